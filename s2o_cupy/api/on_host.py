"""The CPU backend: the NumPy reference behind the same call as the GPU's ``pipeline.run``."""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from ..reference import s2o
from ..spec import S2OConfig

__all__ = ["run"]


def run(
    q: np.ndarray,  # [batch, heads, seqlen_q, head_dim], any strides
    k: np.ndarray,  # [batch, kv_heads, seqlen_k, head_dim]
    v: np.ndarray,  # [batch, kv_heads, seqlen_k, head_dim]
    out: np.ndarray,  # [batch, heads, seqlen_q, head_dim], written
    lse: np.ndarray | None,  # [batch, heads, seqlen_q] float32, written
    problem: Problem,
    config: S2OConfig,
    *,
    keep_visited: bool = True,
) -> np.ndarray | None:  # visited, int32 [batch, heads, segments, tiles]
    """float16 and bfloat16 are computed in float32 and rounded once, in the output."""
    q, k, v = (_blas_ready(x) for x in (q, k, v))
    result = s2o.s2o(q, k, v, config, scale=problem.scale, softcap=problem.softcap, is_causal=problem.is_causal)
    out[...] = result.o
    if lse is not None:
        lse[...] = result.lse
    return result.visited if keep_visited else None


def _blas_ready(x: np.ndarray) -> np.ndarray:
    """In the dtype computed in, C order and aligned: strides then change neither speed nor rounding."""
    if x.dtype.name in ("float16", "bfloat16"):
        return x.astype(np.float32, order="C")
    return np.require(x, x.dtype.newbyteorder("="), ["C", "A"])
