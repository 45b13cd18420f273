"""Calls on arrays of which no more is known than where they begin, as a compiler that owns them hands them over.

They lie in C order on a GPU, and the workspace is the caller's too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..arrays.array_info import ArrayInfo, Device
from ..arrays.lazy_cupy import import_cupy
from ..arrays.operand import ITEM_BYTES, Call, Operand, Operands, operand
from ..arrays.streams import cupy_scope
from ..problem import Problem
from ..spec import S2OConfig
from .on_gpu import load_pipeline

__all__ = ["run", "workspace_bytes"]

Shape = tuple[int, ...]


def workspace_bytes(problem: Problem, config: S2OConfig, layout: str) -> int:
    """How large a workspace `run` asks for on the current device. Compiles its kernels if need be."""
    import_cupy()
    operands = _operands(problem, layout, (0, 0, 0, 0))
    return load_pipeline().workspace_bytes(operands, problem, config)


def run(
    pointers: Sequence[int],
    workspace: tuple[int, int],
    problem: Problem,
    config: S2OConfig,
    layout: str,
    *,
    device: int,
    stream: int,
) -> None:
    """Launch one problem on a stream of a device, and wait for nothing.

    ``pointers``: of q, k, v, o, which is written, and lse, which is written if this is not 0. ``workspace``: where, and
    how many bytes. Where that is too few, the rest of this call's memory is CuPy's.
    """
    *arrays, lse = pointers
    address, nbytes = workspace
    with cupy_scope(Device("cuda", device), stream):
        pipeline = load_pipeline()

        def memory(wanted: int) -> tuple[int, Any]:
            return (address, None) if wanted <= nbytes else pipeline.allocate(wanted)

        call = Call(_operands(problem, layout, arrays), lse, 0, problem)
        pipeline.run(call, config, stream=stream, memory=memory)


def _operands(problem: Problem, layout: str, pointers: Sequence[int]) -> Operands:
    p = problem
    of_q, of_k = (p.batch, p.heads, p.seqlen_q, p.head_dim), (p.batch, p.kv_heads, p.seqlen_k, p.head_dim)
    shapes = (of_q, of_k, of_k, of_q)
    q, k, v, out = (_in_c_order(x, shape, layout) for x, shape in zip(pointers, shapes, strict=True))
    return q, k, v, out


def _in_c_order(pointer: int, bhsd: Shape, layout: str) -> Operand:
    b, h, s, d = bhsd
    shape = (b, s, h, d) if layout == "BSHD" else bhsd
    strides = tuple(ITEM_BYTES * math.prod(shape[axis + 1 :]) for axis in range(4))
    return operand(ArrayInfo(pointer, shape, strides, ITEM_BYTES), layout)
