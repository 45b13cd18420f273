"""Steps that methods share: means of blocks, and the choice by their scores.

Pure: no array, no GPU, no CuPy. reference/methods/blocks.py is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..errors import ArgumentValueError
from ..plan.build import Array, Launch, Place, Workspace, make_launch, pointers_of
from ..plan.kernels import Kernel
from ..spec import LOG2E
from .base import Site
from .grid import BlockGrid
from .kernels import MOST_HEADS, SCORE_TILES, block_means, block_scores, choose_blocks, rows_of_block

__all__ = [
    "BASES", "BlockMeans", "Choice", "MeanScores", "Scores", "heads_at_a_time", "launch", "pitch_of",
]  # fmt: skip

# What a pointer of a parameter struct starts from.
BASES = ("q", "k", "entries", "begins", "keys", "k_order", "q_order", "tokens", "workspace")


def launch(
    memory: Workspace, stage: str, kernel: Kernel, blocks: int, values: dict[str, Any], **read: str
) -> Launch:
    """``read``: which array a pointer means that has another name."""
    return make_launch(stage, kernel, blocks, values, pointers_of(kernel, BASES, memory, read=read))


@dataclass(frozen=True)
class BlockMeans:
    """Mean rows of the blocks of q and k, and how alike their rows are.

    They are kept as two numbers of q's dtype whose sum is nearer to the mean than one would be.
    """

    site: Site
    key_heads: int  # of a sequence, that have mean keys: more than k has where each query head has an order of its own
    q_permuted: bool = False  # through q_order
    k_permuted: bool = False  # through k_order
    similarity: bool = False
    one_order: bool = False  # of the keys, for all heads

    @property
    def _blocks(self) -> dict[str, tuple[int, int]]:
        """Heads of all sequences, and blocks of each."""
        batch, grid = self.site.problem.batch, self.site.grid
        return {"q": (self.site.heads, grid.rows), "k": (batch * self.key_heads, grid.columns)}

    @property
    def arrays(self) -> list[Array]:
        found: list[Array] = []
        for of, count in self._blocks.items():
            found.append((f"{of}_means", (*count, 2, self.site.inputs.head_dim), "uint16"))  # [.., high and low, ..]
            if self.similarity:
                found.append((f"{of}_similarity", count, "float32"))
        return found

    def launches(self, memory: Workspace) -> list[Launch]:
        site, problem, grid = self.site, self.site.problem, self.site.grid
        sizes = {
            "q": (problem.heads, problem.heads, problem.seqlen_q, grid.block_q),
            "k": (self.key_heads, problem.kv_heads, problem.seqlen_k, grid.block_k),
        }
        values: dict[str, Any] = {
            of: {
                "x": site.tensor(of),
                "heads": heads,
                "shared_heads": heads // own,
                "seqlen": seqlen,
                "order_row": 0 if of == "k" and self.one_order else seqlen,
                "block": block,
                "blocks": self._blocks[of][1],
            }
            for of, (heads, own, seqlen, block) in sizes.items()
        }
        of_q, of_k = (math.prod(x) for x in self._blocks.values())
        values |= {"of_q": of_q, "of_k": of_k, "head_dim": problem.head_dim, "aligned": int(site.inputs.aligned)}
        read: dict[str, str] = {}
        for of, permuted in (("q", self.q_permuted), ("k", self.k_permuted)):
            read |= {f"{of}.x": of, f"{of}.means": f"{of}_means", f"{of}.similarity": f"{of}_similarity"}
            read[f"{of}.order"] = f"{of}_order" if permuted else "no order"
        kernel = block_means(site.inputs, self.similarity)
        blocks = -(-(of_q + of_k) // (kernel.threads // 32))  # a warp has a block of rows
        return [launch(memory, "means", kernel, blocks, values, **read)]


def pitch_of(grid: BlockGrid) -> int:
    """Scores that a row has room for."""
    return -(-grid.columns // 4) * 4


def heads_at_a_time(site: Site, arrays: Callable[[int], list[Array]]) -> int:
    """How many take a turn together within the bytes that a workspace may have; one always fits. ``arrays``: of so many
    heads."""
    of_head = sum(Place(0, *array[1:]).nbytes for array in arrays(1))
    return max(1, min(site.heads, site.workspace_bytes // max(1, of_head)))


class Scores(Protocol):
    """What scores columns for a choice."""

    def arrays(self, heads: int) -> list[Array]:
        """In the workspace, of ``heads`` heads at a time."""

    def launches(self, memory: Workspace, first: int, heads: int, pitch: int) -> list[Launch]:
        """What writes `scores` [heads, rows, pitch] of ``heads`` heads from ``first`` on."""


@dataclass(frozen=True)
class MeanScores:
    """By products of mean rows."""

    site: Site
    key_heads: int  # of a sequence, that have mean keys

    def arrays(self, heads: int) -> list[Array]:
        return []

    def launches(self, memory: Workspace, first: int, heads: int, pitch: int) -> list[Launch]:
        site, grid = self.site, self.site.grid
        kernel = block_scores(site.inputs, site.limits)
        tile_rows, tile_columns = SCORE_TILES[kernel.family]
        row_tiles, column_tiles = -(-grid.rows // tile_rows), -(-grid.columns // tile_columns)
        values = {
            "grid": grid.params(),
            "first_head": first,
            "shared_heads": site.problem.heads // self.key_heads,
            "pitch": pitch,
            "row_tiles": row_tiles,
            "column_tiles": column_tiles,
            "scale_log2": site.problem.scale * LOG2E,
        }
        return [launch(memory, "scores", kernel, heads * row_tiles * column_tiles, values)]


@dataclass(frozen=True)
class Choice:
    """Scores of mean keys, their softmax, which of them are chosen, and the lists. Heads take turns within the bytes
    that a workspace may have; one always fits."""

    site: Site
    key_heads: int  # of a sequence, that have mean keys
    rule: str  # "reach", "within" or "largest"
    threshold: float | tuple[float, ...]  # a number, or one for each query head; of "largest" a share of the columns
    keep_first: bool
    theta: float | tuple[float, ...] | None = None  # similarity below which a block is attended to whole
    scores: Scores | None = None  # in place of those of mean keys
    forced_count: bool = False  # what is attended to in any case counts towards the threshold

    def check(self) -> None:
        """Raise ValueError where no kernel takes it."""
        for name, x in (("topk" if self.rule == "largest" else "tau", self.threshold), ("theta", self.theta)):
            if isinstance(x, tuple) and len(x) > MOST_HEADS:
                raise ArgumentValueError(f"{name} has {len(x)} numbers; accepted on the GPU: up to {MOST_HEADS}")
        most = 1 << ((self.site.limits.shared_per_block - 256) // 4).bit_length() - 1
        if self.site.grid.columns > most:
            raise ArgumentValueError(
                f"k has {self.site.grid.columns} blocks of {self.site.grid.block_k}; accepted on this GPU: "
                f"{most}, whose weights its shared memory holds"
            )

    @property
    def turn(self) -> int:
        """Heads that are chosen for at a time: about as many each time, and pairs where that can be."""
        most, heads = heads_at_a_time(self.site, self._arrays), self.site.heads
        each = -(-heads // -(-heads // most))
        return each + each % 2 if each < most else max(1, each - each % 2)

    @property
    def arrays(self) -> list[Array]:
        return self._arrays(self.turn)

    @property
    def _scores(self) -> Scores:
        return self.scores or MeanScores(self.site, self.key_heads)

    def _arrays(self, heads: int) -> list[Array]:
        grid = self.site.grid
        return [("scores", (heads, grid.rows, pitch_of(grid)), "float32"), *self._scores.arrays(heads)]  # in log2 units

    def launches(self, memory: Workspace) -> list[Launch]:
        self.check()
        site = self.site
        found = []
        for first in range(0, site.heads, self.turn):
            heads = min(self.turn, site.heads - first)
            found += self._scores.launches(memory, first, heads, pitch_of(site.grid))
            found.append(self._choose(memory, first, heads))
        return found

    def _choose(self, memory: Workspace, first: int, heads: int) -> Launch:
        site, grid = self.site, self.site.grid
        of_sum = self.rule != "largest"
        thresholds = self.threshold if of_sum else np.maximum(1, np.floor(np.multiply(self.threshold, grid.columns)))
        numbers = {name: np.atleast_1d(x) for name, x in (("threshold", thresholds), ("theta", self.theta or 0.0))}
        values = {
            "grid": grid.params(),
            "first_head": first,
            "shared_heads": site.problem.heads // self.key_heads,
            "pitch": pitch_of(grid),
            "heads": site.problem.heads,
            "list_entries": grid.entries,
            "within": int(self.rule == "within"),
            "counted": int(not of_sum),
            "keep_first": int(self.keep_first),
            "forced_count": int(self.forced_count),
            "thresholds": len(numbers["threshold"]),
            "thetas": len(numbers["theta"]),
        }
        judged = self.theta is not None
        kernel, rows = choose_blocks(grid.columns), heads * grid.rows
        values["rows"] = rows
        blocks = -(-rows // rows_of_block(kernel))
        read = {} if judged else {"q_similarity": "no judge", "k_similarity": "no judge"}
        made = launch(memory, "choose", kernel, blocks, values, **read)
        for name, x in numbers.items():
            made.params[name][: len(x)] = x
        return made
