"""The kernels of S2O's ordering: their families, their shared memory, and how many blocks the work is dealt to.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from typing import Any

from ..plan.device import DeviceLimits
from ..plan.kernels import Family, Inputs, Kernel, Path
from ..plan.paths import HOPPER
from ..plan.rounds import STEP, Chunk
from ..spec import MAX_POOLED_QUERIES, ORDER_HEAD, STRATUM

__all__ = [
    "BLOCK_PAIRS", "HOPPER_SCORE_KEYS", "HOPPER_SCORE_ROWS", "NORM_QUERIES", "TILE_ROWS", "UNIT_KEYS_OF_BLOCK",
    "cluster_keys_of_block", "guides", "key_middle", "key_order_head", "key_scores", "key_strata", "pool_queries",
    "query_norms", "query_weights", "rank_queries", "score_blocks", "takes_bytes", "unit_clusters", "unit_keys",
    "unit_row_tiles", "unit_rows", "unit_rows_blocks", "unit_weight_blocks", "unit_weights",
]  # fmt: skip

THREADS = 256
WARP = 32
BLOCK_PAIRS = 32  # pairs of strata of a block of key_strata (kBlockPairs)
SCORE_ROWS = 64  # rows of a block of key_scores (kScoreRows)
SCORE_KEYS = 8 * STEP  # keys of a block of key_scores
HOPPER_SCORE_ROWS = 128  # rows of a block of key_scores_sm90, 64 a warpgroup
HOPPER_SCORE_STAGES = 4  # tiles of STEP keys in its shared memory
HOPPER_SCORE_KEYS = (8 * STEP, 32 * STEP)  # keys of a block: no fewer, and about as many before there is a second wave
HOPPER_BLOCKS = 2  # of key_scores_sm90 on a multiprocessor

# --- Queries ---
_RANK_TRAITS = "RankTraits<{element}, {head_dim}, {aligned}, {paged}>"
GUIDES = Family("guides", "selection/rank_queries.cu", "RankQueriesParams", THREADS, 1, _RANK_TRAITS)
RANK_QUERIES = Family(
    "rank_queries", "selection/rank_queries.cu", "RankQueriesParams", 128,
    "(!{aligned} ? 2 : {head_dim} > 128 ? (__CUDACC_VER_MAJOR__ > 12 ? 2 : 3) : "
    "{head_dim} > 64 ? (__CUDA_ARCH__ == 800 ? 3 : 5) : 7)",
    _RANK_TRAITS,
)  # fmt: skip
POOL_QUERIES = Family(
    "pool_queries", "selection/pool_queries.cu", "PoolQueriesParams", THREADS, "({aligned} ? 4 : 2)",
    "PoolTraits<{element}, {head_dim}, {aligned}>",
)  # fmt: skip


def guides(inputs: Inputs, sort_slots: int) -> Kernel:
    return Kernel(
        GUIDES, inputs.dtype, inputs.head_dim, inputs.aligned, paged=inputs.paged,
        **_rank_shared(inputs.head_dim, sort_slots),
    )  # fmt: skip


def rank_queries(inputs: Inputs, sort_slots: int) -> Kernel:
    """It reads no keys."""
    return Kernel(
        RANK_QUERIES, inputs.dtype, inputs.head_dim, inputs.aligned, **_rank_shared(inputs.head_dim, sort_slots)
    )


def pool_queries(inputs: Inputs) -> Kernel:
    sums = THREADS * 8 * 4  # sizeof(PoolTraits::Shared)
    return Kernel(POOL_QUERIES, inputs.dtype, inputs.head_dim, inputs.aligned, shared_bytes=sums)


def _rank_shared(head_dim: int, sort_slots: int) -> dict[str, Any]:
    """sizeof(RankTraits::Shared), which has a warp's slots, and further slots, as a segment needs them."""
    of_guides, products, segment = THREADS * 8 * 4, head_dim * (32 + 4 * 4), 32
    more = (sort_slots - WARP) * 4
    return {"shared_bytes": max(of_guides, products) + segment + WARP * 4 + more, "open_bytes": more}


