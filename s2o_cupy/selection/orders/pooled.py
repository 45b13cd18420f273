"""rank="mean" and "max": keys by their largest dot product with a pooled query.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from ...plan.build import Builder, Launch
from ...plan.device import DeviceLimits
from ...plan.kernels import Family, Inputs, Kernel, Path
from ...plan.paths import HOPPER
from ...plan.rounds import STEP, Chunk
from .base import Order

__all__ = ["HOPPER_SCORE_KEYS", "HOPPER_SCORE_ROWS", "PooledOrder", "key_scores", "score_blocks"]

SCORE_ROWS = 64  # rows of a block of key_scores (kScoreRows)
SCORE_KEYS = 8 * STEP  # keys of a block of key_scores
HOPPER_SCORE_ROWS = 128  # rows of a block of key_scores_sm90, 64 a warpgroup
HOPPER_SCORE_STAGES = 4  # tiles of STEP keys in its shared memory
HOPPER_SCORE_KEYS = (8 * STEP, 32 * STEP)  # keys of a block: no fewer, and about as many before there is a second wave
HOPPER_BLOCKS = 2  # of key_scores_sm90 on a multiprocessor

KEY_SCORES = Family(
    "key_scores", "selection/key_scores.cu", "RankKeysParams", 128,
    "(__CUDA_ARCH__ >= 1000 || {head_dim} > 128 ? 2 : 3)", "ScoreTraits<{element}, {head_dim}, {aligned}, {paged}>",
)  # fmt: skip
KEY_SCORES_SM90 = Family(
    "key_scores_sm90", "selection/key_scores_sm90.cu", "RankKeysParams", 256, HOPPER_BLOCKS,
    "KeyScoresTraits<{element}, {head_dim}, {paged}>", path=HOPPER,
)  # fmt: skip


def key_scores(inputs: Inputs, path: Path, pooled_queries: int) -> Kernel:
    head_dim = inputs.head_dim
    if pooled_queries == 1 and head_dim <= path.wgmma_head_dim:  # sizeof(KeyScoresTraits::Shared)
        shared = (HOPPER_SCORE_ROWS + HOPPER_SCORE_STAGES * STEP) * head_dim * 2
        return Kernel(KEY_SCORES_SM90, inputs.dtype, head_dim, paged=inputs.paged, shared_bytes=shared)
    shared = 2 * STEP * head_dim * 2 + 16
    return Kernel(KEY_SCORES, inputs.dtype, head_dim, inputs.aligned, paged=inputs.paged, shared_bytes=shared)


def score_blocks(kernel: Kernel, chunk: Chunk, limits: DeviceLimits) -> tuple[int, int]:
    """Blocks of key_scores that cover the rows of one KV head, and the keys.

    Of key_scores_sm90 two run on a multiprocessor; all take as many keys, and those that have any fill whole waves.
    """
    rows = chunk.shared_heads * chunk.segments
    if kernel.family is KEY_SCORES:
        return -(-rows // SCORE_ROWS), -(-chunk.longest // SCORE_KEYS)
    slots, (fewest, most) = HOPPER_BLOCKS * limits.multiprocessors, HOPPER_SCORE_KEYS
    tiles = [tiles for tiles in _score_tiles(chunk) for _ in range(chunk.heads // chunk.shared_heads)]
    waves = -(-sum(tiles) * STEP // (slots * most))
    # The fewest that leave no more blocks than there are places.
    tiles_each = max(fewest // STEP, -(-sum(tiles) // (waves * slots)))
    blocks = lambda each: sum(-(-n // -(-max(tiles) // -(-max(tiles) // each))) for n in tiles)  # noqa: E731
    while blocks(tiles_each) > waves * slots and tiles_each < max(tiles):
        tiles_each += 1
    return -(-rows // HOPPER_SCORE_ROWS), -(-max(tiles) // tiles_each)


def _score_tiles(chunk: Chunk) -> list[int]:
    """Tiles of keys that each row block of key_scores_sm90 reads of one KV head: up to its last row's end."""
    last_rows = range(HOPPER_SCORE_ROWS, chunk.shared_heads * chunk.segments, HOPPER_SCORE_ROWS)
    last = [(row - 1) // chunk.shared_heads for row in last_rows] + [chunk.segments - 1]
    return [(chunk.stride + i * chunk.growth) // STEP for i in last]


class PooledOrder(Order):
    """Products of pooled queries and single keys."""

    @functools.cached_property
    def kernel(self) -> Kernel:
        return key_scores(self.setting.inputs, self.setting.path, self.setting.config.pooled_queries)

    @staticmethod
    def catalogue(inputs: Inputs, path: Path) -> Iterator[Kernel]:
        yield from (key_scores(inputs, path, pooled_queries) for pooled_queries in (1, 2))

    def scores(self, build: Builder, chunk: Chunk, values: Mapping[str, Any]) -> Launch:
        row_blocks, key_blocks = score_blocks(self.kernel, chunk, self.setting.limits)
        blocks = chunk.heads // chunk.shared_heads * row_blocks * key_blocks
        values = {**values, "row_blocks": row_blocks, "key_blocks": key_blocks}
        return build.launch("key_scores", self.kernel, blocks, values, chunk)


ORDER = PooledOrder
