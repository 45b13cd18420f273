"""What is made of a few KV heads' keys at a time where all would take much memory: groups of rank="query", moments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import has_gpu, has_hopper
from gpu_cases import Case, run_diff
from pages import differing
from test_paged_plan import operands_of
from test_plan import a_problem, plan_of

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.arrays.operand import Paging
from s2o_cupy.caches import clear_cache
from s2o_cupy.plan import tail
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.launches import launches, workspace
from s2o_cupy.selection.methods import make_plan
from s2o_cupy.selection.orders import query

ON_A_GPU = pytest.mark.skipif(not (has_gpu() and has_hopper()), reason="no Hopper GPU, which has both paths")
ONE_HEAD = 100 * 4 * 64 * 2  # bytes of a KV head's groups: 100 units of 4 groups, head_dim 64


@pytest.fixture(params=[1, 2 * ONE_HEAD, 3.5 * ONE_HEAD])
def limit(request, monkeypatch):
    """Some bytes, for one head, two or a sequence's three. Calls that were prepared with others are forgotten."""
    clear_cache()
    monkeypatch.setattr(query, "GROUPED_BYTES", int(request.param))
    yield int(request.param)
    clear_cache()


def planned(capability=90, **sizes):
    config = S2OConfig(clusters=4, dense_up_to=0)
    problem = a_problem(**{"batch": 2, "heads": 6, "kv_heads": 3, "seqlen_q": 800, "head_dim": 64, **sizes})
    return plan_of(problem, config, capability), problem, config


def starts_of(launch, name):
    """Bytes into the workspace at which a launch's pointer of that name starts."""
    (at,) = (offset for field, offset in launch.kernel.family.params.pointers if field == name)
    return [further for offset, base, further in launch.pointers if offset == at and base == "workspace"]


def test_all_heads_at_once_up_to_131072_tokens_of_8():
    sizes = {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128}
    for length, turns in ((131_072, [range(8)]), (131_200, [range(4), range(4, 8)])):
        plan, *_ = planned(**sizes, seqlen_q=length)
        assert plan.method.order.turns() == turns


def test_where_each_key_is_a_group_nobody_looks_for_groups():
    """Rows of 8 bits are made of the keys themselves, of all heads at once."""
    problem, config = a_problem(heads=32, kv_heads=8, seqlen_q=200_000, head_dim=128), S2OConfig()
    plan = plan_of(problem, config)
    memory = workspace(plan, problem, config)
    assert plan.method.order.turns() == [range(8)] and "unit_rows" in memory.places
    assert not {"cluster_keys", "cluster_shares"} & {*memory.places}
    made = {x.stage: x for x in launches(plan, problem, config, operands_of(problem, None), memory)}
    for stage in ("unit_keys", "unit_rows"):
        params = made[stage].kernel.family.params
        (at,) = (offset for field, offset in params.pointers if field == "cluster_keys")
        assert at not in [offset for offset, *_ in made[stage].pointers]  # null


def test_sequences_that_fit_share_a_turn():
    """As even turns as can be: a second of a few heads would leave most of a GPU idle."""
    sizes = {"heads": 32, "kv_heads": 8, "seqlen_q": 16_384, "head_dim": 128}
    for batch, turns in ((8, [range(64)]), (9, [range(40), range(40, 72)])):
        plan, *_ = planned(batch=batch, **sizes)
        assert plan.method.order.turns() == turns


