"""Packed sequences: the bits of a loop over them, in one call without copies. On a GPU too when one is present."""

from __future__ import annotations

import itertools
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import DEVICES, SMALL, has_gpu, has_hopper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packs import starts
from pretended import pretend_gpu

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_varlen
from s2o_cupy.arrays.frameworks.numpy import NumpyFramework
from s2o_cupy.arrays.operand import Operand, operand
from s2o_cupy.tools.metrics import rel_l2

# Lengths of queries and of keys. Zeros, one token, odd ones, whole tiles and several segments.
CAUSAL = {
    "one": ([300], [300]),
    "as many keys": ([1, 65, 0, 128, 401], [1, 65, 0, 128, 401]),
    "more keys": ([100, 1, 0, 300, 64], [333, 200, 70, 301, 64]),
    "empty at the ends": ([0, 0, 200, 0], [0, 5, 200, 0]),
    "the same twice": ([150, 150, 150], [300, 300, 300]),
}
FULL = CAUSAL | {
    "fewer keys": ([300, 65], [100, 1]),
    "no key": ([300, 40, 7], [300, 0, 0]),
}
MASKS = [(name, True) for name in CAUSAL] + [(name, False) for name in FULL]


def parts(q, k, v, lengths_q, lengths_k):
    """Each sequence as contiguous [1, heads, seqlen, head_dim] arrays of its own."""
    for (a, b), (c, d) in zip(*(itertools.pairwise(starts(x)) for x in (lengths_q, lengths_k)), strict=True):
        yield [x[begin:end].swapaxes(0, 1)[None].copy() for x, begin, end in ((q, a, b), (k, c, d), (v, c, d))]


def assert_the_loop(device, host, lengths_q, lengths_k, **options):
    """One call gives each sequence's own output, log-sum-exp and statistics."""
    options.setdefault("config", device.config)
    q, k, v = (device.array(x) for x in host)
    out = device.poisoned(q.shape)
    o, lse, stats = s2o_attention_varlen(
        q, k, v, starts(lengths_q), starts(lengths_k), out=out, return_lse=True, return_stats=True, **options
    )
    assert o is out
    assert (lse.shape, lse.dtype) == ((q.shape[1], q.shape[0]), np.float32)
    assert len(stats) == len(lengths_q)
    rows = itertools.pairwise(starts(lengths_q))
    for (begin, end), one, sequence in zip(rows, parts(q, k, v, lengths_q, lengths_k), stats, strict=True):
        own_o, own_lse, own = s2o_attention(*one, return_lse=True, return_stats=True, **options)
        np.testing.assert_array_equal(device.host(o[begin:end]), device.host(own_o[0].swapaxes(0, 1)))
        np.testing.assert_array_equal(device.host(lse[:, begin:end]), device.host(own_lse[0]))
        np.testing.assert_array_equal(device.host(sequence.visited), device.host(own.visited))
        assert (sequence.problem, sequence.config) == (own.problem, own.config)
        assert sequence.density == own.density
    np.testing.assert_array_equal(  # an output of its own, and without the rest
        device.host(s2o_attention_varlen(q, k, v, starts(lengths_q), starts(lengths_k), **options)), device.host(o)
    )


# ---------------------------------------------------------------- the same as a loop


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "is_causal"), MASKS)
def test_the_bits_of_a_loop(device, packed, name, is_causal):
    lengths = FULL[name]
    assert_the_loop(device, packed(*lengths), *lengths, is_causal=is_causal)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("head_dim", [1, 33, 64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 3), (8, 1)])
def test_heads_of_every_size(device, packed, heads, kv_heads, head_dim):
    lengths = CAUSAL["more keys"]
    assert_the_loop(device, packed(*lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim), *lengths)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"tau": 0.0},
        {"tau": 1e30},
        {"segment": 100, "window": 30},
        {"rank": "max", "pooled_queries": 16},
        {"tail": "first_order"},
        {"unit": 1},
        {"dense_up_to": 200},  # on a GPU some sequences are dense, and others are not
        {"workspace_bytes": 1 << 20},
    ],
    ids=str,
)
def test_every_configuration(device, packed, config, changes):
    lengths = [200, 700, 65], [200, 900, 65]
    assert_the_loop(device, packed(*lengths), *lengths, config=replace(config, **changes))


