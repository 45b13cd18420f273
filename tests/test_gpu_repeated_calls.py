"""Calls that come again on a GPU: captured in graphs by their caller, or replayed by the pipeline on its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import has_gpu, spin
from packs import assert_same_bits, words

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.caches import clear_cache
from s2o_cupy.cuda import graphs
from s2o_cupy.cuda.graphs import GRAPH_LAUNCHES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]


# ---------------------------------------------------------------- plain calls


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "order", [{}, {"unit": 16}, {"rank": "weight", "tail": "none"}], ids=["default", "units of 16", "weight"]
)
def test_calls_that_fill_the_gpu_repeat_their_bits(gpu, path, order, head_dim):
    """With several blocks on each multiprocessor, which wait for one another's copies, products and memory."""
    config = S2OConfig(path=path, dense_up_to=0, **order)
    q, k, v = gpu(16_384 if path == "hopper" else 4096, heads=16, kv_heads=8, head_dim=head_dim)
    k += k[:, :, :1] * 3  # scores of a wide spread
    first = s2o_attention(q, k, v, config=config, return_lse=True, return_stats=True)
    for _ in range(10):
        again = s2o_attention(q, k, v, config=config, return_lse=True, return_stats=True)
        assert (words(first[0]) == words(again[0])).all()
        assert (words(first[1]) == words(again[1])).all()
        assert (first[2].visited == again[2].visited).all()


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_a_call_like_one_before_reads_what_its_stream_has_written(path_config, qkv, framework):
    """It is known and takes the short way, on whichever stream is current."""
    import cupy

    q, k, v = (cupy.asarray(x.astype(np.float16)) for x in qkv(700, heads=4, head_dim=128))
    other = q[:, :, ::-1].copy()
    expected = [s2o_attention(x.copy(), k, v, config=path_config) for x in (q, other)]
    if framework == "torch":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
        q, k, v, other = (torch.from_dlpack(x) for x in (q, k, v, other))
        expected = [torch.from_dlpack(x) for x in expected]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        entered = torch.cuda.stream
    else:
        streams = [cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)]
        entered = lambda stream: stream  # noqa: E731
    s2o_attention(q, k, v, config=path_config)
    cupy.cuda.Device().synchronize()
    for turn in range(6):
        with entered(streams[turn % 2]):
            handle = streams[turn % 2].cuda_stream if framework == "torch" else streams[turn % 2].ptr
            with cupy.cuda.ExternalStream(handle):
                spin(milliseconds=20)
            q[...] = other if turn % 3 else q.clone() if framework == "torch" else q.copy()
            o = s2o_attention(q, k, v, config=path_config)
        cupy.cuda.Device().synchronize()
        assert bool((o == expected[turn > 0]).all())


# ---------------------------------------------------------------- captured by the caller


