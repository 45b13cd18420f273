"""Streams of any framework, and CuPy on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import ArgumentTypeError
from .array_info import Device
from .lazy_cupy import import_cupy

__all__ = ["cupy_scope", "stream_handle"]


def stream_handle(stream: Any) -> int:
    """The cudaStream_t behind any framework's stream object, or an int handle."""
    handle = stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        handle = (protocol() if callable(protocol) else protocol)[1]
    else:
        for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
            if hasattr(stream, attribute):
                handle = getattr(stream, attribute)
                break
    if isinstance(handle, bool) or not isinstance(handle, int) or handle < 0:
        raise ArgumentTypeError(
            f"stream is {stream!r}; accepted: None (the current stream), a CuPy or torch "
            "stream, an object with .ptr, .cuda_stream or __cuda_stream__, or an int handle"
        )
    return handle


class _ExternalStream:
    """Someone else's stream by the CUDA stream protocol."""

    def __init__(self, handle: int, owner: Any) -> None:
        self.handle = handle
        self.owner = owner  # kept alive as long as this is

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@contextmanager
def cupy_scope(device: Device, stream: Any) -> Iterator[Any]:
    """CuPy's current device and stream (None: leave its current stream); both are restored."""
    cupy = import_cupy()
    with ExitStack() as stack:
        stack.enter_context(cupy.cuda.Device(device.ordinal))  # an external stream knows no device
        if stream is not None:
            handle = stream_handle(stream)
            if hasattr(cupy.cuda.Stream, "from_external"):
                current = cupy.cuda.Stream.from_external(_ExternalStream(handle, stream))
            else:  # CuPy < 14
                current = cupy.cuda.ExternalStream(handle, device.ordinal)
            stack.enter_context(current)
        yield cupy
