"""Units of neighbouring keys, ordered by the softmax weight that pooled queries give them (``rank="weight"``);
test_query_rank.py has single queries."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.reference import key_order, s2o
from s2o_cupy.spec import STOP_LAG, UNITS, Geometry
from s2o_cupy.tools.metrics import rel_l2

LENGTH, DISTANCE = 1500, 700


@pytest.fixture
def slash(rng):
    """q, k, v in which every query of head 0 wants one key of its own, DISTANCE before it; head 1's the same."""
    directions = rng.standard_normal((LENGTH + DISTANCE, 64), np.float32)
    directions *= 8 / np.linalg.norm(directions, axis=1, keepdims=True)
    k = np.concatenate([directions[:LENGTH], np.zeros((LENGTH, 64), np.float32)], axis=1)
    wanted = np.zeros((LENGTH, 64), np.float32)
    wanted[DISTANCE:] = directions[: LENGTH - DISTANCE]
    q = np.zeros((1, 2, LENGTH, 128), np.float32)
    q[0, 0, :, :64] = 2.5 * wanted
    q[0, 1, :, 64:] = 0.5
    k[::97, 64:] = 2
    v = rng.standard_normal((1, 1, LENGTH, 128), np.float32)
    return q, k[None, None], v


def weights_of(q, k, geometry, config, scale):
    """N times [B, H, W]: scores as S2O orders by them."""
    pooled, counts = s2o.pooled_queries(q, geometry, config)
    of_units = s2o.unit_keys(k, geometry)
    return [s2o.unit_weights(pooled, counts, of_units, n, geometry, scale) for n in range(geometry.segments)]


def own_mass(q, k, geometry, scale):
    """What pass 1 finds, as rank="query" takes it."""
    return s2o.finish(s2o.pass1(q, k, np.repeat(k[..., :1], q.shape[-1], axis=-1), geometry, scale))[1]


