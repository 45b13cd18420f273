"""What every method's configuration is and has. Pure: no array, no GPU, no CuPy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..arrays.operand import Operand
from ..by_head import by_head, checked_real
from ..errors import ArgumentTypeError, ArgumentValueError
from ..plan.build import Array, Launch, Workspace
from ..plan.device import DeviceLimits
from ..plan.kernels import Inputs, Kernel
from ..plan.schedule_form import BLOCK_N
from ..problem import Problem
from ..spec import PATHS, Pass, checked_int
from .grid import BlockGrid

__all__ = [
    "BLOCKS", "MethodConfig", "Site", "Stage", "checked_bool", "checked_choice", "checked_number", "checked_numbers",
]  # fmt: skip

BLOCKS = (64, 128)  # keys of a block, and queries of a q tile


@dataclass(frozen=True)
class Site:
    """What a method's launches are made for."""

    problem: Problem
    grid: BlockGrid
    inputs: Inputs
    limits: DeviceLimits
    operands: Mapping[str, Operand]  # q and k, of which only the strides are read
    workspace_bytes: int

    @property
    def heads(self) -> int:
        """Query heads of all sequences."""
        return self.problem.batch * self.problem.heads

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.problem.heads // self.problem.kv_heads

    def tensor(self, name: str) -> dict[str, int]:
        """The kernels' Tensor without its address."""
        return dict(zip(("batch", "head", "row"), self.operands[name].strides, strict=True))


class Stage(Protocol):
    """One step of a selection."""

    @property
    def arrays(self) -> list[Array]:
        """What it leaves in the workspace."""

    def launches(self, memory: Workspace) -> list[Launch]:
        """Its kernels in order. Pointers start from q, k and what a selection makes (`entries`, ...), or lie in
        ``memory``."""


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Fields of every method."""

    path: str = "auto"
    workspace_bytes: int = 256 << 20

    reference: ClassVar[str]  # the module in reference/methods
    causal_only: ClassVar[bool] = False
    rule: ClassVar[str] = "reach"  # that ends a choice: "reach", "within" or "largest"
    long_lists: ClassVar[bool] = False  # of single keys: heads take turns in `sparse_attention`
    value_skip: ClassVar[Any] = None  # of its schedules; a field where a method has it

    def __post_init__(self) -> None:
        checked_choice("path", self.path, PATHS)
        self._set("workspace_bytes", checked_int("workspace_bytes", self.workspace_bytes, 1 << 20))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the one way into a frozen dataclass

    @property
    def block_q(self) -> int:
        raise NotImplementedError

    @property
    def of_pass(self) -> Pass:
        """What it leaves to the passes; the rest its schedules say."""
        return Pass(self.block_q, BLOCK_N, self.path)

    def check(self, problem: Problem) -> None:
        """Raise ValueError for a problem that the method does not take."""
        if self.causal_only and not problem.is_causal:
            accepted = "accepted: True, as the method is for causal attention"
            raise ArgumentValueError(f"is_causal is False; {accepted}", type(self).__name__)

    def grid(self, problem: Problem) -> BlockGrid:
        raise NotImplementedError

    def fixed_rules(self, problem: Problem) -> dict[str, Any] | None:
        """The rules of its schedules where these depend on no array and have no lists; None: they do."""
        return None

    def order_heads(self, problem: Problem) -> int:
        """Heads of the permutation of keys; 0: there is none."""
        return 0

    @property
    def orders_queries(self) -> bool:
        """Whether queries are taken in another order, too, the same for all sequences, as keys then are."""
        return False

    def stages(self, site: Site) -> list[Stage]:
        """What runs on a GPU, in order."""
        raise NotImplementedError

    @staticmethod
    def catalogue(inputs: Inputs) -> Iterator[Kernel]:
        """Kernels of its own file that a call with such inputs may choose."""
        return iter(())


def checked_choice(name: str, value: Any, accepted: Sequence[Any], owner: str = "") -> Any:
    """``value``, if it is one of ``accepted`` and of its kind: integers may be NumPy's, a float is none."""
    kind = str if isinstance(accepted[0], str) else numbers.Integral
    if isinstance(value, bool) or not isinstance(value, kind) or value not in accepted:
        raise ArgumentValueError(f"{name} is {value!r}; accepted: {' or '.join(map(repr, accepted))}", owner)
    return value


def checked_bool(name: str, value: Any, owner: str = "") -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} is {value!r}; accepted: True or False", owner)
    return value


def checked_number(name: str, value: Any, low: float, high: float, accepted: str, owner: str = "") -> float:
    """``value`` as a float above ``low`` and up to ``high``."""
    number = checked_real(name, value, accepted, owner)
    if math.isnan(number) or not low < number <= high:
        raise ArgumentValueError(f"{name} is {value!r}; accepted: {accepted}", owner)
    return number


def checked_numbers(name: str, value: Any, low: float, high: float, accepted: str) -> float | tuple[float, ...]:
    """A number, or one for each query head."""
    return by_head(name, value, lambda of, x: checked_number(of, x, low, high, accepted))
