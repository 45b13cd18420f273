"""What unvisited candidates count for: the mean key and value of each segment's, from sums that calls may share.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from .build import Array, Builder, Launch, SumsShape
from .kernels import Family, Inputs, Kernel
from .method import Setting

__all__ = ["SUM_KEYS", "Tail", "sum_blocks"]

SUM_KEYS = 256  # keys of a block of block_sums (kSumBlock)
THREADS = 256

BLOCK_SUMS, CANDIDATE_MEANS = (
    Family(function, "tail.cu", "TailParams", THREADS, blocks, "TailTraits<{element}, {head_dim}, {paged}>")
    for function, blocks in (("block_sums", 5), ("candidate_means", 1))
)


def sum_blocks(keys: int) -> int:
    """Blocks of SUM_KEYS keys."""
    return -(-keys // SUM_KEYS)


def kernels(inputs: Inputs) -> tuple[Kernel, Kernel]:
    """block_sums and candidate_means."""
    of = lambda family: Kernel(  # noqa: E731
        family, inputs.dtype, inputs.head_dim, paged=inputs.paged, shared_bytes=THREADS * 8 * 4
    )
    return of(BLOCK_SUMS), of(CANDIDATE_MEANS)


class Tail:
    """Of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.block_sums, self.candidate_means = kernels(setting.inputs)

    def arrays(self, sums: SumsShape | None) -> list[Array]:
        s = self.setting
        width, segments = s.inputs.head_dim, s.geometry.segments
        own: list[Array] = []
        if sums is None:
            own.append(("sums", (s.kv_heads, sum_blocks(s.problem.seqlen_k), 2, width), "float32"))
        return [
            *own,
            ("candidate_means", (s.kv_heads, segments, 2, width), "float32"),
            ("tail", (s.heads, s.problem.seqlen_q), "float32"),
        ]

    def launches(self, build: Builder) -> list[Launch]:
        s = self.setting
        needed = sum_blocks(s.problem.seqlen_k)
        blocks, first = build.sums or (needed, 0)
        made, pairs = needed - first, 2 * s.kv_heads  # pairs: k and v of each KV head
        values = {
            "k": build.tensors["k"],
            "v": build.tensors["v"],
            "geometry": build.geometry,
            "kv_heads": s.problem.kv_heads,
            "blocks": blocks,
            "first_block": first,
            "made": made,
            "aligned": s.inputs.aligned,
            "pages": build.pages,
        }
        return [
            build.launch("block_sums", self.block_sums, pairs * made, values),
            build.launch("candidate_means", self.candidate_means, pairs * s.geometry.segments, values),
        ]
