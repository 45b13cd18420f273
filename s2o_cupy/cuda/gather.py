"""Attention by a schedule: the dense part by pass 1, then its sinks and its lists by pass 2 on what pass 1 left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..arrays.operand import Call, Operand, Paging
from ..caches import remembered
from ..errors import ArgumentValueError
from ..plan.launch_plan import LaunchPlan
from ..plan.schedule_form import ScheduleForm
from ..problem import Problem
from ..spec import Pass
from . import pipeline
from .lists import ListPointers, SkipPointers, attend_lists
from .pipeline import Memory, allocate

__all__ = ["gather"]

STATE_BYTES = 8  # of a row
INT32_BYTES, INT64_BYTES = 4, 8


def gather(
    call: Call, arrays: Mapping[str, int], form: ScheduleForm, of_pass: Pass, *, stream: int, skipped: int = 0,
    memory: Memory = allocate,
) -> LaunchPlan:  # fmt: skip
    """``call``: with a k_order without paging. ``arrays``: addresses by form.array_names, which nobody checks.
    ``skipped``: as of `SkipPointers`. Nothing waits for the GPU. Returns the lists' plan.

    Raises
    ------
    ValueError
        No kernel takes it: with a k_order rows are whole chunks of 16 bytes.
    """
    problem = call.problem
    if form.order_batch and not all(x.pointer % 16 == 0 and x.is_aligned() for x in call.operands):
        raise ArgumentValueError(
            "the schedule has a k_order, and a row of q, k, v or out does not start on 16 bytes, or head_dim "
            f"({problem.head_dim}) is no multiple of 8; accepted on the GPU: rows that do, in multiples of 8 elements"
        )
    state, keeper = 0, None
    if form.dense is not None:
        state, keeper = pipeline.run_pass1(call, of_pass, stream=stream, memory=memory)
    apart = problem.batch > 1 and (form.batch == 1 or form.order_batch > 0 or form.sinks > 0)
    rows = problem.heads * problem.seqlen_q  # of a sequence
    tiles = math.prod(form.shape(problem).visited_shape(problem, form.block_m)[1:])
    plan = None
    for first, end in [(b, b + 1) for b in range(problem.batch)] if apart else [(0, problem.batch)]:
        before = first * rows
        turn = _turn(call, first, end)._replace(lse=call.lse and call.lse + before * INT32_BYTES)
        of_rows: dict[str, Any] = {"stream": stream, "state": state and state + before * STATE_BYTES, "memory": memory}
        if form.sinks:
            sinks = ListPointers(
                arrays["sink_entries"], arrays["sink_begins"], arrays["sink_keys"], kept=of_rows["state"]
            )
            attend_lists(turn, sinks, form.sinks_shape(), _never_stops(of_pass), **of_rows)
        lists_before = first * form.list_heads * form.rows if form.batch > 1 else 0
        lists = ListPointers(
            arrays["entries"], arrays["begins"] + lists_before * INT64_BYTES,
            arrays["keys"] + lists_before * INT32_BYTES,
            q_order=arrays["q_order"] + before * INT32_BYTES if form.q_ordered else 0,
        )  # fmt: skip
        if form.order_batch:
            turn = _permuted(turn, arrays["k_order"], form, first)
        tiles_before = first * tiles * INT32_BYTES
        plan = attend_lists(
            turn._replace(visited=call.visited and call.visited + tiles_before), lists, form.shape(turn.problem),
            of_pass, skips=SkipPointers(skipped and skipped + tiles_before), **of_rows,
        )  # fmt: skip
    del keeper
    assert plan is not None
    return plan


def _turn(call: Call, first: int, end: int) -> Call:
    """Sequences ``first`` to ``end``, half-open, that share launches, without lse and visited."""
    q, k, v, out = call.operands
    q, out, paging = q.sequences(first, end), out.sequences(first, end), call.paging
    if paging is None:
        k, v = k.sequences(first, end), v.sequences(first, end)
    else:
        paging = paging.sequences(first, end)
    return Call((q, k, v, out), 0, 0, _of_batch(call.problem, end - first), paging)


def _permuted(call: Call, order: int, form: ScheduleForm, first: int) -> Call:
    """A permutation of the keys of one sequence, number ``first``, is the table of a cache whose pages have one key
    each."""
    if form.order_batch > 1:
        order += first * form.order_heads * form.seqlen_k * INT32_BYTES
    q, k, v, out = call.operands
    paging = Paging(order, form.seqlen_k if form.order_heads > 1 else 0, 1, form.seqlen_k)
    return call._replace(operands=(q, _single_keys(k), _single_keys(v), out), paging=paging)


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
