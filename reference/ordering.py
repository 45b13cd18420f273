"""Step 1 of S2O: in which order a segment's queries are tiled and its candidates visited.

    pooled_queries -> key_scores -> log_weights -> order_keys        Algorithm 1 (ii)
    pooled_queries, unit_keys -> unit_weights -> order_keys         the same with rank="weight"
    unit_clusters, query_norms -> query_weights -> near_first -> order_keys     the same with rank="query"
    least_keys                                                       of the order, which q tiles do not stop before
    query_order                                                      Algorithm 1 (i)

Shapes are those of `reference.s2o`. U is the number of whole units of keys, W of those among a segment's candidates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..spec import (
    BLOCK_UNITS,
    LEAST_PART,
    LN2,
    LOG2E,
    MAX_SEGMENT,
    MOST_EXCESS,
    ORDER_HEAD,
    ORDER_WHOLE,
    OUTLIER_SHIFT,
    SAMPLED_KEYS,
    SAMPLED_OF_BLOCK,
    Geometry,
    S2OConfig,
)
from .dense import Array, quiet
from .key_order import log_weights, order_keys

__all__ = [
    "OF_KEYS",
    "candidate_positions",
    "key_order",
    "key_scores",
    "KeyOrder",
    "leading_bits",
    "least_keys",
    "near_first",
    "ordered_units",
    "outlier_distances",
    "pooled_queries",
    "Clusters",
    "query_norms",
    "query_order",
    "query_weights",
    "ranked_units",
    "unit_clusters",
    "unit_keys",
    "unit_positions",
    "unit_weights",
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
    shape = (geometry.segments, config.pooled_queries)
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
def query_order(q: Array, k: Array, geometry: Geometry, block_m: int) -> Array:
    """Queries of each segment by descending dot product with a guide (Algorithm 1, lines 9-14).

    The guide is the mean of the KV head's first segment of keys, or of as many of them as stand before
    the segment: when 0 < seqlen_k - seqlen_q < segment, queries of the first segment would otherwise be
    ordered, and so stopped together, by keys of their future. With no such key the order is the identity,
    and where segments are one q tile, of ``block_m`` queries, which stops as one in whichever order.
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
        if count == 0 or not geometry.orders_queries(block_m):
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


# By rank, of orders of single keys: unscaled scores of a segment's candidates.
OF_KEYS = {"mean": key_scores, "max": key_scores}


def ranked_units(n: int, geometry: Geometry) -> Array:
    """The whole units among segment ``n``'s candidates, ascending: int32 [W]."""
    return candidate_positions(n, geometry)[: geometry.ranked(n) * geometry.unit : geometry.unit] // geometry.unit


def unit_positions(units: Array, n: int, geometry: Geometry) -> Array:
    """Key positions of ``units`` [..., W], a unit's in turn, and behind them those of a short unit at the end of the
    keys if it is among segment ``n``'s candidates: int32 [..., C]."""
    whole = (units[..., None] * geometry.unit + np.arange(geometry.unit)).reshape(*units.shape[:-1], -1)
    short = candidate_positions(n, geometry)[geometry.ranked(n) * geometry.unit :]
    return np.concatenate([whole, np.broadcast_to(short, (*units.shape[:-1], len(short)))], axis=-1).astype(np.int32)


@quiet
def unit_keys(k: Array, geometry: Geometry) -> Array:
    """Of whole units the mean key and the outlier, the key furthest from it, of equally far ones the first: a mean of
    many hides one key that many queries look for, such as the first of a sequence. [B, Hkv, U, 2, D]."""
    batch, kv_heads, _, head_dim = k.shape
    keys = k[:, :, : geometry.units * geometry.unit].reshape(batch, kv_heads, geometry.units, geometry.unit, head_dim)
    mean = keys.mean(axis=3, keepdims=True)  # [B, Hkv, U, 1, D]
    furthest = outlier_distances(keys, mean).argmax(axis=3)[..., None, None]  # [B, Hkv, U, 1, 1]
    return np.concatenate([mean, np.take_along_axis(keys, furthest, axis=3)], axis=3)


