"""A GPU that is not there: NumPy arrays claim to be on it and a module stands for the CUDA pipeline, or a CUDA that
only takes notes stands for the driver."""

from __future__ import annotations

import ctypes
import functools
import sys
import types
from typing import Any, NamedTuple

import numpy as np

import s2o_cupy.cuda
from s2o_cupy.arrays.array_info import Device
from s2o_cupy.arrays.frameworks.numpy import NumpyFramework
from s2o_cupy.arrays.operand import Addresses, Call, Layout


def pretend_gpu(monkeypatch: Any, **pipeline: Any) -> None:
    """``pipeline``: what the module s2o_cupy.cuda.pipeline has. ``run`` also gets calls that are prepared first."""
    module: Any = types.ModuleType("s2o_cupy.cuda.pipeline")
    if "run" in pipeline:
        pipeline["prepared"] = functools.partial(_Prepared, pipeline["run"])
    module.__dict__.update({"allocate": None, **pipeline})
    monkeypatch.setitem(sys.modules, "s2o_cupy.cuda.pipeline", module)
    monkeypatch.setattr(s2o_cupy.cuda, "pipeline", module, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(NumpyFramework, "stream", lambda self, ordinal=None: 0)
    monkeypatch.setattr(NumpyFramework, "is_capturing", lambda self: False)
    describe = NumpyFramework.describe
    on_gpu = Device("cuda", 0)
    monkeypatch.setattr(NumpyFramework, "describe", lambda self, x: describe(self, x)._replace(device=on_gpu))


class _Prepared:
    def __init__(self, run: Any, problem: Any, config: Any, layout: Layout) -> None:
        self.run_call, self.problem, self.config, self.layout = run, problem, config, layout

    def run(self, at: Addresses, stream: int, memory: Any, observe: Any = None, await_keys: Any = None) -> Any:
        found, paging = self.layout.operands(self.problem), self.layout.paging
        names = ["q", "k_pages", "v_pages", "out"] if self.layout.is_fp8 else ["q", "k", "v", "out"]
        q, k, v, out = (found[name]._replace(pointer=getattr(at, name)) for name in names)
        if paging is not None:
            scales = paging.scales
            if scales is not None:
                scales = scales[0]._replace(pointer=at.k_scale), scales[1]._replace(pointer=at.v_scale)
            paging = paging._replace(pointer=at.pages, scales=scales)
        call = Call((q, k, v, out), at.lse, at.visited, self.problem, paging)
        return self.run_call(call, self.config, stream=stream, memory=memory, await_keys=await_keys, taus=at.taus)


def array_at(pointer: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> np.ndarray:
    """The array whose first element is at an address; strides in elements, without the last one."""
    interface: dict[str, Any] = {"data": (pointer, False), "shape": shape, "typestr": np.dtype(dtype).str, "version": 3}
    if strides is not None:
        interface["strides"] = tuple(s * np.dtype(dtype).itemsize for s in (*strides, 1))
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def interrupted_before(monkeypatch: Any, owner: type, name: str) -> list[bool]:
    """A list. While it has an entry a KeyboardInterrupt comes where ``owner`` would take a note of something in its
    attribute ``name``; that it forgets goes on."""

    class Interrupting:
        def __get__(self, it: Any, of: type) -> Any:
            return it.__dict__[name]

        def __set__(self, it: Any, value: Any) -> None:
            if value and armed:
                raise KeyboardInterrupt
            it.__dict__[name] = value

    armed: list[bool] = []
    monkeypatch.setattr(owner, name, Interrupting(), raising=False)
    return armed


class Launched(NamedTuple):
    kernel: Any
    blocks: int
    params: Any  # a copy of what it was given
    stream: int = 0


def record_launches(monkeypatch: Any, compute_capability: int, *modules: Any) -> list[Launched]:
    """What is launched from then on, by a CUDA that does nothing else. ``modules`` of s2o_cupy.cuda ask the runtime."""
    from s2o_cupy.cuda import program, tensor_maps
    from s2o_cupy.plan.device import DeviceLimits

    launched: list[Launched] = []
    kernels: list[Any] = []

    def load_all(wanted: Any, device: int) -> list[Any]:
        kernels.extend(wanted)
        return [types.SimpleNamespace(ptr=len(kernels) - len(wanted) + i) for i in range(len(wanted))]

    def launch(function: int, blocks: int, *others: Any) -> None:
        _, _, threads, _, _, shared_bytes, stream, struct, _ = others
        kernel = kernels[function]
        assert (threads, shared_bytes) == (kernel.threads, kernel.shared_bytes)
        params = kernel.family.params
        data = ctypes.string_at(ctypes.c_uint64.from_address(struct).value, params.itemsize)
        launched.append(Launched(kernel, blocks, np.frombuffer(data, params.dtype)[0], stream))

    runtime = types.SimpleNamespace(getDevice=lambda: 0, memsetAsync=lambda *arguments: None)
    limits = DeviceLimits.of_architecture(compute_capability)
    monkeypatch.setattr(program, "compiler", types.SimpleNamespace(load_all=load_all))
    monkeypatch.setattr(program, "driver", types.SimpleNamespace(launchKernel=launch, ctxGetCurrent=lambda: 1))
    for module in modules:
        monkeypatch.setattr(module, "runtime", runtime)
        monkeypatch.setattr(module, "device_limits", lambda device: limits)
    for of_array in ("tensor_map", "box_map", "page_map"):
        monkeypatch.setattr(tensor_maps, of_array, lambda pointer, *others: pointer.to_bytes(128, "little"))
    return launched
