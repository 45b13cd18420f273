"""Rows exchanged for heads, a few KV heads at a time: each rank attends the whole sequence with its share of the heads.

A stage is some of each rank's KV heads with their query heads. Rows of later stages come while the first attends, and
outputs leave while the next does, so that what shows is sending the first stage's rows and the last one's outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .exchange import Exchange, exchange, side_stream, wait_for, wide
from .zigzag import Zigzag

__all__ = ["STAGES", "attend_by_heads"]

Tensor = Any  # torch.Tensor
# Attends some of all query heads, q [batch, seqlen, heads, head_dim], to k and v into out; lse [batch, heads, seqlen]
# or None.
Attend = Callable[[slice, Tensor, Tensor, Tensor, Tensor], Any]

STAGES = 4  # at most: each is a call of its own


def attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, attend: Attend, *, zigzag: Zigzag, rank: int, group: Any
) -> Any:
    """This rank's rows q, k, v and out, (batch, length, heads, head_dim); lse (batch, heads, length) or None."""
    rows = HeadExchange(zigzag, rank, group, q.device)
    kv_heads, group_heads = k.shape[2] // zigzag.world_size, q.shape[2] // k.shape[2]
    count = min(STAGES, kv_heads)
    bounds = [kv_heads * i // count for i in range(count + 1)]
    stages = [slice(*pair) for pair in itertools.pairwise(bounds)]
    arriving = [rows.to_heads([q, k, v], kv_heads, stage) for stage in stages]
    found = []
    for stage, (received, shares, exchanges) in zip(stages, arriving, strict=True):
        wait_for(exchanges)
        o = received.new_empty((zigzag.seqlen, *received.shape[1:2], shares[0], received.shape[3]))
        whole = [x.transpose(0, 1) for x in (*received.split(shares, 2), o)]  # [batch, seqlen, heads, head_dim]
        first = (rank * kv_heads + stage.start) * group_heads
        lse = attend(slice(first, first + shares[0]), *whole)
        rows.to_rows(o, out, kv_heads, stage)
        if lse is not None:
            found.append(rows.to_rows(lse.permute(2, 0, 1).contiguous()[..., None], None, kv_heads, stage))
    rows.done()
    if not found:
        return None
    # Each [batch, length, ranks, KV heads of the stage, group, 1]
    return torch.cat(found, 3).flatten(2).transpose(1, 2).contiguous()


class HeadExchange:
    """Sends stages of heads to the ranks that attend with them, and what becomes of their rows back."""

    def __init__(self, zigzag: Zigzag, rank: int, group: Any, device: Any) -> None:
        self.zigzag, self.rank, self.group, self.device = zigzag, rank, group, device
        self.ranks = zigzag.world_size
        self.beside = side_stream(device)
        self.tag = 0
        ends = list(itertools.accumulate(end - begin for begin, end in zigzag.rows(rank)))
        self.here = [slice(*pair) for pair in itertools.pairwise([0, *ends])]  # this rank's chunks among its rows

    def to_heads(
        self, tensors: Sequence[Tensor], kv_heads: int, stage: slice
    ) -> tuple[Tensor, list[int], list[Exchange]]:
        """Of tensors (batch, length, heads, head_dim), whose heads are ``kv_heads`` for each rank or a multiple:
        [seqlen, batch, heads of the stage, head_dim], all of them side by side on axis 2; how many of each; what to
        wait for before it is read."""
        parts = [self._of_stage(wide(x), kv_heads, stage) for x in tensors]
        shares = [x.shape[3] * x.shape[4] for x in parts]
        batch, length, _, head_dim = tensors[0].shape
        sent = tensors[0].new_empty((self.ranks, length, batch, sum(shares), head_dim))
        for x, place in zip(parts, sent.split(shares, 3), strict=True):
            place = place.unflatten(3, x.shape[3:5])
            (place.view(x.dtype) if x.dtype != place.dtype else place).copy_(x.permute(2, 1, 0, 3, 4, 5))
        whole = sent.new_empty((self.zigzag.seqlen, *sent.shape[2:]))
        return whole, shares, self._start(
            lambda r, i: sent[r, self.here[i]], lambda r, i: whole[slice(*self._bounds(r, i))]
        )

    def to_rows(self, x: Tensor, out: Tensor | None, kv_heads: int, stage: slice) -> Tensor:
        """``x`` [seqlen, batch, heads of the stage, ...] to the rows' ranks. What arrives is written to the stage's
        heads of ``out`` (batch, length, heads, ...) if that is given, and returned as [batch, length, ranks, KV heads
        of the stage, heads of each, ...]. Both are there for the current stream after `done`."""
        back = x.new_empty((self.ranks, self.zigzag.length(self.rank), *x.shape[1:]))
        exchanges = self._start(lambda r, i: x[slice(*self._bounds(r, i))], lambda r, i: back[r, self.here[i]])
        with torch.cuda.stream(self.beside):  # None: as it is
            wait_for(exchanges)
            found = back.permute(2, 1, 0, *range(3, back.ndim)).unflatten(3, (stage.stop - stage.start, -1))
            if out is not None:
                places, found_wide = wide(out), wide(found)
                if places.dtype != found_wide.dtype:
                    places, found_wide = out, found
                self._of_stage(places, kv_heads, stage).copy_(found_wide)
        return found

    def done(self) -> None:
        """The current stream waits for all that was sent, whose memory goes after this."""
        if self.beside is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.beside)

    def _of_stage(self, x: Tensor, kv_heads: int, stage: slice) -> Tensor:
        """[batch, length, ranks, KV heads of the stage, heads of each, ...], a view."""
        return x.unflatten(2, (self.ranks, kv_heads, -1))[:, :, :, stage]

    def _bounds(self, rank: int, index: int) -> tuple[int, int]:
        return self.zigzag.bounds(self.zigzag.chunk(rank, index))

    def _start(self, source: Callable[[int, int], Tensor], place: Callable[[int, int], Tensor]) -> list[Exchange]:
        """From ``source(rank, round)`` here to ``place(rank, round)`` there, beside the current stream and behind what
        it has; what a rank sends to itself is copied."""
        rounds, started = range(self.zigzag.rounds), []
        if self.beside is not None:
            self.beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.beside):
            for index in rounds:
                sent, received = ([of(r, index) for r in range(self.ranks)] for of in (source, place))
                started.append(exchange(sent, received, rank=self.rank, group=self.group, tag=self.tag))
                self.tag += 1
        for index in rounds:
            place(self.rank, index).copy_(source(self.rank, index))
        return started
