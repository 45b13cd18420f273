"""Keys and values in the pages of a cache: the bits of the same call on one array."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, Device, has_gpu, has_hopper
from gpu_cases import CASES
from packs import bits
from pages import differing, fits_pages, paged, random_table

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged
from s2o_cupy.plan.launch_plan import COLLECT_ROWS


def assert_same_bits(
    device: Device, q: Any, k: Any, v: Any, rng: Any, page_size: int, layout: Any, **options: Any
) -> tuple[Any, ...]:
    """The paged call and the call on one array, in this device's dtype; the arrays of the paged one."""
    options.setdefault("config", device.config)
    q, k, v = (np.asarray(x).astype(device.dtype) for x in (q, k, v))
    lengths = [k.shape[2]] * len(k)
    table, pages = random_table(rng, lengths, page_size)
    arrays = [device.xp.asarray(x) for x in (q, k, v)]
    caches = [device.xp.asarray(paged(x, table, pages, page_size, layout, lengths)) for x in (k, v)]
    inputs = (arrays[0], *caches, device.xp.asarray(table))
    out = device.poisoned(q.shape)
    found = s2o_attention_paged(
        *inputs, seqlen_k=k.shape[2], layout=layout, out=out, return_lse=True, return_stats=True, **options
    )
    assert found[0] is out
    expected = s2o_attention(*arrays, return_lse=True, return_stats=True, **options)
    for x, y in ((found[0], expected[0]), (found[1], expected[1]), (found[2].visited, expected[2].visited)):
        np.testing.assert_array_equal(bits(x), bits(y))
    assert found[2].density == expected[2].density
    assert (found[2].path, found[2].path_reason) == (expected[2].path, expected[2].path_reason)
    return inputs


# ---------------------------------------------------------------- the same bits


@pytest.mark.sampled(6)
@pytest.mark.parametrize("lengths", [(301, 779), (320, 832)])
@pytest.mark.parametrize("page_size", [1, 16, 32, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages(device, qkv, rng, lengths, page_size, layout, head_dim):
    q, k, v = qkv(*lengths, batch=2, heads=4, kv_heads=2, head_dim=head_dim)
    assert_same_bits(device, q, k, v, rng, page_size, layout)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((1, 1), {}),
        ((1, 300), {}),
        ((128, 128), {}),
        ((700, 700), {}),
        ((257, 1000), {"tau": 0}),
        ((200, 333), {"tau": 10.0}),
        ((700, 700), {"config": {"window": 30}}),
        ((500, 700), {"config": {"rank": "max", "pooled_queries": 3, "segment": 100}}),
        ((500, 700), {"config": {"rank": "mean", "tail": "first_order"}}),
        ((1100, 1900), {"config": {"segment": 64, "unit": 8}}),
        ((500, 700), {"config": {"unit": 128}}),
        ((500, 700), {"config": {"tail": "first_order"}}),
        ((700, 1100), {"config": {"dense_up_to": 10_000}}),
        ((300, 700), {"is_causal": False}),
        ((700, 300), {"is_causal": False}),
        ((300, 700), {"scale": -0.1}),
        ((300, 700), {"softcap": 2.0}),
        ((300, 2), {"is_causal": False}),
    ],
    ids=str,
)
def test_problems(device, qkv, rng, lengths, options):
    options = dict(options)
    options["config"] = replace(device.config, **options.get("config", {}))
    q, k, v = qkv(*lengths, heads=3, kv_heads=3, head_dim=72)
    assert_same_bits(device, q, k, v, rng, 16, "NHD", **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("row", [5, 299, 650, 699])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_values_that_are_not_finite(device, qkv, rng, name, row, value, head_dim):
    """At the diagonal they are taken out of the product for rows that do not see them."""
    arrays = dict(zip("qkv", qkv(700, heads=2, head_dim=head_dim), strict=True))
    arrays[name][:, -1, row, 77] = value
    with np.errstate(invalid="ignore"):
        assert_same_bits(device, *arrays.values(), rng, 32, "NHD")


def test_sequences_of_their_own_lengths(device, qkv, rng):
    lengths = [400, 400, 123, 0, 801]
    q, k, v = (x.astype(device.dtype) for x in qkv(90, 801, batch=5, heads=4, kv_heads=2))
    table, pages = random_table(rng, lengths, 64)
    caches = [device.xp.asarray(paged(x, table, pages, 64, "NHD", lengths)) for x in (k, v)]
    q, k, v, table = map(device.xp.asarray, (q, k, v, table))
    options = {"config": device.config, "is_causal": False, "return_lse": True}
    o, lse = s2o_attention_paged(q, *caches, table, seqlen_k=lengths, **options)
    for b, n in enumerate(lengths):
        expected = s2o_attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **options)
        for x, y in zip((o[b : b + 1], lse[b : b + 1]), expected, strict=True):
            np.testing.assert_array_equal(bits(x), bits(y))
    again = s2o_attention_paged(q, *caches, table, seqlen_k=np.array(lengths), **options)
    np.testing.assert_array_equal(bits(o), bits(again[0]))


