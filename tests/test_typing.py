"""What type checkers know: whether a call returns o, (o, lse) or (o, stats), and which words it takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import s2o_cupy
import s2o_cupy.raw_kernels
import s2o_cupy.reference

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[1]
SNIPPET = """
import numpy as np
import numpy.typing as npt

from s2o_cupy import s2o_attention, s2o_attention_paged, s2o_attention_varlen
from s2o_cupy.integrations.torch import attention

x: npt.NDArray[np.float32]
maybe: bool
reveal_type(s2o_attention(x, x, x))
reveal_type(s2o_attention(x, x, x, tau=0, layout="BSHD", return_lse=False))
reveal_type(s2o_attention(x, x, x, return_lse=True))
reveal_type(s2o_attention(x, x, x, return_stats=True, scale=None))
reveal_type(s2o_attention(x, x, x, return_lse=True, return_stats=True))
reveal_type(s2o_attention(x, x, x, return_lse=maybe))
reveal_type(s2o_attention_varlen(x, x, x, [0, 1]))
reveal_type(s2o_attention_varlen(x, x, x, [0, 1], [0, 1], return_lse=True, return_stats=True))
reveal_type(s2o_attention_paged(x, x, x, x, seqlen_k=1, return_lse=True, layout="HND"))
reveal_type(attention(x, x, x, return_lse=True, layout="BSHD"))
s2o_attention(x, x, x, layout="BSDH")
s2o_attention(x, x, x, causal=True)
s2o_attention(x, x, x, backend="torch")
s2o_attention(x, x, x).density
s2o_attention(x, x, x, return_lse=True)[1].density
s2o_attention(x, x, x, return_stats=True)[1].density
"""
ARRAY = "ndarray[tuple[Any, ...], dtype[floating[_32Bit]]]"
STATS = "s2o_cupy.stats.S2OStats"
REVEALED = [
    ARRAY, ARRAY, f"tuple[{ARRAY}, {ARRAY}]", f"tuple[{ARRAY}, {STATS}]", f"tuple[{ARRAY}, {ARRAY}, {STATS}]", "Any",
    ARRAY, f"tuple[{ARRAY}, {ARRAY}, list[{STATS}]]", f"tuple[{ARRAY}, {ARRAY}]", f"tuple[{ARRAY}, {ARRAY}]",
]  # fmt: skip


def test_results_and_words(tmp_path):
    package = tmp_path / "installed" / "s2o_cupy"  # laid out as `make mypy` does
    shutil.copytree(Path(s2o_cupy.__file__).parent, package)
    for part in (s2o_cupy.raw_kernels, s2o_cupy.reference):
        folder = Path(part.__file__).parent
        shutil.copytree(folder, package / folder.name, dirs_exist_ok=True)
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml"]
    result = subprocess.run(
        [*command, "--cache-dir", ROOT / ".mypy_cache", "snippet.py"], cwd=tmp_path, capture_output=True, text=True,
        env={"MYPYPATH": str(package.parent)}, check=False,
    )  # fmt: skip
    assert not result.stderr
    lines = result.stdout.splitlines()
    revealed = [x[1].replace("numpy.", "").replace("_typing._nbit_base.", "") for x in map(
        re.compile(r'.*note: Revealed type is "(.*)"').match, lines) if x]  # fmt: skip
    assert revealed == REVEALED
    first = SNIPPET.splitlines().index('s2o_attention(x, x, x, layout="BSDH")') + 1
    wrong = {int(line.split(":")[1]) - first for line in lines if ": error: " in line}
    assert wrong == {0, 1, 2, 3, 4}, result.stdout  # not the last, which is right
