"""Attention by a schedule: a dense part by a rule, then listed keys. What `gather_attention` computes.

Arrays are q [B, H, Lq, D] and k, v [B, Hkv, Lk, D] in one compute dtype, as in `reference.s2o`.
"""

from __future__ import annotations

import math

import numpy as np

from ..spec import Geometry
from .dense import Array, check_shapes
from .lists import KeyLists, attend_lists
from .s2o import State, finish, pass1
from .value_skip import ValueSkips

__all__ = ["gather", "sink_lists"]


def gather(
    q: Array,
    k: Array,
    v: Array,
    lists: KeyLists,
    dense: Geometry | None = None,
    *,
    sinks: int = 0,
    k_order: Array | None = None,
    q_order: Array | None = None,
    block_m: int = 128,
    scale: float | None = None,
    softcap: float = 0.0,
    tau: float = 0.0,
    visited: Array | None = None,
    values: ValueSkips | None = None,
) -> tuple[Array, Array, Array]:
    """Dense part, sinks and lists, one after the other, each of which takes up the state that the one before left.

    Parameters
    ----------
    q, k, v : [B, H, Lq, D] and [B, Hkv, Lk, D]
    lists : KeyLists, of one segment with a list for each q tile, or a list for each segment of ``dense``
    dense : Geometry, optional; its segments' own keys and window. Without it rows start from their lists.
    sinks : first keys that every query attends to, where its segment's dense keys do not hold them already
    k_order, q_order, block_m, scale, softcap, tau, visited, values : `attend_lists`

    Returns
    -------
    o [B, H, Lq, D], lse [B, H, Lq] and the key tiles visited, int32 [B, H, N, T].
    """
    check_shapes(q, k, v)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    state: State | None = None
    if dense is not None:
        state = pass1(q, k, v, dense, scale, softcap)
        if sinks:
            state, _ = attend_lists(
                q, k, v, sink_lists(sinks, dense, len(q)), state, segment=dense.segment, block_m=block_m, scale=scale,
                softcap=softcap,
            )  # fmt: skip
    per_tile = lists.begins.ndim == 4
    state, visited = attend_lists(
        q, k, v, lists, state, segment=None if per_tile or dense is None else dense.segment, k_order=k_order,
        q_order=q_order, block_m=block_m, scale=scale, softcap=softcap, tau=tau, visited=visited, values=values,
    )  # fmt: skip
    return *finish(state), visited


def sink_lists(sinks: int, dense: Geometry, batch: int) -> KeyLists:
    """A list for each segment: the first ``sinks`` keys, but for those that its dense part holds."""
    keys = [min(sinks, dense.dense_keys(n)[0]) for n in range(dense.segments)]
    shape = (batch, 1, dense.segments)
    of_all = np.broadcast_to(np.array(keys, np.int32), shape)
    return KeyLists(np.arange(sinks, dtype=np.int32), np.zeros(shape, np.int64), of_all)
