"""How far an output is from its reference; sums in float64.

NaN never passes: a NaN on either side, or an infinity that the other side has not, makes an error
``inf`` and a cosine ``-inf``, so that every comparison with a tolerance fails whichever way it is written.
Infinities that both sides have at the same place agree and count no further.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["cosine", "mse", "rel_l1", "rel_l2"]

_CHUNK = 1 << 20  # elements turned into float64 at a time


def _chunks(o: Any, reference: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    o, reference = np.asarray(o), np.asarray(reference)
    if o.shape != reference.shape:
        raise ValueError(f"output is {o.shape}, reference {reference.shape}; accepted: equal shapes")
    o, reference = o.reshape(-1), reference.reshape(-1)
    for begin in range(0, o.size, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        a, b = o[part].astype(np.float64), reference[part].astype(np.float64)
        agree = np.isinf(a) & (a == b)
        yield np.where(agree, 0.0, a), np.where(agree, 0.0, b)


def _ratio(error: float, size: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return 0.0 if error == 0 else error / size if size else math.inf


def rel_l2(o: Any, reference: Any) -> float:
    """``||o - reference|| / ||reference||`` over all elements of two arrays of one shape."""
    error = size = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for a, b in _chunks(o, reference):
            error += float(np.square(a - b).sum())
            size += float(np.square(b).sum())
    return math.sqrt(_ratio(error, size))


def rel_l1(o: Any, reference: Any) -> float:
    """``sum |o - reference| / sum |reference|``."""
    error = size = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for a, b in _chunks(o, reference):
            error += float(np.abs(a - b).sum())
            size += float(np.abs(b).sum())
    return _ratio(error, size)


def mse(o: Any, reference: Any) -> float:
    """Mean of the squared differences; 0 for empty arrays."""
    error, count = 0.0, 0
    with np.errstate(invalid="ignore", over="ignore"):
        for a, b in _chunks(o, reference):
            error += float(np.square(a - b).sum())
            count += a.size
    return error / max(count, 1) if math.isfinite(error) else math.inf


def cosine(o: Any, reference: Any) -> float:
    """Cosine of the angle between the two arrays as vectors; 1 for two zero arrays, 0 for one."""
    dot = aa = bb = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for a, b in _chunks(o, reference):
            dot += float((a * b).sum())
            aa += float(np.square(a).sum())
            bb += float(np.square(b).sum())
    if not math.isfinite(dot + aa + bb):
        return -math.inf
    if aa == 0 or bb == 0:
        return float(aa == bb)
    return max(-1.0, min(1.0, dot / (math.sqrt(aa) * math.sqrt(bb))))
