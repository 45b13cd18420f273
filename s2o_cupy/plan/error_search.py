"""The search for each head's tau by an error: which segments are sampled, and what is launched.

The sampled segments are ordered like those of a call, and pass 2 walks their keys twice: to the end, keeping what each
tau of a first ladder would give, and as far as the last tau of a second one goes. reference/error_taus.py is the
definition. Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operand import Operand, Paging
from ..caches import remembered
from ..problem import Problem
from ..spec import ERROR_SEGMENTS, FIRST_LADDER, Geometry, S2OConfig
from . import head_taus
from .build import Array, Builder, InTurns, Launch, Workspace, lay_out
from .kernels import Family, Inputs, Kernel
from .launch_plan import LaunchPlan
from .launches import attention_launch, pass1_launch
from .maps import arrays_of
from .rounds import Chunk, Grid

__all__ = ["Sampled", "kernels", "launches", "sampled", "searched", "workspace"]

SOURCE = "sampled_error.cu"
CHOOSE_TAUS = Kernel(Family("choose_taus", SOURCE, "ChooseTausParams", 256, 4, knows_segments=False))
SEGMENT_SIZES = Family("segment_sizes", SOURCE, "SegmentSizesParams", 256, 4, "SampledTraits<{element}>")
LADDERS = 2
LADDER = len(FIRST_LADDER)
WARPS = 8  # of a block of pass 2, at most (kLadderWarps)
TINY = float(np.finfo(np.float32).tiny)


def kernels(inputs: Inputs) -> Iterator[Kernel]:
    """Those beside attention and its order; they are of any head_dim."""
    yield from (CHOOSE_TAUS, drawn(Kernel(SEGMENT_SIZES, inputs.dtype)))


class Sampled(NamedTuple):
    """Segments, ascending, and how many of all each stands for."""

    segments: tuple[int, ...]
    weights: tuple[float, ...]


def searched(problem: Problem, config: S2OConfig) -> tuple[Problem, S2OConfig]:
    """What the search attends to: the sampled segments, and nothing for unvisited keys. Those of `dense_last` stop too,
    so that taus come out a little small."""
    drawn = ERROR_SEGMENTS if problem.geometry(config).segments > ERROR_SEGMENTS else 0
    return replace(problem, drawn=drawn), replace(config, tail="none", dense_up_to=0, dense_last=0)


@remembered
def sampled(problem: Problem, config: S2OConfig) -> Sampled:
    """Of a problem, the same at every call."""
    return _sampled(searched(problem, config)[0].geometry(config))


def _sampled(geometry: Geometry) -> Sampled:
    runs = [geometry.run(n) for n in range(geometry.segments)]
    return Sampled(tuple(map(geometry.place, range(len(runs)))), tuple(float(end - begin) for begin, end in runs))


def _pairs(plan: LaunchPlan) -> int:
    """32-bit words of a q tile's outputs."""
    return plan.pass2.block_m * plan.inputs.head_dim // 2


def _blocks(plan: LaunchPlan, chunk: Chunk) -> int:
    return plan.runs_on.ladder_blocks(plan.pass2, chunk.rows * plan.tiles, plan.limits)


def workspace(plan: LaunchPlan, problem: Problem, config: S2OConfig) -> Workspace:
    """Of a problem and a config that are `searched`."""
    heads, segments = problem.batch * problem.heads, plan.geometry.segments
    rows = (heads, segments, plan.tiles)
    zeroed: list[Array] = [("sums", (*rows, LADDER, WARPS), "float32"), ("sizes", (*rows, WARPS), "float32")]
    if plan.counts_q_tiles:
        zeroed.append(("next_q_tile", (1 + LADDERS * len(plan.chunks),), "int32"))
    others: list[Array | InTurns] = [
        ("errors", (problem.heads,), "float32"),
        ("ladders", (LADDERS, heads, LADDER), "float32"),
        ("found", (LADDERS, heads, LADDER), "float32"),
        ("state", (heads, problem.seqlen_q, 2), "float32"),
    ]
    if plan.chunks:
        blocks = max(_blocks(plan, chunk) for chunk in plan.chunks)
        others += [
            ("dense", (*rows, _pairs(plan)), "uint32"),
            ("snapshots", (blocks, LADDER, _pairs(plan)), "uint32"),
            *plan.method.arrays(),
        ]
    return lay_out(zeroed, others)


def launches(
    plan: LaunchPlan, problem: Problem, config: S2OConfig, operands: dict[str, Operand], memory: Workspace,
    paging: Paging | None = None,
) -> tuple[Launch, ...]:  # fmt: skip
    """Likewise, in order. Pass 1 writes outputs of the sampled segments."""
    build = Builder(problem, plan.geometry, operands, memory, paging)
    sample = _sampled(plan.geometry)
    errors = [max(head_taus.as_float32(x), TINY) for x in config.errors(problem.heads)]
    found = head_taus.written(errors, 1, memory, {"taus": "errors"})  # a graph holds them
    found.append(_choose(build, plan, sample, 0))
    found.append(pass1_launch(build, plan, arrays_of(plan, operands, memory)))
    found += _sizes(build, plan)
    if plan.chunks:
        found += plan.method.before_rounds(build)
    for done in range(LADDERS):
        for i, chunk in enumerate(plan.chunks):
            if done == 0 or len(plan.chunks) > 1:  # the order of the only round is still there
                found += plan.method.before_pass2(build, chunk)
            found.append(_ladder(build, plan, chunk, done, i))
        found.append(_choose(build, plan, sample, done + 1))
    return tuple(replace(x, kernel=drawn(x.kernel)) for x in found)


def drawn(kernel: Kernel) -> Kernel:
    """The same for sampled segments, if it looks at segments."""
    return replace(kernel, drawn=True) if kernel.family.knows_segments else kernel


def _sizes(build: Builder, plan: LaunchPlan) -> Iterator[Launch]:
    """Of segments without candidates, which pass 2 does not come to."""
    geometry, problem = plan.geometry, build.problem
    without = sum(geometry.candidates(n) == 0 for n in range(geometry.segments))
    if without:
        values = {
            "out": build.tensors["out"], "geometry": build.geometry, "heads": problem.heads, "tiles": plan.tiles,
            "segments": without,
        }  # fmt: skip
        kernel = Kernel(SEGMENT_SIZES, problem.dtype)
        yield build.launch("segment_sizes", kernel, problem.batch * problem.heads * without, values)


def _ladder(build: Builder, plan: LaunchPlan, chunk: Chunk, done: int, i: int) -> Launch:
    heads = build.problem.batch * build.problem.heads
    further = {"next_q_tile": 4 * (1 + done * len(plan.chunks) + i), "ladders": 4 * done * heads * LADDER}
    grid = Grid(chunk, plan.tiles, _blocks(plan, chunk))
    return attention_launch(
        build, "pass2_ladder", plan.runs_on.laddered(plan.pass2), plan.of_pass, grid, further, is_first=done == 0
    )


def _choose(build: Builder, plan: LaunchPlan, sample: Sampled, done: int) -> Launch:
    problem = build.problem
    heads = problem.batch * problem.heads
    values: dict[str, Any] = {
        "all_heads": heads, "heads": problem.heads, "segments": plan.geometry.segments, "tiles": plan.tiles,
        "done": done,
    }  # fmt: skip
    launch = build.launch("choose_taus", CHOOSE_TAUS, heads, values)
    launch.params["first"][:] = FIRST_LADDER
    launch.params["weights"][: len(sample.weights)] = sample.weights
    return launch
