"""The tau of an error or a density that the user names, found on a sample of segments."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..api.habits import answers_habits
from ..api.run import parse_config
from ..by_head import check_one_error
from ..errors import ArgumentTypeError, ArgumentValueError, arguments_of
from ..plan import launch_plan
from ..problem import Problem
from ..spec import S2OConfig
from .inputs import QKV
from .layer_settings import plain_config
from .progress import Report
from .sampled import ErrorEstimate, Sample

__all__ = ["DENSE_ON_A_GPU", "TAUS", "Target", "TuneResult", "parse_target", "parse_taus", "tune"]

TAUS = (0.5, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.003, 0.002, 0.001)
HALVINGS = 4  # of the gap between two taus of the grid, in logarithms: a sample tells no more
DENSE_ON_A_GPU = (
    "On a GPU a call of {:,} keys is plain dense attention by dense_up_to; here S2O is measured all the same"
)


@dataclass(frozen=True)
class Target:
    """What was asked for: at most ``value`` of ``name``: "error", "density", or of a model "loss", more nats a token
    than with dense attention."""

    name: str
    value: float

    def reached(self, point: ErrorEstimate) -> bool:
        """By all heads together."""
        return self.of(point) <= self.value

    def of(self, point: ErrorEstimate) -> float:
        return point.pooled_error if self.name == "error" else point.pooled_density

    def best(self, taus: Sequence[float]) -> float:
        """Of taus that reach it: the largest for an error, for a density the smallest, which errs least."""
        return max(taus) if self.name == "error" else min(taus)

    def __str__(self) -> str:
        return f"{self.name} at most {self.value:g}"


@dataclass(frozen=True)
class TuneResult:
    """A configuration that reaches the target on the sampled segments, and what led to it.

    Attributes
    ----------
    config : S2OConfig
        The configuration that was given, with the tau that was found.
    target : Target
    points : tuple of ErrorEstimate
        Every tau that was looked at, the largest first.
    head_taus : float64 numpy.ndarray, (batch, heads)
        For information: the tau of the grid by which that head alone would reach the target, NaN if there is none.
        A configuration has one tau; `s2o_cupy.integrations.transformers.register` takes one for each head.
    problem : Problem
        Sizes, dtype, mask and scale of the call.
    """

    config: S2OConfig
    target: Target
    points: tuple[ErrorEstimate, ...]
    head_taus: np.ndarray
    problem: Problem

    @property
    def estimate(self) -> ErrorEstimate:
        """What ``config`` gives."""
        return next(point for point in self.points if point.tau == self.config.tau)

    def table(self, names: Sequence[str] | None = None) -> str:
        """For a terminal; ``names`` are those of the heads, by default their numbers."""
        here = self.estimate
        lines = [
            f"tau {here.tau:g} for {self.target}: error {here.pooled_error:.3g} +- {here.pooled_standard_error:.2g}, "
            f"density {here.pooled_density:.3f}",
            f"by {len(here.segments):,} of {here.segments_total:,} segments; error is rel_l2 against dense attention, "
            "+- its standard error; density is pairs computed / pairs of dense attention",
        ]
        if launch_plan.is_dense(self.problem, self.config):
            lines.append(DENSE_ON_A_GPU.format(self.problem.seqlen_k))
        lines += ["", f"{'tau':>9} {'density':>9} {'error':>9} {'+-':>9}   (all heads)"]
        lines += [
            f"{p.tau:>9g} {p.pooled_density:>9.3f} {p.pooled_error:>9.3g} {p.pooled_standard_error:>9.2g}"
            + ("   chosen" if p is here else "")
            for p in self.points
        ]
        lines += ["", f"{'head':>9} {'density':>9} {'error':>9} {'+-':>9}   tau of the grid for {self.target}"]
        for b, h in np.ndindex(*here.error.shape):
            name = str(h) if names is None else names[h]
            name = name if self.problem.batch == 1 else f"{b}:{name}"
            lines.append(
                f"{name:>9} {here.density[b, h]:>9.3f} {here.error[b, h]:>9.3g} {here.standard_error[b, h]:>9.2g}   "
                + ("none" if math.isnan(self.head_taus[b, h]) else f"{self.head_taus[b, h]:g}")
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``S2OConfig(**found["config"])`` is the configuration."""
        plain = [{key: _plain(value) for key, value in asdict(point).items()} for point in self.points]
        return {
            "config": plain_config(self.config),
            "target": asdict(self.target),
            "estimate": plain[self.points.index(self.estimate)],
            "points": plain,
            "head_taus": [[None if math.isnan(x) else x for x in row] for row in self.head_taus.tolist()],
            "problem": asdict(self.problem),
        }


