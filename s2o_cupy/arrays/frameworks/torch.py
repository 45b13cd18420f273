"""PyTorch tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from ...caches import remembered
from ...errors import ArgumentTypeError
from ..array_info import ArrayInfo, Device
from ..lazy_cupy import import_cupy
from ..streams import stream_handle
from ..torch_streams import in_use_until_now
from ..torch_transforms import check_derivatives, no_address
from .base import Framework, Output, is_instance, numpy_dtype

__all__ = ["TorchFramework"]


class TorchFramework(Framework):
    name = "PyTorch"

    def owns(self, x: Any) -> bool:
        return is_instance(x, "torch", "Tensor")

    def check(self, name: str, x: Any) -> None:
        torch = sys.modules["torch"]  # one of its tensors came in
        if x.layout != torch.strided:
            raise ArgumentTypeError(f"{name} is {x.layout}; accepted: dense tensors (.to_dense())")
        if x.is_nested:
            raise ArgumentTypeError(f"{name} is a nested tensor; accepted: dense tensors")
        if x.is_neg():  # kernels read memory, which holds the other sign
            raise ArgumentTypeError(f"{name} is a view with its negative bit set; accepted: {name}.resolve_neg()")
        check_derivatives(name, x)

    def describe(self, x: Any) -> ArrayInfo:
        if x.requires_grad:  # refused by check() where it would matter
            x = x.detach()
        form = form_of(x.shape, x.stride(), x.element_size(), x.dtype, x.device)
        return ArrayInfo(pointer_of(x), *form, x)

    def look(self, arrays: Iterable[Any]) -> tuple[Any, ...] | None:
        torch = sys.modules["torch"]
        if torch.autograd.forward_ad._current_level >= 0:
            return None
        tensor, bfloat16 = torch.Tensor, torch.bfloat16
        looks: list[Any] = []
        try:
            for x in arrays:
                if type(x) is not tensor or x.requires_grad:
                    return None
                dtype = x.dtype
                # No complex number has parts in bfloat16, of whose views alone the negative bit is set.
                if dtype is not bfloat16 and x.is_neg():
                    return None
                looks += (x.shape, x.stride(), dtype, x.device)
        except RuntimeError:  # nested and compressed sparse tensors have no strides; other sparse ones have no address
            return None
        return tuple(looks)

    def pointers(self, natives: Iterable[Any]) -> tuple[int, ...]:
        return tuple([x.data_ptr() for x in natives])

    def dtype(self, x: Any) -> str:
        return torch_dtype_name(x.dtype)

    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> AbstractContextManager[Any]:
        if device.kind == "cpu" or (stream is None and self._is_current(device.ordinal, host)):
            return nullcontext()
        return self._other_scope(device, stream, arrays, host)

    def stream_on(self, ordinal: int) -> int | None:
        return self._stream_of(ordinal) if self._is_current(ordinal) else None

    def stream(self) -> int:
        return self._stream_of(sys.modules["torch"].cuda.current_device())

    def _stream_of(self, ordinal: int) -> int:
        torch = sys.modules["torch"]
        # What PyTorch's own compiler calls: making a Stream object takes two microseconds more.
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        return raw(ordinal) if raw is not None else torch.cuda.current_stream(ordinal).cuda_stream

    def _is_current(self, ordinal: int, host: bool = False) -> bool:
        torch = sys.modules["torch"]
        # What current_device() calls once CUDA has been begun, as it has where a tensor is on a GPU.
        if getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)() != ordinal:
            return False
        # CuPy may come with a CUDA runtime of its own, whose current device need not be PyTorch's.
        return host or import_cupy().cuda.runtime.getDevice() == ordinal

    @contextmanager
    def _other_scope(self, device: Device, stream: Any, arrays: Sequence[Any], host: bool) -> Iterator[None]:
        import torch

        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(device.ordinal))
            if not host:
                stack.enter_context(import_cupy().cuda.Device(device.ordinal))
            current = torch.cuda.current_stream()
            handle = current.cuda_stream if stream is None else stream_handle(stream)
            if handle != current.cuda_stream:
                # As DLPack orders producer and consumer: the given stream waits for the current one.
                # The allocator learns that inputs are in use there, and allocates the output there.
                if isinstance(stream, torch.cuda.Stream) and stream.device_index == device.ordinal:
                    given = stream
                else:
                    given = torch.cuda.ExternalStream(handle) if handle > 1 else torch.cuda.default_stream()
                given.wait_stream(current)
                stack.enter_context(torch.cuda.stream(given))
                if host:
                    stack.callback(given.synchronize)
                else:
                    stack.callback(in_use_until_now, arrays, given)
            yield

    def is_capturing(self) -> bool:
        import torch

        return torch.cuda.is_current_stream_capturing()

    def memory(self, like: Any) -> Callable[[int], tuple[int, Any]] | None:
        torch = sys.modules["torch"]

        def allocate(nbytes: int) -> tuple[int, Any]:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
            return pointer_of(memory), memory

        return allocate

    def contiguous(self, native: Any) -> Any:
        return native.contiguous()

    def fill(self, native: Any, value: float) -> None:
        if isinstance(native, np.ndarray):
            native.fill(value)
        else:
            native.fill_(value)

    def on_host(self, x: Any) -> np.ndarray:
        import torch

        x = x.detach().cpu()
        if x.dtype == torch.bfloat16:  # NumPy imports none: carry the bits as int16
            return x.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
        if x.element_size() == 1 and x.is_floating_point():  # its bytes
            return x.view(torch.uint8).numpy()
        return x.numpy()

    def export(self, native: Any, like: Any) -> Any:
        import torch

        if not isinstance(native, np.ndarray):
            return native
        if native.dtype.name == "bfloat16":
            return torch.from_numpy(native.view(np.int16)).view(torch.bfloat16).to(like.device)
        return torch.from_numpy(native).to(like.device)

    def store(self, native: np.ndarray, out: Any) -> None:
        out.detach().copy_(self.export(native, out))

    def writes(self, out: Any) -> None:
        if not out.is_inference():  # such a tensor has no count, and no gradient needs it
            sys.modules["torch"].autograd.graph.increment_version(out)

    def output(self, shape: tuple[int, ...], dtype: str, like: Any, *, host: bool) -> Output:
        torch = sys.modules["torch"]
        # torch's own allocator, also under graph capture
        return self._new(torch.empty(shape, dtype=getattr(torch, dtype), device=like.device), host)

    def output_like(self, shape: tuple[int, ...], dtype: str, like: Any, *, host: bool) -> Output:
        if type(like) is not sys.modules["torch"].Tensor:  # of a subclass it may be one too
            return self.output(shape, dtype, like, host=host)
        return self._new(self.new_like(shape, dtype, like), host)

    def new_like(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        torch = sys.modules["torch"]
        return torch.empty_like(like, memory_format=torch.contiguous_format)

    def _new(self, out: Any, host: bool) -> Output:
        if not host:
            pointer_of(out)  # where PyTorch makes wrappers, outputs are some too
            return Output(out, lambda: out)
        return self.output_into(out, self.describe(out), host=host)


def pointer_of(x: Any) -> int:
    """Where a tensor begins; raises TypeError of one that is not in memory. A wrapper of torch.func.functionalize, a
    fake tensor and one whose storage is freed say 0; a device without memory, "meta", is refused for itself."""
    try:
        pointer = x.data_ptr()
    except RuntimeError:
        raise no_address(x) from None
    if pointer == 0 and x.numel() and x.device.type != "meta":
        raise no_address(x)
    return pointer


@functools.lru_cache
def device_of(device: Any) -> Device:
    return Device(device.type, device.index or 0)


@remembered
def form_of(
    shape: Any, strides: tuple[int, ...], size: int, dtype: Any, device: Any
) -> tuple[tuple[int, ...], tuple[int, ...], int, str, Device]:
    """What an ArrayInfo has between its address and the tensor."""
    return tuple(shape), tuple(s * size for s in strides), size, torch_dtype_name(dtype), device_of(device)


@functools.lru_cache
def torch_dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
