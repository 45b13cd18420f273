"""The comparison that `diff` makes, tried on stages that stand in for a GPU's: the reference in low precision.

Right stages pass; a fault planted in one stage is reported at that stage and at no earlier one.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from gpu_cases import CASES
from stand_ins import CONFIGS, larger, make, stand_in

from s2o_cupy import S2OConfig, S2OError
from s2o_cupy.problem import Problem
from s2o_cupy.reference import s2o
from s2o_cupy.selection.orders.query import E4M3, INT8, WIDE
from s2o_cupy.tools.diff_report import Row, Rows
from s2o_cupy.tools.diffing import compare, diff

STAGES = (
    "pooled_queries", "query order", "unit means", "groups", "shares", "block means", "sampled keys", "deviations",
    "8-bit exponents", "8-bit steps", "8-bit rows", "norms", "8-bit scales", "outliers", "key scores", "key order",
    "pass 1 state", "pass 1 output", "stop", "output", "lse",
)  # fmt: skip


def is_of(stage: str, rank: str) -> bool:
    """Whether a report on the portable path has it."""
    ranks = {
        "pooled_queries": ("weight", "max", "mean"), "unit means": ("weight", "query"), "outliers": ("weight",),
        "groups": ("query",), "shares": ("query",), "block means": ("query",),
        "sampled keys": ("query",), "deviations": ("query",), "norms": ("query",),
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
    found = [s for s in STAGES if is_of(s, config.rank)]
    if config.segment == config.block_m:  # without an order of queries
        found.remove("query order")
    assert [row.stage for row in report.rows] == found
    assert report.ok, report.table()
    assert 0 < report.density <= 1
    assert (report.path, report.to_dict()["path_reason"]) == ("portable", None)
    assert "\npath portable\ndensity" in report.table()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("unit", "clusters"), [(4, 2), (4, 4), (8, 4), (8, 8), (16, 8)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("products", [E4M3, INT8])
def test_right_stages_of_8_bits_agree(unit: int, clusters: int, is_causal: bool, products: str) -> None:
    config = replace(CONFIGS["query"], unit=unit, clusters=clusters)
    stages, problem = make(config, is_causal=is_causal, products=products)
    report = compare(stages, *problem)
    of_floats, of_integers = {"8-bit exponents", "8-bit scales"}, {"8-bit steps"}
    found = {row.stage for row in report.rows if row.stage.startswith("8-bit")}
    assert found == {"8-bit rows"} | (of_floats if products == E4M3 else of_integers)
    assert report.ok, report.table()


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
    stages, problem = make(replace(CONFIGS["paper"], segment=256, window=70))
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


FAULTS = {
    "pooled_queries": lambda s: larger(s.pooled, (1, 2, 1, 0)),
    "query order": lambda s: swap(s.q_order, (0, 1, 2, 3), (0, 1, 2, 40)),
    "unit means": lambda s: larger(s.unit_keys[:, :, :, 0] if s.query is None else s.query.means, (1, 1, 20, 2)),
    "groups": lambda s: larger(s.query.keys, (1, 1, 20, 0, 2)),
    "shares": lambda s: s.query.shares.__setitem__((1, 1, 20, 0), s.query.shares[1, 1, 20, 0] + 1),
    "block means": lambda s: larger(s.query.blocks, (1, 1, 0, 2)),
    "sampled keys": lambda s: larger(s.query.sampled_keys, (1, 1, 3, 2)),
    "deviations": lambda s: larger(s.query.deviations, (1, 1, 3, 2)),
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


OF_QUERIES = ("unit means", "groups", "shares", "block means", "sampled keys", "deviations", "8-bit exponents",
              "8-bit steps", "8-bit rows", "norms", "8-bit scales", "key scores")  # fmt: skip
OF_UNITS = ("unit means", "outliers")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "config", "products"),
    [
        *((stage, "weight" if stage in OF_UNITS else "paper", WIDE) for stage in STAGES
          if stage in OF_UNITS or stage not in OF_QUERIES[:-1]),
        *((stage, "query", WIDE) for stage in OF_QUERIES if not stage.startswith("8-bit")),
        *((stage, "query", E4M3) for stage in OF_QUERIES if stage != "8-bit steps"),
        *((stage, "query", INT8) for stage in OF_QUERIES if stage not in ("8-bit exponents", "8-bit scales")),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_is(stage: str, config: str, products: str) -> None:
    stages, problem = make(CONFIGS[config], products=products)
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


@pytest.mark.parametrize("products", [WIDE, E4M3, INT8])
@pytest.mark.parametrize("wrong", ["shifted", "noisy"])
def test_scores_are_held_to_their_own_rounding(products: str, wrong: str) -> None:
    """head_dim 128 and normal inputs, of which scores deviate by 0.5: off by as much, or noise of that size, is a
    fault."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, heads, 200, 128)).astype(ml_dtypes.bfloat16) for heads in (2, 1, 1))
    problem = Problem(1, 2, 1, 200, 200, 128, q.dtype.name, True, 128**-0.5)
    config = CONFIGS["query"]
    stages = stand_in(q, k, v, problem, config, products)
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
    units = 2 * 2 * (270 // 4) - left_out
    assert row.note == f"{left_out} units have keys as far as others, to rounding"
    assert row.compared == units * 2 * 24  # groups, elements


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
