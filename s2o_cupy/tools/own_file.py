"""A method of the caller's own, by the file that it is in: FILE.py:NAME[:FIELD=VALUE,...]."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..methods.own import AnyMethod, as_method, method_name
from ..nearest import meant

__all__ = ["OwnPlace", "own_method", "own_place", "says_which"]


class OwnPlace(NamedTuple):
    """Where a method is, and its fields as they were written."""

    file: str
    name: str
    fields: str


def own_place(text: str) -> OwnPlace | None:
    """What a text says; None unless it names a file."""
    found = re.fullmatch(r"(.+\.py):(\w+)(?::(.*))?", text)
    return None if found is None else OwnPlace(*found.groups(""))


def own_method(place: OwnPlace, fields: dict[str, Any], option: str) -> AnyMethod:
    """The method there: a class is made with ``fields``, a function gets them as further keywords. ``option``: for
    errors."""
    path = Path(place.file)
    if not path.is_file():
        raise ValueError(f"{option} has {place.file}; accepted: a file that is there")
    try:
        module = _module(path.resolve())
    except Exception as error:
        raise ValueError(f"{option} has {place.file}, which raised {_told(error)}") from error
    found = getattr(module, place.name, None)
    if found is None:
        of_file = lambda x: callable(x) and getattr(x, "__module__", "") == module.__name__  # noqa: E731
        names = [name for name, x in vars(module).items() if of_file(x)]
        raise ValueError(
            f"{option} has {place.name}, which {place.file} does not define; {meant(place.name, names)}accepted: "
            f"{', '.join(names) or 'a function or a class that it defines'}"
        )
    try:
        if isinstance(found, type):
            found = found(**fields)
        elif inspect.isfunction(found):
            inspect.signature(found).bind(None, None, is_causal=True, scale=1.0, **fields)
            found = functools.partial(found, **fields) if fields else found
        elif fields:
            raise TypeError("it is made already, and takes no fields")
    except TypeError as error:
        raise TypeError(f"{option} has {place.name}: {error}") from error
    as_method(found, place.name, option)
    return found


@contextlib.contextmanager
def says_which(texts: Sequence[str], methods: Sequence[AnyMethod], option: str) -> Iterator[None]:
    """Inside it an error that one of the ``methods`` raises is told with the text that it came from."""
    try:
        yield
    except Exception as error:
        raised_by = getattr(error, "raised_by", None)
        for text, method in zip(texts, methods, strict=True):
            if raised_by == f"the method {method_name(method)}":
                raise ValueError(f"{option} {text} raised {_told(error)}") from error
        raise


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@functools.cache  # one module however often it is asked for, so that what it makes compares equal
def _module(path: Path) -> ModuleType:
    name = f"s2o_own_{path.stem}_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module