@pytest.mark.parametrize("scale", [0.3, -0.1, 0])
def test_scale_and_tau_by_keyword(device, packed, scale):
    lengths = CAUSAL["more keys"]
    assert_the_loop(device, packed(*lengths), *lengths, scale=scale, tau=0.2)


def test_softcap_by_keyword(device, packed):
    lengths = CAUSAL["more keys"]
    assert_the_loop(device, packed(*lengths), *lengths, softcap=2.0, tau=0.2)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_causal=st.booleans(), kv_heads=st.integers(1, 2), group=st.integers(1, 3))
def test_any_lengths(packed, data, is_causal, kv_heads, group):
    """On the CPU, whose tiles may be small."""
    length = st.one_of(st.just(0), st.integers(0, 70))
    lengths_k = data.draw(st.lists(length, max_size=6))
    lengths_q = [data.draw(st.integers(0, n) if is_causal else length) for n in lengths_k]
    config = S2OConfig(segment=data.draw(st.integers(1, 50)), tau=0.05, block_m=16, block_n=16)
    host = packed(lengths_q, lengths_k, heads=kv_heads * group, kv_heads=kv_heads, head_dim=8)
    assert_the_loop(DEVICES["cpu"], host, lengths_q, lengths_k, config=config, is_causal=is_causal)


@pytest.mark.parametrize(("name", "is_causal"), MASKS)
def test_tau_0_is_dense_in_each_sequence(device, packed, name, is_causal):
    lengths = FULL[name]
    host = packed(*lengths)
    o = s2o_attention_varlen(
        *(device.array(x) for x in host), *map(starts, lengths), tau=0, config=device.config, is_causal=is_causal
    )
    rows = itertools.pairwise(starts(lengths[0]))
    for (begin, end), one in zip(rows, parts(*host, *lengths), strict=True):
        if begin < end:
            own = device.host(o[begin:end]).swapaxes(0, 1)[None]
            if one[1].size:
                device.assert_dense(own, *one, is_causal=is_causal)
            else:
                assert (own == 0).all()


def test_float64_is_computed_in_float64(packed):
    from s2o_cupy.reference.dense import dense_attention

    lengths = CAUSAL["more keys"]
    host = [x.astype(np.float64) for x in packed(*lengths)]
    o = s2o_attention_varlen(*host, *map(starts, lengths), tau=0, config=SMALL)
    exact = [dense_attention(*one)[0][0].swapaxes(0, 1) for one in parts(*host, *lengths)]
    assert o.dtype == np.float64
    assert rel_l2(o, np.concatenate(exact)) < 1e-13


def test_a_sequence_knows_nothing_of_its_neighbours(device, packed, config):
    lengths = [130, 200, 65], [300, 200, 70]
    q, k, v = packed(*lengths)
    starts_q, starts_k = map(starts, lengths)
    call = lambda: device.host(  # noqa: E731
        s2o_attention_varlen(*(device.array(x) for x in (q, k, v)), starts_q, starts_k, config=config)
    )
    expected = call()
    middle_q, middle_k = slice(*starts_q[1:3]), slice(*starts_k[1:3])
    for x, rows in ((q, middle_q), (k, middle_k), (v, middle_k)):
        x[rows] = np.nan
    o = call()
    assert np.isnan(o[middle_q]).all()
    np.testing.assert_array_equal(np.delete(o, middle_q, 0), np.delete(expected, middle_q, 0))


# ---------------------------------------------------------------- nothing to do


