"""When a call is launched, captured and replayed, on a CUDA that only takes notes. On a GPU: test_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from s2o_cupy.cuda.graphs import GRAPHS, GraphCache

STREAM = 7  # a caller's


class Cuda:
    """As much of cupy.cuda as GraphCache uses. A stream's work is a list, a captured one's the graph's."""

    def __init__(self):
        self.runtime = SimpleNamespace(
            streamCaptureModeRelaxed=2,
            streamIsCapturing=self.is_capturing,
            streamGetPriority=lambda stream: -stream,
            graphLaunch=self.launch_graph,
        )
        self.capturing = False  # the callers' streams; an error: what asking raises
        self.done = []  # (stream, work) in order
        self.captured = {}  # by stream
        self.graphs = []  # the work of each
        self.replays = 0
        self.fails = ""  # the name of what raises

    def maybe_fail(self, name):
        if self.fails == name:
            raise RuntimeError(name)

    def is_capturing(self, stream):
        if isinstance(self.capturing, Exception):
            raise self.capturing
        return self.capturing

    def enqueue(self, stream, work):
        if stream in self.captured:
            self.captured[stream].append(work)
        else:
            self.done.append((stream, work))

    def launch_graph(self, graph, stream):
        self.maybe_fail("graphLaunch")
        self.replays += 1
        self.done += [(stream, work) for work in self.graphs[graph]]

    def Stream(self, *, non_blocking, priority):
        assert non_blocking
        assert priority == -STREAM
        self.maybe_fail("Stream")
        stream = SimpleNamespace(ptr=1000 + len(self.graphs))

        def begin_capture(mode):
            assert mode == 2
            self.maybe_fail("begin_capture")
            self.captured[stream.ptr] = []

        def end_capture():
            work = self.captured.pop(stream.ptr)
            self.maybe_fail("end_capture")
            self.graphs.append(work)
            return SimpleNamespace(graphExec=len(self.graphs) - 1)

        stream.begin_capture, stream.end_capture = begin_capture, end_capture
        return stream


@pytest.fixture
def cuda():
    return Cuda()


@pytest.fixture
def call(cuda):
    """call(addresses, stream=...): run it and check that its work is done once, in order, on the stream."""
    replay = GraphCache(cuda)

    def call(*addresses, stream=STREAM):
        before = len(cuda.done)

        def launch(into):
            call.launches += 1
            for step in ("memset", "kernel", "kernel"):
                cuda.enqueue(into, (step, addresses))
                if into != stream:
                    cuda.maybe_fail("launch")

        replay.run(addresses, stream, launch)
        expected = [(stream, (step, addresses)) for step in ("memset", "kernel", "kernel")]
        assert cuda.done[before:] == expected
        assert not cuda.captured

    call.replay, call.launches = replay, 0
    return call


def test_first_launched_then_captured_then_replayed(cuda, call):
    call(1, 2)
    assert (call.launches, len(cuda.graphs), cuda.replays) == (1, 0, 0)
    call(1, 2)
    assert (call.launches, len(cuda.graphs), cuda.replays) == (2, 1, 1)
    for repeat in range(3, 10):
        call(1, 2)
        assert (call.launches, len(cuda.graphs), cuda.replays) == (2, 1, repeat - 1)


def test_another_address_is_another_graph(cuda, call):
    for _ in range(3):
        for addresses in ((1, 2), (1, 3), (2, 1), (1, 0)):
            call(*addresses)
    assert (call.launches, len(cuda.graphs), cuda.replays) == (8, 4, 8)


def test_another_stream_is_another_graph(cuda, call, monkeypatch):
    monkeypatch.setattr(cuda.runtime, "streamGetPriority", lambda stream: -STREAM)
    for _ in range(3):
        call(1, stream=0)
        call(1)
    assert (len(cuda.graphs), cuda.replays) == (2, 4)


def test_the_least_recently_used_is_dropped(cuda, call):
    for i in range(GRAPHS):
        for _ in range(2):
            call(i)
    call(0)
    assert (len(cuda.graphs), cuda.replays) == (GRAPHS, GRAPHS + 1)
    call(GRAPHS)  # in place of 1, although it came only once
    assert len(call.replay.graphs) == GRAPHS
    launches = call.launches
    for i in (0, *range(2, GRAPHS)):
        call(i)
    assert call.launches == launches
    call(1)  # as if for the first time
    assert call.launches == launches + 1
    assert len(call.replay.graphs) == GRAPHS
    assert (len(cuda.graphs), cuda.replays) == (GRAPHS, 2 * GRAPHS)


def test_more_calls_in_turn_than_graphs_are_launched(cuda, call):
    for _ in range(5):
        for i in range(GRAPHS + 1):
            call(i)
    assert (call.launches, len(cuda.graphs)) == (5 * (GRAPHS + 1), 0)


@pytest.mark.parametrize("capturing", [True, RuntimeError("cudaErrorStreamCaptureImplicit")], ids=["yes", "an error"])
def test_while_the_caller_captures_it_is_launched_and_nothing_is_kept(cuda, call, capturing):
    cuda.capturing = capturing
    for _ in range(3):
        call(1)
    assert (call.launches, len(cuda.graphs), call.replay.graphs) == (3, 0, {})
    cuda.capturing = False
    for _ in range(3):
        call(1)
    assert (call.launches, cuda.replays) == (5, 2)
    cuda.capturing = capturing
    call(1)
    assert (call.launches, cuda.replays) == (6, 2)
    cuda.capturing = False
    call(1)
    assert (call.launches, cuda.replays) == (6, 3)


@pytest.mark.parametrize("what", ["Stream", "begin_capture", "launch", "end_capture", "graphLaunch"])
def test_what_fails_is_launched_from_then_on(cuda, call, what):
    cuda.fails = what
    call(1)
    call(1)
    assert call.replay.failed and not call.replay.graphs
    cuda.fails = ""
    launches, graphs = call.launches, len(cuda.graphs)
    for _ in range(3):
        call(1)
        call(2)
    assert (call.launches, len(cuda.graphs), cuda.replays) == (launches + 6, graphs, 0)


def test_an_interrupted_capture_is_ended(cuda, call):
    call(1)

    def interrupted(into):
        cuda.enqueue(into, "half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call.replay.run((1,), STREAM, interrupted)
    assert not cuda.captured
    call(1)
    call(1)
    assert (call.launches, cuda.replays) == (2, 2)
