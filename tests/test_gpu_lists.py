"""Pass 2 by lists of keys on a GPU, against the definition (reference/lists.py) and against S2O.

Skipped without a GPU. An entry that belongs to no list is far outside of k and v: reading it would be a fault.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from benchmark_lists import KIND_NUMBERS, benchmark_lists
from conftest import has_gpu
from gpu_cases import DTYPES
from in_process import run_script
from key_lists import all_keys, list_heads, make_lists, random_lists
from listed_calls import assert_defined, attend, by_lists_of_s2o, moved_by_unlisted, problem_of

from s2o_cupy import S2OConfig
from s2o_cupy.reference.lists import KeyLists
from s2o_cupy.spec import STOP_LAG

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]


def draw(qkv, dtype, *lengths, **shape):
    return [x.astype(DTYPES[dtype]) for x in qkv(*lengths, **shape)]


# ---------------------------------------------------------------- the definition


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("unit", [1, 64, 128])
def test_head_dims_and_units(path, qkv, rng, dtype, head_dim, unit):
    q, k, v = draw(qkv, dtype, 300, 777, heads=4, kv_heads=2, head_dim=head_dim)
    lists = random_lists(rng, q.shape, 777, list_heads=4, unit=unit, per_tile=True)
    assert_defined(attend(path, q, k, v, lists, per_tile=True), q, k, v, lists)


@pytest.mark.parametrize("seqlen_q", [1, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("seqlen_k", [1, 64, 127, 128, 129, 300])
def test_lengths_around_tiles(path, qkv, rng, seqlen_q, seqlen_k):
    q, k, v = draw(qkv, "bfloat16", seqlen_q, seqlen_k, head_dim=128)
    for unit, per_tile in ((1, False), (64, True)):
        lists = all_keys(q.shape, seqlen_k, unit, rng=rng, per_tile=per_tile)
        found = attend(path, q, k, v, lists, per_tile=per_tile)
        assert_defined(found, q, k, v, lists)
        assert (found.visited == -(-seqlen_k // 128)).all()


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("kind", ["one", "kv_heads", "heads"])
@pytest.mark.parametrize("per_tile", [False, True])
def test_heads_that_share_keys_and_lists(path, qkv, rng, group, kind, per_tile):
    heads = 2 * group
    q, k, v = draw(qkv, "bfloat16", 400, 500, batch=2, heads=heads, kv_heads=2, head_dim=64)
    few = list_heads(kind, heads, 2)
    shape = {"list_heads": few, "unit": 64, "segment": 150, "per_tile": per_tile}
    lists = random_lists(rng, q.shape, 500, **shape)
    found = attend(path, q, k, v, lists, per_tile=per_tile, segment=150)
    assert_defined(found, q, k, v, lists, segment=150)
    repeated = KeyLists(
        lists.entries, *(np.repeat(x, heads // few, axis=1) for x in (lists.begins, lists.keys)), lists.unit
    )
    attend(path, q, k, v, repeated, per_tile=per_tile, segment=150).assert_same_bits(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("unit", [1, 64])
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("few", [8, 32])
def test_tiles_of_64_queries(path, qkv, rng, dtype, head_dim, unit, page_size, options, few):
    """And more of them than run at once: on Hopper two a multiprocessor, or one of two heads that share their lists."""
    q, k, v = draw(qkv, dtype, 1100, 777, heads=32, kv_heads=8, head_dim=head_dim)
    lists = random_lists(rng, q.shape, 777, list_heads=few, unit=unit, per_tile=True, block_m=64)
    found = attend(path, q, k, v, lists, per_tile=True, block_m=64, page_size=page_size, **options)
    assert_defined(found, q, k, v, lists, block_m=64, **options)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("kind", ["one", "kv_heads", "heads"])
@pytest.mark.parametrize("per_tile", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_heads_that_share_lists_of_64_queries(path, qkv, rng, group, kind, per_tile, ordered):
    """On Hopper two of a KV head share a tile if their number is even; each has its own rows and counts."""
    heads = 2 * group
    q, k, v = draw(qkv, "bfloat16", 400, 500, batch=2, heads=heads, kv_heads=2, head_dim=128)
    shape = {"list_heads": list_heads(kind, heads, 2), "unit": 64, "segment": 150, "per_tile": per_tile, "block_m": 64}
    lists = random_lists(rng, q.shape, 500, **shape)
    order = rng.permuted(np.broadcast_to(np.arange(400), (2, heads, 400)), axis=-1) if ordered else None
    found = attend(path, q, k, v, lists, per_tile=per_tile, segment=150, block_m=64, q_order=order)
    assert_defined(found, q, k, v, lists, segment=150, block_m=64, q_order=order)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("seqlen_q", [1, 63, 64, 65, 129])
@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 65, 127, 128, 129, 193, 300])
def test_lengths_around_tiles_of_64_queries(path, qkv, rng, seqlen_q, seqlen_k, heads):
    q, k, v = draw(qkv, "bfloat16", seqlen_q, seqlen_k, heads=heads, kv_heads=1, head_dim=128)
    for unit, per_tile in ((1, False), (64, True)):
        lists = all_keys(q.shape, seqlen_k, unit, rng=rng, per_tile=per_tile, block_m=64)
        found = attend(path, q, k, v, lists, per_tile=per_tile, block_m=64)
        assert_defined(found, q, k, v, lists, block_m=64)
        assert (found.visited == -(-seqlen_k // 128)).all()


@pytest.mark.parametrize("tau", [0.05, 0.3, float("inf")])
def test_tiles_of_64_queries_stop(path, qkv, rng, tau):
    """For what they visited the definition holds. Whatever the second stop check adds is less than all: what a path
    visits before it knows comes besides."""
    q, k, v = draw(qkv, "bfloat16", 500, 3000, heads=4, kv_heads=2, head_dim=128)
    lists = random_lists(rng, q.shape, 3000, list_heads=4, unit=1, per_tile=True, block_m=64)
    found = attend(path, q, k, v, lists, per_tile=True, block_m=64, tau=tau)
    assert_defined(found, q, k, v, lists, block_m=64)
    whole = -(-lists.keys // 128)
    assert found.visited.shape == whole.shape == (1, 4, 1, 8)
    assert (found.visited <= whole).all() and (found.visited < whole).any()
    if tau == float("inf"):
        np.testing.assert_array_equal(found.visited, np.minimum(whole, 2 + STOP_LAG[path]))


@pytest.mark.parametrize("keys", [1, 8, 100, 104, 130, 255])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("unit", "block_m"), [(4, 128), (64, 128), (128, 128), (128, 64)])
def test_lists_that_end_within_a_unit(path, head_dim, unit, block_m, keys):
    """What stands behind the end has no influence, not even NaN."""
    if head_dim <= 128 or block_m == 128:
        assert moved_by_unlisted(path, head_dim, unit, keys, block_m=block_m) == []


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 2.0}, {"block_n": 256}], ids=str)
def test_options(path, qkv, rng, options):
    if path == "hopper" and "block_n" in options:
        pytest.skip("the Hopper kernels do not take it")
    q, k, v = draw(qkv, "bfloat16", 300, 900, head_dim=128)
    lists = random_lists(rng, q.shape, 900, list_heads=2, unit=1, per_tile=True)
    found = attend(path, q, k, v, lists, per_tile=True, **options)
    assert_defined(found, q, k, v, lists, **options)


@pytest.mark.parametrize("head_dim", [33, 200])
@pytest.mark.parametrize("block_m", [64, 128])
def test_rows_that_are_not_aligned_and_small_tiles(qkv, rng, head_dim, block_m):
    q, k, v = draw(qkv, "float16", 300, 500, head_dim=head_dim)
    lists = random_lists(rng, q.shape, 500, list_heads=2, unit=1, per_tile=True, block_m=block_m)
    found = attend("portable", q, k, v, lists, per_tile=True, block_m=block_m)
    assert_defined(found, q, k, v, lists, block_m=block_m)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_are_taken_in_the_order_given(path, qkv, rng, head_dim):
    q, k, v = draw(qkv, "bfloat16", 10_000, 300, heads=2, head_dim=head_dim)  # more than 13 bits of them
    order = np.stack([rng.permutation(10_000) for _ in range(2)])[None]
    lists = random_lists(rng, q.shape, 300, list_heads=2, unit=1, per_tile=True)
    found = attend(path, q, k, v, lists, per_tile=True, q_order=order)
    assert_defined(found, q, k, v, lists, q_order=order)


# ---------------------------------------------------------------- the benchmark's


@pytest.mark.parametrize("kind", KIND_NUMBERS)
def test_lists_of_the_benchmark(path, qkv, kind):
    q, k, v = draw(qkv, "bfloat16", 2048, heads=4, kv_heads=2, head_dim=128)
    lists = benchmark_lists(problem_of(q, k, S2OConfig()), 0.3, kind)
    shape = lists.shape
    listed = KeyLists(lists.entries.numpy(), lists.begins, lists.keys, shape.unit)
    block_m = lists.block_m
    found = attend(path, q, k, v, listed, per_tile=shape.per_tile, segment=shape.segment, block_m=block_m)
    assert_defined(found, q, k, v, listed, segment=shape.segment, block_m=block_m)
    visited = found.visited.sum() * 128  # at most a key tile more than listed
    assert lists.pairs / block_m <= visited < lists.pairs / block_m + found.visited.size * 128


def test_the_benchmark(tmp_path):
    """With more q tiles than multiprocessors; it compares S2O's bits itself."""
    from benchmark_modules import BENCHMARKS

    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs a PyTorch with CUDA")
    result = run_script(
        BENCHMARKS / "lists.py", "--lengths", 16384, "--heads", 8, "--kv-heads", 2, "--densities", "0.3", "--repeats",
        2, "--json", tmp_path / "x.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    s2o_row, *others = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert s2o_row["kind"] == "s2o" and s2o_row["density"] == pytest.approx(0.3, rel=0.1)
    assert len({row["kind"] for row in others}) == len(KIND_NUMBERS)
    assert all(row["density"] == pytest.approx(0.3, rel=0.2) and row["lists_ms"] > 0 for row in others)


# ---------------------------------------------------------------- nothing but what is listed


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("unit", [1, 64, 128])
@pytest.mark.parametrize("page_size", [None, 16])
def test_keys_that_are_not_listed_have_no_influence(path, qkv, rng, head_dim, unit, page_size):
    q, k, v = draw(qkv, "bfloat16", 300, 1000, head_dim=head_dim)
    per_tile = [rng.permutation(np.arange(0, 1000 // unit, 2)).tolist() for _ in range(3)]  # of even units
    lists = make_lists([[[per_tile]]], unit, 1000, rng)
    found = attend(path, q, k, v, lists, per_tile=True, page_size=page_size)
    absent = np.arange(1000) // unit % 2 == 1
    k[:, :, absent], v[:, :, absent] = np.nan, np.nan
    attend(path, q, k, v, lists, per_tile=True, page_size=page_size).assert_same_bits(found)
    assert np.isfinite(found.o.astype(np.float32)).all()


def test_a_listed_nan_reaches_the_rows_of_its_tile_and_no_others(path, qkv):
    q, k, v = draw(qkv, "bfloat16", 300, 400, head_dim=64)
    lists = make_lists([[[[list(range(0, 200)), list(range(100, 400)), list(range(0, 150))]]]], 1)
    k[:, :, 250] = np.nan
    found = attend(path, q, k, v, lists, per_tile=True)
    nan = np.isnan(found.o.astype(np.float32)).all(axis=-1)
    assert (nan == np.isin(np.arange(300) // 128, [1])).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_without_keys_have_no_output(path, qkv, rng, head_dim):
    """More q tiles than multiprocessors, so that persistent blocks go from one with keys to one without and back."""
    q, k, v = draw(qkv, "bfloat16", 1100, 600, heads=32, kv_heads=8, head_dim=head_dim)
    lists = random_lists(rng, q.shape, 600, list_heads=32, unit=1, per_tile=True)
    empty = lists.keys == 0
    assert 20 < empty.sum() < empty.size / 2
    found = attend(path, q, k, v, lists, per_tile=True)
    assert_defined(found, q, k, v, lists)
    assert (found.visited[empty] == 0).all() and (found.visited[~empty] > 0).all()
    rows = np.repeat(empty[0, :, 0], 128, axis=-1)[:, :1100]
    assert (found.o[0][rows].astype(np.float32) == 0).all() and np.isneginf(found.lse[0][rows]).all()


def test_no_list_has_a_key(path, qkv):
    q, k, v = draw(qkv, "float16", 300, 300, heads=32, head_dim=128)
    found = attend(path, q, k, v, make_lists([[[[]]]], 1))
    assert (found.o == 0).all() and np.isneginf(found.lse).all() and (found.visited == 0).all()


# ---------------------------------------------------------------- pages, and the same bits again


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("unit", [1, 128])
def test_pages_have_the_bits_of_arrays(path, qkv, rng, head_dim, page_size, unit):
    q, k, v = draw(qkv, "bfloat16", 300, 700, batch=2, heads=4, kv_heads=2, head_dim=head_dim)
    lists = random_lists(rng, q.shape, 700, list_heads=2, unit=unit, per_tile=True)
    expected = attend(path, q, k, v, lists, per_tile=True)
    attend(path, q, k, v, lists, per_tile=True, page_size=page_size).assert_same_bits(expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_units_of_the_same_keys_have_the_same_bits(path, qkv, rng, head_dim):
    q, k, v = draw(qkv, "bfloat16", 200, 1000, head_dim=head_dim)
    blocks = [5, 0, 3, 7]  # of 128, and the last is short
    halves = [e for x in blocks for e in (2 * x, 2 * x + 1) if e * 64 < 1000]
    single = [e * 64 + i for e in halves for i in range(64) if e * 64 + i < 1000]
    first, *others = (
        attend(path, q, k, v, make_lists([[[entries]]], unit, 1000, rng))
        for unit, entries in ((128, blocks), (64, halves), (1, single))
    )
    for other in others:
        other.assert_same_bits(first)


def test_repeats_have_the_same_bits(path, qkv, rng):
    q, k, v = draw(qkv, "bfloat16", 1500, 1500, heads=32, kv_heads=8, head_dim=128)
    lists = random_lists(rng, q.shape, 1500, list_heads=8, unit=64, per_tile=True)
    first = attend(path, q, k, v, lists, per_tile=True, tau=0.05)
    for _ in range(30):
        attend(path, q, k, v, lists, per_tile=True, tau=0.05).assert_same_bits(first)


def test_a_q_tile_stops(path, qkv):
    """Keys that matter come first, so that tau ends the visit; what was visited counts in full."""
    q, k, v = draw(qkv, "bfloat16", 500, 3000, heads=4, kv_heads=2, head_dim=128)
    importance = k.astype(np.float32).sum(axis=-1)[0]  # [kv_heads, Lk]: queries have a positive mean
    lists = make_lists([[[x.argsort()[::-1].tolist()] for x in importance]], 1)
    found = attend(path, q, k, v, lists, tau=0.05)
    assert (found.visited > 0).all() and found.visited.max() < 24
    assert_defined(found, q, k, v, lists)


# ---------------------------------------------------------------- S2O as a producer of lists


@pytest.mark.parametrize(
    ("dtype", "head_dim", "options"),
    [
        *((dtype, head_dim, {}) for dtype in DTYPES for head_dim in (64, 80, 128, 256)),
        ("bfloat16", 128, {"rank": "mean"}),
        ("bfloat16", 128, {"unit": 1}),
        ("bfloat16", 128, {"unit": 128}),
        ("bfloat16", 128, {"tau": 0.0}),
        ("bfloat16", 128, {"segment": 200, "window": 30}),
        ("bfloat16", 128, {"workspace_bytes": 1 << 20, "unit": 1}),
        ("bfloat16", 128, {"workspace_bytes": 1 << 20, "segment": 32}),
        ("bfloat16", 128, {"softcap": 3.0}),
        *(("bfloat16", head_dim, {"page_size": 16}) for head_dim in (64, 128, 256)),
    ],
    ids=str,
)
def test_s2o_is_the_case_of_its_orders_as_lists(path, qkv, dtype, head_dim, options):
    """Rows in S2O's order, resuming its pass 1 with its lists, stop where S2O stops and have its bits."""
    options = dict(options)
    softcap, page_size = options.pop("softcap", 0.0), options.pop("page_size", None)
    config = S2OConfig(**({"segment": 256, "tau": 0.05, "path": path, "dense_up_to": 0, "tail": "none"} | options))
    q, k, v = draw(qkv, dtype, 2500, heads=16, kv_heads=2, head_dim=head_dim)
    found, stages, keys = by_lists_of_s2o(q, k, v, config, softcap, page_size)
    assert (len(stages.chunks) > 1) == (config.workspace_bytes == 1 << 20)
    found.assert_same_bits(stages.attended)
    if config.tau > 0:
        assert 0 < found.visited.sum() < 2 * (-(-keys // 128)).sum(), "nothing stopped early"
