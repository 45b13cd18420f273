"""Some cases of a GPU on the interpreter of kernels (emulator/), against the reference, where no GPU is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the interpreter is compiled with gcc")


@pytest.mark.parametrize(
    ("capability", "cases"),
    [
        (80, ("--every", "12")),
        (90, ("--every", "12")),
        (90, ("-k", "seqlen_k 700, head_dim")),  # fewer queries than a q tile, in order
    ],
)
def test_the_kernels_against_the_reference(capability, cases):
    """In a process of its own, as what stands for CuPy takes its place for good."""
    command = [sys.executable, "-m", "tests.emulator", "--capability", str(capability), "--most", "1e6", *cases]
    ran = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600)
    said = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    agreed, count = said[-1].split(" agree")[0].split(" of ")
    assert agreed == count and int(count) >= 4