# --- Keys by the mean of a segment's queries, or by the largest of few pooled queries ---
KEY_SCORES = Family(
    "key_scores", "selection/key_scores.cu", "RankKeysParams", 128,
    "(__CUDA_ARCH__ >= 1000 || {head_dim} > 128 ? 2 : 3)", "ScoreTraits<{element}, {head_dim}, {aligned}, {paged}>",
)  # fmt: skip
KEY_SCORES_SM90 = Family(
    "key_scores_sm90", "selection/key_scores_sm90.cu", "RankKeysParams", 256, HOPPER_BLOCKS,
    "KeyScoresTraits<{element}, {head_dim}, {paged}>", path=HOPPER,
)  # fmt: skip


def key_scores(inputs: Inputs, path: Path, pooled_queries: int) -> Kernel:
    head_dim = inputs.head_dim
    if pooled_queries == 1 and head_dim <= path.wgmma_head_dim:  # sizeof(KeyScoresTraits::Shared)
        shared = (HOPPER_SCORE_ROWS + HOPPER_SCORE_STAGES * STEP) * head_dim * 2
        return Kernel(KEY_SCORES_SM90, inputs.dtype, head_dim, paged=inputs.paged, shared_bytes=shared)
    shared = 2 * STEP * head_dim * 2 + 16
    return Kernel(KEY_SCORES, inputs.dtype, head_dim, inputs.aligned, paged=inputs.paged, shared_bytes=shared)


