"""Pass 2 by lists of keys on a GPU: launched, what is wrong by the definition (reference/lists.py), and what S2O does
by lists of its own.

Importing this needs no GPU and no CuPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gpu_cases import Case
from gpu_rounding import beyond_rounding
from key_lists import random_lists
from pages import paged, random_table

from s2o_cupy import S2OConfig
from s2o_cupy.arrays.operand import Call, Operand, Paging, operand
from s2o_cupy.plan.schedule import SHORTEST_STEP, ScheduleShape, order_lists
from s2o_cupy.problem import Problem, validate
from s2o_cupy.reference import s2o
from s2o_cupy.reference.lists import KeyLists
from s2o_cupy.reference.lists import attend_lists as definition
from s2o_cupy.reference.value_skip import ValueSkips
from s2o_cupy.spec import VALUE_KEYS, VALUE_ROWS, Geometry
from s2o_cupy.tools.diffing import _score_error


@dataclass
class Attended:
    """What a launch wrote, on the host."""

    o: Any  # [B, H, Lq, D]
    lse: Any  # float32 [B, H, Lq]
    visited: Any  # int32 [B, H, N, T]
    skipped: Any = None  # with a value_skip: int32 [B, H, N, T]
    found_skips: Any = None  # likewise, bool [B, H, N, T, groups, blocks]

    def differing(self, other: Attended) -> list[str]:
        """What is not, bit for bit, the other's."""
        pairs = {"o": (self.o, other.o), "lse": (self.lse, other.lse), "visited": (self.visited, other.visited)}
        return [name for name, (x, y) in pairs.items() if x.shape != y.shape or x.tobytes() != y.tobytes()]

    def assert_same_bits(self, other: Attended) -> None:
        assert self.differing(other) == []


def operands(q: Any, k: Any, v: Any, o: Any) -> tuple[Operand, Operand, Operand, Operand]:
    return operand(q, "BHSD"), operand(k, "BHSD"), operand(v, "BHSD"), operand(o, "BHSD")


def problem_of(q, k, config, **options) -> Problem:
    return validate(
        [q.shape, k.shape, k.shape], [str(q.dtype)] * 3, config=config, backend="cupy", is_causal=False, **options
    )


