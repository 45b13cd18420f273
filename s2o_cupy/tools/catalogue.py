"""Every kernel that a call may choose on an architecture: what `s2o compile` builds and tests look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..methods import antidiagonal, last_rows
from ..methods import kernels as methods
from ..methods.registry import METHODS as OF_BLOCKS
from ..nsa import kernels as nsa
from ..plan import error_search, tail
from ..plan.collecting import COLLECT_PACKED_PAGES, fp8_kernels
from ..plan.device import DeviceLimits
from ..plan.every_tile import KERNEL as EVERY_TILE
from ..plan.head_taus import KERNEL as HEAD_TAUS
from ..plan.kernels import HEAD_DIMS, Inputs, Kernel, Path
from ..plan.launch_plan import COLLECT_PAGES
from ..plan.paths import PATHS, WRITTEN_FOR, is_written_for, path_of
from ..selection.methods import METHODS

__all__ = ["kernels_for", "sample_for"]

SAMPLE = Inputs("bfloat16", 128)


def kernels_for(compute_capability: int) -> tuple[Kernel, ...]:
    """Every kernel that a call may choose on an architecture. Of two of these together, unaligned rows, capped scores,
    a paged cache, packed sequences and values left out, which do what each does alone, only those of bfloat16 and
    head_dim 128."""
    return tuple(dict.fromkeys(_kernels(DeviceLimits.of_architecture(compute_capability))))


def _kernels(limits: DeviceLimits) -> Iterator[Kernel]:
    """Some come several times."""
    paths = [path for path in PATHS if path.runs_on(limits.compute_capability)]
    yield from (EVERY_TILE, HEAD_TAUS)
    if any(path.gathers_pages for path in paths):
        yield from (COLLECT_PAGES, COLLECT_PACKED_PAGES)
    for dtype in ("float16", "bfloat16"):
        yield from fp8_kernels(dtype)
    arrays = ((True, False), (False, False), (True, True))  # aligned, paged: a paged cache is always aligned
    for dtype, head_dim, (aligned, paged) in itertools.product(("float16", "bfloat16"), HEAD_DIMS, arrays):
        sample, plain = (dtype, head_dim) == (SAMPLE.dtype, SAMPLE.head_dim), aligned and not paged
        for softcap in (False, True) if sample or plain else (False,):
            inputs = Inputs(dtype, head_dim, aligned, paged, softcap)
            for path in paths:
                packed = sample or (aligned and not softcap)
                skips_values = packed and (plain or not softcap)  # not three together
                yield from path.catalogue(inputs, limits, packed, skips_values)
                if not softcap:
                    yield from itertools.chain.from_iterable(method.catalogue(inputs, path) for method in METHODS)
                yield from tail.catalogue(inputs, limits)
                if not paged:
                    yield from _of_sampled_segments(inputs, path, limits)
        yield from error_search.kernels(Inputs(dtype, head_dim))
        yield from methods.kernels(Inputs(dtype, head_dim, aligned, paged), limits)
        yield from antidiagonal.kernels(Inputs(dtype, head_dim, aligned, paged), paths)
        yield from last_rows.kernels(Inputs(dtype, head_dim, aligned, paged))
        for of in OF_BLOCKS:
            yield from of.catalogue(Inputs(dtype, head_dim, aligned, paged))
        if plain:
            yield from nsa.catalogue(Inputs(dtype, head_dim), paths)


def _of_sampled_segments(inputs: Inputs, path: Path, limits: DeviceLimits) -> Iterator[Kernel]:
    """What finds taus by an error."""
    yield error_search.drawn(path.pass1(inputs, limits, maps=True))
    for block_m in path.block_ms_of(inputs.head_dim):
        yield error_search.drawn(path.laddered(path.pass2(inputs, limits, block_m)))
    if not inputs.softcap:
        yield from (error_search.drawn(kernel) for method in METHODS for kernel in method.catalogue(inputs, path))


# --- A sample, for who cannot wait for all of them ---
def sample_for(compute_capability: int) -> tuple[Kernel, ...]:
    """Some of `kernels_for`, which stand for the others: of a function one kernel, of bfloat16 and head_dim 128.

    Of an architecture that kernels are written for all functions that no earlier one has. On the fastest path also its
    passes of head_dim 256 over a paged cache, where registers are fewest, but for those over packed sequences, and
    those of head_dim 64 with two blocks on a multiprocessor. Of another architecture the passes of its path: what
    differs there is how many registers and how much shared memory they take.
    """
    kernels, limits = kernels_for(compute_capability), DeviceLimits.of_architecture(compute_capability)
    functions, own = {kernel.function for kernel in kernels}, path_of(compute_capability)
    if is_written_for(compute_capability):
        earlier = (known for known in WRITTEN_FOR if known < compute_capability)
        functions -= {kernel.function for known in earlier for kernel in kernels_for(known)}
    else:
        functions = set() if own is None else _passes(own, limits, packed=True)
    tight = set() if own is not PATHS[0] else _passes(own, limits, packed=False)
    sample: dict[tuple[str, int], Kernel] = {}
    plain: dict[str, set[str]] = {}  # some functions are for a paged cache only
    for kernel in kernels:
        variants = _variants(kernel)
        least = plain.setdefault(kernel.function, variants)
        if kernel.dtype != SAMPLE.dtype:
            continue
        is_plain = kernel.function in functions and kernel.head_dim == SAMPLE.head_dim and variants == least
        is_tight = kernel.head_dim == max(HEAD_DIMS) and variants == {"paged"}
        is_tight |= kernel.name.endswith("-two")  # blocks on a multiprocessor
        if is_plain or (kernel.function in tight and is_tight):
            sample[kernel.function, kernel.head_dim] = kernel  # of several the last, with the most rows
    return tuple(sample.values())


def _passes(path: Path, limits: DeviceLimits, packed: bool) -> set[str]:
    """The functions of its passes."""
    inputs = (Inputs(SAMPLE.dtype, SAMPLE.head_dim, paged=paged) for paged in (False, True))
    return {x.function for of in inputs for x in path.catalogue(of, limits, packed=packed, skips_values=True)}


def _variants(kernel: Kernel) -> set[str]:
    of = {
        "unaligned": not kernel.aligned, "paged": kernel.paged, "softcap": kernel.softcap, "drawn": kernel.drawn,
    }  # fmt: skip
    return {name for name, is_so in of.items() if is_so}
