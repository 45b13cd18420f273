"""Statements of PTX to the code that machine.c runs: rows for registers and constants, a function for each opcode."""

from __future__ import annotations

import struct

import numpy as np

from .assembled import INS, Assembled, UnknownOpcode
from .code import LABEL
from .copies import CopyInstructions
from .lanes import LaneInstructions
from .ptx import Instruction, Label, Program
from .rows import SPECIALS, TOKENS
from .warps import WarpInstructions

__all__ = ["Assembled", "assemble"]


class _Assembler(LaneInstructions, CopyInstructions, WarpInstructions):
    def run(self) -> Assembled:
        self.place_registers()
        text: set[str] = set()
        for x in self.program.body:
            if isinstance(x, Instruction):
                text.update(y for o in x.operands for y in TOKENS.findall(o))
        for name in SPECIALS:
            if name in text:
                self.special_rows[name] = self.add_row(32)
        self.param_row = self.add_row(64)
        if self.program.local_bytes:
            self.local_row = self.add_row(64)
        for x in self.program.body:
            if isinstance(x, Label):
                self.targets[x.name] = len(self.code)
                self.code.append((0, 0, 0, -1, 0, 0, LABEL, 0, 0, 0))
            else:
                try:
                    self.instruction(x)
                except UnknownOpcode as error:
                    raise UnknownOpcode(f"{x.opcode} (op_{error})") from None
                except (ValueError, KeyError, IndexError, struct.error) as error:
                    raise ValueError(f"{self.program.lines[x.line - 1 if x.line else 0].strip()} "
                                     f"[{x.opcode} {x.operands}]: {error!r}") from error  # fmt: skip
        return self.finish()

    def finish(self) -> Assembled:
        code = np.array(
            [(*x[:2], self.targets[x[2]], *x[3:]) if isinstance(x[2], str) else x for x in self.code], INS
        )
        constants = b"".join(
            value.to_bytes(4, "little") if width == 1 else value.to_bytes(width // 8, "little") * 32
            for width, value in self.constant_values
        )
        program = self.program
        return Assembled(
            program.name, program.param_bytes, program.cluster, program.shared_bytes,
            -(-program.local_bytes // 16) * 16, list(self.functions), code, np.array(self.operands or [0], np.int32),
            constants or b"\0" * 4, self.register_bytes, [self.special_rows.get(name, -1) for name in SPECIALS],
            self.local_row, self.param_row, program.places,
        )  # fmt: skip


def assemble(program: Program) -> Assembled:
    return _Assembler(program).run()