def attend(
    path: str, q: Any, k: Any, v: Any, lists: KeyLists, *, per_tile: bool = False, segment: int | None = None,
    q_order: Any = None, start: tuple[Any, Any, Any] | None = None, page_size: int | None = None,
    problem: Problem | None = None, scale: float | None = None, softcap: float = 0.0, value_skip: Any = None,
    **config: Any,
) -> Attended:  # fmt: skip
    """`cuda.lists.attend_lists` of host or CuPy arrays, into poisoned outputs. ``start``: output, lse and state
    [B, H, Lq, 2] of a pass before. ``page_size``: k and v are put into a cache."""
    import cupy

    from s2o_cupy.cuda.lists import ListPointers, SkipPointers, attend_lists

    settings = S2OConfig(**({"tau": 0.0} | config), path=path)
    problem = problem or problem_of(q, k, settings, scale=scale, softcap=softcap)
    shape = ScheduleShape(
        lists.begins.shape[1], lists.unit, per_tile, segment, start is not None, value_skip=value_skip
    )
    assert lists.begins.shape == shape.lists_shape(problem, settings.block_m)
    paging, table = None, None
    if page_size is not None:
        lengths = [k.shape[2]] * len(k)
        host_table, pages = random_table(np.random.default_rng(1), lengths, page_size)
        k, v = (paged(x, host_table, pages, page_size, "HND", lengths) for x in (k, v))
        table = cupy.asarray(host_table)
        paging = Paging(table.data.ptr, table.shape[1], page_size, pages)
    q, k, v = (cupy.asarray(x) for x in (q, k, v))
    o = cupy.full(q.shape, np.nan, np.float32).astype(q.dtype)
    lse = cupy.full(q.shape[:3], np.nan, np.float32)
    state = 0
    if start is not None:
        o[...], lse[...] = cupy.asarray(start[0]), cupy.asarray(start[1])
        start_state = cupy.ascontiguousarray(cupy.asarray(start[2], dtype=np.float32))
        state = start_state.data.ptr
    visited = cupy.full(shape.visited_shape(problem, settings.block_m), -1, np.int32)
    skips: dict[str, Any] = {}
    if value_skip is not None:
        groups = settings.block_m // value_rows(path, q.shape[-1], settings.block_m)
        blocks = -(-problem.seqlen_k // SHORTEST_STEP)
        skips["skipped"] = cupy.full(visited.shape, -1, np.int32)
        skips["found"] = cupy.zeros((*visited.shape, groups, blocks), np.int32)
    entries, keys = (cupy.asarray(x, dtype=np.int32) for x in (lists.entries, lists.keys))
    begins = cupy.asarray(lists.begins, dtype=np.int64)
    order = None if q_order is None else cupy.asarray(q_order, dtype=np.int32)
    pointers = ListPointers(
        entries.data.ptr, begins.data.ptr, keys.data.ptr, q_order=0 if order is None else order.data.ptr
    )
    plan = attend_lists(
        Call(operands(q, k, v, o), lse.data.ptr, visited.data.ptr, problem, paging), pointers, shape, settings.of_pass,
        stream=cupy.cuda.get_current_stream().ptr, state=state,
        skips=SkipPointers(**{name: x.data.ptr for name, x in skips.items()}),
    )  # fmt: skip
    assert plan.path == path
    found = Attended(*(cupy.asnumpy(x) for x in (o, lse, visited, *skips.values())))
    if value_skip is not None:
        found.found_skips = found.found_skips.astype(bool)
    return found


def undefined(
    found: Attended, q: Any, k: Any, v: Any, lists: KeyLists, *, scale: float | None = None, softcap: float = 0.0,
    **options: Any,
) -> list[str]:  # fmt: skip
    """What of ``found`` is not the definition's, given how many key tiles each q tile visited."""
    q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
    options |= {"scale": scale or q.shape[-1] ** -0.5, "softcap": softcap, "visited": found.visited}
    exact = s2o.finish(definition(q64, k64, v64, lists, **options)[0])
    weight = s2o.finish(definition(q64, k64, np.abs(v64), lists, **options)[0])[0]  # sum p |v| / l
    return beyond_rounding(found.o, found.lse, exact, weight, q, k, scale=scale, softcap=softcap)


def assert_defined(*arguments: Any, **options: Any) -> None:
    assert undefined(*arguments, **options) == []


def value_rows(path: str, head_dim: int, block_m: int) -> int:
    """Rows of a group that leaves out values together."""
    wide = path == "hopper" or (head_dim <= 128 and block_m == 128)
    return VALUE_ROWS[path] // (1 if wide else 2)


def wrong_skips(
    path: str, found: Attended, q: Any, k: Any, v: Any, lists: KeyLists, limits: Any, *, scale: float | None = None,
    softcap: float = 0.0, block_m: int = 128, start: s2o.State | None = None, **options: Any,
) -> list[str]:  # fmt: skip
    """What is not the definition's of a call that left out values: which, how many, and what follows from these."""
    q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
    options |= {
        "scale": scale or q.shape[-1] ** -0.5, "softcap": softcap, "visited": found.visited, "block_m": block_m,
    }  # fmt: skip
    head_dim = q.shape[-1]
    halved = 64 < head_dim <= 128 and head_dim % 8 and block_m == 128
    keys = VALUE_KEYS // 2 if halved else VALUE_KEYS
    given = ValueSkips(limits, value_rows(path, head_dim, block_m), keys, given=found.found_skips)
    exact = s2o.finish(definition(q64, k64, v64, lists, start, values=given, **options)[0])
    weight = s2o.finish(definition(q64, k64, np.abs(v64), lists, start, values=given, **options)[0])[0]
    reach = _score_error(q64, k64, q.shape[1] // k.shape[1], q.shape[-1], options["scale"], softcap).max()
    off = 2 * reach + 2.0**-10
    limits = np.broadcast_to(limits, (q.shape[1],))
    wrong = []
    # What is left out the rule leaves out. What it leaves out is left out on the portable path; on Hopper the maximum
    # may lag behind, but not behind that after the first block.
    least = given.margins if path == "portable" else given.from_first
    for at, skips in given.found.items():
        if (given.margins[at][skips] > limits[at[1]] + off).any():
            wrong.append("too many")
        if (least[at][~skips] < limits[at[1]] - off).any():
            wrong.append("too few")
    if not np.array_equal(found.skipped, given.skipped(found.visited.shape)):
        wrong.append("pairs")
    wrong += beyond_rounding(found.o, found.lse, exact, weight, q, k, scale=scale, softcap=softcap,
                             launches=1 + (start is not None))  # fmt: skip
    return list(dict.fromkeys(wrong))


def wrong_by_random_lists(
    case: Case, path: str, unit: int, page_size: int | None = None, value_skip: float | None = None
) -> list[str]:
    """Of a case's arrays, with a list for each q tile of each KV head; what of its segments and stops is not read."""
    q, k, v = case.arrays()
    lists = random_lists(
        np.random.default_rng(0), q.shape, k.shape[2], list_heads=case.kv_heads, unit=unit, per_tile=True,
        block_m=case.block_m,
    )  # fmt: skip
    tiles: dict[str, Any] = {"block_m": case.block_m}
    found = attend(path, q, k, v, lists, per_tile=True, page_size=page_size, value_skip=value_skip, **tiles)
    if value_skip is not None:
        return wrong_skips(path, found, q, k, v, lists, value_skip, **tiles)
    return undefined(found, q, k, v, lists, **tiles)


def moved_by_unlisted(path: str, head_dim: int, unit: int, keys: int, **options: Any) -> list[str]:
    """What NaN in the keys and values of no list change: of so many ``keys`` a list may end within a unit."""
    rng = np.random.default_rng(0)
    q, (k, v) = rng.standard_normal((1, 2, 128, head_dim)), rng.standard_normal((2, 1, 1, 512, head_dim))
    entries = np.arange(-(-keys // unit), dtype=np.int32)[::-1].copy()
    lists = KeyLists(entries, np.zeros((1, 1, 1), np.int64), np.full((1, 1, 1), keys, np.int32), unit)
    found = []
    for _ in range(2):
        of_q, of_k, of_v = (x.astype(np.float16) for x in (q, k, v))
        found.append(attend(path, of_q, of_k, of_v, lists, **options))
        unlisted = np.setdiff1d(np.arange(512), lists.positions(0, 0, 0, 0))
        k[:, :, unlisted] = v[:, :, unlisted] = np.nan
    return found[0].differing(found[1])


# ---------------------------------------------------------------- S2O as a producer of lists


@dataclass
class S2OStages:
    """What S2O on the GPU made on its way."""

    problem: Problem
    chunks: list[Any]
    entries: Any = None  # the orders of all rounds, one behind the other
    q_order: Any = None  # int32 [heads, segments, segment]; None: a segment is one q tile
    o1: Any = None
    lse1: Any = None
    state: Any = None
    attended: Any = None


def s2o_stages(q, k, v, config, softcap) -> S2OStages:
    import cupy

    from s2o_cupy.cuda import pipeline

    problem = validate(
        [q.shape, k.shape, k.shape], [str(q.dtype)] * 3, config=config, backend="cupy", is_causal=True, softcap=softcap
    )
    q, k, v = (cupy.asarray(x) for x in (q, k, v))
    o, lse = cupy.zeros(q.shape, q.dtype), cupy.zeros(q.shape[:3], np.float32)
    visited = cupy.zeros(problem.visited_shape(config), np.int32)
    found, orders = S2OStages(problem, []), []

    def observe(stage, arrays):
        if stage == "pass1":
            found.o1, found.lse1, found.state = o.copy(), lse.copy(), arrays["state"].copy()
        elif stage == "rank_queries":
            found.q_order = cupy.asnumpy(arrays["q_order"]) if "q_order" in arrays else None
        elif stage == "rank_keys":
            found.chunks.append(arrays["chunk"])
            orders.append(arrays["k_order"][: arrays["chunk"].elements].copy())

    pipeline.run(
        Call(operands(q, k, v, o), lse.data.ptr, visited.data.ptr, problem), config,
        stream=cupy.cuda.get_current_stream().ptr, observe=observe,
    )  # fmt: skip
    found.entries = cupy.concatenate(orders)
    found.attended = Attended(*(cupy.asnumpy(x) for x in (o, lse, visited)))
    return found


def by_lists_of_s2o(
    q: Any, k: Any, v: Any, config: S2OConfig, softcap: float = 0.0, page_size: int | None = None
) -> tuple[Attended, S2OStages, Any]:
    """Rows in S2O's order, resuming its pass 1 with its lists; S2O itself; and the keys of each list [H, N]."""
    stages = s2o_stages(q, k, v, config, softcap)
    seqlen, heads = q.shape[2], q.shape[1]
    geometry = Geometry(seqlen, seqlen, config.segment, config.window, unit=config.unit)
    begins, keys = order_lists(stages.chunks, geometry, heads)
    queries = [geometry.queries(n) for n in range(geometry.segments)]
    q_order = None
    if stages.q_order is not None:  # else a segment is one q tile
        of_segments = [stages.q_order[:, n, : end - begin] + begin for n, (begin, end) in enumerate(queries)]
        q_order = np.concatenate(of_segments, axis=-1)
    found = attend(
        config.path, q, k, v, KeyLists(stages.entries, begins[None], keys[None], config.unit), segment=config.segment,
        q_order=q_order, start=(stages.o1, stages.lse1, stages.state), page_size=page_size,
        problem=stages.problem, tau=config.tau,
    )  # fmt: skip
    return found, stages, keys


def unlike_s2o(case: Case, path: str) -> list[str]:
    """Of a case's arrays, what S2O by lists of its own does otherwise."""
    found, stages, _ = by_lists_of_s2o(*case.arrays(), case.config(path))
    return found.differing(stages.attended)
