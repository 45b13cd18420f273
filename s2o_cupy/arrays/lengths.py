"""Lengths and offsets of sequences, which the host needs as integers."""

from __future__ import annotations

import numbers
from typing import Any

from ..errors import ArgumentTypeError, ArgumentValueError
from .frameworks import framework_of, to_host

__all__ = ["parse_lengths", "parse_starts"]

INTEGERS = "a list or tuple of integers, or a one-dimensional array of int32 or int64"


def is_integer(x: Any) -> bool:
    return type(x) is int or (isinstance(x, numbers.Integral) and not isinstance(x, bool))


def parse_starts(name: str, x: Any) -> tuple[int, ...]:
    """Where packed sequences begin, and their total: the argument ``name``."""
    return _integers(name, x, "batch + 1", INTEGERS)


def parse_lengths(name: str, x: Any) -> int | tuple[int, ...]:
    """One length for all sequences, or one of each."""
    return int(x) if is_integer(x) else _integers(name, x, "batch", f"an integer, {INTEGERS}")


def _integers(name: str, x: Any, axis: str, accepted: str) -> tuple[int, ...]:
    """On the host. ``axis``: the length of its axis. The host waits for an array on a GPU."""
    if isinstance(x, (list, tuple, range)):
        for i, n in enumerate(x):
            if not is_integer(n):
                raise ArgumentTypeError(f"{name}[{i}] is a {type(n).__name__}; accepted: {accepted}")
        return tuple(map(int, x))
    try:
        framework = framework_of(name, x)
    except TypeError:
        raise ArgumentTypeError(f"{name} is a {type(x).__name__}; accepted: {accepted}") from None
    framework.check(name, x)
    info = framework.describe(x)
    device, dtype, shape = info.device, info.dtype, tuple(info.shape)
    if dtype not in ("int32", "int64"):
        raise ArgumentTypeError(f"{name} is {dtype}; accepted: {accepted}")
    if len(shape) != 1:
        raise ArgumentValueError(f"{name} has shape {shape}; accepted: ({axis},)")
    if device.kind not in ("cpu", "cuda"):
        raise ArgumentValueError(f"{name} is on {device}; accepted: the host (best) or an NVIDIA GPU")
    if device.kind == "cuda" and framework.is_capturing():
        raise ArgumentValueError(
            f"{name} is on {device} while a CUDA graph is captured, so its values cannot be "
            "read; accepted: a list, tuple or array on the host (the graph keeps these lengths)"
        )
    return tuple(to_host(x).tolist())
