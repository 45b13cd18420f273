"""Geometry's formulas against masks written out in full."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2o_cupy.reference import s2o
from s2o_cupy.spec import UNITS, Geometry


@st.composite
def geometries(draw):
    """Causal with seqlen_k >= seqlen_q, or not causal with any lengths; units of 1 key or several."""
    is_causal = draw(st.booleans())
    seqlen_q = draw(st.integers(1, 40))
    seqlen_k = draw(st.integers(seqlen_q if is_causal else 1, 70))
    window = draw(st.integers(0, 80))
    return Geometry(seqlen_q, seqlen_k, draw(st.integers(1, 50)), window, is_causal, draw(st.sampled_from(UNITS)))


def visible(g):
    """bool [Lq, Lk]: what dense attention computes."""
    i, j = np.arange(g.seqlen_q)[:, None], np.arange(g.seqlen_k)
    return (j <= i + g.offset) | (not g.is_causal)


def dense(g):
    """bool [Lq, Lk]: what pass 1 computes."""
    mask = np.zeros((g.seqlen_q, g.seqlen_k), bool)
    for n in range(g.segments):
        mask[slice(*g.queries(n)), slice(*g.dense_keys(n))] = True
    return mask & visible(g)


def candidate(g):
    """bool [Lq, Lk]: what pass 2 may compute."""
    mask = np.zeros((g.seqlen_q, g.seqlen_k), bool)
    for n in range(g.segments):
        mask[slice(*g.queries(n)), s2o.candidate_positions(n, g)] = True
    return mask


@given(geometries())
def test_segments_partition_the_queries(g):
    queries = [i for n in range(g.segments) for i in range(*g.queries(n))]
    assert queries == list(range(g.seqlen_q))
    assert all(begin < end for begin, end in map(g.queries, range(g.segments)))


@given(geometries())
def test_each_visible_key_is_either_dense_or_a_candidate(g):
    np.testing.assert_array_equal(dense(g).astype(int) + candidate(g), visible(g).astype(int))


@given(geometries())
def test_a_query_attends_densely_to_itself_and_to_its_window(g):
    mask = dense(g)
    for i in range(g.seqlen_q):
        first = i - i % g.segment + g.offset  # key position of the segment's first query
        for j in range(max(0, first - g.window), min(i + g.offset + 1, g.seqlen_k)):
            assert mask[i, j]


@given(geometries())
def test_no_unit_is_dense_in_part(g):
    """Of what a segment does not read densely all units are whole, but for one at the end of the keys; and no more is
    read than its own keys, the window, and what is left of the units in which these begin and end."""
    for n in range(g.segments):
        begin, end = g.dense_keys(n)
        first, last = (i + g.offset for i in g.queries(n))
        assert begin % g.unit == 0
        assert end == last if g.is_causal else end % g.unit == 0 or end == g.seqlen_k
        assert 0 <= max(0, first - g.window) - begin < g.unit
        assert 0 <= end - max(0, last) < g.unit
        positions = s2o.candidate_positions(n, g)
        inside = np.bincount(positions // g.unit, minlength=1)
        assert set(inside) <= {0, g.unit, g.seqlen_k % g.unit}
        assert g.ranked(n) == (inside == g.unit).sum() == len(s2o.ranked_units(n, g))
        np.testing.assert_array_equal(s2o.unit_positions(s2o.ranked_units(n, g), n, g), positions)
    assert g.units == g.seqlen_k // g.unit


@given(geometries())
def test_candidate_positions_ascend_and_are_counted(g):
    for n in range(g.segments):
        positions = s2o.candidate_positions(n, g)
        assert positions.dtype == np.int32
        assert len(positions) == g.candidates(n)
        assert (np.diff(positions) > 0).all()


@given(geometries())
def test_pair_counts(g):
    assert g.causal_pairs() == visible(g).sum()
    assert g.dense_pairs() == dense(g).sum()


@given(geometries())
def test_guide_keys_are_visible_to_the_whole_segment(g):
    for n in range(g.segments):
        count = g.guide_keys(n)
        assert 0 <= count <= min(g.segment, g.seqlen_k)
        assert visible(g)[slice(*g.queries(n)), :count].all()
        if n > 0 or not g.is_causal or g.offset >= g.segment:
            assert count == min(g.segment, g.seqlen_k)  # the full guide


@given(geometries(), st.integers(1, 64))
@settings(max_examples=50)
def test_block_count_covers_every_segment(g, block_m):
    longest = max(end - begin for begin, end in map(g.queries, range(g.segments)))
    assert (g.block_count(block_m) - 1) * block_m < longest <= g.block_count(block_m) * block_m


@pytest.mark.parametrize(
    ("g", "n", "dense_keys", "candidates"),
    [
        (Geometry(10, 10, 4), 0, (0, 4), 0),
        (Geometry(10, 10, 4), 2, (8, 10), 8),  # a short last segment
        (Geometry(10, 15, 4), 0, (5, 9), 5),  # earlier context: the first segment has a prefix
        (Geometry(10, 10, 4, window=3), 1, (1, 8), 1),
        (Geometry(10, 10, 4, window=9), 1, (0, 8), 0),  # a window larger than the prefix
        (Geometry(10, 10, 4, is_causal=False), 1, (4, 8), 6),  # also keys after the segment
        (Geometry(10, 6, 4, is_causal=False), 0, (0, 0), 6),  # stands before every key
        (Geometry(20, 20, 5, unit=4), 2, (8, 15), 8),  # from the start of the unit on
        (Geometry(20, 20, 5, 3, unit=4), 3, (12, 20), 12),  # a window, likewise
        (Geometry(20, 20, 4, unit=32), 4, (0, 20), 0),  # no whole unit
        (Geometry(20, 22, 5, is_causal=False, unit=4), 1, (4, 12), 14),  # to the end of one: 12, and 2 of a short one
        (Geometry(20, 22, 5, is_causal=False, unit=4), 3, (16, 22), 16),
    ],
)
def test_examples(g, n, dense_keys, candidates):
    assert g.dense_keys(n) == dense_keys
    assert g.candidates(n) == candidates
