"""From a plan to launches: each kernel's parameters, and where in the workspace its arrays lie.

No array and no GPU: addresses are filled in at each call (pipeline.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from ..arrays.operand import ITEM_BYTES, Operand, Paging
from ..problem import MAX_SCALE, Problem
from ..spec import LOG2E, MIDDLE, ORDER_HEAD, S2OConfig
from . import kernels
from .launch_plan import COLLECT_CHUNK, COLLECT_CHUNKS, REFINE_KEYS, SUM_KEYS, LaunchPlan, collected_chunks
from .rounds import Chunk

__all__ = [
    "BASES", "KeySums", "Launch", "Place", "SumsShape", "Workspace", "launches", "listed_launch",
    "packed_collect_launch", "packed_launch", "sum_blocks", "workspace",
]  # fmt: skip

Params = Any  # a 0-d array of a kernel's parameter struct
MAX_FLOAT32 = float(np.finfo(np.float32).max)
ALIGNMENT = 256  # bytes, of an array in the workspace

# What a pointer of a parameter struct starts from.
BASES = ("q", "k", "v", "out", "pages", "sums", "lse", "visited", "workspace")


class Place(NamedTuple):
    """An array in the workspace."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Workspace:
    """Everything that lives between the stages of a call, in one piece of memory."""

    places: dict[str, Place]
    zeroed: int  # leading bytes that must be 0 at the start
    nbytes: int

    def operand(self, name: str, address: int) -> Operand:
        """A [batch, heads, seqlen, head_dim] array in a workspace that begins at ``address``."""
        offset, (batch, heads, seqlen, head_dim), _ = self.places[name]
        strides = (heads * seqlen * head_dim, seqlen * head_dim, head_dim)
        sb, sh, ss = (s if n > 1 else 0 for s, n in zip(strides, (batch, heads, seqlen), strict=True))
        return Operand(address + offset, (batch, heads, seqlen, head_dim), (sb, sh, ss))


@dataclass(frozen=True)
class Launch:
    """One kernel of a call. ``pointers``: (byte offset in params, base, bytes from the base)."""

    stage: str
    kernel: kernels.Kernel
    blocks: int
    params: Params
    pointers: tuple[tuple[int, str, int], ...]
    chunk: Chunk | None = None


class SumsShape(NamedTuple):
    """Sums of keys and values that calls on one sequence share: float32 [batch * kv_heads, blocks, 2, width]."""

    blocks: int  # of SUM_KEYS keys, that there is room for
    first_block: int  # those before it are made


class KeySums(NamedTuple):
    """Where they are."""

    pointer: int
    shape: SumsShape