@quiet
def outlier_distances(keys: Array, mean: Array) -> Array:
    """Squared distances of keys [..., unit, D] from ``mean``, -1 for what is not a number: [..., unit]."""
    distances = np.square(keys - mean).sum(axis=-1)
    return np.where(np.isnan(distances), -1, distances)


@quiet
def unit_weights(pooled: Array, counts: Array, of_units: Array, n: int, geometry: Geometry, scale: float) -> Array:
    """log2 of the largest softmax weight that a pooled query of segment ``n`` gives each of its units.

    Takes the arrays of :func:`pooled_queries` and :func:`unit_keys`. What a pooled query gives a unit is what it gives
    the mean key, or 2 ** -OUTLIER_SHIFT of an outlier's part of the unit if that is more. Weights are shares of what it
    gives the mean keys of the segment's whole units; where this sum is not finite it is taken for 1. NaN wins.

    Returns float32 [B, H, W], units in ascending position.
    """
    batch, heads = pooled.shape[:2]
    kv_heads, units = of_units.shape[1], ranked_units(n, geometry)
    pooled = pooled[:, :, n, counts[n] > 0]  # [B, H, R', D]
    pooled = pooled.reshape(batch, kv_heads, heads // kv_heads, *pooled.shape[2:])  # [B, Hkv, G, R', D]
    mean, outlier = (of_units[:, :, None, units, i] for i in range(2))  # [B, Hkv, 1, W, D] each
    scores, alone = (pooled @ x.swapaxes(-1, -2) * (scale * LOG2E) for x in (mean, outlier))  # [B, Hkv, G, R', W]
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)  # [B, Hkv, G, R', 1]
    norm = top + np.log2(np.exp2(scores - top).sum(axis=-1, keepdims=True))
    scores = np.maximum(scores, alone - math.log2(geometry.unit) - OUTLIER_SHIFT)
    weights = scores - np.where(np.isfinite(norm), norm, 0).astype(scores.dtype)
    return weights.max(axis=-2).reshape(batch, heads, len(units)).astype(np.float32)  # [B, H, W]


class Clusters(NamedTuple):
    """Whole units of keys as groups of keys that lie close together, C of each."""

    keys: Array  # [B, Hkv, U, C, D] their means; 0 where a group has no key
    shares: Array  # [B, Hkv, U, C] their part of the unit's keys
    means: Array  # [B, Hkv, U, D] of all keys of a unit


@quiet
def unit_clusters(k: Array, geometry: Geometry, clusters: int) -> Clusters:
    """The first centre is the key furthest from the unit's mean, each further one the key furthest from all centres
    before it, of equally far ones the first; a key belongs to the centre nearest to it, of equally near ones the first.
    So a key unlike its neighbours, which a query may look for, hardly shares its group's mean with others. Where a unit
    has as many keys as groups, each key is one, in their order."""
    batch, kv_heads, _, head_dim = k.shape
    keys = k[:, :, : geometry.units * geometry.unit].reshape(batch, kv_heads, geometry.units, geometry.unit, head_dim)
    mean = keys.mean(axis=3, keepdims=True)  # [B, Hkv, U, 1, D]
    if geometry.unit == clusters:
        return Clusters(keys, np.full(keys.shape[:4], 1 / clusters), mean[:, :, :, 0])
    furthest = outlier_distances(keys, mean).argmax(axis=3)  # [B, Hkv, U]
    nearest = np.full(keys.shape[:4], np.inf, keys.dtype)  # squared distances to the nearest centre so far
    group = np.zeros(keys.shape[:4], np.int8)
    for c in range(clusters):
        centre = np.take_along_axis(keys, furthest[..., None, None], axis=3)
        distance = np.square(keys - centre).sum(axis=-1)
        nearer = (distance < nearest) | (c == 0)
        group[nearer], nearest = c, np.where(nearer, distance, nearest)
        furthest = np.where(np.isnan(nearest), -1, nearest).argmax(axis=3)
    belongs = [(group == c)[..., None] for c in range(clusters)]
    sizes = np.stack([x.sum(axis=3)[..., 0] for x in belongs], axis=-1)  # [B, Hkv, U, C]
    sums = np.stack([np.where(x, keys, 0).sum(axis=3) for x in belongs], axis=3)  # [B, Hkv, U, C, D]
    return Clusters(sums / np.maximum(sizes, 1)[..., None].astype(k.dtype), sizes / geometry.unit, mean[:, :, :, 0])


