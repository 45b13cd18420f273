"""What a call asks of every framework."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..array_info import ArrayInfo, Device
from ..lazy_cupy import import_cupy

__all__ = ["Framework", "Output", "dtype_name", "is_instance", "numpy_dtype"]


class Output(NamedTuple):
    """A native array for the backend to write, and how it becomes the caller's array."""

    native: Any
    finish: Callable[[], Any]


class Framework:
    """Defaults for frameworks whose arrays can be written in place."""

    name = ""
    mutable = True
    imports = False  # describe() is an exchange that orders the producer's stream and the current one

    def owns(self, x: Any) -> bool:
        raise NotImplementedError

    def check(self, name: str, x: Any) -> None:
        """Raise if ``x`` is of this framework but cannot be computed on."""

    def describe(self, x: Any) -> ArrayInfo:
        """All that a call needs to know of ``x``, at once."""
        raise NotImplementedError

    def look(self, arrays: Iterable[Any]) -> tuple[Any, ...] | None:
        """All that `check` and `describe` look at in each, but for the address: an array that looks as one that was
        accepted is accepted. None: there is more to one than a glance tells, or it is of another framework."""
        return None

    def stream_on(self, ordinal: int) -> int | None:
        """The handle of the stream to launch on where ``ordinal`` is the current device of all that a call uses: then
        `scope` without a stream has nothing to do. None: it is not."""
        return None

    def pointers(self, natives: Iterable[Any]) -> tuple[int, ...]:
        """Where what ``ArrayInfo.native`` is begins, of each, if no more is asked."""
        return tuple([self.describe(x).pointer for x in natives])

    def dtype(self, x: Any) -> str:
        return dtype_name(x.dtype)

    def writeable(self, native: Any) -> bool:
        """Whether what ``ArrayInfo.native`` is may be written."""
        return True

    def scope(self, device: Device, stream: Any, arrays: Sequence[Any], *, host: bool) -> AbstractContextManager[Any]:
        """Device and stream to run on; ``host``: the NumPy backend will do the work."""
        return nullcontext()

    def on_host(self, x: Any) -> np.ndarray:
        """``x`` as a numpy.ndarray, a copy only if it is on a GPU."""
        raise NotImplementedError

    def export(self, native: Any, like: Any) -> Any:
        """A native array as the caller's array on the device of ``like``."""
        raise NotImplementedError

    def contiguous(self, native: Any) -> Any:
        """A copy of what ``ArrayInfo.native`` is, whose rows are contiguous."""
        return native.copy()

    def stream(self) -> int:
        """The handle of the stream to launch on, inside `scope`."""
        return import_cupy().cuda.get_current_stream().ptr

    def is_capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph."""
        return import_cupy().cuda.get_current_stream().is_capturing()

    def memory(self, like: Any) -> Callable[[int], tuple[int, Any]] | None:
        """Where a call's workspace comes from, as pipeline.Memory; None: CuPy's pool."""
        return None

    def graphs_own(self, like: Any, *, host: bool = False) -> AbstractContextManager[Any]:
        """Inside it CuPy's arrays are the graph's own memory while a graph is captured: for what is forgotten after the
        call. From the pool it would go to others then, and the graph's launches would overwrite them. ``like``: one of
        the call's arrays."""
        if host or self.memory(like) is not None or not self.is_capturing():
            return nullcontext()
        cupy = import_cupy()
        return cupy.cuda.using_allocator(cupy.cuda.malloc_async)

    def put(self, target: Any, places: Any, values: Any) -> Any:
        """``target`` with ``values`` at ``places``, all in one row; it may be written."""
        target[places] = values
        return target

    def wide_integers(self) -> AbstractContextManager[Any]:
        """Inside it arrays of int64 can be made."""
        return nullcontext()

    def fill(self, native: Any, value: float) -> None:
        native.fill(value)

    def store(self, native: np.ndarray, out: Any) -> None:
        """Copy a host array into the caller's GPU array."""
        raise NotImplementedError

    def output(self, shape: tuple[int, ...], dtype: str, like: Any, *, host: bool) -> Output:
        """A new output in C order, uninitialised."""
        native = (np if host else import_cupy()).empty(shape, numpy_dtype(dtype))
        return Output(native, lambda: self.export(native, like))

    def output_like(self, shape: tuple[int, ...], dtype: str, like: Any, *, host: bool) -> Output:
        """One of the shape and dtype of the caller's array ``like``, which ``shape`` and ``dtype`` say."""
        return self.output(shape, dtype, like, host=host)

    def new_like(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """The native array of `output_like` on a GPU, of an array that `look` has found plain."""
        return self.output_like(shape, dtype, like, host=False).native

    def writes(self, out: Any) -> None:
        """The caller's ``out`` is about to be written, by its address: tell who keeps count."""

    def output_into(self, out: Any, info: ArrayInfo, *, host: bool) -> Output:
        """An output that is written to the caller's ``out``, of which ``info`` was found."""
        if not host:
            return Output(info.native, lambda: out)
        native = self.on_host(out)
        if info.device.kind == "cpu":
            return Output(native, lambda: out)

        def finish() -> Any:
            self.store(native, out)
            return out

        return Output(native, finish)


@functools.lru_cache
def dtype_name(dtype: np.dtype) -> str:
    return dtype.name  # which NumPy makes up anew each time


@functools.lru_cache
def numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":  # NumPy has none of its own; CuPy shares this one
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def is_instance(x: Any, module: str, type_name: str) -> bool:
    """isinstance against a type of a module that may not be imported (then x cannot be its)."""
    kind = getattr(sys.modules.get(module), type_name, None)
    return kind is not None and isinstance(x, kind)
