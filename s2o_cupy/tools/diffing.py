"""Reference against GPU, stage by stage.

Each stage is checked *given the GPU's own decisions of the stage before it*, so that a fault shows where it is
and nowhere else. Integers must be equal, or lie between what the reference decides at either end of the rounding;
floats must lie within a bound that follows from their format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..api.attention import s2o_attention
from ..api.habits import answers_habits
from ..arrays.lazy_cupy import import_cupy
from ..errors import ArgumentValueError, arguments_of
from ..extras import remedy
from ..problem import Problem, validate
from ..spec import LOG2E, STOP_LAG, Geometry, S2OConfig, S2OError
from . import diff_query_weights as by_query
from .diff_fp8 import fp8_cache, wrong_values
from .diff_queries import query_order_parts
from .diff_report import DiffReport, Row, Rows
from .diff_stages import BeforeTail, GpuStages, capture, listed
from .diff_tail import with_tail
from .diff_units import wrong_means, wrong_outliers

__all__ = ["DiffReport", "GpuStages", "Row", "capture", "compare", "diff"]

Array = Any  # numpy.ndarray
Progress = Callable[[int, int], None]

# Relative size of half a unit in the last place.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
UNIT32 = 2.0**-24
TANH_UNIT = 2.0**-11  # of tanh.approx


@answers_habits
@arguments_of("diff")
def diff(
    q: Any,
    k: Any,
    v: Any,
    config: S2OConfig | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    fp8: bool = False,
    progress: Progress | None = None,
) -> DiffReport:
    """Run the kernels and the NumPy reference on the same input and compare every stage.

    Parameters
    ----------
    q, k, v : arrays, (batch, heads, seqlen_q, head_dim) and (batch, kv_heads, seqlen_k, head_dim), or without batch
        float16 or bfloat16, on the host (NumPy, ml_dtypes.bfloat16) or on the GPU (CuPy).
    config, scale, softcap, is_causal : as for `s2o_attention`; of an error the taus that the GPU finds are taken
    fp8 : k and v are rounded to 8 bits (e4m3) with a scale for each head, and the GPU reads them from pages of a cache
    progress : called with (done, total)

    Returns
    -------
    DiffReport
        ``.ok``, ``.table()``, ``.to_dict()``, ``.rows``.

    Raises
    ------
    S2OError
        There is no usable GPU.
    TypeError, ValueError
        As for `s2o_attention`.
    """
    try:
        cupy = import_cupy()
    except S2OError as error:
        raise S2OError(f"diff needs a GPU and CuPy; remedy: {remedy('CuPy')}") from error
    if not cupy.is_available():
        raise S2OError("diff needs an NVIDIA GPU, and CuPy finds none")
    config = config or S2OConfig()
    host = [cupy.asnumpy(x) if isinstance(x, cupy.ndarray) else np.asarray(x) for x in (q, k, v)]
    problem = validate(
        [x.shape for x in host], [x.dtype.name for x in host], config=config, backend="cupy", is_causal=is_causal,
        scale=scale, softcap=softcap,
    )  # fmt: skip
    if problem.empty or problem.seqlen_k == 0:
        raise ArgumentValueError(
            f"q is {host[0].shape} and k {host[1].shape}; accepted: at least one query and one key", "diff"
        )
    hq, hk, hv = (x if x.ndim == 4 else x[None] for x in host)
    cache = None
    if fp8:
        cache = fp8_cache(hk, hv)
        hk, hv = cache.values
    arrays = cupy.asarray(hq), cupy.asarray(hk), cupy.asarray(hv)
    if config.error is not None:
        config = config.with_found_taus(_found_taus(arrays, problem, config))
    stages = capture(*arrays, problem, config, cache)
    return compare(stages, hq, hk, hv, problem, config, progress=progress)


def _found_taus(arrays: tuple[Any, Any, Any], problem: Problem, config: S2OConfig) -> list[float]:
    """What the GPU's search by an error gives each head; tests/test_asked_error.py compares that with the reference."""
    if problem.batch > 1:
        raise ArgumentValueError(f"config.error with batch {problem.batch}; accepted: batch 1, or a tau", "diff")
    options: dict[str, Any] = {"scale": problem.scale, "softcap": problem.softcap, "is_causal": problem.is_causal}
    _, stats = s2o_attention(*arrays, config=replace(config, dense_up_to=0), return_stats=True, **options)
    taus: list[float] = stats.tau_per_head.get()[0].tolist()
    return taus


