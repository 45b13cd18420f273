"""Which rank has which rows of a sequence: every row one rank's, work even, and how much has to arrive before what."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2o_cupy.integrations.zigzag import Zigzag

zigzags = st.builds(
    Zigzag, st.integers(0, 5000), st.integers(1, 9), st.integers(1, 300), st.integers(1, 4).map(lambda n: 2 * n)
)


@given(zigzags)
def test_chunks_are_whole_segments_of_the_sequence(zigzag):
    bounds = [zigzag.bounds(chunk) for chunk in range(zigzag.count)]
    assert bounds[0][0] == 0 and bounds[-1][1] == zigzag.seqlen
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    assert all(begin % zigzag.segment == 0 or begin == zigzag.seqlen for begin, _ in bounds)
    segments = [-(-(end - begin) // zigzag.segment) for begin, end in bounds]
    assert max(segments) - min(segments) <= 1


@given(zigzags)
def test_every_position_is_one_rank_s(zigzag):
    ranks = range(zigzag.world_size)
    rows = [span for rank in ranks for span in zigzag.rows(rank)]
    assert sorted(itertools.chain(*itertools.starmap(range, rows))) == list(range(zigzag.seqlen))
    assert sum(map(zigzag.length, ranks)) == zigzag.seqlen
    assert sum(map(zigzag.pairs, ranks)) == zigzag.seqlen * (zigzag.seqlen + 1) // 2


def test_chunks_go_there_and_back():
    assert [Zigzag(0, 3, 1, rounds=4).chunks(rank) for rank in range(3)] == [(0, 5, 6, 11), (1, 4, 7, 10), (2, 3, 8, 9)]
    assert [Zigzag(0, 2, 1, rounds=2).chunks(rank) for rank in range(2)] == [(0, 3), (1, 2)]


@given(zigzags)
def test_a_chunk_needs_the_rounds_of_those_before_it(zigzag):
    round_of = {chunk: i for rank in range(zigzag.world_size) for i, chunk in enumerate(zigzag.chunks(rank))}
    assert sorted(round_of) == list(range(zigzag.count))
    for chunk in range(zigzag.count):
        assert {round_of[before] for before in range(chunk)} == set(range(zigzag.rounds_before(chunk)))


@given(zigzags)
def test_runs_are_the_rows_in_fewest_pieces(zigzag):
    """And no piece waits for more rounds than its own chunks do, unless those between them are empty."""
    for rank in range(zigzag.world_size):
        runs = zigzag.runs(rank)
        spans = [span for span in zigzag.rows(rank) if span[0] < span[1]]
        joined = list(itertools.chain(*(range(begin, end) for _, begin, end in runs)))
        assert joined == list(itertools.chain(*itertools.starmap(range, spans)))
        assert all(end < begin for (_, _, end), (_, begin, _) in itertools.pairwise(runs))
        for chunk, begin, _ in runs:
            first = next(x for x in zigzag.chunks(rank) if zigzag.bounds(x)[0] == begin < zigzag.bounds(x)[1])
            between = [x for x in range(first, chunk + 1) if x not in zigzag.chunks(rank)]
            if zigzag.world_size > 1 and not between:
                assert zigzag.rounds_before(first) == zigzag.rounds_before(chunk)
            assert all(zigzag.bounds(x)[0] == zigzag.bounds(x)[1] for x in between)


@given(zigzags)
def test_work_is_even_but_for_what_is_left_over(zigzag):
    """Left-over segments move ends of chunks by less than a segment, in the first pair of rounds only. So each of a
    rank's two chunks there has, at either end, less than a segment's queries times that pair's keys too much or too
    little; and one rank lacks what the last segment is short of."""
    pairs = [zigzag.pairs(rank) for rank in range(zigzag.world_size)]
    segments = -(-zigzag.seqlen // zigzag.segment)
    keys = -(-zigzag.bounds(2 * zigzag.world_size - 1)[1] // zigzag.segment) * zigzag.segment
    left_over = 4 * zigzag.segment * keys if segments % (2 * zigzag.world_size) else 0
    lacking = segments * zigzag.segment - zigzag.seqlen
    assert max(pairs) - min(pairs) <= left_over + lacking * segments * zigzag.segment


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_more_rounds_are_more_even(world_size):
    """At lengths that leave segments over, and where a query's work grows less than in proportion to its keys."""

    def excess(seqlen, rounds, power):
        """By how much the rank with most work is above the mean; a query's work is its keys to a power."""
        zigzag = Zigzag(seqlen, world_size, 1024, rounds)
        rows = [np.array(zigzag.rows(rank), np.float64) for rank in range(world_size)]
        work = [np.diff(x ** (1 + power), axis=1).sum() for x in rows]
        return max(work) / np.mean(work) - 1

    assert excess(131_072, 2, 1) == excess(131_072, 4, 1) == 0
    assert 0 < excess(100_000, 4, 1) < 0.6 * excess(100_000, 2, 1) < 0.06
    assert 0 < excess(131_072, 4, 0.5) < 0.5 * excess(131_072, 2, 0.5) < 0.05
