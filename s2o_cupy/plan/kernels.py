"""The CUDA kernels that there are: families, instantiations, and the parameters that each is given.

Pure: no array, no GPU, no CuPy. cuda/compiler.py turns a Kernel into machine code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FAMILIES", "Kernel"]

TENSOR_MAP_BYTES = 128

# --- Parameter structs, field by field as in the .cu files; a static_assert compares the sizes. ---
_TENSOR = np.dtype([("data", "u8"), ("batch", "i8"), ("head", "i8"), ("row", "i8")], align=True)
_GEOMETRY = [(name, "i4") for name in ("seqlen_q", "seqlen_k", "segment", "window", "is_causal", "head_dim")]
_PAGES = np.dtype([("table", "u8"), ("stride", "i8"), ("shift", "i4")], align=True)
_CHUNK = np.dtype(
    [
        *((name, "i4") for name in ("first_head", "heads", "first_segment", "segments", "shared_heads", "near_heads")),
        *((name, "i8") for name in ("stride", "growth")),
    ],
    align=True,
)
ATTENTION_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("q", "k", "v", "out")),
        *((name, "u8") for name in ("state", "lse", "q_order", "k_order", "visited", "next_q_tile")),
        *((name, "u8") for name in ("tail", "candidate_means")),
        ("geometry", np.dtype(_GEOMETRY)),
        ("chunk", _CHUNK),
        *((name, "i4") for name in ("heads", "kv_heads", "tiles", "steps_per_tile", "q_tiles")),
        ("scale_log2", "f4"),
        ("sign_mask", "u4"),
        ("tau", "f4"),
        ("cap_scale", "f4"),
        ("pages", _PAGES),
    ],
    align=True,
)


def _mapped(params: np.dtype[Any]) -> np.dtype[Any]:
    """Tensor maps of q, k and v, then ``params``. Maps are aligned to 64 bytes; the size is a multiple of that too."""
    maps = 3 * TENSOR_MAP_BYTES
    return np.dtype(
        {
            "names": ["maps", "attention"],
            "formats": [f"V{maps}", params],
            "offsets": [0, maps],
            "itemsize": maps + -(-params.itemsize // 64) * 64,
        }
    )


MAPPED_ATTENTION_PARAMS = _mapped(ATTENTION_PARAMS)
# Sequences of one launch of pass 1. With it parameters stay below the 4,096 bytes that every driver takes.
PACKED_SEQUENCES = 128
PACKED_SEQUENCE = np.dtype([(name, "i4") for name in ("begin_q", "begin_k", "seqlen_q", "seqlen_k", "near_heads")])
PACKED_ATTENTION_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        ("sequences", "i4"),
        ("first_q_tile", "i4", (PACKED_SEQUENCES,)),
        ("of", PACKED_SEQUENCE, (PACKED_SEQUENCES,)),
    ],
    align=True,
)
MAPPED_PACKED_ATTENTION_PARAMS = _mapped(PACKED_ATTENTION_PARAMS)
RANK_QUERIES_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("q", "k")),
        *((name, "u8") for name in ("guide", "means", "q_order", "candidate_means", "tail")),
        ("geometry", np.dtype(_GEOMETRY)),
        *((name, "i4") for name in ("heads", "kv_heads", "pooled_queries", "run", "sort_slots")),
        *((name, "f4") for name in ("sign", "scale_log2")),
        ("pages", _PAGES),
    ],
    align=True,
)
TAIL_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("k", "v")),
        *((name, "u8") for name in ("sums", "candidate_means")),
        ("geometry", np.dtype(_GEOMETRY)),
        *((name, "i4") for name in ("kv_heads", "blocks", "first_block", "made", "aligned")),
        ("pages", _PAGES),
    ],
    align=True,
)
COLLECT_PAGES_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("k", "v")),
        *((name, "u8") for name in ("keys", "values")),
        *((name, "i4") for name in ("kv_heads", "seqlen_k", "row_chunks", "chunks")),
        ("pages", _PAGES),
    ],
    align=True,
)
RANK_KEYS_PARAMS = np.dtype(
    [
        ("k", _TENSOR),
        *((name, "u8") for name in ("means", "refined", "scores", "k_order")),
        *((name, "u8") for name in ("order_head_scores", "middle", "middle_scores")),
        ("geometry", np.dtype(_GEOMETRY)),
        ("chunk", _CHUNK),
        *((name, "i4") for name in ("heads", "kv_heads", "pooled_queries", "run")),
        *((name, "i4") for name in ("row_blocks", "key_blocks", "strata_blocks")),
        ("scale_log2", "f4"),
        ("pages", _PAGES),
    ],
    align=True,
)
REFINE_PARAMS = np.dtype(
    [
        *((name, _TENSOR) for name in ("q", "k")),
        *((name, "u8") for name in ("deficits", "refined", "norms", "scores")),
        ("geometry", np.dtype(_GEOMETRY)),
        ("chunk", _CHUNK),
        *((name, "i4") for name in ("heads", "kv_heads", "pooled_queries", "run", "probe_run")),
        *((name, "i4") for name in ("first_ordered", "probes", "key_blocks", "aligned")),
        *((name, "f4") for name in ("scale_log2", "sign")),
        ("pages", _PAGES),
    ],
    align=True,
)


@dataclass(frozen=True)
class _Family:
    """What the instantiations of one kernel function share.

    Blocks differ by architecture where some version of ptxas spills registers with more.
    """

    source: str
    params: np.dtype[Any]
    params_type: str
    threads: int
    blocks_per_multiprocessor: int | str  # that the registers must allow; a string is CUDA C++ as traits is
    traits: str | None  # format string over Kernel's fields
    arch: str | None = None  # the one architecture it is for


_ATTENTION_TRAITS = "AttentionTraits<{element}, {head_dim}, {block_m}, {stages}, {aligned}, {step}, {paged}>"
_HOPPER_TRAITS = "sm90::Traits<{{element}}, {{head_dim}}, {{stages}}, {{paged}}, {packed}>"
FAMILIES = {
    **{
        name: _Family(source, params, struct, 128, "256 / {threads}", _ATTENTION_TRAITS)
        for name, source, params, struct in (
            ("pass1", "sm80/pass1.cu", ATTENTION_PARAMS, "AttentionParams"),
            ("pass1_packed", "sm80/pass1.cu", PACKED_ATTENTION_PARAMS, "PackedAttentionParams"),
            ("pass2", "sm80/pass2.cu", ATTENTION_PARAMS, "AttentionParams"),
        )
    },
    **{
        name: _Family(f"sm90/{source}.cu", params, struct, 384, 1, _HOPPER_TRAITS.format(packed=packed), "sm_90a")
        for name, source, params, struct, packed in (
            ("pass1_sm90", "pass1", MAPPED_ATTENTION_PARAMS, "MappedAttentionParams", "false"),
            ("pass1_packed_sm90", "pass1", MAPPED_PACKED_ATTENTION_PARAMS, "MappedPackedAttentionParams", "true"),
            ("pass1_gathered_sm90", "pass1_gathered", ATTENTION_PARAMS, "AttentionParams", "false"),
            ("pass2_sm90", "pass2", ATTENTION_PARAMS, "AttentionParams", "false"),
        )
    },
    **{
        name: _Family(
            "selection/rank_queries.cu", RANK_QUERIES_PARAMS, "RankQueriesParams", threads, blocks,
            "RankTraits<{element}, {head_dim}, {aligned}, {paged}>",
        )
        for name, threads, blocks in (
            ("guides", 256, 1),
            (
                "rank_queries",
                128,
                "(!{aligned} ? 2 : {head_dim} > 128 ? 3 : {head_dim} > 64 ? (__CUDA_ARCH__ == 800 ? 3 : 5) : 7)",
            ),
        )
    },
    **{
        name: _Family(
            "tail.cu", TAIL_PARAMS, "TailParams", 256, blocks,
            "TailTraits<{element}, {head_dim}, {paged}>",
        )
        for name, blocks in (("block_sums", 5), ("candidate_means", 1))
    },
    "key_scores": _Family(
        "selection/key_scores.cu", RANK_KEYS_PARAMS, "RankKeysParams", 128,
        "(__CUDA_ARCH__ >= 1000 || {head_dim} > 128 ? 2 : 3)",
        "ScoreTraits<{element}, {head_dim}, {aligned}, {paged}>",
    ),
    **{
        name: _Family(
            "selection/refine.cu", REFINE_PARAMS, "RefineParams", 256,
            f"(__CUDA_ARCH__ == 900 && {{head_dim}} <= 128 && {of_pages} ? 2 : 1)",
            f"RefineTraits<{{element}}, {{head_dim}}, {tiles}, {{paged}}>",
        )
        for name, tiles, of_pages in (
            ("probe", 1, "true"), ("refined_norms", 2, "true"), ("refined_scores", 2, "!{paged}"),
        )
    },
    "refined_scores_sm90": _Family(
        "selection/refined_scores_sm90.cu", REFINE_PARAMS, "RefineParams", 128, 2,
        "RefinedScoresTraits<{element}, {head_dim}, {paged}>", "sm_90a",
    ),
    "key_scores_sm90": _Family(
        "selection/key_scores_sm90.cu", RANK_KEYS_PARAMS, "RankKeysParams", 256, 2,
        "KeyScoresTraits<{element}, {head_dim}, {paged}>", "sm_90a",
    ),
    **{
        name: _Family("selection/key_order.cu", RANK_KEYS_PARAMS, "RankKeysParams", 256, 4, None)
        for name in ("key_strata", "key_middle")
    },
    "collect_pages": _Family("collect_pages.cu", COLLECT_PAGES_PARAMS, "CollectPagesParams", 256, 4, None),
    "key_order_head": _Family(
        "selection/key_order.cu", RANK_KEYS_PARAMS, "RankKeysParams", 256, "(__CUDA_ARCH__ == 900 ? 4 : 3)", None
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
