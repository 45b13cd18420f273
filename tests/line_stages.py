"""FlexPrefill and vertical-slash on the GPU, each stage against the reference given what the GPU made before it:
what `method_stages` asks of these two."""

from __future__ import annotations

from typing import Any

import numpy as np

from s2o_cupy.methods.flex_prefill import FlexPrefillConfig
from s2o_cupy.methods.vertical_slash import FORCED, ROWS, VerticalSlashConfig
from s2o_cupy.reference.methods import blocks, flex_prefill, last_rows, vertical_slash
from s2o_cupy.spec import LOG2E

SUMS = 2.0**-14  # how far sums of weights may be off, as a share: exp2 of the GPU, and some 100,000 terms
FLOAT = 2.0**-24
NEAR_TAU = 1e-3  # of a divergence, whose terms cancel


def last_sums(found: Any, q: Any, k: Any, config: Any) -> bool:
    """`sums`: by key, and by distance."""
    p = found.problem
    rows = ROWS if isinstance(config, VerticalSlashConfig) else 128
    weights = last_rows.last_row_weights(q, k, rows, p.scale)
    exact = np.stack([last_rows.column_sums(weights), last_rows.distance_sums(weights)], axis=2)
    mine = found.arrays["sums"].reshape(exact.shape).astype(np.float64)
    most = np.abs(q).sum(axis=-1).max() * np.abs(k).max() * abs(p.scale)  # of a score
    allowed = exact * (np.expm1(2 * most * p.head_dim * FLOAT * 4) + SUMS) + 1e-30
    return bool(((np.abs(mine - exact) <= allowed) | (np.isnan(mine) & np.isnan(exact))).all())


def crossed(found: Any, config: VerticalSlashConfig) -> Any:
    """Columns that must be chosen, by the GPU's sums."""
    p, grid = found.problem, found.grid
    sums = found.arrays["sums"].reshape(p.batch, p.heads, 2, p.seqlen_k)
    columns = last_rows.best(sums[:, :, 0], config.verticals, FORCED)
    distances = last_rows.best(sums[:, :, 1], config.slashes, FORCED)
    return vertical_slash.listed_keys(columns, distances, grid)


def lines(found: Any, q: Any, k_means: Any, config: FlexPrefillConfig) -> bool:
    """`blocks`, `by_means` and `lines`, by the GPU's sums and mean keys [B, Hkv, C, D]."""
    p, grid = found.problem, found.grid
    rows = min(128, p.seqlen_q)
    of_heads = (p.batch, p.heads)
    sums = found.arrays["sums"].reshape(*of_heads, 2, p.seqlen_k).astype(np.float64) / rows
    mine = found.arrays["blocks"].reshape(*of_heads, 3, grid.columns).astype(np.float64)
    if not np.allclose(mine[:, :, :2], flex_prefill.block_sums(sums, 128), rtol=SUMS, atol=1e-30, equal_nan=True):
        return False
    last = q[:, :, -128:].mean(axis=2, keepdims=True)
    of_last = blocks.softmax(blocks.block_scores(last, k_means, p.scale), np.ones((1, grid.columns), bool))[:, :, 0]
    apart = flex_prefill.divergence(of_last, mine[:, :, 0])
    by_means = found.arrays["by_means"].reshape(of_heads).astype(bool)
    expected = (apart < config.tau) & (config.gamma < 1)
    if ((by_means != expected) & ~(np.abs(apart - config.tau) < NEAR_TAU)).any():
        return False
    chosen = found.arrays["lines"].reshape(*of_heads, 2, grid.columns).astype(bool)
    for line in range(2):
        least, most = (
            flex_prefill.budget(sums[:, :, line], config.gamma * (1 + e) if config.gamma < 1 else 1.0,
                                config.min_blocks, 128) for e in (-SUMS, SUMS)
        )  # fmt: skip
        fewest = min(config.min_blocks, grid.columns)
        least, most = (np.where(by_means, fewest, x) for x in (least, most))
        count = chosen[:, :, line].sum(axis=-1)
        if (count < least).any() or (count > most).any():
            return False
        if not np.array_equal(chosen[:, :, line], last_rows.best(mine[:, :, line].astype(np.float32), count, 1)):
            return False
    return True


def flex_choices(found: Any, config: FlexPrefillConfig) -> tuple[Any, Any]:
    """Columns that must be chosen, and those that may be, by the GPU's lines and scores."""
    p, grid = found.problem, found.grid
    of_heads = (p.batch, p.heads)
    chosen = found.arrays["lines"].reshape(*of_heads, 2, grid.columns).astype(bool)
    distance = np.array([grid.listed(row) for row in range(grid.rows)])[:, None] - np.arange(grid.columns)
    of_lines = chosen[:, :, 0, None] | chosen[:, :, 1][..., np.maximum(distance, 0)]
    by_means = found.arrays["by_means"].reshape(of_heads).astype(bool)[..., None, None]
    scores = found.arrays["scores"][..., : grid.columns].astype(np.float64).reshape(*of_heads, grid.rows, -1) / LOG2E
    visible = blocks.visible_columns(grid)
    w = np.where(visible, blocks.softmax(scores, visible), 0)
    low, high = (flex_prefill.by_weight(w, min(config.gamma * (1 + e), 1 - 1e-12)) for e in (-SUMS, SUMS))
    least = lambda taken: np.where(taken, w, np.inf).min(axis=(-2, -1), keepdims=True)  # noqa: E731
    sure = low & (w > least(low) * (1 + SUMS))
    may = high | (w >= least(high) * (1 - SUMS))
    listed = blocks.listed_columns(grid)
    return (of_lines | sure & by_means) & listed, (of_lines | may & by_means) & listed
