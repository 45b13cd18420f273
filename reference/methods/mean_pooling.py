"""MeanPooling: `s2o_cupy.methods.mean_pooling` says what it is."""

from __future__ import annotations

import numpy as np

from ...methods.grid import BlockGrid
from ...methods.mean_pooling import MeanPoolingConfig
from ..dense import Array
from .blocks import Chosen, block_means, block_scores, choose

__all__ = ["chosen"]


def chosen(q: Array, k: Array, config: MeanPoolingConfig, grid: BlockGrid, scale: float) -> Chosen:
    """Of q [B, H, Lq, D] and k [B, Hkv, Lk, D]."""
    scores = block_scores(block_means(q, grid.block_q), block_means(k, grid.block_k), scale)  # [B, H, R, C]
    kept = np.zeros(q.shape[:2], int) if config.keep_first else None
    return Chosen(choose(scores, grid, config.rule, config.threshold, kept=kept))
