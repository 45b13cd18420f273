"""Instructions that a warp, or four, do together: products of tiles, exchanges between lanes."""

from __future__ import annotations

import re

from .assembled import UnknownOpcode
from .code import SYNC_ALL, SYNC_MASK, Code
from .ptx import Instruction
from .rows import vector

__all__ = ["WarpInstructions"]


class WarpInstructions(Code):
    def do_mma(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        name = "_".join(p for p in parts if p not in ("sync", "aligned", "row", "col"))
        rows = [self.row(y, 32) for group in o for y in vector(group)]
        self.emit(x, f"mma_{name}", rows, 0, SYNC_ALL)

    def do_ldmatrix(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        results = vector(o[0])
        row, bits, offset = self.address(o[1])
        if bits != 32:
            raise ValueError("ldmatrix of a 64-bit address")
        name = "ldmatrix_trans" if "trans" in parts else "ldmatrix"
        rows = [*(self.row(y, 32) for y in results), row]
        self.emit(x, name, rows, offset, SYNC_ALL, n=len(results))

    def do_wgmma(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        if parts[0] == "fence":
            self.emit(x, "nothing", [], 0, SYNC_ALL)
            return
        if parts[0] in ("commit_group", "wait_group"):
            self.emit(x, f"wgmma_{parts[0]}", [], int(o[0]) if o else 0, SYNC_ALL)
            return
        kept = parts[1] == "sp"  # two of every four columns of a
        if kept:
            parts, choices, which = [parts[0], *parts[2:]], o.pop(3), o.pop(3)
            if not o[1].startswith("{") or which != "0" or parts[3].endswith("k64") is (parts[5] != "e4m3"):
                raise UnknownOpcode(x.opcode)
        shape, d, a, b = parts[3:7]
        columns = int(re.fullmatch(r"m64n(\d+)k\d+", shape).group(1))  # type: ignore[union-attr]
        results, flags = vector(o[0]), [int(y) for y in o[4:]]
        if a != b or flags[:2] != [1, 1]:
            raise UnknownOpcode(x.opcode)
        in_registers = o[1].startswith("{")
        transposed = flags[2:]
        aux = in_registers | (8 if a == "e4m3" else 0) | (16 if d == "f16" else 0) | (32 if a == "bf16" else 0)
        if in_registers and transposed and transposed[-1]:
            aux |= 4
        elif not in_registers and transposed:
            aux |= 2 * transposed[0] | 4 * transposed[1]
        rows = [self.row(y, 32) for y in results]
        rows += [self.row(y, 32) for y in vector(o[1])] if in_registers else [self.row(o[1], 64)]
        rows += [self.row(o[2], 64), self.row(o[3], 1)]
        if kept:
            rows, aux = [*rows, self.row(choices, 32)], aux | 64
        self.emit(x, "wgmma", rows, columns, SYNC_ALL, aux=aux)

    def do_shfl(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        d, _, p = o[0].partition("|")
        rows = [self.row(d, 32), self.row(p, 1) if p else self.constant(1, 0)]
        rows += [self.row(y, 32) for y in o[1:4]]
        self.emit(x, f"shfl_{parts[1]}", rows, 2, SYNC_MASK, self.row(o[4], 32), aux=bool(p))

    def do_vote(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        mode = parts[1]
        negated = o[1].startswith("!")
        mask = self.row(o[2], 32)
        rows = [self.row(o[0], 32 if mode == "ballot" else 1), self.row(o[1].lstrip("!"), 1), mask]
        self.emit(x, f"vote_{mode}", rows, -1, SYNC_MASK, mask, aux=negated)

    def do_redux(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        op, t = parts[1], parts[-1]
        kind = t if op in ("min", "max") else "u32"
        mask = self.row(o[2], 32)
        self.emit(x, f"redux_{op}_{kind}", [self.row(o[0], 32), self.row(o[1], 32), mask], 1, SYNC_MASK, mask)

    def do_match(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        mask = self.row(o[2], 32)
        self.emit(x, f"match_any_{parts[-1]}", [self.row(y, 32) for y in o], 0, SYNC_MASK, mask)

    def do_activemask(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        self.emit(x, "activemask", [self.row(o[0], 32)])

    def do_elect(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        d, _, p = o[0].partition("|")
        wanted = d != "_"
        mask = self.row(o[1], 32)
        rows = [self.row(d, 32) if wanted else mask, self.row(p, 1), mask]
        self.emit(x, "elect", rows, 0, SYNC_MASK, mask, aux=wanted)
