"""All methods. A new one is a file beside this with its configuration and its launches, a file in reference/methods,
its kernels, and a line here."""

from __future__ import annotations

from .a_shape import AShapeConfig
from .base import MethodConfig
from .flex_prefill import FlexPrefillConfig
from .mean_pooling import MeanPoolingConfig
from .pbs import PBSConfig
from .sparge import SpargeConfig
from .vertical_slash import VerticalSlashConfig
from .xattention import XAttentionConfig

__all__ = ["METHODS"]

METHODS: tuple[type[MethodConfig], ...] = (
    MeanPoolingConfig, PBSConfig, SpargeConfig, XAttentionConfig, FlexPrefillConfig, VerticalSlashConfig,
    AShapeConfig,
)  # fmt: skip
