"""Caches of pages as tests make them. Importing this needs no GPU and no CuPy."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from gpu_cases import Case
from key_lists import nowhere

from s2o_cupy import s2o_attention, s2o_attention_paged


def paged(x: np.ndarray, table: np.ndarray, pages: int, page_size: int, layout: str, lengths: list[int]) -> np.ndarray:
    """A cache that holds x [batch, kv_heads, seqlen_k, head_dim] as ``table`` says, and NaN wherever no key is."""
    cache = np.full((pages, page_size, x.shape[1], x.shape[3]), np.nan, x.dtype)
    for sequence, entries, length in zip(x, table, lengths, strict=True):
        positions = np.arange(length)
        cache[entries[positions // page_size], positions % page_size] = sequence[:, :length].swapaxes(0, 1)
    return np.ascontiguousarray(cache.swapaxes(1, 2)) if layout == "HND" else cache


def random_table(rng: np.random.Generator, lengths: list[int], page_size: int) -> tuple[np.ndarray, int]:
    """(page table with entries to spare, pages of the cache, some of them unused)."""
    counts = [-(-length // page_size) for length in lengths]
    pages = sum(counts) + 3
    table = np.full((len(lengths), max(counts) + 2), nowhere(page_size), np.int32)
    order = iter(rng.permutation(pages))
    for entries, count in zip(table, counts, strict=True):
        entries[:count] = [next(order) for _ in range(count)]
    return table, pages


def fits_pages(case: Case) -> bool:
    """Whether the GPU takes a case's problem from a cache."""
    return case.head_dim % 8 == 0 and case.arrange == "contiguous"


def differing(case: Case, path: str, page_size: int | None = None) -> list[str]:
    """Of o, lse and visited of a case on the GPU, those whose bits differ between a cache and one array."""
    import cupy

    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    drawn = int(rng.choice([1, 16, 64, 256]))
    layout: Any = str(rng.choice(["NHD", "HND"]))
    page_size = page_size or drawn
    q, k, v = case.arrays()
    lengths = [k.shape[2]] * len(k)
    table, pages = random_table(rng, lengths, page_size)
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    caches = [cupy.asarray(paged(x, table, pages, page_size, layout, lengths)) for x in (k, v)]
    options: dict[str, Any] = {"config": case.config(path), "is_causal": case.is_causal, "scale": case.scale}
    options |= {"softcap": case.softcap, "return_lse": True, "return_stats": True}
    expected = s2o_attention(*arrays, **options)
    found = s2o_attention_paged(
        arrays[0], caches[0], caches[1], cupy.asarray(table), seqlen_k=k.shape[2], layout=layout, **options
    )
    as_bytes = lambda x: cupy.ascontiguousarray(x).view(np.uint8)  # noqa: E731
    pairs = {"o": (found[0], expected[0]), "lse": (found[1], expected[1])}
    pairs["visited"] = (found[2].visited, expected[2].visited)
    return [name for name, (x, y) in pairs.items() if not bool((as_bytes(x) == as_bytes(y)).all())]
