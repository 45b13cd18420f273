"""MeanPooling: blocks of keys by the product of their mean with a block's mean query. The baseline of PBS-Attn's paper
(arXiv 2510.21270), and what several methods begin with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..problem import Problem
from ..spec import names_its_fields
from .base import BLOCKS, MethodConfig, Site, Stage, checked_bool, checked_choice, checked_number
from .grid import BlockGrid
from .stages import BlockMeans, Choice

__all__ = ["MeanPoolingConfig"]


@names_its_fields
@dataclass(frozen=True, kw_only=True)
class MeanPoolingConfig(MethodConfig):
    """How MeanPooling chooses blocks.

    Parameters
    ----------
    block : 64 or 128, default 128
        Queries and keys of a block.
    threshold : float, default 0.9
        The fewest blocks are chosen whose share of a softmax over the scores of all visible ones reaches it: a number
        above 0, up to 1. At 1 all are.
    keep_first : bool, default True
        The block of key 0 is always chosen, as that of the queries themselves is.
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
    threshold: float = 0.9
    keep_first: bool = True

    reference: ClassVar[str] = "mean_pooling"

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_choice("block", self.block, BLOCKS)
        accepted = "a number above 0, up to 1"
        self._set("threshold", checked_number("threshold", self.threshold, 0, 1, accepted))
        checked_bool("keep_first", self.keep_first)

    @property
    def block_q(self) -> int:
        return self.block

    def grid(self, problem: Problem) -> BlockGrid:
        return BlockGrid(
            problem.seqlen_q, problem.seqlen_k, self.block, self.block, self.block, problem.is_causal, self.block
        )

    def stages(self, site: Site) -> list[Stage]:
        kv_heads = site.problem.kv_heads
        return [
            BlockMeans(site, kv_heads),
            Choice(site, kv_heads, self.rule, self.threshold, self.keep_first),
        ]
