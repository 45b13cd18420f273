"""The GPU backend: each part of a call where its rows lie, through the CUDA pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .. import cuda
from ..arrays.array_info import ArrayInfo
from ..arrays.frameworks.base import Framework
from ..arrays.lazy_cupy import import_cupy
from ..arrays.operand import (
    ENTRY_BYTES,
    Addresses,
    Call,
    Layout,
    Operand,
    Paging,
    Scale,
    address,
    axes,
    begins_aligned,
    operand,
)
from ..caches import remembered
from ..plan.launch_plan import is_dense
from ..plan.packed_table import PackedTable
from ..plan.rounds import MAX_GRID
from ..stats import NOTHING_RAN, Ran
from .batch import Batch, Form, Part
from .results import Results
from .scales import Scales

__all__ = ["layout_of", "load_pipeline", "run"]

LSE_BYTES = 4
ITEM_BYTES = 4  # of visited
SCALE_BYTES = 4


def run(
    batch: Batch, framework: Framework, infos: Sequence[ArrayInfo], results: Results,
    await_keys: Callable[[], None] | None = None, scales: Scales | None = None,
) -> list[Ran]:  # fmt: skip
    """Attend each part. ``infos``: of q, k and v, of a paged call also of the page table. ``await_keys``: as in
    `pipeline.run`, of a call with one part, as a call with an error is. ``scales``: of a cache of 8 bits; its arrays
    are the last of ``infos``. Returns what ran for each part."""
    if batch.schedule is not None:
        return _gather(batch, framework, infos, results)
    if batch.alone:
        return [_alone(batch, framework, infos, results, await_keys, scales)]
    o, lse, visited, _ = results
    pipeline = load_pipeline()
    q, k, v, out = _operands(batch, infos, o)
    paging = _paging(batch, infos, scales)
    stream, memory = framework.stream(), framework.memory(infos[0].native) or pipeline.allocate
    to_visit = [] if visited is None else [address(x) for x in visited]
    config, first_lse = batch.config, address(lse)
    ran = [NOTHING_RAN] * len(batch.parts)
    together, packed_table, in_turn = _together(batch)
    launch = None
    if packed_table is not None:
        from ..cuda import packed

        if packed.fits((q, k, v, out), packed_table, paging):
            launch = packed.prepare((q, k, v, out), packed_table, config, paging)  # before any other is launched
        else:
            in_turn = list(range(len(batch.parts)))
    if in_turn:
        calls = [_call(batch, batch.parts[i], (q, k, v, out), paging, first_lse, to_visit) for i in in_turn]
        found = pipeline.run_in_turn(calls, config, lse_stride=out.shape[2], stream=stream, memory=memory)
        for i, launched in zip(in_turn, found, strict=True):
            ran[i] = (launched.path, launched.path_reason, launched.graphs)
    if packed_table is not None and launch is not None:
        launch.run((q, k, v, out), packed_table, first_lse, stream=stream, paging=paging, memory=memory)
        for i in together:
            ran[i] = (launch.plan.path, launch.plan.path_reason, "launched")
            if to_visit:
                part = batch.parts[i]
                pipeline.write_every_tile(to_visit[part.first], part.problem, config.of_pass, stream)
    return ran


def _alone(
    batch: Batch, framework: Framework, infos: Sequence[ArrayInfo], results: Results,
    await_keys: Callable[[], None] | None, scales: Scales | None,
) -> Ran:  # fmt: skip
    """A call of one problem, of which only addresses are new where one like it came before."""
    o, lse, visited, taus = results
    pipeline = load_pipeline()
    problem, config = batch.parts[0].problem, batch.config
    stream, memory = framework.stream(), framework.memory(infos[0].native) or pipeline.allocate
    of_taus = 0
    if taus is not None:
        of_taus = address(taus)
        if is_dense(problem, config):
            framework.fill(taus, 0)
        else:
            if await_keys is not None:  # segments from all over are attended first
                await_keys()
                await_keys = None
            from ..cuda.within import find_taus

            find_taus(_operands(batch, infos, o), of_taus, problem, config, stream=stream, memory=memory)
    form, out = (o.form, o.pointer) if isinstance(o, ArrayInfo) else (None, address(o))
    arrays = (infos[0].pointer, infos[1].pointer, infos[2].pointer, out)
    paging = _paging(batch, infos, scales) if batch.paged else None
    layout = layout_of(batch, form, begins_aligned(arrays, paging), paging and paging.without_addresses())
    at = Addresses.of(
        arrays, paging, taus=of_taus, lse=address(lse), visited=0 if visited is None else address(visited[0])
    )
    launched = pipeline.prepared(problem, config, layout).run(at, stream, memory, None, await_keys)
    return launched.path, launched.path_reason, launched.graphs


@remembered
def layout_of(batch: Batch, of_out: Form | None, aligned: bool, paging: Paging | None) -> Layout:
    """Of a call of one problem. ``of_out``: of the caller's own ``out``; ``paging``: without addresses."""
    *of_inputs, of_new = batch.axes
    if of_out is not None:
        of_new = axes(of_out[0], of_out[1], batch.layout)
    q, k, v, out = (strides for _, strides in (*of_inputs, of_new))
    return Layout((q, k, v, out), aligned, paging)


