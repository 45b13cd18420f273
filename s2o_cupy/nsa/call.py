"""A call of one of NSA's functions: the problem that its arrays pose, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..api.call import Call
from ..arrays.array_info import ArrayInfo
from ..arrays.frameworks import framework_of
from ..arrays.frameworks.base import Output
from ..arrays.narrowed import as_int32
from ..arrays.operand import ALIGNMENT, Operand, address, axes
from ..errors import ArgumentTypeError, ArgumentValueError
from ..problem import PLAIN, Problem, cached_validate, check_flag
from ..spec import checked_int

__all__ = ["NsaCall", "axis_of_tokens", "is_readable"]

CONTIGUOUS = ("blocks", "lse")  # in C order


class NsaCall:
    """Arrays of NSA, with the problem that they pose, and the results that are wanted.

    ``call``: its arrays by name. ``keys``: which of them are the keys; others than ``k`` stand for ``seqlen_k`` keys.
    """

    def __init__(
        self, where: str, call: Call, layout: Any, scale: Any, *, keys: str = "k", seqlen_k: int | None = None
    ) -> None:
        self.where, self.call, self.layout = where, call, layout
        self.axis = axis_of_tokens(where, layout)
        self.infos: dict[str, ArrayInfo] = dict(zip(call.inputs, call.infos, strict=True))
        for name in ("q", keys):
            if len(self.infos[name].shape) != 4:
                raise ArgumentValueError(
                    f"{name} has shape {tuple(self.infos[name].shape)}; accepted: 4 axes ({layout})",
                    where,
                )
        q, k = self.infos["q"], self.infos[keys]
        of_k = list(k.shape)
        if keys != "k":  # as if it were the keys
            length = q.shape[self.axis] if seqlen_k is None else seqlen_k
            of_k[self.axis] = checked_int("seqlen_k", length, 0, owner=where)
        v = self.infos.get("v", k)
        shapes = (tuple(q.shape), tuple(of_k), tuple(of_k) if v is k else tuple(v.shape))
        self.problem: Problem = cached_validate(
            shapes, (q.dtype, k.dtype, v.dtype), PLAIN, call.backend, layout, True, scale, 0.0
        )

    def bhsd_shape(self, name: str) -> tuple[int, ...]:
        a, b, c, d = self.infos[name].shape
        return (a, b, c, d) if self.layout == "BHSD" else (a, c, b, d)

    def bhsd(self, name: str, native: Any) -> Any:
        return native if self.layout == "BHSD" else native.swapaxes(1, 2)

    def expect(self, name: str, shape: tuple[int, ...], what: str) -> None:
        """Raise unless an array has this shape, as BHSD, and q's dtype."""
        found, dtype = self.infos[name], self.infos["q"].dtype
        if len(found.shape) != 4 or self.bhsd_shape(name) != shape:
            accepted = shape if self.layout == "BHSD" else (shape[0], shape[2], shape[1], shape[3])
            raise ArgumentValueError(f"{name} has shape {tuple(found.shape)}; accepted: {accepted}, {what}", self.where)
        if found.dtype != dtype:
            raise ArgumentTypeError(f"{name} is {found.dtype}; accepted: {dtype}, the dtype of q", self.where)

    def check_blocks(self) -> None:
        """Raise unless ``blocks`` are what a token attends to."""
        found, p = self.infos["blocks"], self.problem
        if found.dtype not in ("int32", "int64"):
            raise ArgumentTypeError(f"blocks is {found.dtype}; accepted: int32 or int64", self.where)
        rows = (p.batch, p.kv_heads, p.seqlen_q)
        if len(found.shape) != 4 or found.shape[:3] != rows or found.shape[3] == 0:
            raise ArgumentValueError(
                f"blocks has shape {tuple(found.shape)}; accepted: {rows} (batch, kv_heads, seqlen_q) "
                "and the blocks of a token",
                self.where,
            )

    def run(
        self, on_host: Callable[[dict[str, Any]], tuple[Any, ...]], on_gpu: Callable[..., None], *,
        return_lse: bool = False, results: tuple[tuple[str, tuple[int, ...]], ...] | None = None, fill: float = 0,
    ) -> Any:  # fmt: skip
        """``results``: dtypes and shapes; by default an output like q, and an lse. Without a query or a key they are
        ``fill``, or -inf of an lse."""
        p, call, return_lse = self.problem, self.call, check_flag("return_lse", return_lse)
        call.check_out(p.dtype)
        with call.scope():
            if results is not None:
                made = [call.result(shape, dtype) for dtype, shape in results]
            else:
                made = [call.output(p.dtype)]
                if return_lse:
                    made.append(call.result((p.batch, p.heads, p.seqlen_q), "float32"))
            natives = [x.native for x in made]
            if p.empty or p.seqlen_k == 0:
                for i, native in enumerate(natives):
                    if 0 not in native.shape:
                        call.framework.fill(native, float("-inf") if i and results is None else fill)
            elif call.host:
                found = on_host(dict(zip(call.inputs, call.on_host(), strict=True)))
                for i, native in enumerate(natives):
                    native[...] = self.bhsd("q", found[0]) if i == 0 and results is None else found[i]
            else:
                self._on_gpu(on_gpu, made, results is None)
            finished = [x.finish() for x in made]
        return finished[0] if len(finished) == 1 else tuple(finished)

    def _on_gpu(self, on_gpu: Callable[..., None], made: list[Output], has_output: bool) -> None:
        call = self.call
        stream, memory = call.launching()
        infos = dict(zip(call.inputs, call.exchanged(), strict=True))
        for name, info in infos.items():
            if not is_readable(name, info):
                infos[name] = call.copied(info, as_int32 if name == "blocks" else None)
        operands = {
            name: Operand(x.pointer, (0, 0, 0, 0), (0, 0, 0))
            if name in ("gates", *CONTIGUOUS)
            else Operand(x.pointer, *axes(x.shape, x.strides, self.layout, x.itemsize))
            for name, x in infos.items()
        }
        where: list[Any] = [address(x.native) for x in made]
        if has_output:
            out = call.of_out or framework_of("array", made[0].native).describe(made[0].native)
            if not is_readable("out", out):
                raise ArgumentValueError(
                    f"out has strides {out.strides} (bytes), or does not begin on {ALIGNMENT} bytes; "
                    f"accepted on the GPU: rows that begin on {ALIGNMENT} bytes",
                    self.where,
                )
            where[0] = Operand(out.pointer, *axes(out.shape, out.strides, self.layout, out.itemsize))
            where += [0] * (2 - len(where))
        on_gpu(operands, tuple(where), stream, memory)


def is_readable(name: str, x: ArrayInfo) -> bool:
    """Whether kernels read an array as it lies; others are copied. Blocks are int32 and an lse is float32, both in C
    order, gates have a contiguous last axis, rows of the others begin on 16 bytes."""
    if 0 in x.shape:
        return True
    if name in CONTIGUOUS:
        expected = x.itemsize
        for n, stride in zip(x.shape[::-1], x.strides[::-1], strict=True):
            if n > 1 and stride != expected:
                return False
            expected *= n
        return x.dtype == ("int32" if name == "blocks" else "float32")
    if name == "gates":
        return x.has_contiguous_rows
    rows = all(n == 1 or (s >= 0 and s % ALIGNMENT == 0) for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True))
    return x.has_contiguous_rows and rows and x.pointer % ALIGNMENT == 0


def axis_of_tokens(where: str, layout: Any) -> int:
    """Of tokens."""
    if layout not in ("BHSD", "BSHD"):
        raise ArgumentValueError(f"layout is {layout!r}; accepted: 'BHSD' or 'BSHD'", where)
    return 2 if layout == "BHSD" else 1
