"""Which blocks of keys a block of queries may choose, and where its list lies."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..plan.schedule_form import ScheduleForm

__all__ = ["BlockGrid"]


@dataclass(frozen=True)
class BlockGrid:
    """Rows are blocks of queries, columns blocks of keys, from query 0 and key 0 on; the last of each may be short.

    A causal call has a dense part: the ``segment`` of queries that a row is in, and the ``window`` keys before it. Only
    whole columns before it are listed, which all rows of the segment see. Without causality every column is listed.
    The same formulas stand in raw_kernels/methods/block_grid.cuh.
    """

    seqlen_q: int
    seqlen_k: int
    block_q: int
    block_k: int
    segment: int
    is_causal: bool = True
    align: int = 1  # the dense part begins with a multiple of it: block_k, or more
    own: bool = True  # columns that the dense part holds compete with those that are listed

    @property
    def offset(self) -> int:
        return self.seqlen_k - self.seqlen_q

    @property
    def window(self) -> int:
        return self.offset % self.align if self.is_causal else 0

    @property
    def rows(self) -> int:
        return -(-self.seqlen_q // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.seqlen_k // self.block_k)

    @property
    def short(self) -> int:
        """Keys that the last column lacks."""
        return self.columns * self.block_k - self.seqlen_k

    def listed(self, row: int) -> int:
        """How many columns, from the first on, a row's list may hold."""
        if not self.is_causal:
            return self.columns
        first = row * self.block_q // self.segment * self.segment
        return (first + self.offset - self.window) // self.block_k

    def visible(self, row: int) -> int:
        """How many columns, from the first on, compete in a row's softmax."""
        if not self.is_causal or not self.own:
            return self.listed(row)
        last = min((row + 1) * self.block_q, self.seqlen_q) - 1 + self.offset
        return last // self.block_k + 1

    def begin(self, row: int) -> int:
        """Where the list of a row has its place, of those of a head."""
        if not self.is_causal:
            return row * self.columns
        tiles = self.segment // self.block_q  # rows of a segment
        n, first, growth = row // tiles, self.listed(0), self.segment // self.block_k
        return tiles * (n * first + n * (n - 1) // 2 * growth) + row % tiles * (first + n * growth)

    @functools.cached_property
    def entries(self) -> int:
        """Places for all lists of a head."""
        return self.begin(self.rows)

    def params(self) -> dict[str, int]:
        """The kernels' BlockGrid."""
        return {
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "block_q": self.block_q,
            "block_k": self.block_k,
            "segment": self.segment,
            "window": self.window,
            "is_causal": int(self.is_causal),
            "own": int(self.own),
            "all_rows": self.rows,
            "all_columns": self.columns,
            "tiles": self.segment // self.block_q,
            "first": self.listed(0),
            "growth": self.segment // self.block_k,
        }

    def form(
        self, batch: int, heads: int, order_heads: int = 0, orders_queries: bool = False,
        value_skip: float | tuple[float, ...] | None = None,
    ) -> ScheduleForm:  # fmt: skip
        """Of the schedule of lists of ``batch * heads`` heads. ``order_heads``: of a permutation of the keys;
        ``orders_queries``: there is one of the queries as well, and that of the keys is for all sequences."""
        order_batch = 0 if order_heads == 0 else 1 if orders_queries else batch
        return ScheduleForm(
            batch, heads, order_batch, order_heads, self.seqlen_q, self.seqlen_k, self.block_k,
            self.block_q, False, self.segment if self.is_causal else None, self.window, 0, self.is_causal, 0.0,
            orders_queries, value_skip,
        )  # fmt: skip
