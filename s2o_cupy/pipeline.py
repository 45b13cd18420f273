"""The GPU backend: order, pass 1 and pass 2 on CuPy arrays, on CuPy's current device and stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cupy
import numpy as np

from . import kernels
from .plan import SCORE_KEYS, SCORE_ROWS, STEP, Chunk, DeviceLimits, LaunchPlan, make_plan
from .problem import Problem
from .spec import LOG2E, S2OConfig
from .tensor_maps import tensor_map

__all__ = ["run"]

Array = Any  # cupy.ndarray
NO_ROW = 2**32 - 1  # stands for a row that is not there among the Hopper producer's offsets
# Called after each stage with its name and arrays; a tool's way to look inside (diffing, benchmarks).
Observer = Callable[[str, Mapping[str, Any]], None]


@functools.lru_cache
def device_limits(device: int) -> DeviceLimits:
    """The limits of a device, or S2OError if it cannot run the kernels."""
    runtime = cupy.cuda.runtime
    capability = int(cupy.cuda.Device(device).compute_capability)
    kernels.check_device(capability, runtime.driverGetVersion(), runtime.runtimeGetVersion())
    return DeviceLimits(
        capability,
        runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
        runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device),
    )


def _tensor(x: Array) -> tuple[int, int, int, int]:
    """A [batch, heads, seqlen, head_dim] array as the kernels' Tensor: address and strides in elements."""
    batch, head, row = (s // x.itemsize if n > 1 else 0 for s, n in zip(x.strides[:3], x.shape[:3], strict=True))
    return x.data.ptr, batch, head, row


def _is_aligned(x: Array) -> bool:
    """Rows are whole chunks of 16 bytes: what the fast copies need."""
    address, *strides = _tensor(x)
    return address % 16 == 0 and all(n * x.itemsize % 16 == 0 for n in (*strides, x.shape[3]))


def _fits_32_bits(x: Array) -> bool:
    """Offsets of rows from the first, in chunks of 16 bytes, fit in 32 bits: what the Hopper producer needs."""
    return x.shape[2] <= 1 or 0 <= x.strides[2] * (x.shape[2] - 1) < 16 * NO_ROW


def _scratch() -> AbstractContextManager[Any]:
    """Where arrays come from that only live during a call: CuPy's pool, but the graph's own memory while a graph is
    captured, as the pool would give theirs to others that the graph's launches then overwrite."""
    capturing = cupy.cuda.get_current_stream().is_capturing()
    return cupy.cuda.using_allocator(cupy.cuda.malloc_async) if capturing else nullcontext()


def run(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    problem: Problem,
    config: S2OConfig,
    observe: Observer | None = None,
    *,
    keep_visited: bool = True,
) -> Array | None:
    """Attend q [batch, heads, seqlen_q, head_dim] to k and v [batch, kv_heads, seqlen_k, head_dim].

    Writes ``out`` (like q) and ``lse`` (float32, [batch, heads, seqlen_q], contiguous, or None), and returns the key
    tiles visited, int32 [batch, heads, segments, tiles], if ``keep_visited``. Nothing waits for the GPU.
    """
    device = cupy.cuda.runtime.getDevice()
    aligned = all(_is_aligned(x) for x in (q, k, v, out))
    compact = all(_fits_32_bits(x) for x in (q, k, v))
    plan = make_plan(problem, config, device_limits(device), aligned, compact)
    kept = cupy.zeros(problem.visited_shape(config), np.int32) if keep_visited else None
    with _scratch():
        visited = cupy.zeros(problem.visited_shape(config), np.int32) if kept is None else kept
        call = _Call(plan, problem, config, device, aligned, observe)
    call.pass1(q, k, v, out, lse, visited)
    if plan.chunks:
        call.rank_queries(q, k)
        for chunk in plan.chunks:
            call.rank_keys(chunk, k)
            call.pass2(chunk, q, k, v, out, lse, visited)
    return kept


class _Call:
    """One call: its plan and the arrays that live between its stages."""

    def __init__(
        self,
        plan: LaunchPlan,
        problem: Problem,
        config: S2OConfig,
        device: int,
        aligned: bool,
        observe: Observer | None,
    ) -> None:
        self.plan, self.problem, self.config, self.device, self.aligned = plan, problem, config, device, aligned
        self.observe = observe or (lambda stage, arrays: None)
        g, p = plan.geometry, problem
        window = min(g.window, g.seqlen_k)  # the same keys, and 32 bits hold it
        self.geometry = (g.seqlen_q, g.seqlen_k, g.segment, window, g.is_causal, p.head_dim)
        heads = p.batch * p.heads
        self.state = cupy.empty((heads, p.seqlen_q, 2), np.float32)  # (m in log2 units, l)
        self.next_work = cupy.zeros(1 + len(plan.chunks), np.int32)  # a counter a launch of pass 1 or 2
        self.launches = 0
        if plan.chunks:
            representatives = (heads, g.segments, config.representatives, plan.pass1.head_dim)
            self.guide = cupy.empty((p.batch * p.kv_heads, 2, plan.pass1.head_dim), np.float32)
            self.high, self.low = cupy.empty(representatives, np.uint16), cupy.empty(representatives, np.uint16)
            self.q_order = cupy.empty((heads, g.segments, g.segment), np.int32)
            self.scores = cupy.empty(plan.workspace_elements, np.float32)  # [chunk rows, stride]
            self.k_order = cupy.empty(plan.workspace_elements, np.int32)  # [chunk rows, stride]
            self.counts = cupy.empty(plan.count_elements, np.uint16)  # [chunk rows, parts, KEY_BUCKETS]
            # The score range of each row of each chunk: the kernel grows it from 0.
            self.range = cupy.zeros((sum(chunk.rows for chunk in plan.chunks), 2), np.uint32)
            self.ranked_rows = 0

    def _launch(self, kernel: kernels.Kernel, blocks: int, params: np.ndarray[Any, Any]) -> None:
        kernels.launch(kernel, blocks, params, self.device)

    def _launch_attention(self, kernel: kernels.Kernel, works: int, params: np.ndarray[Any, Any]) -> None:
        persistent = kernel.function.endswith("sm90")
        self._launch(kernel, min(works, self.plan.persistent_blocks) if persistent else works, params)
        self.launches += 1

    @staticmethod
    def _chunk(chunk: Chunk) -> tuple[int, ...]:
        return chunk.first_head, chunk.heads, chunk.first_segment, chunk.segments, chunk.shared_heads, chunk.near_heads

    def _attention_params(
        self, chunk: Chunk, tiles: int, q: Array, k: Array, v: Array, out: Array, lse: Array | None, visited: Array
    ) -> np.ndarray[Any, Any]:
        p = self.problem
        ordered = bool(self.plan.chunks)
        return np.array(
            (
                _tensor(q),
                _tensor(k),
                _tensor(v),
                _tensor(out),
                self.state.data.ptr,
                0 if lse is None else lse.data.ptr,
                self.q_order.data.ptr if ordered else 0,
                self.k_order.data.ptr if ordered else 0,
                visited.data.ptr,
                self.next_work.data.ptr + self.launches * self.next_work.itemsize,
                chunk.stride,
                self.geometry,
                self._chunk(chunk),
                p.heads,
                p.kv_heads,
                tiles,
                max(1, self.config.block_n // STEP),
                chunk.rows * tiles,
                abs(p.scale) * LOG2E,
                0x80008000 if p.scale < 0 else 0,
                self.config.tau,
            ),
            kernels.ATTENTION_PARAMS,
        )

    def pass1(self, q: Array, k: Array, v: Array, out: Array, lse: Array | None, visited: Array) -> None:
        tiles = self.plan.pass1_tiles
        params = self._attention_params(self.plan.whole, tiles, q, k, v, out, lse, visited)
        if self.plan.pass1.function == "pass1_sm90":
            maps = b"".join(tensor_map(_tensor(x)[0], x.shape, _tensor(x)[1:], 128) for x in (q, k, v))
            full = np.zeros((), kernels.MAPPED_ATTENTION_PARAMS)
            full["maps"], full["attention"] = np.void(maps), params
            params = full
        self._launch_attention(self.plan.pass1, self.plan.whole.rows * tiles, params)
        self.observe("pass1", {"out": out, "state": self.state, "plan": self.plan})

    def pass2(
        self, chunk: Chunk, q: Array, k: Array, v: Array, out: Array, lse: Array | None, visited: Array
    ) -> None:
        params = self._attention_params(chunk, self.plan.tiles, q, k, v, out, lse, visited)
        self._launch_attention(self.plan.pass2, chunk.rows * self.plan.tiles, params)
        self.observe("pass2", {"chunk": chunk})

    def rank_queries(self, q: Array, k: Array) -> None:
        p, plan, config = self.problem, self.plan, self.config
        assert config.representatives is not None
        params = np.array(
            (
                _tensor(q),
                _tensor(k),
                self.guide.data.ptr,
                self.high.data.ptr,
                self.low.data.ptr,
                self.q_order.data.ptr,
                self.geometry,
                p.heads,
                p.kv_heads,
                config.representatives,
                config.run,
                plan.sort_slots,
                self.aligned,
                -1.0 if p.scale < 0 else 1.0,
            ),
            kernels.RANK_QUERIES_PARAMS,
        )
        rows = plan.whole.rows
        self._launch(plan.guides, p.batch * p.kv_heads * 2, params)
        self._launch(plan.rank_queries, rows, params)
        self.observe("rank_queries", {"q_order": self.q_order, "high": self.high, "low": self.low})

    def rank_keys(self, chunk: Chunk, k: Array) -> None:
        p, plan, config = self.problem, self.plan, self.config
        row_blocks = -(-chunk.shared_heads * chunk.segments // SCORE_ROWS)
        key_blocks = -(-chunk.stride // SCORE_KEYS)
        params = np.array(
            (
                _tensor(k),
                self.high.data.ptr,
                self.low.data.ptr,
                self.scores.data.ptr,
                self.range.data.ptr + self.ranked_rows * self.range.strides[0],
                self.counts.data.ptr,
                self.k_order.data.ptr,
                chunk.stride,
                self.geometry,
                self._chunk(chunk),
                p.heads,
                p.kv_heads,
                config.representatives,
                config.run,
                row_blocks,
                key_blocks,
                chunk.parts,
            ),
            kernels.RANK_KEYS_PARAMS,
        )
        self._launch(plan.key_scores, chunk.heads // chunk.shared_heads * row_blocks * key_blocks, params)
        self._launch(plan.key_counts, chunk.rows * chunk.parts, params)
        self._launch(plan.key_order, chunk.rows * chunk.parts, params)
        self.ranked_rows += chunk.rows
        self.observe("rank_keys", {"chunk": chunk, "scores": self.scores, "k_order": self.k_order})
