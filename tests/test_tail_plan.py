"""What a plan launches for the tail: moments of the groups that segments have, and what adds it; no GPU is needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan import LIMITS, a_problem, plan_of

from s2o_cupy.arrays.operand import Operand
from s2o_cupy.plan.launches import launches, workspace
from s2o_cupy.plan.tail import MOMENT_ROWS
from s2o_cupy.spec import GRAIN_KEYS, Geometry, S2OConfig, moment_group, moment_keys


def launched(problem, config, **options):
    """Its plan and its launches."""
    plan, width = plan_of(problem, config), problem.head_dim
    of_q, of_k = (
        Operand(0, (1, n, length, width), (0, length * width, width))
        for n, length in ((problem.heads, problem.seqlen_q), (problem.kv_heads, problem.seqlen_k))
    )
    operands = {"q": of_q, "k": of_k, "v": of_k, "out": of_q}
    return plan, launches(plan, problem, config, operands, workspace(plan, problem, config), **options)


@pytest.mark.parametrize("path", ["portable", "hopper"])
def test_moments_of_the_groups_that_segments_have(path):
    """A chunk makes those of its own segments alone, of as many leading keys as the whole prompt's would."""
    problem, config = a_problem(seqlen_q=2000, seqlen_k=20_000), S2OConfig(tail="first_order", path=path)
    plan, found = launched(problem, config)
    memory, steps = workspace(plan, problem, config), {x.stage: x for x in found}
    groups = sorted({plan.geometry.moment_group(n) for n in range(plan.geometry.segments)})
    assert groups == [moment_group(18_000), moment_group(19_900)]
    adder = "pass2" if path == "hopper" else "add_tail"
    of_adder = steps[adder].params["attention"] if path == "hopper" else steps[adder].params  # behind tensor maps
    for params in (steps["key_moments"].params, of_adder):
        assert (params["first_group"], params["groups"]) == (groups[0], 2)
    grain = 2 ** plan.geometry.grain_shift
    assert grain == 16  # 18,000 is so many times an odd number
    parts = moment_group(moment_keys(groups[1]) // grain)
    for stage in ("part_moments", "key_moments"):
        assert (steps[stage].params["parts"], steps[stage].params["grain_shift"]) == (parts, 4)
    assert steps["part_moments"].blocks == 2 * parts and steps["key_moments"].blocks == 2 * 128 // MOMENT_ROWS
    assert memory.places["part_products"].shape == (2, parts, 128, 128)
    assert memory.places["covariances"].shape == (2, 2, 128, 128)
    assert ("add_tail" in steps) == (path == "portable")
    bases = {place: name for place, name, _ in steps[adder].pointers}
    places = dict(steps[adder].kernel.family.params.pointers)
    assert bases[places["lse"]] == "lse" and bases[places["covariances"]] == "workspace"
    assert "lse" in memory.places  # where nobody asks for it
    plain = S2OConfig(tail="none", path=path)
    assert "covariances" not in workspace(plan_of(problem, plain), problem, plain).places


@given(
    st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 400), st.integers(0, 300), st.sampled_from([1, 8, 16]),
    st.booleans(),
)  # fmt: skip
def test_moments_of_segments_are_those_of_whole_grains(seqlen_q, before, segment, window, unit, is_causal):
    """So parts of the keys need end nowhere else; a call of some whole segments has the grain of the whole."""
    whole = Geometry(seqlen_q, seqlen_q + before, segment, window, is_causal, unit)
    grain = 1 << whole.grain_shift
    assert 1 <= grain <= GRAIN_KEYS
    for n in range(whole.segments):
        assert moment_keys(whole.moment_group(n)) % grain == 0
    if is_causal:
        for n in range(0, whole.segments, 3):
            begin, end = whole.queries(n)[0], whole.queries(min(n + 1, whole.segments - 1))[1]
            chunk = Geometry(end - begin, before + end, segment, window, is_causal, unit)
            assert chunk.grain_shift == whole.grain_shift


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("compute_capability", [80, 86, 90, 120])
def test_a_block_of_add_tail_fits(compute_capability, head_dim):
    problem = a_problem(seqlen_q=9000, head_dim=head_dim)
    config = S2OConfig(tail="first_order", path="portable")
    kernel = plan_of(problem, config, compute_capability).method.tail.add_tail
    assert kernel.shared_bytes <= LIMITS[compute_capability].shared_per_block


@pytest.mark.parametrize(("path", "head_dim", "block_m", "functions"), [
    ("hopper", 40, 128, ["pass2_tail_sm90"]), ("hopper", 128, 128, ["pass2_boxes_tail_sm90"]),
    ("hopper", 128, 64, ["pass2_sm90", "add_tail"]), ("hopper", 136, 128, ["pass2_sm90", "add_tail"]),
    ("portable", 128, 128, ["pass2", "add_tail"]),
])  # fmt: skip
def test_who_adds_the_tail(path, head_dim, block_m, functions):
    """On Hopper pass 2 itself, where a tile of keys is as large as a sample."""
    problem, config = a_problem(seqlen_q=9000, head_dim=head_dim), S2OConfig(path=path, block_m=block_m)
    _, steps = launched(problem, config)
    assert [x.kernel.function for x in steps if x.stage in ("pass2", "add_tail")] == functions
    _, without = launched(problem, config, adds_tail=False)
    plain = functions[0].replace("_tail", "")
    assert [x.kernel.function for x in without if x.stage in ("pass2", "add_tail")] == [plain]
    pass2 = next(x.kernel for x in steps if x.stage == "pass2")
    assert pass2.shared_bytes <= LIMITS[90].shared_per_block
