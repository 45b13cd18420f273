"""Stages that stand in for a GPU's, of which `diff` is tried: the reference in low precision."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from s2o_cupy import S2OConfig
from s2o_cupy.problem import Problem
from s2o_cupy.reference import key_order, ordering, s2o
from s2o_cupy.selection.orders.query import E4M3, INT8, WIDE
from s2o_cupy.spec import KEY_EXPONENT, LOG2E, MOST_EXPONENT, QUERY_EXPONENT
from s2o_cupy.tools.diff_query_weights import (
    QueryStages,
    as_e4m3,
    as_int8,
    half_exponent,
    keep_two,
    longest_of_keys,
    step_of_int8,
)
from s2o_cupy.tools.diffing import GpuStages

CONFIGS = {
    "query": S2OConfig(segment=24, tau=0.05, block_m=16, block_n=32, unit=4, tail="none"),
    "paper": S2OConfig(segment=64, tau=0.05, block_m=16, block_n=32, rank="mean"),
    "weight": S2OConfig(segment=24, tau=0.05, block_m=16, block_n=32, unit=8, pooled_queries=5),
    "max": S2OConfig(segment=48, tau=0.02, block_m=32, block_n=32, rank="max", pooled_queries=5, window=20),
    "dense": S2OConfig(segment=64, tau=0, block_m=64, block_n=64),
}


def stand_in(q, k, v, problem: Problem, config: S2OConfig, products: str = WIDE, exact: bool = False) -> GpuStages:
    """What a right GPU would capture: float32 stages, P and the hand-over rounded to the dtype. ``products``: what
    queries and groups of keys are multiplied as. ``exact``: all in float64, and nothing is rounded but to 8 bits."""
    dtype, half = (np.dtype(np.float64),) * 2 if exact else (q.dtype, np.dtype(np.float16))
    q, k, v = (x.astype(np.float64 if exact else np.float32) for x in (q, k, v))
    scale = problem.scale
    if scale < 0:
        q, scale = -q, -scale
    geometry = problem.geometry(config)
    pooled, counts = s2o.pooled_queries(q, geometry, config)
    q_order = s2o.query_order(q, k, geometry, config.block_m)
    state1 = s2o.pass1(q, k, v, geometry, scale, problem.softcap)
    own = s2o.finish(state1)[1]
    of_query = query_stages(q, k, own, geometry, config, scale, products) if config.rank == "query" else None
    of_units = s2o.unit_keys(k, geometry) if config.rank == "weight" else None
    scores, k_order, positions = [], [], []
    for n in range(geometry.segments):
        if of_query is not None and products != WIDE:
            scores.append(scores_of_bytes(q, of_query, n, geometry, scale).astype(half))
        elif of_query is not None:
            shares = np.exp2(of_query.shares.astype(q.dtype))
            found = ordering.query_weights(q, of_query.norms, of_query.keys, shares, n, geometry, scale)
            scores.append(found.astype(half))
        elif of_units is None:
            found = s2o.key_scores(pooled, counts, k, n, geometry)
            scores.append(found * scale * LOG2E if exact else key_order.log_weights(found, scale))
        else:
            scores.append(s2o.unit_weights(pooled, counts, of_units, n, geometry, scale).astype(half))
        if of_query is not None:
            scores[n] = s2o.near_first(scores[n], n, geometry, config)
        units = s2o.ordered_units(scores[n], n, geometry, config)
        positions.append(s2o.unit_positions(units, n, geometry))
        short = int(geometry.candidates(n) % geometry.unit > 0)
        k_order.append(np.pad(units, ((0, 0), (0, 0), (0, short)), constant_values=geometry.units))
    o1 = s2o.finish(state1)[0].astype(dtype)
    resumed = s2o.State(state1.m, state1.l, o1.astype(q.dtype) * state1.l[..., None])
    least = [s2o.least_keys(x, geometry, config) for x in scores]
    order = s2o.KeyOrder(positions, least)
    state2, visited = s2o.pass2(q, k, v, resumed, q_order, order, geometry, config, scale, problem.softcap)
    o, lse = s2o.finish(state2)
    return GpuStages(
        pooled, q_order, of_units, scores, k_order, least, o1, state1.m, state1.l, visited, o.astype(dtype), lse,
        query=of_query,
    )  # fmt: skip


def query_stages(q, k, own, geometry, config: S2OConfig, scale: float, products: str) -> QueryStages:
    """Of rank="query"."""
    found = ordering.unit_clusters(k, geometry, config.groups)
    with np.errstate(divide="ignore"):
        shares = np.log2(found.shares).astype(np.float16 if q.dtype == np.float32 else q.dtype)
    centre = found.means[:, :, : geometry.leading_units].mean(axis=2, keepdims=True)
    blocks = ordering.block_keys(found.means)
    less = None if products == WIDE else centre[:, :, 0]
    sampled = ordering.sampled_keys(k, blocks, geometry)
    norms = ordering.query_norms(q, found.means, blocks, sampled, own, geometry, scale, less)
    stages = QueryStages(
        found.keys, shares, found.means, np.concatenate([centre, blocks], axis=2), *sampled, norms
    )  # fmt: skip
    if products == INT8:
        return with_integers(stages)
    return with_floats(stages, q, geometry, scale) if products == E4M3 else stages


def with_integers(stages: QueryStages) -> QueryStages:
    """Rows of which a unit's largest element is 127, or 90 of more than 128; of a group that is not finite NaN."""
    off_centre = (stages.keys - stages.blocks[:, :, :1, None]).astype(np.float32)
    off_centre[np.isneginf(stages.shares)] = 0
    is_finite = np.isfinite(off_centre).all(axis=-1)
    off_centre[~is_finite] = 0
    steps = step_of_int8(np.abs(off_centre).max(axis=(3, 4)), off_centre.shape[-1])
    rows = as_int8(off_centre, steps[..., None, None])
    rows[~is_finite] = np.nan
    return replace(stages, rows=rows, steps=steps)


