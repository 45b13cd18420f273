"""What a call knows of an array: found once, where the array comes in."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["ArrayInfo", "Device"]


class Device(NamedTuple):
    kind: str  # "cpu", "cuda", or another framework's name for what s2o_cupy does not run on
    ordinal: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}" if self.kind == "cuda" else self.kind


class ArrayInfo(NamedTuple):
    """Where an array's elements lie in memory, and what they are."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    itemsize: int
    dtype: str = ""
    device: Device = Device("cpu")
    native: Any = None  # the array itself, or the view of it that was imported: what kernels can be pointed at

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """All but the place: what a call is known by when it comes again."""
        return self.shape, self.strides, self.dtype

    @property
    def has_contiguous_rows(self) -> bool:
        """Whether the elements of the last axis lie side by side: kernels read rows in vectors."""
        return self.strides[-1] == self.itemsize or self.shape[-1] == 1

    def byte_range(self) -> tuple[int, int]:
        """[lowest byte, one past the highest byte)."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        spans = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = self.pointer + sum(min(0, s) for s in spans)
        return low, self.pointer + sum(max(0, s) for s in spans) + self.itemsize

    def overlaps(self, other: ArrayInfo) -> bool:
        (a, b), (c, d) = self.byte_range(), other.byte_range()
        return a < b and c < d and a < d and c < b

    def overlaps_itself(self) -> bool:
        """Whether two indices may name one element: a stride within the reach of the smaller ones."""
        reach = self.itemsize
        axes = sorted((abs(s), n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1)
        for stride, n in axes:
            if stride < reach:
                return True
            reach += (n - 1) * stride
        return False
