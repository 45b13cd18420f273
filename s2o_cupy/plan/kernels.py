"""What a CUDA kernel is to a plan: a family, and the instantiation of it that fits the arrays of a call.

Families stand where their kernels are chosen: those of the passes in paths.py, of the tail in tail.py, of a way to
choose keys in its file in s2o_cupy/selection. Pure: no array, no GPU, no CuPy. cuda/compiler.py turns a Kernel into
machine code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .params import Struct, struct

if TYPE_CHECKING:
    from .paths import Path

__all__ = ["HEAD_DIMS", "Family", "Inputs", "Kernel", "padded_head_dim"]

HEAD_DIMS = (64, 128, 256)  # that kernels are compiled for


def padded_head_dim(head_dim: int) -> int:
    return next(padded for padded in HEAD_DIMS if head_dim <= padded)


@dataclass(frozen=True)
class Inputs:
    """What kernels are instantiated for: the arrays of a call."""

    dtype: str
    head_dim: int  # padded
    aligned: bool = True  # every row of q, k, v and out starts on 16 bytes
    paged: bool = False  # k and v are a paged cache
    softcap: bool = False  # scores are capped


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
    open_shared: bool = False  # which ends in an open array: its size is the least that is needed
    path: Path | None = None  # that it belongs to; None: it runs on all

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

    @property
    def function(self) -> str:
        return self.family.function

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
