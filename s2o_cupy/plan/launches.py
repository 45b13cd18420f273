"""From a plan to the launches of a call in order, and to the workspace that they share.

No array and no GPU: addresses are filled in at each call (cuda/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..arrays.operand import ITEM_BYTES, Operand, Paging
from ..problem import MAX_SCALE, Problem
from ..spec import LOG2E, Pass, S2OConfig
from . import head_taus
from .build import ALIGNMENT, BASES, NOTHING, Array, Builder, InTurns, Launch, Place, Workspace, lay_out
from .kernels import Kernel
from .launch_plan import COLLECT_CHUNK, COLLECT_CHUNKS, LaunchPlan, collected_chunks
from .maps import Maps, Read, arrays_of, maps_of_pass1, maps_of_pass2
from .paths import SMALLEST_SCALE
from .rounds import Grid

__all__ = [
    "ALIGNMENT", "BASES", "Launch", "Place", "Workspace", "attention_launch", "launches", "listed_launch",
    "packed_collect_launch", "packed_launch", "pass1_launch", "workspace",
]  # fmt: skip

NO_WORKSPACE = Workspace({}, 0, 0)


def workspace(plan: LaunchPlan, problem: Problem, config: S2OConfig | Pass) -> Workspace:
    counters: list[Array] = []
    if plan.counts_q_tiles:
        counters.append(("next_q_tile", (1 + len(plan.chunks),), "int32"))  # one for each launch of pass 1 or 2
    if plan.method.visits:
        counters.append(("visited", problem.visited_shape(config), "int32"))  # where the caller does not ask for it
    others: list[Array | InTurns] = []
    if plan.keeps_state:
        heads = problem.batch * problem.heads
        others.append(("state", (heads, problem.seqlen_q, 2), "float32"))  # (m in log2 units, l)
    if plan.method.visits:
        others += [*plan.method.arrays(), *head_taus.arrays(problem, config)]
    if plan.collect_pages is not None:
        collected = (problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
        others += [("keys", collected, "uint16"), ("values", collected, "uint16")]
    return lay_out(counters, others)


def launches(
    plan: LaunchPlan,
    problem: Problem,
    config: S2OConfig | Pass,
    operands: dict[str, Operand],
    memory: Workspace,
    paging: Paging | None = None,
    adds_tail: bool = True,
) -> tuple[Launch, ...]:
    """All launches of a call in order; for the arguments see `Builder`. ``adds_tail``: False leaves out what unvisited
    candidates count for, and decides all else alike."""
    build = Builder(problem, plan.geometry, operands, memory, paging)
    arrays = arrays_of(plan, operands, memory)
    found = [_collect_pages(build, plan.collect_pages, paging)] if plan.collect_pages else []
    found.append(pass1_launch(build, plan, arrays))
    if plan.method.visits:
        found += [*head_taus.launches(build, problem, config), *plan.method.before_rounds(build)]
        pass2, more = plan.method.pass2(plan.pass2) if adds_tail else (plan.pass2, {})
        if not plan.geometry.orders_queries(plan.of_pass.block_m):  # boxes bring neighbours
            pass2 = plan.runs_on.by_boxes(pass2, plan.geometry.unit, problem.head_dim, plan.page_size)
        maps = maps_of_pass2(pass2, arrays, memory.places.get("covariances"))
        for i, chunk in enumerate(plan.chunks):
            found += plan.method.before_pass2(build, chunk)
            further = {"next_q_tile": 4 * (1 + i)}
            grid = plan.grid(chunk, pass2)
            found.append(attention_launch(build, "pass2", pass2, plan.of_pass, grid, further, maps=maps, **more))
            if adds_tail:
                found += plan.method.after_pass2(build, chunk)
    return tuple(found)


def pass1_launch(build: Builder, plan: LaunchPlan, arrays: Read) -> Launch:
    """Pass 1 of a plan. ``arrays``: where it reads q, k and v."""
    maps = maps_of_pass1(plan, arrays)
    return attention_launch(build, "pass1", plan.pass1, plan.of_pass, plan.pass1_grid, maps=maps)


def packed_launch(
    plan: LaunchPlan, kernel: Kernel, problem: Problem, operands: dict[str, Operand], paging: Paging | None = None
) -> Launch:
    """Pass 1 of packed sequences; lengths and addresses are for the caller to fill in."""
    build = Builder(problem, plan.geometry, operands, NO_WORKSPACE, paging)
    return attention_launch(build, "pass1", kernel, plan.of_pass, plan.pass1_grid, sequences=0)


def listed_launch(
    plan: LaunchPlan, kernel: Kernel, problem: Problem, operands: dict[str, Operand], paging: Paging | None,
    more: dict[str, Any],
) -> Launch:  # fmt: skip
    """Pass 2 by lists of keys, all in one launch; addresses are for the caller to fill in. ``more``: what the
    kernel is given besides AttentionParams."""
    build = Builder(problem, plan.geometry, operands, NO_WORKSPACE, paging)
    maps = maps_of_pass2(kernel, arrays_of(plan, operands, NO_WORKSPACE))
    return attention_launch(build, "pass2", kernel, plan.of_pass, plan.grid(plan.whole, kernel), maps=maps, **more)


def packed_collect_launch(
    plan: LaunchPlan, kernel: Kernel, problem: Problem, operands: dict[str, Operand], paging: Paging
) -> Launch:
    """Copies of packed sequences' keys and values from pages; likewise."""
    build = Builder(problem, plan.geometry, operands, NO_WORKSPACE, paging)
    return _collect_pages(build, kernel, paging, sequences=0)


