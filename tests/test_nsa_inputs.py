"""Which arrays NSA's kernels read as they lie; others are copied, and as outputs refused."""

from __future__ import annotations

import numpy as np
import pytest

from s2o_cupy.arrays.frameworks import framework_of
from s2o_cupy.nsa.call import is_readable


def at(offset, shape, dtype=np.float16, row=None):
    """An array that begins ``offset`` bytes behind a multiple of 16, its rows ``row`` elements apart."""
    row = row or shape[-1]
    whole = (*shape[:-1], row)
    memory = np.zeros(int(np.prod(whole)) * np.dtype(dtype).itemsize + 32, np.uint8)
    first = -memory.ctypes.data % 16 + offset
    return np.ndarray(whole, dtype, memory, first)[..., : shape[-1]]


@pytest.mark.parametrize(
    ("name", "x", "readable"),
    [
        ("q", at(0, (1, 2, 5, 64)), True),
        ("q", at(2, (1, 2, 5, 64)), False),
        ("k", at(8, (1, 2, 5, 64)), False),
        ("v", at(0, (1, 2, 5, 64), row=72), True),
        ("v", at(0, (1, 2, 5, 64), row=68), False),
        ("q", at(0, (1, 2, 5, 64))[..., ::2], False),
        ("q", at(0, (1, 2, 5, 64))[:, :, ::-1], False),
        ("q", at(2, (1, 2, 0, 64)), True),
        ("gates", at(4, (1, 2, 5, 3), np.float32), True),
        ("gates", at(0, (1, 2, 5, 6), np.float32)[..., ::2], False),
        ("blocks", at(4, (1, 2, 5, 8), np.int32), True),
        ("blocks", at(4, (1, 2, 5, 8), np.int64), False),
        ("blocks", at(4, (1, 2, 5, 8), np.int32, row=9), False),
    ],
)
def test_arrays_that_kernels_read(name, x, readable):
    assert is_readable(name, framework_of(name, x).describe(x)) is readable
