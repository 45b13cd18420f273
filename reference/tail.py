"""What candidates that a q tile did not visit count for: their mass by a sample, their values to first order or, as far
as halves of the sample agree, by the sample."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from ..spec import (
    LOG2E,
    TAIL_DOUBT,
    TAIL_EVIDENCE,
    TAIL_LIGHT,
    TAIL_REACH,
    TAIL_ROWS,
    TAIL_TRIFLE,
    moment_keys,
    moment_place,
    moment_samples,
    tail_samples,
)
from .dense import Array, capped, quiet

__all__ = [
    "Moments",
    "TailValues",
    "TailWeights",
    "add_tail",
    "at_most",
    "key_moments",
    "of_rows",
    "sample_places",
    "sample_variance",
    "tail_values",
    "tail_weights",
]


class Moments(NamedTuple):
    """Of keys and values among the leading ones."""

    mean_value: Array  # [D]
    covariance: Array  # [D of values, D of keys]


class TailWeights(NamedTuple):
    """Of M rows, what their samples say."""

    mass: Array  # [M] of all unvisited candidates, as a multiple of what the row has found
    tilt: Array  # [M] how far the mean score moves with the weights, over the variance of scores
    weight: Array  # [M, samples], in some unit
    carrying: Array  # [M] how many of them carry the weight
    alone: Array  # [M] above 0 where one carries it alone and weighs much of what the row has found, up to 1
    largest: Array  # [M] what the largest weighs by itself, like mass
    of_all: Array  # [M] mass if it speaks for others


class TailValues(NamedTuple):
    """Of M rows, what their unvisited values are."""

    value: Array  # [M, D]
    sampled: Array  # [M, D] the samples' own by their weights
    believed: Array  # [M] how far a value goes from the regression's to that
    most: Array  # [M] how far it would if both halves of the samples agreed
    # [M, TAIL_EVIDENCE] each: what samples of even and of odd number say beyond the regression.
    halves: tuple[Array, Array]
    may: Array  # [M] how far the samples' values may move a row's: by its square a row counts among its neighbours


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
    fall along the order. int64 [samples]; number i of n stands for (2 i + 1) / n**2 of them all."""
    n = tail_samples(left)
    odd = 2 * np.arange(n, dtype=np.int64) + 1
    return odd * odd * left // (4 * n**2)


@quiet
def tail_weights(t: Array, lse: Array, left: int, softcap: float) -> TailWeights:
    """Of rows with ``lse`` [M], from the uncapped scores t [M, samples].

    The mass is the sum of exp(score) that the samples stand for, less of it the fewer of them carry it: a sample that
    outweighs the others may be alone in its kind. One that carries the weight alone and weighs over TAIL_TRIFLE of what
    the row has found counts for itself instead. The tilt says how far the mean of t moves with these weights, over
    the variance of t: 1 if t is spread like a normal distribution, and kept within [0, 1]. Mass is 0 where something
    is not finite, and where a sample weighs more than 2 ** TAIL_REACH times all that the row has found.
    """
    share, size = _shares(t), capped(t, softcap) - lse[:, None]  # [samples], [M, samples]
    above = np.fmax(size.max(axis=1, keepdims=True), 0)  # [M, 1], the unit of weights: squares are finite
    weight = share * np.exp(size - above)  # [M, samples]
    total = weight.sum(axis=1)
    carrying = total * total / (weight * weight).sum(axis=1)  # samples
    spoken_for = carrying / (carrying + TAIL_DOUBT)
    # One that carries it alone and weighs much of what the row has found is no sample of others, but a key that comes
    # too late: it counts for itself.
    largest = np.exp(size.max(axis=1))
    alone = np.clip(largest / TAIL_TRIFLE - 1, 0, 1) * np.clip(2 - carrying, 0, 1)
    of_all = total * np.exp(above[:, 0]) * t.dtype.type(left) * spoken_for
    mass = np.where(alone > 0, (1 - alone) * of_all + alone * largest, of_all)
    mass = np.where(above[:, 0] * LOG2E > TAIL_REACH, 0, mass)
    off = t - (share * t).sum(axis=1, keepdims=True)
    variance = sample_variance(t)
    tilt = np.where(variance > 0, (weight * off).sum(axis=1) / (total * variance), 0)
    tilt = np.fmin(np.fmax(tilt, 0), 1)
    mass = np.where(np.isfinite(mass), mass, 0)
    rows = (x.astype(t.dtype) for x in (mass, tilt, weight, carrying, alone, largest, of_all))
    return TailWeights(*rows)


