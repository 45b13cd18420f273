"""From a kernel to machine code: rendered, compiled by NVRTC, cached and loaded.

A kernel's text is its source file with every ``#include "..."`` written out, the spec's constants before it and one
instantiation after it, so that the cache, which keys on the text, sees every change of every file.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from ..arrays.lazy_cupy import import_cupy
from ..plan.kernels import Kernel
from ..plan.paths import path_of
from ..spec import KERNEL_CONSTANTS, S2OError
from . import cubin_cache

__all__ = [
    "ARCHITECTURES", "CompiledKernel", "architecture_path", "check_device", "device_architecture", "load",
    "load_all", "local_architectures", "machine_code", "render", "threads",
]  # fmt: skip

ENTRY = "s2o_{function}"
OPTIONS = ("-std=c++17", "-default-device", "-ftz=true")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
ELEMENTS = {"float16": "Float16", "bfloat16": "Bfloat16"}

_INCLUDE = re.compile(r'^#include "([\w./]+)"\s*$')


def _with_includes(name: str, seen: set[str]) -> Iterator[str]:
    """Lines of a kernel source with its own headers written out, each once."""
    if name in seen:
        return
    seen.add(name)
    text = resources.files("s2o_cupy.raw_kernels").joinpath(name).read_text(encoding="utf-8")
    yield f'#line 1 "{name}"'
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include:
            yield from _with_includes(include.group(1), seen)
            yield f'#line {number + 1} "{name}"'
        else:
            yield "" if line == "#pragma once" else line


def render(kernel: Kernel) -> str:
    """The complete CUDA C++ text of a kernel."""
    family = kernel.family
    constants = "\n".join(f"inline constexpr int {name} = {value};" for name, value in KERNEL_CONSTANTS.items())
    constants += f"\ninline constexpr bool kSoftcap = {str(kernel.softcap).lower()};"
    constants += f"\ninline constexpr bool kDrawn = {str(kernel.drawn).lower()};"
    fields = {
        "element": f"s2o::{ELEMENTS[kernel.dtype]}",
        "head_dim": kernel.head_dim,
        "block_m": kernel.block_m,
        "stages": kernel.stages,
        "aligned": str(kernel.aligned).lower(),
        "paged": str(kernel.paged).lower(),
        "step": kernel.step,
        "group": kernel.group,
        "clusters": kernel.clusters,
        "threads": kernel.threads,
    }
    traits = f"s2o::{family.traits.format(**fields)}" if family.traits else "void"
    blocks = str(family.blocks_per_multiprocessor).format(**fields)
    cluster = f" __cluster_dims__({family.cluster}, 1, 1)" if family.cluster > 1 else ""
    shared = family.shared.format(traits=traits)
    call = kernel.function if family.traits is None else f"{kernel.function}<{traits}>"
    if kernel.shared_bytes == 0:
        check, body = "", f"  s2o::{call}(params);"
    else:
        check = (
            f"static_assert(sizeof({shared}) == {kernel.shared_bytes - kernel.open_bytes}, "
            '"the plan counts the shared memory differently");'
        )
        body = (
            "  extern __shared__ __align__(1024) unsigned char shared[];\n"
            f"  s2o::{call}(params, *reinterpret_cast<{shared}*>(shared));"
        )
    return "\n".join(
        [
            f"namespace s2o {{\nnamespace spec {{\n{constants}\n}}\n}}",
            *_with_includes(family.source, set()),
            f'#line 1 "{kernel.name}"',
            check,
            f"static_assert(sizeof(s2o::{family.params_type}) == {family.params.itemsize}, "
            '"plan/params.py lays the parameters out differently");',
            f'extern "C" __global__ void __launch_bounds__({kernel.threads}, {blocks}){cluster}',
            f"{ENTRY.format(function=kernel.function)}(const __grid_constant__ s2o::{family.params_type} params) {{",
            body,
            "}",
            "",
        ]
    )


def architecture_path(compute_capability: int) -> str:
    """Which kernels a device runs: the name of the fastest path, or "unsupported"."""
    path = path_of(compute_capability)
    return "unsupported" if path is None else path.name


def check_device(compute_capability: int, driver_version: int, runtime_version: int) -> None:
    """Raise S2OError, in one sentence with the remedy, if the device cannot run the kernels.

    ``compute_capability`` as 90 for 9.0; versions as CUDA writes them, 12040 for 12.4.
    """
    if path_of(compute_capability) is None:
        raise S2OError(
            f"the GPU has compute capability {compute_capability // 10}.{compute_capability % 10}, and the kernels "
            'need 8.0 or newer (Ampere); use backend="numpy" with arrays on the CPU'
        )
    if driver_version // 1000 < runtime_version // 1000:
        raise S2OError(
            f"the NVIDIA driver supports CUDA {driver_version // 1000}.{driver_version % 1000 // 10}, and the "
            f"installed CuPy needs CUDA {runtime_version // 1000}; update the driver or install the CuPy that "
            f"matches it (cupy-cuda{driver_version // 1000}x)"
        )


# --- Machine code: from the cache folder, or from NVRTC ---
@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's machine code for an architecture, and what NVRTC said of it."""

    name: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...]
    seconds: float  # that NVRTC took, in this process or in the one that filled the cache
    code: bytes = field(default=b"", repr=False)


