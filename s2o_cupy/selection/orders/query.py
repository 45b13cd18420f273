"""rank="query": units of keys by the largest softmax weight that any single query gives a group of their keys.

unit_clusters parts the keys of each unit into groups, unit_rows has their means in 8 bits, and query_norms finds each
query's softmax mass from what pass 1 has left and the means of blocks of units. `products_of` says in which numbers a
call multiplies.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...arrays.operand import ITEM_BYTES
from ...plan import turns
from ...plan.build import Array, Builder, Launch
from ...plan.device import DeviceLimits
from ...plan.kernels import Family, Inputs, Kernel, Path
from ...plan.method import Setting
from ...plan.paths import HOPPER
from ...plan.rounds import STEP, Chunk
from ...spec import BLOCK_UNITS, CLUSTERS, SAMPLED_OF_BLOCK
from .base import Order

__all__ = [
    "NORM_QUERIES", "TILE_ROWS", "QueryOrder", "cluster_keys_of_block", "heads_in_turns", "query_weight_blocks",
    "products_of", "unit_row_tiles", "unit_rows_parts",
]  # fmt: skip

THREADS = 256
QUERY_WEIGHTS_BLOCKS = {64: 4, 128: 3}  # of query_weights_sm90 on a multiprocessor, by head_dim
UNIT_CLUSTERS = Family(
    "unit_clusters", "selection/unit_clusters.cu", "UnitClustersParams", THREADS, "({head_dim} > 128 ? 1 : 2)",
    "ClusterTraits<{element}, {head_dim}, {paged}, {clusters}>", knows_segments=False,
)  # fmt: skip
UNIT_ROWS = Family(
    "unit_rows", "selection/unit_rows.cu", "UnitRowsParams", THREADS, 3,
    "UnitRowsTraits<{element}, {head_dim}, {paged}, {clusters}>", knows_segments=False,
)  # fmt: skip
UNIT_ROWS_INT8 = replace(UNIT_ROWS, function="unit_rows_int8", blocks_per_multiprocessor=2)
QUERY_NORMS = Family(
    "query_norms", "selection/query_norms.cu", "QueryNormsParams", THREADS,
    "({head_dim} > 128 ? 1 : {head_dim} > 64 && __CUDA_ARCH__ / 100 == 10 ? 2 : 3)",
    "NormTraits<{element}, {head_dim}>",
)  # fmt: skip
QUERY_WEIGHTS = Family(
    "query_weights", "selection/query_weights.cu", "RankKeysParams", 128, 2,
    "ByQueryTraits<{element}, {head_dim}, {clusters}>",
)  # fmt: skip
QUERY_WEIGHTS_SM90 = Family(
    "query_weights_sm90", "selection/query_weights_sm90.cu", "RankKeysParams", 128,
    f"({{head_dim}} > 64 ? {QUERY_WEIGHTS_BLOCKS[128]} : {QUERY_WEIGHTS_BLOCKS[64]})",
    "QueryWeightTraits<{element}, {head_dim}, {clusters}>", path=HOPPER,
)  # fmt: skip
QUERY_WEIGHTS_INT8 = Family(
    "query_weights_int8", "selection/query_weights_int8.cu", "RankKeysParams", 128,
    "({head_dim} > 128 || ({head_dim} > 64 && {clusters} < 8) ? 3 : 4)",
    "IntegerWeightTraits<{element}, {head_dim}, {clusters}>",
)  # fmt: skip
# These arrays are [KV heads, ...].
OF_KV_HEADS = (
    "unit_means", "block_keys", "sampled_keys", "deviations", "unit_rows", "row_shares", "key_exponents", "unit_scales",
)  # fmt: skip
SUPER_UNITS = 128  # units whose scores are written together (kSuperUnits)
TILE_ROWS = 64  # rows of 8 bits of a tile (kTileRows)
MOST_QUERIES = 128  # of a segment that is multiplied in 8 bits (kQueries)
UNIT_ROW_LOADS = 4  # rows that a thread of unit_rows has on their way (kRowsAhead)
NORM_QUERIES = 128  # queries of a block of query_norms (kQueries)
# Several blocks share the units of a pair of segments, each of which reads its queries anew, some 8 microseconds. All
# pairs have as many as fill a GPU 1.6 times. Of 1 to 4 that was the best number with 4, 6, 12, 24 and 32 heads of
# 8,192, 16,384 and 32,768 keys, but for 4 heads of 32,768, where four took 7 % less than the one that they have.
MOST_UNIT_PARTS = 4
UNIT_PART_WAVES = 1.6
GROUPED_BYTES = 128 << 20  # cluster_keys take up to so many at a time where rows of 8 bits are made of them


# What queries and keys are multiplied as.
E4M3, INT8, WIDE = "e4m3", "int8", "16 bits"


def products_of(inputs: Inputs, path: Path, segment: int, limits: DeviceLimits | None = None) -> str:
    """What queries and keys are multiplied as: E4M3, INT8 or WIDE. Without ``limits`` the GPU has INT8."""
    if not inputs.aligned or segment > MOST_QUERIES:
        return WIDE
    if inputs.head_dim <= path.wgmma_head_dim:
        return E4M3
    return INT8 if limits is None or path.has_int8(limits) else WIDE


def cluster_keys_of_block(head_dim: int) -> int:
    """Keys of a block of unit_clusters (kKeys)."""
    return 128 if head_dim > 128 else 256


def unit_clusters(inputs: Inputs, clusters: int) -> Kernel:
    shared = cluster_keys_of_block(inputs.head_dim) * (8 + inputs.head_dim * 2 + 4 + 4)  # sizeof(ClusterTraits::Shared)
    return Kernel(
        UNIT_CLUSTERS, inputs.dtype, inputs.head_dim, paged=inputs.paged, shared_bytes=shared, clusters=clusters
    )


def unit_rows(inputs: Inputs, clusters: int, products: str) -> Kernel:
    """``products``: as of `products_of`."""
    family = UNIT_ROWS_INT8 if products == INT8 else UNIT_ROWS
    return Kernel(family, inputs.dtype, inputs.head_dim, paged=inputs.paged, clusters=clusters)


def unit_rows_runs(units: int) -> int:
    """Runs of units that unit_rows takes, of a KV head."""
    return -(-units // SUPER_UNITS)


def unit_rows_parts(kernel: Kernel, runs: int, in_bytes: bool, limits: DeviceLimits) -> int:
    """Blocks for each of ``runs``: 1, or a power of two where the GPU has room for so many at once. Each finds the
    centre anew, and has as many rows as its threads load at a time or, where there are none, the mean of a block."""
    at_once = UNIT_ROW_LOADS * THREADS // (kernel.head_dim // 8)
    most = min(8, SUPER_UNITS * kernel.clusters // at_once) if in_bytes else SUPER_UNITS // BLOCK_UNITS
    return 1 << min(most, max(1, 3 * limits.multiprocessors // runs)).bit_length() - 1


def unit_row_tiles(units: int, clusters: int) -> int:
    """Tiles of a KV head's rows of 8 bits."""
    return unit_rows_runs(units) * SUPER_UNITS * clusters // TILE_ROWS


