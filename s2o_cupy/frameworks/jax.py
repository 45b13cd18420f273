"""JAX arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..lazy_cupy import import_cupy
from ..place import Device
from ..streams import cupy_scope
from .base import Framework, is_instance

__all__ = ["JaxFramework"]


class JaxFramework(Framework):
    name = "JAX"
    mutable = False

    def owns(self, x: Any) -> bool:
        return is_instance(x, "jax", "Array")

    def check(self, name: str, x: Any) -> None:
        import jax

        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"s2o_attention: {name} is a JAX tracer ({type(x).__name__}), which has no data; accepted: "
                "concrete arrays (call it outside jax.jit, jax.vmap and jax.grad, or by jax.pure_callback)"
            )
        if len(x.devices()) != 1:
            raise ValueError(
                f"s2o_attention: {name} is sharded over {len(x.devices())} devices; accepted: arrays "
                "on one device (call it on each shard, x.addressable_shards[i].data)"
            )

    def device(self, x: Any) -> Device:
        (device,) = x.devices()
        if device.platform in ("gpu", "cuda"):
            return Device("cuda", int(x.__dlpack_device__()[1]))
        return Device(device.platform)

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

    def native(self, x: Any, *, host: bool) -> Any:
        return np.asarray(x) if host else import_cupy().from_dlpack(x)

    def export(self, native: Any, like: Any) -> Any:
        import jax

        if isinstance(native, np.ndarray):
            (device,) = like.devices()
            return jax.device_put(native, device)
        return jax.dlpack.from_dlpack(native)
