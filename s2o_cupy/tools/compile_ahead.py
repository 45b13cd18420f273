"""Compiling kernels ahead, with or without a GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..arrays.lazy_cupy import import_cupy
from ..cuda import compiler
from ..cuda.compiler import ARCHITECTURES, CompiledKernel
from ..extras import remedy
from ..plan.kernels import Kernel
from ..spec import S2OError
from .catalogue import kernels_for, sample_for

__all__ = ["all_kernels", "compile_all", "sampled_kernels"]


@functools.lru_cache
def all_kernels(arch: str) -> tuple[Kernel, ...]:
    """Every kernel that a device of an architecture may be asked for."""
    return kernels_for(int(re.sub(r"\D", "", arch)))


@functools.lru_cache
def sampled_kernels(arch: str) -> tuple[Kernel, ...]:
    """Some of them, which stand for the others."""
    return sample_for(int(re.sub(r"\D", "", arch)))


def compile_all(
    architectures: Sequence[str] = ARCHITECTURES,
    progress: Callable[[int, int], None] | None = None,
    dtypes: Sequence[str] | None = None,
    head_dims: Sequence[int] | None = None,
    sample: bool = False,
) -> list[CompiledKernel]:
    """Compile every kernel for the named architectures into the cache folder that calls use.

    Needs CuPy and NVRTC, but no GPU. A kernel that is in the folder already is not compiled again. ``dtypes`` and
    ``head_dims`` (64, 128 or 256): only kernels of these, and those that are of none. ``sample``: only some, which
    stand for the others (tools/catalogue.py says which). ``progress`` is called with (done, total). Raises S2OError
    if CuPy or NVRTC is missing or a kernel does not compile; spills and warnings are in the result for the caller to
    judge.
    """
    unknown = [arch for arch in architectures if not re.fullmatch(r"sm_\d{2,3}[af]?", arch)]
    if unknown:
        raise ValueError(f"architectures has {unknown[0]!r}; accepted: names such as {', '.join(ARCHITECTURES)}")
    known = [(kernel, arch) for arch in architectures for kernel in (sampled_kernels if sample else all_kernels)(arch)]
    jobs = [
        (kernel, arch)
        for kernel, arch in known
        if (dtypes is None or kernel.dtype in dtypes or "{element}" not in (kernel.family.traits or ""))
        and (head_dims is None or kernel.head_dim in head_dims or "{head_dim}" not in (kernel.family.traits or ""))
    ]
    if known and not jobs:
        asked = [f"{name} {x}" for name, x in {"dtypes": dtypes, "head_dims": head_dims}.items() if x is not None]
        there = sorted({(kernel.dtype, kernel.head_dim) for kernel, _ in known})
        accepted = ", ".join(f"{dtype} of head_dim {head_dim}" for dtype, head_dim in there)
        of = " of the sample" if sample else ""
        raise ValueError(f"no kernel{of} has {' and '.join(asked)}; accepted: {accepted}")
    try:
        import_cupy()
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        why = error.__cause__ or error  # without import_cupy's own remedy, which is that of calls
        raise S2OError(f"compiling needs CuPy and NVRTC ({why}); remedy: {remedy('NVRTC')}") from error
    done: list[CompiledKernel] = []
    with ThreadPoolExecutor(compiler.threads()) as pool:
        for compiled in pool.map(lambda job: compiler.machine_code(*job), jobs):
            done.append(compiled)
            if progress:
                progress(len(done), len(jobs))
    return done
