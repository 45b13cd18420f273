"""The lists that benchmarks/lists.py draws, for tests."""

from __future__ import annotations

from typing import Any

import pytest

from s2o_cupy.problem import Problem

KIND_NUMBERS = range(7)


def benchmark_lists(problem: Problem, density: float, kind: int) -> Any:
    """RandomLists of one of its kinds, on the CPU; skips where there is no source checkout or no PyTorch."""
    pytest.importorskip("torch")
    import benchmark_modules as benchmark_modules

    # isort: split
    import _random_lists

    assert len(_random_lists.KINDS) == len(KIND_NUMBERS)
    return _random_lists.random_lists(problem, density, *_random_lists.KINDS[kind], device="cpu")
