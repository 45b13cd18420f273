"""MInference's A-shape (arXiv 2407.02490), as StreamingLLM: the first keys and a window, whatever q and k are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..problem import MAX_SEQLEN, Problem
from ..spec import checked_int, names_its_fields
from .base import MethodConfig, Site, Stage
from .grid import BlockGrid

__all__ = ["AShapeConfig"]

BLOCK = 128


@names_its_fields
@dataclass(frozen=True, kw_only=True)
class AShapeConfig(MethodConfig):
    """The first keys, a query's own block of 128 queries, and the keys just before that. Causal calls only.

    Parameters
    ----------
    initial : int, default 128
        First keys that all queries attend to.
    window : int, default 4096
        Keys before a block of 128 queries that its queries attend to: each sees between so many and 127 more before
        itself.
    path : str, default "auto"
        Kernels to attend with, as in `S2OConfig`.
    workspace_bytes : int, default 256 MiB
        Not used: nothing is chosen.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.
    """

    initial: int = 128
    window: int = 4096

    reference: ClassVar[str] = "a_shape"
    causal_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("initial", "window"):
            value = checked_int(name, getattr(self, name), 0, MAX_SEQLEN)
            self._set(name, value)

    @property
    def block_q(self) -> int:
        return BLOCK

    def fixed_rules(self, problem: Problem) -> dict[str, Any]:
        return {"segment": BLOCK, "window": self.window, "sinks": min(self.initial, problem.seqlen_k)}

    def grid(self, problem: Problem) -> BlockGrid:
        return BlockGrid(problem.seqlen_q, problem.seqlen_k, BLOCK, BLOCK, BLOCK)

    def stages(self, site: Site) -> list[Stage]:
        return []
