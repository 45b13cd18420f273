"""NSA on the current device: its three branches, launched one after the other.

Compressed attention is plain causal attention of the queries i with one remainder i % stride, which pass 1 takes as the
sequences of a batch (nsa/plan.py: Remainders). Everything else is in raw_kernels/nsa. Nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from ..arrays.operand import Operand
from ..caches import remembered
from ..cuda import pipeline
from ..cuda.pipeline import Memory, device_limits
from ..cuda.program import Program
from ..plan.build import ALIGNMENT, Launch
from ..plan.kernels import Kernel
from ..plan.params import Struct
from ..problem import Problem
from ..spec import LOG2E
from . import kernels
from .config import NSAConfig
from .plan import NsaPlan, make_plan

__all__ = ["Branches", "Gates", "Pair", "attend", "attend_blocks", "attend_window", "calling", "select", "tensor"]

Strides = tuple[int, int, int]
# Called after each launch with its stage's name; a tool's way to look inside.
Observer = Callable[[str], None]
NO_REMAINDER = 1 << 30
SOME_BYTES = 256


class Pair(NamedTuple):
    """Keys and values."""

    k: Operand
    v: Operand


class Gates(NamedTuple):
    """[batch, heads, seqlen_q, 3], in float32 or q's dtype, with a contiguous last axis; strides in elements."""

    pointer: int
    strides: tuple[int, int, int]
    wide: bool


class Branches(NamedTuple):
    """What the three branches attend to, and how much each counts."""

    keys: Pair  # of the selected one
    compressed: Pair
    window: Pair
    gates: Gates


def attend(
    q: Operand, branches: Branches, out: Operand, problem: Problem, config: NSAConfig, *, stream: int, memory: Memory,
    observe: Observer | None = None,
) -> None:  # fmt: skip
    """All three branches into ``out``. ``observe`` is called with each stage's name after its launch."""
    keys, compressed, window, gates = branches
    device = runtime.getDevice()
    plan = make_plan(problem, config, device_limits(device), where="nsa_attention", compresses=True,
                     attends=True, gates=True, shares=window == keys)  # fmt: skip
    operands = (q, *keys, *compressed, *window, out)
    prepared = _prepared(plan, device, q.strides, compressed.k.strides, compressed.v.strides)
    address, keeper = memory(prepared.nbytes)
    gate_of = (gates.pointer, *gates.strides, int(gates.wide))

    def there(place: int) -> Memory:
        return lambda nbytes: (place, keeper)

    def launch(into: int) -> None:
        call, beside = Call(plan, prepared.program, address, into, observe), prepared.beside
        side = beside.begin(into, captured=into != stream)
        call.params["gates"], call.params["gates_wide"] = gate_of[:4], gates.wide
        runs = _compressed_runs(plan, q, compressed, call.places["cmp_out"], call.places["cmp_lse"])
        ends = accumulate(prepared.run_bytes, initial=address + plan.workspace.nbytes)
        of_runs = list(zip(runs, ends, strict=False))
        for run, memory_of_run in of_runs[1:]:
            call.compressed(run, there(memory_of_run), side)
        beside.mark(_Beside.COMPRESSED)
        call.window(q, window, out, side)
        beside.mark(_Beside.WINDOW)
        for run, memory_of_run in of_runs[:1]:
            call.compressed(run, there(memory_of_run), into)
        beside.join(into, _Beside.COMPRESSED)
        call.before_merge = partial(beside.join, into, _Beside.WINDOW)
        call.params["k_cmp"], call.params["v_cmp"] = tensor(compressed.k), tensor(compressed.v)
        for first, tokens in plan.choice_rounds:
            call.choose(q, first, tokens)
        for first, tokens in plan.rounds:
            call.attend_blocks(q, keys, out, first, tokens)

    with prepared.program.lock:
        if observe is not None:
            launch(stream)
        else:
            key = (address, *gate_of, *(n for x in operands for n in (x.pointer, *x.strides)))
            prepared.program.replay(key, stream, launch)


