"""S2O attention: early stopping along an online permutation of keys, in CUDA kernels and in NumPy.

Importing this touches no GPU and imports none of CuPy, PyTorch and JAX.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .attention import s2o_attention
from .merge import merge_states
from .paged import s2o_attention_paged
from .spec import S2OConfig, S2OError
from .stats import S2OStats
from .varlen import s2o_attention_varlen

if TYPE_CHECKING:
    from .diffing import diff

__all__ = [
    "S2OConfig",
    "S2OError",
    "S2OStats",
    "__version__",
    "diff",
    "merge_states",
    "s2o_attention",
    "s2o_attention_paged",
    "s2o_attention_varlen",
]
__version__ = "0.1.0"

# In a source checkout raw_kernels/ and reference/ stand beside this folder; installed, inside it.
_here = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_here, "raw_kernels")):
    __path__.append(os.path.dirname(_here))


def __getattr__(name: str) -> Any:
    if name == "diff":  # only where it is used: it loads the reference
        from .diffing import diff

        return diff
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
