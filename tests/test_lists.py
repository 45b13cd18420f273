"""Attention to listed keys, by the definition: what a list means, whatever produced it."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark_lists import KIND_NUMBERS, benchmark_lists
from hypothesis import given, settings
from hypothesis import strategies as st
from key_lists import all_keys, list_heads, make_lists, nowhere, random_lists, tiles_of
from listed_memory import ListedMemory

from s2o_cupy import S2OConfig
from s2o_cupy.plan.rounds import Chunk, rounds
from s2o_cupy.plan.schedule import ScheduleShape, order_lists
from s2o_cupy.problem import Problem
from s2o_cupy.reference import s2o
from s2o_cupy.reference.dense import dense_attention
from s2o_cupy.reference.lists import KeyLists, attend_lists
from s2o_cupy.selection.s2o import chunk_bytes
from s2o_cupy.spec import Geometry

TOLERANCE = 1e-12  # of float64 sums of a few hundred terms of size 1, a few hundred units of 2.2e-16 each


@pytest.fixture
def arrays(rng):
    """arrays(seqlen_q, seqlen_k, batch=, heads=, kv_heads=, head_dim=) -> q, k, v in float64."""

    def make(seqlen_q, seqlen_k, *, batch=1, heads=2, kv_heads=1, head_dim=8):
        q = rng.standard_normal((batch, heads, seqlen_q, head_dim))
        k, v = rng.standard_normal((2, batch, kv_heads, seqlen_k, head_dim))
        return q, k, v

    return make


def attended(*arguments, **options):
    """Output and lse of `attend_lists`."""
    return s2o.finish(attend_lists(*arguments, **options)[0])


def assert_close(found, expected):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE)


def subset(q, k, v, listed, block_m, segment=None):
    """Output and lse of dense attention in which each q tile has the keys ``listed(b, h, n, tile)``."""
    (batch, heads, seqlen_q, _), group = q.shape, q.shape[1] // k.shape[1]
    o, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, h, (n, tile, begin, end) in (
        (b, h, x) for b in range(batch) for h in range(heads) for x in tiles_of(seqlen_q, segment, block_m)
    ):
        keys = listed(b, h, n, tile)
        rows = q[b : b + 1, h : h + 1, begin:end]
        of_keys = [x[b : b + 1, h // group : h // group + 1][:, :, keys] for x in (k, v)]
        o[b, h, begin:end], lse[b, h, begin:end] = (x[0, 0] for x in dense_attention(rows, *of_keys, is_causal=False))
    return o, lse


# ---------------------------------------------------------------- what a list means


@pytest.mark.parametrize("unit", [1, 64, 128])
@pytest.mark.parametrize("per_tile", [False, True])
def test_all_keys_in_any_order_are_dense_attention(arrays, rng, unit, per_tile):
    q, k, v = arrays(300, 333, heads=4, kv_heads=2)
    lists = all_keys(q.shape, 333, unit, per_tile=per_tile, rng=rng)
    assert_close(attended(q, k, v, lists), dense_attention(q, k, v, is_causal=False))


def test_units_of_the_same_keys_are_the_same(arrays):
    q, k, v = arrays(200, 700)
    blocks = np.array([3, 0, 5])  # of 128, and the last is short: keys 640 to 699
    by_unit = {128: blocks, 64: (blocks[:, None] * 2 + [0, 1]).ravel()}
    by_unit[1] = (by_unit[64][:, None] * 64 + np.arange(64)).ravel()
    keys = 2 * 128 + 60
    found = [
        attended(q, k, v, KeyLists(entries.astype(np.int32), np.zeros((1, 1, 1), np.int64),
                                   np.full((1, 1, 1), keys, np.int32), unit))
        for unit, entries in by_unit.items()
    ]  # fmt: skip
    for x, y in zip(found[0], found[1], strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(found[0], found[2], strict=True):
        np.testing.assert_array_equal(x, y)


def test_rows_of_an_empty_list_have_no_output(arrays):
    q, k, v = arrays(256, 100)
    lists = make_lists([[[[[], [1, 2]]]]], unit=1)  # of two q tiles the second has keys
    o, lse = attended(q, k, v, lists)
    assert (o[:, :, :128] == 0).all() and np.isneginf(lse[:, :, :128]).all()
    assert np.isfinite(lse[:, :, 128:]).all()


def test_a_tile_and_a_segment_have_lists_of_their_own(arrays, rng):
    q, k, v = arrays(500, 400, batch=2, heads=4, kv_heads=2)
    for per_tile in (False, True):
        lists = random_lists(rng, q.shape, 400, list_heads=4, unit=1, segment=200, block_m=64, per_tile=per_tile)
        found = attended(q, k, v, lists, segment=200, block_m=64)
        assert_close(found, subset(q, k, v, lambda b, h, n, t, of=lists: of.positions(b, h, n, t), 64, 200))


@pytest.mark.parametrize("kind", ["one", "kv_heads", "heads"])
def test_heads_share_lists(arrays, rng, kind):
    q, k, v = arrays(130, 300, batch=2, heads=4, kv_heads=2)
    few = list_heads(kind, 4, 2)
    lists = random_lists(rng, q.shape, 300, list_heads=few, unit=64, per_tile=True)
    repeated = KeyLists(
        lists.entries, np.repeat(lists.begins, 4 // few, axis=1), np.repeat(lists.keys, 4 // few, axis=1), 64
    )
    for x, y in zip(attended(q, k, v, lists), attended(q, k, v, repeated), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("ordered_heads", [1, 2, 4])
def test_lists_count_keys_in_an_order(arrays, rng, ordered_heads):
    """Of all heads, of each KV head's heads, or of each head."""
    q, k, v = arrays(130, 300, batch=2, heads=4, kv_heads=2)
    lists = random_lists(rng, q.shape, 300, list_heads=1, unit=1, per_tile=True)
    order = rng.permuted(np.broadcast_to(np.arange(300), (2, ordered_heads, 300)), axis=-1)
    found = attended(q, k, v, lists, k_order=order)
    of_head = lambda b, h: order[b, h // (4 // ordered_heads)]  # noqa: E731
    assert_close(found, subset(q, k, v, lambda b, h, n, t: of_head(b, h)[lists.positions(b, 0, n, t)], 128))


def test_keys_that_are_not_listed_have_no_influence(arrays, rng):
    q, k, v = arrays(200, 300)
    lists = make_lists([[[list(range(10, 290, 3))]]], unit=1)
    expected = attended(q, k, v, lists)
    absent = np.setdiff1d(np.arange(300), lists.positions(0, 0, 0, 0))
    k[:, :, absent] = v[:, :, absent] = np.nan
    for x, y in zip(attended(q, k, v, lists), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_queries_are_taken_in_the_order_given(arrays, rng):
    """A permutation of queries moves them between q tiles, and so to other lists."""
    q, k, v = arrays(200, 300)
    order = np.stack([rng.permutation(200) for _ in range(2)])[None]  # [B, H, Lq]
    lists = random_lists(rng, q.shape, 300, list_heads=2, unit=1, per_tile=True, block_m=64)
    o, lse = attended(q, k, v, lists, q_order=order, block_m=64)
    permuted = np.take_along_axis(q, order[..., None], axis=2)
    expected = attended(permuted, k, v, lists, block_m=64)
    assert_close((np.take_along_axis(o, order[..., None], axis=2), np.take_along_axis(lse, order, axis=2)), expected)


# ---------------------------------------------------------------- a start that is resumed, a stop


def test_resuming_is_merging_with_what_was_seen_before(arrays):
    q, k, v = arrays(300, 300, heads=4, kv_heads=2)
    geometry = Geometry(300, 300, 100)
    before = s2o.pass1(q, k, v, geometry, q.shape[-1] ** -0.5)
    lists = make_lists([[[list(range(n * 100))[::-1] for n in range(3)]]], unit=1)  # what pass 1 has not seen
    assert_close(attended(q, k, v, lists, before, segment=100), dense_attention(q, k, v))


def test_a_row_without_keys_keeps_its_state(arrays):
    q, k, v = arrays(100, 100)
    before = s2o.pass1(q, k, v, Geometry(100, 100, 100), q.shape[-1] ** -0.5)
    after, visited = attend_lists(q, k, v, make_lists([[[[]]]], unit=1), before)
    assert all((x == y).all() for x, y in zip(before, after, strict=True)) and not visited.any()


def test_s2o_is_the_case_of_its_orders_as_lists(qkv):
    """Rows in S2O's order resume pass 1 and visit S2O's lists, which lie as in two rounds of its workspace."""
    q, k, v = (x.astype(np.float64) for x in qkv(700, heads=4, kv_heads=2, head_dim=16))
    config = S2OConfig(segment=128, tau=0.2, block_m=64, block_n=32, rank="mean")
    result, geometry = s2o.s2o(q, k, v, config), Geometry(700, 700, 128)
    chunks = [Chunk(0, 4, 4, 2, 2, 4, 512, 128), Chunk(0, 4, 1, 3, 2, 4, 128, 128)]
    begins, keys = order_lists(chunks, geometry, 4)
    entries = np.full(sum(chunk.elements for chunk in chunks), nowhere(1), np.int32)
    for h, n in np.ndindex(begins.shape):
        entries[begins[h, n] :][: keys[h, n]] = result.k_order.keys[n][0, h]
    assert (entries != nowhere(1)).sum() == keys.sum(), "two lists lie in one place"
    queries = [geometry.queries(n) for n in range(geometry.segments)]
    of_segments = [result.q_order[:, :, n, : end - begin] + begin for n, (begin, end) in enumerate(queries)]
    q_order = np.concatenate(of_segments, axis=-1)
    lists = KeyLists(entries, begins[None], keys[None])
    state, visited = attend_lists(
        q, k, v, lists, result.state1, segment=128, q_order=q_order, block_m=64, block_n=32, tau=0.2,
    )  # fmt: skip
    np.testing.assert_array_equal(visited, result.visited)
    assert 0 < visited.sum() < attend_lists(q, k, v, lists, segment=128, block_m=64, block_n=32)[1].sum()
    assert_close(s2o.finish(state), (result.o, result.lse))


def test_tau_0_visits_every_key(arrays, rng):
    q, k, v = arrays(200, 1000)
    lists = random_lists(rng, q.shape, 1000, list_heads=1, unit=1, per_tile=True)
    _, visited = attend_lists(q, k, v, lists, tau=0.0)
    assert (visited == np.ceil(lists.keys / 128).astype(int)).all()


def test_visited_says_how_many_key_tiles_count(arrays, rng):
    q, k, v = arrays(100, 1000)
    lists = all_keys(q.shape, 1000, unit=1, rng=rng)
    first = KeyLists(lists.entries, lists.begins, np.minimum(lists.keys, 3 * 128), 1)
    short = attended(q, k, v, lists, visited=np.full((1, 2, 1, 1), 3))
    for x, y in zip(short, attended(q, k, v, first), strict=True):
        np.testing.assert_array_equal(x, y)


# ---------------------------------------------------------------- any lists


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_lists_are_dense_attention_to_their_keys(data):
    draw = data.draw
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    heads, seqlen_q = kv_heads * group, draw(st.integers(1, 200))
    seqlen_k, unit = draw(st.integers(1, 400)), draw(st.sampled_from([1, 64, 128]))
    segment, block_m = draw(st.sampled_from([None, 70, 128])), draw(st.sampled_from([32, 64, 128]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    q = rng.standard_normal((1, heads, seqlen_q, 4))
    k, v = rng.standard_normal((2, 1, kv_heads, seqlen_k, 4))
    few = draw(st.sampled_from([1, kv_heads, heads]))
    lists = random_lists(
        rng, q.shape, seqlen_k, list_heads=few, unit=unit, segment=segment, block_m=block_m,
        per_tile=draw(st.booleans()),
    )  # fmt: skip
    found = attended(q, k, v, lists, segment=segment, block_m=block_m)
    assert_close(
        found, subset(q, k, v, lambda b, h, n, t: lists.positions(b, h * few // heads, n, t), block_m, segment)
    )


# ---------------------------------------------------------------- the description of a schedule


def test_shapes_of_lists():
    problem = Problem(2, 8, 2, 1000, 3000, 64, "bfloat16", True, 0.125)
    assert ScheduleShape(list_heads=8).lists_shape(problem, 128) == (2, 8, 1)
    assert ScheduleShape(list_heads=2, per_tile=True).lists_shape(problem, 128) == (2, 2, 1, 8)
    assert ScheduleShape(list_heads=1, segment=256).lists_shape(problem, 128) == (2, 1, 4)
    assert ScheduleShape(list_heads=1, segment=256, per_tile=True).lists_shape(problem, 64) == (2, 1, 4, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": 48}, r"attend_lists: unit is 48; accepted: 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"list_heads": 4}, r"attend_lists: list_heads is 4 with 8 query and 2 KV heads; accepted: 1, 2 or 8"),
        ({"segment": 0}, r"attend_lists: segment is 0; accepted: an integer >= 1, or None for all queries"),
        ({"seqlen_q": 2**30 + 1}, r"attend_lists: a segment has 1073741825 queries; accepted: up to 1073741824"),
    ],
)
def test_a_schedule_that_no_kernel_takes_is_refused(changes, message):
    seqlen_q = changes.pop("seqlen_q", 1000)
    problem = Problem(2, 8, 2, seqlen_q, 3000, 64, "bfloat16", seqlen_q < 3000, 0.125)
    with pytest.raises(ValueError, match=message):
        ScheduleShape(**({"list_heads": 8} | changes)).check(problem)


# ---------------------------------------------------------------- what kernels read of it


@pytest.mark.parametrize("unit", [1, 16, 64, 128])
@pytest.mark.parametrize("kind", ["one", "kv_heads", "heads"])
@pytest.mark.parametrize("per_tile", [False, True])
def test_kernels_read_the_lists_of_the_definition(rng, unit, kind, per_tile):
    problem, few = Problem(2, 4, 2, 500, 700, 64, "bfloat16", False, 0.125), list_heads(kind, 4, 2)
    shape = ScheduleShape(few, unit, per_tile, 200)
    lists = random_lists(
        rng, (2, 4, 500, 64), 700, list_heads=few, unit=unit, segment=200, block_m=64, per_tile=per_tile
    )
    memory = ListedMemory(problem, shape, 64, lists.entries, lists.begins, lists.keys)
    for b, h, (n, tile, _, _) in ((b, h, x) for b in range(2) for h in range(4) for x in tiles_of(500, 200, 64)):
        expected = lists.positions(b, h * few // 4, n, tile)
        np.testing.assert_array_equal(memory.positions(b * 4 + h, n, tile), expected)


@pytest.mark.parametrize("unit", [1, 16, 64, 128, 256])
def test_what_must_not_be_read_is_far_outside(unit):
    """Of lists and of pages, in the 32 bits that kernels compute keys and, on Hopper, places of rows in."""
    keys = (np.int32(nowhere(unit)) << np.int32(unit.bit_length() - 1)) + np.arange(unit, dtype=np.int32)
    assert keys.dtype == np.int32 and keys.min() >= 1 << 29
    for row in (8, 16, 32):  # units of 16 bytes: head_dim 64, 128 and 256
        assert (keys.astype(np.uint32) * np.uint32(row)).min() >= 1 << 29


@pytest.mark.parametrize(
    ("config", "workspace_mib", "turns"),
    [(S2OConfig(rank="mean"), 256, 1), (S2OConfig(rank="mean"), 32, 4), (S2OConfig(segment=1024, unit=4), 8, 4)],
    ids=["keys", "keys in rounds", "units in rounds"],
)
def test_kernels_read_s2os_orders_of_all_rounds(config, workspace_mib, turns):
    """The orders of rounds lie one behind the other: each the units of its segment's candidates, then padding."""
    problem = Problem(1, 32, 8, 32768, 32768, 128, "bfloat16", True, 0.1)
    geometry, unit = problem.geometry(config), config.unit
    chunks = rounds(problem, geometry, chunk_bytes, workspace_mib << 20)
    assert len(chunks) == turns
    orders = []
    for chunk in chunks:
        order = np.full(chunk.elements, nowhere(unit), np.int32)
        for h, n in np.ndindex(chunk.heads, chunk.segments):
            row = order[chunk.place(chunk.first_head + h, chunk.first_segment + n)]
            units = geometry.ranked(chunk.first_segment + n)
            row[:units] = (chunk.first_head + h + np.arange(units)) % units  # each head its own order
        orders.append(order)
    begins, keys = order_lists(chunks, geometry, 32)
    shape = ScheduleShape(32, unit, segment=1024, resumed=True)
    memory = ListedMemory(problem, shape, 128, np.concatenate(orders), begins[None], keys[None])
    for head, n in np.ndindex(32, 32):
        expected = (head * unit + np.arange(n * 1024)) % max(1, n * 1024)
        np.testing.assert_array_equal(memory.positions(head, n, tile=7), expected)


@pytest.mark.parametrize("kind", KIND_NUMBERS)
@pytest.mark.parametrize("density", [0.05, 0.3])
def test_kernels_read_the_benchmarks_lists(kind, density):
    """Of each kind: a share of the units before the segment or q tile, none twice."""
    problem = Problem(1, 8, 2, 4096, 4096, 128, "bfloat16", True, 0.1)
    lists = benchmark_lists(problem, density, kind)
    per_tile, unit = lists.shape.per_tile, lists.shape.unit
    rows = lists.block_m
    memory = ListedMemory(problem, lists.shape, rows, lists.entries.numpy(), lists.begins, lists.keys)
    pairs = 0
    for head, tile in np.ndindex(8, 4096 // rows):
        segment, tile = (0, tile) if per_tile else divmod(tile, 1024 // rows)
        found = memory.positions(head, segment, tile)
        before = tile * rows if per_tile else segment * 1024
        assert len(found) == int(density * (before // unit)) * unit
        assert (np.sort(found)[1:] != np.sort(found)[:-1]).all()
        assert len(found) == 0 or 0 <= found.min() <= found.max() < before
        pairs += rows * len(found)
    assert pairs == lists.pairs > 0
