"""XAttention (arXiv 2503.16428): blocks of keys by the softmax mass of antidiagonals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..problem import Problem
from ..spec import names_its_fields
from .antidiagonal import BLOCK, STRIDES, AntidiagonalMass
from .base import MethodConfig, Site, Stage, checked_choice, checked_number
from .grid import BlockGrid
from .stages import Choice

__all__ = ["XAttentionConfig"]


@names_its_fields
@dataclass(frozen=True, kw_only=True)
class XAttentionConfig(MethodConfig):
    """How XAttention chooses blocks of 128 keys for blocks of 128 queries. Causal calls only.

    Queries and keys are cut into cells of ``stride`` neighbours. Two cells have the mean score of their antidiagonal,
    and the softmax of a cell of queries over the cells of keys gives blocks their mass.

    Parameters
    ----------
    stride : 8 or 16, default 8
        The choice costs 1 / (2 * stride) of dense attention's products.
    threshold : float, default 0.9
        The first block and that of the queries themselves are attended to, and others by descending mass until all hold
        this share of it: a number above 0, up to 1. At 1 all are.
    path : str, default "auto"
        Kernels to choose and to attend with, as in `S2OConfig`.
    workspace_bytes : int, default 256 MiB
        Bound on the GPU memory of scores; those of one head always fit.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.

    Notes
    -----
    From the public code, which pads a sequence with zeros. Its own choice where that is silent: a cell of queries sees
    the cells of keys that begin no later than it, also where seqlen_k is more than seqlen_q.
    """

    stride: int = 8
    threshold: float = 0.9

    reference: ClassVar[str] = "xattention"
    causal_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_choice("stride", self.stride, STRIDES)
        accepted = "a number above 0, up to 1"
        self._set("threshold", checked_number("threshold", self.threshold, 0, 1, accepted))

    @property
    def block_q(self) -> int:
        return BLOCK

    def grid(self, problem: Problem) -> BlockGrid:
        return BlockGrid(problem.seqlen_q, problem.seqlen_k, BLOCK, BLOCK, BLOCK, problem.is_causal, BLOCK)

    def stages(self, site: Site) -> list[Stage]:
        mass, kv_heads = AntidiagonalMass(site, self.stride, self.path), site.problem.kv_heads
        return [Choice(site, kv_heads, "reach", self.threshold, keep_first=True, scores=mass, forced_count=True)]
