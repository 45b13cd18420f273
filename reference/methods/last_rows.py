"""Weights that the last queries give all keys, and their sums by key and by distance.

What FlexPrefill and vertical-slash choose by. A distance is a query's position less a key's.
"""

from __future__ import annotations

import numpy as np

from ..dense import Array, visible_keys
from .blocks import softmax

__all__ = ["best", "column_sums", "distance_sums", "last_row_weights"]


def last_row_weights(q: Array, k: Array, rows: int, scale: float) -> Array:
    """Causal softmax of the last ``rows`` queries, or of as many as there are: [B, H, rows, Lk]."""
    batch, heads, seqlen_q, _ = q.shape
    group, seqlen_k = heads // k.shape[1], k.shape[2]
    last = range(max(0, seqlen_q - rows), seqlen_q)
    visible = visible_keys(last, range(seqlen_k), seqlen_k - seqlen_q)  # [rows, Lk]
    weights = np.empty((batch, heads, len(last), seqlen_k), q.dtype)
    for b, h in np.ndindex(batch, heads):
        weights[b, h] = softmax(q[b, h, last.start :] @ k[b, h // group].T * scale, visible)
    return weights


def column_sums(weights: Array) -> Array:
    """Of each key's weights [B, H, rows, Lk]: [B, H, Lk]."""
    return weights.sum(axis=2)


def distance_sums(weights: Array) -> Array:
    """Of the weights [B, H, rows, Lk] at each distance, 0 first: [B, H, Lk]."""
    rows, seqlen_k = weights.shape[2:]
    sums = np.zeros((*weights.shape[:2], seqlen_k), weights.dtype)
    for r in range(rows):
        seen = max(0, seqlen_k - (rows - 1 - r))  # keys up to the row's own
        sums[..., :seen] += weights[:, :, r, :seen][..., ::-1]
    return sums


def best(x: Array, count: Array | int, forced: int) -> Array:
    """The ``count`` ([...] or one for all) largest of x [..., C], the first ``forced`` among them: bool [..., C].

    Of equals the lower index. All, where one is NaN.
    """
    order = np.argsort(np.where(np.arange(x.shape[-1]) < forced, -np.inf, -x), axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable")
    return (rank < np.maximum(np.asarray(count)[..., None], forced)) | np.isnan(x).any(axis=-1, keepdims=True)
