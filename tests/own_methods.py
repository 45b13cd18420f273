"""Methods of one's own, as a user would write them; benchmarks and commands are given this file, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from s2o_cupy import Schedule

BLOCK = 128


@dataclass
class LargestKeys:
    """The share of all blocks of 128 keys that have the largest sum of squares, for all queries of a KV head."""

    share: float = 0.5

    def __call__(self, q: Any, k: Any, *, is_causal: bool, scale: float) -> Schedule:
        from array_api_compat import array_namespace, device

        xp, (batch, kv_heads, seqlen_k, head_dim) = array_namespace(q), k.shape
        blocks = -(-seqlen_k // BLOCK)
        missing = xp.zeros((batch, kv_heads, blocks * BLOCK - seqlen_k, head_dim), dtype=k.dtype, device=device(k))
        squares = xp.astype(xp.concat((k, missing), axis=2), xp.float32) ** 2  # CuPy sorts no bfloat16
        sums = xp.sum(xp.reshape(squares, (batch, kv_heads, blocks, -1)), axis=-1)
        least = xp.sort(sums, axis=-1)[..., -max(1, int(self.share * blocks)), None]
        tiles = -(-q.shape[2] // BLOCK)
        mask = xp.broadcast_to((sums >= least)[:, :, None], (batch, kv_heads, tiles, blocks))
        rules = {"segment": BLOCK, "window": (seqlen_k - q.shape[2]) % BLOCK} if is_causal else {}
        return Schedule.from_block_mask(
            mask, BLOCK, seqlen_q=q.shape[2], seqlen_k=seqlen_k, is_causal=is_causal, **rules
        )


def everything(q: Any, k: Any, *, is_causal: bool, scale: float) -> Schedule:
    """Dense attention."""
    return LargestKeys(1.0)(q, k, is_causal=is_causal, scale=scale)


def some(q: Any, k: Any, *, is_causal: bool, scale: float, share: float) -> Schedule:
    return LargestKeys(share)(q, k, is_causal=is_causal, scale=scale)


NOT_A_METHOD = 3
