"""Machine code on disk, so that a kernel is compiled once for all processes.

A file holds what NVRTC made of one text with one set of options. Its name is the digest of those and of NVRTC's own
version, so that nothing is ever out of date; it starts with the digest of the rest, so that what was cut short or
changed counts as not there. Nothing here needs CuPy or a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Entry", "folder", "key", "read", "unwritable", "write"]

_FORMAT = "1"  # of a file; another number leaves older files alone
_DIGEST_BYTES = 32  # of SHA-256


class Entry(NamedTuple):
    """Machine code (or PTX) and what is known of it, as plain values that JSON can hold."""

    code: bytes
    facts: Mapping[str, Any]


def folder() -> Path | None:
    """Where files are: ``S2O_CACHE_DIR``, or a folder of CuPy's cache. None: CuPy is told to keep kernels in memory."""
    if own := os.environ.get("S2O_CACHE_DIR"):
        return Path(own)
    if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1":
        return None
    cupys = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    return Path(cupys) / "s2o_cupy"


def key(text: str, options: Sequence[str], compiler: str) -> str:
    """The name of a file: of a kernel's complete text, options with the architecture, and the compiler's version."""
    parts = [part.encode() for part in (_FORMAT, compiler, *options, text)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest() + ".s2o"


def read(name: str) -> Entry | None:
    """None: there is no such file, or not all of it is as it was written."""
    where = folder()
    try:
        data = (where / name).read_bytes() if where else b""
    except OSError:
        return None
    digest, rest = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if not rest or hashlib.sha256(rest).digest() != digest:
        return None
    facts, code = rest.split(b"\n", 1)
    return Entry(code, json.loads(facts))


def write(name: str, entry: Entry) -> None:
    """Keep an entry, if the folder takes it. Other processes see all of it or nothing."""
    rest = json.dumps(entry.facts).encode() + b"\n" + entry.code
    where = folder()
    if where is None:
        return
    temporary = None
    try:
        where.mkdir(parents=True, exist_ok=True)
        temporary = where / f"{name}.{uuid.uuid4().hex}"
        with temporary.open("xb") as file:  # not of tempfile, which lets nobody else read
            file.write(hashlib.sha256(rest).digest() + rest)
        temporary.replace(where / name)
    except OSError:  # read-only, full, or not to be made: then for this process only
        if temporary is not None:
            with contextlib.suppress(OSError):  # a read-only folder says so even where there is nothing to remove
                temporary.unlink(missing_ok=True)


def unwritable() -> str | None:
    """Why nothing can be kept; None if it can. Makes the folder."""
    where = folder()
    if where is None:
        return "CUPY_CACHE_IN_MEMORY is 1"
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=where):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__