def test_no_sequences(device):
    q, k = device.array(np.zeros((0, 4, 64))), device.array(np.zeros((0, 2, 64)))
    for none in ([0], [0, 0, 0]):
        o, lse, stats = s2o_attention_varlen(q, k, k, none, none, return_lse=True, return_stats=True)
        assert (o.shape, o.dtype) == (q.shape, q.dtype)
        assert (lse.shape, lse.dtype) == ((4, 0), np.float32)
        assert [(x.density, x.path) for x in stats] == [(0.0, None)] * (len(none) - 1)


def test_no_key_anywhere(device):
    q, k = device.array(np.ones((5, 4, 64))), device.array(np.ones((0, 2, 64)))
    o, lse = s2o_attention_varlen(
        q, k, k, [0, 2, 5], [0, 0, 0], is_causal=False, return_lse=True, out=device.poisoned(q.shape)
    )
    assert (device.host(o) == 0).all()
    assert np.isneginf(device.host(lse)).all()


# ---------------------------------------------------------------- cu_seqlens, however they come


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_cu_seqlens_on_the_host_and_on_the_device(device, packed, config, dtype):
    lengths = CAUSAL["more keys"]
    q, k, v = (device.array(x) for x in packed(*lengths))
    starts_q, starts_k = map(starts, lengths)
    expected = device.host(s2o_attention_varlen(q, k, v, starts_q, starts_k, config=config))
    host, on_device = (lambda x, xp=xp: xp.array(x, dtype) for xp in (np, device.xp))
    for make in (tuple, lambda x: list(map(dtype, x)), host, on_device):
        o = s2o_attention_varlen(q, k, v, make(starts_q), make(starts_k), config=config)
        np.testing.assert_array_equal(device.host(o), expected)


def test_cu_seqlens_k_are_those_of_q_unless_given(device, packed, config):
    lengths = CAUSAL["as many keys"]
    q, k, v = (device.array(x) for x in packed(*lengths))
    o, same = (s2o_attention_varlen(q, k, v, starts(lengths[0]), x, config=config) for x in (None, starts(lengths[1])))
    np.testing.assert_array_equal(device.host(o), device.host(same))


# ---------------------------------------------------------------- the way to the GPU, without one


def test_rows_of_an_operand():
    """As the operand of the slice itself."""
    many, one = np.zeros((50, 4, 64), np.float16), np.zeros((50, 1, 72), np.float16)
    for x in (many, one, many[::-2], many[:, ::3, 8:]):
        whole = operand(x, "BSHD")
        for begin, end in ((0, len(x)), (3, 20), (24, 25)):
            assert whole.rows(begin, end) == operand(x[begin:end], "BSHD")


def array_at(pointer, shape, strides, dtype):
    """The array whose first element is at an address; strides in bytes."""
    interface = {"data": (pointer, False), "shape": shape, "strides": strides, "typestr": np.dtype(dtype).str}
    return np.asarray(types.SimpleNamespace(__array_interface__=interface | {"version": 3}))


@pytest.fixture
def pretended_gpu(monkeypatch):
    """NumPy arrays that claim to be on a GPU, NumPy for CuPy, and a pipeline that records its calls."""
    recorded: list[Any] = []

    def run_in_turn(calls, config, **options):
        recorded.append((calls, config, options))
        reasons = (f"{call.problem.seqlen_q} queries" for call in calls)
        return [types.SimpleNamespace(path="portable", path_reason=reason, graphs="launched") for reason in reasons]

    pretend_gpu(monkeypatch, run_in_turn=run_in_turn)
    return recorded


