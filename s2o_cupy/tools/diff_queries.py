"""Reference against GPU: the order of each segment's queries."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..spec import Geometry

__all__ = ["query_order_parts"]

Array = Any  # numpy.ndarray
UNIT32 = 2.0**-24


def query_order_parts(order: Array, q: Array, k: Array, geometry: Geometry, block_m: int) -> tuple[Array, int]:
    """How far neighbours of q_order stand in the wrong order, as a share of what rounding of their scores allows,
    [B, H, N, S - 1]; infinite where a segment's entries are no permutation. And the places unlike the reference's."""
    from ..reference import s2o

    batch, heads, segments, segment = order.shape
    group = heads // k.shape[1]
    part = np.zeros((batch, heads, segments, max(1, segment - 1)))
    different = 0
    reference = s2o.query_order(q, k, geometry, block_m)
    for n in range(segments):
        begin, end = geometry.queries(n)
        count, guide_keys = end - begin, geometry.guide_keys(n)
        mine = order[:, :, n, :count]
        if geometry.candidates(n) == 0:
            continue
        different += int((mine != reference[:, :, n, :count]).sum())
        permutation = (np.sort(mine, axis=-1) == np.arange(count)).all(axis=-1)  # [B, H]
        part[:, :, n][~permutation] = np.inf
        if not geometry.orders_queries(block_m):
            part[:, :, n][(mine != reference[:, :, n, :count]).any(axis=-1)] = np.inf
            continue
        guide = np.repeat(k[:, :, :guide_keys].mean(axis=2), group, axis=1)  # [B, H, D]
        size = np.repeat(np.abs(k[:, :, :guide_keys]).mean(axis=2), group, axis=1)
        for b, h in np.ndindex(batch, heads):
            if not permutation[b, h]:
                continue
            with np.errstate(invalid="ignore", over="ignore"):
                scores = (q[b, h, begin:end] @ guide[b, h])[mine[b, h]]  # [count], in the GPU's order
                bound = (np.abs(q[b, h, begin:end]) @ size[b, h])[mine[b, h]]
                bound = bound * (q.shape[-1] + guide_keys + 2) * UNIT32
                rise = scores[1:] - scores[:-1]
                cut = 2.0**-10 * np.maximum(np.abs(scores[1:]), np.abs(scores[:-1]))  # reference.s2o.leading_bits
                share = rise / (bound[1:] + bound[:-1] + cut + 1e-30)
            part[b, h, n, : count - 1] = np.where(rise > 0, share, 0)  # NaN comes first, and any order of NaN is right
    return part, different
