"""The kernels that choose blocks: their families and their shared memory.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..plan.kernels import Family, Inputs, Kernel

__all__ = ["MOST_HEADS", "SCORE_TILE", "block_means", "block_scores", "choose_blocks", "kernels"]

MOST_HEADS = 256  # that may have thresholds of their own (kMostHeads)
SCORE_TILE = 64  # rows and columns of a block of block_scores
WARP = 32
CHOICE_THREADS = 128

_ELEMENT = "{element}, {head_dim}"
BLOCK_MEANS = Family(
    "block_means", "blocks/block_means.cu", "BlockMeansParams", 256, 4, f"BlockMeansTraits<{_ELEMENT}>"
)
BLOCK_SCORES = Family(
    "block_scores", "blocks/block_scores.cu", "BlockScoresParams", 128, 4, f"BlockScoresTraits<{_ELEMENT}>"
)
CHOOSE_BLOCKS = Family(
    "choose_blocks", "blocks/choose_blocks.cu", "ChooseBlocksParams", CHOICE_THREADS, 8, shared="s2o::ChoiceShared"
)


def block_means(inputs: Inputs) -> Kernel:
    """sizeof(BlockMeansTraits::Shared)"""
    return Kernel(BLOCK_MEANS, inputs.dtype, inputs.head_dim, shared_bytes=256 * 8 * 4 + 8 * 4)


def block_scores(inputs: Inputs) -> Kernel:
    return Kernel(BLOCK_SCORES, inputs.dtype, inputs.head_dim)


def choose_blocks(columns: int) -> Kernel:
    """sizeof(ChoiceShared), which has a warp's weights, and further weights as rows need them."""
    room = max(1024, 1 << (columns - 1).bit_length())
    fixed, more = (2 * 4 + 2 * 4) * 4, (room - WARP) * 4
    return Kernel(CHOOSE_BLOCKS, shared_bytes=fixed + WARP * 4 + more, open_bytes=more)


def kernels(inputs: Inputs) -> Iterator[Kernel]:
    """All that a call with such inputs may run; shared memory that is only sized is no part of their texts."""
    if inputs.aligned and not inputs.paged and not inputs.softcap:
        yield from (block_means(inputs), block_scores(inputs), choose_blocks(1))
