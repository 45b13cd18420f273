"""Where arrays lie in the workspace: apart, but for those that have their memory in turns."""

from __future__ import annotations

import itertools

import pytest
from test_plan import a_problem, plan_of

from s2o_cupy import S2OConfig
from s2o_cupy.arrays.operand import Operand
from s2o_cupy.plan.build import ALIGNMENT, InTurns, Place, Workspace, lay_out
from s2o_cupy.plan.launches import launches, workspace

BEFORE_ROUNDS = {"unit_means", "block_keys", "sampled_keys", "deviations"}  # what norms are made of
GROUPS = {"cluster_keys", "cluster_shares"}  # which rounds multiply with but for 8 bits
OF_ROUNDS = {"scores", "k_order", "order_head_scores", "middle", "middle_scores"}
OF_MOMENTS = {"part_products", "part_sums"}  # what they are made of


def of_last_queries(memory: Workspace) -> set[str]:
    return {name for name in memory.places if name.startswith("part_")} - OF_MOMENTS


def overlapping(memory: Workspace) -> set[frozenset[str]]:
    """Pairs of arrays that have memory in common."""

    def meet(a: Place, b: Place) -> bool:
        return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes

    pairs = itertools.combinations(memory.places.items(), 2)
    return {frozenset((one, other)) for (one, a), (other, b) in pairs if meet(a, b)}


def test_arrays_in_turns_share_what_the_larger_of_both_takes():
    memory = lay_out(
        [("zeros", (3,), "int32")],
        [("a", (100,), "int32"), InTurns([("b", (1000,), "uint8"), ("c", (10,), "uint8")], [("d", (500,), "uint8")]),
         InTurns([], [("e", (1,), "uint8")]), ("f", (0,), "float32"), ("g", (1,), "float32")],
    )  # fmt: skip
    assert (memory.zeroed, memory.nbytes) == (256, 256 + 512 + 1024 + 256 + 256 + 256)
    assert overlapping(memory) == {frozenset("bd")}
    assert all(place.offset % ALIGNMENT == 0 for place in memory.places.values())


@pytest.mark.parametrize(
    "options", [{}, {"clusters": 4}, {"unit": 1}, {"tail": "none"}, {"workspace_bytes": 1 << 20}], ids=str
)
@pytest.mark.parametrize("length", [600, 5000, 40_000])
@pytest.mark.parametrize("capability", [80, 90])
def test_scores_take_the_place_of_what_no_round_reads(capability, length, options):
    """Of groups where they have been made into rows of 8 bits; of nothing that a round still needs. Where each key is a
    group rows of 8 bits are made of the keys."""
    problem, config = a_problem(heads=32, kv_heads=8, seqlen_q=length), S2OConfig(dense_up_to=0, **options)
    plan = plan_of(problem, config, capability)
    memory = workspace(plan, problem, config)
    in_bytes = "unit_rows" in memory.places
    groups = set() if in_bytes and config.unit == config.groups else GROUPS
    assert in_bytes and {*memory.places} >= groups | BEFORE_ROUNDS | OF_ROUNDS
    assert groups or not GROUPS & {*memory.places}
    early = BEFORE_ROUNDS | (groups if in_bytes else set())
    turns = (of_last_queries(memory), OF_MOMENTS & {*memory.places}, early, OF_ROUNDS)
    for pair in overlapping(memory):
        assert max(len(pair & turn) for turn in turns) == 1 and pair <= set().union(*turns), pair
    assert memory.places["scores"].offset == min(memory.places[name].offset for name in early)


@pytest.mark.parametrize("rank", ["weight", "max", "mean"])
def test_other_orders_have_rounds_alone_in_the_place_of_the_last_queries(rank):
    problem, config = a_problem(heads=32, kv_heads=8, seqlen_q=40_000), S2OConfig(rank=rank)
    memory = workspace(plan_of(problem, config), problem, config)
    assert bool(overlapping(memory)) == bool(of_last_queries(memory)) == (rank == "weight")
    for pair in overlapping(memory):
        assert len(pair & of_last_queries(memory)) == len(pair & OF_ROUNDS) == 1, pair


@pytest.mark.parametrize("rank", ["query", "weight"])
@pytest.mark.parametrize("capability", [80, 90])
def test_last_queries_are_merged_before_anything_takes_their_place(capability, rank):
    problem, config = a_problem(heads=32, kv_heads=8, seqlen_q=40_000), S2OConfig(rank=rank)
    plan = plan_of(problem, config, capability)
    memory = workspace(plan, problem, config)
    operands = {name: Operand(0, (1, 32, 40_000, 128), (0, 0, 128)) for name in ("q", "k", "v", "out")}
    stages = [launch.stage for launch in launches(plan, problem, config, operands, memory)]
    assert stages[0] == "pass1" and {"part_lists", "last_queries", "merge_last"} == set(stages[1:4])
    assert not {"part_lists", "last_queries", "merge_last"} & set(stages[4:])
