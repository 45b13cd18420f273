"""A GPU that is not there: NumPy arrays claim to be on it, and a module stands for the CUDA pipeline."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np

import s2o_cupy.cuda
from s2o_cupy.arrays.array_info import Device
from s2o_cupy.arrays.frameworks.numpy import NumpyFramework


def pretend_gpu(monkeypatch: Any, **pipeline: Any) -> None:
    """``pipeline``: what the module s2o_cupy.cuda.pipeline has."""
    module: Any = types.ModuleType("s2o_cupy.cuda.pipeline")
    module.__dict__.update({"allocate": None, "Call": lambda *fields: fields, **pipeline})
    monkeypatch.setitem(sys.modules, "s2o_cupy.cuda.pipeline", module)
    monkeypatch.setattr(s2o_cupy.cuda, "pipeline", module, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(NumpyFramework, "stream", lambda self: 0)
    monkeypatch.setattr(NumpyFramework, "is_capturing", lambda self: False)
    describe = NumpyFramework.describe
    on_gpu = Device("cuda", 0)
    monkeypatch.setattr(NumpyFramework, "describe", lambda self, x: describe(self, x)._replace(device=on_gpu))


def array_at(pointer: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> np.ndarray:
    """The array whose first element is at an address; strides in elements, without the last one."""
    interface: dict[str, Any] = {"data": (pointer, False), "shape": shape, "typestr": np.dtype(dtype).str, "version": 3}
    if strides is not None:
        interface["strides"] = tuple(s * np.dtype(dtype).itemsize for s in (*strides, 1))
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))
