"""What stands for queries and keys where ``rank="query"`` multiplies them in 8 bits, on Hopper: the definition.

An order asks less of products than a softmax does. So keys have two of every four elements, all are rounded to e4m3, and
queries that are alike share a product. Elsewhere each query is multiplied with all of each key, in 16 bits
(:func:`ordering.query_weights`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..spec import QUERY_GROUPS, QUERY_RUN
from .dense import quiet

__all__ = ["E4M3", "QueryGroups", "as_e4m3", "keep_two", "query_groups"]

Array = Any  # numpy.ndarray
E4M3 = ml_dtypes.float8_e4m3fn
LARGEST_E4M3 = 448.0


@quiet
def as_e4m3(x: Array) -> Array:
    """float32 rounded to the nearest e4m3, at most its largest; what is not finite is NaN. As float32."""
    rounded = np.clip(x, -LARGEST_E4M3, LARGEST_E4M3).astype(np.float32).astype(E4M3).astype(np.float32)
    return np.where(np.isfinite(x), rounded, np.float32(np.nan))


def keep_two(x: Array) -> Array:
    """Of every four elements of the last axis the two of the largest magnitude, of equal ones the first; others are 0.
    What is not finite is larger than all else."""
    size = np.where(np.isfinite(x), np.abs(x), np.inf)
    size = np.pad(size, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 4)]).reshape(*x.shape[:-1], -1, 4)
    order = np.argsort(-size, axis=-1, kind="stable")
    kept = np.zeros(size.shape, bool)
    np.put_along_axis(kept, order[..., :2], True, axis=-1)
    return np.where(kept.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], x, x.dtype.type(0))


@dataclass
class QueryGroups:
    """Groups of like queries of a segment: QUERY_GROUPS of each run of QUERY_RUN."""

    means: Array  # [B, H, groups, D]; 0 of a group without a query
    norms: Array  # [B, H, groups], the mean of its queries'; infinite of a group without one
    magnitudes: Array  # [B, H, groups, D], the mean magnitude of its queries' elements
    clear: Array  # bool [B, H]: no query is, to rounding, as far from or as near to a centre as another


@quiet
def query_groups(rows: Array, norms: Array, rounding: float = 0.0) -> QueryGroups:
    """Of ``rows`` [B, H, R, D], a segment's queries, with ``norms`` [B, H, R].

    Of each QUERY_RUN neighbours the first is the first centre, each further one the query furthest from all centres
    before it, of equally far ones the first. A query belongs to the centre nearest to it, of equally near ones the first.
    So a query unlike its neighbours, which may look for something of its own, is a group of its own. What the others
    give a key is their geometric mean, by their mean and the mean of their norms. ``rounding``: of one step of a product.
    """
    batch, heads, count, head_dim = rows.shape
    runs = -(-count // QUERY_RUN)
    place = np.arange(runs * QUERY_RUN)
    there = (place < count).reshape(runs, QUERY_RUN)
    place = np.where(place < count, place, place // QUERY_RUN * QUERY_RUN)  # the first of a run stands in
    x = rows[:, :, place].reshape(batch, heads, runs, QUERY_RUN, head_dim)
    group, clear = _groups_of_runs(x, rounding)
    # One that is not finite makes every score NaN, whichever its group.
    group = np.where(np.isfinite(x).all(axis=(3, 4))[..., None], group, 0)
    members = there[:, :, None] & (group[..., None] == np.arange(QUERY_GROUPS))  # [B, H, runs, RUN, GROUPS]
    size = members.sum(axis=3)  # [B, H, runs, GROUPS]

    def means(y: Array) -> Array:
        """Of [B, H, runs, RUN, any]: [B, H, groups, any]."""
        sums = [np.where(members[..., g, None], y, 0).sum(axis=3) for g in range(QUERY_GROUPS)]
        found = np.stack(sums, axis=3) / np.maximum(size, 1)[..., None]
        return found.reshape(batch, heads, runs * QUERY_GROUPS, -1)

    of_groups = means(norms[:, :, place].reshape(batch, heads, runs, QUERY_RUN, 1))[..., 0]
    of_groups = np.where(size.reshape(of_groups.shape) > 0, of_groups, np.inf)
    return QueryGroups(means(x), of_groups, means(np.abs(x)), clear.all(axis=2))


def _groups_of_runs(x: Array, rounding: float) -> tuple[Array, Array]:
    """Which group each query of runs [B, H, runs, RUN, D] is of, [B, H, runs, RUN], and whether that is clear."""
    products = x @ x.swapaxes(-1, -2)
    length = np.diagonal(products, axis1=-2, axis2=-1)  # [B, H, runs, RUN]
    distance = np.maximum(length[..., None] + length[..., None, :] - 2 * products, 0)
    off = 4 * length.max(axis=-1) * (x.shape[-1] + 8) * rounding
    clear = length.max(axis=-1) < np.finfo(np.float32).max / 8
    centre = np.zeros(x.shape[:3], np.int64)
    nearest, group = np.full(x.shape[:4], np.inf), np.zeros(x.shape[:4], np.int64)
    numbers = np.arange(QUERY_RUN)
    for g in range(QUERY_GROUPS):
        to_centre = np.take_along_axis(distance, centre[..., None, None], axis=3)[..., 0, :]
        to_centre = np.where(numbers == centre[..., None], 0, to_centre)
        close = (np.abs(to_centre - nearest) <= off[..., None]) & (nearest > 0) & (numbers != centre[..., None])
        clear &= ~close.any(axis=-1)
        nearer = to_centre < nearest
        nearest, group = np.where(nearer, to_centre, nearest), np.where(nearer, g, group)
        if g + 1 < QUERY_GROUPS:
            two = np.partition(nearest, -2, axis=-1)
            # A kernel compares the first 19 bits of a distance.
            clear &= two[..., -1] - two[..., -2] > off + two[..., -1] * 2.0**-17
        centre = nearest.argmax(axis=-1)
    return group, clear
