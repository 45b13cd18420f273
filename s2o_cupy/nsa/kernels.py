"""NSA's kernels and their instantiations. Pure: no array, no GPU, no CuPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan.kernels import Family, Inputs, Kernel, Path
from ..plan.paths import HOPPER

__all__ = [
    "BLOCKS", "CHUNK_TOKENS", "COMPRESSED_KEYS", "FUSED_GROUP", "GRADIENT_KEYS", "ITEM_ROWS", "MAX_GROUP",
    "MAX_HEAD_DIM", "MAX_SLOTS", "MERGE_TOKENS", "ROWS", "TOTAL_BLOCKS", "backward_sums", "block_weight_tokens",
    "block_weights", "catalogue", "compressed", "count", "merge_parts", "places", "scatter", "selected",
    "selected_backward", "top_blocks", "totals", "window", "window_rows",
]  # fmt: skip

MAX_HEAD_DIM = 128
MAX_GROUP = 16
MAX_HOPPER_GROUP = 8
HOPPER_WINDOW_ROWS = 192
HOPPER_STAGES = 3  # tiles of compressed keys in shared memory
COMPRESSED_KEYS = 128  # of such a tile
# Query heads of a KV head up to which blocks' weights come from compressed attention itself, a row for each: fewer
# products and exponentials for more memory traffic.
FUSED_GROUP = 1
MAX_SLOTS = 32  # bits that hold which of 32 tokens chose a block, and lanes that hold the parts of a token
BLOCKS = (64, 128)  # keys of a block
ROWS = 128  # queries of a tile
STEP = 64  # keys of a step, of a tile
ITEM_ROWS = 1024  # (token, head) pairs of a block of nsa_selected, at most
CHUNK_TOKENS = 512  # whose blocks a thread block of the counting sort reads (kChunkTokens)
MERGE_TOKENS = 4  # of a warp (kMergeTokens)
TOTAL_BLOCKS = 128  # of keys, of a block of threads of nsa_totals (kTotalThreads)
OPEN = 32 * 4  # bytes of an open array that a Shared has

GRADIENT_KEYS = 64  # of a block of threads of nsa_selected_backward (kGradientKeys)

WINDOW = Family("nsa_window", "nsa/window.cu", "NsaParams", 128, 2, "WindowTraits<{element}, {head_dim}>")
WINDOW_SM90 = Family(
    "nsa_window_sm90", "nsa/window_sm90.cu", "NsaParams", 512, 1, "WindowSm90Traits<{element}, {head_dim}>", path=HOPPER
)
BLOCK_WEIGHTS = Family(
    "nsa_block_weights", "nsa/block_weights.cu", "NsaParams", 128, 2,
    "BlockWeightTraits<{element}, {head_dim}, {group}>",
)  # fmt: skip
BLOCK_WEIGHTS_SM90 = Family(
    "nsa_block_weights_sm90", "nsa/block_weights_sm90.cu", "NsaParams", 512, 1,
    "BlockWeightsTraits<{element}, {head_dim}, {group}>", path=HOPPER,
)  # fmt: skip
COMPRESSED_SM90 = Family(
    "nsa_compressed_sm90", "nsa/compressed_sm90.cu", "NsaParams", 384, 1, "CompressedTraits<{element}, {head_dim}>",
    path=HOPPER,
)  # fmt: skip
SELECTED = Family(
    "nsa_selected", "nsa/selected.cu", "NsaParams", 128, 2, "SelectedTraits<{element}, {head_dim}, {step}>"
)
SELECTED_SM90 = Family(
    "nsa_selected_sm90", "nsa/selected_sm90.cu", "NsaParams", 256, 2, "SelectedSm90Traits<{element}, {head_dim}>",
    path=HOPPER,
)  # fmt: skip
MERGE_PARTS = Family(
    "nsa_merge_parts", "nsa/merge_parts.cu", "NsaParams", 128, 5, "MergeTraits<{element}, {head_dim}>"
)
LEAVE_TOPS = (BLOCK_WEIGHTS_SM90, COMPRESSED_SM90)  # step_tops
TOP_BLOCKS = Family("nsa_top_blocks", "nsa/top_blocks.cu", "NsaParams", 128, 7, shared="s2o::TopShared")
COUNT, PLACES, SCATTER = (
    Family(f"nsa_{name}", "nsa/invert.cu", "NsaParams", threads, blocks, shared=f"s2o::{name.title()}Shared")
    for name, threads, blocks in (("count", 512, 2), ("places", 1024, 1), ("scatter", 512, 2))
)
TOTALS = Family("nsa_totals", "nsa/invert.cu", "NsaParams", TOTAL_BLOCKS, 2)
SELECTED_BACKWARD = Family(
    "nsa_selected_backward", "nsa/selected_backward.cu", "NsaBackwardParams", 128, 2,
    "BackwardTraits<{element}, {head_dim}>",
)  # fmt: skip
DELTAS, QUERY_GRADIENTS, KEY_GRADIENTS = (
    Family(name, "nsa/backward_sums.cu", "NsaBackwardParams", 128, 8, "SumTraits<{element}, {head_dim}>")
    for name in ("nsa_deltas", "nsa_query_gradients", "nsa_key_gradients")
)


def window(inputs: Inputs, path: Path) -> Kernel:
    if path.has_wgmma:
        shared = (HOPPER_WINDOW_ROWS + 9 * STEP) * inputs.head_dim * 2 + 8 * 8 + 8 * 4  # barriers, bits of keys
        return Kernel(WINDOW_SM90, inputs.dtype, inputs.head_dim, shared_bytes=shared)
    shared = (ROWS + 4 * STEP) * inputs.head_dim * 2 + 2 * 8 + 6 * 4 + 4 * 4
    return Kernel(WINDOW, inputs.dtype, inputs.head_dim, shared_bytes=shared)


def window_rows(kernel: Kernel) -> int:
    """Positions of a block."""
    return HOPPER_WINDOW_ROWS if kernel.family is WINDOW_SM90 else ROWS


def block_weights(inputs: Inputs, group: int, path: Path) -> Kernel:
    """Of Hopper 2 to 8 query heads of a KV head, whose queries shared memory holds; of one `compressed` has them."""
    queries = ROWS * inputs.head_dim * 2  # of a turn
    if path.has_wgmma and FUSED_GROUP < group <= MAX_HOPPER_GROUP:
        group = 1 << (group - 1).bit_length()
        own_threads = 256 if group > 2 else 0  # their queries take turns, for which shared memory has less room
        shared = group // 2 * (own_threads or BLOCK_WEIGHTS_SM90.threads) // 2 * (inputs.head_dim * 2 + 4)  # with lse
        shared += HOPPER_STAGES * (COMPRESSED_KEYS * inputs.head_dim * 2 + 2 * 8) + 8  # keys, barriers, an address
        return Kernel(BLOCK_WEIGHTS_SM90, inputs.dtype, inputs.head_dim, group=group, shared_bytes=shared,
                      own_threads=own_threads)  # fmt: skip
    heads = 1 if group == 1 else 2 if group == 2 else 4  # among the four rows of a thread
    shared = 2 * STEP * inputs.head_dim * 2 + 4 * ROWS * 4 + queries
    more = (-(-group // heads) - 1) * queries
    return Kernel(
        BLOCK_WEIGHTS, inputs.dtype, inputs.head_dim, group=heads, shared_bytes=shared + more, open_bytes=more
    )


def compressed(inputs: Inputs) -> Kernel:
    """Of Hopper: compressed attention and the blocks' weights of each query head in one pass."""
    shared = (ROWS + 2 * HOPPER_STAGES * COMPRESSED_KEYS) * inputs.head_dim * 2 + HOPPER_STAGES * COMPRESSED_KEYS // 8
    shared += 4 * HOPPER_STAGES * 8  # barriers
    return Kernel(COMPRESSED_SM90, inputs.dtype, inputs.head_dim, shared_bytes=shared)


