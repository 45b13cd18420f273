"""Methods side by side on the user's own q, k and v: density, error and time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from ..api.habits import answers_habits
from ..arrays.arguments import describe
from ..arrays.frameworks import to_host
from ..errors import ArgumentTypeError, ArgumentValueError, arguments_of
from ..methods.attention import sparse_attention
from ..methods.base import MethodConfig
from ..methods.blasst import BLASSTConfig
from ..methods.own import ACCEPTED, IN_ARRAY_CODE, AnyMethod, as_method, fields_given, method_name
from ..methods.registry import METHODS
from ..methods.sparge import SpargeConfig
from ..nearest import meant
from ..problem import Problem
from ..spec import S2OConfig
from .finite import all_finite, not_finite_of
from .own_file import own_method, own_place
from .problems import problem_of
from .progress import Report

__all__ = [
    "Compared", "Comparison", "compare", "default_configs", "draw", "methods_by_name", "parse_method", "settings_of",
]  # fmt: skip

DENSE = S2OConfig(tau=0)
# Of a method without defaults, which wants to be tuned.
UNTUNED: dict[type[Any], dict[str, Any]] = {
    SpargeConfig: {"tau": 0.9, "theta": -0.1}, BLASSTConfig: {"scale_factor": 1000},
}  # fmt: skip
WARMUP = 2  # calls of each that are not timed


@dataclass(frozen=True)
class Compared:
    """One configuration's part.

    Attributes
    ----------
    config : S2OConfig, the configuration of a method, or a method of the caller's own
    density : float64 numpy.ndarray, (batch, heads)
        Pairs computed / pairs of dense attention.
    error : float64 numpy.ndarray, (batch, heads)
        rel_l2 against dense attention, ||o - dense|| / ||dense||.
    pooled_density, pooled_error : float
        The same over all heads of the batch together.
    milliseconds : float or None
        Of a call on a GPU, between CUDA events: the median of calls that take turns. None on a CPU, where the time of
        NumPy's reference says nothing of a GPU's.
    """

    config: AnyMethod
    density: np.ndarray
    error: np.ndarray
    pooled_density: float
    pooled_error: float
    milliseconds: float | None

    @property
    def name(self) -> str:
        return method_name(self.config)

    @property
    def settings(self) -> str:
        return settings_of(self.config)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes
    ----------
    rows : tuple of Compared
        In the order of the configurations.
    dense_milliseconds : float or None
        Of dense attention: `s2o_attention` with tau 0, in the same turns. None on a CPU.
    backend : str
        "cupy" or "numpy".
    problem : Problem
        Sizes, dtype, mask and scale of the calls.
    """

    rows: tuple[Compared, ...]
    dense_milliseconds: float | None
    backend: str
    problem: Problem

    def table(self) -> str:
        """For a terminal."""
        p = self.problem
        time = "" if self.dense_milliseconds is None else f" {'ms':>9} {'of dense':>9}"
        told = [f"{row.name}{f' ({row.settings})' if row.settings else ''}" for row in self.rows]
        width = max(len("dense"), *map(len, told))
        lines = [
            f"{p.heads} heads, {p.kv_heads} KV heads, {p.seqlen_q:,} queries, {p.seqlen_k:,} keys, head_dim "
            f"{p.head_dim}, {p.dtype}, {'causal' if p.is_causal else 'not causal'}",
            "error: rel_l2 against dense attention, of all heads and of the worst; density: pairs computed / pairs of "
            "dense attention",
            "",
            f"{'':<{width}} {'density':>9} {'error':>9} {'worst':>9}{time}",
            f"{'dense':<{width}} {1:>9.3f} {0:>9.4f} {0:>9.4f}" + self._times(self.dense_milliseconds),
        ]
        for name, row in zip(told, self.rows, strict=True):
            lines.append(
                f"{name:<{width}} {row.pooled_density:>9.3f} {row.pooled_error:>9.4f} {row.error.max():>9.4f}"
                + self._times(row.milliseconds)
            )
        if not time:
            lines += ["", "No GPU used: NumPy's reference ran, whose time says nothing of a GPU's; it was not taken."]
        return "\n".join(lines)

    def _times(self, milliseconds: float | None) -> str:
        """Two columns of the table, nothing where no times were taken."""
        if milliseconds is None or self.dense_milliseconds is None:
            return ""
        return f" {milliseconds:>9.3f} {milliseconds / self.dense_milliseconds:>9.3f}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [
            {
                "method": row.name,
                "config": {name: _plain(value) for name, value in fields_given(row.config).items()},
                "density": row.density.tolist(),
                "error": row.error.tolist(),
                "pooled_density": row.pooled_density,
                "pooled_error": row.pooled_error,
                "milliseconds": row.milliseconds,
            }
            for row in self.rows
        ]
        return {
            "rows": rows,
            "dense_milliseconds": self.dense_milliseconds,
            "backend": self.backend,
            "problem": asdict(self.problem),
        }