def whole_blocks(n: int, geometry: Geometry) -> tuple[Array, Array]:
    """Blocks of BLOCK_UNITS neighbouring units that are all candidates of segment ``n``, and its units in none of
    them, both ascending: int32."""
    units = ranked_units(n, geometry)
    blocks, counts = np.unique(units // BLOCK_UNITS, return_counts=True)
    blocks = blocks[counts == BLOCK_UNITS].astype(np.int32)
    return blocks, units[~np.isin(units // BLOCK_UNITS, blocks)]


def block_keys(means: Array) -> Array:
    """Of each BLOCK_UNITS neighbouring whole units the mean of their means [B, Hkv, U, D]: [B, Hkv, blocks, D]."""
    batch, kv_heads, units, head_dim = means.shape
    whole = units // BLOCK_UNITS * BLOCK_UNITS
    return means[:, :, :whole].reshape(batch, kv_heads, -1, BLOCK_UNITS, head_dim).mean(axis=3)


class Sampled(NamedTuple):
    """SAMPLED_OF_BLOCK keys of each of :func:`block_keys`' blocks, evenly apart: S of all."""

    keys: Array  # [B, Hkv, S, D]
    deviations: Array  # [B, Hkv, S, D] half of them less the block's mean: float16 may not hold all of it


def sampled_keys(k: Array, blocks: Array, geometry: Geometry) -> Sampled:
    """The keys that stand for each of the ``blocks`` [B, Hkv, blocks, D] where single ones are looked at."""
    apart = BLOCK_UNITS // SAMPLED_OF_BLOCK  # units; the first key of the one in the middle
    units = np.arange(blocks.shape[2] * SAMPLED_OF_BLOCK) * apart + apart // 2
    keys = k[:, :, units * geometry.unit]
    return Sampled(keys, (keys - blocks.repeat(SAMPLED_OF_BLOCK, axis=2)) / 2)


def telling(n: int, geometry: Geometry) -> Array:
    """Which of the :class:`Sampled` tell how scores of segment ``n`` vary: those of the blocks before it, without
    causality of all. Where these are more than SAMPLED_KEYS, blocks evenly apart give one each, the next block its next
    one: keys may repeat with a period."""
    blocks = len(whole_blocks(n, geometry)[0]) if geometry.is_causal else geometry.units // BLOCK_UNITS
    if blocks * SAMPLED_OF_BLOCK <= SAMPLED_KEYS:
        return np.arange(blocks * SAMPLED_OF_BLOCK)
    places = np.arange(SAMPLED_KEYS)
    return places * blocks // SAMPLED_KEYS * SAMPLED_OF_BLOCK + places % SAMPLED_OF_BLOCK


def excess(scores: Array) -> Array:
    """log2 of the factor by which blocks count more than their mean keys say, [..., 1]. ``scores`` [..., samples] are a
    query's of deviations, in log2 units. It is half of what single keys add if scores are normal, and no more
    than MOST_EXCESS: where a norm overstates a query's mass, what the query looks for comes last."""
    if scores.shape[-1] == 0:
        return np.zeros((*scores.shape[:-1], 1), scores.dtype)
    return np.minimum(np.square(scores).mean(axis=-1, keepdims=True) * LN2, MOST_EXCESS)


@quiet
def query_norms(
    q: Array, means: Array, blocks: Array, sampled: Sampled, own: Array, geometry: Geometry, scale: float,
    centre: Array | None = None,
) -> Array:  # fmt: skip
    """log2 of each query's softmax mass, in units of one unit of keys.

    ``means`` [B, Hkv, U, D] are :func:`unit_clusters`', ``blocks`` :func:`block_keys` of them, ``sampled``
    :func:`sampled_keys`, and ``own`` [B, H, Lq] the natural log of what pass 1 has found (its lse). Beside it count the
    segment's candidates: each whole block of BLOCK_UNITS units as many times as it has units by its mean key, and units
    in no such block by their own, all with the query's :func:`excess`. Means hide a key that a query looks for, so that
    its norm comes out too small and that key's weight too large: it comes first. Where scores spread far, norms come
    out too small by so much that all of a query's keys would come before what other queries look for: so none is less
    than what a single one of the sampled keys of those blocks weighs. A norm that is not finite is 0. ``centre``
    [B, Hkv, D]: that of keys less it.

    Returns [B, H, Lq]; of segments without a candidate 0.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads = means.shape[1]
    norms = np.zeros((batch, heads, seqlen_q), q.dtype)
    for n in range(geometry.segments):
        (first, end), (which, units) = geometry.queries(n), whole_blocks(n, geometry)
        if len(which) + len(units) == 0:
            continue
        rows = q[:, :, first:end].reshape(batch, kv_heads, heads // kv_heads, end - first, head_dim)
        single = (which[:, None] * SAMPLED_OF_BLOCK + np.arange(SAMPLED_OF_BLOCK)).reshape(-1)
        keys = [
            blocks[:, :, which], means[:, :, units],
            sampled.deviations[:, :, telling(n, geometry)], sampled.keys[:, :, single],
        ]  # fmt: skip
        *parts, scores, of_single = (rows @ x[:, :, None].swapaxes(-1, -2) * (scale * LOG2E) for x in keys)
        parts[0] = parts[0] + math.log2(BLOCK_UNITS)
        parts = [x + excess(scores) for x in parts]
        found = own[:, :, first:end].reshape(rows.shape[:-1])[..., None] * LOG2E - math.log2(geometry.unit)
        x = np.concatenate([*parts, found], axis=-1)  # [B, Hkv, G, rows, blocks + units + 1]
        top = x.max(axis=-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isneginf(top), 0, top)
        norm = (top + np.log2(np.exp2(x - top).sum(axis=-1, keepdims=True)))[..., 0]
        # fmax leaves out what is not a number: such a key makes its block's mean none either.
        largest = np.fmax.reduce(of_single, axis=-1, initial=-np.inf)
        norm = np.maximum(norm, largest - math.log2(geometry.unit))
        if centre is not None:
            norm = norm - (rows @ centre[:, :, None, :, None])[..., 0] * (scale * LOG2E)
        norms[:, :, first:end] = np.where(np.isfinite(norm), norm, 0).reshape(batch, heads, end - first)
    return norms


@quiet
def query_weights(
    q: Array, norms: Array, keys: Array, shares: Array, n: int, geometry: Geometry, scale: float
) -> Array:
    """log2 of the largest part of its softmax mass that a single query of segment ``n`` gives a group of a unit's keys.

    Takes the arrays of :func:`query_norms` and :func:`unit_clusters`. NaN wins.

    Returns float32 [B, H, W], units in ascending position.
    """
    batch, heads, _, head_dim = q.shape
    kv_heads, units, (first, end) = keys.shape[1], ranked_units(n, geometry), geometry.queries(n)
    rows = q[:, :, first:end].reshape(batch, kv_heads, heads // kv_heads, end - first, head_dim)
    norms = norms[:, :, first:end].reshape(rows.shape[:-1])[..., None]  # [B, Hkv, G, rows, 1]
    weights = np.full((batch, kv_heads, heads // kv_heads, len(units)), -np.inf, rows.dtype)  # [B, Hkv, G, W]
    for c in range(keys.shape[3]):
        scores = rows @ keys[:, :, None, units, c].swapaxes(-1, -2) * (scale * LOG2E)  # [B, Hkv, G, rows, W]
        scores = scores + np.log2(shares[:, :, None, None, units, c])
        weights = np.maximum(weights, (scores - norms).max(axis=-2))
    return weights.reshape(batch, heads, len(units)).astype(np.float32)  # [B, H, W]


def near_first(scores: Array, n: int, geometry: Geometry, config: S2OConfig) -> Array:
    """Segment ``n``'s scores [B, H, W], infinite for units that have one of the last ``config.near_keys`` keys before
    it, so that these come first and q tiles wait for them: its first queries look there for what later ones find among
    its own keys. Without causality the scores stay as they are.

    Source: not in the paper.

    Returns [B, H, W], a copy.
    """
    scores = scores.copy()
    if geometry.is_causal and config.near_keys:
        keys = geometry.queries(n)[0] + geometry.offset - config.near_keys  # before them
        scores[..., max(0, keys // geometry.unit) :] = np.inf
    return scores


def ordered_units(scores: Array, n: int, geometry: Geometry, config: S2OConfig) -> Array:
    """Segment ``n``'s units by their float16 scores [B, H, W], most important first: int32 [B, H, W].

    A segment that visits them all (``config.dense_last``) takes them as they lie.
    """
    units = ranked_units(n, geometry)
    return np.broadcast_to(units, scores.shape) if n >= config.dense_from(geometry) else units[order_keys(scores)]


def least_keys(scores: Array, geometry: Geometry, config: S2OConfig) -> Array:
    """Keys that q tiles of a segment visit before they may stop: of the units whose float16 scores [B, H, W] are at
    least the log2 of LEAST_PART of their head's tau, or not a number; of more than ORDER_WHOLE among the first
    ORDER_HEAD of the order. Nothing of it falls with the number of keys. Without ``config.has_least_keys`` none.

    Source: not in the paper.

    Returns int32 [B, H].
    """
    if not config.has_least_keys:
        return np.zeros(scores.shape[:2], np.int32)
    scores = np.asarray(scores).astype(np.float16)
    if scores.shape[-1] > ORDER_WHOLE:
        scores = np.take_along_axis(scores, order_keys(scores)[..., :ORDER_HEAD], axis=-1)
    with np.errstate(over="ignore", divide="ignore"):
        taus = np.array(config.taus(scores.shape[1], candidates=0)).astype(np.float32)
        weight = taus * np.float32(LEAST_PART)
        least = np.log2(np.where(weight < np.finfo(np.float32).tiny, 0, weight))  # [H]; to GPUs so little is 0
    heavy = ~(scores.astype(np.float32) < least[:, None])
    return (heavy.sum(axis=-1) * geometry.unit).astype(np.int32)


class KeyOrder(NamedTuple):
    """How q tiles of each of N segments go through its candidates."""

    keys: list[Array]  # int32 [B, H, C] absolute positions of its candidates, most important first
    least: list[Array] | None = None  # int32 [B, H]: of `least_keys`; None: none


@quiet
def key_order(
    q: Array, k: Array, geometry: Geometry, config: S2OConfig, scale: float, own: Array | None = None
) -> KeyOrder:
    """Candidates of each segment, most important first (Algorithm 1, lines 15-20).

    ``own`` [B, H, Lq], the lse that pass 1 has found, is what ``rank="query"`` needs. With an error, whose taus have
    not been found, no key is among the least.
    """
    scores = [x.astype(np.float16) for x in segment_scores(q, k, geometry, config, scale, own)]
    return KeyOrder(
        [unit_positions(ordered_units(x, n, geometry, config), n, geometry) for n, x in enumerate(scores)],
        None if config.error is not None else [least_keys(x, geometry, config) for x in scores],
    )


@quiet
def segment_scores(
    q: Array, k: Array, geometry: Geometry, config: S2OConfig, scale: float, own: Array | None = None
) -> list[Array]:
    """What the units of each segment are ordered by: N arrays [B, H, W], for the arguments see :func:`key_order`."""
    if config.rank == "query":
        if own is None:
            raise ValueError("key_order: own is None; accepted with rank='query': the lse of pass 1, [B, H, Lq]")
        of_units = unit_clusters(k, geometry, config.groups)
        blocks = block_keys(of_units.means)
        norms = query_norms(q, of_units.means, blocks, sampled_keys(k, blocks, geometry), own, geometry, scale)
    else:
        pooled, counts = pooled_queries(q, geometry, config)
        keys = unit_keys(k, geometry) if config.rank == "weight" else k
    found = []
    for n in range(geometry.segments):
        if config.rank == "query":
            weights = query_weights(q, norms, of_units.keys, of_units.shares, n, geometry, scale)
            found.append(near_first(weights, n, geometry, config))
        elif config.rank == "weight":
            found.append(unit_weights(pooled, counts, keys, n, geometry, scale))
        elif config.rank in OF_KEYS:
            found.append(log_weights(OF_KEYS[config.rank](pooled, counts, keys, n, geometry), scale))
        else:
            raise ValueError(f"key_order: rank is {config.rank!r}, which has no scores here")
    return found
