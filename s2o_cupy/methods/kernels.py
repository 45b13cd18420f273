"""The kernels that choose blocks: their families and their shared memory.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..plan.device import DeviceLimits
from ..plan.kernels import Family, Inputs, Kernel
from ..plan.paths import HOPPER, device_path

__all__ = [
    "LAST_ROWS", "MOST_HEADS", "SCORE_TILES", "block_means", "block_scores", "choose_blocks", "column_means", "kernels",
    "last_row_sums", "last_rows_tile", "order_segments", "rows_of_block", "segments_of_block", "token_order",
]  # fmt: skip

MOST_HEADS = 256  # that may have thresholds of their own (kMostHeads)
WARP = 32
CHOICE_THREADS = 128
MOST_OF_ROW = 2048  # columns whose weights a warp holds
LAST_ROWS = 128  # queries that there is room for in last_row_sums (LastRowsTraits::kRows)

_ELEMENT = "{element}, {head_dim}"
BLOCK_MEANS, ALIKE_BLOCK_MEANS = (
    Family(function, "methods/block_means.cu", "BlockMeansParams", 256, blocks, f"BlockMeansTraits<{_ELEMENT}>")
    for function, blocks in (("block_means", 6), ("alike_block_means", "(__CUDA_ARCH__ >= 1000 ? 3 : 4)"))
)
BLOCK_SCORES = Family(
    "block_scores", "methods/block_scores.cu", "BlockScoresParams", 128, "(__CUDA_ARCH__ >= 1200 ? 3 : 4)",
    f"BlockScoresTraits<{_ELEMENT}>",
)
BLOCK_SCORES_SM90 = Family(
    "block_scores_sm90", "methods/block_scores_sm90.cu", "BlockScoresParams", 128, 2,
    f"BlockScoresSm90Traits<{_ELEMENT}>", path=HOPPER,
)  # fmt: skip
SCORE_TILES = {BLOCK_SCORES: (64, 64), BLOCK_SCORES_SM90: (64, 128)}  # rows and columns of a block
CHOOSE_BLOCKS = Family(
    "choose_blocks", "methods/choose_blocks.cu", "ChooseBlocksParams", CHOICE_THREADS,
    "(__CUDA_ARCH__ >= 1000 ? 2 : {step} < 64 ? 8 : 4)", "ChoiceTraits<{step}>", shared="s2o::WarpChoiceShared",
)
CHOOSE_LONG = Family(
    "choose_long", "methods/choose_blocks.cu", "ChooseBlocksParams", CHOICE_THREADS, 8, shared="s2o::ChoiceShared"
)
LAST_ROW_SUMS, COLUMN_MEANS = (
    Family(function, "methods/last_rows.cu", "LastRowsParams", 256, 2, f"LastRowsTraits<{_ELEMENT}>")
    for function in ("last_row_sums", "column_means")
)
# By query heads that share keys in a block.
LAST_ROW_SUMS_SM90, COLUMN_MEANS_SM90 = (
    {heads: Family(function + of, "methods/last_rows_sm90.cu", "LastRowsParams", threads, 2 // heads,
                   f"LastRowsSm90Traits<{_ELEMENT}, {{group}}>", path=HOPPER)
     for heads, of, threads in ((1, "_sm90", 288), (2, "_of_two_sm90", 640))}
    for function in ("last_row_sums", "column_means")
)  # fmt: skip
ORDER_SEGMENTS = Family(
    "order_segments", "methods/order_segments.cu", "OrderSegmentsParams", 256, 4, shared="s2o::OrderSegmentsShared"
)
ORDER_SHORT_SEGMENTS = Family(
    "order_short_segments", "methods/order_segments.cu", "OrderSegmentsParams", 256, 4,
    shared="s2o::ShortSegmentsShared",
)  # fmt: skip
SHORT_SEGMENT = 256  # keys (kShort)
TOKEN_ORDER = Family("token_order", "methods/token_order.cu", "TokenOrderParams", 256, 4)


def block_means(inputs: Inputs, alike: bool) -> Kernel:
    """``alike``: with similarities."""
    family = ALIKE_BLOCK_MEANS if alike else BLOCK_MEANS
    return Kernel(family, inputs.dtype, inputs.head_dim)


def block_scores(inputs: Inputs, limits: DeviceLimits) -> Kernel:
    """sizeof(BlockScoresSm90Traits::Shared)"""
    if inputs.head_dim > device_path(limits).wgmma_head_dim:
        return Kernel(BLOCK_SCORES, inputs.dtype, inputs.head_dim)
    shared = sum(SCORE_TILES[BLOCK_SCORES_SM90]) * 2 * inputs.head_dim * 2
    return Kernel(BLOCK_SCORES_SM90, inputs.dtype, inputs.head_dim, shared_bytes=shared)


def choose_blocks(columns: int) -> Kernel:
    """For rows of so many columns. sizeof(WarpChoiceShared)"""
    if columns > MOST_OF_ROW:
        return choose_long(columns)
    return Kernel(CHOOSE_BLOCKS, step=32 if columns <= MOST_OF_ROW // 2 else 64, shared_bytes=CHOICE_THREADS * 4)


def rows_of_block(kernel: Kernel) -> int:
    """That a block of `choose_blocks` has."""
    return CHOICE_THREADS // WARP if kernel.family is CHOOSE_BLOCKS else 1


def choose_long(columns: int) -> Kernel:
    """sizeof(ChoiceShared), which has a warp's weights, and further weights as rows need them."""
    room = 1 << (columns - 1).bit_length()
    fixed, more = (2 * 4 + 2 * 4) * 4, (room - WARP) * 4
    return Kernel(CHOOSE_LONG, shared_bytes=fixed + WARP * 4 + more, open_bytes=more)


