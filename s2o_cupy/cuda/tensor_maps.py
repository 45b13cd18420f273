"""Tensor maps: how the copy engine of compute capability 9.0 is told of an array (cuTensorMapEncodeTiled).

CuPy has no call for it, so this is the one place that speaks to the CUDA driver itself.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from ..caches import remembered
from ..spec import S2OError

__all__ = ["tensor_map"]

BOX_COLUMNS = 64  # 128 bytes of 16-bit elements: a row of the swizzle
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
    axes = [*rows, (heads, strides[1], 1), (batch, strides[0], 1)]
    count = 1 + len(axes)
    sizes = (ctypes.c_uint64 * count)(head_dim, *(n for n, _, _ in axes))
    # An axis of one element has no stride; the driver wants one even so.
    steps = (ctypes.c_uint64 * len(axes))(*(2 * s if n > 1 else 16 for n, s, _ in axes))
    box = (ctypes.c_uint32 * count)(BOX_COLUMNS, *(n for _, _, n in axes))
    ones = (ctypes.c_uint32 * count)(*[1] * count)
    storage = ctypes.create_string_buffer(128 + 64)
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
    return ctypes.string_at(aligned, 128)