def test_a_cache_of_both_and_other_strides(device, qkv, rng):
    """k and v side by side in each page, q and out as (batch, seqlen, heads, head_dim), a slice of a wider table."""
    q, k, v = (x.astype(device.dtype) for x in qkv(300, heads=4, kv_heads=2, batch=2))
    table, pages = random_table(rng, [300, 300], 16)
    both = np.stack([paged(x, table, pages, 16, "NHD", [300, 300]) for x in (k, v)], axis=1)
    both = device.xp.asarray(both)  # [pages, 2, page_size, kv_heads, head_dim]
    wide = device.xp.asarray(np.concatenate([table, table], axis=1))[:, : table.shape[1]]
    turned = device.xp.asarray(np.ascontiguousarray(q.swapaxes(1, 2))).swapaxes(1, 2)
    out = device.poisoned((2, 300, 4, 64)).swapaxes(1, 2)
    s2o_attention_paged(turned, both[:, 0], both[:, 1], wide, seqlen_k=300, config=device.config, out=out)
    expected = s2o_attention(*map(device.xp.asarray, (q, k, v)), config=device.config)
    np.testing.assert_array_equal(bits(device.xp.ascontiguousarray(out)), bits(expected))


@pytest.mark.parametrize(
    ("kept", "given"),
    [
        (lambda x: np.stack([x, x + 1], axis=2).reshape(len(x), -1), lambda x: x[:, ::2]),
        (lambda x: x[:, ::-1], lambda x: x[:, ::-1]),
        (lambda x: x.T, lambda x: x.T),
    ],
    ids=["in every other column", "turned round", "by columns"],
)
def test_a_page_table_may_lie_anyhow(device, qkv, rng, kept, given):
    """Kernels read rows without gaps."""
    q, k, v = (x.astype(device.dtype) for x in qkv(300, heads=4, kv_heads=2, batch=2))
    table, pages = random_table(rng, [300, 300], 16)
    caches = [device.xp.asarray(paged(x, table, pages, 16, "NHD", [300, 300])) for x in (k, v)]
    lying = given(device.xp.asarray(np.ascontiguousarray(kept(table), np.int32)))
    packed_q = np.concatenate([*q], axis=1).swapaxes(0, 1)
    for queries, options in ((q, {}), (packed_q, {"cu_seqlens_q": [0, 300, 600]})):
        found, expected = (
            s2o_attention_paged(device.xp.asarray(queries), *caches, x, seqlen_k=300, config=device.config, **options)
            for x in (lying, device.xp.asarray(table))
        )
        np.testing.assert_array_equal(bits(found), bits(expected))


def test_pages_that_sequences_share(device, qkv):
    """A common prefix: entries may repeat."""
    q, k, v = (x.astype(device.dtype) for x in qkv(100, 640, batch=2, heads=2))
    k[1, :, :512], v[1, :, :512] = k[0, :, :512], v[0, :, :512]
    table = np.array([[7, 3, 1, 2, 5], [7, 3, 1, 2, 0]], np.int32)
    caches = [device.xp.asarray(paged(x, table, 8, 128, "HND", [640, 640])) for x in (k, v)]
    options = {"config": device.config}
    o = s2o_attention_paged(
        device.xp.asarray(q), *caches, device.xp.asarray(table), seqlen_k=640, layout="HND", **options
    )
    expected = s2o_attention(*map(device.xp.asarray, (q, k, v)), **options)
    np.testing.assert_array_equal(bits(o), bits(expected))


@pytest.mark.parametrize("shape", [(0, 2, 10, 64), (2, 0, 10, 64), (2, 2, 0, 64)])
def test_nothing_to_compute(device, shape):
    cache = device.array(np.zeros((4, 16, max(1, shape[1]), 64)))
    table = device.xp.zeros((shape[0], 2), np.int32)
    o, lse = s2o_attention_paged(device.array(np.zeros(shape)), cache, cache, table, seqlen_k=20, return_lse=True)
    assert o.shape == shape and lse.shape == shape[:3]


# ---------------------------------------------------------------- on a GPU alone


@pytest.fixture(params=["portable", "hopper"])
def big(request):
    """A device and a configuration with several q tiles for each multiprocessor."""
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if request.param == "hopper" and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    import ml_dtypes

    config = S2OConfig(segment=256, tau=0.05, path=request.param, dense_up_to=0)
    return Device("cuda", np.dtype(ml_dtypes.bfloat16), config)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"dense_up_to": 10_000}, {"workspace_bytes": 1 << 20}], ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("lengths", [(1700, 2300), (1700, 2212)])
