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
        "s2o_cupy/call.py": "x = 1\n", "s2o_cupy/tools/tool.py": "y = 1\n", "s2o_cupy/spec.py": "A: int = 1  # one\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "changed"),
    [
        ("raw_kernels/sm90/two.cuh", "\nint c;  /* for\nanother reason */\n", ""),
        ("raw_kernels/sm90/two.cuh", "int d;", "sm90"),
        ("raw_kernels/own.cu", "int c;", "."),
        ("raw_kernels/nsa/two.cu", "", "nsa"),
        ("s2o_cupy/call.py", "# one\n\nx = 1\n", ""),
        ("s2o_cupy/call.py", "x = 2\n", "host"),
        ("s2o_cupy/spec.py", "A: int = 2\nB = 3\n", "constants host"),
        ("s2o_cupy/tools/tool.py", "y = 2\n", ""),
    ],
)
def test_what_changes_a_digest(checkout, file, text, changed):
    """Code of its folder; not comments, blank lines and tools."""
    before = digest.digests(checkout)
    assert set(before["kernels"]) == {".", "nsa", "sm90", "constants"}
    (checkout / file).write_text(text)
    after = digest.digests(checkout)
    names = {name for name in before["kernels"] if before["kernels"][name] != after["kernels"][name]}
    assert names | ({"host"} if before["host"] != after["host"] else set()) == {*changed.split()}


def test_what_has_become_of_a_result_s_kernels():
    """NSA has a folder of its own, on which nothing else depends, and does not depend on all others."""
    now = {"kernels": {"nsa": "1", "sm90": "2", "tail": "3"}}
    of_s2o, of_nsa = {"command": "python benchmarks/speed.py"}, {"command": "python benchmarks/nsa.py --json a.json"}

    def since(result, **changed):
        return digest.since(result | {"kernels": now["kernels"] | changed}, now)

    assert since(of_s2o) == since(of_nsa) == since(of_s2o, nsa="0") == since(of_nsa, tail="0") == ""
    for changed in (since(of_s2o, sm90="0"), since(of_nsa, sm90="0"), since(of_nsa, nsa="0"), since(of_s2o, new="4")):
        assert changed == "kernels have changed since"
    assert digest.since(of_s2o, now) == "its kernels were not recorded"
