"""What a kernel is assembled to: code, operands and constants, which machine.c is given."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .library import library

__all__ = ["INS", "Assembled", "UnknownOpcode", "function_address"]

INS = np.dtype(
    [("run", "u8"), ("o", "u8"), ("imm", "i8"), ("guard", "i4"), ("member", "i4"), ("line", "i4"), ("kind", "u1"),
     ("negated", "u1"), ("aux", "u1"), ("n", "u1")]
)  # fmt: skip


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
        code, addresses = self.code.copy(), np.array([function_address(name) for name in self.functions], np.uint64)
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
def function_address(name: str) -> int:
    try:
        return ctypes.cast(getattr(library(), f"op_{name}"), ctypes.c_void_p).value or 0
    except AttributeError:
        raise UnknownOpcode(name) from None
