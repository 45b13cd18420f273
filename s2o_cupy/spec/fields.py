"""Fields of settings: checked, with defaults that are found anew, and with errors that name them."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Container
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from ..errors import ArgumentError, ArgumentTypeError, ArgumentValueError, without_names
from ..nearest import meant

__all__ = [
    "Default", "DefaultInt", "DefaultText", "checked_int", "is_one_of", "names_its_fields", "plain",
    "takes_defaults_for_given",
]  # fmt: skip


def checked_int(name: str, value: Any, low: int, high: int | None = None, owner: str = "") -> int:
    """``value``, of Python or NumPy, as an int, or an error that says what is accepted."""
    accepted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{name} is {value!r} ({type(value).__name__}); accepted: {accepted}", owner)
    number = value if isinstance(value, int) else int(value)  # a default stays one
    if number < low or (high is not None and number > high):
        raise ArgumentValueError(f"{name} is {number}; accepted: {accepted}", owner)
    return number


def is_one_of(value: Any, choices: Container[str]) -> bool:
    """Whether it is one of some names; an array, which compares by element, is none."""
    return isinstance(value, str) and value in choices


class Default:
    """Of a field's value: it was not given but found, and is found anew by ``dataclasses.replace``. That passes on what
    the attributes hold, so that a value itself must say it; `S2OConfig.values` are plain."""

    __slots__ = ()


class DefaultInt(Default, int):
    __slots__ = ()


class DefaultText(Default, str):
    __slots__ = ()


def plain(value: Any) -> Any:
    """A field's value as a number or name like any other."""
    if isinstance(value, Default):
        return int(value) if isinstance(value, int) else str(value)
    return value


_Class = TypeVar("_Class")


def names_its_fields(cls: type[_Class]) -> type[_Class]:
    """Errors of the dataclass's fields begin with its name. A field that it has not is answered with those that it has,
    and with the nearest of them."""
    make = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    unnamed = len([field for field in fields(cls) if field.init and not field.kw_only])  # type: ignore[arg-type]
    needed = [
        field.name for field in fields(cls)  # type: ignore[arg-type]
        if field.kw_only and field.init and field.default is MISSING and field.default_factory is MISSING
    ]  # fmt: skip

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        try:
            for name in given:
                if name not in known:
                    raise ArgumentTypeError(f"{name} is not a field; {meant(name, known)}accepted: {', '.join(known)}")
            if missing := [name for name in needed if name not in given]:
                raise ArgumentTypeError(f"{' and '.join(missing)} is missing; accepted: {', '.join(known)}")
            if len(args) > unnamed:
                up_to = f"up to {unnamed}, the others by name" if unnamed else "by name"
                raise ArgumentTypeError(f"{without_names(len(args))}; accepted: {up_to}: {', '.join(known)}")
            make(self, *args, **given)
        except ArgumentError as error:
            error.args = error.args[0], cls.__name__
            raise

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def takes_defaults_for_given(cls: type[_Class]) -> type[_Class]:
    """What another config has found is given where somebody passes it. ``dataclasses.replace`` is told by its naming
    every field."""
    make, count = cls.__init__, len(fields(cls))  # type: ignore[arg-type]

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if len(given) < count:
            args, given = tuple(map(plain, args)), {name: plain(x) for name, x in given.items()}
        make(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls
