"""NSA, natively trainable sparse attention: the whole, and its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..arrays.arguments import check_out, describe
from ..arrays.array_info import ArrayInfo
from ..arrays.frameworks import framework_of
from ..arrays.frameworks.base import Framework, Output
from ..arrays.operand import ALIGNMENT, Operand, address, axes
from ..arrays.torch_compile import outside_graphs
from ..nsa.config import NSAConfig
from ..nsa.plan import compressed_count
from ..problem import Problem, cached_validate
from ..spec import S2OConfig
from .on_gpu import load_pipeline
from .run import parse_backend

__all__ = ["nsa_attention", "nsa_compress", "nsa_select", "selected_attention", "window_attention"]

PLAIN = S2OConfig()


@outside_graphs
def nsa_attention(
    q: Any,
    k: Any,
    v: Any,
    k_cmp: Any,
    v_cmp: Any,
    gates: Any,
    *,
    config: NSAConfig | None = None,
    k_win: Any = None,
    v_win: Any = None,
    scale: float | None = None,
    layout: str = "BHSD",
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """Causal attention by NSA: ``gates[0] * compressed + gates[1] * selected + gates[2] * window``.

    The compressed branch attends to keys and values that stand for runs of tokens each, the selected one to the blocks
    of keys that weigh most in it, and the window to the latest keys. Forward only, for inference.

    Parameters
    ----------
    q, k, v : arrays, (batch, heads, seqlen_q, head_dim) and twice (batch, kv_heads, seqlen_k, head_dim)
        As `s2o_attention` takes them, with a batch axis. Query i stands at key i + seqlen_k - seqlen_q.
    k_cmp, v_cmp : arrays, (batch, kv_heads, compressed, head_dim)
        Compressed key number c stands for keys c * stride to c * stride + length - 1, and is seen from the last of
        these on; there are max(0, (seqlen_k - length) // stride + 1). `nsa_compress` takes their means; a model may
        have learnt a better way.
    gates : array, (batch, seqlen_q, 3) or (batch, heads, seqlen_q, 3); float32 or q's dtype
        Factors of the compressed, the selected and the window branch, in this order.
    config : NSAConfig, optional
    k_win, v_win : arrays like k, optional
        Keys and values of the window branch, where a model has its own. Default: k and v.
    scale : float, default 1 / sqrt(head_dim)
    layout : {"BHSD", "BSHD"}, default "BHSD"
        Order of the axes of all arrays, gates with four axes among them.
    out : array like q, optional
    stream, backend : as in `s2o_attention`

    Returns
    -------
    array like q
        A branch without any visible key adds nothing.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted; the message names it, what came and what is accepted.
    S2OError
        The machine cannot run the call.

    Notes
    -----
    Source: Native Sparse Attention (Yuan et al. 2025); the selected branch goes by blocks of keys, as in Flash Sparse
    Attention (FSA, ICLR 2026). On a GPU its branches are rounded to q's dtype before they are added up, head_dim is a
    multiple of 8 up to 128, and NSAConfig says what else is accepted there. Nothing waits for the GPU.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import nsa_attention, nsa_compress
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 4, 300, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 1, 2, 300, 64), dtype=np.float32)
    >>> gates = rng.random((1, 300, 3), dtype=np.float32)
    >>> nsa_attention(q, k, v, nsa_compress(k), nsa_compress(v), gates).shape
    (1, 4, 300, 64)
    """
    where, config = "nsa_attention", _config("nsa_attention", config)
    inputs = {"q": q, "k": k, "v": v, "k_cmp": k_cmp, "v_cmp": v_cmp, "gates": gates}
    if (k_win is None) != (v_win is None):
        missing = "k_win" if k_win is None else "v_win"
        raise TypeError(f"{where}: {missing} is missing; accepted: both of k_win and v_win, or neither")
    if k_win is not None:
        inputs |= {"k_win": k_win, "v_win": v_win}
    call = _Call(where, inputs, layout, scale, backend, stream)
    of, problem = call.infos, call.problem
    expected = (problem.batch, problem.kv_heads, _compressed(problem, config), problem.head_dim)
    for name in ("k_cmp", "v_cmp"):
        call.expect(name, expected, "(batch, kv_heads, compressed, head_dim) of the config's length and stride")
    if k_win is not None:
        call.expect("k_win", call.bhsd_shape("k"), "as k")
        call.expect("v_win", call.bhsd_shape("k"), "as k")
    gates_strides = _gates_strides(of["gates"], problem, layout, of["q"].dtype)

    def on_host(natives: dict[str, Any]) -> tuple[Any, ...]:
        from . import nsa_on_host

        x = {name: call.bhsd(name, native) for name, native in natives.items() if name != "gates"}
        g = natives["gates"]
        g = g[:, None] if g.ndim == 3 else g if layout == "BHSD" else g.swapaxes(1, 2)
        window = (x.get("k_win", x["k"]), x.get("v_win", x["v"]))
        return (nsa_on_host.attend(x["q"], x["k"], x["v"], x["k_cmp"], x["v_cmp"], *window, g, problem, config),)

    def on_gpu(x: dict[str, Operand], results: tuple[Any, ...], stream: int, memory: Any) -> None:
        nsa = _kernels()
        gates_at = nsa.Gates(x["gates"].pointer, gates_strides, of["gates"].dtype == "float32")
        keys = nsa.Pair(x["k"], x["v"])
        window = nsa.Pair(x["k_win"], x["v_win"]) if "k_win" in x else keys
        nsa.attend(
            x["q"], keys, nsa.Pair(x["k_cmp"], x["v_cmp"]), window, gates_at, results[0], problem, config,
            stream=stream, memory=memory,
        )  # fmt: skip

    return call.run(on_host, on_gpu, out=out)


@outside_graphs
def nsa_select(
    q: Any,
    k_cmp: Any,
    *,
    seqlen_k: int | None = None,
    config: NSAConfig | None = None,
    scale: float | None = None,
    layout: str = "BHSD",
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """The blocks of keys that each token attends to in NSA's selected branch.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim)
    k_cmp : array, (batch, kv_heads, compressed, head_dim), as in `nsa_attention`
    seqlen_k : int, optional
        Keys behind k_cmp; default seqlen_q.
    config, scale, layout, stream, backend : as in `nsa_attention`

    Returns
    -------
    int32 array, (batch, kv_heads, seqlen_q, top), for either layout
        Blocks in ascending order, -1 behind the last: the first ones, the token's own and those before it, and the ones
        of most weight. Heads of a group share them. Among equal weights the lower block wins, and NaN is the most.

    Raises
    ------
    As `nsa_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import nsa_compress, nsa_select
    >>> q = np.random.default_rng(0).standard_normal((1, 2, 200, 64), dtype=np.float32)
    >>> nsa_select(q, nsa_compress(q))[0, 0, 130, :4].tolist()
    [0, 1, 2, -1]
    """
    where, config = "nsa_select", _config("nsa_select", config)
    call = _Call(where, {"q": q, "k_cmp": k_cmp}, layout, scale, backend, stream, keys="k_cmp", seqlen_k=seqlen_k)
    problem = call.problem
    expected = (problem.batch, problem.kv_heads, _compressed(problem, config), problem.head_dim)
    call.expect("k_cmp", expected, f"(batch, kv_heads, compressed, head_dim) of seqlen_k {problem.seqlen_k}")

    def on_host(natives: dict[str, Any]) -> tuple[Any, ...]:
        from . import nsa_on_host

        q, k_cmp = (call.bhsd(name, x) for name, x in natives.items())
        return (nsa_on_host.select(q, k_cmp, problem, config),)

    def on_gpu(x: dict[str, Operand], results: tuple[Any, ...], stream: int, memory: Any) -> None:
        _kernels().select(x["q"], x["k_cmp"], results[0], problem, config, stream=stream, memory=memory)

    shape = (problem.batch, problem.kv_heads, problem.seqlen_q, config.top)
    return call.run(on_host, on_gpu, results=(("int32", shape),), fill=-1)


@outside_graphs
def selected_attention(
    q: Any,
    k: Any,
    v: Any,
    blocks: Any,
    block: int = 64,
    *,
    scale: float | None = None,
    layout: str = "BHSD",
    return_lse: bool = False,
    out: Any = None,
    workspace_bytes: int = NSAConfig.workspace_bytes,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """Causal attention of each token to blocks of keys of its own, which the heads of a group share.

    Parameters
    ----------
    q, k, v, scale, layout, out, stream, backend : as in `nsa_attention`
    blocks : int32 or int64 array, (batch, kv_heads, seqlen_q, any), for either layout
        Block c holds keys c * block to (c + 1) * block - 1, of which a token sees those up to its own. Entries of a row
        are distinct, in any order; one below 0 is none. On the CPU they are checked to exist.
    block : int, default 64
        The GPU takes 64 and 128, and up to 32 blocks a token.
    return_lse : bool, default False
    workspace_bytes : int, default 1 GiB
        As in `NSAConfig`.

    Returns
    -------
    o : array like q
    lse : float32 array (batch, heads, seqlen_q), if ``return_lse``
        Natural logarithm; -inf, with o = 0, for a token without a key.

    Raises
    ------
    As `nsa_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import selected_attention
    >>> q = np.random.default_rng(0).standard_normal((1, 2, 128, 64), dtype=np.float32)
    >>> blocks = np.tile(np.array([0, 1], np.int32), (1, 2, 128, 1))
    >>> selected_attention(q, q, q, blocks).shape
    (1, 2, 128, 64)
    """
    where = "selected_attention"
    call = _Call(where, {"q": q, "k": k, "v": v, "blocks": blocks}, layout, scale, backend, stream)
    problem, found = call.problem, call.infos["blocks"]
    if found.dtype not in ("int32", "int64"):
        raise TypeError(f"{where}: blocks is {found.dtype}; accepted: int32 or int64")
    rows = (problem.batch, problem.kv_heads, problem.seqlen_q)
    if len(found.shape) != 4 or found.shape[:3] != rows or found.shape[3] == 0:
        raise ValueError(
            f"{where}: blocks has shape {tuple(found.shape)}; accepted: {rows} (batch, kv_heads, seqlen_q) and the "
            "blocks of a token"
        )
    # One field at a time is wrong: those that the caller has not given are right.
    config = NSAConfig(block, found.shape[3], 0, 1, length=1, stride=1, workspace_bytes=workspace_bytes)

    def on_host(natives: dict[str, Any]) -> tuple[Any, ...]:
        from . import nsa_on_host

        q, k, v = (call.bhsd(name, natives[name]) for name in "qkv")
        return nsa_on_host.attend_blocks(q, k, v, natives["blocks"], config.block, problem)

    def on_gpu(x: dict[str, Operand], results: tuple[Any, ...], stream: int, memory: Any) -> None:
        nsa = _kernels()
        nsa.attend_blocks(
            x["q"], nsa.Pair(x["k"], x["v"]), x["blocks"].pointer, results[0], results[1], problem, config,
            stream=stream, memory=memory,
        )  # fmt: skip

    return call.run(on_host, on_gpu, out=out, return_lse=return_lse)


@outside_graphs
def window_attention(
    q: Any,
    k: Any,
    v: Any,
    window: int,
    sinks: int = 0,
    *,
    scale: float | None = None,
    layout: str = "BHSD",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """Causal attention to the latest keys, and to the first ones.

    Parameters
    ----------
    q, k, v, scale, layout, out, stream, backend : as in `nsa_attention`
    window : int
        Latest keys that a query sees, its own among them: position p sees p - window + 1 to p.
    sinks : int, default 0
        First keys that all queries see.
    return_lse : bool, default False

    Returns
    -------
    As `selected_attention`.

    Raises
    ------
    As `nsa_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import window_attention
    >>> q = np.random.default_rng(0).standard_normal((1, 2, 128, 64), dtype=np.float32)
    >>> window_attention(q, q, q, 32, sinks=4).shape
    (1, 2, 128, 64)
    """
    where = "window_attention"
    config = NSAConfig(window=window)
    if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
        raise ValueError(f"{where}: sinks is {sinks!r}; accepted: an integer >= 0")
    call = _Call(where, {"q": q, "k": k, "v": v}, layout, scale, backend, stream)
    problem = call.problem

    def on_host(natives: dict[str, Any]) -> tuple[Any, ...]:
        from . import nsa_on_host

        q, k, v = (call.bhsd(name, native) for name, native in natives.items())
        return nsa_on_host.attend_window(q, k, v, config.window, sinks, problem)

    def on_gpu(x: dict[str, Operand], results: tuple[Any, ...], stream: int, memory: Any) -> None:
        nsa = _kernels()
        nsa.attend_window(
            x["q"], nsa.Pair(x["k"], x["v"]), results[0], results[1], problem, config, sinks, stream=stream,
            memory=memory,
        )  # fmt: skip

    return call.run(on_host, on_gpu, out=out, return_lse=return_lse)


def nsa_compress(
    x: Any, length: int = NSAConfig.length, stride: int = NSAConfig.stride, *, layout: str = "BHSD"
) -> Any:
    """Keys, or values, of runs of tokens: the mean of each.

    Parameters
    ----------
    x : array, (batch, kv_heads, seqlen_k, head_dim)
        Of any framework with an array API namespace, whose own operations compute it, and its derivative.
    length, stride : int, default 32 and 16
        Of NSAConfig: run number c has tokens c * stride to c * stride + length - 1. A multiple of stride.
    layout : {"BHSD", "BSHD"}, default "BHSD"

    Returns
    -------
    array like x, with max(0, (seqlen_k - length) // stride + 1) tokens
        Added up in float32, or in float64 where x is, and rounded once.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted; the message names it, what came and what is accepted.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import nsa_compress
    >>> x = np.arange(96.0).reshape(1, 1, 96, 1)
    >>> nsa_compress(x)[0, 0, :, 0].tolist()
    [15.5, 31.5, 47.5, 63.5, 79.5]
    """
    from array_api_compat import array_namespace

    config, axis = NSAConfig(length=length, stride=stride, block=stride), _axis("nsa_compress", layout)
    dtype = framework_of("x", x).dtype(x)
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
        raise TypeError(f"nsa_compress: x is {dtype}; accepted: float16, bfloat16, float32 or float64")
    shape = tuple(x.shape)
    if len(shape) != 4:
        raise ValueError(f"nsa_compress: x has shape {shape}; accepted: 4 axes ({layout})")
    xp = array_namespace(x)
    count, parts = compressed_count(shape[axis], length, stride), config.length // config.stride
    at = lambda begin, end: (slice(None),) * axis + (slice(begin, end),)  # noqa: E731
    if count == 0:
        return x[at(0, 0)]
    strides = x[at(0, (count + parts - 1) * stride)]
    wide = xp.astype(strides, xp.float64 if dtype == "float64" else xp.float32)
    wide = xp.reshape(wide, (*shape[:axis], count + parts - 1, stride, *shape[axis + 1 :]))
    sums = xp.sum(wide, axis=axis + 1)  # of a stride each
    total = sums[at(0, count)]
    for part in range(1, parts):
        total = total + sums[at(part, part + count)]
    return xp.astype(total / length, x.dtype)


class _Result(NamedTuple):
    output: Output
    operand: Any  # where a GPU writes it: an Operand of the output, an address of others


class _Call:
    """What the doors have in common: arrays of one framework on one device, and the results that are wanted."""

    def __init__(
        self, where: str, inputs: dict[str, Any], layout: Any, scale: Any, backend: Any, stream: Any, *,
        keys: str = "k", seqlen_k: int | None = None,
    ) -> None:  # fmt: skip
        self.where, self.inputs, self.layout, self.stream = where, inputs, layout, stream
        self.axis = _axis(where, layout)
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
            of_k[self.axis] = q.shape[self.axis] if seqlen_k is None else _length(where, seqlen_k)
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
                        framework.fill(native, float("-inf") if i else fill)
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
                native = framework.contiguous(_int32(info.native) if name == "blocks" else info.native)
                kept.append(native)
                infos[name] = framework_of("array", native).describe(native)
        operands = {
            name: Operand(x.pointer, (0, 0, 0, 0), (0, 0, 0))
            if name in ("gates", "blocks")
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


def _kernels() -> Any:
    """The module that launches them, imported when it is first needed."""
    load_pipeline()
    from ..cuda import nsa

    return nsa


def _is_readable(name: str, x: ArrayInfo) -> bool:
    """Whether kernels read an array as it lies; others are copied. Blocks are int32 in C order, gates have a contiguous
    last axis, rows of the others begin on 16 bytes."""
    if 0 in x.shape:
        return True
    if name == "blocks":
        expected = x.itemsize
        for n, stride in zip(x.shape[::-1], x.strides[::-1], strict=True):
            if n > 1 and stride != expected:
                return False
            expected *= n
        return x.dtype == "int32"
    if name == "gates":
        return x.has_contiguous_rows
    rows = all(n == 1 or (s >= 0 and s % ALIGNMENT == 0) for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True))
    return x.has_contiguous_rows and rows and x.pointer % ALIGNMENT == 0


def _int32(x: Any) -> Any:
    from array_api_compat import array_namespace

    xp = array_namespace(x)
    return xp.astype(x, xp.int32, copy=False)


def _gates_strides(gates: ArrayInfo, problem: Problem, layout: str, dtype: str) -> tuple[int, int, int]:
    """Of [batch, heads, seqlen_q, 3], in elements."""
    p = problem
    of_heads = (p.batch, p.heads, p.seqlen_q, 3) if layout == "BHSD" else (p.batch, p.seqlen_q, p.heads, 3)
    if tuple(gates.shape) not in ((p.batch, p.seqlen_q, 3), of_heads):
        raise ValueError(
            f"nsa_attention: gates has shape {tuple(gates.shape)}; accepted: {(p.batch, p.seqlen_q, 3)} or {of_heads}"
        )
    if gates.dtype not in ("float32", dtype):
        raise TypeError(f"nsa_attention: gates is {gates.dtype}; accepted: float32 or {dtype}, the dtype of q")
    strides = [s // gates.itemsize for s in gates.strides]
    if len(strides) == 3:
        return strides[0], 0, strides[1]
    return (strides[0], strides[1], strides[2]) if layout == "BHSD" else (strides[0], strides[2], strides[1])


def _config(where: str, config: Any) -> NSAConfig:
    if config is None:
        return NSAConfig()
    if not isinstance(config, NSAConfig):
        raise TypeError(f"{where}: config is a {type(config).__name__}; accepted: NSAConfig or None")
    return config


def _compressed(problem: Problem, config: NSAConfig) -> int:
    return compressed_count(problem.seqlen_k, config.length, config.stride)


def _axis(where: str, layout: Any) -> int:
    """Of tokens."""
    if layout not in ("BHSD", "BSHD"):
        raise ValueError(f"{where}: layout is {layout!r}; accepted: 'BHSD' or 'BSHD'")
    return 2 if layout == "BHSD" else 1


def _length(where: str, seqlen_k: Any) -> int:
    if isinstance(seqlen_k, bool) or not isinstance(seqlen_k, int) or seqlen_k < 0:
        raise ValueError(f"{where}: seqlen_k is {seqlen_k!r}; accepted: an integer >= 0, or None for seqlen_q")
    return seqlen_k
