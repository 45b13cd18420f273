"""Which calls are dense as they are short, and what one asks for beside its launch: nothing. No GPU decides it."""

from __future__ import annotations

import math

import pytest
from conftest import DENSE_UP_TO
from test_plan import a_problem, plan_of

from s2o_cupy import S2OConfig
from s2o_cupy.arrays.operand import Operand
from s2o_cupy.plan import launch_plan
from s2o_cupy.plan.launches import launches, workspace


@pytest.mark.parametrize(("limit", "longest"), [(None, 7168), (5000, 5000), (0, 0)])
def test_calls_up_to_the_limit_are_dense(limit, longest, monkeypatch):
    """By default of up to 7,168 keys with 32 heads, as S2OConfig says."""
    monkeypatch.setattr(launch_plan, "DENSE_UP_TO", DENSE_UP_TO)
    for seqlen in {max(longest, 1), longest + 1}:
        problem = a_problem(heads=32, seqlen_q=1000 if seqlen > 1000 else 1, seqlen_k=seqlen)
        plan = plan_of(problem, S2OConfig(dense_up_to=limit))
        assert plan.dense == (seqlen <= longest)


@pytest.mark.parametrize(
    ("heads", "head_dim", "longest"),
    [
        (1, 128, 12_288), (7, 128, 12_288), (8, 128, 11_264), (12, 80, 9216), (13, 128, 8192), (16, 65, 8192),
        (17, 128, 7168), (64, 128, 7168), (4, 64, 10_240), (8, 64, 9216), (12, 33, 7168), (32, 64, 7168),
        (4, 256, 12_288), (32, 129, 8192),
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 4])
def test_the_fewer_heads_the_longer_they_are_dense(batch, heads, head_dim, longest, monkeypatch):
    """However many sequences there are; where a limit is given, or tau is 0, that is the limit whatever the heads."""
    monkeypatch.setattr(launch_plan, "DENSE_UP_TO", DENSE_UP_TO)
    limit = launch_plan.dense_limit
    assert limit(S2OConfig(), heads, head_dim) == launch_plan.dense_by_default(heads, head_dim) == longest
    assert limit(S2OConfig(dense_up_to=300), heads, head_dim) == 300
    assert limit(S2OConfig(tau=0), heads, head_dim) == math.inf
    for seqlen in (longest, longest + 1):
        problem = a_problem(batch=batch, heads=heads, kv_heads=1, seqlen_q=500, seqlen_k=seqlen, head_dim=head_dim)
        assert plan_of(problem, S2OConfig()).dense == (seqlen == longest)


@pytest.mark.parametrize(("seqlen", "counts"), [(100, False), (2048, False), (4224, False), (4352, True), (8192, True)])
def test_a_short_dense_call_needs_no_memory(seqlen, counts):
    """32 heads in q tiles of 128 rows: up to 8 for each of 132 multiprocessors."""
    config, problem = S2OConfig(dense_up_to=1 << 20), a_problem(heads=32, kv_heads=8, seqlen_q=seqlen)
    plan = plan_of(problem, config)
    assert plan.dense and plan.counts_q_tiles == counts
    memory = workspace(plan, problem, config)
    assert set(memory.places) == ({"next_q_tile"} if counts else set()) and (memory.nbytes > 0) == counts
    operands = dict.fromkeys(("q", "k", "v", "out"), Operand(0, (1,) * 4, (0, 0, 0)))
    (step,) = launches(plan, problem, config, operands, memory)
    assert ("workspace" in {base for _, base, _ in step.pointers}) == counts
