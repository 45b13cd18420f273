"""Dense attention in float32 to compare with, and errors; NumPy arrays and PyTorch tensors alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

Array = Any

# Scores held at once: 1 GiB of them on a GPU, 64 MiB on the CPU.
GPU_SCORES, CPU_SCORES = 1 << 28, 1 << 24


def dense(q: Array, k: Array, v: Array, first: int = 0, last: int | None = None) -> Array:
    """Causal attention of the query rows from ``first`` to ``last``, float32 [batch, heads, rows, head_dim].

    q [batch, heads, seqlen_q, head_dim], k and v [batch, kv_heads, seqlen_k, head_dim]; aligned bottom-right.
    """
    xp = array_namespace(q)
    exactly_float32(xp)
    last = q.shape[2] if last is None else last
    offset, group, scale = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    scores = CPU_SCORES if str(device(q)) == "cpu" else GPU_SCORES
    step = max(1, scores // (last + offset))
    out = xp.empty((*q.shape[:2], last - first, q.shape[3]), dtype=xp.float32, device=device(q))
    for b, h in np.ndindex(*q.shape[:2]):
        kh, vh = (xp.astype(x[b, h // group, : last + offset], xp.float32) for x in (k, v))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            s = (xp.astype(q[b, h, begin:end], xp.float32) * scale) @ kh[: end + offset].T
            rows = xp.arange(end - begin, device=device(q))
            diagonal = s[:, begin + offset :]  # the rest is visible to every row
            diagonal[rows > rows[:, None]] = -np.inf
            s -= xp.max(s, axis=-1, keepdims=True)
            s = xp.exp(s)
            out[b, h, begin - first : end - first] = (s @ vh[: end + offset]) / xp.sum(s, axis=-1, keepdims=True)
    return out


def exactly_float32(xp: Any) -> None:
    """No TF32 in products of float32."""
    if xp.__name__.endswith("torch"):
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False


def sums(o: Array, exact: Array) -> np.ndarray:
    """For each head the sums of |o - exact|^2, |exact|^2, |o - exact| and |exact|: float64 [4, batch, heads].

    Those of several parts of an output add up.
    """
    xp = array_namespace(exact)
    found = np.empty((4, *exact.shape[:2]))
    for b, h in np.ndindex(*exact.shape[:2]):
        e = xp.astype(exact[b, h], xp.float64)
        d = xp.astype(o[b, h], xp.float64) - e
        found[:, b, h] = [float(xp.sum(x)) for x in (d * d, e * e, xp.abs(d), xp.abs(e))]
    return found


def rel_l2(found: np.ndarray) -> np.ndarray:
    """||o - exact|| / ||exact|| of `sums`, whichever axes are left beside the first."""
    return np.sqrt(found[0] / found[1])


def rel_l1(found: np.ndarray) -> np.ndarray:
    """sum |o - exact| / sum |exact|."""
    return found[2] / found[3]


def pooled(found: np.ndarray) -> dict[str, float]:
    """The errors of the whole output."""
    total = found.sum((1, 2))
    return {"rel_l2": float(rel_l2(total)), "rel_l1": float(rel_l1(total))}
