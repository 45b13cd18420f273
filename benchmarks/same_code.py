"""Keep figures of kernels that were changed in words alone: whose machine code is that of a commit before.

    python benchmarks/same_code.py COMMIT

compiles in both, for one architecture and dtype, each kernel whose text differs between COMMIT and this checkout. If
all machine code is the same, which is all of a cubin but names of functions and constants, results that were measured
with the kernels of COMMIT get the digests of the present ones and say so under "same_code". If any differs it is named,
and nothing is written. This needs NVRTC, which CuPy brings, and no GPU. Results whose Python has changed are older all
the same.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _digest
from _published import RESULTS, ROOT

# In a checkout: the digest of each kernel's text, or of the machine code of those that are named.
LIST = """
import hashlib, json, sys
from s2o_cupy.cuda import compiler
from s2o_cupy.tools.compile_ahead import all_kernels
architecture, dtype, names, here = json.load(sys.stdin)
sys.path.insert(0, here)
from _cubin import without_symbols
found = {}
for kernel in all_kernels(architecture):
    if kernel.dtype != dtype or (names is not None and kernel.name not in names):
        continue
    if names is not None:
        print(kernel.name, file=sys.stderr, flush=True)
    if names is None:
        code = compiler.render(kernel)
    else:
        code = repr(without_symbols(compiler.machine_code(kernel, architecture).code))
    found[kernel.name] = hashlib.sha256(code.encode()).hexdigest()
json.dump(found, sys.stdout)
"""


def digests(tree: Path, architecture: str, dtype: str, names: Sequence[str] | None = None) -> dict[str, str]:
    """By kernel of a checkout: of its text, or of the machine code of those with these names."""
    asked = json.dumps([architecture, dtype, names, str(Path(__file__).parent)])
    environment = os.environ | {"PYTHONPATH": str(tree)}
    told = subprocess.run(
        [sys.executable, "-c", LIST], input=asked, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment,
        check=True,
    ).stdout  # fmt: skip
    found: dict[str, str] = json.loads(told)
    return found


def changed(before: Path, architecture: str, dtype: str) -> tuple[list[str], int]:
    """Kernels whose machine code differs between the checkouts ``before`` and this one, or that one alone has, and how
    many were compiled."""
    texts = [digests(tree, architecture, dtype) for tree in (before, ROOT)]
    others = sorted(name for name in {*texts[0], *texts[1]} if texts[0].get(name) != texts[1].get(name))
    codes = [digests(tree, architecture, dtype, others) for tree in (before, ROOT)] if others else [{}, {}]
    return [name for name in others if codes[0].get(name) != codes[1].get(name)], len(others)


def stamped(result: Mapping[str, Any], before: Mapping[str, str], now: Mapping[str, str], what: Any) -> dict[str, Any]:
    """The result with the digests ``now`` where it has those of ``before``, and ``what`` says why."""
    own = result.get("kernels") or {}
    kernels = {name: now.get(name, digest) if digest == before.get(name) else digest for name, digest in own.items()}
    return {**result, "kernels": kernels, "same_code": what} if kernels != own else dict(result)


def exported(commit: str, to: Path) -> str:
    """Files of ``commit`` in the folder ``to``. Returns its short name."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout

    short = git("rev-parse", "--short=12", f"{commit}^{{commit}}").decode().strip()
    with tarfile.open(fileobj=io.BytesIO(git("archive", short))) as tar:
        tar.extractall(to, filter="data")
    return short


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="whose kernels the results were measured with")
    parser.add_argument("--architecture", default="sm_90a", help="of the GPUs that measured (sm_90a)")
    parser.add_argument("--dtype", default="bfloat16", help="that was measured; results of another stay (bfloat16)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder)
        commit = exported(args.commit, before)
        differ, compiled = changed(before, args.architecture, args.dtype)
        of_before = _digest.kernels(before)
    if differ:
        print(f"same_code: other machine code than at {commit}: {', '.join(differ)}", file=sys.stderr)
        return 1
    what = {"as": commit, "architecture": args.architecture, "dtype": args.dtype, "compiled": compiled}
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("settings", {}).get("dtype", args.dtype) != args.dtype:
            continue
        found = stamped(result, of_before, _digest.kernels(), what)
        if found != result:
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(path.name)
    print(f"{compiled} kernels' texts differ, and no machine code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
