"""Paged caches: which kernels a plan takes, what they are given, and that they compile. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from s2o_cupy import S2OConfig
from s2o_cupy.arrays.operand import Layout, Operand, Paging, Scale
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.launch_plan import COLLECT_ROWS
from s2o_cupy.plan.launches import launches, workspace
from s2o_cupy.problem import Problem
from s2o_cupy.selection.methods import make_plan
from s2o_cupy.spec import RANKS
from s2o_cupy.tools.catalogue import kernels_for

PROBLEM = Problem(1, 8, 2, 5000, 5000, 128, "bfloat16", True, 0.1)
READERS = (  # of k or v
    "pass1", "pass2", "pass2_tail", "guides", "part_moments", "add_tail", "unit_keys", "unit_clusters", "key_scores",
)


def operands_of(problem, paging):
    """q, k, v and out where k and v are a cache, or with no paging arrays."""
    p = problem
    of_q, of_k = (1, p.heads, p.seqlen_q, p.head_dim), (1, p.kv_heads, p.seqlen_k, p.head_dim)
    if paging is not None:
        of_k = (paging.pages, p.kv_heads, paging.page_size, p.head_dim)
    row = p.kv_heads * p.head_dim
    operands = {name: Operand(0, of_q, (0, p.seqlen_q * p.head_dim, p.head_dim)) for name in ("q", "out")}
    return operands | {name: Operand(0, of_k, (of_k[2] * row, p.head_dim, row)) for name in "kv"}


def kernels_of(plan, problem, config, paging=None):
    """By the function without its path, all that a call launches."""
    memory = workspace(plan, problem, config)
    steps = launches(plan, problem, config, operands_of(problem, paging), memory, paging)
    return {x.kernel.function.removesuffix("_sm90").removesuffix("_int8"): x.kernel for x in steps}


@pytest.mark.parametrize("path", ["auto", "portable"])
@pytest.mark.parametrize("rank", ["query", "weight"])
def test_what_the_kernels_get(path, rank):
    config = S2OConfig(path=path, dense_up_to=0, tail="first_order", rank=rank)
    plan = make_plan(PROBLEM, config, DeviceLimits.of_architecture(90), True, True, 64)
    paging = Paging(0, 100, 64, 90)
    steps = launches(plan, PROBLEM, config, operands_of(PROBLEM, paging), workspace(plan, PROBLEM, config), paging)
    for step in steps:
        params, shift = step.params, 0
        function = step.kernel.function.removesuffix("_int8")
        of_keys = function == "unit_rows" and plan.method.order.of_keys
        if function in ("pool_queries", "unit_rows", "query_norms", "key_moments") and not of_keys:
            # They read no keys.
            assert not step.kernel.paged
            continue
        if "attention" in params.dtype.fields:
            params, shift = params["attention"], params.dtype.fields["attention"][1]
        assert params["pages"].tolist() == (0, 100, 6)
        assert params["k"].tolist() == (0, 16384, 128, 256)
        addresses = {offset: base for offset, base, further in step.pointers if further == 0}
        assert addresses[shift + params.dtype.fields["pages"][1]] == "pages"
        assert addresses[shift + params.dtype.fields["k"][1]] == "k"
    assert {step.kernel.paged for step in steps} == {True, False}


def test_groups_of_keys_lie_side_by_side_wherever_keys_lie():
    """unit_rows reads pages where it makes floats or integers of keys themselves; with 16 bits none does."""
    of_pages = {capability: {(k.function, k.head_dim) for k in kernels_for(capability) if k.paged}
                for capability in (80, 90)}  # fmt: skip
    rows = {x: {dim for name, dim in of_pages[x] if name == "unit_rows"} for x in of_pages}
    integers = {x: {dim for name, dim in of_pages[x] if name == "unit_rows_int8"} for x in of_pages}
    assert rows == {80: set(), 90: {64, 128}}
    assert integers[80] == integers[90] == {64, 128, 256}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compute_capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("path", ["auto", "portable"])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize(("head_dim", "softcap"), [(40, 0.0), (128, 0.0), (128, 30.0), (256, 0.0)])
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("rank", RANKS)
def test_a_plan_of_a_cache(compute_capability, path, block_m, head_dim, softcap, page_size, rank):
    """It takes the path and the rounds of one array, and kernels that were compiled ahead."""
    config = S2OConfig(block_m=block_m, path=path, tail="first_order", rank=rank, dense_up_to=0)
    limits = DeviceLimits.of_architecture(compute_capability)
    problem = replace(PROBLEM, head_dim=head_dim, softcap=softcap)
    plan, other = (make_plan(problem, config, limits, True, True, paged) for paged in (page_size, 0))
    assert (plan.path, plan.path_reason) == (other.path, other.path_reason)
    assert (plan.stop_lag, plan.chunks, plan.whole) == (other.stop_lag, other.chunks, other.whole)
    ahead = {kernel.name for kernel in kernels_for(compute_capability)}
    paging = Paging(0, 400, page_size, 350)
    of_arrays = kernels_of(other, problem, config)
    for function, kernel in kernels_of(plan, problem, config, paging).items():
        assert kernel.name in ahead
        name = function.replace("_boxes", "")
        for suffix in ("_whole_rows", "_gathered", "_listed"):
            name = name.removesuffix(suffix)
        reads_keys = name in READERS or (name == "unit_rows" and plan.method.order.of_keys)
        assert kernel.paged == reads_keys
        assert kernel.paged or kernel == of_arrays[function]
    assert plan.pass1.softcap == plan.pass2.softcap == (softcap > 0)
    hopper = compute_capability == 90 and path == "auto" and (block_m == 128 or head_dim <= 128)
    of_hopper = "pass1_whole_rows_sm90" if page_size == 16 and head_dim > 64 else "pass1_sm90"
    assert plan.pass1.function == (of_hopper if hopper else "pass1")


@pytest.mark.parametrize(
    ("page_size", "head_dim", "function"),
    [
        (1, 128, "pass2_tail"), (4, 128, "pass2_tail"), (8, 128, "pass2_boxes_tail"), (256, 128, "pass2_boxes_tail"),
        (16, 64, "pass2_tail"), (16, 256, "pass2_boxes"), (16, 96, "pass2_tail"),
    ],
)  # fmt: skip
def test_units_that_the_copy_engine_brings_from_pages(page_size, head_dim, function):
    """Where a page holds each of their boxes, as from one array."""
    problem, config = replace(PROBLEM, head_dim=head_dim), S2OConfig(dense_up_to=0)
    plan = make_plan(problem, config, DeviceLimits.of_architecture(90), True, True, page_size)
    assert function in kernels_of(plan, problem, config, Paging(0, 5000, page_size, 5000))


def test_a_plan_of_unaligned_rows_is_refused():
    with pytest.raises(ValueError, match="a row of q, k_pages, v_pages or out does not start on 16 bytes"):
        make_plan(PROBLEM, S2OConfig(), DeviceLimits.of_architecture(90), False, True, 16)


@pytest.mark.parametrize(
    ("page_size", "seqlen_q", "seqlen_k", "window", "head_dim", "rows"),
    [
        (8, 4096, 4096, 0, 128, 0),  # gathering is faster
        (16, 4096, 4096, 0, 128, 16),
        (16, 4096, 4096, 0, 256, 16),
        (16, 4096, 4096, 0, 40, 16),
        (16, 4096, 4096, 0, 96, 0),  # a box would have another head's columns
        (16, 4000, 4093, 0, 128, 0),  # segments begin with the units of 8 that key 93, 1117, ... stand in
        (16, 4000, 4099, 0, 128, 16),
        (32, 4096, 4096, 0, 128, 32),
        (32, 4000, 4096, 0, 128, 32),  # segments begin with key 96, 1120, ...
        (64, 4000, 4096, 0, 128, 0),
        (64, 4000, 4096, 96, 128, 64),  # and read from key 0, 1024, ...
        (64, 4000, 4001, 4001, 128, 64),  # every segment reads from key 0
        (256, 4096, 4096, 0, 128, 128),  # a tile's rows
        (256, 4096, 4096, 0, 256, 64),
        (256, 4096, 4096, 64, 128, 0),
        (256, 4096, 4096, 64, 256, 64),
    ],
)
def test_boxes_of_pages(page_size, seqlen_q, seqlen_k, window, head_dim, rows):
    """They begin where tiles may, and end with their page."""
    problem = replace(PROBLEM, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim)
    config = S2OConfig(window=window, dense_up_to=0)
    plan = make_plan(problem, config, DeviceLimits.of_architecture(90), True, True, page_size)
    assert plan.map_boxes == ((128, rows, rows) if rows else ())
    whole_rows = rows == 16 and head_dim > 64
    assert plan.maps_whole_rows == whole_rows
    kind = "whole_rows_" if whole_rows else "" if rows else "gathered_"
    assert plan.pass1.function == f"pass1_{kind}sm90"


@pytest.mark.parametrize(
    ("segment", "unit", "rows"),
    [
        (128, 1, 0),  # keys 96, 224, ...: no multiples of 64
        (128, 32, 0),
        (128, 64, 64),  # the units that these stand in
        (1024, 128, 64),
        (192, 128, 64),
        (200, 64, 0),  # segments begin anywhere in a unit
    ],
)
def test_boxes_begin_with_a_unit(segment, unit, rows):
    problem = replace(PROBLEM, seqlen_q=4000, seqlen_k=4096)
    config = S2OConfig(segment=segment, unit=unit, dense_up_to=0)
    plan = make_plan(problem, config, DeviceLimits.of_architecture(90), True, True, 64)
    assert plan.map_boxes == ((128, rows, rows) if rows else ())
    if rows:
        assert all(plan.geometry.dense_keys(n)[0] % rows == 0 for n in range(plan.geometry.segments))


@pytest.mark.parametrize(
    ("page_size", "changes", "of_config", "collects"),
    [
        (8, {}, {}, True),
        (1, {"is_causal": False, "softcap": 30.0}, {}, True),
        (16, {}, {}, False),  # boxes
        (8, {"seqlen_q": COLLECT_ROWS // 4}, {}, True),
        (8, {"seqlen_q": COLLECT_ROWS // 4 - 1}, {}, False),
        (8, {}, {"workspace_bytes": 2 * 2 * 4096 * 128 * 2}, True),
        (8, {}, {"workspace_bytes": 2 * 2 * 4096 * 128 * 2 - 1}, False),
        (8, {}, {"dense_up_to": 0}, False),
        (8, {}, {"path": "portable"}, False),
        (8, {"head_dim": 256}, {}, True),
        (8, {"scale": -1.0}, {}, False),
    ],
)
def test_dense_calls_collect_small_pages(page_size, changes, of_config, collects):
    """Where the copy is repaid and fits into the workspace; pass 1 is then that of arrays."""
    problem = replace(PROBLEM, **{"seqlen_q": 4096, "seqlen_k": 4096} | changes)
    config = S2OConfig(**{"dense_up_to": 10_000} | of_config)
    plan = make_plan(problem, config, DeviceLimits.of_architecture(90), True, True, page_size)
    assert (plan.collect_pages is not None) == collects
    if not collects:
        return
    assert plan.collect_pages.name in {kernel.name for kernel in kernels_for(90)}
    assert plan.pass1 == make_plan(problem, config, DeviceLimits.of_architecture(90), True).pass1
    memory = workspace(plan, problem, config)
    dim = problem.head_dim
    row = problem.kv_heads * page_size * dim
    cache = Operand(0, (999, problem.kv_heads, page_size, dim), (row, dim, problem.kv_heads * dim))
    heads = (0, problem.seqlen_q * dim, dim)
    of_q = Operand(0, (1, problem.heads, problem.seqlen_q, dim), heads)
    operands = {"q": of_q, "k": cache, "v": cache, "out": of_q}
    first, second = launches(plan, problem, config, operands, memory, Paging(0, 0, page_size, 999))
    assert (first.stage, second.stage) == ("collect_pages", "pass1")
    assert first.blocks * 4 * 256 >= int(first.params["chunks"]) == 2 * 4096 * dim * 2 // 16
    found = memory.operand("values", 1 << 20)
    assert found.pointer == (1 << 20) + memory.places["values"].offset
    assert (found.shape, found.strides) == ((1, 2, 4096, dim), (0, 4096 * dim, dim))


@pytest.mark.parametrize(
    ("shape", "strides", "compact"),
    [
        ((1000, 8, 16, 128), (16384, 128, 1024), True),  # NHD
        ((1000, 8, 16, 128), (16384, 2048, 128), True),  # HND
        ((1000, 8, 16, 128), (-16384, 2048, 128), False),
        ((1000, 8, 16, 128), (16384, -2048, 128), False),
        ((2**21, 8, 16, 128), (16384, 2048, 128), True),  # just below 64 GiB
        ((2**21 + 1, 8, 16, 128), (16384, 2048, 128), False),
        ((1, 8, 2**25, 128), (0, 128, 1024), True),
        ((2, 8, 2**25, 128), (2**35, 128, 1024), False),
        ((1_048_000, 8, 16, 128), (16392, 128, 1024), True),  # counted by 8 elements, just below 2^31 of them
        ((1_049_000, 8, 16, 128), (16392, 128, 1024), False),
    ],
)
def test_how_far_apart_rows_of_a_cache_may_be(shape, strides, compact):
    assert Operand(0, shape, strides).is_compact_cache() is compact


@pytest.mark.parametrize(
    ("paging", "compact"),
    [
        (None, True),
        (Paging(0, 0, 1024, 2), False),
        (Paging(0, 0, 1024, 2, (Scale(1.0), Scale(1.0))), True),  # of 8 bits: read into arrays first
    ],
)
def test_sequences_may_be_further_apart_than_pages(paging, compact):
    problem = replace(PROBLEM, batch=2, seqlen_q=1024, seqlen_k=1024)
    of_q, of_k = (2**20, 2**17, 128), (2**35, 2**17, 128)  # 64 GiB
    layout = Layout((of_q, of_k, of_k, of_q), True, paging)
    assert layout.is_compact(layout.operands(problem)) is compact


def test_names_of_kernels():
    names = {kernel.name for kernel in kernels_for(90) if kernel.paged}
    assert all("paged" in name and "unaligned" not in name for name in names)
    hopper = ("pass1_sm90", "pass1_gathered_sm90", "pass2_sm90")
    assert {f"{function}-bfloat16-d128-s2-paged" for function in hopper} <= names
    assert not any("paged" in kernel.name for kernel in kernels_for(90) if not kernel.paged)
