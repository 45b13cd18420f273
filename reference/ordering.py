"""Step 1 of S2O: in which order a segment's queries are tiled and its candidates visited.

    pooled_queries -> key_scores -> log_weights -> order_keys  (key_order)    Algorithm 1 (ii)
    probe -> refined_segments -> refined_scores                in place of key_scores, with rank="auto" where it pays
    query_order                                                Algorithm 1 (i)

Shapes are those of `reference.s2o`.
"""

from __future__ import annotations

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
from .dense import Array, quiet
from .key_order import log_weights, order_keys

__all__ = [
    "candidate_positions",
    "key_order",
    "key_scores",
    "leading_bits",
    "pooled_queries",
    "probe",
    "query_order",
    "refined_scores",
    "refined_segments",
    "run_means",
    "sample_positions",
]


@quiet
def pooled_queries(q: Array, geometry: Geometry, config: S2OConfig) -> tuple[Array, Array]:
    """Means of runs of ``config.run`` consecutive queries of each segment (Algorithm 1, lines 5-8).

    ``rank="mean"`` has one run, the whole segment, as in the paper. A short last segment, or a count
    that does not divide the segment, leaves runs short or empty.

    Returns
    -------
    pooled : [B, H, N, R, D]; 0 where the run is empty, which nothing reads
    counts : int32 [N, R], queries of each run
    """
    batch, heads, _, head_dim = q.shape
    shape = (geometry.segments, config.pooled_queries or 1)
    pooled = np.zeros((batch, heads, *shape, head_dim), q.dtype)  # [B, H, N, R, D]
    counts = np.zeros(shape, np.int32)  # [N, R]
    for n, r in np.ndindex(shape):
        first, end = geometry.queries(n)
        begin, end = first + r * config.run, min(first + (r + 1) * config.run, end)
        if begin < end:
            counts[n, r] = end - begin
            pooled[:, :, n, r] = q[:, :, begin:end].mean(axis=2)
    return pooled, counts


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
def key_scores(pooled: Array, counts: Array, k: Array, n: int, geometry: Geometry) -> Array:
    """Largest unscaled dot product of each candidate with a pooled query (Algorithm 1, lines 15-18).

    Takes :func:`pooled_queries`' arrays. Empty pooled queries do not count; NaN wins.

    Returns float32 [B, H, C], candidates of segment ``n`` in ascending position.
    """
    batch, heads = pooled.shape[:2]
    group = heads // k.shape[1]
    begin, end = geometry.dense_keys(n)
    spans = [slice(0, begin)] if geometry.is_causal else [slice(0, begin), slice(end, None)]
    pooled = pooled[:, :, n, counts[n] > 0]  # [B, H, R', D]
    scores = np.empty((batch, heads, geometry.candidates(n)), np.float32)  # [B, H, C]
    for b, h in np.ndindex(batch, heads):
        kh = k[b, h // group]  # [Lk, D]
        scores[b, h] = np.concatenate([(pooled[b, h] @ kh[span].T).max(axis=0) for span in spans])
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
            pooled, last = run_means(q[b, h, first:end], config.probe_run)  # [R, D], [R]
            scores = pooled @ kh[sample].T * scale  # [R, C']
            own_scores = pooled @ kh[own].T * scale  # [R, keys]
            if geometry.is_causal:
                own_scores = np.where(own <= (first + last + geometry.offset)[:, None], own_scores, -np.inf)
            norm = np.logaddexp(_log_mass(scores, weight), _log_mass(own_scores, PROBE_OWN_STEP))  # [R]
            norm = np.where(np.isneginf(norm), 0, norm)
            mass = np.where(np.isfinite(scores), np.exp(scores - norm[:, None]), 0).sum(axis=0)  # [C']
            mean = scores.sum(axis=0)  # [C'] times R
            top = [mass[np.lexsort((-x, ~np.isnan(x)))[:best]].sum() for x in (mass, mean)]
            deficits[b, h, i] = (top[0] - top[1]) * weight / len(pooled)
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
        pooled = run_means(q[b, h, first:end], config.run)[0]  # [R, D]
        norm = _log_mass(pooled @ kh[sample].T * scale) / scale  # [R]
        norm = np.where(np.isneginf(norm), 0, norm)
        found[b, h] = (pooled @ kh[positions].T - norm[:, None]).max(axis=0)
    return found


def key_order(q: Array, k: Array, geometry: Geometry, config: S2OConfig, scale: float) -> list[Array]:
    """Candidates of each segment, most important first (Algorithm 1, lines 15-20).

    Returns N arrays int32 [B, H, C] of absolute key positions.
    """
    pooled, counts = pooled_queries(q, geometry, config.coarse)
    batch, heads = q.shape[:2]
    refined = np.zeros((batch, heads, geometry.segments), bool)
    if config.probes(scale):
        refined = refined_segments(probe(q, k, geometry, config, scale), geometry)
    orders = []
    for n in range(geometry.segments):
        scores = key_scores(pooled, counts, k, n, geometry)
        if refined[:, :, n].any():
            scores = np.where(refined[:, :, n, None], refined_scores(q, k, n, geometry, config, scale), scores)
        orders.append(candidate_positions(n, geometry)[order_keys(log_weights(scores, scale))])
    return orders
