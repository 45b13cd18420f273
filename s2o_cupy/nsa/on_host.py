"""NSA on the CPU: the NumPy reference on [batch, heads, seqlen, head_dim] arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ArgumentValueError
from ..problem import Problem
from ..reference.nsa import backward, forward
from .config import NSAConfig

__all__ = ["attend", "attend_blocks", "attend_blocks_backward", "attend_window", "select"]


def attend(arrays: Mapping[str, np.ndarray], problem: Problem, config: NSAConfig) -> np.ndarray:
    """The sum of the branches. ``arrays``: those of `nsa_attention` by name; gates are [batch, heads, seqlen_q, 3]."""
    x = {name: _wide(array) for name, array in arrays.items()}
    q, k, v, k_cmp = (x[name] for name in ("q", "k", "v", "k_cmp"))
    o_cmp, lse = forward.compressed(q, k_cmp, x["v_cmp"], problem.seqlen_k, **_runs(problem, config))
    blocks = _choose(q, k_cmp, lse, problem, config)
    o_slc, _ = forward.selected(q, k, v, blocks, block=config.block, scale=problem.scale)
    o_win, _ = attend_window(q, x.get("k_win", k), x.get("v_win", v), config.window, 0, problem)
    return forward.gate(x["gates"], o_cmp, o_slc, o_win)


def select(q: np.ndarray, k_cmp: np.ndarray, problem: Problem, config: NSAConfig) -> np.ndarray:
    """int32 [batch, kv_heads, seqlen_q, top]."""
    q, k_cmp = _wide(q), _wide(k_cmp)
    _, lse = forward.compressed(q, k_cmp, k_cmp, problem.seqlen_k, **_runs(problem, config))
    return _choose(q, k_cmp, lse, problem, config)


def attend_blocks(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, blocks: np.ndarray, block: int, problem: Problem
) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse."""
    _check_exist(blocks, block, problem, "selected_attention")
    return forward.selected(_wide(q), _wide(k), _wide(v), blocks, block=block, scale=problem.scale)


def attend_blocks_backward(arrays: Mapping[str, np.ndarray], block: int, problem: Problem) -> tuple[np.ndarray, ...]:
    """Gradients of q, k and v. ``arrays``: those of `selected_attention_backward` by name."""
    _check_exist(arrays["blocks"], block, problem, "selected_attention_backward")
    wide = {name: _wide(x) for name, x in arrays.items()}
    if problem.dtype == "float64":  # found anew, as an lse in float32 would leave gradients no more than that
        _, wide["lse"] = attend_blocks(wide["q"], wide["k"], wide["v"], wide["blocks"], block, problem)
    return backward.selected_backward(**wide, block=block, scale=problem.scale)


def _check_exist(blocks: np.ndarray, block: int, problem: Problem, where: str) -> None:
    last = -(-problem.seqlen_k // block) - 1
    if blocks.size and blocks.max() > last:
        raise ArgumentValueError(f"blocks has {blocks.max()}; accepted: up to {last}, the last block", where)


def attend_window(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int, sinks: int, problem: Problem
) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse."""
    window = min(window, problem.seqlen_k)  # the same keys, and 64 bits hold it
    return forward.window(_wide(q), _wide(k), _wide(v), window, sinks=sinks, scale=problem.scale)


def _choose(q: np.ndarray, k_cmp: np.ndarray, lse: np.ndarray, problem: Problem, config: NSAConfig) -> np.ndarray:
    weight = forward.importance(q, k_cmp, lse, problem.seqlen_k, block=config.block, **_runs(problem, config))
    return forward.top_blocks(
        weight, problem.seqlen_k, block=config.block, top=config.top, first=config.first, local=config.local
    )


def _runs(problem: Problem, config: NSAConfig) -> dict[str, Any]:
    return {"length": config.length, "stride": config.stride, "scale": problem.scale}


def _wide(x: np.ndarray) -> np.ndarray:
    """16-bit elements are computed in float32, and the result is rounded once."""
    return x.astype(np.float32) if x.dtype.name in ("float16", "bfloat16") else x
