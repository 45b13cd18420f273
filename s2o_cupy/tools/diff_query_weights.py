"""Reference against GPU: what ``rank="query"`` scores, from groups of keys to weights.

Every stage is given the GPU's own numbers of the stage before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..problem import Problem
from ..selection.orders.query import heads_in_turns
from ..spec import (
    BLOCK_UNITS,
    CENTRE_PART,
    KEY_EXPONENT,
    LN2,
    LOG2E,
    MOST_EXCESS,
    MOST_EXPONENT,
    QUERY_EXPONENT,
    Geometry,
    S2OConfig,
)

__all__ = ["QueryStages", "capture", "compare_groups", "compare_norms", "longest_of_keys", "scores_and_bounds"]

Array = Any  # numpy.ndarray
UNIT32 = 2.0**-24
UNIT16 = 2.0**-11  # of float16
LARGEST_E4M3 = 448.0
E4M3 = ml_dtypes.float8_e4m3fn


@dataclass
class QueryStages:
    """What the GPU found. Floats are float32 unless said."""

    keys: Array  # [B, Hkv, U, C, D] means of groups; of the first `grouped` KV heads
    shares: Array  # [B, Hkv, U, C] float16, log2 of their part of the unit
    means: Array  # [B, Hkv, U, D] of units
    blocks: Array  # [B, Hkv, 1 + blocks, D]: the centre, means of blocks
    sampled_keys: Array  # [B, Hkv, S, D]
    deviations: Array  # [B, Hkv, S, D], half of these less their block's mean
    norms: Array  # [B, H, Lq]
    rows: Any = None  # [B, Hkv, U, C, D] in 8 bits, where products are of these, else None; NaN where no integer can be
    exponents: Any = None  # int32 [B, Hkv]: powers of two that e4m3 is multiplied by
    scales: Any = None  # [B, H, N, 2]: of queries, of products, of e4m3
    steps: Any = None  # [B, Hkv, U]: of integers, what one of a unit's elements stands for
    grouped: int = 0  # KV heads of all sequences whose groups have been found


def capture(stages: QueryStages | None, stage: str, host: Any, names: Any, dtype: Any, problem: Problem,
            config: S2OConfig) -> QueryStages:  # fmt: skip
    """Adds what the stage has left in the workspace. ``host(name)`` copies an array."""
    geometry, clusters = problem.geometry(config), config.groups
    batch, kv_heads, head_dim, units = problem.batch, problem.kv_heads, problem.head_dim, geometry.units
    stages = stages or QueryStages(None, None, None, None, None, None, None)
    as_floats = lambda name: host(name).view(dtype).astype(np.float32)  # noqa: E731
    if stage == "unit_keys" and "cluster_keys" not in names:  # each key is a group
        stages.means = as_floats("unit_means").reshape(batch, kv_heads, units, -1)[..., :head_dim]
    elif stage == "unit_keys":
        if stages.grouped == 0:
            stages.keys = np.empty((batch, kv_heads, units, clusters, head_dim), np.float32)
            stages.shares = np.empty(stages.keys.shape[:4], np.float16)
        keys, shares = as_floats("cluster_keys")[..., :head_dim], host("cluster_shares")
        turns = [range(batch * kv_heads)]
        if "unit_rows" in names:
            turns = heads_in_turns(batch, kv_heads, host("cluster_keys")[0].nbytes)
        (heads,) = (x for x in turns if x.start == stages.grouped)
        for into, x in ((stages.keys, keys), (stages.shares, shares)):
            into.reshape(batch * kv_heads, *into.shape[2:])[heads.start : heads.stop] = x[: len(heads)]
        stages.grouped = heads.stop
        stages.means = as_floats("unit_means").reshape(batch, kv_heads, units, -1)[..., :head_dim]
    elif stage == "unit_rows":
        blocks = as_floats("block_keys").reshape(batch, kv_heads, 1 + units // BLOCK_UNITS, -1)
        stages.blocks = blocks[..., :head_dim]
        stages.sampled_keys, stages.deviations = (
            x.reshape(batch, kv_heads, *x.shape[1:])[..., :head_dim]
            for x in map(as_floats, ("sampled_keys", "deviations"))
        )
        if "unit_scales" in names:
            stages.rows = _integers_in_order(host("unit_rows"), host("row_shares"), units, clusters)
            stages.steps = host("unit_scales")[:, :units].reshape(batch, kv_heads, units)
        elif "unit_rows" in names:
            stages.rows = _floats_in_order(host("unit_rows"), units, clusters)
            stages.exponents = host("key_exponents").reshape(batch, kv_heads)
        if stages.rows is not None:
            stages.rows = stages.rows.reshape(batch, kv_heads, units, clusters, -1)[..., :head_dim]
    elif stage == "query_norms":
        stages.norms = host("norms").reshape(batch, problem.heads, problem.seqlen_q)
        if "query_scales" in names:
            stages.scales = host("query_scales").reshape(batch, problem.heads, geometry.segments, 2)
    return stages


def _integers_in_order(tiles: Array, shares: Array, units: int, clusters: int) -> Array:
    """Tiles of integers [kv_heads, tiles, bytes] by unit and group, as float32 [kv_heads, units, clusters, D], NaN
    where the share [kv_heads, tiles, 64] is (raw_kernels/selection/unit_tile.cuh)."""
    kv_heads, count, width = tiles.shape[0], tiles.shape[1], tiles.shape[2] // 64
    unit, cluster = np.arange(units)[:, None], np.arange(clusters)[None]
    tile, of_tile = np.divmod(unit, 64 // clusters)
    eighth, of_eighth = of_tile // 8 * clusters + cluster, of_tile % 8  # a thread has each row of_eighth of an eighth
    # Of 16 rows and 32 columns 16 bytes of each thread: four columns of two rows eight apart, then four more of both.
    bytes_of = tiles.view(np.int8).reshape(kv_heads, count, 4, width // 32, 8, 4, 2, 2, 4)
    rows = bytes_of.transpose(0, 1, 2, 7, 4, 3, 5, 6, 8).reshape(kv_heads, count, 64, width)
    found = rows[:, tile, eighth * 8 + of_eighth].astype(np.float32)
    found[np.isnan(shares[:, tile, of_eighth * 8 + eighth])] = np.nan
    return found


def _floats_in_order(tiles: Array, units: int, clusters: int) -> Array:
    """Tiles of keys in 8 bits [kv_heads, tiles, bytes] by unit, group and element, as float32 [kv_heads, units,
    clusters, D], 0 where an element is left out (raw_kernels/selection/unit_tile.cuh)."""
    kv_heads, count, width = tiles.shape[0], tiles.shape[1], tiles.shape[2] // 40
    parts = width // 64
    unit, cluster = np.arange(units)[:, None], np.arange(clusters)[None]
    of_warp = 16 // clusters
    tile = unit // 128 * 2 * clusters + unit % 32 // of_warp
    row = unit % 128 // 32 * 16 + cluster % 2 * 8 + unit % of_warp * (clusters // 2) + cluster // 2
    # Of a thread 16 bytes of each part of 64 columns, and a word with the choices of eight times four columns.
    kept = tiles[..., : 32 * width].reshape(kv_heads, count, 4, parts, 8, 4, 2, 2, 4)  # half of 32, row / 8, byte
    kept = kept.transpose(0, 1, 2, 7, 4, 3, 6, 5, 8).reshape(kv_heads, count, 64, width // 4, 2)
    choices = np.ascontiguousarray(tiles[..., 32 * width :]).view("<u4").reshape(kv_heads, count, 4, 8, 2, 2, parts)
    choices = choices.transpose(0, 1, 2, 5, 3, 6, 4).reshape(kv_heads, count, 64, 2 * parts)  # [.., row, half]
    choices = (choices[..., None] >> (4 * np.arange(8, dtype=np.uint32))).reshape(kv_heads, count, 64, width // 4) & 15
    places = np.stack([choices & 3, choices >> 2], axis=-1).astype(np.int64)
    found = np.zeros((kv_heads, count, 64, width // 4, 4), np.float32)
    np.put_along_axis(found, places, np.ascontiguousarray(kept).view(E4M3).astype(np.float32), axis=-1)
    return found.reshape(kv_heads, count, 64, width)[:, tile, row][..., np.argsort(spread(width))]


def spread(width: int) -> Array:
    """Which element of a row of ``width``, 64 or 128, stands in each column of the products of floats (Spread of
    unit_tile.cuh): four columns are of elements from all over the row."""
    lane, half = np.arange(width // 8), width // 4  # pairs of neighbours of half a row
    shifted = (lane + len(lane) // 2) % len(lane)
    pairs = np.stack([lane, half - 1 - lane, half + shifted, 2 * half - 1 - shifted], axis=-1)
    return np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1)


def keep_two(x: Array) -> Array:
    """Of every four elements of a row [..., D], D up to 128, as `spread` has them, the two of the largest magnitude, of
    equal ones the first; others are 0. What is not finite is larger than all else."""
    head_dim = x.shape[-1]
    columns = spread(64 if head_dim <= 64 else 128)
    size = np.where(np.isfinite(x), np.abs(x), np.inf)
    size = np.pad(size, [(0, 0)] * (x.ndim - 1) + [(0, len(columns) - head_dim)])
    size = size[..., columns].reshape(*x.shape[:-1], -1, 4)
    order = np.argsort(-size, axis=-1, kind="stable")
    kept = np.zeros(size.shape, bool)
    np.put_along_axis(kept, order[..., :2], True, axis=-1)
    kept = kept.reshape(*x.shape[:-1], -1)[..., np.argsort(columns)]
    return np.where(kept[..., :head_dim], x, x.dtype.type(0))


def as_e4m3(x: Array) -> Array:
    """float32 rounded to the nearest e4m3, at most its largest; what is not finite is NaN. As float32."""
    with np.errstate(invalid="ignore"):
        rounded = np.clip(x, -LARGEST_E4M3, LARGEST_E4M3).astype(np.float32).astype(E4M3).astype(np.float32)
    return np.where(np.isfinite(x), rounded, np.float32(np.nan))


def as_int8(x: Array, step: Array) -> Array:
    """float32 in steps that broadcast with them, rounded to the nearest integer; as float32."""
    with np.errstate(invalid="ignore"):
        return np.rint(x.astype(np.float64) * (np.float32(1) / step).astype(np.float64)).astype(np.float32)


def step_of_int8(largest: Array, head_dim: int) -> Array:
    """What a step of 8-bit integers is of which the ``largest`` magnitudes are these, as unit_tile.cuh has it."""
    most = np.float32(90 if head_dim > 128 else 127)
    return np.maximum(largest.astype(np.float32) * (np.float32(1) / most), np.float32(1e-30))


def half_exponent(squared: Array) -> Array:
    """Half the exponent of squared lengths, rounded down, as unit_tile.cuh has it."""
    with np.errstate(divide="ignore"):
        exponent = np.where(squared > 0, np.floor(np.log2(np.maximum(squared, 1e-45))), -127)
    return np.clip(exponent, -60, 120).astype(np.int64) >> 1


def compare_groups(rows: Any, got: QueryStages, k: Array, geometry: Geometry, clusters: int, unit: float,
                   smallest: float) -> None:  # fmt: skip
    """Groups of keys, means of blocks and rows of 8 bits. ``rows`` collects; k [B, Hkv, Lk, D] in float64; ``unit`` of
    the dtype."""
    from ..reference import ordering

    absolute = np.abs(k)
    want, clear = ordering.unit_clusters(k, geometry, clusters), _are_clear(k, geometry, clusters)
    magnitude = ordering.unit_clusters(absolute, geometry, 1).means
    sums = UNIT32 * (geometry.unit + 2)
    rows.floats("unit means", got.means, want.means, magnitude * (unit + sums) + smallest)
    largest = absolute[:, :, : geometry.units * geometry.unit].reshape(*want.means.shape[:3], geometry.unit, k.shape[3])
    allowed = largest.max(axis=3)[:, :, :, None] * (unit + sums) * np.ones_like(want.keys) + smallest
    if got.keys is None:
        got.keys = want.keys.astype(np.float32)
        got.shares = np.log2(want.shares).astype(np.float16)
    rows.floats("groups", got.keys[clear], want.keys[clear], allowed[clear],
                f"{int((~clear).sum())} units have keys as far as others, to rounding")  # fmt: skip
    with np.errstate(divide="ignore"):
        shares = np.log2(want.shares)
    with np.errstate(invalid="ignore"):
        off = np.abs(got.shares.astype(np.float64) - shares)[clear]
    off = np.where(got.shares[clear] == shares[clear], 0, off / (np.abs(shares[clear]) * UNIT16 + 2.0**-20))
    off = np.where(np.isnan(off), np.inf, off)
    rows.integers("shares", off, int((off > 1).sum()))
    means = got.means.astype(np.float64)
    lead = geometry.leading_units
    if lead <= geometry.units:
        blocks, size = (
            np.concatenate([x[:, :, :lead].mean(axis=2, keepdims=True), ordering.block_keys(x)], axis=2)
            for x in (means, np.abs(means))
        )
        rows.floats("block means", got.blocks, blocks, size * (unit + UNIT32 * (BLOCK_UNITS + 4)) + smallest)
        of_blocks = ordering.block_keys(means)
        sampled = ordering.sampled_keys(k, of_blocks, geometry)
        other = (got.sampled_keys != sampled.keys) & ~(np.isnan(got.sampled_keys) & np.isnan(sampled.keys))
        rows.integers("sampled keys", np.where(other, np.inf, 0.0), int(other.sum()), "exact")
        # Of both that are subtracted.
        size = ordering.sampled_keys(absolute, -np.abs(of_blocks), geometry).deviations
        allowed = np.abs(sampled.deviations) * unit + size * UNIT32 * (BLOCK_UNITS + 4)
        rows.floats("deviations", got.deviations, sampled.deviations, allowed + smallest)
    if got.rows is None:
        return
    centre = got.blocks[:, :, :1, None].astype(np.float32)  # [B, Hkv, 1, 1, D]
    with np.errstate(invalid="ignore", over="ignore"):
        off_centre = got.keys - centre
    if got.steps is not None:
        _compare_integers(rows, got, off_centre)
        return
    _compare_exponents(rows, got.exponents, off_centre[:, :, :lead].astype(np.float64), centre.astype(np.float64))
    with np.errstate(invalid="ignore", over="ignore"):
        exact = off_centre * np.exp2(got.exponents.astype(np.float32))[..., None, None, None]
    exact = as_e4m3(keep_two(exact))
    exact = np.where(np.isneginf(got.shares.astype(np.float32))[..., None], np.float32(0), exact)
    different = (exact != got.rows) & ~(np.isnan(exact) & np.isnan(got.rows))
    rows.integers("8-bit rows", np.where(different, np.inf, 0.0), int(different.sum()), "exact")


def _compare_integers(rows: Any, got: QueryStages, off_centre: Array) -> None:
    """Integers and their steps against groups less the centre, float32 [B, Hkv, U, C, D]. A group of no key is 0, one
    that is not finite counts for no step."""
    is_none = np.isneginf(got.shares.astype(np.float32))
    off_centre = np.where(is_none[..., None], np.float32(0), off_centre)
    size = np.abs(off_centre).max(axis=-1)  # NaN if one is
    is_finite = size < np.inf
    steps = step_of_int8(np.where(is_finite, size, 0).max(axis=3), off_centre.shape[-1])
    wrong = steps != got.steps
    rows.integers("8-bit steps", np.where(wrong, np.inf, 0.0), int(wrong.sum()), "exact")
    exact = np.where(is_finite[..., None], as_int8(off_centre, steps[..., None, None]), np.float32(np.nan))
    different = (exact != got.rows) & ~(np.isnan(exact) & np.isnan(got.rows))
    rows.integers("8-bit rows", np.where(different, np.inf, 0.0), int(different.sum()), "exact")


def _compare_exponents(rows: Any, got: Array, leading: Array, centre: Array) -> None:
    """Powers of two ``got`` [B, Hkv] against the one of the longest of the ``leading`` groups less the centre [B, Hkv,
    units, C, D], or of the part of the ``centre`` [B, Hkv, 1, 1, D] that is longer; or its neighbour, by rounding."""
    longest = longest_of_keys(leading, centre)
    high, low = (KEY_EXPONENT - half_exponent(x) for x in _either_end(longest, leading.shape[-1]))
    wrong = (got < low) | (got > high)
    rows.integers("8-bit exponents", np.where(wrong, np.inf, 0.0), int(wrong.sum()))


def longest_of_keys(leading: Array, centre: Array) -> Array:
    """The squared length [B, Hkv] that keys are scaled by: as of `_compare_exponents`, and 1 where all are zeros."""
    with np.errstate(invalid="ignore", over="ignore"):
        squared, of_centre = (np.square(x).sum(axis=-1) for x in (leading, centre))
        finite = [np.where(x < np.finfo(np.float32).max, x, 0).max(axis=(2, 3)) for x in (squared, of_centre)]
    longest = np.maximum(finite[0], finite[1] / CENTRE_PART**2)
    return np.where(longest < 2.0**-60, 1, longest)


def _either_end(squared: Array, head_dim: int) -> tuple[Array, Array]:
    """The least and the most that float32 may have summed for ``squared`` lengths."""
    rounding = (head_dim + 8) * UNIT32
    return squared * (1 - rounding), squared * (1 + rounding)


def _are_clear(k: Array, geometry: Geometry, clusters: int) -> Array:
    """Units [B, Hkv, U] of which no key is, up to rounding, as far from or as near to a centre as another."""
    batch, kv_heads, _, head_dim = k.shape
    keys = k[:, :, : geometry.units * geometry.unit].reshape(batch, kv_heads, geometry.units, geometry.unit, head_dim)
    if geometry.unit == clusters:  # each key is a group
        return np.ones(keys.shape[:3], bool)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = keys.mean(axis=3, keepdims=True)
        distance = np.square(keys - mean).sum(axis=-1)  # [B, Hkv, U, unit]
        off = np.abs(keys).max(axis=(3, 4)) * UNIT32 * (geometry.unit + 2)
        slack = 4 * (distance.max(axis=3) * (head_dim + 8) * UNIT32 + np.sqrt(distance.max(axis=3) * head_dim) * off)
        clear = np.isfinite(slack) & (distance.max(axis=3) < np.finfo(np.float32).max / 4)
        nearest = np.full(distance.shape, np.inf)
        for c in range(clusters):
            clear &= _gap(distance if c == 0 else nearest) > slack
            furthest = np.where(np.isnan(distance), -1, distance if c == 0 else nearest).argmax(axis=3)
            centre = np.take_along_axis(keys, furthest[..., None, None], axis=3)
            to_centre = np.square(keys - centre).sum(axis=-1)
            equal = np.abs(to_centre - nearest) <= 4 * slack[..., None]
            clear &= ~np.where(np.isinf(nearest) | (nearest == 0), False, equal).any(axis=3)  # a centre is its own
            nearest = np.minimum(nearest, to_centre)
    return clear


def _gap(distance: Array) -> Array:
    """From the largest to the second largest of the last axis; of one alone, or where all are 0, infinite."""
    if distance.shape[-1] < 2:
        return np.full(distance.shape[:-1], np.inf)
    two = np.partition(distance, -2, axis=-1)
    return np.where(two[..., -1] == 0, np.inf, two[..., -1] - two[..., -2])


def compare_norms(rows: Any, got: QueryStages, q: Array, own: Array, problem: Problem, geometry: Geometry,
                  scale: float) -> None:  # fmt: skip
    """Norms given the GPU's means and what pass 1 has left, own [B, H, Lq] in nats; and the scales of 8 bits."""
    from ..reference import ordering

    means, blocks = got.means.astype(np.float64), got.blocks.astype(np.float64)
    centre = None if got.rows is None else blocks[:, :, 0]
    sampled = ordering.Sampled(got.sampled_keys.astype(np.float64), got.deviations.astype(np.float64))
    want = ordering.query_norms(q, means, blocks[:, :, 1:], sampled, own, geometry, scale, centre)
    group = problem.heads // problem.kv_heads
    finite = lambda x: np.where(np.isfinite(x), x, 0)  # noqa: E731
    # The excess is ln 2 times the mean of squared scores: scores off by x move it by 2 ln 2 times their root mean
    # square times x, which is at most twice the root of MOST_EXCESS ln 2, where it is bounded.
    varied = 2 * math.sqrt(MOST_EXCESS * LN2) * sampled.deviations
    of_all = finite(np.concatenate([means, blocks, varied, sampled.keys], axis=2))
    longest = np.linalg.norm(of_all, axis=-1).max(axis=-1)
    reach = np.linalg.norm(finite(q), axis=-1) * np.repeat(longest, group, axis=1)[..., None] * scale * LOG2E
    bound = 3 * reach * (problem.head_dim + 8) * UNIT32 + 2.0**-16 + geometry.units * UNIT32
    bound = bound + (np.abs(finite(own)) + np.abs(finite(want))) * 8 * UNIT32
    ordered = np.zeros(problem.seqlen_q, bool)
    for n in range(geometry.segments):
        ordered[slice(*geometry.queries(n))] = geometry.ranked(n) > 0
    with np.errstate(over="ignore", invalid="ignore"):
        inside = ordered & (reach < np.finfo(np.float32).max / 4)  # as float32 has it
    rows.floats("norms", np.where(inside, got.norms, 0), np.where(inside, want, 0), bound)
    if got.scales is None:
        return
    _compare_scales(rows, got, q, problem, geometry, scale)


