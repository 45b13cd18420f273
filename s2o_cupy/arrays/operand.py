"""Where an array lies, as kernels see it: an address and strides."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..problem import Problem
from .array_info import ArrayInfo
from .frameworks import framework_of

__all__ = [
    "ENTRY_BYTES", "ITEM_BYTES", "Addresses", "Call", "Layout", "Operand", "Operands", "Paging", "Scale", "address",
    "axes", "begins_aligned", "in_c_order", "operand",
]  # fmt: skip

ITEM_BYTES = 2  # of float16 and bfloat16
ENTRY_BYTES = 4  # of a page table
ALIGNMENT = 16  # bytes that one copy takes
NO_ROW = 2**32 - 1  # stands for a row that is not there among the Hopper producer's offsets
MAX_MAP_STRIDE = 2**40  # bytes, of a tensor map


class Operand(NamedTuple):
    """A [batch, heads, seqlen, head_dim] array of 16-bit elements on a GPU with a contiguous last axis.

    ``strides`` of the first three axes in elements, 0 where an axis has one element. Keys and values in a paged cache
    are [pages, kv_heads, page_size, head_dim].
    """

    pointer: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]

    @property
    def tensor(self) -> tuple[int, int, int, int]:
        """The kernels' Tensor without its address, which is known only at the call."""
        return 0, *self.strides

    def rows(self, begin: int, end: int) -> Operand:
        """The part whose seqlen axis runs from ``begin`` to ``end``."""
        batch, heads, _, head_dim = self.shape
        sb, sh, ss = self.strides
        rows = end - begin
        pointer = self.pointer + begin * ss * ITEM_BYTES
        return Operand(pointer, (batch, heads, rows, head_dim), (sb, sh, ss if rows > 1 else 0))

    def sequences(self, begin: int, end: int) -> Operand:
        """The part whose batch axis runs from ``begin`` to ``end``."""
        batch = end - begin
        pointer = self.pointer + begin * self.strides[0] * ITEM_BYTES
        return Operand(pointer, (batch, *self.shape[1:]), (self.strides[0] if batch > 1 else 0, *self.strides[1:]))

    def is_aligned(self) -> bool:
        """Rows are whole chunks of 16 bytes: what the fast copies need. (The address apart.)"""
        return all(n * ITEM_BYTES % ALIGNMENT == 0 for n in (*self.strides, self.shape[3]))

    def is_compact(self) -> bool:
        """What the Hopper producers need: offsets of rows from the first, in chunks of 16 bytes, fit in 32 bits; and
        tensor maps: no stride is negative or 1 TiB."""
        return self._reaches(2) and self._maps()

    def is_compact_cache(self) -> bool:
        """The same of a paged cache, whose rows are those of all pages; and a tensor map counts heads of all pages by
        31 bits (`page_step`)."""
        reach = self.strides[0] * (self.shape[0] - 1) + self.strides[1] * (self.shape[1] - 1)
        return self._reaches(0, 2) and self._maps() and reach // self.page_step < 2**31

    @property
    def page_step(self) -> int:
        """Elements in which a tensor map of whole rows of pages counts heads of pages: the largest power of two that
        divides both strides."""
        both = self.strides[0] | self.strides[1] | 1 << 30
        return both & -both

    def reaches_next_head(self) -> bool:
        """Whether 32 bits hold such offsets of a head's rows from the first row of the head before it."""
        return self._reaches(2, past=self.strides[1])

    def _maps(self) -> bool:
        return all(0 <= n * ITEM_BYTES < MAX_MAP_STRIDE for n in self.strides)

    def _reaches(self, *axes: int, past: int = 0) -> bool:
        """Whether 32 bits hold the offsets along ``axes``, ``past`` elements further."""
        reach = past + sum(self.strides[axis] * max(0, self.shape[axis] - 1) for axis in axes)
        return 0 <= reach * ITEM_BYTES < ALIGNMENT * NO_ROW


