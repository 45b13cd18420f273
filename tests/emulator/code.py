"""The code of a kernel as it grows, instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .assembled import function_address
from .ptx import Instruction, Program
from .rows import Rows

__all__ = ["BARRIER", "BRANCH", "EXIT", "LABEL", "PLAIN", "SYNC_ALL", "SYNC_MASK", "Code"]

PLAIN, LABEL, BRANCH, EXIT, SYNC_ALL, SYNC_MASK, BARRIER = range(7)


class Code(Rows):
    """Keeps of each instruction the C function, the rows of its operands, and how a warp meets at it."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.targets: dict[str, int] = {}
        self.functions: dict[str, int] = {"nothing": 0}
        self.operands: list[int] = []  # offsets of all instructions
        self.code: list[tuple[Any, ...]] = []  # as INS, `o` an index into operands

    def emit(
        self, x: Instruction, function: str, rows: Iterable[int], imm: int = 0, kind: int = PLAIN, member: int = 0,
        aux: int = 0, n: int = 0,
    ) -> None:  # fmt: skip
        guard = -1 if x.guard is None else self.rows[x.guard]
        start = len(self.operands)
        self.operands.extend(rows)
        function_address(function)  # or it is not known
        which = self.functions.setdefault(function, len(self.functions))
        self.code.append((which, start, imm, guard, member, x.line, kind, x.negated, aux, n))
