"""Synthetic q, k, v whose attention (causal, scale 1/sqrt(head_dim)) shows one known pattern.

Each function takes (rng, length, heads, kv_heads, head_dim) and returns float32 q [H, L, D] and
k, v [Hkv, L, D]. Values are normal. Patterns that single out keys need a head_dim of about 32 or more,
so that random vectors are nearly orthogonal.

Arrays are of the framework and on the device of what ``rng`` draws: numpy.random.Generator, or anything with
its ``standard_normal`` and ``permutation`` for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from array_api_compat import array_namespace, device

__all__ = ["PATTERNS", "Random"]


class Random(Protocol):
    """The part of numpy.random.Generator that patterns need."""

    def standard_normal(self, size: Any, dtype: Any) -> Any: ...

    def permutation(self, x: int) -> Any: ...


Array = Any
Arrays = tuple[Array, Array, Array]
Pattern = Callable[[Random, int, int, int, int], Arrays]

SINKS = 4  # leading keys
BLOCK = 64  # keys of a block of `blocks`
WIDTH = 48.0  # of the Gaussian of `local`, in keys
# Of the heads of `mixture`: how the scores of all keys spread, and the mass of sink and neighbours, each over theirs.
MIXTURE = ((0.7, 0.5, 0.5), (1.5, 1.0, 2.0), (2.0, 1.0, 0.5), (2.5, 0.5, 0.5))


def random(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Normal entries everywhere: scores have variance 1."""
    q = rng.standard_normal((heads, length, head_dim), np.float32)
    k = rng.standard_normal((kv_heads, length, head_dim), np.float32)
    v = rng.standard_normal((kv_heads, length, head_dim), np.float32)
    return q, k, v