@quiet
def tail_values(found: TailWeights, values: Array, regressed: Array) -> TailValues:
    """Of the samples' ``values`` [samples, D] and, from the regression, ``regressed`` [M, D].

    The weighted mean of the samples' values is right but for noise, the regression has hardly any and may be wrong. How
    much of what is between them is no noise, samples of even and of odd number say by how far they agree: noise does
    not. TAIL_ROWS rows in turn are asked together, each by the square of what its samples may bring, as one row's own
    are too few to tell. Where nearly all samples carry the weight there is little to learn from it, and their mean is
    the noisier one. Rows to which hardly anything is to be added keep the regression, as do those in which one half has
    next to no weight, and all where a value is not finite, or squares of a row are beyond float32, which kernels sum
    in. A sample that counts for itself has its own value.
    """

    def mean(weight: Array, of: Array) -> Array:
        return (weight @ of) / weight.sum(axis=1, keepdims=True)

    even, odd = (
        mean(found.weight[:, first::2], values[first::2, :TAIL_EVIDENCE]) - regressed[:, :TAIL_EVIDENCE]
        for first in (0, 1)
    )
    agreed, both = (even * odd).sum(axis=1), ((even + odd) ** 2).sum(axis=1)  # [M]
    most, may = at_most(found)
    both = np.where(both <= np.finfo(np.float32).max, both, np.nan)
    agreed, both = of_rows(may, agreed), of_rows(may, both)
    agreement = np.where(agreed > 0, np.fmax(np.minimum(4 * agreed / both, 1), 0), 0)  # [M]
    believed = np.fmax(agreement * most, found.alone)
    if not np.isfinite(values).all():
        most, believed = np.zeros_like(most), np.zeros_like(believed)
    sampled = np.where(np.isfinite(values), values, 0)
    sampled = mean(found.weight, sampled)
    moved = np.where(believed[:, None] > 0, believed[:, None] * (sampled - regressed), 0)
    return TailValues((regressed + moved).astype(regressed.dtype), sampled, believed, most, (even, odd), may)


def at_most(found: TailWeights) -> tuple[Array, Array]:
    """How far the samples' values count if both halves agree [M], and how far they may move a row's then [M].

    Nothing where all scores are equal: three quarters of the samples carry the weight then. Nor if little is added, or
    one half has next to no weight.
    """
    most = np.fmax(1 - found.carrying / (0.75 * found.weight.shape[1]), 0)
    most = most * np.fmin(np.fmax(found.mass / TAIL_TRIFLE - 1, 0), 1)
    halves = [found.weight[:, first::2].sum(axis=1) for first in (0, 1)]  # [M]
    most = most * np.clip(np.fmin(*halves) / (TAIL_LIGHT * sum(halves)) - 1, 0, 1)
    return most, found.mass / (1 + found.mass) * most * (1 - found.alone)


def of_rows(may: Array, x: Array) -> Array:
    """Sums of x [M] over TAIL_ROWS rows in turn, each by the square of ``may`` [M], for each of these rows."""
    sums = np.add.reduceat(np.where(may > 0, may * may * x, 0), np.arange(0, len(x), TAIL_ROWS))
    return np.repeat(sums, TAIL_ROWS)[: len(x)]


def sample_variance(t: Array) -> Array:
    """Variance [M] over all unvisited candidates of scores t [M, samples]."""
    off = t - (_shares(t) * t).sum(axis=1, keepdims=True)
    return (_shares(t) * off * off).sum(axis=1)


def _shares(t: Array) -> Array:
    """Of the unvisited candidates, what each sample stands for, [samples]."""
    n = t.shape[1]
    return (2 * np.arange(n) + 1).astype(t.dtype) / t.dtype.type(n**2)


@quiet
def add_tail(
    rows: Array, state: tuple[Array, Array, Array], keys: Array, k: Array, v: Array, moments: Moments, scale: float,
    softcap: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Queries ``rows`` [M, D] in the state (m [M], mass [M], acc [M, D]) also count ``keys`` [C], positions in k and v
    [Lk, D] in the order in which they would have been visited.

    Their values count as `tail_values` says; the regression of values on scores at the weighted mean score is
    mean_value + tilt * covariance (scale * q). Nothing is added where something of it is not finite.
    """
    m, mass, acc = state
    at = keys[sample_places(len(keys))]
    t = rows @ k[at].T * scale  # [M, samples]
    found = tail_weights(t, m + np.log(mass), len(keys), softcap)
    if not (np.isfinite(moments.mean_value).all() and np.isfinite(moments.covariance).all()):
        return state
    regressed = moments.mean_value + found.tilt[:, None] * (rows * scale @ moments.covariance.T)  # [M, D]
    value = tail_values(found, v[at], regressed).value
    adds = found.mass > 0
    added = np.where(adds, mass * found.mass, 0).astype(mass.dtype)  # [M]
    return m, mass + added, acc + np.where(adds[:, None], added[:, None] * value, 0).astype(acc.dtype)
