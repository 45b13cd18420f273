"""What `S2OConfig.dense_last` asks for: the last queries of a call attend to all their keys.

A q tile that walks all keys, one tile of them after the other, would take longer than all the rest of a call of few
heads (docs/notebook/accuracy.md). So the candidates of such a segment are cut into parts. Pass 2 by lists, which starts
from nothing, attends to each in a q tile of its own, and a kernel merges their outputs with what pass 1 left. How a
segment is cut depends on where it stands and on the number of heads of the whole call alone.
Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays.operand import ENTRY_BYTES, ITEM_BYTES, Operand
from ..problem import Problem
from ..spec import Geometry
from .build import Array, Builder, Launch, geometry_of
from .kernels import Family, Inputs, Kernel
from .launches import attention_launch
from .maps import Read, maps_of_pass2
from .method import Setting
from .rounds import Chunk, Grid, near_heads
from .schedule import ScheduleShape

__all__ = ["LastQueries", "kernels"]

MOST_PARTS, LEAST_PART_KEYS, PART_GRAIN = 16, 1024, 128  # the last two as in raw_kernels/last_queries/parts.cuh
# Q tiles at a time, whatever the GPU, so that each rounds as the others do; what a tile costs, as a part of all keys.
PART_TILES, TILE_START = 132, 1 / 80
MERGE_ROWS = 4  # of a block: a warp each
PART_LISTS = Kernel(
    Family("part_lists", "last_queries/part_lists.cu", "PartListsParams", 256, 4, knows_segments=False)
)
MERGE_LAST = Family(
    "merge_last", "last_queries/merge_last.cu", "MergeLastParams", 32 * MERGE_ROWS, 4,
    "MergeLastTraits<{element}, {head_dim}>", knows_segments=False,
)  # fmt: skip
# What pass 2 reads and writes of parts in place of its own arrays; what has no array is null.
OF_PARTS = {
    "out": "part_out", "lse": "part_lse", "visited": "part_visited", "next_q_tile": "part_counters",
    "lists.entries": "part_entries", "lists.begins": "part_begins", "lists.keys": "part_keys", "state": "", "taus": "",
    "least_keys": "", "q_order": "", "k_order": "",
}  # fmt: skip


def kernels(inputs: Inputs) -> Iterator[Kernel]:
    """Those that are of nothing else."""
    yield PART_LISTS
    yield merge_last(inputs)


def merge_last(inputs: Inputs) -> Kernel:
    return Kernel(MERGE_LAST, inputs.dtype, inputs.head_dim)


@functools.lru_cache
def most_parts(heads: int) -> int:
    """Parts of a segment's keys in a call of so many query heads, if they are not too short: as many as take the least
    time, of two segments and of three, as prompts of any length have them at their end."""

    def time(parts: int) -> float:
        rounds = sum(-(-segments * heads * parts // PART_TILES) for segments in (2, 3))
        return rounds * (1 / parts + TILE_START)

    return min(range(1, MOST_PARTS + 1), key=time)


def parts_of(geometry: Geometry, n: int, heads: int) -> int:
    """Of the keys before segment ``n``'s dense ones (KeyPart in raw_kernels/last_queries/parts.cuh)."""
    before, most = geometry.dense_keys(n)[0], most_parts(heads)
    return -(-before // max(-(-before // (most * PART_GRAIN)) * PART_GRAIN, LEAST_PART_KEYS))


class Piece(NamedTuple):
    """What is attended and then merged: neighbouring sequences, heads and segments."""

    sequence: int
    sequences: int
    first_head: int
    heads: int
    first_segment: int
    segments: int


class LastQueries:
    """The last queries of one setting, from segment ``first`` on."""

    def __init__(self, setting: Setting, first: int, budget: int) -> None:
        """``budget``: bytes that parts' outputs may take, if those of one segment and KV head do."""
        self.setting, self.first = setting, first
        problem, geometry = setting.problem, setting.geometry
        self.segments = geometry.segments - first
        self.parts = max(parts_of(geometry, n, problem.all_heads) for n in range(first, geometry.segments))
        self.parts += not problem.is_causal
        rows = min(geometry.segment, problem.seqlen_q)
        fits = budget // (self.parts * rows * (setting.inputs.head_dim * ITEM_BYTES + 4))  # segments of one head
        self.group = group = problem.heads // problem.kv_heads
        # Of many sequences one part at a time, or else all parts of one sequence: q has no stride for both.
        self.by_part = problem.batch > self.parts and fits // problem.batch >= group
        sequences = problem.batch if self.by_part else 1
        fits //= sequences
        self.segments_each = max(1, min(fits // problem.heads, self.segments))
        self.heads_each = problem.heads if fits >= problem.heads else max(1, fits // group) * group
        self.pieces = [
            Piece(
                b, sequences, h, min(self.heads_each, problem.heads - h),
                n, min(self.segments_each, geometry.segments - n),
            )
            for n, b, h in itertools.product(
                range(first, geometry.segments, self.segments_each),
                range(0, problem.batch, sequences),
                range(0, problem.heads, self.heads_each),
            )
        ]  # fmt: skip
        self.launches_each = self.parts if self.by_part else 1
        self.tiles = geometry.block_count(setting.config.block_m)
        # Neighbouring keys that an entry of a list stands for. Each part begins with a whole unit: parts are cut at
        # multiples of PART_GRAIN, but keys behind the dense ones, which a causal call has not, at the geometry's units.
        self.unit = PART_GRAIN if problem.is_causal else geometry.unit
        self.units = -(-geometry.seqlen_k // self.unit)

    @property
    def largest_grid(self) -> int:
        piece = self.pieces[0]
        return max(self.parts, piece.sequences) * piece.heads * piece.segments * self.tiles

    def arrays(self) -> list[Array]:
        width, lists = self.setting.inputs.head_dim, self.parts * self.segments
        rows = max(self.parts * x.sequences * x.heads * self._rows(x) for x in self.pieces)
        return [
            ("part_out", (rows, width), "uint16"),  # [parts, sequences, heads, rows] of a piece
            ("part_lse", (rows,), "float32"),
            ("part_visited", (self.largest_grid,), "int32"),  # nobody reads it
            ("part_entries", (self.units,), "int32"),
            ("part_begins", (lists,), "int64"),
            ("part_keys", (lists,), "int32"),
            ("part_counters", (self._attends,), "int32"),
        ]

    def launches(self, build: Builder) -> list[Launch]:
        """After pass 1."""
        s, lists = self.setting, self.parts * self.segments
        values = {
            "geometry": build.geometry, "first_segment": self.first, "segments": self.segments,
            "segments_each": self.segments_each, "parts": self.parts, "launches": self._attends,
            "units": self.units, "unit_shift": self.unit.bit_length() - 1,
            "most_parts": most_parts(s.problem.all_heads),
        }  # fmt: skip
        threads = max(self.units, lists, self._attends)
        found = [build.launch("part_lists", PART_LISTS, -(-threads // PART_LISTS.threads), values)]
        counters = itertools.count(step=4)  # bytes
        for piece in self.pieces:
            for part in range(self.launches_each):
                found.append(self._attend(build, piece, part, next(counters)))
            found.append(self._merge(build, piece))
        return found

    @property
    def _attends(self) -> int:
        """Launches of pass 2."""
        return len(self.pieces) * self.launches_each

    def _rows(self, piece: Piece) -> int:
        """Queries of each head."""
        geometry = self.setting.geometry
        end = geometry.queries(piece.first_segment + piece.segments - 1)[1]
        return end - geometry.queries(piece.first_segment)[0]

    def _attend(self, build: Builder, piece: Piece, part: int, counter: int) -> Launch:
        """Of one part the output of all sequences, or of one sequence that of all parts, as if these were sequences
        with one q, k and v. ``counter``: where among the bytes of part_counters it has its own."""
        s, rows, segment = self.setting, self._rows(piece), self.setting.geometry.segment
        batch = piece.sequences if self.by_part else self.parts
        problem = replace(
            s.problem, batch=batch, heads=piece.heads, kv_heads=piece.heads // self.group, seqlen_q=rows,
            is_causal=False,
        )  # fmt: skip
        heads = batch * piece.heads
        table_heads = piece.heads if self.by_part else heads
        lists = ScheduleShape(1, self.unit, segment=segment, table_heads=table_heads).params(problem)
        if self.by_part:
            lists["shared_heads"] = heads
        chunk = Chunk(0, heads, 0, piece.segments, self.group, near_heads(problem, heads), 0, 0)
        page_size = 1 << build.pages["shift"] if s.inputs.paged else 0
        inputs = replace(s.inputs, wants_tail=False)  # which lists have none of
        kernel = s.path.listed(s.path.pass2(inputs, s.limits, s.config.block_m))
        kernel = s.path.by_boxes(kernel, self.unit, problem.head_dim, page_size)
        of_parts, further = self._of_parts(build, piece, problem), self._further(build, piece, part)
        return attention_launch(
            of_parts, "last_queries", kernel, s.config.of_pass,
            Grid(chunk, self.tiles, s.path.blocks(kernel, chunk.rows * self.tiles, s.limits)),
            {"next_q_tile": counter, **further}, OF_PARTS,
            maps_of_pass2(kernel, self._arrays(of_parts, further)), tau=0.0, tau_falls=0.0, lists=lists,
        )  # fmt: skip

    def _of_parts(self, build: Builder, piece: Piece, problem: Problem) -> Builder:
        """With the strides of a piece's parts."""
        s, rows, width = self.setting, self._rows(piece), self.setting.inputs.head_dim
        found = copy.copy(build)
        found.problem = problem
        geometry = Geometry(rows, s.problem.seqlen_k, s.geometry.segment, is_causal=False)
        found.geometry = geometry_of(geometry, s.problem.head_dim)
        found.tensors = {
            **build.tensors,
            "out": {"batch": piece.heads * rows * width, "head": rows * width, "row": width},
        }
        if not self.by_part:
            found.pages = {**build.pages, "stride": 0}
            for name in "q" if s.inputs.paged else "qkv":  # a cache's is from page to page
                found.tensors[name] = {**build.tensors[name], "batch": 0}
        return found

    def _arrays(self, of_parts: Builder, further: dict[str, int]) -> Read:
        """Where a launch of a piece's parts reads q, k and v, with the shapes and strides of those parts."""
        p, found = of_parts.problem, {}
        for name, heads in (("q", p.heads), ("k", p.kv_heads), ("v", p.kv_heads)):
            sequences, rows = p.batch, p.seqlen_q if name == "q" else p.seqlen_k
            if name != "q" and self.setting.inputs.paged:
                sequences, _, rows, _ = of_parts.operands[name].shape  # pages
            batch, head, row = of_parts.tensors[name].values()
            found[name] = name, Operand(further[name], (sequences, heads, rows, p.head_dim), (batch, head, row))
        return found

    def _further(self, build: Builder, piece: Piece, part: int) -> dict[str, int]:
        """Bytes from where arrays begin to what the launch reads and writes first."""
        rows, kv_head = self._rows(piece), piece.first_head // self.group
        begin = self.setting.geometry.queries(piece.first_segment)[0]
        q = build.tensors["q"]
        found = {"q": piece.sequence * q["batch"] + piece.first_head * q["head"] + begin * q["row"]}
        for name in "kv":
            x = build.tensors[name]
            found[name] = kv_head * x["head"] + (0 if self.setting.inputs.paged else piece.sequence * x["batch"])
        found = {name: ITEM_BYTES * elements for name, elements in found.items()}
        found["pages"] = ENTRY_BYTES * piece.sequence * build.pages["stride"]
        before = piece.sequences * piece.heads * rows * part if self.by_part else 0  # rows of other parts
        found |= {"out": ITEM_BYTES * before * self.setting.inputs.head_dim, "lse": 4 * before}
        lists = self.parts * (piece.first_segment - self.first) + part * piece.segments  # of other pieces and parts
        return found | {"lists.begins": 8 * lists, "lists.keys": 4 * lists}

    def _merge(self, build: Builder, piece: Piece) -> Launch:
        s, rows = self.setting, self._rows(piece)
        values: dict[str, Any] = {
            "out": build.tensors["out"], "geometry": build.geometry, "heads": s.problem.heads,
            "sequence": piece.sequence, "sequences": piece.sequences, "first_head": piece.first_head,
            "piece_heads": piece.heads, "first_segment": piece.first_segment, "rows": rows, "parts": self.parts,
            "tiles": self.tiles, "block_m": s.config.block_m, "block_n": s.config.block_n,
        }  # fmt: skip
        blocks = -(-piece.sequences * piece.heads * rows // MERGE_ROWS)
        return build.launch("merge_last", merge_last(s.inputs), blocks, values)
