"""Whether packed sequences' keys and values are copied from small pages to arrays before pass 1 reads them.

Where pages are too small for Hopper's copy engine pass 1 gathers their rows one by one, and takes a seventh longer and
more. A copy takes as long as its bytes, so it is repaid where each key has many queries. Pure: no array, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..arrays.operand import ITEM_BYTES
from ..problem import Problem
from ..spec import S2OConfig
from .kernels import Family, Kernel
from .launch_plan import COLLECT_CHUNK, COLLECT_ROWS, FP8_PAGES, MAX_CHUNKS

__all__ = [
    "COLLECT_PAIRS", "COLLECT_PACKED_PAGES", "PACKED_FP8_PAGES", "fp8_kernels", "most_collected_keys",
    "repays_collecting",
]  # fmt: skip

COLLECT_PACKED_PAGES = Kernel(
    Family("collect_packed_pages", "collect_pages.cu", "CollectPackedPagesParams", 256, 4)
)
PACKED_FP8_PAGES = replace(FP8_PAGES, function="packed_fp8_pages", params_type="PackedFp8PagesParams")
# (query row, key) pairs of a KV head for each of its keys from which a copy is repaid: on an H200 a copy of one key of
# head_dim 128 takes as long as dense attention of some 300 rows to it.
COLLECT_PAIRS = 2048


def repays_collecting(problems: Sequence[Problem]) -> bool:
    """Whether sequences that are attended densely in one launch repay a copy of their keys and values."""
    rows, pairs, keys = 0, 0.0, 0  # of all sequences: query rows of a KV head, what they see, and keys
    for p in problems:
        queries = p.seqlen_q * (p.heads // p.kv_heads)
        unseen = (p.seqlen_q - 1) / 2 if p.is_causal else 0  # by a row, on average
        rows += queries
        pairs += queries * (p.seqlen_k - unseen)
        keys += p.seqlen_k
    return rows >= COLLECT_ROWS and pairs >= COLLECT_PAIRS * keys


def fp8_kernels(dtype: str) -> Iterator[Kernel]:
    """What reads caches of 8 bits."""
    yield from (Kernel(FP8_PAGES, dtype), Kernel(PACKED_FP8_PAGES, dtype))


def most_collected_keys(problem: Problem, config: S2OConfig) -> int:
    """Keys of each KV head that the workspace, and the kernel that copies, take at a time."""
    chunks = problem.kv_heads * -(-problem.head_dim * ITEM_BYTES // COLLECT_CHUNK)  # of a key
    most = min(config.workspace_bytes // (2 * COLLECT_CHUNK), MAX_CHUNKS - 1)
    return most // chunks
