"""What unvisited candidates count for: moments of leading keys and values once, and after pass 2 what is added.

reference/tail.py is the definition. Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from typing import Any

from ..spec import TAIL_SAMPLES
from .build import Array, Builder, Launch
from .kernels import Family, Inputs, Kernel
from .method import Setting
from .rounds import Chunk

__all__ = ["Tail", "kernels"]

MOMENT_SLICE = 64  # dimensions of values of a block of key_moments (kMomentSlice)
MOMENT_STEP = 64  # keys of its step (kMomentStep)
KEY_MOMENTS = Family(
    "key_moments", "tail/key_moments.cu", "KeyMomentsParams", 256, "({head_dim} > 128 ? 1 : 2)",
    "MomentTraits<{element}, {head_dim}, {paged}>",
)  # fmt: skip
ADD_TAIL = Family(
    "add_tail", "tail/add_tail.cu", "AddTailParams", 256, "({head_dim} > 128 ? 1 : 2)",
    "TailTraits<{element}, {head_dim}, {paged}>",
)  # fmt: skip

def kernels(inputs: Inputs) -> tuple[Kernel, Kernel]:
    """key_moments and add_tail."""
    head_dim = inputs.head_dim
    pitch, slice_pitch = head_dim + 8, MOMENT_SLICE + 8
    of_moments = 2 * MOMENT_STEP * (pitch + slice_pitch) * 2 + MOMENT_SLICE * 4 + 4  # sizeof(MomentTraits::Shared)
    of_tail = TAIL_SAMPLES * (pitch * 2 + 8)  # sizeof(TailTraits::Shared)
    return (
        Kernel(KEY_MOMENTS, inputs.dtype, head_dim, paged=inputs.paged, shared_bytes=of_moments),
        Kernel(ADD_TAIL, inputs.dtype, head_dim, paged=inputs.paged, shared_bytes=of_tail),
    )


class Tail:
    """Of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.key_moments, self.add_tail = kernels(setting.inputs)
        geometry = setting.geometry
        self.first_group = geometry.moment_group(0)  # groups ascend with segments
        self.groups = geometry.moment_group(geometry.segments - 1) - self.first_group + 1

    def arrays(self) -> list[Array]:
        s = self.setting
        width = s.inputs.head_dim
        return [
            ("mean_values", (s.kv_heads, self.groups, width), "float32"),
            ("covariances", (s.kv_heads, self.groups, width, width), "uint16"),
            ("lse", (s.heads, s.problem.seqlen_q), "float32"),  # where the caller does not ask for it
        ]

    def before_rounds(self, build: Builder) -> Launch:
        """Moments, which need keys and values alone."""
        s = self.setting
        values = {"k": build.tensors["k"], "v": build.tensors["v"], "kv_heads": s.problem.kv_heads}
        blocks = s.kv_heads * self.groups * (s.inputs.head_dim // MOMENT_SLICE)
        return build.launch("key_moments", self.key_moments, blocks, values | self._shared(build))

    def after_pass2(self, build: Builder, chunk: Chunk) -> Launch:
        """What they stand for, added to a chunk's output."""
        s = self.setting
        tiles = s.geometry.block_count(s.config.block_m)
        values: dict[str, Any] = {name: build.tensors[name] for name in ("q", "k", "out")}
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
        return build.launch("add_tail", self.add_tail, chunk.rows * tiles, values | self._shared(build), chunk)

    def _shared(self, build: Builder) -> dict[str, Any]:
        return {
            "geometry": build.geometry,
            "groups": self.groups,
            "first_group": self.first_group,
            "aligned": self.setting.inputs.aligned,
            "pages": build.pages,
        }
