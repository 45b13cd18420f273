"""Rounds: which heads and segments are ordered and attended together, and what memory they take."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from test_plan import a_problem, plan_of, problems

from s2o_cupy.plan.rounds import STEP, UNIT_STEP, Chunk
from s2o_cupy.reference import key_order
from s2o_cupy.selection.s2o import BYTES_PER_CANDIDATE, chunk_bytes, middle_blocks, row_pairs, strata_blocks
from s2o_cupy.selection.s2o_kernels import BLOCK_PAIRS
from s2o_cupy.spec import MIDDLE, MIDDLE_FROM, ORDER_HEAD, ORDER_WHOLE, STRATUM, S2OConfig


@given(problems())
@settings(deadline=None)
def test_chunks_cover_every_pair_with_candidates_once(case):
    problem, config = case
    plan, geometry = plan_of(problem, config), problem.geometry(config)
    wanted = {n for n in range(config.dense_from(geometry)) if geometry.candidates(n) > 0}  # the last are in no round
    seen: set[tuple[int, int]] = set()
    for chunk in plan.chunks:
        heads = range(chunk.first_head, chunk.first_head + chunk.heads)
        segments = range(chunk.first_segment, chunk.first_segment + chunk.segments)
        assert 0 <= heads.start < heads.stop <= problem.batch * problem.heads
        assert 0 <= segments.start < segments.stop <= geometry.segments
        pairs = set(itertools.product(heads, segments))
        assert not pairs & seen
        seen |= pairs
    assert {pair for pair in seen if pair[1] in wanted} == set(
        itertools.product(range(problem.batch * problem.heads), wanted)
    )
    if not wanted:
        assert plan.chunks == () and plan.method.elements == 0


@functools.cache  # they are dealt to be counted, and all chunks of a problem have the same
def count_strata(candidates: int) -> int:
    return len(key_order.strata(candidates))


@given(problems())
@settings(deadline=None)
def test_chunks_stay_within_the_workspace(case):
    problem, config = case
    plan, geometry = plan_of(problem, config), problem.geometry(config)
    for chunk in plan.chunks:
        assert chunk.rows == 1 or chunk_bytes(chunk) <= config.workspace_bytes
        assert chunk.elements <= plan.method.elements
        last = max(geometry.ranked(n) for n in range(chunk.first_segment, chunk.first_segment + chunk.segments))
        # Blocks for all strata, where a row has any, of a long row and a short one together.
        blocks = lambda n: -(-count_strata(n) // (2 * BLOCK_PAIRS)) if n > ORDER_WHOLE else 0  # noqa: E731
        counts = [geometry.ranked(chunk.first_segment + n) for n in range(chunk.segments)]
        for i in range(chunk.segments // 2):
            assert strata_blocks(chunk) >= blocks(counts[i]) + blocks(counts[-1 - i])
        assert strata_blocks(chunk) >= blocks(counts[chunk.segments // 2])
        assert row_pairs(chunk) == chunk.heads * len(range(0, chunk.segments, 2))
        assert (last > MIDDLE_FROM) <= (middle_blocks(chunk) * 2 * BLOCK_PAIRS == len(key_order.strata(MIDDLE)))


@given(problems())
@settings(deadline=None)
def test_rows_of_a_chunk_lie_one_behind_the_other(case):
    problem, config = case
    geometry = problem.geometry(config)
    step = STEP if geometry.unit == 1 else UNIT_STEP
    for chunk in plan_of(problem, config).chunks:
        end = 0
        for head, n in itertools.product(range(chunk.heads), range(chunk.segments)):
            row = chunk.place(chunk.first_head + head, chunk.first_segment + n)
            assert row.start == end and row.start % step == 0
            end = row.stop
            # Scores lie by unit: without causality up to the last one, which an order has even if it is short.
            every = -(-geometry.seqlen_k // geometry.unit)
            units = geometry.ranked(chunk.first_segment + n) if geometry.is_causal else every
            assert units <= row.stop - row.start <= chunk.longest
        assert end == chunk.elements
        longest = max(geometry.ranked(chunk.first_segment + n) for n in range(chunk.segments))
        if geometry.is_causal:  # no more than if all rows were as long as the longest
            assert chunk.elements <= chunk.rows * -(-longest // step) * step


def test_rows_and_blocks_by_hand():
    """Of two heads' rows of 64, 96 and 128 units, and of blocks that sort 16,384 units each."""
    chunk = Chunk(5, 2, 3, 3, 1, 1, stride=64, growth=32)
    assert (chunk.rows, chunk.longest, chunk.elements) == (6, 128, 2 * 288)
    elements = list(range(chunk.elements))
    rows = [elements[chunk.place(head, n)] for head in (5, 6) for n in (3, 4, 5)]
    assert [len(row) for row in rows] == [64, 96, 128] * 2 and list(itertools.chain(*rows)) == elements
    assert 2 * STRATUM * BLOCK_PAIRS == 16384 == ORDER_WHOLE
    for segments, stride, growth, blocks in (
        (1, 16384, 0, 0),  # is sorted at once
        (1, 16392, 0, 2),
        (1, 32768, 0, 2),
        (1, 32776, 0, 3),
        (2, 16392, 0, 4),  # of two rows one more than their units fill, as each may end in a block that is not full
        (2, 4096, 16384, 3),
        (3, 8192, 16384, 4),
    ):
        assert strata_blocks(Chunk(0, 4, 0, segments, 1, 1, stride, growth)) == blocks
        assert row_pairs(Chunk(0, 4, 0, segments, 1, 1, stride, growth)) == 4 * (1 if segments < 3 else 2)


