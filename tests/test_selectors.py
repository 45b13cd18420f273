"""XAttention, FlexPrefill and vertical-slash on the CPU: their stages, and what they must equal."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_methods import columns_of, draw, trace  # noqa: F401

from s2o_cupy.methods import FlexPrefillConfig, VerticalSlashConfig, XAttentionConfig, select, sparse_attention
from s2o_cupy.methods.grid import BlockGrid
from s2o_cupy.reference import dense_attention
from s2o_cupy.reference.methods import flex_prefill, last_rows, vertical_slash, xattention
from s2o_cupy.tools import metrics


def causal_weights(q, k, scale):
    """Softmax of one head, [Lq, Lk]."""
    s = np.where(np.tri(len(q), len(k), len(k) - len(q), dtype=bool), q @ k.T * scale, -np.inf)
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def grid_of(seqlen_q, seqlen_k, **rules):
    return BlockGrid(seqlen_q, seqlen_k, 128, 128, 128, True, 128, **rules)


# ---------------------------------------------------------------- numbers of the built-in trace


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("config", "density", "rel_l2", "rel_l1"),
    [
        (XAttentionConfig(), 0.550, 0.0974, 0.0302),
        (XAttentionConfig(stride=16), 0.554, 0.0821, 0.0264),
        (FlexPrefillConfig(), 0.378, 0.1532, 0.0641),
        (FlexPrefillConfig(gamma=0.95), 0.517, 0.1134, 0.0413),
        (VerticalSlashConfig(verticals=30, slashes=800, block_m=64), 0.969, 0.0095, 0.0008),
    ],
    ids=str,
)
def test_the_trace(trace, config, density, rel_l2, rel_l1):  # noqa: F811
    q, k, v, dense = trace
    o, stats = sparse_attention(q, k, v, config=config, return_stats=True)
    assert stats.density == pytest.approx(density, abs=5e-4)
    assert metrics.rel_l2(o, dense) == pytest.approx(rel_l2, abs=6e-5)
    assert metrics.rel_l1(o, dense) == pytest.approx(rel_l1, abs=6e-5)


# ---------------------------------------------------------------- XAttention


@pytest.mark.parametrize("lengths", [(300, 300), (200, 500)], ids=str)
def test_cells_of_one_row_have_the_exact_mass_of_attention(rng, lengths):
    q, k, _ = draw(rng, *lengths)
    grid = grid_of(*lengths)
    mass = xattention.antidiagonal_mass(q, k, grid, 1, 0.3)
    for h in range(4):
        p = causal_weights(q[0, h], k[0, h // 2], 0.3)
        by_column = np.add.reduceat(p, np.arange(0, lengths[1], 128), axis=1)
        expected = np.add.reduceat(by_column, np.arange(0, lengths[0], 128), axis=0)
        np.testing.assert_allclose(mass[0, h], expected, rtol=1e-12, atol=1e-14)


def test_each_query_of_a_cell_meets_one_key(rng):
    q, k = rng.standard_normal((2, 20, 4))
    found = xattention.antidiagonal_scores(q, k, 8, 0.5)
    assert found.shape == (3, 3)
    pad = np.zeros((4, 4))
    q, k = np.concatenate([q, pad]), np.concatenate([k, pad])
    for x, y in np.ndindex(3, 3):
        expected = sum(q[8 * x + 7 - r] @ k[8 * y + r] for r in range(8)) * 0.5 / 8
        assert found[x, y] == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("stride", [8, 16])
def test_mass_adds_up_to_the_cells_of_a_row(rng, stride):
    q, k, _ = draw(rng, 500, 700)
    for own in (True, False):
        grid = grid_of(500, 700, own=own)
        mass = xattention.antidiagonal_mass(q, k, grid, stride, 0.3)
        cells = np.array([128, 128, 128, 116]) // stride + np.array([0, 0, 0, 116 % stride > 0])
        np.testing.assert_allclose(mass.sum(axis=-1), np.broadcast_to(cells, (1, 4, 4)), rtol=1e-12)
        if not own:  # nothing of the dense part
            listed = np.arange(6) < np.array([1, 2, 3, 4])[:, None]
            assert (mass[0, :, ~listed] == 0).all() and (mass[0, :, listed] > 0).all()


def test_the_cumulative_rule(rng):
    grid = grid_of(1024, 1024)
    last = lambda mass, threshold: np.flatnonzero(  # noqa: E731
        xattention.choose(np.array(mass, float).reshape(1, 1, 1, 8).repeat(8, 2), XAttentionConfig(threshold=threshold),
                          grid)[0, 0, 7]
    ).tolist()  # fmt: skip
    # The first column and the own (7, not listed) hold 0.4 between them.
    mass = [0.1, 0.05, 0.2, 0.05, 0.2, 0.05, 0.05, 0.3]
    assert last(mass, 0.3) == last(mass, 0.4) == [0]
    assert last(mass, 0.5) == last(mass, 0.6) == [0, 2]  # of equals the lower
    assert last(mass, 0.7) == [0, 2, 4]
    assert last(mass, 0.82) == [0, 1, 2, 4]
    assert last(mass, 0.93) == [0, 1, 2, 3, 4, 5]
    assert last(mass, 1) == list(range(7))
    assert last([np.nan] * 8, 0.1) == list(range(7))
    assert last([0] * 8, 0.9) == [0]


def test_the_mass_of_what_xattention_chooses_reaches_the_threshold(rng):
    q, k, _ = draw(rng, 900, 1200)
    config, grid = XAttentionConfig(threshold=0.8, stride=16), grid_of(900, 1200)
    chosen = columns_of(select(q, k, config, scale=0.9))
    mass = xattention.antidiagonal_mass(q, k, grid, 16, 0.9)
    assert chosen[..., 0].all()
    for row in range(grid.rows):
        held = np.arange(grid.columns) >= grid.listed(row)  # by the dense part
        of_row = mass[:, :, row].sum(axis=-1)
        taken = np.where(chosen[:, :, row] | held, mass[:, :, row], 0)
        assert (taken.sum(axis=-1) >= 0.8 * of_row * (1 - 1e-12)).all()
        least = np.where(chosen[:, :, row] & (np.arange(grid.columns) > 0), taken, np.inf).min(axis=-1)
        one_less = taken.sum(axis=-1) - least
        assert (np.isinf(least) | (one_less < 0.8 * of_row)).all()  # no more than that


# ---------------------------------------------------------------- FlexPrefill


def test_divergence():
    x = np.array([0.2, 0.3, 0.5, 0])
    assert flex_prefill.divergence(x, x) == 0
    assert flex_prefill.divergence(np.array([1.0, 0]), np.array([0, 1.0])) == pytest.approx(math.sqrt(math.log(2)))
    m = (x + 0.25) / 2
    kl = [sum(a * math.log(a / b) for a, b in zip(p, m, strict=True) if a) for p in (x, [0.25] * 4)]
    assert flex_prefill.divergence(x, np.full(4, 0.25)) == pytest.approx(math.sqrt(sum(kl) / 2))


def test_budget():
    weights = np.zeros((1, 1, 1024))
    weights[0, 0, 500:900] = 1 / 400
    assert flex_prefill.budget(weights, 0.5, 1, 128) == (1 + 200) // 128 + 1
    assert flex_prefill.budget(weights, 0.9, 1, 128) == (1 + 360) // 128 + 1
    assert flex_prefill.budget(weights, 0.5, 4, 128) == 4
    assert flex_prefill.budget(weights, 0.5, 40, 128) == 8
    assert flex_prefill.budget(weights, 1, 1, 128) == 8


def test_columns_and_diagonals_of_three_blocks():
    columns, diagonals = np.array([[[0.1, 0.2, 0.7]]]), np.array([[[0.5, 0.1, 0.4]]])
    of = lambda a, b: flex_prefill.columns_and_diagonals(  # noqa: E731
        columns, diagonals, np.array([[a]]), np.array([[b]]), grid_of(384, 384)
    )[0, 0].astype(int).tolist()  # fmt: skip
    assert of(1, 1) == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert of(1, 2) == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]  # distance 2 meets column 0
    assert of(2, 1) == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]  # column 2 is the last one's own
    assert of(3, 1) == of(1, 3) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_by_weight_leaves_out_what_crosses():
    weights = np.array([[0.6, 0.4, 0], [0.5, 0.3, 0.2]])[None, None]
    of = lambda gamma: flex_prefill.by_weight(weights, gamma)[0, 0].astype(int).tolist()  # noqa: E731
    assert of(0.29) == [[0, 0, 0], [0, 0, 0]]
    assert of(0.56) == [[1, 0, 0], [1, 0, 0]]
    assert of(0.91) == [[1, 1, 0], [1, 1, 0]]
    assert of(1) == [[1, 1, 1], [1, 1, 1]]


def test_even_attention_is_chosen_by_means(rng):
    """Keys alike inside blocks: their means say all, so that single blocks are chosen and few lines."""
    k = np.repeat(rng.standard_normal((1, 2, 8, 16)), 128, axis=2) * 2
    q = np.repeat(rng.standard_normal((1, 4, 8, 16)), 128, axis=2)
    config = FlexPrefillConfig(gamma=0.8, min_blocks=1)
    with_means, without = (
        columns_of(select(q, k, x)) for x in (config, FlexPrefillConfig(gamma=0.8, min_blocks=1, tau=0))
    )
    by_means = (with_means != without).any(axis=(0, 2, 3))  # heads
    assert by_means.any()
    scores = q[:, :, ::128] @ np.repeat(k[:, :, ::128], 2, axis=1).swapaxes(-1, -2) / 4  # [1, 4, 8, 8]
    scores = np.where(np.tri(8, dtype=bool), scores, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    by_weight = flex_prefill.by_weight(weights, 0.8) & np.tri(8, 8, -1, dtype=bool)
    assert with_means[:, by_means][by_weight[:, by_means]].all()


# ---------------------------------------------------------------- the last queries, and vertical-slash


def test_sums_of_the_last_queries(rng):
    q, k, _ = draw(rng, 90, 130)
    weights = last_rows.last_row_weights(q, k, 64, 0.3)
    expected = causal_weights(q[0, 3], k[0, 1], 0.3)[-64:]
    np.testing.assert_allclose(weights[0, 3], expected, atol=1e-15)
    np.testing.assert_allclose(last_rows.column_sums(weights)[0, 3], expected.sum(axis=0))
    by_distance = np.zeros(130)
    for r, j in np.ndindex(64, 130):
        if j <= 66 + r:
            by_distance[66 + r - j] += expected[r, j]
    np.testing.assert_allclose(last_rows.distance_sums(weights)[0, 3], by_distance, atol=1e-15)
    assert last_rows.last_row_weights(q[:, :, :5], k, 64, 0.3).shape == (1, 4, 5, 130)


def test_best():
    x = np.array([[1.0, 5, 5, 3, 6, 2]])
    of = lambda count, forced: np.flatnonzero(last_rows.best(x, count, forced)).tolist()  # noqa: E731
    assert of(1, 0) == [4] and of(2, 0) == [1, 4] and of(2, 1) == [0, 4]
    assert of(np.array([3]), 1) == [0, 1, 4] and of(1, 3) == [0, 1, 2] and of(9, 0) == list(range(6))
    x[0, 3] = np.nan
    assert of(1, 0) == list(range(6))


def test_keys_that_lines_cross():
    columns, distances = np.zeros((2, 1, 200), bool)
    columns[0, 7] = distances[0, 100] = distances[0, 30] = True
    found = vertical_slash.crossed_keys(columns, distances, 128, 20)[0]
    assert np.flatnonzero(found).tolist() == [7, *range(28, 48), *range(98, 118)]


def test_a_band_and_stripes_are_found(rng):
    """Where each query sees key p - 200 best, the distance is chosen; where all see one key, the column."""
    band = rng.standard_normal((1, 1, 1000, 64)) * 2
    config = VerticalSlashConfig(verticals=30, slashes=31)
    keys = columns_of(select(np.concatenate([np.zeros((1, 1, 200, 64)), band[:, :, :-200]], axis=2), band, config))
    assert keys[0, 0, 5, 640 - 200 : 768 - 200].all() and not keys[0, 0, 5, 31 : 640 - 200].any()
    stripes = rng.standard_normal((1, 1, 1000, 64)) * 0.1
    stripes[0, 0, [77, 400]] = 1.0
    q = np.ones((1, 1, 1000, 64))
    keys = columns_of(select(q, stripes, VerticalSlashConfig(verticals=32, slashes=30)))
    assert np.flatnonzero(keys[0, 0, 5]).tolist() == [*range(30), 77, 400, *range(611, 640)]


# ---------------------------------------------------------------- all of them


DENSE = (XAttentionConfig(threshold=1), FlexPrefillConfig(gamma=1), VerticalSlashConfig(slashes=2000))


@pytest.mark.parametrize("config", DENSE, ids=str)
@pytest.mark.parametrize("lengths", [(700, 700), (300, 900)], ids=str)
def test_everything_chosen_is_dense_attention(rng, config, lengths):
    q, k, v = draw(rng, *lengths)
    o, stats = sparse_attention(q, k, v, config=config, return_stats=True)
    assert stats.density == 1.0
    np.testing.assert_allclose(o, dense_attention(q, k, v)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [XAttentionConfig(), FlexPrefillConfig(), VerticalSlashConfig()], ids=str)
def test_what_is_refused(rng, config):
    q, k, _ = draw(rng, 300)
    name = type(config).__name__
    with pytest.raises(ValueError, match=f"{name}: is_causal is False; accepted: True, as the method"):
        select(q, k, config, is_causal=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: XAttentionConfig(stride=4), "XAttentionConfig: stride is 4; accepted: 8 or 16"),
        (lambda: XAttentionConfig(threshold=0), "XAttentionConfig: threshold is 0; accepted: a number above 0"),
        (lambda: FlexPrefillConfig(gamma=1.5), "FlexPrefillConfig: gamma is 1.5; accepted: a number above 0, up to 1"),
        (lambda: FlexPrefillConfig(tau=-1), "FlexPrefillConfig: tau is -1; accepted: a number from 0 on"),
        (lambda: FlexPrefillConfig(min_blocks=0), "FlexPrefillConfig: min_blocks is 0; accepted: an integer >= 1"),
        (lambda: VerticalSlashConfig(verticals=10), "VerticalSlashConfig: verticals is 10; accepted: an integer >= 30"),
        (lambda: VerticalSlashConfig(block_m=32), "VerticalSlashConfig: block_m is 32; accepted: 64 or 128"),
    ],
)
def test_configs(make, message):
    with pytest.raises(ValueError, match=message):
        make()
