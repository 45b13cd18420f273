"""Reference against GPU: what the tail adds, given the GPU's output before it, its orders and its stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..problem import Problem
from ..spec import TAIL_TRIFLE, S2OConfig
from .diff_stages import GpuStages

__all__ = ["with_tail"]

Array = Any  # numpy.ndarray

# Kernels sum in float32, of which numbers end at 2^128 and squares below 2^-126 are lost.
LARGEST_SQUARES = 2.0**120  # of a row: 16 rows' are a sixteenth of what may overflow, and a sixteenth of that is spare
LARGEST_SUM = 2.0**126  # of weights and values: a quarter is spare
LEAST_SQUARES = 2.0**-100  # of 256 weights: what is lost of them is less than 2^-18 of their sum


def with_tail(
    stages: GpuStages, k_order: Sequence[Array], qkv: tuple[Array, Array, Array], problem: Problem, config: S2OConfig,
    reach: Array, unit: float,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Output [B, H, Lq, D] and lse [B, H, Lq] with the tail in float64, and what each may be off by.

    ``k_order`` has positions of ``stages``' orders, ``qkv`` float64, ``reach`` [B, H, Lq] bounds the error of a row's
    scores, ``unit`` is the relative size of half a unit in the last place of the output.
    """
    from ..reference import tail

    geometry, scale, softcap = problem.geometry(config), abs(problem.scale), problem.softcap
    group, block_m = problem.heads // problem.kv_heads, config.block_m
    before, (q, k, v) = stages.before_tail, qkv
    assert before is not None
    o, lse = before.o.astype(np.float64), before.lse.astype(np.float64)
    allowed_o, allowed_lse = np.zeros_like(o), np.zeros_like(lse)
    for n in range(geometry.segments):
        first, last = geometry.queries(n)
        if geometry.candidates(n) == 0:
            continue
        for b, h in np.ndindex(q.shape[:2]):
            kh, vh = k[b, h // group], v[b, h // group]
            moments = tail.key_moments(kh, vh, geometry.moment_group(n))
            for tile in range(-(-(last - first) // block_m)):
                keys = k_order[n][b, h][int(stages.visited[b, h, n, tile]) * config.block_n :]
                if len(keys) == 0:
                    continue
                queries = stages.q_order[b, h, n, tile * block_m : min((tile + 1) * block_m, last - first)]
                at = (b, h, first + queries)
                rows, start = q[at], (lse[at], np.ones(len(at[2])), o[at])
                m, mass, acc = tail.add_tail(rows, start, keys, kh, vh, moments, scale, softcap)
                # A weight is off by what its score is, and exp2's error; the mass by a few times that.
                relative = 6 * (np.expm1(2 * reach[at]) + 2.0**-18)  # [M]
                samples = keys[tail.sample_places(len(keys))]
                t = rows @ kh[samples].T * scale
                spread = np.sqrt(tail.sample_variance(t))
                tilt_off = relative + 8 * np.divide(reach[at], spread, where=spread > 0, out=np.zeros_like(spread))
                # Covariances and queries are rounded to bfloat16, and a first-order value is at most that of tilt 1.
                slope = scale * np.abs(rows) @ np.abs(moments.covariance).T  # [M, D]
                value_off = slope * (2.0**-7 + np.minimum(tilt_off, 1)[:, None])
                found = tail.tail_weights(t, start[0], len(keys), softcap)
                # Kernels may add nothing where squares of weights are lost.
                relative = np.where((found.weight**2).sum(axis=1) < LEAST_SQUARES, 1, relative)
                regressed = moments.mean_value + found.tilt[:, None] * (rows * scale @ moments.covariance.T)
                values = tail.tail_values(found, vh[samples], regressed)
                value_off += _values_off(found, values, np.abs(vh[samples]), relative, value_off, regressed)
                of_both = (found.of_all + found.largest) / np.where(found.mass > 0, found.mass, 1)
                relative = relative + _alone_off(found, relative) * of_both
                # Of what is added [M]: nothing where add_tail gives its state back.
                share = np.zeros_like(mass) if mass is start[1] else found.mass / (1 + found.mass)
                o[at], lse[at] = acc / mass[:, None], m + np.log(mass)
                size = np.abs(o[at]) + np.abs(start[2]) + np.abs(moments.mean_value) + slope
                start_off = 0 if before.is_read else unit * np.abs(start[2]) / mass[:, None]
                tail_off = share[:, None] * (relative[:, None] * size + value_off)
                allowed_o[at] = unit * np.abs(o[at]) + start_off + tail_off
                allowed_lse[at] = share * relative
    return o, lse, allowed_o, allowed_lse


def _alone_off(found: Any, relative: Array) -> Array:
    """What `alone` = (64 x - 1) (2 - c) may be off by [M]: x by ``relative`` and c - 1 by four times that, as each
    factor is kept within [0, 1] and is off by nothing well beyond."""
    kept = lambda factor: np.clip(factor, 0, 1)  # noqa: E731
    x, c = found.largest / TAIL_TRIFLE, found.carrying
    c_off = 4 * relative * np.maximum(c - 1, 0) + 2.0**-18
    weighs = kept(x * (1 + relative) - 1) - kept(x * (1 - relative) - 1)
    carries = kept(2 - c + c_off) - kept(2 - c - c_off)
    return np.minimum(weighs + carries, 1)


def _may(found: Any, relative: Array) -> Array:
    """How far the samples' values may move rows' values [M] at most, or at least where ``relative`` is negative: by so
    much weights are larger."""
    from ..reference import tail

    light = np.where(np.arange(found.weight.shape[1]) % 2, 1, 1 + 2 * relative[:, None])
    lighter = found.weight[:, ::2].sum(axis=1) < found.weight[:, 1::2].sum(axis=1)
    light = np.where(lighter[:, None], light, light[:, ::-1])
    moved = found._replace(
        mass=found.mass * np.maximum(1 + relative, 0), weight=found.weight * light,
        carrying=found.carrying * np.maximum(1 - 4 * relative, 0),
        alone=np.clip(found.alone - np.sign(relative) * _alone_off(found, np.abs(relative)), 0, 1),
    )  # fmt: skip
    return tail.at_most(moved)[1]


def _values_off(
    found: Any, values: Any, size: Array, relative: Array, regressed_off: Array, regressed: Array
) -> Array:
    """What values between samples' and a regression's may be off by [M, D], beside the regression: ``size``
    [samples, D] of the samples' values, ``relative`` [M] error of their weights."""

    from ..reference import tail

    def mean_off(weight: Array, of: Array) -> Array:  # weights and values are rounded to 16 bits, to bfloat16 at worst
        mean = np.nan_to_num(weight @ of) / np.maximum(weight.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
        return (relative[:, None] + 2.0**-7) * mean

    norm = lambda x: np.linalg.norm(np.nan_to_num(x), axis=1)  # noqa: E731
    even, odd = values.halves
    elements = even.shape[1]
    halves_off = [
        norm(mean_off(found.weight[:, i::2], size[i::2, :elements]) + regressed_off[:, :elements]) for i in (0, 1)
    ]
    both = norm(even + odd)
    # Of believed = most * 4 even . odd / |even + odd|^2 by its derivatives, and most by how the weight is spread, which
    # rows are weighed by, too. `relative` is what the mass is off by, six times a weight: (64 mass - 1) moves by 2 of
    # it at most, the other two factors of most by 4 / 6 each.
    off = 4 * (halves_off[0] * norm(odd) + halves_off[1] * norm(even)) + 2 * both * sum(halves_off)
    ends = [_may(found, sign * relative) for sign in (-1, 1)]
    apart_off = np.sqrt(np.maximum(ends[1] ** 2 - ends[0] ** 2, 0))
    off = tail.of_rows(values.may, off) + tail.of_rows(apart_off, 4 * norm(even) * norm(odd) + both**2)
    of_all = tail.of_rows(values.may, both**2)
    agreement_off = np.minimum(np.divide(off, of_all, where=of_all > 0, out=np.ones_like(off)), 1)
    # Nothing is believed where a sum of squares overflows, and kernels' may before or after the reference's.
    agreement_off = np.where(tail.of_rows(values.may, both**2 > LARGEST_SQUARES) > 0, 1, agreement_off)
    apart = np.abs(np.nan_to_num(values.sampled - regressed))  # [M, D]
    believed_off = values.most * agreement_off + np.where(values.most > 0, 4 * relative, 0)
    believed_off = believed_off + _alone_off(found, relative)
    # The regression stays where a kernel's sum of weights and values overflows.
    believed_off = np.where(found.largest * size.max() > LARGEST_SUM, 1, believed_off)
    return believed_off[:, None] * apart + values.believed[:, None] * mean_off(found.weight, size)