def test_what_the_gpu_backend_gets(pretended_gpu, packed, config):
    """One call with views of the caller's arrays; sequences without queries are not in it."""
    lengths = CAUSAL["more keys"]
    q, k, v = (x.astype(np.float16) for x in packed(*lengths))
    starts_q, starts_k = map(starts, lengths)
    o, lse, stats = s2o_attention_varlen(q, k, v, starts_q, starts_k, config=config, return_lse=True, return_stats=True)
    ((calls, used, options),) = pretended_gpu
    assert used is config
    assert options == {"lse_stride": 465, "stream": 0, "memory": None}
    address = lambda x: x.__array_interface__["data"][0]  # noqa: E731
    for call, i in zip(calls, (0, 1, 3, 4), strict=True):
        rows_q, rows_k = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        expected = [operand(x, "BSHD") for x in (q[rows_q], k[rows_k], v[rows_k], o[rows_q])]
        assert list(call.operands) == expected
        assert call.lse == address(lse[:, rows_q])
        assert call.visited == address(stats[i].visited)
        assert (call.problem.batch, call.problem.seqlen_q, call.problem.seqlen_k) == (1, lengths[0][i], lengths[1][i])
        assert call.problem is stats[i].problem
        assert (stats[i].path, stats[i].path_reason) == ("portable", f"{lengths[0][i]} queries")
    assert (stats[2].path, stats[2].path_reason) == (None, None)
    s2o_attention_varlen(q, k, v, starts_q, starts_k, config=config)
    assert all((call.lse, call.visited) == (0, 0) for call in pretended_gpu[1][0])


def test_only_a_strided_last_axis_is_copied(pretended_gpu, packed, config):
    q, k, v = (x.astype(np.float16) for x in packed([30, 40], [30, 40]))
    wide = np.repeat(q, 2, axis=-1)[..., ::2]
    s2o_attention_varlen(wide, k[::-1], v, [0, 30, 70], config=config)
    ((calls, _, _),) = pretended_gpu
    assert calls[0].operands[1] == operand(k[::-1][:30], "BSHD")
    assert calls[0].operands[0].strides == operand(q[:30], "BSHD").strides
    assert calls[0].operands[0].pointer != operand(wide[:30], "BSHD").pointer


def test_cu_seqlens_on_the_gpu_during_a_capture(pretended_gpu, packed, monkeypatch):
    q, k, v = (x.astype(np.float16) for x in packed([30], [30]))
    monkeypatch.setattr(NumpyFramework, "is_capturing", lambda self: True)
    with pytest.raises(ValueError, match="cu_seqlens_q is on cuda:0 while a CUDA graph .*; accepted: a list"):
        s2o_attention_varlen(q, k, v, np.array([0, 30]))
    s2o_attention_varlen(q, k, v, [0, 30])
    assert len(pretended_gpu) == 1


