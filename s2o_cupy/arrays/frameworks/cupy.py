"""CuPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..lazy_cupy import import_cupy
from ..place import Device, Extent
from ..streams import cupy_scope
from .base import Framework, is_instance

__all__ = ["CupyFramework"]


class CupyFramework(Framework):
    name = "CuPy"

    def owns(self, x: Any) -> bool:
        return is_instance(x, "cupy", "ndarray")

    def device(self, x: Any) -> Device:
        return Device("cuda", x.device.id)

    def extent(self, x: Any) -> Extent:
        return Extent(x.data.ptr, x.shape, x.strides, x.itemsize)

    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> AbstractContextManager[Any]:
        if stream is None and import_cupy().cuda.runtime.getDevice() == device.ordinal:
            return nullcontext()
        return cupy_scope(device, stream)

    def native(self, x: Any, *, host: bool) -> Any:
        return x.get() if host else x

    def export(self, native: Any, like: Any) -> Any:
        return import_cupy().asarray(native) if isinstance(native, np.ndarray) else native

    def store(self, native: np.ndarray, out: Any) -> None:
        out[...] = import_cupy().asarray(native)