def test_a_round_has_all_segments_of_a_few_heads():
    """As many heads as fit, evenly; or of one KV head's as many segments as fit."""
    of = lambda seqlen: [  # noqa: E731
        (chunk.first_head, chunk.heads, chunk.first_segment, chunk.segments)
        for chunk in plan_of(a_problem(1, 32, 8, seqlen, seqlen), S2OConfig(rank="mean")).chunks
    ]
    assert of(1 << 15) == [(0, 32, 1, 31)]
    assert of(1 << 16) == [(0, 16, 1, 63), (16, 16, 1, 63)]
    assert of(1 << 17) == [(4 * i, 4, 1, 127) for i in range(8)]
    assert of(1 << 18)[:8] == [(4 * i, 4, 210, 46) for i in range(8)]
    assert of(3 << 19)[:8] == [(4 * i, 4, 1530, 6) for i in range(8)]


@pytest.mark.parametrize(
    ("problem", "options", "rounds"),
    [
        # Equal turns, and nearly equal ones where equal ones would be many.
        ((2, 32, 8, 65_536, 65_536), {}, [16] * 4),
        ((1, 24, 6, 65_536, 65_536), {}, [12, 12]),
        ((1, 44, 11, 65_536, 65_536), {}, [12, 16, 16]),
        ((61, 8, 1, 1024, 131_072), {}, [30 * 8, 31 * 8]),
        # Segments without candidates take no memory, and decide nothing.
        ((1, 32, 8, 131_072, 131_072), {"window": 65_536}, [16, 16]),
        ((17, 8, 1, 32_768, 32_768), {"window": 16_384}, [17 * 8]),
        ((1, 8, 2, 4420, 4420), {"segment": 65, "window": 130, "workspace_bytes": 13_996_032}, None),
    ],
)
def test_heads_of_the_rounds(problem, options, rounds):
    config = S2OConfig(rank="mean", **options)
    chunks = plan_of(a_problem(*problem), config).chunks
    assert all(chunk_bytes(chunk) <= config.workspace_bytes for chunk in chunks)
    assert rounds is None or [chunk.heads for chunk in chunks] == rounds


@given(problems())
@settings(deadline=None)
def test_heads_that_share_a_chunk_s_keys_read_one_kv_head(case):
    problem, config = case
    group = problem.heads // problem.kv_heads
    for chunk in (*(plan := plan_of(problem, config)).chunks, plan.whole):
        assert chunk.heads % chunk.shared_heads == 0
        for first in range(chunk.first_head, chunk.first_head + chunk.heads, chunk.shared_heads):
            assert first // group == (first + chunk.shared_heads - 1) // group


def test_without_causality_a_last_segment_without_candidates_hides_none():
    """The one key block of the last segment is all there is for it, but not for the segments before."""
    problem = a_problem(seqlen_q=130, seqlen_k=2, is_causal=False)
    plan = plan_of(problem, S2OConfig(segment=128))
    assert [problem.geometry(S2OConfig(segment=128)).candidates(n) for n in range(2)] == [2, 0]
    assert [(chunk.first_segment, chunk.segments) for chunk in plan.chunks] == [(0, 1)]


def test_later_segments_come_first():
    """The longest rows start first, so that the shortest fill the end."""
    plan = plan_of(a_problem(seqlen_q=20_000), S2OConfig(segment=512, workspace_bytes=1 << 20))
    assert len(plan.chunks) > 1
    order = [chunk.first_segment for chunk in plan.chunks]
    assert order == sorted(order, reverse=True)


def test_memory_of_a_long_call():
    """131,072 tokens, 32 heads over 8, head_dim 128: at most half a GiB beside the output."""
    problem, config = a_problem(heads=32, kv_heads=8, seqlen_q=1 << 17), S2OConfig()
    plan = plan_of(problem, config)
    workspace = plan.method.elements * BYTES_PER_CANDIDATE + plan.method.order_head_rows * ORDER_HEAD * 2
    state = problem.heads * problem.seqlen_q * 8
    assert workspace <= 1.02 * config.workspace_bytes  # its parts are the largest of any round, here of different ones
    assert workspace + state < 0.5 * 2**30


@pytest.mark.parametrize("length", [1 << 18, 1 << 20])
@pytest.mark.parametrize("unit", [8, 1])
def test_arrays_of_rounds_that_differ(length, unit):
    """Each round is within the bound; an array is as large as any round needs it."""
    problem, config = a_problem(heads=32, kv_heads=8, seqlen_q=length), S2OConfig(unit=unit)
    method = plan_of(problem, config).method
    assert all(chunk_bytes(chunk) <= config.workspace_bytes for chunk in method.chunks)
    of_rounds = method.elements * BYTES_PER_CANDIDATE + method.order_head_rows * ORDER_HEAD * 2
    of_rounds += method.middle_rows * MIDDLE * 6
    assert config.workspace_bytes < of_rounds <= 1.5 * config.workspace_bytes
