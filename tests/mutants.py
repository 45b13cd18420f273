"""Plants random faults in Python that has changed since a commit, and says which of them no test sees.

Each is a slip of the hand: another comparison or operator, a number off by one, a condition the other way round, two
arguments exchanged, a statement left out. In a copy of the checkout the tests run once with coverage; a fault is then
given to those that run its line, the quickest first. Some that are left change nothing that anyone could see.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from s2o_cupy.tools.progress import progress

ROOT = Path(__file__).resolve().parent.parent
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
EITHER_WAY = ("min", "max", "minimum", "maximum", "dot", "array_equal")  # arguments of which may be exchanged
MESSAGES = (ast.Raise, ast.Assert, ast.JoinedStr)  # in which nothing is planted
LEFT_OUT = (ast.Expr, ast.AugAssign, ast.Break, ast.Continue, ast.Raise)


@dataclass(frozen=True)
class Fault:
    path: str
    line: int
    begin: int  # in the text's UTF-8
    end: int
    new: str
    old: str

    def plant(self, text: bytes) -> bytes:
        return text[: self.begin] + self.new.encode() + text[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: " + "  ->  ".join(" ".join(x.split()) for x in (self.old, self.new))


@dataclass
class Covering:
    """By (path, line) the tests that run it, and the files of tests whose fixtures do, which several may share; and how
    long each test takes."""

    of_line: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    of_fixtures: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def of(self, path: str, line: int, most: float) -> list[str]:
        """Quickest first, up to so many seconds; where it runs when a module is imported, those of all its lines, or of
        a module without others any."""
        found = self.of_line.get((path, line)) or set().union(*(x for at, x in self.of_line.items() if at[0] == path))
        files = self.of_fixtures.get((path, line), ())
        found = found | {x for x in self.seconds if x.partition("::")[0] in files} or set(self.seconds)
        chosen: list[str] = []
        total = 0.0
        for test in sorted(found, key=lambda x: (self.seconds[x], x)):
            total += self.seconds[test]
            if chosen and total > most:
                break
            chosen.append(test)
        return chosen


def faults_of(path: str, text: bytes, lines: set[int]) -> Iterator[Fault]:
    """Every fault that may be planted in these lines."""
    starts = [0, *itertools.accumulate(len(line) + 1 for line in text.split(b"\n"))]

    def fault(node: ast.expr | ast.stmt, new: ast.AST | str) -> Fault:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        is_expression = isinstance(node, ast.expr) and not isinstance(node, (ast.Constant, ast.Call))
        said = new if isinstance(new, str) else f"({ast.unparse(new)})" if is_expression else ast.unparse(new)
        return Fault(path, node.lineno, begin, end, said, text[begin:end].decode())

    def changed(node: ast.AST, **fields: object) -> ast.AST:
        new = copy.copy(node)
        vars(new).update(fields)
        return new

    def visit(node: ast.AST) -> Iterator[Fault]:
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a check alone
            return
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list") and not isinstance(node, MESSAGES):
                for child in value if isinstance(value, list) else [value]:
                    yield from visit(child) if isinstance(child, ast.AST) else ()
        if not isinstance(node, (ast.expr, ast.stmt)) or node.lineno not in lines:
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield fault(node, changed(node, ops=[OTHER[type(node.ops[0])]()]))
        elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OTHER:
            yield fault(node, changed(node, op=OTHER[type(node.op)]()))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield fault(node, node.operand)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield fault(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield fault(node, repr(node.value + 1 if isinstance(node.value, int) else node.value * 1.5 or 1.0))
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield fault(node.test, f"(not ({ast.unparse(node.test)}))")
        elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[0], ast.Starred):
            first, second, *rest = node.args
            same = ast.unparse(first) == ast.unparse(second) or ast.unparse(node.func).rpartition(".")[2] in EITHER_WAY
            if not same and not isinstance(second, ast.Starred):
                yield fault(node, changed(node, args=[second, first, *rest]))
        elif isinstance(node, LEFT_OUT) and not isinstance(getattr(node, "value", None), ast.Constant):
            yield fault(node, "pass")

    yield from visit(ast.parse(text))


def changed_lines(since: str, paths: list[str]) -> dict[str, set[int]]:
    """Of each Python file the lines that are new since a commit."""
    command = ["git", "diff", "-U0", "--no-color", "--no-ext-diff", since, "--", *paths]
    changes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in changes.splitlines():
        if line.startswith("+++ "):
            path = line[6:]
        elif (match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line)) and path.endswith(".py"):
            found[path] |= set(range(int(match[1]), int(match[1]) + int(match[2] or 1)))
    return found


def run(folder: Path, arguments: list[str], limit: float | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit)


def with_coverage(folder: Path, arguments: list[str]) -> Covering:
    from coverage import CoverageData

    sources = ["--cov=s2o_cupy", "--cov=reference", "--cov-context=test", "--cov-report="]
    ran = run(folder, [*sources, "--durations=0", "-vvv", "-m", "not slow", *arguments])
    said = ran.stdout
    tests, failed = Covering(), set(re.findall(r"(?m)^(?:FAILED|ERROR) (\S+::.*?)(?: - |$)", said))
    for seconds, test in re.findall(r"(?m)^([\d.]+)s \w+ +(\S+::.*)$", said):
        if test not in failed:
            tests.seconds[test] += float(seconds)
    if not tests.seconds:
        sys.exit(f"no test ran: {ran.stderr or said}")
    data = CoverageData(str(folder / ".coverage"))
    data.read()
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            at = str(Path(file).relative_to(folder)), line
            tests.of_line[at] |= {x.rsplit("|", 1)[0] for x in contexts if x} - failed
            tests.of_fixtures[at] |= {x.partition("::")[0] for x in contexts if x.endswith("|setup")}
    print(f"{len(tests.seconds):,} tests; {len(failed)} failed before any fault and are left out", flush=True)
    return tests


def is_seen(folder: Path, fault: Fault, number: int, tests: list[str], seconds: float) -> bool:
    path = folder / fault.path
    good = path.read_bytes()
    try:
        path.write_bytes(fault.plant(good))
        compile(path.read_bytes(), fault.path, "exec")
        os.utime(path, (10**9 + number,) * 2)  # or what Python has compiled of the file before may be taken
        return run(folder, ["-x", *tests], 60 + 5 * seconds).returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_bytes(good)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    add = parser.add_argument
    add("--since", default="HEAD~1", help="a commit: faults are in what has changed since (%(default)s)")
    add("--count", type=int, default=200, help="of faults (%(default)s)")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=60.0, help="of tests for a fault (%(default)s)")
    add("--tests", nargs="*", default=[], help="files, or other arguments for pytest; all by default")
    add("paths", nargs="*", default=["s2o_cupy", "reference"], help="where (%(default)s)")
    options = parser.parse_args()
    lines = changed_lines(options.since, options.paths)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copied = f"git ls-files -co --exclude-standard -z | xargs -0 cp --parents -t {folder}"
        subprocess.run(copied, shell=True, cwd=ROOT, check=True)
        possible = [x for path in sorted(lines) for x in faults_of(path, (folder / path).read_bytes(), lines[path])]
        chosen = random.Random(options.seed).sample(possible, min(options.count, len(possible)))
        print(f"{len(chosen)} of {len(possible):,} faults in {len(lines)} files; first all tests run once", flush=True)
        tests = with_coverage(folder, options.tests)
        seen = 0
        with progress("faults") as report:
            for i, fault in enumerate(chosen):
                of_it = tests.of(fault.path, fault.line, options.seconds)
                if of_it and is_seen(folder, fault, i, of_it, sum(tests.seconds[x] for x in of_it)):
                    seen += 1
                else:
                    print(f"unseen by {len(of_it)} tests: {fault}", flush=True)
                report(i + 1, len(chosen))
    print(f"{seen} of {len(chosen)} faults are seen")
    return int(seen < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