def sum_blocks(keys: int) -> int:
    """Blocks of SUM_KEYS keys."""
    return -(-keys // SUM_KEYS)


def workspace(
    plan: LaunchPlan, problem: Problem, config: S2OConfig, sums: SumsShape | None = None
) -> Workspace:
    """Counters come first: they start from 0. ``sums``: the caller's, which are then not in it."""
    heads, geometry = problem.batch * problem.heads, plan.geometry
    arrays: list[tuple[str, tuple[int, ...], str]] = [
        ("next_q_tile", (1 + len(plan.chunks),), "int32"),  # a counter for each launch of pass 1 or 2
        ("visited", problem.visited_shape(config), "int32"),  # where the caller does not ask for it
    ]
    counters = len(arrays)
    if plan.keeps_state:
        arrays.append(("state", (heads, problem.seqlen_q, 2), "float32"))  # (m in log2 units, l)
    if plan.chunks:
        width = plan.pass1.head_dim
        pooled_queries = (heads, geometry.segments, config.coarse.pooled_queries or 1, width)
        arrays += [
            ("guide", (problem.batch * problem.kv_heads, 2, width), "float32"),
            ("means", pooled_queries, "uint16"),
            ("q_order", (heads, geometry.segments, geometry.segment), "int32"),
            ("scores", (plan.workspace_elements,), "float16"),  # rows of a chunk
            ("k_order", (plan.workspace_elements,), "int32"),  # likewise
            ("order_head_scores", (plan.order_head_rows, ORDER_HEAD), "float16"),
            ("middle", (plan.middle_rows, MIDDLE), "int32"),
            ("middle_scores", (plan.middle_rows, MIDDLE), "float16"),
        ]
    if plan.chunks and config.adds_tail:
        kv_heads = problem.batch * problem.kv_heads
        if sums is None:
            arrays.append(("sums", (kv_heads, sum_blocks(problem.seqlen_k), 2, plan.pass1.head_dim), "float32"))
        arrays += [
            ("candidate_means", (kv_heads, geometry.segments, 2, plan.pass1.head_dim), "float32"),
            ("tail", (heads, problem.seqlen_q), "float32"),
        ]
    if plan.chunks and config.probes(problem.scale):
        arrays += [
            ("deficits", (heads, len(geometry.probed())), "float32"),
            ("refined", (heads, geometry.segments), "int32"),
            ("norms", (heads, geometry.segments, config.pooled_queries or 1), "float32"),
        ]
    if plan.collect_pages is not None:
        collected = (problem.batch, problem.kv_heads, problem.seqlen_k, problem.head_dim)
        arrays += [("keys", collected, "uint16"), ("values", collected, "uint16")]
    places: dict[str, Place] = {}
    end = zeroed = 0
    for i, (name, shape, dtype) in enumerate(arrays):
        places[name] = Place(end, shape, dtype)
        end += -(-places[name].nbytes // ALIGNMENT) * ALIGNMENT
        if i < counters:
            zeroed = end
    return Workspace(places, zeroed, end)


def launches(
    plan: LaunchPlan,
    problem: Problem,
    config: S2OConfig,
    operands: dict[str, Operand],
    memory: Workspace,
    aligned: bool,
    paging: Paging | None = None,
    sums: SumsShape | None = None,
) -> tuple[Launch, ...]:
    """All launches of a call in order. ``operands``: q, k, v and out, of which only the strides are read. ``paging``:
    where k and v are a paged cache; its address apart, as that of the caller's ``sums``."""
    builder = _Builder(plan, problem, config, operands, memory, aligned, paging, sums)
    found = [builder.collect_pages(plan.collect_pages)] if plan.collect_pages else []
    found.append(builder.pass1())
    if plan.chunks:
        if config.adds_tail:
            found += builder.candidate_means()
        found += builder.rank_queries()
        if config.probes(problem.scale):
            found += builder.probes()
        for chunk in plan.chunks:
            found += builder.rank_keys(chunk)
            found.append(builder.pass2(chunk))
    return tuple(found)


def packed_launch(
    plan: LaunchPlan, kernel: kernels.Kernel, problem: Problem, config: S2OConfig, operands: dict[str, Operand],
    aligned: bool, paging: Paging | None = None,
) -> Launch:  # fmt: skip
    """Pass 1 of packed sequences; lengths and addresses are for the caller to fill in."""
    builder = _Builder(plan, problem, config, operands, Workspace({}, 0, 0), aligned, paging)
    return builder.packed_pass1(kernel)


def listed_launch(
    plan: LaunchPlan, kernel: kernels.Kernel, problem: Problem, config: S2OConfig, operands: dict[str, Operand],
    aligned: bool, paging: Paging | None, lists: Values,
) -> Launch:  # fmt: skip
    """Pass 2 by lists of keys, all in one launch; addresses are for the caller to fill in. ``lists``: KeyLists."""
    builder = _Builder(plan, problem, config, operands, Workspace({}, 0, 0), aligned, paging)
    return builder.listed_pass2(kernel, lists)


def packed_collect_launch(
    plan: LaunchPlan, kernel: kernels.Kernel, problem: Problem, config: S2OConfig, operands: dict[str, Operand],
    paging: Paging,
) -> Launch:  # fmt: skip
    """Copies of packed sequences' keys and values from pages; likewise."""
    builder = _Builder(plan, problem, config, operands, Workspace({}, 0, 0), True, paging)
    return builder.collect_pages(kernel, sequences=0)


Values = dict[str, Any]  # of a parameter struct, by name


def _fill(kernel: kernels.Kernel, values: Values) -> Params:
    """A kernel's parameters without addresses."""
    params = kernel.family.params
    return params.fill({"attention": values} if params.map_bytes else values)


class _Builder:
    def __init__(
        self,
        plan: LaunchPlan,
        problem: Problem,
        config: S2OConfig,
        operands: dict[str, Operand],
        memory: Workspace,
        aligned: bool,
        paging: Paging | None,
        sums: SumsShape | None = None,
    ) -> None:
        self.sums = sums
        self.bases = BASES if sums else tuple(name for name in BASES if name != "sums")
        stride, page_size = (0, 1) if paging is None else (paging.stride, paging.page_size)
        self.pages = {"stride": stride, "shift": page_size.bit_length() - 1}
        self.plan, self.problem, self.config, self.memory, self.aligned = plan, problem, config, memory, aligned
        self.tensors = {
            name: dict(zip(("batch", "head", "row"), x.strides, strict=True)) for name, x in operands.items()
        }
        g = plan.geometry
        window = min(g.window, g.seqlen_k)  # the same keys, and 32 bits hold it
        self.geometry = {
            "seqlen_q": g.seqlen_q,
            "seqlen_k": g.seqlen_k,
            "segment": g.segment,
            "window": window,
            "is_causal": g.is_causal,
            "head_dim": problem.head_dim,
        }
        self.attention_launches = 0

    def _launch(
        self, stage: str, kernel: kernels.Kernel, blocks: int, params: Params, chunk: Chunk | None = None, **extra: int
    ) -> Launch:
        """``extra``: bytes further into the array that a pointer of this name reads."""
        pointers = []
        for names, offset in kernel.family.params.pointers:
            for name in names:
                if name in self.bases:  # of the caller
                    pointers.append((offset, name, 0))
                elif name in self.memory.places:
                    further = self.memory.places[name].offset + extra.get(name, 0)
                    pointers.append((offset, "workspace", further))
        return Launch(stage, kernel, blocks, params, tuple(pointers), chunk)

    @staticmethod
    def _chunk(chunk: Chunk) -> Values:
        return {field.name: getattr(chunk, field.name) for field in fields(Chunk)}

    def _attention(self, stage: str, kernel: kernels.Kernel, chunk: Chunk, tiles: int, **more: Any) -> Launch:
        p, q_tiles = self.problem, chunk.rows * tiles
        values: Values = {
            **self.tensors,
            "geometry": self.geometry,
            "chunk": self._chunk(chunk),
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "tiles": tiles,
            "steps_per_tile": max(1, self.config.block_n // kernel.step),
            "q_tiles": q_tiles,
            "scale_log2": (p.softcap or abs(p.scale)) * LOG2E,
            "sign_mask": 0x80008000 if p.scale < 0 else 0,
            "tau": self.config.tau if self.config.tau <= MAX_FLOAT32 else math.inf,
            "cap_scale": min(abs(p.scale) / p.softcap, MAX_SCALE) if p.softcap else 0.0,
            "pages": self.pages,
            **more,
        }
        blocks = min(q_tiles, self.plan.persistent_blocks) if kernel.family.arch == "sm_90a" else q_tiles
        counter = self.attention_launches * 4
        self.attention_launches += 1
        return self._launch(stage, kernel, blocks, _fill(kernel, values), chunk, next_q_tile=counter)

    def collect_pages(self, kernel: kernels.Kernel, **more: int) -> Launch:
        p, chunks = self.problem, collected_chunks(self.problem)
        values: Values = {
            "k": self.tensors["k"],
            "v": self.tensors["v"],
            "kv_heads": p.kv_heads,
            "seqlen_k": p.seqlen_k,
            "row_chunks": p.head_dim * ITEM_BYTES // COLLECT_CHUNK,
            "chunks": chunks,
            "pages": self.pages,
            **more,
        }
        return self._launch("collect_pages", kernel, -(-chunks // COLLECT_CHUNKS), _fill(kernel, values))

    def pass1(self) -> Launch:
        return self._attention("pass1", self.plan.pass1, self.plan.whole, self.plan.pass1_tiles)

    def packed_pass1(self, kernel: kernels.Kernel) -> Launch:
        return self._attention("pass1", kernel, self.plan.whole, self.plan.pass1_tiles, sequences=0)

    def pass2(self, chunk: Chunk) -> Launch:
        return self._attention("pass2", self.plan.pass2, chunk, self.plan.tiles)

    def listed_pass2(self, kernel: kernels.Kernel, lists: Values) -> Launch:
        return self._attention("pass2", kernel, self.plan.whole, self.plan.tiles, lists=lists)

    def candidate_means(self) -> list[Launch]:
        p, plan = self.problem, self.plan
        blocks, first = self.sums or (sum_blocks(p.seqlen_k), 0)
        made = sum_blocks(p.seqlen_k) - first
        values: Values = {
            "k": self.tensors["k"],
            "v": self.tensors["v"],
            "geometry": self.geometry,
            "kv_heads": p.kv_heads,
            "blocks": blocks,
            "first_block": first,
            "made": made,
            "aligned": self.aligned,
            "pages": self.pages,
        }
        pairs = 2 * p.batch * p.kv_heads  # k and v of each KV head
        stages = (
            ("block_sums", plan.block_sums, pairs * made),
            ("candidate_means", plan.candidate_means, pairs * plan.geometry.segments),
        )
        return [self._launch(stage, kernel, blocks, _fill(kernel, values)) for stage, kernel, blocks in stages]

    def rank_queries(self) -> list[Launch]:
        p, plan, config = self.problem, self.plan, self.config
        values: Values = {
            "q": self.tensors["q"],
            "k": self.tensors["k"],
            "geometry": self.geometry,
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "pooled_queries": config.coarse.pooled_queries,
            "run": config.coarse.run,
            "sort_slots": plan.sort_slots,
            "sign": -1.0 if p.scale < 0 else 1.0,
            "scale_log2": abs(p.scale) * LOG2E,
            "pages": self.pages,
        }
        return [
            self._launch("guides", plan.guides, p.batch * p.kv_heads * 2, _fill(plan.guides, values)),
            self._launch("rank_queries", plan.rank_queries, plan.whole.rows, _fill(plan.rank_queries, values)),
        ]

    def _refine(self, chunk: Chunk) -> tuple[Values, int]:
        """Parameters of the kernels of refine.cu, and the blocks of refined_scores."""
        p, config, geometry = self.problem, self.config, self.plan.geometry
        key_blocks = -(-chunk.longest // REFINE_KEYS)
        values: Values = {
            "q": self.tensors["q"],
            "k": self.tensors["k"],
            "geometry": self.geometry,
            "chunk": self._chunk(chunk),
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "pooled_queries": config.pooled_queries,
            "run": config.run,
            "probe_run": config.probe_run,
            "first_ordered": geometry.first_ordered,
            "probes": len(geometry.probed()),
            "key_blocks": key_blocks,
            "aligned": self.aligned,
            "scale_log2": abs(p.scale) * LOG2E,
            "sign": -1.0 if p.scale < 0 else 1.0,
            "pages": self.pages,
        }
        if self.plan.refined_scores.family.arch == "sm_90a":  # shares all rows' work among blocks that run at once
            return values, 2 * self.plan.persistent_blocks
        return values, chunk.rows * key_blocks

    def probes(self) -> list[Launch]:
        plan, values = self.plan, self._refine(self.plan.whole)[0]
        probes = self.problem.batch * self.problem.heads * len(plan.geometry.probed())
        return [
            self._launch("probe", plan.probe, probes, _fill(plan.probe, values)),
            self._launch("refined_norms", plan.refined_norms, plan.whole.rows, _fill(plan.refined_norms, values)),
        ]

    def rank_keys(self, chunk: Chunk) -> list[Launch]:
        p, plan, config = self.problem, self.plan, self.config
        row_blocks, key_blocks = plan.score_blocks(chunk)
        values: Values = {
            "k": self.tensors["k"],
            "geometry": self.geometry,
            "chunk": self._chunk(chunk),
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "pooled_queries": config.coarse.pooled_queries,
            "run": config.coarse.run,
            "row_blocks": row_blocks,
            "key_blocks": key_blocks,
            "strata_blocks": chunk.strata_blocks,
            "scale_log2": abs(p.scale) * LOG2E,
            "pages": self.pages,
        }
        steps = [("key_scores", plan.key_scores, chunk.heads // chunk.shared_heads * row_blocks * key_blocks, values)]
        if config.probes(p.scale):
            refined, blocks = self._refine(chunk)
            steps.append(("refined_scores", plan.refined_scores, blocks, refined))
        if chunk.strata_blocks:
            steps.append(("key_strata", plan.key_strata, chunk.row_pairs * chunk.strata_blocks, values))
        if chunk.middle_blocks:
            steps.append(("key_middle", plan.key_middle, chunk.rows * chunk.middle_blocks, values))
        steps.append(("rank_keys", plan.key_order_head, chunk.rows, values))
        return [self._launch(stage, kernel, blocks, _fill(kernel, its), chunk) for stage, kernel, blocks, its in steps]
