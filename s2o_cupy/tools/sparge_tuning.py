"""SpargeAttn's thresholds of a layer, found on its own queries, keys and values."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..api.attention import s2o_attention
from ..api.gather import gather_attention
from ..api.habits import answers_habits
from ..arrays.frameworks import to_host
from ..errors import ArgumentTypeError, ArgumentValueError, arguments_of, plain_kind
from ..methods.attention import select
from ..methods.base import checked_bool, checked_number
from ..methods.sparge import LARGEST, SpargeConfig
from ..plan.schedule_form import ScheduleForm
from ..schedules.schedule import Schedule
from ..schedules.stats import GatherStats
from .problems import problem_of

__all__ = ["TAUS", "THETAS", "VALUE_SKIPS", "SpargeTuning", "tune_sparge"]

TAUS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
THETAS = (-1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
VALUE_SKIPS = (-0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, -8.0)
MORE_ERROR = 0.01  # by leaving out values, as in the paper for Llama 3.1
DENSE = (1.0, -1.0)  # tau and theta of a head that no pair of the grid serves


@dataclass(frozen=True)
class SpargeTuning:
    """What was found.

    Attributes
    ----------
    config : SpargeConfig
        With a tau, a theta and a value_skip for each head, or one for all.
    density, value_density, rel_l1 : float64 numpy.ndarray, (heads,)
        What ``config`` gives: pairs computed / pairs of dense attention, the same of products with values, and
        sum |o - dense| / sum |dense|, the means over the inputs.
    """

    config: SpargeConfig
    density: np.ndarray
    value_density: np.ndarray
    rel_l1: np.ndarray


@answers_habits
@arguments_of("tune_sparge")
def tune_sparge(
    inputs: Sequence[tuple[Any, Any, Any]],
    config: SpargeConfig | None = None,
    *,
    rel_l1: float = 0.08,
    value_rel_l1: float | None = None,
    taus: Sequence[float] = TAUS,
    thetas: Sequence[float] = THETAS,
    value_skips: Sequence[float] = VALUE_SKIPS,
    per_head: bool = True,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "BHSD",
) -> SpargeTuning:
    """The sparsest of a grid of thresholds whose error is small enough: the procedure of SpargeAttn's paper.

    First tau and theta are found, then the value_skip that leaves out most with these. It takes two calls of dense
    attention for each input (`s2o_attention` at tau 0), and one of sparse attention for each of the inputs and pairs
    and for each of the inputs and value_skips.

    Parameters
    ----------
    inputs : list or tuple of (q, k, v)
        Of one layer, so of as many heads, as `sparse_attention` takes them; the paper takes five.
    config : SpargeConfig, optional
        Whose other fields are kept.
    rel_l1 : float, default 0.08
        Bound on sum |o - dense| / sum |dense|, the mean over the inputs. The paper has 0.08 for Llama 3.1, 0.05 to 0.07
        for models of pictures and videos.
    value_rel_l1 : float, default rel_l1 + 0.01
        The same with values left out; no smaller. The paper has 0.09 for Llama 3.1.
    taus, thetas, value_skips : sequences of numbers
        The grid; without value_skips none is looked for, and ``config``'s is kept.
    per_head : bool, default True
        Thresholds for each head, each of which keeps to the bound, as in the public code; else for all heads together,
        as in the paper.
    is_causal, scale, softcap, layout : as in `sparse_attention`

    Returns
    -------
    SpargeTuning
        A head that no pair serves attends to all blocks.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted; the message names it, what came and what is accepted.
    """
    _check_bound("rel_l1", rel_l1, 0, "a number above 0")
    value_rel_l1 = rel_l1 + MORE_ERROR if value_rel_l1 is None else value_rel_l1
    _check_bound("value_rel_l1", value_rel_l1, rel_l1 * (1 - 1e-9), f"None, or a number from rel_l1 ({rel_l1}) on")
    if config is not None and not isinstance(config, SpargeConfig):
        raise ArgumentTypeError(
            f"config is a {type(config).__name__}; accepted: None, or a SpargeConfig", "tune_sparge"
        )
    config = SpargeConfig(tau=1, theta=-1) if config is None else config
    checked_bool("per_head", per_head, "tune_sparge")
    taus = _numbers("taus", taus, 0, 1, "numbers above 0, up to 1")
    thetas = _numbers("thetas", thetas, -LARGEST, LARGEST, "finite numbers")
    skips = _numbers("value_skips", value_skips, -LARGEST, -1 / LARGEST, "numbers below 0", may_be_empty=True)
    pairs = [DENSE, *itertools.product(taus, thetas)]
    plain = replace(config, value_skip=None) if skips else config
    candidates = [replace(plain, tau=tau, topk=None, theta=theta) for tau, theta in pairs]
    options: dict[str, Any] = {"scale": scale, "layout": layout}
    heads = _heads(inputs, candidates[0], {"is_causal": is_causal, "softcap": softcap, **options})
    density, values, error = (np.zeros((len(inputs), len(pairs), heads)) for _ in range(3))
    for i, (q, k, v) in enumerate(inputs):
        dense = s2o_attention(q, k, v, tau=0, is_causal=is_causal, softcap=softcap, **options)
        for p, candidate in enumerate(candidates):
            schedule = select(q, k, candidate, is_causal=is_causal, **options)
            o, stats = gather_attention(
                q, k, v, schedule, softcap=softcap, path=candidate.path, return_stats=True, **options
            )
            density[i, p], error[i, p] = _densities(schedule), _errors(o, dense, layout)
            values[i, p] = density[i, p] - _skipped(stats)
    density, values, error = (x.mean(axis=0) for x in (density, values, error))  # [pairs, heads]
    best = _sparsest(density, error < rel_l1 if per_head else error.mean(axis=1) < rel_l1)  # [heads]
    each = np.arange(heads)
    thresholds = [_of_heads([pairs[p][j] for p in best], per_head) for j in range(2)]
    found = replace(plain, tau=thresholds[0], topk=None, theta=thresholds[1])
    if not skips:
        return SpargeTuning(found, density[best, each], values[best, each], error[best, each])

    limits = (-np.inf, *skips)  # the first leaves out nothing
    values, error = (np.zeros((len(inputs), len(limits), heads)) for _ in range(2))
    for i, (q, k, v) in enumerate(inputs):
        dense = s2o_attention(q, k, v, tau=0, is_causal=is_causal, softcap=softcap, **options)
        schedule = select(q, k, found, is_causal=is_causal, **options)
        for p, limit in enumerate(limits):
            form = replace(schedule.form, value_skip=None if p == 0 else limit)
            o, stats = gather_attention(
                q, k, v, replace(schedule, form=form), softcap=softcap, path=found.path, return_stats=True, **options
            )
            values[i, p], error[i, p] = _densities(schedule) - _skipped(stats), _errors(o, dense, layout)
    values, error = values.mean(axis=0), error.mean(axis=0)  # [limits, heads]
    chosen = _sparsest(values, error < value_rel_l1 if per_head else error.mean(axis=1) < value_rel_l1)
    found = replace(found, value_skip=_of_heads([limits[p] for p in chosen], per_head))
    return SpargeTuning(found, density[best, each], values[chosen, each], error[chosen, each])


def _check_bound(name: str, value: Any, low: float, accepted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) > low:
        raise ArgumentValueError(f"{name} is {value!r}; accepted: {accepted}", "tune_sparge")


def _sparsest(density: np.ndarray, good: np.ndarray) -> np.ndarray:
    """Of candidates [P, heads] the one of the least density that is good, [heads]: of each head, or, where ``good`` is
    [P], of all together. The first where none is."""
    if good.ndim == 1:
        density, good = density.mean(axis=1, keepdims=True).repeat(density.shape[1], axis=1), good[:, None]
    best = np.where(good, density, np.inf).argmin(axis=0)
    return np.where(np.broadcast_to(good, density.shape).any(axis=0), best, 0)


def _of_heads(values: list[float], per_head: bool) -> Any:
    return tuple(values) if per_head else values[0]


def _numbers(
    name: str, values: Any, low: float, high: float, accepted: str, may_be_empty: bool = False
) -> tuple[float, ...]:
    """Of the grid, each above ``low`` and up to ``high``."""
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
        came = f"{values!r} ({type(values).__name__})"
        raise ArgumentTypeError(f"{name} is {came}; accepted: a sequence of {accepted}", "tune_sparge")
    if not len(values) and not may_be_empty:
        raise ArgumentValueError(f"{name} is empty; accepted: one or more {accepted}", "tune_sparge")
    return tuple(checked_number(f"{name}[{i}]", x, low, high, accepted, "tune_sparge") for i, x in enumerate(values))


def _heads(inputs: Any, config: SpargeConfig, options: dict[str, Any]) -> int:
    """Query heads of the inputs, each of which is a call that is accepted."""
    accepted = "a list or tuple of (q, k, v)"
    if not isinstance(inputs, (list, tuple)):
        raise ArgumentTypeError(f"inputs is a {type(inputs).__name__}; accepted: {accepted}", "tune_sparge")
    if not inputs:
        raise ArgumentValueError(f"inputs is empty; accepted: {accepted}, one or more", "tune_sparge")
    heads = 0
    for i, x in enumerate(inputs):
        if not isinstance(x, (list, tuple)) or len(x) != 3:
            came = f"a {type(x).__name__}" + (f" of {len(x)}" if isinstance(x, (list, tuple)) else "")
            raise ArgumentTypeError(
                f"inputs[{i}] is {came}; accepted: (q, k, v), as inputs is {accepted}", "tune_sparge"
            )
        try:
            q, k, v = x
            problem, *_ = problem_of(q, k, v, config.of_pass, **options)
            config.check(problem)
        except (TypeError, ValueError) as error:
            raise plain_kind(error)(f"tune_sparge: inputs[{i}] is not accepted: {error}") from error
        if problem.empty or not problem.seqlen_k:
            raise ArgumentValueError(
                f"inputs[{i}] has {problem.batch} x {problem.heads} heads, {problem.seqlen_q} queries "
                f"and {problem.seqlen_k} keys; accepted: at least one of each",
                "tune_sparge",
            )
        heads = heads or problem.heads
        if problem.heads != heads:
            raise ArgumentValueError(
                f"inputs[{i}] has {problem.heads} query heads and inputs[0] has {heads}; accepted: inputs "
                "of one layer, of as many heads",
                "tune_sparge",
            )
    return heads


def _heads_axis(layout: str) -> int:
    return -3 if layout == "BHSD" else -2


def _errors(o: Any, dense: Any, layout: str) -> np.ndarray:
    """rel_l1 of each head, float64 [heads]."""
    from array_api_compat import array_namespace

    xp = array_namespace(o)
    wide = [xp.astype(x, xp.float32) if str(x.dtype) not in ("float64", "torch.float64") else x for x in (o, dense)]
    axes = tuple(i for i in range(o.ndim) if i != o.ndim + _heads_axis(layout))
    difference = to_host(xp.sum(xp.abs(wide[0] - wide[1]), axis=axes)).astype(np.float64)
    size = to_host(xp.sum(xp.abs(wide[1]), axis=axes)).astype(np.float64)
    return difference / np.where(size > 0, size, 1)


def _densities(schedule: Schedule) -> np.ndarray:
    """Pairs computed / pairs of dense attention of each head, [heads]."""
    form = schedule.form
    rows = np.minimum(form.block_m, form.seqlen_q - np.arange(form.rows) * form.block_m)
    pairs = (to_host(schedule.keys).astype(np.int64) * rows).sum(axis=-1).mean(axis=0)  # [heads]
    if form.dense is not None:
        pairs = pairs + form.dense.dense_pairs()
    return pairs / _all_pairs(form)


def _all_pairs(form: ScheduleForm) -> int:
    """Of dense attention, of a head."""
    return form.seqlen_q * form.seqlen_k if form.dense is None else form.dense.causal_pairs()


def _skipped(stats: GatherStats) -> Any:
    """Pairs whose values were left out / pairs of dense attention of each head, [heads]."""
    if stats.skipped is None:
        return 0.0
    return to_host(stats.skipped).astype(np.int64).sum(axis=(2, 3)).mean(axis=0) / _all_pairs(stats.schedule.form)