def test_many_tiles(big, qkv, rng, lengths, page_size, changes):
    q, k, v = qkv(*lengths, heads=32, kv_heads=8, head_dim=128)
    assert_same_bits(big, q, k, v, rng, page_size, "NHD", config=replace(big.config, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize(("head_dim", "layout"), [(64, "NHD"), (72, "HND"), (128, "NHD"), (256, "HND")])
def test_pages_that_a_dense_call_collects(big, qkv, rng, head_dim, layout, page_size, is_causal):
    """Enough queries for a copy of keys and values to arrays first (on Hopper)."""
    q, k, v = qkv(COLLECT_ROWS // 4, COLLECT_ROWS // 4 + 300, batch=2, heads=4, kv_heads=1, head_dim=head_dim)
    config = replace(big.config, dense_up_to=10_000)
    assert_same_bits(big, q, k, v, rng, page_size, layout, config=config, is_causal=is_causal)


@pytest.mark.gpu
def test_a_captured_graph_collects_pages(big, qkv, rng):
    """Graphs follow the page table and the cache; calls between them do not move what they read."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        config = replace(big.config, dense_up_to=10_000)
        inputs = assert_same_bits(big, *qkv(COLLECT_ROWS // 4, heads=4, head_dim=128), rng, 8, "NHD", config=config)
        options = {"seqlen_k": COLLECT_ROWS // 4, "config": config}
        stream.begin_capture()
        o = s2o_attention_paged(*inputs, **options)
        graph = stream.end_capture()
        table, entries = inputs[3], COLLECT_ROWS // 4 // 8
        for _ in range(3):
            table[:, :entries] = cupy.roll(table[:, :entries], 1, axis=1)
            graph.launch(stream=stream)
            for caches in (inputs[1:3], inputs[2:0:-1]):  # also with keys for values
                again = s2o_attention_paged(inputs[0], *caches, table, **options)
                same = bool((o.view(np.uint16) == again.view(np.uint16)).all())
                assert same == (caches[0] is inputs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if fits_pages(case)])
def test_every_branch(big, name):
    case, path = CASES[name], big.config.path
    if path == "hopper" and not case.hopper:
        pytest.skip("the Hopper kernels do not take it")
    assert differing(case, path) == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("gib", [24, 96])
def test_pages_far_apart(big, qkv, rng, gib):
    """Past 2^31 elements; and past 64 GiB, which the Hopper kernels do not take."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if cupy.cuda.runtime.memGetInfo()[0] < (gib + 2) * 2**30:
        pytest.skip(f"needs {gib + 2} GiB of free GPU memory")
    q, k, v = (x.astype(big.dtype) for x in qkv(300, 700, heads=4, kv_heads=2, head_dim=128))
    table, pages = random_table(rng, [700], 64)
    stride = gib * 2**30 // pages // 16 * 16  # bytes
    memory = cupy.empty(pages * stride, np.uint8)
    caches = []
    for i, x in enumerate((k, v)):
        cache = paged(x, table, pages, 64, "NHD", [700])
        part = memory[i * cache[0].nbytes :].view(big.dtype)
        caches.append(cupy.lib.stride_tricks.as_strided(part, cache.shape, (stride, *cache.strides[1:])))
        caches[-1][...] = cupy.asarray(cache)
    config = big.config
    if gib > 64 and config.path == "hopper":
        with pytest.raises(ValueError, match="rows more than 64 GiB apart"):
            s2o_attention_paged(cupy.asarray(q), *caches, cupy.asarray(table), seqlen_k=700, config=config)
        config = replace(config, path="portable")
    o = s2o_attention_paged(cupy.asarray(q), *caches, cupy.asarray(table), seqlen_k=700, config=config)
    expected = s2o_attention(*map(cupy.asarray, (q, k, v)), config=config)
    np.testing.assert_array_equal(bits(o), bits(expected))
    del caches, memory, part
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
def test_100_repeats_of_a_busy_gpu(big, qkv, rng):
    import cupy
    from conftest import spin

    q, k, v = qkv(1500, heads=32, kv_heads=8, head_dim=128)
    inputs = assert_same_bits(big, q, k, v, rng, 16, "NHD")
    options = {"seqlen_k": 1500, "config": big.config}
    o = s2o_attention_paged(*inputs, **options)
    with cupy.cuda.Stream(non_blocking=True):
        spin(milliseconds=1000, blocks=60)  # half of the GPU is elsewhere
    equal = [(s2o_attention_paged(*inputs, **options).view(np.uint16) == o.view(np.uint16)).all() for _ in range(100)]
    assert all(map(bool, equal))


@pytest.mark.gpu
def test_a_captured_graph(big, qkv, rng):
    """Graphs follow the page table."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        inputs = assert_same_bits(big, *qkv(1024, heads=4, head_dim=128), rng, 128, "NHD")
        options = {"seqlen_k": 1024, "config": big.config}
        stream.begin_capture()
        o = s2o_attention_paged(*inputs, **options)
        graph = stream.end_capture()
        table = inputs[3]
        for _ in range(3):
            table[:, :8] = cupy.roll(table[:, :8], 1, axis=1)
            graph.launch(stream=stream)
            assert bool((o.view(np.uint16) == s2o_attention_paged(*inputs, **options).view(np.uint16)).all())


@pytest.mark.gpu
def test_replays_see_the_page_table(big, qkv, rng):
    """Calls with the same arrays, which are replayed from the third on."""
    import cupy

    inputs = assert_same_bits(big, *qkv(2000, heads=4, head_dim=128), rng, 128, "NHD")
    options = {"seqlen_k": 2000, "config": big.config}
    table, out = inputs[3], cupy.empty_like(inputs[0])
    for _ in range(6):
        table[:, :15] = cupy.roll(table[:, :15], 1, axis=1)  # the last page is not full
        s2o_attention_paged(*inputs, out=out, **options)
        expected = s2o_attention_paged(*inputs[:3], table.copy(), **options)
        assert bool((out.view(np.uint16) == expected.view(np.uint16)).all())


@pytest.mark.gpu
def test_a_refusal_comes_before_any_launch(big, qkv, rng):
    """The second of two lengths is not aligned: nothing of the first is written."""
    import cupy

    cache = cupy.zeros((8, 64, 1, 128), big.dtype)
    table = cupy.arange(8, dtype=np.int32).reshape(2, 4)
    memory = cupy.zeros(2 * 2 * 100 * 128 + 4, big.dtype)
    bytes_of = lambda *strides: tuple(2 * n for n in strides)  # noqa: E731
    q = cupy.lib.stride_tricks.as_strided(memory, (2, 2, 100, 128), bytes_of(2 * 100 * 128 + 4, 100 * 128, 128, 1))
    out = big.poisoned(q.shape)
    before = bits(out)
    with pytest.raises(ValueError, match="does not start on 16 bytes"):
        s2o_attention_paged(q, cache, cache, table, seqlen_k=[200, 256], config=big.config, out=out)
    np.testing.assert_array_equal(bits(out), before)


@pytest.mark.gpu
def test_what_the_gpu_refuses(big):
    import cupy

    q, cache, table = (
        cupy.zeros(s, t) for s, t in (((1, 2, 40, 66), big.dtype), ((4, 16, 2, 66), big.dtype), ((1, 4), np.int32))
    )
    options = {"seqlen_k": 60, "config": big.config}
    with pytest.raises(ValueError, match=r"k_pages has a stride of .* bytes on its last axis; accepted: a contiguous"):
        twice = cupy.zeros((4, 16, 2, 132), big.dtype)[..., ::2]
        s2o_attention_paged(q, twice, twice, table, **options)
    with pytest.raises(ValueError, match=r"does not start on 16 bytes, or head_dim \(66\) is no multiple of 8"):
        s2o_attention_paged(q, cache, cache, table, **options)
    with pytest.raises(ValueError, match="does not start on 16 bytes"):
        s2o_attention_paged(q[..., 1:65], cache[..., :64], cache[..., :64], table, **options)


# ---------------------------------------------------------------- frameworks


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks(framework, where, qkv, rng):
    library = pytest.importorskip(framework)
    q, k, v = (x.astype(np.float16) for x in qkv(200, 500, heads=4, kv_heads=2))
    table, pages = random_table(rng, [500], 32)
    host = (q, *(paged(x, table, pages, 32, "NHD", [500]) for x in (k, v)), table)
    if where == "gpu" and not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if framework == "torch":
        if where == "gpu" and not library.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
        inputs = [library.from_numpy(x).to("cuda" if where == "gpu" else "cpu") for x in host]
        back = lambda x: x.cpu().numpy()  # noqa: E731
    else:
        try:
            inputs = [library.device_put(x, library.devices(where)[0]) for x in host]
        except RuntimeError:
            pytest.skip("this JAX has no such device")
        back = np.asarray
    if where == "gpu":
        import cupy

        host = tuple(map(cupy.asarray, host))
    o = s2o_attention_paged(*inputs, seqlen_k=500, config=SMALL)
    expected = s2o_attention_paged(*host, seqlen_k=500, config=SMALL)
    assert type(o) is type(inputs[0])
    np.testing.assert_array_equal(back(o), expected if where == "cpu" else expected.get())
