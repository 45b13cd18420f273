"""CuPy arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
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

    def look(self, arrays: Iterable[Any]) -> tuple[Any, ...] | None:
        ndarray = sys.modules["cupy"].ndarray
        looks: list[Any] = []
        for x in arrays:
            if type(x) is not ndarray:
                return None
            looks += (x.shape, x.strides, x.dtype, x.data.device_id)
        return tuple(looks)

    def stream_on(self, ordinal: int) -> int | None:
        cuda = import_cupy().cuda
        return cuda.get_current_stream().ptr if cuda.runtime.getDevice() == ordinal else None

    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> AbstractContextManager[Any]:
        if stream is None and import_cupy().cuda.runtime.getDevice() == device.ordinal:
            return nullcontext()
        return cupy_scope(device, stream)

    def pointers(self, natives: Iterable[Any]) -> tuple[int, ...]:
        return tuple([x.data.ptr for x in natives])

    def on_host(self, x: Any) -> np.ndarray:
        return x.get()

    def export(self, native: Any, like: Any) -> Any:
        return import_cupy().asarray(native) if isinstance(native, np.ndarray) else native

    def store(self, native: np.ndarray, out: Any) -> None:
        out[...] = import_cupy().asarray(native)
