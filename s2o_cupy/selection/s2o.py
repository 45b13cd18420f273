"""S2O's ordering: queries by a guide, keys by the scores of an order (orders/).

reference/ordering.py and reference/key_order.py are the definition. Once: guides and rank_queries order each segment's
queries and pool them; of a segment that is one q tile pool_queries only pools them, if they are pooled. In each round
the order scores the candidates of its rows, and kernels for rows of some lengths each put them in order. The last
queries need no order where they attend to all keys (plan/last_queries.py).
Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..caches import remembered
from ..plan import head_taus
from ..plan.build import Array, Builder, InTurns, Launch
from ..plan.kernels import Inputs, Kernel, Path
from ..plan.last_queries import LastQueries
from ..plan.last_queries import kernels as last_queries
from ..plan.method import Setting
from ..plan.rounds import MAX_GRID, Chunk, rounds
from ..plan.tail import Tail
from ..spec import MIDDLE, MIDDLE_FROM, ORDER_HEAD, ORDER_WHOLE, STRATUM, Geometry
from . import s2o_kernels as kernels
from .orders import ORDERS
from .s2o_kernels import BLOCK_PAIRS, SHORT_ROW

__all__ = ["S2O", "chunk_bytes", "middle_blocks", "row_pairs", "row_sorts", "strata_blocks"]

BYTES_PER_CANDIDATE = 6  # a float16 score and an int32, a unit's number
LAST_PART = 4  # part of the workspace that the last queries may take, before the rounds do


def strata_blocks(chunk: Chunk) -> int:
    """Blocks of key_strata for two rows, of the i-th segment from either end; 0 where each is sorted at once.

    Both rows are together as long as the first and the last; each may have a block that is not full.
    """
    each = 2 * STRATUM * BLOCK_PAIRS
    if chunk.longest <= ORDER_WHOLE:
        return 0
    return -(-(chunk.stride + chunk.longest) // each) + 1 if chunk.segments > 1 else -(-chunk.longest // each)


def row_pairs(chunk: Chunk) -> int:
    """Rows two by two, as strata_blocks takes them."""
    return chunk.heads * -(-chunk.segments // 2)


def middle_blocks(chunk: Chunk) -> int:
    """Blocks of key_middle for a row; 0 where no row is so long."""
    return MIDDLE // (2 * STRATUM * BLOCK_PAIRS) if chunk.longest > MIDDLE_FROM else 0


@remembered
def row_sorts(chunk: Chunk, geometry: Geometry) -> tuple[tuple[Kernel, int], ...]:
    """Kernels that sort rows at once, or the heads of their orders, and the blocks of each.

    Blocks have rows from those of the last segment to those of the first, and leave the ones that another kernel has.
    """
    if chunk.longest <= ORDER_HEAD:
        kernel = kernels.key_order_short() if chunk.longest <= SHORT_ROW else kernels.key_order_head()
        return ((kernel, chunk.rows),)
    segments = range(chunk.first_segment, chunk.first_segment + chunk.segments)
    whole: Sequence[int]  # places of rows that are key_order_whole's
    if geometry.is_causal:  # no row is shorter than the one before
        whole = range(*(bisect.bisect_right(segments, most, key=geometry.ranked) for most in (ORDER_HEAD, ORDER_WHOLE)))
    else:
        whole = [i for i, n in enumerate(segments) if ORDER_HEAD < geometry.ranked(n) <= ORDER_WHOLE]
    found = [(kernels.key_order_whole(), (chunk.segments - whole[0]) * chunk.heads)] if whole else []
    if len(whole) < chunk.segments:
        found.append((kernels.key_order_head(), chunk.rows))
    return tuple(found)


def chunk_bytes(chunk: Chunk) -> int:
    """What scores, orders, heads of orders and middles take of the workspace."""
    order_head = chunk.rows * ORDER_HEAD * 2 if strata_blocks(chunk) else 0
    middle = chunk.rows * MIDDLE * (4 + 2) if middle_blocks(chunk) else 0
    return chunk.elements * BYTES_PER_CANDIDATE + order_head + middle


class S2O:
    """The ordering of one setting, as plan.method.Method."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        problem, config = setting.problem, setting.config
        # At most MAX_SEGMENT.
        self.sort_slots = max(kernels.WARP, 1 << (min(config.segment, problem.seqlen_q) - 1).bit_length())
        self.order = ORDERS[config.rank](setting)
        self.orders_queries = setting.geometry.orders_queries(config.block_m)
        # No grid has more blocks than a round has elements.
        budget = min(config.workspace_bytes, MAX_GRID * BYTES_PER_CANDIDATE)
        geometry = setting.geometry
        last = config.dense_from(geometry)
        self.chunks = rounds(problem, geometry, chunk_bytes, budget, last)
        first = next((n for n in range(last, geometry.segments) if geometry.candidates(n) > 0), None)
        self.last = None if first is None else LastQueries(setting, first, config.workspace_bytes // LAST_PART)

    # What a dense call does not ask for is not made.

    @functools.cached_property
    def tail(self) -> Tail | None:
        return Tail(self.setting) if self.setting.config.adds_tail else None

    @functools.cached_property
    def guides(self) -> Kernel:
        return kernels.guides(self.setting.inputs, self.sort_slots)

    @functools.cached_property
    def rank_queries(self) -> Kernel:
        return kernels.rank_queries(self.setting.inputs, self.sort_slots)

    @functools.cached_property
    def pool_queries(self) -> Kernel:
        return kernels.pool_queries(self.setting.inputs)

    @functools.cached_property
    def key_strata(self) -> Kernel:
        return kernels.key_strata()

    @functools.cached_property
    def key_middle(self) -> Kernel:
        return kernels.key_middle()

    @staticmethod
    def catalogue(inputs: Inputs, path: Path) -> Iterator[Kernel]:
        """Kernels that a call with such inputs may choose; the sort's slots are no part of their texts."""
        sort_slots = 1024
        yield kernels.guides(inputs, sort_slots)
        if not inputs.paged:
            yield kernels.rank_queries(inputs, sort_slots)
            yield kernels.pool_queries(inputs)
        for order in dict.fromkeys(ORDERS.values()):
            yield from order.catalogue(inputs, path)
        yield from (kernels.key_strata(), kernels.key_middle())
        yield from (kernels.key_order_short(), kernels.key_order_head(), kernels.key_order_whole())
        yield from last_queries(inputs)

    @property
    def visits(self) -> bool:
        return bool(self.chunks or self.last)

    @property
    def largest_grid(self) -> int:
        return max(2 * self.setting.kv_heads, self.order.largest_grid, self.last.largest_grid if self.last else 0)

    @property
    def elements(self) -> int:
        """Scores, and as many numbers of units, of the largest chunk."""
        return max((chunk.elements for chunk in self.chunks), default=0)

    @property
    def order_head_rows(self) -> int:
        """Rows of the largest chunk with strata."""
        return max((chunk.rows for chunk in self.chunks if strata_blocks(chunk)), default=0)

    @property
    def middle_rows(self) -> int:
        """Rows of the largest chunk with a middle."""
        return max((chunk.rows for chunk in self.chunks if middle_blocks(chunk)), default=0)

    def arrays(self) -> Sequence[Array | InTurns]:
        if not self.chunks:
            return [*self.last.arrays()] if self.last else []
        s, geometry = self.setting, self.setting.geometry
        width, segments = s.inputs.head_dim, geometry.segments
        of_rounds: list[Array] = [
            ("scores", (self.elements,), "float16"),  # rows of a chunk
            ("k_order", (self.elements,), "int32"),  # likewise
            ("order_head_scores", (self.order_head_rows, ORDER_HEAD), "float16"),
            ("middle", (self.middle_rows, MIDDLE), "int32"),
            ("middle_scores", (self.middle_rows, MIDDLE), "float16"),
        ]
        q_order: list[Array] = [("q_order", (s.heads, segments, geometry.segment), "int32")]
        least_keys: list[Array] = [("least_keys", (s.heads, segments), "int32")]
        found: list[Array | InTurns] = [
            ("guide", (s.kv_heads if self.orders_queries else 0, 2, width), "float32"),
            ("means", (s.heads, segments, self._pooled_queries, width), "uint16"),
            *(q_order if self.orders_queries else []),
            *(least_keys if s.config.has_least_keys else []),
            InTurns(
                self.last.arrays() if self.last else [],
                [
                    InTurns(
                        self.tail.arrays_before_rounds() if self.tail else [],
                        [InTurns(self.order.arrays_before_rounds(), of_rounds)],
                    )
                ],
            ),
        ]
        if self.tail:
            found += self.tail.arrays()
        return found + self.order.arrays()

    def before_rounds(self, build: Builder) -> list[Launch]:
        s, problem, geometry = self.setting, self.setting.problem, self.setting.geometry
        values = {
            "q": build.tensors["q"],
            "k": build.tensors["k"],
            "geometry": build.geometry,
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "pooled_queries": self._pooled_queries,
            "run": s.config.run if s.config.pools_queries else geometry.segment,
            "sort_slots": self.sort_slots,
            "sign": self._sign,
            "pages": build.pages,
        }
        rows = s.heads * geometry.segments
        found = self.last.launches(build) if self.last else []
        if not self.chunks:
            return found
        if self.tail:
            found += self.tail.before_rounds(build)
        if self.orders_queries:
            found += [
                build.launch("guides", self.guides, s.kv_heads * 2, values),
                build.launch("rank_queries", self.rank_queries, rows, values),
            ]
        elif s.config.pools_queries:
            names = ("q", "geometry", "heads", "pooled_queries", "run", "sign")
            of_runs = {name: values[name] for name in names}
            found.append(build.launch("rank_queries", self.pool_queries, rows, of_runs))
        return found + self.order.before_rounds(build)

    def before_pass2(self, build: Builder, chunk: Chunk) -> list[Launch]:
        problem, geometry = self.setting.problem, self.setting.geometry
        values: dict[str, Any] = {
            "q": build.tensors["q"],
            "aligned": self.setting.inputs.aligned,
            "k": build.tensors["k"],
            "geometry": build.geometry,
            "chunk": build.chunk(chunk),
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "pooled_queries": self.setting.config.pooled_queries,
            "run": self.setting.config.run,
            "near_keys": self.setting.config.near_keys if geometry.is_causal else 0,
            "unit_parts": 1,
            "row_blocks": 0,
            "key_blocks": 0,
            "strata_blocks": strata_blocks(chunk),
            "scale_log2": self.order.scale_log2,
            "tau": head_taus.as_float32(self.setting.config.of_pass.tau),
            "pages": build.pages,
        }
        found = [self.order.scores(build, chunk, values)]
        if strata_blocks(chunk):
            blocks = row_pairs(chunk) * strata_blocks(chunk)
            found.append(build.launch("key_strata", self.key_strata, blocks, values, chunk))
        if middle_blocks(chunk):
            blocks = chunk.rows * middle_blocks(chunk)
            found.append(build.launch("key_middle", self.key_middle, blocks, values, chunk))
        sorts = row_sorts(replace(chunk, first_head=0), geometry)  # the same of any head
        for kernel, blocks in sorts:
            stage = "rank_keys" if kernel is sorts[-1][0] else "rank_long_rows"
            found.append(build.launch(stage, kernel, blocks, values, chunk))
        return found

    def pass2(self, kernel: Kernel) -> tuple[Kernel, dict[str, Any]]:
        return self.tail.pass2(kernel) if self.tail else (kernel, {})

    def after_pass2(self, build: Builder, chunk: Chunk) -> list[Launch]:
        return self.tail.after_pass2(build, chunk) if self.tail else []

    @property
    def _pooled_queries(self) -> int:
        """Means of queries that rank_queries or pool_queries leaves of a segment. Nobody reads those of an order that
        pools none: rank_queries then makes one, as it scores queries run by run."""
        config = self.setting.config
        return config.pooled_queries if config.pools_queries else int(self.orders_queries)

    @property
    def _sign(self) -> float:
        return -1.0 if self.setting.problem.scale < 0 else 1.0
