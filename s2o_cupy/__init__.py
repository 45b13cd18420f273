"""S2O attention: early stopping along an online permutation of keys, in CUDA kernels and in NumPy.

S2O and attention by schedules are here; published methods in `s2o_cupy.methods`, NSA in `s2o_cupy.nsa`, what looks at
attention from outside in `s2o_cupy.tools`, and frameworks' and servers' plug-ins in `s2o_cupy.integrations`. Importing
this touches no GPU and imports none of CuPy, PyTorch and JAX.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import _source_tree as _source_tree
from .api.attention import s2o_attention
from .api.gather import gather_attention, gather_attention_paged
from .api.gather_varlen import gather_attention_varlen
from .api.paged import s2o_attention_paged
from .api.varlen import s2o_attention_varlen
from .caches import clear_cache
from .merge import merge_states
from .schedules.schedule import Schedule
from .schedules.stats import GatherStats
from .spec import S2OConfig, S2OError
from .stats import S2OStats

if TYPE_CHECKING:
    from . import methods, nsa, tools

__all__ = [
    "GatherStats",
    "S2OConfig",
    "S2OError",
    "S2OStats",
    "Schedule",
    "__version__",
    "clear_cache",
    "gather_attention",
    "gather_attention_paged",
    "gather_attention_varlen",
    "merge_states",
    "methods",
    "nsa",
    "s2o_attention",
    "s2o_attention_paged",
    "s2o_attention_varlen",
    "tools",
]
__version__ = "0.1.0"
_FOLDERS = ("methods", "nsa", "tools")


def __getattr__(name: str) -> Any:
    """`methods`, `nsa`, `tools` and `integrations` are loaded where they are used. Of what they have it is said where
    it is."""
    if name in (*_FOLDERS, "integrations"):
        return importlib.import_module(f".{name}", __name__)
    where = None if name.startswith("_") else _where(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    said = f"{__name__} has no {name}; it is {where}"
    # `from s2o_cupy import` asks first whether there is such an attribute, and loses an AttributeError's words.
    if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
        raise ImportError(said, name=__name__)
    raise AttributeError(said)


def _where(name: str) -> str | None:
    """In words, and how it is imported."""
    for folder in _FOLDERS:
        if name in importlib.import_module(f".{folder}", __name__).__all__:
            return f"in {__name__}.{folder}: from {__name__}.{folder} import {name}"
    integrations = importlib.import_module(".integrations", __name__)
    found = [f"from {integrations.__name__}.{x} import {name}" for x in integrations.modules_with(name)]
    if found:
        return f"in {integrations.__name__}: {', or '.join(found)}"
    module = f"{integrations.__name__}.{name}"
    return f"{module}: import {module}" if name in integrations.MODULES else None
