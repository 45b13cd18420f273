"""What of the library a result was measured with: digests of each folder of kernels, of some kernels by themselves and
of the constants that kernels and defaults are made of, and of each Python file that the measuring process had loaded.

Comments, docstrings, blank lines and functions that only say something are left out, so that words may change. Needs
nothing but Python.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 12  # digits of a digest
NSA = {"nsa"}  # folders of kernels that only NSA's results depend on, and those that they do not
NOT_OF_NSA = {"methods", "last_queries", "selection", "tail", "integers", "floats"}
# Kernels that count by themselves, as not all orders launch them, nor all GPUs: products of 8-bit integers and floats.
OF_THEIR_OWN = {"selection/query_weights_int8.cu": "integers", "selection/query_weights_sm90.cu": "floats"}
OF_QUERY = {"selection/orders/query.py"}  # Python that decides what rank="query" launches and nothing else
WITHOUT_QUERY = ("benchmarks/nsa.py", "benchmarks/lists.py")  # scripts that never order by it
# Python of schedules and of whatever else than S2O chooses keys, and scripts that call none of it.
OF_SCHEDULES = ("schedules/", "methods/", "nsa/", "api/gather", "arrays/narrowed.py")
WITHOUT_SCHEDULES = tuple(
    f"benchmarks/{name}.py" for name in ("speed", "scaling", "quality", "ragged", "serving", "host", "model")
)  # unless they are given a --method
# Of s2o_cupy: what prints, draws and searches around the calls, and what records their inputs.
NOT_TIMED = ("tools/", "integrations/capture.py")
# Functions anywhere else that print, or answer a name that there is not.
SAYS = {"__repr__", "__getattr__", "_where", "modules_with", "_public_names"}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_loaded_elsewhere: set[str] = set()


def digests(root: Path = ROOT, files: Iterable[str] | None = None) -> dict[str, Any]:
    """``kernels``: by folder of raw_kernels or of their own, and of the constants in spec/; ``python``: by file of
    s2o_cupy, by default of those that are loaded."""
    names = sorted({*loaded(root), *_loaded_elsewhere} if files is None else files)
    return {"kernels": kernels(root), "python": python(names, root)}


@functools.cache
def kernels(root: Path = ROOT) -> dict[str, str]:
    found: dict[str, list[Path]] = {}
    folder = root / "raw_kernels"
    for file in sorted(file for end in ("cu", "cuh") for file in folder.rglob(f"*.{end}")):
        name = file.relative_to(folder).as_posix()
        found.setdefault(OF_THEIR_OWN.get(name, name.split("/")[0] if "/" in name else "."), []).append(file)
    spec = (root / "s2o_cupy" / "spec" / "constants.py").read_text(encoding="utf-8")
    constants = re.findall(r"^[A-Z][A-Z0-9_, ]*(?:: [^=]+)?= [^#\n]*", spec, re.MULTILINE)
    by_folder = {
        name: _digest((x.relative_to(folder).as_posix(), _code(x)) for x in files)
        for name, files in sorted(found.items())
    }
    return by_folder | {"constants": _hex("\n".join(map(str.rstrip, constants)))}


def python(files: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """By file of s2o_cupy; of one that is gone, that of none."""
    package = root / "s2o_cupy"
    return {name: _digest([("", _python(package / name))]) for name in sorted(files)}


def loaded(root: Path = ROOT) -> list[str]:
    """Files of s2o_cupy that this process has imported, but for tools."""
    package = root / "s2o_cupy"
    paths = [Path(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))]
    names = {path.relative_to(package).as_posix() for path in paths if path.is_relative_to(package)}
    return sorted(name for name in names if name.endswith(".py") and not name.startswith(NOT_TIMED))


def add_loaded(files: Iterable[str]) -> None:
    """Files that other processes of this run had loaded."""
    _loaded_elsewhere.update(files)


def since(result: Mapping[str, Any], root: Path = ROOT) -> str:
    """What has become of the code that a result was measured with, in words; nothing if it is that of now."""
    if not result.get("kernels"):
        return "its kernels were not recorded"
    now, others = kernels(root), _others(result)
    names = {*result["kernels"], *now} - others
    if any(result["kernels"].get(name) != now.get(name) for name in names):
        return "kernels have changed since"
    known = result.get("python")
    if not known:
        return "its Python was not recorded"
    # In older results "digest" is one of all "files", which no longer says anything.
    now = python({*known} - others, root)
    same = "digest" not in known and all(known[name] == now[name] for name in now)
    return "" if same else "the Python around its kernels has changed since"


def _others(result: Mapping[str, Any]) -> set[str]:
    """Folders and kernels of `kernels`, and files of `python`, that a result does not depend on."""
    command, device = result.get("command", ""), result.get("device", "")
    unused = {name for name in result.get("python") or () if _is_unused(name, command)}
    of_nsa = "benchmarks/nsa.py" in command
    orders = re.search(r"--orders[ =](\S+)", command)
    if any(script in command for script in WITHOUT_QUERY) or (orders and "query" not in orders[1]):
        return unused | {"integers", "floats"} | OF_QUERY | (NOT_OF_NSA if of_nsa else NSA)
    dims = [int(x) for of in re.findall(r"--head-dims?[ =]([\d,]+)", command) for x in of.split(",")] or [128]
    # Floats are Hopper's, up to a head_dim of 128, integers all others'; of a GPU that is not known both count.
    portable = bool(re.search(r"--path[ =]portable", command))
    others = unused | NSA
    if not portable and re.search(r"\bG?H[12]00\b", device) and max(dims) <= 128:
        others.add("integers")
    if portable or min(dims) > 128 or re.search(r"\b(A\d|L4|RTX|B\d)", device):
        others.add("floats")
    return others


def _is_unused(name: str, command: str) -> bool:
    """Whether a file of s2o_cupy has no part in what a script times, although it has been imported."""
    chosen = "--method" in command or not any(script in command for script in WITHOUT_SCHEDULES)
    return name.startswith(NOT_TIMED) or (not chosen and name.startswith(OF_SCHEDULES))


def _digest(texts: Iterable[tuple[str, str]]) -> str:
    """Of names and the code of each."""
    lines = ([name, *filter(None, map(str.strip, text.splitlines())), ""] for name, text in texts)
    return _hex("".join(map("\n".join, lines)))


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:SHOWN]


def _code(path: Path) -> str:
    return _COMMENT.sub("", path.read_text(encoding="utf-8"))


@functools.cache
def _python(path: Path) -> str:
    """Without docstrings, comments and what SAYS names."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if getattr(node, "name", None) in SAYS and isinstance(node, ast.FunctionDef):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            said = node.body[0]
            last = said.end_lineno or said.lineno
            lines[said.lineno - 1 : last] = [""] * (last - said.lineno + 1)
    return "\n".join(lines)
