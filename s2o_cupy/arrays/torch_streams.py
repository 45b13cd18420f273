"""PyTorch's allocator, and streams that are not PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from .lazy_cupy import import_cupy

__all__ = ["in_use_until_now"]


def in_use_until_now(arrays: Sequence[Any], stream: Any) -> None:
    """Keep the memory of tensors from being reused before all that was launched on ``stream``, a torch.cuda.Stream that
    is the current one, is done.

    `Tensor.record_stream` makes the allocator remember the stream's handle, and record an event there when the tensor
    is freed. That ends the process if the stream is destroyed by then, as CuPy does with one that nobody holds. So
    another stream, which is never destroyed, waits for ``stream`` and is remembered in its place. PyTorch's own streams
    are never destroyed.
    """
    import torch

    # While a graph is captured no event is recorded, and a stream outside of the capture must not wait for one inside.
    if not _is_own(stream) and not torch.cuda.is_current_stream_capturing():
        event = stream.record_event()
        stream = _lasting_stream(stream.device_index)
        stream.wait_event(event)
    for x in arrays:
        x.record_stream(stream)


def _is_own(stream: Any) -> bool:
    """PyTorch numbers its own streams 0 and with odd numbers; another one's number is its handle, which is even."""
    return stream.stream_id == 0 or stream.stream_id % 2 == 1


@functools.cache  # one for each device
def _lasting_stream(device: int) -> Any:
    """Not of PyTorch's pool, whose streams may be capturing elsewhere."""
    import torch

    runtime = import_cupy().cuda.runtime
    return torch.cuda.ExternalStream(runtime.streamCreateWithFlags(runtime.streamNonBlocking), device)
