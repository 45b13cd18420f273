"""Streams, where arrays lie in memory, and what the GPU backend is handed, on a machine without a GPU."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from pretended import array_at, pretend_gpu

from s2o_cupy import S2OError, s2o_attention
from s2o_cupy.arrays.array_info import ArrayInfo
from s2o_cupy.arrays.frameworks import framework_of
from s2o_cupy.arrays.lazy_cupy import import_cupy
from s2o_cupy.arrays.streams import stream_handle


def test_stream_handles():
    assert stream_handle(0) == 0
    assert stream_handle(140_000_000) == 140_000_000
    assert stream_handle(types.SimpleNamespace(ptr=7)) == 7
    assert stream_handle(types.SimpleNamespace(cuda_stream=8)) == 8
    assert stream_handle(types.SimpleNamespace(__cuda_stream__=lambda: (0, 9))) == 9
    assert stream_handle(types.SimpleNamespace(__cuda_stream__=(0, 9))) == 9
    for bad in ("default", -1, True, 1.5, object(), types.SimpleNamespace(ptr=None)):
        with pytest.raises(TypeError, match=r"stream is .*; accepted: None \(the current stream\), a CuPy"):
            stream_handle(bad)


def test_where_arrays_lie():
    def of(x):
        return framework_of("x", x).describe(x)

    a = np.zeros((4, 6), np.float32)
    start = a.ctypes.data
    assert of(a).byte_range() == (start, start + 96)
    assert of(a[::-1, ::-1]).byte_range() == (start, start + 96)
    assert of(a[1:3, 2:4]).byte_range() == (start + 32, start + 64)
    assert of(a[:0]).byte_range() == (start, start)
    assert of(a).overlaps(of(a[::-1]))
    assert not of(a[:2]).overlaps(of(a[2:]))
    assert not of(a[1:1]).overlaps(of(a))
    assert not of(a[::2, ::-1].T).overlaps_itself()
    assert ArrayInfo(0, (2, 3), (0, 4), 4).overlaps_itself()
    assert ArrayInfo(0, (2, 3), (8, 4), 4).overlaps_itself()
    assert not ArrayInfo(0, (1, 3), (0, 4), 4).overlaps_itself()


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with pytest.raises(S2OError, match=r'need CuPy .*remedy: pip install "\.\[cuda12\]"'):
        import_cupy()


@pytest.fixture
def pretended_gpu(monkeypatch):
    """NumPy arrays that claim to be on a GPU, NumPy for CuPy, and a pipeline that records its call."""
    calls = []

    def run(call, config, *, stream, memory, await_keys, taus):
        operands, lse, visited, problem, _ = call
        assert taus == 0  # one for all heads is a number of the config
        arrays = [array_at(x.pointer, np.float16, x.shape, x.strides) for x in operands]
        calls.append((*arrays, lse, visited, problem, config))
        arrays[3][...] = 1
        if lse:
            array_at(lse, np.float32, (problem.batch, problem.heads, problem.seqlen_q))[...] = 2
        return types.SimpleNamespace(path="portable", path_reason="a reason", graphs="off: a reason")

    pretend_gpu(monkeypatch, run=run)
    return calls


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("ndim", [3, 4])
def test_what_the_gpu_backend_gets(pretended_gpu, qkv, config, layout, ndim):
    """Views [batch, heads, seqlen, head_dim] of the caller's arrays: no copy."""
    bhsd = [x.astype(np.float16) for x in qkv(20, 30, batch=1, heads=4, kv_heads=2)]
    given = [x if ndim == 4 else x[0] for x in bhsd]
    if layout == "BSHD":
        given = [np.ascontiguousarray(x.swapaxes(-2, -3)) for x in given]
    o, lse = s2o_attention(*given, config=config, layout=layout, return_lse=True)
    ((*natives, out, lse_address, visited, problem, used),) = pretended_gpu
    for native, x, full in zip(natives, given, bhsd, strict=True):
        assert np.shares_memory(native, x)
        assert native.shape == full.shape
        np.testing.assert_array_equal(native, full)
    assert out.shape == (1, 4, 20, 64)
    assert np.shares_memory(out, o)
    assert (o == 1).all()
    assert o.shape == given[0].shape
    assert lse_address == lse.__array_interface__["data"][0]
    assert visited == 0
    assert lse.shape == (1, 4, 20)[4 - ndim :]
    assert (lse == 2).all()
    assert used is config
    assert (problem.kv_heads, problem.seqlen_k, problem.dtype) == (2, 30, "float16")


def test_only_a_strided_last_axis_is_copied(pretended_gpu, qkv, config):
    wide = [np.repeat(x.astype(np.float16), 2, axis=-1) for x in qkv(20)]
    q, k, v = wide[0][..., ::2], wide[1][..., ::2], wide[2][..., 64:]
    s2o_attention(q, k, v[:, :, ::-1], config=config)
    ((native_q, native_k, native_v, *_),) = pretended_gpu
    for native, x in ((native_q, q), (native_k, k)):
        assert native.strides[-1] == 2
        assert not np.shares_memory(native, x)
    assert native_v.strides[2:] == v[:, :, ::-1].strides[2:]
    assert np.shares_memory(native_v, v)


def test_lse_is_computed_only_when_asked(pretended_gpu, qkv, config):
    s2o_attention(*(x.astype(np.float16) for x in qkv(20)), config=config)
    assert pretended_gpu[0][4] == 0


def test_statistics_say_which_kernels_ran(pretended_gpu, qkv, config):
    x = [x.astype(np.float16) for x in qkv(20)]
    _, stats = s2o_attention(*x, config=config, return_stats=True)
    assert (stats.path, stats.path_reason, stats.graphs) == ("portable", "a reason", "off: a reason")
    assert ", path: portable (a reason), graphs off: a reason, Problem(" in repr(stats)
    _, stats = s2o_attention(*x, config=config, return_stats=True, backend="numpy")
    assert (stats.path, stats.path_reason, stats.graphs) == ("numpy", None, None)
    assert ", path: numpy, Problem(" in repr(stats)
    _, stats = s2o_attention(*(x[:, :, :0] for x in x), config=config, return_stats=True)
    assert (stats.path, stats.path_reason, stats.graphs) == (None, None, None)


def test_float32_on_a_gpu_is_refused(pretended_gpu, qkv):
    with pytest.raises(TypeError, match='float32; accepted.*cast the inputs to bfloat16.*backend="numpy"'):
        s2o_attention(*qkv(20))
