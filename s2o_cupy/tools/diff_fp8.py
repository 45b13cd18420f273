"""Keys and values as `diff` has them read from pages of 8 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..reference.fp8 import VALUES, from_e4m3

__all__ = ["Fp8Cache", "fp8_cache", "wrong_values"]

Array = Any  # numpy.ndarray
PAGE_SIZE = 64


class Fp8Cache(NamedTuple):
    pages: tuple[Array, Array]  # of keys and of values, uint8 [pages, PAGE_SIZE, kv_heads, head_dim]
    table: Array  # int32 [batch, pages of a sequence], in any order
    scales: tuple[Array, Array]  # float32 [kv_heads]
    values: tuple[Array, Array]  # what it holds, [batch, kv_heads, seqlen_k, head_dim] of q's dtype


def fp8_cache(k: Array, v: Array) -> Fp8Cache:
    """k and v [batch, kv_heads, seqlen_k, head_dim] rounded to e4m3, each head by its largest magnitude."""
    batch, _, seqlen_k, _ = k.shape
    entries = -(-seqlen_k // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(batch * entries).astype(np.int32).reshape(batch, entries)
    found = []
    for x in (k, v):
        wide = x.astype(np.float32)
        with np.errstate(invalid="ignore"):
            largest = np.where(np.isfinite(wide), np.abs(wide), 0).max(axis=(0, 2, 3))
        scale = np.where(largest > 0, largest / VALUES[0x7E], 1).astype(np.float32)
        codes = _nearest(wide / scale[:, None, None])
        found.append((_in_pages(codes, table), scale, from_e4m3(codes, scale, x.dtype)))
    pages, scales, values = zip(*found, strict=True)
    return Fp8Cache(pages, table, scales, values)


def _nearest(x: Array) -> Array:
    """The bytes of the nearest e4m3 numbers; of what is not finite, NaN's."""
    magnitudes = VALUES[:0x7F]  # ascending
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = np.where(np.isfinite(x), np.searchsorted(between, np.abs(x)), 0x7F).astype(np.uint8)
    return codes | (np.signbit(x).astype(np.uint8) << 7)


def _in_pages(codes: Array, table: Array) -> Array:
    batch, kv_heads, seqlen_k, head_dim = codes.shape
    padded = np.full((batch, table.shape[1] * PAGE_SIZE, kv_heads, head_dim), 0x7F, np.uint8)
    padded[:, :seqlen_k] = codes.swapaxes(1, 2)
    pages = np.empty((table.size, PAGE_SIZE, kv_heads, head_dim), np.uint8)
    pages[table.reshape(-1)] = padded.reshape(pages.shape)
    return pages


def wrong_values(found: Array, expected: Array) -> Array:
    """Infinite where they differ; one NaN is as good as another."""
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    return np.where(same, 0.0, np.inf)
