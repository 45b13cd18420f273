"""Which packed sequences a launch of pass 1 attends: the table among its parameters. Pure: no array, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem
from . import kernels
from .rounds import near_heads

__all__ = ["PackedLaunch", "PackedTable"]


class PackedLaunch(NamedTuple):
    """As many sequences as a launch takes, the longest first."""

    q_tiles: int  # q tiles
    first_q_tile: Any  # int32 (sequences,): q tiles before each one's
    of: Any  # PackedSequence of attention_params.cuh (sequences,)


class PackedTable:
    """Packed sequences that are attended densely. Problems differ in nothing but lengths."""

    def __init__(self, begins: Sequence[tuple[int, int]], problems: Sequence[Problem]) -> None:
        """``begins``: each sequence's first row in q, and in k and v."""
        self._among = kernels.FAMILIES["pass1_packed"].params.dtype["of"]  # the sequences of a launch
        of = np.zeros(len(problems), self._among.base)
        of["begin_q"], of["begin_k"] = zip(*begins, strict=True)
        of["seqlen_q"] = [x.seqlen_q for x in problems]
        of["seqlen_k"] = [x.seqlen_k for x in problems]
        of["near_heads"] = [near_heads(x, x.heads) for x in problems]
        self.problem = replace(problems[0], seqlen_q=1, seqlen_k=1)
        self.shortest = int(min(of["seqlen_q"].min(), of["seqlen_k"].min()))
        self.longest_q, self.longest_k = int(of["seqlen_q"].max()), int(of["seqlen_k"].max())
        self._of = of[np.argsort(-of["seqlen_k"], kind="stable")]  # longest tiles first
        self._launches: dict[int, list[PackedLaunch]] = {}

    def launches(self, block_m: int) -> list[PackedLaunch]:
        """For q tiles of ``block_m`` rows."""
        if block_m not in self._launches:
            (size,) = self._among.shape
            parts = [self._of[i : i + size] for i in range(0, len(self._of), size)]
            self._launches[block_m] = [self._launch(part, block_m) for part in parts]
        return self._launches[block_m]

    def _launch(self, of: Any, block_m: int) -> PackedLaunch:
        ends = np.cumsum(self.problem.heads * -(-of["seqlen_q"].astype(np.int64) // block_m))
        return PackedLaunch(int(ends[-1]), np.concatenate([[0], ends[:-1]]).astype(np.int32), of)
