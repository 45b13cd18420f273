"""Kernels of S2O's ordering that every way to score keys shares: queries in order, and keys by their scores.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from typing import Any

from ..plan.kernels import Family, Inputs, Kernel
from ..spec import STRATUM

__all__ = [
    "BLOCK_PAIRS", "SHORT_ROW", "WARP", "guides", "key_middle", "key_order_head", "key_order_short", "key_order_whole",
    "key_strata", "pool_queries", "rank_queries",
]  # fmt: skip

THREADS = 256
WARP = 32
OF_THREAD = 32  # candidates that a thread of a sort has at most (kMostOfThread)
SHORT_ROW = THREADS // 2 * OF_THREAD  # candidates of a row that key_order_short sorts, at most
BLOCK_PAIRS = 32  # pairs of strata of a block of key_strata (kBlockPairs)

# --- Queries ---
_RANK_TRAITS = "RankTraits<{element}, {head_dim}, {aligned}, {paged}>"
GUIDES = Family("guides", "selection/rank_queries.cu", "RankQueriesParams", THREADS, 1, _RANK_TRAITS)
RANK_QUERIES = Family(
    "rank_queries", "selection/rank_queries.cu", "RankQueriesParams", 128,
    "(!{aligned} ? 2 : {head_dim} > 128 ? (__CUDACC_VER_MAJOR__ > 12 || __CUDA_ARCH__ >= 1000 ? 2 : 3) : "
    "{head_dim} > 64 ? (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ >= 1200 ? 3 : 5) : __CUDA_ARCH__ >= 1200 ? 5 : 7)",
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


# --- Orders ---
KEY_STRATA, KEY_MIDDLE = (
    Family(function, "selection/key_order.cu", "RankKeysParams", THREADS, 4, shared="s2o::StrataShared")
    for function in ("key_strata", "key_middle")
)
KEY_ORDER_HEAD = Family(
    "key_order_head", "selection/key_order.cu", "RankKeysParams", THREADS, "(__CUDA_ARCH__ == 900 ? 4 : 3)",
    shared="s2o::OrderHeadShared",
)  # fmt: skip
KEY_ORDER_SHORT = Family(
    "key_order_short", "selection/key_order.cu", "RankKeysParams", THREADS // 2, "(__CUDA_ARCH__ == 900 ? 7 : 4)",
    shared="s2o::OrderShortShared",
)  # fmt: skip
KEY_ORDER_WHOLE = Family(
    "key_order_whole", "selection/key_order.cu", "RankKeysParams", 2 * THREADS, "(__CUDA_ARCH__ == 900 ? 2 : 1)",
    shared="s2o::OrderWholeShared",
)  # fmt: skip
_STRATA_SHARED = BLOCK_PAIRS * (STRATUM * 4 + STRATUM // 4 * 4)


def key_strata() -> Kernel:
    return Kernel(KEY_STRATA, shared_bytes=_STRATA_SHARED)


def key_middle() -> Kernel:
    return Kernel(KEY_MIDDLE, shared_bytes=_STRATA_SHARED)


def key_order_short() -> Kernel:
    return _key_order(KEY_ORDER_SHORT)


def key_order_head() -> Kernel:
    return _key_order(KEY_ORDER_HEAD)


def key_order_whole() -> Kernel:
    return _key_order(KEY_ORDER_WHOLE)


def _key_order(family: Family) -> Kernel:
    """Its shared memory is sizeof(OrderShared): items, counters, sums by digit, and what each warp has found."""
    digits, threads = 32, family.threads
    return Kernel(family, shared_bytes=threads * (OF_THREAD * 4 + digits * 2) + digits * 4 + threads // 32 * 12)
