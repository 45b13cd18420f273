"""FlexPrefill: `s2o_cupy.methods.flex_prefill` says what it is.

    last_row_weights -> column_sums, distance_sums -> block_sums, budget -> columns_and_diagonals
    block_scores, softmax -> divergence, by_weight
"""

from __future__ import annotations

import numpy as np

from ...methods.flex_prefill import FlexPrefillConfig
from ...methods.grid import BlockGrid
from ..dense import Array, quiet
from .blocks import Chosen, block_means, block_scores, listed_columns, softmax, visible_columns
from .last_rows import best, column_sums, distance_sums, last_row_weights

__all__ = ["block_sums", "budget", "by_weight", "chosen", "columns_and_diagonals", "divergence"]


def block_sums(x: Array, block: int) -> Array:
    """Sums of x [B, H, Lk] over blocks: [B, H, C]."""
    return np.add.reduceat(x, np.arange(0, x.shape[-1], block), axis=-1)


def budget(weights: Array, gamma: float, min_blocks: int, block: int) -> Array:
    """How many blocks the largest of weights [B, H, Lk] fill that add up to ``gamma``: int [B, H]."""
    blocks = -(-weights.shape[-1] // block)
    if gamma >= 1:
        return np.full(weights.shape[:2], blocks)
    ranked = -np.sort(-weights, axis=-1)
    count = 1 + (np.cumsum(ranked, axis=-1) <= gamma).sum(axis=-1)
    return np.clip(count // block + 1, min(min_blocks, blocks), blocks)


@quiet
def divergence(found: Array, expected: Array) -> Array:
    """Square root of the Jensen-Shannon divergence of distributions [..., C], natural logarithm: [...]."""
    middle = (found + expected) / 2
    of = lambda p: np.where(p > 0, p * np.log(p / middle), 0).sum(axis=-1)  # noqa: E731
    return np.sqrt(np.maximum((of(found) + of(expected)) / 2, 0))


def columns_and_diagonals(
    columns: Array, diagonals: Array, n_columns: Array, n_diagonals: Array, grid: BlockGrid
) -> Array:
    """The best columns, the first among them, for all rows, and the best diagonals, the rows' own among them.

    ``columns`` and ``diagonals`` are sums [B, H, C] of weights by block of keys and by distance in blocks,
    ``n_columns`` and ``n_diagonals`` [B, H] how many to take. A row's own column is that of its first query. Returns
    bool [B, H, R, C].
    """
    own = (np.arange(grid.rows) * grid.block_q + grid.offset) // grid.block_k
    distance = own[:, None] - np.arange(grid.columns)  # [R, C]
    of_columns, of_diagonals = best(columns, n_columns, 1), best(diagonals, n_diagonals, 1)  # [B, H, C]
    return (of_columns[:, :, None] | of_diagonals[..., np.maximum(distance, 0)]) & (distance >= 0)


def by_weight(weights: Array, gamma: float) -> Array:
    """The largest of all weights [B, H, R, C] of a head whose sum is at most ``gamma`` of R: bool [B, H, R, C].

    Of equals that of the lower row, then the lower column; all at a gamma of 1.
    """
    flat = weights.reshape(*weights.shape[:2], -1)
    order = np.argsort(-flat, axis=-1, kind="stable")
    sums = np.cumsum(np.take_along_axis(flat, order, axis=-1), axis=-1)
    taken = np.zeros(flat.shape, bool)
    np.put_along_axis(taken, order, ~(sums > gamma * weights.shape[2]) | (gamma >= 1), axis=-1)
    return taken.reshape(weights.shape)


def chosen(q: Array, k: Array, config: FlexPrefillConfig, grid: BlockGrid, scale: float) -> Chosen:
    """Of q [B, H, Lq, D] and k [B, Hkv, Lk, D]."""
    block, gamma = grid.block_k, config.gamma
    weights = last_row_weights(q, k, block, scale)  # [B, H, 128, Lk]
    rows = weights.shape[2]
    of_keys, of_distances = column_sums(weights) / rows, distance_sums(weights) / rows  # [B, H, Lk]
    columns, diagonals = block_sums(of_keys, block), block_sums(of_distances, block)  # [B, H, C]

    means = block_means(k, block)  # [B, Hkv, C, D]
    last = q[:, :, -block:].mean(axis=2, keepdims=True)  # [B, H, 1, D]
    of_last = softmax(block_scores(last, means, scale), np.ones((1, grid.columns), bool))[:, :, 0]  # [B, H, C]
    is_even = (divergence(of_last, columns) < config.tau) & (gamma < 1)  # [B, H]
    fewest = min(config.min_blocks, grid.columns)
    n_columns, n_diagonals = (
        np.where(is_even, fewest, budget(x, gamma, config.min_blocks, block)) for x in (of_keys, of_distances)
    )
    lines = columns_and_diagonals(columns, diagonals, n_columns, n_diagonals, grid)
    of_means = softmax(block_scores(block_means(q, grid.block_q), means, scale), visible_columns(grid))
    taken = lines | by_weight(of_means, gamma) & is_even[..., None, None]
    return Chosen(taken & listed_columns(grid))
