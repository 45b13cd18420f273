"""The CUDA kernels that there are: families, instantiations, and the parameters that each is given.

Pure: no array, no GPU, no CuPy. cuda/compiler.py turns a Kernel into machine code.
"""

from __future__ import annotations

from dataclasses import dataclass

from .params import Struct, struct

__all__ = ["FAMILIES", "Kernel"]


@dataclass(frozen=True)
class _Family:
    """What the instantiations of one kernel function share.

    Blocks differ by architecture where some version of ptxas spills registers with more.
    """

    source: str
    params_type: str
    threads: int
    blocks_per_multiprocessor: int | str  # that the registers must allow; a string is CUDA C++ as traits is
    traits: str | None  # format string over Kernel's fields
    arch: str | None = None  # the one architecture it is for

    @property
    def params(self) -> Struct:
        """What its source says that it is given."""
        return struct(self.source, self.params_type)


_ATTENTION_TRAITS = "AttentionTraits<{element}, {head_dim}, {block_m}, {stages}, {aligned}, {step}, {paged}>"
_HOPPER_TRAITS = "sm90::Traits<{element}, {head_dim}, {stages}, {paged}>"
FAMILIES = {
    **{
        name: _Family(source, type, 128, "256 / {threads}", _ATTENTION_TRAITS)
        for name, source, type in (
            ("pass1", "sm80/pass1.cu", "AttentionParams"),
            ("pass1_packed", "sm80/pass1.cu", "PackedAttentionParams"),
            ("pass2", "sm80/pass2.cu", "AttentionParams"),
            ("pass2_listed", "sm80/pass2.cu", "ListedAttentionParams"),
        )
    },
    **{
        name: _Family(f"sm90/{source}.cu", type, 384, 1, _HOPPER_TRAITS, "sm_90a")
        for name, source, type in (
            ("pass1_sm90", "pass1", "MappedAttentionParams"),
            ("pass1_packed_sm90", "pass1", "MappedPackedAttentionParams"),
            ("pass1_gathered_sm90", "pass1_gathered", "AttentionParams"),
            ("pass1_packed_gathered_sm90", "pass1_gathered", "PackedAttentionParams"),
            ("pass2_sm90", "pass2", "AttentionParams"),
            ("pass2_listed_sm90", "pass2", "ListedAttentionParams"),
        )
    },
    **{
        name: _Family(
            "selection/rank_queries.cu", "RankQueriesParams", threads, blocks,
            "RankTraits<{element}, {head_dim}, {aligned}, {paged}>",
        )
        for name, threads, blocks in (
            ("guides", 256, 1),
            (
                "rank_queries",
                128,
                "(!{aligned} ? 2 : {head_dim} > 128 ? (__CUDACC_VER_MAJOR__ > 12 ? 2 : 3) : "
                "{head_dim} > 64 ? (__CUDA_ARCH__ == 800 ? 3 : 5) : 7)",
            ),
        )
    },
    **{
        name: _Family(
            "tail.cu", "TailParams", 256, blocks,
            "TailTraits<{element}, {head_dim}, {paged}>",
        )
        for name, blocks in (("block_sums", 5), ("candidate_means", 1))
    },
    "key_scores": _Family(
        "selection/key_scores.cu", "RankKeysParams", 128,
        "(__CUDA_ARCH__ >= 1000 || {head_dim} > 128 ? 2 : 3)",
        "ScoreTraits<{element}, {head_dim}, {aligned}, {paged}>",
    ),
    **{
        name: _Family(
            "selection/refine.cu", "RefineParams", 256,
            f"(__CUDA_ARCH__ == 900 && {{head_dim}} <= 128 && {of_pages} ? 2 : 1)",
            f"RefineTraits<{{element}}, {{head_dim}}, {tiles}, {{paged}}>",
        )
        for name, tiles, of_pages in (
            ("probe", 1, "true"), ("refined_norms", 2, "true"), ("refined_scores", 2, "!{paged}"),
        )
    },
    "refined_scores_sm90": _Family(
        "selection/refined_scores_sm90.cu", "RefineParams", 128, 2,
        "RefinedScoresTraits<{element}, {head_dim}, {paged}>", "sm_90a",
    ),
    "key_scores_sm90": _Family(
        "selection/key_scores_sm90.cu", "RankKeysParams", 256, 2,
        "KeyScoresTraits<{element}, {head_dim}, {paged}>", "sm_90a",
    ),
    **{
        name: _Family("selection/key_order.cu", "RankKeysParams", 256, 4, None)
        for name in ("key_strata", "key_middle")
    },
    "every_tile": _Family("every_tile.cu", "EveryTileParams", 256, 4, None),
    "collect_pages": _Family("collect_pages.cu", "CollectPagesParams", 256, 4, None),
    "collect_packed_pages": _Family("collect_pages.cu", "CollectPackedPagesParams", 256, 4, None),
    "key_order_head": _Family(
        "selection/key_order.cu", "RankKeysParams", 256, "(__CUDA_ARCH__ == 900 ? 4 : 3)", None
    ),
}


@dataclass(frozen=True)
class Kernel:
    """One instantiation. Fields that its family does not use keep their defaults."""

    function: str
    dtype: str = "bfloat16"
    head_dim: int = 128  # padded: 64, 128 or 256
    aligned: bool = True  # every row of q, k, v and out starts on 16 bytes
    block_m: int = 128
    stages: int = 2
    step: int = 64  # keys of a step of the main loop
    softcap: bool = False  # scores are capped
    paged: bool = False  # k and v are a paged cache
    shared_bytes: int = 0  # dynamic shared memory, as the plan counts it

    @property
    def family(self) -> _Family:
        return FAMILIES[self.function]

    @property
    def threads(self) -> int:
        """Of a block. A warp of the portable passes holds the accumulators of 32 rows of 128, or of 16 of 256."""
        wide = "{block_m}" in (self.family.traits or "") and self.head_dim * self.block_m > 128 * 128
        return self.family.threads * (2 if wide else 1)

    @property
    def name(self) -> str:
        parts = [self.function]
        traits = self.family.traits or ""
        if "{element}" in traits:
            parts += [self.dtype, f"d{self.head_dim}"]
        if "{block_m}" in traits:
            parts.append(f"m{self.block_m}")
        if "{stages}" in traits:
            parts.append(f"s{self.stages}")
        if "{step}" in traits and self.step != 64:
            parts.append(f"k{self.step}")
        if "{aligned}" in traits and not self.aligned:
            parts.append("unaligned")
        if self.softcap:
            parts.append("softcap")
        if self.paged:
            parts.append("paged")
        return "-".join(parts)
