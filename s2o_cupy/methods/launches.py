"""Selections on the GPU: a method's stages, launched on the current device.

What does not depend on addresses is made once and remembered; a call fills addresses in and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from ..arrays.operand import Operand
from ..caches import remembered
from ..cuda.pipeline import Memory, allocate, device_limits
from ..cuda.program import Program
from ..cuda.tables import on_device
from ..cuda.tensor_maps import tensor_map
from ..plan.build import lay_out
from ..plan.kernels import Inputs, Kernel, padded_head_dim
from ..problem import Problem
from .antidiagonal import MAP_ROWS
from .base import MethodConfig, Site
from .stages import BASES

__all__ = ["run"]

# Called after each launch with its stage and the workspace's arrays; a tool's way to look inside.
Observer = Callable[[str, Mapping[str, Any]], None]


def run(
    q: Operand, k: Operand, made: Mapping[str, int], problem: Problem, config: MethodConfig, *, stream: int,
    memory: Memory = allocate, observe: Observer | None = None,
) -> None:  # fmt: skip
    """``made``: addresses of what is written: entries, begins, keys and, where keys are permuted, k_order. Nothing
    waits for the GPU."""
    aligned = (q.pointer | k.pointer) % 16 == 0 and q.is_aligned() and k.is_aligned()
    of_q, of_k = q._replace(pointer=0), k._replace(pointer=0)
    prepared = _prepare(problem, config, runtime.getDevice(), aligned, of_q, of_k)
    prepared.run({"q": q.pointer, "k": k.pointer, **made}, stream, memory, observe)


class _Selection:
    """Prepared launches of a method's stages."""

    def __init__(
        self, problem: Problem, config: MethodConfig, device: int, aligned: bool, q: Operand, k: Operand
    ) -> None:
        site = Site(
            problem, config.grid(problem), Inputs(problem.dtype, padded_head_dim(problem.head_dim), aligned),
            device_limits(device), {"q": q, "k": k}, config.workspace_bytes,
        )  # fmt: skip
        stages = config.stages(site)
        self.operands = site.operands
        self.workspace = lay_out((), [array for stage in stages for array in stage.arrays])
        tables = [item for stage in stages for item in getattr(stage, "tables", {}).items()]
        self.tables = {name: on_device(x, device).data.ptr for name, x in tables}
        launches = [x for stage in stages for x in stage.launches(self.workspace) if x.blocks > 0]
        self.program = Program(launches, device, BASES)

    def run(self, bases: dict[str, int], stream: int, memory: Memory, observe: Observer | None) -> None:
        address, keeper = memory(self.workspace.nbytes)
        bases = {**bases, **self.tables, "workspace": address}
        program = self.program
        with program.lock:
            program.point_to(tuple([bases.get(name, 0) for name in BASES]))
            for i, step in enumerate(program.launches):
                if step.kernel.family.params.map_bytes:
                    program.map_words(i)[:] = self._maps(step.kernel, bases)
                program.launch(i, stream)
                if observe is not None:
                    observe(step.stage, self._views(address, keeper))
        del keeper

    def _maps(self, kernel: Kernel, bases: Mapping[str, int]) -> Any:
        """Of q and k, as the kernel of antidiagonal norms takes them."""
        maps = [
            tensor_map(bases[name], x.shape, x.strides, rows, kernel.step)
            for (name, x), rows in zip(self.operands.items(), MAP_ROWS, strict=True)
        ]
        return np.frombuffer(b"".join(maps), np.uint64)

    def _views(self, address: int, keeper: Any) -> dict[str, Any]:
        memory = cupy.cuda.UnownedMemory(address, self.workspace.nbytes, keeper)
        return {
            name: cupy.ndarray(place.shape, place.dtype, cupy.cuda.MemoryPointer(memory, place.offset))
            for name, place in self.workspace.places.items()
        }


_prepare = remembered(_Selection)
