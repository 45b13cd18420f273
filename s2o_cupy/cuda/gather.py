"""Attention by a schedule: the dense part by pass 1, then its sinks and its lists by pass 2 on what pass 1 left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..arrays.operand import Operand, Operands, Paging
from ..caches import remembered
from ..plan.launch_plan import LaunchPlan
from ..plan.schedule_form import ScheduleForm
from ..problem import Problem
from ..spec import Pass
from . import pipeline
from .lists import ListPointers, attend_lists
from .pipeline import Memory, allocate

__all__ = ["gather"]

STATE_BYTES = 8  # of a row
INT32_BYTES, INT64_BYTES = 4, 8


def gather(
    operands: Operands,
    arrays: Mapping[str, int],
    form: ScheduleForm,
    problem: Problem,
    of_pass: Pass,
    *,
    stream: int,
    lse: int = 0,
    visited: int = 0,
    skipped: int = 0,
    paging: Paging | None = None,
    memory: Memory = allocate,
) -> LaunchPlan:
    """``operands`` and ``paging``: as `pipeline.run` takes them; no paging with a k_order. ``arrays``: addresses by
    form.array_names, which nobody checks. ``lse``, ``visited`` and ``skipped``: as in `attend_lists`.
    Nothing waits for the GPU. Returns the lists' plan.

    Raises
    ------
    ValueError
        No kernel takes it: with a k_order rows are whole chunks of 16 bytes.
    """
    if form.order_batch and not all(x.pointer % 16 == 0 and x.is_aligned() for x in operands):
        raise ValueError(
            "gather_attention: the schedule has a k_order, and a row of q, k, v or out does not start on 16 bytes, or "
            f"head_dim ({problem.head_dim}) is no multiple of 8; accepted on the GPU: rows that do, in multiples of 8 "
            "elements"
        )
    state, keeper = 0, None
    if form.dense is not None:
        state, keeper = pipeline.run_pass1(operands, lse, problem, of_pass, stream=stream, paging=paging, memory=memory)
    apart = problem.batch > 1 and (form.batch == 1 or form.order_batch > 0 or form.sinks > 0)
    turns = problem.batch if apart else 1
    rows = problem.heads * problem.seqlen_q  # of a sequence
    tiles = _elements(form.shape(problem).visited_shape(problem, form.block_m)[1:])
    plan = None
    for b in range(turns):
        of = _Turn(b, b + 1) if apart else _Turn(0, problem.batch)
        plan = of.attend(
            operands, arrays, form, problem, of_pass, stream, state and state + b * rows * STATE_BYTES,
            lse and lse + b * rows * INT32_BYTES, visited and visited + b * tiles * INT32_BYTES,
            skipped and skipped + b * tiles * INT32_BYTES, paging, memory,
        )  # fmt: skip
    del keeper
    assert plan is not None
    return plan


class _Turn:
    """Sequences ``first`` to ``end``, half-open, that share launches."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end

    def attend(
        self, operands: Operands, arrays: Mapping[str, int], form: ScheduleForm, whole: Problem, of_pass: Pass,
        stream: int, state: int, lse: int, visited: int, skipped: int, paging: Paging | None, memory: Memory,
    ) -> LaunchPlan:  # fmt: skip
        q, k, v, out = operands
        q, out = (x.sequences(self.first, self.end) for x in (q, out))
        if paging is None:
            k, v = (x.sequences(self.first, self.end) for x in (k, v))
        else:
            paging = paging.sequences(self.first, self.end)
        problem = _of_batch(whole, self.end - self.first)
        if form.sinks:
            sinks = ListPointers(arrays["sink_entries"], arrays["sink_begins"], arrays["sink_keys"], kept=state)
            attend_lists(
                (q, k, v, out), sinks, form.sinks_shape(), problem, _never_stops(of_pass), stream=stream, state=state,
                lse=lse, paging=paging, memory=memory,
            )  # fmt: skip
        before = self.first * form.list_heads * form.rows if form.batch > 1 else 0  # lists of sequences before
        queries_before = self.first * whole.heads * whole.seqlen_q * INT32_BYTES
        lists = ListPointers(
            arrays["entries"], arrays["begins"] + before * INT64_BYTES, arrays["keys"] + before * INT32_BYTES,
            q_order=arrays["q_order"] + queries_before if form.q_ordered else 0,
        )
        if form.order_batch:
            paging, k, v = self._permuted(arrays["k_order"], form, k, v)
        return attend_lists(
            (q, k, v, out), lists, form.shape(problem), problem, of_pass, stream=stream, state=state, lse=lse,
            visited=visited, skipped=skipped, paging=paging, memory=memory,
        )  # fmt: skip

    def _permuted(self, order: int, form: ScheduleForm, k: Operand, v: Operand) -> tuple[Paging, Operand, Operand]:
        """A permutation of the keys of one sequence is the table of a cache whose pages have one key each."""
        if form.order_batch > 1:
            order += self.first * form.order_heads * form.seqlen_k * INT32_BYTES
        stride = form.seqlen_k if form.order_heads > 1 else 0
        return Paging(order, stride, 1, form.seqlen_k), _single_keys(k), _single_keys(v)


def _single_keys(x: Operand) -> Operand:
    """Keys [1, kv_heads, seqlen_k, head_dim] as pages [seqlen_k, kv_heads, 1, head_dim]."""
    _, kv_heads, seqlen_k, head_dim = x.shape
    _, head, row = x.strides
    return Operand(x.pointer, (seqlen_k, kv_heads, 1, head_dim), (row, head, 0))


@remembered  # a new problem, and a new pass, would take the host longer than a launch
def _of_batch(problem: Problem, batch: int) -> Problem:
    return replace(problem, batch=batch)


@remembered
def _never_stops(of_pass: Pass) -> Pass:
    return replace(of_pass, tau=0.0)


def _elements(shape: tuple[int, ...]) -> int:
    heads, segments, tiles = shape
    return heads * segments * tiles
