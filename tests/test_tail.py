"""Candidates that a q tile leaves unvisited: what stands for them with tail="first_order", in the reference."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2o_cupy.reference import dense_attention, s2o, tail
from s2o_cupy.spec import (
    MOMENT_KEYS,
    TAIL_DOUBT,
    TAIL_FEW,
    TAIL_LIGHT,
    TAIL_REACH,
    TAIL_ROWS,
    TAIL_SAMPLES,
    TAIL_TRIFLE,
    Geometry,
    S2OConfig,
    moment_group,
    moment_keys,
    moment_place,
    moment_samples,
    tail_samples,
)


def test_without_a_tail_unvisited_keys_count_for_nothing(rng):
    q, k, v = (rng.standard_normal((1, 1, 256, 8)) for _ in range(3))
    config = S2OConfig(segment=64, tau=1e9, block_m=64, block_n=32, unit=8, tail="none", rank="weight")
    k_order = s2o.key_order(q, k, Geometry(256, 256, 64, unit=8), config, 8**-0.5).keys
    changed = v.copy()
    changed[0, 0, k_order[3][0, 0, 32:]] = 100  # of the last segment's candidates all but the one tile it visits
    (before, after), (_, with_tail) = (
        [s2o.s2o(q, k, x, replace(config, tail=tail)).o[0, 0, 192:] for x in (v, changed)]
        for tail in ("none", "first_order")
    )
    np.testing.assert_array_equal(after, before)
    assert (with_tail > before + 1).all()


def test_a_tail_has_nothing_of_the_future(rng):
    """Moments are those of candidates, none of which is in the segment: a later key changes no bit of a row, but of
    those whose samples are believed together with a later row's."""
    q, k, v = (rng.standard_normal((1, 1, 256, 8)) for _ in range(3))
    config = S2OConfig(segment=64, tau=1e9, block_m=64, block_n=32, unit=8, tail="first_order", rank="weight")
    o = s2o.s2o(q, k, v, config).o
    later = 192 + TAIL_ROWS  # from within the last segment on, whose rows have the tail of 192 candidates
    k[:, :, later:] += 1
    v[:, :, later:] += 1
    changed = s2o.s2o(q, k, v, config).o
    np.testing.assert_array_equal(changed[:, :, :later], o[:, :, :later])
    assert (changed[:, :, later:] != o[:, :, later:]).any(axis=-1).all()


def test_equal_keys_need_no_visit(rng):
    """Where all candidates are alike, a sample of them stands for them but for what it is doubted."""
    q, k, v = (rng.standard_normal((1, 2, 300, 8)) for _ in range(3))
    k[:] = k[:, :, :1]
    v[:] = v[:, :, :1]
    config = S2OConfig(segment=100, tau=1e9, block_m=50, block_n=16, unit=4, tail="first_order", rank="weight")
    found, (o, lse) = s2o.s2o(q, k, v, config), dense_attention(q, k, v, is_causal=True)
    assert (found.visited[:, :, 1:] == 1).all()
    # A handful of operations in float64 on numbers of the result's size.
    np.testing.assert_allclose(found.o, o, rtol=1e-12)
    # Weights go with the share that a sample stands for, (2 i + 1) / N^2, so about 3 / 4 of N samples carry them.
    samples = tail_samples(300)
    share = (2 * np.arange(samples) + 1) / samples**2
    carrying = 1 / (share**2).sum()
    assert carrying == pytest.approx(0.75 * samples, rel=0.01)
    for n in (1, 2):
        rest, dense = 100 * n - 16, np.arange(100) + 1
        counted = np.log(16 + dense + rest * carrying / (carrying + TAIL_DOUBT)) - np.log(100 * n + dense)
        rows = slice(100 * n, 100 * n + 100)
        np.testing.assert_allclose(found.lse[0, 0, rows] - lse[0, 0, rows], counted, rtol=1e-9)


