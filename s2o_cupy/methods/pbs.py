"""PBS-Attn: permuted block-sparse attention (arXiv 2510.21270). Keys of a segment are ordered by what the last queries
of the prompt make of them, so that the important ones share blocks; blocks are then chosen by their means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ArgumentValueError
from ..plan.build import Array, Launch, Workspace
from ..problem import Problem
from ..spec import MAX_SEGMENT, checked_int, names_its_fields
from . import last_rows
from .antidiagonal import BLOCK, STRIDES, AntidiagonalMass
from .base import BLOCKS, MethodConfig, Site, Stage, checked_bool, checked_choice, checked_number
from .grid import BlockGrid
from .kernels import LAST_ROWS, column_means, last_row_sums, order_segments, segments_of_block
from .stages import BlockMeans, Choice, launch

__all__ = ["PBSConfig"]

SHARES = ("head", "kv_head")
SCORES = ("mean", "antidiagonal")


@names_its_fields
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
    scores : {"mean", "antidiagonal"}, default "mean"
        A block's score is the product of its mean key and the mean query, or, as in PBS-Attn+, its softmax mass as
        `XAttentionConfig` has it, of blocks of 128 alone.
    stride : 8 or 16, default 16
        Of antidiagonal scores, which cost 1 / (2 * stride) of dense attention's products.
    path : str, default "auto"
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
    scores: str = "mean"
    stride: int = 16

    reference: ClassVar[str] = "pbs"
    causal_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_choice("block", self.block, BLOCKS)
        self._set("segment", checked_int("segment", self.segment, self.block, MAX_SEGMENT))
        if self.segment % self.block:
            raise ArgumentValueError(f"segment is {self.segment}; accepted: a multiple of block ({self.block})")
        accepted = "a number above 0, up to 1"
        self._set("threshold", checked_number("threshold", self.threshold, 0, 1, accepted))
        checked_choice("share", self.share, SHARES)
        checked_bool("keep_first", self.keep_first)
        checked_choice("scores", self.scores, SCORES)
        checked_choice("stride", self.stride, STRIDES)
        if self.scores == "antidiagonal" and self.block != BLOCK:
            raise ArgumentValueError(f"block is {self.block} with scores='antidiagonal'; accepted: {BLOCK}")

    @property
    def block_q(self) -> int:
        return self.block

    def grid(self, problem: Problem) -> BlockGrid:
        return BlockGrid(
            problem.seqlen_q, problem.seqlen_k, self.block, self.block, self.segment, align=self.segment, own=False
        )

    def order_heads(self, problem: Problem) -> int:
        return problem.heads if self.share == "head" else problem.kv_heads

    def stages(self, site: Site) -> list[Stage]:
        last_rows.check_aligned(site, "PBSConfig")
        heads = self.order_heads(site.problem)
        order: list[Stage] = [
            Importance(site, min(self.block, site.problem.seqlen_q)),
            SegmentOrder(site, self.segment, heads),
        ]
        if self.scores == "antidiagonal":
            mass = AntidiagonalMass(site, self.stride, self.path, heads)
            return [*order, Choice(site, heads, self.rule, self.threshold, self.keep_first, scores=mass)]
        return [
            *order,
            BlockMeans(site, heads, k_permuted=True),
            Choice(site, heads, self.rule, self.threshold, self.keep_first),
        ]


@dataclass(frozen=True)
class Importance:
    """Of each key the mean weight that the last ``rows`` queries of each head give it, without a mask."""

    site: Site
    rows: int

    @property
    def arrays(self) -> list[Array]:
        heads, count = self.site.heads, last_rows.splits(self.site)[0]
        return [
            ("partial", (heads, count, LAST_ROWS, 2), "float32"),  # (maximum, sum) of each query
            ("importance", (heads, self.site.problem.seqlen_k), "float32"),
        ]

    def launches(self, memory: Workspace) -> list[Launch]:
        return [
            *last_rows.launches(memory, "last_row_sums", last_row_sums, self.site, self.rows, False),
            *last_rows.launches(memory, "importance", column_means, self.site, self.rows, False),
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
            "all_segments": problem.batch * self.heads * segments,
            "group": problem.heads // self.heads,
            "sort_slots": slots,
            "block": self.site.grid.block_k,
        }
        kernel = order_segments(slots)
        blocks = -(-values["all_segments"] // segments_of_block(kernel))
        return [launch(memory, "k_order", kernel, blocks, values)]
