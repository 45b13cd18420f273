"""Synthetic q, k, v whose attention (causal, scale 1/sqrt(head_dim)) shows one known pattern.

Each function takes (rng, length, heads, kv_heads, head_dim) and returns float32 q [H, L, D] and
k, v [Hkv, L, D]. Values are normal. Patterns that single out keys need a head_dim of about 32 or more,
so that random vectors are nearly orthogonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

__all__ = ["PATTERNS"]

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
Pattern = Callable[[np.random.Generator, int, int, int, int], Arrays]


def random(rng: np.random.Generator, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Normal entries everywhere: scores have variance 1."""
    q = rng.standard_normal((heads, length, head_dim), np.float32)
    k = rng.standard_normal((kv_heads, length, head_dim), np.float32)
    v = rng.standard_normal((kv_heads, length, head_dim), np.float32)
    return q, k, v


def diffuse(rng: np.random.Generator, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Every query attends to every key about equally: the worst case for sparse attention."""
    q, k, v = random(rng, length, heads, kv_heads, head_dim)
    return 0.1 * q, k, v


def sinks(rng: np.random.Generator, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """The first four keys hold nearly all the mass of every query."""
    return _marked(rng, length, heads, kv_heads, head_dim, lambda: np.arange(min(4, length)))


def stripes(rng: np.random.Generator, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """One key in 64, the first among them, holds nearly all the mass; which ones, depends on the KV head."""

    def pick() -> np.ndarray:
        others = rng.permutation(max(length - 1, 0))[: length // 64] + 1
        return np.concatenate([np.zeros(min(length, 1), np.int64), others])

    return _marked(rng, length, heads, kv_heads, head_dim, pick)


def slash(rng: np.random.Generator, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Query i attends to key i - d, with a distance d of its head's own (an induction head)."""
    q, k, v = random(rng, length, heads, kv_heads, head_dim)
    position = np.arange(length)
    for h in range(heads):
        distance = length * (2 * h + 1) // (4 * heads) + 1  # spread over the first half of the context
        target = np.maximum(position - distance, 0)
        q[h] = _aim(k[h * kv_heads // heads][target], _logit(length))
    return q, k, v


def local(rng: np.random.Generator, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Mass falls with distance, to nothing within about a hundred keys.

    Random Fourier features of the positions: q . k is a Gaussian of their distance.
    """
    _, _, v = random(rng, length, heads, kv_heads, head_dim)
    width = 48.0
    position = np.arange(length, dtype=np.float32)
    features = np.empty((kv_heads, length, head_dim), np.float32)
    for g in range(kv_heads):
        frequency = rng.standard_normal(head_dim // 2 + 1).astype(np.float32) / width
        angle = position[:, None] * frequency  # [L, D/2 + 1]
        features[g] = np.concatenate([np.cos(angle), np.sin(angle)], 1)[:, :head_dim]
    unit = features / np.linalg.norm(features, axis=-1, keepdims=True).clip(1e-6)
    amplitude = np.float32(math.sqrt(_logit(length) * math.sqrt(head_dim)))
    k = amplitude * unit
    return np.repeat(k, heads // kv_heads, 0), k, v


def needle(rng: np.random.Generator, length: int, heads: int, kv_heads: int, head_dim: int) -> Arrays:
    """Diffuse, but the last eighth of the queries look for one key a third of the way in, and find it."""
    q, k, v = diffuse(rng, length, heads, kv_heads, head_dim)
    seekers = slice(length - length // 8, length)
    for h in range(heads):
        q[h, seekers] += _aim(k[h * kv_heads // heads, length // 3 : length // 3 + 1], _logit(length))
    return q, k, v


def _logit(length: int) -> float:
    """A score so far above the other keys' that e^-3 of the mass or less is left to ``length`` of them."""
    return math.log(max(length, 2)) + 5.0


def _aim(keys: np.ndarray, logit: float) -> np.ndarray:
    """Queries whose scaled score with their own key of ``keys`` [N, D] is ``logit``."""
    norm = np.square(keys).sum(-1, keepdims=True).clip(1e-6)
    return (keys * (logit * math.sqrt(keys.shape[-1]) / norm)).astype(np.float32)


def _marked(
    rng: np.random.Generator,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    pick: Callable[[], np.ndarray],
) -> Arrays:
    """Keys that ``pick`` names carry one direction that every query looks for."""
    q, k, v = random(rng, length, heads, kv_heads, head_dim)
    q, k = 0.3 * q, 0.3 * k
    direction = np.full(head_dim, 1 / math.sqrt(head_dim), np.float32)
    amplitude = np.float32(math.sqrt(_logit(length) * math.sqrt(head_dim)))
    q += amplitude * direction
    for g in range(kv_heads):
        k[g, pick()] += amplitude * direction
    return q, k, v


PATTERNS: Mapping[str, Pattern] = {
    f.__name__: f for f in (random, diffuse, sinks, stripes, slash, local, needle)
}
