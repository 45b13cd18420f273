"""The bounds of `diff`: exact stages pass, one number off by half of what rounding allows too, by twice of it fails.

What is allowed is said here again, of inputs for which it is short: where scores are small, roundings to the dtype and
constants are all there is; where all keys have a large part in common, which changes no weight, it is the rounding of
sums of products. What a bound is off by is seen from a factor of 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from stand_ins import stand_in

from s2o_cupy import S2OConfig
from s2o_cupy.problem import Problem
from s2o_cupy.selection.orders.query import E4M3, INT8, WIDE
from s2o_cupy.spec import LOG2E, moment_keys
from s2o_cupy.tools.diff_stages import BeforeTail
from s2o_cupy.tools.diffing import DiffReport, _packed_error, compare

HEAD_DIM, SEGMENT, UNIT = 16, 32, 4
OPTIONS: dict[str, Any] = {"segment": SEGMENT, "block_m": 16, "block_n": 16, "tau": 0.3, "tail": "none"}
CONFIGS = {
    "query": S2OConfig(**OPTIONS, rank="query", unit=UNIT),
    "weight": S2OConfig(**OPTIONS, rank="weight", unit=8, pooled_queries=4),
    "mean": S2OConfig(**OPTIONS, rank="mean"),
}
U = 2.0**-11  # half a unit in the last place of float16, and of the dtype here
U32 = 2.0**-24  # of float32
SMALL = 2.0**-10  # a scale
COMMON = 1000.0  # an element that all keys have, with a scale of 1


@dataclass
class Call:
    """Inputs in float64 and what an exact GPU makes of them."""

    config: S2OConfig
    common: float = 0.0
    number: str = WIDE

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        self.q = rng.standard_normal((1, 2, 96, HEAD_DIM))
        self.k = rng.standard_normal((1, 1, 110, HEAD_DIM))
        self.k[..., 0] += self.common
        self.v = rng.choice([-1.0, 1.0], self.k.shape)  # so weighted sums of |v| are 1
        self.scale = 1.0 if self.common else SMALL
        self.problem = Problem(1, 2, 1, 96, 110, HEAD_DIM, "float16", True, self.scale, 0.0)

    def stages(self) -> Any:
        """GpuStages; none of what it may lack is looked at where it does."""
        return stand_in(self.q, self.k, self.v, self.problem, self.config, self.number, exact=True)

    def report(self, stages: Any) -> DiffReport:
        return compare(stages, self.q, self.k, self.v, self.problem, self.config)

    def score_error(self, row: int, head: int = 1) -> float:
        """Of a query's scores, products' sums in float32, in nats."""
        longest = np.linalg.norm(self.k[0, 0], axis=-1).max()
        return float(self.scale * np.linalg.norm(self.q[0, head, row]) * longest * (HEAD_DIM + 4) * U32)

    def products(self, queries: np.ndarray, keys: np.ndarray) -> float:
        """Bound on products' sums [.., D] x [.., D], in units of log2."""
        largest = [np.abs(x).reshape(-1, HEAD_DIM).max(axis=0) for x in (queries, keys)]
        return float(self.scale * LOG2E * (largest[0] * largest[1]).sum())

    def step_of_sums(self, stages: Any) -> float:
        """What one of a sum of integers stands for, in units of log2: of the best unit of the last segment."""
        unit = int(stages.scores[2][0, 1].argmax())
        largest = np.abs(self.q[0, 1, BEHIND]).max()
        return float(self.scale * LOG2E * stages.query.steps[0, 0, unit] * largest / 127)


def is_ok(report: DiffReport, stage: str) -> bool:
    return next(row.ok for row in report.rows if row.stage == stage)


# Of each stage an array of it, a place there, and what rounding allows.
Place = Callable[[Call, Any], tuple[Any, tuple[int, ...], float]]
ROW = 70  # of the last segment, query 6
BEHIND = slice(2 * SEGMENT, 3 * SEGMENT)


def leading_units(call: Call) -> int:
    return call.problem.geometry(call.config).leading_units


def of_scores(stages: Any, allowed: Callable[[float], float]) -> tuple[np.ndarray, tuple[int, ...], float]:
    """The best unit of the last segment; what is allowed follows from its score's magnitude."""
    at = 0, 1, int(stages.scores[2][0, 1].argmax())
    return stages.scores[2], at, allowed(abs(stages.scores[2][at]))