class Scale(NamedTuple):
    """What the 8-bit keys of a cache, or its values, are multiplied by: ``value``, or where ``pointer`` is not 0
    float32 numbers on the GPU."""

    value: float = 1.0
    pointer: int = 0
    stride: int = 0  # from one KV head's number to the next's; 0: one of all


class Paging(NamedTuple):
    """The page table of a paged cache, int32 [batch, at least the pages of seqlen_k] on the GPU."""

    pointer: int
    stride: int  # entries from one sequence's to the next's
    page_size: int  # a power of two
    pages: int  # of the cache
    scales: tuple[Scale, Scale] | None = None  # of keys and values, where the cache has bytes: e4m3

    def sequences(self, begin: int, end: int) -> Paging:
        """The page table of some of the sequences."""
        pointer = self.pointer + begin * self.stride * ENTRY_BYTES
        return self._replace(pointer=pointer, stride=self.stride if end - begin > 1 else 0)

    def without_addresses(self) -> Paging:
        scales = self.scales and (self.scales[0]._replace(pointer=0), self.scales[1]._replace(pointer=0))
        return self._replace(pointer=0, scales=scales)


Operands = tuple[Operand, Operand, Operand, Operand]  # q, k, v, out


class Addresses(NamedTuple):
    """Where the arrays of a call begin, by the names of `plan.build.BASES`; 0: not there, or not asked for."""

    q: int
    k: int
    v: int
    out: int
    pages: int = 0
    k_pages: int = 0
    v_pages: int = 0
    k_scale: int = 0
    v_scale: int = 0
    taus: int = 0
    lse: int = 0
    visited: int = 0

    @classmethod
    def of(
        cls, arrays: tuple[int, int, int, int], paging: Paging | None, *, taus: int = 0, lse: int = 0, visited: int = 0
    ) -> Addresses:
        """``arrays``: q, k, v and out, as of a Call's operands."""
        if paging is None:
            return cls(*arrays, 0, 0, 0, 0, 0, taus, lse, visited)
        if paging.scales is None:
            return cls(*arrays, paging.pointer, 0, 0, 0, 0, taus, lse, visited)
        q, k, v, out = arrays
        k_scale, v_scale = (x.pointer for x in paging.scales)
        return cls(q, 0, 0, out, paging.pointer, k, v, k_scale, v_scale, taus, lse, visited)


class Call(NamedTuple):
    """A problem on arrays that lie on a GPU: q [batch, heads, seqlen_q, head_dim], k and v [batch, kv_heads, seqlen_k,
    head_dim], or with ``paging`` a cache [pages, kv_heads, page_size, head_dim], and out like q, which is written. So
    are, where their addresses are not 0, ``lse`` and ``visited``."""

    operands: Operands
    lse: int  # float32 [batch, heads, seqlen_q], contiguous
    visited: int  # int32 [batch, heads, segments, tiles], contiguous: the key tiles visited
    problem: Problem
    paging: Paging | None = None

    def addresses(self, taus: int = 0) -> Addresses:
        q, k, v, out = self.operands
        arrays = (q.pointer, k.pointer, v.pointer, out.pointer)
        return Addresses.of(arrays, self.paging, taus=taus, lse=self.lse, visited=self.visited)


