"""S2O in NumPy: the definition, one function a stage.

    query_order, key_order     Algorithm 1 (ordering.py)
    pass1                      Algorithm 2
    pass2, finish              Algorithm 3

Source: S2O: Early Stopping for Sparse Attention via Online Permutation, Algorithms 1 to 3.

Arrays are q [B, H, Lq, D] and k, v [B, Hkv, Lk, D] in one compute dtype: float32, or float64 to
study the method without rounding. Query head h reads KV head h // (H // Hkv). ``geometry`` says which
keys a segment attends densely and which are candidates of pass 2. N is the number of segments, S the
queries of a full one, R the pooled queries, C the candidates of a segment, T the query tiles of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..spec import NEAR_KEYS, PATIENCE, PATIENCE_PARTS, Geometry, S2OConfig
from .dense import Array, capped, check_shapes, compute_dtype, quiet, visible_keys, weighted_sum
from .ordering import (
    KeyOrder,
    candidate_positions,
    key_order,
    key_scores,
    leading_bits,
    least_keys,
    near_first,
    ordered_units,
    pooled_queries,
    query_order,
    ranked_units,
    unit_keys,
    unit_positions,
    unit_weights,
)
from .tail import Moments, add_tail, key_moments

__all__ = [
    "KeyOrder",
    "Result",
    "State",
    "candidate_positions",
    "finish",
    "key_order",
    "key_scores",
    "leading_bits",
    "least_keys",
    "near_first",
    "ordered_units",
    "pass1",
    "pass2",
    "pooled_queries",
    "query_order",
    "ranked_units",
    "s2o",
    "unit_keys",
    "unit_positions",
    "unit_weights",
    "update",
    "visit",
]

ROWS = 512  # query rows that pass 1 takes at once; it bounds memory and skips keys past the diagonal


class State(NamedTuple):
    """Online softmax of every query, in natural-log units."""

    m: Array  # [B, H, Lq] running maximum of the scaled (and capped) scores, -inf before any key
    l: Array  # noqa: E741  [B, H, Lq] sum of exp(score - m)
    acc: Array  # [B, H, Lq, D] sum of exp(score - m) * v


class Result(NamedTuple):
    """What :func:`s2o` returns: the output and every decision that led to it."""

    o: Array  # [B, H, Lq, D] compute dtype
    lse: Array  # [B, H, Lq] compute dtype, natural log
    visited: Array  # int32 [B, H, N, T] key tiles that each query tile visited
    q_order: Array  # int32 [B, H, N, S] offsets inside the segment, -1 past its end
    k_order: KeyOrder  # absolute key positions, and how many of them no q tile stops before
    state1: State  # after pass 1


def update(
    m: Array, mass: Array, acc: Array, s: Array, v: Array, visible: Array | None = None
) -> tuple[Array, Array, Array, Array, Array]:
    """One online-softmax step: rows in state (m [M], mass [M], acc [M, D]) see scores s [M, K] and v [K, D].

    Returns the new state, the tile's own mass t [M], and l0 [M], the mass before in the new scale.
    """
    top = np.maximum(m, s.max(axis=-1, initial=-np.inf))  # [M]
    base = np.where(np.isneginf(top), top.dtype.type(0), top)  # [M] -inf - -inf would be NaN
    p = np.exp(s - base[:, None])  # [M, K]
    rescale_by = np.exp(m - base)  # [M]
    t, l0 = p.sum(axis=-1), mass * rescale_by  # [M]
    return top, l0 + t, acc * rescale_by[:, None] + weighted_sum(p, v, visible), t, l0


@quiet
def pass1(q: Array, k: Array, v: Array, geometry: Geometry, scale: float, softcap: float = 0.0) -> State:
    """Each query attends to its segment's visible keys and to the window (Algorithm 2)."""
    batch, heads, seqlen_q, _ = q.shape
    group = heads // k.shape[1]
    state = State(
        np.full((batch, heads, seqlen_q), -np.inf, q.dtype), np.zeros(q.shape[:3], q.dtype), np.zeros_like(q)
    )
    for n in range(geometry.segments):
        (first, last), (begin, end) = geometry.queries(n), geometry.dense_keys(n)
        for start in range(first, last, ROWS):
            rows = range(start, min(start + ROWS, last))
            keys, visible = range(begin, end), None
            if geometry.is_causal:  # nothing of this chunk looks past its last row
                keys = range(begin, max(begin, min(end, rows.stop + geometry.offset)))
                visible = visible_keys(rows, keys, geometry.offset)
            to = slice(keys.start, keys.stop)
            for b, h in np.ndindex(batch, heads):
                at = (b, h, slice(rows.start, rows.stop))
                s = capped(q[at] @ k[b, h // group, to].T * scale, softcap)  # [rows, keys]
                if visible is not None:
                    s = np.where(visible, s, s.dtype.type(-np.inf))
                m, mass, acc = state.m[at], state.l[at], state.acc[at]
                m, mass, acc, _, _ = update(m, mass, acc, s, v[b, h // group, to], visible)
                state.m[at], state.l[at], state.acc[at] = m, mass, acc
    return state


def visit(
    rows: Array, start: tuple[Array, Array, Array], keys: Array, k: Array, v: Array, scale: float, softcap: float,
    *, block_n: int, tau: float, stop_lag: int, visited: int | None, least: int = 0,
    step: Callable[..., Any] = update,
) -> tuple[Array, Array, Array, int]:  # fmt: skip
    """A q tile's ``rows`` [M, D] in the state ``start`` (m [M], mass [M], acc [M, D]) see ``keys`` [C], positions in k
    and v [Lk, D], block_n at a time, until a key tile adds too little (:func:`pass2`) or ``visited`` are done.

    ``least``: keys before which only PATIENCE + NEAR_KEYS // block_n key tiles in a row that add too little end the
    visit, or as many as a PATIENCE_PARTS-th of all keys fills if that is more. ``step`` is what a key tile does.
    Returns the state and the number of key tiles visited.
    """
    m, mass, acc = start
    in_a_row, patience = 0, max(PATIENCE + NEAR_KEYS // block_n, len(keys) // (PATIENCE_PARTS * block_n))
    tiles = -(-len(keys) // block_n)
    deciding, end = visited is None, tiles if visited is None else min(visited, tiles)
    j = 0
    while j < end:
        at = keys[j * block_n : (j + 1) * block_n]  # [K]
        s = capped(rows @ k[at].T * scale, softcap)  # [M, K]
        m, mass, acc, t, l0 = step(m, mass, acc, s, v[at])
        j += 1
        in_a_row = in_a_row + 1 if (t < tau * l0).all() else 0
        if deciding and in_a_row >= (1 if j * block_n >= least else patience):
            deciding, end = False, min(j + stop_lag, tiles)
    return m, mass, acc, j


@quiet
def pass2(
    q: Array,
    k: Array,
    v: Array,
    state: State,
    q_order: Array,
    k_order: KeyOrder,
    geometry: Geometry,
    config: S2OConfig,
    scale: float,
    softcap: float = 0.0,
    *,
    visited: Array | None = None,
    stop_lag: int = 0,
    tau_factor: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[State, Array]:
    """Tiles of queries resume ``state`` and visit candidates in order until the gain is small (Algorithm 3).

    A q tile is ``block_m`` consecutive entries of q_order. It visits ``block_n`` entries of k_order at a
    time. The first key tile that adds t < tau * l0 to *every* row ends the visit, together with
    ``stop_lag`` more: it is kept, as it has been computed (the paper's line 13 drops it). Before the order's least keys
    have been visited (:func:`reference.ordering.least_keys`) it takes several in a row (:func:`visit`). A row whose l0
    is 0 or NaN keeps its tile going; tau = 0 never stops, and neither do segments of ``config.dense_last``. Heads may
    have a tau each. Every row of a segment sees all its candidates, so nothing is masked and no row touches another
    except through the common stop. What it leaves unvisited counts for what ``config.tail`` says
    (:func:`reference.tail.add_tail`).

    Parameters
    ----------
    state, q_order, k_order : what :func:`pass1`, :func:`query_order`, :func:`key_order` return
    visited : int [B, H, N, T], optional; key tiles to visit, instead of deciding
    tau_factor : by which every tau is multiplied
    progress : called with (segments done, segments)

    Returns
    -------
    State, the input left unchanged, and visited, int32 [B, H, N, T]; 0 for a q tile without rows.
    """
    batch, heads = q.shape[:2]
    group, dense_from = heads // k.shape[1], config.dense_from(geometry)
    block_m, block_n = config.block_m, config.block_n
    state = State(*(x.copy() for x in state))
    taken = np.zeros((batch, heads, geometry.segments, geometry.block_count(block_m)), np.int32)
    for n in range(geometry.segments):
        first, last = geometry.queries(n)
        tiles = -(-geometry.candidates(n) // block_n)
        taus = config.taus(heads, geometry.candidates(n))
        moments: dict[tuple[int, int], Moments] = {}
        if tiles and config.adds_tail:
            group_of_keys = geometry.moment_group(n)
            moments = {(b, h): key_moments(k[b, h], v[b, h], group_of_keys) for b, h in np.ndindex(k.shape[:2])}
        for b, h, tile in np.ndindex(batch, heads, -(-(last - first) // block_m)):
            kh, vh = k[b, h // group], v[b, h // group]  # [Lk, D]
            offsets = q_order[b, h, n, tile * block_m : min((tile + 1) * block_m, last - first)]
            at = (b, h, first + offsets)  # rows of this tile
            rows = q[at]  # [M, D]
            keys, least = k_order.keys[n][b, h], 0 if k_order.least is None else int(k_order.least[n][b, h])
            m, mass, acc, j = visit(
                rows, (state.m[at], state.l[at], state.acc[at]), keys, kh, vh, scale, softcap,
                block_n=block_n, tau=tau_factor * taus[h] if n < dense_from else 0.0, stop_lag=stop_lag,
                visited=None if visited is None else int(visited[b, h, n, tile]), least=least,
            )  # fmt: skip
            rest = keys[j * block_n :]
            if len(rest) > 0 and config.adds_tail:
                m, mass, acc = add_tail(rows, (m, mass, acc), rest, kh, vh, moments[b, h // group], scale, softcap)
            state.m[at], state.l[at], state.acc[at] = m, mass, acc
            taken[b, h, n, tile] = j
        if progress is not None:
            progress(n + 1, geometry.segments)
    return state, taken


@quiet
def finish(state: State) -> tuple[Array, Array]:
    """o = acc / l [B, H, Lq, D] and lse = m + ln(l) [B, H, Lq] (Algorithm 3, line 18).

    A row that saw no key has o = 0 and lse = -inf.
    """
    m, mass, acc = state
    empty = mass == 0
    o = np.where(empty[..., None], mass.dtype.type(0), acc / mass[..., None])
    return o, np.where(empty, mass.dtype.type(-np.inf), m + np.log(mass))


def s2o(
    q: Array,
    k: Array,
    v: Array,
    config: S2OConfig,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """S2O attention, all stages.

    Parameters
    ----------
    q : [B, H, Lq, D], float16, bfloat16, float32 or float64
    k, v : [B, Hkv, Lk, D], Hkv a divisor of H
    config : S2OConfig
    scale : float, default 1 / sqrt(D). Ordering takes large q.k for important, so a negative scale is
        applied as -q with -scale, which is the same attention.
    softcap : float, default 0 (off)
        Scores become softcap * tanh(score / softcap) in both passes. Ordering caps no dot product; with
        ``rank="query"`` it depends on it all the same, by what pass 1 has found for each query.
    is_causal : bool, default True; aligned bottom-right
    progress : called with (segments done, segments) during pass 2

    Returns
    -------
    Result, in float64 if any input is, else in float32.

    Raises
    ------
    ValueError, TypeError
        Shapes do not fit together, or a dtype is not accepted.
    """
    check_shapes(q, k, v)
    dtype = np.result_type(*(compute_dtype(x.dtype) for x in (q, k, v)))
    q, k, v = (x.astype(dtype, copy=False) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    if scale < 0:
        q, scale = -q, -scale
    geometry = Geometry(q.shape[2], k.shape[2], config.segment, config.window, is_causal, config.unit)

    q_order = query_order(q, k, geometry, config.block_m)
    state1 = pass1(q, k, v, geometry, scale, softcap)
    k_order = key_order(q, k, geometry, config, scale, finish(state1)[1])
    state2, visited = pass2(q, k, v, state1, q_order, k_order, geometry, config, scale, softcap, progress=progress)
    return Result(*finish(state2), visited, q_order, k_order, state1)