@given(st.integers(1, 100_000))
def test_places_of_samples(left):
    """All are there, they ascend, and none is further from those beside it than what both stand for."""
    at = tail.sample_places(left)
    samples = len(at)
    assert samples == (TAIL_SAMPLES if left >= TAIL_FEW else TAIL_SAMPLES // 2)
    assert at[0] <= left // samples**2 and at[-1] < left and (np.diff(at) >= 0).all()
    shares = (2 * np.arange(samples) + 1) / samples**2 * left
    assert shares.sum() == pytest.approx(left)
    assert (np.diff(at) <= shares[1:] + 1).all()


@given(st.integers(0, 1 << 30))
def test_groups_of_leading_keys(keys):
    group = moment_group(keys)
    assert moment_keys(group) <= keys < moment_keys(group + 1)
    assert keys < 16 or moment_keys(group) > keys * 8 / 9  # no more than a ninth is left out
    assert moment_group(moment_keys(group)) == group


def test_moments_are_those_of_all_keys_while_there_are_few(rng):
    k, v = rng.standard_normal((2, 300, 8))
    keys = moment_keys(moment_group(300))
    found = tail.key_moments(k, v, moment_group(300))
    np.testing.assert_allclose(found.mean_value, v[:keys].mean(axis=0))
    both = np.cov(v[:keys].T, k[:keys].T, bias=True)
    np.testing.assert_allclose(found.covariance, both[:8, 8:], atol=1e-14)


@given(st.integers(1, 300))
def test_samples_stand_for_all_keys_of_a_group(group):
    """Each for a share of neighbours, the first 2 * MOMENT_KEYS for themselves; a larger group has those of a smaller
    one, and of any eighth of an octave no more than an eighth of MOMENT_KEYS."""
    keys = moment_keys(group)
    samples = moment_samples(keys)
    for sample in {samples - 1, samples // 2, samples // 3}:
        at, count = moment_place(sample)
        before = sample if count == 1 else count * (MOMENT_KEYS + sample % MOMENT_KEYS)  # keys of the shares before
        assert before <= at < before + count <= keys and count & (count - 1) == 0
        assert count == 1 or sample >= 2 * MOMENT_KEYS
    assert moment_place(samples)[0] >= keys
    assert samples - moment_samples(moment_keys(group - 1)) <= MOMENT_KEYS // 8


def test_moments_of_many_keys_are_of_a_sample(rng):
    length = 24 * MOMENT_KEYS
    k, v = np.full((2, length, 4), np.nan)
    at, count = np.array([moment_place(i) for i in range(moment_samples(length))]).T
    k[at], v[at] = rng.standard_normal((2, len(at), 4))
    found = tail.key_moments(k, v, moment_group(length))
    assert count.sum() == length and len(at) < length / 4
    np.testing.assert_allclose(found.mean_value, np.average(v[at], axis=0, weights=count))
    both = np.cov(v[at].T, k[at].T, bias=True, fweights=count)
    np.testing.assert_allclose(found.covariance, both[:4, 4:], atol=1e-14)


@pytest.mark.parametrize("period", [2, 3, 16, 64, 100, 128, 1000])
def test_no_period_of_the_keys_meets_the_samples(period):
    """Keys of which one in so many is unlike the others have their share of the samples, to the noise of n drawn at
    random, of which a share p is hardly ever off by more than four of sqrt(p / n)."""
    length = 1 << 17
    k = v = (np.arange(length) % period == 0).astype(np.float64)[:, None]
    count = np.array([moment_place(i)[1] for i in range(moment_samples(length))])
    alike = count.sum() ** 2 / (count**2).sum()  # so many equal ones say as much
    mean = tail.key_moments(k, v, moment_group(length)).mean_value[0]
    assert mean == pytest.approx(v.mean(), abs=4 * np.sqrt(v.mean() / alike))


def test_values_that_go_with_scores_are_found(rng):
    """Scores of a normal distribution and values linear in keys: the regression is exact but for sampling."""
    keys, queries = rng.standard_normal((60_000, 8)), 0.3 * rng.standard_normal((40, 8))
    values = keys @ rng.standard_normal((8, 8)) + 1
    s = queries @ keys.T
    weights = np.exp(s)
    exact = weights @ values / weights.sum(axis=1, keepdims=True)
    state = np.zeros(40), np.full(40, 1e-9), np.zeros((40, 8))
    moments = tail.key_moments(keys, values, moment_group(60_000))
    m, mass, acc = tail.add_tail(queries, state, np.arange(60_000), keys, values, moments, 1.0, 0.0)
    error = lambda x: np.linalg.norm(x - exact) / np.linalg.norm(exact)  # noqa: E731
    assert error(acc / mass[:, None]) < 0.3 * error(values.mean(axis=0))
    # The mass of 60,000 keys from 256, some of which carry most of it.
    assert np.median(np.abs(np.log(mass / weights.sum(axis=1)))) < 0.4


def test_the_tilt_stays_between_no_and_a_normal_distribution_s(rng):
    t = rng.standard_normal((3, TAIL_SAMPLES)) * [[0.0], [0.1], [30.0]]
    tilt = tail.tail_weights(t, np.zeros(3), 1000, 0.0).tilt
    assert tilt[0] == 0 and 0.9 <= tilt[1] <= 1 and 0 < tilt[2] < 0.2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("bits", "counts"), [(40, True), (99, True), (TAIL_REACH + 1, False), (900, False)])
def test_samples_that_outweigh_all_that_was_found(dtype, bits, counts):
    """Count for as much as they weigh, whatever the precision, up to 2 ** TAIL_REACH times; beyond for nothing."""
    t = np.full((1, TAIL_SAMPLES), bits * np.log(2), dtype)
    mass = tail.tail_weights(t, np.zeros(1, dtype), 1024, 0.0).mass
    carrying = 1 / np.square((2 * np.arange(TAIL_SAMPLES) + 1) / TAIL_SAMPLES**2).sum()
    if counts:  # exp of a float32 score of so many bits is off by as much as the score, bits * 2^-24
        assert np.log2(mass[0]) == pytest.approx(bits + 10 + np.log2(carrying / (carrying + TAIL_DOUBT)), abs=1e-4)
    else:
        assert mass[0] == 0


@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_adds_nothing(rng, place, value):
    q, k, v = rng.standard_normal((3, 200, 4))
    state = np.zeros(200), np.ones(200), rng.standard_normal((200, 4))
    {"k": k, "v": v}[place][:] = value
    moments, before = tail.key_moments(k, v, moment_group(200)), [x.copy() for x in state]
    with np.errstate(invalid="ignore", over="ignore"):
        found = tail.add_tail(q, state, np.arange(200), k, v, moments, 0.5, 0.0)
    for x, y in zip(found, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_products_beyond_the_dtype_add_nothing(rng):
    """Keys, values and their means are finite, and so are weights; the covariance is not."""
    q, k, v = rng.standard_normal((3, 200, 4)).astype(np.float32)
    k[:, 1] *= np.float32(1e25)
    v[:, 2] *= np.float32(1e25)
    q[:, 1] = 0
    state = np.zeros(200, np.float32), np.ones(200, np.float32), v / 2
    moments, before = tail.key_moments(k, v, moment_group(200)), [x.copy() for x in state]
    assert np.isfinite(moments.mean_value).all() and not np.isfinite(moments.covariance).all()
    for x, y in zip(tail.add_tail(q, state, np.arange(200), k, v, moments, 0.5, 0.0), before, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("is_causal", [True, False])
def test_errors_are_smaller_with_it(qkv, softcap, is_causal):
    q, k, v = (x.astype(np.float64) for x in qkv(2000, heads=4, kv_heads=2, head_dim=16))
    exact = dense_attention(q, k, v, is_causal=is_causal, softcap=softcap)[0]
    error = {}
    for kind in ("none", "first_order"):
        config = S2OConfig(tau=0.2, block_n=64, tail=kind)
        o = s2o.s2o(q, k, v, config, is_causal=is_causal, softcap=softcap).o
        error[kind] = np.linalg.norm(o - exact)
    assert error["first_order"] < 0.8 * error["none"]


def sampled_values(weight, values, regressed, mass=1.0, carrying=0.0, alone=0.0):
    """What `tail_values` makes of one row."""
    row = [np.array([x], values.dtype) for x in (mass, 0.0, weight, carrying, alone, 0.0, mass)]
    return tail.tail_values(tail.TailWeights(*row), values, regressed[None])


def halves(rng, apart):
    """A regression's value [40], and samples' [TAIL_SAMPLES, 40]: even ones 1 above it, odd ones ``apart``."""
    regressed = rng.standard_normal(40)
    return regressed, regressed + np.where(np.arange(TAIL_SAMPLES) % 2, apart, 1.0)[:, None]


@pytest.mark.parametrize(("apart", "believed"), [(1.0, 1.0), (0.5, 2 / 2.25), (0.0, 0.0), (-1.0, 0.0)])
def test_samples_are_believed_as_far_as_halves_agree(rng, apart, believed):
    """By 4 e o / (e + o)^2, where even samples are e beyond the regression and odd ones o."""
    regressed, values = halves(rng, apart)
    found = sampled_values(np.ones(TAIL_SAMPLES), values, regressed)
    assert found.believed == pytest.approx(believed)
    np.testing.assert_allclose(found.value[0], regressed + believed * (1 + apart) / 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1e18, 1e20])
def test_squares_beyond_float32_say_nothing(rng, dtype, size):
    """Halves that agree are believed, and where sums would overflow in float32, as kernels' do, they are not."""
    regressed, values = (x.astype(dtype) for x in halves(rng, 1.0))
    found = sampled_values(np.ones(TAIL_SAMPLES), (size * values).astype(dtype), (size * regressed).astype(dtype))
    assert found.believed == pytest.approx(1.0 if size == 1e18 else 0.0)
    assert np.isfinite(found.value).all()


@pytest.mark.parametrize(("change", "believed"), [
    ({}, 1 - 4 / 12), ({"mass": 1.0}, 1 - 4 / 12 * (0.5 / 0.75) ** 2), ({"alone": 1.0}, 1.0),
    ({"mass": TAIL_TRIFLE}, 1.0), ({"carrying": TAIL_SAMPLES}, 1.0),
])  # fmt: skip
def test_rows_in_turn_are_believed_together(rng, change, believed):
    """Of 16 rows 12 have samples that agree, and 4 that do not and count by the square of what they may bring."""
    regressed = np.zeros(40)
    values = np.ones((TAIL_SAMPLES, 40))
    values[TAIL_SAMPLES // 2 :][1::2] = -1
    differ = np.arange(40) % 4 == 3
    differ[TAIL_ROWS : 2 * TAIL_ROWS] = False
    weight = np.where((np.arange(TAIL_SAMPLES) < TAIL_SAMPLES // 2) == ~differ[:, None], 1.0, 0.0)
    of = {"mass": 3.0, "tilt": 0.0, "weight": weight, "carrying": 0.0, "alone": 0.0, "largest": 0.0, "of_all": 3.0}
    of |= {name: np.where(differ, change.get(name, x), x) for name, x in of.items() if name != "weight"}
    found = tail.tail_values(tail.TailWeights(**of), values, np.broadcast_to(regressed, (40, 40))).believed
    np.testing.assert_allclose(found[~differ], np.where(np.arange(40)[~differ] // TAIL_ROWS == 1, 1, believed))


@pytest.mark.parametrize(("change", "believed"), [
    ({"carrying": 0.75 * TAIL_SAMPLES / 4}, 0.75), ({"carrying": TAIL_SAMPLES}, 0.0),
    ({"mass": TAIL_TRIFLE}, 0.0), ({"mass": 1.5 * TAIL_TRIFLE}, 0.5), ({"mass": 2 * TAIL_TRIFLE}, 1.0),
])  # fmt: skip
def test_samples_are_not_believed_where_all_carry_the_weight_or_little_is_added(rng, change, believed):
    regressed, values = halves(rng, 1.0)
    found = sampled_values(np.ones(TAIL_SAMPLES), values, regressed, **change)
    assert found.believed == pytest.approx(believed)


@pytest.mark.parametrize(("share", "believed"), [(TAIL_LIGHT, 0.0), (1.5 * TAIL_LIGHT, 0.5), (2 * TAIL_LIGHT, 1.0)])
def test_a_half_with_next_to_no_weight_says_nothing(rng, share, believed):
    regressed, values = halves(rng, 1.0)
    weight = np.where(np.arange(TAIL_SAMPLES) % 2, share, 1 - share)
    assert sampled_values(weight, values, regressed).believed == pytest.approx(believed)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_no_number_leaves_the_regression(rng, value):
    regressed, values = halves(rng, 1.0)
    values[3, 39] = value
    found = sampled_values(np.ones(TAIL_SAMPLES), values, regressed)
    assert found.believed == 0
    np.testing.assert_array_equal(found.value[0], regressed)


@pytest.mark.parametrize(("weighs", "alone"), [
    (TAIL_TRIFLE, 0.0), (1.5 * TAIL_TRIFLE, 0.5), (2 * TAIL_TRIFLE, 1.0), (1.0, 1.0), (1e6, 1.0),
])  # fmt: skip
def test_one_sample_that_weighs_much_counts_for_itself(rng, weighs, alone):
    """Where it carries the weight alone. It weighs what its key does, and has its value; else its share speaks for
    others, TAIL_DOUBT of one."""
    t = np.where(np.arange(TAIL_SAMPLES) == 100, 0, -1000.0)[None]
    found = tail.tail_weights(t, np.array([-np.log(weighs)]), 9000, 0.0)
    assert found.alone == pytest.approx(alone)
    of_all = 9000 * 201 / TAIL_SAMPLES**2 * weighs / (1 + TAIL_DOUBT)
    assert found.mass == pytest.approx((1 - alone) * of_all + alone * weighs)
    regressed, values = halves(rng, 0.0)
    row = sampled_values(found.weight[0], values, regressed, alone=alone)
    np.testing.assert_allclose(row.value[0], regressed + alone * (values[100] - regressed))


def test_samples_that_share_the_weight_speak_for_others():
    t = np.where(np.arange(TAIL_SAMPLES) == 100, 0, -0.1)[None]
    found = tail.tail_weights(t, np.zeros(1), 9000, 0.0)
    assert found.alone == 0 and found.mass == pytest.approx(9000, rel=0.12)