@answers_habits
@arguments_of("tune")
def tune(
    q: Any,
    k: Any,
    v: Any,
    *,
    error: float | None = None,
    density: float | None = None,
    taus: Sequence[float] = TAUS,
    config: S2OConfig | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "BHSD",
    segments: int = 32,
    seed: int = 0,
    progress: Report | None = None,
) -> TuneResult:
    """Find the largest tau whose error is at most ``error``, or the smallest whose density is at most ``density``.

    Error and density of each tau are estimated as by `error_per_head`, over all heads together: of the grid ``taus``
    first, then between the tau of the grid that is chosen and the next one that misses the target.

    Parameters
    ----------
    q, k, v : array
        As `s2o_attention` takes them, of any framework.
    error : float, optional
        rel_l2 against dense attention, ||o - dense|| / ||dense||. Between 0 and 1.
    density : float, optional
        Pairs computed / pairs of dense attention. Above 0, up to 1. One of the two must be given.
    taus : sequence of float
        The grid, at least one number above 0.
    config : S2OConfig, optional
        All but tau, which is not looked at. S2O is measured at any length, whatever ``dense_up_to`` says.
    is_causal, scale, softcap, layout, segments, seed : optional
        As of `error_per_head`.
    progress : callable, optional
        Called with (calls done, calls at most, what they are of).

    Returns
    -------
    TuneResult

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted, or no tau of the grid reaches the target; the message says the nearest.

    Examples
    --------
    >>> from s2o_cupy import S2OConfig
    >>> from s2o_cupy.tools import inputs, tune
    >>> q, k, v = inputs.builtin("slash", length=1024, head_dim=32)
    >>> found = tune(q, k, v, density=0.95, taus=(0.5, 0.1, 0.02), config=S2OConfig(block_n=64), segments=4)
    >>> found.estimate.pooled_density <= 0.95
    True
    """
    target, grid = parse_target("tune", error=error, density=density), parse_taus("tune", taus)
    config = parse_config(config, None)
    sample = Sample(
        QKV(q, k, v), config, segments=segments, seed=seed, is_causal=is_causal, scale=scale, softcap=softcap,
        layout=layout,
    )  # fmt: skip
    calls, done = len(sample.segments) * (1 + len(grid) + HALVINGS), 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, calls, what)

    sample.attend_densely(step)
    of_grid = {tau: sample.estimate(tau, step) for tau in grid}
    points, reaching = dict(of_grid), [tau for tau, point in of_grid.items() if target.reached(point)]
    if not reaching:
        near = min(of_grid.values(), key=target.of)
        further = "smaller" if target.name == "error" else "larger"
        raise ArgumentValueError(
            f"no tau of {', '.join(f'{x:g}' for x in grid)} has {target}; the nearest is tau {near.tau:g}, with "
            f"{target.name} {target.of(near):.4g}; accepted: at least that, or {further} taus",
            "tune",
        )
    chosen = target.best(reaching)
    beyond = [tau for tau in grid if (tau > chosen if target.name == "error" else tau < chosen)]
    if beyond:
        missing = min(beyond) if target.name == "error" else max(beyond)
        for _ in range(HALVINGS):
            middle = float(f"{math.sqrt(chosen * missing):.3g}")  # what a person would write
            if middle in points:
                break
            points[middle] = sample.estimate(middle, step)
            if target.reached(points[middle]):
                chosen = middle
            else:
                missing = middle
    if progress is not None:
        progress(calls, calls)
    ordered = tuple(points[tau] for tau in sorted(points, reverse=True))
    return TuneResult(
        config.with_tau(chosen), target, ordered, _head_taus(target, list(of_grid.values())), sample.problem
    )


def _head_taus(target: Target, grid: Sequence[ErrorEstimate]) -> np.ndarray:
    """The tau of the grid, in descending order, by which each head reaches the target: float64 [batch, heads]."""
    values = np.stack([x.error if target.name == "error" else x.density for x in grid])  # [grid, batch, heads]
    taus = np.where(values <= target.value, np.array([x.tau for x in grid])[:, None, None], np.nan)
    best = np.fmax.reduce if target.name == "error" else np.fmin.reduce
    return best(taus, axis=0)


def parse_target(function: str, /, **targets: Any) -> Target:
    """The one that is not None. Errors begin with the name of ``function``, here and below."""
    given = {name: x for name, x in targets.items() if x is not None}
    if len(given) != 1:
        names = list(targets)
        listed = f"{', '.join(names[:-1])} {{}} {names[-1]}"
        came = f"both {listed.format('and')} are given" if len(names) == 2 else f"{' and '.join(given)} are given"
        came = came if given else f"neither {listed.format('nor')} is given"
        raise ArgumentValueError(f"{came}; accepted: one of them", function)
    ((name, value),) = given.items()
    if name == "error":
        return Target(name, check_one_error(name, value, function))
    most, accepted = (1.0, "a number above 0, up to 1") if name == "density" else (math.inf, "a finite number above 0")
    return Target(name, positive(f"{name} is", value, accepted, most, function))


def parse_taus(function: str, taus: Any) -> tuple[float, ...]:
    """Different ones, the largest first."""
    accepted = "at least one finite number above 0"
    try:
        found = {positive("taus has", tau, accepted, owner=function) for tau in taus}
    except TypeError:
        if hasattr(taus, "__iter__"):
            raise
        raise ArgumentTypeError(f"taus is {taus!r} ({type(taus).__name__}); accepted: {accepted}", function) from None
    if not found:
        raise ArgumentValueError(f"taus is empty; accepted: {accepted}", function)
    return tuple(sorted(found, reverse=True))


def positive(came: str, value: Any, accepted: str, most: float = math.inf, owner: str = "") -> float:
    """A finite number above 0 and up to ``most``. For errors ``came``: "tau is", ``owner``: of what."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{came} {value!r} ({type(value).__name__}); accepted: {accepted}", owner)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond any float
        number = math.inf
    if not 0 < number <= most or number == math.inf:  # NaN fails too
        raise ArgumentValueError(f"{came} {value}; accepted: {accepted}", owner)
    return number


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
