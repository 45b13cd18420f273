"""From a kernel to machine code: rendered, compiled by NVRTC, cached and loaded.

The only user of CuPy's RawModule. A kernel's text is its source file with every ``#include "..."``
written out, the spec's constants before it and one instantiation after it, so that CuPy's cache,
which keys on the text, sees every change of every file.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..plan.catalogue import kernels_for
from ..plan.kernels import Kernel
from ..spec import KERNEL_CONSTANTS, S2OError

__all__ = ["ARCHITECTURES", "CompiledKernel", "architecture_path", "check_device", "compile_all", "load", "render"]

ENTRY = "s2o_{function}"
OPTIONS = ("-std=c++17", "-default-device")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
ELEMENTS = {"float16": "Float16", "bfloat16": "Bfloat16"}
MIN_COMPUTE_CAPABILITY = 80

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
    fields = {
        "element": f"s2o::{ELEMENTS[kernel.dtype]}",
        "head_dim": kernel.head_dim,
        "block_m": kernel.block_m,
        "stages": kernel.stages,
        "aligned": str(kernel.aligned).lower(),
        "paged": str(kernel.paged).lower(),
        "step": kernel.step,
        "threads": kernel.threads,
    }
    traits = f"s2o::{family.traits.format(**fields)}" if family.traits else "void"
    blocks = str(family.blocks_per_multiprocessor).format(**fields)
    plain = dict.fromkeys(("key_strata", "key_middle"), "s2o::StrataShared")
    plain["key_order_head"] = "s2o::OrderHeadShared"
    shared = plain.get(kernel.function, f"{traits}::Shared")
    call = kernel.function if family.traits is None else f"{kernel.function}<{traits}>"
    # A struct that ends in an open array is only the least that is needed.
    compare = "<=" if family.source == "selection/rank_queries.cu" else "=="
    if kernel.shared_bytes == 0:
        check, body = "", f"  s2o::{call}(params);"
    else:
        check = (
            f"static_assert(sizeof({shared}) {compare} {kernel.shared_bytes}, "
            '"plan.py counts the shared memory differently");'
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
            '"kernels.py lays the parameters out differently");',
            f'extern "C" __global__ void __launch_bounds__({kernel.threads}, {blocks})',
            f"{ENTRY.format(function=kernel.function)}(const __grid_constant__ s2o::{family.params_type} params) {{",
            body,
            "}",
            "",
        ]
    )


def architecture_path(compute_capability: int) -> str:
    """Which kernels a device runs: "hopper" (wgmma, sm_90a), "portable" (mma.sync, sm_80 and newer), "unsupported"."""
    if compute_capability == 90:
        return "hopper"
    return "portable" if compute_capability >= MIN_COMPUTE_CAPABILITY else "unsupported"


def check_device(compute_capability: int, driver_version: int, runtime_version: int) -> None:
    """Raise S2OError, in one sentence with the remedy, if the device cannot run the kernels.

    ``compute_capability`` as 90 for 9.0; versions as CUDA writes them, 12040 for 12.4.
    """
    if compute_capability < MIN_COMPUTE_CAPABILITY:
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


@contextmanager
def _cache_in_memory() -> Iterator[None]:
    before = os.environ.get("CUPY_CACHE_IN_MEMORY")
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUPY_CACHE_IN_MEMORY"]
        else:
            os.environ["CUPY_CACHE_IN_MEMORY"] = before


_lock = threading.Lock()
_loaded: dict[tuple[Kernel, int], Any] = {}


def load(kernel: Kernel, device: int) -> Any:
    """The compiled kernel on a device (which must be current), from memory, CuPy's cache or NVRTC."""
    try:
        return _loaded[kernel, device]
    except KeyError:
        pass
    import cupy

    with _lock:
        if (kernel, device) in _loaded:
            return _loaded[kernel, device]
        entry = ENTRY.format(function=kernel.function)
        # CuPy adds the device's plain architecture; a kernel's own, sm_90a, comes first and wins.
        options = OPTIONS if kernel.family.arch is None else (f"-arch={kernel.family.arch}", *OPTIONS)
        module = cupy.RawModule(code=render(kernel), options=options)
        try:
            module.compile()
        except OSError:  # the cache folder cannot be written
            with _cache_in_memory():
                module = cupy.RawModule(code=render(kernel), options=options)
                module.compile()
        function = module.get_function(entry)
        if kernel.shared_bytes > 48 * 1024:
            function.max_dynamic_shared_size_bytes = kernel.shared_bytes
        _loaded[kernel, device] = function
        return function


# --- Compiling without a GPU ---
@dataclass(frozen=True)
class CompiledKernel:
    """What NVRTC says of a kernel for an architecture."""

    name: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...]
    seconds: float


def _compile(kernel: Kernel, arch: str) -> CompiledKernel:
    from cupy.cuda import nvrtc

    start = time.perf_counter()
    program = nvrtc.createProgram(render(kernel), f"{kernel.name}.cu", [], [])
    try:
        options = [f"-arch={kernel.family.arch or arch}", *OPTIONS, "-ftz=true", "--ptxas-options=-v"]
        if nvrtc.getVersion() >= (12, 9):
            options.append("--no-cache")  # a kernel from NVRTC's own cache comes without ptxas' report
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
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
    )


@functools.lru_cache
def all_kernels(arch: str) -> tuple[Kernel, ...]:
    """Every kernel that a device of an architecture may be asked for."""
    return kernels_for(int(re.sub(r"\D", "", arch)))


def compile_all(
    architectures: Sequence[str] = ARCHITECTURES, progress: Callable[[int, int], None] | None = None
) -> list[CompiledKernel]:
    """Compile every kernel for the named architectures with NVRTC; needs CuPy and NVRTC, but no GPU.

    ``progress`` is called with (done, total). Raises S2OError if CuPy or NVRTC is missing or a kernel
    does not compile; spills and warnings are in the result for the caller to judge.
    """
    unknown = [arch for arch in architectures if not re.fullmatch(r"sm_\d{2,3}[af]?", arch)]
    if unknown:
        raise ValueError(f"architectures has {unknown[0]!r}; accepted: names such as {', '.join(ARCHITECTURES)}")
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        raise S2OError(
            "compiling needs CuPy and NVRTC: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12"
        ) from error
    jobs = [(kernel, arch) for arch in architectures for kernel in all_kernels(arch)]
    done: list[CompiledKernel] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for compiled in pool.map(lambda job: _compile(*job), jobs):
            done.append(compiled)
            if progress:
                progress(len(done), len(jobs))
    return done
