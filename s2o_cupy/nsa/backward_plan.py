"""From the selected branch's gradients to what is launched: rounds of tokens, the workspace.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from dataclasses import replace

from ..caches import remembered
from ..errors import ArgumentValueError
from ..plan.build import Array, lay_out
from ..plan.device import DeviceLimits
from ..plan.kernels import Inputs, padded_head_dim
from ..problem import Problem
from . import kernels
from .config import NSAConfig
from .plan import NsaPlan, check, inverted, round_tokens

__all__ = ["halves", "make_backward_plan"]

# Gradients of keys and values are left by item and added up: more rows of an item are less of that, and fewer share the
# work on a block that many tokens chose.
ITEM_ROWS = 4096


def halves(config: NSAConfig) -> int:
    """Of a block, each of which has threads of its own."""
    return config.block // kernels.GRADIENT_KEYS


@remembered
def make_backward_plan(problem: Problem, config: NSAConfig, limits: DeviceLimits, *, where: str) -> NsaPlan:
    """As `make_plan`: of a call that attends to blocks that are given."""
    group = problem.heads // max(1, problem.kv_heads)
    check(problem, config, group, where, compresses=False)
    inputs = Inputs(problem.dtype, padded_head_dim(problem.head_dim))
    rows, width = problem.batch * problem.heads, inputs.head_dim
    plan = NsaPlan(problem, config, inputs, group, config.top, False, 0, (), lay_out((), ()), item_rows=ITEM_ROWS)
    launched = (
        kernels.count(plan.blocks), kernels.totals(), kernels.places(), kernels.scatter(plan.blocks),
        kernels.selected_backward(inputs), *kernels.backward_sums(inputs),
    )  # fmt: skip
    most = max(kernel.shared_bytes for kernel in launched)
    if most > limits.shared_per_block:
        raise ArgumentValueError(
            f"{plan.blocks} blocks of keys need {most} bytes of shared memory, and the GPU has "
            f"{limits.shared_per_block}; accepted: fewer, or larger blocks",
            where,
        )
    of_block = halves(config)
    plan = replace(plan, kernels=launched, tokens=round_tokens(plan, 4 * rows * plan.slots * of_block * width))
    of_items = (plan.kv_rows, plan.most_items, of_block, kernels.GRADIENT_KEYS, width)
    arrays: list[Array] = [
        *inverted(plan),
        ("delta", (rows, problem.seqlen_q), "float32"),
        ("query_parts", (plan.kv_rows, plan.tokens, plan.slots, of_block, group, width), "float32"),
        ("key_parts", of_items, "float32"),
        ("value_parts", of_items, "float32"),
    ]
    return replace(plan, workspace=lay_out((), arrays))
