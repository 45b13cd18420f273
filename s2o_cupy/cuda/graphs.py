"""Calls that come again with the same addresses, as CUDA graphs: the host launches one thing instead of many."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ..caches import forgets

__all__ = ["GRAPHS", "GRAPH_LAUNCHES", "LAUNCHED", "REPLAYED", "GraphCache", "forget_graphs"]

GRAPH_LAUNCHES = 4  # kernels of a call up to which a graph would save the host little
GRAPHS = 256  # of a process, keys that came once included: a model's layers have one each, a graph some 100 KiB
ATTEMPTS = 3  # that may fail one after the other, for want of memory say, before a prepared call has no more graphs

REPLAYED, LAUNCHED = "replayed", "launched"  # what a call did

# Of all prepared calls, least recently used first; None: the key came once. A graph that is dropped while it runs is
# freed when it is done: "if the executable graph is in-flight, it will not be terminated, but rather freed
# asynchronously on completion" (cuGraphExecDestroy).
_Key = tuple["GraphCache", tuple[int, ...], int]
_graphs: dict[_Key, Any] = {}
_lock = threading.Lock()


def forget_graphs() -> None:
    """Drop the graphs of all prepared calls."""
    with _lock:
        _graphs.clear()


forgets(forget_graphs)


class GraphCache:
    """The graphs of a prepared call. The caller keeps other threads out of it, though not out of other calls'.

    A key is all that a graph's launches hold: addresses, and the stream, as kernels in a graph keep the priority they
    were captured with. It comes once by plain launches, the second time it is captured, from then on replayed.
    """

    def __init__(self, cuda: Any) -> None:
        """``cuda``: the module cupy.cuda."""
        self.cuda = cuda
        self.failures = 0  # since a graph was last launched
        self.off: str | None = None  # why there are no graphs any more

    def run(self, addresses: tuple[int, ...], stream: int, launch: Callable[[int], None]) -> str:
        """What ``launch(stream)`` does; it may enqueue on the stream that it is given, and nothing else.

        Returns REPLAYED, LAUNCHED or "off: " and why.
        """
        # While the caller captures, nothing is made or dropped: CUDA may forbid that then.
        if self.off is None and not self.is_capturing(stream) and self._replay((self, addresses, stream), launch):
            return REPLAYED
        launch(stream)
        return LAUNCHED if self.off is None else f"off: {self.off}"

    def is_capturing(self, stream: int) -> bool:
        try:
            return bool(self.cuda.runtime.streamIsCapturing(stream))
        except RuntimeError:  # the capture is invalid, or the default stream may not be used now: launch says which
            return True

    def _replay(self, key: _Key, launch: Callable[[int], None]) -> bool:
        """False: launch instead."""
        stream = key[2]
        with _lock:
            known = key in _graphs
            graph = _graphs[key] = _graphs.pop(key, None)
            if len(_graphs) > GRAPHS:
                del _graphs[next(iter(_graphs))]
        if not known:
            return False
        try:
            if graph is None:
                graph = self._capture(stream, launch)
                with _lock:
                    if key in _graphs:  # no other thread's calls have pushed it out
                        _graphs[key] = graph
            self.cuda.runtime.graphLaunch(graph.graphExec, stream)
        except RuntimeError as error:  # of the runtime or the driver; one that is not the graph's own comes again
            self._failed(key, str(error) or type(error).__name__)
            return False
        self.failures = 0
        return True

    def _failed(self, key: _Key, why: str) -> None:
        self.failures += 1
        if self.failures == ATTEMPTS:
            self.off = why
        with _lock:
            for other in [key] if self.off is None else [x for x in _graphs if x[0] is self]:
                _graphs.pop(other, None)

    def _capture(self, stream: int, launch: Callable[[int], None]) -> Any:
        # A stream of its own: the default one cannot be captured, and other threads may be using the caller's.
        # Non-blocking, or the default stream could not be used meanwhile. Relaxed, so that no thread is kept from
        # allocating or freeing memory, which a garbage collection may do here.
        priority = self.cuda.runtime.streamGetPriority(stream)
        private = self.cuda.Stream(non_blocking=True, priority=priority)
        private.begin_capture(self.cuda.runtime.streamCaptureModeRelaxed)
        try:
            launch(private.ptr)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                private.end_capture()
            raise
        return private.end_capture()
