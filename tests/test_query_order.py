"""The definition of the queries' order in a segment."""

import numpy as np
import pytest

from s2o_cupy.reference import s2o
from s2o_cupy.reference.methods import pbs
from s2o_cupy.reference.ordering import leading_bits
from s2o_cupy.spec import Geometry


def test_query_order_follows_the_guide():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 4, 21, 8)).round(), rng.standard_normal((2, 2, 25, 8)).round()
    # Dot products of small integers are exact, and short enough to be compared whole: ties are ties.
    geometry = Geometry(21, 25, 16)
    order = s2o.query_order(q, k, geometry, 8)
    assert order.shape == (2, 4, 2, 16)
    assert order.dtype == np.int32
    for b, h, n in np.ndindex(2, 4, 2):
        guide = k[b, h // 2, : (4, 16)[n]].mean(axis=0)  # only 4 keys stand before segment 0
        rows = q[b, h, 16 * n : min(16 * n + 16, 21)] @ guide
        expected = sorted(range(len(rows)), key=lambda s, rows=rows: (-rows[s], s))
        assert order[b, h, n, : len(rows)].tolist() == expected
        assert (order[b, h, n, len(rows) :] == -1).all()


def test_query_order_without_earlier_keys_is_the_identity():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 40, 8))
    order = s2o.query_order(q, k, Geometry(40, 40, 16), 8)
    np.testing.assert_array_equal(order[:, :, 0], np.tile(np.arange(16), (1, 2, 1)))


def test_queries_of_one_tile_keep_their_order():
    """All of them stop together, in whichever order they stand."""
    q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 40, 8))
    for segment, block_m in ((16, 16), (16, 100)):
        geometry = Geometry(40, 40, segment, is_causal=False)
        rows = [min(segment, 40 - n * segment) for n in range(geometry.segments)]
        order = s2o.query_order(q, k, geometry, block_m)
        for n, count in enumerate(rows):
            assert (order[:, :, n, :count] == np.arange(count)).all() and (order[:, :, n, count:] == -1).all()
        assert (s2o.query_order(q, k, geometry, segment - 1)[:, :, 0, : rows[0]] != np.arange(rows[0])).any()


def test_a_short_segment_has_the_order_that_it_has_behind_others():
    """Also where its queries, by themselves, are one q tile."""
    q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 40, 8))
    whole = s2o.query_order(q, k, Geometry(40, 40, 32), 16)
    alone = s2o.query_order(q[:, :, 32:], k, Geometry(8, 40, 32), 16)
    np.testing.assert_array_equal(alone[:, :, 0, :8], whole[:, :, 1, :8])
    assert (alone[:, :, 0, :8] != np.arange(8)).any()


def test_query_order_compares_leading_bits():
    """1 + 2^-11 is cut to 1, and -1 - 2^-11 to -1: ties, which stay in ascending position; 1 + 2^-10 is not."""
    tie, more = 1 + 2.0**-11, 1 + 2.0**-10
    q = np.array([[[[1.0], [tie], [-tie], [-1.0], [more], [np.nan]]]], np.float32)
    k = np.ones((1, 1, 6, 1), np.float32)
    order = s2o.query_order(q, k, Geometry(6, 6, 6, is_causal=False), 2)
    assert order[0, 0, 0].tolist() == [5, 4, 0, 1, 2, 3]


def test_leading_bits_by_hand():
    """From the least to the greatest; both zeros are one number, and NaN is above infinity, its sign bit set or not."""
    ascending = [-np.inf, -65504.0, -1 - 2.0**-10, -1.0, -1e-30, 0.0, 1e-30, 1.0, 1 + 2.0**-10, 65504.0, np.inf, np.nan]
    bits = leading_bits(np.array(ascending))
    assert (np.diff(bits) > 0).all() and bits[-1] < 2**19
    np.testing.assert_array_equal(leading_bits(np.array([-0.0, -np.nan])), bits[[5, -1]])
    assert leading_bits(np.float32(1 + 2.0**-10)) == leading_bits(np.float32(1)) + 1


@pytest.mark.parametrize("count", [12, 20, 32])
def test_leading_bits_of_block_order(count):
    """Those of float32, as many as a position leaves room for; likewise."""
    ascending = np.array([-np.inf, -2.0, -1e-30, 0.0, 1e-30, 2.0, 65504.0, np.inf, np.nan], np.float32)
    bits = pbs.leading_bits(ascending, count)
    assert (np.diff(bits.astype(np.int64)) > 0).all() and bits[-1] == 2**count - 1
    zeros_and_nan = pbs.leading_bits(np.array([-0.0, -np.nan], np.float32), count)
    np.testing.assert_array_equal(zeros_and_nan, bits[[3, -1]])


def test_query_order_puts_nan_first():
    q, k = np.array([1, np.nan, np.inf, np.nan]).reshape(1, 1, 4, 1), np.ones((1, 1, 4, 1))
    order = s2o.query_order(q, k, Geometry(4, 4, 4, is_causal=False), 2)
    assert order.tolist() == [[[[1, 3, 2, 0]]]]
