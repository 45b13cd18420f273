"""What is remembered from one call to the next, each bounded, and one way to forget all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import ArgumentTypeError

__all__ = ["CALLS", "clear_cache", "forgets", "remembered", "remembered_or_made"]

# Calls that are remembered, by shapes, strides, dtypes, lengths and options. A model's layers share a few; packed
# sequences come in many lengths.
CALLS = 1024

_forget: list[Callable[[], Any]] = []

F = TypeVar("F", bound=Callable[..., Any])


def remembered(function: F) -> F:
    """``function`` with its last CALLS results; arguments of different types are different (1 is not True)."""
    cached = functools.lru_cache(maxsize=CALLS, typed=True)(function)
    forgets(cached.cache_clear)
    return cached  # type: ignore[return-value]


def remembered_or_made(function: F) -> F:
    """The same, made anew of arguments that are not hashable: these are not accepted, and ``function`` says so."""
    known = remembered(function)

    @functools.wraps(function)
    def found(*arguments: Any) -> Any:
        try:
            return known(*arguments)
        except ArgumentTypeError:
            raise
        except TypeError:
            return function(*arguments)

    return found  # type: ignore[return-value]


def forgets(forget: Callable[[], Any]) -> None:
    """Have `clear_cache` call ``forget`` as well."""
    _forget.append(forget)


def clear_cache() -> None:
    """Forget every prepared call, and the launches and CUDA graphs that it holds. Compiled kernels stay loaded."""
    for forget in _forget:
        forget()
