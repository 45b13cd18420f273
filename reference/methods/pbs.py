"""PBS-Attn: `s2o_cupy.methods.pbs` says what it is, and arXiv 2510.21270 where it comes from.

A row's keys depend on the last queries of the prompt, through the order of the keys.
"""

from __future__ import annotations

import numpy as np

from ...methods.grid import BlockGrid
from ...methods.pbs import PBSConfig
from ..dense import Array, quiet
from .blocks import Chosen, block_means, block_scores, choose
from .xattention import antidiagonal_mass

__all__ = ["chosen", "first_column", "importance", "leading_bits", "mass_scores", "segment_order"]


@quiet
def importance(q: Array, k: Array, rows: int, scale: float) -> Array:
    """The mean over the last ``rows`` queries of their softmax over all keys, without a mask: float32 [B, H, Lk]."""
    q = q[:, :, max(0, q.shape[2] - rows) :]  # [B, H, rows, D]
    group = q.shape[1] // k.shape[1]
    s = q @ np.repeat(k, group, axis=1).swapaxes(2, 3) * scale  # [B, H, rows, Lk]
    p = np.exp(s - s.max(axis=-1, keepdims=True, initial=-np.inf))
    return (p / p.sum(axis=-1, keepdims=True)).mean(axis=2).astype(np.float32)


def segment_order(importance: Array, segment: int, heads: int) -> Array:
    """Keys of each whole segment by descending importance [B, H, Lk], those of the tail as they lie.

    ``heads``: how many orders there are; neighbours of H share one by their mean importance. Of that the leading bits
    count that a place in a segment leaves of 32; equal ones go by position, NaN comes first. int32 [B, heads, Lk].
    """
    batch, of, seqlen = importance.shape
    shared = importance.reshape(batch, heads, of // heads, seqlen)
    mean = shared[:, :, 0]
    for h in range(1, of // heads):  # in this order, in float32, as the kernel adds up
        mean = mean + shared[:, :, h]
    mean = mean / np.float32(of // heads)
    descending = ~leading_bits(mean, 32 - (segment - 1).bit_length())  # [B, heads, Lk]
    whole = seqlen // segment * segment
    order = np.broadcast_to(np.arange(seqlen, dtype=np.int32), (batch, heads, seqlen)).copy()
    split = descending[..., :whole].reshape(batch, heads, -1, segment)
    found = np.argsort(split, axis=-1, kind="stable") + np.arange(0, whole, segment)[:, None]
    order[..., :whole] = found.reshape(batch, heads, whole)
    return order


def leading_bits(x: Array, count: int) -> Array:
    """The first ``count`` of 32 bits that grow with x, float32; NaN is the largest. uint32, like x."""
    bits = np.where(x == 0, np.float32(0), x).view(np.uint32)
    grows = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return np.where(np.isnan(x), ~np.uint32(0), grows) >> np.uint32(32 - count)


def first_column(order: Array, block: int) -> Array:
    """Which block of an order [B, H, Lk] holds key 0, int [B, H]."""
    return (order == 0).argmax(axis=-1) // block


@quiet
def mass_scores(q: Array, k: Array, order: Array, grid: BlockGrid, stride: int, scale: float) -> Array:
    """Logarithm of the softmax mass that antidiagonals give blocks of the permuted keys, [B, H, R, C]: PBS-Attn+."""
    permuted = np.take_along_axis(np.repeat(k, order.shape[1] // k.shape[1], axis=1), order[..., None], axis=2)
    return np.log(antidiagonal_mass(q, permuted, grid, stride, scale))


def chosen(q: Array, k: Array, config: PBSConfig, grid: BlockGrid, scale: float) -> Chosen:
    """Of q [B, H, Lq, D] and k [B, Hkv, Lk, D]."""
    heads = q.shape[1] if config.share == "head" else k.shape[1]
    order = segment_order(importance(q, k, config.block, scale), config.segment, heads)  # [B, heads, Lk]
    if config.scores == "mean":
        scores = block_scores(block_means(q, grid.block_q), block_means(k, grid.block_k, order), scale)  # [B, H, R, C]
    else:
        scores = mass_scores(q, k, order, grid, config.stride, scale)
    kept = None
    if config.keep_first:
        kept = np.repeat(first_column(order, grid.block_k), q.shape[1] // heads, axis=1)  # [B, H]
    return Chosen(choose(scores, grid, config.rule, config.threshold, kept=kept), order)
