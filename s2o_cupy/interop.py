"""Any framework's arrays in, the same framework's arrays out, on the caller's device and stream.

Each framework is one small class that answers the same questions (where is it, give me a native
view, make me an output). *Native* means what a backend computes on: numpy.ndarray for the NumPy
backend, cupy.ndarray for the GPU. Views share memory with the caller's array; inputs are never
written. A framework is only touched if one of its arrays came in, so importing this module
imports none of CuPy, PyTorch and JAX.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .operand import Operand
from .spec import S2OError

__all__ = [
    "Device",
    "Framework",
    "Output",
    "address",
    "check_out",
    "common_framework",
    "framework_of",
    "import_cupy",
    "operand",
    "stream_handle",
    "to_host",
]

ACCEPTED = "NumPy, CuPy, PyTorch or JAX arrays, or others that implement __dlpack__"


class Device(NamedTuple):
    kind: str  # "cpu", "cuda", or another framework's name for what s2o_cupy does not run on
    ordinal: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}" if self.kind == "cuda" else self.kind


class Extent(NamedTuple):
    """Where an array's elements lie in memory; strides in bytes."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def byte_range(self) -> tuple[int, int]:
        """[lowest byte, one past the highest byte)."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        spans = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = self.pointer + sum(min(0, s) for s in spans)
        return low, self.pointer + sum(max(0, s) for s in spans) + self.itemsize

    def overlaps(self, other: Extent) -> bool:
        (a, b), (c, d) = self.byte_range(), other.byte_range()
        return a < b and c < d and a < d and c < b

    def overlaps_itself(self) -> bool:
        """Whether two indices may name one element: a stride within the reach of the smaller ones."""
        reach = self.itemsize
        axes = sorted((abs(s), n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1)
        for stride, n in axes:
            if stride < reach:
                return True
            reach += (n - 1) * stride
        return False


@dataclass(frozen=True)
class Output:
    """A native array for the backend to write, and how it becomes the caller's array."""

    native: Any
    finish: Callable[[], Any]


def import_cupy() -> Any:
    if "cupy" in sys.modules and sys.modules["cupy"] is not None:
        return sys.modules["cupy"]
    _prepare_cupy_cache()
    try:
        import cupy
    except ImportError as error:
        raise S2OError(
            'arrays on an NVIDIA GPU need CuPy: pip install "s2o_cupy[cuda12]" '
            f"(cuda13 for CUDA 13), or move them to the CPU ({error})"
        ) from error
    return cupy


