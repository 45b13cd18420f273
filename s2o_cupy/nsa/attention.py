"""NSA, natively trainable sparse attention: the whole, and its parts."""

from __future__ import annotations

from typing import Any

from ..api.call import Call
from ..api.habits import answers_habits
from ..api.on_gpu import load_pipeline
from ..arrays import operand
from ..arrays.array_info import ArrayInfo
from ..arrays.frameworks import framework_of
from ..arrays.operand import Operand
from ..arrays.torch_compile import outside_graphs
from ..errors import ArgumentTypeError, ArgumentValueError, arguments_of
from ..problem import Problem
from ..spec import checked_int
from .call import NsaCall, axis_of_tokens
from .config import LEAST, NSAConfig
from .plan import compressed_count

__all__ = ["nsa_attention", "nsa_compress", "nsa_select", "selected_attention", "window_attention"]


@outside_graphs
@answers_habits
@arguments_of("nsa_attention")
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
    >>> from s2o_cupy.nsa import nsa_attention, nsa_compress
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
        raise ArgumentTypeError(f"{missing} is missing; accepted: both of k_win and v_win, or neither", where)
    if k_win is not None:
        inputs |= {"k_win": k_win, "v_win": v_win}
    call = NsaCall(where, Call(inputs, backend, stream, out), layout, scale)
    of, problem = call.infos, call.problem
    expected = (problem.batch, problem.kv_heads, _compressed(problem, config), problem.head_dim)
    for name in ("k_cmp", "v_cmp"):
        call.expect(name, expected, "(batch, kv_heads, compressed, head_dim) of the config's length and stride")
    if k_win is not None:
        call.expect("k_win", call.bhsd_shape("k"), "as k")
        call.expect("v_win", call.bhsd_shape("k"), "as k")
    gates_strides = _gates_strides(of["gates"], problem, layout, of["q"].dtype)

    def on_host(natives: dict[str, Any]) -> tuple[Any, ...]:
        from . import on_host as nsa_on_host

        x = {name: native[:, None] if native.ndim == 3 else call.bhsd(name, native) for name, native in natives.items()}
        return (nsa_on_host.attend(x, problem, config),)

    def on_gpu(x: dict[str, Operand], results: tuple[Any, ...], stream: int, memory: Any) -> None:
        nsa = _kernels()
        gates_at = nsa.Gates(x["gates"].pointer, gates_strides, of["gates"].dtype == "float32")
        keys = nsa.Pair(x["k"], x["v"])
        window = nsa.Pair(x["k_win"], x["v_win"]) if "k_win" in x else keys
        branches = nsa.Branches(keys, nsa.Pair(x["k_cmp"], x["v_cmp"]), window, gates_at)
        nsa.attend(x["q"], branches, results[0], problem, config, stream=stream, memory=memory)

    return call.run(on_host, on_gpu)


@outside_graphs
@answers_habits
@arguments_of("nsa_select")
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
    >>> from s2o_cupy.nsa import nsa_compress, nsa_select
    >>> q = np.random.default_rng(0).standard_normal((1, 2, 200, 64), dtype=np.float32)
    >>> nsa_select(q, nsa_compress(q))[0, 0, 130, :4].tolist()
    [0, 1, 2, -1]
    """
    where, config = "nsa_select", _config("nsa_select", config)
    arrays = Call({"q": q, "k_cmp": k_cmp}, backend, stream)
    call = NsaCall(where, arrays, layout, scale, keys="k_cmp", seqlen_k=seqlen_k)
    problem = call.problem
    expected = (problem.batch, problem.kv_heads, _compressed(problem, config), problem.head_dim)
    call.expect("k_cmp", expected, f"(batch, kv_heads, compressed, head_dim) of seqlen_k {problem.seqlen_k}")

    def on_host(natives: dict[str, Any]) -> tuple[Any, ...]:
        from . import on_host as nsa_on_host

        q, k_cmp = (call.bhsd(name, x) for name, x in natives.items())
        return (nsa_on_host.select(q, k_cmp, problem, config),)

    def on_gpu(x: dict[str, Operand], results: tuple[Any, ...], stream: int, memory: Any) -> None:
        _kernels().select(x["q"], x["k_cmp"], results[0], problem, config, stream=stream, memory=memory)

    shape = (problem.batch, problem.kv_heads, problem.seqlen_q, config.top)
    return call.run(on_host, on_gpu, results=(("int32", shape),), fill=-1)


@outside_graphs
@answers_habits
@arguments_of("selected_attention")
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
        are distinct, in any order; one below 0 is none. On the CPU they are checked to exist. On the GPU a row with
        an entry twice has an undefined result.
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
    >>> from s2o_cupy.nsa import selected_attention
    >>> q = np.random.default_rng(0).standard_normal((1, 2, 128, 64), dtype=np.float32)
    >>> blocks = np.tile(np.array([0, 1], np.int32), (1, 2, 128, 1))
    >>> selected_attention(q, q, q, blocks).shape
    (1, 2, 128, 64)
    """
    where = "selected_attention"
    block = checked_int("block", block, 1, owner=where)
    workspace_bytes = checked_int("workspace_bytes", workspace_bytes, LEAST["workspace_bytes"], owner=where)
    call = NsaCall(where, Call({"q": q, "k": k, "v": v, "blocks": blocks}, backend, stream, out), layout, scale)
    problem, found = call.problem, call.infos["blocks"]
    call.check_blocks()
    config = NSAConfig(block, found.shape[3], 0, 1, length=1, stride=1, workspace_bytes=workspace_bytes)

    def on_host(natives: dict[str, Any]) -> tuple[Any, ...]:
        from . import on_host as nsa_on_host

        q, k, v = (call.bhsd(name, natives[name]) for name in "qkv")
        return nsa_on_host.attend_blocks(q, k, v, natives["blocks"], config.block, problem)

    def on_gpu(x: dict[str, Operand], results: tuple[Any, ...], stream: int, memory: Any) -> None:
        arrays = operand.Call((x["q"], x["k"], x["v"], results[0]), results[1], 0, problem)
        _kernels().attend_blocks(arrays, x["blocks"].pointer, config, stream=stream, memory=memory)

    return call.run(on_host, on_gpu, return_lse=return_lse)