def of_bytes(call: Call, stages: Any) -> tuple[np.ndarray, tuple[int, ...], float]:
    """Weights are sums in float16: of the norm too."""
    norm = np.abs(stages.query.norms[0, 1, BEHIND]).max()
    return of_scores(stages, lambda score: (norm + 8) * 4 * U + score * 2 * U)


NUMBERS = {"in e4m3": E4M3, "in integers": INT8}
ROUNDINGS: dict[tuple[str, str], Place] = {
    ("pooled_queries", "mean"): lambda c, s: (s.pooled, (0, 1, 2, 0, 3), np.abs(c.q[0, 1, BEHIND, 3]).mean() * U),
    ("unit means", "weight"): lambda c, s: (s.unit_keys, (0, 0, 5, 0, 3), np.abs(c.k[0, 0, 40:48, 3]).mean() * U),
    ("unit means", "query"): lambda c, s: (s.query.means, (0, 0, 5, 3), np.abs(c.k[0, 0, 20:24, 3]).mean() * U),
    ("groups", "query"): lambda c, s: (s.query.keys, (0, 0, 5, 0, 3), np.abs(c.k[0, 0, 20:24, 3]).max() * U),
    ("shares", "query"): lambda c, s: (s.query.shares, (0, 0, 5, 0), 2 * U),  # log2 of a fourth, in float16
    ("block means", "query"): lambda c, s: (s.query.blocks, (0, 0, 0, 3),
                                            np.abs(s.query.means[0, 0, : leading_units(c), 3]).mean() * U),
    ("norms", "query"): lambda c, s: (s.query.norms, (0, 1, ROW),
                                      2.0**-16 + 8 * np.abs(s.query.norms[0, 1, ROW]) * U32),
    ("key scores", "mean"): lambda c, s: of_scores(s, lambda score: score * U),
    ("key scores", "weight"): lambda c, s: of_scores(s, lambda score: score * U),
    ("key scores", "query"): lambda c, s: of_scores(s, lambda score: score * U),
    ("key scores", "query in e4m3"): of_bytes,
    ("key scores", "query in integers"): lambda c, s: of_scores(
        s, lambda score: 3 * c.step_of_sums(s) + score * U),
    ("pass 1 state", "mean"): lambda c, s: (s.m1, (0, 1, ROW), 2.0**-18 + 4 * np.abs(s.m1[0, 1, ROW]) * U32),
    ("pass 1 output", "mean"): lambda c, s: (s.o1, (0, 1, ROW, 3), 2 * U),  # of weights, and of the output
    ("output", "mean"): lambda c, s: (s.o, (0, 1, ROW, 3), 3 * U),  # and of what pass 1 hands over
    ("lse", "mean"): lambda c, s: (s.lse, (0, 1, ROW), 2.0**-18 + 4 * np.abs(s.lse[0, 1, ROW]) * U32),
}  # fmt: skip
SUMS: dict[tuple[str, str], Place] = {
    ("norms", "query"): lambda c, s: (
        s.query.norms, (0, 1, ROW), 3 * (HEAD_DIM + 8) / (HEAD_DIM + 4) * LOG2E * c.score_error(ROW)
        * np.linalg.norm(s.query.means, axis=-1).max() / np.linalg.norm(c.k, axis=-1).max()),
    ("key scores", "weight"): lambda c, s: of_scores(
        s, lambda score: 2 * (HEAD_DIM + 6) * U32 * c.products(s.pooled[0, 1, 2], s.unit_keys[0, 0, :8]) + score * U),
    ("key scores", "query"): lambda c, s: of_scores(
        s, lambda score: 2 * (HEAD_DIM + 8) * U32 * c.products(c.q[0, 1, BEHIND], s.query.keys[0, 0, :16])
        + score * U),
    ("key scores", "query in integers"): lambda c, s: of_scores(
        s, lambda score: 3 * c.step_of_sums(s) + score * U),
    ("pass 1 state", "mean"): lambda c, s: (s.m1, (0, 1, ROW), 2 * c.score_error(ROW)),
    ("pass 1 output", "mean"): lambda c, s: (s.o1, (0, 1, ROW, 3), np.expm1(2 * c.score_error(ROW))),
    ("output", "mean"): lambda c, s: (s.o, (0, 1, ROW, 3), np.expm1(2 * c.score_error(ROW))),
    ("lse", "mean"): lambda c, s: (s.lse, (0, 1, ROW), 2 * c.score_error(ROW)),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stage", "config", "is_common"), [*((*key, False) for key in ROUNDINGS),
                                                           *((*key, True) for key in SUMS)])  # fmt: skip
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_number_that_is_off(stage: str, config: str, is_common: bool, sign: int) -> None:
    place = (SUMS if is_common else ROUNDINGS)[stage, config]
    for part, ok in ((0, True), (0.5, True), (2, False)):
        number = NUMBERS.get(config.partition(" ")[2], WIDE)
        call = Call(CONFIGS[config.split()[0]], COMMON * is_common, number)
        stages = call.stages()
        array, at, allowed = place(call, stages)
        array[at] += sign * part * allowed
        report = call.report(stages)
        assert is_ok(report, stage) == ok, (part, report.table())


