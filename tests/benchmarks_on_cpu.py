"""Benchmarks that need a GPU, run with PyTorch on the CPU in its place and with timings that are made up, for tests."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import BENCHMARKS as BENCHMARKS
from benchmark_modules import CPU as CPU

# isort: split
import _baselines
import _common


class Event:
    """One of CUDA, 1 ms after the one before."""

    clock = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.clock += 1
        self.at = Event.clock

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch, runs: Sequence[tuple[Any, str]]) -> None:
    """Each timing is 2 ms of the first call. ``runs``: modules and names of their functions (args, step, device)."""
    import torch
    from torch.nn.attention import SDPBackend

    def call(function: Any, value: float) -> float:
        function()
        return value

    monkeypatch.setattr(_common, "has_gpu", lambda: True)
    monkeypatch.setattr(_common, "time_ms", lambda function, repeats: call(function, 2.0))
    monkeypatch.setattr(_common, "peak_gib", lambda function, but=(): call(function, 1.0))
    monkeypatch.setattr(_common, "provenance", lambda device="cuda": {"commit": "here"})
    monkeypatch.setattr(_baselines, "sdpa_backends", lambda: dict.fromkeys(("cudnn", "flash2"), SDPBackend.MATH))
    monkeypatch.setattr(_baselines, "_flash3", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module, name in runs:
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), device=CPU))


def rows_on_a_gpu(path: Path, script: str, *arguments: Any) -> list[dict[str, Any]]:
    """What a script writes, run as a user would; skips without PyTorch for CUDA."""
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    command = [sys.executable, BENCHMARKS / script, "--repeats", "3", "--json", path, *arguments]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text())["rows"]
