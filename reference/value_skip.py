"""SpargeAttn's second filter: products with values that are left out as their weights are next to nothing.

Rows of a q tile come in groups, keys of its list in blocks. For a block a row has its largest score there, top,
and its maximum m' of all scores up to the end of the block. A group leaves out the values of a block if top - m' <=
limit in each of its rows, where top of a row that sees nothing is -inf; the row's weights still count in its sum. As
limit is below 0, what is left out never has a row's maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..spec import VALUE_KEYS, VALUE_ROWS
from .dense import Array

__all__ = ["Update", "ValueSkips"]

Update = Callable[..., tuple[Array, Array, Array, Array, Array]]  # `reference.s2o.update`


@dataclass
class ValueSkips:
    """Which values to leave out, and then which were.

    Parameters
    ----------
    limits : natural logarithms below 0, of each query head, or one of all
    rows, keys : of a group, and of a block
    given : bool [B, H, N, T, groups, blocks], optional; what to leave out, instead of deciding

    Attributes
    ----------
    found : by (batch, head, segment, q tile), bool [groups, blocks]
    margins : likewise, the largest top - m' of a group's rows, [groups, blocks]
    from_first : likewise, the largest top - m, with the maximum that rows had after the first block; from the third on
    pairs : likewise, the number of (query, key) pairs left out
    """

    limits: float | Sequence[float]
    rows: int = VALUE_ROWS["portable"]
    keys: int = VALUE_KEYS
    given: Array | None = None
    found: dict[tuple[int, ...], Array] = field(default_factory=dict)
    margins: dict[tuple[int, ...], Array] = field(default_factory=dict)
    from_first: dict[tuple[int, ...], Array] = field(default_factory=dict)
    pairs: dict[tuple[int, ...], int] = field(default_factory=dict)

    def updating(self, plain: Update, at: tuple[int, ...], rows: int, keys: int) -> Update:
        """``plain`` but for what q tile ``at`` (batch, head, segment, tile) leaves out, which has so many ``rows``, and
        its list so many ``keys``."""
        first_rows = np.arange(0, rows, self.rows)
        shape = (len(first_rows), -(-keys // self.keys))
        limits = np.atleast_1d(np.asarray(self.limits, np.float64))
        limit = limits[at[1] if len(limits) > 1 else 0]
        found, margins, from_first = np.zeros(shape, bool), np.full(shape, np.inf), np.full(shape, np.inf)
        self.found[at], self.margins[at], self.from_first[at], self.pairs[at] = found, margins, from_first, 0
        counts = np.diff([*first_rows, rows])
        done, first = 0, np.zeros(rows)  # blocks; [M], the maxima after the first

        def of_groups(x: Array) -> Any:
            return np.maximum.reduceat(x, first_rows)

        def update(m: Array, mass: Array, acc: Array, s: Array, v: Array) -> tuple[Array, Array, Array, Array, Array]:
            nonlocal done, first
            before, state = (m, mass), (m, mass, acc)
            for i in range(0, s.shape[1], self.keys):
                here = s[:, i : i + self.keys]
                top = here.max(axis=-1)  # [M]
                after = plain(*state, here, v[i : i + self.keys])
                margins[:, done] = of_groups(_difference(top, after[0]))
                if done == 0:
                    first = after[0]
                elif done > 1:
                    from_first[:, done] = of_groups(_difference(top, first))
                small = margins[:, done] <= limit if self.given is None else self.given[at][: len(found), done]
                found[:, done] = small
                self.pairs[at] += int((counts * small).sum()) * here.shape[1]
                left_out = np.repeat(small, counts)[:, None]  # [M, 1]
                rescaled = state[2] * np.exp(_difference(state[0], after[0]))[:, None]
                state = after[0], after[1], np.where(left_out, rescaled, after[2])
                done += 1
            l0 = before[1] * np.exp(_difference(before[0], state[0]))
            return *state, state[1] - l0, l0

        return update

    def skipped(self, shape: tuple[int, ...]) -> Array:
        """`pairs` as an array, int32 [B, H, N, T]."""
        found = np.zeros(shape, np.int32)
        for at, pairs in self.pairs.items():
            found[at] = pairs
        return found


def _difference(x: Array, m: Array) -> Array:
    """x - m; -inf where x is, also where both are."""
    return np.where(np.isneginf(x), x, x - np.where(np.isneginf(m), m.dtype.type(0), m))
