"""Errors of arguments: raised without the name of a function, which the one that was called puts before them. Warnings
of them, which name the caller's line. And the error of the machine.

Standard library only.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import ContextDecorator
from types import FrameType

__all__ = [
    "ArgumentError", "ArgumentTypeError", "ArgumentValueError", "S2OError", "arguments_of", "plain_kind", "warn_caller",
    "without_names",
]  # fmt: skip

# Packages whose frames lie between a caller and what warns: this one, and those of its decorators and operators.
_BETWEEN = (__name__.partition(".")[0], "contextlib", "functools", "torch")


class S2OError(RuntimeError):
    """The machine cannot run the call (no GPU, too old a driver or card); the message says the remedy."""


class ArgumentError(Exception):
    """``ArgumentError(message, owner)``: an argument is not accepted. The message names it, what came and what is
    accepted. The text begins with ``owner``, such as the class whose field it is; without one, with the public function
    that was called. There is no ``__init__``, as torch.compile cannot trace one."""

    function = "s2o_attention"  # whose rules the others share

    def __str__(self) -> str:
        message, owner = (*self.args, "")[:2]
        return f"{owner or self.function}: {message}"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a type that is not accepted."""


class ArgumentValueError(ArgumentError, ValueError):
    """An argument has a value that is not accepted."""


class arguments_of(ContextDecorator):
    """Inside it arguments are those of ``function``. Where one function calls another, the caller's name counts."""

    def __init__(self, function: str) -> None:
        self.function = function

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, ArgumentError):
            error.function = self.function


def without_names(count: int) -> str:
    """What came: so many arguments, without their names."""
    return "1 argument comes without a name" if count == 1 else f"{count} arguments come without a name"


def plain_kind(error: Exception) -> type[TypeError] | type[ValueError]:
    """What to raise in the place of ``error`` with a text that is complete."""
    return TypeError if isinstance(error, TypeError) else ValueError


def warn_caller(message: str) -> None:
    """A UserWarning of the line outside of this package that called it, however many functions lie between."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
