"""What launches are made of: a kernel's parameters by name, and where in the workspace its arrays lie.

No array and no GPU: addresses are filled in at each call (cuda/pipeline.py).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.operand import Operand, Paging, in_c_order
from ..problem import Problem
from ..spec import Geometry
from .kernels import Kernel
from .rounds import Chunk

if TYPE_CHECKING:
    from .maps import Maps

__all__ = [
    "ALIGNMENT", "BASES", "NOTHING", "Array", "Builder", "InTurns", "Launch", "Place", "Workspace",
    "added_to_addresses", "geometry_of", "lay_out", "make_launch", "pointers_of",
]  # fmt: skip

Params = Any  # a 0-d array of a kernel's parameter struct
NOTHING: Mapping[str, Any] = {}
Array = tuple[str, tuple[int, ...], str]  # name, shape, dtype
Pointers = tuple[tuple[int, str, int], ...]  # byte offset in a launch's parameters, base, bytes from the base


class InTurns(NamedTuple):
    """Arrays that are done with when others are first written: both have the same memory."""

    first: Sequence[Array]
    then: Sequence[Array | InTurns]


ALIGNMENT = 256  # bytes, of an array in the workspace

# What a pointer of a parameter struct starts from. pages: the page table; k_pages and v_pages: a cache of 8 bits, while
# one of 16 bits is k and v.
BASES = (
    "q", "k", "v", "out", "pages", "k_pages", "v_pages", "k_scale", "v_scale", "taus", "lse", "visited", "workspace",
)  # fmt: skip
CACHE = ("k_pages", "v_pages")  # of 8 bits


class Place(NamedTuple):
    """An array in the workspace."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Workspace:
    """Everything that lives between the stages of a call, in one piece of memory."""

    places: dict[str, Place]
    zeroed: int  # leading bytes that must be 0 at the start
    nbytes: int

    def operand(self, name: str, address: int) -> Operand:
        """A [batch, heads, seqlen, head_dim] array in a workspace that begins at ``address``."""
        offset, (batch, heads, seqlen, head_dim), _ = self.places[name]
        return in_c_order(address + offset, (batch, heads, seqlen, head_dim))


def lay_out(zeroed: Iterable[Array], others: Iterable[Array | InTurns]) -> Workspace:
    """Arrays that start from 0 come first."""
    places: dict[str, Place] = {}

    def place(arrays: Iterable[Array | InTurns], end: int) -> int:
        for array in arrays:
            if isinstance(array, InTurns):
                end = max(place(array.first, end), place(array.then, end))
                continue
            name, shape, dtype = array
            places[name] = Place(end, shape, dtype)
            end += -(-places[name].nbytes // ALIGNMENT) * ALIGNMENT
        return end

    end = place(zeroed, 0)
    return Workspace(places, end, place(others, end))


@dataclass(frozen=True)
class Launch:
    """One kernel of a call."""

    stage: str
    kernel: Kernel
    blocks: int
    params: Params
    pointers: Pointers
    chunk: Chunk | None = None
    maps: Maps = ()  # with which its parameters begin


def added_to_addresses(numbers: Sequence[int]) -> Any:
    """Bytes from a base, which a descending axis makes negative, as uint64 numbers that wrap around."""
    return np.array(numbers, np.int64).view(np.uint64)


def geometry_of(geometry: Geometry, head_dim: int) -> dict[str, int]:
    """The parameter `Geometry` of a kernel (raw_kernels/common/geometry.cuh)."""
    return {
        "seqlen_q": geometry.seqlen_q,
        "seqlen_k": geometry.seqlen_k,
        "segment": geometry.segment,
        "window": min(geometry.window, geometry.seqlen_k),  # the same keys, and 32 bits hold it
        "is_causal": geometry.is_causal,
        "head_dim": head_dim,
        "unit_shift": geometry.unit.bit_length() - 1,
        **dict(zip(("drawn", "least_run", "longer_runs"), geometry.runs if geometry.drawn else (0, 0, 0), strict=True)),
    }


class Builder:
    """Makes the launches of a call. Its attributes are parameters that many kernels share, by name.

    ``operands``: q, k, v and out, and a cache of 8 bits, of which only the strides are read. ``paging``: where k and v
    are a paged cache, or are read from one; its address apart.
    """

    def __init__(
        self, problem: Problem, geometry: Geometry, operands: Mapping[str, Operand], memory: Workspace,
        paging: Paging | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.operands, self.memory = problem, operands, memory
        self.tensors = {
            name: dict(zip(("batch", "head", "row"), x.strides, strict=True)) for name, x in operands.items()
        }
        self.cache = {name: self.tensors.pop(name) for name in CACHE if name in self.tensors}
        self.geometry = geometry_of(geometry, problem.head_dim)
        stride, page_size = (0, 1) if paging is None else (paging.stride, paging.page_size)
        self.pages = {"stride": stride, "shift": page_size.bit_length() - 1}

    @staticmethod
    def chunk(chunk: Chunk) -> dict[str, int]:
        return {field.name: getattr(chunk, field.name) for field in fields(Chunk)}

    def launch(
        self, stage: str, kernel: Kernel, blocks: int, values: Mapping[str, Any], chunk: Chunk | None = None,
        further: Mapping[str, int] = NOTHING, read: Mapping[str, str] = NOTHING,
    ) -> Launch:  # fmt: skip
        """``values``: parameters by name. ``further``, ``read``: as of `pointers_of`."""
        return make_launch(stage, kernel, blocks, values, pointers_of(kernel, BASES, self.memory, further, read), chunk)


def pointers_of(
    kernel: Kernel, bases: Container[str], memory: Workspace, further: Mapping[str, int] = NOTHING,
    read: Mapping[str, str] = NOTHING,
) -> Pointers:  # fmt: skip
    """A pointer of the parameters starts from that of ``bases``, or in the array of ``memory``, that has its name, or
    the one that ``read`` gives for it; others are left 0. ``further``: bytes into the array that a pointer of this name
    reads."""
    found = []
    for field, offset in kernel.family.params.pointers:
        name = read.get(field, field)
        if name in bases:  # of the caller
            found.append((offset, name, further.get(field, 0)))
        elif name in memory.places:
            found.append((offset, "workspace", memory.places[name].offset + further.get(field, 0)))
    return tuple(found)


def make_launch(
    stage: str, kernel: Kernel, blocks: int, values: Mapping[str, Any], pointers: Pointers, chunk: Chunk | None = None
) -> Launch:
    """``values``: as in `Builder.launch`."""
    params = kernel.family.params
    filled = params.fill({"attention": values} if params.map_bytes else values)
    return Launch(stage, kernel, blocks, filled, pointers, chunk)
