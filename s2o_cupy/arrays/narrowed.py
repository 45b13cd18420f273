"""Integers kept within bounds, and those of 64 bits as kernels read them, in 32. Nothing here waits for a GPU, as
xp.clip does with CuPy."""

from __future__ import annotations

from typing import Any

__all__ = ["as_int32", "at_least", "at_most"]


def at_least(xp: Any, x: Any, bound: int) -> Any:
    return xp.where(x < bound, xp.full_like(x, bound), x)


def at_most(xp: Any, x: Any, bound: int) -> Any:
    return xp.where(x > bound, xp.full_like(x, bound), x)


def as_int32(x: Any) -> Any:
    """``x``, integers of an array API namespace, in 32 bits. What these have no room for becomes the nearest that they
    have, which stands for nothing either: cut off, it might stand for something."""
    from array_api_compat import array_namespace

    xp = array_namespace(x)
    if x.dtype == xp.int32:
        return x
    return xp.astype(at_most(xp, at_least(xp, x, -(2**31)), 2**31 - 1), xp.int32)
