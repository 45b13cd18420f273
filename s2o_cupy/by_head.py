"""Arguments that are a number for all query heads, or one for each, checked.

Standard library only.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Set
from typing import Any

from .errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "by_head", "check_error", "check_one_error", "check_one_tau", "check_tau", "check_value_skip", "checked_real",
]  # fmt: skip


def by_head(name: str, value: Any, check: Callable[[str, Any], float], owner: str = "") -> float | tuple[float, ...]:
    """``check(name, number)`` of a number, or of one for each query head: a sequence or an array on the host."""
    # Text, what has no order, and arrays without an axis are for the check to refuse.
    is_one = isinstance(value, (str, bytes, Mapping, Set)) or getattr(value, "ndim", 1) == 0
    if is_one or not hasattr(value, "__iter__"):
        return check(name, value)
    value = value.tolist() if hasattr(value, "tolist") else value
    found = tuple([check(f"{name}[{i}]", x) for i, x in enumerate(value)])
    if not found:
        raise ArgumentValueError(f"{name} is empty; accepted: a number, or one for each query head", owner)
    return found


def checked_real(name: str, value: Any, accepted: str, owner: str = "") -> float:
    """``value`` as a float, or an error that says what is accepted."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name} is {value!r} ({type(value).__name__}); accepted: {accepted}", owner)
    try:
        return float(value)
    except OverflowError as error:
        raise ArgumentValueError(f"{name} is beyond what a float holds; accepted: {accepted}", owner) from error


def check_tau(tau: Any, owner: str = "") -> float | tuple[float, ...]:
    """A number of at least 0, or one for each query head, or an error that says what is accepted."""
    also = ", or one for each head"
    return by_head("tau", tau, lambda name, value: check_one_tau(name, value, owner, also), owner)


def check_one_tau(name: str, tau: Any, owner: str = "", also: str = "") -> float:
    """``also``: what else is accepted, for errors."""
    accepted = f"a number >= 0 (0 never stops: dense attention; math.inf stops after one key tile){also}"
    value = checked_real(name, tau, accepted, owner)
    if not value >= 0:  # NaN fails too
        raise ArgumentValueError(f"{name} is {tau}; accepted: {accepted}", owner)
    return value


def check_error(error: Any, owner: str = "") -> float | tuple[float, ...]:
    """A rel_l2 between 0 and 1, or one for each query head, likewise."""
    also = ", or one for each query head"
    return by_head("error", error, lambda name, value: check_one_error(name, value, owner, also), owner)


def check_one_error(name: str, error: Any, owner: str = "", also: str = "") -> float:
    """``also``: what else is accepted, for errors."""
    accepted = f"0 < error < 1 (an output of zeros has 1){also}"
    value = checked_real(name, error, accepted, owner)
    if not 0 < value < 1:  # NaN fails too
        raise ArgumentValueError(f"{name} is {error}; accepted: {accepted}", owner)
    return value


def check_value_skip(value: Any, owner: str = "") -> float | tuple[float, ...] | None:
    """A number below 0, or one for each query head, likewise. None where nothing is left out."""
    accepted = "None, or a number below 0, or one for each query head"
    if value is None:
        return None

    def check(name: str, number: Any) -> float:
        value = checked_real(name, number, accepted, owner)
        if not value < 0:  # NaN fails too
            raise ArgumentValueError(
                f"{name} is {number!r}; accepted: {accepted} (at 0 a row's own maximum would be left out)", owner
            )
        return value

    found = by_head("value_skip", value, check, owner)
    return None if set(found if isinstance(found, tuple) else (found,)) == {-math.inf} else found
