"""NSA's kernels and their instantiations. Pure: no array, no GPU, no CuPy."""

from __future__ import annotations

from collections.abc import Iterator

from ..plan.kernels import Family, Inputs, Kernel

__all__ = [
    "BLOCKS", "CHUNK_TOKENS", "MAX_GROUP", "MAX_HEAD_DIM", "MAX_SLOTS", "ROWS", "block_weights", "catalogue", "count",
    "merge_parts", "places", "scatter", "selected", "top_blocks", "turns_of", "window",
]  # fmt: skip

MAX_HEAD_DIM = 128
MAX_GROUP = 16
MAX_SLOTS = 32  # bits that hold which of 32 tokens chose a block, and lanes that hold the parts of a token
BLOCKS = (64, 128)  # keys of a block
ROWS = 128  # queries of a tile
STEP = 64  # keys of a step, of a tile
CHUNK_TOKENS = 512  # whose blocks a thread block of the counting sort reads (kChunkTokens)
OPEN = 32 * 4  # bytes of an open array that a Shared has

WINDOW = Family("nsa_window", "nsa/window.cu", "NsaParams", 128, 2, "WindowTraits<{element}, {head_dim}>")
BLOCK_WEIGHTS = Family(
    "nsa_block_weights", "nsa/block_weights.cu", "NsaParams", 128, 2,
    "BlockWeightTraits<{element}, {head_dim}, {group}>",
)  # fmt: skip
SELECTED = Family(
    "nsa_selected", "nsa/selected.cu", "NsaParams", 128, 2, "SelectedTraits<{element}, {head_dim}, {step}>"
)
MERGE_PARTS = Family(
    "nsa_merge_parts", "nsa/merge_parts.cu", "NsaParams", 128, 6, "MergeTraits<{element}, {head_dim}>"
)
TOP_BLOCKS = Family("nsa_top_blocks", "nsa/top_blocks.cu", "NsaParams", 128, 8, shared="s2o::TopShared")
COUNT, PLACES, SCATTER = (
    Family(f"nsa_{name}", "nsa/invert.cu", "NsaParams", threads, 1, shared=f"s2o::{name.title()}Shared")
    for name, threads in (("count", 512), ("places", 1024), ("scatter", 512))
)


def window(inputs: Inputs) -> Kernel:
    shared = (ROWS + 4 * STEP) * inputs.head_dim * 2 + 2 * 8 + 4 * 4
    return Kernel(WINDOW, inputs.dtype, inputs.head_dim, shared_bytes=shared)


def heads_of_thread(group: int) -> int:
    """Query heads of a KV head among the four rows of a thread of nsa_block_weights."""
    return 1 if group == 1 else 2 if group == 2 else 4


def turns_of(group: int) -> int:
    """In how many turns it takes the heads of a group."""
    return -(-group // heads_of_thread(group))


def block_weights(inputs: Inputs, group: int) -> Kernel:
    queries = ROWS * inputs.head_dim * 2
    shared = 2 * STEP * inputs.head_dim * 2 + 4 * ROWS * 4 + queries
    more = (turns_of(group) - 1) * queries
    return Kernel(
        BLOCK_WEIGHTS, inputs.dtype, inputs.head_dim, group=heads_of_thread(group), shared_bytes=shared + more,
        open_bytes=more,
    )  # fmt: skip


def selected(inputs: Inputs, block: int) -> Kernel:
    buffers = 2 if block == STEP else 1
    shared = (buffers * ROWS + 2 * block) * inputs.head_dim * 2 + 2 * buffers * ROWS * 4 + 4 * 4
    return Kernel(SELECTED, inputs.dtype, inputs.head_dim, step=block, shared_bytes=shared)


def merge_parts(inputs: Inputs) -> Kernel:
    return Kernel(MERGE_PARTS, inputs.dtype, inputs.head_dim)


def top_blocks() -> Kernel:
    return Kernel(TOP_BLOCKS, shared_bytes=2 * 128 * 4)


def count(blocks: int) -> Kernel:
    return Kernel(COUNT, shared_bytes=4 * _room(blocks), open_bytes=4 * _room(blocks) - OPEN)


def places() -> Kernel:
    return Kernel(PLACES, shared_bytes=2 * 32 * 4)


def scatter(blocks: int) -> Kernel:
    return Kernel(SCATTER, shared_bytes=8 * _room(blocks), open_bytes=8 * _room(blocks) - OPEN)


def _room(blocks: int) -> int:
    """A power of two, so that few sizes are loaded."""
    return 1 << max(5, (blocks - 1).bit_length())


def catalogue(inputs: Inputs) -> Iterator[Kernel]:
    """Those of a dtype and a padded head_dim."""
    if inputs.head_dim > MAX_HEAD_DIM:
        return
    yield from (window(inputs), merge_parts(inputs), top_blocks(), count(0), places(), scatter(0))
    yield from (selected(inputs, block) for block in BLOCKS)
    yield from (block_weights(inputs, group) for group in (1, 2, 4))
