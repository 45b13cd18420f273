"""The order of a segment's candidates by their scores (Algorithm 1, line 19).

    log_weights -> order_keys, by score_buckets and, of many candidates, by strata

Arrays are scores [..., C] of C candidates in ascending position, rows apart.
"""

from __future__ import annotations

import functools

import numpy as np

from ..spec import KEY_BUCKETS, KEY_LEVELS, LAYER_MIX, LOG2E, MIDDLE, MIDDLE_FROM, ORDER_HEAD, ORDER_WHOLE, STRATUM
from .dense import Array, quiet

__all__ = ["log_weights", "order_keys", "score_buckets", "strata", "stratified_order"]


@quiet
def log_weights(scores: Array, scale: float) -> Array:
    """Scores as :func:`order_keys` takes them: log2 of a softmax weight, rounded to float16 (2 bytes, not 4, for each
    candidate of each segment).

    ``scores`` is float32, in units of a dot product, ``scale`` not negative. Float16 tells weights of 2^8 apart by a
    half percent; what is not finite in it is treated like an infinite score.
    """
    return (np.asarray(scores, np.float32) * np.float32(scale * LOG2E)).astype(np.float16)


@quiet
def score_buckets(scores: Array, count: int = KEY_BUCKETS) -> Array:
    """Which of ``count`` parts of its own row's range each score falls into, from the top: int32 [..., C].

    ``scores`` is float16 [..., C], or is rounded to it. With hi and lo the extremes of a row's finite scores::

        factor = float16(min((count - 2) / (hi - lo), 65504))            in float32
        bucket = clamp(1 + rint((hi - score) * factor), 0, count - 1)    in float16, the product exact

    Float16 has ten bits after the first, so that 1025 plus a bucket is what a fused multiply-add of its arithmetic
    rounds to an integer by itself; ``count`` is at most 1024. NaN and +inf have bucket 0 to themselves, -inf goes to
    the last.
    """
    scores = np.asarray(scores).astype(np.float16)
    finite = np.isfinite(scores)  # [..., C]
    hi = scores.max(axis=-1, keepdims=True, where=finite, initial=-np.inf)  # [..., 1]
    lo = scores.min(axis=-1, keepdims=True, where=finite, initial=np.inf)  # [..., 1]
    none = hi < lo
    hi, lo = np.where(none, np.float16(0), hi), np.where(none, np.float16(0), lo)
    span = hi.astype(np.float32) - lo.astype(np.float32)
    factor = np.minimum(np.float32(count - 2) / span, np.float32(65504)).astype(np.float16)  # [..., 1]
    below = hi - scores  # [..., C] float16
    # Exact in float64 but for what is far below a half, so this rounds once, as the GPU's instruction does.
    place = (below.astype(np.float64) * factor.astype(np.float64) + 1025).astype(np.float16)
    place = np.fmin(np.fmax(place, np.float16(1024)), np.float16(1024 + count - 1))
    return place.astype(np.int32) - 1024


def _bucket_order(scores: Array) -> Array:
    """Descending order of scores [..., C] by bucket, ascending indices inside one: int32 [..., C]."""
    # A stable sort of 16-bit integers is a radix sort.
    return np.argsort(score_buckets(scores).astype(np.uint16), axis=-1, kind="stable").astype(np.int32)


@functools.lru_cache(maxsize=4)
def strata(count: int) -> Array:
    """How ``count`` candidates are dealt to strata of at most STRATUM: int32 [strata, STRATUM], -1 past an end.

    Chunks of eight neighbours go to pairs of strata, layer by layer; their even ones to the pair's first stratum, the
    odd ones to the second, and in every second eight layers the other way round. Each whole layer begins at another
    pair. So keys at equal distances do not meet in few strata.
    """
    pairs, layers = max(1, -(-count // (4 * STRATUM))) * 2, STRATUM // 4
    layer = np.arange(layers, dtype=np.int64)[:, None]  # [layers, 1]
    whole = layer < count // (8 * pairs)
    shift = np.where(whole, (layer**2 * LAYER_MIX & 0xFFFFFFFF) * pairs >> 32, 0)
    chunk = layer * pairs + (np.arange(pairs) - shift) % pairs  # [layers, pairs]
    swapped = (whole & (layer // 8 % 2 == 1))[..., None, None]
    candidates = chunk[..., None, None] * 8 + np.arange(8).reshape(4, 2) ^ swapped  # [layers, pairs, 4, 2]
    dealt = candidates.transpose(1, 3, 0, 2).reshape(2 * pairs, STRATUM)
    dealt = np.where(dealt < count, dealt, -1).astype(np.int32)
    dealt.flags.writeable = False
    return dealt


def stratified_order(scores: Array) -> Array:
    """Scores [..., C] in an order that takes from all strata in turn: the best of each, the second best, and so on.

    A stratum is sorted by KEY_LEVELS parts of its own range, ascending candidates inside one. Returns int32 [..., C].
    """
    dealt = strata(scores.shape[-1])  # [strata, STRATUM]
    there = dealt >= 0
    mine = np.where(there, np.asarray(scores)[..., dealt], np.float16(np.nan))  # [..., strata, STRATUM]
    level = np.where(there, score_buckets(mine, KEY_LEVELS), KEY_LEVELS)
    rank = np.argsort(level.astype(np.uint8), axis=-1, kind="stable")
    ranked = np.take_along_axis(np.broadcast_to(dealt, rank.shape), rank, axis=-1)
    # What is not there comes last in a stratum, so that all rows have it in the same places.
    present = there.sum(axis=-1) > np.arange(STRATUM)[:, None]  # [STRATUM, strata]
    return np.swapaxes(ranked, -1, -2)[..., present]


def order_keys(scores: Array) -> Array:
    """Descending order of scores [..., C] (Algorithm 1, line 19), near a full sort where pass 2 begins.

    Up to ORDER_WHOLE candidates are ordered by :func:`score_buckets`, ascending positions inside a bucket. More come in
    :func:`stratified_order`; of more than MIDDLE_FROM the first MIDDLE of this are put in such an order again. Of what
    results the first ORDER_HEAD are ordered by buckets of their own, stably. Of the same scores any IEEE machine finds
    the same order, bit for bit.

    Returns int32 [..., C] candidate indices.
    """
    scores = np.asarray(scores).astype(np.float16)
    count = scores.shape[-1]
    if count <= ORDER_WHOLE:
        return _bucket_order(scores)
    order = stratified_order(scores)
    for first, sort in ((MIDDLE, stratified_order), (ORDER_HEAD, _bucket_order)):
        if first == ORDER_HEAD or count > MIDDLE_FROM:
            head = order[..., :first]
            inner = sort(np.take_along_axis(scores, head, axis=-1))
            order[..., :first] = np.take_along_axis(head, inner, axis=-1)
    return order
