"""S2O attention: early stopping along an online permutation of keys, in CUDA kernels and in NumPy.

Importing this touches no GPU and imports none of CuPy, PyTorch and JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _source_tree as _source_tree
from .api.attention import s2o_attention
from .api.gather import gather_attention, gather_attention_paged
from .api.paged import s2o_attention_paged
from .api.varlen import s2o_attention_varlen
from .caches import clear_cache
from .merge import merge_states
from .schedules.schedule import Schedule
from .schedules.stats import GatherStats
from .spec import S2OConfig, S2OError
from .stats import S2OStats

if TYPE_CHECKING:
    from .tools import inputs, metrics
    from .tools.diffing import diff

__all__ = [
    "GatherStats",
    "S2OConfig",
    "S2OError",
    "S2OStats",
    "Schedule",
    "__version__",
    "clear_cache",
    "diff",
    "gather_attention",
    "gather_attention_paged",
    "inputs",
    "merge_states",
    "metrics",
    "s2o_attention",
    "s2o_attention_paged",
    "s2o_attention_varlen",
]
__version__ = "0.1.0"

_LAZY = ("diff", "inputs", "metrics")  # loaded where they are used: diff loads the reference


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "diff":
        return importlib.import_module(".tools.diffing", __name__).diff
    return importlib.import_module(f".tools.{name}", __name__)
