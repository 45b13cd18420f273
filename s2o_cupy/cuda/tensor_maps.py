"""Tensor maps: how the copy engine of compute capability 9.0 is told of an array (cuTensorMapEncodeTiled).

CuPy has no call for it, so this is the one place that speaks to the CUDA driver itself.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays.operand import Operand
from ..caches import remembered
from ..plan.build import BASES
from ..plan.kernels import BOX_COLUMNS
from ..plan.maps import COLUMNS, PAGES, ROWS, Maps
from ..spec import S2OError

__all__ = ["MapsOfLaunch", "box_map", "encoded", "page_map", "tensor_map"]

MAP_BYTES = 128
MOVES = 32  # addresses of which a launch keeps its maps

# Enumerators of cuda.h.
TYPE_UINT16, INTERLEAVE_NONE, SWIZZLE_128B, PROMOTION_L2_256B, FILL_ZEROS = 1, 0, 3, 3, 0


@functools.lru_cache
def _encode() -> Any:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    function = library.cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    return function


@remembered
def tensor_map(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], box_rows: int, cell: int = 1
) -> bytes:
    """The map of a [batch, heads, seqlen, head_dim] array of 16-bit elements, in boxes of ``box_rows`` x 64.

    With a ``cell``, which divides seqlen, of five axes, [batch, heads, seqlen / cell, cell, head_dim]: a box has a row
    of each of ``box_rows`` cells.

    ``pointer`` and strides (in elements, of the first three axes) are multiples of 16 bytes. Reads outside of the
    array give zeros. Pure: the same bytes for the same arguments.
    """
    batch, heads, seqlen, head_dim = shape
    rows = [(seqlen, strides[2], box_rows)] if cell == 1 else [(cell, strides[2], 1),
                                                              (seqlen // cell, cell * strides[2], box_rows)]
    axes = [(head_dim, 1, BOX_COLUMNS), *rows, (heads, strides[1], 1), (batch, strides[0], 1)]
    return _map(pointer, axes, shape, strides)


@remembered
def page_map(
    pointer: int, shape: tuple[int, int, int, int], strides: tuple[int, int, int], box_rows: int
) -> bytes:
    """The map of a paged cache [pages, kv_heads, page_size, head_dim] in boxes of ``box_rows`` whole rows, a multiple
    of 8. head_dim is a multiple of 64.

    Its axes are [heads of pages, page_size / 8, head_dim / 64, 8, 64]. A copy engine knows five axes, so pages and
    heads share one, counted in the largest power of two that divides both strides: sm90/page_copier.cuh.
    """
    pages, heads, page_size, head_dim = shape
    step = Operand(pointer, shape, strides).page_step
    reach = (pages - 1) * strides[0] + (heads - 1) * strides[1]
    columns = head_dim // BOX_COLUMNS
    axes = [
        (BOX_COLUMNS, 1, BOX_COLUMNS), (8, strides[2], 8), (columns, BOX_COLUMNS, columns),
        (page_size // 8, 8 * strides[2], box_rows // 8), (reach // step + 1, step, 1),
    ]  # fmt: skip
    return _map(pointer, axes, shape, strides)


@remembered
def box_map(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], box_rows: int) -> bytes:
    """The map of a [batch, heads, seqlen, head_dim] array in boxes of ``box_rows`` whole rows, of 64, 128 or 256
    columns.

    Its axes are [batch, heads, head_dim / 64, seqlen, 64], so that a row of the box is its 64 columns. Else as of
    `tensor_map`.
    """
    batch, heads, seqlen, head_dim = shape
    columns = head_dim // BOX_COLUMNS
    axes = [
        (BOX_COLUMNS, 1, BOX_COLUMNS), (seqlen, strides[2], box_rows), (columns, BOX_COLUMNS, columns),
        (heads, strides[1], 1), (batch, strides[0], 1),
    ]  # fmt: skip
    return _map(pointer, axes, shape, strides)


def encoded(maps: Maps, addresses: Mapping[str, int]) -> Any:
    """A launch's maps as uint64 words, for `Program.map_words`. ``addresses``: by base."""
    encoders = {COLUMNS: tensor_map, ROWS: box_map, PAGES: page_map}
    found = [
        bytes(MAP_BYTES) if x is None
        else encoders[x.kind](addresses[x.base] + x.array.pointer, *x.array[1:], x.box_rows)
        for x in maps
    ]  # fmt: skip
    return np.frombuffer(b"".join(found), np.uint64)


class MapsOfLaunch:
    """A launch's maps as its arrays move. ``pick``: from the addresses of BASES those that the maps are of; ``words``:
    from these what `encoded` makes. The last ones are kept, as the arrays of a model's layers come again."""

    def __init__(self, maps: Maps) -> None:
        bases = sorted({BASES.index(x.base) for x in maps if x})
        # Of one index it gives the item and no tuple.
        self.pick = operator.itemgetter(*bases if len(bases) > 1 else (slice(bases[0], bases[0] + 1),))
        by_base = lambda addresses: {BASES[i]: x for i, x in zip(bases, addresses, strict=True)}  # noqa: E731
        self.words = functools.lru_cache(MOVES)(lambda addresses: encoded(maps, by_base(addresses)))


def _map(
    pointer: int, axes: list[tuple[int, int, int]], shape: tuple[int, ...], strides: tuple[int, ...]
) -> bytes:
    """``axes``: the elements of each, its stride in elements, and the elements of a box; the last axis of an array
    first. ``shape`` and ``strides`` are for the error."""
    count = len(axes)
    sizes = (ctypes.c_uint64 * count)(*(n for n, _, _ in axes))
    # An axis of one element has no stride; the driver wants one even so.
    steps = (ctypes.c_uint64 * (count - 1))(*(2 * s if n > 1 else 16 for n, s, _ in axes[1:]))
    box = (ctypes.c_uint32 * count)(*(n for _, _, n in axes))
    ones = (ctypes.c_uint32 * count)(*[1] * count)
    storage = ctypes.create_string_buffer(MAP_BYTES + 64)
    aligned = -(-ctypes.addressof(storage) // 64) * 64
    status = _encode()(
        ctypes.c_void_p(aligned), TYPE_UINT16, count, ctypes.c_void_p(pointer), sizes, steps, box, ones,
        INTERLEAVE_NONE, SWIZZLE_128B, PROMOTION_L2_256B, FILL_ZEROS,
    )  # fmt: skip
    if status != 0:
        raise S2OError(
            f"the CUDA driver refuses (error {status}) to describe an array of shape {shape} and strides {strides} "
            "(elements) to the copy engine; use S2OConfig(path='portable')"
        )
    return ctypes.string_at(aligned, MAP_BYTES)