def test_one_workspace_and_lse_with_gaps(monkeypatch):
    """Programs get the same memory, and what they write as contiguous lse lands [heads, total_q]."""
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import pipeline
    from s2o_cupy.problem import Problem

    needs = {10: 1000, 20: 4000, 30: 2000}
    lengths, heads = [10, 30, 20, 10], 3
    lse = np.full((heads, sum(lengths)), np.nan, np.float32)
    start = lse.ctypes.data
    allocations, seen = [], []

    def memory(nbytes):
        allocations.append(np.zeros(nbytes, np.uint8))
        return allocations[-1].ctypes.data, allocations[-1]

    class Program:
        def __init__(self, call, config):
            assert not seen, "all are prepared before the first one runs"
            self.problem = problem = call.problem
            self.workspace = types.SimpleNamespace(nbytes=needs[problem.seqlen_q])
            self.plan = f"plan of {problem.seqlen_q}"

        def run(self, at, stream, memory):
            address, _ = memory(self.workspace.nbytes)
            seen.append((address, at.lse, at.visited, stream))
            rows = self.problem.seqlen_q
            written = array_at(at.lse, (heads, rows), (4 * rows, 4), np.float32)
            written[...] = 100 * np.arange(heads)[:, None] + len(seen)
            return pipeline.Launched(self.plan, "launched")

    def copy(target, target_pitch, source, source_pitch, width, height, kind, stream):
        assert (kind, stream) == ("device to device", 7)
        shape = height, width // 4
        array_at(target, shape, (target_pitch, 4), np.float32)[...] = array_at(
            source, shape, (source_pitch, 4), np.float32
        )

    runtime = types.SimpleNamespace(getDevice=lambda: 0, memcpy2DAsync=copy, memcpyDeviceToDevice="device to device")
    monkeypatch.setattr(pipeline, "runtime", runtime)
    monkeypatch.setattr(pipeline, "_prepared", Program)
    one = Operand(0, (1, heads, 1, 64), (0, 0, 0))
    calls = [
        pipeline.Call(
            (one,) * 4, start + 4 * begin, 5, Problem(1, heads, 1, rows, rows, 64, "float16", True, 0.125)
        )
        for begin, rows in zip(starts(lengths), lengths, strict=False)
    ]
    plans = pipeline.run_in_turn(calls, SMALL, lse_stride=lse.shape[1], stream=7, memory=memory)
    assert [x.plan for x in plans] == ["plan of 10", "plan of 30", "plan of 20", "plan of 10"]
    expected = 100 * np.arange(heads)[:, None] + np.repeat([1, 2, 3, 4], lengths)
    np.testing.assert_array_equal(lse, expected)
    (allocated,) = allocations
    assert allocated.nbytes == 4000 + heads * 30 * 4
    assert {(address, visited, stream) for address, _, visited, stream in seen} == {(allocated.ctypes.data, 5, 7)}
    # A sequence that is all of q, and a single head: no gaps, so nothing is copied.
    seen.clear()
    whole = np.zeros((heads, 20), np.float32)
    problem = Problem(1, heads, 1, 20, 20, 64, "float16", True, 0.125)
    call = pipeline.Call((one,) * 4, whole.ctypes.data, 5, problem)
    pipeline.run_in_turn([call], SMALL, lse_stride=20, stream=7, memory=memory)
    assert seen[0][1] == whole.ctypes.data
    assert allocations[-1].nbytes == 4000


# ---------------------------------------------------------------- on a GPU

gpu = pytest.mark.gpu
LONG = [2000, 65, 0, 900, 128], [2000, 700, 30, 901, 128]


@pytest.fixture(params=["portable", "hopper"])
def gpu_device(request):
    """CuPy arrays in bfloat16, by either path."""
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if request.param == "hopper" and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    found = DEVICES[{"portable": "cuda-bfloat16", "hopper": "hopper-bfloat16"}[request.param]]
    return replace(found, config=replace(found.config, path=request.param))


@gpu
@pytest.mark.parametrize("is_causal", [True, False])
def test_each_path(gpu_device, packed, is_causal):
    assert_the_loop(gpu_device, packed(*LONG, heads=8, head_dim=128), *LONG, is_causal=is_causal)


@gpu
def test_parts_of_a_fused_projection(gpu_device, packed):
    """q, k and v cut out of one array [total, heads + 2 kv_heads, head_dim]."""
    import cupy

    lengths = [300, 1, 500]
    host = packed(lengths, lengths, head_dim=128)
    own = [gpu_device.array(x) for x in host]
    fused = cupy.concatenate(own, axis=1)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    expected = s2o_attention_varlen(*own, starts(lengths), config=gpu_device.config)
    o = s2o_attention_varlen(q, k, v, starts(lengths), config=gpu_device.config)
    np.testing.assert_array_equal(gpu_device.host(o), gpu_device.host(expected))


@gpu
def test_memory_is_that_of_the_largest_need(gpu_device, packed):
    """And the lse of one sequence; it all goes back."""
    import cupy

    longest = [2000]
    many = longest * 6

    def peak(lengths, **options):
        q, k, v = (gpu_device.array(x) for x in packed(lengths, lengths))
        out = cupy.empty_like(q)
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            result = s2o_attention_varlen(q, k, v, starts(lengths), config=gpu_device.config, out=out, **options)
            cupy.cuda.Device().synchronize()
        used = pool.used_bytes()
        del result
        assert pool.used_bytes() == 0
        return pool.total_bytes(), used

    assert peak(many)[0] == peak(longest)[0]
    total, own = peak(many, return_lse=True)
    assert total - own <= peak(longest)[0] + 4 * 4 * 2000 + 1024


