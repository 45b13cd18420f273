"""What the keys before each segment hold of the softmax mass, and how much of that S2O left out.

These keys are the ones that S2O chooses among. A segment's own keys are attended densely, and often hold most of the
mass: what was left out of all mass says little, what was left out of the earlier keys' says how well S2O chose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..reference import s2o as stages
from ..spec import Geometry, S2OConfig

__all__ = ["EarlierKeys", "SegmentMap", "segment_map", "segment_maps"]


class SegmentMap(NamedTuple):
    """One head's attention of one segment to its candidates (the keys before it)."""

    head: int
    segment: int
    first: int  # position of the segment's first query
    mass: np.ndarray  # [S, C] softmax mass over all visible keys, by position
    q_order: np.ndarray  # [S] offsets
    k_order: np.ndarray  # [C] offsets among the candidates
    stops: np.ndarray  # [T] keys of k_order that each query tile visited
    block_m: int
    block_n: int

    @property
    def skipped_pairs(self) -> float:
        """Share of the (query, candidate) pairs that were never computed."""
        return float(1 - self.visited.mean())

    @property
    def missed_mass(self) -> float:
        """Softmax mass on those pairs, mean of the segment's queries."""
        return float(self.mass.sum(dtype=np.float64) - self.computed_mass) / len(self.mass)

    @property
    def visited(self) -> np.ndarray:
        """bool [S, C], in permuted order."""
        stops = np.repeat(self.stops, self.block_m)[: len(self.q_order)]
        return np.arange(len(self.k_order)) < stops[:, None]

    @property
    def computed_mass(self) -> float:
        """Softmax mass on the pairs that were computed, sum over the queries."""
        found = 0.0
        for tile, stop in enumerate(self.stops):
            rows = self.q_order[tile * self.block_m : (tile + 1) * self.block_m]
            found += float(self.mass[np.ix_(rows, self.k_order[:stop])].sum(dtype=np.float64))
        return found


class EarlierKeys(NamedTuple):
    """Of segments of one or several heads, summed over their queries: pairs of a query and an earlier key, and softmax
    mass on such pairs."""

    queries: int = 0
    pairs: int = 0
    computed_pairs: int = 0
    mass: float = 0.0
    computed_mass: float = 0.0

    @classmethod
    def of(cls, view: SegmentMap) -> EarlierKeys:
        queries, candidates = view.mass.shape
        rows = np.minimum(view.block_m, queries - view.block_m * np.arange(len(view.stops)))
        mass = float(view.mass.sum(dtype=np.float64))
        return cls(queries, queries * candidates, int((rows * view.stops).sum()), mass, view.computed_mass)

    def with_more(self, other: EarlierKeys) -> EarlierKeys:
        return EarlierKeys(
            self.queries + other.queries, self.pairs + other.pairs, self.computed_pairs + other.computed_pairs,
            self.mass + other.mass, self.computed_mass + other.computed_mass,
        )  # fmt: skip

    def to_dict(self) -> dict[str, float]:
        """``earlier_mass``: the share of all softmax mass that lies on earlier keys. ``earlier_pairs_computed``: of the
        pairs with them. ``earlier_mass_left_out``: of their mass, on pairs that were not computed."""
        left_out = 1 - self.computed_mass / self.mass if self.mass else 0.0
        return {
            "earlier_mass": self.mass / max(1, self.queries),
            "earlier_pairs_computed": self.computed_pairs / self.pairs if self.pairs else 1.0,
            "earlier_mass_left_out": left_out if math.isnan(left_out) else max(0.0, left_out),  # rounding aside
        }


def segment_maps(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, config: S2OConfig, visited: np.ndarray | None = None, *, head: int,
    scale: float,
) -> Iterator[SegmentMap]:  # fmt: skip
    """One head, causal, a segment at a time.

    q [1, H, Lq, D], k and v [1, Hkv, Lk, D]. Orders are the reference's. ``visited`` [1, H, segments, tiles] is that of
    a call's statistics; without it the reference decides.
    """
    kv = head * k.shape[1] // q.shape[1]
    q, k, v = (x.astype(np.float32) for x in (q[:1, head : head + 1], k[:1, kv : kv + 1], v[:1, kv : kv + 1]))
    geometry = Geometry(q.shape[2], k.shape[2], config.segment, config.window, unit=config.unit)
    if visited is None:
        result = stages.s2o(q, k, v, config, scale=scale)
        q_order, k_order, visited = result.q_order, result.k_order, result.visited
    else:
        visited = visited[:, head : head + 1]
        q_order = stages.query_order(q, k, geometry, config.block_m)
        own = stages.finish(stages.pass1(q, k, v, geometry, scale))[1]
        k_order = stages.key_order(q, k, geometry, config, scale, own)

    for segment in range(geometry.segments):
        (first, last), candidates = geometry.queries(segment), geometry.candidates(segment)
        visible = last + geometry.offset
        scores = q[0, 0, first:last] @ k[0, 0, :visible].T * scale  # [S, keys up to the last query's]
        scores[np.arange(visible) > np.arange(first, last)[:, None] + geometry.offset] = -np.inf
        mass = np.exp(scores - scores.max(1, keepdims=True))
        mass /= mass.sum(1, keepdims=True)
        tiles = -(-(last - first) // config.block_m)
        yield SegmentMap(
            head,
            segment,
            first + geometry.offset,
            mass[:, :candidates],
            q_order[0, 0, segment, : last - first],
            k_order.keys[segment][0, 0],
            np.minimum(visited[0, 0, segment, :tiles] * config.block_n, candidates),
            config.block_m,
            config.block_n,
        )


def segment_map(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, config: S2OConfig, *, head: int, segment: int, scale: float
) -> SegmentMap:
    """One segment of :func:`segment_maps`, with the reference's decisions."""
    return next(x for x in segment_maps(q, k, v, config, head=head, scale=scale) if x.segment == segment)
