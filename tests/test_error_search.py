"""What the search for an error's taus launches, and which segments it samples: without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from s2o_cupy import S2OConfig
from s2o_cupy.arrays.operand import Operand
from s2o_cupy.plan import error_search
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.launch_plan import LaunchPlan
from s2o_cupy.problem import Problem
from s2o_cupy.selection.methods import make_plan
from s2o_cupy.spec import FIRST_LADDER, Geometry
from s2o_cupy.tools.catalogue import kernels_for

CONFIG = S2OConfig(error=(0.1, 0.05) * 3)


def problem_of(length, **options):
    options = {"batch": 1, "heads": 6, "kv_heads": 2, "head_dim": 128, "softcap": 0.0, **options}
    return Problem(seqlen_q=length, seqlen_k=length, dtype="bfloat16", is_causal=True, scale=0.1, **options)


def planned(capability, problem, config=CONFIG):
    """The plan of a search, its workspace and its launches."""
    searched, tried = error_search.searched(problem, config)
    plan = make_plan(searched, tried, DeviceLimits.of_architecture(capability), aligned=problem.head_dim % 8 == 0)
    memory = error_search.workspace(plan, searched, tried)
    p = problem
    heads = {"q": p.heads, "k": p.kv_heads, "v": p.kv_heads, "out": p.heads}
    shapes = {name: (p.batch, count, p.seqlen_q) for name, count in heads.items()}
    operands = {
        name: Operand(0, (*shape, p.head_dim), (shape[1] * shape[2] * p.head_dim, shape[2] * p.head_dim, p.head_dim))
        for name, shape in shapes.items()
    }
    return plan, memory, error_search.launches(plan, searched, tried, operands, memory)


def offset_of(launch, name):
    """Where in the workspace a pointer of the launch's parameters starts."""
    place = dict(launch.kernel.family.params.pointers)[name]
    return next(offset for at, _, offset in launch.pointers if at == place)


@pytest.mark.parametrize("capability", [80, 90])
def test_keys_are_ordered_once_and_walked_twice(capability):
    plan, memory, launches = planned(capability, problem_of(32768))
    assert isinstance(plan, LaunchPlan) and plan.geometry.segments == 32
    stages = [x.stage for x in launches]
    assert stages[:3] == ["head_taus", "choose_taus", "pass1"] and stages[-1] == "choose_taus"
    assert stages.count("unit_weights") == stages.count("rank_keys") == 1
    walks = [x for x in launches if x.stage == "pass2_ladder"]
    assert [int(x.params["is_first"]) for x in walks] == [1, 0]
    first, second = (offset_of(x, "ladders") for x in walks)
    assert second - first == 4 * 6 * len(FIRST_LADDER)
    if capability == 90:  # whose blocks take q tiles from a counter of their launch's own
        assert offset_of(walks[1], "next_q_tile") - offset_of(walks[0], "next_q_tile") == 4
    assert {"sums", "sizes"} <= {name for name, x in memory.places.items() if x.offset < memory.zeroed}
    chosen = [x for x in launches if x.stage == "choose_taus"]
    assert [int(x.params["done"]) for x in chosen] == [0, 1, 2]
    np.testing.assert_array_equal(chosen[0].params["first"], np.float32(FIRST_LADDER))
    assert chosen[1].params["weights"].sum() == 256


def test_rounds_are_ordered_again_where_one_overwrites_the_last():
    config = replace(CONFIG, workspace_bytes=1 << 20)
    plan, _, launches = planned(90, problem_of(65536), config)
    stages = [x.stage for x in launches]
    rounds = len(plan.chunks)
    assert rounds > 1 and stages.count("pass2_ladder") == stages.count("unit_weights") == 2 * rounds


@pytest.mark.parametrize("length", [4000, 65536])
def test_segments_without_candidates_are_measured_apart(length):
    """Of each head those that pass 2 does not come to: the first, where it is one of the sample."""
    plan, _, launches = planned(90, problem_of(length))
    geometry, problem = plan.geometry, problem_of(length)
    without = [n for n in range(geometry.segments) if geometry.candidates(n) == 0]
    found = [(int(x.params["segments"]), x.blocks) for x in launches if x.stage == "segment_sizes"]
    assert found == [(1, problem.heads)] * len(without) and without == ([0] if length == 4000 else [])


def test_every_walk_counts_q_tiles_by_itself():
    """In an integer of its own, which is 0 before: pass 1 has the first."""
    plan, memory, launches = planned(90, problem_of(65536), replace(CONFIG, workspace_bytes=1 << 20))
    place = memory.places["next_q_tile"]
    found = [offset_of(x, "next_q_tile") for x in launches if x.stage in ("pass1", "pass2_ladder")]
    assert len(found) == 1 + 2 * len(plan.chunks) > 3
    assert sorted(found) == [place.offset + 4 * i for i in range(len(found))]
    assert found[-1] + 4 == place.offset + place.nbytes <= memory.zeroed


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("options", [{}, {"head_dim": 33}, {"head_dim": 256}, {"softcap": 3.0}], ids=str)
def test_kernels_are_in_the_catalogue(capability, options):
    """But for the slots of a sort, which are no part of a kernel's text."""
    known = {replace(x, shared_bytes=0, open_bytes=0) for x in kernels_for(capability)}
    for length in (4000, 32768):
        _, _, launches = planned(capability, problem_of(length, **options))
        for launch in launches:
            assert replace(launch.kernel, shared_bytes=0, open_bytes=0) in known, launch.stage


def test_outputs_of_all_blocks_have_room():
    for capability, heads, rows in itertools.product((80, 90), (6, 32), (64, 128)):
        problem = problem_of(131072, heads=heads, kv_heads=heads)
        plan, memory, launches = planned(capability, problem, S2OConfig(error=0.1, block_m=rows))
        blocks = max(x.blocks for x in launches if x.stage == "pass2_ladder")
        assert memory.places["snapshots"].nbytes == blocks * len(FIRST_LADDER) * rows * 128 * 2
        assert memory.places["dense"].nbytes == heads * 32 * 128 * 128 * 2
        assert blocks <= 2 * plan.limits.multiprocessors


@pytest.mark.parametrize("total", [33, 64, 100, 1024])
def test_sampled_segments_are_one_of_each_run(total):
    geometry = Geometry(total * 128 - 5, total * 128, 128, drawn=32)
    assert (geometry.segments, geometry.all_segments) == (32, total)
    runs = [geometry.run(n) for n in range(32)]
    assert runs[0][0] == 0 and runs[-1][1] == total and all(a[1] == b[0] for a, b in itertools.pairwise(runs))
    assert all(begin <= geometry.place(n) < end for n, (begin, end) in enumerate(runs))
    assert geometry.queries(31) == (geometry.place(31) * 128, min(geometry.place(31) * 128 + 128, total * 128 - 5))
    where = [(geometry.place(n) - begin + 0.5) / (end - begin) for n, (begin, end) in enumerate(runs)]
    assert 0.4 < np.mean(where) < 0.6 and (total < 1024 or np.std(where) > 0.25)


def test_few_segments_are_all_taken():
    sample = error_search.sampled(problem_of(32 * 128), CONFIG)
    assert sample.segments == tuple(range(32)) and sample.weights == (1.0,) * 32
    sample = error_search.sampled(problem_of(33 * 128), CONFIG)
    assert len(sample.segments) == 32 and sum(sample.weights) == 33
