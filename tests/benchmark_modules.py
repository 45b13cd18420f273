"""Importing this makes the modules of benchmarks/ importable; without a source checkout it skips who imports it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CPU = "cpu:0"  # PyTorch tensors there, which by "cpu" would be NumPy's

if not BENCHMARKS.exists():
    pytest.skip("needs a source checkout", allow_module_level=True)
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))