def attention_launch(
    build: Builder, stage: str, kernel: Kernel, of_pass: Pass, grid: Grid, further: Mapping[str, int] = NOTHING,
    read: Mapping[str, str] = NOTHING, maps: Maps = (), **more: Any,
) -> Launch:  # fmt: skip
    """A launch of a pass. ``further``, ``read``: as of `Builder.launch`. ``maps``: those that the kernel takes, if any.
    ``more``: further parameters."""
    p = build.problem
    values: dict[str, Any] = {
        **build.tensors,
        "geometry": build.geometry,
        "chunk": build.chunk(grid.chunk),
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "tiles": grid.tiles,
        "steps_per_tile": max(1, of_pass.block_n // kernel.step),
        "q_tiles": grid.q_tiles,
        "scale_log2": max(p.softcap or abs(p.scale), SMALLEST_SCALE) * LOG2E,  # times 0 a masked score would be NaN
        "sign_mask": 0x80008000 if p.scale < 0 else 0,
        **of_pass.params,
        "tau": head_taus.as_float32(of_pass.tau),
        "cap_scale": min(abs(p.scale) / p.softcap, MAX_SCALE) if p.softcap else 0.0,
        "pages": build.pages,
        **more,
    }
    return replace(build.launch(stage, kernel, grid.blocks, values, grid.chunk, further, read), maps=maps)


def _collect_pages(build: Builder, kernel: Kernel, paging: Paging | None, **more: int) -> Launch:
    problem = build.problem
    chunks = collected_chunks(problem)
    values: dict[str, Any] = {"k": build.tensors["k"], "v": build.tensors["v"]}
    if paging is not None and paging.scales is not None:
        values = dict(build.cache)
        for name, scale in zip(("k_scale", "v_scale"), paging.scales, strict=True):
            values[name] = {"stride": scale.stride, "value": scale.value}
    values |= {
        "kv_heads": problem.kv_heads,
        "seqlen_k": problem.seqlen_k,
        "row_chunks": problem.head_dim * ITEM_BYTES // COLLECT_CHUNK,
        "chunks": chunks,
        "pages": build.pages,
        **more,
    }
    return build.launch(kernel.function, kernel, -(-chunks // COLLECT_CHUNKS), values)
