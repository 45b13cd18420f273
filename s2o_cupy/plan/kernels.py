"""What a kernel and a path are to a plan: families and instantiations of kernels, and what a path answers.

Families stand where their kernels are chosen: those of the passes in paths.py, of the tail in tail.py, of a way to
choose keys in its file in s2o_cupy/selection. Pure: no array, no GPU, no CuPy. cuda/compiler.py turns a Kernel into
machine code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..problem import GPU_BLOCK_M, Problem
from ..spec import STOP_LAG, Geometry, Pass
from .device import DeviceLimits
from .params import Struct, struct

__all__ = ["HEAD_DIMS", "Family", "Inputs", "Kernel", "Path", "padded_head_dim"]

HEAD_DIMS = (64, 128, 256)  # that kernels are compiled for
BOX_COLUMNS = 64  # of a tensor map: 128 bytes of 16-bit elements, a row of the swizzle


def box_keys(head_dim: int) -> int:
    """Keys of a box of whole rows (sm90::Traits::kBoxKeys), into which units are cut."""
    return 16 if head_dim == 64 else 8


def padded_head_dim(head_dim: int) -> int:
    return next(padded for padded in HEAD_DIMS if head_dim <= padded)


@dataclass(frozen=True)
class Inputs:
    """What kernels are instantiated for: the arrays of a call, and whether it may add a tail."""

    dtype: str
    head_dim: int  # padded
    aligned: bool = True  # every row of q, k, v and out starts on 16 bytes
    paged: bool = False  # k and v are a paged cache
    softcap: bool = False  # scores are capped
    wants_tail: bool = False  # S2O's unvisited candidates would count


@dataclass(frozen=True, eq=False)
class Family:
    """What the instantiations of one kernel function share.

    Blocks differ by architecture where some version of ptxas spills registers with more.
    """

    function: str
    source: str
    params_type: str
    threads: int
    blocks_per_multiprocessor: int | str  # that the registers must allow; a string is CUDA C++ as traits is
    traits: str | None = None  # format string over Kernel's fields; None: no template
    shared: str = "{traits}::Shared"  # the struct of its shared memory
    path: Path | None = None  # that it belongs to; None: it runs on all
    cluster: int = 1  # blocks that share their memory
    knows_segments: bool = True

    @property
    def params(self) -> Struct:
        """What its source says that it is given."""
        return struct(self.source, self.params_type)

    @property
    def arch(self) -> str | None:
        """The one architecture that it is compiled for; None: any."""
        return None if self.path is None else self.path.arch


@dataclass(frozen=True)
class Kernel:
    """One instantiation. Fields that its family does not use keep their defaults."""

    family: Family
    dtype: str = "bfloat16"
    head_dim: int = 128  # padded: 64, 128 or 256
    aligned: bool = True
    block_m: int = 128
    stages: int = 2
    step: int = 64  # keys of a step of the main loop
    softcap: bool = False
    paged: bool = False
    shared_bytes: int = 0  # dynamic shared memory, as the plan counts it
    open_bytes: int = 0  # of these past sizeof(Shared), which ends in an open array; the text has them not
    group: int = 1  # query heads of a KV head among the rows of a thread
    tile_heads: int = 1  # query heads among the rows of a q tile
    drawn: bool = False  # may attend to a part of the segments (Geometry.drawn)
    clusters: int = 0  # groups of keys of a unit that are told apart, by rank="query"
    own_threads: int = 0  # of a block, where they are not its family's

    @property
    def function(self) -> str:
        return self.family.function

    @property
    def role(self) -> str:
        """What it is launched for, on whichever path."""
        return self.function if self.family.path is None else self.function.removesuffix(self.family.path.suffix)

    @property
    def threads(self) -> int:
        """Of a block. A warp of the portable passes holds the accumulators of 32 rows of 128, or of 16 of 256."""
        wide = "{block_m}" in (self.family.traits or "") and self.head_dim * self.block_m > 128 * 128
        return self.own_threads or self.family.threads * (2 if wide else 1)

    @property
    def name(self) -> str:
        parts = [self.function]
        traits = self.family.traits or ""
        if "{element}" in traits:
            parts.append(self.dtype)
        if "{element}" in traits or "{head_dim}" in traits:
            parts.append(f"d{self.head_dim}")
        if "{block_m}" in traits:
            parts.append(f"m{self.block_m}")
        if "{stages}" in traits:
            parts.append(f"s{self.stages}")
        if "TwoBlock" in traits:
            parts.append("two")  # blocks on a multiprocessor
        if "{step}" in traits and self.step != 64:
            parts.append(f"k{self.step}")
        if "{group}" in traits:
            parts.append(f"g{self.group}")
        if self.clusters:
            parts.append(f"c{self.clusters}")
        if "{aligned}" in traits and not self.aligned:
            parts.append("unaligned")
        if self.softcap:
            parts.append("softcap")
        if self.paged:
            parts.append("paged")
        if self.drawn:
            parts.append("drawn")
        return "-".join(parts)


@dataclass(frozen=True, eq=False)
class Path:
    """What a path can do."""

    name: str  # as S2OConfig.path has it
    arch: str | None  # the one architecture that its own kernels are compiled for; None: that of the device
    persistent: bool  # as many blocks as run at once take q tiles from a counter
    keeps_dense_state: bool  # pass 1 leaves (m, l) behind even where no pass 2 reads it
    gathers_pages: bool  # pass 1 gathers rows of pages that are too small to be copied whole, which takes longer
    wgmma_head_dim: int  # padded head_dim up to which there are kernels with wgmma beside the passes; 0: there are none
    block_ms: tuple[int, ...] = GPU_BLOCK_M  # queries of a q tile
    suffix: str = ""  # of the names of its own kernels

    @property
    def stop_lag(self) -> int:
        """Of pass 2: key tiles that it still visits after the one that decides."""
        return STOP_LAG[self.name]

    @property
    def has_wgmma(self) -> bool:
        """Whether there are kernels with wgmma."""
        return self.wgmma_head_dim > 0

    def runs_on(self, compute_capability: int) -> bool:
        raise NotImplementedError

    def has_int8(self, limits: DeviceLimits) -> bool:
        """Whether tensor cores multiply integers of 8 bits faster than floats of 16, by `mma`."""
        return True

    def refusal(
        self, problem: Problem, of_pass: Pass, limits: DeviceLimits, aligned: bool, compact: bool
    ) -> str | None:
        """Why it cannot run a problem, or None."""
        raise NotImplementedError

    def block_ms_of(self, head_dim: int) -> tuple[int, ...]:
        """Queries of a q tile that it has kernels for."""
        return self.block_ms

    def blocks(self, kernel: Kernel, q_tiles: int, limits: DeviceLimits) -> int:
        """Of a launch of a pass."""
        if not self.persistent:
            return q_tiles
        return min(q_tiles, limits.multiprocessors * int(kernel.family.blocks_per_multiprocessor))

    def pass1_rows(self, head_dim: int, limits: DeviceLimits) -> int:
        """Query rows of a tile of pass 1."""
        raise NotImplementedError

    def map_boxes(self, geometry: Geometry, head_dim: int, page_size: int) -> tuple[int, ...]:
        """Rows that one copy by a tensor map brings, of q, k and v; empty: pass 1 cannot read them so. ``page_size``:
        of a paged cache that k and v are, or 0."""
        return ()

    def maps_whole_rows(self, head_dim: int, boxes: tuple[int, ...]) -> bool:
        """Whether boxes of a paged cache have all columns of their rows."""
        return False

    def pass1(self, inputs: Inputs, limits: DeviceLimits, maps: bool, whole_rows: bool = False) -> Kernel:
        """``maps``: by tensor maps, if it has `map_boxes`. ``whole_rows``: `maps_whole_rows`."""
        raise NotImplementedError

    def pass2(self, inputs: Inputs, limits: DeviceLimits, block_m: int) -> Kernel:
        raise NotImplementedError

    def packed(self, pass1: Kernel) -> Kernel:
        """What is to many packed sequences what pass 1 of a dense plan is to one."""
        raise NotImplementedError

    def listed(self, pass2: Kernel, skips_values: bool = False) -> Kernel:
        """What attends to lists of keys that are given as data. ``skips_values``: and leaves out products with values
        that weigh next to nothing."""
        raise NotImplementedError

    def paired(self, listed: Kernel) -> Kernel | None:
        """What does the same at tau 0 for two query heads at a time that share lists; None: it has nothing faster."""
        return None

    def by_boxes(self, pass2: Kernel, unit: int, head_dim: int, page_size: int = 0) -> Kernel:
        """What has the copy engine bring units of keys, of q tiles whose rows are neighbours, if there is such a
        kernel. ``page_size``: as of `map_boxes`."""
        return pass2

    def with_tail(self, pass2: Kernel) -> Kernel | None:
        """What also adds what unvisited candidates count for; None: that takes a launch of its own."""
        return None

    def laddered(self, pass2: Kernel) -> Kernel:
        """What finds the error of sampled segments at a ladder of taus."""
        raise NotImplementedError

    def ladder_blocks(self, kernel: Kernel, q_tiles: int, limits: DeviceLimits) -> int:
        """Of a launch of that; each block has room for what it keeps."""
        raise NotImplementedError

    def catalogue(self, inputs: Inputs, limits: DeviceLimits, packed: bool, skips_values: bool) -> Iterator[Kernel]:
        """Its kernels that a call with such inputs may choose. ``packed``, ``skips_values``: with those kernels too."""
        raise NotImplementedError
