"""S2O's ordering: queries by a guide, keys by what pooled queries make of them.

reference/ordering.py and reference/key_order.py are the definition. Once: guides and rank_queries order each segment's
queries and pool them, or pool_queries only pools them; rank="weight" takes two keys that stand for each unit.
rank="query" pools none: unit_clusters parts the keys of each unit into groups, and query_norms finds each query's
softmax mass from what pass 1 has left and the means of unit_rows. In each round unit_weights, query_weights or
key_scores score the candidates of its rows, and key_strata, key_middle and key_order_head order them. The last queries
need no order where they attend to all keys (plan/last_queries.py).
Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..plan.build import Array, Builder, Launch
from ..plan.kernels import Inputs, Kernel, Path
from ..plan.last_queries import LastQueries
from ..plan.last_queries import kernels as last_queries
from ..plan.method import Setting
from ..plan.rounds import MAX_GRID, Chunk, rounds
from ..plan.tail import Tail
from ..spec import BLOCK_UNITS, CLUSTERS, LOG2E, MIDDLE, MIDDLE_FROM, ORDER_HEAD, STRATUM
from . import s2o_kernels as kernels
from .s2o_kernels import BLOCK_PAIRS, UNIT_KEYS_OF_BLOCK, score_blocks, unit_weight_blocks

__all__ = ["S2O", "chunk_bytes", "middle_blocks", "row_pairs", "strata_blocks"]

BYTES_PER_CANDIDATE = 6  # a float16 score and an int32, a unit's number
LAST_PART = 4  # part of the workspace's size that the last queries may take besides
SMALLEST_SCALE = 1e-30  # of unit_weights: times 0 what is left out, minus infinity, would be NaN


def strata_blocks(chunk: Chunk) -> int:
    """Blocks of key_strata for two rows, of the i-th segment from either end; 0 where all fit the head of an order.

    Both rows are together as long as the first and the last; each may have a block that is not full.
    """
    each = 2 * STRATUM * BLOCK_PAIRS
    if chunk.longest <= ORDER_HEAD:
        return 0
    return -(-(chunk.stride + chunk.longest) // each) + 1 if chunk.segments > 1 else -(-chunk.longest // each)


def row_pairs(chunk: Chunk) -> int:
    """Rows two by two, as strata_blocks takes them."""
    return chunk.heads * -(-chunk.segments // 2)


def middle_blocks(chunk: Chunk) -> int:
    """Blocks of key_middle for a row; 0 where no row is so long."""
    return MIDDLE // (2 * STRATUM * BLOCK_PAIRS) if chunk.longest > MIDDLE_FROM else 0


def chunk_bytes(chunk: Chunk) -> int:
    """What scores, orders, heads of orders and middles take of the workspace."""
    order_head = chunk.rows * ORDER_HEAD * 2 if strata_blocks(chunk) else 0
    middle = chunk.rows * MIDDLE * (4 + 2) if middle_blocks(chunk) else 0
    return chunk.elements * BYTES_PER_CANDIDATE + order_head + middle


class S2O:
    """The ordering of one setting, as plan.method.Method."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        problem, config = setting.problem, setting.config
        # At most MAX_SEGMENT.
        self.sort_slots = max(kernels.WARP, 1 << (min(config.segment, problem.seqlen_q) - 1).bit_length())
        self.by_weight = config.orders_units
        self.by_query = config.rank == "query"
        self.in_bytes = self.by_query and kernels.takes_bytes(setting.inputs, setting.path, config.segment)
        # A tile of all of a segment's queries stops with them all, in whichever order.
        self.orders_queries = setting.geometry.block_count(config.block_m) > 1
        # No grid has more blocks than a round has elements.
        budget = min(config.workspace_bytes, MAX_GRID * BYTES_PER_CANDIDATE)
        geometry = setting.geometry
        last = config.dense_from(geometry)
        self.chunks = rounds(problem, geometry, chunk_bytes, budget, last)
        first = next((n for n in range(last, geometry.segments) if geometry.candidates(n) > 0), None)
        self.last = None if first is None else LastQueries(setting, first, config.workspace_bytes // LAST_PART)

    # What a dense call does not ask for is not made.

    @functools.cached_property
    def tail(self) -> Tail | None:
        return Tail(self.setting) if self.setting.config.adds_tail else None

    @functools.cached_property
    def guides(self) -> Kernel:
        return kernels.guides(self.setting.inputs, self.sort_slots)

    @functools.cached_property
    def rank_queries(self) -> Kernel:
        return kernels.rank_queries(self.setting.inputs, self.sort_slots)

    @functools.cached_property
    def pool_queries(self) -> Kernel:
        return kernels.pool_queries(self.setting.inputs)

    @functools.cached_property
    def unit_keys(self) -> Kernel:
        return kernels.unit_keys(self.setting.inputs)

    @functools.cached_property
    def unit_weights(self) -> Kernel:
        return kernels.unit_weights(self.setting.inputs, self.setting.path, self.setting.config.pooled_queries)

    @functools.cached_property
    def unit_rows(self) -> Kernel:
        return kernels.unit_rows(self.setting.inputs, self.setting.config.groups)

    @functools.cached_property
    def unit_clusters(self) -> Kernel:
        return kernels.unit_clusters(self.setting.inputs, self.setting.config.groups)

    @functools.cached_property
    def query_norms(self) -> Kernel:
        return kernels.query_norms(self.setting.inputs)

    @functools.cached_property
    def query_weights(self) -> Kernel:
        config = self.setting.config
        return kernels.query_weights(self.setting.inputs, self.setting.path, config.segment, config.groups)

    @functools.cached_property
    def key_scores(self) -> Kernel:
        return kernels.key_scores(self.setting.inputs, self.setting.path, self.setting.config.pooled_queries)

    @functools.cached_property
    def key_strata(self) -> Kernel:
        return kernels.key_strata()

    @functools.cached_property
    def key_middle(self) -> Kernel:
        return kernels.key_middle()

    @functools.cached_property
    def key_order_head(self) -> Kernel:
        return kernels.key_order_head()

    @staticmethod
    def catalogue(inputs: Inputs, path: Path) -> Iterator[Kernel]:
        """Kernels that a call with such inputs may choose; the sort's slots are no part of their texts."""
        sort_slots = 1024
        yield kernels.guides(inputs, sort_slots)
        if not inputs.paged:
            yield kernels.rank_queries(inputs, sort_slots)
            yield kernels.pool_queries(inputs)
        if inputs.aligned:
            yield kernels.unit_keys(inputs)
            for pooled_queries in (1, kernels.HOPPER_MOST_POOLED + 1):
                yield kernels.unit_weights(replace(inputs, paged=False), path, pooled_queries)
        arrays = replace(inputs, paged=False, softcap=False)
        if inputs.aligned:
            yield kernels.query_norms(arrays)
        for clusters in CLUSTERS if inputs.aligned else ():
            yield kernels.unit_clusters(inputs, clusters)
            yield kernels.unit_rows(arrays, clusters)
            for segment in (kernels.HOPPER_QUERIES, kernels.HOPPER_QUERIES + 1):
                yield kernels.query_weights(arrays, path, segment, clusters)
        yield from (kernels.key_scores(inputs, path, pooled_queries) for pooled_queries in (1, 2))
        yield from (kernels.key_strata(), kernels.key_middle(), kernels.key_order_head())
        yield from last_queries(inputs)

    @property
    def visits(self) -> bool:
        return bool(self.chunks or self.last)

    @property
    def largest_grid(self) -> int:
        kv_heads = self.setting.kv_heads
        of_last = self.last.largest_grid if self.last else 0
        return max(2 * kv_heads, kv_heads * self._unit_blocks if self.by_weight else 0, of_last)

    @property
    def elements(self) -> int:
        """Scores, and as many numbers of units, of the largest chunk."""
        return max((chunk.elements for chunk in self.chunks), default=0)

    @property
    def order_head_rows(self) -> int:
        """Rows of the largest chunk with strata."""
        return max((chunk.rows for chunk in self.chunks if strata_blocks(chunk)), default=0)

    @property
    def middle_rows(self) -> int:
        """Rows of the largest chunk with a middle."""
        return max((chunk.rows for chunk in self.chunks if middle_blocks(chunk)), default=0)

    def arrays(self) -> list[Array]:
        if not self.chunks:
            return self.last.arrays() if self.last else []
        s, geometry = self.setting, self.setting.geometry
        width, segments = s.inputs.head_dim, geometry.segments
        found: list[Array] = [
            ("guide", (s.kv_heads if self.orders_queries else 0, 2, width), "float32"),
            ("means", (s.heads, segments, 0 if self.by_query else s.config.pooled_queries, width), "uint16"),
            ("q_order", (s.heads, segments, geometry.segment), "int32"),
            ("scores", (self.elements,), "float16"),  # rows of a chunk
            ("k_order", (self.elements,), "int32"),  # likewise
            ("order_head_scores", (self.order_head_rows, ORDER_HEAD), "float16"),
            ("middle", (self.middle_rows, MIDDLE), "int32"),
            ("middle_scores", (self.middle_rows, MIDDLE), "float16"),
        ]
        if self.last:
            found += self.last.arrays()
        if self.tail:
            found += self.tail.arrays()
        if self.by_query:
            groups, tiles = s.config.groups, kernels.unit_row_tiles(geometry.units, s.config.groups)
            found += [
                ("cluster_keys", (s.kv_heads, geometry.units, groups, width), "uint16"),
                ("cluster_shares", (s.kv_heads, geometry.units, groups), "float16"),
                ("unit_means", (s.kv_heads, geometry.units, width), "uint16"),
                ("block_keys", (s.kv_heads, 1 + geometry.units // BLOCK_UNITS, width), "uint16"),
                ("norms", (s.heads, s.problem.seqlen_q), "float32"),
            ]
            if self.in_bytes:
                found += [
                    ("unit_rows", (s.kv_heads, tiles, kernels.TILE_ROWS, width), "uint8"),
                    ("row_shares", (s.kv_heads, tiles, kernels.TILE_ROWS), "float16"),
                    ("key_exponents", (s.kv_heads,), "int32"),
                    ("query_scales", (s.heads, segments, 2), "float32"),
                ]
        elif self.by_weight:
            found.append(("unit_keys", (s.kv_heads, geometry.units, 2, width), "uint16"))
        return found

    def before_rounds(self, build: Builder) -> list[Launch]:
        s, problem, geometry = self.setting, self.setting.problem, self.setting.geometry
        values = {
            "q": build.tensors["q"],
            "k": build.tensors["k"],
            "geometry": build.geometry,
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "pooled_queries": self.setting.config.pooled_queries,
            "run": s.config.run,
            "sort_slots": self.sort_slots,
            "sign": self._sign,
            "pages": build.pages,
        }
        rows = s.heads * geometry.segments
        found = self.last.launches(build) if self.last else []
        if not self.chunks:
            return found
        if self.tail:
            found.append(self.tail.before_rounds(build))
        if self.orders_queries:
            found += [
                build.launch("guides", self.guides, s.kv_heads * 2, values),
                build.launch("rank_queries", self.rank_queries, rows, values),
            ]
        else:
            names = ("q", "geometry", "heads", "pooled_queries", "run", "sign")
            of_runs = {name: values[name] for name in names}
            of_runs |= {"pooled_queries": 0} if self.by_query else {}
            found.append(build.launch("rank_queries", self.pool_queries, rows, of_runs))
        if self.by_weight and self._unit_blocks > 0:
            of_units = {name: values[name] for name in ("k", "geometry", "kv_heads", "pages")}
            of_units |= {"head_blocks": self._unit_blocks, "aligned": s.inputs.aligned}
            kernel = self.unit_clusters if self.by_query else self.unit_keys
            found.append(build.launch("unit_keys", kernel, s.kv_heads * self._unit_blocks, of_units))
            found += self._query_norms(build) if self.by_query else []
        return found

    def _query_norms(self, build: Builder) -> list[Launch]:
        """Of rank="query"."""
        s, geometry = self.setting, self.setting.geometry
        blocks = kernels.unit_rows_blocks(geometry.units)
        rows = {"geometry": build.geometry, "leading": self._leading_units, "head_blocks": blocks}
        tiles = -(-min(geometry.segment, s.problem.seqlen_q) // kernels.NORM_QUERIES)
        norms = {
            "q": build.tensors["q"], "geometry": build.geometry, "heads": s.problem.heads,
            "kv_heads": s.problem.kv_heads, "tiles": tiles, "aligned": s.inputs.aligned,
            "scale_log2": self._signed_scale_log2, "pages": build.pages,
        }  # fmt: skip
        return [
            build.launch("unit_rows", self.unit_rows, s.kv_heads * blocks, rows),
            build.launch("query_norms", self.query_norms, s.heads * geometry.segments * tiles, norms),
        ]

    def before_pass2(self, build: Builder, chunk: Chunk) -> list[Launch]:
        problem = self.setting.problem
        values: dict[str, Any] = {
            "q": build.tensors["q"],
            "aligned": self.setting.inputs.aligned,
            "k": build.tensors["k"],
            "geometry": build.geometry,
            "chunk": build.chunk(chunk),
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "pooled_queries": self.setting.config.pooled_queries,
            "run": self.setting.config.run,
            "row_blocks": 0,
            "key_blocks": 0,
            "strata_blocks": strata_blocks(chunk),
            "scale_log2": self._scale_log2,
            "pages": build.pages,
        }
        if self.by_query:
            blocks = unit_weight_blocks(self.query_weights, chunk)
            values |= {"scale_log2": self._signed_scale_log2}
            read = {"unit_keys": "cluster_keys"}
            found = [build.launch("unit_weights", self.query_weights, blocks, values, chunk, read=read)]
        elif self.by_weight:
            blocks = unit_weight_blocks(self.unit_weights, chunk)
            values |= {"scale_log2": max(self._scale_log2, SMALLEST_SCALE)}
            found = [build.launch("unit_weights", self.unit_weights, blocks, values, chunk)]
        else:
            row_blocks, key_blocks = score_blocks(self.key_scores, chunk, self.setting.limits)
            values |= {"row_blocks": row_blocks, "key_blocks": key_blocks}
            blocks = chunk.heads // chunk.shared_heads * row_blocks * key_blocks
            found = [build.launch("key_scores", self.key_scores, blocks, values, chunk)]
        if strata_blocks(chunk):
            blocks = row_pairs(chunk) * strata_blocks(chunk)
            found.append(build.launch("key_strata", self.key_strata, blocks, values, chunk))
        if middle_blocks(chunk):
            blocks = chunk.rows * middle_blocks(chunk)
            found.append(build.launch("key_middle", self.key_middle, blocks, values, chunk))
        found.append(build.launch("rank_keys", self.key_order_head, chunk.rows, values, chunk))
        return found

    def after_pass2(self, build: Builder, chunk: Chunk) -> list[Launch]:
        return [self.tail.after_pass2(build, chunk)] if self.tail else []

    @property
    def _unit_blocks(self) -> int:
        """Blocks of unit_keys, or of unit_clusters, for a KV head."""
        geometry = self.setting.geometry
        keys = kernels.cluster_keys_of_block(self.setting.inputs.head_dim) if self.by_query else UNIT_KEYS_OF_BLOCK
        return -(-geometry.units * geometry.unit // keys)

    @property
    def _leading_units(self) -> int:
        """Those that the centre is the mean of: of the first keys, and before each segment that has candidates."""
        return self.setting.geometry.leading_units

    @property
    def _signed_scale_log2(self) -> float:
        return math.copysign(max(self._scale_log2, SMALLEST_SCALE), self.setting.problem.scale)

    @property
    def _sign(self) -> float:
        return -1.0 if self.setting.problem.scale < 0 else 1.0

    @property
    def _scale_log2(self) -> float:
        return abs(self.setting.problem.scale) * LOG2E