def _operands(
    batch: Batch, infos: Sequence[ArrayInfo], o: ArrayInfo | Any
) -> tuple[Operand, Operand, Operand, Operand]:
    of_q, of_k, of_v, of_out = batch.axes
    out = operand(o, batch.layout) if isinstance(o, ArrayInfo) else Operand(address(o), *of_out)
    return Operand(infos[0].pointer, *of_q), Operand(infos[1].pointer, *of_k), Operand(infos[2].pointer, *of_v), out


def _paging(batch: Batch, infos: Sequence[ArrayInfo], scales: Scales | None = None) -> Paging | None:
    """Of all sequences, of a paged call; ``scales``, whose arrays are the last of ``infos``."""
    if not batch.paged:
        return None
    (pages, _, page_size, _), _ = batch.axes[1]
    table = infos[3]
    stride = table.strides[0] // ENTRY_BYTES if batch.whole.batch > 1 or batch.packed else 0
    return Paging(table.pointer, stride, page_size, pages, scales and _scales(scales, infos[4:]))


def _scales(scales: Scales, infos: Sequence[ArrayInfo]) -> tuple[Scale, Scale]:
    arrays = iter(infos)

    def of(value: float | None) -> Scale:
        if value is not None:
            return Scale(value)
        x = next(arrays)
        return Scale(pointer=x.pointer, stride=x.strides[0] // SCALE_BYTES if x.shape not in ((), (1,)) else 0)

    k, v = scales
    return of(k), of(v)


def _gather(
    batch: Batch, framework: Framework, infos: Sequence[ArrayInfo], results: Results
) -> list[Ran]:
    """By a schedule, whose arrays ``infos`` has behind the others."""
    o, lse, visited, _ = results
    pipeline = load_pipeline()
    from ..cuda import gather

    form = batch.schedule
    assert form is not None
    others = 4 if batch.paged else 3
    arrays = {name: x.pointer for name, x in zip(form.array_names, infos[others:], strict=True)}
    operands, problem = _operands(batch, infos, o), batch.parts[0].problem
    paging = _paging(batch, infos)
    of_visited = address(visited[0]) if visited else 0
    skipped = 0
    if visited and form.value_skip is not None:
        skipped = of_visited + ITEM_BYTES * math.prod(visited[0].shape[1:])
    launched = gather.gather(
        Call(operands, address(lse), of_visited, problem, paging), arrays, form, batch.of_pass,
        stream=framework.stream(), skipped=skipped, memory=framework.memory(infos[0].native) or pipeline.allocate,
    )  # fmt: skip
    return [(launched.path, launched.path_reason, "launched")]


def load_pipeline() -> Any:
    """The module that touches the GPU, imported when it is first needed: a statement would take a microsecond each.
    Its package has it when all of it is loaded, also where another thread is loading it."""
    known = getattr(cuda, "pipeline", None)
    if known is None:
        import_cupy()
        from ..cuda import pipeline as known
    return known


def _call(
    batch: Batch, part: Part, operands: tuple[Operand, ...], paging: Paging | None, lse: int, to_visit: Sequence[int]
) -> Call:
    """One part's own problem for `pipeline.run_in_turn`."""
    q, k, v, out = operands
    if batch.packed:
        rows = (part.begin_q, part.begin_q + part.problem.seqlen_q)
        q, out, before = q.rows(*rows), out.rows(*rows), part.begin_q
        if paging is None:
            k, v = (x.rows(part.begin_k, part.begin_k + part.problem.seqlen_k) for x in (k, v))
    else:
        before = part.first * q.shape[1] * q.shape[2]
        q, out = (x.sequences(part.first, part.end) for x in (q, out))
    if paging is not None:
        paging = paging.sequences(part.first, part.end)
    visited = to_visit[part.first] if to_visit else 0
    return Call((q, k, v, out), lse and lse + LSE_BYTES * before, visited, part.problem, paging)


@remembered
def _together(batch: Batch) -> tuple[list[int], PackedTable | None, list[int]]:
    """Parts that may share launches, their table, and the others. The first are those of a packed q that are attended
    densely, if 32 bits hold their rows and q tiles."""
    parts = batch.parts
    alone = list(range(len(parts)))
    if not batch.packed or max(batch.total_q * batch.whole.heads, batch.total_k) > MAX_GRID:
        return [], None, alone
    together = [i for i in alone if is_dense(parts[i].problem, batch.config)]
    if not together:
        return [], None, alone
    # Where a sequence's keys begin: among the packed ones, or the row of the page table that names its pages.
    begins = [(x.begin_q, x.first if batch.paged else x.begin_k) for x in (parts[i] for i in together)]
    table = PackedTable(begins, [parts[i].problem for i in together])
    return together, table, [i for i in alone if i not in set(together)]
