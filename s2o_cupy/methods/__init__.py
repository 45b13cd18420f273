"""Published methods, which choose blocks of keys, and methods of one's own: a file a method has its configuration and
its launches."""

from .a_shape import AShapeConfig
from .attention import select, sparse_attention
from .blasst import BLASSTConfig
from .flex_prefill import FlexPrefillConfig
from .mean_pooling import MeanPoolingConfig
from .paged import sparse_attention_paged
from .pbs import PBSConfig
from .sparge import SpargeConfig
from .varlen import sparse_attention_varlen
from .vertical_slash import VerticalSlashConfig
from .xattention import XAttentionConfig

__all__ = [
    "AShapeConfig",
    "BLASSTConfig",
    "FlexPrefillConfig",
    "MeanPoolingConfig",
    "PBSConfig",
    "SpargeConfig",
    "VerticalSlashConfig",
    "XAttentionConfig",
    "select",
    "sparse_attention",
    "sparse_attention_paged",
    "sparse_attention_varlen",
]
