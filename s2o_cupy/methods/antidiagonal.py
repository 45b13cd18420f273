"""Scores of blocks by the softmax mass of antidiagonals: the kernels and the launches.

Pure: no array, no GPU, no CuPy. reference/methods/xattention.py is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan.build import Array, Launch, Workspace
from ..plan.kernels import Family, Inputs, Kernel, Path
from ..plan.paths import HOPPER, device_path
from ..spec import LOG2E
from .base import Site
from .stages import launch

__all__ = ["BLOCK", "MAP_ROWS", "STRIDES", "AntidiagonalMass", "kernels"]

BLOCK = 128  # queries or keys (kMassBlock)
STRIDES = (8, 16)  # rows of a cell
STEP_BYTES = 128  # of a row, that are in shared memory at a time

NORMS = Family(
    "antidiagonal_norms", "methods/antidiagonal_norms.cu", "AntidiagonalParams", 256, 1,
    "AntidiagonalTraits<{element}, {head_dim}, {step}, {aligned}>",
)  # fmt: skip
NORMS_SM90 = Family(
    "antidiagonal_norms_sm90", "methods/antidiagonal_norms_sm90.cu", "AntidiagonalParams", 256, 1,
    "AntidiagonalTraits<{element}, {head_dim}, {step}>", path=HOPPER,
)  # fmt: skip
NORMS_MAPPED = Family(
    "antidiagonal_norms_mapped", "methods/antidiagonal_norms_mapped.cu", "MappedAntidiagonalParams", 384, 1,
    "MappedAntidiagonalTraits<{element}, {head_dim}, {step}>", path=HOPPER, cluster=2,
)  # fmt: skip
MASS = Family("block_mass", "methods/block_mass.cu", "BlockMassParams", 256, 4, "MassTraits<{step}>")
MAP_ROWS = (256, 192 // 2)  # cells of queries and of keys that a block of NORMS_MAPPED copies at a time
# Cells of queries and of keys of a tile of the product, and stages in shared memory.
TILES = {NORMS: (128, 128, 3), NORMS_SM90: (256, 192, 4), NORMS_MAPPED: (256, 192, 4)}


def norms(inputs: Inputs, stride: int, path: Path, mapped: bool = False) -> Kernel:
    """``mapped``: by tensor maps. sizeof(AntidiagonalTraits::Shared)"""
    family = NORMS if not path.has_wgmma or not inputs.aligned else NORMS_MAPPED if mapped else NORMS_SM90
    rows, keys, stages = TILES[family]
    shared = stages * (rows + keys) * STEP_BYTES
    shared += {NORMS: rows * (8 + 4), NORMS_SM90: 0, NORMS_MAPPED: stages * 2 * 8}[family]
    return Kernel(family, inputs.dtype, inputs.head_dim, inputs.aligned, step=stride, shared_bytes=shared)


def mass(stride: int) -> Kernel:
    """sizeof(MassTraits::Shared)"""
    return Kernel(MASS, step=stride, shared_bytes=BLOCK // stride * 4)


def kernels(inputs: Inputs, paths: Sequence[Path]) -> Iterator[Kernel]:
    if inputs.paged or inputs.softcap:
        return
    for stride in STRIDES:
        yield from (norms(inputs, stride, path, mapped) for path in paths for mapped in (False, True))
        yield mass(stride)


@dataclass(frozen=True)
class AntidiagonalMass:
    """Scores for `Choice`: log2 of the mass of each column."""

    site: Site
    stride: int
    path: str
    order_heads: int = 0  # of a permutation of the keys; 0: they lie as they are

    @property
    def norms_of_head(self) -> int:
        """Of norms, one for each cell of queries and each column that its row has room for."""
        grid = self.site.grid
        first = (BLOCK - 1 + grid.offset) // BLOCK + 1
        return (grid.rows * first + grid.rows * (grid.rows - 1) // 2) * (BLOCK // self.stride)

    def arrays(self, heads: int) -> list[Array]:
        return [("norms", (heads, self.norms_of_head), "float32")]

    def _maps(self, first: int, heads: int) -> bool:
        """Whether tensor maps can bring the cells of some heads, of pairs that share keys."""
        site, problem = self.site, self.site.problem
        whole_cells = not (problem.seqlen_q % self.stride or problem.seqlen_k % self.stride)
        pairs = not (site.group % 2 or first % 2 or heads % 2)
        return whole_cells and pairs and not self.order_heads and all(x.is_compact() for x in site.operands.values())

    def launches(self, memory: Workspace, first: int, heads: int, pitch: int) -> list[Launch]:
        """Of ``heads`` heads from ``first`` on."""
        site, problem = self.site, self.site.problem
        path = device_path(site.limits, self.path)
        kernel = norms(site.inputs, self.stride, path, self._maps(first, heads))
        values: dict[str, Any] = {
            "q": site.tensor("q"),
            "k": site.tensor("k"),
            "grid": site.grid.params(),
            "head_dim": problem.head_dim,
            "heads": problem.heads,
            "kv_heads": problem.kv_heads,
            "order_heads": self.order_heads or problem.heads,
            "first_head": first,
            "round_heads": heads,
            "shared_heads": math.gcd(heads, site.group),
            "scale_log2": problem.scale / self.stride * LOG2E,
        }
        read = {"order": "k_order" if self.order_heads else "no order"}
        cells = -(-site.grid.seqlen_q // self.stride)
        blocks = heads * -(-cells // TILES[kernel.family][0])
        if kernel.family is not NORMS:  # as many as run at once
            blocks = min(site.limits.multiprocessors, blocks * -(-site.grid.columns // (TILES[NORMS_SM90][1] // BLOCK)))
        if kernel.family is NORMS_MAPPED:
            blocks -= blocks % 2
        return [
            launch(memory, "norms", kernel, blocks, values, **read),
            launch(memory, "scores", mass(self.stride), heads * site.grid.rows, {**values, "pitch": pitch}, **read),
        ]