def with_floats(stages: QueryStages, q, geometry, scale: float) -> QueryStages:
    """Rows and scales such that the first keys are shorter than 2^(KEY_EXPONENT + 1), queries than 2^(QUERY_EXPONENT +
    1)."""
    off_centre = stages.keys - stages.blocks[:, :, :1, None]
    longest = longest_of_keys(off_centre[:, :, : geometry.leading_units], stages.blocks[:, :, :1, None])
    exponents = KEY_EXPONENT - half_exponent(longest)  # [B, Hkv]
    rows = as_e4m3(keep_two(off_centre * np.exp2(exponents)[:, :, None, None, None]))
    rows[np.isneginf(stages.shares)] = 0
    of_heads = exponents.repeat(q.shape[1] // exponents.shape[1], axis=1)
    scales = np.zeros((*q.shape[:2], geometry.segments, 2), np.float32)
    for n in range(geometry.segments):
        squared = np.square(q[:, :, slice(*geometry.queries(n))]).sum(axis=-1).max(axis=-1) * (scale * LOG2E) ** 2
        exponent = np.minimum(QUERY_EXPONENT - half_exponent(squared), MOST_EXPONENT - of_heads)  # [B, H]
        scales[:, :, n, 0], scales[:, :, n, 1] = scale * LOG2E * np.exp2(exponent), np.exp2(exponent + of_heads)
    return replace(stages, rows=rows, exponents=exponents, scales=scales)


def integer_weights(exact, q, norms, keys, shares, n, geometry, scale):
    """What ``exact``, `ordering.query_weights`, makes of 8-bit integers: of keys less the centre, and norms less its
    score."""
    q, (first, end) = q.astype(np.float64), geometry.queries(n)
    rows = q[:, :, first:end]
    step = step_of_int8(np.abs(rows).max(axis=(2, 3), keepdims=True), q.shape[-1]).astype(np.float64)
    centre = keys[:, :, : geometry.leading_units].mean(axis=(2, 3), keepdims=True)
    of_centre = centre[:, :, 0, 0].repeat(q.shape[1] // keys.shape[1], axis=1)[..., None]  # [B, H, D, 1]
    norms = norms - (q @ of_centre)[..., 0] * (scale * LOG2E)
    q[:, :, first:end] = as_int8(rows.astype(np.float32), step.astype(np.float32)) * step
    off_centre = (keys - centre).astype(np.float32)
    steps = step_of_int8(np.abs(off_centre).max(axis=(3, 4), keepdims=True), q.shape[-1])
    return exact(q, norms, as_int8(off_centre, steps) * steps.astype(np.float64), shares, n, geometry, scale)


def scores_of_bytes(q, stages: QueryStages, n: int, geometry, scale: float) -> np.ndarray:
    """What products of 8 bits make of segment ``n``'s units."""
    (first, end), units = geometry.queries(n), ordering.ranked_units(n, geometry)
    group = q.shape[1] // stages.rows.shape[1]
    rows, shares = (x[:, :, units].repeat(group, axis=1).astype(np.float32) for x in (stages.rows, stages.shares))
    queries = q[:, :, first:end]  # [B, H, queries, D]
    if stages.steps is not None:
        step = step_of_int8(np.abs(queries.astype(np.float32)).max(axis=(2, 3)), q.shape[-1])  # [B, H]
        rounded = as_int8(queries.astype(np.float32), step[..., None, None])
        of_keys = stages.steps[:, :, units].repeat(group, axis=1) * (scale * LOG2E)  # [B, H, units]
        products = np.einsum("bhqd,bhucd->bhucq", rounded, rows) * (of_keys * step[..., None])[..., None, None]
    else:
        rounded = as_e4m3(queries * stages.scales[:, :, n, :1, None])
        products = np.einsum("bhqd,bhucd->bhucq", rounded, rows) / stages.scales[:, :, n, 1][..., None, None, None]
    weights = products + shares[..., None] - stages.norms[:, :, None, None, first:end]
    return weights.max(axis=(3, 4))


def make(
    config: S2OConfig, dtype=ml_dtypes.bfloat16, scale: float = 0.3, is_causal: bool = True, softcap: float = 0.0,
    products: str = WIDE,
):  # fmt: skip
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 4, 200, 24)).astype(dtype)
    k, v = (rng.standard_normal((2, 2, 270, 24)).astype(dtype) for _ in range(2))
    problem = Problem(2, 4, 2, 200, 270, 24, q.dtype.name, is_causal, scale, softcap)
    return stand_in(q, k, v, problem, config, products), (q, k, v, problem, config)


def larger(x: np.ndarray, at: tuple[int, ...]) -> None:
    x[at] = x[at].astype(np.float32) * 1.1 + 0.1
