"""Integers of 64 bits as kernels read them, in 32."""

from __future__ import annotations

from typing import Any

__all__ = ["as_int32"]


def as_int32(x: Any) -> Any:
    """``x``, integers of an array API namespace, in 32 bits. What these have no room for becomes the nearest that they
    have, which stands for nothing either: cut off, it might stand for something."""
    from array_api_compat import array_namespace

    xp = array_namespace(x)
    if x.dtype == xp.int32:
        return x
    for bound in (-(2**31), 2**31 - 1):  # xp.clip waits for a GPU, by CuPy
        beyond = x < bound if bound < 0 else x > bound
        x = xp.where(beyond, xp.full_like(x, bound), x)
    return xp.astype(x, xp.int32)
