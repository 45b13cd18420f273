"""benchmarks/host.py: when calls are warm, and what becomes of the rows of several processes."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest
from benchmark_modules import BENCHMARKS as BENCHMARKS

pytest.importorskip("cupy")
pytest.importorskip("torch")

import host


def turns(first, last, count):
    """``count`` turns of ``first`` microseconds, then all of ``last``, each a little off."""
    noise = itertools.cycle([0.0, 0.4, -0.3, 3.0, 0.1])
    return (us + next(noise) for us in itertools.chain([first] * count, itertools.repeat(last)))


def test_slow_turns_at_the_beginning_do_not_count():
    takes = {"CuPy": turns(65, 38, 17), "PyTorch": turns(80, 50, 3)}
    calls = {name: lambda name=name: next(takes[name]) for name in takes}
    found = {row["call"]: row for row in host.measure(calls, 20, lambda call: call())}
    assert found["CuPy"]["settled"] and found["CuPy"]["warmup_turns"] >= 30
    assert found["CuPy"]["host_us"] == pytest.approx(38.1) and found["CuPy"]["to_us"] == 41
    assert found["PyTorch"]["from_us"] == pytest.approx(49.7)


def test_a_change_late_in_the_warm_up_is_waited_for():
    slow = turns(65, 38, 27)
    (row,) = host.measure({"CuPy": lambda: next(slow)}, 20, lambda call: call())
    assert row["settled"] and row["warmup_turns"] > 30 and row["to_us"] == 41


def test_what_never_settles_is_said():
    slower = itertools.count(10)
    (row,) = host.measure({"CuPy": lambda: 1.1 ** next(slower)}, 5, lambda call: call())
    assert (row["settled"], row["warmup_turns"]) == (False, host.WARMUP_TURNS[1])


def rows_of_a_process(us, settled=True):
    return [
        {"call": name, "host_us": us + more, "from_us": us + more - 1, "to_us": us + more + 2, "settled": settled,
         "warmup_turns": 10, "gpu_us": 300.0, "length": 4096}
        for name, more in (("CuPy", 0), ("PyTorch", 10), ("JAX", 350))
    ]  # fmt: skip


def test_rows_of_several_processes():
    rows = host.of_all([rows_of_a_process(65, settled=False), rows_of_a_process(38), rows_of_a_process(39)])
    cupy, torch, jax = rows
    assert (cupy["host_us"], cupy["from_us"], cupy["to_us"], cupy["more_us"]) == (39, 37, 67, 0)
    assert cupy["process_us"] == [65, 38, 39] and not cupy["settled"] and cupy["length"] == 4096
    assert (torch["more_us"], jax["more_us"]) == (10, 50)


def test_the_first_process_counts_for_nothing(monkeypatch, tmp_path):
    started = []

    def run(command, check, stdout):
        script, *options = command[1:]
        (path,) = (x.removeprefix("--json=") for x in options if x.startswith("--json="))
        result = {"rows": rows_of_a_process(60 - len(started)), "python": {"integrations/jax.py": "0"}}
        Path(path).write_text(json.dumps(result))
        started.append((Path(script).name, options))

    loaded: set[str] = set()
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(host._digest, "add_loaded", loaded.update)
    monkeypatch.setattr(host._common, "check_device", lambda parser, args: setattr(args, "device", "cuda"))
    monkeypatch.setattr(host._common, "provenance", lambda device: {})
    monkeypatch.setattr("sys.argv", ["host.py", "--heads", "4", "--json", str(tmp_path / "x.json")])
    host.main()
    assert loaded == {"integrations/jax.py"}
    assert len(started) == 4 and {name for name, _ in started} == {"host.py"}
    assert all({"--heads=4", "--processes=0", "--tokens=4096"} <= set(options) for _, options in started)
    row = json.loads((tmp_path / "x.json").read_text())["rows"][0]
    assert row["process_us"] == [59, 58, 57]
