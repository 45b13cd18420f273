"""The kernels on a GPU: every branch against the reference, and what only a GPU can get wrong.

Skipped without one. tests/test_faults.py shows that these comparisons find faults; tests/test_gpu_process.py has what
needs a process of its own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from conftest import has_gpu, has_hopper, spin
from gpu_cases import CASES, PATHS, place, run_diff
from packs import assert_same_bits, words

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.tools import diff

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}


# ---------------------------------------------------------------- every branch


@pytest.mark.parametrize("name", CASES)
def test_diff(name, path):
    case = CASES[name]
    if path == "hopper" and not case.hopper:
        pytest.skip("the Hopper kernels do not take it")
    report = run_diff(case, path)
    assert report.ok, report.table()


def test_diff_has_nothing_to_compare_without_queries(gpu):
    q, k, v = gpu(70)
    none = slice(0, 0)
    for arrays in ((q[:, :, none], k, v), (q, k[:, :, none], v[:, :, none])):
        with pytest.raises(ValueError, match=r"diff: q is \(1, 2, .*; accepted: at least one query and one key"):
            diff(*arrays, is_causal=False)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [1000, 2500])
def test_dense_at_tau_0(path_config, qkv, dtype, head_dim, length):
    """Error against float64: at most twice that of a plain low-precision attention."""
    from conftest import Device

    device = Device("cuda", dtype, replace(path_config, tau=0.0))
    q, k, v = qkv(length, heads=4, kv_heads=2, head_dim=head_dim)
    device.assert_dense(device.attend(q, k, v), q, k, v)


@pytest.mark.parametrize("length", [1, 129, 2000, 4300])
def test_a_dense_call_is_a_thread_s_first(path_config, gpu, length):
    """Which nothing has made the device's context current for; short ones clear no memory. All rows are written."""
    import cupy

    q, k, v = gpu(length, heads=8, kv_heads=2)
    config = replace(path_config, tau=0.0)
    expected = s2o_attention(q, k, v, config=config)
    o = cupy.empty_like(q)
    words(o).fill(0xFFFF)
    cupy.cuda.get_current_stream().synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(s2o_attention, q, k, v, config=config, out=o).result()
    cupy.cuda.runtime.deviceSynchronize()
    assert_same_bits(o, expected)


@pytest.mark.parametrize("head_dim", [128, 200, 256])
def test_paths_agree(gpu, head_dim):
    """Where nothing is left out both compute the same, up to rounding."""
    if not has_hopper():
        pytest.skip("needs compute capability 9.0")
    q, k, v = gpu(1500, heads=4, head_dim=head_dim)
    one, other = (
        s2o_attention(q, k, v, tau=0, config=config).astype(np.float32) for config in PATHS.values()
    )
    assert float(abs(one - other).max()) <= 2**-6 * float(abs(one).max())


def test_the_hopper_path_says_why_it_cannot(gpu):
    q, k, v = gpu(300)
    if not has_hopper():
        with pytest.raises(ValueError, match=r"path is 'hopper', but the GPU has compute capability"):
            s2o_attention(q, k, v, config=PATHS["hopper"])
        return
    for match, options in (
        (r"scale is -1\.0, not positive", {"scale": -1.0}),
        (r"scale is 0\.0, not positive", {"scale": 0.0}),
        ("block_n is 64, not 128", {"config": replace(PATHS["hopper"], block_n=64)}),
    ):
        with pytest.raises(ValueError, match=rf"path is 'hopper', but {match}; accepted: 'auto' or 'portable'"):
            s2o_attention(q, k, v, **({"config": PATHS["hopper"]} | options))
    for arrange in ("one element in", "odd row stride", "sequence backwards"):
        with pytest.raises(ValueError, match=r"path is 'hopper', but .*rows? "):
            s2o_attention(q, place(k, arrange), v, config=PATHS["hopper"])


# ---------------------------------------------------------------- the same bits, whatever else happens


def test_200_repeats_on_two_streams_of_a_busy_gpu(path_config, gpu):
    import cupy

    q, k, v = gpu(1500, heads=32, kv_heads=8, head_dim=128)  # several q tiles for each multiprocessor
    o, lse = s2o_attention(q, k, v, config=path_config, return_lse=True)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    equal = []
    with streams[2]:
        spin(milliseconds=1500, blocks=60)  # half of the GPU is elsewhere
    for repeat in range(200):
        with streams[repeat % 2]:
            again = s2o_attention(q, k, v, config=path_config, return_lse=True)
            equal.append((words(again[0]) == words(o)).all() & (words(again[1]) == words(lse)).all())
    cupy.cuda.Device().synchronize()
    assert all(map(bool, equal))


@pytest.mark.parametrize(
    "changes",
    [{"unit": 1}, {"segment": 32}, {"rank": "mean", "tail": "first_order"}, {"dense_last": 300}, {"dense_last": 1500}],
    ids=str,
)
def test_results_do_not_depend_on_the_rounds(path_config, gpu, changes):
    """However many rounds the workspace makes of it, a head's result is the same."""
    q, k, v = gpu(1500, heads=16, kv_heads=4, batch=4)
    config = replace(path_config, **changes)
    one = s2o_attention(q, k, v, config=config, return_lse=True)
    many = s2o_attention(q, k, v, config=replace(config, workspace_bytes=1 << 20), return_lse=True)
    for x, y in zip(one, many, strict=True):
        assert_same_bits(x, y)


