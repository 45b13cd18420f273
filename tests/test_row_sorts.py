"""Which kernels put a round's rows in order: each row is one's alone, and none is launched for nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from test_plan import a_problem, plan_of, problems
from test_tail_plan import launched

from s2o_cupy.selection.s2o import whole_segments
from s2o_cupy.selection.s2o_kernels import OF_THREAD, SHORT_ROW, key_order_head, key_order_short, key_order_whole
from s2o_cupy.spec import ORDER_HEAD, ORDER_WHOLE, S2OConfig


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


@given(problems())
@settings(deadline=None)
def test_segments_of_long_rows(case):
    """Enough of the last segments for every row that key_order_whole sorts, and no more."""
    problem, config = case
    geometry = problem.geometry(config)
    for chunk in plan_of(problem, config).chunks:
        end = chunk.first_segment + chunk.segments
        sorts = [n for n in range(chunk.first_segment, end) if ORDER_HEAD < geometry.ranked(n) <= ORDER_WHOLE]
        count, all_are = whole_segments(geometry, chunk.first_segment, end)
        assert count == (end - sorts[0] if sorts else 0)
        assert all_are == (len(sorts) == chunk.segments)
