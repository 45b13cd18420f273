"""Errors that begin with the name of the function that was called, whichever one found the mistake."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["errors_name"]

Function = TypeVar("Function", bound=Callable[..., Any])


def errors_name(*inner: str) -> Callable[[Function], Function]:
    """``function`` decorated: what one of the ``inner`` functions says of an argument, it says."""

    def named(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            except (TypeError, ValueError) as error:
                message = error.args[0] if error.args else None
                for name in inner:
                    if isinstance(message, str) and message.startswith(f"{name}: "):
                        error.args = (function.__name__ + message[len(name) :], *error.args[1:])
                        break
                raise

        return cast("Function", call)

    return named
