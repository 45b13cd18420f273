"""Calls like one before: of arrays that differ from its arrays by nothing but their addresses.

Such a call has been checked, and what it launches is prepared. What is left to do takes the host half of the time:
that counts where kernels are short.
"""

from __future__ import annotations

from typing import Any

from ..arrays.array_info import ArrayInfo
from ..arrays.frameworks import framework_of
from ..arrays.frameworks.base import Framework
from ..arrays.operand import address, begins_aligned
from ..caches import remembered
from ..spec import S2OConfig
from . import on_gpu
from .batch import Batch, Form
from .call import Call

__all__ = ["KnownCall", "find_known_call"]

PLAIN = {type(None), bool, int, float, str, S2OConfig}  # of options: hashable, and never changed in place


class KnownCall:
    """All calls whose arrays look alike and whose options are the same. It is known once it has learned of one."""

    __slots__ = ("batch", "form_of_out", "framework", "ordinal", "prepared", "reaches")

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.framework: Framework
        self.ordinal: int  # of the device
        self.form_of_out: Form | None  # of the caller's ``out``
        self.reaches: list[tuple[int, int]]  # of q, k, v and ``out``: bytes from its address to its first and its end
        self.prepared: dict[bool, Any] = {}  # by whether all arrays begin aligned

    def learn(self, call: Call, batch: Batch) -> None:
        """``call`` is accepted. It is left unknown unless kernels attend to its arrays as they lie, by one tau or more
        that nobody has to find."""
        is_plain = batch.alone and not batch.is_copied and batch.config.error is None and len(batch.parts) == 1
        if is_plain and not call.host:
            self.framework, self.ordinal = call.framework, call.infos[0].device.ordinal
            self.form_of_out = None if call.of_out is None else call.of_out.form
            self.reaches = [_reach(x) for x in (*call.infos, call.of_out) if x is not None]
            self.batch = batch  # last, as other threads go by it

    def run(self, q: Any, k: Any, v: Any, out: Any, return_lse: bool) -> Any:
        """What `run.run` does; None: nothing is done, as only that can say why."""
        batch = self.batch
        if batch is None:
            return None
        framework = self.framework
        stream = framework.stream_on(self.ordinal)
        if stream is None:
            return None
        try:
            is_new = out is None
            if is_new:
                out = framework.new_like(batch.shape_q, batch.whole.dtype, q)
            arrays = framework.pointers((q, k, v, out))
        except RuntimeError:  # a tensor that stands for others has none
            return None
        if 0 in arrays:  # likewise
            return None
        if not is_new:
            if not self._is_apart(arrays):
                return None
            framework.writes(out)
        lse = framework.output(batch.lse_shape, "float32", q, host=False).native if return_lse else None
        aligned = begins_aligned(arrays, None)
        prepared = self.prepared.get(aligned) or self._prepare(batch, aligned)
        of_q, of_k, of_v, of_out = arrays
        of_lse = 0 if lse is None else address(lse)
        memory = lambda: framework.memory(q) or on_gpu.load_pipeline().allocate  # noqa: E731
        prepared.run_again((of_q, of_k, of_v, of_out), of_lse, stream, memory)
        return out if lse is None else (out, lse)

    def _prepare(self, batch: Batch, aligned: bool) -> Any:
        layout = on_gpu.layout_of(batch, self.form_of_out, aligned, None)
        prepared = self.prepared[aligned] = on_gpu.load_pipeline().prepared(batch.whole, batch.config, layout)
        return prepared

    def _is_apart(self, arrays: tuple[int, ...]) -> bool:
        """Whether ``out`` shares no byte with q, k and v; no array is empty."""
        *inputs, (begin, end) = [(at + low, at + high) for at, (low, high) in zip(arrays, self.reaches, strict=True)]
        return all(end <= low or high <= begin for low, high in inputs)


def _reach(x: ArrayInfo) -> tuple[int, int]:
    low, high = x.byte_range()
    return low - x.pointer, high - x.pointer


def find_known_call(q: Any, k: Any, v: Any, out: Any, *options: Any) -> KnownCall | None:
    """The one for calls of these arrays and options; None: of arrays of which a glance does not tell all, or options
    that are not plain values."""
    if not PLAIN.issuperset(map(type, options)):
        return None
    looks = framework_of("q", q).look((q, k, v) if out is None else (q, k, v, out))
    return None if looks is None else _known(looks, *options)


@remembered
def _known(looks: tuple[Any, ...], *options: Any) -> KnownCall:
    return KnownCall()
