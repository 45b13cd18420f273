"""SpargeAttn's choice of blocks: `s2o_cupy.methods.sparge` says what it is."""

from __future__ import annotations

import numpy as np

from ...methods.grid import BlockGrid
from ...methods.sparge import SpargeConfig
from ..dense import Array
from .blocks import Chosen, block_means, block_scores, choose, similarity

__all__ = ["chosen", "unlike"]


def unlike(q: Array, k: Array, config: SpargeConfig, grid: BlockGrid) -> tuple[Array, Array]:
    """Blocks that their means do not stand for: of queries, bool [B, H, R], and of keys, bool [B, H, C]."""
    heads = q.shape[1]
    theta = np.broadcast_to(np.asarray(config.theta, q.dtype), (heads,))[:, None]  # [H, 1]
    of_keys = np.repeat(similarity(k, grid.block_k), heads // k.shape[1], axis=1)  # [B, H, C]
    return similarity(q, grid.block_q) < theta, of_keys < theta


def chosen(q: Array, k: Array, config: SpargeConfig, grid: BlockGrid, scale: float) -> Chosen:
    """Of q [B, H, Lq, D] and k [B, Hkv, Lk, D]."""
    q_order = k_order = None
    if config.permutation is not None:
        order = config.token_order(k.shape[2])
        q, k = q[:, :, order], k[:, :, order]
        q_order, k_order = np.broadcast_to(order, q.shape[:3]), order[None, None]
    scores = block_scores(block_means(q, grid.block_q), block_means(k, grid.block_k), scale)  # [B, H, R, C]
    whole_rows, fixed = unlike(q, k, config, grid)
    kept = np.zeros(q.shape[:2], int) if config.keep_first else None
    columns = choose(scores, grid, config.rule, config.threshold, kept=kept, whole_rows=whole_rows, fixed=fixed)
    return Chosen(columns, k_order, q_order)
