"""Every kernel that a call may choose on this GPU loads; the other checks find them compiled."""

from __future__ import annotations

from .arrays import capability
from .harness import Run, check


@check(60, shards=12)
def load(run: Run) -> str:
    """Compile (or find in CuPy's cache) and load every kernel of this GPU's catalogue."""
    from s2o_cupy.cuda.compiler import load as load_kernel
    from s2o_cupy.tools.catalogue import kernels_for

    kernels = sorted(kernels_for(capability()), key=lambda kernel: (not kernel.name.startswith("pass"), kernel.name))
    loaded = 0
    for number in run.cases(len(kernels)):
        load_kernel(kernels[number], 0)
        loaded += 1
    return f"{loaded} kernels"