def diffuse(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Every query attends to every key about equally: the worst case for sparse attention."""
    q, k, v = random(rng, length, heads, kv_heads, head_dim)
    q *= 0.1
    return q, k, v


def sinks(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """The first four keys hold nearly all the mass of every query."""
    return _marked(rng, length, heads, kv_heads, head_dim, SINKS, 0)


def stripes(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """One key in 64, the first among them, holds nearly all the mass; which ones, depends on the KV head."""
    return _marked(rng, length, heads, kv_heads, head_dim, 1, length // 64)


def slash(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Query i attends to key i - d, with a distance d of its head's own (an induction head)."""
    return _slashes(rng, length, heads, kv_heads, head_dim, 1)


def slashes(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Query i attends to three keys i - d, with distances d of its head's own."""
    return _slashes(rng, length, heads, kv_heads, head_dim, 3)


def local(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Mass falls with distance, to nothing within about a hundred keys.

    Random Fourier features of the positions: q . k is a Gaussian of their distance.
    """
    _, _, v = random(rng, length, heads, kv_heads, head_dim)
    k = _positions(rng, v)
    k *= math.sqrt(_logit(length) * math.sqrt(head_dim))
    return _of_kv_heads(k, heads), k, v


def blocks(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Keys come in blocks of 64; a query attends to its own block and to an earlier one that its block names."""
    q, k, v = random(rng, length, heads, kv_heads, head_dim)
    q *= 0.3
    k *= 0.3
    count = -(-length // BLOCK)
    codes = rng.standard_normal((kv_heads, count, head_dim), np.float32)
    own = _arange(k, length) // BLOCK
    earlier = rng.permutation(count) % _arange(k, count).clip(1)  # of each block
    for g in range(kv_heads):
        k[g] += codes[g][own]
    for h in range(heads):
        aim = _aim(codes[h * kv_heads // heads], _logit(length))
        q[h] += aim[own] + aim[earlier[own]]
    return q, k, v


def needle(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Diffuse, but the last eighth of the queries look for one key a third of the way in, and find it."""
    q, k, v = diffuse(rng, length, heads, kv_heads, head_dim)
    seekers = slice(length - length // 8, length)
    for h in range(heads):
        q[h, seekers] += _aim(k[h * kv_heads // heads, length // 3 : length // 3 + 1], _logit(length))
    return q, k, v


def mixture(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Nearer to a trained model than the others: a query divides its mass between sinks, its neighbourhood and all
    keys, which differ in importance. Four kinds of heads take turns, from an almost even spread to a peaked one.

    The shares hardly depend on the length. A key has one entry that marks a sink, one for its importance, a third
    for its position; the rest is noise. Values have a mean.
    """
    q, k, v = random(rng, length, heads, kv_heads, head_dim)
    v += 0.3 * rng.standard_normal((kv_heads, 1, head_dim), np.float32)
    sink, importance = slice(0, 1), slice(1, 2)
    place = slice(2, 2 + head_dim // 3)
    k[..., sink] = 0
    k[:, :SINKS, sink] = 1
    k[..., place] = _positions(rng, k[..., place])
    root = math.sqrt(head_dim)
    for h in range(heads):
        spread, to_sink, to_neighbours = MIXTURE[h % len(MIXTURE)]
        everything = math.log(max(length, 2)) + spread**2 / 2 + 0.35  # ln of the mass of all keys
        near = everything + math.log(to_neighbours) - math.log(20)  # about 20 keys are that near
        q[h, :, sink] = root * (everything + math.log(to_sink) - math.log(SINKS))
        q[h, :, importance] = root * spread
        q[h, :, place] = root * near * k[h * kv_heads // heads, :, place]
    return q, k, v


def _logit(length: int) -> float:
    """A score so far above the other keys' that e^-3 of the mass or less is left to ``length`` of them."""
    return math.log(max(length, 2)) + 5.0


def _arange(like: Array, count: int) -> Array:
    return array_namespace(like).arange(count, device=device(like))


def _of_kv_heads(x: Array, heads: int) -> Array:
    """What each query head's KV head has of x [Hkv, ...]: [H, ...]."""
    return x[_arange(x, heads) * x.shape[0] // heads]


def _aim(keys: Array, logit: float) -> Array:
    """Queries whose scaled score with their own key of ``keys`` [N, D] is ``logit``."""
    norm = array_namespace(keys).sum(keys * keys, axis=-1, keepdims=True).clip(1e-6)
    return keys * (logit * math.sqrt(keys.shape[-1]) / norm)


def _positions(rng: Random, like: Array) -> Array:
    """Unit vectors [Hkv, L, D], the product of two of them a Gaussian of their distance."""
    xp = array_namespace(like)
    kv_heads, length, head_dim = like.shape
    position = xp.astype(_arange(like, length), xp.float32)
    features = xp.empty_like(like)
    for g in range(kv_heads):
        frequency = rng.standard_normal(head_dim // 2 + 1, np.float32) / WIDTH
        angle = position[:, None] * frequency  # [L, D/2 + 1]
        features[g] = xp.concat([xp.cos(angle), xp.sin(angle)], axis=1)[:, :head_dim]
    features /= xp.sqrt(xp.sum(features * features, axis=-1, keepdims=True)).clip(1e-6)
    return features


def _slashes(rng: Random, length: int, heads: int, kv_heads: int, head_dim: int, count: int) -> Arrays:
    """``count`` distances for each head, all of them spread over the first half of the context."""
    q, k, v = random(rng, length, heads, kv_heads, head_dim)
    position = _arange(k, length)
    for h in range(heads):
        keys = k[h * kv_heads // heads]
        q[h] = 0
        for i in range(h, heads * count, heads):
            distance = length * (2 * i + 1) // (4 * heads * count) + 1
            q[h] += _aim(keys[(position - distance).clip(0)], _logit(length))
    return q, k, v


def _marked(
    rng: Random, length: int, heads: int, kv_heads: int, head_dim: int, leading: int, others: int
) -> Arrays:
    """The ``leading`` keys, and so many ``others`` of each KV head, carry one direction that every query looks for."""
    q, k, v = random(rng, length, heads, kv_heads, head_dim)
    q *= 0.3
    k *= 0.3
    mark = math.sqrt(_logit(length) / math.sqrt(head_dim))  # each entry of the direction
    q += mark
    for g in range(kv_heads):
        k[g, :leading] += mark
        k[g, rng.permutation(max(length - leading, 0))[:others] + leading] += mark
    return q, k, v


PATTERNS: Mapping[str, Pattern] = {
    f.__name__: f for f in (random, diffuse, sinks, stripes, slash, slashes, local, blocks, needle, mixture)
}