@pytest.mark.parametrize("common", [0.0, COMMON])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_tile_that_stops_elsewhere(common: float, sign: int) -> None:
    """As it would for a tau that is off by 2^-10, and by four times what scores are off by."""
    call = Call(CONFIGS["mean"], common)
    at = (0, 1, 2, 0)
    errors = [call.score_error(row, head) for head in range(2) for row in range(96)]
    slack = 2.0**-10 + 4 * max(errors)
    assert (slack < 2.0**-9) == (common == 0) and slack < 0.1

    def visited(tau: float) -> int:
        call.config = call.config.with_tau(tau)
        return int(call.stages().visited[at])

    low, high = 1e-6, 10.0  # a tau at which the tile stops later than at any larger one lies between
    most = visited(low)
    assert most > visited(high)
    while high / low - 1 > 1e-7:
        tau = np.sqrt(low * high)
        low, high = (tau, high) if visited(tau) == most else (low, tau)
    sooner = visited(high)
    for part, ok in ((0.5, True), (2, False)):
        call.config = call.config.with_tau(low * (1 + sign * part * slack))
        stages = call.stages()
        assert (stages.visited[at] == most) == (sign < 0)
        stages.visited[at] = most if sign > 0 else sooner
        assert is_ok(call.report(stages), "stop") == ok


@pytest.mark.parametrize("cancels", [False, True])
def test_queries_in_the_wrong_order(cancels: bool) -> None:
    """Neighbours whose scores differ by what is cut off, 2^-10 of them; or, where large products cancel in a score, by
    the rounding of its sum and of the mean of keys in it."""
    call = Call(CONFIGS["mean"])
    call.k[0, 0, :SEGMENT:2, 0], call.k[0, 0, 1:SEGMENT:2, 0] = COMMON, -COMMON
    guide, size = call.k[0, 0, :SEGMENT].mean(axis=0), np.abs(call.k[0, 0, :SEGMENT]).mean(axis=0)
    query = 100 * guide
    query[0] = 1000 * cancels
    allowed = 2.0**-10 * query @ guide + 2 * (HEAD_DIM + SEGMENT + 2) * U32 * np.abs(query) @ size
    for part, ok in ((0.5, True), (2, False)):
        call.q[0, 1, [ROW, ROW + 1]] = query, query + part * allowed / (guide @ guide) * guide
        stages = call.stages()
        order = stages.q_order[0, 1, 2].tolist()
        first = [ROW - 2 * SEGMENT, ROW + 1 - 2 * SEGMENT]
        assert set(order[:2]) == set(first)
        stages.q_order[0, 1, 2, :2] = first
        assert is_ok(call.report(stages), "query order") == ok


def test_an_outlier_that_is_too_near() -> None:
    """Of two keys that alone are not 0, the shorter. Squared distances from the mean are sums of head_dim products of
    numbers, the mean's own error on top; that is twice 17.8 units of float32 of the longer key's square."""
    call = Call(CONFIGS["weight"])
    allowed = 2 * (49 / 64 * (HEAD_DIM + 4) + 2 * 7 / 64 * 9) * U32
    for part, ok in ((0.5, True), (2, False)):
        call.k[0, 0, :8] = 0
        call.k[0, 0, 3, 0], call.k[0, 0, 6, 1] = 1, np.sqrt(1 - part * allowed * 4 / 3)  # distances differ by 3/4 of it
        stages = call.stages()
        assert (stages.unit_keys[0, 0, 0, 1] == call.k[0, 0, 3]).all()
        stages.unit_keys[0, 0, 0, 1] = call.k[0, 0, 6]
        assert is_ok(call.report(stages), "outliers") == ok