def _prepare_cupy_cache() -> None:
    """CuPy makes its cache folder when it is imported, and cannot be imported where that fails: without a folder
    let it compile in memory."""
    if "cupy" in sys.modules or importlib.util.find_spec("cupy") is None:
        return
    try:
        os.makedirs(os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache")), exist_ok=True)
    except OSError:
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        os.environ["CUPY_CACHE_DIR"] = tempfile.gettempdir()  # only looked at


@functools.lru_cache
def dtype_name(dtype: np.dtype) -> str:
    return dtype.name  # which NumPy makes up anew each time


@functools.lru_cache
def numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":  # NumPy has none of its own; CuPy shares this one
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


# -- streams ------------------------------------------------------------------------------------


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
        raise TypeError(
            f"s2o_attention: stream is {stream!r}; accepted: None (the current stream), a CuPy or torch "
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


# -- frameworks ---------------------------------------------------------------------------------


class Framework:
    """Defaults for frameworks whose arrays can be written in place."""

    name = ""
    mutable = True

    def owns(self, x: Any) -> bool:
        raise NotImplementedError

    def check(self, name: str, x: Any) -> None:
        """Raise if ``x`` is of this framework but cannot be computed on."""

    def device(self, x: Any) -> Device:
        raise NotImplementedError

    def dtype(self, x: Any) -> str:
        return dtype_name(x.dtype)

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def extent(self, x: Any) -> Extent:
        raise NotImplementedError

    def writeable(self, x: Any) -> bool:
        return True

    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> AbstractContextManager[Any]:
        """Device and stream to run on; ``host``: the NumPy backend will do the work."""
        return nullcontext()

    def native(self, x: Any, *, host: bool) -> Any:
        """``x`` as a numpy.ndarray (``host``; a copy only if x is on a GPU) or as what kernels can be pointed at."""
        raise NotImplementedError

    def export(self, native: Any, like: Any) -> Any:
        """A native array as the caller's array on the device of ``like``."""
        raise NotImplementedError

    def contiguous_last_axis(self, native: Any) -> Any:
        """``native``, copied only if its last axis is strided: kernels read rows in vectors."""
        return native if native.shape[-1] == 1 or native.strides[-1] == native.itemsize else native.copy()

    def stream(self) -> int:
        """The handle of the stream to launch on, inside `scope`."""
        return import_cupy().cuda.get_current_stream().ptr

    def is_capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph."""
        return import_cupy().cuda.get_current_stream().is_capturing()

    def memory(self, like: Any) -> Callable[[int], tuple[int, Any]] | None:
        """Where a call's workspace comes from, as pipeline.Memory; None: CuPy's pool."""
        return None

    def fill(self, native: Any, value: float) -> None:
        native.fill(value)

    def store(self, native: np.ndarray, out: Any) -> None:
        """Copy a host array into the caller's GPU array."""
        raise NotImplementedError

    def output(self, shape: tuple[int, ...], dtype: str, like: Any, *, host: bool) -> Output:
        """A new output in C order, uninitialised."""
        native = (np if host else import_cupy()).empty(shape, numpy_dtype(dtype))
        return Output(native, lambda: self.export(native, like))

    def output_into(self, out: Any, *, host: bool) -> Output:
        """An output that is written to the caller's ``out``."""
        native = self.native(out, host=host)
        if not host or self.device(out).kind == "cpu":
            return Output(native, lambda: out)

        def finish() -> Any:
            self.store(native, out)
            return out

        return Output(native, finish)


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


class CupyFramework(Framework):
    name = "CuPy"

    def owns(self, x: Any) -> bool:
        return _is_instance(x, "cupy", "ndarray")

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
        return import_cupy().asarray(native)

    def store(self, native: np.ndarray, out: Any) -> None:
        out[...] = import_cupy().asarray(native)


class TorchFramework(Framework):
    name = "PyTorch"

    def owns(self, x: Any) -> bool:
        return _is_instance(x, "torch", "Tensor")

    def check(self, name: str, x: Any) -> None:
        import torch

        if x.layout != torch.strided:
            raise TypeError(f"s2o_attention: {name} is {x.layout}; accepted: dense tensors (.to_dense())")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"s2o_attention: {name} requires grad, and S2O is for inference only (it has no backward); "
                f"call it under torch.no_grad(), or pass {name}.detach()"
            )

    def device(self, x: Any) -> Device:
        return Device(x.device.type, x.device.index or 0)

    def dtype(self, x: Any) -> str:
        return torch_dtype_name(x.dtype)

    def extent(self, x: Any) -> Extent:
        size = x.element_size()
        return Extent(x.data_ptr(), tuple(x.shape), tuple(s * size for s in x.stride()), size)

    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> AbstractContextManager[Any]:
        import torch

        if device.kind == "cpu":
            return nullcontext()
        # CuPy may come with a CUDA runtime of its own, whose current device need not be PyTorch's.
        is_current = torch.cuda.current_device() == device.ordinal
        is_current = is_current and (host or import_cupy().cuda.runtime.getDevice() == device.ordinal)
        if stream is None and is_current:
            return nullcontext()
        return self._other_scope(device, stream, arrays, host)

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
                given = torch.cuda.ExternalStream(handle) if handle > 1 else torch.cuda.default_stream()
                given.wait_stream(current)
                for x in arrays:
                    x.record_stream(given)
                stack.enter_context(torch.cuda.stream(given))
            yield

    def stream(self) -> int:
        import torch

        return torch.cuda.current_stream().cuda_stream

    def is_capturing(self) -> bool:
        import torch

        return torch.cuda.is_current_stream_capturing()

    def memory(self, like: Any) -> Callable[[int], tuple[int, Any]] | None:
        import torch

        def allocate(nbytes: int) -> tuple[int, Any]:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
            return memory.data_ptr(), memory

        return allocate

    def contiguous_last_axis(self, native: Any) -> Any:
        if isinstance(native, np.ndarray):
            return super().contiguous_last_axis(native)
        return native if native.shape[-1] == 1 or native.stride(-1) == 1 else native.contiguous()

    def fill(self, native: Any, value: float) -> None:
        if isinstance(native, np.ndarray):
            native.fill(value)
        else:
            native.fill_(value)

    def native(self, x: Any, *, host: bool) -> Any:
        import torch

        x = x.detach()  # refused by check() where it would matter
        if not host:
            return x
        x = x.cpu()
        if x.dtype == torch.bfloat16:  # NumPy imports none: carry the bits as int16
            return x.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
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

    def output(self, shape: tuple[int, ...], dtype: str, like: Any, *, host: bool) -> Output:
        import torch

        # torch's own allocator, also under graph capture
        out = torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
        if not host:
            return Output(out, lambda: out)
        return self.output_into(out, host=host)


class JaxFramework(Framework):
    name = "JAX"
    mutable = False

    def owns(self, x: Any) -> bool:
        return _is_instance(x, "jax", "Array")

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


class DlpackFramework(Framework):
    """Any other producer: through NumPy or CuPy, and back through its own namespace if it has one."""

    name = "DLPack"

    def owns(self, x: Any) -> bool:
        return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__") and not isinstance(x, np.generic)

    def device(self, x: Any) -> Device:
        kind, index = x.__dlpack_device__()
        names = {1: "cpu", 3: "cpu", 2: "cuda", 13: "cuda"}  # DLPack's: CPU, pinned host; CUDA, managed
        return Device(names.get(int(kind), f"DLPack device type {int(kind)}"), int(index))

    def dtype(self, x: Any) -> str:
        return self._import(x).dtype.name

    def shape(self, x: Any) -> tuple[int, ...]:
        return self._import(x).shape

    def extent(self, x: Any) -> Extent:
        native = self._import(x)
        return framework_of("q", native).extent(native)

    def writeable(self, x: Any) -> bool:
        native = self._import(x)
        return framework_of("q", native).writeable(native)

    @contextmanager
    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> Iterator[None]:
        if device.kind == "cpu":
            yield
            return
        with cupy_scope(device, stream):  # the DLPack exchange itself orders producer and consumer
            yield

    def native(self, x: Any, *, host: bool) -> Any:
        native = self._import(x)
        return native.get() if host and not isinstance(native, np.ndarray) else native

    def export(self, native: Any, like: Any) -> Any:
        from array_api_compat import array_namespace

        if self.device(like).kind == "cuda":
            native = import_cupy().asarray(native)
        try:
            namespace = array_namespace(like)
        except TypeError:
            return native
        from_dlpack = getattr(namespace, "from_dlpack", None)
        return native if from_dlpack is None else from_dlpack(native)

    def store(self, native: np.ndarray, out: Any) -> None:
        self._import(out)[...] = import_cupy().asarray(native)

    def _import(self, x: Any) -> Any:
        device = self.device(x)
        if device.kind == "cuda":
            with cupy_scope(device, None) as cupy:
                return cupy.from_dlpack(x)
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError) as error:
            raise TypeError(
                f"s2o_attention: NumPy cannot import this {type(x).__name__} through DLPack ({error}); "
                "accepted on the CPU: float16, float32, float64; bfloat16 as a PyTorch, JAX or NumPy array"
            ) from error


