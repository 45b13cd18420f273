"""The CUDA kernels: which there are, how one is compiled, cached and launched.

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

import numpy as np

from .spec import KERNEL_CONSTANTS, S2OError

__all__ = ["ARCHITECTURES", "CompiledKernel", "Kernel", "architecture_path", "compile_all", "load", "render"]

ENTRY = "s2o_{function}"
OPTIONS = ("-std=c++17", "-default-device")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
ELEMENTS = {"float16": "Float16", "bfloat16": "Bfloat16"}
MIN_COMPUTE_CAPABILITY = 80

TENSOR_MAP_BYTES = 128

# --- Parameter structs, field by field as in the .cu files; a static_assert compares the sizes. ---
_TENSOR = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")], align=True)
_GEOMETRY = [(name, "i4") for name in ("seqlen_q", "seqlen_k", "segment", "window", "is_causal", "head_dim")]
_PAGES = np.dtype([("table", "u8"), ("stride", "i8"), ("shift", "i4")], align=True)
_CHUNK = np.dtype(
    [
        *((name, "i4") for name in ("first_head", "heads", "first_segment", "segments", "shared_heads", "near_heads")),
        *((name, "i8") for name in ("stride", "growth")),
    ],
    align=True,
)
ATTENTION_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("q", "k", "v", "out")),
        *((name, "u8") for name in ("state", "lse", "q_order", "k_order", "visited", "next_work")),
        *((name, "u8") for name in ("remainder", "candidate_means")),
        ("geometry", np.dtype(_GEOMETRY)),
        ("chunk", _CHUNK),
        *((name, "i4") for name in ("heads", "kv_heads", "tiles", "steps_per_tile", "works")),
        ("scale_log2", "f4"),
        ("sign_mask", "u4"),
        ("tau", "f4"),
        ("cap_scale", "f4"),
        ("pages", _PAGES),
    ],
    align=True,
)


def _mapped(params: np.dtype[Any]) -> np.dtype[Any]:
    """Tensor maps of q, k and v, then ``params``. Maps are aligned to 64 bytes; the size is a multiple of that too."""
    maps = 3 * TENSOR_MAP_BYTES
    return np.dtype(
        {
            "names": ["maps", "attention"],
            "formats": [f"V{maps}", params],
            "offsets": [0, maps],
            "itemsize": maps + -(-params.itemsize // 64) * 64,
        }
    )


MAPPED_ATTENTION_PARAMS = _mapped(ATTENTION_PARAMS)
# Sequences of one launch of pass 1. With it parameters stay below the 4,096 bytes that every driver takes.
PACKED_SEQUENCES = 128
PACKED_SEQUENCE = np.dtype([(name, "i4") for name in ("begin_q", "begin_k", "seqlen_q", "seqlen_k", "near_heads")])
PACKED_ATTENTION_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        ("sequences", "i4"),
        ("first_work", "i4", (PACKED_SEQUENCES,)),
        ("of", PACKED_SEQUENCE, (PACKED_SEQUENCES,)),
    ],
    align=True,
)
MAPPED_PACKED_ATTENTION_PARAMS = _mapped(PACKED_ATTENTION_PARAMS)
RANK_QUERIES_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("q", "k")),
        *((name, "u8") for name in ("guide", "means", "q_order", "candidate_means", "remainder")),
        ("geometry", np.dtype(_GEOMETRY)),
        *((name, "i4") for name in ("heads", "kv_heads", "representatives", "run", "sort_slots")),
        *((name, "f4") for name in ("sign", "scale_log2")),
        ("pages", _PAGES),
    ],
    align=True,
)
REMAINDER_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("k", "v")),
        *((name, "u8") for name in ("sums", "candidate_means")),
        ("geometry", np.dtype(_GEOMETRY)),
        *((name, "i4") for name in ("kv_heads", "blocks", "first_block", "made", "aligned")),
        ("pages", _PAGES),
    ],
    align=True,
)
COLLECT_PAGES_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("k", "v")),
        *((name, "u8") for name in ("keys", "values")),
        *((name, "i4") for name in ("kv_heads", "seqlen_k", "row_chunks", "chunks")),
        ("pages", _PAGES),
    ],
    align=True,
)
RANK_KEYS_PARAMS = np.dtype(
    [
        ("k", _TENSOR),
        *((name, "u8") for name in ("means", "fine", "scores", "k_order", "front_scores", "middle", "middle_scores")),
        ("geometry", np.dtype(_GEOMETRY)),
        ("chunk", _CHUNK),
        *((name, "i4") for name in ("heads", "kv_heads", "representatives", "run")),
        *((name, "i4") for name in ("row_blocks", "key_blocks", "strata_blocks")),
        ("scale_log2", "f4"),
        ("pages", _PAGES),
    ],
    align=True,
)
RANK_FINE_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("q", "k")),
        *((name, "u8") for name in ("deficits", "fine", "norms", "scores")),
        ("geometry", np.dtype(_GEOMETRY)),
        ("chunk", _CHUNK),
        *((name, "i4") for name in ("heads", "kv_heads", "representatives", "run", "survey_run")),
        *((name, "i4") for name in ("first_ordered", "surveys", "key_blocks", "aligned")),
        *((name, "f4") for name in ("scale_log2", "sign")),
        ("pages", _PAGES),
    ],
    align=True,
)


@dataclass(frozen=True)
class _Family:
    """What the instantiations of one kernel function share.

    Blocks differ by architecture where some version of ptxas spills registers with more.
    """

    source: str
    params: np.dtype[Any]
    params_type: str
    threads: int
    blocks_per_multiprocessor: int | str  # that the registers must allow; a string is CUDA C++ as traits is
    traits: str | None  # format string over Kernel's fields
    arch: str | None = None  # the one architecture it is for


_ATTENTION_TRAITS = "AttentionTraits<{element}, {head_dim}, {block_m}, {stages}, {aligned}, {step}, {paged}>"
_HOPPER_TRAITS = "sm90::Traits<{{element}}, {{head_dim}}, {{stages}}, {{paged}}, {packed}>"
FAMILIES = {
    **{
        name: _Family(source, params, struct, 128, "256 / {threads}", _ATTENTION_TRAITS)
        for name, source, params, struct in (
            ("pass1", "pass1.cu", ATTENTION_PARAMS, "AttentionParams"),
            ("pass1_packed", "pass1.cu", PACKED_ATTENTION_PARAMS, "PackedAttentionParams"),
            ("pass2", "pass2.cu", ATTENTION_PARAMS, "AttentionParams"),
        )
    },
    **{
        name: _Family(f"{source}.cu", params, struct, 384, 1, _HOPPER_TRAITS.format(packed=packed), "sm_90a")
        for name, source, params, struct, packed in (
            ("pass1_sm90", "pass1_sm90", MAPPED_ATTENTION_PARAMS, "MappedAttentionParams", "false"),
            ("pass1_packed_sm90", "pass1_sm90", MAPPED_PACKED_ATTENTION_PARAMS, "MappedPackedAttentionParams", "true"),
            ("pass1_gathered_sm90", "pass1_gathered_sm90", ATTENTION_PARAMS, "AttentionParams", "false"),
            ("pass2_sm90", "pass2_sm90", ATTENTION_PARAMS, "AttentionParams", "false"),
        )
    },
    **{
        name: _Family(
            "rank_queries.cu", RANK_QUERIES_PARAMS, "RankQueriesParams", threads, blocks,
            "RankTraits<{element}, {head_dim}, {aligned}, {paged}>",
        )
        for name, threads, blocks in (
            ("guides", 256, 1),
            (
                "rank_queries",
                128,
                "(!{aligned} ? 2 : {head_dim} > 128 ? 3 : {head_dim} > 64 ? (__CUDA_ARCH__ == 800 ? 3 : 5) : 7)",
            ),
        )
    },
    **{
        name: _Family(
            "remainder.cu", REMAINDER_PARAMS, "RemainderParams", 256, blocks,
            "RemainderTraits<{element}, {head_dim}, {paged}>",
        )
        for name, blocks in (("block_sums", 5), ("candidate_means", 1))
    },
    "key_scores": _Family(
        "key_scores.cu", RANK_KEYS_PARAMS, "RankKeysParams", 128, "(__CUDA_ARCH__ >= 1000 || {head_dim} > 128 ? 2 : 3)",
        "ScoreTraits<{element}, {head_dim}, {aligned}, {paged}>",
    ),
    **{
        name: _Family(
            "rank_fine.cu", RANK_FINE_PARAMS, "RankFineParams", 256,
            f"(__CUDA_ARCH__ == 900 && {{head_dim}} <= 128 && {of_pages} ? 2 : 1)",
            f"FineTraits<{{element}}, {{head_dim}}, {tiles}, {{paged}}>",
        )
        for name, tiles, of_pages in (("survey", 1, "true"), ("fine_norms", 2, "true"), ("fine_scores", 2, "!{paged}"))
    },
    "fine_scores_sm90": _Family(
        "fine_scores_sm90.cu", RANK_FINE_PARAMS, "RankFineParams", 128, 2,
        "FineScoresTraits<{element}, {head_dim}, {paged}>", "sm_90a",
    ),
    "key_scores_sm90": _Family(
        "key_scores_sm90.cu", RANK_KEYS_PARAMS, "RankKeysParams", 256, 2,
        "KeyScoresTraits<{element}, {head_dim}, {paged}>", "sm_90a",
    ),
    **{
        name: _Family("key_order.cu", RANK_KEYS_PARAMS, "RankKeysParams", 256, 4, None)
        for name in ("key_strata", "key_middle")
    },
    "collect_pages": _Family("collect_pages.cu", COLLECT_PAGES_PARAMS, "CollectPagesParams", 256, 4, None),
    "key_front": _Family(
        "key_order.cu", RANK_KEYS_PARAMS, "RankKeysParams", 256, "(__CUDA_ARCH__ == 900 ? 4 : 3)", None
    ),
}


@dataclass(frozen=True)
class Kernel:
    """One instantiation. Fields that its family does not use keep their defaults."""

    function: str
    dtype: str = "bfloat16"
    head_dim: int = 128  # padded: 64, 128 or 256
    aligned: bool = True  # every row of q, k, v and out starts on 16 bytes
    block_m: int = 128
    stages: int = 2
    step: int = 64  # keys of a step of the main loop
    softcap: bool = False  # scores are capped
    paged: bool = False  # k and v are a paged cache
    shared_bytes: int = 0  # dynamic shared memory, as the plan counts it

    @property
    def family(self) -> _Family:
        return FAMILIES[self.function]

    @property
    def threads(self) -> int:
        """Of a block. A warp of the portable passes holds the accumulators of 32 rows of 128, or of 16 of 256."""
        wide = "{block_m}" in (self.family.traits or "") and self.head_dim * self.block_m > 128 * 128
        return self.family.threads * (2 if wide else 1)

    @property
    def name(self) -> str:
        parts = [self.function]
        traits = self.family.traits or ""
        if "{element}" in traits:
            parts += [self.dtype, f"d{self.head_dim}"]
        if "{block_m}" in traits:
            parts.append(f"m{self.block_m}")
        if "{stages}" in traits:
            parts.append(f"s{self.stages}")
        if "{step}" in traits and self.step != 64:
            parts.append(f"k{self.step}")
        if "{aligned}" in traits and not self.aligned:
            parts.append("unaligned")
        if self.softcap:
            parts.append("softcap")
        if self.paged:
            parts.append("paged")
        return "-".join(parts)


_INCLUDE = re.compile(r'^#include "([\w.]+)"\s*$')


def _with_includes(name: str, seen: set[str]) -> Iterator[str]:
    """Lines of a kernel source with its own headers written out, each once."""
    if name in seen:
        return
    seen.add(name)
    text = resources.files(f"{__package__}.raw_kernels").joinpath(name).read_text(encoding="utf-8")
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
    plain = dict.fromkeys(("key_strata", "key_middle"), "s2o::StrataShared") | {"key_front": "s2o::FrontShared"}
    shared = plain.get(kernel.function, f"{traits}::Shared")
    call = kernel.function if family.traits is None else f"{kernel.function}<{traits}>"
    # A struct that ends in an open array is only the least that is needed.
    compare = "<=" if family.source == "rank_queries.cu" else "=="
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
    from .plan import kernels_for

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
