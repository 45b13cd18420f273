"""CuPy, imported when it is first needed."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Any

from ..extras import remedy
from ..spec import S2OError

__all__ = ["import_cupy"]

_lock = threading.Lock()
_whole: Any = None  # CuPy, once all of it is there


def import_cupy() -> Any:
    global _whole
    imported = sys.modules.get("cupy")
    if imported is not None and (imported is _whole or not _is_being_imported(imported)):
        _whole = imported
        return imported
    with _lock:
        if "cupy" not in sys.modules and _cache_folder_is_missing():
            _keep_cupys_kernels_in_memory()
        try:
            import cupy
        except ImportError as error:
            raise S2OError(
                f"arrays on an NVIDIA GPU need CuPy ({error}); remedy: {remedy('CuPy')}, or move them to the CPU"
            ) from error
        except OSError as error:
            raise S2OError(
                f"CuPy cannot be imported ({error}); set CUPY_CACHE_DIR to a folder that can be written"
            ) from error
    return cupy


def _is_being_imported(module: Any) -> bool:
    """By another thread, so that not all of it is there yet."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _cache_folder_is_missing() -> bool:
    """Whether the folder of kernels that CuPy makes when it is imported cannot be made."""
    try:
        os.makedirs(os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache")), exist_ok=True)
    except OSError:
        return True
    return False


def _keep_cupys_kernels_in_memory() -> None:
    """Have CuPy, which is imported next, do without its folder.

    CuPy 14.2 cannot be imported where it cannot make the folder, whatever CUPY_CACHE_IN_MEMORY says, and the
    environment is the process's own. So the one module of CuPy's that makes it, which imports no other of them, is
    loaded ahead under its name and told that a folder may be missing. Other versions are left as they are.
    """
    name = "cupy.cuda._compiler_cache"
    package = importlib.util.find_spec("cupy")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    for file in (Path(folder, "cuda", "_compiler_cache.py") for folder in folders):
        spec = importlib.util.spec_from_file_location(name, file)
        if not file.is_file() or spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        on_disk = getattr(module, "DiskKernelCacheBackend", None)
        if on_disk is None:
            return

        class InMemory(on_disk):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                """Makes no folder."""

            def load(self, name: str) -> bytes | None:
                return None

            def save(self, name: str, cubin: bytes, source: str) -> None:
                """Nowhere: CuPy remembers a kernel that this process has loaded."""

        module.DiskKernelCacheBackend = InMemory  # type: ignore[attr-defined]
        sys.modules[name] = module
        return
