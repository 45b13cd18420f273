"""S2O in NumPy: the definition, one function a stage.

    pooled queries -> key_scores -> log_weights -> order_keys  (key_order)    Algorithm 1 (ii)
    probe -> refined_segments -> refined_scores                in place of key_scores, with rank="auto" where it pays
    query_order                                                 Algorithm 1 (i)
    pass1                                                       Algorithm 2
    pass2, finish                                               Algorithm 3

Source: S2O: Early Stopping for Sparse Attention via Online Permutation, Algorithms 1 to 3.

Arrays are q [B, H, Lq, D] and k, v [B, Hkv, Lk, D] in one compute dtype: float32, or float64 to
study the method without rounding. Query head h reads KV head h // (H // Hkv). ``geometry`` says which
keys a segment attends densely and which are candidates of pass 2. N is the number of segments, S the
queries of a full one, R the pooled queries, C the candidates of a segment, T the query tiles of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..spec import (
    MAX_SEGMENT,
    PROBE_DEFICIT,
    PROBE_EVERY,
    PROBE_OWN_STEP,
    PROBE_SAMPLES,
    PROBE_TOP,
    PROBE_WINDOW,
    Geometry,
    S2OConfig,
)
from .dense import Array, capped, check_shapes, compute_dtype, visible_keys, weighted_sum
from .key_order import log_weights, order_keys

__all__ = [
    "Result",
    "State",
    "add_tail",
    "candidate_positions",
    "refined_scores",
    "refined_segments",
    "finish",
    "key_order",
    "key_scores",
    "leading_bits",
    "pass1",
    "pass2",
    "query_order",
    "pooled_queries",
    "s2o",
    "probe",
    "visit",
]

ROWS = 512  # query rows that pass 1 takes at once; it bounds memory and skips keys past the diagonal

quiet = np.errstate(invalid="ignore", divide="ignore", over="ignore")  # NaN and Inf are legal input


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
    k_order: list[Array]  # N times int32 [B, H, C] absolute key positions
    state1: State  # after pass 1


# ---------------------------------------------------------------- step 1: ordering


@quiet
def pooled_queries(q: Array, geometry: Geometry, config: S2OConfig) -> tuple[Array, Array]:
    """Means of runs of ``config.run`` consecutive queries of each segment (Algorithm 1, lines 5-8).

    ``rank="mean"`` has one run, the whole segment, as in the paper. A short last segment, or a count
    that does not divide the segment, leaves runs short or empty.

    Returns
    -------
    reps : [B, H, N, R, D]; 0 where the run is empty, which nothing reads
    counts : int32 [N, R], queries of each run
    """
    batch, heads, _, head_dim = q.shape
    shape = (geometry.segments, config.pooled_queries or 1)
    reps = np.zeros((batch, heads, *shape, head_dim), q.dtype)  # [B, H, N, R, D]
    counts = np.zeros(shape, np.int32)  # [N, R]
    for n, r in np.ndindex(shape):
        first, end = geometry.queries(n)
        begin, end = first + r * config.run, min(first + (r + 1) * config.run, end)
        if begin < end:
            counts[n, r] = end - begin
            reps[:, :, n, r] = q[:, :, begin:end].mean(axis=2)
    return reps, counts


def leading_bits(scores: Array) -> Array:
    """Integers that grow with scores, by the first 19 bits of their float32: sign, exponent and 10 of the fraction. The
    rest is cut off, as the GPU has a query's offset there. NaN is the greatest; -0 equals 0."""
    bits = (np.asarray(scores, np.float32) + np.float32(0)).view(np.uint32)
    growing = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (np.where(np.isnan(scores), np.uint32(0xFFFFFFFF), growing) // MAX_SEGMENT).astype(np.int64)


@quiet
def query_order(q: Array, k: Array, geometry: Geometry) -> Array:
    """Queries of each segment by descending dot product with a guide (Algorithm 1, lines 9-14).

    The guide is the mean of the KV head's first segment of keys, or of as many of them as stand before
    the segment: when 0 < seqlen_k - seqlen_q < segment, queries of the first segment would otherwise be
    ordered, and so stopped together, by keys of their future. With no such key the order is the identity.
    Scores are compared by :func:`leading_bits`; equal ones stay in ascending position.

    Returns int32 [B, H, N, S]: offsets inside the segment, -1 past the end of a short last segment.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, seqlen_q, head_dim)  # [B, Hkv, G, Lq, D]
    order = np.full((batch, heads, geometry.segments, geometry.segment), -1, np.int32)  # [B, H, N, S]
    for n in range(geometry.segments):
        begin, end = geometry.queries(n)
        rows, count = end - begin, geometry.guide_keys(n)
        if count == 0:
            order[:, :, n, :rows] = np.arange(rows)
            continue
        guide = k[:, :, :count].mean(axis=2)  # [B, Hkv, D]
        scores = grouped[:, :, :, begin:end] @ guide[:, :, None, :, None]  # [B, Hkv, G, rows, 1]
        bits = leading_bits(scores.reshape(batch, heads, rows))
        order[:, :, n, :rows] = np.argsort(-bits, axis=-1, kind="stable")
    return order


def candidate_positions(n: int, geometry: Geometry) -> Array:
    """Key positions of segment ``n``'s candidates, ascending: int32 [C].

    Those before the dense keys; without causality also those after them.
    """
    begin, end = geometry.dense_keys(n)
    c = np.arange(geometry.candidates(n), dtype=np.int32)
    return np.where(c < begin, c, c + (end - begin)).astype(np.int32)


@quiet
def key_scores(reps: Array, counts: Array, k: Array, n: int, geometry: Geometry) -> Array:
    """Largest unscaled dot product of each candidate with a pooled query (Algorithm 1, lines 15-18).

    Takes :func:`pooled_queries`' arrays. Empty pooled queries do not count; NaN wins.

    Returns float32 [B, H, C], candidates of segment ``n`` in ascending position.
    """
    batch, heads = reps.shape[:2]
    group = heads // k.shape[1]
    begin, end = geometry.dense_keys(n)
    spans = [slice(0, begin)] if geometry.is_causal else [slice(0, begin), slice(end, None)]
    reps = reps[:, :, n, counts[n] > 0]  # [B, H, R', D]
    scores = np.empty((batch, heads, geometry.candidates(n)), np.float32)  # [B, H, C]
    for b, h in np.ndindex(batch, heads):
        kh = k[b, h // group]  # [Lk, D]
        scores[b, h] = np.concatenate([(reps[b, h] @ kh[span].T).max(axis=0) for span in spans])
    return scores


def sample_positions(n: int, geometry: Geometry) -> Array:
    """At most PROBE_SAMPLES candidates of segment ``n``, evenly spread: key positions, int32 [C']."""
    positions = candidate_positions(n, geometry)
    step = max(1, -(-len(positions) // PROBE_SAMPLES))
    return positions[step // 2 :: step]


def run_means(q: Array, run: int) -> tuple[Array, Array]:
    """Means of runs of ``run`` consecutive rows of q [..., L, D]: [..., R, D], and the last row of each, int [R]."""
    starts = np.arange(0, q.shape[-2], run)
    last = np.minimum(starts + run, q.shape[-2]) - 1
    return np.add.reduceat(q, starts, axis=-2) / (last - starts + 1).astype(q.dtype)[:, None], last


def _log_mass(scores: Array, weight: float = 1.0) -> Array:
    """ln(weight * sum exp) over the last axis of finite scores, -inf where there is none."""
    scores = np.where(np.isfinite(scores), scores, -np.inf)
    top = scores.max(axis=-1, initial=-np.inf)
    base = np.where(np.isneginf(top), 0, top)
    return base + np.log(weight * np.exp(scores - base[..., None]).sum(axis=-1))


@quiet
def probe(q: Array, k: Array, geometry: Geometry, config: S2OConfig, scale: float) -> Array:
    """How much softmax mass an order by the mean query would find late: deficits, float32 [B, H, probes].

    For each of ``geometry.probed()``: pooled queries of ``config.probe_run`` queries score a sample of the
    segment's candidates. A candidate's mass is what they give it on average, of all that they see: the sample, taken
    for all candidates, and of the keys that pass 1 reads every PROBE_OWN_STEP-th, taken for all of those. The deficit
    is the mass of the PROBE_TOP-th part of the sample that has the most, less that of the part that the mean of the
    scores puts first. Scores that are not finite give no mass; NaN comes first in the mean's order.
    """
    batch, heads = q.shape[:2]
    group = heads // k.shape[1]
    probed = geometry.probed()
    deficits = np.zeros((batch, heads, len(probed)), np.float32)
    for i, n in enumerate(probed):
        (first, end), (dense_begin, dense_end) = geometry.queries(n), geometry.dense_keys(n)
        sample, own = sample_positions(n, geometry), np.arange(dense_begin, dense_end, PROBE_OWN_STEP)
        if len(sample) == 0:
            continue
        weight = geometry.candidates(n) / len(sample)
        best = max(1, len(sample) // PROBE_TOP)
        for b, h in np.ndindex(batch, heads):
            kh = k[b, h // group]
            reps, last = run_means(q[b, h, first:end], config.probe_run)  # [R, D], [R]
            scores = reps @ kh[sample].T * scale  # [R, C']
            own_scores = reps @ kh[own].T * scale  # [R, keys]
            if geometry.is_causal:
                own_scores = np.where(own <= (first + last + geometry.offset)[:, None], own_scores, -np.inf)
            norm = np.logaddexp(_log_mass(scores, weight), _log_mass(own_scores, PROBE_OWN_STEP))  # [R]
            norm = np.where(np.isneginf(norm), 0, norm)
            mass = np.where(np.isfinite(scores), np.exp(scores - norm[:, None]), 0).sum(axis=0)  # [C']
            mean = scores.sum(axis=0)  # [C'] times R
            front = [mass[np.lexsort((-x, ~np.isnan(x)))[:best]].sum() for x in (mass, mean)]
            deficits[b, h, i] = (front[0] - front[1]) * weight / len(reps)
    return deficits


def refined_segments(deficits: Array, geometry: Geometry) -> Array:
    """Which segments ``rank="auto"`` orders by :func:`refined_scores`: bool [B, H, N].

    Those before which their head's latest PROBE_WINDOW probes found a mean deficit above PROBE_DEFICIT, and the
    first of all, which no probe precedes. A probe sees keys of its own segment, so it says nothing about that one.
    """
    probed = geometry.probed()
    refined = np.zeros((*deficits.shape[:2], geometry.segments), bool)
    for n in range(geometry.first_ordered, geometry.segments):
        before = -(-(n - probed.start) // PROBE_EVERY)
        count = min(before, PROBE_WINDOW)
        total = np.zeros(deficits.shape[:2], np.float32)
        for i in range(before - count, before):
            total += deficits[:, :, i]
        refined[:, :, n] = total > np.float32(count) * np.float32(PROBE_DEFICIT) if count else True
    return refined & np.array([geometry.candidates(n) > 0 for n in range(geometry.segments)], bool)


@quiet
def refined_scores(q: Array, k: Array, n: int, geometry: Geometry, config: S2OConfig, scale: float) -> Array:
    """The largest logarithm of a softmax weight that a pooled query of segment ``n`` gives each candidate.

    Pooled queries are means of ``config.run`` queries; their weights are of the sample of candidates that
    :func:`probe` sees. In units of a dot product, that is divided by ``scale``, which is positive. NaN wins.

    Returns float32 [B, H, C], candidates in ascending position.
    """
    batch, heads = q.shape[:2]
    group = heads // k.shape[1]
    positions, sample = candidate_positions(n, geometry), sample_positions(n, geometry)
    first, end = geometry.queries(n)
    found = np.empty((batch, heads, len(positions)), np.float32)
    for b, h in np.ndindex(batch, heads):
        kh = k[b, h // group]
        reps = run_means(q[b, h, first:end], config.run)[0]  # [R, D]
        norm = _log_mass(reps @ kh[sample].T * scale) / scale  # [R]
        norm = np.where(np.isneginf(norm), 0, norm)
        found[b, h] = (reps @ kh[positions].T - norm[:, None]).max(axis=0)
    return found


def key_order(q: Array, k: Array, geometry: Geometry, config: S2OConfig, scale: float) -> list[Array]:
    """Candidates of each segment, most important first (Algorithm 1, lines 15-20).

    Returns N arrays int32 [B, H, C] of absolute key positions.
    """
    reps, counts = pooled_queries(q, geometry, config.coarse)
    batch, heads = q.shape[:2]
    refined = np.zeros((batch, heads, geometry.segments), bool)
    if config.probes(scale):
        refined = refined_segments(probe(q, k, geometry, config, scale), geometry)
    orders = []
    for n in range(geometry.segments):
        scores = key_scores(reps, counts, k, n, geometry)
        if refined[:, :, n].any():
            scores = np.where(refined[:, :, n, None], refined_scores(q, k, n, geometry, config, scale), scores)
        orders.append(candidate_positions(n, geometry)[order_keys(log_weights(scores, scale))])
    return orders


# ---------------------------------------------------------------- step 2: attention


def _update(
    m: Array, mass: Array, acc: Array, s: Array, v: Array, visible: Array | None = None
) -> tuple[Array, Array, Array, Array, Array]:
    """One online-softmax step: rows in state (m [M], mass [M], acc [M, D]) see scores s [M, K] and v [K, D].

    Returns the new state, the tile's own mass t [M], and l0 [M], the mass before in the new scale.
    """
    top = np.maximum(m, s.max(axis=-1, initial=-np.inf))  # [M]
    base = np.where(np.isneginf(top), top.dtype.type(0), top)  # [M] -inf - -inf would be NaN
    p = np.exp(s - base[:, None])  # [M, K]
    rescale = np.exp(m - base)  # [M]
    t, l0 = p.sum(axis=-1), mass * rescale  # [M]
    return top, l0 + t, acc * rescale[:, None] + weighted_sum(p, v, visible), t, l0


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
                m, mass, acc, _, _ = _update(m, mass, acc, s, v[b, h // group, to], visible)
                state.m[at], state.l[at], state.acc[at] = m, mass, acc
    return state


def visit(
    rows: Array, start: tuple[Array, Array, Array], keys: Array, k: Array, v: Array, scale: float, softcap: float,
    *, block_n: int, tau: float, stop_lag: int, visited: int | None,
) -> tuple[Array, Array, Array, int]:  # fmt: skip
    """A q tile's ``rows`` [M, D] in the state ``start`` (m [M], mass [M], acc [M, D]) see ``keys`` [C], positions in k
    and v [Lk, D], block_n at a time, until a key tile adds too little (:func:`pass2`) or ``visited`` are done.

    Returns the state and the number of key tiles visited.
    """
    m, mass, acc = start
    tiles = -(-len(keys) // block_n)
    deciding, end = visited is None, tiles if visited is None else min(visited, tiles)
    j = 0
    while j < end:
        at = keys[j * block_n : (j + 1) * block_n]  # [K]
        s = capped(rows @ k[at].T * scale, softcap)  # [M, K]
        m, mass, acc, t, l0 = _update(m, mass, acc, s, v[at])
        j += 1
        if deciding and (t < tau * l0).all():
            deciding, end = False, min(j + stop_lag, tiles)
    return m, mass, acc, j


def add_tail(
    m: Array, mass: Array, acc: Array, s: Array, rest: int, v: Array
) -> tuple[Array, Array, Array]:
    """Rows in state (m [M], mass [M], acc [M, D]) see ``rest`` keys of score s [M] and value v [D] each.

    In place of candidates that a q tile did not visit, with the score and value of the mean candidate. By convexity
    exp of the mean score is no more than the mean of exp(score) over all candidates. The visited ones, which weigh most,
    are among these: such keys may get more than those they stand for.
    """
    x = s + np.log(rest).astype(s.dtype)  # [M]
    top = np.fmax(m, x)
    base = np.where(np.isneginf(top), 0, top).astype(s.dtype)
    shrink, weight = np.exp(m - base), np.exp(x - base)
    return top, mass * shrink + weight, acc * shrink[:, None] + weight[:, None] * v


@quiet
def pass2(
    q: Array,
    k: Array,
    v: Array,
    state: State,
    q_order: Array,
    k_order: Sequence[Array],
    geometry: Geometry,
    config: S2OConfig,
    scale: float,
    softcap: float = 0.0,
    *,
    visited: Array | None = None,
    stop_lag: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[State, Array]:
    """Tiles of queries resume ``state`` and visit candidates in order until the gain is small (Algorithm 3).

    A q tile is ``block_m`` consecutive entries of q_order. It visits ``block_n`` entries of k_order at a
    time. The first key tile that adds t < tau * l0 to *every* row ends the visit, together with
    ``stop_lag`` more: it is kept, as it has been computed (the paper's line 13 drops it). A row whose l0
    is 0 or NaN keeps its tile going; tau = 0 never stops. Every row of a segment sees all its
    candidates, so nothing is masked and no row touches another except through the common stop. What it leaves
    unvisited counts as its mean (:func:`add_tail`), unless ``config.tail`` says otherwise.

    Parameters
    ----------
    state, q_order, k_order : what :func:`pass1`, :func:`query_order`, :func:`key_order` return
    visited : int [B, H, N, T], optional; key tiles to visit, instead of deciding
    progress : called with (segments done, segments)

    Returns
    -------
    State, the input left unchanged, and visited, int32 [B, H, N, T]; 0 for a q tile without rows.
    """
    batch, heads = q.shape[:2]
    group = heads // k.shape[1]
    block_m, block_n = config.block_m, config.block_n
    state = State(*(x.copy() for x in state))
    taken = np.zeros((batch, heads, geometry.segments, geometry.block_count(block_m)), np.int32)
    for n in range(geometry.segments):
        first, last = geometry.queries(n)
        tiles = -(-geometry.candidates(n) // block_n)
        if tiles and config.adds_tail:
            positions = candidate_positions(n, geometry)
            mean_k, mean_v = (x[:, :, positions].mean(axis=2) for x in (k, v))  # [B, Hkv, D]
        for b, h, tile in np.ndindex(batch, heads, -(-(last - first) // block_m)):
            kh, vh = k[b, h // group], v[b, h // group]  # [Lk, D]
            offsets = q_order[b, h, n, tile * block_m : min((tile + 1) * block_m, last - first)]
            at = (b, h, first + offsets)  # rows of this tile
            rows = q[at]  # [M, D]
            m, mass, acc, j = visit(
                rows, (state.m[at], state.l[at], state.acc[at]), k_order[n][b, h], kh, vh, scale, softcap,
                block_n=block_n, tau=config.tau, stop_lag=stop_lag,
                visited=None if visited is None else int(visited[b, h, n, tile]),
            )  # fmt: skip
            rest = geometry.candidates(n) - j * block_n
            if rest > 0 and config.adds_tail:
                mean = capped(rows @ mean_k[b, h // group] * scale, softcap)  # [M]
                m, mass, acc = add_tail(m, mass, acc, mean, rest, mean_v[b, h // group])
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
        Scores become softcap * tanh(score / softcap) in both passes. Ordering, whose dot products nobody caps, does
        not depend on it.
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
    geometry = Geometry(q.shape[2], k.shape[2], config.segment, config.window, is_causal)

    q_order = query_order(q, k, geometry)
    k_order = key_order(q, k, geometry, config, scale)
    state1 = pass1(q, k, v, geometry, scale, softcap)
    state2, visited = pass2(q, k, v, state1, q_order, k_order, geometry, config, scale, softcap, progress=progress)
    return Result(*finish(state2), visited, q_order, k_order, state1)
