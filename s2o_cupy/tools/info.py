"""What a bug report needs: versions, GPU, architecture path, CUDA graphs, cache folder. Never raises."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from ..arrays.lazy_cupy import import_cupy
from ..cuda import cubin_cache
from ..cuda.compiler import architecture_path, check_device
from ..cuda.graphs import ATTEMPTS, REPLAYED, GraphCache
from ..extras import remedy
from ..spec import S2OError

__all__ = ["gather", "gpu_problem", "table"]

# Distributions whose versions matter; read from metadata, so that none of them is imported.
PACKAGES = (
    "numpy", "scipy", "ml_dtypes", "array-api-compat", "cupy-cuda12x", "cupy-cuda13x", "cupy",
    "cuda-pathfinder", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "torch", "jax", "jaxlib",
)  # fmt: skip


def gpu_problem() -> str | None:
    """Why the CUDA kernels cannot run here, with the remedy; None if they can."""
    try:
        cupy = import_cupy()
    except Exception as error:  # a broken CuPy raises more than ImportError
        return (
            f"CuPy cannot be imported ({_line(error.__cause__ or error)}); with an NVIDIA GPU: {remedy('CuPy')}"
        )
    try:
        if not cupy.is_available():
            return "no NVIDIA GPU with a working driver was found (nvidia-smi shows what the driver sees)"
        runtime = cupy.cuda.runtime
        versions = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        check_device(int(cupy.cuda.Device().compute_capability), *versions)
    except S2OError as error:
        return str(error)
    except Exception as error:
        return f"the CUDA driver does not work ({_line(error)}); remedy: update it"
    return None


def gather() -> dict[str, Any]:
    """Everything as plain values that JSON can hold; what cannot be found out is None."""
    return {
        "s2o_cupy": _try(_own_version),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _installed(name))},
        "cuda": _cuda(),
        "gpus": _try(_cupy_gpus) or _try(_smi_gpus) or [],
        "gpu_problem": _try(gpu_problem),
        "cuda_graphs": _try(_cuda_graphs),
        "cache_folder": _try(_cache_folder),
        "cache_problem": _try(cubin_cache.unwritable),
        "kernel_sources": _try(_kernel_sources),
    }


def table(found: dict[str, Any]) -> str:
    """:func:`gather`'s answer as lines of text."""
    rows = [(name, found[name]) for name in ("s2o_cupy", "python", "executable", "platform")]
    rows += list(found["packages"].items())
    rows += [(f"CUDA {name}", value) for name, value in found["cuda"].items()]
    for number, gpu in enumerate(found["gpus"]):
        rows.append((f"GPU {number}", ", ".join(f"{key} {value}" for key, value in gpu.items() if value)))
    rows += [
        ("GPU path", found["gpu_problem"] or "usable"),
        ("CUDA graphs", found["cuda_graphs"]),
        ("cache folder", found["cache_folder"]),
        *([("cache problem", found["cache_problem"])] if found["cache_problem"] else []),
        ("kernel sources", found["kernel_sources"]),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {'not found' if value is None else value}" for name, value in rows)


def _try(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:
        return None


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except Exception:  # not installed, or metadata that cannot be read
        return None


def _own_version() -> str:
    from .. import __version__

    return __version__


def _cuda() -> dict[str, Any]:
    """Versions as 12.9; None without CuPy, driver or library."""

    def runtime(name: str) -> str | None:
        import cupy

        version = int(getattr(cupy.cuda.runtime, name)())
        return f"{version // 1000}.{version % 1000 // 10}" if version else None

    def nvrtc() -> str:
        from cupy.cuda import nvrtc as library

        return "{}.{}".format(*library.getVersion())

    return {
        "driver": _try(lambda: runtime("driverGetVersion")),
        "runtime": _try(lambda: runtime("runtimeGetVersion")),
        "NVRTC": _try(nvrtc),
    }


def _cupy_gpus() -> list[dict[str, Any]]:
    import cupy

    gpus = []
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        major, minor = int(properties["major"]), int(properties["minor"])
        gpus.append(
            {
                "name": properties["name"].decode(),
                "compute_capability": f"{major}.{minor}",
                "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
                "architecture_path": architecture_path(major * 10 + minor),
            }
        )
    return gpus


def _smi_gpus() -> list[dict[str, Any]]:
    """From nvidia-smi: a GPU that CuPy is not there to see."""
    if not shutil.which("nvidia-smi"):
        return []
    fields = ("name", "compute_cap", "memory.total", "driver_version")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return [dict(zip(fields, line.split(", "), strict=True)) for line in text.splitlines() if line.strip()]


def _cuda_graphs() -> str:
    """Whether one that clears a few bytes can be captured and replayed on the current device; else why not."""
    cupy = import_cupy()
    zeros, graphs = cupy.cuda.alloc(512), GraphCache(cupy.cuda)
    for _ in range(2 * ATTEMPTS):
        said = graphs.run((zeros.ptr,), 0, lambda stream: cupy.cuda.runtime.memsetAsync(zeros.ptr, 0, 512, stream))
        if said == REPLAYED:
            cupy.cuda.runtime.streamSynchronize(0)
            return "usable"
    return said


def _cache_folder() -> str | None:
    """Where compiled kernels are kept; None: in memory only."""
    folder = cubin_cache.folder()
    return None if folder is None else str(folder)


def _kernel_sources() -> str:
    from importlib import resources

    return str(resources.files("s2o_cupy.raw_kernels"))
