"""Arrays of any other framework that implements DLPack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import ArgumentTypeError
from ..array_info import ArrayInfo, Device
from ..lazy_cupy import import_cupy
from ..streams import cupy_scope
from .base import Framework
from .cupy import CupyFramework
from .numpy import NumpyFramework

__all__ = ["DlpackFramework"]


class DlpackFramework(Framework):
    """Any other producer: through NumPy or CuPy, and back through its own namespace if it has one."""

    name = "DLPack"

    def owns(self, x: Any) -> bool:
        has_data = hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")
        return has_data and not isinstance(x, (np.generic, type))

    imports = True

    def _device(self, x: Any) -> Device:
        kind, index = x.__dlpack_device__()
        names = {1: "cpu", 3: "cpu", 2: "cuda", 13: "cuda"}  # DLPack's: CPU, pinned host; CUDA, managed
        return Device(names.get(int(kind), f"DLPack device type {int(kind)}"), int(index))

    def describe(self, x: Any) -> ArrayInfo:
        device = self._device(x)
        if device.kind not in ("cpu", "cuda"):  # what nobody can import: refused by its device
            return ArrayInfo(0, (), (), 1, "", device)
        native = self._import(x, device)
        return _framework_of(native).describe(native)._replace(device=device)

    def dtype(self, x: Any) -> str:
        return self.describe(x).dtype

    def writeable(self, native: Any) -> bool:
        return _framework_of(native).writeable(native)

    @contextmanager
    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> Iterator[None]:
        if device.kind == "cpu":
            yield
            return
        with cupy_scope(device, stream):  # the DLPack exchange itself orders producer and consumer
            yield

    def on_host(self, x: Any) -> np.ndarray:
        native = self._import(x, self._device(x))
        return native if isinstance(native, np.ndarray) else native.get()

    def export(self, native: Any, like: Any) -> Any:
        from array_api_compat import array_namespace

        if self._device(like).kind == "cuda":
            native = import_cupy().asarray(native)
        try:
            namespace = array_namespace(like)
        except TypeError:
            return native
        from_dlpack = getattr(namespace, "from_dlpack", None)
        return native if from_dlpack is None else from_dlpack(native)

    def store(self, native: np.ndarray, out: Any) -> None:
        self._import(out, self._device(out))[...] = import_cupy().asarray(native)

    def _import(self, x: Any, device: Device) -> Any:
        if device.kind == "cuda":
            with cupy_scope(device, None) as cupy:
                return cupy.from_dlpack(x)
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError) as error:
            raise ArgumentTypeError(
                f"NumPy cannot import this {type(x).__name__} through DLPack ({error}); "
                "accepted on the CPU: float16, float32, float64; bfloat16 as a PyTorch, JAX or NumPy array"
            ) from error


def _framework_of(native: Any) -> Framework:
    return NumpyFramework() if isinstance(native, np.ndarray) else CupyFramework()
