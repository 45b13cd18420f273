"""What is known of a schedule without a look into its arrays."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import Problem
from ..spec import Geometry, Pass
from .schedule import ScheduleShape

__all__ = ["BLOCK_N", "ScheduleForm"]

BLOCK_N = 128  # keys between two stop checks


@dataclass(frozen=True)
class ScheduleForm:
    """Sizes and rules; the arrays' shapes are ``batch``, ``list_heads`` and so on. Calls are known by it."""

    batch: int  # of the lists: that of q, or 1
    list_heads: int
    order_batch: int  # of k_order; 0: there is none
    order_heads: int
    seqlen_q: int
    seqlen_k: int
    unit: int
    block_m: int
    per_segment: bool
    segment: int | None
    window: int
    sinks: int
    is_causal: bool
    tau: float
    q_ordered: bool = False  # q tiles take queries in an order; only without a dense part and causality
    value_skip: float | tuple[float, ...] | None = None  # of each query head, or all; None: no values are left out

    @property
    def dense(self) -> Geometry | None:
        """The dense part; None: there is none."""
        if self.segment is None:
            return None
        return Geometry(self.seqlen_q, self.seqlen_k, self.segment, self.window, self.is_causal)

    @property
    def list_rows(self) -> int:
        """Queries that share a list."""
        return self.segment if self.per_segment and self.segment is not None else self.block_m

    @property
    def rows(self) -> int:
        """Lists of a list head."""
        return -(-self.seqlen_q // self.list_rows)

    @property
    def units(self) -> int:
        """Units of keys; the last may be short."""
        return -(-self.seqlen_k // self.unit)

    @property
    def array_names(self) -> tuple[str, ...]:
        """Of the schedule's arrays, in the order in which calls pass them on."""
        names = ["entries", "begins", "keys"]
        if self.sinks:
            names += ["sink_entries", "sink_begins", "sink_keys"]
        if self.order_batch:
            names.append("k_order")
        if self.q_ordered:
            names.append("q_order")
        return tuple(names)

    def of_pass(self, path: str) -> Pass:
        """What the passes need to know; without a segment there is no dense part."""
        return Pass(self.block_m, BLOCK_N, path, self.segment, self.window, 1, self.tau)

    def shape(self, problem: Problem) -> ScheduleShape:
        """What the kernels need to know of the lists."""
        return ScheduleShape(
            self.list_heads, self.unit, not self.per_segment, self.segment if self.per_segment else None,
            self.segment is not None, problem.heads // self.order_heads if self.order_batch else 0, self.value_skip,
        )  # fmt: skip

    def sinks_shape(self) -> ScheduleShape:
        """The same of the sinks, whose lists segments have."""
        return ScheduleShape(1, segment=self.segment, resumed=True)