FRAMEWORKS: tuple[Framework, ...] = (
    NumpyFramework(),
    CupyFramework(),
    TorchFramework(),
    JaxFramework(),
    DlpackFramework(),
)


@functools.lru_cache
def torch_dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _is_instance(x: Any, module: str, type_name: str) -> bool:
    """isinstance against a type of a module that may not be imported (then x cannot be its)."""
    kind = getattr(sys.modules.get(module), type_name, None)
    return kind is not None and isinstance(x, kind)


_owner_of_type: dict[type, Framework] = {}


def framework_of(name: str, x: Any) -> Framework:
    try:
        return _owner_of_type[type(x)]
    except KeyError:
        pass
    for framework in FRAMEWORKS:
        if framework.owns(x):
            _owner_of_type[type(x)] = framework  # who owns an array is a matter of its type
            return framework
    raise TypeError(f"s2o_attention: {name} is a {type(x).__name__}; accepted: {ACCEPTED}")


def operand(native: Any, layout: str) -> Operand:
    """Where a native array on a GPU lies, its axes ordered as ``layout`` says."""
    pointer, shape, strides, itemsize = framework_of("array", native).extent(native)
    return Operand.of(pointer, shape, strides, layout, itemsize)


def address(native: Any) -> int:
    return framework_of("array", native).extent(native).pointer


