"""What a plan knows of a way to choose keys: which arrays it needs, and what it launches before pass 2.

The ways themselves are in s2o_cupy/selection. Pass 2 reads what they leave in the workspace: `q_order` and `k_order`
(attention_params.cuh). Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..problem import Problem
from ..spec import Geometry, S2OConfig
from .build import Array, Builder, InTurns, Launch
from .device import DeviceLimits
from .kernels import Inputs, Kernel, Path
from .rounds import Chunk

__all__ = ["Choose", "Method", "NothingChosen", "Setting"]


@dataclass(frozen=True)
class Setting:
    """What a method is made for."""

    problem: Problem
    config: S2OConfig
    geometry: Geometry
    inputs: Inputs
    path: Path
    limits: DeviceLimits
    whole: Chunk  # everything

    @property
    def heads(self) -> int:
        """Of all sequences."""
        return self.problem.batch * self.problem.heads

    @property
    def kv_heads(self) -> int:
        return self.problem.batch * self.problem.kv_heads


class Method(Protocol):
    """A way to choose keys, made for a setting."""

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The rounds, each of which is ordered and then attended by pass 2; none: no segment has a candidate."""

    @property
    def visits(self) -> bool:
        """Whether any q tile visits keys after pass 1."""

    @property
    def largest_grid(self) -> int:
        """Blocks of its largest launch, that of a round apart."""

    def arrays(self) -> Sequence[Array | InTurns]:
        """Its arrays in the workspace."""

    def before_rounds(self, build: Builder) -> list[Launch]:
        """What it launches once, after pass 1."""

    def before_pass2(self, build: Builder, chunk: Chunk) -> list[Launch]:
        """What it launches in each round."""

    def pass2(self, kernel: Kernel) -> tuple[Kernel, dict[str, Any]]:
        """``kernel``, or what takes its place as pass 2, and what that is given besides AttentionParams."""

    def after_pass2(self, build: Builder, chunk: Chunk) -> list[Launch]:
        """Likewise, with pass 2's output."""


class NothingChosen:
    """It chooses no keys: the call is pass 1 alone, or its lists come from elsewhere."""

    chunks: tuple[Chunk, ...] = ()
    visits = False
    largest_grid = 0

    def arrays(self) -> list[Array]:
        return []

    def before_rounds(self, build: Builder) -> list[Launch]:
        return []

    def before_pass2(self, build: Builder, chunk: Chunk) -> list[Launch]:
        return []

    def pass2(self, kernel: Kernel) -> tuple[Kernel, dict[str, Any]]:
        return kernel, {}

    def after_pass2(self, build: Builder, chunk: Chunk) -> list[Launch]:
        return []


Choose = Callable[[Setting], Method]
