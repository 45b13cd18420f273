"""Tokens of a picture or a video along a Hilbert curve: neighbours in a block are then neighbours in all directions.

Skilling, "Programming the Hilbert curve", AIP Conference Proceedings 707 (2004).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..caches import remembered

__all__ = ["hilbert_order", "token_order"]


def hilbert_order(shape: Sequence[int]) -> npt.NDArray[Any]:
    """Places in a grid of ``shape``, counted in C order, along the curve: int32 [product of shape].

    The curve is that of the smallest cube with an edge of a power of two which holds the grid; axes of length 1 count
    for nothing. Each step leads to a neighbour where the grid is that cube.
    """
    sizes = [n for n in shape if n > 1]
    if not sizes:
        return np.zeros(1, np.int32)
    places = np.indices(sizes).reshape(len(sizes), -1)  # [axes, tokens]
    bits = (max(sizes) - 1).bit_length()
    x = _transposed(places, bits)
    key = np.zeros(places.shape[1], np.int64)
    for bit in reversed(range(bits)):
        for axis in x:
            key = key << 1 | axis >> bit & 1
    return np.argsort(key, kind="stable").astype(np.int32)


def _transposed(places: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    """Skilling's transform: the key's bits, dealt to the axes."""
    x = places.copy()
    for high in (1 << b for b in reversed(range(1, bits))):
        for i in range(len(x)):
            swap = (x[0] ^ x[i]) & (high - 1)
            inside = (x[i] & high) != 0
            x[0], x[i] = (
                np.where(inside, x[0] ^ (high - 1), x[0] ^ swap),
                np.where(inside, x[i] if i else x[0] ^ (high - 1), x[i] ^ swap if i else x[0] ^ swap),
            )
    for i in range(1, len(x)):
        x[i] ^= x[i - 1]
    turn = np.zeros_like(x[0])
    for high in (1 << b for b in reversed(range(1, bits))):
        turn = np.where(x[-1] & high, turn ^ (high - 1), turn)
    return x ^ turn


@remembered
def token_order(shape: tuple[int, ...], seqlen: int) -> npt.NDArray[Any]:
    """Positions of ``seqlen`` tokens: those before the last ``shape`` ones as they lie, then these along the curve."""
    grid = hilbert_order(shape)
    first = seqlen - len(grid)
    return np.concatenate([np.arange(first, dtype=np.int32), grid + np.int32(first)])
