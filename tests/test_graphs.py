"""When a call is launched, captured and replayed, on a CUDA that only takes notes. On a GPU:
test_gpu_repeated_calls.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from s2o_cupy.cuda import graphs
from s2o_cupy.cuda.graphs import ATTEMPTS, GRAPHS, GraphCache

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
    graphs.forget_graphs()
    yield Cuda()
    graphs.forget_graphs()


def kept():
    """Keys of all prepared calls."""
    return len(graphs._graphs)


@pytest.fixture
def prepared(cuda):
    """prepared() -> call; call(addresses, stream=...): run it and check that its work is done once, in order, on the
    stream. It returns what was said of graphs."""
    return lambda: make_call(cuda, GraphCache(cuda))


@pytest.fixture
def call(prepared):
    return prepared()


def make_call(cuda, replay):
    def call(*addresses, stream=STREAM):
        before = len(cuda.done)

        def launch(into):
            call.launches += 1
            for step in ("memset", "kernel", "kernel"):
                cuda.enqueue(into, (step, addresses))
                if into != stream:
                    cuda.maybe_fail("launch")

        said = replay.run(addresses, stream, launch)
        expected = [(stream, (step, addresses)) for step in ("memset", "kernel", "kernel")]
        assert cuda.done[before:] == expected
        assert not cuda.captured
        return said

    call.replay, call.launches = replay, 0
    return call


def test_first_launched_then_captured_then_replayed(cuda, call):
    assert call(1, 2) == "launched"
    assert (call.launches, len(cuda.graphs), cuda.replays) == (1, 0, 0)
    assert call(1, 2) == "replayed"
    assert (call.launches, len(cuda.graphs), cuda.replays) == (2, 1, 1)
    for repeat in range(3, 10):
        assert call(1, 2) == "replayed"
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


def test_another_prepared_call_has_graphs_of_its_own(cuda, prepared):
    first, second = prepared(), prepared()
    for _ in range(3):
        first(1)
        second(1)
    assert (first.launches, second.launches, len(cuda.graphs), cuda.replays) == (2, 2, 2, 4)


def test_the_least_recently_used_of_all_prepared_calls_is_dropped(cuda, prepared):
    calls = [prepared() for _ in range(GRAPHS // 8)]
    keys = [(call, i) for call in calls for i in range(8)]
    for call, i in keys:
        assert [call(i), call(i)] == ["launched", "replayed"]
    calls[0](0)
    assert (len(cuda.graphs), kept()) == (GRAPHS, GRAPHS)
    calls[1](8)  # in place of calls[0]'s 1, although it came only once
    assert kept() == GRAPHS
    for call, i in keys[:1] + keys[2:]:
        assert call(i) == "replayed"
    assert calls[0](1) == "launched"  # as if for the first time
    assert (len(cuda.graphs), kept()) == (GRAPHS, GRAPHS)


def test_more_calls_in_turn_than_graphs_are_launched(cuda, call):
    for _ in range(5):
        for i in range(GRAPHS + 1):
            call(i)
    assert (call.launches, len(cuda.graphs), kept()) == (5 * (GRAPHS + 1), 0, GRAPHS)


def test_forgotten_graphs_are_made_anew(cuda, prepared):
    calls = prepared(), prepared()
    for _ in range(2):
        for call in calls:
            call(1)
    graphs.forget_graphs()
    assert kept() == 0
    for call in calls:
        assert [call(1), call(1)] == ["launched", "replayed"]
    assert len(cuda.graphs) == 4


def test_a_graph_that_other_threads_push_out_while_it_is_made_is_launched(cuda, call):
    call(1)
    good = cuda.Stream

    def stream(**options):
        graphs.forget_graphs()
        return good(**options)

    cuda.Stream = stream
    assert call(1) == "replayed"
    assert kept() == 0


@pytest.mark.parametrize("capturing", [True, RuntimeError("cudaErrorStreamCaptureImplicit")], ids=["yes", "an error"])
def test_while_the_caller_captures_it_is_launched_and_nothing_is_kept(cuda, call, capturing):
    cuda.capturing = capturing
    for _ in range(3):
        call(1)
    assert (call.launches, len(cuda.graphs), kept()) == (3, 0, 0)
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


FAILURES = ["Stream", "begin_capture", "launch", "end_capture", "graphLaunch"]


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_once_is_launched_and_tried_again(cuda, call, what):
    """Memory may be there the next time."""
    for _ in range(2 * ATTEMPTS):  # failures that are not one after the other do not add up
        cuda.fails = what
        assert [call(1), call(1)] == ["launched", "launched"]
        assert kept() == 0
        cuda.fails = ""
        assert [call(1), call(1), call(1)] == ["launched", "replayed", "replayed"]
        graphs.forget_graphs()


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_again_and_again_is_launched_from_then_on_and_says_why(cuda, prepared, what):
    call, other = prepared(), prepared()
    call(3)
    other(3)
    cuda.fails = what
    for attempt in range(1, ATTEMPTS + 1):
        assert call(1) == "launched"
        assert call(1) == ("launched" if attempt < ATTEMPTS else f"off: {what}")
    assert kept() == 1  # the other's
    cuda.fails = ""
    launches, made = call.launches, len(cuda.graphs)
    for _ in range(3):
        assert [call(1), call(2), call(3)] == [f"off: {what}"] * 3
    assert (call.launches, len(cuda.graphs), cuda.replays) == (launches + 9, made, 0)
    assert other(3) == "replayed"


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