# ---------------------------------------------------------------- the definition, by hand


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_score_is_the_largest_log_weight(rng, is_causal):
    """Written out for one unit and one pooled query at a time; GQA, runs that end early, and a short last segment."""
    q, k = rng.standard_normal((1, 4, 300, 8)), rng.standard_normal((1, 2, 333, 8))
    config = S2OConfig(segment=64, unit=8, pooled_queries=10)
    geometry, scale = Geometry(300, 333, 64, is_causal=is_causal, unit=8), 0.3
    found = weights_of(q, k, geometry, config, scale)
    assert config.run == 7 and geometry.segments == 5
    for n, h in ((0, 0), (1, 3), (3, 1), (4, 2)):
        first, end = geometry.queries(n)
        runs = [range(a, min(a + 7, end)) for a in range(first, end, 7)]
        begin, behind = geometry.dense_keys(n)
        units = [u for u in range(333 // 8) if u * 8 < begin or (not is_causal and u * 8 >= behind)]
        expected = dict.fromkeys(units, -math.inf)
        for run in runs:
            mean = sum(q[0, h, i] for i in run) / len(run)
            weights = {}
            for u in units:
                keys = k[0, h // 2, u * 8 : u * 8 + 8]
                middle = keys.sum(axis=0) / 8
                outlier = max(keys, key=lambda key: ((key - middle) ** 2).sum())
                weights[u] = math.exp(scale * (middle @ mean)), math.exp(scale * (outlier @ mean)) / 8 / 16
            norm = sum(of_mean for of_mean, _ in weights.values())
            for u in units:
                expected[u] = max(expected[u], math.log2(max(weights[u]) / norm))
        assert found[n].shape == (1, 4, len(units)) and found[n].dtype == np.float32
        np.testing.assert_allclose(found[n][0, h], list(expected.values()), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(s2o.ranked_units(n, geometry), units)


def test_units_go_by_their_score_and_stay_together(rng):
    q, k = rng.standard_normal((2, 1, 1, 200, 8)) * 2
    config, geometry = S2OConfig(segment=50, unit=4, rank="weight"), Geometry(200, 200, 50, unit=4)
    order = s2o.key_order(q, k, geometry, config, 1.0).keys
    for n, scores in enumerate(weights_of(q, k, geometry, config, 1.0)):
        begin, _ = geometry.dense_keys(n)
        assert begin == n * 50 // 4 * 4 == len(order[n][0, 0])
        units = order[n][0, 0].reshape(-1, 4)
        np.testing.assert_array_equal(units, units[:, :1] + np.arange(4))
        assert (units[:, 0] % 4 == 0).all()
        in_order = scores[0, 0, units[:, 0] // 4]
        # A bucket of the order is a thousandth of the range, and float16 rounds scores to 2^-11.
        slack = (np.ptp(in_order) / 1000 + abs(in_order).max() * 2**-10) if len(in_order) else 0
        assert (np.diff(in_order) <= slack).all()


def test_unit_1_is_single_keys(rng):
    """By the weight of each key, without a mean."""
    q, k = rng.standard_normal((2, 1, 2, 150, 8))
    config, geometry, scale = S2OConfig(segment=40, unit=1, pooled_queries=5), Geometry(150, 150, 40), 0.4
    np.testing.assert_array_equal(s2o.unit_keys(k, geometry), np.stack([k, k], axis=3))
    order = s2o.key_order(q, k, geometry, config, scale).keys
    for n in range(1, geometry.segments):
        pooled, counts = s2o.pooled_queries(q, geometry, config)
        for h in range(2):
            scores = pooled[0, h, n, counts[n] > 0] @ k[0, h, : n * 40].T * scale * math.log2(math.e)  # [R, C]
            weights = (scores - np.log2(np.exp2(scores).sum(axis=1, keepdims=True))).max(axis=0)
            np.testing.assert_array_equal(order[n][0, h], key_order.order_keys(weights.astype(np.float16)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_unit_that_is_not_finite(rng, value):
    """NaN and +inf come first; beside -inf a unit counts by its first key. The others are ordered as ever."""
    q, k = abs(rng.standard_normal((1, 1, 100, 4))), rng.standard_normal((1, 1, 100, 4))
    config, geometry = S2OConfig(segment=50, unit=8, rank="weight"), Geometry(100, 100, 50, unit=8)
    others = np.setdiff1d(np.arange(geometry.ranked(1)), [3])
    k[0, 0, 27, 2] = value
    scores = weights_of(q, k, geometry, config, 0.5)[1][0, 0]
    assert np.isfinite(scores[others]).all() and np.isfinite(scores[3]) == (value == -np.inf)
    first = s2o.key_order(q, k, geometry, config, 0.5).keys[1][0, 0, 0]
    assert first == 24 or value == -np.inf
    # A sum of weights that is not finite is taken for 1; one of minus infinity adds nothing.
    pooled, counts = s2o.pooled_queries(q, geometry, config)
    mean, outlier = s2o.unit_keys(k, geometry)[0, 0, others].swapaxes(0, 1)  # [W, D] each
    products, alone = (pooled[0, 0, 1, counts[1] > 0] @ x.T * 0.5 * math.log2(math.e) for x in (mean, outlier))
    norms = np.log2(np.exp2(products).sum(axis=1, keepdims=True)) if value == -np.inf else 0
    expected = (np.maximum(products, alone - 7) - norms).max(axis=0)
    np.testing.assert_allclose(scores[others], expected, rtol=1e-5)


# ---------------------------------------------------------------- units at the ends


@given(
    seqlen_q=st.integers(1, 70), more=st.integers(-69, 90), segment=st.integers(1, 50), unit=st.sampled_from(UNITS),
    window=st.sampled_from([0, 1, 9, 200]), is_causal=st.booleans(), seed=st.integers(0, 2**32 - 1),
    rank=st.sampled_from(["query", "weight"]),
)  # fmt: skip
def test_an_order_is_all_candidates_in_units(seqlen_q, more, segment, unit, window, is_causal, seed, rank):
    """Whole units in any order, then what there is of a short one."""
    seqlen_k = max(1, seqlen_q + (abs(more) if is_causal else more))
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((1, 2, seqlen_q, 4)), rng.standard_normal((1, 1, seqlen_k, 4))
    config = S2OConfig(segment=segment, unit=unit, window=window, rank=rank)
    geometry = Geometry(seqlen_q, seqlen_k, segment, window, is_causal, unit)
    for n, order in enumerate(s2o.key_order(q, k, geometry, config, 0.5, own_mass(q, k, geometry, 0.5)).keys):
        assert order.shape == (1, 2, geometry.candidates(n)) and order.dtype == np.int32
        for row in order[0]:
            np.testing.assert_array_equal(np.sort(row), s2o.candidate_positions(n, geometry))
            starts = row[::unit]
            np.testing.assert_array_equal(row, (starts[:, None] + np.arange(unit)).ravel()[: len(row)])
            assert (starts % unit == 0).all() and (starts[: geometry.ranked(n)] + unit <= seqlen_k).all()


def test_a_short_unit_at_the_end_comes_last(rng):
    """However much its keys matter: no score is made of it."""
    q, k = np.ones((1, 1, 96, 4)), rng.standard_normal((1, 1, 203, 4))
    k[0, 0, 192:] = 100
    geometry = Geometry(96, 203, 32, is_causal=False, unit=16)
    for rank in ("query", "weight"):
        config, own = S2OConfig(segment=32, rank=rank), own_mass(q, k, geometry, 1.0)
        first, second, last = s2o.key_order(q, k, geometry, config, 1.0, own).keys
        for order in (first, second):
            assert order[0, 0, -11:].tolist() == list(range(192, 203))
        assert geometry.dense_keys(2) == (160, 203) and last.max() < 160  # whose own keys they are


def test_units_larger_than_the_sequence(device, qkv):
    """Causal: no key is a candidate. Otherwise keys after a query's may be, all in one short unit."""
    config = replace(device.config, segment=32, unit=128, tau=10.0)
    q, k, v = qkv(100)
    device.assert_dense(device.attend(q, k, v, config=config), q, k, v)
    q, k, v = qkv(100, 40)
    o = device.attend(q, k, v, config=config, is_causal=False)
    device.assert_dense(o, q, k, v, is_causal=False)  # one key tile has them all


@pytest.mark.parametrize("unit", UNITS)
def test_tau_0_is_dense_with_every_unit(device, qkv, unit):
    for lengths, is_causal in (((333, 333), True), ((200, 437), True), ((200, 437), False), ((300, 91), False)):
        q, k, v = qkv(*lengths)
        config = replace(device.config, segment=100, unit=unit, window=10, tau=0.0)
        o = device.attend(q, k, v, config=config, is_causal=is_causal)
        device.assert_dense(o, q, k, v, is_causal=is_causal)


# ---------------------------------------------------------------- what it is for


def test_fewer_keys_are_visited(device, slash, config):
    """Where queries disagree far fewer keys are visited for a small error; where they agree the error is as small."""
    q, k, v = slash
    exact = device.exact(q, k, v)
    found = {}
    for rank in ("mean", "weight"):
        o, stats = s2o_attention(
            *(device.array(x) for x in (q, k, v)), config=replace(config, segment=128, tau=0.05, rank=rank),
            return_stats=True,
        )  # fmt: skip
        o = device.host(o)
        found[rank] = [rel_l2(o[:, h], exact[:, h]) for h in (0, 1)], device.host(stats.density_per_head)[0]
    (_, mean_density), (weight, weight_density) = found["mean"], found["weight"]
    # A path that visits a key tile more before it stops visits that share of a segment's keys, 750 on average, more.
    lag = STOP_LAG.get(stats.path, 0) * config.block_n / (LENGTH / 2)
    assert weight_density[0] < (0.6 + lag) * mean_density[0] and weight[0] < 0.02, found


@pytest.mark.parametrize("changes", [{}, {"unit": 64}, {"segment": 100, "unit": 32}, {"unit": 1}], ids=str)
def test_no_key_of_the_future_decides(device, qkv, config, changes):
    """Keys from a segment's first on change neither its order nor that of any before it."""
    q, k, v = qkv(700, heads=2, kv_heads=1)
    config = replace(config, **{"segment": 128, "tau": 0.1} | changes)
    before = device.attend(q, k, v, config=config)
    for first in (300, 512, 513):
        later, values = k.copy(), v.copy()
        later[:, :, first:] = 3 * later[:, :, first:][:, :, ::-1]
        values[:, :, first:] += 1
        after = device.attend(q, later, values, config=config)
        own = first // config.segment * config.segment  # rows of a q tile stop together, and later ones see the change
        np.testing.assert_array_equal(after[:, :, :own], before[:, :, :own])
        assert (after[:, :, first:] != before[:, :, first:]).any()


def test_a_key_that_its_unit_hides_is_found(device, config, rng):
    """As the first key of most language models, which takes much of the weight of most queries and adds little: a row
    that stops before it has seen it is wrong by a multiple. By their mean alone its unit comes late: 0.51."""
    length, head_dim = 2000, 64
    common = rng.standard_normal(head_dim) / math.sqrt(head_dim)
    near = 1.3 * rng.standard_normal((16, head_dim)).repeat(128, axis=0)[:length]
    q, k, v = rng.standard_normal((3, 1, 1, length, head_dim))
    q, k = q + 6 * common + near, k + near
    k[:, :, :16] -= 4 * common
    k[:, :, 5], v[:, :, 5] = 22 * common, 0.1 * v[:, :, 5]
    late = slice(length // 2, None)
    o, exact = device.attend(q, k, v, config=replace(config, segment=128, tau=0.02)), device.exact(q, k, v)
    assert rel_l2(o[:, :, late], exact[:, :, late]) < 0.05
