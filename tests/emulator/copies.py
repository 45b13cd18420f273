"""Asynchronous copies and the barriers that they report to."""

from __future__ import annotations

from .assembled import UnknownOpcode
from .code import Code
from .ptx import Instruction
from .rows import split_place

__all__ = ["CopyInstructions"]


class CopyInstructions(Code):
    def do_cp(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        what = parts[1] if len(parts) > 1 else ""
        if what in ("ca", "cg"):
            to, to_bits, to_offset = self.address(o[0])
            source, _, offset = self.address(o[1])
            if to_bits != 32:
                raise ValueError("cp.async to a 64-bit address")
            rows, aux = [to, source], 0
            if len(o) > 3:
                if self.program.widths.get(o[3]) != 1:
                    raise ValueError("cp.async with a size that varies")
                rows.append(self.row(o[3], 1))
                aux = 2
            self.emit(x, "cp_async", rows, to_offset << 32 | offset & 0xFFFFFFFF, aux=aux, n=int(o[2]))
        elif what == "commit_group":
            self.emit(x, "cp_async_commit_group", [])
        elif what == "wait_group":
            self.emit(x, "cp_async_wait_group", [], int(o[0]))
        elif what == "wait_all":
            self.emit(x, "cp_async_wait_all", [])
        elif what == "mbarrier":
            base, bits, offset = self.address(o[0])
            self.emit(x, "cp_async_mbarrier_arrive_noinc", [base], offset, aux=bits == 32)
        elif what == "bulk" and "tensor" in parts:
            place, coordinates = split_place(o[1])
            rows = [self.plain_address(o[0]), self.row(place, 64)]
            rows += [self.row(y, 32) for y in coordinates]
            rows.append(self.plain_address(o[2]))
            aux = 0
            if "multicast::cluster" in parts:
                rows.append(self.row(o[3], 16))
                aux = 2
            self.emit(x, "cp_async_bulk_tensor", rows, aux=aux, n=len(coordinates))
        elif what == "bulk" and "shared::cluster" in parts:
            base, _, offset = self.address(o[1])
            if offset:
                raise ValueError("an offset")
            rows = [self.plain_address(o[0]), base, self.row(o[2], 32), self.plain_address(o[3])]
            self.emit(x, "cp_async_bulk", rows)
        else:
            raise UnknownOpcode(x.opcode)

    def do_mbarrier(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        what = parts[0]
        if what == "try_wait" or what == "test_wait":
            if "parity" not in parts:
                raise ValueError("a wait without a parity")
            base, bits, offset = self.address(o[1])
            self.emit(x, "mbarrier_try_wait", [self.row(o[0], 1), base, self.row(o[2], 32)], offset, aux=bits == 32)
            return
        if what != "init" and what != "expect_tx":
            o = o[1:]  # the state
        base, bits, offset = self.address(o[0])
        rows = [base, *(self.row(y, 32) for y in o[1:])]
        if what == "init":
            name = "mbarrier_init"
        elif what == "expect_tx":
            name = "mbarrier_expect_tx"
        elif "expect_tx" in parts:
            name = "mbarrier_arrive_expect_tx"
        else:
            name = "mbarrier_arrive" if len(rows) == 1 else "mbarrier_arrive_count"
        self.emit(x, name, rows, offset, aux=bits == 32)
