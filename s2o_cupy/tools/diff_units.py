"""Reference against GPU: the two keys that stand for each unit of ``rank="weight"``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..spec import Geometry

__all__ = ["wrong_means", "wrong_outliers"]

Array = Any  # numpy.ndarray
UNIT32 = 2.0**-24


def wrong_means(got: Array, k: Array, geometry: Geometry, unit: float, smallest: float) -> tuple[Array, Array, Array]:
    """Mean keys as they are and as they should be, [B, Hkv, U, D], and what each may be off by: a float32 mean, rounded
    once to the input's dtype. ``got`` [B, Hkv, U, 2, D], k in float64; ``unit`` of the dtype."""
    from ..reference import s2o

    want, magnitude = (s2o.unit_keys(x, geometry)[..., 0, :] for x in (k, np.abs(k)))
    return got[..., 0, :], want, magnitude * (unit + UNIT32 * geometry.unit) + smallest


def wrong_outliers(got: Array, k: Array, geometry: Geometry) -> Array:
    """By what share of the allowed margin each unit's outlier [B, Hkv, U] is nearer to the mean than another of its
    keys; infinite where it is none of them.

    Squared distances are sums of D products in float32, from a mean that is off by the rounding of a sum.
    """
    from ..reference.ordering import outlier_distances

    batch, kv_heads, _, head_dim = k.shape
    keys = k[:, :, : geometry.units * geometry.unit].reshape(batch, kv_heads, geometry.units, geometry.unit, head_dim)
    chosen = got[..., 1:, :].astype(np.float64)  # [B, Hkv, U, 1, D]
    is_key = ((keys == chosen) | (np.isnan(keys) & np.isnan(chosen))).all(axis=-1)  # [B, Hkv, U, unit]
    with np.errstate(invalid="ignore", over="ignore"):
        mean = keys.mean(axis=3, keepdims=True)
        distances = outlier_distances(keys, mean)  # [B, Hkv, U, unit]
        off_mean = np.abs(keys).mean(axis=3, keepdims=True) * UNIT32 * (geometry.unit + 1)
        largest = distances.max(axis=-1)
        by_mean = 2 * (np.abs(keys - mean) * off_mean).sum(axis=-1).max(axis=-1)
        allowed = 2 * (by_mean + largest * (head_dim + 4) * UNIT32) + 1e-30
        nearest = np.where(is_key, distances, -np.inf).max(axis=-1)  # of equal keys any
        part = (largest - nearest) / allowed
    is_known = np.isfinite(allowed) & (largest >= 0) & (largest < np.finfo(np.float32).max)  # as float32 has it
    part = np.where(is_known, part, 0)
    return np.where(is_key.any(axis=-1), part, np.inf)
