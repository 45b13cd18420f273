"""Samples by strata: what is drawn, and that ratios and their standard errors are those of the theory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2o_cupy.plan.strata import Stratum, draw, ratio


@given(st.integers(1, 300), st.integers(2, 60), st.integers(0, 2**32 - 1))
def test_what_is_drawn(total, count, seed):
    """So many different ones in ascending order, two or three from each of neighbouring runs of about one size."""
    found = draw(total, count, seed)
    drawn = [i for stratum in found for i in stratum.drawn]
    assert drawn == sorted(set(drawn)) and len(drawn) == min(count, total)
    assert sum(stratum.size for stratum in found) == total
    if count >= total:
        assert found == (Stratum(total, tuple(range(total))),)
        return
    assert max(x.size for x in found) - min(x.size for x in found) <= 1
    first = 0
    for stratum in found:
        assert len(stratum.drawn) in (2, 3) and len(stratum.drawn) <= stratum.size
        assert all(first <= i < first + stratum.size for i in stratum.drawn)
        first += stratum.size


def test_draws_differ_by_seed():
    assert draw(100, 10, 0) == draw(100, 10, 0) != draw(100, 10, 1)


def test_every_sample_of_a_small_population(rng):
    """The weighted sums behind the ratio have the right mean over all samples that can be drawn, and the variance by
    linearisation, at the true ratio, is theirs: by counting, with constant denominators."""
    above = rng.uniform(0, 1, 9) + np.arange(9)
    samples = []
    for first, second in itertools.product(itertools.combinations(range(4), 2), itertools.combinations(range(4, 9), 3)):
        strata = (Stratum(4, first), Stratum(5, second))
        drawn = [*first, *second]
        samples.append([float(x) for x in ratio(above[drawn], np.full(5, 2.0), strata)])
    found, errors = np.array(samples).T
    assert found.mean() == pytest.approx(above.sum() / 18, rel=1e-12)
    within = [(4, 2, above[:4]), (5, 3, above[4:])]
    variance = sum(size * (size - n) / n * part.var(ddof=1) for size, n, part in within) / 18**2
    assert found.var() == pytest.approx(variance, rel=1e-12)
    assert (errors**2).mean() == pytest.approx(variance, rel=0.05)  # residuals are from each sample's own ratio


def test_standard_errors_are_of_the_spread(rng):
    """With denominators that vary, in two columns: the spread over draws is what each draw says."""
    below = rng.uniform(1, 3, (200, 2)) * np.linspace(1, 4, 200)[:, None]
    above = below * rng.uniform(0.1, 0.3, (200, 2))
    samples = []
    for seed in range(400):
        strata = draw(200, 31, seed)
        drawn = [i for stratum in strata for i in stratum.drawn]
        samples.append(ratio(above[drawn], below[drawn], strata))
    found, errors = (np.stack(x) for x in zip(*samples, strict=True))  # [draws, 2]
    truth = above.sum(0) / below.sum(0)
    np.testing.assert_allclose(found.std(axis=0), errors.mean(axis=0), rtol=0.12)
    np.testing.assert_allclose(found.mean(axis=0), truth, rtol=0.01)
    assert 0.9 < (np.abs(found - truth) < 2 * errors).mean() < 0.98


def test_zeros_and_whole_strata():
    whole = (Stratum(3, (0, 1, 2)),)
    assert [float(x) for x in ratio(np.array([1.0, 0, 5]), np.array([2.0, 2, 4]), whole)] == [0.75, 0.0]
    assert [float(x) for x in ratio(np.zeros(3), np.zeros(3), whole)] == [0.0, 0.0]
    assert float(ratio(np.ones(3), np.zeros(3), whole)[0]) == np.inf
