"""Rows and queries of 8 bits, as the kernels of ``rank="query"`` leave them and `diff` judges them."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import stand_ins
from stand_ins import CONFIGS, larger, make, query_stages, scores_of_bytes, stand_in

from s2o_cupy import S2OConfig
from s2o_cupy.problem import Problem
from s2o_cupy.reference import ordering
from s2o_cupy.selection.orders.query import E4M3, INT8
from s2o_cupy.spec import BLOCK_UNITS, KEY_EXPONENT, LOG2E, Geometry
from s2o_cupy.tools.diff_query_weights import _compare_exponents, capture, keep_two, longest_of_keys, spread
from s2o_cupy.tools.diffing import compare


def of_samples(units, width):
    """What is sampled of blocks, which nothing here looks at."""
    shape = (2, 4 * (units // BLOCK_UNITS), width)
    return {name: np.zeros(shape, np.uint16) for name in ("sampled_keys", "deviations")}


@pytest.mark.parametrize("alike", [1.0, 2.0**-6, 2.0**-8, 2.0**-10, 0.0])
@pytest.mark.parametrize("products", [E4M3, INT8])
def test_first_keys_that_are_alike_leave_room_for_others(rng, alike, products):
    """As of repeated tokens: what later keys differ by is no multiple of what these do. Nor if they are zeros. The
    first ten units by 8 bits are among the first twenty, of integers the first twelve, by the same elements before they
    are rounded."""
    q, k = rng.standard_normal((2, 1, 1, 2048, 128))
    k[:, :, :128] = (k[:, :, :1] if alike else 0) + alike * k[:, :, :128]
    config, scale = S2OConfig(dense_last=0), 128**-0.5
    geometry = Geometry(2048, 2048, config.segment, unit=config.unit)
    stages = query_stages(q, k, np.zeros((1, 1, 2048)), geometry, config, scale, products)
    n, centre = geometry.segments - 1, stages.blocks[:, :, 0]
    norms = stages.norms + (q @ centre[..., None])[..., 0] * (scale * LOG2E)  # of keys as they are
    kept = stages.keys
    if products == E4M3:
        kept = keep_two(stages.keys - stages.blocks[:, :, :1, None]) + stages.blocks[:, :, :1, None]
    exact = ordering.query_weights(q, norms, kept, np.exp2(stages.shares.astype(float)), n, geometry, scale)
    found = scores_of_bytes(q, stages, n, geometry, scale)
    first = set(np.argsort(-exact[0, 0])[: 20 if products == E4M3 else 12])
    assert first.issuperset(np.argsort(-found[0, 0])[:10])


def test_what_rows_of_8_bits_are_scaled_by():
    """The square of the longest of the first groups, or of a 16th of the centre if that is longer; what overflows
    float32 counts for nothing, and where nothing counts it is 1."""
    groups = np.zeros((1, 2, 3, 2, 64), np.float32)
    groups[0, 0, 1, 1, :2] = 3, 4
    groups[0, 1, 2, 0, 5] = 1e30
    for centre, expected in ((0, [25, 1]), (16 * 4, [25, 16]), (16 * 6, [36, 36]), (1e30, [25, 1])):
        of_heads = np.zeros((1, 2, 1, 1, 64), np.float32)
        of_heads[..., 7] = centre
        np.testing.assert_array_equal(longest_of_keys(groups, of_heads), [expected])


@pytest.mark.parametrize(("head_dim", "width", "clusters"), [(64, 64, 2), (72, 128, 4), (128, 128, 8)])
def test_rows_of_8_bits_are_read_where_a_gpu_puts_them(rng, head_dim, width, clusters):
    """Of each four elements two, by thread and register, and behind them which two: raw_kernels/selection/unit_tile.cuh
    says where."""
    config = S2OConfig(rank="query", segment=256, unit=8, clusters=clusters)
    problem = Problem(1, 2, 2, 1100, 1100, head_dim, "float16", True, 0.1)
    units, parts = problem.geometry(config).units, width // 64
    kept = rng.uniform(1, 2, (2, units, clusters, width // 8, 2, 2)).astype(ml_dtypes.float8_e4m3fn)
    pairs = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])[rng.integers(6, size=kept.shape[:-1])]
    expected = np.zeros((*kept.shape[:-1], 4), np.float32)
    np.put_along_axis(expected, pairs, kept.astype(np.float32), axis=-1)

    head, unit, cluster, eighth = np.ogrid[:2, :units, :clusters, : width // 8]
    of_warp = 16 // clusters  # units in a tile
    tile = unit // 128 * 2 * clusters + unit % 32 // of_warp
    row = unit % 128 // 32 * 16 + cluster % 2 * 8 + unit % of_warp * (clusters // 2) + cluster // 2
    thread = row // 16 * parts * 32 + eighth // 8 * 32 + row % 8 * 4 + eighth % 4
    bytes_at = thread * 16 + eighth % 8 // 4 * 8 + row % 16 // 8 * 4
    thread = row // 16 * 32 + row % 8 * 4 + eighth % 8 // 4 * 2 + row % 16 // 8
    choices_at = 32 * width + (thread * parts + eighth // 8) * 4 + eighth % 4
    tiles = np.full((2, 2 * 2 * clusters, 40 * width), 255, np.uint8)
    for i, byte in enumerate(np.moveaxis(kept.reshape(*kept.shape[:-2], 4), -1, 0)):
        tiles[head, tile, bytes_at + i] = byte.view(np.uint8)
    tiles[head, tile, choices_at] = (pairs * [1, 4]).sum(-1) @ [1, 16]

    host = {
        "block_keys": rng.standard_normal((2, 1 + units // BLOCK_UNITS, width)).astype(np.float16).view(np.uint16),
        **of_samples(units, width),
        "unit_rows": tiles,
        "key_exponents": np.array([3, -4], np.int32),
    }
    stages = capture(None, "unit_rows", host.__getitem__, host, np.float16, problem, config)
    by_element = np.empty((2, units, clusters, width), np.float32)
    by_element[..., spread(width)] = expected.reshape(by_element.shape)
    np.testing.assert_array_equal(stages.rows[0], by_element[..., :head_dim])
    np.testing.assert_array_equal(stages.exponents, [[3, -4]])
    np.testing.assert_array_equal(stages.blocks[0], host["block_keys"].view(np.float16)[..., :head_dim])


@pytest.mark.parametrize(("width", "first"), [(64, [0, 30, 40, 54]), (128, [0, 62, 80, 110])])
def test_fours_are_from_all_over_a_row(width, first):
    """Each element is in one of them. A rotary embedding turns elements i and i + width / 2 by one frequency, or 2 i
    and 2 i + 1, and the next ones by nearly the same: none of these are together."""
    columns = spread(width)
    assert sorted(columns) == list(range(width))
    fours = columns.reshape(-1, 4)
    assert fours[0].tolist() == first and (fours[1::2] == fours[::2] + 1).all()
    assert (np.sort(fours // (width // 2), axis=1) == [0, 0, 1, 1]).all()
    for pair_of, apart in ((fours % (width // 2), 2), (fours // 2, 1)):
        assert np.diff(np.sort(pair_of, axis=1), axis=1).min() == apart


def test_two_of_four_are_kept():
    x = np.zeros((2, 128), np.float32)
    four = spread(128)[8:12]
    x[0, four] = [1, -3, 2, -2]
    x[1, four] = [4, 4, np.nan, 4]
    np.testing.assert_array_equal(keep_two(x)[:, four], [[0, -3, 2, 0], [4, 0, np.nan, 0]])


@pytest.mark.parametrize("head_dim", [40, 64, 72, 128])
def test_elements_past_the_row_take_no_place(head_dim):
    there = spread(64 if head_dim <= 64 else 128).reshape(-1, 4) < head_dim
    assert np.count_nonzero(keep_two(np.ones(head_dim, np.float32))) == np.minimum(there.sum(axis=1), 2).sum()


@pytest.mark.parametrize(("head_dim", "width", "clusters"), [(64, 64, 2), (72, 128, 4), (128, 128, 8)])
def test_rows_of_integers_are_read_where_a_gpu_puts_them(rng, head_dim, width, clusters):
    """By thread and register: raw_kernels/selection/unit_tile.cuh says where. Those whose share is NaN are NaN."""
    config = S2OConfig(rank="query", segment=256, unit=8, clusters=clusters)
    problem = Problem(1, 2, 2, 1100, 1100, head_dim, "float16", True, 0.1)
    units = problem.geometry(config).units
    expected = rng.integers(-127, 128, (2, units, clusters, width))
    head, unit, cluster, column = np.ogrid[:2, :units, :clusters, :width]
    of_tile = unit % (64 // clusters)
    tile, row = unit // (64 // clusters), of_tile % 8 + (of_tile // 8 * clusters + cluster) * 8
    thread = row % 8 * 4 + column % 32 // 8
    of_thread = column % 8 // 4 * 8 + row % 16 // 8 * 4 + column % 4
    tiles = np.full((2, 2 * 2 * clusters, 64 * width), 255, np.uint8)
    at = ((row // 16 * (width // 32) + column // 32) * 32 + thread) * 16 + of_thread
    tiles[head, tile, at] = expected.astype(np.int8).view(np.uint8)
    shares = np.zeros((2, 2 * 2 * clusters, 64), np.float16)
    shares[1, 20 // (64 // clusters), (row % 8 * 8 + row // 8)[0, 20, 1, 0]] = np.nan

    host = {
        "block_keys": np.zeros((2, 1 + units // BLOCK_UNITS, width), np.uint16),
        **of_samples(units, width),
        "unit_rows": tiles, "row_shares": shares, "unit_scales": rng.random((2, 256)).astype(np.float32),
    }  # fmt: skip
    stages = capture(None, "unit_rows", host.__getitem__, host, np.float16, problem, config)
    is_nan = (head == 1) & (unit == 20) & (cluster == 1)
    np.testing.assert_array_equal(stages.rows[0], np.where(is_nan, np.nan, expected)[..., :head_dim])
    np.testing.assert_array_equal(stages.steps[0], host["unit_scales"][:, :units])
    assert stages.exponents is None


@pytest.mark.parametrize(("head_dim", "most"), [(128, 127), (129, 90)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_integers_of_groups_that_are_not_finite(head_dim: int, most: int, value: float) -> None:
    """A unit's score is NaN where one of its groups is, and the step that of its other groups."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, 1, 200, head_dim)).astype(np.float16) for _ in range(3))
    k[0, 0, 50, 3] = value
    problem = Problem(1, 1, 1, 200, 200, head_dim, "float16", True, head_dim**-0.5)
    config = replace(CONFIGS["query"], clusters=4)  # each key of a unit is a group
    stages = stand_in(q, k, v, problem, config, INT8)
    report = compare(stages, q, k, v, problem, config)
    assert [row.stage for row in report.rows if not row.ok] == [], report.table()
    assert stages.query is not None
    rows = stages.query.rows
    assert np.nanmax(np.abs(rows)) == most and np.isnan(rows[0, 0, 50 // 4, 50 % 4]).all()
    assert np.isnan(rows).sum() == head_dim and np.isnan(stages.scores[4][0, 0, 50 // 4])
    for fault in (lambda s: s.rows.__setitem__((0, 0, 50 // 4, 50 % 4), 0), lambda s: larger(s.steps, (0, 0, 50 // 4))):
        faulty = copy.deepcopy(stages)
        fault(faulty.query)
        assert not compare(faulty, q, k, v, problem, config).ok


@pytest.mark.parametrize("clusters", [2, 4])
def test_groups_of_no_key_are_zeros(clusters: int) -> None:
    """Keys that are all alike are one group."""
    q, k, v = (np.ones((1, 1, 200, 24), np.float16) for _ in range(3))
    q, k = q * np.linspace(0, 1, 24, dtype=np.float16), k * np.linspace(1, 0, 24, dtype=np.float16)
    problem = Problem(1, 1, 1, 200, 200, 24, "float16", True, 0.1)
    config = replace(CONFIGS["query"], unit=8, clusters=clusters)
    stages = stand_in(q, k, v, problem, config, INT8)
    assert stages.query is not None
    assert np.isneginf(stages.query.shares).any() and not stages.query.rows[np.isneginf(stages.query.shares)].any()
    assert compare(stages, q, k, v, problem, config).ok


@pytest.mark.parametrize("off", [5, -9])
def test_8_bits_that_are_scaled_wrongly_all_along(off: int, monkeypatch) -> None:
    """Rows, scales and scores that follow from a wrong power of two agree with each other."""
    with monkeypatch.context() as patch:
        patch.setattr(stand_ins, "KEY_EXPONENT", KEY_EXPONENT + off)
        stages, problem = make(CONFIGS["query"], products=E4M3)
    report = compare(stages, *problem)
    assert [row.stage for row in report.rows if not row.ok][:1] == ["8-bit exponents"], report.table()


@pytest.mark.parametrize(
    ("longest", "lengths"),  # of the first keys; the powers of two that lengths may have
    [(4.0, {1, 2}), (4 - 2**-20, {1, 2}), (4 - 2**-12, {1}), (4 + 2**-12, {2}), (1.5 * 2**-5, {-5}), (96.0, {6})],
)
def test_powers_of_two_that_rounding_may_make(longest: float, lengths: set[int]) -> None:
    leading, wrong = np.zeros((1, 1, 2, 2, 24)), []
    leading[0, 0, 1, 0, 5] = longest
    rows = SimpleNamespace(integers=lambda stage, off, count: wrong.append(count))
    for power in range(-9, 9):
        _compare_exponents(rows, np.array([[KEY_EXPONENT - power]]), leading, np.zeros((1, 1, 1, 1, 24)))
    assert [n == 0 for n in wrong] == [power in lengths for power in range(-9, 9)]


def test_sums_beyond_float16_are_counted() -> None:
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, 1, 96, 64)).astype(np.float16) for _ in range(3))
    k[..., 60:, :] *= 1000  # of the first keys comes the power of two that all are scaled by
    problem = Problem(1, 1, 1, 96, 96, 64, "float16", True, 0.1)
    report = compare(stand_in(q, k, v, problem, CONFIGS["query"], E4M3), q, k, v, problem, CONFIGS["query"])
    (note,) = (row.note for row in report.rows if row.stage == "key scores")
    assert re.fullmatch(r"\[segment, batch, head, unit\]; [1-9]\d* not compared: sums beyond float16", note)