class _Beside:
    """A stream beside the one that is captured. In a plain call there is none: everything takes its turn."""

    COMPRESSED, WINDOW = 0, 1

    def __init__(self) -> None:
        self.stream: Any = None
        self.events: tuple[Any, ...] = ()
        self.captured = False

    def begin(self, into: int, captured: bool) -> int:
        """A stream that waits for what ``into`` has so far."""
        self.captured = captured
        if not captured:
            return into
        if self.stream is None:
            self.stream = cupy.cuda.Stream(non_blocking=True, priority=runtime.streamGetPriority(into))
            self.events = tuple(cupy.cuda.Event(disable_timing=True) for _ in range(3))
        runtime.eventRecord(self.events[-1].ptr, into)
        runtime.streamWaitEvent(self.stream.ptr, self.events[-1].ptr)
        handle: int = self.stream.ptr
        return handle

    def mark(self, what: int) -> None:
        """What is launched so far beside the others."""
        if self.captured:
            runtime.eventRecord(self.events[what].ptr, self.stream.ptr)

    def join(self, into: int, what: int) -> None:
        """Let ``into`` wait for that."""
        if self.captured:
            runtime.streamWaitEvent(into, self.events[what].ptr)


class _Prepared:
    """What calls of one kind have in common."""

    def __init__(self, plan: NsaPlan, device: int, run_bytes: list[int]) -> None:
        self.run_bytes = run_bytes  # of the workspaces of pass 1, behind the plan's
        self.nbytes = plan.workspace.nbytes + sum(run_bytes)
        self.program = program_of(plan, device)  # its lock is the stream's too
        self.beside = _Beside()


@remembered
def _prepared(plan: NsaPlan, device: int, of_q: Strides, of_k: Strides, of_v: Strides) -> _Prepared:
    """``of_k``, ``of_v``: of compressed keys and values."""
    p = plan.problem
    of_cmp = (p.batch, p.kv_heads, plan.compressed, p.head_dim)
    q = Operand(0, (p.batch, p.heads, p.seqlen_q, p.head_dim), of_q)
    runs = _compressed_runs(plan, q, Pair(Operand(0, of_cmp, of_k), Operand(0, of_cmp, of_v)), 0, 0)
    of_pass = plan.config.of_pass
    return _Prepared(plan, device, [_aligned(pipeline.workspace_bytes(x.operands, x.problem, of_pass)) for x in runs])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def select(
    q: Operand, k_cmp: Operand, chosen: int, problem: Problem, config: NSAConfig, *, stream: int, memory: Memory
) -> None:
    """Each token's blocks to ``chosen``, int32 [batch, kv_heads, seqlen_q, top]."""
    plan = make_plan(problem, config, device_limits(runtime.getDevice()), where="nsa_select", compresses=True,
                     attends=False, gates=False)  # fmt: skip
    address, keeper = memory(plan.workspace.nbytes)
    with calling(plan, address, stream) as call:
        for run in _compressed_runs(plan, q, Pair(k_cmp, k_cmp), call.places["cmp_out"], call.places["cmp_lse"]):
            call.compressed(run, memory)
        call.params["k_cmp"] = call.params["v_cmp"] = tensor(k_cmp)
        call.params["chosen"] = chosen
        for first, tokens in plan.choice_rounds:
            call.choose(q, first, tokens)
    del keeper


def attend_blocks(arrays: pipeline.Call, chosen: int, config: NSAConfig, *, stream: int, memory: Memory) -> None:
    """The selected branch alone, with blocks that the caller chose."""
    q, k, v, out = arrays.operands
    plan = make_plan(arrays.problem, config, device_limits(runtime.getDevice()), where="selected_attention",
                     compresses=False, attends=True, gates=False)  # fmt: skip
    address, keeper = memory(plan.workspace.nbytes)
    with calling(plan, address, stream) as call:
        call.params["chosen"], call.params["lse"] = chosen, arrays.lse
        for first, tokens in plan.rounds:
            call.attend_blocks(q, Pair(k, v), out, first, tokens)
    del keeper


def attend_window(arrays: pipeline.Call, config: NSAConfig, sinks: int, *, stream: int, memory: Memory) -> None:
    """The window branch alone."""
    q, k, v, out = arrays.operands
    plan = make_plan(arrays.problem, config, device_limits(runtime.getDevice()), where="window_attention",
                     compresses=False, attends=False, gates=False)  # fmt: skip
    address, keeper = memory(SOME_BYTES)
    with calling(plan, address, stream) as call:
        call.params["lse"], call.params["sinks"] = arrays.lse, min(sinks, arrays.problem.seqlen_k)
        call.window(q, Pair(k, v), out)
    del keeper


