"""FlexPrefill (arXiv 2502.20766): columns and diagonals of blocks by the last queries, or blocks by their means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..plan.build import Array, Launch, Workspace
from ..plan.kernels import Family, Inputs, Kernel
from ..problem import Problem
from ..spec import LOG2E, checked_int, names_its_fields
from .base import MethodConfig, Site, Stage, checked_number
from .grid import BlockGrid
from .last_rows import LineSums, check_aligned
from .stages import BlockMeans, MeanScores, heads_at_a_time, launch, pitch_of
from .vertical_slash import LARGEST_BYTES, LARGEST_THREADS

__all__ = ["FlexPrefillConfig"]

BLOCK = 128
_SOURCE = "methods/flex_prefill.cu", "FlexPrefillParams"
FLEX_LINES = Family("flex_lines", *_SOURCE, LARGEST_THREADS, 1, "FlexTraits<{element}, {head_dim}>")
FLEX_BOUND = Family("flex_bound", *_SOURCE, LARGEST_THREADS, 1, shared="s2o::LargestShared")
ROW_WEIGHTS, FLEX_LISTS = (
    Family(function, *_SOURCE, 128, 8, shared="s2o::RowShared") for function in ("row_weights", "flex_lists")
)
ROW_BYTES = 2 * 2 * 4 * 4  # sizeof(RowShared)


def flex_lines(inputs: Inputs) -> Kernel:
    """sizeof(FlexTraits::Shared)"""
    return Kernel(FLEX_LINES, inputs.dtype, inputs.head_dim, shared_bytes=LARGEST_BYTES + inputs.head_dim * 4)


@names_its_fields
@dataclass(frozen=True, kw_only=True)
class FlexPrefillConfig(MethodConfig):
    """How FlexPrefill chooses blocks of 128 keys for blocks of 128 queries. Causal calls only.

    The softmax of the last 128 queries says which columns of blocks, and which diagonals, all queries attend to: as
    many as the largest weights that hold ``gamma`` of the whole would fill, put side by side. Where the mean of those
    queries finds nearly the same blocks from mean keys, single blocks are chosen by means as well, and few columns and
    diagonals.

    Parameters
    ----------
    gamma : float, default 0.9
        Share of the softmax mass to keep: a number above 0, up to 1. At 1 all blocks are chosen.
    tau : float, default 0.1
        Below this square root of a Jensen-Shannon divergence (0 to 0.83) means are trusted: a number from 0 on.
    min_blocks : int, default 4
        Columns, and diagonals, at least.
    path : str, default "auto"
        Kernels to attend with, as in `S2OConfig`; the choice does not depend on it.
    workspace_bytes : int, default 256 MiB
        Bound on the GPU memory of scores; those of one head always fit.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.

    Notes
    -----
    From the public code. Its own choice where that is silent: a short block's mean is over the rows that there are, and
    where seqlen_k is more than seqlen_q, diagonals count from the block that a block's first query stands in.
    """

    gamma: float = 0.9
    tau: float = 0.1
    min_blocks: int = 4

    reference: ClassVar[str] = "flex_prefill"
    causal_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("gamma", checked_number("gamma", self.gamma, 0, 1, "a number above 0, up to 1"))
        if self.tau != 0:
            self._set("tau", checked_number("tau", self.tau, 0, float("inf"), "a number from 0 on"))
        self._set("min_blocks", checked_int("min_blocks", self.min_blocks, 1))

    @property
    def block_q(self) -> int:
        return BLOCK

    def grid(self, problem: Problem) -> BlockGrid:
        return BlockGrid(problem.seqlen_q, problem.seqlen_k, BLOCK, BLOCK, BLOCK, problem.is_causal, BLOCK)

    def stages(self, site: Site) -> list[Stage]:
        check_aligned(site, type(self).__name__)
        problem = site.problem
        sums = LineSums(site, min(BLOCK, problem.seqlen_q))
        return [
            BlockMeans(site, problem.kv_heads), _Lists(site, self, sums),
        ]  # fmt: skip

    @staticmethod
    def catalogue(inputs: Inputs) -> Iterator[Kernel]:
        if inputs.aligned and not inputs.paged and not inputs.softcap:
            yield flex_lines(inputs)
            yield Kernel(FLEX_BOUND, shared_bytes=LARGEST_BYTES)
            yield from (Kernel(family, shared_bytes=ROW_BYTES) for family in (ROW_WEIGHTS, FLEX_LISTS))


@dataclass(frozen=True)
class _Lists:
    """Lines, scores of mean rows and the lists; heads take turns."""

    site: Site
    config: FlexPrefillConfig
    sums: LineSums

    def _of_heads(self, heads: int) -> list[Array]:
        grid, columns = self.site.grid, self.site.grid.columns
        return [
            *self.sums.arrays(heads),
            ("scores", (heads, grid.rows, pitch_of(grid)), "float32"),  # in log2 units, then weights
            ("blocks", (heads, 3, columns), "float32"),  # sums of columns and of diagonals; the softmax of means
            ("lines", (heads, 2, columns), "int32"),
            ("by_means", (heads,), "int32"),
            ("bound", (heads, 2), "int64"),
        ]

    @property
    def _turn(self) -> int:
        """Heads at a time."""
        return heads_at_a_time(self.site, self._of_heads)

    @property
    def arrays(self) -> list[Array]:
        return [*self.sums.shared_arrays, *self._of_heads(self._turn)]

    def launches(self, memory: Workspace) -> list[Launch]:
        site, config, problem = self.site, self.config, self.site.problem
        scores = MeanScores(site, problem.kv_heads)
        found = self.sums.before(memory)
        for first in range(0, site.heads, self._turn):
            heads = min(self._turn, site.heads - first)
            values = {
                "q": site.tensor("q"),
                "grid": site.grid.params(),
                "heads": problem.heads,
                "kv_heads": problem.kv_heads,
                "head_dim": problem.head_dim,
                "rows": self.sums.rows,
                "first_head": first,
                "pitch": pitch_of(self.site.grid),
                "min_blocks": min(config.min_blocks, site.grid.columns),
                "list_entries": site.grid.entries,
                "gamma": config.gamma,
                "tau": min(config.tau, 1e30),
                "scale_log2": problem.scale * LOG2E,
            }
            rows = heads * site.grid.rows
            found += [
                *self.sums.launches(memory, first, heads),
                launch(memory, "lines", flex_lines(site.inputs), heads, values),
                *scores.launches(memory, first, heads, pitch_of(site.grid)),
                launch(memory, "weights", Kernel(ROW_WEIGHTS, shared_bytes=ROW_BYTES), rows, values),
                launch(memory, "bound", Kernel(FLEX_BOUND, shared_bytes=LARGEST_BYTES), heads, values),
                launch(memory, "choose", Kernel(FLEX_LISTS, shared_bytes=ROW_BYTES), rows, values),
            ]
        return found
