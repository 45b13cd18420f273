"""Instructions that each lane does by itself, branches and barriers of a block."""

from __future__ import annotations

from collections.abc import Callable

from .code import BARRIER, BRANCH, EXIT, SYNC_ALL, SYNC_MASK, Code
from .ptx import Instruction
from .rows import FLOATS, bits_of, unsigned, vector

__all__ = ["LaneInstructions"]

_DROPPED = {"ftz", "volatile", "weak", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys", "cs", "nc",
            "lu", "L2::128B", "L2::256B", "sync", "aligned"}  # fmt: skip
_PLAIN_INTEGER = {"add", "sub", "and", "or", "xor", "not", "shl", "selp", "mov", "popc", "clz", "brev"}


class LaneInstructions(Code):
    def instruction(self, x: Instruction) -> None:
        head, *rest = x.opcode.split(".")
        o = x.operands
        special: Callable[..., None] | None = getattr(self, f"do_{head}", None)
        if special is not None:
            special(x, rest, o)
            return
        parts = [p for p in rest if p not in _DROPPED]
        t = parts[-1] if parts else ""
        if t in FLOATS and head not in ("cvt",):
            parts = [p for p in parts if p not in ("rn", "approx", "full")]
        if head in _PLAIN_INTEGER or (head == "mul" and "lo" in parts) or (head == "mad" and "lo" in parts):
            if t == "pred" or head in ("popc", "clz", "brev"):
                pass
            elif t not in FLOATS or head in ("selp", "mov"):
                parts[-1] = unsigned(t)
        if head == "shr" or head in ("bfe", "bfind", "min", "max", "redux") or "hi" in parts:
            parts[-1] = f"u{t[1:]}" if t[0] == "b" else t
        if head == "neg" and t[0] in "bu":
            parts[-1] = f"s{t[1:]}"
        bits = bits_of(t)
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
            inner = vector(o[1])
            width = bits_of(t) // len(inner)
            name = {(32, 2): "pack_b32", (64, 2): "pack_b64", (64, 4): "pack4_b64"}[bits_of(t), len(inner)]
            self.emit(x, name, [self.row(o[0], bits_of(t)), *(self.row(y, width) for y in inner)])
        elif o[0].startswith("{"):
            inner = vector(o[0])
            width = bits_of(t) // 2
            rows = [self.rows[y] if y in self.rows else self.sink(width) for y in inner]
            self.emit(x, f"unpack_b{bits_of(t)}", [*rows, self.row(o[1], bits_of(t))])
        elif t == "pred":
            self.emit(x, "mov_pred", [self.row(o[0], 1), self.row(o[1], 1)])
        else:
            width = bits_of(t)
            self.emit(x, f"mov_u{width}", [self.row(o[0], width), self.row(o[1], width)])

    def do_setp(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        compare, t = parts[0], parts[-1]
        if len(o) != 3 or "|" in o[0]:
            raise ValueError("a setp with more than a predicate and two operands")
        compare = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)
        kind = t if t in FLOATS or (compare not in ("eq", "ne") and t[0] == "s") else unsigned(t)
        self.emit(x, f"setp_{compare}_{kind}", [self.row(o[0], 1), *(self.row(y, bits_of(t)) for y in o[1:])])

    def do_cvt(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        parts = [p for p in parts if p not in ("ftz", "sat")]
        to, source = parts[-2:]
        integer = lambda t: t[0] in "us" and t[1:].isdigit()  # noqa: E731
        widths = self.program.widths
        if integer(to) and integer(source):
            w_to, w_from = widths[o[0]], widths.get(o[1], bits_of(source))
            fast = f"cvt_{to}_{source}"
            same = (w_to, w_from) == (bits_of(to), bits_of(source))
            if same and fast in ("cvt_s64_s32", "cvt_u64_u32", "cvt_u32_u64"):
                self.emit(x, fast, [self.rows[o[0]], self.row(o[1], w_from)])
                return
            types = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]
            aux = types.index(source) | types.index(to) << 4
            self.emit(x, "cvt_integer", [self.rows[o[0]], self.row(o[1], w_from)], w_to | w_from << 8, aux=aux)
            return
        name = "cvt_" + "_".join(parts)
        size = {"f16x2": 32, "bf16x2": 32, "e4m3x2": 16}
        w_to, w_from = size.get(to, bits_of(to) if to != "bf16" else 16), 16 if source == "bf16" else bits_of(source)
        self.emit(x, name, [self.row(o[0], w_to), *(self.row(y, w_from) for y in o[1:])])

    def memory(self, parts: list[str]) -> tuple[str, str, int]:
        """Space, type and count of elements."""
        names = {"global": "global", "shared": "shared", "param": "host", "local": "host"}
        space = next((names[p.split("::")[0]] for p in parts if p.split("::")[0] in names), "global")
        return space, parts[-1], 4 if "v4" in parts else 2 if "v2" in parts else 1

    def do_ld(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        space, t, n = self.memory(parts)
        results = vector(o[0]) if n > 1 else [o[0]]
        width = next(self.program.widths[y] for y in results if y in self.program.widths)
        bits = bits_of(t)
        sign = t[0] if t[0] == "s" and bits < width else "u"
        base, base_bits, offset = self.address(o[1])
        rows = [self.rows[y] if y in self.rows else self.sink(width) for y in results]
        self.emit(x, f"ld_{space}_{sign}{bits}_{width}", [*rows, base], offset, aux=base_bits == 32, n=n)

    def do_st(self, x: Instruction, parts: list[str], o: list[str]) -> None:
        space, t, n = self.memory(parts)
        values = vector(o[1]) if n > 1 else [o[1]]
        bits = bits_of(t)
        width = next((self.program.widths[y] for y in values if y in self.program.widths), max(bits, 16))
        base, base_bits, offset = self.address(o[0])
        rows = [base, *(self.row(y, width) for y in values)]
        self.emit(x, f"st_{space}_u{bits}_{width}", rows, offset, aux=base_bits == 32, n=n)

    def do_atom(self, x: Instruction, parts: list[str], o: list[str], returns: bool = True) -> None:
        parts = [p for p in parts if p not in _DROPPED]
        space, t, _ = self.memory(parts)
        op = next(p for p in parts if p in ("add", "or", "and", "xor", "exch", "max", "min"))
        kind = t if op in ("max", "min") or t in FLOATS else unsigned(t)
        place, value = (o[1], o[2]) if returns else (o[0], o[1])
        base, base_bits, offset = self.address(place)
        result = self.row(o[0], bits_of(t)) if returns and o[0] != "_" else base
        aux = (base_bits == 32) | (2 if returns and o[0] != "_" else 0)
        self.emit(x, f"atom_{space}_{op}_{kind}", [result, base, self.row(value, bits_of(t))], offset, aux=aux)

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
