"""The reference's stop rule: a q tile ends after the first key tile that adds little to every row."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cases import Case, cases, make

from s2o_cupy.reference import dense_attention, key_order, s2o
from s2o_cupy.spec import NEAR_KEYS, Geometry, S2OConfig


def example(tau, block_m=1, masses=((4, 2, 1, 0.5),), stop_lag=0, least=0):
    """One segment whose rows start with mass 1 and see 4 earlier keys of given masses, in tiles of one key.

    Head dimension i holds row i's scores; a row's own key weighs 1 for it and exp(-1e4) = 0 for the
    others. The earlier keys' values are 1, 10, 100 and 1000.
    """
    rows = len(masses)
    q = np.eye(rows)[None, None]
    with np.errstate(divide="ignore"):
        scores = np.log(np.array(masses, float))  # [rows, 4]
    k = np.vstack([np.maximum(scores, -1e4).T, np.where(np.eye(rows) == 1, 0, -1e4)])[None, None]
    v = np.zeros_like(k)
    v[0, 0, :4, 0] = [1, 10, 100, 1000]
    config = S2OConfig(segment=rows, tau=tau, block_m=block_m, block_n=1, tail="none")
    geometry = Geometry(rows, rows + 4, rows)
    q_order = np.arange(rows, dtype=np.int32)[None, None, None]
    k_order = s2o.KeyOrder([np.arange(4, dtype=np.int32)[None, None]], [np.array([[least]])])
    state = s2o.pass1(q, k, v, geometry, 1.0)
    state, visited = s2o.pass2(q, k, v, state, q_order, k_order, geometry, config, 1.0, stop_lag=stop_lag)
    o, lse = s2o.finish(state)
    return visited[0, 0, 0].tolist(), o[0, 0, :, 0], np.exp(lse[0, 0])


# Own mass 1, then tiles of mass 4, 2, 1, 0.5: gains 4, 2/5 = 0.4, 1/7 = 0.143, 1/16 = 0.0625.
@pytest.mark.parametrize(
    ("tau", "visited"), [(0, 4), (0.06, 4), (0.1, 4), (0.15, 3), (0.3, 3), (0.5, 2), (3, 2), (5, 1), (1e9, 1)]
)
def test_the_first_tile_of_small_gain_is_the_last_and_is_kept(tau, visited):
    tiles, o, mass = example(tau)
    assert tiles == [visited]
    # A handful of operations on numbers of the result's size, each off by at most 1.1e-16 of it.
    weights, values = np.array([4, 2, 1, 0.5])[:visited], np.array([1, 10, 100, 1000])[:visited]
    np.testing.assert_allclose(mass, [1 + weights.sum()], rtol=1e-14)
    np.testing.assert_allclose(o, [weights @ values / (1 + weights.sum())], rtol=1e-14)


@pytest.mark.parametrize(("stop_lag", "visited"), [(0, 1), (1, 2), (2, 3), (3, 4), (9, 4)])
def test_stop_lag_visits_more_tiles(stop_lag, visited):
    assert example(5, stop_lag=stop_lag)[0] == [visited]


def test_a_gain_of_exactly_tau_goes_on():
    assert example(1.0, masses=((1, 1, 1, 1),))[0] == [2]  # gains 1, 1/2: exp(0) is exact
    assert example(0.0, masses=((1, 1e-300, 1e-300, 1e-300),))[0] == [4]
    assert example(0.0, masses=((1, 0.0, 0.0, 0.0),))[0] == [4]  # nothing gained is not less than nothing


def test_every_row_of_a_tile_must_gain_little():
    masses = ((4, 2, 1, 0.5), (0.01, 0.01, 0.01, 4))
    assert example(0.5, 1, masses)[0] == [2, 1]  # alone, row 1 misses its late key
    assert example(0.5, 2, masses)[0] == [2]  # together they stop when row 0 does
    assert example(0.2, 2, masses)[0] == [3]


def test_a_row_without_mass_keeps_its_tile_going():
    """Non-causal queries that stand before every key have no dense keys: l0 = 0 at their first tile."""
    q, k, v, config = make(Case(seqlen_q=41, seqlen_k=13, is_causal=False, config={"tau": 1e9}))
    result = s2o.s2o(q, k, v, config, is_causal=False)
    assert (result.state1.l[:, :, :16] == 0).all()
    assert (result.visited[:, :, 0] == 2).all()  # one tile to start, one of gain < tau
    assert np.isfinite(result.lse).all()


@given(cases(), st.sampled_from([0.01, 1.0, 1e30, math.inf]))
@settings(deadline=None, max_examples=40)
def test_a_huge_tau_leaves_no_row_empty(case, tau):
    q, k, v, config = make(case._replace(config=case.config | {"tau": tau}), np.float32)
    result = s2o.s2o(q, k, v, config, is_causal=case.is_causal)
    assert np.isfinite(result.lse).all()
    assert np.isfinite(result.o).all()


@given(cases(), st.lists(st.floats(0, 2), min_size=2, max_size=4))
@settings(deadline=None, max_examples=40)
def test_density_never_increases_with_tau(case, taus):
    q, k, v, _ = make(case)
    previous = None
    for tau in sorted(taus):
        config = make(case._replace(config=case.config | {"tau": tau}))[3]
        visited = s2o.s2o(q, k, v, config, is_causal=case.is_causal).visited
        if previous is not None:
            assert (visited <= previous).all()
        previous = visited


@given(cases())
@settings(deadline=None, max_examples=30)
def test_forcing_the_visits_reproduces_the_result(case):
    q, k, v, config = make(case._replace(config=case.config | {"tau": 0.1}), np.float32)
    geometry, scale = case.geometry(config), 1 / math.sqrt(case.head_dim)
    r = s2o.s2o(q, k, v, config, is_causal=case.is_causal)
    kept = [x.copy() for x in r.state1]
    state, visited = s2o.pass2(
        q, k, v, r.state1, r.q_order, r.k_order, geometry, config, scale, visited=r.visited
    )
    o, lse = s2o.finish(state)
    np.testing.assert_array_equal(visited, r.visited)
    np.testing.assert_array_equal(o, r.o)
    np.testing.assert_array_equal(lse, r.lse)
    for before, after in zip(kept, r.state1, strict=True):
        np.testing.assert_array_equal(after, before)  # pass 2 leaves its input alone


def test_keys_behind_a_stop_do_not_matter():
    """NaN among them, or a higher maximum than that of the keys before, is not seen."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 1, 64, 4)) for _ in range(3))
    geometry, config = Geometry(64, 64, 8, 0, True, 1), S2OConfig(
        segment=8, tau=1e9, block_m=8, block_n=8, unit=1, tail="none"
    )
    q_order = np.tile(np.arange(8, dtype=np.int32), (1, 1, 8, 1))
    k_order = s2o.KeyOrder([np.arange(8 * n, dtype=np.int32)[None, None] for n in range(8)])
    state = s2o.pass1(q, k, v, geometry, 0.5)
    found, visited = s2o.pass2(q, k, v, state, q_order, k_order, geometry, config, 0.5)
    assert visited.max() == 1
    for bad in (np.nan, np.inf, 1e6):
        hostile_k, hostile_v = k.copy(), v.copy()
        hostile_k[:, :, 8:], hostile_v[:, :, 8:] = bad, bad
        other, _ = s2o.pass2(q, hostile_k, hostile_v, state, q_order, k_order, geometry, config, 0.5)
        for x, y in zip(other, found, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("order", [{"unit": 1}, {"rank": "mean"}, {"rank": "mean", "tail": "first_order"}], ids=str)
def test_error_falls_with_tau(order):
    """Heavy keys are found early: at tau = 0.05 most tiles are skipped and the error is still small."""
    q, k, v, _ = make(Case(heads=1, seqlen_q=512, seqlen_k=512))
    heavy = np.random.default_rng(1).choice(512, 40, replace=False)
    q += 2
    k[0, 0, heavy] += 1.5
    exact, _ = dense_attention(q, k, v)
    errors, densities = [], []
    for tau in (0.3, 0.1, 0.05, 0.01, 0.0):
        config = S2OConfig(segment=64, tau=tau, block_m=16, block_n=8, **order)
        r = s2o.s2o(q, k, v, config)
        errors.append(np.linalg.norm(r.o - exact) / np.linalg.norm(exact))
        densities.append(r.visited.sum() / (4 * 8 * sum(range(8))))
    assert errors == sorted(errors, reverse=True)
    assert densities == sorted(densities)
    assert densities[2] < 0.5
    assert errors[2] < 0.1


# --- Keys that are visited in any case ---


@pytest.mark.parametrize(("least", "visited"), [(0, 1), (1, 1), (2, 2), (3, 3), (4, 4), (9, 4)])
def test_no_tile_stops_before_its_least_keys(least, visited):
    """Gains 4, 0.4, 0.143 and 0.0625: by tau alone the first tile of one key is the last."""
    assert example(5, least=least)[0] == [visited]


def test_what_a_key_must_weigh_is_half_of_its_head_s_tau():
    scores = np.log2(np.array([[[0.3, 0.06, 0.04, np.nan, 0.0, np.inf]] * 3])).astype(np.float16)  # [1, 3, 6]
    geometry = Geometry(48, 48, 8, unit=8)
    of = lambda **options: s2o.least_keys(scores, geometry, S2OConfig(**options)).tolist()  # noqa: E731
    assert of() == [[32, 32, 32]]  # 0.05, whatever the number of keys; NaN and infinity come first, too
    assert of(tau=(0.1, 0.02, 0.7)) == [[32, 40, 16]]
    assert of(tau=(math.inf, 1e300, 0.0)) == [[16, 16, 48]]
    for without in ({"tail": "none"}, {"rank": "weight", "tail": "first_order"}, {"tau": 0.0}, {"error": 0.1}):
        assert of(**without) == [[0, 0, 0]]


@pytest.mark.parametrize(("units", "counted"), [(10_000, 10_000), (16_384, 16_384), (20_000, 8192)])
def test_least_keys_are_of_all_units_or_of_the_head_of_their_order(rng, units, counted):
    """Of those that are sorted at once all count."""
    scores = rng.standard_normal((1, 2, units)).astype(np.float16)
    scores[0, 1] = 1.0
    tokens = 8 * units + 128
    geometry, config = Geometry(tokens, tokens, 128, unit=8), S2OConfig(tau=2.0)  # at least 1, whose logarithm is 0
    count = (np.take_along_axis(scores, key_order.order_keys(scores), axis=-1)[..., :counted] >= 0).sum(axis=-1)
    assert count[0, 1] == counted and 0.4 * counted < count[0, 0] <= counted
    np.testing.assert_array_equal(s2o.least_keys(scores, geometry, config), 8 * count)


@pytest.mark.parametrize(
    ("gains", "least", "visited"),
    [
        ("n" * 9, 0, 1), ("n" * 9, 3, 3), ("n" * 9, 9, 4), ("nnnynnnnn", 9, 8), ("yyyyyyyny", 9, 9), ("ynnnny", 5, 5),
        ("y" + "n" * 79, 80, 6), ("y" + "n" * 95, 96, 7),
    ],
)
def test_it_waits_no_longer_than_for_four_tiles_or_a_sixteenth_in_a_row(gains, least, visited):
    """Key tiles that add much, y, or next to nothing to a row."""
    assert tiles_of(gains, least, block_n=NEAR_KEYS + 1) == visited


@pytest.mark.parametrize(("block_n", "tiles"), [(NEAR_KEYS, 1), (24, 2), (8, 8), (1, 64)])
def test_it_waits_as_many_tiles_longer_as_near_keys_fill(block_n, tiles):
    assert tiles_of("n" * 70, 70, block_n) == tiles + 4


def tiles_of(gains: str, least: int, block_n: int) -> int:
    """How many key tiles are visited, of which ``least`` must be: each has one key that adds something."""
    mass, keys = 1.0, np.full((len(gains), block_n), -np.inf)
    for tile, gain in enumerate(gains):
        keys[tile, 0] = math.log(mass if gain == "y" else 1e-6 * mass)
        mass += math.exp(keys[tile, 0])
    start, keys = (np.zeros(1), np.ones(1), np.zeros((1, 1))), keys.reshape(-1, 1)
    return s2o.visit(
        np.ones((1, 1)), start, np.arange(len(keys)), keys, np.zeros_like(keys), 1.0, 0.0, block_n=block_n, tau=0.1,
        stop_lag=0, visited=None, least=least * block_n,
    )[3]  # fmt: skip


@given(cases(), st.sampled_from([0.05, 0.5]))
@settings(deadline=None, max_examples=30)
def test_waiting_only_visits_more(case, tau):
    q, k, v, config = make(case._replace(config=case.config | {"tau": tau}), np.float32)
    r = s2o.s2o(q, k, v, config, is_causal=case.is_causal)
    geometry, scale = case.geometry(config), 1 / math.sqrt(case.head_dim)
    without = s2o.pass2(q, k, v, r.state1, r.q_order, s2o.KeyOrder(r.k_order.keys), geometry, config, scale)[1]
    assert (r.visited >= without).all()
    for n, least in enumerate(r.k_order.least):
        assert (r.visited[:, :, n] == without[:, :, n]).all() or (least > 0).any()
