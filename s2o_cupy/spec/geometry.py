"""Which keys a segment attends densely, and which it may visit."""

from __future__ import annotations

from dataclasses import dataclass

from .constants import CENTRE_KEYS, DRAW_STEP, GRAIN_KEYS, MOMENT_KEYS, TAIL_FEW, TAIL_SAMPLES

__all__ = ["Geometry", "moment_group", "moment_keys", "moment_place", "moment_samples", "tail_samples"]


def moment_group(keys: int) -> int:
    """The group of segments with so many leading keys: one for each number up to 15, then eight for each power of two,
    so that there are few. The same formula as in raw_kernels/tail/moment_groups.cuh."""
    shift = max(0, keys.bit_length() - 4)
    return keys if keys < 16 else 8 * shift + (keys >> shift)


def moment_keys(group: int) -> int:
    """The fewest leading keys of a group: those that its moments are taken from."""
    shift = max(0, group // 8 - 1)
    return group if group < 16 else (group - 8 * shift) << shift


def moment_samples(keys: int) -> int:
    """How many of a group's keys its moments are taken from: all of the first 2 * MOMENT_KEYS, and MOMENT_KEYS of those
    between two further powers of two. The same formula as in raw_kernels/tail/moment_groups.cuh."""
    shift = max(0, keys.bit_length() - MOMENT_KEYS.bit_length())
    return shift * MOMENT_KEYS + (keys >> shift) if shift else keys


def moment_place(sample: int) -> tuple[int, int]:
    """Where the sample number ``sample`` stands among the keys, and how many of these it stands for: a power of two of
    neighbours, in which it has no fixed place, so that no period of the keys meets it."""
    shift, i = max(0, sample // MOMENT_KEYS - 1), sample % MOMENT_KEYS
    if shift == 0:
        return sample, 1
    return ((MOMENT_KEYS + i) << shift) + ((i * DRAW_STEP % 2**32 << shift) >> 32), 1 << shift


def tail_samples(left: int) -> int:
    """How many of ``left`` unvisited candidates are sampled. The same is in raw_kernels/tail/tail_places.cuh."""
    return TAIL_SAMPLES // 2 if left < TAIL_FEW else TAIL_SAMPLES


@dataclass(frozen=True)
class Geometry:
    """Which keys a segment attends densely and which are candidates of pass 2.

    Query i stands at key position i + seqlen_k - seqlen_q (bottom-right alignment). Candidates are whole units of
    ``unit`` keys from key 0 on; without causality the last may be short. Ranges are half-open pairs (begin, end); the
    same formulas stand in raw_kernels/common/geometry.cuh.
    """

    seqlen_q: int
    seqlen_k: int
    segment: int
    window: int = 0
    is_causal: bool = True
    unit: int = 1
    drawn: int = 0  # above 0: only so many segments are attended, one from each of as many equal runs of neighbours

    @property
    def offset(self) -> int:
        return self.seqlen_k - self.seqlen_q

    @property
    def all_segments(self) -> int:
        return -(-self.seqlen_q // self.segment)

    @property
    def segments(self) -> int:
        return self.drawn or self.all_segments

    @property
    def runs(self) -> tuple[int, int, int]:
        """How many there are, segments of one at least, and how many, the first ones, have one more."""
        return self.segments, *divmod(self.all_segments, self.segments)

    def run(self, n: int) -> tuple[int, int]:
        """The run of neighbours among all segments that number ``n`` stands for."""
        _, least, longer = self.runs
        return n * least + min(n, longer), (n + 1) * least + min(n + 1, longer)

    def place(self, n: int) -> int:
        """Which of all segments number ``n`` is."""
        if not self.drawn:
            return n
        begin, end = self.run(n)
        return begin + ((n * DRAW_STEP + 2**31) % 2**32 * (end - begin) >> 32)

    @property
    def units(self) -> int:
        """Whole units of keys."""
        return self.seqlen_k // self.unit

    def queries(self, n: int) -> tuple[int, int]:
        """Query positions of segment ``n``."""
        begin = self.place(n) * self.segment
        return begin, min(begin + self.segment, self.seqlen_q)

    def dense_keys(self, n: int) -> tuple[int, int]:
        """Keys that pass 1 reads for segment ``n``: its own, the window before them, and the rest of a unit that this
        begins in; without causality also of the unit that its own end in."""
        begin, end = self.queries(n)
        clip = lambda x: min(max(x, 0), self.seqlen_k)  # noqa: E731
        dense_begin, dense_end = clip(begin + self.offset - self.window), clip(end + self.offset)
        dense_begin -= dense_begin % self.unit
        return dense_begin, dense_end if self.is_causal else clip(-(-dense_end // self.unit) * self.unit)

    def candidates(self, n: int) -> int:
        """How many keys pass 2 may visit: those before the dense ones; without causality also those after."""
        begin, end = self.dense_keys(n)
        return begin if self.is_causal else self.seqlen_k - (end - begin)

    def ranked(self, n: int) -> int:
        """How many whole units are among them: these are put in order. A short one comes last."""
        return self.candidates(n) // self.unit

    @property
    def leading_units(self) -> int:
        """Units that the centre of rank="query" is the mean of: of at most CENTRE_KEYS first keys, all of them before
        each segment that has candidates. At least 1, where nothing is ordered too.

        A call of some whole segments of a causal prompt has as many as that of all its segments, and so the same bits:
        what counts is where the first segment with a candidate would begin, had the call its neighbours before it."""
        if not self.is_causal:
            return max(1, min(CENTRE_KEYS // self.unit, self.units))
        n = next((n for n in range(self.segments) if self.ranked(n) > 0), None)
        if n is None:
            return 1
        keys = self.queries(n)[0] + self.offset - self.window  # before the segment and its window
        keys -= (keys - self.unit) // self.segment * self.segment  # before the first one that has a whole unit of them
        return max(1, min(CENTRE_KEYS, keys) // self.unit)

    def moment_group(self, n: int) -> int:
        """The group of leading keys that stands for segment ``n``'s candidates; without causality all keys do."""
        return moment_group(self.dense_keys(n)[0] if self.is_causal else self.seqlen_k)

    @property
    def grain_shift(self) -> int:
        """Log2 of the keys of a grain, GRAIN_KEYS or less: each segment's moments are those of whole grains. A call of
        some whole segments of a prompt has the prompt's."""
        if not self.is_causal:
            keys = moment_keys(moment_group(self.seqlen_k))
        elif self.segment % self.unit:
            keys = self.unit
        else:
            keys = (self.offset - self.window) // self.unit * self.unit | self.segment
        keys |= GRAIN_KEYS
        return (keys & -keys).bit_length() - 1

    def guide_keys(self, n: int) -> int:
        """Leading keys whose mean orders the queries: one segment of them, never a future one."""
        visible = self.queries(n)[0] + self.offset if self.is_causal else self.seqlen_k
        return max(0, min(self.segment, visible))

    def orders_queries(self, block_m: int) -> bool:
        """Whether a segment's queries are put in order: one q tile stops as one, in whichever they stand. By the
        segment alone, so that a short last one by itself, as a chunk, has the order that it has behind the others."""
        return self.segment > block_m

    def block_count(self, block_m: int) -> int:
        """Query tiles of a full segment."""
        return -(-min(self.segment, self.seqlen_q) // block_m)

    def causal_pairs(self) -> int:
        """(query, key) pairs that dense attention computes for one head."""
        if not self.is_causal:
            return self.seqlen_q * self.seqlen_k
        return self.seqlen_q * (self.offset + 1) + self.seqlen_q * (self.seqlen_q - 1) // 2

    def dense_pairs(self) -> int:
        """(query, key) pairs that pass 1 computes for one head."""
        total = 0
        for n in range(self.segments):
            (first, last), (begin, end) = self.queries(n), self.dense_keys(n)
            rows = last - first
            total += rows * (end - begin)
            if self.is_causal:
                total -= rows * (rows - 1) // 2
        return total
