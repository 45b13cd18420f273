"""NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ArgumentTypeError
from ..array_info import ArrayInfo, Device
from .base import Framework, dtype_name

__all__ = ["NumpyFramework"]

CPU = Device("cpu")


class NumpyFramework(Framework):
    name = "NumPy"

    def owns(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def check(self, name: str, x: Any) -> None:
        if isinstance(x, np.ma.MaskedArray):
            raise ArgumentTypeError(f"{name} is a masked array; accepted: arrays without a mask")

    def describe(self, x: Any) -> ArrayInfo:
        x = np.asarray(x)  # of a subclass: its data
        pointer = x.__array_interface__["data"][0]
        return ArrayInfo(pointer, x.shape, x.strides, x.itemsize, dtype_name(x.dtype), CPU, x)

    def writeable(self, native: Any) -> bool:
        return native.flags.writeable

    def on_host(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def export(self, native: Any, like: Any) -> Any:
        return native
