"""Sequences that lie in the rows of a padded batch, packed one behind the other, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["pack", "starts", "unpack"]

Tensor = Any  # torch.Tensor
Span = tuple[int, int, int]  # row of the batch, first position, one behind the last


def pack(x: Tensor, spans: Sequence[Span]) -> Tensor:
    """(batch, seqlen, heads, head_dim) -> (total, heads, head_dim); a view where one span, or all of x, is asked."""
    if len(spans) == 1:
        row, begin, end = spans[0]
        return x[row, begin:end]
    if _all_of(x.shape, spans) and x.is_contiguous():
        return x.flatten(0, 1)
    return torch.cat([x[row, begin:end] for row, begin, end in spans])


def unpack(packed: Tensor, spans: Sequence[Span], batch: int, seqlen: int) -> Tensor:
    """(total, heads, head_dim) -> (batch, seqlen, heads, head_dim), contiguous; 0 where no span is."""
    shape = (batch, seqlen, *packed.shape[1:])
    if _all_of(shape, spans):
        return packed.contiguous().view(shape)
    x = packed.new_zeros(shape)
    for (row, begin, end), part in zip(spans, packed.split([end - begin for _, begin, end in spans]), strict=True):
        x[row, begin:end] = part
    return x


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each of some sequences begins, and the end of the last: what is called cu_seqlens."""
    return [0, *itertools.accumulate(lengths)]


def _all_of(shape: Sequence[int], spans: Sequence[Span]) -> bool:
    """Whether ascending spans leave nothing out."""
    return sum(end - begin for _, begin, end in spans) == shape[0] * shape[1]
