"""Numbers of 8 bits, e4m3: 4 bits of exponent, 3 of mantissa, no infinity."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["from_e4m3"]


def _value(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


VALUES = np.array([_value(byte) for byte in range(256)], np.float32)


def from_e4m3(
    x: np.ndarray,  # [..., kv_heads, rows, head_dim], of one byte each
    scale: float | np.ndarray,  # of all, or [kv_heads]
    dtype: Any,
) -> np.ndarray:
    """round(scale * x), of which the product is float32."""
    of_heads = np.asarray(scale, np.float32).reshape(-1, 1, 1)
    with np.errstate(over="ignore"):
        return (VALUES[x.view(np.uint8)] * of_heads).astype(dtype)