def compare(
    stages: GpuStages,
    q: Array,
    k: Array,
    v: Array,
    problem: Problem,
    config: S2OConfig,
    *,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare captured stages with the reference in float64. NumPy only.

    q [B, H, Lq, D] and k, v [B, Hkv, Lk, D] in the dtype that the GPU saw.
    """
    from ..reference import s2o
    from ..reference.ordering import OF_KEYS
    from ..stats import S2OStats

    unit, kv = UNIT[problem.dtype], (k, v)
    geometry, segments = problem.geometry(config), problem.geometry(config).segments
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale, softcap = problem.scale, problem.softcap
    if scale < 0:
        q, scale = -q, -scale
    group, head_dim = problem.heads // problem.kv_heads, problem.head_dim
    rows = Rows()
    # Half the spacing of the format's subnormal numbers, and a little.
    smallest = 2.0**-24 if problem.dtype == "float16" else 1e-30
    total = 6
    done = iter(range(1, total + 1))
    step = (lambda: progress(next(done), total)) if progress else (lambda: None)

    # What is read from pages of 8 bits: equal.
    if stages.read is not None:
        part = np.stack([wrong_values(x, y) for x, y in zip(stages.read, kv, strict=True)])
        rows.integers("fp8 pages", part, int((part > 0).sum()), "exact")

    # Pooled queries: a float32 mean, its sum rounded `run` times at worst, and rounded once to the input's dtype.
    if not config.pools_queries:
        pooled, counts, magnitude = np.zeros((1, 1, 1, 1, 1)), np.zeros((1, 1), int), np.zeros((1, 1, 1, 1, 1))
    else:
        pooled, counts = s2o.pooled_queries(q, geometry, config)
        magnitude = s2o.pooled_queries(np.abs(q), geometry, config)[0]
    present = counts > 0  # [N, R]
    allowed = magnitude * (unit + UNIT32 * (config.run + 2)) + smallest
    ordered = any(geometry.candidates(n) for n in range(len(stages.k_order)))
    is_by_query = config.rank == "query"
    if ordered and config.pools_queries:
        rows.floats("pooled_queries", stages.pooled[:, :, present], pooled[:, :, present], allowed[:, :, present])
    step()

    # Query order: descending in exact scores, up to the rounding of two neighbouring scores and the bits that are cut.
    # Where a segment is one q tile there is none.
    if ordered and geometry.orders_queries(config.block_m):
        rows.integers("query order", *query_order_parts(stages.q_order, q, k, geometry, config.block_m))
    step()

    # The means that stand for each unit, and what queries' weights are shares of.
    if is_by_query and ordered and geometry.units and stages.query is not None:
        by_query.compare_groups(rows, stages.query, k, geometry, config.groups, unit, smallest)
        with np.errstate(divide="ignore", invalid="ignore"):
            own = stages.m1.astype(np.float64) + np.log(stages.l1.astype(np.float64))
            own = np.where(stages.l1 == 0, -np.inf, own)
        by_query.compare_norms(rows, stages.query, q, own, problem, geometry, scale)

    # The two keys that stand for each unit.
    by_weight = config.rank == "weight"
    if by_weight and ordered and geometry.units:
        rows.floats("unit means", *wrong_means(stages.unit_keys, k, geometry, unit, smallest))
        part = wrong_outliers(stages.unit_keys, k, geometry)
        rows.integers("outliers", part, int((part > 1).sum()))

    # Scores given the GPU's pooled queries and units' keys: products are exact, head_dim sums round, and once more to
    # float16 in the end. Weights are relative to a norm, which is off by no more than the scores are, and by what
    # float32 and its exp2 and log2 make of a sum of W numbers.
    to_log2 = scale * LOG2E
    worst_part: list[Array] = []
    not_compared = 0
    for n in range(len(stages.scores)):
        if is_by_query:
            if (query := stages.query) is None:  # no segment has a whole unit to score
                worst_part.append(np.zeros(stages.scores[n].shape))
                continue
            want, bound = by_query.scores_and_bounds(query, q, n, problem, geometry, scale)
            near = np.isposinf(s2o.near_first(np.zeros(want.shape), n, geometry, config))  # whatever their estimate
            want, bound = np.where(near, np.inf, want), np.where(near, 0, bound)
            worst_part.append(_parts(stages.scores[n], want, bound))
            not_compared += int(np.isinf(bound).sum())
            continue
        mine, rounding = stages.pooled.astype(np.float64), (head_dim + 2) * UNIT32
        if by_weight:
            keys = np.zeros((problem.batch, problem.kv_heads, 0, 2, head_dim))  # of a call without a whole unit
            keys = keys if stages.unit_keys is None else stages.unit_keys.astype(np.float64)
            want = s2o.unit_weights(mine, counts, keys, n, geometry, scale).astype(np.float64)
            largest = _largest_products(mine, counts, keys, n, geometry) * to_log2  # [B, H, 1]
            if (largest > np.finfo(np.float32).max).any():  # the kernels' float32 overflows, and so must this
                mine, keys = mine.astype(np.float32), keys.astype(np.float32)
                want = s2o.unit_weights(mine, counts, keys, n, geometry, scale).astype(np.float64)
            bound = 2 * largest * (rounding + 4 * UNIT32) + 2.0**-17 + geometry.ranked(n) * UNIT32
        else:
            score = OF_KEYS[config.rank]
            want = score(mine, counts, k, n, geometry).astype(np.float64) * to_log2
            bound = score(np.abs(mine), counts, np.abs(k), n, geometry) * rounding + 1e-30
            bound = bound * to_log2 * (1 + 2 * UNIT32)
        bound = bound + np.abs(want) * (UNIT["float16"] + UNIT32) + 2.0**-25
        worst_part.append(_parts(stages.scores[n], want, bound))
    flat = _flatten(worst_part)
    note = "[segment, batch, head, unit]" if flat.size else ""
    note += f"; {not_compared} not compared: sums beyond float16" if not_compared else ""
    rows.integers("key scores", flat, int((flat > 1).sum()), note)

    # Key order given the GPU's scores: equal.
    parts = []
    for n in range(len(stages.k_order)):
        want = s2o.ordered_units(stages.scores[n], n, geometry, config)
        if want.shape[-1] < listed(n, geometry):
            want = np.concatenate([want, np.full((*want.shape[:-1], 1), geometry.units)], axis=-1)
        parts.append(np.where(stages.k_order[n] != want, np.inf, 0.0))
    flat = _flatten(parts)
    rows.integers("key order", flat, int((flat > 0).sum()), "exact")
    least = [s2o.least_keys(x, geometry, config) for x in stages.scores]
    if config.has_least_keys:
        other = np.array([x != y for x, y in zip(stages.least_keys, least, strict=True)])
        rows.integers("least keys", np.where(other, np.inf, 0.0), int(other.sum()), "exact")
    step()

    # Pass 1. A score is off by head_dim roundings of its products' sum, and by tanh; exp2 and the sum add a few more.
    state1 = s2o.pass1(q, k, v, geometry, scale, softcap)
    o1, lse1 = s2o.finish(state1)
    reach = _score_error(q, k, group, head_dim, scale, softcap)  # [B, H, Lq] absolute error of a row's scores
    with np.errstate(divide="ignore", invalid="ignore"):
        m1, l1 = stages.m1.astype(np.float64), stages.l1.astype(np.float64)
        gpu_lse1 = np.where(l1 == 0, -np.inf, m1 + np.log(l1))
    rows.floats("pass 1 state", gpu_lse1, lse1, _lse_allowed(lse1, reach), "m + ln(l)")
    weight1 = s2o.finish(s2o.pass1(q, k, np.abs(v), geometry, scale, softcap))[0]  # sum p |v| / l
    # One rounding of p and one of the output.
    error1 = 2 * unit + np.expm1(2 * reach[..., None]) + 2.0**-18
    packed = _packed_error(v, group, problem.dtype)  # [B, H, 1, D]
    packed1 = packed / np.maximum(state1.l, 1)[..., None]
    rows.floats("pass 1 output", stages.o1, o1, weight1 * error1 + packed1 + smallest)
    step()

    # Stops given the orders: where tau is a little larger the reference stops no later, a little smaller no sooner.
    slack = min(0.5, 2.0**-10 + 4 * float(np.nanmax(np.where(np.isfinite(reach), reach, 0), initial=0)))
    keys_in_order = [
        s2o.unit_positions(units[..., : geometry.ranked(n)], n, geometry) for n, units in enumerate(stages.k_order)
    ]
    for n in range(len(keys_in_order), segments):  # all of them, in any order
        units = np.broadcast_to(s2o.ranked_units(n, geometry), (problem.batch, problem.heads, geometry.ranked(n)))
        keys_in_order.append(s2o.unit_positions(units, n, geometry))
    none = np.zeros((problem.batch, problem.heads), np.int32)
    least += [none] * (segments - len(least))
    arguments = (state1, stages.q_order, s2o.KeyOrder(keys_in_order, least), geometry)
    lag = STOP_LAG[stages.path]
    no_values = (q, k, np.zeros_like(v[..., :1]), _without_values(state1), *arguments[1:])
    earliest, latest = (
        s2o.pass2(*no_values, config, scale, softcap, stop_lag=lag, tau_factor=factor)[1]
        for factor in (1 + slack, 1 - slack)
    )
    outside = (stages.visited < earliest) | (stages.visited > latest)
    note = f"{int((earliest != latest).sum())} within rounding of tau"
    rows.integers("stop", np.where(outside, np.inf, 0.0), int(outside.sum()), note)
    step()

    # Output given orders and stops: as pass 1, and what it or parts of the last queries hand over rounds once more.
    further = (*arguments[1:], replace(config, tail="none"), scale, softcap)
    state2 = s2o.pass2(q, k, v, state1, *further, visited=stages.visited)[0]
    o, lse = s2o.finish(state2)
    absolute1 = s2o.pass1(q, k, np.abs(v), geometry, scale, softcap)
    weight = s2o.finish(s2o.pass2(q, k, np.abs(v), absolute1, *further, visited=stages.visited)[0])[0]
    before = stages.before_tail or BeforeTail(stages.o, stages.lse)
    packed = packed / np.maximum(state2.l, 1)[..., None]
    rows.floats("output", before.o, o, weight * (error1 + unit) + packed + smallest)
    rows.floats("lse", before.lse, lse, _lse_allowed(lse, reach))
    if stages.before_tail is not None:
        o, lse, allowed_o, allowed_lse = with_tail(stages, keys_in_order, (q, k, v), problem, config, reach, unit)
        rows.floats("tail output", stages.o, o, allowed_o + smallest)
        rows.floats("tail lse", stages.lse, lse, allowed_lse + _lse_allowed(lse, 0 * reach))
    step()
    ran = stages.path, stages.path_reason
    density = S2OStats(stages.visited, problem, config, *ran).density
    return DiffReport(tuple(rows.rows), density, problem, config, *ran)


def _parts(scores: Array, want: Array, bound: Array) -> Array:
    """By what share of ``bound`` float16 scores are off; infinite where one alone is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = want.astype(np.float16)
        part = np.abs(scores.astype(np.float64) - want) / bound
    same = (scores == rounded) | (np.isnan(scores) & np.isnan(want)) | np.broadcast_to(np.isinf(bound), want.shape)
    return np.where(same, 0, np.where(np.isnan(part), np.inf, part))


def _largest_products(pooled: Array, counts: Array, keys: Array, n: int, geometry: Geometry) -> Array:
    """Bound [B, H, 1] on the sum of magnitudes in a dot product of a pooled query of segment ``n`` and a unit's key."""
    from ..reference import s2o

    finite = lambda x: np.abs(np.where(np.isfinite(x), x, 0))  # noqa: E731
    queries = finite(pooled[:, :, n, counts[n] > 0]).max(axis=2)  # [B, H, D]
    largest = finite(keys[:, :, s2o.ranked_units(n, geometry)]).max(axis=(2, 3), initial=0)  # [B, Hkv, D]
    largest = np.repeat(largest, pooled.shape[1] // keys.shape[1], axis=1)  # [B, H, D]
    return (queries * largest).sum(axis=-1, keepdims=True)


def _flatten(parts: list[Array]) -> Array:
    """Ragged [N][B, H, W] as one array [N, B, H, W], 0 where a segment has no such unit."""
    width = max((x.shape[2] for x in parts), default=0)
    if width == 0:
        return np.zeros(0)
    return np.stack([np.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2]))) for x in parts])


