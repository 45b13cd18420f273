"""CuPy arrays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..array_info import ArrayInfo, Device
from ..lazy_cupy import import_cupy
from ..streams import cupy_scope
from .base import Framework, dtype_name, is_instance

__all__ = ["CupyFramework"]


class CupyFramework(Framework):
    name = "CuPy"

    def owns(self, x: Any) -> bool:
        return is_instance(x, "cupy", "ndarray")

    def describe(self, x: Any) -> ArrayInfo:
        device = Device("cuda", x.data.device_id)
        return ArrayInfo(x.data.ptr, x.shape, x.strides, x.itemsize, dtype_name(x.dtype), device, x)

    def look(self, x: Any) -> tuple[Any, ...] | None:
        return (x.shape, x.strides, x.dtype, x.data.device_id) if type(x) is sys.modules["cupy"].ndarray else None

    def is_current(self, ordinal: int) -> bool:
        return import_cupy().cuda.runtime.getDevice() == ordinal

    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> AbstractContextManager[Any]:
        if stream is None and self.is_current(device.ordinal):
            return nullcontext()
        return cupy_scope(device, stream)

    def pointer(self, native: Any) -> int:
        return native.data.ptr

    def on_host(self, x: Any) -> np.ndarray:
        return x.get()

    def export(self, native: Any, like: Any) -> Any:
        return import_cupy().asarray(native) if isinstance(native, np.ndarray) else native

    def store(self, native: np.ndarray, out: Any) -> None:
        out[...] = import_cupy().asarray(native)
