"""MeanPooling: `s2o_cupy.methods.mean_pooling` says what it is."""

from __future__ import annotations

from ...methods.grid import BlockGrid
from ...methods.mean_pooling import MeanPoolingConfig
from ..dense import Array
from .blocks import Chosen, block_means, block_scores, listed_columns, reach, softmax, visible_columns

__all__ = ["choose", "chosen"]


def choose(scores: Array, config: MeanPoolingConfig, grid: BlockGrid) -> Array:
    """Columns that each row's list holds, by scores [B, H, R, C]."""
    taken = reach(softmax(scores, visible_columns(grid)), config.threshold)
    if config.keep_first:
        taken[..., :1] = True
    return taken & listed_columns(grid)


def chosen(q: Array, k: Array, config: MeanPoolingConfig, grid: BlockGrid, scale: float) -> Chosen:
    """Of q [B, H, Lq, D] and k [B, Hkv, Lk, D]."""
    scores = block_scores(block_means(q, grid.block_q), block_means(k, grid.block_k), scale)  # [B, H, R, C]
    return Chosen(choose(scores, config, grid))
