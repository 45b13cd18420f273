"""What looks at attention from outside: inputs, metrics, diff, demo, pictures and the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import inputs, metrics
    from .comparing import compare
    from .diffing import diff
    from .sampled import error_per_head
    from .sparge_tuning import tune_sparge
    from .tuning import tune
    from .within_error import attention_within

__all__ = ["attention_within", "compare", "diff", "error_per_head", "inputs", "metrics", "tune", "tune_sparge"]

# Loaded where they are used: diff loads the reference.
_FILES = {
    "attention_within": "within_error",
    "compare": "comparing",
    "diff": "diffing",
    "error_per_head": "sampled",
    "tune": "tuning",
    "tune_sparge": "sparge_tuning",
}


def __getattr__(name: str) -> Any:
    if name in _FILES:
        return getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
    if name in ("inputs", "metrics"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
