"""The interpreter, compiled when its text has changed."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

__all__ = ["folder", "library"]

HERE = Path(__file__).parent
SOURCES = ("arithmetic.c", "memory.c", "tensor.c", "machine.c")
OPTIONS = ("-O2", "-ftree-vectorize", "-march=native", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno",
           "-fPIC", "-shared")  # fmt: skip


def folder() -> Path:
    """Of this user, for what takes time to make."""
    found = Path(tempfile.gettempdir()) / f"s2o-emulator-{os.getuid()}"
    found.mkdir(mode=0o700, exist_ok=True)
    return found


@functools.cache
def library() -> ctypes.CDLL:
    text = b"".join((HERE / name).read_bytes() for name in ("machine.h", *SOURCES)) + repr(OPTIONS).encode()
    built = folder() / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not built.exists():
        part = built.with_suffix(f".{os.getpid()}")
        command = ["gcc", *OPTIONS, "-o", str(part), *(str(HERE / name) for name in SOURCES), "-lm"]
        subprocess.run(command, check=True)
        part.replace(built)
    loaded = ctypes.CDLL(str(built))
    loaded.machine_message.restype = ctypes.c_char_p
    loaded.machine_executed.restype = ctypes.c_uint64
    return loaded
