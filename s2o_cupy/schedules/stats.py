"""What a call by a schedule computed. Nothing is computed until asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.frameworks import to_host
from ..plan.schedule_form import BLOCK_N
from ..problem import Problem
from ..spec import Geometry
from .schedule import Schedule

__all__ = ["GatherStats"]


@dataclass(frozen=True, repr=False, eq=False)
class GatherStats:
    """Measurements of one ``gather_attention`` call.

    Attributes
    ----------
    visited : array, int32, (batch, heads, segments, q tiles)
        Tiles of 128 keys of its list that each q tile visited. With a list for each q tile all are of one segment.
    schedule : Schedule
    problem : Problem
        Sizes, dtype, mask and scale of the call.
    path, path_reason : as in S2OStats
    skipped : array, int32, like visited, or None
        With a ``value_skip``: how many (query, key) pairs' products with values were left out.
    """

    visited: Any
    schedule: Schedule
    problem: Problem
    path: str | None
    path_reason: str | None = None
    skipped: Any = None

    @property
    def density(self) -> float:
        """(query, key) pairs computed / pairs of dense attention, over all heads. Waits for the GPU. 0.0 if there is
        nothing to compute."""
        form, problem = self.schedule.form, self.problem
        heads, all_pairs = problem.batch * problem.heads, self._all_pairs()
        if all_pairs == 0:
            return 0.0
        visited = to_host(self.visited).astype(np.int64)  # [B, H, N, T]
        keys = to_host(self.schedule.keys)  # [Bs, HL, lists]
        keys = np.repeat(keys, problem.heads // form.list_heads, axis=1)
        keys = keys[:, :, :, None] if form.per_segment else keys[:, :, None]
        listed = (np.minimum(visited * BLOCK_N, keys) * self._tile_rows()).sum()
        return (float(listed) + heads * self._dense_pairs()) / all_pairs

    @property
    def value_density(self) -> float:
        """Pairs whose product with values was computed / pairs of dense attention: `density` but for what a schedule's
        ``value_skip`` left out. Waits for the GPU."""
        if self.skipped is None:
            return self.density
        skipped = float(to_host(self.skipped).astype(np.int64).sum())
        return self.density - skipped / max(1, self._all_pairs())

    @property
    def density_per_head(self) -> Any:
        """The same of each head, float32 (batch, heads), as an array of visited's framework."""
        from array_api_compat import array_namespace, device

        form, problem, xp = self.schedule.form, self.problem, array_namespace(self.visited)
        pairs = max(1, Geometry(form.seqlen_q, form.seqlen_k, 1, 0, form.is_causal).causal_pairs())
        share = xp.asarray((self._tile_rows() / pairs).astype(np.float32), device=device(self.visited))
        keys = self.schedule.keys[:, :, None]  # [Bs, HL, 1, lists]
        keys = keys[..., None] if form.per_segment else keys[..., None, :]  # [Bs, HL, 1, N, T or 1]
        group = problem.heads // form.list_heads
        visited = xp.reshape(self.visited, (problem.batch, form.list_heads, group, *self.visited.shape[2:]))
        listed = xp.astype(xp.minimum(visited * BLOCK_N, keys), xp.float32) * share
        of_head = xp.reshape(xp.sum(listed, axis=(-2, -1)), (problem.batch, problem.heads))
        return of_head + self._dense_pairs() / pairs

    def _all_pairs(self) -> int:
        """Of dense attention, over all heads."""
        form, problem = self.schedule.form, self.problem
        pairs = Geometry(form.seqlen_q, form.seqlen_k, 1, 0, form.is_causal).causal_pairs()
        return problem.batch * problem.heads * pairs

    def _dense_pairs(self) -> int:
        """Of a head's dense part and sinks."""
        form, dense = self.schedule.form, self.schedule.form.dense
        if dense is None:
            return 0
        rows = [end - begin for begin, end in map(dense.queries, range(dense.segments))]
        sinks = [min(form.sinks, dense.dense_keys(n)[0]) for n in range(dense.segments)]
        return dense.dense_pairs() + int(np.dot(rows, sinks))

    def _tile_rows(self) -> np.ndarray:
        """Queries of each q tile, int64 [segments, q tiles]."""
        form = self.schedule.form
        segment = form.list_rows if form.per_segment else max(1, form.seqlen_q)
        lengths = np.array([min(segment, form.seqlen_q - n) for n in range(0, form.seqlen_q, segment)])
        starts = np.arange(self.visited.shape[-1]) * form.block_m
        return np.clip(lengths[:, None] - starts, 0, form.block_m)

    def __repr__(self) -> str:
        path = f"{self.path}" + (f" ({self.path_reason})" if self.path_reason else "")
        return f"GatherStats(path: {path}, {self.problem}, {self.schedule})"