def settings_of(config: AnyMethod) -> str:
    """What of a configuration is not a default, for a reader."""
    given = fields_given(config)
    defaults = {x.name: x.default for x in fields(config)} if is_dataclass(config) else {}
    told = [x for x in given if x not in defaults or not _same(given[x], defaults[x])]
    if isinstance(config, S2OConfig):  # some defaults depend on others
        plain, of_these = S2OConfig(), S2OConfig(rank=config.rank, segment=config.segment)
        changed = [x for x in given if given[x] != getattr(plain if x in ("rank", "segment") else of_these, x)]
        told = [*(["tau"] if config.tau is not None else []), *(x for x in changed if x not in ("tau", "dense_up_to"))]
    return ", ".join(f"{name}={_said(given[name])}" for name in told)


def _same(value: Any, default: Any) -> bool:
    """Whether a field has its default; one that cannot be compared, as an array, has not."""
    try:
        return value is default or bool(value == default)
    except ValueError:
        return False


def parse_method(text: str, option: str) -> AnyMethod:
    """A configuration from NAME or NAME:FIELD=VALUE,...; of S2O at any length. Or a method of the caller's own, from
    FILE.py:NAME or FILE.py:NAME:FIELD=VALUE,.... ``option``: for errors."""
    place = own_place(text)
    if place is not None:
        return own_method(place, _fields(place.fields, f"{place.file}:{place.name}", text, option), option)
    name, _, rest = text.partition(":")
    methods = methods_by_name()
    if name not in methods:
        like = meant(re.split(r"[ ,]|[Cc]onfig", name)[0], list(methods))
        several = "; fields are NAME:FIELD=VALUE,..., another method another --method"
        raise ValueError(
            f"{option} has {name!r}; {like}accepted: {', '.join(methods)}, or FILE.py:NAME, a method of your own"
            f"{several if re.search('[ ,]', name) else ''}"
        )
    method = methods[name]
    given: dict[str, Any] = {"dense_up_to": 0} if method is S2OConfig else dict(UNTUNED.get(method, {}))
    named = _fields(rest, name, text, option)
    for name, other in (("topk", "tau"), ("threshold", "scale_factor")):
        if name in named:  # SpargeAttn and BLASST take it in place of the other
            given.pop(other, None)
    return method(**{**given, **named})


def _fields(rest: str, name: str, text: str, option: str) -> dict[str, Any]:
    """From FIELD=VALUE,..., which is the end of ``text``."""
    named: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        field, equals, value = item.partition("=")
        if not equals:
            raise ValueError(
                f"{option} has {text!r}; accepted: {name}:FIELD=VALUE, further ones behind commas; a number for each "
                "query head as FIELD=0.1/0.2"
            )
        named[field.strip()] = _value(value.strip())
    return named


def _value(text: str) -> Any:
    """A number, True, False or None as Python writes it, or several, "0.1/0.2"; else the text."""
    parts = text.split("/")
    try:
        if len(parts) > 1:
            return tuple([float(x) for x in parts])
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def methods_by_name() -> dict[str, type[Any]]:
    """Configurations by the names that the command line has for them: "xattention" of XAttentionConfig."""
    accepted: tuple[type[Any], ...] = (S2OConfig, *METHODS, *IN_ARRAY_CODE)
    return {method.__name__.removesuffix("Config").lower(): method for method in accepted}


