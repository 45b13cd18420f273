"""Vertical-slash: `s2o_cupy.methods.vertical_slash` says what it is.

    last_row_weights -> column_sums, distance_sums -> best -> listed_keys
"""

from __future__ import annotations

import numpy as np

from ...methods.grid import BlockGrid
from ...methods.vertical_slash import FORCED, ROWS, VerticalSlashConfig
from ..dense import Array
from .blocks import Chosen
from .last_rows import best, column_sums, distance_sums, last_row_weights

__all__ = ["chosen", "crossed_keys", "listed_keys"]


def crossed_keys(columns: Array, distances: Array, first: int, rows: int) -> Array:
    """Keys before position ``first`` that queries at ``first`` to ``first + rows - 1`` attend to: bool [..., first].

    ``columns`` and ``distances`` are bool [..., Lk]. A key is in a chosen column, or at a chosen distance of one of the
    queries.
    """
    upto = np.concatenate([np.zeros((*distances.shape[:-1], 1), np.int64), distances.cumsum(axis=-1)], axis=-1)
    j = np.arange(first)
    crossed = upto[..., np.minimum(first + rows - j, distances.shape[-1])] > upto[..., first - j]
    return columns[..., :first] | crossed


def listed_keys(columns: Array, distances: Array, grid: BlockGrid) -> Array:
    """`crossed_keys` of each row, of ``columns`` and ``distances`` [B, H, Lk]: bool [B, H, R, Lk]."""
    taken = np.zeros((*columns.shape[:2], grid.rows, grid.columns), bool)
    for row in range(grid.rows):
        first, rows = grid.listed(row), min(grid.block_q, grid.seqlen_q - row * grid.block_q)
        taken[:, :, row, :first] = crossed_keys(columns, distances, first, rows)
    return taken


def chosen(q: Array, k: Array, config: VerticalSlashConfig, grid: BlockGrid, scale: float) -> Chosen:
    """Of q [B, H, Lq, D] and k [B, Hkv, Lk, D]; columns are single keys."""
    weights = last_row_weights(q, k, ROWS, scale)  # [B, H, 64, Lk]
    columns = best(column_sums(weights), config.verticals, FORCED)
    distances = best(distance_sums(weights), config.slashes, FORCED)
    return Chosen(listed_keys(columns, distances, grid))
