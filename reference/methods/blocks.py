"""What methods that choose blocks of keys have in common, one function a stage.

Arrays are q [B, H, Lq, D] and k [B, Hkv, Lk, D] in the dtype that is computed in. R is the number of blocks of queries,
C that of blocks of keys; `BlockGrid` says which of these a row may choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...methods.grid import BlockGrid
from ..dense import Array, quiet

__all__ = [
    "Chosen", "block_means", "block_scores", "choose", "listed_columns", "reach", "similarity", "softmax",
    "visible_columns", "within", "written",
]  # fmt: skip


class Chosen(NamedTuple):
    """What a method chooses."""

    columns: Array  # bool [B, H, R, C], listed ones alone
    k_order: Array | None = None  # int32 [B or 1, HO, Lk], HO H, Hkv or 1: columns are blocks of this order
    q_order: Array | None = None  # int32 [B, H, Lq]: and rows of this


def block_means(x: Array, block: int, order: Array | None = None) -> Array:
    """Means of ``block`` neighbouring rows of x [B, HX, L, D]; the last block is that of the rows that there are.

    With ``order`` [B, H, L], H a multiple of HX, rows in that order of each head. Returns [B, H or HX, blocks, D].
    """
    x = _ordered(x, order)
    starts = np.arange(0, x.shape[2], block)
    counts = np.minimum(block, x.shape[2] - starts)  # [blocks]
    return np.add.reduceat(x, starts, axis=2) / counts[:, None].astype(x.dtype) if len(starts) else x[:, :, :0]


@quiet
def similarity(x: Array, block: int) -> Array:
    """How alike the rows of each block are: the mean cosine of all pairs of its rows, [B, HX, blocks].

    That is the squared length of the mean of unit rows, so it is never negative. A row of zeros counts 0.
    """
    most = np.abs(x).max(axis=-1, keepdims=True, initial=0)
    shrunk = x / np.where(most > 0, most, 1)  # or squares may be infinite
    norm = np.sqrt((shrunk * shrunk).sum(axis=-1, keepdims=True))
    units = shrunk / np.where(norm == 0, 1, norm)
    return (block_means(units, block) ** 2).sum(axis=-1)


@quiet
def block_scores(q_means: Array, k_means: Array, scale: float) -> Array:
    """scale * q_means . k_means, [B, H, R, C] of [B, H, R, D] and [B, HK, C, D]. A mean that is not finite makes NaN.
    """
    q_means, k_means = (
        np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, np.nan) for x in (q_means, k_means)
    )
    group = q_means.shape[1] // k_means.shape[1]
    return q_means @ np.repeat(k_means, group, axis=1).swapaxes(2, 3) * scale


def visible_columns(grid: BlockGrid) -> Array:
    """Which columns compete in each row's softmax, bool [R, C]."""
    return np.arange(grid.columns) < np.array([grid.visible(row) for row in range(grid.rows)])[:, None]


def listed_columns(grid: BlockGrid) -> Array:
    """Which columns each row's list may hold, bool [R, C]."""
    return np.arange(grid.columns) < np.array([grid.listed(row) for row in range(grid.rows)])[:, None]


@quiet
def softmax(scores: Array, visible: Array) -> Array:
    """Along the last axis, 0 where not ``visible``. A row without a finite score is 0; one with a visible score that is
    NaN or +infinity is NaN."""
    masked = np.where(visible, scores, -np.inf)
    m = masked.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(masked - np.where(np.isneginf(m), 0, m))
    total = p.sum(axis=-1, keepdims=True)
    return np.where(total == 0, 0, p / total)


def reach(w: Array, threshold: float | Array) -> Array:
    """Along the last axis the shortest prefix of the descending order of w whose sum is >= threshold * sum(w).

    Equal weights count by index. A threshold of 1 takes every w > 0, so none that underflowed to 0: `choose` takes
    those as well. A sum of 0 takes nothing; NaN takes all. bool, like w; ``threshold`` is broadcast against all but the
    last axis.
    """
    return _prefix(w, threshold, lambda sums, limit: (sums < limit).sum(axis=-1) + 1)


def within(w: Array, threshold: float | Array) -> Array:
    """Likewise the longest prefix whose sum is <= threshold * sum(w), at least one entry."""
    return _prefix(w, threshold, lambda sums, limit: np.maximum(1, (sums <= limit).sum(axis=-1)))


