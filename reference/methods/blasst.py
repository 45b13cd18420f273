"""BLASST's rule, block by block as its kernel goes: `s2o_cupy.methods.blasst` says what it is."""

from __future__ import annotations

import numpy as np

from ...methods.blasst import BLASSTConfig
from ..dense import Array

__all__ = ["attended"]


def attended(q: Array, k: Array, config: BLASSTConfig, is_causal: bool, scale: float) -> Array:
    """Which keys queries attend to, bool [B, H, Lq, Lk], of q [B, H, Lq, D] and k [B, Hkv, Lk, D]."""
    (batch, heads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    offset, key = seqlen_k - seqlen_q, np.arange(seqlen_k)
    segment = max(config.block, config.block_m)
    mask = np.zeros((batch, heads, seqlen_q, seqlen_k), bool)
    for b, h in np.ndindex(batch, heads):
        for first in range(0, seqlen_q, config.block_m):
            query = np.arange(first, min(first + config.block_m, seqlen_q))
            scores = scale * q[b, h, query] @ k[b, h * k.shape[1] // heads].T
            dense_from = (first // segment * segment + offset) // config.block * config.block if is_causal else seqlen_k
            running = np.full(len(query), -np.inf)
            for begin in range(0, dense_from, config.block):
                block = slice(begin, begin + config.block)
                largest = scores[:, block].max(1)
                running = np.maximum(running, largest)
                with np.errstate(divide="ignore"):
                    skipped = largest - running < np.log(config.threshold_of(seqlen_k))
                mask[b, h, query, block] = not skipped.all()
            own = (key >= dense_from) & (key <= query[:, None] + offset)
            mask[b, h, query] |= own & is_causal
    return mask
