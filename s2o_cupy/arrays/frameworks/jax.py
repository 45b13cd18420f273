"""JAX arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from ...caches import remembered
from ...errors import ArgumentTypeError, ArgumentValueError
from ..array_info import ArrayInfo, Device
from ..lazy_cupy import import_cupy
from ..streams import cupy_scope
from .base import Framework, dtype_name, is_instance

__all__ = ["JaxFramework"]


class JaxFramework(Framework):
    name = "JAX"
    mutable = False

    def __init__(self) -> None:
        self.devices: dict[Any, Device] = {}  # JAX's device -> ours

    def owns(self, x: Any) -> bool:
        return is_instance(x, "jax", "Array")

    def check(self, name: str, x: Any) -> None:
        import jax

        if isinstance(x, jax.core.Tracer):
            raise ArgumentTypeError(
                f"{name} is a JAX tracer ({type(x).__name__}), which has no data; accepted: "
                "concrete arrays, outside jax.jit, jax.vmap and jax.grad; inside of jax.jit and jax.vmap call "
                "s2o_cupy.integrations.jax.attention"
            )
        if len(x.devices()) != 1:
            raise ArgumentValueError(
                f"{name} is sharded over {len(x.devices())} devices; accepted: arrays "
                "on one device (call it on each shard, x.addressable_shards[i].data)"
            )

    def _device(self, x: Any) -> Device:
        (device,) = x.devices()
        known = self.devices.get(device)
        if known is None:
            is_gpu = device.platform in ("gpu", "cuda")
            known = Device("cuda", int(x.__dlpack_device__()[1])) if is_gpu else Device(device.platform)
            self.devices[device] = known
        return known

    @contextmanager
    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> Iterator[None]:
        if device.kind == "cpu" or host:
            yield
            return
        import jax

        # JAX has no public current stream: wait for its inputs on the host, and for our kernels
        # before the inputs can be dropped and their memory reused.
        jax.block_until_ready(tuple(arrays))
        with cupy_scope(device, stream) as cupy:
            try:
                yield
            finally:
                cupy.cuda.get_current_stream().synchronize()

    def describe(self, x: Any) -> ArrayInfo:
        device, dtype, size = self._device(x), dtype_name(x.dtype), x.dtype.itemsize
        if device.kind == "cuda" and not _in_c_order(x):
            native = import_cupy().from_dlpack(x)
            return ArrayInfo(native.data.ptr, native.shape, native.strides, size, dtype, device, native)
        # Kernels need no more than an address, which JAX tells in a tenth of the time that an import by CuPy takes.
        return ArrayInfo(x.unsafe_buffer_pointer(), x.shape, _c_strides(x.shape, size), size, dtype, device, x)

    def put(self, target: Any, places: Any, values: Any) -> Any:
        return target.at[places].set(values)

    def wide_integers(self) -> AbstractContextManager[Any]:
        import jax

        if hasattr(jax, "enable_x64"):
            return jax.enable_x64(True)
        from jax import experimental

        return experimental.enable_x64()

    def on_host(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def export(self, native: Any, like: Any) -> Any:
        import jax

        if isinstance(native, np.ndarray):
            (device,) = like.devices()
            return jax.device_put(native, device)
        return jax.dlpack.from_dlpack(native)


def _in_c_order(x: Any) -> bool:
    """Whether JAX says that the elements of an array lie as those of NumPy's do; older versions say nothing."""
    layout = getattr(getattr(x, "format", None), "layout", None)
    return layout is not None and not layout.tiling and tuple(layout.major_to_minor) == tuple(range(x.ndim))


@remembered
def _c_strides(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(size * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
