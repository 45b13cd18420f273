"""Lists of keys drawn at random among those before a segment or a q tile: attention to them, whatever chose them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from s2o_cupy.plan.schedule import ScheduleShape
from s2o_cupy.problem import Problem

NOBODYS = -1  # an entry of no list, and no key: reading one is a fault rather than a time that means nothing
TILE, HALF, SEGMENT = 128, 64, 1024  # queries that share a list


class Kind(NamedTuple):
    """Arguments of random_lists."""

    per_tile: bool
    of_heads: bool
    unit: int
    block_m: int = TILE


KINDS = (
    Kind(False, True, 1), Kind(False, False, 1), Kind(True, False, 64), Kind(True, False, 128), Kind(True, True, 128),
    Kind(True, False, 64, HALF), Kind(True, True, 64, HALF),
)  # fmt: skip


class RandomLists(NamedTuple):
    """KeyLists of raw_kernels/common/listed_rows.cuh."""

    shape: ScheduleShape
    entries: Any  # int32 [any], a PyTorch tensor
    begins: npt.NDArray[np.int64]  # [1, list heads, 1, q tiles] or [1, list heads, segments], in C order
    keys: npt.NDArray[np.int32]  # like begins
    pairs: float  # (query, key) pairs of all heads
    block_m: int


def random_lists(
    problem: Problem, density: float, per_tile: bool, of_heads: bool, unit: int, block_m: int = TILE,
    device: str = "cuda",
) -> RandomLists:  # fmt: skip
    """Lists of ``density`` of the units before each segment, or q tile of ``block_m`` queries with ``per_tile``, for
    each KV head, or each query head with ``of_heads``. Of a batch of 1 whose length is a multiple of SEGMENT."""
    import torch

    rows = block_m if per_tile else SEGMENT
    list_heads, count = problem.heads if of_heads else problem.kv_heads, problem.seqlen_q // rows
    shape = ScheduleShape(list_heads, unit, per_tile, None if per_tile else rows)
    width = max(1, int(density * (problem.seqlen_k // unit)))
    generator = torch.Generator(device).manual_seed(0)
    entries = torch.full((list_heads, count, width), NOBODYS, dtype=torch.int32, device=device)
    kept = np.zeros(count, np.int64)
    for n in range(count):
        before = n * rows // unit
        kept[n] = int(density * before)
        drawn = torch.rand((list_heads, before), generator=generator, device=device).argsort(-1)
        entries[:, n, : kept[n]] = drawn[:, : kept[n]]
    of = shape.lists_shape(problem, block_m)
    # tile, as a copy of broadcast_to need not be in C order, which CuPy would keep and a kernel does not ask for.
    keys = np.tile((kept * unit).astype(np.int32), list_heads).reshape(of)
    begins = (np.arange(list_heads * count, dtype=np.int64) * width).reshape(of)
    pairs = float(problem.heads * (kept * unit).sum() * rows)
    return RandomLists(shape, entries.reshape(-1), begins, keys, pairs, block_m)
