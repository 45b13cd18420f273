"""Rows exchanged for heads, a few KV heads at a time: each rank attends the whole sequence with its share of the heads.

A stage is some of each rank's KV heads with their query heads. Rows of all stages leave at once, and come while earlier
stages attend; outputs leave while later ones do. So what shows is sending the first stage's rows and the last one's
outputs. All is in the order of the current stream, but for what is on its way, which torch.distributed has on its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .exchange import Exchange, exchange, wait_for, wide
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
    kv_heads, group_heads = k.shape[2] // zigzag.world_size, q.shape[2] // k.shape[2]
    count = min(STAGES, kv_heads)
    bounds = [kv_heads * i // count for i in range(count + 1)]
    stages = [slice(*pair) for pair in itertools.pairwise(bounds)]
    rows = HeadExchange(zigzag, rank, group, kv_heads)
    arriving = [rows.to_heads([q, k, v], stage) for stage in stages]
    leaving = []
    for stage, arrives in zip(stages, arriving, strict=True):
        received = arrives.wait()  # [seqlen, batch, heads of the stage and twice its KV heads, head_dim]
        heads = (stage.stop - stage.start) * group_heads
        kv = (received.shape[2] - heads) // 2
        o = received.new_empty((*received.shape[:2], heads, received.shape[3]))
        whole = [x.transpose(0, 1) for x in (*received.split([heads, kv, kv], 2), o)]
        first = (rank * kv_heads + stage.start) * group_heads
        lse = attend(slice(first, first + heads), *whole)
        of_lse = None if lse is None else rows.to_rows(lse.permute(2, 0, 1).contiguous()[..., None])
        leaving.append((stage, rows.to_rows(o), of_lse))
    found = []
    for stage, of_o, of_lse in leaving:
        places, came = rows.of_stage(out, stage), rows.spread(of_o.wait(), stage)
        if wide(places).dtype == wide(came).dtype:
            places, came = wide(places), wide(came)
        places.copy_(came)
        if of_lse is not None:
            found.append(rows.spread(of_lse.wait(), stage))
    # Each [batch, length, ranks, KV heads of the stage, query heads of each, 1]
    return torch.cat(found, 3).flatten(2).transpose(1, 2).contiguous() if found else None


class Sent:
    """A tensor that is being received. It, and what it comes from, is kept until it was waited for."""

    def __init__(self, received: Tensor, source: Tensor, exchanges: list[Exchange]) -> None:
        self.received, self.source, self.exchanges = received, source, exchanges

    def wait(self) -> Tensor:
        """The tensor, once the current stream, or on the CPU the host, has waited for all parts of it."""
        wait_for(self.exchanges)
        self.source = None
        return self.received


class HeadExchange:
    """Sends stages of heads to the ranks that attend with them, and what becomes of their rows back."""

    def __init__(self, zigzag: Zigzag, rank: int, group: Any, kv_heads: int) -> None:
        """``kv_heads``: of each rank."""
        self.zigzag, self.rank, self.group, self.kv_heads = zigzag, rank, group, kv_heads
        self.ranks = zigzag.world_size
        self.tag = 0
        self.here = zigzag.spans(rank)

    def to_heads(self, tensors: Sequence[Tensor], stage: slice) -> Sent:
        """Of tensors (batch, length, heads, head_dim) the stage's heads to their ranks: [seqlen, batch, heads of this
        rank's stage, head_dim], those of all tensors side by side on axis 2."""
        parts = [self.of_stage(wide(x), stage) for x in tensors]
        shares = [x.shape[3] * x.shape[4] for x in parts]
        batch, length, _, head_dim = tensors[0].shape
        sent = tensors[0].new_empty((self.ranks, length, batch, sum(shares), head_dim))
        for x, place in zip(parts, sent.split(shares, 3), strict=True):
            place.unflatten(3, x.shape[3:5]).view(x.dtype).copy_(x.permute(2, 1, 0, 3, 4, 5))
        whole = sent.new_empty((self.zigzag.seqlen, *sent.shape[2:]))
        return self._start(whole, lambda r, i: whole[self._at(r, i)], sent, lambda r, i: sent[r, self.here[i]])

    def to_rows(self, x: Tensor) -> Sent:
        """``x`` [seqlen, batch, heads of the stage, ...] to its rows' ranks: [ranks, length, batch, heads of their
        stages, ...]."""
        back = x.new_empty((self.ranks, self.zigzag.length(self.rank), *x.shape[1:]))
        return self._start(back, lambda r, i: back[r, self.here[i]], x, lambda r, i: x[self._at(r, i)])

    def of_stage(self, x: Tensor, stage: slice) -> Tensor:
        """Of (batch, length, heads, ...) [batch, length, ranks, KV heads of the stage, heads of each, ...], a view."""
        return x.unflatten(2, (self.ranks, self.kv_heads, -1))[:, :, :, stage]

    def spread(self, back: Tensor, stage: slice) -> Tensor:
        """What `to_rows` received in the order of `of_stage`, a view."""
        return back.permute(2, 1, 0, *range(3, back.ndim)).unflatten(3, (stage.stop - stage.start, -1))

    def _at(self, rank: int, index: int) -> slice:
        """A rank's chunk of a round in the sequence."""
        return slice(*self.zigzag.bounds(self.zigzag.chunk(rank, index)))

    def _start(
        self, received: Tensor, place: Callable[[int, int], Tensor], source: Tensor, of: Callable[[int, int], Tensor]
    ) -> Sent:
        """From ``of(rank, round)`` here, parts of ``source``, to ``place(rank, round)`` there, parts of ``received``;
        what a rank sends to itself is copied."""
        started = []
        for index in range(self.zigzag.rounds):
            to, into = ([part(r, index) for r in range(self.ranks)] for part in (of, place))
            started.append(exchange(to, into, rank=self.rank, group=self.group, tag=self.tag))
            self.tag += 1
        for index in range(self.zigzag.rounds):
            place(self.rank, index).copy_(of(self.rank, index))
        return Sent(received, source, started)
