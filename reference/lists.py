"""Attention to keys that are given as data: what pass 2 computes, whatever chose the keys.

Arrays are q [B, H, Lq, D] and k, v [B, Hkv, Lk, D] in one compute dtype, as in `reference.s2o`. N is the number of
segments, T the q tiles of a full one, HL the list heads: H, Hkv or 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .dense import Array, check_shapes, quiet
from .s2o import State, update, visit
from .value_skip import ValueSkips

__all__ = ["KeyLists", "attend_lists"]


class KeyLists(NamedTuple):
    """Lists of keys, each in the order in which it is visited.

    Key number i of a list is ``entries[begin + i // unit] * unit + i % unit``: keys come in units of so many
    neighbours, of which only a list's last may be short.
    """

    entries: Array  # int32 [any]
    begins: Array  # int64 [B, HL, N], a list for each segment, or [B, HL, N, T], one for each q tile
    keys: Array  # int32, like begins: how many keys a list has
    unit: int = 1

    def positions(self, batch: int, list_head: int, segment: int, tile: int) -> Array:
        """Key positions, int [C], of the list of a q tile."""
        at = (batch, list_head, segment, tile)[: self.begins.ndim]
        i = np.arange(self.keys[at])
        entries = self.entries[int(self.begins[at]) + i // self.unit].astype(np.int64)
        return entries * self.unit + i % self.unit


@quiet
def attend_lists(
    q: Array,
    k: Array,
    v: Array,
    lists: KeyLists,
    state: State | None = None,
    *,
    segment: int | None = None,
    q_order: Array | None = None,
    k_order: Array | None = None,
    block_m: int = 128,
    block_n: int = 128,
    scale: float | None = None,
    softcap: float = 0.0,
    tau: float = 0.0,
    stop_lag: int = 0,
    visited: Array | None = None,
    values: ValueSkips | None = None,
) -> tuple[State, Array]:
    """Each q tile attends to the keys of its list, all of which all of its rows see.

    Parameters
    ----------
    q, k, v : [B, H, Lq, D] and [B, Hkv, Lk, D]
    lists : KeyLists
    state : State, optional; what rows have seen before. Without it they start empty, and one without any key stays so.
    segment : int, optional; queries of a segment, by default all of them
    q_order : int [B, H, Lq], optional; query positions in the order in which q tiles take them: block_m at a time, of
        one segment. By default as they lie.
    k_order : int [B, HO, Lk], optional; key positions in the order that lists count keys in, of HO heads: H, Hkv or 1
    block_n : keys of a key tile
    scale : float, default 1 / sqrt(D)
    tau, stop_lag : when a q tile stops (`reference.s2o.pass2`); tau 0 never does
    visited : int [B, H, N, T], optional; key tiles to visit, instead of deciding
    values : ValueSkips, optional; which products with values are left out

    Returns
    -------
    State, which `reference.s2o.finish` turns into output and lse, and the key tiles visited, int32 [B, H, N, T].
    """
    check_shapes(q, k, v)
    batch, heads, seqlen_q, head_dim = q.shape
    group, shared = heads // k.shape[1], heads // lists.begins.shape[1]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    segment = max(1, seqlen_q) if segment is None else segment
    tiles = -(-min(segment, seqlen_q) // block_m)  # of a full segment
    if state is None:
        state = State(np.full(q.shape[:3], -np.inf, q.dtype), np.zeros(q.shape[:3], q.dtype), np.zeros_like(q))
    state = State(*(x.copy() for x in state))
    taken = np.zeros((batch, heads, -(-seqlen_q // segment), tiles), np.int32)
    for b, h, n, tile in np.ndindex(taken.shape):
        begin = n * segment + tile * block_m
        end = min(begin + block_m, (n + 1) * segment, seqlen_q)
        if begin >= end:
            continue
        order = np.arange(begin, end) if q_order is None else q_order[b, h, begin:end]
        at = (b, h, order)  # rows of this tile
        kh, vh = k[b, h // group], v[b, h // group]  # [Lk, D]
        keys = lists.positions(b, h // shared, n, tile)  # [C]
        if k_order is not None:
            keys = k_order[b, h * k_order.shape[1] // heads][keys]
        of_tile = update
        if values is not None:
            of_tile = values.updating(update, (b, h, n, tile), end - begin, len(keys))
        m, mass, acc, j = visit(
            q[at], (state.m[at], state.l[at], state.acc[at]), keys, kh, vh, scale, softcap, block_n=block_n, tau=tau,
            stop_lag=stop_lag, visited=None if visited is None else int(visited[b, h, n, tile]),
            step=of_tile,
        )  # fmt: skip
        state.m[at], state.l[at], state.acc[at] = m, mass, acc
        taken[b, h, n, tile] = j
    return state, taken