def key_tile_bytes(head_dim: int, products: str) -> int:
    """Of a tile of keys: integers (IntegerTile::kBytes), or of floats two of every four elements, and four bits for
    each four of them (KeyTile::kBytes)."""
    return TILE_ROWS * head_dim if products == INT8 else TILE_ROWS * head_dim // 2 + TILE_ROWS * head_dim // 8


def query_norms(inputs: Inputs) -> Kernel:
    threads = THREADS if inputs.head_dim > 128 else 128
    # sizeof(NormTraits::Shared)
    shared = (3 * STEP + 1) * inputs.head_dim * 2 + (threads // 32 + 4 * NORM_QUERIES + 2) * 4
    return Kernel(QUERY_NORMS, inputs.dtype, inputs.head_dim, shared_bytes=shared, own_threads=threads)


def query_weights(inputs: Inputs, clusters: int, products: str) -> Kernel:
    head_dim = inputs.head_dim
    if products == INT8:
        shared = MOST_QUERIES * (head_dim + 8) + 4 * 3 * 4  # sizeof(IntegerWeightTraits::Shared)
        return Kernel(QUERY_WEIGHTS_INT8, inputs.dtype, head_dim, shared_bytes=shared, clusters=clusters)
    if products == E4M3:
        stages = 8 * (key_tile_bytes(head_dim, products) + TILE_ROWS * 2)
        # sizeof(QueryWeightTraits::Shared)
        shared = -(-(2 * MOST_QUERIES * (head_dim + 1) + stages + 4 * 8 + 2 * 24 + 16) // 1024) * 1024
        return Kernel(QUERY_WEIGHTS_SM90, inputs.dtype, head_dim, shared_bytes=shared, clusters=clusters)
    shared = -(-(2 * STEP * (head_dim + 1) * 2 + 2 * 128 * 4) // 512) * 512  # sizeof(ByQueryTraits::Shared)
    return Kernel(QUERY_WEIGHTS, inputs.dtype, head_dim, shared_bytes=shared, clusters=clusters)


def query_weight_blocks(kernel: Kernel, chunk: Chunk) -> int:
    """Of query_weights (kSegments), where none share units."""
    segments = 2 if kernel.family is QUERY_WEIGHTS_SM90 else 1
    return chunk.heads * -(-chunk.segments // segments)


def query_weight_parts(kernel: Kernel, chunk: Chunk, limits: DeviceLimits) -> int:
    """Blocks of query_weights that share the units of a pair of segments: more than one where otherwise those of the
    longest pairs, which have twice the units of a mean one, would be at work when all others are done."""
    if kernel.family is not QUERY_WEIGHTS_SM90:
        return 1
    at_once = QUERY_WEIGHTS_BLOCKS[kernel.head_dim] * limits.multiprocessors
    return max(1, min(MOST_UNIT_PARTS, round(UNIT_PART_WAVES * at_once / query_weight_blocks(kernel, chunk))))


def heads_in_turns(batch: int, kv_heads: int, of_head: int) -> list[range]:
    """KV heads in turns of up to GROUPED_BYTES (`turns.heads_in_turns`)."""
    return turns.heads_in_turns(batch, kv_heads, of_head, GROUPED_BYTES)


class QueryOrder(Order):
    """Groups of a unit's keys, weighed by each query."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.products = products_of(setting.inputs, setting.path, setting.config.segment, setting.limits)
        self.in_bytes = self.products != WIDE
        # Whether rows of 8 bits are made of keys themselves: nobody looks for groups then.
        self.of_keys = self.in_bytes and setting.geometry.unit == setting.config.groups

    @functools.cached_property
    def unit_rows(self) -> Kernel:
        inputs = self.setting.inputs
        inputs = inputs if self.of_keys else replace(inputs, paged=False)
        return unit_rows(inputs, self.setting.config.groups, self.products)

    @functools.cached_property
    def unit_clusters(self) -> Kernel:
        return unit_clusters(self.setting.inputs, self.setting.config.groups)

    @functools.cached_property
    def query_norms(self) -> Kernel:
        return query_norms(self.setting.inputs)

    @functools.cached_property
    def kernel(self) -> Kernel:
        return query_weights(self.setting.inputs, self.setting.config.groups, self.products)

    @staticmethod
    def catalogue(inputs: Inputs, path: Path) -> Iterator[Kernel]:
        if not inputs.aligned:
            return
        arrays = replace(inputs, paged=False, softcap=False)
        yield query_norms(arrays)
        for clusters in CLUSTERS:
            yield unit_clusters(inputs, clusters)
            for products in dict.fromkeys((products_of(inputs, path, MOST_QUERIES), WIDE)):
                yield unit_rows(arrays, clusters, products)
                if inputs.paged and products != WIDE:  # else of groups, whose keys lie side by side
                    yield unit_rows(inputs, clusters, products)
                yield query_weights(arrays, clusters, products)

    @property
    def head_blocks(self) -> int:
        """Blocks of unit_clusters for a KV head."""
        geometry = self.setting.geometry
        return -(-geometry.units * geometry.unit // cluster_keys_of_block(self.setting.inputs.head_dim))

    @property
    def largest_grid(self) -> int:  # type: ignore[override]
        return self.setting.kv_heads * self.head_blocks

    def turns(self) -> list[range]:
        """KV heads, of all sequences, whose groups are found at a time."""
        s = self.setting
        if not self.in_bytes or self.of_keys:
            return [range(s.kv_heads)]
        return heads_in_turns(
            s.problem.batch, s.problem.kv_heads, s.geometry.units * s.config.groups * s.inputs.head_dim * ITEM_BYTES
        )

    def arrays(self) -> list[Array]:
        s, units, groups = self.setting, self.setting.geometry.units, self.setting.config.groups
        norms: Array = ("norms", (s.heads, s.problem.seqlen_q), "float32")
        if not self.in_bytes:
            return [norms, *self._clusters()]
        tiles = unit_row_tiles(units, groups)
        rows: list[Array] = [
            norms,
            ("unit_rows", (s.kv_heads, tiles, key_tile_bytes(s.inputs.head_dim, self.products)), "uint8"),
            ("row_shares", (s.kv_heads, tiles, TILE_ROWS), "float16"),
        ]
        if self.products == INT8:
            return [*rows, ("unit_scales", (s.kv_heads, unit_rows_runs(units) * SUPER_UNITS), "float32")]
        return [
            *rows,
            ("key_exponents", (s.kv_heads,), "int32"),
            ("query_scales", (s.heads, s.geometry.segments, 2), "float32"),
        ]

    def arrays_before_rounds(self) -> list[Array]:
        """Norms are made of them, and in 8 bits the rows that rounds multiply with."""
        s, units = self.setting, self.setting.geometry.units
        of_blocks = (s.kv_heads, units // BLOCK_UNITS * SAMPLED_OF_BLOCK, s.inputs.head_dim)
        return [
            *(self._clusters() if self.in_bytes and not self.of_keys else []),
            ("unit_means", (s.kv_heads, units, s.inputs.head_dim), "uint16"),
            ("block_keys", (s.kv_heads, 1 + units // BLOCK_UNITS, s.inputs.head_dim), "uint16"),
            ("sampled_keys", of_blocks, "uint16"),
            ("deviations", of_blocks, "uint16"),
        ]

    def _clusters(self) -> list[Array]:
        s, units, groups = self.setting, self.setting.geometry.units, self.setting.config.groups
        heads = max(map(len, self.turns()))
        return [
            ("cluster_keys", (heads, units, groups, s.inputs.head_dim), "uint16"),
            ("cluster_shares", (heads, units, groups), "float16"),
        ]

    def before_rounds(self, build: Builder) -> list[Launch]:
        if self.head_blocks == 0:
            return []
        s, geometry = self.setting, self.setting.geometry
        tiles = -(-min(geometry.segment, s.problem.seqlen_q) // NORM_QUERIES)
        norms = {
            "q": build.tensors["q"], "geometry": build.geometry, "heads": s.problem.heads,
            "shared_heads": s.problem.heads // s.problem.kv_heads, "tiles": tiles,
            "head_tiles": geometry.segments * tiles, "aligned": s.inputs.aligned, "scale_log2": self.signed_scale_log2,
            "less_centre": self.in_bytes,
        }  # fmt: skip
        return [
            *(launch for heads in self.turns() for launch in self._grouped(build, heads)),
            build.launch("query_norms", self.query_norms, s.heads * geometry.segments * tiles, norms),
        ]

    def _grouped(self, build: Builder, heads: range) -> list[Launch]:
        """Finds groups of the keys of some KV heads, and makes what is multiplied in place of them."""
        s, geometry = self.setting, self.setting.geometry
        of_units = {
            "k": build.tensors["k"], "geometry": build.geometry, "kv_heads": s.problem.kv_heads, "pages": build.pages,
            "head_blocks": self.head_blocks, "aligned": s.inputs.aligned,
        }  # fmt: skip
        runs = unit_rows_runs(geometry.units)
        parts = unit_rows_parts(self.unit_rows, len(heads) * runs, self.in_bytes, s.limits)
        # The centre is the mean of the leading units: of the first keys, and before each segment that has candidates.
        rows = {
            "k": build.tensors["k"], "geometry": build.geometry, "kv_heads": s.problem.kv_heads,
            "leading": geometry.leading_units, "runs": runs, "parts": parts, "pages": build.pages,
        }  # fmt: skip
        of_heads = [name for name in OF_KV_HEADS if name in build.memory.places]
        further = turns.bytes_before(build, s, heads.start, ("k",), of_heads)
        return [
            build.launch("unit_keys", self.unit_clusters, len(heads) * self.head_blocks, of_units, further=further),
            build.launch("unit_rows", self.unit_rows, len(heads) * runs * parts, rows, further=further),
        ]

    def scores(self, build: Builder, chunk: Chunk, values: Mapping[str, Any]) -> Launch:
        parts = query_weight_parts(self.kernel, chunk, self.setting.limits)
        blocks = query_weight_blocks(self.kernel, chunk) * parts
        values = {**values, "unit_parts": parts, "scale_log2": self.signed_scale_log2}
        # In 8 bits groups are done with, and scores lie where they lay.
        read = {"unit_keys": "", "cluster_shares": ""} if self.in_bytes else {"unit_keys": "cluster_keys"}
        return build.launch("unit_weights", self.kernel, blocks, values, chunk, read=read)


ORDER = QueryOrder
