"""Packed sequences that are attended densely: pass 1 of all of them in one launch.

Their keys and values are packed too, or lie in the pages of a cache. What depends on neither lengths nor addresses is
made once and cached; a call fills those in.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from cupy.cuda import runtime

from ..arrays.operand import Layout, Operand, Operands, Paging, begins_aligned
from ..caches import remembered
from ..plan.launch_plan import check_fp8_keys, packed_pass1
from ..plan.launches import ALIGNMENT, packed_launch
from ..plan.maps import maps_of_pass1
from ..plan.packed_table import PackedTable
from ..problem import Problem
from ..selection.methods import make_plan
from ..spec import S2OConfig
from .packed_pages import PageCollector
from .pipeline import Memory, allocate, device_limits
from .program import Program
from .tensor_maps import encoded

__all__ = ["PackedPass", "fits", "prepare"]

COUNTER_BYTES = 4  # a launch's next q tile


def fits(operands: Operands, table: PackedTable, paging: Paging | None = None) -> bool:
    """Whether kernels may be chosen for all sequences at once: they would be the same for each alone. A single row has
    no stride, so it may be aligned where all rows together are not."""
    q, k, v, out = operands
    rows: tuple[Operand, ...] = (q, out)
    shortest = table.shortest_q
    if paging is None:  # a cache is the same to all sequences
        rows, shortest = operands, min(shortest, table.shortest_k)
    return shortest > 1 or all(x.is_aligned() and x.is_compact() for x in rows)


def prepare(operands: Operands, table: PackedTable, config: S2OConfig, paging: Paging | None = None) -> PackedPass:
    """Ready for `PackedPass.run`, or the error of a configuration that the device or the arrays do not allow.

    ``operands``: q and out [1, heads, total_q, head_dim], k and v [1, kv_heads, total_k, head_dim] or, with ``paging``,
    [pages, kv_heads, page_size, head_dim]. Every problem of the table is dense under ``config``.
    """
    q, k, v, out = operands
    aligned = begins_aligned((q.pointer, k.pointer, v.pointer, out.pointer), paging)
    q, k, v, out = [x._replace(pointer=0) for x in operands]
    of_paging = paging and paging.without_addresses()
    return _prepare((q, k, v, out), aligned, table, config, of_paging, runtime.getDevice())


@remembered
def _prepare(
    operands: Operands, aligned: bool, table: PackedTable, config: S2OConfig, paging: Paging | None, device: int
) -> PackedPass:
    q, k, v, out = operands
    # As each sequence alone would be judged.
    compact = all(x.rows(0, table.longest_q).is_compact() for x in (q, out))
    collects = False
    if paging is None:
        compact &= all(x.rows(0, table.longest_k).is_compact() for x in (k, v))
    else:
        if paging.scales is None:
            compact &= all(x.is_compact_cache() for x in (k, v))
        else:
            check_fp8_keys(replace(table.problem, seqlen_k=table.longest_k))
        collects = table.collected_keys(config) > 0
    layout = Layout((q.strides, k.strides, v.strides, out.strides), aligned, paging)
    return prepared(table.problem, config, device, compact, layout, collects)


class PackedPass:
    """A prepared launch. ``problem``: of one query and one key. ``compact``: as each sequence alone is. ``collects``:
    where pass 1 would gather rows of pages, keys and values are copied to arrays first, as those of 8 bits always
    are. ``plan``: of each sequence, but for its lengths."""

    def __init__(
        self, problem: Problem, config: S2OConfig, device: int, compact: bool, layout: Layout, collects: bool
    ) -> None:
        of_arrays = layout if layout.is_fp8 else layout._replace(paging=None)
        operands = of_arrays.operands(problem)  # of a cache too the strides alone are read
        aligned, paging = layout.is_aligned(operands), layout.paging
        self.config, self.is_fp8 = config, layout.is_fp8
        given = (problem, config, device_limits(device), aligned, compact)
        make = functools.partial(make_plan, *given, fp8=layout.is_fp8)
        self.plan = make(layout.page_size)
        self.kernel = packed_pass1(self.plan)
        self.collector: PageCollector | None = None
        if paging is not None and (layout.is_fp8 or (collects and self.plan.gathers_pages)):
            self.collector = PageCollector(self.plan, problem, operands, paging, device)
            self.plan, paging = make(), None
            self.kernel = packed_pass1(self.plan)
        self.program = Program([packed_launch(self.plan, self.kernel, problem, operands, paging)], device)
        params, self.maps = self.program.params[0], self.program.map_words(0)
        self.attention = params["attention"] if len(self.maps) else params
        self.pointed: tuple[Any, ...] = ()  # the arrays whose addresses are in the parameters

    def run(
        self, operands: Operands, table: PackedTable, lse: int, *, stream: int, paging: Paging | None = None,
        memory: Memory = allocate,
    ) -> None:  # fmt: skip
        """Attend. ``lse``: address of float32 [heads, total_q] to write, or 0. ``paging``: as `prepare` was given; each
        sequence's row of it is the table's to say. Nothing waits for the GPU."""
        collector = self.collector
        most_keys = table.read_keys(self.config) if self.is_fp8 else table.collected_keys(self.config)
        launches = table.launches(self.kernel.block_m, most_keys if collector else 0)
        counters = COUNTER_BYTES * len(launches)
        before_keys = -(-counters // ALIGNMENT) * ALIGNMENT
        keys_bytes = max(collector.nbytes(x.keys) for x in launches) if collector else 0  # launches take turns
        address, keeper = memory(before_keys + keys_bytes)
        runtime.memsetAsync(address, 0, counters, stream)
        page_table = 0 if paging is None else paging.pointer
        with self.program.lock:
            for i, launch in enumerate(launches):
                now, table_now = operands, page_table
                if collector and paging is not None:
                    q, k, v, out = operands
                    k, v = collector.run(k, v, paging, launch, address + before_keys, stream)
                    now, table_now = (q, k, v, out), 0
                if self.pointed != (*now, lse, table_now):
                    self._point_to(now, lse, table_now)
                n = len(launch.of)
                self.attention["sequences"] = n
                self.attention["first_q_tile"][:n] = launch.first_q_tile
                self.attention["of"][:n] = launch.of
                self.attention["q_tiles"] = launch.q_tiles
                self.attention["next_q_tile"] = address + COUNTER_BYTES * i
                blocks = self.plan.blocks(self.kernel, launch.q_tiles)
                self.program.launch(0, stream, blocks)
        del keeper

    def _point_to(self, operands: Operands, lse: int, page_table: int) -> None:
        self.pointed = ()  # until all is written: a map may be refused
        for name, x in zip(("q", "k", "v", "out"), operands, strict=True):
            self.attention[name] = (x.pointer, *x.strides)  # of what is collected strides differ by launch
        self.attention["lse"] = lse
        self.attention["pages"]["table"] = page_table
        self.attention["geometry"]["seqlen_q"] = operands[0].shape[2]
        self.attention["geometry"]["seqlen_k"] = operands[1].shape[2]  # of pages nobody reads it
        if len(self.maps):
            named = dict(zip("qkv", operands, strict=False))
            maps = maps_of_pass1(self.plan, {name: (name, x._replace(pointer=0)) for name, x in named.items()})
            self.maps[:] = encoded(maps, {name: x.pointer for name, x in named.items()})
        self.pointed = (*operands, lse, page_table)


prepared = remembered(PackedPass)
