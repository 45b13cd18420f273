"""A method of the caller's own: a callable that gives a Schedule. Here is what it is given, and what it must give."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

from ..arrays.frameworks.base import Framework
from ..errors import ArgumentTypeError, ArgumentValueError
from ..nearest import nearest
from ..plan.schedule_form import ScheduleForm
from ..problem import PLAIN, Problem
from ..schedules.schedule import Schedule
from ..spec import RANKS, Pass, S2OConfig
from .base import MethodConfig
from .blasst import BLASSTConfig
from .registry import METHODS

__all__ = [
    "ACCEPTED", "IN_ARRAY_CODE", "AnyMethod", "Method", "OwnMethod", "as_method", "config_named", "fields_given",
    "method_name", "pass_of",
]  # fmt: skip

IN_ARRAY_CODE: tuple[type[Any], ...] = (BLASSTConfig,)  # published methods that are callables


class Method(Protocol):
    """What can stand for the configuration of a method, wherever one is accepted.

    A function, or an instance of a class with ``__call__``. A frozen dataclass serves best: tables name its class, and
    the fields that are not defaults.
    """

    def __call__(self, q: Any, k: Any, *, is_causal: bool, scale: float) -> Schedule:
        """Which keys the queries attend to.

        Parameters
        ----------
        q : array, (batch, heads, seqlen_q, head_dim)
            The caller's, or a view of it: of NumPy, read-only, CuPy, PyTorch or JAX, whatever the layout of the call.
        k : array, (batch, kv_heads, seqlen_k, head_dim)
            Query head h reads KV head ``h // (heads // kv_heads)``; query i stands at key i + seqlen_k - seqlen_q.
        is_causal : bool
        scale : float
            The factor of the scores.

        Returns
        -------
        Schedule
            Of q's framework, on q's device, for these lengths and this ``is_causal``, for the batch or for 1, and of
            all query heads, KV heads or 1.
        """


AnyMethod = S2OConfig | MethodConfig | Method

_PUBLISHED = ", ".join(method.__name__ for method in (*METHODS, *IN_ARRAY_CODE))
_OWN = "or a method of your own, called as method(q, k, is_causal=, scale=) and returning a Schedule"
ACCEPTED = f"S2OConfig, {_PUBLISHED}, {_OWN}"


@dataclass(frozen=True)
class OwnMethod:
    """A `Method` with the properties that the configuration of a published one has."""

    method: Method
    path = "auto"
    long_lists = False
    of_pass = PLAIN

    def check(self, problem: Problem) -> None:
        """Whether it can be called as `Method` is. Which problems it takes it says itself."""
        function: Any = self.method
        before, options = (), {"is_causal": True, "scale": 1.0}
        if isinstance(function, functools.partial):
            before, options, function = function.args, function.keywords | options, function.func
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of C, say
            return
        try:
            signature.bind(*before, None, None, **options)
        except TypeError as error:
            name = method_name(self.method)
            raise ArgumentTypeError(
                f"the method {name}{signature} is called as {name}(q, k, is_causal=, scale=), which it does not take "
                f"({error}); accepted: two arguments by position, q and k, and the keywords is_causal and scale"
            ) from None

    def schedule(self, framework: Framework, q: Any, k: Any, problem: Problem, layout: str, device: Any) -> Schedule:
        """What the method chooses for q and k, arrays of ``framework`` on ``device``; checked, as far as can be without
        waiting for a GPU."""
        name = f"the method {method_name(self.method)}"
        if framework.name == "DLPack":
            raise ArgumentTypeError(
                f"q is a {type(q).__name__}, which {name} gets as it is; accepted: an array of NumPy, CuPy, "
                "PyTorch or JAX"
            )
        q, k = _bhsd(q, layout), _bhsd(k, layout)
        if framework.name == "NumPy":  # the caller's own, which a method must not write
            q, k = _read_only(q), _read_only(k)
        with _as_written(framework, device):
            try:
                made = self.method(q, k, is_causal=problem.is_causal, scale=problem.scale)
            except Exception as error:
                with suppress(Exception):  # one that takes no attribute; `s2o compare` names the method's file by it
                    error.raised_by = name  # type: ignore[attr-defined]
                raise
        if not isinstance(made, Schedule):
            raise ArgumentTypeError(f"{name} returned a {type(made).__name__}; accepted: a Schedule")
        _check_arrays(made, framework, device, f"{name} returned a Schedule")
        _check_form(made.form, problem, f"{name} returned a Schedule")
        if device.kind == "cpu":
            try:
                made.check()
            except ValueError as error:
                mistake = str(error).removeprefix("Schedule.check: ")
                raise ArgumentValueError(f"{name} returned a Schedule with a mistake: {mistake}") from error
        return made


def as_method(config: Any, what: str = "config", owner: str = "", *, s2o: bool = True, also: str = "") -> Any:
    """An S2OConfig, the configuration of a published method, or an OwnMethod; TypeError if ``config`` is none of them.
    ``s2o``: whether an S2OConfig is. For errors ``what``: the argument, ``owner``: of what, ``also``: what else is
    accepted."""
    if isinstance(config, METHODS) or (s2o and isinstance(config, S2OConfig)):
        return config
    accepted = ", ".join(filter(None, (also, ACCEPTED if s2o else f"{_PUBLISHED}, {_OWN}")))
    if isinstance(config, type):
        raise ArgumentTypeError(
            f"{what} is the class {config.__name__}; accepted: an instance, {config.__name__}(...)", owner
        )
    if isinstance(config, S2OConfig) or not callable(config):
        meant = _meant(config, s2o)
        raise ArgumentTypeError(f"{what} is a {type(config).__name__}; accepted: {accepted}{meant}", owner)
    return OwnMethod(config)


def config_named(name: str, *, s2o: bool = True, exactly: bool = False) -> str | None:
    """How the configuration is made that ``name`` is or is like: "XAttentionConfig(...)" of "xattention". ``s2o``:
    whether S2O and its ranks count, ``exactly``: names alone that differ in nothing but signs and cases."""
    accepted: tuple[type[Any], ...] = (S2OConfig, *METHODS, *IN_ARRAY_CODE) if s2o else (*METHODS, *IN_ARRAY_CODE)
    known = {method.__name__.removesuffix("Config").lower(): f"{method.__name__}(...)" for method in accepted}
    known |= {rank: f"S2OConfig(rank={rank!r})" for rank in (RANKS if s2o else ())}
    plain = re.sub(r"config|[\W_]", "", name.lower())
    near = nearest(plain, known, 1.0 if exactly else 0.6)
    return None if near is None else known[near]


def _meant(config: Any, s2o: bool) -> str:
    """What was probably meant, for an error."""
    if isinstance(config, str):
        named = config_named(config, s2o=s2o)
        return "" if named is None else f"; did you mean {named}?"
    if not s2o:
        return ""
    if isinstance(config, Mapping):
        return "; such as S2OConfig(**config)"
    is_number = isinstance(config, numbers.Real) and not isinstance(config, bool)
    return f"; such as S2OConfig(tau={config})" if is_number else ""


def pass_of(config: AnyMethod) -> Pass:
    """What the passes need to attend by it."""
    found: Pass = as_method(config).of_pass
    return found


def method_name(config: AnyMethod) -> str:
    """For tables and the command line: "xattention" of an XAttentionConfig, the name of a function."""
    if isinstance(config, functools.partial):
        return method_name(config.func)
    named = getattr(config, "__name__", None)
    return named if isinstance(named, str) else type(config).__name__.removesuffix("Config").lower()


def fields_given(config: AnyMethod) -> dict[str, Any]:
    """All fields of a configuration, or the keywords that a functools.partial has."""
    if is_dataclass(config):
        return {x.name: getattr(config, x.name) for x in fields(config)}
    return dict(config.keywords) if isinstance(config, functools.partial) else {}


def _bhsd(x: Any, layout: str) -> Any:
    """A view [batch, heads, seqlen, head_dim]."""
    from array_api_compat import array_namespace

    x = x if x.ndim == 4 else x[None]
    return x if layout == "BHSD" else array_namespace(x).permute_dims(x, (0, 2, 1, 3))


def _read_only(x: Any) -> Any:
    view = x.view()
    view.flags.writeable = False
    return view


def _as_written(framework: Framework, device: Any) -> AbstractContextManager[Any]:
    """Inside it operations have the dtype that a method asks for: PyTorch's autocast is off."""
    if framework.name != "PyTorch":
        return nullcontext()
    return sys.modules["torch"].autocast(device.kind, enabled=False)