def largest(w: Array, share: float | Array) -> Array:
    """Likewise the largest w, as many as ``share`` of all columns, rounded down, at least one; none of less than 2^-126
    of the largest, which float32 holds as 0 beside it."""
    columns = w.shape[-1]
    order = np.argsort(-w, axis=-1, kind="stable")
    count = np.broadcast_to(np.maximum(1, np.floor(np.asarray(share) * columns)), w.shape[:-1])[..., None]
    taken = np.zeros(w.shape, bool)
    np.put_along_axis(taken, order, np.arange(columns) < count, axis=-1)
    most = w.max(axis=-1, keepdims=True, initial=0)
    return np.where(np.isnan(most), True, taken & (w > 0) & (w >= most * 2.0**-126))


def _prefix(w: Array, threshold: float | Array, length: Callable[[Array, Array], Array]) -> Array:
    order = np.argsort(-w, axis=-1, kind="stable")
    sums = np.cumsum(np.take_along_axis(w, order, axis=-1), axis=-1)
    total = sums[..., -1:] if w.shape[-1] else np.zeros((*w.shape[:-1], 1), w.dtype)
    of_row = np.broadcast_to(np.asarray(threshold, w.dtype), w.shape[:-1])[..., None]
    count = length(sums, of_row * total)  # entries of the prefix
    taken = np.zeros(w.shape, bool)
    np.put_along_axis(taken, order, np.arange(w.shape[-1]) < count[..., None], axis=-1)
    taken = np.where(of_row >= 1, w > 0, taken)
    return np.where(np.isnan(total), True, taken & (total > 0))


def choose(
    scores: Array, grid: BlockGrid, rule: str, threshold: float | Sequence[float] | Array, *, kept: Array | None = None,
    whole_rows: Array | None = None, fixed: Array | None = None,
) -> Array:  # fmt: skip
    """Columns that each row's list holds, bool [B, H, R, C], by scores [B, H, R, C].

    ``rule``: "reach", "within" or "largest", of a softmax over the visible columns; ``threshold``: a number, or one for
    each head. One that takes as many columns as a row sees takes every one that is listed, whatever its weight: 1.
    Chosen whatever their weight: column ``kept`` [B, H] of all rows, all columns of ``whole_rows`` [B, H, R], and
    ``fixed`` columns [B, H, C], which are out of the softmax.
    """
    visible = visible_columns(grid) & np.ones(scores.shape, bool)
    w = softmax(scores, visible if fixed is None else visible & ~fixed[:, :, None])
    of_head = np.asarray(threshold, np.float64 if rule == "largest" else w.dtype)[..., None]  # [H, 1], or [1]
    taken = {"reach": reach, "within": within, "largest": largest}[rule](w, of_head) | (of_head >= 1)[..., None]
    if rule == "largest":
        count = np.maximum(1, np.floor(of_head * grid.columns))
        taken = taken | (count >= visible_columns(grid).sum(axis=-1))[..., None]
    if kept is not None:
        taken = taken | (np.arange(grid.columns) == kept[..., None])[:, :, None]
    if fixed is not None:
        taken = taken | fixed[:, :, None]
    if whole_rows is not None:
        taken = taken | whole_rows[..., None]
    return taken & listed_columns(grid)


def written(columns: Array, grid: BlockGrid) -> tuple[Array, Array, Array]:
    """Ascending lists of the chosen columns, where the kernels put them.

    Returns entries, int32 [B * H * grid.entries], of which those past the end of a list are 0; begins, int64, and keys,
    int32 [B, H, R].
    """
    batch, heads, rows, count = columns.shape
    entries = np.zeros((batch * heads * grid.entries,), np.int32)
    begins = np.arange(batch * heads)[:, None] * grid.entries + np.array([grid.begin(a) for a in range(rows)])
    begins = begins.reshape(batch, heads, rows).astype(np.int64)
    for at in np.ndindex(batch, heads, rows):
        found = np.flatnonzero(columns[at])
        entries[begins[at] : begins[at] + len(found)] = found
    keys = columns.sum(axis=-1) * grid.block_k - columns[..., count - 1 :].sum(axis=-1) * grid.short
    return entries, begins, keys.astype(np.int32)


def _ordered(x: Array, order: Array | None) -> Array:
    """Rows of x [B, HX, L, D] in the order [B, H, L] of each head."""
    if order is None:
        return x
    return np.take_along_axis(np.repeat(x, order.shape[1] // x.shape[1], axis=1), order[..., None], axis=2)
