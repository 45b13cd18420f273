"""The comparison that `diff` makes, tried on stages that stand in for a GPU's: the reference in low precision.

Right stages pass; a fault planted in one stage is reported at that stage and at no earlier one.
"""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from gpu_cases import CASES

from s2o_cupy import S2OConfig, S2OError
from s2o_cupy.problem import Problem
from s2o_cupy.reference import key_order, ordering, s2o
from s2o_cupy.selection.orders.query import E4M3, INT8, WIDE
from s2o_cupy.spec import BLOCK_UNITS, KEY_EXPONENT, LOG2E, MOST_EXPONENT, QUERY_EXPONENT, Geometry
from s2o_cupy.tools.diff_query_weights import (
    QueryStages,
    _compare_exponents,
    as_e4m3,
    as_int8,
    capture,
    half_exponent,
    keep_two,
    longest_of_keys,
    step_of_int8,
)
from s2o_cupy.tools.diff_report import Row, Rows
from s2o_cupy.tools.diffing import GpuStages, compare, diff

STAGES = (
    "pooled_queries", "query order", "unit means", "groups", "shares", "block means", "8-bit exponents", "8-bit steps",
    "8-bit rows", "norms", "8-bit scales", "outliers", "key scores", "key order",
    "pass 1 state", "pass 1 output", "stop", "output", "lse",
)  # fmt: skip
CONFIGS = {
    "query": S2OConfig(segment=24, tau=0.05, block_m=16, block_n=32, unit=4, tail="none"),
    "paper": S2OConfig(segment=64, tau=0.05, block_m=16, block_n=32, rank="mean"),
    "weight": S2OConfig(segment=24, tau=0.05, block_m=16, block_n=32, unit=8, pooled_queries=5),
    "max": S2OConfig(segment=48, tau=0.02, block_m=32, block_n=32, rank="max", pooled_queries=5, window=20),
    "dense": S2OConfig(segment=64, tau=0, block_m=64, block_n=64),
}


def stand_in(q, k, v, problem: Problem, config: S2OConfig, number: str = WIDE, exact: bool = False) -> GpuStages:
    """What a right GPU would capture: float32 stages, P and the hand-over rounded to the dtype. ``number``: what
    queries and groups of keys are multiplied as. ``exact``: all in float64, and nothing is rounded but to 8 bits."""
    dtype, half = (np.dtype(np.float64),) * 2 if exact else (q.dtype, np.dtype(np.float16))
    q, k, v = (x.astype(np.float64 if exact else np.float32) for x in (q, k, v))
    scale = problem.scale
    if scale < 0:
        q, scale = -q, -scale
    geometry = problem.geometry(config)
    pooled, counts = s2o.pooled_queries(q, geometry, config)
    q_order = s2o.query_order(q, k, geometry, config.block_m)
    state1 = s2o.pass1(q, k, v, geometry, scale, problem.softcap)
    own = s2o.finish(state1)[1]
    of_query = query_stages(q, k, own, geometry, config, scale, number) if config.rank == "query" else None
    of_units = s2o.unit_keys(k, geometry) if config.rank == "weight" else None
    scores, k_order, positions = [], [], []
    for n in range(geometry.segments):
        if of_query is not None and number != WIDE:
            scores.append(scores_of_bytes(q, of_query, n, geometry, scale).astype(half))
        elif of_query is not None:
            shares = np.exp2(of_query.shares.astype(q.dtype))
            found = ordering.query_weights(q, of_query.norms, of_query.keys, shares, n, geometry, scale)
            scores.append(found.astype(half))
        elif of_units is None:
            found = s2o.key_scores(pooled, counts, k, n, geometry)
            scores.append(found * scale * LOG2E if exact else key_order.log_weights(found, scale))
        else:
            scores.append(s2o.unit_weights(pooled, counts, of_units, n, geometry, scale).astype(half))
        units = s2o.ordered_units(scores[n], n, geometry, config)
        positions.append(s2o.unit_positions(units, n, geometry))
        short = int(geometry.candidates(n) % geometry.unit > 0)
        k_order.append(np.pad(units, ((0, 0), (0, 0), (0, short)), constant_values=geometry.units))
    o1 = s2o.finish(state1)[0].astype(dtype)
    resumed = s2o.State(state1.m, state1.l, o1.astype(q.dtype) * state1.l[..., None])
    state2, visited = s2o.pass2(q, k, v, resumed, q_order, positions, geometry, config, scale, problem.softcap)
    o, lse = s2o.finish(state2)
    return GpuStages(
        pooled, q_order, of_units, scores, k_order, o1, state1.m, state1.l, visited, o.astype(dtype), lse,
        query=of_query,
    )  # fmt: skip


