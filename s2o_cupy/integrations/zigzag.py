"""Which rank attends which part of a sequence: chunks dealt out there and back, so that causal work is even."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

__all__ = ["Zigzag", "rounds_for"]

TWO_ROUNDS_UP_TO = 524_288  # tokens; measured on two GPUs


def rounds_for(seqlen: int) -> int:
    """In how many rounds to deal a sequence out: more where unevenness costs more than calls on more chunks do
    (docs/several_gpus.md)."""
    return 2 if seqlen <= TWO_ROUNDS_UP_TO else 4


@dataclass(frozen=True)
class Zigzag:
    """A sequence dealt out in ``rounds`` rounds, an even number, of a chunk for each rank: from rank 0 up in one round,
    from the last rank down in the next.

    A causal query at position i sees i + 1 keys, so a rank that has less work than others in one round has as much
    more in the next. S2O's work is not in proportion to the keys, which leaves it a little uneven, the less the more
    rounds there are.

    Chunks are whole segments, as a segment's queries share their key order, and differ by one segment at most; the
    last segment may be short, and with few segments some chunks are empty.
    """

    seqlen: int
    world_size: int
    segment: int
    rounds: int

    @property
    def count(self) -> int:
        """How many chunks there are."""
        return self.rounds * self.world_size

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Positions [begin, end) of a chunk."""
        return self._begin(chunk), self._begin(chunk + 1)

    def _begin(self, chunk: int) -> int:
        """Chunks of a pair of rounds are of one length if they can be: only then do a rank's two make up for each
        other. Segments left over, fewer than these chunks, go to the first pair, whose queries see the fewest keys."""
        chunks = 2 * self.world_size  # of a pair
        whole, left = divmod(-(-self.seqlen // self.segment), chunks)
        pair, place = divmod(chunk, chunks)
        before, after = (n * whole // (self.rounds // 2) for n in (pair, pair + 1))
        segments = chunks * before + place * (after - before) + min(chunk * left // chunks, left)
        return min(segments * self.segment, self.seqlen)

    def chunk(self, rank: int, index: int) -> int:
        """The chunk that a rank has in round ``index``."""
        return index * self.world_size + (self.world_size - 1 - rank if index % 2 else rank)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """A rank's chunk of each round."""
        return tuple(self.chunk(rank, index) for index in range(self.rounds))

    def spans(self, rank: int) -> list[slice]:
        """Where the chunks of `rows` lie among a rank's own rows."""
        ends = list(itertools.accumulate(end - begin for begin, end in self.rows(rank)))
        return [slice(*pair) for pair in itertools.pairwise([0, *ends])]

    def rounds_before(self, chunk: int) -> int:
        """How many rounds, from the first, have all chunks before this one: all keys that it sees beside its own."""
        return -(-chunk // self.world_size)

    def runs(self, rank: int) -> list[tuple[int, int, int]]:
        """A rank's rows in as few pieces as they have: (last chunk, begin, end), positions half-open.

        Where a round turns round, the same rank has both chunks, and all that is before the second is before the first
        or the first itself: they need the same rounds.
        """
        found: list[tuple[int, int, int]] = []
        for chunk in self.chunks(rank):
            begin, end = self.bounds(chunk)
            if begin == end:
                continue
            if found and found[-1][2] == begin:
                begin = found.pop()[1]
            found.append((chunk, begin, end))
        return found

    def rows(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Positions of a rank's rows: [begin, end) of its chunk of each round."""
        return tuple(self.bounds(chunk) for chunk in self.chunks(rank))

    def length(self, rank: int) -> int:
        """How many rows a rank has."""
        return sum(end - begin for begin, end in self.rows(rank))

    def pairs(self, rank: int) -> int:
        """(query, key) pairs of dense causal attention on a rank."""
        return sum((end - begin) * (begin + 1 + end) // 2 for begin, end in self.rows(rank))