def _without_values(state: Any) -> Any:
    """The state with one zero column for acc: enough to decide stops."""
    return type(state)(state.m, state.l, np.zeros_like(state.acc[..., :1]))


def _score_error(q: Array, k: Array, group: int, head_dim: int, scale: float, softcap: float) -> Array:
    """Bound [B, H, Lq] on the error of a row's scores over all keys, in nats: float32 rounding of scale * q . k, which
    tanh, nowhere steeper than 1, does not enlarge, and tanh's own."""
    with np.errstate(invalid="ignore", over="ignore"):
        longest = np.linalg.norm(np.where(np.isfinite(k), k, 0), axis=-1).max(axis=-1)  # [B, Hkv]
        mine = np.linalg.norm(np.where(np.isfinite(q), q, 0), axis=-1)  # [B, H, Lq]
        largest = abs(scale) * mine * np.repeat(longest, group, axis=1)[..., None]  # of a row's scores
        return largest * (head_dim + 4) * UNIT32 + np.minimum(largest, softcap) * (TANH_UNIT + 4 * UNIT32)


def _packed_error(v: Array, group: int, dtype: str) -> Array:
    """Bound [B, H, 1, D] on the error of a row's sum of p v, in units of its largest p, as a small p is packed: float16
    has steps of 2^-24 there."""
    least = 2.0**-25 if dtype == "float16" else 0.0
    return np.repeat(np.abs(np.where(np.isfinite(v), v, 0)).sum(axis=2, keepdims=True) * least, group, axis=1)


def _lse_allowed(lse: Array, reach: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return 2 * reach + 2.0**-18 + np.abs(np.where(np.isfinite(lse), lse, 0)) * 4 * UNIT32
