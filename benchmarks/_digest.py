"""What of the library a result was measured with: digests of each folder of kernels, of the constants that kernels and
defaults are made of, and of the host's Python.

Lines of comments and blank ones are left out, so that words may change. Needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 12  # digits of a digest
NSA = {"nsa"}  # folders of kernels that only NSA's results depend on, and those that they do not
NOT_OF_NSA = {"blocks", "last_queries", "selection", "tail"}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def digests(root: Path = ROOT) -> dict[str, Any]:
    """``kernels``: by folder of raw_kernels, and of the constants in spec.py; ``host``: of s2o_cupy but for tools and
    integrations."""
    kernels: dict[str, list[Path]] = {}
    folder = root / "raw_kernels"
    for file in sorted(file for end in ("cu", "cuh") for file in folder.rglob(f"*.{end}")):
        kernels.setdefault(file.relative_to(folder).parts[0] if file.parent != folder else ".", []).append(file)
    package = root / "s2o_cupy"
    beside = {package / "tools", package / "integrations"}
    host = [file for file in sorted(package.rglob("*.py")) if not beside & {*file.parents}]
    constants = re.findall(r"^[A-Z][A-Z0-9_, ]*(?:: [^=]+)?= [^#\n]*", (package / "spec.py").read_text(), re.MULTILINE)
    return {
        "kernels": {name: _digest(files, folder) for name, files in sorted(kernels.items())}
        | {"constants": hashlib.sha256("\n".join(map(str.rstrip, constants)).encode()).hexdigest()[:SHOWN]},
        "host": _digest(host, package),
    }


def since(result: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What has become of the kernels that a result was measured with, in words; nothing if they are those of now."""
    if not result.get("kernels"):
        return "its kernels were not recorded"
    others = NOT_OF_NSA if "benchmarks/nsa.py" in result.get("command", "") else NSA
    names = {*result["kernels"], *now["kernels"]} - others
    same = all(result["kernels"].get(name) == now["kernels"].get(name) for name in names)
    return "" if same else "kernels have changed since"


def _digest(files: Iterable[Path], folder: Path) -> str:
    found = hashlib.sha256()
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = _COMMENT.sub("", text) if file.suffix != ".py" else re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
        lines = [line for line in (line.strip() for line in text.splitlines()) if line]
        found.update("\n".join([file.relative_to(folder).as_posix(), *lines, ""]).encode())
    return found.hexdigest()[:SHOWN]
