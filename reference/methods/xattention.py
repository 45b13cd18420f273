"""XAttention: `s2o_cupy.methods.xattention` says what it is.

    antidiagonal_scores -> antidiagonal_mass -> choose
"""

from __future__ import annotations

import numpy as np

from ...methods.grid import BlockGrid
from ...methods.xattention import XAttentionConfig
from ..dense import Array, quiet
from .blocks import Chosen, listed_columns, reach, softmax

__all__ = ["antidiagonal_mass", "antidiagonal_scores", "choose", "chosen"]


def _cells(x: Array, stride: int) -> Array:
    """[L, D] as cells [cells, stride, D]; what a short last one lacks is zeros."""
    cells = -(-len(x) // stride)
    padded = np.zeros((cells * stride, x.shape[1]), x.dtype)
    padded[: len(x)] = x
    return padded.reshape(cells, stride, x.shape[1])


@quiet
def antidiagonal_scores(q: Array, k: Array, stride: int, scale: float) -> Array:
    """Score of each cell of queries with each cell of keys, of one head: q [Lq, D], k [Lk, D] -> [X, Y].

    A cell is ``stride`` neighbouring rows. Its score is the mean of those on the antidiagonal of the two, where each
    query of the one meets one key of the other.
    """
    of_q, of_k = _cells(q, stride)[:, ::-1], _cells(k, stride)
    product: Array = of_q.reshape(len(of_q), -1) @ of_k.reshape(len(of_k), -1).T
    return product * (scale / stride)


@quiet
def antidiagonal_mass(q: Array, k: Array, grid: BlockGrid, stride: int, scale: float) -> Array:
    """Softmax mass that the cells of each row give each column, summed: [B, H, R, C].

    A cell of queries sees the cells of keys that begin no later than it. Where the dense part does not compete
    (``grid.own``) it sees those of the listed columns alone.
    """
    batch, heads, seqlen_q, _ = q.shape
    group, cells = heads // k.shape[1], grid.block_k // stride
    x, y = np.arange(-(-seqlen_q // stride))[:, None], np.arange(-(-k.shape[2] // stride))
    visible = y <= x + grid.offset // stride  # [X, Y]
    if not grid.own:
        visible = y // cells < np.array([grid.listed(int(i)) for i in x[:, 0] // cells], int)[:, None]
    mass = np.zeros((batch, heads, grid.rows, grid.columns), q.dtype)
    for b, h in np.ndindex(batch, heads):
        scores = antidiagonal_scores(q[b, h], k[b, h // group], stride, scale)  # [X, Y]
        of_columns = np.add.reduceat(softmax(scores, visible), y[::cells], axis=1)  # [X, C]
        mass[b, h] = np.add.reduceat(of_columns, x[::cells, 0], axis=0)
    return mass


@quiet
def choose(mass: Array, config: XAttentionConfig, grid: BlockGrid) -> Array:
    """Columns that each row's list holds, by mass [B, H, R, C].

    The first column and those of the dense part are attended to in any case, and count towards the threshold; then
    others by descending mass, until all hold that share of the row's.
    """
    listed = listed_columns(grid)
    forced = ~listed | (np.arange(grid.columns) == 0)
    total = mass.sum(axis=-1, keepdims=True)
    free = np.where(forced, 0, mass)
    missing = config.threshold * total - np.where(forced, mass, 0).sum(axis=-1, keepdims=True)  # of what is forced
    share = np.where(missing > 0, missing / free.sum(axis=-1, keepdims=True), 0)[..., 0]
    taken = reach(free, np.minimum(np.nan_to_num(share), 1)) & (share > 0)[..., None]
    everything = np.isnan(total) | (config.threshold >= 1)
    return (taken | forced | everything) & listed


def chosen(q: Array, k: Array, config: XAttentionConfig, grid: BlockGrid, scale: float) -> Chosen:
    """Of q [B, H, Lq, D] and k [B, Hkv, Lk, D]."""
    return Chosen(choose(antidiagonal_mass(q, k, grid, config.stride, scale), config, grid))