def score_blocks(kernel: Kernel, chunk: Chunk, limits: DeviceLimits) -> tuple[int, int]:
    """Blocks of key_scores that cover the rows of one KV head, and the keys.

    Of key_scores_sm90 two run on a multiprocessor; all take as many keys, and those that have any fill whole waves.
    """
    rows = chunk.shared_heads * chunk.segments
    if kernel.family is KEY_SCORES:
        return -(-rows // SCORE_ROWS), -(-chunk.longest // SCORE_KEYS)
    slots, (fewest, most) = HOPPER_BLOCKS * limits.multiprocessors, HOPPER_SCORE_KEYS
    tiles = [tiles for tiles in _score_tiles(chunk) for _ in range(chunk.heads // chunk.shared_heads)]
    waves = -(-sum(tiles) * STEP // (slots * most))
    # The fewest that leave no more blocks than there are places.
    tiles_each = max(fewest // STEP, -(-sum(tiles) // (waves * slots)))
    blocks = lambda each: sum(-(-n // -(-max(tiles) // -(-max(tiles) // each))) for n in tiles)  # noqa: E731
    while blocks(tiles_each) > waves * slots and tiles_each < max(tiles):
        tiles_each += 1
    return -(-rows // HOPPER_SCORE_ROWS), -(-max(tiles) // tiles_each)


def _score_tiles(chunk: Chunk) -> list[int]:
    """Tiles of keys that each row block of key_scores_sm90 reads of one KV head: up to its last row's end."""
    last_rows = range(HOPPER_SCORE_ROWS, chunk.shared_heads * chunk.segments, HOPPER_SCORE_ROWS)
    last = [(row - 1) // chunk.shared_heads for row in last_rows] + [chunk.segments - 1]
    return [(chunk.stride + i * chunk.growth) // STEP for i in last]


# --- Units of keys by the weight that pooled queries give them ---
UNIT_KEYS = Family(
    "unit_keys", "selection/unit_keys.cu", "UnitKeysParams", THREADS, 2,
    "UnitKeysTraits<{element}, {head_dim}, {paged}>", knows_segments=False,
)  # fmt: skip
UNIT_WEIGHTS = Family(
    "unit_weights", "selection/unit_weights.cu", "RankKeysParams", 128, 2, "WeightTraits<{element}, {head_dim}>"
)
UNIT_WEIGHTS_SM90 = Family(
    "unit_weights_sm90", "selection/unit_weights_sm90.cu", "RankKeysParams", 512, 1,
    "WeightSm90Traits<{element}, {head_dim}>", path=HOPPER,
)  # fmt: skip
UNIT_KEYS_OF_BLOCK = 128  # keys of a block of unit_keys (kKeys)
HOPPER_WEIGHT_ROWS = 128  # rows of unit_keys of a tile of unit_weights_sm90 (kTile)
HOPPER_WEIGHT_STAGES = 4  # tiles of these in its shared memory
HOPPER_MOST_POOLED = 16  # pooled queries of a segment: rows of a warp's product
_HOPPER_SEGMENTS = UNIT_WEIGHTS_SM90.threads // WARP


def unit_keys(inputs: Inputs) -> Kernel:
    shared = UNIT_KEYS_OF_BLOCK * (8 + inputs.head_dim * 2)  # sizeof(UnitKeysTraits::Shared)
    return Kernel(UNIT_KEYS, inputs.dtype, inputs.head_dim, paged=inputs.paged, shared_bytes=shared)


def unit_weights(inputs: Inputs, path: Path, pooled_queries: int) -> Kernel:
    """Mean keys are whole rows in one array, wherever keys are."""
    head_dim = inputs.head_dim
    if pooled_queries <= HOPPER_MOST_POOLED and head_dim <= path.wgmma_head_dim:  # sizeof(WeightSm90Traits::Shared)
        pooled = _HOPPER_SEGMENTS * HOPPER_MOST_POOLED * head_dim * 2
        shared = HOPPER_WEIGHT_STAGES * (HOPPER_WEIGHT_ROWS * head_dim * 2 + 2 * 8) + pooled
        return Kernel(UNIT_WEIGHTS_SM90, inputs.dtype, head_dim, shared_bytes=shared)
    norms = (4 if head_dim > 128 else 8) * MAX_POOLED_QUERIES["weight"] * 4
    shared = 2 * STEP * head_dim * 2 + norms + 4  # sizeof(WeightTraits::Shared)
    return Kernel(UNIT_WEIGHTS, inputs.dtype, head_dim, shared_bytes=shared)


def unit_weight_blocks(kernel: Kernel, chunk: Chunk) -> int:
    """Of unit_weights and query_weights."""
    return chunk.heads * -(-chunk.segments // _weight_segments(kernel))


def _weight_segments(kernel: Kernel) -> int:
    """Segments of a block (kSegments of its traits)."""
    if kernel.family is UNIT_WEIGHTS_SM90:
        return _HOPPER_SEGMENTS
    if kernel.family is QUERY_WEIGHTS_SM90:
        return 2
    return 4 if kernel.head_dim > 128 else 8


# --- Units of keys by the weight that single queries give them ---
UNIT_CLUSTERS = Family(
    "unit_clusters", "selection/unit_clusters.cu", "UnitClustersParams", THREADS, "({head_dim} > 128 ? 1 : 2)",
    "ClusterTraits<{element}, {head_dim}, {paged}, {clusters}>", knows_segments=False,
)  # fmt: skip
UNIT_ROWS = Family(
    "unit_rows", "selection/unit_rows.cu", "UnitRowsParams", THREADS, 2,
    "UnitRowsTraits<{element}, {head_dim}, {clusters}>", knows_segments=False,
)  # fmt: skip
QUERY_NORMS = Family(
    "query_norms", "selection/query_norms.cu", "QueryNormsParams", THREADS,
    "({head_dim} > 128 ? 1 : {head_dim} > 64 ? 2 : 3)", "NormTraits<{element}, {head_dim}>",
)  # fmt: skip
QUERY_WEIGHTS = Family(
    "query_weights", "selection/unit_weights.cu", "RankKeysParams", 128, 2,
    "WeightTraits<{element}, {head_dim}, {clusters}>",
)  # fmt: skip
QUERY_WEIGHTS_SM90 = Family(
    "query_weights_sm90", "selection/query_weights_sm90.cu", "RankKeysParams", 160, 3,
    "QueryWeightTraits<{element}, {head_dim}, {clusters}>", path=HOPPER,
)  # fmt: skip
SUPER_UNITS = 128  # units whose scores are written together (kSuperUnits)
TILE_ROWS = 64  # rows of 8 bits of a tile (kTileRows)
HOPPER_QUERIES = 128  # of a segment, at most (kQueries)
NORM_QUERIES = 128  # queries of a block of query_norms (kQueries)
_QUERY_STAGES = 4


def takes_bytes(inputs: Inputs, path: Path, segment: int) -> bool:
    """Whether queries and keys are multiplied in 8 bits."""
    return inputs.aligned and inputs.head_dim <= path.wgmma_head_dim and segment <= HOPPER_QUERIES


def cluster_keys_of_block(head_dim: int) -> int:
    """Keys of a block of unit_clusters (kKeys)."""
    return 128 if head_dim > 128 else 256


def unit_clusters(inputs: Inputs, clusters: int) -> Kernel:
    shared = cluster_keys_of_block(inputs.head_dim) * (8 + inputs.head_dim * 2 + 4 + 4)  # sizeof(ClusterTraits::Shared)
    return Kernel(
        UNIT_CLUSTERS, inputs.dtype, inputs.head_dim, paged=inputs.paged, shared_bytes=shared, clusters=clusters
    )


def unit_rows(inputs: Inputs, clusters: int) -> Kernel:
    return Kernel(UNIT_ROWS, inputs.dtype, inputs.head_dim, clusters=clusters)


def unit_rows_blocks(units: int) -> int:
    """Blocks of unit_rows for a KV head."""
    return -(-units // SUPER_UNITS)


def unit_row_tiles(units: int, clusters: int) -> int:
    """Tiles of a KV head's rows of 8 bits."""
    return unit_rows_blocks(units) * SUPER_UNITS * clusters // TILE_ROWS


def query_norms(inputs: Inputs) -> Kernel:
    threads = THREADS if inputs.head_dim > 64 else 128
    shared = 2 * STEP * inputs.head_dim * 2 + threads // 32 * 4 + 4  # sizeof(NormTraits::Shared)
    return Kernel(QUERY_NORMS, inputs.dtype, inputs.head_dim, shared_bytes=shared, own_threads=threads)


def query_weights(inputs: Inputs, path: Path, segment: int, clusters: int) -> Kernel:
    head_dim = inputs.head_dim
    if takes_bytes(inputs, path, segment):
        tiles = (_QUERY_STAGES * TILE_ROWS + 2 * HOPPER_QUERIES) * head_dim + _QUERY_STAGES * (TILE_ROWS * 2 + 2 * 8)
        shared = -(-tiles // 1024) * 1024  # sizeof(QueryWeightTraits::Shared)
        return Kernel(QUERY_WEIGHTS_SM90, inputs.dtype, head_dim, shared_bytes=shared, clusters=clusters)
    shared = 2 * STEP * head_dim * 2 + 4 + 4  # sizeof(WeightTraits::Shared), without norms
    return Kernel(QUERY_WEIGHTS, inputs.dtype, head_dim, shared_bytes=shared, clusters=clusters)


# --- Orders ---
KEY_STRATA, KEY_MIDDLE = (
    Family(function, "selection/key_order.cu", "RankKeysParams", THREADS, 4, shared="s2o::StrataShared")
    for function in ("key_strata", "key_middle")
)
KEY_ORDER_HEAD = Family(
    "key_order_head", "selection/key_order.cu", "RankKeysParams", THREADS, "(__CUDA_ARCH__ == 900 ? 4 : 3)",
    shared="s2o::OrderHeadShared",
)  # fmt: skip
_STRATA_SHARED = BLOCK_PAIRS * (STRATUM * 4 + STRATUM // 4 * 4)


def key_strata() -> Kernel:
    return Kernel(KEY_STRATA, shared_bytes=_STRATA_SHARED)


def key_middle() -> Kernel:
    return Kernel(KEY_MIDDLE, shared_bytes=_STRATA_SHARED)


def key_order_head() -> Kernel:
    digits, warps = 32, THREADS // 32
    return Kernel(KEY_ORDER_HEAD, shared_bytes=ORDER_HEAD * 4 + digits * THREADS * 2 + digits * 4 + warps * 8)
