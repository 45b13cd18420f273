"""NSA, natively trainable sparse attention, forward: one function a stage, and the selected branch in FSA's order too.

    compress                       keys and values of runs of tokens, by their mean (a model may learn its own)
    compressed, importance         attention to those, and what a block of tokens weighs in it
    top_blocks, selected           the blocks that a token attends to, and the attention to their keys
    window                         attention to the latest keys
    gate                           the sum of the three
    invert, partials, merge        `selected` by blocks of keys: the tokens of each, a part for each pair, their sum

Sources: Native Sparse Attention (Yuan et al. 2025); the order of loops: Flash Sparse Attention (FSA, ICLR 2026).

Arrays are q [B, H, Lq, D] and k, v [B, Hkv, Lk, D] in one compute dtype, as in `reference.s2o`; G = H / Hkv. Query i
stands at position p = i + Lk - Lq and sees the keys j <= p. The compressed key c, of N, is of the ``length`` keys from
c * stride on, and visible once all of them are. Blocks are of ``block`` keys, NB of them; a query's own is p // block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..dense import ROWS, Array, check_shapes, quiet, weighted_sum

__all__ = [
    "compress", "compressed", "compressed_count", "gate", "importance", "invert", "merge", "partials", "row_chunks",
    "scale_of", "selected", "top_blocks", "visible_compressed", "window",
]  # fmt: skip


def compressed_count(seqlen_k: int, length: int, stride: int) -> int:
    """How many compressed keys there are: N."""
    return max(0, (seqlen_k - length) // stride + 1)


def visible_compressed(p: Array, length: int, stride: int) -> Array:
    """How many compressed keys a query at position ``p`` sees."""
    return np.maximum(0, (p - length + 1) // stride + 1)


def compress(x: Array, length: int, stride: int) -> Array:
    """The mean of the keys (or values) of each run: [B, Hkv, Lk, D] -> [B, Hkv, N, D]."""
    count = compressed_count(x.shape[2], length, stride)
    found = np.zeros((*x.shape[:2], count, x.shape[3]), x.dtype)
    for c in range(count):
        found[:, :, c] = x[:, :, c * stride : c * stride + length].mean(axis=2)
    return found


@quiet
def compressed(
    q: Array, k_cmp: Array, v_cmp: Array, seqlen_k: int, *, length: int, stride: int, scale: float | None = None
) -> tuple[Array, Array]:
    """Attention to the compressed keys that are visible; o [B, H, Lq, D] and lse [B, H, Lq], 0 and -inf without one."""
    check_shapes(q, k_cmp, v_cmp)
    o, lse = _nothing(q)
    for at, kv, p in row_chunks(q, k_cmp, seqlen_k):
        sees = np.arange(k_cmp.shape[2]) < visible_compressed(p, length, stride)[:, None]  # [rows, N]
        o[at], lse[at] = _attend(q[at], k_cmp[kv], v_cmp[kv], sees, scale_of(q, scale))
    return o, lse


@quiet
def importance(
    q: Array, k_cmp: Array, lse: Array, seqlen_k: int, *, length: int, stride: int, block: int,
    scale: float | None = None,
) -> Array:  # fmt: skip
    """What each block weighs for a token, [B, Hkv, Lq, NB]: the softmax weights that the compressed keys have in all
    heads of the group, each counted as often as the strides of the block overlap those of its run.

    ``lse``: of `compressed`. With length = 2 stride and block = 4 stride the compressed keys 4 j - 1 to 4 j + 3 count
    1, 2, 2, 2, 1 times for block j.
    """
    (batch, heads, seqlen_q, _), (kv_heads, count) = q.shape, k_cmp.shape[1:3]
    group, blocks = heads // kv_heads, -(-seqlen_k // block)
    weights = np.zeros((batch, kv_heads, seqlen_q, count), q.dtype)
    for (b, h, rows), kv, p in row_chunks(q, k_cmp, seqlen_k):
        sees = np.arange(count) < visible_compressed(p, length, stride)[:, None]  # [rows, N]
        s = q[b, h, rows] @ k_cmp[kv].T * scale_of(q, scale)
        weights[b, h // group, rows] += np.where(sees, np.exp(s - lse[b, h, rows, None]), 0)
    found = np.zeros((batch, kv_heads, seqlen_q, blocks), q.dtype)
    for m in range(block // stride):
        for n in range(length // stride):
            c = np.arange(blocks) * (block // stride) + m + n - (length // stride - 1)
            inside = (c >= 0) & (c < count)
            found[..., inside] += weights[..., c[inside]]
    return found


def top_blocks(weight: Array, seqlen_k: int, *, block: int, top: int, first: int, local: int) -> Array:
    """The blocks of each token, ascending, int32 [B, Hkv, Lq, top], -1 behind the last: the ``first``, its own and
    those just before it, ``local`` in all, and of the others before those the ones of most ``weight`` [B, Hkv, Lq, NB].
    Among equals the lower block, and NaN is the most of all."""
    found = np.full((*weight.shape[:3], top), -1, np.int32)
    offset = seqlen_k - weight.shape[2]
    for i in range(weight.shape[2]):
        own = (i + offset) // block
        free = np.arange(first, max(first, own - local + 1))  # blocks that must earn their place
        forced = [j for j in range(own + 1) if j < first or j > own - local]
        chosen = min(top - len(forced), len(free))
        for b, h in np.ndindex(weight.shape[:2]):
            w = weight[b, h, i, free]
            order = np.argsort(np.where(np.isnan(w), -np.inf, -w), kind="stable")[:chosen]
            found[b, h, i, : len(forced) + chosen] = np.sort([*forced, *free[order]])
    return found


@quiet
def selected(
    q: Array, k: Array, v: Array, blocks: Array, *, block: int, scale: float | None = None
) -> tuple[Array, Array]:
    """Attention to the visible keys of each token's ``blocks``, int [B, Hkv, Lq, T] (below 0: none), which all heads of
    a group share."""
    check_shapes(q, k, v)
    o, lse = _nothing(q)
    of_key = np.arange(k.shape[2]) // block
    for at, kv, p in row_chunks(q, k):
        chosen = np.zeros((len(p), of_key.max(initial=0) + 2), bool)
        np.put_along_axis(chosen, np.maximum(blocks[kv[0], kv[1], at[2]], -1), True, axis=1)  # -1 is the last column
        sees = chosen[:, of_key] & (np.arange(k.shape[2]) <= p[:, None])  # [rows, Lk]
        o[at], lse[at] = _attend(q[at], k[kv], v[kv], sees, scale_of(q, scale))
    return o, lse


@quiet
def window(
    q: Array, k: Array, v: Array, size: int, *, sinks: int = 0, scale: float | None = None
) -> tuple[Array, Array]:
    """Attention to the latest ``size`` keys, a query's own among them, and to the first ``sinks``."""
    check_shapes(q, k, v)
    o, lse = _nothing(q)
    j = np.arange(k.shape[2])
    for at, kv, p in row_chunks(q, k):
        sees = (j <= p[:, None]) & ((j > p[:, None] - size) | (j < sinks))  # [rows, Lk]
        o[at], lse[at] = _attend(q[at], k[kv], v[kv], sees, scale_of(q, scale))
    return o, lse


