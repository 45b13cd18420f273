"""Error and density of the heads of one layer at each tau of a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..plan import launch_plan
from .sampled import Sample

__all__ = ["LayerCurves", "measure_layer", "merged"]


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """What each tau gives in one layer, by a sample of its segments.

    Attributes
    ----------
    layer : int
        Counted from 0.
    taus : tuple of float
        The largest first.
    error, density : float64 numpy.ndarray, (taus, heads)
        rel_l2 of each head against dense attention, and pairs computed / pairs of dense attention.
    share : float64 numpy.ndarray, (heads,)
        Each head's part of the squared norm of dense attention's output in this layer.
    segments, segments_total : int
        How many segments were taken, and how many there are.
    seqlen_k : int
        Keys of the call.
    plain_dense : bool
        Whether on a GPU such a call is plain dense attention, by ``dense_up_to``; the curves are S2O's all the same.
    """

    layer: int
    taus: tuple[float, ...]
    error: np.ndarray
    density: np.ndarray
    share: np.ndarray
    segments: int
    segments_total: int
    seqlen_k: int
    plain_dense: bool

    @property
    def heads(self) -> int:
        return len(self.share)

    @property
    def squared(self) -> np.ndarray:
        """Squared error of each head as a part of the layer's squared norm: float64 [taus, heads]."""
        return self.share * np.square(self.error)


def measure_layer(layer: int, sample: Sample, taus: Sequence[float], step: Callable[[str], None]) -> LayerCurves:
    """The curves of one layer from a sample of its segments; sequences of a batch count together. ``step`` is called
    after dense attention and after each tau."""
    sample.attend_densely()
    step("dense")
    errors, densities, share = [], [], np.ones(())
    for tau in taus:
        found = sample.estimate(tau)
        share = found.share.sum(0)  # [heads]
        squared = (found.share * np.square(found.error)).sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            errors.append(np.where(squared == 0, 0.0, np.sqrt(squared / share)))
        densities.append(found.density.mean(0))  # all sequences of a batch have as many pairs
        step(f"tau {tau:g}")
    plain_dense = launch_plan.is_dense(sample.problem, sample.config.with_tau(max(taus)))
    return LayerCurves(
        layer, tuple(taus), np.stack(errors), np.stack(densities), share, len(sample.segments),
        sample.geometry.segments, sample.problem.seqlen_k, plain_dense,
    )  # fmt: skip


def merged(curves: Sequence[LayerCurves]) -> LayerCurves:
    """Of one layer on several texts: each counts by its pairs of queries and keys."""
    if len(curves) == 1:
        return curves[0]
    pairs = np.array([float(x.seqlen_k) ** 2 for x in curves])
    weight = pairs / pairs.sum()
    over_texts = lambda values: np.tensordot(weight, np.stack(values), 1)  # noqa: E731
    share = over_texts([x.share for x in curves])  # [heads]
    squared = over_texts([x.squared for x in curves])  # [taus, heads]
    error = np.sqrt(squared / np.where(share > 0, share, 1))
    return LayerCurves(
        curves[0].layer, curves[0].taus, error, over_texts([x.density for x in curves]), share,
        sum(x.segments for x in curves), sum(x.segments_total for x in curves), max(x.seqlen_k for x in curves),
        any(x.plain_dense for x in curves),
    )  # fmt: skip
