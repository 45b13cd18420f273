"""Lengths and offsets of sequences, which the host needs as integers."""

from __future__ import annotations

import numbers
from typing import Any

from .frameworks import framework_of, to_host

__all__ = ["INTEGERS", "is_integer", "parse_integers"]

INTEGERS = "a list or tuple of integers, or a one-dimensional array of int32 or int64"


def is_integer(x: Any) -> bool:
    return type(x) is int or (isinstance(x, numbers.Integral) and not isinstance(x, bool))


def parse_integers(function: str, name: str, x: Any, axis: str, accepted: str = INTEGERS) -> tuple[int, ...]:
    """The argument ``name`` of ``function``, whose axis has the length ``axis``, on the host. The host waits for an
    array on a GPU."""
    if isinstance(x, (list, tuple, range)):
        for i, n in enumerate(x):
            if not is_integer(n):
                raise TypeError(f"{function}: {name}[{i}] is a {type(n).__name__}; accepted: {accepted}")
        return tuple(map(int, x))
    try:
        framework = framework_of(name, x)
    except TypeError:
        raise TypeError(f"{function}: {name} is a {type(x).__name__}; accepted: {accepted}") from None
    framework.check(name, x)
    device, dtype, shape = framework.device(x), framework.dtype(x), framework.shape(x)
    if dtype not in ("int32", "int64"):
        raise TypeError(f"{function}: {name} is {dtype}; accepted: {accepted}")
    if len(shape) != 1:
        raise ValueError(f"{function}: {name} has shape {shape}; accepted: ({axis},)")
    if device.kind not in ("cpu", "cuda"):
        raise ValueError(f"{function}: {name} is on {device}; accepted: the host (best) or an NVIDIA GPU")
    if device.kind == "cuda" and framework.is_capturing():
        raise ValueError(
            f"{function}: {name} is on {device} while a CUDA graph is captured, so its values cannot be "
            "read; accepted: a list, tuple or array on the host (the graph keeps these lengths)"
        )
    return tuple(to_host(x).tolist())
