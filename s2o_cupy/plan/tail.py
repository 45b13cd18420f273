"""What unvisited candidates count for: moments of leading keys and values, and what pass 2 adds or a launch behind it.

reference/tail.py is the definition. Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from typing import Any

from ..spec import TAIL_EVIDENCE, TAIL_SAMPLES, moment_group, moment_keys
from .build import Array, Builder, Launch
from .device import DeviceLimits
from .kernels import Family, Inputs, Kernel
from .method import Setting
from .rounds import Chunk
from .turns import bytes_before, heads_in_turns

__all__ = ["Tail", "catalogue"]

MOMENT_ROWS = 2  # of covariances, that a block of key_moments finds (KeyMomentTraits::kRows)
PARTS_BYTES = 64 << 20  # sums of parts take up to so many at a time
MOMENT_STEP = 64  # keys of a step of part_moments (kMomentStep)
TAIL_QUERIES = 128  # of a block of add_tail (kTailQueries)
PART_MOMENTS = Family(
    "part_moments", "tail/part_moments.cu", "PartMomentsParams", 256, "({head_dim} > 128 ? 1 : 2)",
    "MomentTraits<{element}, {head_dim}, {paged}>", knows_segments=False,
)  # fmt: skip
KEY_MOMENTS = Family(
    "key_moments", "tail/key_moments.cu", "KeyMomentsParams", 32 * MOMENT_ROWS, 8, "KeyMomentTraits<{head_dim}>",
    knows_segments=False,
)  # fmt: skip
ADD_TAIL = Family(
    "add_tail", "tail/add_tail.cu", "AddTailParams", 256, 1, "TailTraits<{element}, {head_dim}, {aligned}, {paged}>",
)  # fmt: skip


def moment_rows(head_dim: int) -> int:
    """Of a part's products, that a block finds (MomentTraits::kRows)."""
    return 128 if head_dim == 128 else 64


def part_moments(inputs: Inputs) -> Kernel:
    head_dim, rows = inputs.head_dim, moment_rows(inputs.head_dim)
    shared = 2 * MOMENT_STEP * (head_dim + 8 + rows + 8) * 2  # sizeof(MomentTraits::Shared)
    return Kernel(PART_MOMENTS, inputs.dtype, head_dim, paged=inputs.paged, shared_bytes=shared)


def key_moments(inputs: Inputs) -> Kernel:
    return Kernel(KEY_MOMENTS, head_dim=inputs.head_dim)


def tail_shared(head_dim: int) -> int:
    """sizeof(TailTraits::Shared)."""
    of_keys, of_slices = TAIL_SAMPLES // 2 * head_dim, (TAIL_SAMPLES + head_dim) * TAIL_EVIDENCE
    pointers, work = 2 * TAIL_SAMPLES + 3 * TAIL_QUERIES, 9 * 8 + 6 * 4
    return max(of_keys, of_slices) * 2 + pointers * 8 + head_dim * 4 + work


def add_tail(inputs: Inputs) -> Kernel:
    return Kernel(
        ADD_TAIL, inputs.dtype, inputs.head_dim, inputs.aligned, softcap=inputs.softcap, paged=inputs.paged,
        shared_bytes=tail_shared(inputs.head_dim),
    )  # fmt: skip


def catalogue(inputs: Inputs, limits: DeviceLimits) -> tuple[Kernel, ...]:
    """What calls with such inputs may choose."""
    return part_moments(inputs), key_moments(inputs), add_tail(inputs)


class Tail:
    """Of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.part_moments, self.key_moments = part_moments(setting.inputs), key_moments(setting.inputs)
        pass2 = setting.path.pass2(setting.inputs, setting.limits, setting.config.block_m)
        self.in_pass2 = setting.path.with_tail(pass2)  # what adds it; None: add_tail does
        self.add_tail = add_tail(setting.inputs)
        geometry = setting.geometry
        self.first_group = geometry.moment_group(0)  # groups ascend with segments
        last_group = geometry.moment_group(geometry.segments - 1)
        self.groups = last_group - self.first_group + 1
        self.parts = moment_group(moment_keys(last_group) >> geometry.grain_shift)

    def arrays_before_rounds(self) -> list[Array]:
        """Sums of the parts of some KV heads' keys, of which moments are made."""
        width, heads = self.setting.inputs.head_dim, max(map(len, self.turns()))
        return [
            ("part_products", (heads, self.parts, width, width), "float32"),
            ("part_sums", (heads, self.parts, 2, width), "float32"),
        ]

    def turns(self) -> list[range]:
        """KV heads, of all sequences, whose moments are made at a time."""
        s, width = self.setting, self.setting.inputs.head_dim
        return heads_in_turns(s.problem.batch, s.problem.kv_heads, self.parts * width * (width + 2) * 4, PARTS_BYTES)

    def arrays(self) -> list[Array]:
        s = self.setting
        width = s.inputs.head_dim
        return [
            ("mean_values", (s.kv_heads, self.groups, width), "float32"),
            ("covariances", (s.kv_heads, self.groups, width, width), "uint16"),
            ("lse", (s.heads, s.problem.seqlen_q), "float32"),  # where the caller does not ask for it
        ]

    def before_rounds(self, build: Builder) -> list[Launch]:
        """Moments, which need keys and values alone."""
        return [launch for heads in self.turns() for launch in self._moments(build, heads)]

    def _moments(self, build: Builder, heads: range) -> list[Launch]:
        """Those of some KV heads."""
        s, width = self.setting, self.setting.inputs.head_dim
        further = bytes_before(build, s, heads.start, ("k", "v"), ("mean_values", "covariances"))
        of_parts = {"parts": self.parts, "grain_shift": s.geometry.grain_shift}
        values: dict[str, Any] = {name: build.tensors[name] for name in ("k", "v")}
        values |= {
            "geometry": build.geometry, "kv_heads": s.problem.kv_heads, "aligned": s.inputs.aligned,
            "pages": build.pages, **of_parts,
        }  # fmt: skip
        blocks = len(heads) * self.parts * (width // moment_rows(width))
        return [
            build.launch("part_moments", self.part_moments, blocks, values, further=further),
            build.launch("key_moments", self.key_moments, len(heads) * width // MOMENT_ROWS, of_parts | self._groups,
                         further=further),
        ]  # fmt: skip

    def pass2(self, kernel: Kernel) -> tuple[Kernel, dict[str, Any]]:
        """As `Method.pass2`."""
        if self.in_pass2 is None:
            return kernel, {}
        return self.in_pass2, {"scale": self.setting.problem.scale, **self._groups}

    def after_pass2(self, build: Builder, chunk: Chunk) -> list[Launch]:
        """What they stand for, added to a chunk's output where pass 2 has not done so."""
        if self.in_pass2:
            return []
        s = self.setting
        tiles = s.geometry.block_count(s.config.block_m)
        values: dict[str, Any] = {name: build.tensors[name] for name in ("q", "k", "v", "out")}
        values |= {
            "chunk": build.chunk(chunk),
            "heads": s.problem.heads,
            "kv_heads": s.problem.kv_heads,
            "tiles": tiles,
            "block_m": s.config.block_m,
            "block_n": s.config.block_n,
            "scale": s.problem.scale,
            "softcap": s.problem.softcap,
        }
        values |= {"geometry": build.geometry, "pages": build.pages, **self._groups}
        return [build.launch("add_tail", self.add_tail, chunk.rows * tiles, values, chunk)]

    @property
    def _groups(self) -> dict[str, int]:
        return {"groups": self.groups, "first_group": self.first_group}
