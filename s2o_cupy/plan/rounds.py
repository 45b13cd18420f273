"""Which (head, segment) pairs are ordered and attended together: rounds that fit the workspace.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..caches import remembered
from ..problem import Problem
from ..spec import Geometry

__all__ = ["MAX_GRID", "STEP", "UNIT_STEP", "Chunk", "Grid", "near_heads", "rounds"]

STEP = 64  # keys of one step of the kernels' main loop (kStep), and what lengths of rows of keys are multiples of
UNIT_STEP = 8  # those of rows of larger units: 16 bytes of scores
MAX_GRID = 2**31 - 1
NEAR_BYTES = 16 << 20  # of keys and values, of an L2 of 50 MB


@dataclass(frozen=True)
class Chunk:
    """The (head, segment) pairs of one round of ordering and pass 2.

    ``heads`` flattened (batch, head) pairs from ``first_head``, ``segments`` segments from ``first_segment``;
    ``shared_heads`` consecutive heads read one KV head; the keys of ``near_heads`` consecutive ones fit in L2.
    Scores and orders have a row for each pair, heads in turn and within one segments: ``stride`` elements of the first
    segment, ``growth`` more of each further one.
    """

    first_head: int
    heads: int
    first_segment: int
    segments: int
    shared_heads: int
    near_heads: int
    stride: int
    growth: int

    @property
    def rows(self) -> int:
        return self.heads * self.segments

    @property
    def longest(self) -> int:
        """Elements of the last segment's row."""
        return self.stride + (self.segments - 1) * self.growth

    @property
    def elements(self) -> int:
        return self.heads * self._before(self.segments)

    def place(self, head: int, segment: int) -> slice:
        """Where a pair's row lies among the elements."""
        i = segment - self.first_segment
        begin = (head - self.first_head) * self._before(self.segments) + self._before(i)
        return slice(begin, begin + self.stride + i * self.growth)

    def _before(self, segments: int) -> int:
        """Elements of a head's first rows (Chunk::before in geometry.cuh)."""
        return segments * self.stride + segments * (segments - 1) // 2 * self.growth


class Grid(NamedTuple):
    """The q tiles of a launch of pass 1 or 2: ``tiles`` of each row of ``chunk``, which ``blocks`` of threads take. A q
    tile has rows of ``tile_heads`` neighbouring heads."""

    chunk: Chunk
    tiles: int
    blocks: int
    tile_heads: int = 1

    @property
    def q_tiles(self) -> int:
        return self.chunk.rows // self.tile_heads * self.tiles


def near_heads(problem: Problem, heads: int) -> int:
    """How many of ``heads`` query heads run at a time: the more, the better the longest tiles are spread, as long as
    L2 holds their keys and values."""
    group = problem.heads // problem.kv_heads
    if heads % group:
        return 1
    return group * _near_kv_heads(heads // group, NEAR_BYTES // (2 * problem.seqlen_k * problem.head_dim * 2))


@remembered
def _near_kv_heads(kv_heads: int, fits: int) -> int:
    return max(n for n in _divisors(kv_heads) if n <= max(1, fits))


@remembered
def _divisors(n: int) -> tuple[int, ...]:
    """From the largest to 1."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return tuple(sorted({*small, *(n // i for i in small)}, reverse=True))


def row_lengths(geometry: Geometry, begin: int, end: int) -> tuple[int, int]:
    """``stride`` and ``growth`` of the rows of segments [begin, end), an element a unit: those of later segments are
    longer, by up to a segment each, or all are as long as the last where that takes less or only some are drawn."""
    step = STEP if geometry.unit == 1 else UNIT_STEP
    padded = lambda units: -(-units // step) * step  # noqa: E731
    if not geometry.is_causal:  # scores lie by unit, and an order may end in a short one
        return padded(-(-geometry.seqlen_k // geometry.unit)), 0
    first, last = geometry.ranked(begin), geometry.ranked(end - 1)
    growth = padded(-(-geometry.segment // geometry.unit))
    grown = 2 * padded(first) + (end - begin - 1) * growth
    return (padded(first), growth) if grown < 2 * padded(last) and not geometry.drawn else (padded(last), 0)


def rounds(
    problem: Problem, geometry: Geometry, chunk_bytes: Callable[[Chunk], int], budget: int, before: int | None = None
) -> tuple[Chunk, ...]:
    """Rounds from the last segment to the first, each within ``budget`` by ``chunk_bytes`` if one row fits; of the
    segments ``before`` one, or of all.

    Few heads and many segments: their keys are read once for all of them, and the last tiles of a round are short, so
    that few multiprocessors wait for its end. A round takes all segments that are left, of as many heads as fit in
    equal turns, or as many segments as fit of the heads that share a KV head, or of one head.
    """
    heads, group = problem.batch * problem.heads, problem.heads // problem.kv_heads
    kv_heads = heads // group
    end = geometry.segments if before is None else before
    first = next((n for n in range(end) if geometry.candidates(n) > 0), end)

    def chunk(first_head: int, heads: int, begin: int, end: int) -> Chunk:
        shared = group if heads % group == 0 else 1
        near = near_heads(problem, heads)
        return Chunk(first_head, heads, begin, end - begin, shared, near, *row_lengths(geometry, begin, end))

    def fits(heads: int, begin: int) -> bool:
        return chunk_bytes(chunk(0, heads, begin, end)) <= budget

    def fitting_segments(heads: int) -> int:
        return _most(lambda n: fits(heads, end - n), end - first)

    chunks: list[Chunk] = []
    while end > first:
        if geometry.candidates(end - 1) == 0:  # without causality earlier segments may have some even so
            end -= 1
            continue
        if whole := _most(lambda n: fits(n * group, first), kv_heads):
            turns = _turns(kv_heads, whole)
            bounds, begin = [i * kv_heads // turns * group for i in range(turns + 1)], first
        elif segments := fitting_segments(group):
            bounds, begin = list(range(0, heads + 1, group)), end - segments
        else:
            bounds, begin = list(range(heads + 1)), end - max(1, fitting_segments(1))
        begin = next(n for n in range(begin, end) if geometry.candidates(n) > 0)
        chunks += (chunk(a, b - a, begin, end) for a, b in itertools.pairwise(bounds))
        end = begin
    return tuple(chunks)


def _turns(count: int, most: int) -> int:
    """In how many turns ``count`` are taken, up to ``most`` each: equal ones, if no more than twice the fewest."""
    fewest = -(-count // most)
    return next((n for n in range(fewest, 2 * fewest + 1) if count % n == 0), fewest)


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n up to ``limit`` that fits, where all smaller ones do; 0 if 1 does not."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
