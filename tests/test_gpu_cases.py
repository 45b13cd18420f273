"""Without a GPU: what test_gpu.py and sanitize.py would launch is given what its kernels take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpu_cases import CASES, SANITIZED, Case

from s2o_cupy.arrays.operand import Operand
from s2o_cupy.plan.build import Launch
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.launch_plan import LaunchPlan
from s2o_cupy.plan.launches import launches, workspace
from s2o_cupy.selection.methods import make_plan

NAMED = CASES | {f"sanitized {i}": case for i, case in enumerate(SANITIZED)}


def launched(case: Case, path: str) -> tuple[LaunchPlan, tuple[Launch, ...]]:
    problem, config = case.problem(), replace(case.config(path), dense_up_to=0)
    aligned = case.head_dim % 8 == 0 and case.arrange not in ("one element in", "odd row stride")
    plan = make_plan(problem, config, DeviceLimits.of_architecture(90), aligned, True)
    dim = problem.head_dim
    of_q, of_k = (
        Operand(0, (problem.batch, heads, length, dim), (heads * length * dim, length * dim, dim))
        for heads, length in ((problem.heads, problem.seqlen_q), (problem.kv_heads, problem.seqlen_k))
    )
    operands = {"q": of_q, "k": of_k, "v": of_k, "out": of_q}
    return plan, launches(plan, problem, config, operands, workspace(plan, problem, config))


@pytest.mark.parametrize("name", NAMED)
def test_every_case_can_be_launched(name):
    case = NAMED[name]
    for path in ("portable", "hopper") if case.hopper else ("portable",):
        plan, steps = launched(case, path)
        stages = [step.stage for step in steps]
        assert stages[0] == "pass1" and stages.count("pass2") == len(plan.chunks)
        assert all(step.blocks > 0 for step in steps)
        functions = [step.kernel.function for step in steps]
        by_weight = plan.chunks and case.config().orders_units
        last = plan.method.last
        assert ("part_lists" in stages) == (last is not None)
        assert stages.count("merge_last") == (len(last.pieces) if last else 0)
        assert stages.count("last_queries") == (len(last.pieces) * last.launches_each if last else 0)
        assert ("unit_weights" in stages) == bool(by_weight)
        assert ("unit_keys" in stages) == bool(by_weight and plan.geometry.units)
        assert ("key_scores" in stages) == bool(plan.chunks and not by_weight)
        by_query = plan.chunks and case.config().rank == "query" and plan.geometry.units
        assert [stages.count(name) for name in ("unit_rows", "query_norms")] == [int(bool(by_query))] * 2
        adds_tail = bool(plan.chunks and case.config().adds_tail)
        assert ("key_moments" in stages) == adds_tail
        in_pass2 = any(function in ("pass2_tail_sm90", "pass2_boxes_tail_sm90") for function in functions)
        assert ("add_tail" in stages) + in_pass2 == adds_tail
        of_pass2 = {step.kernel.function for step in steps if step.stage == "pass2"}
        in_order = plan.geometry.orders_queries(plan.of_pass.block_m)
        assert not (in_order and any("boxes" in function for function in of_pass2))  # boxes bring neighbours


@pytest.mark.parametrize("rank", ["query", "weight", "max", "mean"])
@pytest.mark.parametrize("block_m", [64, 128])
def test_means_of_queries_have_their_place(rank, block_m):
    """What rank_queries, or for segments of one q tile pool_queries, writes is no longer than the array for it."""
    case = Case(block_m=block_m, options={"rank": rank})
    plan, steps = launched(case, "portable")
    problem, config = case.problem(), case.config()
    places = workspace(plan, problem, config).places
    place = places["means"]
    ranked = [step for step in steps if step.stage == "rank_queries" and "means" in step.params.dtype.names]
    assert bool(ranked) == (block_m < config.segment or rank != "query")
    assert ("q_order" in places) == (block_m < config.segment)
    for step in ranked:
        pooled_queries, run = int(step.params["pooled_queries"]), int(step.params["run"])
        assert place.shape[:3] == (problem.batch * problem.heads, plan.geometry.segments, pooled_queries)
        if step.kernel.function == "rank_queries":  # which scores queries as it pools them
            assert pooled_queries * run >= config.segment


def rounds(plan: LaunchPlan) -> int:
    method: Any = plan.method
    return len(plan.chunks) + (len(method.last.pieces) if method.last else 0)


def test_some_cases_take_many_rounds():
    many = [case for case in NAMED.values() if "workspace_bytes" in case.options]
    assert len(many) > 5 and all(rounds(launched(case, "portable")[0]) > 1 for case in many)
