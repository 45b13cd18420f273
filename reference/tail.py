"""What candidates that a q tile did not visit count for: their mass by a sample, their values to first order."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from ..spec import LOG2E, TAIL_DOUBT, TAIL_REACH, TAIL_SAMPLES, moment_keys, moment_place, moment_samples
from .dense import Array, capped, quiet

__all__ = ["Moments", "add_tail", "key_moments", "sample_places", "sample_variance", "tail_weights"]


class Moments(NamedTuple):
    """Of keys and values among the leading ones."""

    mean_value: Array  # [D]
    covariance: Array  # [D of values, D of keys]


@quiet
def key_moments(k: Array, v: Array, group: int) -> Moments:
    """Moments of the leading keys of k and v [Lk, D] that a group has (:func:`spec.moment_keys`), from samples that
    stand for equal shares of their neighbours (:func:`spec.moment_place`)."""
    keys = moment_keys(group)
    if keys == 0:
        return Moments(np.zeros(v.shape[1], v.dtype), np.zeros((v.shape[1], k.shape[1]), v.dtype))
    at, counts = _moment_places(keys)
    k, v, share = k[at], v[at], (counts / keys).astype(v.dtype)[:, None]
    mean_value, mean_key = (share * v).sum(axis=0), (share * k).sum(axis=0)
    return Moments(mean_value, (share * (v - mean_value)).T @ (k - mean_key))


@cache
def _moment_places(keys: int) -> tuple[Array, Array]:
    """Where a group's samples stand, and how many keys each stands for, int64 [samples]."""
    at, counts = np.array([moment_place(sample) for sample in range(moment_samples(keys))]).T
    return at, counts


def sample_places(left: int) -> Array:
    """Which of ``left`` unvisited candidates, in their order, are sampled: denser where they come early, as weights
    fall along the order. int64 [TAIL_SAMPLES]; number i stands for (2 i + 1) / TAIL_SAMPLES**2 of them all."""
    odd = 2 * np.arange(TAIL_SAMPLES, dtype=np.int64) + 1
    return odd * odd * left // (4 * TAIL_SAMPLES**2)


@quiet
def tail_weights(t: Array, lse: Array, left: int, softcap: float) -> tuple[Array, Array]:
    """Mass [M], as a multiple of what rows with ``lse`` [M] have found, and tilt [M], from the uncapped scores t
    [M, TAIL_SAMPLES] of the samples.

    The mass is the sum of exp(score) that the samples stand for, less of it the fewer of them carry it: a sample that
    outweighs the others may be alone in its kind. The tilt says how far the mean of t moves with these weights, over
    the variance of t: 1 if t is spread like a normal distribution, and kept within [0, 1]. Mass is 0 where something
    is not finite, and where a sample weighs more than 2 ** TAIL_REACH times all that the row has found.
    """
    share, size = _shares(t), capped(t, softcap) - lse[:, None]  # [TAIL_SAMPLES], [M, TAIL_SAMPLES]
    above = np.fmax(size.max(axis=1, keepdims=True), 0)  # [M, 1], the unit of weights: squares are finite
    weight = share * np.exp(size - above)  # [M, TAIL_SAMPLES]
    total = weight.sum(axis=1)
    carrying = total * total / (weight * weight).sum(axis=1)  # samples
    mass = total * np.exp(above[:, 0]) * t.dtype.type(left) * carrying / (carrying + TAIL_DOUBT)
    mass = np.where(above[:, 0] * LOG2E > TAIL_REACH, 0, mass)
    off = t - (share * t).sum(axis=1, keepdims=True)
    variance = sample_variance(t)
    tilt = np.where(variance > 0, (weight * off).sum(axis=1) / (total * variance), 0)
    tilt = np.fmin(np.fmax(tilt, 0), 1)
    return np.where(np.isfinite(mass), mass, 0).astype(t.dtype), tilt.astype(t.dtype)


def sample_variance(t: Array) -> Array:
    """Variance [M] over all unvisited candidates of scores t [M, TAIL_SAMPLES] of the samples."""
    off = t - (_shares(t) * t).sum(axis=1, keepdims=True)
    return (_shares(t) * off * off).sum(axis=1)


def _shares(t: Array) -> Array:
    """Of the unvisited candidates, what each sample stands for, [TAIL_SAMPLES]."""
    return (2 * np.arange(TAIL_SAMPLES) + 1).astype(t.dtype) / t.dtype.type(TAIL_SAMPLES**2)


@quiet
def add_tail(
    rows: Array, state: tuple[Array, Array, Array], keys: Array, k: Array, moments: Moments, scale: float,
    softcap: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Queries ``rows`` [M, D] in the state (m [M], mass [M], acc [M, D]) also count ``keys`` [C], positions in k
    [Lk, D] in the order in which they would have been visited.

    Their values count as mean_value + tilt * covariance (scale * q), the regression of values on scores at the weighted
    mean score. Nothing is added where something is not finite.
    """
    m, mass, acc = state
    t = rows @ k[keys[sample_places(len(keys))]].T * scale  # [M, TAIL_SAMPLES]
    more, tilt = tail_weights(t, m + np.log(mass), len(keys), softcap)
    if not (np.isfinite(moments.mean_value).all() and np.isfinite(moments.covariance).all()):
        return state
    value = moments.mean_value + tilt[:, None] * (rows * scale @ moments.covariance.T)  # [M, D]
    adds = more > 0
    added = np.where(adds, mass * more, 0).astype(mass.dtype)  # [M]
    return m, mass + added, acc + np.where(adds[:, None], added[:, None] * value, 0).astype(acc.dtype)
