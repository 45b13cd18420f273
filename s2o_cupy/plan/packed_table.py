"""Which packed sequences a launch of pass 1 attends: the table among its parameters. Pure: no array, no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem
from ..spec import S2OConfig
from .collecting import most_collected_keys, repays_collecting
from .paths import PASS1_PACKED
from .rounds import near_heads

__all__ = ["PackedLaunch", "PackedTable"]


class PackedLaunch(NamedTuple):
    """As many sequences as a launch takes, the longest first."""

    q_tiles: int
    first_q_tile: Any  # int32 (sequences,): q tiles before each one's
    of: Any  # PackedSequence of attention_params.cuh (sequences,)
    table_row: Any  # int32 (sequences,): `begin_k` as the caller gave it
    keys: int  # of all its sequences


class PackedTable:
    """Packed sequences that are attended densely. Problems differ in nothing but lengths."""

    def __init__(self, begins: Sequence[tuple[int, int]], problems: Sequence[Problem]) -> None:
        """``begins``: each sequence's first row in q, and in k and v, or in a paged cache its row of the page table."""
        self._among = PASS1_PACKED.params.dtype["of"]  # the sequences of a launch
        of = np.zeros(len(problems), self._among.base)
        of["begin_q"], of["begin_k"] = zip(*begins, strict=True)
        of["seqlen_q"] = [x.seqlen_q for x in problems]
        of["seqlen_k"] = [x.seqlen_k for x in problems]
        of["near_heads"] = [near_heads(x, x.heads) for x in problems]
        self.problem = replace(problems[0], seqlen_q=1, seqlen_k=1)
        self.shortest_q, self.shortest_k = int(of["seqlen_q"].min()), int(of["seqlen_k"].min())
        self.longest_q, self.longest_k = int(of["seqlen_q"].max()), int(of["seqlen_k"].max())
        self._repays_collecting = repays_collecting(problems)
        self._of = of[np.argsort(-of["seqlen_k"], kind="stable")]  # longest tiles first
        self._launches: dict[tuple[int, int], list[PackedLaunch]] = {}

    def collected_keys(self, config: S2OConfig) -> int:
        """Keys that launches copy from small pages to arrays at a time, at most; 0: pass 1 had better gather them."""
        most = most_collected_keys(self.problem, config)
        return most if self._repays_collecting and self.longest_k <= most else 0

    def read_keys(self, config: S2OConfig) -> int:
        """Likewise of a cache of 8 bits, all of which are read; a sequence is never cut."""
        return max(self.longest_k, most_collected_keys(self.problem, config))

    def launches(self, block_m: int, most_keys: int = 0) -> list[PackedLaunch]:
        """For q tiles of ``block_m`` rows. ``most_keys``: the keys of a launch, up to so many, are collected from pages
        one sequence behind the other, and `begin_k` is where they begin there; 0: they lie as the caller said."""
        if (block_m, most_keys) not in self._launches:
            parts = self._parts(most_keys)
            self._launches[block_m, most_keys] = [self._launch(part, block_m, most_keys > 0) for part in parts]
        return self._launches[block_m, most_keys]

    def _parts(self, most_keys: int) -> Iterator[Any]:
        """What each launch takes."""
        (size,) = self._among.shape
        first = keys = 0
        for i, length in enumerate(self._of["seqlen_k"].tolist()):
            if i - first == size or (most_keys and keys + length > most_keys):
                yield self._of[first:i]
                first, keys = i, 0
            keys += length
        yield self._of[first:]

    def _launch(self, of: Any, block_m: int, collected: bool) -> PackedLaunch:
        ends = np.cumsum(self.problem.heads * -(-of["seqlen_q"].astype(np.int64) // block_m))
        ends_k = np.cumsum(of["seqlen_k"].astype(np.int64))
        before = lambda ends: np.concatenate([[0], ends[:-1]]).astype(np.int32)  # noqa: E731
        table_row = of["begin_k"].copy()
        if collected:
            of = of.copy()
            of["begin_k"] = before(ends_k)
        return PackedLaunch(int(ends[-1]), before(ends), of, table_row, int(ends_k[-1]))