class Layout(NamedTuple):
    """How q, k, v and out lie in memory, apart from their addresses: what the preparation of a call depends on.

    Keys and values of 8 bits are read into arrays first, which then are the operands k and v."""

    strides: tuple[tuple[int, int, int], ...]
    begins_aligned: bool  # all of them on 16 bytes, of 8 bits on 8
    paging: Paging | None  # where k and v are a paged cache

    @classmethod
    def of(cls, operands: Operands, paging: Paging | None) -> Layout:
        q, k, v, out = operands
        aligned = begins_aligned((q.pointer, k.pointer, v.pointer, out.pointer), paging)
        return cls((q.strides, k.strides, v.strides, out.strides), aligned, paging and paging.without_addresses())

    @property
    def is_fp8(self) -> bool:
        return self.paging is not None and self.paging.scales is not None

    @property
    def page_size(self) -> int:
        """0: keys and values are arrays, as kernels attend to them."""
        return 0 if self.paging is None or self.is_fp8 else self.paging.page_size

    def operands(self, problem: Problem) -> dict[str, Operand]:
        """By name, without addresses; a cache of 8 bits as k_pages and v_pages, and as k and v what is read of it."""
        p = problem
        of_q, of_k = (p.batch, p.heads, p.seqlen_q, p.head_dim), (p.batch, p.kv_heads, p.seqlen_k, p.head_dim)
        of_cache = of_k
        if self.paging is not None:
            of_cache = (self.paging.pages, p.kv_heads, self.paging.page_size, p.head_dim)
        cached = ("k_pages", "v_pages") if self.is_fp8 else ("k", "v")
        named = zip(("q", *cached, "out"), (of_q, of_cache, of_cache, of_q), self.strides, strict=True)
        found = {name: Operand(0, shape, strides) for name, shape, strides in named}
        return found | ({"k": in_c_order(0, of_k), "v": in_c_order(0, of_k)} if self.is_fp8 else {})

    def is_aligned(self, operands: dict[str, Operand]) -> bool:
        """Whether every row starts on 16 bytes."""
        return self.begins_aligned and all(x.is_aligned() for x in operands.values())

    def is_compact(self, operands: dict[str, Operand]) -> bool:
        """As of each operand, or of a cache. What is read into arrays first may lie anywhere."""
        cached = ("k", "v") if self.page_size else ()
        return all(
            x.is_compact_cache() if name in cached else x.is_compact()
            for name, x in operands.items() if name not in ("k_pages", "v_pages")
        )  # fmt: skip


def begins_aligned(arrays: tuple[int, ...], paging: Paging | None) -> bool:
    """Whether q, k, v and out begin on 16 bytes, keys and values of 8 bits on 8: what the fast copies need."""
    q, k, v, out = arrays
    of_cache = k | v
    if paging is not None and paging.scales is not None:
        of_cache *= 2
    return (q | of_cache | out) % ALIGNMENT == 0


def in_c_order(pointer: int, shape: tuple[int, int, int, int]) -> Operand:
    batch, heads, seqlen, head_dim = shape
    strides = (heads * seqlen * head_dim, seqlen * head_dim, head_dim)
    sb, sh, ss = (s if n > 1 else 0 for s, n in zip(strides, (batch, heads, seqlen), strict=True))
    return Operand(pointer, shape, (sb, sh, ss))


def operand(array: Any, layout: str) -> Operand:
    """Where an array on a GPU lies, or one that an ArrayInfo tells of, its axes ordered as ``layout`` says."""
    info = array if isinstance(array, ArrayInfo) else framework_of("array", array).describe(array)
    return Operand(info.pointer, *axes(info.shape, info.strides, layout, info.itemsize))


def axes(
    shape: tuple[int, ...], strides: tuple[int, ...], layout: str, itemsize: int = ITEM_BYTES
) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
    """The shape and strides of an Operand from those (in bytes) of an array in ``layout``, with or without the batch
    axis."""
    if len(shape) == 3:
        shape, strides = (1, *shape), (0, *strides)
    b, x, y, d = shape
    sb, sx, sy = (stride // itemsize for stride in strides[:3])
    if layout == "BSHD":
        x, y, sx, sy = y, x, sy, sx
    return (b, x, y, d), (sb if b > 1 else 0, sx if x > 1 else 0, sy if y > 1 else 0)


def address(native: Any) -> int:
    """Where an array on a GPU begins; 0 for None, an output that is not wanted."""
    return 0 if native is None else framework_of("array", native).pointers((native,))[0]
