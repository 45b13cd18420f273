"""Lists of keys drawn at random among those before a segment or a q tile: attention to them, whatever chose them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from s2o_cupy.plan.schedule import ScheduleShape
from s2o_cupy.problem import Problem

NOBODYS = -1  # an entry of no list, and no key: reading one is a fault rather than a time that means nothing
# per_tile, of_heads and unit of random_lists
KINDS = ((False, True, 1), (False, False, 1), (True, False, 64), (True, False, 128), (True, True, 128))
TILE, SEGMENT = 128, 1024  # queries that share a list


class RandomLists(NamedTuple):
    """KeyLists of raw_kernels/common/listed_rows.cuh."""

    shape: ScheduleShape
    entries: Any  # int32 [any], a PyTorch tensor
    begins: npt.NDArray[np.int64]  # [1, list heads, 1, q tiles] or [1, list heads, segments], in C order
    keys: npt.NDArray[np.int32]  # like begins
    pairs: float  # (query, key) pairs of all heads


def random_lists(
    problem: Problem, density: float, per_tile: bool, of_heads: bool, unit: int, device: str = "cuda"
) -> RandomLists:
    """Lists of ``density`` of the units before each segment, or q tile with ``per_tile``, for each KV head, or each
    query head with ``of_heads``. Of a batch of 1 whose length is a multiple of SEGMENT."""
    import torch

    rows = TILE if per_tile else SEGMENT
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
    of = shape.lists_shape(problem, TILE)
    # tile, as a copy of broadcast_to need not be in C order, which CuPy would keep and a kernel does not ask for.
    keys = np.tile((kept * unit).astype(np.int32), list_heads).reshape(of)
    begins = (np.arange(list_heads * count, dtype=np.int64) * width).reshape(of)
    pairs = float(problem.heads * (kept * unit).sum() * rows)
    return RandomLists(shape, entries.reshape(-1), begins, keys, pairs)
