"""The taus that keep each head to an error, found on the device: sampled segments are attended densely and at ladders
of taus, and what comes out decides. Nothing waits for the GPU.

A sampled segment is a call of its own, in which a query head stands once for each tau of a ladder. Segments run on
several streams at a time, as one alone would fill few multiprocessors.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from ..arrays.operand import ITEM_BYTES, Operand
from ..caches import remembered
from ..plan import error_search, head_taus
from ..plan.build import ALIGNMENT
from ..plan.kernels import Kernel
from ..problem import Problem
from ..spec import FIRST_LADDER, S2OConfig
from . import compiler, pipeline
from .graphs import GraphCache
from .pipeline import Memory, Operands

__all__ = ["find_taus"]

STREAMS = 16  # segments at a time
ROUNDS = 2  # ladders
FLOAT = 4  # bytes
ALIGNED = 16  # bytes, of rows that the fast copies take
LADDER = len(FIRST_LADDER)
TINY = float(np.finfo(np.float32).tiny)


def find_taus(
    operands: Operands, taus: int, problem: Problem, config: S2OConfig, *, stream: int, memory: Memory
) -> None:
    """Write each head's tau, float32 [batch, heads], to the address ``taus``. ``config`` has an error, and the call is
    not dense. ``operands``: as of `pipeline.run`; the output is not touched."""
    places = tuple([x.pointer % ALIGNED for x in operands])
    strides = tuple(x.strides for x in operands)
    search = _search(problem, config, runtime.getDevice(), places, strides)
    search.run(operands, taus, stream, memory)


@remembered
def _search(
    problem: Problem, config: S2OConfig, device: int, places: tuple[int, ...],
    strides: tuple[tuple[int, int, int], ...],
) -> _Search:  # fmt: skip
    """``places``, bytes past a multiple of ALIGNED, and ``strides``: what the prepared calls of segments depend on."""
    return _Search(problem, config, device)


class _Segment(NamedTuple):
    """A sampled one: its queries, the keys that it sees, and its calls."""

    begin: int
    end: int
    seen: int
    dense: Problem
    tried: Problem  # with a head for each tau


class _Search:
    def __init__(self, problem: Problem, config: S2OConfig, device: int) -> None:
        self.problem, self.config, self.device = problem, config, device
        self.exact = replace(config.with_tau(0.0), dense_up_to=None, tail="none")
        self.tried = replace(config, error=1.0, dense_up_to=0)  # whose taus are there
        found, geometry = error_search.sampled(problem, config), problem.geometry(config)
        self.segments = [self._segment(n, geometry) for n in found.segments][::-1]  # the longest first
        self.weights = found.weights[::-1]
        of_heads = config.errors(problem.heads)
        self.errors = np.array([max(head_taus.as_float32(x), TINY) for x in of_heads], np.float32)
        heads, self.rows = problem.heads, max(x.end - x.begin for x in self.segments)
        counts = {
            "errors": heads,
            "ladders": ROUNDS * heads * LADDER,
            "sums": ROUNDS * len(self.segments) * heads * LADDER,
            "sizes": len(self.segments) * heads,
        }
        self.places, self.shared_bytes = {}, 0
        for name, count in counts.items():
            self.places[name] = self.shared_bytes
            self.shared_bytes += _padded(FLOAT * count)
        self.dense_bytes = _padded(heads * self.rows * problem.head_dim * ITEM_BYTES)  # an output of a segment
        self.streams = 0  # known when the calls are prepared
        self.workspace_bytes = 0
        self.replay = GraphCache(cupy.cuda)
        self.lock = threading.RLock()

    def _segment(self, n: int, geometry: Any) -> _Segment:
        p, (begin, end) = self.problem, geometry.queries(n)
        seen = end + geometry.offset if p.is_causal else p.seqlen_k
        dense = replace(p, batch=1, seqlen_q=end - begin, seqlen_k=seen)
        return _Segment(begin, end, seen, dense, replace(dense, heads=p.heads * LADDER))

    def run(self, operands: Operands, taus: int, stream: int, memory: Memory) -> None:
        if self.streams == 0:
            self._prepare(operands)
        tried_bytes = 2 * LADDER * self.dense_bytes  # queries and outputs
        each = self.workspace_bytes + tried_bytes
        wanted = self.shared_bytes + len(self.segments) * self.dense_bytes + self.streams * each
        address, keeper = memory(wanted)
        q, k, v, _ = operands
        addresses = (q.pointer, k.pointer, v.pointer, taus, address)
        captured = self.replay.is_capturing(stream)  # by the caller
        pipeline.make_context_current()
        with self.lock, _sides.lock:
            self.replay.run(addresses, stream, lambda into: self._search(operands, taus, address, into, captured))
        del keeper

    def _prepare(self, operands: Operands) -> None:
        with self.lock:
            # The kernels of the call itself, which may differ where rows of a sequence alone begin on 16 bytes.
            path = pipeline.prepared(operands, self.problem, self.config).plan.path
            self.exact, self.tried = (replace(x, path=path) for x in (self.exact, self.tried))
            largest = 0
            for b, segment in itertools.product(range(self.problem.batch), self.segments):
                of_segment = self._operands(operands, b, segment, 0, 0)
                programs = (
                    pipeline.prepared(of_segment[0], segment.dense, self.exact),
                    pipeline.prepared(of_segment[1], segment.tried, self.tried),
                )
                largest = max(largest, *(x.workspace.nbytes for x in programs))
            self.workspace_bytes = _padded(largest)
            each = self.workspace_bytes + 2 * LADDER * self.dense_bytes
            fits = max(1, self.tried.workspace_bytes // each)
            self.streams = min(STREAMS, len(self.segments), fits)

    def _operands(
        self, operands: Operands, b: int, segment: _Segment, dense: int, tried: int
    ) -> tuple[Operands, Operands]:
        """Of a segment's dense call, and of that with a head for each tau; ``dense`` and ``tried``: addresses."""
        q, k, v, _ = (x.sequences(b, b + 1) for x in operands)
        q, k, v = q.rows(segment.begin, segment.end), k.rows(0, segment.seen), v.rows(0, segment.seen)
        heads, rows, head_dim = self.problem.heads, segment.end - segment.begin, self.problem.head_dim
        out = _in_c_order(dense, heads, rows, head_dim)
        queries = _in_c_order(tried, heads * LADDER, rows, head_dim)
        outputs = queries._replace(pointer=tried + LADDER * self.dense_bytes)
        return (q, k, v, out), (queries, k, v, outputs)

    def _search(self, operands: Operands, taus: int, address: int, stream: int, captured: bool) -> None:
        """Onto a stream, which may capture."""
        at = {name: address + place for name, place in self.places.items()}
        heads = self.problem.heads
        self._write(at["errors"], self.errors, stream)
        self._write(at["ladders"], np.tile(np.array(FIRST_LADDER, np.float32), heads), stream)
        sides = _sides.take(self.device, self.streams, captured)
        for b in range(self.problem.batch):
            for done in range(1, ROUNDS + 1):
                sides.fork(stream)
                for i in range(len(self.segments)):
                    self._look(operands, b, i, done - 1, at, address, sides.streams[i % self.streams])
                sides.join(stream)
                numbers = {"heads": heads, "segments": len(self.segments), "done": done}
                pointers = {**at, "taus": taus + FLOAT * b * heads}
                _launch(error_search.CHOOSE_TAUS, -(-heads // 128), stream, numbers, pointers, weights=self.weights)

    def _look(
        self, operands: Operands, b: int, i: int, before: int, at: dict[str, int], address: int, stream: int
    ) -> None:
        """Segment ``i`` at the ladder after ``before`` others, and the first time densely."""
        segment, heads = self.segments[i], self.problem.heads
        dense = address + self.shared_bytes + i * self.dense_bytes
        each = self.workspace_bytes + 2 * LADDER * self.dense_bytes
        own = address + self.shared_bytes + len(self.segments) * self.dense_bytes + i % self.streams * each
        workspace, tried = own, own + self.workspace_bytes
        of_dense, of_tried = self._operands(operands, b, segment, dense, tried)
        elements = (segment.end - segment.begin) * self.problem.head_dim
        if before == 0:
            pipeline.prepared(of_dense, segment.dense, self.exact).enqueue(of_dense, workspace, stream)
        numbers: dict[str, Any] = {
            "q": dict(zip(("batch", "head", "row"), of_dense[0].strides, strict=True)),
            "rows": segment.end - segment.begin,
            "head_dim": self.problem.head_dim,
        }
        pointers = {"q": of_dense[0].pointer, "to": tried}
        _launch(error_search.REPEAT_QUERIES, heads * LADDER, stream, numbers, pointers)
        ladder = at["ladders"] + FLOAT * before * heads * LADDER
        pipeline.prepared(of_tried, segment.tried, self.tried).enqueue(of_tried, workspace, stream, taus=ladder)
        sums = at["sums"] + FLOAT * (before * len(self.segments) + i) * heads * LADDER
        pointers = {"out": of_tried[3].pointer, "dense": dense, "sums": sums, "sizes": at["sizes"] + FLOAT * i * heads}
        kernel = error_search.error_sums(self.problem.dtype)
        _launch(kernel, heads * LADDER, stream, {"elements": elements}, pointers)

    @staticmethod
    def _write(address: int, values: np.ndarray, stream: int) -> None:
        """Numbers of the host, by a launch, which a graph holds."""
        for first in range(0, len(values), head_taus.HEADS):
            part = values[first : first + head_taus.HEADS]
            numbers = {"heads": 0, "first": first, "count": len(part)}
            _launch(head_taus.KERNEL, 1, stream, numbers, {"taus": address}, values=part)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _in_c_order(pointer: int, heads: int, rows: int, head_dim: int) -> Operand:
    strides = (0, rows * head_dim if heads > 1 else 0, head_dim if rows > 1 else 0)
    return Operand(pointer, (1, heads, rows, head_dim), strides)


def _launch(
    kernel: Kernel, blocks: int, stream: int, numbers: dict[str, Any], pointers: dict[str, int], **arrays: Any
) -> None:
    """One kernel with parameters by name."""
    params = kernel.family.params.fill(numbers)
    for name, offset in kernel.family.params.pointers:
        place = params.reshape(1).view(np.uint8)[offset : offset + 8]
        place[:] = np.frombuffer(np.uint64(pointers[name]).tobytes(), np.uint8)
    for name, values in arrays.items():
        params[name][: len(values)] = values
    address = np.array([params.ctypes.data], np.uint64)
    function = compiler.load(kernel, runtime.getDevice())
    driver.launchKernel(function.ptr, blocks, 1, 1, kernel.threads, 1, 1, 0, stream, address.ctypes.data, 0)


class _Fan:
    """Streams beside another one, between fork and join."""

    def __init__(self, count: int) -> None:
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]
        self._events = [cupy.cuda.Event(block=False, disable_timing=True) for _ in range(count + 1)]
        self.streams = [x.ptr for x in self._streams]

    @property
    def is_capturing(self) -> bool:
        """Whether the capture that they have joined goes on."""
        try:
            return bool(runtime.streamIsCapturing(self.streams[0]))
        except RuntimeError:  # it is invalid, and ends with an error
            return True

    def fork(self, stream: int) -> None:
        """They wait for what is on ``stream``."""
        runtime.eventRecord(self._events[-1].ptr, stream)
        for side in self.streams:
            runtime.streamWaitEvent(side, self._events[-1].ptr)

    def join(self, stream: int) -> None:
        """``stream`` waits for them."""
        for side, event in zip(self.streams, self._events, strict=False):
            runtime.eventRecord(event.ptr, side)
            runtime.streamWaitEvent(stream, event.ptr)


class _Sides:
    """Fans that are kept. One thread has them at a time; in a capture of the caller's, which goes on after the call and
    holds the streams that have joined it, a fan is of that call alone."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._kept: dict[tuple[int, int], _Fan] = {}
        self._captured: list[_Fan] = []  # a capture may not lose its streams, however many calls it has

    def take(self, device: int, count: int, captured: bool) -> _Fan:
        if captured:
            self._captured = [*(x for x in self._captured if x.is_capturing), _Fan(count)]
            return self._captured[-1]
        key = device, count
        if key not in self._kept:
            self._kept[key] = _Fan(count)
        return self._kept[key]


_sides = _Sides()
