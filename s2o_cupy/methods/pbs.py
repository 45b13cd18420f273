"""PBS-Attn: permuted block-sparse attention (arXiv 2510.21270). Keys of a segment are ordered by what the last queries
of the prompt make of them, so that the important ones share blocks; blocks are then chosen by their means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..plan.build import Array, Launch, Workspace
from ..problem import Problem
from ..spec import LOG2E, MAX_SEGMENT, checked_int, names_unknown_fields
from .base import BLOCKS, MethodConfig, Site, Stage, checked_bool, checked_choice, checked_number
from .grid import BlockGrid
from .kernels import column_means, last_row_sums, last_rows_tile, order_segments
from .stages import BlockMeans, Choice, launch

__all__ = ["PBSConfig"]

SHARES = ("head", "kv_head")
WAVES = 4  # blocks that last_row_sums has for each that runs at once


@names_unknown_fields
@dataclass(frozen=True, kw_only=True)
class PBSConfig(MethodConfig):
    """How PBS-Attn orders keys and chooses blocks. Causal calls only.

    Parameters
    ----------
    block : 64 or 128, default 128
        Queries and keys of a block, and how many last queries of the prompt say which keys are important.
    segment : int, default 256
        Keys that are put in order among themselves, and queries that attend to their own densely: a multiple of block,
        up to 8192.
    threshold : float, default 0.9
        The fewest blocks before a segment are chosen whose share of a softmax over the scores of all of these reaches
        it: a number above 0, up to 1. At 1 all are.
    share : {"head", "kv_head"}, default "head"
        Each query head has an order of its own, or those of a KV head share one by their mean importance.
    keep_first : bool, default True
        The block that holds key 0 is always chosen.
    path : {"auto", "portable", "hopper"}, default "auto"
        Kernels to attend with, as in `S2OConfig`; the choice does not depend on it.
    workspace_bytes : int, default 256 MiB
        Bound on the GPU memory of scores; those of one head always fit.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.
    """

    block: int = 128
    segment: int = 256
    threshold: float = 0.9
    share: str = "head"
    keep_first: bool = True

    reference: ClassVar[str] = "pbs"

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        checked_choice("block", self.block, BLOCKS, owner)
        self._set("segment", checked_int("segment", self.segment, self.block, MAX_SEGMENT, owner))
        if self.segment % self.block:
            raise ValueError(f"{owner}: segment is {self.segment}; accepted: a multiple of block ({self.block})")
        accepted = "a number above 0, up to 1"
        self._set("threshold", checked_number("threshold", self.threshold, 0, 1, accepted, owner))
        checked_choice("share", self.share, SHARES, owner)
        checked_bool("keep_first", self.keep_first, owner)

    @property
    def block_q(self) -> int:
        return self.block

    def check(self, problem: Problem) -> None:
        if not problem.is_causal:
            raise ValueError("PBSConfig: is_causal is False; accepted: True, as the method is for causal attention")

    def grid(self, problem: Problem) -> BlockGrid:
        return BlockGrid(
            problem.seqlen_q, problem.seqlen_k, self.block, self.block, self.segment, align=self.segment, own=False
        )

    def order_heads(self, problem: Problem) -> int:
        return problem.heads if self.share == "head" else problem.kv_heads

    def stages(self, site: Site) -> list[Stage]:
        if not site.inputs.aligned:
            raise ValueError(
                f"PBSConfig: a row of q or k does not start on 16 bytes, or head_dim ({site.problem.head_dim}) is no "
                "multiple of 8; accepted on the GPU: rows that do, in multiples of 8 elements"
            )
        heads = self.order_heads(site.problem)
        return [
            Importance(site, min(self.block, site.problem.seqlen_q)),
            SegmentOrder(site, self.segment, heads),
            BlockMeans(site, "q", site.problem.heads),
            BlockMeans(site, "k", heads, permuted=True),
            Choice(site, heads, self.rule, self.threshold, self.keep_first),
        ]


@dataclass(frozen=True)
class Importance:
    """Of each key the mean weight that the last ``rows`` queries of each head give it, without a mask."""

    site: Site
    rows: int

    @property
    def _splits(self) -> tuple[int, int]:
        """Splits of the keys, and tiles of each."""
        tiles = -(-self.site.problem.seqlen_k // last_rows_tile(self.site.inputs.head_dim))
        blocks = WAVES * 2 * self.site.limits.multiprocessors
        each = -(-tiles // max(1, min(tiles, blocks // self.site.heads)))
        return -(-tiles // each), each

    @property
    def arrays(self) -> list[Array]:
        heads, splits = self.site.heads, self._splits[0]
        return [
            ("partial", (heads, splits, 128, 2), "float32"),  # (maximum, sum) of each query
            ("importance", (heads, self.site.problem.seqlen_k), "float32"),
        ]

    def launches(self, memory: Workspace) -> list[Launch]:
        site, problem = self.site, self.site.problem
        splits, each = self._splits
        values: dict[str, Any] = {
            "q": site.tensor("q"),
            "k": site.tensor("k"),
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
            "head_dim": problem.head_dim,
            "rows": self.rows,
            "splits": splits,
            "split_tiles": each,
            "scale_log2": problem.scale * LOG2E,
        }
        blocks = site.heads * splits
        return [
            launch(memory, "last_row_sums", last_row_sums(site.inputs, site.limits), blocks, values),
            launch(memory, "importance", column_means(site.inputs, site.limits), blocks, values),
        ]


@dataclass(frozen=True)
class SegmentOrder:
    """k_order: the keys of each whole segment by descending importance."""

    site: Site
    segment: int
    heads: int  # of a sequence, that have an order

    @property
    def arrays(self) -> list[Array]:
        return [("first_column", (self.site.problem.batch * self.heads,), "int32")]  # where key 0 is

    def launches(self, memory: Workspace) -> list[Launch]:
        problem = self.site.problem
        segments = -(-problem.seqlen_k // self.segment)
        slots = 1 << (self.segment - 1).bit_length()
        values = {
            "seqlen": problem.seqlen_k,
            "segment": self.segment,
            "segments": segments,
            "group": problem.heads // self.heads,
            "sort_slots": slots,
            "block": self.site.grid.block_k,
        }
        return [launch(memory, "k_order", order_segments(slots), problem.batch * self.heads * segments, values)]
