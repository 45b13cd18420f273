"""What `S2OConfig.dense_last` asks for: the last queries of a call attend to all their keys.

A q tile that walks all keys, one tile of them after the other, would take longer than all the rest of a call of few
heads (docs/notebook/accuracy.md). So the candidates of such a segment are cut into parts. Pass 2 by lists, which starts
from nothing, attends to each in a q tile of its own, and a kernel merges their outputs with what pass 1 left. How a
segment is cut depends on where it stands alone.
Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays.operand import ENTRY_BYTES, ITEM_BYTES
from ..spec import Geometry
from .build import Array, Builder, Launch, geometry_of
from .kernels import Family, Inputs, Kernel
from .launches import attention_launch
from .method import Setting
from .rounds import Chunk, near_heads
from .schedule import ScheduleShape

__all__ = ["LastQueries", "kernels"]

PART_KEYS, MOST_PARTS = 4096, 16  # kPartKeys and kMostParts
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
    "q_order": "", "k_order": "",
}  # fmt: skip


def kernels(inputs: Inputs) -> Iterator[Kernel]:
    """Those that are of nothing else."""
    yield PART_LISTS
    yield _merge(inputs)


def _merge(inputs: Inputs) -> Kernel:
    return Kernel(MERGE_LAST, inputs.dtype, inputs.head_dim)


def parts_of(geometry: Geometry, n: int) -> int:
    """Of the keys before segment ``n``'s dense ones (KeyPart in raw_kernels/last_queries/parts.cuh)."""
    before, each = geometry.dense_keys(n)[0], PART_KEYS
    while each * MOST_PARTS < before:
        each *= 2
    return -(-before // each)


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
        self.parts = max(parts_of(geometry, n) for n in range(first, geometry.segments)) + (not problem.is_causal)
        rows = min(geometry.segment, problem.seqlen_q)
        fits = budget // (self.parts * rows * (setting.inputs.head_dim * ITEM_BYTES + 4))  # segments of one head
        group = problem.heads // problem.kv_heads
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
            ("part_entries", (self.setting.geometry.seqlen_k,), "int32"),
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
        }  # fmt: skip
        threads = max(s.geometry.seqlen_k, lists, self._attends)
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
        s, rows, width, by_part = self.setting, self._rows(piece), self.setting.inputs.head_dim, self.by_part
        group, batch = s.problem.heads // s.problem.kv_heads, piece.sequences if by_part else self.parts
        problem = replace(
            s.problem, batch=batch, heads=piece.heads, kv_heads=piece.heads // group, seqlen_q=rows, is_causal=False
        )
        geometry = Geometry(rows, problem.seqlen_k, s.geometry.segment, is_causal=False)
        q, k, v = (build.tensors[name] for name in "qkv")
        begin, kv_head = s.geometry.queries(piece.first_segment)[0], piece.first_head // group
        before = {"q": piece.sequence * q["batch"] + piece.first_head * q["head"] + begin * q["row"]}
        for name, x in (("k", k), ("v", v)):
            before[name] = kv_head * x["head"] + (0 if s.inputs.paged else piece.sequence * x["batch"])
        further = {name: ITEM_BYTES * elements for name, elements in before.items()}
        further["pages"] = ENTRY_BYTES * piece.sequence * build.pages["stride"]
        heads = batch * piece.heads
        of_part = heads * rows if by_part else 0  # rows of a part's output
        further |= {"out": ITEM_BYTES * part * of_part * width, "lse": 4 * part * of_part}
        list_before = self.parts * (piece.first_segment - self.first) + part * piece.segments
        further |= {"lists.begins": 8 * list_before, "lists.keys": 4 * list_before}

        of_parts = copy.copy(build)
        of_parts.geometry = geometry_of(geometry, problem.head_dim)
        if not by_part:
            of_parts.pages = {**build.pages, "stride": 0}
            q = {**q, "batch": 0}
            if not s.inputs.paged:  # a cache's is from page to page
                k, v = {**k, "batch": 0}, {**v, "batch": 0}
        out = {"batch": piece.heads * rows * width, "head": rows * width, "row": width}
        of_parts.tensors = {"q": q, "k": k, "v": v, "out": out}
        chunk = Chunk(0, heads, 0, piece.segments, group, near_heads(problem, heads), 0, 0)
        shape = ScheduleShape(1, segment=geometry.segment, table_heads=piece.heads if by_part else heads)
        lists = shape.params(problem)
        if by_part:
            lists["shared_heads"] = heads
        return attention_launch(
            of_parts, lambda q_tiles: s.path.blocks(q_tiles, s.limits), problem, s.config, "last_queries",
            s.path.listed(s.path.pass2(s.inputs, s.limits, s.config.block_m)), chunk, self.tiles, counter=counter,
            further=further, read=OF_PARTS, tau=0.0, tau_falls=0.0, lists=lists,
        )  # fmt: skip

    def _merge(self, build: Builder, piece: Piece) -> Launch:
        s, rows = self.setting, self._rows(piece)
        values: dict[str, Any] = {
            "out": build.tensors["out"], "geometry": build.geometry, "heads": s.problem.heads,
            "sequence": piece.sequence, "sequences": piece.sequences, "first_head": piece.first_head,
            "piece_heads": piece.heads,
            "first_segment": piece.first_segment, "rows": rows, "parts": self.parts, "tiles": self.tiles,
            "block_m": s.config.block_m, "block_n": s.config.block_n,
        }  # fmt: skip
        blocks = -(-piece.sequences * piece.heads * rows // MERGE_ROWS)
        return build.launch("merge_last", _merge(s.inputs), blocks, values)
