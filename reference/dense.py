"""Dense attention in float64, and the few rules that every reference shares.

Query i stands at key position i + seqlen_k - seqlen_q (bottom-right alignment) and, if causal, sees
the keys at or before it. A hidden key has no influence at all, even when it holds NaN or Inf; a
visible NaN reaches the output.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array", "capped", "check_shapes", "compute_dtype", "dense_attention", "quiet", "visible_keys", "weighted_sum",
]  # fmt: skip

Array = npt.NDArray[Any]

quiet = np.errstate(all="ignore")  # NaN and Inf are legal input, and small weights vanish

ROWS = 256  # query rows of a chunk: 256 x 8,192 float64 scores are 16 MiB


def compute_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype that the reference computes in: float64 for float64, else float32.

    Accepts float16, bfloat16 (ml_dtypes), float32 and float64; anything else is a TypeError.
    """
    given = np.dtype(dtype)
    if given.name == "float64":
        return given
    if given.name in ("float16", "bfloat16", "float32"):
        return np.dtype(np.float32)
    raise TypeError(f"compute_dtype: dtype is {given.name}; accepted: float16, bfloat16, float32, float64")


def check_shapes(q: Array, k: Array, v: Array) -> None:
    """ValueError unless q is [B, H, Lq, D] and k, v are [B, Hkv, Lk, D] with H a multiple of Hkv."""
    shapes = f"q, k, v have shapes {q.shape}, {k.shape}, {v.shape}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise ValueError(f"attention: {shapes}; accepted: [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, D]")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"attention: {shapes}; accepted: query heads a multiple of KV heads")


def visible_keys(rows: range, keys: range, offset: int) -> Array:
    """Causal mask: may query i of ``rows`` see key j of ``keys``? bool [len(rows), len(keys)]."""
    return np.arange(keys.start, keys.stop) <= np.arange(rows.start, rows.stop)[:, None] + offset


def capped(scores: Array, softcap: float) -> Array:
    """softcap * tanh(scores / softcap), or the scores as they are where softcap is 0."""
    return softcap * np.tanh(scores / softcap) if softcap else scores


def weighted_sum(p: Array, v: Array, visible: Array | None = None) -> Array:
    """``p @ v`` in which a hidden element adds nothing, although 0 * NaN is NaN.

    p is [M, K] and 0 where hidden, v is [K, D], visible is bool [M, K] (None: everything). The
    non-finite elements of v, if any, are left out of the product and then added to the rows that see
    them. Rows that see none get the same bits as if v had been finite.
    """
    if visible is None:
        return p @ v
    finite = np.isfinite(v)  # [K, D]
    if finite.all():
        return p @ v
    out: Array = p @ np.where(finite, v, 0)  # [M, D]
    for j in np.flatnonzero(~finite.all(axis=1)):
        rows = visible[:, j]
        out[rows] += p[rows, j, None] * np.where(finite[j], 0, v[j])
    return out


@np.errstate(invalid="ignore", divide="ignore")
def dense_attention(
    q: Array, k: Array, v: Array, *, scale: float | None = None, softcap: float = 0.0, is_causal: bool = True
) -> tuple[Array, Array]:
    """softmax(scale * q @ k^T) @ v, exactly, in float64, a chunk of query rows at a time.

    Parameters
    ----------
    q : [B, H, Lq, D], any float dtype
    k, v : [B, Hkv, Lk, D]; query head h reads KV head h // (H // Hkv)
    scale : float, default 1 / sqrt(D)
    softcap : float, default 0 (off): softmax is then that of :func:`capped` scores
    is_causal : bool, default True; aligned bottom-right

    Returns
    -------
    o : float64 [B, H, Lq, D]
    lse : float64 [B, H, Lq], natural log of the softmax denominator

    A row that sees no key has o = 0 and lse = -inf.
    """
    check_shapes(q, k, v)
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    offset = seqlen_k - seqlen_q
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)

    o = np.zeros(q.shape)  # [B, H, Lq, D]
    lse = np.full(q.shape[:3], -np.inf)  # [B, H, Lq]
    for b, h in np.ndindex(batch, heads):
        kv = h // (heads // kv_heads)
        kh, vh = k[b, kv].astype(np.float64), v[b, kv].astype(np.float64)  # [Lk, D]
        for begin in range(0, seqlen_q, ROWS):
            rows = range(begin, min(begin + ROWS, seqlen_q))
            keys = range(max(0, rows.stop + offset) if is_causal else seqlen_k)
            visible = visible_keys(rows, keys, offset) if is_causal else None
            at, to = slice(rows.start, rows.stop), slice(keys.stop)

            s = capped(q[b, h, at].astype(np.float64) @ kh[to].T * scale, softcap)  # [rows, keys]
            if visible is not None:
                s = np.where(visible, s, -np.inf)
            m = s.max(axis=-1, initial=-np.inf)  # [rows]
            p = np.exp(s - np.where(np.isneginf(m), 0, m)[:, None])  # [rows, keys]
            total = p.sum(axis=-1)  # [rows]
            empty = total == 0
            o[b, h, at] = np.where(empty[:, None], 0, weighted_sum(p, vh[to], visible) / total[:, None])
            lse[b, h, at] = np.where(empty, -np.inf, m + np.log(total))
    return o, lse
