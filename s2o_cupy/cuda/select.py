"""Selections on the GPU: a method's stages, launched on the current device.

What does not depend on addresses is made once and remembered; a call fills addresses in and launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from ..arrays.operand import Operand
from ..caches import remembered
from ..methods.antidiagonal import MAP_ROWS
from ..methods.base import MethodConfig, Site, Stage
from ..plan.build import lay_out
from ..plan.kernels import Inputs, Kernel, padded_head_dim
from ..problem import Problem
from . import compiler
from .pipeline import Memory, allocate, device_limits
from .tables import on_device
from .tensor_maps import tensor_map

__all__ = ["run"]

MAP_WORDS = 16  # 8 bytes each, of a tensor map

# Called after each launch with its stage and the workspace's arrays; a tool's way to look inside.
Observer = Callable[[str, Mapping[str, Any]], None]


def run(
    q: Operand, k: Operand, made: Mapping[str, int], problem: Problem, config: MethodConfig, *, stream: int,
    memory: Memory = allocate, observe: Observer | None = None,
) -> None:  # fmt: skip
    """``made``: addresses of what is written: entries, begins, keys and, where keys are permuted, k_order. Nothing
    waits for the GPU."""
    aligned = (q.pointer | k.pointer) % 16 == 0 and q.is_aligned() and k.is_aligned()
    program = _program(problem, config, runtime.getDevice(), aligned, q.shape, q.strides, k.shape, k.strides)
    program.run({"q": q.pointer, "k": k.pointer, **made}, stream, memory, observe)


@remembered
def _program(
    problem: Problem, config: MethodConfig, device: int, aligned: bool, q_shape: tuple[int, int, int, int],
    q_strides: tuple[int, int, int], k_shape: tuple[int, int, int, int], k_strides: tuple[int, int, int],
) -> _Program:  # fmt: skip
    site = Site(
        problem, config.grid(problem), Inputs(problem.dtype, padded_head_dim(problem.head_dim), aligned),
        device_limits(device), {"q": Operand(0, q_shape, q_strides), "k": Operand(0, k_shape, k_strides)},
        config.workspace_bytes,
    )  # fmt: skip
    return _Program(config.stages(site), device, site.operands)


class _Program:
    """Prepared launches, in whose parameters a call fills in its addresses."""

    def __init__(self, stages: list[Stage], device: int, operands: Mapping[str, Operand]) -> None:
        self.operands = operands
        self.workspace = lay_out((), [array for stage in stages for array in stage.arrays])
        tables = [item for stage in stages for item in getattr(stage, "tables", {}).items()]
        self.tables = {name: on_device(x, device).data.ptr for name, x in tables}
        self.launches = [x for stage in stages for x in stage.launches(self.workspace) if x.blocks > 0]
        functions = compiler.load_all([x.kernel for x in self.launches], device)
        self.functions = [function.ptr for function in functions]
        self.arguments = [np.array([x.params.ctypes.data], np.uint64) for x in self.launches]
        # A struct's bytes as 8-byte words; pointers stand on these.
        self.words = [x.params.reshape(1).view(np.uint8)[: x.params.nbytes // 8 * 8].view(np.uint64)
                      for x in self.launches]  # fmt: skip
        self.lock = threading.Lock()  # the parameters are one for all threads

    def run(self, bases: dict[str, int], stream: int, memory: Memory, observe: Observer | None) -> None:
        address, keeper = memory(self.workspace.nbytes)
        bases["workspace"] = address
        bases.update(self.tables)
        with self.lock:
            for step, function, words, argument in zip(
                self.launches, self.functions, self.words, self.arguments, strict=True
            ):
                for offset, base, further in step.pointers:
                    words[offset // 8] = bases[base] + further
                if step.kernel.family.cluster > 1:
                    words[: 2 * MAP_WORDS] = self._maps(step.kernel, bases)
                driver.launchKernel(
                    function, step.blocks, 1, 1, step.kernel.threads, 1, 1, step.kernel.shared_bytes, stream,
                    argument.ctypes.data, 0,
                )  # fmt: skip
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
