"""What the library asks of CuPy, on arrays in host memory; kernels are interpreted when they are launched."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import device as emulated
from .device import settings

__all__ = ["install"]

MAP_MARK = 0x53324F4D41505F5F


# --- arrays ---
class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, 0
        self.device = Device(0)


class Memory:
    def __init__(self, nbytes: int, pieces: list[tuple[int, int]] | None = None) -> None:
        self.array = emulated.allocate(nbytes, pieces)
        self.ptr, self.size, self.device_id = self.array.ctypes.data, nbytes, 0


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = 0) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class ndarray(np.ndarray):
    """In memory that kernels may touch once its address has been asked for."""

    def __new__(cls, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C") -> Any:
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(int(x) for x in shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if memptr is None:
            memptr = MemoryPointer(Memory(nbytes), 0)
        if nbytes == 0:
            return np.empty(shape, dtype).view(cls)
        buffer = (ctypes.c_uint8 * (memptr.mem.ptr + memptr.mem.size - memptr.ptr)).from_address(memptr.ptr)
        found = np.ndarray.__new__(cls, shape, dtype, buffer, 0, strides)
        found._keeps = memptr
        return found

    def __array_finalize__(self, other: Any) -> None:
        self._keeps = getattr(other, "_keeps", None)

    @property
    def data(self) -> Any:  # type: ignore[override]
        pointer = self.ctypes.data
        if self.size and not emulated.known(pointer):
            owner: Any = self
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            emulated.add_range(owner.ctypes.data, owner.nbytes)
            import weakref

            weakref.finalize(owner, emulated.drop_range, owner.ctypes.data)
        return types.SimpleNamespace(ptr=pointer, device_id=0, device=Device(0), mem=self)

    @property
    def device(self) -> Any:
        return Device(0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "strides": self.strides,
                "data": (self.data.ptr, False), "version": 3, "stream": 1}  # fmt: skip

    def astype(self, dtype: Any, *args: Any, copy: bool = True, **more: Any) -> Any:  # type: ignore[override]
        if not copy and self.dtype == dtype:
            return self
        found = empty(self.shape, dtype)
        found[...] = np.asarray(self).astype(dtype)
        return found

    def copy(self, order: Any = "C") -> Any:
        return asarray(np.array(self, subok=False))

    def get(self, *args: Any, **more: Any) -> np.ndarray:
        return np.array(self, subok=False)


ndarray.__module__ = "cupy"


def empty(shape: Any, dtype: Any = float, order: str = "C") -> Any:
    return ndarray(shape, dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> Any:
    found = empty(shape, np.asarray(value).dtype if dtype is None else dtype)
    found[...] = value
    return found


def asarray(x: Any, dtype: Any = None) -> Any:
    if isinstance(x, ndarray) and (dtype is None or x.dtype == dtype):
        return x
    x = np.asarray(x, dtype)
    found = empty(x.shape, x.dtype)
    found[...] = x
    return found


def ascontiguousarray(x: Any, dtype: Any = None) -> Any:
    fits = isinstance(x, ndarray) and x.flags.c_contiguous and dtype in (None, x.dtype)
    return x if fits else asarray(np.array(x), dtype)


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        found = function(*args, **more)
        if not isinstance(found, np.ndarray) or any(np.shares_memory(found, x) for x in args if isinstance(x, ndarray)):
            return found
        return asarray(np.asarray(found))

    return call


# --- cupy.cuda ---
class Device:
    def __init__(self, ordinal: int = 0) -> None:
        self.id = int(ordinal)

    @property
    def compute_capability(self) -> str:
        return str(settings.capability)

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": settings.multiprocessors}

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def use(self) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    ptr = 0
    null: Stream

    def __init__(self, *args: Any, **more: Any) -> None: ...

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        return cls()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Any) -> None: ...

    def record(self, event: Any = None) -> Any:
        return event or Event()

    def use(self) -> Stream:
        return self


Stream.null = Stream()


class Event:
    ptr = 0

    def __init__(self, *args: Any, **more: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


def alloc(nbytes: int) -> MemoryPointer:
    """What a workspace is asked of: by a call's own run, or for several calls that take turns in the largest one's,
    whose gaps may then be the others' arrays."""
    is_one_calls = sys._getframe(2).f_code.co_name == "run"
    return MemoryPointer(Memory(nbytes, _workspaces.get(nbytes) if is_one_calls else None), 0)


# A workspace's arrays are apart by a gap that nobody may touch. Its number of bytes, which no other one has, tells the
# allocation which it is for.
GAP = 4096
_workspaces: dict[int, list[tuple[int, int]]] = {}  # bytes: its arrays' offsets and sizes


