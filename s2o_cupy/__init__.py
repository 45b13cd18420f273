"""S2O attention: early stopping along an online permutation of keys, in CUDA kernels and in NumPy.

Importing this touches no GPU and imports none of CuPy, PyTorch and JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _source_tree as _source_tree
from .api.attention import s2o_attention
from .api.gather import gather_attention, gather_attention_paged
from .api.nsa import nsa_attention, nsa_compress, nsa_select, selected_attention, window_attention
from .api.nsa_backward import selected_attention_backward
from .api.paged import s2o_attention_paged
from .api.select import select, sparse_attention
from .api.sparse_paged import sparse_attention_paged
from .api.sparse_varlen import gather_attention_varlen, sparse_attention_varlen
from .api.varlen import s2o_attention_varlen
from .caches import clear_cache
from .merge import merge_states
from .methods.a_shape import AShapeConfig
from .methods.flex_prefill import FlexPrefillConfig
from .methods.mean_pooling import MeanPoolingConfig
from .methods.pbs import PBSConfig
from .methods.sparge import SpargeConfig
from .methods.vertical_slash import VerticalSlashConfig
from .methods.xattention import XAttentionConfig
from .nsa.config import NSAConfig
from .own.blasst import BLASSTConfig
from .schedules.schedule import Schedule
from .schedules.stats import GatherStats
from .spec import S2OConfig, S2OError
from .stats import S2OStats

if TYPE_CHECKING:
    from .tools import inputs, metrics
    from .tools.compare import compare
    from .tools.diffing import diff
    from .tools.sampled import error_per_head
    from .tools.tune import tune
    from .tools.tune_sparge import tune_sparge
    from .tools.within_error import attention_within

__all__ = [
    "AShapeConfig",
    "BLASSTConfig",
    "FlexPrefillConfig",
    "GatherStats",
    "MeanPoolingConfig",
    "NSAConfig",
    "PBSConfig",
    "S2OConfig",
    "S2OError",
    "S2OStats",
    "Schedule",
    "SpargeConfig",
    "VerticalSlashConfig",
    "XAttentionConfig",
    "__version__",
    "attention_within",
    "clear_cache",
    "compare",
    "diff",
    "error_per_head",
    "gather_attention",
    "gather_attention_paged",
    "gather_attention_varlen",
    "inputs",
    "merge_states",
    "metrics",
    "nsa_attention",
    "nsa_compress",
    "nsa_select",
    "s2o_attention",
    "s2o_attention_paged",
    "s2o_attention_varlen",
    "select",
    "selected_attention",
    "selected_attention_backward",
    "sparse_attention",
    "sparse_attention_paged",
    "sparse_attention_varlen",
    "tune",
    "tune_sparge",
    "window_attention",
]
__version__ = "0.1.0"

# Functions and modules of the tools, loaded where they are used: diff loads the reference.
_LAZY = {
    "attention_within": "within_error",
    "compare": "compare",
    "diff": "diffing",
    "error_per_head": "sampled",
    "inputs": "",
    "metrics": "",
    "tune": "tune",
    "tune_sparge": "tune_sparge",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".tools.{_LAZY[name] or name}", __name__)
    return getattr(module, name) if _LAZY[name] else module
