"""What of the library a result was measured with: a digest of each folder of kernels, and of the host's Python.

Comments and blank lines are left out, so that words may change. Needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 12  # digits of a digest
NSA = {"nsa"}  # folders of kernels that only NSA's results depend on
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def digests(root: Path = ROOT) -> dict[str, Any]:
    """``kernels``: by folder of raw_kernels; ``host``: of s2o_cupy without its tools and integrations."""
    kernels: dict[str, list[Path]] = {}
    folder = root / "raw_kernels"
    for file in sorted(folder.rglob("*.cu*")):
        kernels.setdefault(file.relative_to(folder).parts[0] if file.parent != folder else ".", []).append(file)
    package = root / "s2o_cupy"
    beside = {package / "tools", package / "integrations"}
    host = [file for file in sorted(package.rglob("*.py")) if not beside & {*file.parents}]
    return {
        "kernels": {name: _digest(files, folder) for name, files in sorted(kernels.items())},
        "host": _digest(host, package),
    }


def are_older(result: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the kernels that a result was measured with have changed, or nobody knows."""
    of_nsa = "benchmarks/nsa.py" in result.get("command", "")
    then = result.get("kernels") or {}
    return any(
        then.get(name) != digest for name, digest in now["kernels"].items() if of_nsa or name not in NSA
    )


def _digest(files: Iterable[Path], folder: Path) -> str:
    found = hashlib.sha256()
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = _COMMENT.sub("", text) if file.suffix != ".py" else re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
        lines = [line for line in (line.strip() for line in text.splitlines()) if line]
        found.update("\n".join([file.relative_to(folder).as_posix(), *lines, ""]).encode())
    return found.hexdigest()[:SHOWN]
