"""Every kernel that a call may choose on an architecture: what `s2o compile` builds and tests look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..plan import tail
from ..plan.collecting import COLLECT_PACKED_PAGES
from ..plan.device import DeviceLimits
from ..plan.every_tile import KERNEL as EVERY_TILE
from ..plan.kernels import HEAD_DIMS, Inputs, Kernel
from ..plan.launch_plan import COLLECT_PAGES
from ..plan.paths import PATHS
from .methods import METHODS

__all__ = ["SAMPLE", "kernels_for"]

SAMPLE = ("bfloat16", 128)


def kernels_for(compute_capability: int) -> tuple[Kernel, ...]:
    """Every kernel that a call may choose on an architecture. Of two of these together, unaligned rows, capped scores,
    a paged cache, packed sequences and listed keys, which do what each does alone, only those of bfloat16 and head_dim
    128."""
    return tuple(dict.fromkeys(_kernels(DeviceLimits.of_architecture(compute_capability))))


def _kernels(limits: DeviceLimits) -> Iterator[Kernel]:
    """Some come several times."""
    paths = [path for path in PATHS if path.runs_on(limits.compute_capability)]
    yield EVERY_TILE
    if any(path.gathers_pages for path in paths):
        yield from (COLLECT_PAGES, COLLECT_PACKED_PAGES)
    arrays = ((True, False), (False, False), (True, True))  # aligned, paged: a paged cache is always aligned
    for dtype, head_dim, (aligned, paged) in itertools.product(("float16", "bfloat16"), HEAD_DIMS, arrays):
        sample, plain = (dtype, head_dim) == SAMPLE, aligned and not paged
        for softcap in (False, True) if sample or plain else (False,):
            inputs = Inputs(dtype, head_dim, aligned, paged, softcap)
            for path in paths:
                packed = sample or (aligned and not softcap)
                listed = packed and (plain or not softcap)  # not three together
                yield from path.catalogue(inputs, limits, packed, listed)
                if not softcap:
                    yield from itertools.chain.from_iterable(method.catalogue(inputs, path) for method in METHODS)
        yield from tail.kernels(Inputs(dtype, head_dim, paged=paged))
