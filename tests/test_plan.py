"""What will be launched, for any problem and any device; no GPU is needed to decide it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2o_cupy.arrays.operand import Operand
from s2o_cupy.plan.build import geometry_of, lay_out
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.kernels import Inputs
from s2o_cupy.plan.launch_plan import LaunchPlan, padded_head_dim
from s2o_cupy.plan.launches import launches, workspace
from s2o_cupy.plan.paths import MAX_STAGES, PORTABLE, attention_shared, blocks_that_fit, stages_for, step_for
from s2o_cupy.plan.rounds import MAX_GRID, STEP
from s2o_cupy.problem import Problem
from s2o_cupy.selection.methods import make_plan
from s2o_cupy.selection.orders.pooled import HOPPER_SCORE_KEYS, HOPPER_SCORE_ROWS, score_blocks
from s2o_cupy.selection.orders.query import (
    cluster_keys_of_block,
    query_weight_blocks,
    query_weight_parts,
    unit_rows_parts,
)
from s2o_cupy.selection.orders.weight import UNIT_KEYS_OF_BLOCK, unit_weight_blocks
from s2o_cupy.selection.s2o import BYTES_PER_CANDIDATE, S2O, middle_blocks, row_pairs, strata_blocks
from s2o_cupy.spec import (
    LOG2E,
    RANKS,
    STOP_LAG,
    UNIT_RANKS,
    UNITS,
    Geometry,
    S2OConfig,
)
from s2o_cupy.tools.catalogue import kernels_for

ARCHITECTURES = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
LIMITS = {cc: DeviceLimits.of_architecture(cc) for cc in ARCHITECTURES}


def plan_of(
    problem: Problem, config: S2OConfig, compute_capability: int = 90, aligned: bool = True, compact: bool = True
) -> LaunchPlan:
    return make_plan(problem, config, LIMITS[compute_capability], aligned, compact)


def a_problem(batch=1, heads=8, kv_heads=2, seqlen_q=1000, seqlen_k=None, head_dim=128, is_causal=True):
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    return Problem(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, "bfloat16", is_causal, 0.1)


@st.composite
def problems(draw):
    """A problem and a configuration; lengths up to where one segment's candidates fill the workspace."""
    is_causal = draw(st.booleans())
    kv_heads = draw(st.integers(1, 3))
    seqlen_q = draw(st.one_of(st.integers(1, 600), st.integers(1, 400_000)))
    more = draw(st.sampled_from([0, 0, 1, 1000, 300_000]))
    seqlen_k = seqlen_q + more if is_causal else draw(st.one_of(st.integers(1, 600), st.integers(1, 400_000)))
    lowest = max(1, -(-seqlen_q // 60))  # at most 60 segments, so that the test stays quick
    rank = draw(st.sampled_from(RANKS))
    config = S2OConfig(
        rank=rank,
        unit=draw(st.sampled_from(UNITS)) if rank in UNIT_RANKS else 1,
        segment=draw(st.integers(min(lowest, 8192), 8192)),
        block_m=draw(st.sampled_from([64, 128])),
        window=draw(st.sampled_from([0, 1, 500, 1_000_000])),
        workspace_bytes=draw(st.integers(1 << 20, 1 << 24)),
    )
    problem = a_problem(draw(st.integers(1, 4)), kv_heads * draw(st.integers(1, 9)), kv_heads, seqlen_q, seqlen_k)
    return Problem(**(problem.__dict__ | {"is_causal": is_causal})), config


def grids(problem: Problem, config: S2OConfig, plan: LaunchPlan) -> dict[str, int]:
    """Blocks of every launch, the largest where a kernel is launched several times."""
    sizes = {
        "pass1": plan.whole.rows * plan.pass1_tiles,
    }
    method, geometry = plan.method, problem.geometry(config)
    assert isinstance(method, S2O)
    if geometry.orders_queries(config.block_m):
        sizes |= {"guides": problem.batch * problem.kv_heads * 2, "rank_queries": plan.whole.rows}
    elif config.pools_queries:
        sizes["pool_queries"] = plan.whole.rows
    if config.rank == "weight" and plan.chunks and geometry.units:
        blocks = -(-geometry.units * geometry.unit // UNIT_KEYS_OF_BLOCK)
        sizes["unit_keys"] = problem.batch * problem.kv_heads * blocks
    if config.rank == "query" and plan.chunks and geometry.units:
        kv_heads, heads = problem.batch * problem.kv_heads, problem.batch * problem.heads
        sizes["unit_clusters"] = kv_heads * -(-geometry.units * geometry.unit // cluster_keys_of_block(128))
        sizes["unit_rows"] = kv_heads * -(-geometry.units // 128)  # more only where these are few
        tiles = -(-min(geometry.segment, problem.seqlen_q) // 128)
        sizes["query_norms"] = heads * geometry.segments * tiles
    for chunk in plan.chunks:
        if config.rank == "query":
            of_scores = "query_weights", query_weight_blocks(method.order.kernel, chunk)
        elif config.rank == "weight":
            of_scores = "unit_weights", unit_weight_blocks(method.order.kernel, chunk)
        else:
            row_blocks, key_blocks = score_blocks(method.order.kernel, chunk, method.setting.limits)
            of_scores = "key_scores", chunk.heads // chunk.shared_heads * row_blocks * key_blocks
        for name, size in (
            of_scores,
            ("key_strata", row_pairs(chunk) * max(1, strata_blocks(chunk))),  # 0 blocks are not launched
            ("key_middle", chunk.rows * max(1, middle_blocks(chunk))),
            ("key_order_head", chunk.rows),
            ("pass2", chunk.rows * plan.tiles),
        ):
            sizes[name] = max(sizes.get(name, 0), size)
    return sizes


def test_what_kernels_are_told_of_a_geometry():
    """Runs of segments only where some are drawn: 3 of 10, one of the first four and of three each."""
    found = geometry_of(Geometry(1000, 1100, 100, window=5000, is_causal=False, unit=8), 64)
    assert found == {
        "seqlen_q": 1000, "seqlen_k": 1100, "segment": 100, "window": 1100, "is_causal": False, "head_dim": 64,
        "unit_shift": 3, "drawn": 0, "least_run": 0, "longer_runs": 0,
    }  # fmt: skip
    drawn = geometry_of(Geometry(1000, 1000, 100, drawn=3), 64)
    assert (drawn["drawn"], drawn["least_run"], drawn["longer_runs"]) == (3, 3, 1)


def test_an_array_of_a_workspace_is_an_operand():
    memory = lay_out([], [("a", (5,), "int32"), ("b", (2, 3, 10, 64), "uint16"), ("c", (1, 3, 1, 64), "uint16")])
    at = (1 << 20) + memory.places["b"].offset
    assert memory.operand("b", 1 << 20) == Operand(at, (2, 3, 10, 64), (1920, 640, 64))
    assert memory.operand("c", 0).strides == (0, 64, 0)  # of one, no stride


@pytest.mark.parametrize(
    ("capability", "page_size", "gathers"), [(90, 0, False), (90, 64, False), (90, 1, True), (80, 1, False)]
)
def test_rows_of_pages_are_gathered_where_no_box_brings_them(capability, page_size, gathers):
    config = S2OConfig(dense_up_to=0)
    plan = make_plan(a_problem(), config, LIMITS[capability], aligned=True, compact=True, page_size=page_size)
    assert plan.gathers_pages == gathers


@given(problems())
@settings(deadline=None)
def test_grids_are_what_a_device_launches(case):
    problem, config = case
    for name, size in grids(problem, config, plan_of(problem, config)).items():
        assert 1 <= size <= MAX_GRID, name


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 65536, "heads": 16, "seqlen_q": 128},
        {"batch": 1 << 20, "heads": 256, "kv_heads": 1, "seqlen_q": 8},
        {"batch": 1, "heads": 70_000, "kv_heads": 70_000, "seqlen_q": 3},
        {"batch": 1 << 30, "heads": 1, "kv_heads": 1, "seqlen_q": 1, "seqlen_k": 9, "head_dim": 1},
        {"batch": 64, "heads": 64, "seqlen_q": 1 << 20},
        {"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 1, "seqlen_k": 1 << 30},
        {"batch": 1, "heads": 128, "kv_heads": 128, "seqlen_q": 1 << 22, "is_causal": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("workspace_bytes", [1 << 26, 1 << 30, 1 << 50])
def test_a_huge_problem_fits_or_is_refused_at_once(changes, workspace_bytes):
    """Before anything is allocated, and without counting through billions of rounds."""
    problem = a_problem(**changes)
    for config in (
        S2OConfig(workspace_bytes=workspace_bytes),
        S2OConfig(rank="max", pooled_queries=64, workspace_bytes=workspace_bytes),
        S2OConfig(segment=64, block_m=64, workspace_bytes=workspace_bytes),
    ):
        pairs = problem.batch * problem.heads * problem.geometry(config).segments
        if pairs <= MAX_GRID and pairs * problem.seqlen_k * BYTES_PER_CANDIDATE > workspace_bytes << 14:
            continue  # tens of thousands of rounds: long to plan, and far longer to compute
        try:
            plan = plan_of(problem, config)
        except ValueError as error:
            assert "blocks; accepted: up to 2147483647" in str(error)
            assert "\n" not in str(error)
        else:
            assert max(grids(problem, config, plan).values()) <= MAX_GRID


@pytest.mark.parametrize("pooled_queries", [1, 64])
def test_the_largest_grid(pooled_queries):
    config = S2OConfig(segment=64, rank="max", pooled_queries=pooled_queries)
    fits = MAX_GRID // 2  # guides has two blocks for a KV head
    assert plan_of(a_problem(batch=fits, heads=1, kv_heads=1, seqlen_q=64), config).whole.rows == fits
    with pytest.raises(ValueError, match=r"q has \d+ heads x 1 segments, \d+ blocks; accepted: up to 2147483647"):
        plan_of(a_problem(batch=fits + 1, heads=1, kv_heads=1, seqlen_q=64), config)


@given(problems())
@settings(deadline=None)
def test_blocks_of_key_scores_on_hopper(case):
    """They cover all rows and keys, none lies past the last key, and none has more keys than it should."""
    problem, config = case
    plan = plan_of(problem, replace(config, block_m=128, rank="mean", unit=1, pooled_queries=1))
    assert plan.method.order.kernel.function == "key_scores_sm90"
    for chunk in plan.chunks:
        row_blocks, key_blocks = score_blocks(plan.method.order.kernel, chunk, LIMITS[90])
        assert 0 <= row_blocks * HOPPER_SCORE_ROWS - chunk.shared_heads * chunk.segments < HOPPER_SCORE_ROWS
        tiles = chunk.longest // STEP
        tiles_each = -(-tiles // key_blocks)  # as the kernel counts
        assert (key_blocks - 1) * tiles_each < tiles <= key_blocks * tiles_each
        assert tiles_each * STEP <= 2 * HOPPER_SCORE_KEYS[1]


@pytest.mark.parametrize("seqlen", [16_384, 32_768, 65_536, 131_072, 1 << 20])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 32), (8, 2), (64, 8)])
def test_key_scores_on_hopper_fill_whole_waves(seqlen, heads, kv_heads):
    """Two blocks a multiprocessor: of 8 places no more than one stays empty, unless blocks are of the fewest keys.
    Blocks past the last key of their rows do not count."""
    plan = plan_of(a_problem(heads=heads, kv_heads=kv_heads, seqlen_q=seqlen), S2OConfig(rank="mean"))
    limits = LIMITS[90]
    assert 2 * (plan.method.order.kernel.shared_bytes + 1024) <= limits.shared_per_multiprocessor
    for chunk in plan.chunks:
        row_blocks, key_blocks = score_blocks(plan.method.order.kernel, chunk, LIMITS[90])
        tiles_each = -(-chunk.longest // STEP // key_blocks)
        segments = [min((i + 1) * HOPPER_SCORE_ROWS // chunk.shared_heads, chunk.segments) for i in range(row_blocks)]
        keys = [chunk.stride + (n - 1) * chunk.growth for n in segments]  # of the last row of each row block
        blocks = sum(-(-n // (tiles_each * STEP)) for n in keys) * (chunk.heads // chunk.shared_heads)
        waves = blocks / (2 * limits.multiprocessors)
        fewest = tiles_each * STEP <= HOPPER_SCORE_KEYS[0]
        assert fewest or waves >= 7 / 8 * -(-waves // 1), chunk


@pytest.mark.parametrize(
    ("seqlen", "kv_heads", "options", "parts"),
    [
        (8192, 8, {}, 4), (8704, 8, {}, 4), (16_384, 8, {}, 2), (17_408, 8, {}, 2), (32_768, 8, {}, 1),
        (131_072, 8, {}, 1), (32_768, 2, {}, 4),
        (8192, 1, {}, 8),
        (8192, 1, {"clusters": 2}, 4),  # a thread has four rows
        (8192, 1, {"path": "portable"}, 8),
        (8192, 1, {"path": "portable", "segment": 256}, 2),  # no rows, but two means of blocks
    ],
)  # fmt: skip
def test_few_runs_of_units_have_several_blocks(seqlen, kv_heads, options, parts):
    config = S2OConfig(dense_up_to=0, **options)
    plan = plan_of(a_problem(heads=4 * kv_heads, kv_heads=kv_heads, seqlen_q=seqlen), config)
    order, runs = plan.method.order, kv_heads * seqlen // 8 // 128
    assert unit_rows_parts(order.unit_rows, runs, order.in_bytes, LIMITS[90]) == parts


@pytest.mark.parametrize(
    ("capability", "changes", "options", "aligned", "expected"),
    [
        (80, {}, {}, True, "query_weights_int8"), (120, {}, {}, True, "query_weights_int8"),
        (80, {}, {"segment": 129}, True, "query_weights"), (80, {"head_dim": 250}, {}, False, "query_weights"),
        (90, {}, {}, True, "query_weights_sm90"), (90, {"head_dim": 129}, {}, True, "query_weights_int8"),
        (90, {}, {"path": "portable"}, True, "query_weights_int8"),
        (103, {}, {}, True, "query_weights"),  # which has next to no 8-bit integers
    ],
)  # fmt: skip
def test_what_queries_and_keys_are_multiplied_as(capability, changes, options, aligned, expected):
    """In 8 bits wherever it is faster: there are rows of them then."""
    problem, limits = a_problem(seqlen_q=5000, **changes), DeviceLimits.of_architecture(capability)
    config = S2OConfig(dense_up_to=0, **options)
    plan = make_plan(problem, config, limits, aligned)
    operands = dict.fromkeys(("q", "k", "v", "out"), Operand(0, (1,) * 4, (0, 0, 0)))
    memory = workspace(plan, problem, config)
    steps = launches(plan, problem, config, operands, memory)
    kernel = next(x.kernel for x in steps if x.stage == "unit_weights")
    assert kernel.function == expected
    rows = memory.places.get("unit_rows")
    assert (rows is not None) == (expected != "query_weights")
    of_rows = next(x.kernel.function for x in steps if x.stage == "unit_rows")
    assert of_rows == ("unit_rows_int8" if expected == "query_weights_int8" else "unit_rows")
    if rows is not None:  # a byte for an element, or for two of four that and four bits more
        of_four = 2.5 if expected == "query_weights_sm90" else 4
        assert rows.shape == (problem.kv_heads, 5 * 2 * 8, 64 * padded_head_dim(problem.head_dim) * of_four / 4)
    assert {x.kernel.name for x in steps} <= {x.name for x in kernels_for(capability)}


@pytest.mark.parametrize(
    ("heads", "seqlen", "parts"),
    [
        (32, 131072, 1), (32, 16384, 1), (24, 16384, 1), (12, 8192, 2), (6, 32768, 1), (6, 16384, 2), (4, 16384, 2),
        (1, 9000, 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("capability", [80, 90])
def test_few_blocks_of_query_weights_share_the_longest_rows(heads, seqlen, parts, capability):
    """On Hopper: so many that 132 multiprocessors have some five blocks each."""
    problem = a_problem(1, heads, 1, seqlen, seqlen)
    config = S2OConfig(dense_up_to=0, dense_last=0)
    plan = make_plan(problem, config, LIMITS[capability], True)
    kernel, chunk = plan.method.order.kernel, plan.chunks[0]
    parts = parts if capability == 90 else 1
    assert query_weight_parts(kernel, chunk, LIMITS[capability]) == parts
    operands = dict.fromkeys(("q", "k", "v", "out"), Operand(0, (1,) * 4, (0, 0, 0)))
    steps = launches(plan, problem, config, operands, workspace(plan, problem, config))
    step = next(x for x in steps if x.stage == "unit_weights")
    assert int(step.params["unit_parts"]) == parts
    assert step.blocks == parts * query_weight_blocks(kernel, chunk)


# ---------------------------------------------------------------- kernels of a device


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"compute_capability": 120}, "compute capability 12.0, not 9.0"),
        ({}, {"aligned": False}, "does not start on 16 bytes"),
        ({}, {"compact": False}, "more than 64 GiB apart"),
        ({"scale": 0.0}, {}, "scale is 0.0, not positive"),
        ({"scale": -1.0}, {}, "scale is -1.0, not positive"),
        ({"scale": 1e-40}, {}, "scale is 1e-40, which is 0 in float32"),
    ],
)
def test_what_the_hopper_kernels_cannot_run_goes_to_the_portable_ones(changes, options, message):
    problem = Problem(**(a_problem().__dict__ | changes))
    plan = plan_of(problem, S2OConfig(), **options)
    assert (plan.pass1.function, plan.pass2.function, plan.stop_lag) == ("pass1", "pass2", STOP_LAG["portable"])
    assert plan.path == "portable"
    with pytest.raises(ValueError, match=f"path is 'hopper', but .*{message}"):
        plan_of(problem, S2OConfig(path="hopper"), **options)


@pytest.mark.parametrize("head_dim", [64, 128, 136, 256])
def test_the_hopper_kernels_run_what_they_can(head_dim):
    for config in (S2OConfig(), S2OConfig(path="hopper"), S2OConfig(tau=0)):
        plan = plan_of(replace(a_problem(), head_dim=head_dim), config)
        assert (plan.pass1.function, plan.pass2.function) == ("pass1_sm90", "pass2_sm90")
        assert plan.stop_lag == STOP_LAG["hopper"]
        assert (plan.path, plan.path_reason) == ("hopper", None)


@pytest.mark.parametrize(
    ("changes", "config", "options", "reason"),
    [
        ({"scale": -1.0}, {}, {}, "scale is -1.0, not positive"),
        ({}, {"block_n": 64}, {}, "block_n is 64, not 128"),
        ({"head_dim": 256}, {"block_m": 64}, {}, "block_m is 64, not 128 with head_dim 256"),
        ({}, {}, {"aligned": False}, "a row of q, k, v or out does not start on 16 bytes, or head_dim is no multiple"),
        ({}, {}, {"compact": False}, "rows, heads or batches of q, k or v are in descending order of address"),
        ({"scale": -1.0}, {"tau": 0}, {}, "scale is -1.0, not positive"),  # a dense call too
        ({}, {"path": "portable"}, {}, None),  # as asked for
        ({"scale": -1.0}, {"path": "portable"}, {}, None),
        ({}, {}, {"compute_capability": 80}, None),  # there are no other kernels
        ({"scale": -1.0}, {}, {"compute_capability": 120}, None),
    ],
)
def test_a_plan_says_why_it_does_not_take_the_hopper_kernels(changes, config, options, reason):
    """Where they are to be had."""
    plan = plan_of(replace(a_problem(), **changes), S2OConfig(**config), **options)
    assert plan.path == "portable"
    assert (plan.path_reason or "").startswith(reason or "") and (plan.path_reason is None) == (reason is None)


@pytest.mark.parametrize("compute_capability", ARCHITECTURES)
def test_shared_memory_fits_a_block(compute_capability):
    limits = LIMITS[compute_capability]
    for kernel in kernels_for(compute_capability):
        assert 0 <= kernel.shared_bytes <= limits.shared_per_block, kernel.name
    longest = plan_of(a_problem(seqlen_q=1 << 17), S2OConfig(segment=8192), compute_capability)
    assert 8192 * 4 < longest.method.rank_queries.shared_bytes <= limits.shared_per_block


@pytest.mark.parametrize("compute_capability", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_m", [64, 128])
def test_a_second_stage_never_costs_a_block(compute_capability, head_dim, block_m):
    limits = LIMITS[compute_capability]
    stages, step = stages_for(head_dim, block_m, limits), step_for(head_dim, block_m, limits)
    of_one = blocks_that_fit(head_dim, block_m, 1, limits, step)
    assert attention_shared(head_dim, block_m, stages, step) <= limits.shared_per_block
    assert blocks_that_fit(head_dim, block_m, stages, limits, step) == of_one >= 1
    assert stages == MAX_STAGES or blocks_that_fit(head_dim, block_m, stages + 1, limits, step) < of_one


def test_shared_memory_of_architectures():
    """In KiB of a multiprocessor, as the CUDA C++ Programming Guide has them; a block may have all but one."""
    kib = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 110: 228, 120: 100, 121: 100}
    for architecture, limits in LIMITS.items():
        assert limits == DeviceLimits(architecture, (kib[architecture] - 1) * 1024, kib[architecture] * 1024)


def test_a_block_may_take_all_of_its_shared_memory():
    size = attention_shared(128, 128, 1)
    for more, blocks in ((0, 1), (-1, 0), (1, 1)):
        assert blocks_that_fit(128, 128, 1, DeviceLimits(80, size + more, size + 1024)) == blocks


@pytest.mark.parametrize(("head_dim", "halved"), [(64, False), (128, True), (256, True)])
def test_steps_of_a_pass_with_a_tau_for_each_row(head_dim, halved):
    """Registers hold the taus besides 64 elements of a row, not besides more."""
    pass2 = PORTABLE.pass2(Inputs("float16", head_dim), LIMITS[80], 128)
    laddered = PORTABLE.laddered(pass2)
    assert (laddered.step, pass2.step) == (pass2.step // 2 if halved else pass2.step, pass2.step)
    assert laddered.shared_bytes == attention_shared(head_dim, pass2.block_m, pass2.stages, laddered.step)


def test_stages_by_architecture():
    """(head_dim, block_m) -> stages, as the sizes of shared memory give them."""
    stages = {
        cc: [stages_for(d, m, LIMITS[cc]) for d, m in itertools.product((64, 128, 256), (64, 128))]
        for cc in ARCHITECTURES
    }
    assert stages[80] == stages[87] == [2, 2, 1, 1, 2, 1]
    assert stages[86] == stages[89] == stages[120] == [2, 1, 2, 2, 1, 1]
    assert stages[90] == stages[100] == [2, 2, 2, 2, 1, 2]


def test_tiles_of_large_heads():
    """8 warps hold 128 rows of 256 columns, and keys come 32 at a time where memory is short; block_n counts keys."""
    config = S2OConfig(block_n=192)
    for cc, step, pass1_rows in ((80, 64, 128), (86, 32, 128), (90, 64, 64), (100, 64, 64), (120, 32, 128)):
        problem = a_problem(head_dim=256, seqlen_q=20_000)
        plan = plan_of(problem, config, cc)
        assert (plan.pass2.head_dim, plan.pass2.threads, plan.pass2.step) == (256, 256, step)
        assert (plan.pass1.block_m, plan.pass1.threads) == (pass1_rows, 2 * pass1_rows)
        assert plan.pass1_tiles == config.segment // pass1_rows
        operand = Operand(0, (1, 8, 20_000, 256), (0, 20_000 * 256, 256))
        operands = dict.fromkeys(("q", "k", "v", "out"), operand)
        steps = launches(plan, problem, config, operands, workspace(plan, problem, config))
        assert all(x.params["steps_per_tile"] * step == 192 for x in steps if x.stage == "pass2")


@pytest.mark.parametrize("options", [{}, {"tau": 0.0}], ids=str)
def test_hopper_tiles_are_the_same_for_every_head_dim(options):
    """128 queries: not those of the portable pass 1, which has fewer of a large head_dim."""
    plans = [plan_of(a_problem(head_dim=n, seqlen_q=20_000), S2OConfig(**options)) for n in (64, 128, 136, 256)]
    assert {(plan.path, plan.pass1.block_m) for plan in plans} == {("hopper", 128)}
    rows = 20_000 if options else S2OConfig().segment
    assert {(plan.pass1_tiles, plan.tiles) for plan in plans} == {(-(-rows // 128),) * 2}


@pytest.mark.parametrize("scale", [0.1, -0.1, 1e38])
def test_capped_scores_among_the_parameters(scale):
    problem, config = replace(a_problem(seqlen_q=20_000), softcap=4.0, scale=scale), S2OConfig(path="portable")
    plan = plan_of(problem, config)
    operands = dict.fromkeys(("q", "k", "v", "out"), Operand(0, (1, 8, 20_000, 128), (0, 20_000 * 128, 128)))
    steps = launches(plan, problem, config, operands, workspace(plan, problem, config))
    found = {x.stage: x.params for x in steps}
    for stage in ("pass1", "pass2"):  # cap_scale * q.k is what tanh takes, and scale_log2 its factor
        assert found[stage]["scale_log2"] == pytest.approx(4 * LOG2E)
        assert found[stage]["cap_scale"] == pytest.approx(abs(scale) / 4)
    assert found["unit_weights"]["scale_log2"] == pytest.approx(scale * LOG2E)  # with its sign: q is read as it is


def test_norms_of_queries_find_their_head_s_keys():
    """By the tiles of a head and the query heads of a KV head, so that no block divides for them."""
    problem, config = a_problem(heads=8, kv_heads=2, seqlen_q=20_000), S2OConfig()
    plan = plan_of(problem, config)
    of_q, of_k = (Operand(0, (1, n, 20_000, 128), (0, 20_000 * 128, 128)) for n in (8, 2))
    operands = {"q": of_q, "k": of_k, "v": of_k, "out": of_q}
    (step,) = (
        x for x in launches(plan, problem, config, operands, workspace(plan, problem, config))
        if x.stage == "query_norms"
    )  # fmt: skip
    tiles = -(-20_000 // 128)
    assert (step.params["shared_heads"], step.params["head_tiles"], step.params["tiles"]) == (4, tiles, 1)
    assert step.blocks == 8 * tiles


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compute_capability", ARCHITECTURES)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("head_dim", [1, 33, 64, 65, 80, 128, 129, 256])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_every_kernel_that_a_plan_chooses_is_compiled_ahead(compute_capability, aligned, head_dim, block_m, softcap):
    """``s2o compile`` misses none but capped scores of unaligned rows, of which it has a sample; only the sort's size,
    which the text does not hold, may differ."""
    problem = replace(a_problem(head_dim=head_dim, seqlen_q=5000), softcap=softcap)
    ahead = {kernel.name for kernel in kernels_for(compute_capability)}
    operands = {name: Operand(0, (1, 8 if name in ("q", "out") else 2, 5000, head_dim), (0, 0, 0))
                for name in ("q", "k", "v", "out")}  # fmt: skip
    for rank in RANKS:
        config = S2OConfig(block_m=block_m, rank=rank, dense_up_to=0)
        plan = plan_of(problem, config, compute_capability, aligned)
        assert plan.pass1.softcap == plan.pass2.softcap == (softcap > 0)
        assert plan.pass1.head_dim == plan.pass2.head_dim == padded_head_dim(head_dim)
        memory = workspace(plan, problem, config)
        for kernel in {x.kernel for x in launches(plan, problem, config, operands, memory)}:
            left_out = kernel.softcap and not kernel.aligned and kernel.head_dim != 128
            assert (kernel.name in ahead) is not left_out


@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 1000, 1024, 1025, 9000])
@pytest.mark.parametrize("segment", [1, 100, 1024, 8192])
def test_the_sort_holds_a_segment(seqlen_q, segment):
    slots = plan_of(a_problem(seqlen_q=seqlen_q), S2OConfig(segment=segment)).method.sort_slots
    rows = max(32, min(seqlen_q, segment))  # a warp's slots are the least
    assert slots & (slots - 1) == 0 and rows <= slots < 2 * rows