@pytest.mark.parametrize("given", [False, True], ids=["own output", "out="])
def test_100_replays_of_a_captured_graph(path_config, gpu, given):
    """Equal to eager calls, and the graph writes no memory of others: its scratch is its own."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        q, k, v = gpu(1500, heads=4, head_dim=128)
        out = cupy.empty_like(q) if given else None
        s2o_attention(q, k, v, config=path_config)  # kernels are loaded outside the capture
        pool = cupy.get_default_memory_pool()
        used = pool.used_bytes()
        stream.begin_capture()
        o, lse, stats = s2o_attention(q, k, v, config=path_config, out=out, return_lse=True, return_stats=True)
        graph = stream.end_capture()
        assert pool.used_bytes() - used <= o.nbytes * (not given) + lse.nbytes + stats.visited.nbytes + 3 * 512
        sizes = [x // 4 for x in (1 << 12, 1 << 14, 1 << 16, 48_000, 1 << 18, 1 << 20, 1 << 22)]
        others = [cupy.full(size, 7, np.int32) for size in sizes for _ in range(4)]
        equal = []
        for _ in range(100):
            for x in (q, k, v):
                x[...] = cupy.roll(x, 1, axis=2)
            graph.launch(stream=stream)
            eager = s2o_attention(q, k, v, config=path_config, return_lse=True, return_stats=True)
            equal.append((words(o) == words(eager[0])).all() & (words(lse) == words(eager[1])).all())
            equal.append((stats.visited == eager[2].visited).all())
        stream.synchronize()
        assert all(map(bool, equal))
        assert all(bool((x == 7).all()) for x in others)


def test_a_graph_captured_by_torch(path_config, qkv):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    q, k, v = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in qkv(1500, heads=4))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        s2o_attention(q, k, v, config=path_config)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = s2o_attention(q, k, v, config=path_config)
    for _ in range(100):
        for x in (q, k, v):
            x.copy_(x.roll(1, dims=2))
        graph.replay()
        assert torch.equal(o, s2o_attention(q, k, v, config=path_config))


# ---------------------------------------------------------------- replayed


@pytest.fixture
def launched(monkeypatch):
    """launched(): kernels that were launched since it was last asked, captured ones among them."""
    from cupy.cuda import driver

    from s2o_cupy.cuda import program

    count = 0

    def launch(*arguments):
        nonlocal count
        count += 1
        driver.launchKernel(*arguments)

    def ask():
        nonlocal count
        asked, count = count, 0
        return asked

    fake = SimpleNamespace(launchKernel=launch, ctxGetCurrent=driver.ctxGetCurrent)
    monkeypatch.setattr(program, "driver", fake)
    clear_cache()
    return ask


@pytest.fixture
def rounds(path_config):
    """A config with which the arrays of `gpu(2000, heads=8, kv_heads=2)` take more than GRAPH_LAUNCHES launches."""
    return replace(path_config, workspace_bytes=1 << 20)


def poison(x):
    """NaN everywhere."""
    words(x).fill(0xFFFF)


def on(stream):
    """CuPy's stream of this name, to be entered."""
    import cupy

    return {
        "default": cupy.cuda.Stream.null,
        "blocking": cupy.cuda.Stream(),
        "non-blocking": cupy.cuda.Stream(non_blocking=True),
        "high priority": cupy.cuda.Stream(non_blocking=True, priority=-1),
    }[stream]


@pytest.mark.parametrize("stream", ["default", "blocking", "non-blocking", "high priority"])
def test_a_repeated_call_is_replayed(rounds, gpu, launched, stream):
    """The same bits from launches, from the capture and from each replay; new values in the same arrays are seen."""
    import cupy

    with on(stream):
        q, k, v = gpu(2000, heads=8, kv_heads=2)
        first = s2o_attention(q, k, v, config=rounds)
        each = launched()
        assert each > GRAPH_LAUNCHES
        out = cupy.empty_like(q)
        counts = []
        for repeat in range(12):
            if repeat == 6:
                for x in (q, k, v):
                    x[...] = cupy.roll(x, 1, axis=2)
                first = s2o_attention(*(x.copy() for x in (q, k, v)), config=rounds)
                launched()
            poison(out)
            s2o_attention(q, k, v, config=rounds, out=out)
            counts.append(launched())
            assert_same_bits(out, first)
        assert counts[0] == each
        # The workspace is where it was, or soon is again after other allocations.
        assert counts[3:6] == counts[9:] == [0, 0, 0]
        other = [x.copy() for x in (q, k, v)]
        assert_same_bits(s2o_attention(*other, config=rounds), first)
        assert launched() == each


