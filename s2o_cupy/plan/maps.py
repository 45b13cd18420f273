"""Which arrays a launch on Hopper knows by tensor maps, and in which boxes the copy engine brings their rows.

Pure: cuda/tensor_maps.py makes the maps once addresses are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..arrays.operand import Operand, in_c_order
from .build import Place, Workspace
from .kernels import Kernel, box_keys
from .launch_plan import LaunchPlan

__all__ = ["COLUMNS", "PAGES", "ROWS", "ArrayMap", "Maps", "Read", "arrays_of", "maps_of_pass1", "maps_of_pass2"]


class ArrayMap(NamedTuple):
    """What a tensor map is made of: an array of 16-bit elements, and the boxes that the copy engine brings of it."""

    base: str  # what its address starts from, of BASES
    array: Operand  # pointer: bytes from there
    kind: str  # COLUMNS: a box has 64 columns of its rows. ROWS: it has all. PAGES: all, and the array is a paged cache
    box_rows: int  # how many rows a box has


COLUMNS, ROWS, PAGES = "columns", "rows", "pages"
# q, k, v and perhaps out by name: the base, and the operand, whose pointer is its bytes from there.
Read = Mapping[str, tuple[str, Operand]]
# A launch's maps, in the order in which its parameters have them. The kernel does not read one that is None.
Maps = tuple[ArrayMap | None, ...]


def arrays_of(plan: LaunchPlan, operands: Mapping[str, Operand], memory: Workspace) -> Read:
    """Where the passes read a call's arrays. Keys and values that are collected from pages lie in the workspace."""
    found = {name: (name, x) for name, x in operands.items()}
    if plan.collect_pages is not None:
        found |= {name: ("workspace", memory.operand(place, 0)) for name, place in (("k", "keys"), ("v", "values"))}
    return found


def maps_of_pass1(plan: LaunchPlan, arrays: Read) -> Maps:
    """The maps of q, k and v with which a pass 1 begins (Mapped in raw_kernels/sm90/shared.cuh); none where it has no
    `map_boxes`."""
    of_keys = PAGES if plan.maps_whole_rows else COLUMNS
    kinds = zip("qkv", (COLUMNS, of_keys, of_keys), plan.map_boxes, strict=False)
    return tuple(ArrayMap(*arrays[name], kind, rows) for name, kind, rows in kinds)


def maps_of_pass2(kernel: Kernel, arrays: Read, covariances: Place | None = None) -> Maps:
    """The maps of q, k, v, out and the tail's covariances with which a pass 2 begins (MappedUnits in
    raw_kernels/sm90/shared.cuh); none where it gathers. Without out in ``arrays`` nothing is resumed."""
    if not kernel.family.params.map_bytes:
        return ()
    rows, of_keys = box_keys(kernel.head_dim), PAGES if kernel.paged else ROWS
    q = ArrayMap(*arrays["q"], COLUMNS, kernel.block_m // kernel.tile_heads)
    k, v = (ArrayMap(*arrays[name], of_keys, rows) for name in "kv")
    out = ArrayMap(*arrays["out"], ROWS, rows) if "out" in arrays else None
    if covariances is None:
        return q, k, v, out, None
    shape = (1, 1, math.prod(covariances.shape[:-1]), covariances.shape[-1])
    return q, k, v, out, ArrayMap("workspace", in_c_order(covariances.offset, shape), ROWS, rows)
