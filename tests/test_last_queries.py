"""The last queries of a call, which attend to all their keys: how they are cut, what is launched and compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2o_cupy import S2OConfig
from s2o_cupy.arrays.operand import Operand, Paging
from s2o_cupy.plan.build import added_to_addresses
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.last_queries import LEAST_PART_KEYS, MOST_PARTS, PART_GRAIN, most_parts, parts_of
from s2o_cupy.plan.launches import launches, workspace
from s2o_cupy.problem import Problem
from s2o_cupy.selection.methods import make_plan
from s2o_cupy.spec import Geometry
from s2o_cupy.tools.catalogue import kernels_for

CONFIG = S2OConfig(dense_up_to=0)


def problem_of(seqlen_q, seqlen_k=None, heads=8, kv_heads=2, batch=1, is_causal=True):
    return Problem(batch, heads, kv_heads, seqlen_q, seqlen_k or seqlen_q, 128, "bfloat16", is_causal, 0.1)


def planned(problem, config, page_size=0):
    return make_plan(problem, config, DeviceLimits.of_architecture(90), True, page_size=page_size)


def launched(problem, config, paging=None, sign=1):
    """The plan, the workspace and the launches, of contiguous arrays or pages; all axes descend with a sign of -1."""
    plan, dim = planned(problem, config, paging.page_size if paging else 0), problem.head_dim
    of_k = (problem.batch, problem.kv_heads, problem.seqlen_k, dim)
    if paging:
        of_k = (paging.pages, problem.kv_heads, paging.page_size, dim)
    q, k = (
        Operand(0, (n, heads, rows, d), (sign * heads * rows * d, sign * rows * d, sign * d))
        for n, heads, rows, d in ((problem.batch, problem.heads, problem.seqlen_q, dim), of_k)
    )
    memory = workspace(plan, problem, config)
    return plan, memory, launches(plan, problem, config, {"q": q, "k": k, "v": k, "out": q}, memory, paging)


def pointer(launch, name):
    """(base, bytes from it) of a pointer of a launch's parameters, or None if it is null."""
    (at,) = (offset for field, offset in launch.kernel.family.params.pointers if field == name)
    found = [(base, further) for offset, base, further in launch.pointers if offset == at]
    return found[0] if found else None


def attention(launch):
    """Its parameters without tensor maps."""
    return launch.params["attention"] if "attention" in launch.params.dtype.names else launch.params


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compute_capability", [80, 86, 90, 120])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("head_dim", [33, 64, 128, 256])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_their_kernels_are_compiled_ahead(compute_capability, aligned, head_dim, block_m, softcap):
    """All but capped scores of unaligned rows, of which there is a sample, as of the passes."""
    problem = replace(problem_of(5000), head_dim=head_dim, softcap=softcap)
    config = replace(CONFIG, block_m=block_m, dense_last=200)
    plan = make_plan(problem, config, DeviceLimits.of_architecture(compute_capability), aligned)
    operands = dict.fromkeys(("q", "k", "v", "out"), Operand(0, (1, 8, 5000, head_dim), (0, 5000 * 256, 256)))
    steps = launches(plan, problem, config, operands, workspace(plan, problem, config))
    kernels = [x.kernel for x in steps if x.stage in ("part_lists", "last_queries", "merge_last")]
    assert len(kernels) == 3
    ahead = {kernel.name for kernel in kernels_for(compute_capability)}
    for kernel in kernels:
        left_out = kernel.softcap and not kernel.aligned and kernel.head_dim != 128
        assert (kernel.name in ahead) is not left_out


def test_memory_of_a_long_call():
    """131,072 tokens, 32 heads over 8: a quarter of the workspace at most, and less than half a GiB with all else."""
    problem = problem_of(131072, heads=32, kv_heads=8)
    _, memory, _ = launched(problem, CONFIG)
    assert memory.places["part_out"].nbytes + memory.places["part_lse"].nbytes <= CONFIG.workspace_bytes // 4
    assert memory.nbytes < 0.5 * 2**30


