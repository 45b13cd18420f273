"""Where a kernel's registers and constants lie: a row of 32 lanes each."""

from __future__ import annotations

import re

from .ptx import Instruction, Label, Program

__all__ = ["FLOATS", "ONES", "SPECIALS", "TOKENS", "Rows", "bits_of", "split_place", "unsigned", "vector"]

SHARED_BASE = 1024
SPECIALS = ("%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x", "%cluster_ctarank", "%laneid", "%warpid", "%smid")
ONES = {"%tid.y": 0, "%tid.z": 0, "%ctaid.y": 0, "%ctaid.z": 0, "%ntid.y": 1, "%ntid.z": 1, "%nctaid.y": 1,
        "%nctaid.z": 1}  # fmt: skip
ROW_BYTES = {1: 4, 16: 64, 32: 128, 64: 256}
FLOATS = {"f32", "f64"}
TOKENS = re.compile(r"[%a-zA-Z_$][\w$.@:]*")


def bits_of(t: str) -> int:
    return 1 if t == "pred" else int(t[1:]) if t[1:].isdigit() else 32


def unsigned(t: str) -> str:
    return f"u{t[1:]}" if t[0] in "bsf" and t[1:].isdigit() else t


def vector(operand: str) -> list[str]:
    return [x.strip() for x in operand.strip().strip("{}").split(",")]


def split_place(operand: str) -> tuple[str, list[str]]:
    """Of [map, {coordinates}]."""
    inner = operand.strip()[1:-1]
    place, _, rest = inner.partition(",")
    return place.strip(), vector(rest)


def _number(text: str, width: int) -> int:
    if text.startswith(("0f", "0F")):
        return int(text[2:], 16)
    if text.startswith(("0d", "0D")):
        return int(text[2:], 16)
    if width == 1:
        return 0 if int(text, 0) == 0 else -1
    return int(text.rstrip("U"), 0)


class Rows:
    """Gives registers and constants their rows, as offsets in bytes; constants lie behind all registers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rows: dict[str, int] = {}
        self.register_bytes = 0
        self.constants: dict[tuple[int, int], int] = {}
        self.constant_values: list[tuple[int, int]] = []
        self.constant_bytes = 0
        self.local_row = self.param_row = -1
        self.special_rows: dict[str, int] = {}

    def add_row(self, width: int) -> int:
        at = self.register_bytes
        self.register_bytes += ROW_BYTES[width]
        return at

    def place_registers(self) -> None:
        """A row for each register; those that one block alone uses, one after the other, share rows."""
        widths = self.program.widths
        block, first, last = 0, {}, {}
        blocks: dict[str, int] = {}  # register: the block that uses it, -1: several, or it is read before it is written
        uses: list[list[str]] = []
        for index, x in enumerate(self.program.body):
            if isinstance(x, Label):
                block += 1
                uses.append([])
                continue
            text = ",".join(x.operands)
            names = [name for name in TOKENS.findall(text) if name in widths]
            if x.guard:
                names.append(x.guard)
            uses.append(names)
            written = TOKENS.match(x.operands[0].lstrip("{")) if x.operands else None
            writes = not x.guard and not x.opcode.startswith(("wgmma", "st", "red"))
            fresh = written.group() if written and writes else None
            for name in names:
                if name not in blocks:
                    alone = (name == fresh and names.count(name) == 1) or self._is_result(x, name, names)
                    blocks[name] = block if alone else -1
                    first[name] = index
                elif blocks[name] != block:
                    blocks[name] = -1
                last[name] = index
            if x.opcode.startswith(("bra", "ret", "exit")):
                block += 1
        free: dict[int, list[int]] = {1: [], 16: [], 32: [], 64: []}
        ends: dict[int, list[str]] = {}
        for name, where in blocks.items():
            if where >= 0:
                ends.setdefault(last[name], []).append(name)
        for index, names in enumerate(uses):
            for name in names:
                if name not in self.rows:
                    width = widths[name]
                    shared = blocks[name] >= 0 and free[width]
                    self.rows[name] = free[width].pop() if shared else self.add_row(width)
            for name in ends.get(index, ()):
                free[widths[name]].append(self.rows[name])

    @staticmethod
    def _is_result(x: Instruction, name: str, names: list[str]) -> bool:
        """Whether a register of a vector is written, and nothing before."""
        if x.guard or names.count(name) > 1 or not x.operands[0].startswith("{"):
            return False
        return x.opcode.startswith(("ld", "mov", "mma")) and name in TOKENS.findall(x.operands[0])

    def constant(self, width: int, value: int) -> int:
        value &= (1 << (32 if width == 1 else width)) - 1
        if (width, value) not in self.constants:
            self.constants[width, value] = self.constant_bytes
            self.constant_values.append((width, value))
            self.constant_bytes += ROW_BYTES[width]
        return self.register_bytes + self.constants[width, value]

    def row(self, operand: str, width: int) -> int:
        """Of a register or a constant of so many bits."""
        if operand in self.rows:
            have = self.program.widths[operand]
            if have != width:
                raise ValueError(f"{operand} has {have} bits and {width} are wanted")
            return self.rows[operand]
        if operand in self.program.widths or operand in self.special_rows:
            return self.special_rows[operand]
        if operand in ONES:
            return self.constant(32, ONES[operand])
        if operand in self.program.shared:
            return self.constant(width, SHARED_BASE + self.program.shared[operand])
        if operand in self.program.params:
            return self.param_row
        if operand in self.program.local:
            if self.program.local[operand]:
                raise ValueError(f"{operand}: a second local array")
            return self.local_row
        return self.constant(width, _number(operand, width))

    def address(self, operand: str) -> tuple[int, int, int]:
        """Of [base+offset]: the base's row, its bits, the offset."""
        inner = operand.strip()[1:-1].strip()
        base, sign, rest = inner.partition("+")
        offset = int(rest, 0) if sign else 0
        base = base.strip()
        if base in self.program.widths:
            return self.row(base, self.program.widths[base]), self.program.widths[base], offset
        return self.row(base, 64), 64, offset

    def plain_address(self, operand: str) -> int:
        row, bits, offset = self.address(operand)
        if bits != 32 or offset:
            raise ValueError(f"{operand} is no 32-bit register alone")
        return row

    def sink(self, width: int) -> int:
        """A row of a result that nobody wants."""
        return self.constant(width, (1 << width) - 0x5A5B) if width > 16 else self.constant(width, 0x5A5B)