def gate(gates: Array, o_cmp: Array, o_slc: Array, o_win: Array) -> Array:
    """The branches times their gates, [B, Lq, 3] or [B, H, Lq, 3], added up."""
    g = gates[:, None] if gates.ndim == 3 else gates
    return g[..., 0, None] * o_cmp + g[..., 1, None] * o_slc + g[..., 2, None] * o_win


# --- The selected branch by blocks of keys ---
def invert(blocks: Array, count: int) -> tuple[Array, Array]:
    """The (token, slot) pairs of each of ``count`` blocks, ascending: entries token * T + slot of ``blocks``
    [B, Hkv, Lq, T], int32 [B, Hkv, Lq * T] with -1 behind the last, and begins int64 [B, Hkv, count + 1]."""
    batch, kv_heads = blocks.shape[:2]
    flat = blocks.reshape(batch, kv_heads, -1)
    entries = np.full(flat.shape, -1, np.int32)
    begins = np.zeros((batch, kv_heads, count + 1), np.int64)
    for at in np.ndindex(batch, kv_heads):
        there = np.flatnonzero(flat[at] >= 0)
        order = there[np.argsort(flat[at][there], kind="stable")]
        entries[at][: len(order)] = order
        begins[at][1:] = np.cumsum(np.bincount(flat[at][there], minlength=count))
    return begins, entries


