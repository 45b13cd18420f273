"""A call of one of NSA's functions: its arrays, the problem that they pose, where it runs and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..arrays.arguments import check_out, describe
from ..arrays.array_info import ArrayInfo
from ..arrays.frameworks import framework_of
from ..arrays.frameworks.base import Framework, Output
from ..arrays.operand import ALIGNMENT, Operand, address, axes
from ..problem import Problem, cached_validate
from ..spec import S2OConfig, checked_int
from .on_gpu import load_pipeline
from .run import parse_backend

__all__ = ["NsaCall", "axis_of_tokens"]

PLAIN = S2OConfig()
CONTIGUOUS = ("blocks", "lse")  # in C order


class _Result(NamedTuple):
    output: Output
    operand: Any  # where a GPU writes it: an Operand of the output, an address of others


class NsaCall:
    """What the doors have in common: arrays of one framework on one device, and the results that are wanted."""

    def __init__(
        self, where: str, inputs: dict[str, Any], layout: Any, scale: Any, backend: Any, stream: Any, *,
        keys: str = "k", seqlen_k: int | None = None,
    ) -> None:  # fmt: skip
        self.where, self.inputs, self.layout, self.stream = where, inputs, layout, stream
        self.axis = axis_of_tokens(where, layout)
        self.framework: Framework
        self.framework, found = describe(**inputs)
        self.infos: dict[str, ArrayInfo] = dict(zip(inputs, found, strict=True))
        self.backend = parse_backend(backend, found[0].device, stream)
        for name in ("q", keys):
            if len(self.infos[name].shape) != 4:
                raise ValueError(
                    f"{where}: {name} has shape {tuple(self.infos[name].shape)}; accepted: 4 axes ({layout})"
                )
        q, k = self.infos["q"], self.infos[keys]
        of_k = list(k.shape)
        if keys != "k":  # as if it were the keys
            length = q.shape[self.axis] if seqlen_k is None else seqlen_k
            of_k[self.axis] = checked_int("seqlen_k", length, 0, owner=where)
        v = self.infos.get("v", k)
        shapes = (tuple(q.shape), tuple(of_k), tuple(of_k) if v is k else tuple(v.shape))
        self.problem: Problem = cached_validate(
            shapes, (q.dtype, k.dtype, v.dtype), PLAIN, self.backend, layout, True, scale, 0.0
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
            raise ValueError(f"{self.where}: {name} has shape {tuple(found.shape)}; accepted: {accepted}, {what}")
        if found.dtype != dtype:
            raise TypeError(f"{self.where}: {name} is {found.dtype}; accepted: {dtype}, the dtype of q")

    def check_blocks(self) -> None:
        """Raise unless ``blocks`` are what a token attends to."""
        found, p = self.infos["blocks"], self.problem
        if found.dtype not in ("int32", "int64"):
            raise TypeError(f"{self.where}: blocks is {found.dtype}; accepted: int32 or int64")
        rows = (p.batch, p.kv_heads, p.seqlen_q)
        if len(found.shape) != 4 or found.shape[:3] != rows or found.shape[3] == 0:
            raise ValueError(
                f"{self.where}: blocks has shape {tuple(found.shape)}; accepted: {rows} (batch, kv_heads, seqlen_q) "
                "and the blocks of a token"
            )

    def run(
        self, on_host: Callable[[dict[str, Any]], tuple[Any, ...]], on_gpu: Callable[..., None], *, out: Any = None,
        return_lse: bool = False, results: tuple[tuple[str, tuple[int, ...]], ...] | None = None, fill: float = 0,
    ) -> Any:  # fmt: skip
        """``results``: dtypes and shapes; by default an output like q, and an lse. Without a query or a key they are
        ``fill``, or -inf of an lse."""
        p, framework, host = self.problem, self.framework, self.backend == "numpy"
        q, of_q = self.inputs["q"], self.infos["q"]
        arrays = (*self.inputs.values(),)
        out_info = None
        if out is not None:
            out_info = check_out(out, framework, self.infos, p.dtype)
            arrays = (*arrays, out)
        with framework.scope(of_q.device, self.stream, arrays, host=host):
            made: list[_Result] = []
            if results is not None:
                made = [_Result(x := framework.output(shape, dtype, q, host=host), x) for dtype, shape in results]
            else:
                if out_info is None:
                    o = framework.output(tuple(of_q.shape), p.dtype, q, host=host)
                else:
                    o = framework.output_into(out, out_info, host=host)
                made.append(_Result(o, None))
                if return_lse:
                    x = framework.output((p.batch, p.heads, p.seqlen_q), "float32", q, host=host)
                    made.append(_Result(x, x))
            natives = [x.output.native for x in made]
            if p.empty or p.seqlen_k == 0:
                for i, native in enumerate(natives):
                    if 0 not in native.shape:
                        framework.fill(native, float("-inf") if i and results is None else fill)
            elif host:
                found = on_host({name: framework.on_host(x) for name, x in self.inputs.items()})
                for i, native in enumerate(natives):
                    native[...] = self.bhsd("q", found[0]) if i == 0 and results is None else found[i]
            else:
                self._on_gpu(on_gpu, natives, out_info, results is None)
            finished = [x.output.finish() for x in made]
        return finished[0] if len(finished) == 1 else tuple(finished)

    def _on_gpu(
        self, on_gpu: Callable[..., None], natives: list[Any], out_info: ArrayInfo | None, has_output: bool
    ) -> None:
        pipeline = load_pipeline()
        framework, infos = self.framework, dict(self.infos)
        if framework.imports and self.stream is not None:  # the exchange orders the producer's stream and this one
            infos = {name: framework.describe(x) for name, x in self.inputs.items()}
        kept: list[Any] = []
        for name, info in infos.items():
            if not _is_readable(name, info):
                with framework.graphs_own(info.native):
                    native = framework.contiguous(_int32(info.native) if name == "blocks" else info.native)
                kept.append(native)
                infos[name] = framework_of("array", native).describe(native)
        operands = {
            name: Operand(x.pointer, (0, 0, 0, 0), (0, 0, 0))
            if name in ("gates", *CONTIGUOUS)
            else Operand(x.pointer, *axes(x.shape, x.strides, self.layout, x.itemsize))
            for name, x in infos.items()
        }
        where: list[Any] = [address(x) for x in natives]
        if has_output:
            out = out_info or framework_of("array", natives[0]).describe(natives[0])
            if not _is_readable("out", out):
                raise ValueError(
                    f"{self.where}: out has strides {out.strides} (bytes), or does not begin on {ALIGNMENT} bytes; "
                    f"accepted on the GPU: rows that begin on {ALIGNMENT} bytes"
                )
            where[0] = Operand(out.pointer, *axes(out.shape, out.strides, self.layout, out.itemsize))
            where += [0] * (2 - len(where))
        memory = framework.memory(next(iter(infos.values())).native) or pipeline.allocate
        on_gpu(operands, tuple(where), framework.stream(), memory)


def _is_readable(name: str, x: ArrayInfo) -> bool:
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


def _int32(x: Any) -> Any:
    from array_api_compat import array_namespace

    xp = array_namespace(x)
    return xp.astype(x, xp.int32, copy=False)


def axis_of_tokens(where: str, layout: Any) -> int:
    """Of tokens."""
    if layout not in ("BHSD", "BSHD"):
        raise ValueError(f"{where}: layout is {layout!r}; accepted: 'BHSD' or 'BSHD'")
    return 2 if layout == "BHSD" else 1