def test_a_unit_that_may_be_parted_either_way() -> None:
    """Two of its keys are nearly as far from the mean, and the group of the further one comes first. Squared distances
    are sums of head_dim products, from a mean that is off by a sum of the unit's keys."""
    allowed = 4 * (HEAD_DIM + 8 + np.sqrt(HEAD_DIM) * (UNIT + 2)) * U32
    for part, ok in ((0.5, True), (2, False)):
        call = Call(replace(CONFIGS["query"], clusters=2))
        call.k[0, 0, :UNIT] = 0
        call.k[0, 0, :UNIT, 0] = 1, part * allowed - 1, 0.5, -0.5
        stages = call.stages()
        assert stages.query.keys[0, 0, 0, :, 0].tolist() == pytest.approx([0.75, -0.75], rel=1e-3)
        stages.query.keys[0, 0, 0] = stages.query.keys[0, 0, 0, ::-1].copy()
        assert is_ok(call.report(stages), "groups") == ok


@pytest.mark.parametrize(
    "stage",
    ["tail output", "tail output of pass 2", "tail output of the first order", "tail lse", "tail lse of no keys"],
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_tail_that_is_off(stage: str, sign: int) -> None:
    """Small scores are weights near 1: 2^-18 of exp2 and a few sums in the lse, the output rounded once. What values
    change by with scores is of bfloat16: its covariances, and queries. A row without a tail keeps its lse. Where pass 2
    adds it, what it adds it to has not been rounded. Nine tenths of what is allowed pass here: half would not show that
    a smaller part of it is missing."""
    for part, ok in ((0, True), (0.9, True), (2, False)):
        call = Call(replace(CONFIGS["mean"], tau=1000.0, tail="first_order"))
        if "order" in stage:
            call.v = 2.0**20 * call.k
        with_tail = call.stages()
        call.config = replace(call.config, tail="none")
        stages = call.stages()
        assert (stages.visited == with_tail.visited).all()
        stages.before_tail = BeforeTail(stages.o, stages.lse, is_read=stage != "tail output of pass 2")
        stages.o, stages.lse = with_tail.o, with_tail.lse
        call.config = replace(call.config, tail="first_order")
        share = 1 - np.exp(stages.before_tail.lse[0, 1, ROW] - stages.lse[0, 1, ROW])
        o, lse = stages.o[0, 1, ROW], stages.lse[0, 1]
        if stage in ("tail output", "tail output of pass 2"):
            d = int(np.abs(o).argmax())
            before = 0 if stage == "tail output" else (1 - share) * abs(stages.before_tail.o[0, 1, ROW, d])
            o[d] += sign * part * (U * (abs(o[d]) + before) + 2.0**-24)
        elif stage == "tail lse":
            lse[ROW] += sign * part * (share * 6 * 2.0**-18 + 2.0**-18)
        elif stage == "tail lse of no keys":
            lse[0] += sign * part * 2.0**-18
        else:
            leading = moment_keys(call.problem.geometry(call.config).moment_group(2))
            both = np.cov(call.v[0, 0, :leading].T, call.k[0, 0, :leading].T, bias=True)
            slope = SMALL * np.abs(both[:HEAD_DIM, HEAD_DIM:]) @ np.abs(call.q[0, 1, ROW])
            d = int((np.abs(o) / slope).argmin())  # where rounding of the output is the least of it
            o[d] += sign * part * share * slope[d] * 2.0**-7
        report = call.report(stages)
        assert is_ok(report, stage.split(" of")[0]) == ok, (part, report.table())


def test_small_weights_of_float16_have_steps(rng):
    """Of 2^-24: a row of one key that outweighs 1,000 others by 2^16 has each of these within 2^-25 of its weight."""
    v = rng.standard_normal((1, 2, 1000, 8))
    p = 2.0**-16 * rng.uniform(0.5, 1.5, 1000)
    off = np.abs((p.astype(np.float16) - p) @ v)  # [1, 2, 8]
    bound = _packed_error(v, 2, "float16")
    assert bound.shape == (1, 4, 1, 8) and (off.repeat(2, axis=1)[:, :, None] <= bound).all()
    assert (bound < 100 * off.mean()).all() and not _packed_error(v, 2, "bfloat16").any()