def _options(kernel: Kernel, arch: str) -> tuple[str, ...]:
    return (f"-arch={kernel.family.arch or arch}", *OPTIONS)


@functools.lru_cache
def _nvrtc_build() -> str:
    """NVRTC's own name of its build: two of the same version may compile differently."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram("", "build.cu", [], [])
    try:
        nvrtc.compileProgram(program, ["-arch=compute_80"])
        ptx: bytes = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return "\n".join(line for line in ptx.decode().splitlines() if line.startswith("//"))


def machine_code(kernel: Kernel, arch: str) -> CompiledKernel:
    """A kernel for ``arch``, "sm_90a" or, for a driver to translate, "compute_90"; compiled if no process has yet."""
    text, options = render(kernel), _options(kernel, arch)
    name = cubin_cache.key(text, options, _nvrtc_build())
    if found := cubin_cache.read(name):
        facts = {**found.facts, "warnings": tuple(found.facts["warnings"])}
        return CompiledKernel(kernel.name, arch, shared_bytes=kernel.shared_bytes, code=found.code, **facts)
    compiled = _compile(kernel, arch, text, options)
    facts = {name: getattr(compiled, name) for name in ("registers", "spill_bytes", "warnings", "seconds")}
    cubin_cache.write(name, cubin_cache.Entry(compiled.code, facts))
    return compiled


def _compile(kernel: Kernel, arch: str, text: str, options: Sequence[str]) -> CompiledKernel:
    from cupy.cuda import nvrtc

    start = time.perf_counter()
    program = nvrtc.createProgram(text, f"{kernel.name}.cu", [], [])
    try:
        options = [*options, "--ptxas-options=-v"]  # report registers and spills
        if nvrtc.getVersion() >= (12, 9):
            options.append("--no-cache")  # a kernel from NVRTC's own cache comes without ptxas' report
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
        code = (nvrtc.getPTX if options[0].startswith("-arch=compute_") else nvrtc.getCUBIN)(program)
    except nvrtc.NVRTCError as error:
        raise S2OError(f"{kernel.name} does not compile for {arch}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    count = lambda pattern: sum(map(int, re.findall(pattern, log)))  # noqa: E731
    registers = count(r"Used (\d+) registers")
    # ptxas prints what it did about serialised wgmma (C7510 ...) and ignored setmaxnreg (C7508) as warnings.
    warnings = [line for line in log.splitlines() if re.search(r"\bC75\d\d\b|ptxas\s+warning", line)]
    if registers == 0:
        warnings.append("ptxas reported nothing, so spills are unknown")
    return CompiledKernel(
        name=kernel.name,
        arch=arch,
        registers=registers,
        spill_bytes=count(r"(\d+) bytes spill stores") + count(r"(\d+) bytes spill loads"),
        shared_bytes=kernel.shared_bytes,
        warnings=tuple(warnings),
        seconds=time.perf_counter() - start,
        code=code,
    )


def threads() -> int:
    """Compilations at a time: NVRTC takes a core for each and keeps no thread of Python's waiting."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- Kernels for calls ---
