"""The comparison that `diff` makes, tried on stages that stand in for a GPU's: the reference in low precision.

Right stages pass; a fault planted in one stage is reported at that stage and at no earlier one.
"""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest
from gpu_cases import CASES

from s2o_cupy import S2OConfig, S2OError
from s2o_cupy.problem import Problem
from s2o_cupy.reference import key_order, s2o
from s2o_cupy.tools.diffing import GpuStages, compare, diff

STAGES = (
    "pooled_queries", "query order", "unit means", "outliers", "key scores", "key order",
    "pass 1 state", "pass 1 output", "stop", "output", "lse",
)  # fmt: skip
CONFIGS = {
    "paper": S2OConfig(segment=64, tau=0.05, block_m=16, block_n=32, rank="mean"),
    "weight": S2OConfig(segment=24, tau=0.05, block_m=16, block_n=32, unit=8, pooled_queries=5),
    "max": S2OConfig(segment=48, tau=0.02, block_m=32, block_n=32, rank="max", pooled_queries=5, window=20),
    "dense": S2OConfig(segment=64, tau=0, block_m=64, block_n=64),
}


def stand_in(q, k, v, problem: Problem, config: S2OConfig) -> GpuStages:
    """What a right GPU would capture: float32 stages, P and the hand-over rounded to the dtype."""
    dtype = q.dtype
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    scale = problem.scale
    if scale < 0:
        q, scale = -q, -scale
    geometry = problem.geometry(config)
    pooled, counts = s2o.pooled_queries(q, geometry, config)
    q_order = s2o.query_order(q, k, geometry, config.block_m)
    of_units = s2o.unit_keys(k, geometry) if config.rank == "weight" else None
    scores, k_order, positions = [], [], []
    for n in range(geometry.segments):
        if of_units is None:
            scores.append(key_order.log_weights(s2o.key_scores(pooled, counts, k, n, geometry), scale))
        else:
            scores.append(s2o.unit_weights(pooled, counts, of_units, n, geometry, scale).astype(np.float16))
        units = s2o.ordered_units(scores[n], n, geometry, config)
        positions.append(s2o.unit_positions(units, n, geometry))
        short = int(geometry.candidates(n) % geometry.unit > 0)
        k_order.append(np.pad(units, ((0, 0), (0, 0), (0, short)), constant_values=geometry.units))
    state1 = s2o.pass1(q, k, v, geometry, scale, problem.softcap)
    o1 = s2o.finish(state1)[0].astype(dtype)
    resumed = s2o.State(state1.m, state1.l, o1.astype(np.float32) * state1.l[..., None])
    state2, visited = s2o.pass2(q, k, v, resumed, q_order, positions, geometry, config, scale, problem.softcap)
    o, lse = s2o.finish(state2)
    return GpuStages(pooled, q_order, of_units, scores, k_order, o1, state1.m, state1.l, visited, o.astype(dtype), lse)


def make(config: S2OConfig, dtype=ml_dtypes.bfloat16, scale: float = 0.3, is_causal: bool = True, softcap: float = 0.0):
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 4, 200, 24)).astype(dtype)
    k, v = (rng.standard_normal((2, 2, 230, 24)).astype(dtype) for _ in range(2))
    problem = Problem(2, 4, 2, 200, 230, 24, q.dtype.name, is_causal, scale, softcap)
    return stand_in(q, k, v, problem, config), (q, k, v, problem, config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("is_causal", [True, False])
def test_right_stages_agree(config: S2OConfig, dtype, is_causal: bool) -> None:
    stages, problem = make(config, dtype, is_causal=is_causal)
    report = compare(stages, *problem)
    assert [row.stage for row in report.rows] == [
        s for s in STAGES if s not in ("unit means", "outliers") or config.rank == "weight"
    ]
    assert report.ok, report.table()
    assert 0 < report.density <= 1
    assert (report.path, report.to_dict()["path_reason"]) == ("portable", None)
    assert "\npath portable\ndensity" in report.table()


SMALL_CASES = {
    name: case
    for name, case in CASES.items()
    if case.batch * case.heads * case.seqlen_q * case.problem().seqlen_k * max(case.head_dim, 16) < 1e8
}


@pytest.mark.parametrize("name", SMALL_CASES)
def test_cases_for_a_gpu_agree(name: str) -> None:
    """What test_gpu.py compares, here with a stand-in for the GPU: no comparison that nothing could pass."""
    case = SMALL_CASES[name]
    arrays, problem, config = case.arrays(), case.problem(), case.config("portable")
    report = compare(stand_in(*arrays, problem, config), *arrays, problem, config)
    assert report.ok, report.table()


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


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_causal", [True, False])
def test_nan_and_inf_in_the_same_places_agree(name: str, value: float, is_causal: bool) -> None:
    _, (q, k, v, problem, config) = make(CONFIGS["max"], is_causal=is_causal)
    {"q": q, "k": k, "v": v}[name][:, 1, 70, 3] = value
    report = compare(stand_in(q, k, v, problem, config), q, k, v, problem, config)
    assert report.ok, report.table()


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
    "unit means": lambda s: larger(s.unit_keys, (1, 1, 20, 0, 2)),
    "outliers": lambda s: swap(s.unit_keys, (1, 1, 20, 1), (1, 1, 21, 1)),
    "key scores": lambda s: larger(s.scores[2], (1, 3, 17)),
    "key order": lambda s: swap(s.k_order[2], (0, 0, 1), (0, 0, 60)),
    "pass 1 state": lambda s: larger(s.l1, (0, 3, 11)),
    "pass 1 output": lambda s: larger(s.o1, (1, 1, 199, 5)),
    "stop": lambda s: s.visited.__setitem__((0, 0, 2, 0), s.visited[0, 0, 2, 0] + 1),
    "output": lambda s: larger(s.o, (0, 2, 100, 3)),
    "lse": lambda s: larger(s.lse, (0, 2, 100)),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_is_found_where_it_is(stage: str) -> None:
    stages, problem = make(CONFIGS["weight" if stage in ("unit means", "outliers") else "paper"])
    faulty = copy.deepcopy(stages)
    FAULTS[stage](faulty)
    report = compare(faulty, *problem)
    first = next(row for row in report.rows if not row.ok)
    assert first.stage == stage, report.table()
    assert first.different >= 1 and "FAULT" in report.table()
    assert report.to_dict()["ok"] is False


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
