"""The search for each head's tau by an error: which segments are sampled, and the kernels beside attention itself.

reference/error_taus.py is the definition. Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..caches import remembered
from ..problem import Problem
from ..spec import ERROR_SEGMENTS, S2OConfig
from . import strata
from .kernels import Family, Inputs, Kernel

__all__ = ["CHOOSE_TAUS", "REPEAT_QUERIES", "Sampled", "error_sums", "kernels", "sampled"]

SOURCE = "sampled_error.cu"
REPEAT_QUERIES = Kernel(Family("repeat_queries", SOURCE, "RepeatQueriesParams", 256, 4))
CHOOSE_TAUS = Kernel(Family("choose_taus", SOURCE, "ChooseTausParams", 128, 4))
ERROR_SUMS = Family("error_sums", SOURCE, "ErrorSumsParams", 256, 4, "SampledTraits<{element}>")


def error_sums(dtype: str) -> Kernel:
    return Kernel(ERROR_SUMS, dtype)


def kernels(inputs: Inputs) -> Iterator[Kernel]:
    """All of them; they are of any head_dim."""
    yield from (REPEAT_QUERIES, CHOOSE_TAUS, error_sums(inputs.dtype))


class Sampled(NamedTuple):
    """Segments, ascending, and how many of all each stands for."""

    segments: tuple[int, ...]
    weights: tuple[float, ...]


@remembered
def sampled(problem: Problem, config: S2OConfig) -> Sampled:
    """Of a problem, the same at every call."""
    drawn = strata.draw(problem.geometry(config).segments, ERROR_SEGMENTS, seed=0)
    pairs = [(n, x.size / len(x.drawn)) for x in drawn for n in x.drawn]
    return Sampled(tuple(n for n, _ in pairs), tuple(weight for _, weight in pairs))
