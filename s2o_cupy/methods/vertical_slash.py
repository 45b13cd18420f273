"""MInference's vertical-slash (arXiv 2407.02490): columns and diagonals of single keys by the last queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..plan.build import Array, Launch, Workspace
from ..plan.kernels import Family, Inputs, Kernel
from ..problem import MAX_SEQLEN, Problem
from ..spec import checked_int, names_its_fields
from .base import BLOCKS, MethodConfig, Site, Stage, checked_choice
from .grid import BlockGrid
from .last_rows import LineSums, check_aligned
from .stages import heads_at_a_time, launch

__all__ = ["FORCED", "ROWS", "VerticalSlashConfig"]

ROWS = 64  # last queries, which choose
FORCED = 30  # first columns, and first distances, that are always chosen

LARGEST_THREADS = 512  # (kLargestThreads)
LARGEST_BYTES = 2 * 2 * LARGEST_THREADS // 32 * 4 + 256 * 4 + 2 * 4  # sizeof(LargestShared)
CHOOSE_LINES, CROSSED_KEYS = (
    Family(function, "methods/vertical_slash.cu", "VerticalSlashParams", threads, blocks, shared=f"s2o::{shared}")
    for function, threads, blocks, shared in (
        ("choose_lines", LARGEST_THREADS, 1, "LargestShared"),
        ("crossed_keys", 256, 2, "CrossedShared"),
    )
)


def choose_lines() -> Kernel:
    return Kernel(CHOOSE_LINES, shared_bytes=LARGEST_BYTES)


def crossed_keys() -> Kernel:
    """sizeof(CrossedShared)"""
    return Kernel(CROSSED_KEYS, shared_bytes=2 * 2 * 8 * 4)


@names_its_fields
@dataclass(frozen=True, kw_only=True)
class VerticalSlashConfig(MethodConfig):
    """How vertical-slash chooses keys. Causal calls only.

    The softmax of the last 64 queries says which columns of keys, and which diagonals (distances of a query and a key),
    all queries attend to, the first 30 of each among them. A q tile attends to every key that a chosen diagonal crosses
    for one of its queries.

    Parameters
    ----------
    verticals : int, default 1000
        Columns of keys.
    slashes : int, default 6096
        Distances.
    block_m : 64 or 128, default 128
        Queries of a q tile. With fewer, diagonals cross fewer keys. The Hopper kernels take 64 up to head_dim 128.
    path : str, default "auto"
        Kernels to attend with, as in `S2OConfig`; the choice does not depend on it.
    workspace_bytes : int, default 256 MiB
        Bound on the GPU memory of scores; those of one head always fit. `sparse_attention` takes KV heads in turns
        for the lists to be within it, too, where it returns no statistics; those of one KV head always fit.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.

    Notes
    -----
    From the public code, which takes other numbers for each head and rounds what a tile attends to up to 64 keys. Lists
    are of single keys, with room for all of them: 4 bytes for each key and q tile.
    """

    verticals: int = 1000
    slashes: int = 6096
    block_m: int = 128

    reference: ClassVar[str] = "vertical_slash"
    long_lists: ClassVar[bool] = True
    causal_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("verticals", "slashes"):
            self._set(name, checked_int(name, getattr(self, name), FORCED))
        checked_choice("block_m", self.block_m, BLOCKS)

    @property
    def block_q(self) -> int:
        return self.block_m

    def grid(self, problem: Problem) -> BlockGrid:
        return BlockGrid(problem.seqlen_q, problem.seqlen_k, self.block_m, 1, self.block_m, problem.is_causal)

    def stages(self, site: Site) -> list[Stage]:
        check_aligned(site, type(self).__name__)
        return [_Lists(site, self, LineSums(site, min(ROWS, site.problem.seqlen_q)))]

    @staticmethod
    def catalogue(inputs: Inputs) -> Iterator[Kernel]:
        yield from (choose_lines(), crossed_keys())


@dataclass(frozen=True)
class _Lists:
    """The lines, and the lists of the keys that they cross; heads take turns."""

    site: Site
    config: VerticalSlashConfig
    sums: LineSums

    def _of_heads(self, heads: int) -> list[Array]:
        upto: Array = ("upto", (heads, 2, self.site.problem.seqlen_k + 1), "int32")  # chosen ones before each
        return [*self.sums.arrays(heads), upto]

    @property
    def _turn(self) -> int:
        """Heads at a time."""
        return heads_at_a_time(self.site, self._of_heads)

    @property
    def arrays(self) -> list[Array]:
        return [*self.sums.shared_arrays, *self._of_heads(self._turn)]

    def launches(self, memory: Workspace) -> list[Launch]:
        site, config = self.site, self.config
        found = self.sums.before(memory)
        for first in range(0, site.heads, self._turn):
            heads = min(self._turn, site.heads - first)
            values = {
                "grid": site.grid.params(),
                "list_entries": site.grid.entries,
                "first_head": first,
                "verticals": min(config.verticals, MAX_SEQLEN),  # 32 bits hold it
                "slashes": min(config.slashes, MAX_SEQLEN),
                "forced": FORCED,
            }
            found += self.sums.launches(memory, first, heads)
            found.append(launch(memory, "lines", choose_lines(), heads * 2, values))
            found.append(launch(memory, "choose", crossed_keys(), heads * site.grid.rows, values))
        return found
