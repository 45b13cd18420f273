"""The definition of the keys' counting sort: buckets, and the order they give."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from s2o_cupy.reference import s2o
from s2o_cupy.spec import KEY_BUCKETS


def buckets(scores):
    """order_keys' buckets of one row, element by element, with exact products."""
    scores = [np.float16(x) for x in scores]
    finite = [x for x in scores if np.isfinite(x)] or [np.float16(0)]
    with np.errstate(all="ignore"):
        span = np.float32(max(finite)) - np.float32(min(finite))
        factor = np.float16(min(np.float32(KEY_BUCKETS - 1) / span, np.float32(65504)))
        result = []
        for x in scores:
            below = max(finite) - x  # float16
            if np.isnan(below):
                result.append(0)
            elif np.isinf(below):
                result.append(KEY_BUCKETS - 1 if below > 0 else 0)
            else:  # round() takes a fraction to the nearest integer, halves to an even one
                result.append(min(max(round(Fraction(float(below)) * Fraction(float(factor))), 0), KEY_BUCKETS - 1))
    return result


@given(hnp.arrays(np.float16, hnp.array_shapes(min_dims=1, max_dims=1, min_side=0, max_side=50)))
@settings(max_examples=300)
def test_order_keys_is_a_stable_descending_sort_of_buckets(scores):
    """Hypothesis draws NaN, both infinities, subnormals and the largest numbers."""
    order = s2o.order_keys(scores)
    assert order.dtype == np.int32
    bucket = buckets(scores)
    assert order.tolist() == sorted(range(len(scores)), key=lambda c: (bucket[c], c))


def test_order_keys_sorts_clear_margins_and_keeps_near_ties():
    scores = np.array([0.0, 3.0, 3.001, 10.0, -5.0, 3.0], np.float16)  # a bucket is 15 / 1023 = 0.015
    assert s2o.order_keys(scores).tolist() == [3, 1, 2, 5, 0, 4]


@pytest.mark.parametrize(
    ("scores", "order"),
    [
        ([2.0, 2.0, 2.0], [0, 1, 2]),  # constant
        ([np.nan, np.nan], [0, 1]),
        ([1.0, np.nan, 2.0, np.inf, -np.inf], [1, 2, 3, 0, 4]),  # 2, NaN and inf share bucket 0
        ([-np.inf, 1.0, -np.inf], [1, 0, 2]),
        ([-60000, 60000, -np.inf, 0.0], [1, 3, 0, 2]),  # what is more than float16 below shares the last bucket
        ([-30000, 30000, 0.0], [1, 2, 0]),
        ([0.0, 6e-8, 0.0], [0, 1, 2]),  # no factor of float16 tells so small a range apart
        ([1.0, 1e30, 2.0, -1e30], [1, 2, 0, 3]),  # infinite in float16
        ([], []),
    ],
)
def test_order_keys_corner_cases(scores, order):
    with np.errstate(over="ignore"):
        assert s2o.order_keys(np.array(scores).astype(np.float16)).tolist() == order


def test_order_keys_treats_rows_apart():
    scores = np.random.default_rng(0).standard_normal((2, 3, 500)).astype(np.float16)
    scores[1, 1] *= 1000
    order = s2o.order_keys(scores)
    for b, h in np.ndindex(2, 3):
        np.testing.assert_array_equal(order[b, h], s2o.order_keys(scores[b, h]))
        # Scores ascend by no more than a bucket, and by the rounding of a distance and of its place to ten bits.
        ranked = scores[b, h][order[b, h]].astype(np.float64)
        lowest = np.minimum.accumulate(ranked)
        assert (ranked - lowest <= np.ptp(ranked) * (1 / (KEY_BUCKETS - 1) + 2**-10)).all()