@pytest.mark.parametrize("rank", ["weight", "mean"])
@pytest.mark.parametrize("tail", ["none", "first_order"])
def test_they_come_after_pass_1_and_are_not_ordered(rank, tail):
    config = replace(CONFIG, rank=rank, tail=tail, dense_last=300)
    plan, _, steps = launched(problem_of(16384), config)
    assert [x.stage for x in steps[:4]] == ["pass1", "part_lists", "last_queries", "merge_last"]
    first = config.dense_from(plan.geometry)
    assert first == (16384 - 300) // config.segment
    assert all(x.first_segment + x.segments <= first for x in plan.chunks)
    assert sum(x.rows for x in plan.chunks) == 8 * (first - 1)  # the first segment has no candidate


@pytest.mark.parametrize("tail", ["none", "first_order"])
def test_nothing_is_ordered_where_all_queries_are_last(tail):
    _, memory, steps = launched(problem_of(4096), replace(CONFIG, tail=tail, dense_last=9999))
    assert [x.stage for x in steps] == ["pass1", "part_lists", "last_queries", "merge_last"]
    assert "visited" in memory.places


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (problem_of(16384), replace(CONFIG, dense_last=0)),
        (problem_of(4096), CONFIG),  # shorter than those whose last queries are dense by default
        (problem_of(128), replace(CONFIG, segment=128, dense_last=128)),  # no candidate
        (problem_of(16384), S2OConfig(dense_up_to=16384, dense_last=256)),
    ],
    ids=["none", "short", "no candidate", "dense"],
)
def test_calls_without(problem, config):
    plan, memory, steps = launched(problem, config)
    assert plan.method.last is None and "part_out" not in memory.places
    assert "last_queries" not in [x.stage for x in steps]