def default_configs(is_causal: bool = True) -> tuple[S2OConfig | MethodConfig, ...]:
    """S2O, at any length, and every method with kernels that takes such a mask, by their defaults, or UNTUNED."""
    methods = [method(**UNTUNED.get(method, {})) for method in METHODS if is_causal or not method.causal_only]
    return (S2OConfig(dense_up_to=0), *methods)


@answers_habits
@arguments_of("compare")
def compare(
    q: Any,
    k: Any,
    v: Any,
    configs: Iterable[Any] | None = None,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "BHSD",
    repeats: int = 5,
    progress: Report | None = None,
) -> Comparison:
    """Run methods on the same q, k and v, and say how far each is off dense attention, what it computes and how long.

    Parameters
    ----------
    q, k, v : array
        As `s2o_attention` takes them, of any framework.
    configs : iterable of configurations, optional
        An S2OConfig, the configuration of another method or a method of your own each, as `sparse_attention` takes it.
        By default S2O and all methods that take the mask, by their defaults.
    is_causal, scale, softcap, layout : optional
        As of `s2o_attention`.
    repeats : int, default 5
        Timed calls of each on a GPU, which take turns.
    progress : callable, optional
        Called with (calls done, calls of all, what they are of).

    Returns
    -------
    Comparison

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted, or one of the arrays or dense attention's output is not finite.

    Notes
    -----
    Outputs are rounded to the dtype of the inputs, so an error near its rounding (2^-9 of bfloat16, 2^-12 of float16)
    is of the dtype. An S2OConfig is taken as it is: without ``dense_up_to=0`` a short call is dense attention on a GPU.

    Examples
    --------
    >>> from s2o_cupy import S2OConfig
    >>> from s2o_cupy.methods import MeanPoolingConfig, XAttentionConfig
    >>> from s2o_cupy.tools import compare, inputs
    >>> q, k, v = inputs.builtin("slash", length=1024, head_dim=32)
    >>> found = compare(q, k, v, [S2OConfig(dense_up_to=0), XAttentionConfig(), MeanPoolingConfig()], repeats=1)
    >>> [row.name for row in found.rows]
    ['s2o', 'xattention', 'meanpooling']
    """
    problem, backend, arrays = problem_of(
        q, k, v, DENSE, layout=layout, is_causal=is_causal, scale=scale, softcap=softcap
    )
    if problem.empty or not problem.seqlen_k:
        came = f"q is {tuple(q.shape)}, k is {tuple(k.shape)}"
        raise ArgumentValueError(f"{came}; accepted: at least one head, query and key", "compare")
    chosen = _checked(default_configs(is_causal) if configs is None else configs, problem)
    if isinstance(repeats, bool) or not isinstance(repeats, (int, np.integer)) or repeats < 1:
        raise ArgumentValueError(f"repeats is {repeats!r}; accepted: an integer >= 1", "compare")
    if wrong := not_finite_of(arrays):
        raise ArgumentValueError(f"{wrong[0]}; accepted: finite q, k and v", "compare")
    options = {"is_causal": is_causal, "scale": scale, "softcap": softcap, "layout": layout}
    calls = _Calls(arrays, options, backend == "cupy")
    turns = WARMUP + repeats if calls.on_gpu else 0  # a reference's times say nothing
    every = (DENSE, *chosen)
    total, done = len(every) * (1 + turns), 0

    def step(config: AnyMethod) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total, "dense" if config is DENSE else method_name(config))

    dense, _ = calls.run(DENSE)
    if not all_finite(dense):
        raise ArgumentValueError(
            "dense attention's output is not finite; accepted: smaller values of q, k and v", "compare"
        )
    step(DENSE)
    found = []
    for config in chosen:
        o, stats = calls.run(config)
        density = to_host(stats.density_per_head).astype(np.float64)
        found.append((config, density, stats.density, *calls.errors(o, dense)))
        step(config)
        del o, stats
    times: dict[int, list[float]] = {i: [] for i in range(len(every))}
    for turn in range(turns):
        for i, config in enumerate(every):
            taken = calls.milliseconds(config)
            if turn >= WARMUP:
                times[i].append(taken)
            step(config)
    medians = [float(np.median(times[i])) if turns else None for i in range(len(every))]
    rows = [
        Compared(config, density, error, pooled_density, pooled_error, taken)
        for (config, density, pooled_density, error, pooled_error), taken in zip(found, medians[1:], strict=True)
    ]
    return Comparison(tuple(rows), medians[0], backend, problem)