_lock = threading.Lock()
_loaded: dict[tuple[Kernel, int], Any] = {}
_compiling: dict[tuple[Kernel, str], Future[CompiledKernel]] = {}  # what some thread is about to load


def device_architecture(compute_capability: int, supported: Sequence[int]) -> str:
    """What NVRTC, which knows the ``supported`` compute capabilities, compiles a device's kernels for."""
    family = [known for known in supported if known // 10 == compute_capability // 10 and known <= compute_capability]
    if not family:
        # PTX, which the driver translates for the device it was compiled for and for every newer one.
        return f"compute_{max((known for known in supported if known <= compute_capability), default=max(supported))}"
    best = max(family)
    return f"sm_{best}a" if best == compute_capability and best >= 90 else f"sm_{best}"


@functools.lru_cache
def _architecture_of(device: int) -> str:
    import cupy

    return device_architecture(
        int(cupy.cuda.Device(device).compute_capability), tuple(cupy.cuda.nvrtc.getSupportedArchs())
    )


def load(kernel: Kernel, device: int) -> Any:
    """The compiled kernel on a device (which must be current): a cupy.cuda.function.Function."""
    return load_all([kernel], device)[0]


def load_all(kernels: Sequence[Kernel], device: int) -> list[Any]:
    """The compiled kernels on a device (which must be current), from memory, the cache folder or NVRTC.

    Several are compiled at a time. One that another thread is compiling is waited for.
    """
    missing = [kernel for kernel in dict.fromkeys(kernels) if (kernel, device) not in _loaded]
    if missing:
        arch = _architecture_of(device)
        with ThreadPoolExecutor(min(len(missing), threads()), "s2o-compile") as pool:
            with _lock:
                waiting = {}
                for kernel in missing:
                    if (kernel, device) not in _loaded:
                        if (kernel, arch) not in _compiling:
                            _compiling[kernel, arch] = pool.submit(machine_code, kernel, arch)
                        waiting[kernel] = _compiling[kernel, arch]
            try:
                for kernel, future in waiting.items():
                    compiled = future.result()
                    with _lock:
                        if (kernel, device) not in _loaded:
                            _loaded[kernel, device] = _function(kernel, compiled.code)
            finally:
                with _lock:
                    for kernel, future in waiting.items():
                        if _compiling.get((kernel, arch)) is future:
                            del _compiling[kernel, arch]
    return [_loaded[kernel, device] for kernel in kernels]


def _function(kernel: Kernel, code: bytes) -> Any:
    from cupy.cuda import driver, function

    module = function.Module()
    module.load(code)
    loaded = module.get_function(ENTRY.format(function=kernel.function))
    if kernel.shared_bytes > 48 * 1024:
        which = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(loaded.ptr, which, kernel.shared_bytes)
    return loaded


def local_architectures() -> list[str]:
    """What calls compile for on this machine's GPUs that can run the kernels; none without CuPy or a GPU."""
    try:
        cupy = import_cupy()
        devices = range(cupy.cuda.runtime.getDeviceCount())
        usable = [x for x in devices if path_of(int(cupy.cuda.Device(x).compute_capability)) is not None]
        return list(dict.fromkeys(_architecture_of(x) for x in usable))
    except Exception:  # no driver, or an S2OError without CuPy
        return []
