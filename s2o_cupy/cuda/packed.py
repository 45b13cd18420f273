"""Packed sequences that are attended densely: pass 1 of all of them in one launch.

What depends on neither lengths nor addresses is made once and cached; a call fills those in.
"""

from __future__ import annotations

import threading

import numpy as np
from cupy.cuda import driver, runtime

from ..arrays.operand import Operand
from ..caches import remembered
from ..plan.launch_plan import make_plan, packed_pass1
from ..plan.launches import packed_launch
from ..plan.packed_table import PackedTable
from ..problem import Problem
from ..spec import S2OConfig
from . import compiler
from .pipeline import Memory, Operands, allocate, device_limits
from .tensor_maps import tensor_map

__all__ = ["PackedPass", "fits", "prepare"]


def fits(operands: Operands, table: PackedTable) -> bool:
    """Whether kernels may be chosen for all sequences at once: they would be the same for each alone. A single row has
    no stride, so it may be aligned where all rows together are not."""
    return table.shortest > 1 or all(x.is_aligned() and x.is_compact() for x in operands)


def prepare(operands: Operands, table: PackedTable, config: S2OConfig) -> PackedPass:
    """Ready for `PackedPass.run`, or the error of a configuration that the device or the arrays do not allow.

    ``operands``: q and out [1, heads, total_q, head_dim], k and v [1, kv_heads, total_k, head_dim]. Every problem of
    the table is dense under ``config``.
    """
    q, k, v, out = operands
    aligned = (q.pointer | k.pointer | v.pointer | out.pointer) % 16 == 0
    longest = (table.longest_q, table.longest_k, table.longest_k, table.longest_q)
    # As each sequence alone would be judged.
    compact = all(x.rows(0, rows).is_compact() for x, rows in zip(operands, longest, strict=True))
    strides = (q.strides, k.strides, v.strides, out.strides)
    return prepared(table.problem, config, runtime.getDevice(), aligned, compact, strides)


@remembered
def prepared(
    problem: Problem, config: S2OConfig, device: int, aligned: bool, compact: bool,
    strides: tuple[tuple[int, int, int], ...],
) -> PackedPass:  # fmt: skip
    """``strides`` of q, k, v and out."""
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    operands = {
        name: Operand(0, (1, n, 1, problem.head_dim), s)
        for name, n, s in zip(("q", "k", "v", "out"), heads, strides, strict=True)
    }
    return PackedPass(problem, config, device, aligned, compact, operands)


class PackedPass:
    """A prepared launch. ``problem``: of one query and one key. ``plan``: of each sequence, but for its lengths."""

    def __init__(
        self, problem: Problem, config: S2OConfig, device: int, aligned: bool, compact: bool,
        operands: dict[str, Operand],
    ) -> None:  # fmt: skip
        aligned = aligned and all(x.is_aligned() for x in operands.values())
        self.plan = make_plan(problem, config, device_limits(device), aligned, compact)
        self.kernel = packed_pass1(self.plan)
        self.params = packed_launch(self.plan, self.kernel, problem, config, operands, aligned).params
        self.function = compiler.load(self.kernel, device).ptr
        self.address = np.array([self.params.ctypes.data], np.uint64)
        map_bytes = self.kernel.family.params.map_bytes  # tensor maps first; persistent blocks
        self.maps = self.params.reshape(1).view(np.uint8)[:map_bytes] if map_bytes else None
        self.attention = self.params["attention"] if map_bytes else self.params
        self.pointed: tuple[Operands, int] | None = None  # the arrays whose addresses are in the parameters
        self.lock = threading.Lock()  # they are one for all threads

    def run(
        self, operands: Operands, table: PackedTable, lse: int, *, stream: int, memory: Memory = allocate
    ) -> None:
        """Attend. ``lse``: address of float32 [heads, total_q] to write, or 0. Nothing waits for the GPU."""
        launches = table.launches(self.kernel.block_m)
        counters, keeper = memory(4 * len(launches))  # a launch's next q tile
        runtime.memsetAsync(counters, 0, 4 * len(launches), stream)
        with self.lock:
            if self.pointed != (operands, lse):
                self._point_to(operands, lse)
            for i, launch in enumerate(launches):
                n = len(launch.of)
                self.attention["sequences"] = n
                self.attention["first_q_tile"][:n] = launch.first_q_tile
                self.attention["of"][:n] = launch.of
                self.attention["q_tiles"] = launch.q_tiles
                self.attention["next_q_tile"] = counters + 4 * i
                blocks = launch.q_tiles if self.maps is None else min(launch.q_tiles, self.plan.persistent_blocks)
                driver.launchKernel(
                    self.function, blocks, 1, 1, self.kernel.threads, 1, 1, self.kernel.shared_bytes, stream,
                    self.address.ctypes.data, 0,
                )  # fmt: skip
        del keeper

    def _point_to(self, operands: Operands, lse: int) -> None:
        self.pointed = None  # until all is written: a map may be refused
        for name, x in zip(("q", "k", "v", "out"), operands, strict=True):
            self.attention[name]["data"] = x.pointer
        self.attention["lse"] = lse
        self.attention["geometry"]["seqlen_q"] = operands[0].shape[2]
        self.attention["geometry"]["seqlen_k"] = operands[1].shape[2]
        if self.maps is not None:
            boxes = zip(operands[:3], self.plan.map_boxes, strict=True)
            maps = b"".join([tensor_map(x.pointer, x.shape, x.strides, box) for x, box in boxes])
            self.maps[:] = np.frombuffer(maps, np.uint8)
        self.pointed = (operands, lse)