@quiet
def partials(
    q: Array, k: Array, v: Array, begins: Array, entries: Array, top: int, *, block: int, scale: float | None = None
) -> tuple[Array, Array]:
    """Attention of each (token, slot) pair to its one block: o [B, H, Lq, T, D] and lse [B, H, Lq, T], 0 and -inf of a
    pair that is not listed. A block of keys is read once for all heads of its group."""
    (batch, heads, seqlen_q, head_dim), (kv_heads, seqlen_k) = q.shape, k.shape[1:3]
    group = heads // kv_heads
    o = np.zeros((batch, heads, seqlen_q, top, head_dim), q.dtype)
    lse = np.full((batch, heads, seqlen_q, top), -np.inf, q.dtype)
    for b, kv, c in np.ndindex(batch, kv_heads, begins.shape[2] - 1):
        token, slot = np.divmod(entries[b, kv, begins[b, kv, c] : begins[b, kv, c + 1]], top)
        keys = slice(c * block, min((c + 1) * block, seqlen_k))
        sees = np.arange(keys.start, keys.stop) <= token[:, None] + seqlen_k - seqlen_q  # [tokens, block]
        for h in range(kv * group, (kv + 1) * group):
            o[b, h, token, slot], lse[b, h, token, slot] = _attend(
                q[b, h, token], k[b, kv, keys], v[b, kv, keys], sees, scale_of(q, scale)
            )
    return o, lse


@quiet
def merge(o: Array, lse: Array) -> tuple[Array, Array]:
    """Attention over all parts from that over each: [..., T, D] and [..., T] -> [..., D] and [...]."""
    top = lse.max(axis=-1, initial=-np.inf)
    weight = np.exp(lse - np.where(np.isneginf(top), 0, top)[..., None])  # [..., T]
    total = weight.sum(axis=-1)
    share = np.where(total[..., None] == 0, 0, weight / total[..., None])
    return (share[..., None] * o).sum(axis=-2), np.where(total == 0, -np.inf, top + np.log(total))


# --- Helpers ---
def scale_of(q: Array, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[3]) if scale is None else scale


def _nothing(q: Array) -> tuple[Array, Array]:
    """Output and lse of rows without a key."""
    return np.zeros_like(q), np.full(q.shape[:3], -np.inf, q.dtype)


def row_chunks(
    q: Array, k: Array, seqlen_k: int | None = None
) -> Iterator[tuple[tuple[int, int, slice], tuple[int, int], Array]]:
    """Some rows of a head at a time: where they are in q, their KV head, and their positions."""
    batch, heads, seqlen_q, _ = q.shape
    offset = (k.shape[2] if seqlen_k is None else seqlen_k) - seqlen_q
    for b, h in np.ndindex(batch, heads):
        for begin in range(0, seqlen_q, ROWS):
            rows = slice(begin, min(begin + ROWS, seqlen_q))
            yield (b, h, rows), (b, h * k.shape[1] // heads), np.arange(rows.start, rows.stop) + offset


def _attend(q: Array, k: Array, v: Array, sees: Array, scale: float) -> tuple[Array, Array]:
    """Rows q [M, D] to the keys that each ``sees``, bool [M, K]: o [M, D] and lse [M]."""
    s = np.where(sees, q @ k.T * scale, -np.inf)  # [M, K]
    m = s.max(axis=1, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0, m)[:, None])
    total = p.sum(axis=1)
    empty = total == 0
    o = np.where(empty[:, None], 0, weighted_sum(p, v, sees) / total[:, None])
    return o, np.where(empty, -np.inf, m + np.log(total))
