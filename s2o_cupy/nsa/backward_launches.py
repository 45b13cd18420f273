"""The selected branch's gradients on the current device: by blocks of keys, on the portable kernels of every
architecture. Nothing waits for the GPU."""

from __future__ import annotations

from typing import NamedTuple

from cupy.cuda import runtime

from ..arrays.operand import Operand
from ..cuda import pipeline
from ..cuda.pipeline import Memory, device_limits
from . import kernels
from .backward_plan import halves, make_backward_plan
from .config import NSAConfig
from .launches import Pair, calling, tensor

__all__ = ["Gradients", "attend_blocks_backward"]


class Gradients(NamedTuple):
    """Addresses of float32 arrays like q, k and v, contiguous."""

    q: int
    k: int
    v: int


def attend_blocks_backward(
    arrays: pipeline.Call, chosen: int, dout: Operand, gradients: Gradients, config: NSAConfig, *, stream: int,
    memory: Memory,
) -> None:  # fmt: skip
    """Of ``arrays`` all are read: the output and lse are those of the selected branch alone."""
    problem, (q, k, v, out) = arrays.problem, arrays.operands
    plan = make_backward_plan(problem, config, device_limits(runtime.getDevice()), where="selected_attention_backward")
    address, keeper = memory(plan.workspace.nbytes)
    with calling(plan, address, stream, kernels.SELECTED_BACKWARD.params) as call:
        call.point(q, Pair(k, v), out)
        call.params["dout"], call.params["chosen"], call.params["lse"] = tensor(dout), chosen, arrays.lse
        for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
            call.params[name] = x
        call.params["halves"] = halves(config)
        nbytes = 4 * problem.batch * problem.kv_heads * problem.seqlen_k * problem.head_dim
        for x in (gradients.k, gradients.v):
            runtime.memsetAsync(x, 0, nbytes, stream)
        deltas, of_queries, of_keys = kernels.backward_sums(plan.inputs)
        items = plan.kv_rows * plan.most_items
        for first, tokens in plan.rounds:
            call.round(first, tokens)
            if first == 0:
                call.launch(deltas, -(-problem.batch * problem.heads * problem.seqlen_q // 4))
            call.invert()
            call.launch(kernels.selected_backward(plan.inputs), items * halves(config))
            call.launch(of_queries, -(-plan.kv_rows * tokens * plan.group // 4))
            call.launch(of_keys, items)
    del keeper