def test_replayed_with_lse_and_statistics(rounds, gpu, launched):
    """Of memory that is always the same: with and without each of the two they are different calls."""
    import cupy

    from s2o_cupy.arrays.operand import Call, operand
    from s2o_cupy.cuda import pipeline
    from s2o_cupy.problem import validate

    q, k, v = gpu(2000, heads=8, kv_heads=2)
    problem = validate(
        (q.shape, k.shape, v.shape), ["bfloat16"] * 3, config=rounds, backend="cupy", is_causal=True, scale=None
    )
    o, expected_lse, stats = s2o_attention(q, k, v, config=rounds, return_lse=True, return_stats=True)
    out = cupy.empty_like(q)
    operands = tuple(operand(x, "BHSD") for x in (q, k, v, out))
    lse, visited = cupy.empty(q.shape[:3], np.float32), cupy.empty_like(stats.visited)
    workspace = {}

    def memory(nbytes):
        if nbytes not in workspace:
            workspace[nbytes] = cupy.cuda.alloc(nbytes)
        kept = workspace[nbytes]
        cupy.cuda.runtime.memsetAsync(kept.ptr, 0xFF, nbytes, cupy.cuda.get_current_stream().ptr)
        return kept.ptr, kept

    counts = []
    for _ in range(4):
        for with_lse in (False, True):
            for with_visited in (False, True):
                poison(out)
                lse.fill(7)
                visited.fill(-7)
                launched()
                pipeline.run(
                    Call(operands, lse.data.ptr * with_lse, visited.data.ptr * with_visited, problem),
                    rounds,
                    stream=cupy.cuda.get_current_stream().ptr,
                    memory=memory,
                )
                counts.append(launched())
                assert_same_bits(out, o)
                assert bool((lse == (expected_lse if with_lse else 7)).all())
                assert bool((visited == (stats.visited if with_visited else -7)).all())
    assert min(counts[:8]) > GRAPH_LAUNCHES
    assert counts[8:] == [0] * 8


def test_a_replayed_call_can_be_captured(rounds, gpu, launched):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        q, k, v = gpu(2000, heads=8, kv_heads=2)
        out = cupy.empty_like(q)
        for _ in range(4):
            s2o_attention(q, k, v, config=rounds, out=out)
        expected = out.copy()
        launched()
        stream.begin_capture()
        s2o_attention(q, k, v, config=rounds, out=out)
        graph = stream.end_capture()
        assert launched() > GRAPH_LAUNCHES
        for _ in range(3):
            poison(out)
            graph.launch(stream=stream)
            assert_same_bits(out, expected)
            poison(out)
            s2o_attention(q, k, v, config=rounds, out=out)
            assert_same_bits(out, expected)


def test_graphs_are_dropped_while_they_run(rounds, gpu, launched, monkeypatch):
    """By others' turns, and with the prepared call."""
    import cupy

    few = 8  # as making all that are kept would take longer than the GPU is kept busy
    monkeypatch.setattr(graphs, "GRAPHS", few)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        q, k, v = gpu(2000, heads=8, kv_heads=2)
        expected = s2o_attention(q, k, v, config=rounds)
        outs = [cupy.empty_like(q) for _ in range(few + 3)]
        for out in outs:
            poison(out)
        stream.synchronize()
        spin(milliseconds=500)
        for out in outs:
            for _ in range(3):
                s2o_attention(q, k, v, config=rounds, out=out)
        clear_cache()
        queued = not stream.done
        stream.synchronize()
        assert queued  # or nothing was dropped while it ran
        for out in outs:
            assert_same_bits(out, expected)


def test_replays_of_threads_and_of_memory_that_was_given_back(rounds, gpu):
    """Each thread has a stream, and hence a workspace, of its own. CUDA gives out freed addresses again."""
    import cupy

    q, k, v = gpu(2000, heads=8, kv_heads=2)
    expected = s2o_attention(q, k, v, config=rounds)
    cupy.cuda.Device().synchronize()

    def calls(_):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            out, equal = cupy.empty_like(q), []
            for _ in range(20):
                poison(out)
                s2o_attention(q, k, v, config=rounds, out=out)
                equal.append((words(out) == words(expected)).all())
            stream.synchronize()
            return all(map(bool, equal))

    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(calls, range(8)))
        cupy.get_default_memory_pool().free_all_blocks()