# ---------------------------------------------------------------- sizes


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "heads"), [(65535, 1), (1, 65536), (700, 100)])
def test_many_heads_with_candidates(path_config, gpu, batch, heads):
    """Each (batch, head) pair gets what it gets alone, past 65535 of them too."""
    config = replace(path_config, segment=8)
    q, k, v = gpu(24, batch=batch, heads=heads, kv_heads=max(1, heads // 4), head_dim=8)
    o = s2o_attention(q, k, v, config=config)
    group = heads // k.shape[1]
    for first in (0, 32_000, 65_530, batch * heads - 8):
        for pair in range(first, min(first + 8, batch * heads)):
            b, h = divmod(pair, heads)
            alone = [x[b : b + 1, i : i + 1].copy() for x, i in ((q, h), (k, h // group), (v, h // group))]
            assert_same_bits(o[b : b + 1, h : h + 1], s2o_attention(*alone, config=config))


def need_memory(gib: float) -> None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    if cupy.cuda.runtime.memGetInfo()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


@pytest.mark.slow
def test_more_than_2_to_31_elements(path_config, gpu):
    import cupy

    need_memory(14)
    batch, rows, head_dim = 16_400, 1024, 128
    fill = cupy.ElementwiseKernel(
        "uint64 seed", "uint16 x",
        """
        unsigned long long z = i + seed;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        x = (z >> 20 & 0x8000) | 0x3e00 + (z >> 40 & 0x1ff);  // +-[0.125, 2) in bfloat16
        """,
        "s2o_test_fill",
    )  # fmt: skip
    q = cupy.empty((batch, 1, rows, head_dim), BFLOAT16)
    assert q.size > 2**31
    fill(1, words(q))
    _, k, v = gpu(rows, head_dim=head_dim)
    k, v = (cupy.broadcast_to(x, (batch, *x.shape[1:])) for x in (k, v))
    o, lse = s2o_attention(q, k, v, config=path_config, return_lse=True)
    for first in (0, 8190, batch - 20):  # around 2^30 elements, and at the end
        part = slice(first, first + 20)
        alone = s2o_attention(q[part].copy(), k[part].copy(), v[part].copy(), config=path_config, return_lse=True)
        assert_same_bits(o[part], alone[0])
        assert_same_bits(lse[part], alone[1])
    del q, o
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.slow
def test_a_small_array_with_a_huge_stride(path_config, gpu):
    """Rows more than 2^31 elements apart; the distance between the first and the last is larger still."""
    import cupy

    need_memory(24)
    host = gpu(300, heads=2, kv_heads=2)
    expected = s2o_attention(*host, config=path_config)
    row = 2**31 // 256 + 64  # rows 256 and on lie past 2^31
    buffers = [cupy.empty(2 * 64 + 300 * row, BFLOAT16) for _ in range(4)]
    spread = [
        cupy.lib.stride_tricks.as_strided(x, (1, 2, 300, 64), (0, 128, row * 2, 2)) for x in buffers
    ]
    for x, source in zip(spread, host, strict=False):
        x[...] = source
    s2o_attention(*spread[:3], config=path_config, out=spread[3])
    assert_same_bits(cupy.ascontiguousarray(spread[3]), expected)
    del buffers, spread
    cupy.get_default_memory_pool().free_all_blocks()


# ---------------------------------------------------------------- memory


def test_out_of_memory_and_on(path_config, gpu):
    """CuPy's own error; a small call works at once, and the large one when there is room again."""
    import cupy

    small, large = gpu(300), gpu(20_000, heads=8)
    expected = [s2o_attention(*x, config=path_config) for x in (small, large)]
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=22 << 20)  # the output fits, the workspace does not
    with cupy.cuda.using_allocator(pool.malloc):
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            s2o_attention(*large, config=path_config)
        assert_same_bits(s2o_attention(*small, config=path_config), expected[0])
        pool.set_limit(size=0)
        assert_same_bits(s2o_attention(*large, config=path_config), expected[1])


def test_a_call_keeps_no_memory(path_config, gpu):
    import cupy

    q, k, v = gpu(2000, heads=4)
    out = cupy.empty_like(q)
    pool = cupy.get_default_memory_pool()
    s2o_attention(q, k, v, config=path_config, out=out)
    before = pool.used_bytes()
    for _ in range(3):
        s2o_attention(q, k, v, config=path_config, out=out)
    assert pool.used_bytes() == before


@pytest.mark.slow
def test_peak_memory_of_a_long_call():
    """131,072 tokens, 32 heads over 8, head_dim 128: at most 1 GiB beside the output."""
    import cupy

    need_memory(16)
    rng = cupy.arange(131_072 * 128, dtype=np.uint32) * np.uint32(2654435761) >> 16
    row = (rng.astype(np.float32) / 2**15 - 1).reshape(1, 1, 131_072, 128).astype(BFLOAT16)
    q = cupy.broadcast_to(row, (1, 32, 131_072, 128))
    k = cupy.broadcast_to(row[:, :, ::-1], (1, 8, 131_072, 128))
    out = cupy.empty(q.shape, BFLOAT16)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        s2o_attention(q, k, k, config=S2OConfig(tau=10.0), out=out)
        cupy.cuda.Device().synchronize()
    assert pool.total_bytes() <= 2**30
    assert pool.used_bytes() == 0


# ---------------------------------------------------------------- devices


def test_arrays_on_a_device_that_is_not_current(gpu, path_config):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    on_0 = gpu(300)
    expected = s2o_attention(*on_0, config=path_config)
    host = [x.get() for x in on_0]
    with cupy.cuda.Device(1):
        on_1 = [cupy.asarray(x) for x in host]
    o, lse = s2o_attention(*on_1, config=path_config, return_lse=True)
    assert cupy.cuda.Device().id == 0
    assert o.device.id == lse.device.id == 1
    np.testing.assert_array_equal(o.get().view(np.uint16), expected.get().view(np.uint16))
