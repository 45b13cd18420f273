"""Which tau keeps each head to an error, by a sample of segments: the definition.

A segment's order depends on its own queries and the keys up to its end alone, so attention of the sampled segments is
that of the whole call. A ladder of taus is tried on them, which ends with dense attention, tau 0, then a second one
between the two of the first that a head's error lies between, and last the error is interpolated between the two
nearest, in logarithms. Nothing counts for unvisited keys (S2OConfig.tail) while taus are tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..spec import FIRST_LADDER, Geometry, S2OConfig
from .dense import Array, dense_attention, quiet
from .s2o import finish, key_order, pass1, pass2, query_order

__all__ = ["chosen_tau", "error_taus", "second_ladder"]

LEAST_ERROR = 1 / 16  # of what is asked for, that an interpolation starts from


def _neighbours(points: dict[float, float], error: float) -> tuple[float, float | None]:
    """Of taus and their errors the largest that keeps to ``error``, and the next larger one."""
    below = max((tau for tau, found in points.items() if found <= error), default=0.0)
    return below, min((tau for tau in points if tau > below), default=None)


def second_ladder(points: dict[float, float], error: float) -> tuple[float, ...]:
    """The taus to look at after those of ``points``, descending."""
    count = len(FIRST_LADDER)
    below, above = _neighbours(points, error)
    if above is None:
        return (math.inf, *(below * 2.0 ** (count - i) for i in range(1, count)))
    if below == 0:
        return tuple(above * 2.0 ** (-i - 1) for i in range(count))
    return tuple(below * (above / below) ** ((count - i) / (count + 1)) for i in range(count))


def chosen_tau(points: dict[float, float], error: float) -> float:
    """The tau whose error is ``error``, as far as ``points`` tell; 0 if no other keeps to it."""
    below, above = _neighbours(points, error)
    if below == 0 or above is None or not (math.isfinite(above) and math.isfinite(points[above])):
        return below
    low = math.log(max(points[below], error * LEAST_ERROR))
    part = (math.log(error) - low) / (math.log(points[above]) - low)
    return float(below * (above / below) ** part)


@quiet
def error_taus(
    q: Array, k: Array, v: Array, config: S2OConfig, segments: Sequence[int], weights: Sequence[float], *,
    scale: float, softcap: float = 0.0, is_causal: bool = True, stop_lag: int = 0,
) -> Array:  # fmt: skip
    """Each head's tau, float32 [B, H], by the error of ``config``.

    q [B, H, Lq, D], k and v [B, Hkv, Lk, D]; ``weights``: how many segments each of ``segments`` stands for.
    ``stop_lag``: of `pass2`.
    """
    batch, heads = q.shape[:2]
    if scale < 0:
        q, scale = -q, -scale
    errors = config.errors(heads)
    whole = Geometry(q.shape[2], k.shape[2], config.segment, config.window, is_causal, config.unit)
    taus = np.zeros((batch, heads), np.float32)
    for b in range(batch):
        of_sequence = q[b : b + 1], k[b : b + 1], v[b : b + 1]
        pieces = [_Piece(*of_sequence, n, whole, config, scale, softcap, stop_lag) for n in segments]
        points: list[dict[float, float]] = [{} for _ in range(heads)]
        _look([FIRST_LADDER] * heads, pieces, weights, points)
        further = [second_ladder(of_head, error) for of_head, error in zip(points, errors, strict=True)]
        _look(further, pieces, weights, points)
        taus[b] = [chosen_tau(of_head, error) for of_head, error in zip(points, errors, strict=True)]
    return taus


def _look(
    ladders: Sequence[tuple[float, ...]], pieces: Sequence[_Piece], weights: Sequence[float],
    points: Sequence[dict[float, float]],
) -> None:  # fmt: skip
    """Adds to each head's ``points`` the errors at its ladder's taus; not a number, on a GPU infinity, where the dense
    output is not finite."""
    size = sum(weight * piece.size for weight, piece in zip(weights, pieces, strict=True))  # [H]
    for taus in zip(*ladders, strict=True):  # one for each head
        off = sum(weight * piece.off(taus) for weight, piece in zip(weights, pieces, strict=True))  # [H]
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(off == 0, 0.0, np.sqrt(off / size))
        for of_head, tau, error in zip(points, taus, errors.tolist(), strict=True):
            of_head[tau] = error


class _Piece:
    """A segment as a call of its own."""

    def __init__(
        self, q: Array, k: Array, v: Array, n: int, whole: Geometry, config: S2OConfig, scale: float, softcap: float,
        stop_lag: int,
    ) -> None:  # fmt: skip
        begin, end = whole.queries(n)
        seen = end + whole.offset if whole.is_causal else whole.seqlen_k
        self.q, self.k, self.v = q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen]
        self.geometry = replace(whole, seqlen_q=end - begin, seqlen_k=seen)
        self.config, self.scores, self.stop_lag = replace(config, tail="none"), (scale, softcap), stop_lag
        self.state = pass1(self.q, self.k, self.v, self.geometry, scale, softcap)
        self.orders = (
            query_order(self.q, self.k, self.geometry, config.block_m),
            key_order(self.q, self.k, self.geometry, self.config, scale, finish(self.state)[1]),
        )  # fmt: skip
        self.dense = dense_attention(
            self.q, self.k, self.v, scale=scale, softcap=softcap, is_causal=whole.is_causal
        )[0]  # fmt: skip
        self.size = np.square(self.dense).sum(axis=(0, 2, 3))  # [H]

    @quiet
    def off(self, taus: tuple[float, ...]) -> Array:
        """The squares of the error of each head at its tau, summed, [H]."""
        if not any(taus):  # dense attention
            return self.size - self.size
        config = replace(self.config, tau=taus, error=None, tail="none")
        state, _ = pass2(
            self.q, self.k, self.v, self.state, *self.orders, self.geometry, config, *self.scores,
            stop_lag=self.stop_lag,
        )  # fmt: skip
        return np.square(finish(state)[0] - self.dense).sum(axis=(0, 2, 3))
