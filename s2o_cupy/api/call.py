"""What every public function does around its work: arrays are described, outputs are made, and the work runs in the
scope of the call's device and stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..arrays.arguments import check_out, describe
from ..arrays.array_info import ArrayInfo, Device
from ..arrays.frameworks import framework_of
from ..arrays.frameworks.base import Framework, Output
from ..errors import ArgumentValueError
from ..spec import is_one_of
from .on_gpu import load_pipeline

__all__ = ["Call", "parse_backend"]

BACKENDS = ("auto", "cupy", "numpy")


def parse_backend(backend: Any, device: Device, stream: Any) -> str:
    """ "cupy" or "numpy"."""
    if not is_one_of(backend, BACKENDS):
        raise ArgumentValueError(f"backend is {backend!r}; accepted: {', '.join(map(repr, BACKENDS))}")
    if device.kind not in ("cpu", "cuda"):
        raise ArgumentValueError(f"q, k and v are on {device}; accepted: the CPU or an NVIDIA GPU (move them there)")
    if backend == "cupy" and device.kind == "cpu":
        raise ArgumentValueError(
            'backend is "cupy", but q, k and v are on the CPU; '
            'move them to a GPU (cupy.asarray, .to("cuda"), jax.device_put), or pass backend="auto"'
        )
    if stream is not None and device.kind == "cpu":
        raise ArgumentValueError("stream is given, but q, k and v are on the CPU; accepted: None")
    if backend == "auto":
        return "cupy" if device.kind == "cuda" else "numpy"
    return backend


class Call:
    """The arrays of one call, and where it runs.

    Parameters
    ----------
    inputs : dict
        The caller's arrays by name, q first. All are of one framework and on one device.
    backend, stream, out : as in `s2o_attention`
    """

    def __init__(self, inputs: dict[str, Any], backend: Any, stream: Any, out: Any = None) -> None:
        self.inputs, self.stream, self.out = inputs, stream, out
        self.framework: Framework
        self.infos: tuple[ArrayInfo, ...]  # of the inputs
        self.framework, self.infos = describe(inputs)
        self.backend = parse_backend(backend, self.infos[0].device, stream)
        self.host = self.backend == "numpy"
        self.of_out: ArrayInfo | None = None  # of ``out``, once it is checked

    @property
    def q(self) -> Any:
        return next(iter(self.inputs.values()))

    def check_out(self, dtype: str) -> None:
        """Raise unless the output can be written to ``out``, if there is one."""
        if self.out is not None:
            self.of_out = check_out(self.out, self.framework, dict(zip(self.inputs, self.infos, strict=True)), dtype)

    def scope(self) -> AbstractContextManager[Any]:
        """The device and the stream to run on."""
        arrays = (*self.inputs.values(),) if self.out is None else (*self.inputs.values(), self.out)
        return self.framework.scope(self.infos[0].device, self.stream, arrays, host=self.host)

    def result(self, shape: tuple[int, ...], dtype: str) -> Output:
        """A new array for the caller, uninitialised."""
        return self.framework.output(shape, dtype, self.q, host=self.host)

    def output(self, dtype: str) -> Output:
        """One like q, or ``out``, which `check_out` has seen."""
        if self.of_out is None:
            return self.framework.output_like(self.infos[0].shape, dtype, self.q, host=self.host)
        self.framework.writes(self.out)
        return self.framework.output_into(self.out, self.of_out, host=self.host)

    def where_output_is(self, output: Output) -> ArrayInfo | Any:
        """What is known of ``out``, else the array that `output` has made."""
        return output.native if self.of_out is None else self.of_out

    def on_host(self) -> list[Any]:
        """The inputs as NumPy arrays."""
        return [self.framework.on_host(x) for x in self.inputs.values()]

    def exchanged(self) -> tuple[ArrayInfo, ...]:
        """The inputs as the current stream may read them, and ``out`` as it may write it."""
        if self.framework.imports and self.stream is not None:  # describing orders the producer's stream and this one
            if self.out is not None:
                self.framework.describe(self.out)
            return tuple([self.framework.describe(x) for x in self.inputs.values()])
        return self.infos

    def copied(self, info: ArrayInfo, convert: Callable[[Any], Any] | None = None) -> ArrayInfo:
        """A contiguous copy of an array that kernels cannot read as it lies."""
        with self.framework.graphs_own(info.native):
            native = self.framework.contiguous(info.native if convert is None else convert(info.native))
        return framework_of("array", native).describe(native)

    def launching(self) -> tuple[int, Callable[[int], tuple[int, Any]]]:
        """The handle of the current stream, and where a workspace comes from (`pipeline.Memory`)."""
        pipeline = load_pipeline()
        return self.framework.stream(), self.framework.memory(self.infos[0].native) or pipeline.allocate
