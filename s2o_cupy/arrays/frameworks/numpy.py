"""NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..place import Device, Extent
from .base import Framework

__all__ = ["NumpyFramework"]


class NumpyFramework(Framework):
    name = "NumPy"

    def owns(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def check(self, name: str, x: Any) -> None:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"s2o_attention: {name} is a masked array; accepted: arrays without a mask")

    def device(self, x: Any) -> Device:
        return Device("cpu")

    def extent(self, x: Any) -> Extent:
        return Extent(x.__array_interface__["data"][0], x.shape, x.strides, x.itemsize)

    def writeable(self, x: Any) -> bool:
        return x.flags.writeable

    def native(self, x: Any, *, host: bool) -> Any:
        return np.asarray(x)

    def export(self, native: Any, like: Any) -> Any:
        return native
