"""Which rank attends which part of a sequence: chunks from both ends, so that causal work is even."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Zigzag"]


@dataclass(frozen=True)
class Zigzag:
    """2 x world_size chunks of a sequence; rank r has chunks r and 2 x world_size - 1 - r.

    A causal query at position i sees i + 1 keys, so an early chunk and its mirror image are as much work on every
    rank. Chunks are whole segments, as a segment's queries share their key order, and differ by one segment at most;
    the last segment may be short, and with few segments some chunks are empty.
    """

    seqlen: int
    world_size: int
    segment: int

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return 2 * self.world_size

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Positions [begin, end) of a chunk."""
        segments = -(-self.seqlen // self.segment)
        begin, end = (n * segments // self.count * self.segment for n in (chunk, chunk + 1))
        return min(begin, self.seqlen), min(end, self.seqlen)

    def owner(self, chunk: int) -> int:
        """The rank that has a chunk."""
        return min(chunk, self.count - 1 - chunk)

    def chunks(self, rank: int) -> tuple[int, int]:
        """The early and the late chunk of a rank."""
        return rank, self.count - 1 - rank

    def rows(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Positions of a rank's rows: [begin, end) of its early and of its late chunk."""
        early, late = self.chunks(rank)
        return self.bounds(early), self.bounds(late)

    def length(self, rank: int) -> int:
        """How many rows a rank has."""
        return sum(end - begin for begin, end in self.rows(rank))

    def pairs(self, rank: int) -> int:
        """(query, key) pairs of dense causal attention on a rank."""
        return sum((end - begin) * (begin + 1 + end) // 2 for begin, end in self.rows(rank))
