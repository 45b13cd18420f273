"""Statements of PTX to the code that machine.c runs: rows for registers and constants, a function for each opcode."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .library import library
from .ptx import Instruction, Label, Program

__all__ = ["Assembled", "assemble"]

PLAIN, LABEL, BRANCH, EXIT, SYNC_ALL, SYNC_MASK, BARRIER = range(7)
SHARED_BASE = 1024
SPECIALS = ("%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x", "%cluster_ctarank", "%laneid", "%warpid", "%smid")
ONES = {"%tid.y": 0, "%tid.z": 0, "%ctaid.y": 0, "%ctaid.z": 0, "%ntid.y": 1, "%ntid.z": 1, "%nctaid.y": 1,
        "%nctaid.z": 1}  # fmt: skip
INS = np.dtype(
    [("run", "u8"), ("o", "u8"), ("imm", "i8"), ("guard", "i4"), ("member", "i4"), ("line", "i4"), ("kind", "u1"),
     ("negated", "u1"), ("aux", "u1"), ("n", "u1")]
)  # fmt: skip
ROW_BYTES = {1: 4, 16: 64, 32: 128, 64: 256}

_REGISTER = re.compile(r"!?([%\w$@.]+)")
_TOKENS = re.compile(r"[%a-zA-Z_$][\w$.@:]*")


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p), ("length", ctypes.c_int64), ("constants", ctypes.c_void_p),
        ("constant_bytes", ctypes.c_int64), ("register_bytes", ctypes.c_int64), ("specials", ctypes.c_int64 * 8),
        ("local_bytes", ctypes.c_int64), ("local_row", ctypes.c_int64), ("static_shared", ctypes.c_int64),
        ("param_row", ctypes.c_int64), ("name", ctypes.c_char_p),
    ]  # fmt: skip


@dataclass
class Assembled:
    """Of a kernel, without addresses, so that it can be kept in a file."""

    name: str
    param_bytes: int
    cluster: int
    shared_bytes: int  # of arrays with a size
    local_bytes: int
    functions: list[str]  # names of op_...
    code: Any  # INS; `run` is an index into functions, `o` one into operands
    operands: Any  # int32: offsets of rows
    constants: bytes
    register_bytes: int
    specials: list[int]
    local_row: int
    param_row: int
    places: dict[int, str]  # as of Program

    def bind(self) -> tuple[_Kernel, tuple[Any, ...]]:
        """For machine_launch, and what it points to."""
        code, addresses = self.code.copy(), np.array([_function(name) for name in self.functions], np.uint64)
        code["run"] = addresses[code["run"].astype(np.intp)]
        code["o"] = self.operands.ctypes.data + 4 * code["o"]
        constants = np.frombuffer(self.constants, np.uint8)
        name = self.name.encode()
        kernel = _Kernel(
            code.ctypes.data, len(code), constants.ctypes.data, len(constants), self.register_bytes + len(constants),
            (ctypes.c_int64 * 8)(*self.specials), self.local_bytes, self.local_row, self.shared_bytes, self.param_row,
            name,
        )  # fmt: skip
        return kernel, (code, self.operands, constants, name)


class UnknownOpcode(Exception):
    """Of an instruction that arithmetic.c, memory.c and tensor.c have not."""


@functools.cache
def _function(name: str) -> int:
    try:
        return ctypes.cast(getattr(library(), f"op_{name}"), ctypes.c_void_p).value or 0
    except AttributeError:
        raise UnknownOpcode(name) from None


_DROPPED = {"ftz", "volatile", "weak", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys", "cs", "nc",
            "lu", "L2::128B", "L2::256B", "sync", "aligned"}  # fmt: skip
_FLOATS = {"f32", "f64"}
_PLAIN_INTEGER = {"add", "sub", "and", "or", "xor", "not", "shl", "selp", "mov", "popc", "clz", "brev"}
BITS = {"8": 8, "16": 16, "32": 32, "64": 64}


def _bits(t: str) -> int:
    return 1 if t == "pred" else int(t[1:]) if t[1:].isdigit() else 32


def _unsigned(t: str) -> str:
    return f"u{t[1:]}" if t[0] in "bsf" and t[1:].isdigit() else t


class _Assembler:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.rows: dict[str, int] = {}
        self.register_bytes = 0
        self.constants: dict[tuple[int, int], int] = {}
        self.constant_values: list[tuple[int, int]] = []
        self.constant_bytes = 0
        self.targets: dict[str, int] = {}
        self.functions: dict[str, int] = {"nothing": 0}
        self.operands: list[int] = []  # offsets of all instructions
        self.code: list[tuple[Any, ...]] = []  # as INS, `o` an index into operands
        self.local_row = self.param_row = -1

    # --- rows ---
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
            names = [name for name in _TOKENS.findall(text) if name in widths]
            if x.guard:
                names.append(x.guard)
            uses.append(names)
            written = _TOKENS.match(x.operands[0].lstrip("{")) if x.operands else None
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
        return x.opcode.startswith(("ld", "mov", "mma")) and name in _TOKENS.findall(x.operands[0])

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

    # --- instructions ---
    def emit(
        self, x: Instruction, function: str, rows: Iterable[int], imm: int = 0, kind: int = PLAIN, member: int = 0,
        aux: int = 0, n: int = 0,
    ) -> None:  # fmt: skip
        guard = -1 if x.guard is None else self.rows[x.guard]
        start = len(self.operands)
        self.operands.extend(rows)
        _function(function)  # or it is not known
        which = self.functions.setdefault(function, len(self.functions))
        self.code.append((which, start, imm, guard, member, x.line, kind, x.negated, aux, n))

    def run(self) -> Assembled:
        self.special_rows: dict[str, int] = {}
        self.place_registers()
        text: set[str] = set()
        for x in self.program.body:
            if isinstance(x, Instruction):
                text.update(y for o in x.operands for y in _TOKENS.findall(o))
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

    def instruction(self, x: Instruction) -> None:
        head, *rest = x.opcode.split(".")
        o = x.operands
        special: Callable[..., None] | None = getattr(self, f"do_{head}", None)
        if special is not None:
            special(x, rest, o)
            return
        parts = [p for p in rest if p not in _DROPPED]
        t = parts[-1] if parts else ""
        if t in _FLOATS and head not in ("cvt",):
            parts = [p for p in parts if p not in ("rn", "approx", "full")]
        if head in _PLAIN_INTEGER or (head == "mul" and "lo" in parts) or (head == "mad" and "lo" in parts):
            if t == "pred" or head in ("popc", "clz", "brev"):
                pass
            elif t not in _FLOATS or head in ("selp", "mov"):
                parts[-1] = _unsigned(t)
        if head == "shr" or head in ("bfe", "bfind", "min", "max", "redux") or "hi" in parts:
            parts[-1] = f"u{t[1:]}" if t[0] == "b" else t
        if head == "neg" and t[0] in "bu":
            parts[-1] = f"s{t[1:]}"
        bits = _bits(t)
        widths = [bits] * len(o)
        if t in ("f16x2", "bf16x2"):
            widths = [32] * len(o)
        if head in ("shl", "shr"):
            widths[2] = 32
        elif head == "selp":
            widths[3] = 1
        elif head in ("popc", "clz"):
            widths[0] = 32
        elif "wide" in parts:
            widths[0] = 2 * bits
            if head == "mad":
                widths[3] = 2 * bits
        elif head == "bfi":
            widths[3:] = [32, 32]
        self.emit(x, "_".join([head, *parts]), [self.row(a, w) for a, w in zip(o, widths, strict=True)])

    def do_mov(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        t = parts[-1]
        if o[1].startswith("{"):
            inner = _vector(o[1])
            width = _bits(t) // len(inner)
            name = {(32, 2): "pack_b32", (64, 2): "pack_b64", (64, 4): "pack4_b64"}[_bits(t), len(inner)]
            self.emit(x, name, [self.row(o[0], _bits(t)), *(self.row(y, width) for y in inner)])
        elif o[0].startswith("{"):
            inner = _vector(o[0])
            width = _bits(t) // 2
            rows = [self.rows[y] if y in self.rows else self.sink(width) for y in inner]
            self.emit(x, f"unpack_b{_bits(t)}", [*rows, self.row(o[1], _bits(t))])
        elif t == "pred":
            self.emit(x, "mov_pred", [self.row(o[0], 1), self.row(o[1], 1)])
        else:
            width = _bits(t)
            self.emit(x, f"mov_u{width}", [self.row(o[0], width), self.row(o[1], width)])

    def sink(self, width: int) -> int:
        """A row of a result that nobody wants."""
        return self.constant(width, (1 << width) - 0x5A5B) if width > 16 else self.constant(width, 0x5A5B)

    def do_setp(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        compare, t = parts[0], parts[-1]
        if len(o) != 3 or "|" in o[0]:
            raise ValueError("a setp with more than a predicate and two operands")
        compare = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)
        kind = t if t in _FLOATS or (compare not in ("eq", "ne") and t[0] == "s") else _unsigned(t)
        self.emit(x, f"setp_{compare}_{kind}", [self.row(o[0], 1), *(self.row(y, _bits(t)) for y in o[1:])])

    def do_cvt(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        parts = [p for p in parts if p not in ("ftz", "sat")]
        to, source = parts[-2:]
        integer = lambda t: t[0] in "us" and t[1:].isdigit()  # noqa: E731
        widths = self.program.widths
        if integer(to) and integer(source):
            w_to, w_from = widths[o[0]], widths.get(o[1], _bits(source))
            fast = f"cvt_{to}_{source}"
            if fast in ("cvt_s64_s32", "cvt_u64_u32", "cvt_u32_u64") and (w_to, w_from) == (_bits(to), _bits(source)):
                self.emit(x, fast, [self.rows[o[0]], self.row(o[1], w_from)])
                return
            types = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]
            aux = types.index(source) | types.index(to) << 4
            self.emit(x, "cvt_integer", [self.rows[o[0]], self.row(o[1], w_from)], w_to | w_from << 8, aux=aux)
            return
        name = "cvt_" + "_".join(parts)
        size = {"f16x2": 32, "bf16x2": 32, "e4m3x2": 16}
        w_to, w_from = size.get(to, _bits(to) if to != "bf16" else 16), 16 if source == "bf16" else _bits(source)
        self.emit(x, name, [self.row(o[0], w_to), *(self.row(y, w_from) for y in o[1:])])

    def memory(self, parts: list[str]) -> tuple[str, str, int]:
        """Space, type and count of elements."""
        names = {"global": "global", "shared": "shared", "param": "host", "local": "host"}
        space = next((names[p.split("::")[0]] for p in parts if p.split("::")[0] in names), "global")
        return space, parts[-1], 4 if "v4" in parts else 2 if "v2" in parts else 1

    def do_ld(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        space, t, n = self.memory(parts)
        results = _vector(o[0]) if n > 1 else [o[0]]
        width = next(self.program.widths[y] for y in results if y in self.program.widths)
        bits = _bits(t)
        sign = t[0] if t[0] == "s" and bits < width else "u"
        base, base_bits, offset = self.address(o[1])
        rows = [self.rows[y] if y in self.rows else self.sink(width) for y in results]
        self.emit(x, f"ld_{space}_{sign}{bits}_{width}", [*rows, base], offset, aux=base_bits == 32, n=n)

    def do_st(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        space, t, n = self.memory(parts)
        values = _vector(o[1]) if n > 1 else [o[1]]
        bits = _bits(t)
        width = next((self.program.widths[y] for y in values if y in self.program.widths), max(bits, 16))
        base, base_bits, offset = self.address(o[0])
        rows = [base, *(self.row(y, width) for y in values)]
        self.emit(x, f"st_{space}_u{bits}_{width}", rows, offset, aux=base_bits == 32, n=n)

    def do_atom(self, x: Instruction, parts: list[str], o: list[str], returns: bool = True) -> None:
        parts = [p for p in parts if p not in _DROPPED]
        space, t, _ = self.memory(parts)
        op = next(p for p in parts if p in ("add", "or", "and", "xor", "exch", "max", "min"))
        kind = t if op in ("max", "min") or t in _FLOATS else _unsigned(t)
        place, value = (o[1], o[2]) if returns else (o[0], o[1])
        base, base_bits, offset = self.address(place)
        result = self.row(o[0], _bits(t)) if returns and o[0] != "_" else base
        aux = (base_bits == 32) | (2 if returns and o[0] != "_" else 0)
        self.emit(x, f"atom_{space}_{op}_{kind}", [result, base, self.row(value, _bits(t))], offset, aux=aux)

    def do_red(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        self.do_atom(x, parts, o, returns=False)

    def do_cvta(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        if "shared" in parts:
            raise ValueError("a generic address of shared memory")
        self.emit(x, "mov_u64", [self.row(o[0], 64), self.row(o[1], 64)])

    def do_prefetch(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        self.emit(x, "nothing", [])

    do_fence = do_membar = do_setmaxnreg = do_griddepcontrol = do_nanosleep = do_prefetch

    # --- control ---
    def do_bra(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        self.emit(x, "bra", [], o[0], BRANCH)  # type: ignore[arg-type]  # a label until all are known

    def do_ret(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        self.emit(x, "exit", [], 0, EXIT)

    do_exit = do_ret

    def do_trap(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        self.emit(x, "trap", [])

    def do_bar(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        if parts[0] == "warp":
            self.emit(x, "nothing", [], 0, SYNC_MASK, self.row(o[0], 32))
            return
        n, aux = 0, 0
        result, predicate = self.constant(32, 0), self.constant(1, 0)
        if parts[0] == "arrive":
            n |= 4
        if parts[0] == "red":
            n |= 2
            aux = {"popc": 1, "and": 2, "or": 3}[parts[1]]
            result = self.rows[o[0]]
            predicate = self.row(o[-1], 1)
            o = o[1:-1]
        count = self.constant(32, 0)
        if len(o) > 1:
            n |= 1
            count = self.row(o[1], 32)
        self.emit(x, "bar", [self.row(o[0], 32), count, result, predicate], 0, BARRIER, aux=aux, n=n)

    do_barrier_block = do_bar

    def do_barrier(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        if parts[0] != "cluster":
            self.do_bar(x, [p for p in parts if p != "cta"], o)
            return
        if parts[1] == "arrive":
            self.emit(x, "barrier_cluster_arrive", [], 0, SYNC_ALL)
        else:
            self.emit(x, "barrier_cluster_wait", [])

    def do_mapa(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        self.emit(x, "mapa_u32", [self.row(y, 32) for y in o])

    # --- asynchronous ---
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

    def plain_address(self, operand: str) -> int:
        row, bits, offset = self.address(operand)
        if bits != 32 or offset:
            raise ValueError(f"{operand} is no 32-bit register alone")
        return row

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

    # --- of a whole warp ---
    def do_mma(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        name = "_".join(p for p in parts if p not in ("sync", "aligned", "row", "col"))
        rows = [self.row(y, 32) for group in o for y in _vector(group)]
        self.emit(x, f"mma_{name}", rows, 0, SYNC_ALL)

    def do_ldmatrix(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        results = _vector(o[0])
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
        results, flags = _vector(o[0]), [int(y) for y in o[4:]]
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
        rows += [self.row(y, 32) for y in _vector(o[1])] if in_registers else [self.row(o[1], 64)]
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


def _vector(operand: str) -> list[str]:
    return [x.strip() for x in operand.strip().strip("{}").split(",")]


def split_place(operand: str) -> tuple[str, list[str]]:
    """Of [map, {coordinates}]."""
    inner = operand.strip()[1:-1]
    place, _, rest = inner.partition(",")
    return place.strip(), _vector(rest)


def _number(text: str, width: int) -> int:
    if text.startswith(("0f", "0F")):
        return int(text[2:], 16)
    if text.startswith(("0d", "0D")):
        return int(text[2:], 16)
    if width == 1:
        return 0 if int(text, 0) == 0 else -1
    return int(text.rstrip("U"), 0)


def assemble(program: Program) -> Assembled:
    return _Assembler(program).run()