@pytest.mark.parametrize("capability", [80, 90])
def test_every_head_has_a_turn(limit, capability):
    """In order, and none with heads of two sequences, as kernels find a head's sequence by counting."""
    plan, problem, config = planned(capability)
    turns = plan.method.order.turns()
    assert [*itertools.chain(*turns)] == [*range(6)]
    whole = all(heads.start % 3 == heads.stop % 3 == 0 for heads in turns)
    assert whole or all(heads.start // 3 == (heads.stop - 1) // 3 for heads in turns)
    assert max(map(len, turns)) == max(1, limit // ONE_HEAD)
    memory = workspace(plan, problem, config)
    made = launches(plan, problem, config, operands_of(problem, None), memory)
    assert sum(x.stage == "unit_rows" for x in made) == sum(x.stage == "unit_keys" for x in made) == len(turns)
    assert memory.places["cluster_keys"].shape[0] == max(map(len, turns))
    of_head = -(-800 // 256)  # unit_clusters: 256 keys a block of threads
    assert [x.blocks for x in made if x.stage == "unit_keys"] == [len(heads) * of_head for heads in turns]
    of_rows = ("key_exponents", 4) if capability == 90 else ("unit_scales", 128 * 4)
    of_clusters = [("unit_keys", "unit_means", 100 * 64 * 2), ("unit_keys", "sampled_keys", 4 * 64 * 2)]
    of_both = [("unit_rows", *x[1:]) for x in (*of_clusters, ("unit_rows", "deviations", 4 * 64 * 2))]
    for stage, name, bytes_of_head in (*of_clusters, *of_both, ("unit_rows", *of_rows)):
        written = [begin - memory.places[name].offset for x in made if x.stage == stage
                   for begin in starts_of(x, name)]  # fmt: skip
        assert written == [heads.start * bytes_of_head for heads in turns]


def offsets_of(launch, name):
    """Bytes from an array of the caller at which a launch's pointers of that name start."""
    return [further for _, base, further in launch.pointers if base == name]


@pytest.mark.parametrize("paging", [None, Paging(0, 100, 16, 200)])
@pytest.mark.parametrize(("at_once", "turns"), [(1, [1] * 6), (2, [2, 1, 2, 1]), (3, [3, 3]), (6, [6])])
def test_moments_of_some_heads_at_a_time(monkeypatch, at_once, turns, paging):
    """Where sums of parts of all heads' keys would take much memory: each turn's stand where the turn before had its
    own, and moments side by side."""
    problem, config = a_problem(batch=2, heads=6, kv_heads=3, seqlen_q=800, head_dim=64), S2OConfig(dense_up_to=0)
    plan = make_plan(problem, config, DeviceLimits.of_architecture(90), True, True, 0 if paging is None else 16)
    monkeypatch.setattr(tail, "PARTS_BYTES", at_once * plan.method.tail.parts * 64 * 66 * 4)
    memory = workspace(plan, problem, config)
    assert memory.places["part_products"].shape[0] == max(turns)
    operands = operands_of(problem, paging)
    made = launches(plan, problem, config, operands, memory, paging)
    parts, sums = ([x for x in made if x.stage == name] for name in ("part_moments", "key_moments"))
    starts = [sum(turns[:i]) for i in range(len(turns))]
    of_sequence, of_head = (2 * x for x in operands["k"].strides[:2])
    for first, count, part, total in zip(starts, turns, parts, sums, strict=True):
        assert part.blocks == count * plan.method.tail.parts and total.blocks == count * 64 // tail.MOMENT_ROWS
        sequence, head = divmod(first, 3)
        for name in "kv":
            assert offsets_of(part, name) == [(0 if paging else sequence * of_sequence) + head * of_head]
        assert offsets_of(part, "pages") == ([sequence * 100 * 4] if paging else [0])
        for name in ("mean_values", "covariances"):
            place = memory.places[name]
            assert starts_of(total, name) == [place.offset + first * place.nbytes // 6]
        assert starts_of(part, "part_products") == starts_of(total, "part_products")


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize("arrange", ["contiguous", "BSHD", "one head for all"])
@pytest.mark.parametrize("path", ["hopper", "portable"])
def test_turns_change_no_bit(limit, arrange, path):
    case = Case(batch=2, heads=6, kv_heads=3, seqlen_q=800, head_dim=64, options={"clusters": 4, "dense_up_to": 0},
                arrange=arrange)  # fmt: skip
    report = run_diff(case, path)
    assert report.ok, report.table()


@pytest.mark.gpu
@ON_A_GPU
@pytest.mark.parametrize(
    ("module", "bound", "options"),
    [
        (query, "GROUPED_BYTES", {"clusters": 4, "path": "hopper"}),
        (query, "GROUPED_BYTES", {"clusters": 4, "path": "portable"}),
        (tail, "PARTS_BYTES", {"path": "hopper"}), (tail, "PARTS_BYTES", {"path": "portable"}),
    ],
)  # fmt: skip
def test_outputs_are_those_of_all_heads_at_once(qkv, monkeypatch, module, bound, options):
    import cupy

    q, k, v = (cupy.asarray(x.astype(np.float16)) for x in qkv(1000, heads=6, kv_heads=3, batch=2, head_dim=64))
    config = S2OConfig(dense_up_to=0, **options)
    clear_cache()
    expected = s2o_attention(q, k, v, config=config)
    clear_cache()
    monkeypatch.setattr(module, bound, 1)
    np.testing.assert_array_equal(s2o_attention(q, k, v, config=config).get(), expected.get())
    clear_cache()


@pytest.mark.gpu
@ON_A_GPU
def test_in_pages(limit):
    case = Case(batch=2, heads=6, kv_heads=3, seqlen_q=300, seqlen_k=800,
                options={"clusters": 4, "dense_up_to": 0})  # fmt: skip
    assert differing(case, "hopper") == []