def _check_arrays(made: Schedule, framework: Framework, device: Any, what: str) -> None:
    from ..arrays.frameworks import framework_of

    of_lists = framework_of("schedule", made.entries)
    if of_lists is not framework:
        raise ArgumentTypeError(f"{what} of {of_lists.name} arrays; accepted: of {framework.name} arrays, as q is")
    found = framework.describe(made.entries).device
    if found != device:
        raise ArgumentValueError(f"{what} on {found}; accepted: on {device}, as q is")


def _check_form(form: ScheduleForm, problem: Problem, what: str) -> None:
    expected: Mapping[str, Any] = {
        "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k, "is_causal": problem.is_causal,
    }  # fmt: skip
    for name, value in expected.items():
        if getattr(form, name) != value:
            raise ArgumentValueError(f"{what} with {name} {getattr(form, name)}; accepted: {value}, as in the call")
    heads = dict.fromkeys((1, problem.kv_heads, problem.heads))
    for name, of_batch, of_heads in (
        ("lists", form.batch, form.list_heads), ("a k_order", form.order_batch or 1, form.order_heads or 1),
    ):  # fmt: skip
        came = f"{what} with {name} for"
        if of_batch not in (1, problem.batch):
            raise ArgumentValueError(f"{came} a batch of {of_batch}; accepted: 1 or q's, {problem.batch}")
        if of_heads not in heads:
            raise ArgumentValueError(f"{came} {of_heads} heads; accepted: {' or '.join(map(str, heads))}")