def query_stages(q, k, own, geometry, config: S2OConfig, scale: float, number: str) -> QueryStages:
    """Of rank="query"."""
    found = ordering.unit_clusters(k, geometry, config.groups)
    with np.errstate(divide="ignore"):
        shares = np.log2(found.shares).astype(np.float16 if q.dtype == np.float32 else q.dtype)
    centre = found.means[:, :, : geometry.leading_units].mean(axis=2, keepdims=True)
    blocks = ordering.block_keys(found.means)
    less = None if number == WIDE else centre[:, :, 0]
    norms = ordering.query_norms(q, found.means, blocks, own, geometry, scale, less)
    stages = QueryStages(found.keys, shares, found.means, np.concatenate([centre, blocks], axis=2), norms)
    if number == INT8:
        return with_integers(stages)
    return with_floats(stages, q, geometry, scale) if number == E4M3 else stages


def with_integers(stages: QueryStages) -> QueryStages:
    """Rows of which a unit's largest element is 127, or 90 of more than 128; of a group that is not finite NaN."""
    off_centre = (stages.keys - stages.blocks[:, :, :1, None]).astype(np.float32)
    off_centre[np.isneginf(stages.shares)] = 0
    is_finite = np.isfinite(off_centre).all(axis=-1)
    off_centre[~is_finite] = 0
    steps = step_of_int8(np.abs(off_centre).max(axis=(3, 4)), off_centre.shape[-1])
    rows = as_int8(off_centre, steps[..., None, None])
    rows[~is_finite] = np.nan
    return replace(stages, rows=rows, steps=steps)