def _checked(configs: Any, problem: Problem) -> tuple[AnyMethod, ...]:
    if isinstance(configs, (S2OConfig, *METHODS)) or not hasattr(configs, "__iter__"):
        raise ArgumentTypeError(
            f"configs is a {type(configs).__name__}; accepted: some of {ACCEPTED}, as a list", "compare"
        )
    found = tuple(configs)
    if not found:
        raise ArgumentValueError("configs is empty; accepted: at least one", "compare")
    for i, config in enumerate(found):
        method = as_method(config, f"configs[{i}]", "compare")
        if not isinstance(method, S2OConfig):
            method.check(problem)
    return found


def _plain(value: Any) -> Any:
    """For JSON."""
    return value if value is None or isinstance(value, (str, int, float, list, tuple)) else repr(value)


class _Calls:
    """Calls on one set of arrays."""

    def __init__(self, arrays: tuple[Any, ...], options: dict[str, Any], on_gpu: bool) -> None:
        self.arrays, self.options, self.on_gpu = arrays, options, on_gpu

    def run(self, config: AnyMethod) -> tuple[Any, Any]:
        """Output and stats."""
        return sparse_attention(*self.arrays, config=config, return_stats=True, **self.options)

    def milliseconds(self, config: AnyMethod) -> float:
        """Between CUDA events."""
        import cupy

        framework, infos = describe({"q": self.arrays[0]})
        with framework.scope(infos[0].device, None, self.arrays[:1], host=False):
            stream = cupy.cuda.ExternalStream(framework.stream())
            begin_event, end_event = cupy.cuda.Event(), cupy.cuda.Event()
            begin_event.record(stream)
            sparse_attention(*self.arrays, config=config, **self.options)
            end_event.record(stream)
            end_event.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin_event, end_event))

    def errors(self, o: Any, dense: Any) -> tuple[np.ndarray, float]:
        """rel_l2 of each head, float64 [batch, heads], and over all."""
        difference, size = self._squares(o, dense), self._squares(dense)
        with np.errstate(divide="ignore", invalid="ignore"):
            of_head = np.where(difference == 0, 0.0, np.sqrt(difference / size))
            pooled = float(np.sqrt(difference.sum() / size.sum())) if difference.any() else 0.0
        return of_head, pooled

    def _squares(self, x: Any, other: Any = None) -> np.ndarray:
        """Sum of squares of each head's elements, or of what they differ by, float64 [batch, heads]; a head at a time,
        where the arrays are."""
        from array_api_compat import array_namespace

        xp = array_namespace(x)
        kind = xp.float64 if isinstance(x, np.ndarray) else xp.float32
        by_layout = (lambda y, h: y[h]) if self.options["layout"] == "BHSD" else (lambda y, h: y[:, h])
        batches = [(x, other)] if x.ndim == 3 else [(x[b], other if other is None else other[b]) for b in range(len(x))]
        sums = []
        for mine, its in batches:
            for h in range(mine.shape[0 if self.options["layout"] == "BHSD" else 1]):
                y = xp.astype(by_layout(mine, h), kind)
                if its is not None:
                    y = y - xp.astype(by_layout(its, h), kind)
                sums.append(xp.sum(y * y))
        return to_host(xp.stack(sums)).astype(np.float64).reshape(len(batches), -1)


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def draw(path: str, found: Comparison, title: str) -> None:
    """Write a picture: error by the time of a call where there is a GPU's, else by density."""
    from . import plot

    dense = found.dense_milliseconds
    groups: dict[str, list[tuple[float, float, str]]] = {}
    for row in found.rows:
        x = row.pooled_density if dense is None or row.milliseconds is None else row.milliseconds / dense
        groups.setdefault(row.name, []).append((x, row.pooled_error, row.settings))
    label = "time of a call / of dense attention" if dense else "density: pairs computed / pairs of dense attention"
    plot.draw_methods(path, groups, (label, "rel_l2 error against dense"), title)
