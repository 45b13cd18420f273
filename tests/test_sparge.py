"""SpargeAttn on the CPU: which blocks its judge and its rules choose, and tokens of a grid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_methods import columns_of, draw

from s2o_cupy import S2OConfig
from s2o_cupy.methods import SpargeConfig, select, sparse_attention
from s2o_cupy.methods.hilbert import hilbert_order
from s2o_cupy.reference.methods import blocks, sparge


def test_similarity_is_the_mean_cosine_of_all_pairs(rng):
    x = rng.standard_normal((1, 1, 150, 8)) + 0.5
    unit = x[0, 0] / np.linalg.norm(x[0, 0], axis=1, keepdims=True)
    expected = [(x @ x.T).mean() for x in (unit[:64], unit[64:128], unit[128:])]
    np.testing.assert_allclose(blocks.similarity(x, 64)[0, 0], expected, rtol=1e-12)
    equal = np.broadcast_to(rng.standard_normal(8) * 1e200, (1, 1, 64, 8))
    np.testing.assert_allclose(blocks.similarity(equal, 64), 1)
    assert blocks.similarity(np.zeros((1, 1, 64, 8)), 64) == 0


def test_blocks_that_are_not_alike_are_whole(rng):
    _, k, _ = draw(rng, 1000)
    q = 2 * rng.standard_normal((1, 4, 8, 16)).repeat(128, axis=2)[:, :, :1000] + rng.standard_normal((1, 4, 1000, 16))
    grid = SpargeConfig(tau=0.5, theta=0).grid(_problem(q, k))
    theta = float(np.median(np.append(blocks.similarity(k, 64), blocks.similarity(q, 128))))
    config = SpargeConfig(tau=0.5, theta=theta)
    rows, fixed = sparge.unlike(q, k, config, grid)
    assert rows.any() and not rows.all() and fixed.any() and not fixed.all()
    columns, listed = columns_of(select(q, k, config)), blocks.listed_columns(grid)
    np.testing.assert_array_equal(columns[rows], np.broadcast_to(listed, columns.shape)[rows])
    assert (columns | ~listed)[np.broadcast_to(fixed[:, :, None], columns.shape)].all()
    none = sparge.unlike(q, k, SpargeConfig(tau=0.5, theta=-1e-9), grid)
    assert not none[0].any() and not none[1].any()


def test_thresholds_of_each_head(rng):
    q, k, _ = draw(rng, 900)
    tau, theta = (0.3, 0.5, 0.9, 1.0), (-1.0, 0.3, 0.5, 2.0)
    found = columns_of(select(q, k, SpargeConfig(tau=tau, theta=theta)))
    for h in range(4):
        alone = columns_of(select(q, k, SpargeConfig(tau=tau[h], theta=theta[h])))
        np.testing.assert_array_equal(found[:, h], alone[:, h])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("topk", [0.01, 0.1, 0.5, (0.05, 0.2, 0.99, 1.0)], ids=str)
def test_topk_takes_as_many_blocks_in_each_row(rng, topk, is_causal):
    """Of those that a row sees the highest scores, own blocks among them, and all where it sees no more."""
    q, k, _ = draw(rng, 1000)
    config = SpargeConfig(topk=topk, theta=-1)
    grid = config.grid(replace(_problem(q, k), is_causal=is_causal))
    found = columns_of(select(q, k, config, is_causal=is_causal))
    means = [blocks.block_means(x, n) for x, n in ((q, 128), (k, 64))]
    scores = blocks.block_scores(*means, 0.25)
    visible, listed = blocks.visible_columns(grid), blocks.listed_columns(grid)
    for h, row in np.ndindex(4, grid.rows):
        most = max(1, int(np.float64(topk if isinstance(topk, float) else topk[h]) * 16))
        best = np.argsort(np.where(visible[row], -scores[0, h, row], np.inf))[:most]
        expected = np.isin(np.arange(16), best) & listed[row]
        np.testing.assert_array_equal(found[0, h, row], expected)


def test_topk_leaves_out_what_weighs_nothing(rng):
    """Beside a score that is larger by more than 126 in log2 units others have no order."""
    w = np.array([[1.0, 2.0**-125, 2.0**-127, 0.0, 0.5, 2.0**-126, 0.5, 0.25]])
    np.testing.assert_array_equal(np.flatnonzero(blocks.largest(w, 1.0)), [0, 1, 4, 5, 6, 7])
    np.testing.assert_array_equal(np.flatnonzero(blocks.largest(w, 0.3)), [0, 4])  # the first of equal ones
    assert blocks.largest(np.array([[0.5, np.nan]]), 0.5).all() and not blocks.largest(np.zeros((1, 2)), 0.5).any()


def _problem(q, k):
    from s2o_cupy.problem import validate

    return validate([q.shape, k.shape, k.shape], [str(q.dtype)] * 3, config=S2OConfig(), backend="numpy")


@pytest.mark.parametrize("shape", [(8, 8, 8), (4, 16, 16), (1, 8, 8), (3, 5, 7), (1, 1, 9), (1, 1, 1)], ids=str)
def test_a_hilbert_curve_visits_each_place_once(shape):
    order = hilbert_order(shape)
    np.testing.assert_array_equal(np.sort(order), np.arange(np.prod(shape)))
    steps = np.abs(np.diff(np.array(np.unravel_index(order, shape)), axis=1)).sum(axis=0)
    if len({n for n in shape if n > 1}) == 1 and shape != (1, 1, 9):
        assert (steps == 1).all()
    if shape == (4, 16, 16):
        assert steps.mean() == pytest.approx(1.0156, abs=1e-4)


def test_tokens_of_a_grid_are_attended_to_in_place(rng):
    q, k, v = draw(rng, 650, batch=2)
    config = SpargeConfig(tau=0.6, theta=0.1, permutation=(3, 10, 20))
    order = config.token_order(650)
    np.testing.assert_array_equal(order[:50], np.arange(50))
    o, lse = sparse_attention(q, k, v, config=config, is_causal=False, return_lse=True)
    moved = [x[:, :, order] for x in (q, k, v)]
    plain = replace(config, permutation=None)
    expected, expected_lse = sparse_attention(*moved, config=plain, is_causal=False, return_lse=True)
    np.testing.assert_allclose(o[:, :, order], expected, atol=1e-12)
    np.testing.assert_allclose(lse[:, :, order], expected_lse, atol=1e-6)
    schedule = select(q, k, config, is_causal=False)
    schedule.check()
    schedule.q_order[0, 1, 7] = 3
    with pytest.raises(ValueError, match=r"q_order\[0, 1\] holds 3 out of range or twice"):
        schedule.check()