@given(before=st.integers(0, 3_000_000), heads=st.integers(1, 300))
def test_parts_of_a_segment(before, heads):
    """Equal ones, of whole key tiles, and none too short."""
    parts, most = parts_of(Geometry(128, before + 128, 128), 0, heads), most_parts(heads)
    assert parts_of(Geometry(256, before + 256, 128), 0, heads) == parts <= most <= MOST_PARTS  # whatever follows
    each = max(-(-before // most), LEAST_PART_KEYS)  # but for the rounding to a whole key tile
    assert -(-before // (each + PART_GRAIN)) <= parts <= -(-before // each)


@given(heads=st.integers(1, 300))
def test_parts_by_heads(heads):
    """So many that q tiles of two and of three segments, which the last 256 queries are in, take the least time on 132
    multiprocessors, if each part costs an eightieth of all keys on top of its own."""

    def keys(parts):
        return sum(-(-segments * heads * parts // 132) for segments in (2, 3)) / parts

    found = most_parts(heads)
    for parts in range(1, MOST_PARTS + 1):
        assert keys(found) * (1 + found / 80) <= keys(parts) * (1 + parts / 80) + 1e-9


def test_parts_fill_a_gpu():
    """Of models' heads, or of a rank's share of them."""
    assert [most_parts(heads) for heads in (1, 4, 8, 32, 64, 128)] == [16, 11, 16, 4, 2, 1]
    for heads in (8, 12, 16, 24, 28, 32, 40, 64, 128):
        for segments in (2, 3):
            tiles = segments * heads * most_parts(heads)
            assert tiles > 0.9 * 132 * -(-tiles // 132), heads


def test_kernels_cut_likewise():
    header = (Path(__file__).parents[1] / "raw_kernels" / "last_queries" / "parts.cuh").read_text(encoding="utf-8")
    assert f"kLeastPartKeys = {LEAST_PART_KEYS}, kPartGrain = {PART_GRAIN};" in header


def test_a_share_of_the_heads_has_the_parts_of_all():
    """In the plan, and in what kernels are told."""

    def parts(problem):
        plan, _, steps = launched(problem, CONFIG)
        (lists,) = (x for x in steps if x.stage == "part_lists")
        return plan.method.last.parts, int(lists.params["most_parts"])

    share = problem_of(16384, heads=4, kv_heads=1)
    assert parts(problem_of(16384, heads=32, kv_heads=8)) == parts(replace(share, share_of=32)) == (4, 4)
    assert parts(share) == (11, 11)


@given(
    seqlen_q=st.integers(1, 3000),
    more=st.integers(0, 9000),
    batch=st.sampled_from([1, 2, 7]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (40, 8)]),
    segment=st.sampled_from([64, 97, 256]),
    unit=st.sampled_from([1, 16]),
    last=st.integers(0, 4000),
    is_causal=st.booleans(),
    workspace_bytes=st.sampled_from([1 << 20, 1 << 22, 1 << 28]),
)
def test_each_pair_is_ordered_or_among_the_last_once(
    seqlen_q, more, batch, heads, segment, unit, last, is_causal, workspace_bytes
):
    """Of segments with candidates, whatever the workspace; a piece's outputs fit in a quarter of it, or it is one
    segment of the heads of a KV head. Launches are as many as there are sequences or parts, whichever is less."""
    problem = problem_of(seqlen_q, seqlen_q + more, *heads, batch, is_causal)
    config = replace(CONFIG, segment=segment, unit=unit, dense_last=last, workspace_bytes=workspace_bytes)
    plan, memory, steps = launched(problem, config)
    geometry, first = plan.geometry, config.dense_from(plan.geometry)
    ordered = [
        (x.first_head + h, x.first_segment + n) for x in plan.chunks for h in range(x.heads) for n in range(x.segments)
    ]
    pieces = plan.method.last.pieces if plan.method.last else []
    dense = [
        ((x.sequence + b) * problem.heads + x.first_head + h, x.first_segment + n)
        for x in pieces for b in range(x.sequences) for h in range(x.heads) for n in range(x.segments)
    ]  # fmt: skip
    assert all(n < first for _, n in ordered) and all(n >= first for _, n in dense)
    found = sorted(pair for pair in ordered + dense if geometry.candidates(pair[1]) > 0)
    assert found == [
        (h, n) for h in range(batch * heads[0]) for n in range(geometry.segments) if geometry.candidates(n) > 0
    ]
    group = heads[0] // heads[1]
    if pieces and (pieces[0].segments > 1 or pieces[0].heads > group or pieces[0].sequences > 1):
        assert memory.places["part_out"].nbytes + memory.places["part_lse"].nbytes <= workspace_bytes // 4
    assert all(x.first_head % group == x.heads % group == 0 for x in pieces)
    if pieces and workspace_bytes == 1 << 28:
        attends = [x.stage for x in steps].count("last_queries")
        places = {(x.first_segment, x.first_head) for x in pieces}
        assert attends == len(places) * min(batch, plan.method.last.parts)


def test_pieces_read_their_own_heads_rows_and_lists():
    """Where each begins: of sequence 1, from head 4 on, the second of the last segments."""
    problem = problem_of(1000, 9000, heads=8, kv_heads=2, batch=2)  # 9 parts of a segment
    config = replace(CONFIG, segment=256, dense_last=500, workspace_bytes=1 << 20)
    plan, memory, steps = launched(problem, config)
    last, places = plan.method.last, memory.places
    assert (last.first, last.parts, last.segments_each, last.heads_each) == (1, 9, 1, 4)
    attends = [x for x in steps if x.stage == "last_queries"]
    assert [attention(x)["chunk"]["heads"] for x in attends] == [9 * 4] * (3 * 2 * 2)
    i = last.pieces.index((1, 1, 4, 4, 2, 1))
    step, row = attends[i], 2 * 128
    assert pointer(step, "q") == ("q", row * (1000 * 8 + 1000 * 4 + 512))
    assert pointer(step, "k") == ("k", row * (9000 * 2 + 9000)) == ("k", pointer(step, "v")[1])
    assert pointer(step, "lists.begins") == ("workspace", places["part_begins"].offset + 8 * 9)
    assert pointer(step, "lists.keys") == ("workspace", places["part_keys"].offset + 4 * 9)
    assert pointer(step, "next_q_tile") == ("workspace", places["part_counters"].offset + 4 * i)
    assert pointer(step, "out") == ("workspace", places["part_out"].offset)
    q, k, v, *others = step.maps  # those that the copy engine is told of
    assert (q.base, *q.array) == (*pointer(step, "q"), (9, 4, 256, 128), (0, 1000 * 128, 128))
    assert (k.base, *k.array) == (*pointer(step, "k"), (9, 1, 9000, 128), (0, 9000 * 128, 128))
    assert v == k._replace(base="v") and others == [None, None]  # nothing is resumed
    assert pointer(step, "state") is pointer(step, "taus") is pointer(step, "lists.q_order") is None
    assert float(attention(step)["tau"]) == 0
    assert int(attention(step)["q"]["batch"]) == int(attention(step)["k"]["batch"]) == 0
    geometry = attention(step)["geometry"]
    assert (geometry["seqlen_q"], geometry["seqlen_k"], geometry["segment"]) == (256, 9000, 256)
    short = attention(attends[last.pieces.index((1, 1, 4, 4, 3, 1))])["geometry"]
    assert short["seqlen_q"] == 1000 - 768


def test_axes_may_descend():
    """Then what is read first lies before where an array begins."""
    problem = problem_of(1000, 9000, heads=8, kv_heads=2, batch=2)
    config = replace(CONFIG, segment=256, dense_last=500, workspace_bytes=1 << 20, path="portable")
    plan, _, steps = launched(problem, config, sign=-1)
    i = plan.method.last.pieces.index((1, 1, 4, 4, 2, 1))
    base, before = pointer([x for x in steps if x.stage == "last_queries"][i], "q")
    assert (base, before) == ("q", -2 * 128 * (1000 * 8 + 1000 * 4 + 512))
    address = np.array([1 << 40], np.uint64) + added_to_addresses([before])
    assert address.tolist() == [(1 << 40) + before]


def test_pieces_of_a_paged_cache():
    problem = problem_of(1000, 9000, heads=8, kv_heads=2, batch=2)
    config = replace(CONFIG, segment=256, dense_last=500, workspace_bytes=1 << 20)
    plan, _, steps = launched(problem, config, Paging(0, 600, 16, 1200))
    attends = [x for x in steps if x.stage == "last_queries"]
    step = attends[plan.method.last.pieces.index((1, 1, 4, 4, 2, 1))]
    assert pointer(step, "k") == ("k", 2 * 128 * 16)  # KV head 1 of the first page
    assert step.maps[1].array == (2 * 128 * 16, (1200, 1, 16, 128), (2 * 16 * 128, 16 * 128, 128))
    assert pointer(step, "pages") == ("pages", 4 * 600) and int(attention(step)["pages"]["stride"]) == 0
    assert int(attention(step)["k"]["batch"]) == 2 * 16 * 128  # from page to page
    assert int(attention(step)["lists"]["table_heads"]) == 9 * 4  # all heads and parts have one row of the table


@pytest.mark.parametrize("paging", [None, Paging(0, 600, 16, 3000)], ids=["arrays", "pages"])
def test_many_sequences_take_a_part_at_a_time(paging):
    problem = problem_of(1000, 9000, heads=8, kv_heads=2, batch=11)
    config = replace(CONFIG, segment=256, dense_last=500, workspace_bytes=1 << 30)
    plan, memory, steps = launched(problem, config, paging)
    (piece,), places = plan.method.last.pieces, memory.places
    assert piece == (0, 11, 0, 8, 1, 3)
    for part, step in enumerate(x for x in steps if x.stage == "last_queries"):
        rows = 11 * 8 * (1000 - 256)
        assert pointer(step, "q") == ("q", 2 * 128 * 256) and pointer(step, "k") == ("k", 0)
        assert pointer(step, "pages") == ("pages", 0)
        assert int(attention(step)["pages"]["stride"]) == (600 if paging else 0)
        assert pointer(step, "out") == ("workspace", places["part_out"].offset + 2 * 128 * part * rows)
        assert pointer(step, "lse") == ("workspace", places["part_lse"].offset + 4 * part * rows)
        assert pointer(step, "lists.begins") == ("workspace", places["part_begins"].offset + 8 * part * 3)
        lists = attention(step)["lists"]
        assert (int(lists["shared_heads"]), int(lists["table_heads"])) == (88, 8)
        assert int(attention(step)["q"]["batch"]) == 8 * 1000 * 128
    assert part == 8


@pytest.mark.parametrize(("path", "at_once"), [("portable", 1 << 31), ("hopper", 132)])
@pytest.mark.parametrize("heads", [8, 64])
def test_blocks_of_every_launch_of_a_pass(path, at_once, heads):
    """One for each q tile of all rows, or on Hopper as many as run at once."""
    config = S2OConfig(path=path, dense_up_to=0, dense_last=300)
    *_, steps = launched(problem_of(1900, heads=heads, kv_heads=2), config)
    passes = [x for x in steps if x.stage in ("pass1", "last_queries", "pass2")]
    assert {x.stage for x in passes} == {"pass1", "last_queries", "pass2"}
    for x in passes:
        assert x.blocks == min(attention(x)["q_tiles"], at_once)
