"""The device: its memory, which is the host's with a guard around each array, and launches."""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import os
import pickle
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .assembler import Assembled, assemble
from .library import folder, library
from .ptx import parse

__all__ = ["EmulatorError", "Settings", "allocate", "known", "launch", "load", "settings"]

# Files that make of PTX what is kept.
ASSEMBLES = ("ptx", "rows", "code", "lanes", "copies", "warps", "assembled", "assembler")
GUARD = 4096  # bytes that belong to nobody, before and behind an allocation


class EmulatorError(RuntimeError):
    """A kernel did what it may not: memory out of bounds, a barrier too many, a wait that never ends."""


@dataclass
class Settings:
    """How kernels are run."""

    capability: int = int(os.environ.get("S2O_EMULATED_CAPABILITY", "80"))
    multiprocessors: int = 4
    seed: int = 0  # of the order in which warps run
    late: bool = True  # asynchronous copies land as late as they may; else at once
    apart: bool = True  # arrays of a workspace are apart by a gap, those that have memory in turns too
    at_once: int = 4  # clusters that run side by side
    limit: int = 20_000_000_000  # warp instructions of a launch
    launches: list[tuple[str, int]] = field(default_factory=list)  # kernel, warp instructions
    trace: bool = bool(os.environ.get("S2O_EMULATOR_TRACE"))


settings = Settings()
_lock = threading.RLock()
_starts: list[int] = []
_ends: dict[int, int] = {}
_stale = True


def add_range(start: int, nbytes: int) -> None:
    global _stale
    with _lock:
        if start not in _ends:
            bisect.insort(_starts, start)
        _ends[start] = start + nbytes
        _stale = True


def drop_range(start: int) -> None:
    global _stale
    with _lock:
        if _ends.pop(start, None) is not None:
            _starts.remove(start)
            _stale = True


def known(pointer: int) -> bool:
    """Whether an address is in some array of the device."""
    with _lock:
        at = bisect.bisect(_starts, pointer) - 1
        return at >= 0 and pointer < max(_ends[_starts[at]], _starts[at] + 1)


def allocate(nbytes: int, pieces: Sequence[tuple[int, int]] | None = None) -> np.ndarray:
    """So many bytes, uint8, from a multiple of 512; all bits are set: NaN in every type of float.

    ``pieces``: offsets and sizes of what may be touched; all unless said.
    """
    whole = np.full(nbytes + 2 * GUARD + 512, 0xFF, np.uint8)
    start = -(-(whole.ctypes.data + GUARD) // 512) * 512
    offset = start - whole.ctypes.data
    for at, size in [(0, nbytes)] if pieces is None else pieces:
        add_range(start + at, size)
        weakref.finalize(whole, drop_range, start + at)
    return whole[offset : offset + nbytes]


@dataclass
class Loaded:
    text: str
    assembled: Assembled
    kernel: Any  # for machine_launch
    keeps: Any  # what that points to

    def place(self, line: int) -> str:
        """Of the source, for a line of the PTX."""
        known = [x for x in self.assembled.places if x <= line + 1]
        return self.assembled.places[max(known)] if known else "?"


_kernels: dict[int, Loaded] = {}


def _assembled(text: str) -> Assembled:
    sources = b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in ASSEMBLES)
    file = folder() / f"{hashlib.sha256(sources + text.encode()).hexdigest()[:32]}.pickle"
    if file.exists():
        found: Assembled = pickle.loads(file.read_bytes())
        return found
    found = assemble(parse(text))
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(found))
    part.replace(file)
    return found


def load(text: str) -> int:
    """A handle of a kernel, of its PTX."""
    assembled = _assembled(text)
    handle = 0x1000 + len(_kernels)
    _kernels[handle] = Loaded(text, assembled, *assembled.bind())
    return handle


def launch(handle: int, blocks: int, threads: int, shared_bytes: int, arguments: int) -> None:
    """``arguments``: the address of an array of the addresses of the parameters, as of cuLaunchKernel."""
    global _stale
    loaded = _kernels[handle]
    program = loaded.assembled
    machine = library()
    place = ctypes.c_uint64.from_address(arguments).value
    params = np.zeros(program.param_bytes + 64, np.uint8)
    skip = -params.ctypes.data % 64
    ctypes.memmove(params.ctypes.data + skip, place, program.param_bytes)
    with _lock:
        if _stale:
            ranges = np.array([(start, _ends[start]) for start in _starts], np.uint64).reshape(-1, 2)
            machine.machine_ranges(ctypes.c_void_p(ranges.ctypes.data), ctypes.c_int64(len(ranges)))
            _stale = False
        machine.machine_settings(
            ctypes.c_uint64(settings.seed), int(settings.late), ctypes.c_uint64(settings.limit)
        )
        failed = machine.machine_launch(
            ctypes.byref(loaded.kernel), blocks, threads, program.shared_bytes + shared_bytes,
            program.cluster, ctypes.c_void_p(params.ctypes.data + skip), settings.at_once,
        )  # fmt: skip
    settings.launches.append((program.name, machine.machine_executed()))
    if settings.trace:
        executed = machine.machine_executed()
        print(f"  {program.name}: {blocks} blocks of {threads}, {executed} warp instructions", flush=True)
    if failed:
        line, _, what = machine.machine_message().decode().partition("|")
        raise EmulatorError(_explained(loaded, int(line), what))


def _explained(loaded: Loaded, line: int, what: str) -> str:
    if line < 0:
        return what
    return f"{what}\n  at {loaded.place(line)}\n  PTX line {line + 1}: {loaded.text.splitlines()[line].strip()[:200]}"
