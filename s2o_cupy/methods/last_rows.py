"""What the last queries of each head make of the keys: launches of raw_kernels/methods/last_rows.cu and line_sums.cu.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentValueError
from ..plan.build import Array, Launch, Workspace
from ..plan.kernels import Family, Inputs, Kernel
from ..spec import LOG2E
from .base import Site
from .kernels import LAST_ROWS, last_row_sums, last_rows_tile
from .stages import launch

__all__ = ["LineSums", "check_aligned", "kernels", "launches", "splits"]

WAVES = {1: 4, 2: 1}  # blocks that last_row_sums has for each that runs at once, by query heads of a block
SUMS_WAVES = 4  # likewise line_sums
PART = 64  # queries, and keys, of a product of line_sums (kPart)
TOTALS_KEYS = 256  # of a block of line_totals (kTotalsThreads)

LINE_SUMS = Family(
    "line_sums", "methods/line_sums.cu", "LineSumsParams", 128, 2, "LineTraits<{element}, {head_dim}>"
)
LINE_TOTALS = Family("line_totals", "methods/line_sums.cu", "LineSumsParams", TOTALS_KEYS, 4)


def line_sums(inputs: Inputs) -> Kernel:
    """sizeof(LineTraits::Shared)"""
    head_dim, stages = inputs.head_dim, 1 if inputs.head_dim > 128 else 2
    shared = (1 + stages) * PART * head_dim * 2 + PART * (PART + 1) * 4 + PART * 4
    return Kernel(LINE_SUMS, inputs.dtype, head_dim, shared_bytes=shared)


def kernels(inputs: Inputs) -> Iterator[Kernel]:
    if inputs.aligned and not inputs.paged and not inputs.softcap:
        yield from (line_sums(inputs), Kernel(LINE_TOTALS))


def check_aligned(site: Site, owner: str) -> None:
    """Raise ValueError where rows cannot be copied 16 bytes at a time."""
    if not site.inputs.aligned:
        raise ArgumentValueError(
            f"a row of q or k does not start on 16 bytes, or head_dim ({site.problem.head_dim}) is no "
            "multiple of 8; accepted on the GPU: rows that do, in multiples of 8 elements",
            owner,
        )


def splits(site: Site) -> tuple[int, int]:
    """Splits of the keys for last_row_sums, and tiles of each."""
    tiles = -(-site.problem.seqlen_k // last_rows_tile(site.inputs.head_dim))
    heads = last_row_sums(site.inputs, site.limits, site.group).group
    blocks = WAVES[heads] * 2 // heads * site.limits.multiprocessors
    each = -(-tiles // max(1, min(tiles, blocks // (site.heads // heads))))
    return -(-tiles // each), each


def launches(
    memory: Workspace, stage: str, kernel: Callable[..., Kernel], site: Site, rows: int, is_causal: bool
) -> list[Launch]:
    """Of last_row_sums or column_means."""
    of_heads = kernel(site.inputs, site.limits, site.group)
    blocks = site.heads // of_heads.group * splits(site)[0]
    return [launch(memory, stage, of_heads, blocks, values(site, rows, is_causal))]


def values(site: Site, rows: int, is_causal: bool) -> dict[str, Any]:
    """Of LastRowsParams."""
    count, each = splits(site)
    return {
        **_shared(site, rows),
        "splits": count,
        "split_tiles": each,
        "is_causal": int(is_causal),
    }


def _shared(site: Site, rows: int) -> dict[str, Any]:
    problem = site.problem
    return {
        "q": site.tensor("q"),
        "k": site.tensor("k"),
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "rows": rows,
        "scale_log2": problem.scale * LOG2E,
    }


@dataclass(frozen=True)
class LineSums:
    """`sums`: of the causal softmax of the last ``rows`` queries, by key and by distance, of some heads at a time."""

    site: Site
    rows: int

    @property
    def _parts(self) -> int:
        return -(-self.rows // PART)

    @property
    def _tiles(self) -> int:
        return -(-self.site.problem.seqlen_k // PART)

    @property
    def shared_arrays(self) -> list[Array]:
        """Of all heads: (maximum, sum) of each query over a split of the keys."""
        return [("partial", (self.site.heads, splits(self.site)[0], LAST_ROWS, 2), "float32")]

    def arrays(self, heads: int) -> list[Array]:
        seqlen = self.site.problem.seqlen_k
        return [
            ("columns", (heads, self._parts, seqlen), "float32"),
            ("diagonals", (heads, self._parts, self._tiles, 2 * PART), "float32"),
            ("sums", (heads, 2, seqlen), "float32"),
        ]

    def before(self, memory: Workspace) -> list[Launch]:
        """Once, of all heads."""
        return launches(memory, "last_row_sums", last_row_sums, self.site, self.rows, True)

    def launches(self, memory: Workspace, first: int, heads: int) -> list[Launch]:
        site = self.site
        wanted = max(1, SUMS_WAVES * 2 * site.limits.multiprocessors // (heads * self._parts))
        each = -(-self._tiles // min(wanted, self._tiles))
        of_round = {
            **_shared(site, self.rows),
            "parts": self._parts,
            "tiles": self._tiles,
            "splits": splits(site)[0],
            "block_tiles": each,
            "first_head": first,
            "round_heads": heads,
        }
        blocks = heads * self._parts * -(-self._tiles // each)
        totals = heads * -(-site.problem.seqlen_k // TOTALS_KEYS)
        return [
            launch(memory, "line_sums", line_sums(site.inputs), blocks, of_round),
            launch(memory, "line_totals", Kernel(LINE_TOTALS), totals, of_round),
        ]
