"""Some cases of a GPU on the interpreter of kernels (emulator/), against the reference, where no GPU is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the interpreter is compiled with gcc")


def agree(*command: str) -> int:
    """How many cases agreed, all of them. In a process of its own, as what stands for CuPy takes its place for good."""
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    agreed, count = ran.stdout.splitlines()[-1].split(" agree")[0].split(" of ")
    assert agreed == count
    return int(count)


@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernels_against_the_reference(capability):
    assert agree("-m", "tests.emulator", "--capability", capability, "--most", "1e6", "--every", "16") >= 8


def test_fewer_queries_than_a_q_tile_in_order():
    assert agree("-m", "tests.emulator", "--capability", "90", "-k", "seqlen_k 700, head_dim") >= 8


@pytest.mark.parametrize("capability", ["80", "90"])
def test_random_calls_that_visit_all_keys_are_dense_attention(capability):
    assert agree("-m", "tests.emulator.random_dense", "--capability", capability, "--calls", "60") == 60
