"""PTX text to statements."""

from __future__ import annotations

import bisect
import functools
import re
from dataclasses import dataclass, field

__all__ = ["Instruction", "Label", "Program", "parse"]

WIDTHS = {"pred": 1, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "b32": 32, "u32": 32, "s32": 32, "f32": 32,
          "b64": 64, "u64": 64, "s64": 64, "f64": 64}  # fmt: skip

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STATEMENT = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+)\s*:(?!:)|(?P<text>[^;{}]+(?:\{[^{}]*\}[^;{}]*)*);)"
)
_ARRAY = re.compile(r"\.(shared|local)\s+\.align\s+(\d+)\s+\.\w+\s+([\w$]+)\[(\d*)\]")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")
_NAME = re.compile(r"[%a-zA-Z_$][\w$]*")
_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)[^\n]*", re.MULTILINE)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)


@dataclass
class Label:
    name: str


@dataclass
class Instruction:
    opcode: str
    operands: list[str]
    guard: str | None
    negated: bool
    line: int  # of the text, from 0


@dataclass
class Program:
    """A kernel: what it declares and what it does. Names that a scope declares are made unique."""

    name: str
    lines: list[str]
    widths: dict[str, int] = field(default_factory=dict)  # of registers, in bits
    shared: dict[str, int] = field(default_factory=dict)  # offsets of arrays in shared memory
    shared_bytes: int = 0  # of those with a size; the one without starts there
    local: dict[str, int] = field(default_factory=dict)  # offsets
    local_bytes: int = 0
    params: list[str] = field(default_factory=list)
    param_bytes: int = 0
    cluster: int = 1  # blocks of one
    body: list[Label | Instruction] = field(default_factory=list)
    places: dict[int, str] = field(default_factory=dict)  # line of the text: place in the source


def split(text: str) -> list[str]:
    """Operands, at the commas outside of brackets and braces."""
    if "{" not in text and "[" not in text:
        return [x.strip() for x in text.split(",")] if text else []
    found, depth, start = [], 0, 0
    for at, c in enumerate(text):
        if c in "{[":
            depth += 1
        elif c in "}]":
            depth -= 1
        elif c == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    return [*found, text[start:].strip()]


def parse(text: str) -> Program:
    files = dict(_FILE.findall(text))
    text = _COMMENT.sub(lambda x: "\n" * x.group().count("\n"), text)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)", text)
    if entry is None:
        raise ValueError("the text has no .entry")
    program = Program(entry.group(1), text.split("\n"))
    program.params = re.findall(r"\.param\s[^,]*?([\w$]+)\s*(?:\[\d+\])?\s*(?:,|$)", entry.group(2).strip())
    program.param_bytes = sum(map(int, re.findall(r"\[(\d+)\]", entry.group(2))))
    if found := re.search(r"\.reqnctapercluster\s+(\d+)", text):
        program.cluster = int(found.group(1))
    dynamic = None
    for space, align, name, size in _ARRAY.findall(text):
        step = int(align)
        if space == "local":
            program.local[name] = program.local_bytes = -(-program.local_bytes // step) * step
            program.local_bytes += int(size)
        elif size:
            program.shared[name] = program.shared_bytes = -(-program.shared_bytes // step) * step
            program.shared_bytes += int(size)
        else:
            dynamic = name
    if dynamic is not None:
        program.shared_bytes = -(-program.shared_bytes // 1024) * 1024
        program.shared[dynamic] = program.shared_bytes

    newlines = [x.start() for x in re.finditer("\n", text)]
    for found in _LOCATION.finditer(text):
        place = f"{files.get(found.group(1), found.group(1))}:{found.group(2)}"
        program.places[bisect.bisect(newlines, found.start(1))] = place
    text = _LOCATION.sub(lambda x: " " * len(x.group()), text)
    start = text.index("{", entry.end())
    scopes: list[dict[str, str]] = []  # names as written: unique ones
    waiting: list[list[Instruction]] = []  # branches of open scopes
    counter = 0
    at = start
    while True:
        match = _STATEMENT.match(text, at)
        if match is None:
            raise ValueError(f"{program.name}: no statement at {text[at : at + 80]!r}")
        at = match.end()
        if match["open"]:
            scopes.append({})
            waiting.append([])
            counter += 1
        elif match["close"]:
            names = scopes.pop()
            for branch in waiting.pop():
                target = branch.operands[0]
                if target in names:
                    branch.operands[0] = names[target]
                elif waiting:
                    waiting[-1].append(branch)
            if not scopes:
                return program
        elif match["label"]:
            unique = match["label"] if len(scopes) == 1 else f"{match['label']}@{counter}"
            scopes[-1][match["label"]] = unique
            program.body.append(Label(unique))
        else:
            line = bisect.bisect(newlines, match.start("text"))
            statement = match["text"].strip()
            if statement.startswith("."):
                _declare(statement, program, scopes, counter)
                continue
            guard, negated = None, False
            if found := _GUARD.match(statement):
                negated, guard = bool(found.group(1)), found.group(2)
                statement = statement[found.end() :]
            opcode, *more = statement.split(None, 1)
            rest = more[0] if more else ""
            if len(scopes) > 1:
                own = {k: v for scope in scopes[1:] for k, v in scope.items()}
                if not opcode.startswith("bra"):
                    rest = _NAME.sub(functools.partial(_renamed, own), rest)
                guard = None if guard is None else own.get(guard, guard)
            instruction = Instruction(opcode, split(rest), guard, negated, line)
            program.body.append(instruction)
            if opcode.startswith("bra"):
                waiting[-1].append(instruction)


def _renamed(names: dict[str, str], found: re.Match[str]) -> str:
    return names.get(found.group(), found.group())


def _declare(statement: str, program: Program, scopes: list[dict[str, str]], counter: int) -> None:
    words = statement.split(None, 2)
    if words[0] == ".reg":
        width = WIDTHS[words[1].lstrip(".")]
        for name in words[2].split(","):
            name = name.strip()
            if many := re.match(r"([%\w$]+)<(\d+)>", name):
                for k in range(int(many.group(2))):
                    program.widths[f"{many.group(1)}{k}"] = width
            else:
                unique = name if len(scopes) == 1 else f"{name}@{counter}"
                scopes[-1][name] = unique
                program.widths[unique] = width
    elif words[0] in (".shared", ".local", ".pragma"):
        return
    else:
        raise ValueError(f"{program.name}: {statement!r} is not known")
