"""Calls that come again with the same addresses, as CUDA graphs: the host launches one thing instead of many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

__all__ = ["GRAPHS", "GRAPH_LAUNCHES", "GraphCache"]

GRAPH_LAUNCHES = 4  # kernels of a call up to which a graph would save the host little
GRAPHS = 8  # of a prepared call


class GraphCache:
    """The graphs of a prepared call. The caller keeps other threads out.

    A key is all that a graph's launches hold: addresses, and the stream, as kernels in a graph keep the priority they
    were captured with. It comes once by plain launches, the second time it is captured, from then on replayed.
    """

    def __init__(self, cuda: Any) -> None:
        """``cuda``: the module cupy.cuda."""
        self.cuda = cuda
        # Least recently used first; None: the key came once. A graph that is dropped while it runs is freed when it
        # is done: "if the executable graph is in-flight, it will not be terminated, but rather freed asynchronously on
        # completion" (cuGraphExecDestroy).
        self.graphs: dict[tuple[int, ...], Any] = {}
        self.failed = False

    def run(self, addresses: tuple[int, ...], stream: int, launch: Callable[[int], None]) -> None:
        """What ``launch(stream)`` does; it may enqueue on the stream that it is given, and nothing else."""
        # While the caller captures, nothing is made or dropped: CUDA may forbid that then.
        if self.failed or self._is_capturing(stream) or not self._replay((*addresses, stream), stream, launch):
            launch(stream)

    def _is_capturing(self, stream: int) -> bool:
        try:
            return bool(self.cuda.runtime.streamIsCapturing(stream))
        except RuntimeError:  # the capture is invalid, or the default stream may not be used now: launch says which
            return True

    def _replay(self, key: tuple[int, ...], stream: int, launch: Callable[[int], None]) -> bool:
        """False: launch instead."""
        known = key in self.graphs
        graph = self.graphs[key] = self.graphs.pop(key, None)
        if not known:
            if len(self.graphs) > GRAPHS:
                del self.graphs[next(iter(self.graphs))]
            return False
        try:
            if graph is None:
                graph = self.graphs[key] = self._capture(stream, launch)
            self.cuda.runtime.graphLaunch(graph.graphExec, stream)
        except RuntimeError:  # of the runtime or the driver; an error that is not the graph's own comes again
            self.failed = True
            self.graphs.clear()
            return False
        return True

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
