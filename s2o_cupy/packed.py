"""Packed sequences that are attended densely: pass 1 of all of them in one launch.

What depends on neither lengths nor addresses is made once and cached; a call fills those in.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from cupy.cuda import driver, runtime

from . import kernels
from .operand import Operand
from .pipeline import Memory, Operands, allocate, device_limits, write_every_tile
from .plan import HOPPER_BLOCK, LaunchPlan, make_plan, near_heads, packed_pass1
from .problem import Problem
from .program import packed_launch
from .spec import S2OConfig
from .tensor_maps import tensor_map

__all__ = ["PackedCall", "prepare"]


class PackedCall(NamedTuple):
    """One of the sequences."""

    begin_q: int  # its first row in q, and in k and v
    begin_k: int
    problem: Problem
    visited: int  # address to write to, or 0: int32 [1, heads, segments, tiles]


class Prepared(NamedTuple):
    """Sequences that are ready for their launches, 128 at a time."""

    program: _Program
    operands: Operands
    calls: Sequence[PackedCall]

    @property
    def plan(self) -> LaunchPlan:
        """Of each sequence, but for what depends on its lengths."""
        return self.program.plan

    def run(self, lse: int, *, stream: int, memory: Memory = allocate) -> None:
        """Attend. ``lse``: address of float32 [heads, total_q], or 0. Nothing waits for the GPU."""
        self.program.run(self.operands, self.calls, lse, stream, memory)


def prepare(operands: Operands, calls: Sequence[PackedCall], config: S2OConfig) -> Prepared:
    """``operands``: q and out [1, heads, total_q, head_dim], k and v [1, kv_heads, total_k, head_dim].

    Every call's problem is dense under ``config``, and they differ in nothing but lengths.
    """
    q, k, v, out = operands
    aligned = (q.pointer | k.pointer | v.pointer | out.pointer) % 16 == 0
    # As each sequence alone would be judged.
    longest = [max(getattr(call.problem, name) for call in calls) for name in ("seqlen_q", "seqlen_k")]
    compact = all(x.rows(0, longest[i]).is_compact() for x, i in ((q, 0), (k, 1), (v, 1), (out, 0)))
    problem = replace(calls[0].problem, seqlen_q=1, seqlen_k=1)
    strides = (q.strides, k.strides, v.strides, out.strides)
    program = prepared_program(problem, config, runtime.getDevice(), aligned, compact, strides)
    return Prepared(program, operands, sorted(calls, key=lambda call: -call.problem.seqlen_k))  # longest work first


@functools.lru_cache(maxsize=64)
def prepared_program(
    problem: Problem, config: S2OConfig, device: int, aligned: bool, compact: bool,
    strides: tuple[tuple[int, int, int], ...],
) -> _Program:  # fmt: skip
    """``strides`` of q, k, v and out."""
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    operands = {
        name: Operand(0, (1, n, 1, problem.head_dim), s)
        for name, n, s in zip(("q", "k", "v", "out"), heads, strides, strict=True)
    }
    return _Program(problem, config, device, aligned, compact, operands)


class _Program:
    """A prepared launch. ``problem``: of one query and one key."""

    def __init__(
        self, problem: Problem, config: S2OConfig, device: int, aligned: bool, compact: bool,
        operands: dict[str, Operand],
    ) -> None:  # fmt: skip
        aligned = aligned and all(x.is_aligned() for x in operands.values())
        self.problem, self.config, self.device = problem, config, device
        self.plan = make_plan(problem, config, device_limits(device), aligned, compact)
        self.kernel = packed_pass1(self.plan)
        launch = packed_launch(self.plan, self.kernel, problem, config, operands, aligned)
        self.function = kernels.load(self.kernel, device).kernel.ptr
        self.params = launch.params
        self.address = np.array([self.params.ctypes.data], np.uint64)
        mapped = self.kernel.family.arch == "sm_90a"  # tensor maps first; persistent blocks
        self.maps = self.params.reshape(1).view(np.uint8)[: 3 * kernels.TENSOR_MAP_BYTES] if mapped else None
        self.packed = self.params["attention"] if mapped else self.params
        self.attention = self.packed["attention"]
        self.lock = threading.Lock()  # the parameters are one for all threads

    def run(self, operands: Operands, calls: Sequence[PackedCall], lse: int, stream: int, memory: Memory) -> None:
        for call in calls:
            if call.visited:
                write_every_tile(call.visited, call.problem, self.config, self.device, stream)
        parts = [calls[i : i + kernels.PACKED_SEQUENCES] for i in range(0, len(calls), kernels.PACKED_SEQUENCES)]
        counters, keeper = memory(4 * len(parts))  # a launch's next q tile
        runtime.memsetAsync(counters, 0, 4 * len(parts), stream)
        with self.lock:
            self._point_to(operands, lse)
            for i, part in enumerate(parts):
                self.attention["next_work"] = counters + 4 * i
                works = self._list(part)
                blocks = works if self.maps is None else min(works, self.plan.persistent_blocks)
                driver.launchKernel(
                    self.function, blocks, 1, 1, self.kernel.threads, 1, 1, self.kernel.shared_bytes, stream,
                    self.address.ctypes.data, 0,
                )  # fmt: skip
        del keeper

    def _point_to(self, operands: Operands, lse: int) -> None:
        attention = self.attention
        for name, x in zip(("q", "k", "v", "out"), operands, strict=True):
            attention[name]["data"] = x.pointer
        attention["lse"] = lse
        attention["geometry"]["seqlen_q"] = operands[0].shape[2]
        attention["geometry"]["seqlen_k"] = operands[1].shape[2]
        if self.maps is not None:
            maps = (tensor_map(x.pointer, x.shape, x.strides, HOPPER_BLOCK) for x in operands[:3])
            self.maps[:] = np.frombuffer(b"".join(maps), np.uint8)

    def _list(self, calls: Sequence[PackedCall]) -> int:
        """Tell the kernel of the sequences of a launch; returns its q tiles."""
        problems = [call.problem for call in calls]
        seqlen_q = np.array([problem.seqlen_q for problem in problems])
        ends = np.cumsum(self.problem.heads * -(-seqlen_q // self.kernel.block_m))
        of = self.packed["of"][: len(calls)]
        of["first_work"][0] = 0
        of["first_work"][1:] = ends[:-1]
        of["begin_q"] = [call.begin_q for call in calls]
        of["begin_k"] = [call.begin_k for call in calls]
        of["seqlen_q"] = seqlen_q
        of["seqlen_k"] = [problem.seqlen_k for problem in problems]
        of["near_heads"] = [near_heads(problem, problem.heads) for problem in problems]
        self.packed["sequences"] = len(calls)
        works = int(ends[-1])
        self.attention["works"] = works
        return works