def common_framework(q: Any, k: Any, v: Any) -> tuple[Framework, Device]:
    """The one framework and the one device of q, k and v."""
    arrays = (("q", q), ("k", k), ("v", v))
    owners = [framework_of(name, x) for name, x in arrays]
    framework = owners[0]
    if any(owner is not framework for owner in owners):
        came = ", ".join(f"{name} {owner.name}" for (name, _), owner in zip(arrays, owners, strict=True))
        raise TypeError(
            f"s2o_attention: q, k and v come from different frameworks: {came}; accepted: one framework "
            "for all three (convert with its from_dlpack, without a copy)"
        )
    for name, x in arrays:
        framework.check(name, x)
    devices = [framework.device(x) for _, x in arrays]
    if not devices[0] == devices[1] == devices[2]:
        came = ", ".join(f"{name} on {device}" for (name, _), device in zip(arrays, devices, strict=True))
        raise ValueError(
            f"s2o_attention: q, k and v are on different devices: {came}; accepted: one device for all three "
            "(move them with .to, jax.device_put or cupy.asarray)"
        )
    return framework, devices[0]


def check_out(
    out: Any, framework: Framework, inputs: dict[str, Any], shape: tuple[int, ...], dtype: str, device: Device
) -> None:
    """Raise unless ``out`` can be written in place as the output."""
    owner = framework_of("out", out)
    if owner is not framework:
        raise TypeError(
            f"s2o_attention: out is a {owner.name} array, q is {framework.name}; accepted: {framework.name}"
        )
    if not framework.mutable:
        raise TypeError(f"s2o_attention: out is a {framework.name} array, which is immutable; accepted: None")
    framework.check("out", out)
    if framework.shape(out) != shape:
        raise ValueError(f"s2o_attention: out has shape {framework.shape(out)}; accepted: {shape}, the shape of q")
    if framework.dtype(out) != dtype:
        raise TypeError(f"s2o_attention: out is {framework.dtype(out)}; accepted: {dtype}, the dtype of q")
    if framework.device(out) != device:
        raise ValueError(f"s2o_attention: out is on {framework.device(out)}; accepted: {device} as q")
    if not framework.writeable(out):
        raise ValueError("s2o_attention: out is read-only; accepted: a writeable array")
    problem = _place_problem(framework.extent(out), tuple((name, framework.extent(x)) for name, x in inputs.items()))
    if problem:
        raise ValueError(f"s2o_attention: out{problem}")


@functools.lru_cache(maxsize=1024)
def _place_problem(extent: Extent, inputs: tuple[tuple[str, Extent], ...]) -> str | None:
    """Why nothing can be written there, or None."""
    if 0 in extent.shape:
        return None  # no element, no place in memory
    if extent.shape[-1] > 1 and extent.strides[-1] != extent.itemsize:
        return (
            f" has a stride of {extent.strides[-1]} bytes on its last axis; "
            f"accepted: a contiguous last axis ({extent.itemsize} bytes)"
        )
    if extent.overlaps_itself():
        return (
            f"'s strides {extent.strides} (bytes) put several elements in one place; "
            "accepted: an array whose elements are distinct in memory"
        )
    for name, x in inputs:
        if extent.overlaps(x):
            return (
                f" and {name} overlap in memory (their first to last bytes); "
                "accepted: an out that lies apart from q, k and v"
            )
    return None


def to_host(x: Any) -> np.ndarray:
    """A NumPy array of any framework's array; synchronises if it is on a GPU."""
    return framework_of("array", x).native(x, host=True)
