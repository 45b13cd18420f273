"""Which code a result was measured with (benchmarks/_digest.py)."""

from __future__ import annotations

import benchmark_modules  # noqa: F401  (finds _digest)
import pytest

digest = pytest.importorskip("_digest")
PYTHON = ["call.py", "plan/rounds.py", "selection/orders/query.py"]


@pytest.fixture
def checkout(tmp_path):
    """Of five kernels and some modules."""
    files = {
        "raw_kernels/own.cu": "int a;", "raw_kernels/nsa/one.cu": "int b;",
        "raw_kernels/sm90/two.cuh": "int c; // why\n", "raw_kernels/selection/query_weights_int8.cu": "int d;",
        "raw_kernels/selection/query_weights_sm90.cu": "int e;",
        "s2o_cupy/call.py": '"""Calls."""\n\n\ndef call():\n    """Call."""\n    return 1\n',
        "s2o_cupy/plan/rounds.py": "y = 1\n", "s2o_cupy/other.py": "z = 1\n",
        "s2o_cupy/selection/orders/query.py": "STAGES = 8\n",
        "s2o_cupy/spec/constants.py": "A: int = 1  # one\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def nothing_known():
    digest.kernels.cache_clear()
    digest._python.cache_clear()


@pytest.fixture(autouse=True)
def nothing_kept():
    nothing_known()


@pytest.mark.parametrize(
    ("file", "text", "changed"),
    [
        ("raw_kernels/sm90/two.cuh", "\nint c;  /* for\nanother reason */\n", ""),
        ("raw_kernels/sm90/two.cuh", "int d;", "sm90"),
        ("raw_kernels/own.cu", "int c;", "."),
        ("raw_kernels/selection/query_weights_int8.cu", "int e;", "integers"),
        ("raw_kernels/selection/query_weights_sm90.cu", "int f;", "floats"),
        ("raw_kernels/nsa/two.cu", "", "nsa"),
        ("s2o_cupy/call.py", '"""Of\ncalls."""\n# one\n\n\ndef call():\n    """A\n    call."""\n    return 1\n', ""),
        ("s2o_cupy/call.py", '"""Calls."""\n\n\ndef call():\n    """Call."""\n    return 2\n', "python"),
        ("s2o_cupy/call.py", '"""Calls."""\n\n\ndef call():\n    """Call."""\n    return 1\n\n'
         'def __getattr__(name):\n    return name\n', ""),
        ("s2o_cupy/plan/rounds.py", "y = 1  # of all\n# and more\n", ""),
        ("s2o_cupy/plan/rounds.py", "y = '# of all'\n", "python"),
        ("s2o_cupy/plan/rounds.py", "y = '''text'''\n", "python"),
        ("s2o_cupy/plan/rounds.py", None, "python"),
        ("s2o_cupy/other.py", "z = 2\n", ""),
        ("s2o_cupy/spec/constants.py", "A: int = 2\nB = 3\n", "constants"),
    ],
)
def test_what_changes_a_digest(checkout, file, text, changed):
    """Code of a folder of kernels, and of the Python that was loaded; not comments, docstrings, blank lines and
    functions that only say something."""
    before = digest.digests(checkout, PYTHON)
    assert set(before["kernels"]) == {".", "nsa", "sm90", "integers", "floats", "constants"}
    assert list(before["python"]) == PYTHON
    if text is None:
        (checkout / file).unlink()
    else:
        (checkout / file).write_text(text)
    nothing_known()
    after = digest.digests(checkout, PYTHON)
    names = {name for name in before["kernels"] if before["kernels"][name] != after["kernels"][name]}
    assert names | ({"python"} if before["python"] != after["python"] else set()) == {*changed.split()}


@pytest.mark.parametrize(
    ("command", "device", "depends"),
    [
        ("speed.py --orders query", "NVIDIA H200", "floats query"),
        ("speed.py --orders query", "NVIDIA H100 80GB HBM3", "floats query"),
        ("speed.py --orders query", "NVIDIA A100-SXM4-80GB", "integers query"),
        ("speed.py --orders query --path portable", "NVIDIA H200", "integers query"),
        ("speed.py --head-dims 64,256", "NVIDIA H200", "integers floats query"),
        ("speed.py --head-dim 192", "NVIDIA H200", "integers query"),
        ("speed.py --head-dim 192 --orders mean,weight", "NVIDIA H200", ""),
        ("speed.py --path portable --orders mean,query:8", "NVIDIA H200", "integers query"),
        ("speed.py --head-dims 64,128 --lengths 131072", "NVIDIA H200", "floats query"),
        ("nsa.py", "NVIDIA H200", ""), ("lists.py --lengths 131072", "NVIDIA H200", ""),
        ("video.py", "NVIDIA H200", "floats query"), ("speed.py", "NVIDIA H20", "integers floats query"),
        ("speed.py --head-dim=256", "NVIDIA H200", "integers query"),
    ],
)  # fmt: skip
def test_what_only_one_order_launches_counts_for_results_with_it(checkout, command, device, depends):
    """Which products do depends on the GPU, the path and head_dim."""
    result = digest.digests(checkout, PYTHON) | {"command": f"python benchmarks/{command}", "device": device}
    assert digest.since(result, checkout) == ""
    of_query = {"floats": "raw_kernels/selection/query_weights_sm90.cu",
                "integers": "raw_kernels/selection/query_weights_int8.cu",
                "query": "s2o_cupy/selection/orders/query.py"}  # fmt: skip
    for name, file in of_query.items():
        before = (checkout / file).read_text()
        (checkout / file).write_text("int changed = 1;" if file.endswith("cu") else "CHANGED = 1\n")
        nothing_known()
        assert bool(digest.since(result, checkout)) == (name in depends.split()), name
        (checkout / file).write_text(before)
        nothing_known()


@pytest.mark.parametrize(
    ("command", "depends"),
    [("speed.py --orders query", False), ("lists.py", True), ("model.py --tune loss=0.1", False), ("tasks.py", True),
     ("model.py --method meanpooling", True)],
)  # fmt: skip
def test_schedules_count_for_what_attends_by_them(checkout, command, depends):
    file = checkout / "s2o_cupy" / "schedules" / "lists.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    result = digest.digests(checkout, [*PYTHON, "schedules/lists.py"]) | {"command": f"python benchmarks/{command}"}
    file.write_text("a = 2\n")
    nothing_known()
    assert bool(digest.since(result, checkout)) == depends


def test_the_python_that_was_loaded():
    import s2o_cupy.api.attention
    import s2o_cupy.tools.patterns  # noqa: F401

    found = [*digest.digests()["python"]]
    assert {"__init__.py", "api/attention.py", "spec/constants.py"} <= {*found}
    assert not [name for name in found if name.startswith("tools/")]
    assert found == sorted(found) and all((digest.ROOT / "s2o_cupy" / name).exists() for name in found)


def test_other_processes_of_a_run_add_what_they_loaded(monkeypatch):
    monkeypatch.setattr(digest, "_loaded_elsewhere", set())
    digest.add_loaded(["integrations/jax.py"])
    assert "integrations/jax.py" in digest.digests()["python"]


def test_what_has_become_of_a_result_s_kernels(monkeypatch):
    """NSA has a folder of its own, on which nothing else depends, and does not depend on all others."""
    now = {"nsa": "1", "sm90": "2", "tail": "3"}
    monkeypatch.setattr(digest, "kernels", lambda root: now)
    of_s2o, of_nsa = {"command": "python benchmarks/speed.py"}, {"command": "python benchmarks/nsa.py --json a.json"}
    known = digest.python(["problem.py"])

    def since(result, python=known, **changed):
        return digest.since(result | {"kernels": now | changed, "python": python})

    assert since(of_s2o) == since(of_nsa) == since(of_s2o, nsa="0") == since(of_nsa, tail="0") == ""
    for changed in (since(of_s2o, sm90="0"), since(of_nsa, sm90="0"), since(of_nsa, nsa="0"), since(of_s2o, new="4")):
        assert changed == "kernels have changed since"
    assert digest.since(of_s2o) == "its kernels were not recorded"
    assert since(of_s2o, python=None) == "its Python was not recorded"
    assert since(of_s2o, python={"problem.py": "0"}) == "the Python around its kernels has changed since"
    in_one = {"digest": "0", "files": ["problem.py"]}
    assert since(of_s2o, python=in_one) == "the Python around its kernels has changed since"