def with_floats(stages: QueryStages, q, geometry, scale: float) -> QueryStages:
    """Rows and scales such that the first keys are shorter than 2^(KEY_EXPONENT + 1), queries than 2^(QUERY_EXPONENT +
    1)."""
    off_centre = stages.keys - stages.blocks[:, :, :1, None]
    longest = longest_of_keys(off_centre[:, :, : geometry.leading_units], stages.blocks[:, :, :1, None])
    exponents = KEY_EXPONENT - half_exponent(longest)  # [B, Hkv]
    rows = as_e4m3(keep_two(off_centre * np.exp2(exponents)[:, :, None, None, None]))
    rows[np.isneginf(stages.shares)] = 0
    of_heads = exponents.repeat(q.shape[1] // exponents.shape[1], axis=1)
    scales = np.zeros((*q.shape[:2], geometry.segments, 2), np.float32)
    for n in range(geometry.segments):
        squared = np.square(q[:, :, slice(*geometry.queries(n))]).sum(axis=-1).max(axis=-1) * (scale * LOG2E) ** 2
        exponent = np.minimum(QUERY_EXPONENT - half_exponent(squared), MOST_EXPONENT - of_heads)  # [B, H]
        scales[:, :, n, 0], scales[:, :, n, 1] = scale * LOG2E * np.exp2(exponent), np.exp2(exponent + of_heads)
    return replace(stages, rows=rows, exponents=exponents, scales=scales)


@pytest.mark.parametrize("alike", [1.0, 2.0**-6, 2.0**-8, 2.0**-10])
@pytest.mark.parametrize("number", [E4M3, INT8])
def test_first_keys_that_are_alike_leave_room_for_others(rng, alike, number):
    """As of repeated tokens: what later keys differ by is no multiple of what these do. The first ten units by 8 bits
    are among the first twenty, of integers the first twelve, by the same elements before they are rounded."""
    q, k = rng.standard_normal((2, 1, 1, 2048, 128))
    k[:, :, :128] = k[:, :, :1] + alike * k[:, :, :128]
    config, scale = S2OConfig(dense_last=0), 128**-0.5
    geometry = Geometry(2048, 2048, config.segment, unit=config.unit)
    stages = query_stages(q, k, np.zeros((1, 1, 2048)), geometry, config, scale, number)
    n, centre = geometry.segments - 1, stages.blocks[:, :, 0]
    norms = stages.norms + (q @ centre[..., None])[..., 0] * (scale * LOG2E)  # of keys as they are
    kept = stages.keys
    if number == E4M3:
        kept = keep_two(stages.keys - stages.blocks[:, :, :1, None]) + stages.blocks[:, :, :1, None]
    exact = ordering.query_weights(q, norms, kept, np.exp2(stages.shares.astype(float)), n, geometry, scale)
    found = scores_of_bytes(q, stages, n, geometry, scale)
    first = set(np.argsort(-exact[0, 0])[: 20 if number == E4M3 else 12])
    assert first.issuperset(np.argsort(-found[0, 0])[:10])


def test_what_rows_of_8_bits_are_scaled_by():
    """The square of the longest of the first groups, or of a 16th of the centre if that is longer; what overflows
    float32 counts for nothing."""
    groups = np.zeros((1, 2, 3, 2, 64), np.float32)
    groups[0, 0, 1, 1, :2] = 3, 4
    groups[0, 1, 2, 0, 5] = 1e30
    for centre, expected in ((0, [25, 0]), (16 * 4, [25, 16]), (16 * 6, [36, 36]), (1e30, [25, 0])):
        of_heads = np.zeros((1, 2, 1, 1, 64), np.float32)
        of_heads[..., 7] = centre
        np.testing.assert_array_equal(longest_of_keys(groups, of_heads), [expected])


@pytest.mark.parametrize(("head_dim", "width", "clusters"), [(64, 64, 2), (72, 128, 4), (128, 128, 8)])
def test_rows_of_8_bits_are_read_where_a_gpu_puts_them(rng, head_dim, width, clusters):
    """Of each four elements two, by thread and register, and behind them which two: raw_kernels/selection/unit_tile.cuh
    says where."""
    config = S2OConfig(rank="query", segment=256, unit=8, clusters=clusters)
    problem = Problem(1, 2, 2, 1100, 1100, head_dim, "float16", True, 0.1)
    units, parts = problem.geometry(config).units, width // 64
    kept = rng.uniform(1, 2, (2, units, clusters, width // 8, 2, 2)).astype(ml_dtypes.float8_e4m3fn)
    pairs = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])[rng.integers(6, size=kept.shape[:-1])]
    expected = np.zeros((*kept.shape[:-1], 4), np.float32)
    np.put_along_axis(expected, pairs, kept.astype(np.float32), axis=-1)

    head, unit, cluster, eighth = np.ogrid[:2, :units, :clusters, : width // 8]
    of_warp = 16 // clusters  # units in a tile
    tile = unit // 128 * 2 * clusters + unit % 32 // of_warp
    row = unit % 128 // 32 * 16 + cluster % 2 * 8 + unit % of_warp * (clusters // 2) + cluster // 2
    thread = row // 16 * parts * 32 + eighth // 8 * 32 + row % 8 * 4 + eighth % 4
    bytes_at = thread * 16 + eighth % 8 // 4 * 8 + row % 16 // 8 * 4
    thread = row // 16 * 32 + row % 8 * 4 + eighth % 8 // 4 * 2 + row % 16 // 8
    choices_at = 32 * width + (thread * parts + eighth // 8) * 4 + eighth % 4
    tiles = np.full((2, 2 * 2 * clusters, 40 * width), 255, np.uint8)
    for i, byte in enumerate(np.moveaxis(kept.reshape(*kept.shape[:-2], 4), -1, 0)):
        tiles[head, tile, bytes_at + i] = byte.view(np.uint8)
    tiles[head, tile, choices_at] = (pairs * [1, 4]).sum(-1) @ [1, 16]

    host = {
        "block_keys": rng.standard_normal((2, 1 + units // BLOCK_UNITS, width)).astype(np.float16).view(np.uint16),
        "unit_rows": tiles,
        "key_exponents": np.array([3, -4], np.int32),
    }
    stages = capture(None, "unit_rows", host.__getitem__, host, np.float16, problem, config)
    np.testing.assert_array_equal(stages.rows[0], expected.reshape(2, units, clusters, width)[..., :head_dim])
    np.testing.assert_array_equal(stages.exponents, [[3, -4]])
    np.testing.assert_array_equal(stages.blocks[0], host["block_keys"].view(np.float16)[..., :head_dim])


@pytest.mark.parametrize(("head_dim", "width", "clusters"), [(64, 64, 2), (72, 128, 4), (128, 128, 8)])
def test_rows_of_integers_are_read_where_a_gpu_puts_them(rng, head_dim, width, clusters):
    """By thread and register: raw_kernels/selection/unit_tile.cuh says where. Those whose share is NaN are NaN."""
    config = S2OConfig(rank="query", segment=256, unit=8, clusters=clusters)
    problem = Problem(1, 2, 2, 1100, 1100, head_dim, "float16", True, 0.1)
    units = problem.geometry(config).units
    expected = rng.integers(-127, 128, (2, units, clusters, width))
    head, unit, cluster, column = np.ogrid[:2, :units, :clusters, :width]
    of_tile = unit % (64 // clusters)
    tile, row = unit // (64 // clusters), of_tile % 8 + (of_tile // 8 * clusters + cluster) * 8
    thread = row % 8 * 4 + column % 32 // 8
    of_thread = column % 8 // 4 * 8 + row % 16 // 8 * 4 + column % 4
    tiles = np.full((2, 2 * 2 * clusters, 64 * width), 255, np.uint8)
    at = ((row // 16 * (width // 32) + column // 32) * 32 + thread) * 16 + of_thread
    tiles[head, tile, at] = expected.astype(np.int8).view(np.uint8)
    shares = np.zeros((2, 2 * 2 * clusters, 64), np.float16)
    shares[1, 20 // (64 // clusters), (row % 8 * 8 + row // 8)[0, 20, 1, 0]] = np.nan

    host = {
        "block_keys": np.zeros((2, 1 + units // BLOCK_UNITS, width), np.uint16),
        "unit_rows": tiles, "row_shares": shares, "unit_scales": rng.random((2, 256)).astype(np.float32),
    }  # fmt: skip
    stages = capture(None, "unit_rows", host.__getitem__, host, np.float16, problem, config)
    is_nan = (head == 1) & (unit == 20) & (cluster == 1)
    np.testing.assert_array_equal(stages.rows[0], np.where(is_nan, np.nan, expected)[..., :head_dim])
    np.testing.assert_array_equal(stages.steps[0], host["unit_scales"][:, :units])
    assert stages.exponents is None


def scores_of_bytes(q, stages: QueryStages, n: int, geometry, scale: float) -> np.ndarray:
    """What products of 8 bits make of segment ``n``'s units."""
    (first, end), units = geometry.queries(n), ordering.ranked_units(n, geometry)
    group = q.shape[1] // stages.rows.shape[1]
    rows, shares = (x[:, :, units].repeat(group, axis=1).astype(np.float32) for x in (stages.rows, stages.shares))
    queries = q[:, :, first:end]  # [B, H, queries, D]
    if stages.steps is not None:
        step = step_of_int8(np.abs(queries.astype(np.float32)).max(axis=(2, 3)), q.shape[-1])  # [B, H]
        rounded = as_int8(queries.astype(np.float32), step[..., None, None])
        of_keys = stages.steps[:, :, units].repeat(group, axis=1) * (scale * LOG2E)  # [B, H, units]
        products = np.einsum("bhqd,bhucd->bhucq", rounded, rows) * (of_keys * step[..., None])[..., None, None]
    else:
        rounded = as_e4m3(queries * stages.scales[:, :, n, :1, None])
        products = np.einsum("bhqd,bhucd->bhucq", rounded, rows) / stages.scales[:, :, n, 1][..., None, None, None]
    weights = products + shares[..., None] - stages.norms[:, :, None, None, first:end]
    return weights.max(axis=(3, 4))


def make(
    config: S2OConfig, dtype=ml_dtypes.bfloat16, scale: float = 0.3, is_causal: bool = True, softcap: float = 0.0,
    number: str = WIDE,
):  # fmt: skip
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 4, 200, 24)).astype(dtype)
    k, v = (rng.standard_normal((2, 2, 230, 24)).astype(dtype) for _ in range(2))
    problem = Problem(2, 4, 2, 200, 230, 24, q.dtype.name, is_causal, scale, softcap)
    return stand_in(q, k, v, problem, config, number), (q, k, v, problem, config)


def is_of(stage: str, rank: str) -> bool:
    """Whether a report on the portable path has it."""
    ranks = {
        "pooled_queries": ("weight", "max", "mean"), "unit means": ("weight", "query"), "outliers": ("weight",),
        "groups": ("query",), "shares": ("query",), "block means": ("query",), "norms": ("query",),
        "8-bit exponents": (), "8-bit steps": (), "8-bit rows": (), "8-bit scales": (),
    }  # fmt: skip
    return rank in ranks.get(stage, (rank,))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("is_causal", [True, False])
def test_right_stages_agree(config: S2OConfig, dtype, is_causal: bool) -> None:
    stages, problem = make(config, dtype, is_causal=is_causal)
    report = compare(stages, *problem)
    assert [row.stage for row in report.rows] == [s for s in STAGES if is_of(s, config.rank)]
    assert report.ok, report.table()
    assert 0 < report.density <= 1
    assert (report.path, report.to_dict()["path_reason"]) == ("portable", None)
    assert "\npath portable\ndensity" in report.table()


@pytest.mark.parametrize(("unit", "clusters"), [(4, 2), (4, 4), (8, 4), (8, 8), (16, 8)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("number", [E4M3, INT8])
def test_right_stages_of_8_bits_agree(unit: int, clusters: int, is_causal: bool, number: str) -> None:
    config = replace(CONFIGS["query"], unit=unit, clusters=clusters)
    stages, problem = make(config, is_causal=is_causal, number=number)
    report = compare(stages, *problem)
    of_floats, of_integers = {"8-bit exponents", "8-bit scales"}, {"8-bit steps"}
    found = {row.stage for row in report.rows if row.stage.startswith("8-bit")}
    assert found == {"8-bit rows"} | (of_floats if number == E4M3 else of_integers)
    assert report.ok, report.table()


@pytest.mark.parametrize(("head_dim", "most"), [(128, 127), (129, 90)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_integers_of_groups_that_are_not_finite(head_dim: int, most: int, value: float) -> None:
    """A unit's score is NaN where one of its groups is, and the step that of its other groups."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, 1, 200, head_dim)).astype(np.float16) for _ in range(3))
    k[0, 0, 50, 3] = value
    problem = Problem(1, 1, 1, 200, 200, head_dim, "float16", True, head_dim**-0.5)
    config = replace(CONFIGS["query"], clusters=4)  # each key of a unit is a group
    stages = stand_in(q, k, v, problem, config, INT8)
    report = compare(stages, q, k, v, problem, config)
    assert [row.stage for row in report.rows if not row.ok] == [], report.table()
    assert stages.query is not None
    rows = stages.query.rows
    assert np.nanmax(np.abs(rows)) == most and np.isnan(rows[0, 0, 50 // 4, 50 % 4]).all()
    assert np.isnan(rows).sum() == head_dim and np.isnan(stages.scores[4][0, 0, 50 // 4])
    for fault in (lambda s: s.rows.__setitem__((0, 0, 50 // 4, 50 % 4), 0), lambda s: larger(s.steps, (0, 0, 50 // 4))):
        faulty = copy.deepcopy(stages)
        fault(faulty.query)
        assert not compare(faulty, q, k, v, problem, config).ok


@pytest.mark.parametrize("clusters", [2, 4])
def test_groups_of_no_key_are_zeros(clusters: int) -> None:
    """Keys that are all alike are one group."""
    q, k, v = (np.ones((1, 1, 200, 24), np.float16) for _ in range(3))
    q, k = q * np.linspace(0, 1, 24, dtype=np.float16), k * np.linspace(1, 0, 24, dtype=np.float16)
    problem = Problem(1, 1, 1, 200, 200, 24, "float16", True, 0.1)
    config = replace(CONFIGS["query"], unit=8, clusters=clusters)
    stages = stand_in(q, k, v, problem, config, INT8)
    assert stages.query is not None
    assert np.isneginf(stages.query.shares).any() and not stages.query.rows[np.isneginf(stages.query.shares)].any()
    assert compare(stages, q, k, v, problem, config).ok


SMALL_CASES = {
    name: case
    for name, case in CASES.items()
    if case.batch * case.heads * case.seqlen_q * case.problem().seqlen_k * max(case.head_dim, 16) < 1e8
}


# Of those whose rows are sorted in three steps one is quick enough.
LONG_ROWS = [name for name, case in SMALL_CASES.items() if case.problem().seqlen_k > 1 << 18]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if x in LONG_ROWS[1:] else []) for x in SMALL_CASES]
)
def test_cases_for_a_gpu_agree(name: str) -> None:
    """What test_gpu.py compares, here with a stand-in for the GPU: no comparison that nothing could pass."""
    case = SMALL_CASES[name]
    arrays, problem, config = case.arrays(), case.problem(), replace(case.config("portable"), tail="none")
    report = compare(stand_in(*arrays, problem, config), *arrays, problem, config)
    assert report.ok, report.table()


def test_nothing_is_compared_where_nothing_is_ordered() -> None:
    """One segment and its window are all keys."""
    stages, problem = make(replace(CONFIGS["paper"], segment=256, window=30))
    report = compare(stages, *problem)
    assert report.ok and "nothing to compare" in report.table()
    rows = [row for row in report.rows if row.stage in ("key scores", "key order")]
    assert [(row.compared, row.different, row.worst) for row in rows] == [(0, 0, 0), (0, 0, 0)]


def test_a_negative_scale_agrees() -> None:
    stages, problem = make(CONFIGS["paper"], scale=-0.3)
    assert compare(stages, *problem).ok


@pytest.mark.parametrize(
    ("softcap", "error", "ok"), [(2.0, 2.0**-11, True), (50.0, 2.0**-11, True), (2.0, 2.0**-8, False)]
)
@pytest.mark.parametrize("worst", [True, False])
def test_capped_scores_within_the_error_of_tanh_agree(softcap, error, ok, worst, monkeypatch) -> None:
    """tanh.approx is off by 2^-11 of its result: always in one direction, or in any; more than that is a fault."""
    rng = np.random.default_rng(3)

    def approximate(scores, softcap):
        factor = 1 + error * (np.sign(scores) if worst else rng.uniform(-1, 1, scores.shape))
        return (softcap * np.tanh(scores / softcap) * factor).astype(scores.dtype)

    with monkeypatch.context() as patch:
        patch.setattr(s2o, "capped", approximate)
        stages, problem = make(CONFIGS["weight"], softcap=softcap, scale=1.0)
    report = compare(stages, *problem)
    assert report.ok == ok, report.table()
    assert ok or next(row.stage for row in report.rows if not row.ok) == "pass 1 state"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_causal", [True, False])
def test_nan_and_inf_in_the_same_places_agree(name: str, value: float, is_causal: bool) -> None:
    _, (q, k, v, problem, config) = make(CONFIGS["max"], is_causal=is_causal)
    {"q": q, "k": k, "v": v}[name][:, 1, 70, 3] = value
    report = compare(stand_in(q, k, v, problem, config), q, k, v, problem, config)
    assert report.ok, report.table()


@pytest.mark.parametrize("row", [3, 130])
def test_products_beyond_float32_are_judged_in_float32(row: int) -> None:
    """A GPU's sums are not finite there; in float64 they would be."""
    _, (q, k, v, problem, config) = make(CONFIGS["weight"])
    q[:, :, 150:], k[:, 1, row] = q[:, :, 150:] * 1e20, k[:, 1, row] * 1e20
    with np.errstate(over="ignore", invalid="ignore"):
        report = compare(stand_in(q, k, v, problem, config), q, k, v, problem, config)
    (scores,) = (x for x in report.rows if x.stage == "key scores")
    assert scores.ok and scores.compared, report.table()


def test_the_report_says_why_the_portable_kernels_ran() -> None:
    stages, problem = make(CONFIGS["paper"])
    stages.path_reason = "scale is -1.0, not positive"
    report = compare(stages, *problem)
    assert "path portable (scale is -1.0, not positive)\n" in report.table()
    assert report.to_dict()["path_reason"] == "scale is -1.0, not positive"


def swap(x: np.ndarray, i: tuple[int, ...], j: tuple[int, ...]) -> None:
    x[i], x[j] = x[j].copy(), x[i].copy()


def larger(x: np.ndarray, at: tuple[int, ...]) -> None:
    x[at] = x[at].astype(np.float32) * 1.1 + 0.1


FAULTS = {
    "pooled_queries": lambda s: larger(s.pooled, (1, 2, 1, 0)),
    "query order": lambda s: swap(s.q_order, (0, 1, 2, 3), (0, 1, 2, 40)),
    "unit means": lambda s: larger(s.unit_keys[:, :, :, 0] if s.query is None else s.query.means, (1, 1, 20, 2)),
    "groups": lambda s: larger(s.query.keys, (1, 1, 20, 0, 2)),
    "shares": lambda s: s.query.shares.__setitem__((1, 1, 20, 0), s.query.shares[1, 1, 20, 0] + 1),
    "block means": lambda s: larger(s.query.blocks, (1, 1, 0, 2)),
    "8-bit exponents": lambda s: s.query.exponents.__setitem__((1, 1), s.query.exponents[1, 1] + 1),
    "8-bit steps": lambda s: larger(s.query.steps, (1, 1, 20)),
    "8-bit rows": lambda s: larger(s.query.rows, (1, 1, 20, 0, 2)),
    "norms": lambda s: larger(s.query.norms, (1, 2, 100)),
    "8-bit scales": lambda s: s.query.scales.__setitem__((1, 2, 3, 1), s.query.scales[1, 2, 3, 1] * 2),
    "outliers": lambda s: swap(s.unit_keys, (1, 1, 20, 1), (1, 1, 21, 1)),
    "key scores": lambda s: s.scores[2].__setitem__((1, 3, 17), s.scores[2][1, 3, 17] + 1),
    "key order": lambda s: swap(s.k_order[2], (0, 0, 1), (0, 0, 60)),
    "pass 1 state": lambda s: larger(s.l1, (0, 3, 11)),
    "pass 1 output": lambda s: larger(s.o1, (1, 1, 199, 5)),
    "stop": lambda s: s.visited.__setitem__((0, 0, 2, 0), s.visited[0, 0, 2, 0] + 1),
    "output": lambda s: larger(s.o, (0, 2, 100, 3)),
    "lse": lambda s: larger(s.lse, (0, 2, 100)),
}


OF_QUERIES = ("unit means", "groups", "shares", "block means", "8-bit exponents", "8-bit steps", "8-bit rows",
              "norms", "8-bit scales", "key scores")  # fmt: skip
OF_UNITS = ("unit means", "outliers")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "config", "number"),
    [
        *((stage, "weight" if stage in OF_UNITS else "paper", WIDE) for stage in STAGES
          if stage in OF_UNITS or stage not in OF_QUERIES[:-1]),
        *((stage, "query", WIDE) for stage in OF_QUERIES if not stage.startswith("8-bit")),
        *((stage, "query", E4M3) for stage in OF_QUERIES if stage != "8-bit steps"),
        *((stage, "query", INT8) for stage in OF_QUERIES if stage not in ("8-bit exponents", "8-bit scales")),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_is(stage: str, config: str, number: str) -> None:
    stages, problem = make(CONFIGS[config], number=number)
    faulty = copy.deepcopy(stages)
    FAULTS[stage](faulty)
    report = compare(faulty, *problem)
    first = next(row for row in report.rows if not row.ok)
    assert first.stage == stage, report.table()
    assert first.different >= 1 and "FAULT" in report.table()
    assert report.to_dict()["ok"] is False


def test_a_stage_of_nothing_is_no_fault() -> None:
    rows, none = Rows(), np.zeros((3, 0))
    rows.integers("stop", none, 0)
    rows.floats("output", none, none, none, "no rows")
    said = {"stop": "nothing to compare", "output": "no rows"}
    assert rows.rows == [Row(stage, 0, 0, 0.0, (), 0.0, note) for stage, note in said.items()]
    assert all(row.ok for row in rows.rows)


@pytest.mark.parametrize("off", [5, -9])
def test_8_bits_that_are_scaled_wrongly_all_along(off: int, monkeypatch) -> None:
    """Rows, scales and scores that follow from a wrong power of two agree with each other."""
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "KEY_EXPONENT", KEY_EXPONENT + off)
        stages, problem = make(CONFIGS["query"], number=E4M3)
    report = compare(stages, *problem)
    assert [row.stage for row in report.rows if not row.ok][:1] == ["8-bit exponents"], report.table()


@pytest.mark.parametrize(
    ("longest", "lengths"),  # of the first keys; the powers of two that lengths may have
    [(4.0, {1, 2}), (4 - 2**-20, {1, 2}), (4 - 2**-12, {1}), (4 + 2**-12, {2}), (1.5 * 2**-5, {-5}), (96.0, {6})],
)
def test_powers_of_two_that_rounding_may_make(longest: float, lengths: set[int]) -> None:
    leading, wrong = np.zeros((1, 1, 2, 2, 24)), []
    leading[0, 0, 1, 0, 5] = longest
    rows = SimpleNamespace(integers=lambda stage, off, count: wrong.append(count))
    for power in range(-9, 9):
        _compare_exponents(rows, np.array([[KEY_EXPONENT - power]]), leading, np.zeros((1, 1, 1, 1, 24)))
    assert [n == 0 for n in wrong] == [power in lengths for power in range(-9, 9)]


@pytest.mark.parametrize("number", [WIDE, E4M3, INT8])
@pytest.mark.parametrize("wrong", ["shifted", "noisy"])
def test_scores_are_held_to_their_own_rounding(number: str, wrong: str) -> None:
    """head_dim 128 and normal inputs, of which scores deviate by 0.5: off by as much, or noise of that size, is a
    fault."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, heads, 200, 128)).astype(ml_dtypes.bfloat16) for heads in (2, 1, 1))
    problem = Problem(1, 2, 1, 200, 200, 128, q.dtype.name, True, 128**-0.5)
    config = CONFIGS["query"]
    stages = stand_in(q, k, v, problem, config, number)
    assert compare(stages, q, k, v, problem, config).ok
    for scores in stages.scores:
        off = 0.5 if wrong == "shifted" else rng.uniform(-0.6, 0.6, scores.shape)
        scores += np.asarray(off, np.float16)
    row = next(row for row in compare(stages, q, k, v, problem, config).rows if row.stage == "key scores")
    assert row.different > 0.7 * sum(scores.size for scores in stages.scores)


@pytest.mark.parametrize(
    ("keys", "left_out"),
    [  # a key's first two elements; the others are 0
        ([(4, 0), (-4, 0), (0.5, 0), (-0.5, 0)], 1),  # two are furthest from the mean
        ([(256, 1.25), (-256, 0), (32, 0), (-32, 0)], 1),
        ([(4, 1 / 32), (-4, 0), (0.5, 0), (-0.5, 0)], 0),
        ([(4.5, 0), (-4, 0), (0.25, 1), (-0.5, 0)], 1),  # the third is as far from the first as from the second
        ([(4.5, 0), (-4, 0), (0.25 + 2**-12, 1), (-0.5, 0)], 0),
        ([(0, 0)] * 4, 0),  # all are alike, and so is every group
    ],
)
def test_units_that_rounding_divides_are_left_out(keys: list[tuple[float, float]], left_out: int) -> None:
    """Which of the keys begin a group, or to which group a key goes; no other unit is left out."""
    _, (q, k, v, problem, config) = make(replace(CONFIGS["query"], clusters=2), np.float16)
    k[1, 1, 80:84] = np.pad(keys, ((0, 0), (0, 22)))
    report = compare(stand_in(q, k, v, problem, config), q, k, v, problem, config)
    assert report.ok, report.table()
    (row,) = (row for row in report.rows if row.stage == "groups")
    units = 2 * 2 * (230 // 4) - left_out
    assert row.note == f"{left_out} units have keys as far as others, to rounding"
    assert row.compared == units * 2 * 24  # groups, elements


def test_sums_beyond_float16_are_counted() -> None:
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, 1, 96, 64)).astype(np.float16) for _ in range(3))
    k[..., 60:, :] *= 1000  # of the first keys comes the power of two that all are scaled by
    problem = Problem(1, 1, 1, 96, 96, 64, "float16", True, 0.1)
    report = compare(stand_in(q, k, v, problem, CONFIGS["query"], E4M3), q, k, v, problem, CONFIGS["query"])
    (note,) = (row.note for row in report.rows if row.stage == "key scores")
    assert re.fullmatch(r"\[segment, batch, head, unit\]; [1-9]\d* not compared: sums beyond float16", note)


def test_an_unwritten_output_is_a_fault() -> None:
    stages, problem = make(CONFIGS["paper"])
    stages.o[0, 0, 5] = np.nan
    row = next(row for row in compare(stages, *problem).rows if not row.ok)
    assert row.stage == "output" and row.where[:3] == (0, 0, 5)


def test_without_a_gpu_diff_says_what_it_needs() -> None:
    cupy = pytest.importorskip("cupy")
    if cupy.is_available():
        pytest.skip("there is a GPU")
    x = np.zeros((1, 1, 8, 16), np.float16)
    with pytest.raises(S2OError, match="GPU"):
        diff(x, x, x)
