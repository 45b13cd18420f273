"""Published methods, which choose blocks of keys, and methods of one's own: a file a method has its configuration and
its launches."""

from . import registry
from .attention import select, sparse_attention
from .blasst import BLASSTConfig
from .paged import sparse_attention_paged
from .registry import *  # noqa: F403
from .varlen import sparse_attention_varlen

__all__ = [
    "BLASSTConfig",
    "select",
    "sparse_attention",
    "sparse_attention_paged",
    "sparse_attention_varlen",
]
__all__ += [method.__name__ for method in registry.METHODS]
