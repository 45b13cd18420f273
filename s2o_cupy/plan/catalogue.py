"""Every kernel that a call may choose on an architecture: what `s2o compile` builds and tests look at."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..problem import GPU_BLOCK_M
from .every_tile import KERNEL as EVERY_TILE
from .kernels import Kernel
from .launch_plan import (
    HEAD_DIMS,
    HOPPER_SCORE_HEAD_DIM,
    DeviceLimits,
    _attention,
    _hopper,
    _hopper_key_scores,
    _hopper_refined_scores,
    _key_order_head,
    _key_scores,
    _key_strata,
    _rank_queries,
    _refine,
    _tail,
    pass1_block_m,
)  # fmt: skip
from .schedule import LISTED

__all__ = ["kernels_for"]

SAMPLE = ("bfloat16", 128)


def kernels_for(compute_capability: int) -> tuple[Kernel, ...]:
    """Every kernel that a call may choose on an architecture. Of two of these together, unaligned rows, capped scores,
    a paged cache, packed sequences and listed keys, which do what each does alone, only those of bfloat16 and head_dim
    128."""
    limits = DeviceLimits.of_architecture(compute_capability)

    def caps(dtype: str, head_dim: int, alone: bool) -> tuple[bool, ...]:
        return (False, True) if alone or (dtype, head_dim) == SAMPLE else (False,)

    kernels: list[Kernel] = [_key_strata(), _key_strata("key_middle"), _key_order_head(), EVERY_TILE]
    if compute_capability == 90:
        kernels += [Kernel("collect_pages"), Kernel("collect_packed_pages")]
    for dtype, head_dim in itertools.product(("float16", "bfloat16"), HEAD_DIMS):
        for name, aligned in itertools.product(("guides", "rank_queries"), (True, False)):
            kernels.append(_rank_queries(name, dtype, head_dim, 1024, aligned))
        kernels.append(_rank_queries("guides", dtype, head_dim, 1024, aligned=True, paged=True))
        for name, paged in itertools.product(("block_sums", "candidate_means"), (False, True)):
            kernels.append(_tail(name, dtype, head_dim, paged))
        for name, paged in itertools.product(("probe", "refined_norms", "refined_scores"), (False, True)):
            kernels.append(_refine(name, dtype, head_dim, paged))
        block_m1 = pass1_block_m(head_dim, limits)
        passes = [("pass1", block_m1), *(("pass2", block_m) for block_m in GPU_BLOCK_M)]
        for aligned, paged in ((True, False), (False, False), (True, True)):  # a paged cache is always aligned
            kernels.append(_key_scores(dtype, head_dim, aligned, paged))
            alone = aligned and not paged
            for (name, block_m), softcap in itertools.product(passes, caps(dtype, head_dim, alone)):
                kernels.append(_attention(name, dtype, head_dim, aligned, block_m, limits, softcap, paged))
            for softcap in caps(dtype, head_dim, False) if aligned or (dtype, head_dim) == SAMPLE else ():
                kernels.append(_attention("pass1_packed", dtype, head_dim, aligned, block_m1, limits, softcap, paged))
    if compute_capability == 90:
        for dtype, head_dim, paged in itertools.product(("float16", "bfloat16"), HEAD_DIMS, (False, True)):
            for softcap in caps(dtype, head_dim, not paged):
                kernels += [_hopper(name, dtype, head_dim, softcap, paged) for name in ("pass1_sm90", "pass2_sm90")]
            others = ["pass1_packed_sm90", *(("pass1_gathered_sm90", "pass1_packed_gathered_sm90") if paged else ())]
            for name, softcap in itertools.product(others, caps(dtype, head_dim, False)):
                kernels.append(_hopper(name, dtype, head_dim, softcap, paged))
            if head_dim <= HOPPER_SCORE_HEAD_DIM:
                kernels += [_hopper_key_scores(dtype, head_dim, paged), _hopper_refined_scores(dtype, head_dim, paged)]
    kernels += [
        replace(kernel, function=LISTED[kernel.function])
        for kernel in kernels
        if kernel.function in LISTED
        and ((kernel.dtype, kernel.head_dim) == SAMPLE or (not kernel.softcap and kernel.aligned))
        and not (kernel.softcap and (kernel.paged or not kernel.aligned))  # three together
    ]
    return tuple(kernels)
