"""Which arrays NSA's kernels read as they lie; others are copied, and as outputs refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from nsa_cases import SMALL, draw
from pretended import array_at, pretend_gpu

import s2o_cupy.nsa
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


def test_blocks_that_32_bits_have_no_room_for(rng, monkeypatch):
    """The first ones are none, and the last ones blocks that there are none of, which kernels pass over."""
    seen = []

    def attend_blocks(arrays, blocks, *_, **options):
        seen.append(array_at(blocks, np.int32, (1, 2, 130, 4)).copy())

    launches = SimpleNamespace(attend_blocks=attend_blocks)
    monkeypatch.setitem(sys.modules, "s2o_cupy.nsa.launches", launches)
    monkeypatch.setattr(s2o_cupy.nsa, "launches", launches, raising=False)
    blocks = np.empty((1, 2, 130, 4), np.int64)
    blocks[:] = [-(2**63), -(2**32), 1, 2**32]
    pretend_gpu(monkeypatch)
    s2o_cupy.nsa.selected_attention(*draw(rng, np.float16, 130, head_dim=64)[:3], blocks)
    np.testing.assert_array_equal(seen[0][0, 0, 0], [-(2**31), -(2**31), 1, 2**31 - 1])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("of_heads", [True, False])
def test_where_kernels_find_gates(rng, monkeypatch, dtype, layout, of_heads):
    """Read as they lie, by address and strides: of each head, or the same of all heads."""
    seen = []
    launches = SimpleNamespace(
        Gates=lambda *gates: seen.append(gates), Pair=lambda *arrays: arrays, Branches=lambda *branches: branches,
        attend=lambda *arrays, **options: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "s2o_cupy.nsa.launches", launches)
    monkeypatch.setattr(s2o_cupy.nsa, "launches", launches, raising=False)
    x = draw(rng, np.float16, 130, batch=2, head_dim=64)
    gates = x.gates.astype(dtype) if of_heads else x.gates[:, 0].astype(dtype)
    bhsd = np.broadcast_to(gates if of_heads else gates[:, None], (2, 4, 130, 3))
    arrays = [*x[:5], gates]
    if layout == "BSHD":
        arrays = [np.ascontiguousarray(a.swapaxes(1, 2)) if a.ndim == 4 else a for a in arrays]
    pretend_gpu(monkeypatch)
    s2o_cupy.nsa.nsa_attention(*arrays, config=SMALL, layout=layout)
    ((pointer, strides, is_float32),) = seen
    assert pointer == arrays[-1].ctypes.data and is_float32 == (dtype == np.float32)
    np.testing.assert_array_equal(array_at(pointer, dtype, bhsd.shape, strides), bhsd)
