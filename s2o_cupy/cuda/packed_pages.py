"""Keys and values of packed sequences copied from pages to arrays, which pass 1 then reads.

Where pages are too small for the copy engine pass 1 would gather their rows one by one; queries that are many to a key
repay the copy. Pages of 8 bits are always read so.
"""

from __future__ import annotations

from ..arrays.operand import ITEM_BYTES, Operand, Paging
from ..plan.collecting import COLLECT_PACKED_PAGES, PACKED_FP8_PAGES
from ..plan.kernels import Kernel
from ..plan.launch_plan import COLLECT_CHUNKS, LaunchPlan
from ..plan.launches import packed_collect_launch
from ..plan.packed_table import PackedLaunch
from ..problem import Problem
from .program import Program

__all__ = ["PageCollector"]


class PageCollector:
    """A prepared launch. ``problem``: of any lengths. Of ``operands`` and ``paging`` addresses are not read."""

    def __init__(
        self, plan: LaunchPlan, problem: Problem, operands: dict[str, Operand], paging: Paging, device: int
    ) -> None:
        self.problem = problem
        self.is_fp8 = paging.scales is not None
        kernel = Kernel(PACKED_FP8_PAGES, problem.dtype) if self.is_fp8 else COLLECT_PACKED_PAGES
        launch = packed_collect_launch(plan, kernel, problem, operands, paging)
        self.program = Program([launch], device)
        self.params = self.program.params[0]

    def nbytes(self, keys: int) -> int:
        """Of so many keys and their values, of all KV heads."""
        return 2 * self.problem.kv_heads * keys * self.problem.head_dim * ITEM_BYTES

    def run(
        self, k: Operand, v: Operand, paging: Paging, launch: PackedLaunch, to: int, stream: int
    ) -> tuple[Operand, Operand]:
        """Copy the keys and values of a launch's sequences from the caches ``k`` and ``v``. Returns the arrays, each
        [1, kv_heads, keys, head_dim], the first at the address ``to``. Of ``paging`` addresses alone are read."""
        of, heads, head_dim = launch.of, self.problem.kv_heads, self.problem.head_dim
        shape = (1, heads, launch.keys, head_dim)
        strides = (0, launch.keys * head_dim if heads > 1 else 0, head_dim if launch.keys > 1 else 0)
        keys = Operand(to, shape, strides)
        values = Operand(to + self.nbytes(launch.keys) // 2, shape, strides)
        chunks, n = heads * launch.keys * int(self.params["row_chunks"]), len(of)
        for name, x in zip(("k_pages", "v_pages") if self.is_fp8 else ("k", "v"), (k, v), strict=True):
            self.params[name]["data"] = x.pointer
        for name, scale in zip(("k_scale", "v_scale"), paging.scales or (), strict=False):
            self.params[name]["of_heads"] = scale.pointer
        self.params["keys"], self.params["values"] = keys.pointer, values.pointer
        self.params["seqlen_k"], self.params["chunks"] = launch.keys, chunks
        self.params["pages"]["table"] = paging.pointer
        self.params["sequences"] = n
        self.params["first_key"][:n] = of["begin_k"]
        self.params["table_row"][:n] = launch.table_row
        self.program.launch(0, stream, -(-chunks // COLLECT_CHUNKS))
        return keys, values
