"""Each head's stop threshold, in a small array that pass 2 reads: numbers that come with the call are written by a
kernel of its own, which CUDA graphs hold; those that an error finds are there before (cuda/within.py).

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..problem import Problem
from ..spec import Pass, S2OConfig
from .build import BASES, NOTHING, Array, Builder, Launch, Workspace, make_launch, pointers_of
from .kernels import Family, Kernel

__all__ = ["arrays", "as_float32", "launches", "written"]

KERNEL = Kernel(Family("head_taus", "head_taus.cu", "HeadTausParams", 256, 4, knows_segments=False))
HEADS = 512  # of a launch (kHeadTaus)
MAX_FLOAT32 = float(np.finfo(np.float32).max)


def as_float32(tau: float) -> float:
    """What float32 holds of it."""
    return tau if tau <= MAX_FLOAT32 else math.inf


def arrays(problem: Problem, config: S2OConfig | Pass) -> list[Array]:
    """The place of numbers that come with the call; none: one is of all heads, or an error finds them."""
    return [("taus", (problem.batch, problem.heads), "float32")] if isinstance(config.tau, tuple) else []


def launches(build: Builder, problem: Problem, config: S2OConfig | Pass) -> list[Launch]:
    """What writes them, likewise."""
    if not isinstance(config.tau, tuple):
        return []
    return written([as_float32(tau) for tau in config.tau], problem.batch, build.memory)


def written(
    values: Sequence[float], sequences: int, memory: Workspace, read: Mapping[str, str] = NOTHING
) -> list[Launch]:
    """What writes one number of ``values`` for each head of each sequence. ``read``: as of `pointers_of`."""
    found: list[Launch] = []
    pointers = pointers_of(KERNEL, BASES, memory, read=read)
    for first in range(0, len(values), HEADS):
        part = values[first : first + HEADS]
        numbers = {"heads": len(values), "first": first, "count": len(part)}
        launch = make_launch("head_taus", KERNEL, sequences, numbers, pointers)
        launch.params["values"][: len(part)] = part
        found.append(launch)
    return found
