"""Which kernels put a round's rows in order: each row is one's alone, and none is launched for nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import a_problem
from test_tail_plan import launched

from s2o_cupy.plan.rounds import rounds
from s2o_cupy.problem import Problem
from s2o_cupy.selection.s2o import chunk_bytes, row_sorts, strata_blocks
from s2o_cupy.selection.s2o_kernels import OF_THREAD, SHORT_ROW, key_order_head, key_order_short, key_order_whole
from s2o_cupy.spec import ORDER_HEAD, ORDER_WHOLE, Geometry, S2OConfig


def test_a_block_has_a_place_for_each_unit_of_its_rows():
    kernels = {key_order_short(): SHORT_ROW, key_order_head(): ORDER_HEAD, key_order_whole(): ORDER_WHOLE}
    assert all(kernel.threads * OF_THREAD == most for kernel, most in kernels.items())


@pytest.mark.parametrize(
    ("seqlen", "options", "functions"),
    [
        (16_384, {}, ["key_order_short"]),
        (32_768, {}, ["key_order_short"]),
        (65_536, {}, ["key_order_head"]),
        (131_072, {}, ["key_order_whole", "key_order_head"]),
        (262_144, {}, ["key_strata", "key_order_whole", "key_order_head"]),
        (100_000, {"is_causal": False}, ["key_order_whole"]),
        (40_000, {"is_causal": False}, ["key_order_head"]),
        (300_000, {"is_causal": False}, ["key_strata", "key_order_head"]),
    ],
)  # fmt: skip
def test_kernels_of_a_length(seqlen, options, functions):
    """Of units of 8, in the round of the last segments. The last launch is the stage that ends ordering."""
    problem = a_problem(heads=8, kv_heads=2, seqlen_q=seqlen, head_dim=128, **options)
    _, steps = launched(problem, S2OConfig(dense_last=0, workspace_bytes=1 << 30))
    found = [x for x in steps if x.kernel.function.startswith(("key_order", "key_strata"))]
    first = list(dict.fromkeys(x.kernel.function for x in found))
    assert first == functions
    assert {x.kernel.function for x in found if x.stage == "rank_keys"} == {functions[-1]}


@st.composite
def many_rows(draw):
    """Geometries of long and short rows, and how many heads there are."""
    segment = draw(st.sampled_from([64, 100, 300, 1000, 2048]))
    seqlen_q = draw(st.integers(1, 30_000))
    seqlen_k = draw(st.integers(max(1, seqlen_q - 2000), 300_000))
    geometry = Geometry(
        seqlen_q, seqlen_k, segment, draw(st.sampled_from([0, 77, 5000])), draw(st.booleans()),
        draw(st.sampled_from([1, 4, 8, 16])), draw(st.integers(0, -(-seqlen_q // segment))),
    )  # fmt: skip
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return geometry, Problem(1, group * kv_heads, kv_heads, seqlen_q, seqlen_k, 64, "bfloat16", geometry.is_causal, 1.0)


@given(many_rows(), st.sampled_from([1 << 20, 1 << 24, 1 << 28]))
@settings(deadline=None)
def test_each_row_is_sorted_once(case, budget):
    """By the rows that kernels leave to others (key_order.cu)."""
    geometry, problem = case
    has = {
        "key_order_short": lambda units: True, "key_order_whole": lambda units: ORDER_HEAD < units <= ORDER_WHOLE,
        "key_order_head": lambda units: not ORDER_HEAD < units <= ORDER_WHOLE,
    }  # fmt: skip
    for chunk in rounds(problem, geometry, chunk_bytes, budget):
        rows = [
            (kernel, block % chunk.heads, chunk.first_segment + chunk.segments - 1 - block // chunk.heads)
            for kernel, blocks in row_sorts(chunk, geometry)
            for block in range(blocks)
        ]
        mine = [(k, head, n) for k, head, n in rows if has[k.function](geometry.ranked(n))]
        assert sorted((head, n) for _, head, n in mine) == [
            (head, chunk.first_segment + n) for head in range(chunk.heads) for n in range(chunk.segments)
        ]
        for kernel, _, n in mine:
            head_of_strata = kernel.function == "key_order_head" and strata_blocks(chunk) > 0
            assert geometry.ranked(n) <= kernel.threads * OF_THREAD or head_of_strata
