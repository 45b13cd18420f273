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
from ..plan.paths import PATHS, is_written_for, path_of
from ..selection.methods import METHODS

__all__ = ["kernels_for", "sample_for"]

SAMPLE = ("bfloat16", 128)


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
        sample, plain = (dtype, head_dim) == SAMPLE, aligned and not paged
        for softcap in (False, True) if sample or plain else (False,):
            inputs = Inputs(dtype, head_dim, aligned, paged, softcap)
            for path in paths:
                packed = sample or (aligned and not softcap)
                skips_values = packed and (plain or not softcap)  # not three together
                yield from path.catalogue(inputs, limits, packed, skips_values)
                if not softcap:
                    yield from itertools.chain.from_iterable(method.catalogue(inputs, path) for method in METHODS)
                yield from tail.catalogue(inputs, path, limits)
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
    """Some of `kernels_for`, which stand for the others.

    Of an architecture that kernels are written for, the passes of its path with every head_dim, 64 as float16 and
    more as bfloat16; with 128 also every block_m, and unaligned rows, a paged cache and capped scores, each alone;
    with 256 a paged cache. Of that of the fastest path so too what all share; of anything else one kernel of each
    function. So too of passes over packed sequences, which differ from the others in how a tile is found, and of
    ladders of taus on a path that is not its own. Of another architecture one kernel of each pass: what differs
    there is how many registers and how much shared memory they take.
    """
    limits, own = DeviceLimits.of_architecture(compute_capability), path_of(compute_capability)
    passes = {
        path: {x.function for x in path.catalogue(Inputs(*SAMPLE), limits, packed=True, skips_values=True)}
        for path in PATHS
        if path.runs_on(compute_capability)
    }
    kernels = kernels_for(compute_capability)
    shared = {kernel.function for kernel in kernels} - set().union(*passes.values())
    whole: set[str] = set()
    once: set[str] = set().union(*passes.values())
    if is_written_for(compute_capability):
        whole = {name for path, names in passes.items() if path is own for name in names}
        whole |= shared if own is PATHS[0] else set()
        once |= shared
    for path in passes:
        of_packed = _functions(path, limits, packed=True) - _functions(path, limits, packed=False)
        few = set(of_packed)
        if path is not own:
            few.add(path.laddered(path.pass2(Inputs(*SAMPLE), limits, path.block_ms[-1])).function)
        whole -= few
        once |= few
    sample: dict[tuple[object, ...], Kernel] = {}
    plain: dict[str, set[str]] = {}  # some functions are for a paged cache only
    for kernel in kernels:
        variants = _variants(kernel) - plain.setdefault(kernel.function, _variants(kernel))
        if kernel.function in whole:
            if shown := _shown(kernel, variants):
                place = (kernel.function, *shown)
                sample[place] = kernel  # of several the last, with the most rows
        elif kernel.function in once and not variants and (kernel.dtype, kernel.head_dim) == SAMPLE:
            sample[(kernel.function,)] = kernel
    return tuple(sample.values())


def _functions(path: Path, limits: DeviceLimits, packed: bool) -> set[str]:
    inputs = (Inputs(*SAMPLE, paged=paged) for paged in (False, True))
    return {x.function for of in inputs for x in path.catalogue(of, limits, packed=packed, skips_values=True)}


def _variants(kernel: Kernel) -> set[str]:
    of = {
        "unaligned": not kernel.aligned, "paged": kernel.paged, "softcap": kernel.softcap, "drawn": kernel.drawn,
    }  # fmt: skip
    return {name for name, is_so in of.items() if is_so}


def _shown(kernel: Kernel, variants: set[str]) -> tuple[object, ...]:
    """What a kernel of the sample is compiled for that others of its function are not; empty: it is not of it."""
    if (kernel.dtype, kernel.head_dim) == SAMPLE:
        if len(_variants(kernel)) > 1:
            return ()
        return (kernel.head_dim, kernel.threads, *variants) if variants else (kernel.head_dim, kernel.block_m)
    dtype = "float16" if kernel.head_dim == 64 else "bfloat16"
    shown = not variants or (kernel.head_dim == max(HEAD_DIMS) and variants == {"paged"})  # where registers are fewest
    return (kernel.head_dim, kernel.threads, *variants) if kernel.dtype == dtype and shown else ()
