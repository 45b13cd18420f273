"""Candidates that a q tile leaves unvisited: what their mean stands for, in the reference."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from s2o_cupy.reference import dense_attention, s2o
from s2o_cupy.spec import Geometry, S2OConfig


def test_without_a_tail_unvisited_keys_count_for_nothing(rng):
    q, k, v = (rng.standard_normal((1, 1, 256, 8)) for _ in range(3))
    config = S2OConfig(segment=64, tau=1e9, block_m=64, block_n=32, unit=8)
    k_order = s2o.key_order(q, k, Geometry(256, 256, 64, unit=8), config, 8**-0.5)
    changed = v.copy()
    changed[0, 0, k_order[3][0, 0, 32:]] = 100  # of the last segment's candidates all but the one tile it visits
    (before, after), (_, with_mean) = (
        [s2o.s2o(q, k, x, replace(config, tail=tail)).o[0, 0, 192:] for x in (v, changed)]
        for tail in ("none", "mean")
    )
    np.testing.assert_array_equal(after, before)
    assert (with_mean > before + 1).all()


def test_equal_keys_need_no_visit(rng):
    """Where all candidates are alike, their mean stands for them exactly, at any tau."""
    q, k, v = (rng.standard_normal((1, 2, 300, 8)) for _ in range(3))
    k[:] = k[:, :, :1]
    v[:] = v[:, :, :1]
    config = S2OConfig(segment=100, tau=1e9, block_m=50, block_n=16, tail="mean")
    found, (o, lse) = s2o.s2o(q, k, v, config), dense_attention(q, k, v, is_causal=True)
    assert (found.visited[:, :, 1:] == 1).all()
    # A handful of operations in float64 on numbers of the result's size.
    np.testing.assert_allclose(found.o, o, rtol=1e-12)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-12)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 2.0, 8.0]), st.booleans())
def test_the_tail_never_gets_more_than_the_average_candidate(seed, spread, is_causal):
    """exp of the mean score is no more than the mean of exp: what is added is at most `rest` average candidates."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, 1, 96, 4)) * spread for _ in range(3))
    config = S2OConfig(segment=32, tau=1e9, block_m=32, block_n=16, tail="mean")
    with_mean = s2o.s2o(q, k, v, config, is_causal=is_causal)
    without = s2o.s2o(q, k, v, replace(config, tail="none"), is_causal=is_causal)
    lse = dense_attention(q, k, v, is_causal=is_causal)[1]
    assert (with_mean.lse >= without.lse).all()
    geometry = Geometry(96, 96, 32, is_causal=is_causal)
    for n in range(geometry.segments):
        candidates, rows = geometry.candidates(n), slice(*geometry.queries(n))
        rest = candidates - min(candidates, 16 * int(with_mean.visited[0, 0, n, 0]))
        if rest == 0:
            continue
        added = np.exp(with_mean.lse[0, 0, rows]) - np.exp(without.lse[0, 0, rows])
        own = s2o.finish(s2o.pass1(q, k, v, geometry, 0.5))[1][0, 0, rows]
        of_candidates = np.exp(lse[0, 0, rows]) - np.exp(own)  # the mass of all
        assert (added <= rest / candidates * of_candidates * (1 + 1e-9) + 1e-9 * np.exp(lse[0, 0, rows])).all()