def last_rows_tile(head_dim: int) -> int:
    """Keys at a time (LastRowsTraits::kTile)."""
    return 64 if head_dim > 128 else 128


def last_row_sums(inputs: Inputs, limits: DeviceLimits, group: int) -> Kernel:
    """``group``: query heads of a KV head."""
    return _last_rows(LAST_ROW_SUMS, LAST_ROW_SUMS_SM90, inputs, limits, group)


def column_means(inputs: Inputs, limits: DeviceLimits, group: int) -> Kernel:
    return _last_rows(COLUMN_MEANS, COLUMN_MEANS_SM90, inputs, limits, group)


def _last_rows(family: Family, hopper: dict[int, Family], inputs: Inputs, limits: DeviceLimits, group: int) -> Kernel:
    """sizeof(LastRowsTraits::Shared), or of LastRowsSm90Traits: a device has one of the two, whatever path attends."""
    head_dim, tile = inputs.head_dim, last_rows_tile(inputs.head_dim)
    if head_dim <= device_path(limits).wgmma_head_dim:
        heads = 1 if group % 2 else 2
        shared = (heads * LAST_ROWS + (1 + heads) * tile) * head_dim * 2 + heads * LAST_ROWS * 4 + 2 * (1 + heads) * 8
        return Kernel(hopper[heads], inputs.dtype, head_dim, shared_bytes=shared, group=heads)
    stages = 1 if head_dim > 128 else 2
    shared = (LAST_ROWS + stages * tile) * head_dim * 2 + LAST_ROWS * 4 + 2 * tile * 4
    return Kernel(family, inputs.dtype, head_dim, shared_bytes=shared)


def segments_of_block(kernel: Kernel) -> int:
    """That a block of `order_segments` has."""
    return kernel.threads // WARP if kernel.family is ORDER_SHORT_SEGMENTS else 1


def order_segments(sort_slots: int) -> Kernel:
    """sizeof(OrderSegmentsShared), which has a warp's slots, and further slots as a segment needs them, or of
    ShortSegmentsShared."""
    if sort_slots <= SHORT_SEGMENT:
        return Kernel(ORDER_SHORT_SEGMENTS, shared_bytes=ORDER_SHORT_SEGMENTS.threads // WARP * SHORT_SEGMENT * 4)
    more = (sort_slots - WARP) * 4
    return Kernel(ORDER_SEGMENTS, shared_bytes=WARP * 4 + more, open_bytes=more)


def token_order() -> Kernel:
    return Kernel(TOKEN_ORDER)


def kernels(inputs: Inputs, limits: DeviceLimits) -> Iterator[Kernel]:
    """All that a call with such inputs may run on a device; shared memory that is only sized is not in their texts."""
    if inputs.aligned and not inputs.paged and not inputs.softcap:
        yield block_means(inputs, alike=False)
        yield block_means(inputs, alike=True)
        yield block_scores(inputs, limits)
        yield from (choose_blocks(1), choose_blocks(MOST_OF_ROW), choose_long(WARP))
        for group in (1, 2):
            yield from (last_row_sums(inputs, limits, group), column_means(inputs, limits, group))
        yield from (order_segments(SHORT_SEGMENT), order_segments(2 * SHORT_SEGMENT), token_order())
