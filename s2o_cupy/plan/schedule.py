"""A schedule as data: which keys the q tiles of pass 2 visit, whatever chose them.

Pure: no array on a GPU and no CuPy. raw_kernels/common/listed_rows.cuh has the same as the kernels read it, and
reference/lists.py what it means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..problem import Problem
from ..spec import LOG2E, UNITS, Geometry
from .kernels import Kernel
from .launch_plan import LaunchPlan
from .rounds import Chunk, near_heads

__all__ = ["ScheduleShape", "listed_plan", "order_lists"]

MOST_QUERIES = 2**30  # of a segment: kernels count them, and as many again but for one, in 32 bits
SHORTEST_STEP = 32  # keys of a block whose values are left out, on GPUs of little shared memory

@dataclass(frozen=True)
class ScheduleShape:
    """What is known of lists before they are made.

    Parameters
    ----------
    list_heads : int
        Lists are for each query head (as many as these), KV head, or one for all heads.
    unit : a power of two up to 128, default 1
        Neighbouring keys that an entry stands for: key number i of a list is
        ``entries[begin + i // unit] * unit + i % unit``.
    per_tile : bool, default False
        Each q tile has a list of its own; otherwise all of a segment share one.
    segment : int, optional
        Queries of a segment; a q tile has queries of one. By default all queries are one segment.
    table_heads : int, default 0
        Neighbouring query heads that share a row of the page table; 0: all of a sequence do.
    resumed : bool, default False
        Rows start from the output and state of a pass before, which are theirs to keep where a list is empty. Otherwise
        they start empty, and a row whose list is empty has an output of 0 and an lse of minus infinity.
    value_skip : float below 0, or one for each query head, optional
        Leaves out products with values (reference/value_skip.py).
    """

    list_heads: int
    unit: int = 1
    per_tile: bool = False
    segment: int | None = None
    resumed: bool = False
    table_heads: int = 0
    value_skip: float | tuple[float, ...] | None = None

    def check(self, problem: Problem) -> None:
        """Raise ValueError where no kernel takes it."""
        heads, kv_heads = problem.heads, problem.kv_heads
        if self.unit not in UNITS:
            raise ValueError(f"attend_lists: unit is {self.unit}; accepted: {', '.join(map(str, UNITS))}")
        if self.list_heads not in (1, kv_heads, heads):
            raise ValueError(
                f"attend_lists: list_heads is {self.list_heads} with {heads} query and {kv_heads} KV heads; accepted: "
                f"{', '.join(map(str, sorted({1, kv_heads})))} or {heads}"
            )
        if self.segment is not None and self.segment < 1:
            raise ValueError(
                f"attend_lists: segment is {self.segment}; accepted: an integer >= 1, or None for all queries"
            )
        if self._segment(problem) > MOST_QUERIES:
            raise ValueError(
                f"attend_lists: a segment has {self._segment(problem)} queries; accepted: up to {MOST_QUERIES}"
            )

    def geometry(self, problem: Problem) -> Geometry:
        return Geometry(problem.seqlen_q, problem.seqlen_k, self._segment(problem), 0, problem.is_causal)

    def lists_shape(self, problem: Problem, block_m: int) -> tuple[int, ...]:
        """Of ``begins`` and ``keys``: [batch, list heads, segments], or [batch, list heads, segments, q tiles]."""
        batch, _, segments, tiles = self.visited_shape(problem, block_m)
        shape = (batch, self.list_heads, segments)
        return (*shape, tiles) if self.per_tile else shape

    def visited_shape(self, problem: Problem, block_m: int) -> tuple[int, int, int, int]:
        """[batch, heads, segments, q tiles of a full segment]"""
        geometry = self.geometry(problem)
        return problem.batch, problem.heads, geometry.segments, geometry.block_count(block_m)

    def params(self, problem: Problem) -> dict[str, int]:
        """The kernels' KeyLists without addresses."""
        return {
            "unit_shift": self.unit.bit_length() - 1,
            "unit_mask": self.unit - 1,
            "shared_heads": problem.heads // self.list_heads,
            "per_tile": int(self.per_tile),
            "table_heads": self.table_heads or problem.heads,
        }

    def pairs_heads(self, problem: Problem) -> bool:
        """Whether query heads two and two have the same lists, KV head and row of the page table."""
        shared = (problem.heads // problem.kv_heads, problem.heads // self.list_heads, self.table_heads)
        return all(heads % 2 == 0 for heads in shared)

    def more_params(self, problem: Problem) -> dict[str, dict[str, int]]:
        """What the kernels are given besides AttentionParams, without addresses."""
        more = {"lists": self.params(problem)}
        if self.value_skip is not None:
            more["values"] = {"blocks": -(-problem.seqlen_k // SHORTEST_STEP)}
        return more

    def value_limits(self, problem: Problem) -> npt.NDArray[np.float32]:
        """The kernels' ValueSkip::limits, float32 [heads]."""
        least = np.finfo(np.float32).min
        limits = np.maximum(np.asarray(self.value_skip, np.float64) * LOG2E, least)
        return np.broadcast_to(limits, (problem.heads,)).astype(np.float32)

    def _segment(self, problem: Problem) -> int:
        return max(1, problem.seqlen_q) if self.segment is None else self.segment


def listed_plan(
    plan: LaunchPlan, shape: ScheduleShape, problem: Problem, heads_near: bool, q_ordered: bool
) -> tuple[LaunchPlan, Kernel]:
    """From the plan of a call with the same arrays to that of pass 2 alone, by lists, and its kernel.

    ``heads_near``: 32 bits hold offsets of a head's queries from the head before it, in chunks of 16 bytes.
    ``q_ordered``: the caller gives an order of queries.
    """
    geometry = shape.geometry(problem)
    heads = problem.batch * problem.heads
    whole = Chunk(
        0, heads, 0, geometry.segments, problem.heads // problem.kv_heads, near_heads(problem, heads), 0, 0
    )
    tiles = geometry.block_count(plan.of_pass.block_m)
    kernel = plan.runs_on.listed(plan.pass2, shape.value_skip is not None)
    # With a tau a head's rows would wait for the other's to stop.
    if plan.of_pass.tau == 0 and heads_near and shape.pairs_heads(problem):
        kernel = plan.runs_on.paired(kernel) or kernel
    if not q_ordered:
        kernel = plan.runs_on.by_boxes(kernel, shape.unit, problem.head_dim, plan.page_size)
    return replace(plan, geometry=geometry, dense=False, tiles=tiles, whole=whole, chunks=(whole,)), kernel


def order_lists(
    chunks: Sequence[Chunk], geometry: Geometry, heads: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """S2O's own schedule, in its units: the lists that its key orders are, where those of all rounds stand one behind
    the other. Segments in no round, as those of `S2OConfig.dense_last` are, have none.

    ``heads``: batch times query heads. Returns begins, int64 [heads, segments], and keys, int32 [heads, segments].
    """
    begins = np.zeros((heads, geometry.segments), np.int64)
    keys = np.zeros((heads, geometry.segments), np.int32)
    before = 0  # elements of the rounds before
    for chunk in chunks:
        for head in range(chunk.first_head, chunk.first_head + chunk.heads):
            for n in range(chunk.first_segment, chunk.first_segment + chunk.segments):
                begins[head, n] = before + chunk.place(head, n).start
                keys[head, n] = geometry.candidates(n)
        before += chunk.elements
    return begins, keys