@outside_graphs
@answers_habits
@arguments_of("window_attention")
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
    >>> from s2o_cupy.nsa import window_attention
    >>> q = np.random.default_rng(0).standard_normal((1, 2, 128, 64), dtype=np.float32)
    >>> window_attention(q, q, q, 32, sinks=4).shape
    (1, 2, 128, 64)
    """
    where = "window_attention"
    config = NSAConfig(window=checked_int("window", window, 1, owner=where))
    sinks = checked_int("sinks", sinks, 0, owner=where)
    call = NsaCall(where, Call({"q": q, "k": k, "v": v}, backend, stream, out), layout, scale)
    problem = call.problem

    def on_host(natives: dict[str, Any]) -> tuple[Any, ...]:
        from . import on_host as nsa_on_host

        q, k, v = (call.bhsd(name, native) for name, native in natives.items())
        return nsa_on_host.attend_window(q, k, v, config.window, sinks, problem)

    def on_gpu(x: dict[str, Operand], results: tuple[Any, ...], stream: int, memory: Any) -> None:
        arrays = operand.Call((x["q"], x["k"], x["v"], results[0]), results[1], 0, problem)
        _kernels().attend_window(arrays, config, sinks, stream=stream, memory=memory)

    return call.run(on_host, on_gpu, return_lse=return_lse)


@answers_habits
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
    >>> from s2o_cupy.nsa import nsa_compress
    >>> x = np.arange(96.0).reshape(1, 1, 96, 1)
    >>> nsa_compress(x)[0, 0, :, 0].tolist()
    [15.5, 31.5, 47.5, 63.5, 79.5]
    """
    from array_api_compat import array_namespace

    config, axis = NSAConfig(length=length, stride=stride, block=stride), axis_of_tokens("nsa_compress", layout)
    dtype = framework_of("x", x, "nsa_compress").dtype(x)
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
        raise ArgumentTypeError(f"x is {dtype}; accepted: float16, bfloat16, float32 or float64", "nsa_compress")
    shape = tuple(x.shape)
    if len(shape) != 4:
        raise ArgumentValueError(f"x has shape {shape}; accepted: 4 axes ({layout})", "nsa_compress")
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


def _kernels() -> Any:
    """The module that launches them, imported when it is first needed."""
    load_pipeline()
    from . import launches

    return launches


def _gates_strides(gates: ArrayInfo, problem: Problem, layout: str, dtype: str) -> tuple[int, int, int]:
    """Of [batch, heads, seqlen_q, 3], in elements."""
    p = problem
    of_heads = (p.batch, p.heads, p.seqlen_q, 3) if layout == "BHSD" else (p.batch, p.seqlen_q, p.heads, 3)
    if tuple(gates.shape) not in ((p.batch, p.seqlen_q, 3), of_heads):
        raise ArgumentValueError(
            f"gates has shape {tuple(gates.shape)}; accepted: {(p.batch, p.seqlen_q, 3)} or {of_heads}",
            "nsa_attention",
        )
    accepted = "float32" if dtype == "float32" else f"float32 or {dtype}, the dtype of q"
    if gates.dtype not in ("float32", dtype):
        raise ArgumentTypeError(f"gates is {gates.dtype}; accepted: {accepted}", "nsa_attention")
    strides = [s // gates.itemsize for s in gates.strides]
    if len(strides) == 3:
        return strides[0], 0, strides[1]
    return (strides[0], strides[1], strides[2]) if layout == "BHSD" else (strides[0], strides[2], strides[1])


def _config(where: str, config: Any) -> NSAConfig:
    if config is None:
        return NSAConfig()
    if not isinstance(config, NSAConfig):
        raise ArgumentTypeError(f"config is a {type(config).__name__}; accepted: NSAConfig or None", where)
    return config


def _compressed(problem: Problem, config: NSAConfig) -> int:
    return compressed_count(problem.seqlen_k, config.length, config.stride)
