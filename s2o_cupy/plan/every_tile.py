"""What a dense call visits, for a caller who asks: every key tile, written by a kernel of its own.

It depends on nothing but the problem; kept in memory it would have to outlive every CUDA graph that copies it.
"""

from __future__ import annotations

import math

from ..caches import remembered
from ..problem import Problem
from ..spec import Pass
from .build import Launch, geometry_of
from .kernels import Family, Kernel

__all__ = ["every_tile"]

KERNEL = Kernel(Family("every_tile", "every_tile.cu", "EveryTileParams", 256, 4))


@remembered
def every_tile(problem: Problem, of_pass: Pass) -> Launch:
    """The launch; its parameters lack the address of ``visited``, int32 of problem.visited_shape(of_pass)."""
    geometry, shape = problem.geometry(of_pass), problem.visited_shape(of_pass)
    count = math.prod(shape)
    params = KERNEL.family.params.fill(
        {
            "geometry": geometry_of(geometry, problem.head_dim),
            "count": count,
            "tiles": shape[-1],
            "block_m": of_pass.block_m,
            "block_n": of_pass.block_n,
        }
    )
    return Launch("every_tile", KERNEL, -(-count // KERNEL.threads), params, ())