def block_weight_tokens(kernel: Kernel) -> int:
    """Of a block (kTokens)."""
    if kernel.family is BLOCK_WEIGHTS:
        return ROWS // kernel.group
    return kernel.threads // 4  # a warpgroup has 64 rows: two heads


def selected(inputs: Inputs, block: int, path: Path) -> Kernel:
    """Of Hopper with blocks of 64; with twice as many keys registers are too few for two blocks of threads."""
    family = SELECTED_SM90 if path.has_wgmma and block == STEP else SELECTED
    buffers = 2 if block == STEP else 1
    shared = (buffers * ROWS + 2 * block) * inputs.head_dim * 2 + 2 * buffers * ROWS * 4 + 4 * 4 + block // 8
    if family is SELECTED_SM90:
        shared += ITEM_ROWS * 4 + 4 * 8  # tokens of an item, at most, and barriers
    return Kernel(family, inputs.dtype, inputs.head_dim, step=block, shared_bytes=shared)


def merge_parts(inputs: Inputs) -> Kernel:
    return Kernel(MERGE_PARTS, inputs.dtype, inputs.head_dim)


def top_blocks() -> Kernel:
    return Kernel(TOP_BLOCKS, shared_bytes=4 * 32 * 16)


def count(blocks: int) -> Kernel:
    return Kernel(COUNT, shared_bytes=4 * _room(blocks), open_bytes=4 * _room(blocks) - OPEN)


def places() -> Kernel:
    return Kernel(PLACES, shared_bytes=2 * 32 * 4)


def totals() -> Kernel:
    return Kernel(TOTALS)


def scatter(blocks: int) -> Kernel:
    return Kernel(SCATTER, shared_bytes=8 * _room(blocks), open_bytes=8 * _room(blocks) - OPEN)


def selected_backward(inputs: Inputs) -> Kernel:
    shared = 4 * GRADIENT_KEYS * inputs.head_dim * 2 + GRADIENT_KEYS**2 * 2 + 5 * GRADIENT_KEYS * 4 + 4 * 4
    return Kernel(SELECTED_BACKWARD, inputs.dtype, inputs.head_dim, shared_bytes=shared)


def backward_sums(inputs: Inputs) -> tuple[Kernel, Kernel, Kernel]:
    """Before `selected_backward`, and behind it of queries, and of keys and values."""
    deltas, of_queries, of_keys = (
        Kernel(family, inputs.dtype, inputs.head_dim) for family in (DELTAS, QUERY_GRADIENTS, KEY_GRADIENTS)
    )
    return deltas, of_queries, of_keys


def _room(blocks: int) -> int:
    """A power of two, so that few sizes are loaded."""
    return 1 << max(5, (blocks - 1).bit_length())


def catalogue(inputs: Inputs, paths: Sequence[Path]) -> Iterator[Kernel]:
    """Those of a dtype and a padded head_dim on a device that has ``paths``; some come several times."""
    if inputs.head_dim > MAX_HEAD_DIM:
        return
    yield from (merge_parts(inputs), top_blocks(), count(0), totals(), places(), scatter(0))
    yield from (selected_backward(inputs), *backward_sums(inputs))
    for path in reversed(paths):  # the portable one first, some of whose kernels others have too
        yield window(inputs, path)
        yield from (selected(inputs, block, path) for block in BLOCKS)
        yield from (block_weights(inputs, group, path) for group in ((2, 4, 8) if path.has_wgmma else (1, 2, 4)))
        if path.has_wgmma:
            yield compressed(inputs)
