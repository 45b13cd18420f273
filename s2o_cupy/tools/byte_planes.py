"""bfloat16 arrays as planes of bytes, which compress a third smaller than the arrays themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

__all__ = ["join", "names", "split"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def names() -> list[str]:
    """Of the planes of q, k and v: the high byte of each element, which is sign and exponent, and the low one."""
    return [f"{key}.{half}" for key in "qkv" for half in ("high", "low")]


def split(qkv: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """uint8 planes of bfloat16 q, k and v, each of its array's shape; :func:`join` gives all bits back."""
    planes = {}
    for key, array in zip("qkv", qkv, strict=True):
        if array.dtype != BFLOAT16:
            raise ValueError(f"pack: {key} is {array.dtype.name}; accepted: bfloat16")
        bits = np.ascontiguousarray(array).view(np.uint16)
        planes[f"{key}.high"] = (bits >> 8).astype(np.uint8)
        planes[f"{key}.low"] = (bits & 0xFF).astype(np.uint8)
    return planes


def join(planes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """bfloat16 q, k and v from the planes of :func:`split`."""
    for name in names():
        if name not in planes:
            raise ValueError(f"unpack: {name} is missing; accepted: {', '.join(names())}")
        if planes[name].dtype != np.uint8:
            raise ValueError(f"unpack: {name} is {planes[name].dtype.name}; accepted: uint8, a byte of each element")
    arrays = {}
    for key in "qkv":
        high, low = planes[f"{key}.high"], planes[f"{key}.low"]
        if high.shape != low.shape:
            raise ValueError(f"unpack: {key}.high is {high.shape}, {key}.low {low.shape}; accepted: equal shapes")
        arrays[key] = (high.astype(np.uint16) << 8 | low).view(BFLOAT16)
    return arrays
