"""Inputs of NSA, and what its results must be. Importing this needs no GPU and no CuPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gpu_rounding import beyond_rounding

from s2o_cupy.nsa import NSAConfig
from s2o_cupy.reference.nsa import forward as nsa
from s2o_cupy.tools.diffing import UNIT, _score_error

__all__ = [
    "SMALL", "Arrays", "branch_problems", "choice_problems", "draw", "exact_branches", "whole_problems", "wide",
]  # fmt: skip

SMALL = NSAConfig(top=5, window=130)  # blocks must be chosen, and fall out of the window, in short sequences


class Arrays(NamedTuple):
    """Host arrays of one dtype; gates are float32."""

    q: Any
    k: Any
    v: Any
    k_cmp: Any
    v_cmp: Any
    gates: Any


def draw(
    rng: np.random.Generator, dtype: Any, seqlen_q: int, seqlen_k: int | None = None, *, batch: int = 1, heads: int = 4,
    kv_heads: int = 2, head_dim: int = 64, config: NSAConfig = SMALL,
) -> Arrays:  # fmt: skip
    """Random normal q, k and v, some compressed keys of which weigh much more than others, and gates of every head."""
    seqlen_k = seqlen_k or seqlen_q
    q = rng.standard_normal((batch, heads, seqlen_q, head_dim))
    k, v = rng.standard_normal((2, batch, kv_heads, seqlen_k, head_dim))
    k += rng.standard_normal((batch, kv_heads, -(-seqlen_k // 32), head_dim)).repeat(32, axis=2)[:, :, :seqlen_k]
    compressed = (nsa.compress(x, config.length, config.stride) for x in (k, v))
    gates = rng.random((batch, heads, seqlen_q, 3)).astype(np.float32)
    q, k, v, k_cmp, v_cmp = (x.astype(dtype) for x in (q, k, v, *compressed))
    return Arrays(q, k, v, k_cmp, v_cmp, gates)


def wide(*arrays: Any) -> list[np.ndarray]:
    return [x.astype(np.float64) for x in arrays]


def exact_branches(
    x: Arrays, blocks: np.ndarray, config: NSAConfig, near: Arrays
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Output and lse of the compressed, the selected and the window branch in float64, given ``blocks``; the window's
    keys and values are those of ``near``."""
    q, k, v, k_cmp, v_cmp, k_win, v_win = wide(*x[:5], near.k, near.v)
    runs = {"length": config.length, "stride": config.stride}
    return (
        nsa.compressed(q, k_cmp, v_cmp, k.shape[2], **runs),
        nsa.selected(q, k, v, blocks, block=config.block),
        nsa.window(q, k_win, v_win, config.window),
    )


def whole_problems(
    o: Any, x: Arrays, blocks: np.ndarray, config: NSAConfig, near: Arrays | None = None
) -> list[str]:
    """What of ``nsa_attention``'s output is further than rounding from the branches times their gates. ``near``: whose
    keys and values the window has, if not x."""
    near = near or x
    exact = [of for of, _ in exact_branches(x, blocks, config, near)]
    absolute, near_absolute = (
        of._replace(v=np.abs(wide(of.v)[0]), v_cmp=np.abs(wide(of.v_cmp)[0])) for of in (x, near)
    )
    weights = [of for of, _ in exact_branches(absolute, blocks, config, near_absolute)]  # sum of p |v| / l
    group, head_dim = x.q.shape[1] // x.k.shape[1], x.q.shape[-1]
    unit, allowed = UNIT[str(x.q.dtype)], 0.0
    for i, (keys, weight) in enumerate(zip((x.k_cmp, x.k, near.k), weights, strict=True)):
        reach = 0.0
        if keys.shape[2]:
            q, k = wide(x.q, keys)
            reach = _score_error(q, k, group, head_dim, head_dim**-0.5, 0.0)[..., None]
        # A weight, a part and the sum are rounded once each, and so is the branch.
        allowed = allowed + x.gates[..., i, None] * weight * (4 * unit + np.expm1(2 * reach) + 2.0**-18)
    allowed += 2.0**-22 if unit == UNIT["float16"] else 1e-30
    error = np.abs(o.astype(np.float64) - nsa.gate(x.gates.astype(np.float64), *exact))
    return [] if (error <= allowed).all() else [f"off by {np.nanmax(error / allowed)} of what rounding allows"]


def choice_problems(blocks: np.ndarray, x: Arrays, config: NSAConfig) -> list[str]:
    """What of the GPU's ``blocks`` is no choice that rounding allows."""
    q, k_cmp = wide(x.q, x.k_cmp)
    seqlen_k, runs = x.k.shape[2], {"length": config.length, "stride": config.stride}
    _, lse = nsa.compressed(q, k_cmp, k_cmp, seqlen_k, **runs)
    weight = nsa.importance(q, k_cmp, lse, seqlen_k, block=config.block, **runs)
    rules = {"block": config.block, "top": config.top, "first": config.first, "local": config.local}
    expected = nsa.top_blocks(weight, seqlen_k, **rules)
    if blocks.shape != expected.shape or blocks.dtype != np.int32:
        return [f"{blocks.dtype} {blocks.shape}"]
    found = []
    if ((blocks < 0) != (expected < 0)).any():
        found.append("not as many")
    reach = 0.0
    if k_cmp.shape[2]:
        reach = _score_error(q, k_cmp, q.shape[1] // k_cmp.shape[1], q.shape[-1], q.shape[-1] ** -0.5, 0.0).max()
    for b, h, i in np.argwhere((blocks != expected).any(axis=-1)):
        row = blocks[b, h, i]
        mine, theirs = set(row.tolist()), set(expected[b, h, i].tolist())
        if (np.diff(row[row >= 0]) <= 0).any():
            found.append(f"{(b, h, i)} does not ascend: {row}")
            continue
        w = weight[b, h, i]
        least, most = w[sorted(mine - theirs)].min(), w[sorted(theirs - mine)].max()
        if not least >= most * (1 - np.expm1(4 * reach)) - 1e-6:
            found.append(f"{(b, h, i)} has {least} and lacks {most}")
    return found[:3]


def branch_problems(o: Any, lse: Any, exact: Any, weight: Any, x: Arrays, launches: int) -> list[str]:
    return beyond_rounding(o, lse, exact, weight, x.q, x.k, launches=launches)
