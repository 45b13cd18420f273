"""What the GPU decided and computed at every stage of a call, copied to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem
from ..spec import LN2, Geometry, S2OConfig
from . import diff_query_weights as by_query
from .diff_fp8 import Fp8Cache

__all__ = ["BeforeTail", "GpuStages", "capture", "listed"]

Array = Any  # numpy.ndarray


class BeforeTail(NamedTuple):
    """What visited keys alone give, on the host."""

    o: Array  # [B, H, Lq, D], of the input's dtype
    lse: Array  # float32 [B, H, Lq]
    is_read: bool = True  # whether the tail was added to this o; else pass 2 has added it before it rounded


@dataclass
class GpuStages:
    """What the GPU decided and computed, on the host. Floats are float32 unless said."""

    pooled: Array  # [B, H, N, R, D]
    q_order: Array  # int32 [B, H, N, S]
    unit_keys: Array | None  # [B, Hkv, U, 2, D], of rank="weight"
    scores: list[Array]  # of each segment but those of dense_last [B, H, W] float16, of whole units
    k_order: list[Array]  # likewise int32 [B, H, W or W + 1], units: a short one is the last
    least_keys: list[Array]  # likewise int32 [B, H]; 0 without `S2OConfig.has_least_keys`
    o1: Array  # [B, H, Lq, D], of the input's dtype
    m1: Array  # [B, H, Lq], natural log
    l1: Array  # [B, H, Lq]
    visited: Array  # int32 [B, H, N, T]
    o: Array  # [B, H, Lq, D], of the input's dtype
    lse: Array  # [B, H, Lq]
    before_tail: BeforeTail | None = None  # of a call with a tail
    query: by_query.QueryStages | None = None  # of rank="query"
    read: tuple[Array, Array] | None = None  # keys and values of a cache of 8 bits, [B, Hkv, Lk, D] of q's dtype
    path: str = "portable"  # which kernels ran
    path_reason: str | None = None  # S2OStats.path_reason


def capture(q: Any, k: Any, v: Any, problem: Problem, config: S2OConfig, cache: Fp8Cache | None = None) -> GpuStages:
    """Run the GPU pipeline on CuPy arrays [B, H, L, D], or with what ``cache`` holds as k and v, and copy every stage
    to the host."""
    import cupy

    from ..arrays.operand import Call, Paging, Scale, address, operand
    from ..cuda import pipeline
    from ..reference import s2o

    config = replace(config, dense_up_to=0)  # every stage is to be seen
    geometry = problem.geometry(config)
    batch, heads, segments = problem.batch, problem.heads, geometry.segments
    ordered = config.dense_from(geometry)
    pooled_queries = config.pooled_queries if config.pools_queries else 0
    kv_heads = problem.kv_heads
    head_dim = problem.head_dim
    stages = GpuStages(
        pooled=np.zeros((batch, heads, segments, pooled_queries, head_dim), np.float32),
        q_order=np.tile(np.arange(geometry.segment, dtype=np.int32), (batch, heads, segments, 1)),
        unit_keys=None,
        scores=[np.empty((batch, heads, geometry.ranked(n)), np.float16) for n in range(ordered)],
        k_order=[np.empty((batch, heads, listed(n, geometry)), np.int32) for n in range(ordered)],
        least_keys=[np.zeros((batch, heads), np.int32) for _ in range(ordered)],
        o1=None,
        m1=None,
        l1=None,
        visited=None,
        o=None,
        lse=None,
    )

    def observe(stage: str, arrays: Mapping[str, Any]) -> None:
        def host(name: str) -> Array:
            return cupy.asnumpy(arrays[name])

        if stage == "fp8_pages":
            stages.read = host("keys").view(q.dtype), host("values").view(q.dtype)
        elif stage == "pass1":
            stages.o1 = cupy.asnumpy(out)
            if "state" in arrays:
                state = host("state").reshape(batch, heads, problem.seqlen_q, 2)
                stages.m1, stages.l1 = state[..., 0] * np.float32(LN2), state[..., 1]
        elif config.rank == "query" and stage in ("unit_keys", "unit_rows", "query_norms"):
            stages.query = by_query.capture(stages.query, stage, host, arrays, q.dtype, problem, config)
        elif stage == "rank_queries":
            if "q_order" in arrays:  # else a segment is one q tile
                stages.q_order = host("q_order").reshape(stages.q_order.shape)
            if config.pools_queries:
                with np.errstate(invalid="ignore"):  # memory of empty runs holds anything
                    means = host("means").view(q.dtype).astype(np.float32)
                stages.pooled = means.reshape(batch, heads, segments, pooled_queries, -1)[..., :head_dim]
        elif stage == "unit_keys":
            of_units = host("unit_keys").view(q.dtype).astype(np.float32)
            stages.unit_keys = of_units.reshape(batch, kv_heads, geometry.units, 2, -1)[..., :head_dim]
        elif stage == "add_tail" and stages.before_tail is not None:
            stages.before_tail = stages.before_tail._replace(is_read=True)
        elif stage == "rank_keys":
            chunk = arrays["chunk"]
            scores, orders = host("scores"), host("k_order")
            least = host("least_keys") if config.has_least_keys else np.zeros((batch * heads, segments), np.int32)
            for n in range(chunk.first_segment, chunk.first_segment + chunk.segments):
                ranked = s2o.ranked_units(n, geometry)
                for i in range(chunk.heads):
                    at, row = divmod(chunk.first_head + i, heads), chunk.place(chunk.first_head + i, n)
                    stages.scores[n][at] = scores[row][ranked]
                    stages.k_order[n][at] = orders[row][: listed(n, geometry)]
                    stages.least_keys[n][at] = least[chunk.first_head + i, n]

    unwritten = cupy.full(q.shape, np.nan, np.float32).astype(q.dtype)
    out = unwritten.copy()
    lse = cupy.full(q.shape[:3], np.nan, np.float32)
    visited = cupy.empty(problem.visited_shape(config), np.int32)
    operands = (operand(q, "BHSD"), operand(k, "BHSD"), operand(v, "BHSD"), operand(out, "BHSD"))
    paging = None
    if cache is not None:
        k_pages, v_pages, table, *scales = (cupy.asarray(x) for x in (*cache.pages, cache.table, *cache.scales))
        operands = (operands[0], operand(k_pages, "BSHD"), operand(v_pages, "BSHD"), operands[3])
        k_scale, v_scale = (Scale(pointer=address(x), stride=1) for x in scales)
        pages, page_size = cache.pages[0].shape[:2]
        stride = table.shape[1] if batch > 1 else 0
        paging = Paging(address(table), stride, page_size, pages, (k_scale, v_scale))
    stream = cupy.cuda.get_current_stream().ptr
    call = Call(operands, address(lse), address(visited), problem, paging)
    if config.adds_tail:  # which pass 2 may add itself
        pipeline.run_stages(call, config, pipeline.WITHOUT_TAIL, stream=stream, memory=pipeline.allocate, taus=0)
        stages.before_tail = BeforeTail(cupy.asnumpy(out), cupy.asnumpy(lse), is_read=False)
        out[...], lse[...] = unwritten, np.nan
    plan = pipeline.run(call, config, stream=stream, observe=observe)
    stages.path, stages.path_reason = plan.path, plan.path_reason
    stages.visited, stages.o, stages.lse = (cupy.asnumpy(x) for x in (visited, out, lse))
    return stages


def listed(n: int, geometry: Geometry) -> int:
    """Units in segment ``n``'s order."""
    return -(-geometry.candidates(n) // geometry.unit)
