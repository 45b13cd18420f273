"""All methods. A new one is a file beside this with its configuration and its launches, a file in reference/methods,
its kernels, and its name here."""

from __future__ import annotations

from .a_shape import AShapeConfig
from .base import MethodConfig
from .flex_prefill import FlexPrefillConfig
from .mean_pooling import MeanPoolingConfig
from .pbs import PBSConfig
from .sparge import SpargeConfig
from .vertical_slash import VerticalSlashConfig
from .xattention import XAttentionConfig

# `s2o_cupy.methods` has these names, too.
__all__ = [
    "AShapeConfig",
    "FlexPrefillConfig",
    "METHODS",
    "MeanPoolingConfig",
    "PBSConfig",
    "SpargeConfig",
    "VerticalSlashConfig",
    "XAttentionConfig",
]

METHODS: tuple[type[MethodConfig], ...] = (
    MeanPoolingConfig, PBSConfig, SpargeConfig, XAttentionConfig, FlexPrefillConfig, VerticalSlashConfig,
    AShapeConfig,
)  # fmt: skip
