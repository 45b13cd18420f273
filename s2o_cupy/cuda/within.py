"""The taus that keep each head to an error, found on the device. Nothing waits for the GPU."""

from __future__ import annotations

from ..arrays.operand import Call, Operands
from ..plan import error_search
from ..problem import Problem
from ..spec import S2OConfig
from . import pipeline
from .pipeline import Memory

__all__ = ["find_taus"]

STAGES = pipeline.Stages(error_search.workspace, error_search.launches)


def find_taus(
    operands: Operands, taus: int, problem: Problem, config: S2OConfig, *, stream: int, memory: Memory
) -> None:
    """Write each head's tau, float32 [batch, heads], to the address ``taus``. ``config`` has an error, and the call is
    not dense. ``operands``: as of `pipeline.run`; of the output, which the call then writes, rows of sampled segments
    are written."""
    of_segments, tried = error_search.searched(problem, config)
    call = Call(operands, 0, 0, of_segments)
    pipeline.run_stages(call, tried, STAGES, stream=stream, memory=memory, taus=taus)
