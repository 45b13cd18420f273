"""rank="weight": units of keys by the largest softmax weight that a pooled query gives them.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...plan.build import Array, Builder, Launch
from ...plan.kernels import Family, Inputs, Kernel, Path
from ...plan.paths import HOPPER
from ...plan.rounds import STEP, Chunk
from ...spec import MOST_WEIGHED
from .base import SMALLEST_SCALE, Order

__all__ = ["UNIT_KEYS_OF_BLOCK", "WeightOrder", "unit_keys", "unit_weight_blocks", "unit_weights"]

THREADS = 256
WARP = 32
UNIT_KEYS = Family(
    "unit_keys", "selection/unit_keys.cu", "UnitKeysParams", THREADS, 2,
    "UnitKeysTraits<{element}, {head_dim}, {paged}>", knows_segments=False,
)  # fmt: skip
UNIT_WEIGHTS = Family(
    "unit_weights", "selection/unit_weights.cu", "RankKeysParams", 128, 2, "WeightTraits<{element}, {head_dim}>"
)
UNIT_WEIGHTS_SM90 = Family(
    "unit_weights_sm90", "selection/unit_weights_sm90.cu", "RankKeysParams", 512, 1,
    "WeightSm90Traits<{element}, {head_dim}>", path=HOPPER,
)  # fmt: skip
UNIT_KEYS_OF_BLOCK = 128  # keys of a block of unit_keys (kKeys)
HOPPER_WEIGHT_ROWS = 128  # rows of unit_keys of a tile of unit_weights_sm90 (kTile)
HOPPER_WEIGHT_STAGES = 4  # tiles of these in its shared memory
HOPPER_MOST_POOLED = 16  # pooled queries of a segment: rows of a warp's product
_HOPPER_SEGMENTS = UNIT_WEIGHTS_SM90.threads // WARP


def unit_keys(inputs: Inputs) -> Kernel:
    shared = UNIT_KEYS_OF_BLOCK * (8 + inputs.head_dim * 2)  # sizeof(UnitKeysTraits::Shared)
    return Kernel(UNIT_KEYS, inputs.dtype, inputs.head_dim, paged=inputs.paged, shared_bytes=shared)


def unit_weights(inputs: Inputs, path: Path, pooled_queries: int) -> Kernel:
    """Mean keys are whole rows in one array, wherever keys are."""
    head_dim = inputs.head_dim
    if pooled_queries <= HOPPER_MOST_POOLED and head_dim <= path.wgmma_head_dim:  # sizeof(WeightSm90Traits::Shared)
        pooled = _HOPPER_SEGMENTS * HOPPER_MOST_POOLED * head_dim * 2
        shared = HOPPER_WEIGHT_STAGES * (HOPPER_WEIGHT_ROWS * head_dim * 2 + 2 * 8) + pooled
        return Kernel(UNIT_WEIGHTS_SM90, inputs.dtype, head_dim, shared_bytes=shared)
    norms = (4 if head_dim > 128 else 8) * MOST_WEIGHED * 4
    shared = 2 * STEP * head_dim * 2 + norms + 4  # sizeof(WeightTraits::Shared)
    return Kernel(UNIT_WEIGHTS, inputs.dtype, head_dim, shared_bytes=shared)


def portable_segments(head_dim: int) -> int:
    """Segments of a block of unit_weights (WeightTraits::kSegments)."""
    return 4 if head_dim > 128 else 8


def unit_weight_blocks(kernel: Kernel, chunk: Chunk) -> int:
    """Of unit_weights."""
    segments = _HOPPER_SEGMENTS if kernel.family is UNIT_WEIGHTS_SM90 else portable_segments(kernel.head_dim)
    return chunk.heads * -(-chunk.segments // segments)


class WeightOrder(Order):
    """Two keys stand for each unit, its mean and the one furthest from that; pooled queries weigh both."""

    @functools.cached_property
    def unit_keys(self) -> Kernel:
        return unit_keys(self.setting.inputs)

    @functools.cached_property
    def kernel(self) -> Kernel:
        return unit_weights(self.setting.inputs, self.setting.path, self.setting.config.pooled_queries)

    @staticmethod
    def catalogue(inputs: Inputs, path: Path) -> Iterator[Kernel]:
        if inputs.aligned:
            yield unit_keys(inputs)
            for pooled_queries in (1, HOPPER_MOST_POOLED + 1):
                yield unit_weights(replace(inputs, paged=False), path, pooled_queries)

    @property
    def head_blocks(self) -> int:
        """Blocks of unit_keys for a KV head."""
        geometry = self.setting.geometry
        return -(-geometry.units * geometry.unit // UNIT_KEYS_OF_BLOCK)

    @property
    def largest_grid(self) -> int:  # type: ignore[override]
        return self.setting.kv_heads * self.head_blocks

    def arrays(self) -> list[Array]:
        s = self.setting
        return [("unit_keys", (s.kv_heads, s.geometry.units, 2, s.inputs.head_dim), "uint16")]

    def before_rounds(self, build: Builder) -> list[Launch]:
        if self.head_blocks == 0:
            return []
        s = self.setting
        values = {
            "k": build.tensors["k"], "geometry": build.geometry, "kv_heads": s.problem.kv_heads, "pages": build.pages,
            "head_blocks": self.head_blocks, "aligned": s.inputs.aligned,
        }  # fmt: skip
        return [build.launch("unit_keys", self.unit_keys, s.kv_heads * self.head_blocks, values)]

    def scores(self, build: Builder, chunk: Chunk, values: Mapping[str, Any]) -> Launch:
        blocks = unit_weight_blocks(self.kernel, chunk)
        values = {**values, "scale_log2": max(self.scale_log2, SMALLEST_SCALE)}
        return build.launch("unit_weights", self.kernel, blocks, values, chunk)


ORDER = WeightOrder