def lay_out_apart(build: Any, zeroed: Any, others: Any) -> Any:
    """As plan.build.lay_out; those that start from 0 are one array, as they are cleared together, and those that have
    memory in turns have their own."""

    def arrays_of(some: Any) -> list[Any]:
        return [y for x in some for y in (arrays_of((*x.first, *x.then)) if isinstance(x, build.InTurns) else [x])]

    zeroed, others = list(zeroed), arrays_of(others)
    places, end = {}, 0
    for apart, arrays in ((0, zeroed), (GAP, others)):
        for name, shape, dtype in arrays:
            places[name] = build.Place(end, shape, dtype)
            end += -(-places[name].nbytes // build.ALIGNMENT) * build.ALIGNMENT + apart
        if not apart:
            cleared = end
            end += GAP if zeroed else 0
    pieces = [(0, cleared)] if cleared else []
    pieces += [(places[name].offset, places[name].nbytes) for name, _, _ in others if places[name].nbytes]
    if end:
        while end in _workspaces and _workspaces[end] != pieces:
            end += build.ALIGNMENT
        _workspaces[end] = pieces
    return build.Workspace(places, cleared, end)


class MemoryPool:
    def malloc(self, nbytes: int) -> MemoryPointer:
        return alloc(nbytes)

    def free_all_blocks(self) -> None: ...

    def used_bytes(self) -> int:
        return 0


@contextlib.contextmanager
def using_allocator(allocator: Any = None) -> Iterator[None]:
    yield


class Function:
    def __init__(self, handle: int) -> None:
        self.ptr = handle


class Module:
    def load(self, code: bytes) -> None:
        self.handle = emulated.load(code.rstrip(b"\0").decode())

    def get_function(self, name: str) -> Function:
        return Function(self.handle)


def launch_kernel(
    function: int, x: int, y: int, z: int, threads: int, ty: int, tz: int, shared: int, stream: int, arguments: int,
    extra: int,
) -> None:  # fmt: skip
    if (y, z, ty, tz) != (1, 1, 1, 1):
        raise emulated.EmulatorError("a grid of more than one dimension")
    emulated.launch(function, x, threads, shared, arguments)


def memset(pointer: int, value: int, nbytes: int, stream: int = 0) -> None:
    ctypes.memset(pointer, value, nbytes)


def memcpy_2d(to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int) -> None:
    for row in range(height):
        ctypes.memmove(to + row * to_pitch, source + row * pitch, width)


LIMITS = {80: (163 << 10, 164 << 10), 90: (227 << 10, 228 << 10)}


def attribute(which: str, device: int = 0) -> int:
    a_block, a_multiprocessor = LIMITS[settings.capability]
    return {"block": a_block, "multiprocessor": a_multiprocessor, "count": settings.multiprocessors}[which]


def encode_tensor_map(
    to: Any, dtype: int, rank: int, pointer: Any, sizes: Any, strides: Any, box: Any, ones: Any, interleave: int,
    swizzle: int, promotion: int, fill: int,
) -> int:  # fmt: skip
    """As machine.h's TensorMap, where cuTensorMapEncodeTiled would write its own form. Refuses what that refuses."""
    steps, boxes = list(strides), list(box)
    ok = pointer.value % 16 == 0 and all(s % 16 == 0 and s < 1 << 40 for s in steps)
    ok = ok and all(0 < b <= 256 for b in boxes) and (boxes[0] * 2 <= 128 or swizzle != 3)
    if not ok or any(not 0 < n <= 1 << 32 for n in sizes):
        return 1
    record = np.zeros(1, [("mark", "u8"), ("pointer", "u8"), ("axes", "u4"), ("swizzle", "u4"), ("strides", "u8", 4),
                          ("sizes", "u4", 5), ("box", "u2", 5)])  # fmt: skip
    record["mark"], record["pointer"], record["axes"], record["swizzle"] = MAP_MARK, pointer.value, rank, swizzle
    record["strides"][0, : rank - 1], record["sizes"][0, :rank], record["box"][0, :rank] = steps, list(sizes), boxes
    ctypes.memset(to, 0, 128)
    ctypes.memmove(to, record.tobytes(), record.nbytes)
    return 0


def _runtime() -> types.ModuleType:
    module: Any = types.ModuleType("cupy.cuda.runtime")
    module.getDevice = lambda: 0
    module.getDeviceCount = lambda: 1
    module.setDevice = lambda ordinal: None
    module.driverGetVersion = lambda: 12090
    module.runtimeGetVersion = lambda: 12090
    module.cudaDevAttrMaxSharedMemoryPerBlockOptin = "block"
    module.cudaDevAttrMaxSharedMemoryPerMultiprocessor = "multiprocessor"
    module.cudaDevAttrMultiProcessorCount = "count"
    module.deviceGetAttribute = attribute
    module.memcpyDeviceToDevice, module.streamCaptureModeRelaxed = 3, 2
    module.memsetAsync = memset
    module.memcpy2DAsync = memcpy_2d
    module.memcpyAsync = lambda to, source, nbytes, kind, stream: ctypes.memmove(to, source, nbytes)
    module.streamIsCapturing = lambda stream: True  # so that nothing becomes a graph
    module.streamGetPriority = lambda stream: 0
    module.streamSynchronize = module.deviceSynchronize = lambda *args: None
    module.memGetInfo = lambda: (1 << 33, 1 << 34)
    module.getDeviceProperties = lambda ordinal: {"name": b"emulated", "multiProcessorCount": settings.multiprocessors}
    module.CUDARuntimeError = emulated.EmulatorError
    return module


def _driver() -> types.ModuleType:
    module: Any = types.ModuleType("cupy.cuda.driver")
    module.launchKernel = launch_kernel
    module.ctxGetCurrent = lambda: 1
    module.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    module.funcSetAttribute = lambda *args: None
    return module


def build(nvrtc: Any) -> types.ModuleType:
    """The module; ``nvrtc``: the real cupy.cuda.nvrtc."""
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.__path__ = []
    function: Any = types.ModuleType("cupy.cuda.function")
    function.Module = Module
    cuda.__dict__.update(
        nvrtc=nvrtc, runtime=_runtime(), driver=_driver(), function=function, Device=Device, Stream=Stream, Event=Event,
        alloc=alloc, malloc_async=alloc, using_allocator=using_allocator, MemoryPool=MemoryPool, Memory=Memory,
        UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer, get_current_stream=Stream, ExternalStream=Stream,
        get_elapsed_time=lambda begin, end: 0.0,
        memory=types.SimpleNamespace(OutOfMemoryError=MemoryError),
    )  # fmt: skip
    cupy: Any = types.ModuleType("cupy")
    cupy.__path__ = []
    cupy.__version__ = "14.2.0"
    cupy.__dict__.update(
        cuda=cuda, ndarray=ndarray, empty=empty, full=full, asarray=asarray,
        array=lambda x, dtype=None: asarray(np.array(x), dtype),
        zeros=lambda shape, dtype=float: full(shape, 0, dtype), ones=lambda shape, dtype=float: full(shape, 1, dtype),
        empty_like=lambda x, dtype=None: empty(x.shape, dtype or x.dtype),
        zeros_like=lambda x, dtype=None: full(x.shape, 0, dtype or x.dtype),
        full_like=lambda x, value, dtype=None: full(x.shape, value, dtype or x.dtype),
        asnumpy=lambda x, *args, **more: np.array(x, subok=False), ascontiguousarray=ascontiguousarray,
        is_available=lambda: True, get_default_memory_pool=MemoryPool,
        lib=types.SimpleNamespace(stride_tricks=np.lib.stride_tricks),
    )  # fmt: skip

    def missing(name: str) -> Any:
        found = getattr(np, name)
        return _wrapped(found) if callable(found) and not isinstance(found, type) else found

    cupy.__getattr__ = missing
    return cupy


def install() -> None:
    """Put it in CuPy's place, before anything of the library that launches kernels is imported."""
    early = [name for name in sys.modules if name.startswith("s2o_cupy.cuda.") and name != "s2o_cupy.cuda.cubin_cache"]
    if early:
        raise RuntimeError(f"{early[0]} has been imported already")
    from cupy.cuda import nvrtc

    nvrtc.getVersion()  # loads the library by way of the real CuPy
    fake = build(nvrtc)
    for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupyx")]:
        del sys.modules[name]
    sys.modules["cupy"] = fake
    sys.modules["cupy.cuda"] = fake.cuda
    for name in ("nvrtc", "runtime", "driver", "function"):
        sys.modules[f"cupy.cuda.{name}"] = getattr(fake.cuda, name)

    from s2o_cupy.arrays.frameworks.numpy import NumpyFramework
    from s2o_cupy.cuda import compiler, tensor_maps
    from s2o_cupy.plan import build as build_module
    from s2o_cupy.plan import error_search, launches  # noqa: F401 - whose workspaces are laid out apart

    owns = NumpyFramework.owns
    NumpyFramework.owns = lambda self, x: owns(self, x) and not isinstance(x, ndarray)  # type: ignore[method-assign]

    lay_out = build_module.lay_out
    for module in [x for name, x in sys.modules.items() if name.startswith("s2o_cupy.")]:
        if settings.apart and getattr(module, "lay_out", None) is lay_out:
            module.lay_out = functools.partial(lay_out_apart, build_module)  # type: ignore[attr-defined]

    options = compiler._options

    def to_ptx(kernel: Any, arch: str) -> Sequence[str]:
        first, *others = options(kernel, arch)
        return (first.replace("=sm_", "=compute_"), *others, "-lineinfo")

    compiler._options = to_ptx  # type: ignore[assignment]
    tensor_maps._encode = lambda: encode_tensor_map  # type: ignore[assignment]
