"""Dense attention in float32 to compare with, and errors; NumPy arrays and PyTorch tensors alike."""

from __future__ import annotations

from typing import Any

import _common  # noqa: F401  (finds s2o_cupy)
import numpy as np
from array_api_compat import array_namespace, device

from s2o_cupy.arrays.frameworks import to_host

Array = Any

# Scores held at once: 1 GiB of them on a GPU, 64 MiB on the CPU.
GPU_SCORES, CPU_SCORES = 1 << 28, 1 << 24


def dense(q: Array, k: Array, v: Array, first: int = 0, last: int | None = None, scale: float | None = None) -> Array:
    """Causal attention of the query rows from ``first`` to ``last``, float32 [batch, heads, rows, head_dim].

    q [batch, heads, seqlen_q, head_dim], k and v [batch, kv_heads, seqlen_k, head_dim]; aligned bottom-right.
    ``scale`` of the scores: head_dim^-0.5 where none is given.
    """
    xp = array_namespace(q)
    exactly_float32(xp)
    last = q.shape[2] if last is None else last
    offset, group = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    scale = q.shape[3] ** -0.5 if scale is None else scale
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


def by_row(o: Array, exact: Array) -> np.ndarray:
    """||o - exact|| / ||exact|| of every row of every head: float64 [batch, heads, rows]; 0 / 0 is 0."""
    xp = array_namespace(exact)
    found = np.empty((2, *exact.shape[:3]))
    for b, h in np.ndindex(*exact.shape[:2]):
        e = xp.astype(exact[b, h], xp.float64)
        for into, x in zip(found, (xp.astype(o[b, h], xp.float64) - e, e), strict=True):
            into[b, h] = to_host(xp.sum(x * x, axis=-1)) ** 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(found[0] == 0, 0, found[0] / found[1])


def rows(errors: np.ndarray) -> dict[str, float]:
    """How the errors of `by_row` are spread: median, 99 and 99.9 %, and the share above 0.5."""
    median, p99, p999 = np.quantile(errors, (0.5, 0.99, 0.999))
    return {
        "row_median": float(median), "row_p99": float(p99), "row_p999": float(p999),
        "rows_above_half": float(np.mean(errors > 0.5)),
    }  # fmt: skip
