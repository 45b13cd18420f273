"""A-shape's keys: `s2o_cupy.methods.a_shape` says what they are."""

from __future__ import annotations

import numpy as np

from ...methods.a_shape import BLOCK, AShapeConfig
from ..dense import Array

__all__ = ["attended"]


def attended(seqlen_q: int, seqlen_k: int, config: AShapeConfig) -> Array:
    """Which keys queries attend to, bool [Lq, Lk]."""
    offset = seqlen_k - seqlen_q
    query = np.arange(seqlen_q)[:, None]
    key = np.arange(seqlen_k)
    window = key >= query // BLOCK * BLOCK + offset - config.window
    return (key <= query + offset) & (window | (key < config.initial))
