"""Which values of arrays are NaN or infinite, in words."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..arrays.frameworks import to_host

__all__ = ["all_finite", "not_finite", "not_finite_of", "note_not_finite"]


def all_finite(x: Any) -> bool:
    """Of an array of any framework, (batch, heads, seqlen, head_dim) or the like, where it lies; a head at a time."""
    from array_api_compat import array_namespace

    if isinstance(x, np.ndarray):
        return bool(np.isfinite(x).all())
    xp = array_namespace(x)
    by_head = x.shape[-3] <= x.shape[-2]
    heads = range(x.shape[-3 if by_head else -2])
    parts = (x[..., h, :, :] if by_head else x[..., h, :] for h in heads)
    return all(bool(xp.all(xp.isfinite(xp.astype(part, xp.float32)))) for part in parts)


def not_finite(name: str, x: Any) -> list[str]:
    """A sentence on those of the array that ``name`` says; nothing if there are none."""
    if all_finite(x):
        return []
    x = to_host(x)
    bad = ~np.isfinite(x)
    first = tuple(int(i) for i in np.unravel_index(int(bad.argmax()), x.shape))
    return [f"{name} has {bad.sum():,} of {x.size:,} values that are not finite, the first {x[first]} at {list(first)}"]


def not_finite_of(qkv: Iterable[Any]) -> list[str]:
    """The same of q, k and v."""
    return [words for name, x in zip("qkv", qkv, strict=True) for words in not_finite(name, x)]


def note_not_finite(command: str, qkv: Iterable[Any]) -> None:
    """A line of a command for each of q, k and v that has such values, before anything is measured."""
    for words in not_finite_of(qkv):
        print(f"s2o {command}: note: the input {words}: results of it are not S2O's fault", file=sys.stderr)