@gpu
def test_a_captured_graph(gpu_device, packed):
    """Lengths from the host are the graph's; a device array of them cannot be read."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    config, (starts_q, starts_k) = gpu_device.config, map(starts, LONG)
    options = {"config": config, "return_lse": True, "return_stats": True}
    with stream:
        q, k, v = (gpu_device.array(x) for x in packed(*LONG))
        on_device = cupy.array(starts_q, np.int32)
        s2o_attention_varlen(q, k, v, starts_q, starts_k, **options)
        stream.begin_capture()
        with pytest.raises(ValueError, match="cu_seqlens_q is on cuda:.* while a CUDA graph is captured"):
            s2o_attention_varlen(q, k, v, on_device, starts_k, config=config)
        o, lse, stats = s2o_attention_varlen(q, k, v, starts_q, starts_k, **options)
        graph = stream.end_capture()
        others = [cupy.full(1 << n, 7, np.int32) for n in range(10, 23) for _ in range(3)]
        for _ in range(20):
            for x in (q, k, v):
                x[...] = cupy.roll(x, 1, axis=0)
            graph.launch(stream=stream)
            eager = s2o_attention_varlen(q, k, v, starts_q, starts_k, **options)
            assert bool((o.view(np.uint16) == eager[0].view(np.uint16)).all())
            assert bool((lse.view(np.uint32) == eager[1].view(np.uint32)).all())
            assert all(bool((x.visited == y.visited).all()) for x, y in zip(stats, eager[2], strict=True))
        assert all(bool((x == 7).all()) for x in others)


@gpu
def test_torch_on_a_gpu(gpu_device, packed):
    """The bits of CuPy's arrays, on a side stream, with cu_seqlens on the host and on the GPU, and in a graph."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    host = packed(*LONG, head_dim=128)
    starts_q, starts_k = map(starts, LONG)
    config = gpu_device.config
    expected = s2o_attention_varlen(*map(gpu_device.array, host), starts_q, starts_k, config=config, return_lse=True)
    expected_o, expected_lse = map(gpu_device.host, expected)
    q, k, v = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in host)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = q * 1
        on_device = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (starts_q, starts_k)]
        for cu_seqlens in ((starts_q, starts_k), on_device):
            o, lse = s2o_attention_varlen(late, k, v, *cu_seqlens, config=config, return_lse=True)
            assert o.shape == q.shape and lse.shape == (4, len(q))
            np.testing.assert_array_equal(o.double().cpu().numpy(), expected_o)
            np.testing.assert_array_equal(lse.double().cpu().numpy(), expected_lse)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="while a CUDA graph is captured"):
            s2o_attention_varlen(q, k, v, *on_device, config=config)
        o, lse = s2o_attention_varlen(q, k, v, starts_q, starts_k, config=config, return_lse=True)
    for x in (o, lse):
        x.zero_()
    graph.replay()
    np.testing.assert_array_equal(o.double().cpu().numpy(), expected_o)
    np.testing.assert_array_equal(lse.double().cpu().numpy(), expected_lse)


@gpu
def test_a_path_that_cannot_run_launches_nothing(gpu_device, packed):
    """Nor if only a later sequence refuses: here all do, by the size of their tiles."""
    if gpu_device.config.path != "hopper":
        pytest.skip("about the Hopper kernels")
    q, k, v = (gpu_device.array(x) for x in packed([10, 0], [10, 0]))
    out = gpu_device.poisoned(q.shape)
    with pytest.raises(ValueError, match="path is 'hopper', but block_n is 64, not 128"):
        s2o_attention_varlen(q, k, v, [0, 10, 10], config=replace(gpu_device.config, block_n=64), out=out)
    assert np.isnan(gpu_device.host(out)).all()
