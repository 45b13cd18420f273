"""Attention to keys that are given as data: pass 2 alone, by lists that anybody made.

What depends on neither lists nor addresses is made once and remembered; a call fills addresses in and launches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from cupy.cuda import runtime

from ..arrays.operand import Call, Layout
from ..caches import remembered
from ..plan.launch_plan import LaunchPlan
from ..plan.launches import listed_launch
from ..plan.schedule import ScheduleShape, listed_plan
from ..problem import Problem
from ..selection.methods import make_plan
from ..spec import Pass
from .pipeline import Memory, allocate, device_limits
from .program import Program
from .tables import on_device
from .tensor_maps import encoded

__all__ = ["ListPointers", "SkipPointers", "attend_lists"]

COUNTER_BYTES = 256  # of the launch's next q tile, and what the array behind it is aligned to


class ListPointers(NamedTuple):
    """Where lists lie on the GPU, in C order: KeyLists of raw_kernels/common/listed_rows.cuh. Nobody checks what is in
    them."""

    entries: int  # int32 [any]
    begins: int  # int64 of ScheduleShape.lists_shape: each list's first entry
    keys: int  # int32, likewise: how many keys a list has
    q_order: int = 0  # int32 [batch, heads, seqlen_q]: queries in the order in which q tiles take them; 0: as they lie
    kept: int = 0  # float32 [batch, heads, seqlen_q, 2]: where the state of rows goes that visit keys; 0: nowhere


class SkipPointers(NamedTuple):
    """With a value_skip: where on the GPU to write what is left out; 0: nowhere."""

    skipped: int = 0  # int32 of ScheduleShape.visited_shape: (query, key) pairs
    found: int = 0  # int32 [.., groups, blocks] as ValueSkip::found has them: which blocks each group of rows left out


NO_SKIPS = SkipPointers()


def attend_lists(
    call: Call, lists: ListPointers, shape: ScheduleShape, of_pass: Pass, *, stream: int, state: int = 0,
    skips: SkipPointers = NO_SKIPS, memory: Memory = allocate,
) -> LaunchPlan:  # fmt: skip
    """Each q tile attends to the keys of its list, all of which all of its rows see.

    Parameters
    ----------
    call : Call
        Where rows resume, out is read before it is written. ``visited`` is of shape.visited_shape. Where rows resume
        and a list is empty the lse is left as it is.
    lists, shape : ListPointers and ScheduleShape
    of_pass : Pass
        ``block_m`` is the queries of a q tile, ``block_n`` the keys between two stop checks; with ``tau`` a q tile
        stops as S2O's do (0: never). Segments are those of ``shape``.
    stream : int, a handle
    state : int
        float32 [batch, heads, seqlen_q, 2], (m in log2 units, l) of the rows that ``shape`` says are resumed; else 0.
    skips : SkipPointers

    Nothing waits for the GPU. Returns what was launched.

    Raises
    ------
    ValueError
        No kernel takes ``shape``, or ``state`` is not as it says.
    """
    shape.check(call.problem)
    if shape.resumed != bool(state):
        given = "given" if state else "missing"
        raise ValueError(f"attend_lists: state is {given} and resumed is {shape.resumed}; accepted: both or neither")
    layout = Layout.of(call.operands, call.paging)
    prepared = _prepare(call.problem, of_pass, shape, runtime.getDevice(), layout, bool(lists.q_order))
    if not call.problem.empty:
        prepared.run(call, lists, stream, state, skips, memory)
    return prepared.plan


class _ListedPass:
    """A prepared launch, in whose parameters a call fills in its addresses."""

    def __init__(
        self, problem: Problem, of_pass: Pass, shape: ScheduleShape, device: int, layout: Layout, q_ordered: bool
    ) -> None:
        operands = layout.operands(problem)
        plan = make_plan(
            problem, of_pass, device_limits(device), layout.is_aligned(operands), layout.is_compact(operands),
            layout.page_size,
        )  # fmt: skip
        self.plan, kernel = listed_plan(plan, shape, problem, operands["q"].reaches_next_head(), q_ordered)
        launch = listed_launch(self.plan, kernel, problem, operands, layout.paging, shape.more_params(problem))
        self.program = Program([launch], device)
        self.mapped: dict[str, int] = {}  # the addresses that its tensor maps were made with
        self.visited_bytes = 4 * int(np.prod(shape.visited_shape(problem, of_pass.block_m)))
        self.limits = None if shape.value_skip is None else on_device(shape.value_limits(problem), device)

    def run(
        self, call: Call, lists: ListPointers, stream: int, state: int, skips: SkipPointers, memory: Memory
    ) -> None:
        operands, lse, visited, _, paging = call
        skipped, found = skips
        own = (0 if visited else 1) + (0 if skipped or self.limits is None else 1)
        wanted = COUNTER_BYTES + own * self.visited_bytes
        counter, keeper = memory(wanted)
        runtime.memsetAsync(counter, 0, wanted, stream)
        if visited:
            runtime.memsetAsync(visited, 0, self.visited_bytes, stream)  # of q tiles without keys
        if skipped:
            runtime.memsetAsync(skipped, 0, self.visited_bytes, stream)
        p = self.program.params[0]
        with self.program.lock:
            pointers = dict(zip(("q", "k", "v", "out"), (x.pointer for x in operands), strict=True))
            if maps := self.program.launches[0].maps:
                p = p["attention"]
                if self.mapped != pointers:
                    self.mapped = {}  # until all is written: an interrupt may come between
                    self.program.map_words(0)[:] = encoded(maps, pointers)
                    self.mapped = pointers
            for name, pointer in pointers.items():
                p[name]["data"] = pointer
            for name, address in lists._asdict().items():
                p["lists"][name] = address
            p["pages"]["table"] = 0 if paging is None else paging.pointer
            p["state"], p["lse"] = state, lse
            p["visited"], p["next_q_tile"] = visited or counter + COUNTER_BYTES, counter
            if self.limits is not None:
                p["values"]["limits"], p["values"]["found"] = self.limits.data.ptr, found
                p["values"]["skipped"] = skipped or counter + wanted - self.visited_bytes
            self.program.launch(0, stream)
        del keeper


_prepare = remembered(_ListedPass)
