"""The metrics against their definitions, and what NaN and infinities do to them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from s2o_cupy.tools import metrics

ERRORS = (metrics.rel_l2, metrics.rel_l1, metrics.mse)


def test_definitions():
    o, reference = np.array([[3.0, 4.0]]), np.array([[3.0, 2.0]])
    assert metrics.rel_l2(o, reference) == pytest.approx(2 / math.sqrt(13))
    assert metrics.rel_l1(o, reference) == pytest.approx(2 / 5)
    assert metrics.mse(o, reference) == pytest.approx(2)
    assert metrics.cosine(o, reference) == pytest.approx(17 / (5 * math.sqrt(13)))


def test_more_elements_than_a_chunk(rng, monkeypatch):
    o, reference = rng.standard_normal((2, 7, 11, 13))
    whole = [f(o, reference) for f in (*ERRORS, metrics.cosine)]
    monkeypatch.setattr(metrics, "_CHUNK", 10)
    assert [f(o, reference) for f in (*ERRORS, metrics.cosine)] == pytest.approx(whole, rel=1e-12)


def test_sums_are_float64():
    """In float32 the sum of squares would stop growing at 2^24, in float16 the square overflows."""
    assert metrics.mse(np.ones(2**25, np.float32), np.zeros(2**25, np.float32)) == 1
    large = np.full(8, 60000, np.float16)
    assert metrics.rel_l2(large, -large) == 2


def test_bfloat16(rng):
    x = rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    assert metrics.rel_l2(x, x.astype(np.float64)) == 0
    assert metrics.cosine(x, x) == pytest.approx(1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_on_one_side_never_passes(bad, side):
    pair = [np.ones(5), np.ones(5)]
    pair[side][2] = bad
    for error in ERRORS:
        assert error(*pair) == math.inf
    assert metrics.cosine(*pair) == -math.inf


def test_nan_on_both_sides_never_passes():
    x = np.array([1.0, np.nan])
    assert all(error(x, x) == math.inf for error in ERRORS)
    assert metrics.cosine(x, x) == -math.inf


def test_infinities_that_agree():
    """An lse of a row without keys is -inf on both sides."""
    lse = np.array([-np.inf, 1.0, 2.0])
    assert all(error(lse, lse.copy()) == 0 for error in ERRORS)
    assert metrics.rel_l2(np.array([-np.inf, 1.0, 3.0]), lse) == pytest.approx(1 / math.sqrt(5))
    assert metrics.rel_l2(-lse, lse) == math.inf


def test_zeros_and_empty_arrays():
    zero, one, empty = np.zeros(3), np.ones(3), np.zeros((0, 4))
    assert metrics.rel_l2(zero, zero) == metrics.rel_l1(zero, zero) == 0
    assert metrics.rel_l2(one, zero) == metrics.rel_l1(one, zero) == math.inf
    assert metrics.cosine(zero, zero) == 1
    assert metrics.cosine(one, zero) == 0
    assert all(error(empty, empty) == 0 for error in ERRORS)


def test_shapes_must_agree():
    """Broadcasting would compare the wrong elements."""
    for metric in (*ERRORS, metrics.cosine):
        with pytest.raises(ValueError, match=r"output is \(3,\), reference \(3, 1\)"):
            metric(np.ones(3), np.ones((3, 1)))