def _compare_scales(
    rows: Any, got: QueryStages, q: Array, problem: Problem, geometry: Geometry, scale: float
) -> None:
    """Each a power of two, and the one of the segment's longest query, or its neighbour within rounding."""
    off = []
    to_log2 = max(float(np.float32(scale * LOG2E)), 1e-30)  # the smallest that kernels are given
    exponents = np.repeat(got.exponents, problem.heads // problem.kv_heads, axis=1)  # [B, H]
    for n in (n for n in range(geometry.segments) if geometry.ranked(n) > 0):
        with np.errstate(over="ignore", invalid="ignore"):
            squared = np.square(q[:, :, slice(*geometry.queries(n))]).sum(axis=-1) * to_log2**2
        longest = np.where(squared < np.finfo(np.float32).max, squared, 0).max(axis=-1)  # [B, H]
        high, low = (
            np.minimum(QUERY_EXPONENT - half_exponent(x), MOST_EXPONENT - exponents)
            for x in _either_end(longest, problem.head_dim)
        )
        found = np.log2(got.scales[:, :, n, 1].astype(np.float64)) - exponents
        of_query = np.abs(got.scales[:, :, n, 0]) / np.exp2(found) / to_log2
        off.append((found < low) | (found > high) | (np.abs(of_query - 1) > 4 * UNIT32))
    wrong = np.stack(off) if off else np.zeros(0, bool)
    rows.integers("8-bit scales", np.where(wrong, np.inf, 0.0), int(wrong.sum()))


def scores_and_bounds(got: QueryStages, q: Array, n: int, problem: Problem, geometry: Geometry,
                      scale: float) -> tuple[Array, Array]:  # fmt: skip
    """Scores of segment ``n``'s units [B, H, W] given the GPU's groups and norms, and what theirs may be off by:
    infinite where a sum may be more than float16 holds. q is that of a positive scale."""
    from ..reference import ordering

    shares = np.exp2(got.shares.astype(np.float64))
    units, (first, end) = ordering.ranked_units(n, geometry), geometry.queries(n)
    finite = lambda x: np.abs(np.where(np.isfinite(x), x, 0))  # noqa: E731
    norms = got.norms.astype(np.float64)
    largest_norm = finite(norms[:, :, first:end]).max(axis=-1, initial=0)[..., None]  # [B, H, 1]
    if got.rows is None:
        keys = got.keys.astype(np.float64)
        want = ordering.query_weights(q, norms, keys, shares, n, geometry, scale).astype(np.float64)
        reach = _magnitudes(finite(q[:, :, first:end]), finite(keys[:, :, units])) * scale * LOG2E
        bound = 2 * reach * (problem.head_dim + 8) * UNIT32 + (largest_norm + 8) * 4 * UNIT32
        return want, bound + np.abs(want) * (UNIT16 + UNIT32) + 2.0**-25
    if got.steps is not None:
        return _integer_scores(got, q, n, problem, geometry, scale)
    scales = got.scales[:, :, n]  # [B, H, 2]
    factor = np.abs(scales[..., 0]).astype(np.float32)
    rounded = as_e4m3(q[:, :, first:end].astype(np.float32) * factor[..., None, None]).astype(np.float64)
    back = 1 / scales[..., 1].astype(np.float64)  # [B, H]
    in_place = np.zeros(q.shape)
    in_place[:, :, first:end] = rounded * back[..., None, None]
    keys = got.rows.astype(np.float64)
    want = ordering.query_weights(in_place, norms, keys, shares, n, geometry, 1 / LOG2E).astype(np.float64)
    # Sums of e4m3 products round to float16 once for each 64 elements, and lose of each product what is 2^-12 below
    # the largest of these; norm, share and what they are added to round once each. Twice the steps stand for what is
    # lost.
    steps = max(2, -(-problem.head_dim // 32)) + 2
    sums = _magnitudes(finite(rounded), finite(keys[:, :, units]))
    bound = (sums * steps * 2 * UNIT16 + 2.0**-24) * back[..., None] + (largest_norm + 8) * 4 * UNIT16
    bound = bound + np.abs(want) * 2 * UNIT16 + 2.0**-24
    # A sum begins with a norm, which is at most so much: either may be beyond float16.
    return want, np.where(sums + np.abs(want) / back[..., None] > 60000, np.inf, bound)


def _integer_scores(
    got: QueryStages, q: Array, n: int, problem: Problem, geometry: Geometry, scale: float
) -> tuple[Array, Array]:
    """`scores_and_bounds` of integers. Sums are exact; what they begin with is a norm in whole steps of a sum."""
    from ..reference import ordering

    units, (first, end) = ordering.ranked_units(n, geometry), geometry.queries(n)
    rows = q[:, :, first:end].astype(np.float32)
    is_finite = np.isfinite(rows).all(axis=-1, keepdims=True)
    # [B, H]
    step = step_of_int8(np.abs(np.where(np.isfinite(rows), rows, 0)).max(axis=(2, 3)), problem.head_dim)
    in_place = np.zeros(q.shape)
    in_place[:, :, first:end] = np.where(is_finite, as_int8(rows, step[..., None, None]), np.nan)
    in_place *= step.astype(np.float64)[..., None, None]
    with np.errstate(invalid="ignore"):
        keys, shares = got.rows * got.steps.astype(np.float64)[..., None, None], np.exp2(got.shares.astype(np.float64))
    norms = got.norms.astype(np.float64)
    want = ordering.query_weights(in_place, norms, keys, shares, n, geometry, scale).astype(np.float64)
    largest_norm = np.abs(norms[:, :, first:end]).max(axis=-1, initial=0)[..., None]  # [B, H, 1]
    of_keys = np.repeat(got.steps[:, :, units], problem.heads // problem.kv_heads, axis=1)  # [B, H, W]
    of_sum = of_keys.astype(np.float64) * step[..., None] * scale * LOG2E
    # In steps of a sum: a half, as norms are whole ones; five roundings of a norm's number of them, below 4.2e6, 1.3
    # more; three of a sum, below 2.1e6, another 0.4. The rest is what norms, shares and scores round by.
    bound = 3 * of_sum + (largest_norm + 8) * 4 * UNIT32
    return want, bound + np.abs(want) * (UNIT16 + 4 * UNIT32) + 2.0**-25


def _magnitudes(queries: Array, keys: Array) -> Array:
    """The largest sum of magnitudes [B, H, W] in a product of one of the ``queries`` [B, H, rows, D] with one of a
    unit's ``keys`` [B, Hkv, W, C, D]; all at least 0."""
    batch, heads, rows, head_dim = queries.shape
    kv_heads, units = keys.shape[1:3]
    of_kv_heads = queries.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim)
    largest = np.zeros((batch, heads, units))
    for c in range(keys.shape[3]):
        sums = of_kv_heads @ keys[:, :, :, c].swapaxes(-1, -2)  # [B, Hkv, G * rows, W]
        largest = np.maximum(largest, sums.reshape(batch, heads, rows, units).max(axis=2))
    return largest