@remembered
def program_of(plan: NsaPlan, device: int, struct: Struct = kernels.WINDOW.params) -> Program:
    """The plan's kernels, which are given one ``struct``: NsaParams, or one that begins with it."""
    params = _template(plan, struct)
    return Program([Launch(x.function, x, 0, params, ()) for x in plan.kernels], device)


@contextmanager
def calling(
    plan: NsaPlan, address: int, stream: int, struct: Struct = kernels.WINDOW.params
) -> Iterator[Call]:
    """A call whose parameters no other thread changes meanwhile. ``struct``: as of `program_of`."""
    program = program_of(plan, runtime.getDevice(), struct)
    with program.lock:
        yield Call(plan, program, address, stream)


class Call:
    """One call: parameters that its launches share, each of which changes some."""

    def __init__(
        self, plan: NsaPlan, program: Program, address: int, stream: int, observe: Observer | None = None
    ) -> None:
        self.plan, self.program, self.stream, self.observe = plan, program, stream, observe
        self.number = {kernel: i for i, kernel in enumerate(plan.kernels)}
        # It also makes the device's context current for the driver calls below.
        runtime.memsetAsync(address, 0, SOME_BYTES, stream)
        self.params = program.params[0]
        self.params[...] = program.launches[0].params  # nothing of an earlier call
        self.places = {name: address + place.offset for name, place in plan.workspace.places.items()}
        for name, place in self.places.items():
            self.params[name] = place
        self.before_merge: Callable[[], None] | None = None  # once

    def launch(self, kernel: Kernel, blocks: int, stream: int | None = None) -> None:
        """``stream``: if not the call's."""
        if blocks:
            self.program.launch(self.number[kernel], self.stream if stream is None else stream, blocks)
        if self.observe:
            self.observe(kernel.function)

    def compressed(self, run: pipeline.Call, memory: Memory, stream: int | None = None) -> None:
        """Some of cmp_out and cmp_lse."""
        stream = self.stream if stream is None else stream
        pipeline.run(run, self.plan.config.of_pass, stream=stream, memory=memory)
        if self.observe:
            self.observe("nsa_compressed")

    def window(self, q: Operand, keys: Pair, out: Operand, stream: int | None = None) -> None:
        """The window branch, to ``out``, and near_out where the plan has blocks apart."""
        plan, params = self.plan, self.params
        heads = plan.problem.batch * plan.problem.heads
        self.point(q, keys, out)
        params["q_tiles"], params["tiles"] = heads, plan.window_tiles
        self.launch(plan.kernel("nsa_window"), heads * plan.window_tiles, stream)

    def choose(self, q: Operand, first: int, tokens: int) -> None:
        """The blocks of a round's tokens; where the plan is ``fused``, their compressed attention too."""
        plan, params = self.plan, self.params
        kernel = plan.kernel("nsa_compressed" if plan.fused else "nsa_block_weights")
        self.round(first, tokens)
        params["q"] = tensor(q)
        params["tiles"] = tiles = -(-tokens // (kernels.ROWS if plan.fused else kernels.block_weight_tokens(kernel)))
        self.launch(kernel, plan.kv_rows * plan.weight_rows * tiles)
        self.launch(kernels.top_blocks(), -(-plan.kv_rows * tokens // 4))

    def attend_blocks(self, q: Operand, keys: Pair, out: Operand, first: int, tokens: int) -> None:
        """A round's tokens to their blocks, and the sum of the branches where there are gates."""
        plan = self.plan
        self.round(first, tokens)
        self.point(q, keys, out)
        if plan.slots:
            self.invert()
            self.launch(plan.kernel("nsa_selected"), plan.kv_rows * plan.most_items)
        if self.before_merge:
            self.before_merge()
            self.before_merge = None
        warps = plan.kv_rows * -(-tokens // kernels.MERGE_TOKENS) * plan.group
        self.launch(kernels.merge_parts(plan.inputs), -(-warps // 4))

    def invert(self) -> None:
        """The tokens of each block, of the round."""
        plan = self.plan
        if "chosen" not in self.places:  # of the caller's a block may stand twice in a row, which leaves a gap
            runtime.memsetAsync(self.places["entries"], 255, plan.workspace.places["entries"].nbytes, self.stream)
        self.launch(kernels.count(plan.blocks), plan.kv_rows * plan.chunks)
        self.params["tiles"] = tiles = -(-plan.blocks // kernels.TOTAL_BLOCKS)
        self.launch(kernels.totals(), plan.kv_rows * tiles)
        self.launch(kernels.places(), plan.kv_rows)
        self.launch(kernels.scatter(plan.blocks), plan.kv_rows * plan.chunks)

    def point(self, q: Operand, keys: Pair, out: Operand) -> None:
        """What launches read and write."""
        for name, x in (("q", q), ("k", keys.k), ("v", keys.v), ("out", out)):
            self.params[name] = tensor(x)

    def round(self, first: int, tokens: int) -> None:
        """Which tokens."""
        self.params["first_token"], self.params["tokens"] = first, tokens
        self.params["q_tiles"] = self.plan.kv_rows


def _compressed_runs(plan: NsaPlan, q: Operand, compressed: Pair, out: int, lse: int) -> list[pipeline.Call]:
    """Compressed attention, to cmp_out and cmp_lse at these addresses; what takes longest first."""
    p, stride, row, ends = plan.problem, plan.config.stride, q.strides[2], plan.lse_rows
    runs = []
    for b in range(p.batch):
        q_b, k, v = q.sequences(b, b + 1), compressed.k.sequences(b, b + 1), compressed.v.sequences(b, b + 1)
        out_b, lse_b = out + 2 * b * p.heads * p.seqlen_q * p.head_dim, lse + 4 * b * ends[-1]
        for of, begin in zip(plan.remainders, ends, strict=False):
            if of.rows == 0:
                continue
            first = of.first + of.skipped * stride
            rows = (of.size, p.heads, of.rows, p.head_dim)
            operands = (
                _view(q_b.pointer + 2 * first * row, rows, (row, q.strides[1], stride * row)),
                _view(k.pointer, (of.size, p.kv_heads, of.keys, p.head_dim), (0, *k.strides[1:])),
                _view(v.pointer, (of.size, p.kv_heads, of.keys, p.head_dim), (0, *v.strides[1:])),
                _view(out_b + 2 * first * p.head_dim, rows,
                      (p.head_dim, p.seqlen_q * p.head_dim, stride * p.head_dim)),
            )  # fmt: skip
            runs.append(pipeline.Call(operands, lse_b + 4 * begin, 0, _of_rows(p, of.size, of.rows, of.keys)))
    return sorted(runs, key=lambda run: -run.problem.batch * run.problem.seqlen_q)


@remembered
def _template(plan: NsaPlan, struct: Struct) -> Any:
    """Parameters without addresses."""
    params = np.zeros((), struct.dtype)
    p, config = plan.problem, plan.config
    for field in ("seqlen_q", "seqlen_k", "head_dim"):
        params["geometry"][field] = getattr(p, field)
    for i in range(3):
        if i < len(plan.remainders):
            of = plan.remainders[i]
            params[f"remainders_{i}"] = (of.first, of.rows, of.skipped, plan.lse_rows[i])
        else:
            params[f"remainders_{i}"] = (NO_REMAINDER, 0, 0, 0)
    values: dict[str, float] = {
        "heads": p.heads, "kv_heads": p.kv_heads, "scale_log2": p.scale * LOG2E, "group": plan.group,
        "group_magic": 65536 // plan.group + 1, "compressed": plan.compressed, "length": config.length,
        "stride_shift": config.stride.bit_length() - 1, "blocks": plan.blocks,
        "block_shift": config.block.bit_length() - 1,
        "top": config.top, "first": config.first, "local": config.local, "apart": plan.apart, "slots": plan.slots,
        "window": min(config.window, p.seqlen_k), "weight_stride": plan.weight_stride, "chunks": plan.chunks,
        "most_items": plan.most_items, "item_tokens": plan.item_tokens, "fused": plan.fused,
        "step_stride": plan.step_stride,
        "batch_lse": plan.lse_rows[-1], "steps_per_tile": 1,
    }  # fmt: skip
    for name, value in values.items():
        params[name] = value
    return params


@remembered
def _of_rows(problem: Problem, size: int, rows: int, keys: int) -> Problem:
    return Problem(
        size, problem.heads, problem.kv_heads, rows, keys, problem.head_dim, problem.dtype, True, problem.scale
    )


def tensor(x: Operand) -> tuple[int, int, int, int]:
    return x.pointer, *x.strides


def _view(pointer: int, shape: tuple[int, int, int, int], strides: tuple[int, int, int]) -> Operand:
    sb, sh, ss = (s if n > 1 else 0 for s, n in zip(strides, shape[:3], strict=True))
    return Operand(pointer, shape, (sb, sh, ss))
