"""Which code a result was measured with (benchmarks/_digest.py)."""

from __future__ import annotations

import benchmark_modules  # noqa: F401  (finds _digest)
import pytest

digest = pytest.importorskip("_digest")


@pytest.fixture
def checkout(tmp_path):
    """Of three kernels and a module."""
    files = {
        "raw_kernels/own.cu": "int a;", "raw_kernels/nsa/one.cu": "int b;",
        "raw_kernels/sm90/two.cuh": "int c; // why\n",
        "s2o_cupy/call.py": "x = 1\n", "s2o_cupy/tools/tool.py": "y = 1\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "changed"),
    [
        ("raw_kernels/sm90/two.cuh", "\nint c;  /* for\nanother reason */\n", None),
        ("raw_kernels/sm90/two.cuh", "int d;", "sm90"),
        ("raw_kernels/own.cu", "int c;", "."),
        ("raw_kernels/nsa/two.cu", "", "nsa"),
        ("s2o_cupy/call.py", "# one\n\nx = 1\n", None),
        ("s2o_cupy/call.py", "x = 2\n", "host"),
        ("s2o_cupy/tools/tool.py", "y = 2\n", None),
    ],
)
def test_what_changes_a_digest(checkout, file, text, changed):
    """Code of its folder; not comments, blank lines and tools."""
    before = digest.digests(checkout)
    assert set(before["kernels"]) == {".", "nsa", "sm90"}
    (checkout / file).write_text(text)
    after = digest.digests(checkout)
    names = {name for name in before["kernels"] if before["kernels"][name] != after["kernels"][name]}
    assert names | ({"host"} if before["host"] != after["host"] else set()) == ({changed} if changed else set())


def test_a_result_is_older_once_its_kernels_have_changed():
    """NSA has a folder of its own, on which nothing else depends. Of a file without digests nobody knows."""
    now = {"kernels": {"nsa": "1", "sm90": "2"}}
    of_s2o, of_nsa = {"command": "python benchmarks/speed.py"}, {"command": "python benchmarks/nsa.py --json a.json"}
    assert not digest.are_older(of_s2o | now, now)
    assert not digest.are_older(of_s2o | {"kernels": {"nsa": "0", "sm90": "2"}}, now)
    assert digest.are_older(of_nsa | {"kernels": {"nsa": "0", "sm90": "2"}}, now)
    assert digest.are_older(of_s2o | {"kernels": {"nsa": "1", "sm90": "0"}}, now)
    assert digest.are_older(of_s2o, now)
