"""CuPy, imported when it is first needed."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from typing import Any

from ..spec import S2OError

__all__ = ["import_cupy"]


def import_cupy() -> Any:
    if (imported := sys.modules.get("cupy")) is not None:
        return imported
    _prepare_cupy_cache()
    try:
        import cupy
    except ImportError as error:
        raise S2OError(
            'arrays on an NVIDIA GPU need CuPy: pip install "s2o_cupy[cuda12]" '
            f"(cuda13 for CUDA 13), or move them to the CPU ({error})"
        ) from error
    return cupy


def _prepare_cupy_cache() -> None:
    """CuPy makes its cache folder when it is imported, and cannot be imported where that fails: without a folder
    let it compile in memory."""
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return
    try:
        os.makedirs(os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache")), exist_ok=True)
    except OSError:
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        os.environ["CUPY_CACHE_DIR"] = tempfile.gettempdir()  # only looked at
