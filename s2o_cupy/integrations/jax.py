"""S2O in JAX programs: inside of ``jax.jit`` and ``jax.vmap``.

XLA hands its arrays to a callback where they lie, with the stream that it computes on: S2O's kernels run there, and
write XLA's own output. The workspace is an output too, which nobody reads. Where JAX has no
``jax.experimental.buffer_callback``, arrays go through host memory by ``jax.pure_callback``. Importing this imports
JAX.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

import numpy as np

from ..extras import with_extra

with with_extra(__name__, "JAX"):
    import jax
    import jax.numpy as jnp
    from jax.custom_batching import custom_vmap

from ..api import at_addresses
from ..api.attention import s2o_attention
from ..api.habits import answers_habits
from ..api.run import parse_config
from ..arrays.lazy_cupy import import_cupy
from ..caches import remembered
from ..errors import ArgumentTypeError, ArgumentValueError, arguments_of
from ..problem import Problem, validate
from ..spec import S2OConfig

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # before JAX 0.6
    buffer_callback = None

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..api.options import OperatorOptions

__all__ = ["attention"]

Array = TypeVar("Array")
Results = tuple[Any, ...]  # o, and lse if it is asked for
BACKENDS = {"cpu": "numpy", "gpu": "cupy", "cuda": "cupy"}  # by JAX's platform
CUDA = 2  # a DLPack device type


# fmt: off
@overload
def attention(
    q: Array, k: Any, v: Any, *,
    return_lse: Literal[False] = ..., **options: Unpack[OperatorOptions],
) -> Array: ...
@overload
def attention(
    q: Array, k: Any, v: Any, *,
    return_lse: Literal[True], **options: Unpack[OperatorOptions],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Any, v: Any, *,
    return_lse: bool = ..., **options: Unpack[OperatorOptions],
) -> Any: ...
# fmt: on
@answers_habits
@arguments_of("integrations.jax.attention")
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    config: S2OConfig | None = None,
    tau: float | Sequence[float] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    layout: str = "BHSD",
    return_lse: bool = False,
) -> Any:
    """S2O attention of JAX arrays, also inside of ``jax.jit`` and ``jax.vmap``. Inference only.

    Nothing is copied to the host and the host waits for nothing, if JAX has ``jax.experimental.buffer_callback``. A
    mapped axis joins the batch: one call for all of it. Inside of ``jax.shard_map`` each device attends its shard.

    Parameters
    ----------
    q : jax.Array, (batch, heads, seqlen_q, head_dim)
        float16 or bfloat16; on the CPU also float32 and float64. The batch axis may be left out of q, k and v alike.
    k, v : jax.Array, (batch, kv_heads, seqlen_k, head_dim)
        In q's dtype; heads is a multiple of kv_heads.
    config : S2OConfig, optional
    tau : float or sequence of float, optional
        Overrides ``config.tau`` and ``config.error``.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    softcap : float, default 0
        Scores become softcap * tanh(score / softcap); 0 leaves them as they are.
    is_causal : bool, default True
        Aligned bottom-right; seqlen_k >= seqlen_q.
    layout : {"BHSD", "BSHD"}, default "BHSD"
    return_lse : bool, default False
        All options are Python values, not traced ones: another one compiles anew.

    Returns
    -------
    o : jax.Array, of q's shape and dtype
    lse : float32 jax.Array (batch, heads, seqlen_q), if ``return_lse``

    Raises
    ------
    TypeError, ValueError
        While JAX traces: an argument is not accepted; the message names it, what came and what is accepted. Or a
        derivative is asked for, which S2O has not.
    S2OError
        While JAX traces: the machine cannot run the call.

    Notes
    -----
    Inside of ``jax.jit`` arrays are taken to be on the device that JAX computes on by default.

    Examples
    --------
    >>> import jax
    >>> from s2o_cupy.integrations.jax import attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 128, 64), "bfloat16")
    >>> jax.jit(attention)(q, k, v).shape
    (1, 2, 128, 64)
    """
    for name, given in (("tau", tau), ("scale", scale), ("softcap", softcap)):
        if isinstance(given, jax.core.Tracer):
            raise ArgumentTypeError(
                f"{name} is traced, {given}; accepted: a Python number, in jax.jit an argument of its static_argnames"
            )
    config = parse_config(config, tau)
    if config.error is not None:
        raise ArgumentValueError(
            f"config.error is {config.error}, for which JAX has no memory to give; accepted: a tau, or "
            "one for each query head, or s2o_cupy.s2o_attention outside of jax.jit"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array):
            raise ArgumentTypeError(
                f"{name} is a {type(x).__name__}; accepted: a jax.Array (s2o_cupy.s2o_attention takes other arrays too)"
            )
        if not isinstance(x, jax.core.Tracer) and len(x.devices()) > 1:
            raise ArgumentValueError(
                f"{name} is sharded over {len(x.devices())} devices; accepted: an array on one, or a "
                "call inside of jax.shard_map"
            )
    platform = _platform(q)
    if platform not in BACKENDS:
        raise ArgumentValueError(f"q is on {platform}; accepted: a CPU or an NVIDIA GPU")
    problem = validate(
        [x.shape for x in (q, k, v)], [str(x.dtype) for x in (q, k, v)], config=config, backend=BACKENDS[platform],
        layout=layout, is_causal=is_causal, scale=scale, softcap=softcap,
    )  # fmt: skip
    results = _compiled(problem, config, layout, q.ndim, bool(return_lse), BACKENDS[platform])(q, k, v)
    return results if return_lse else results[0]


def _platform(q: Any) -> str:
    if not isinstance(q, jax.core.Tracer):
        (device,) = q.devices()
    else:
        device = jax.config.jax_default_device
        if device is None or isinstance(device, str):
            return device or jax.default_backend()
    return device.platform


class Asked(NamedTuple):
    """What is asked of q, k and v with a batch axis."""

    problem: Problem
    config: S2OConfig
    layout: str
    return_lse: bool


@remembered  # a function that is the same is compiled once
def _compiled(
    problem: Problem, config: S2OConfig, layout: str, ndim: int, return_lse: bool, backend: str
) -> Callable[[Any, Any, Any], Results]:
    """A call on q, k and v as `attention` takes them, which JAX may trace, batch and compile."""

    def attend(*qkv: Any) -> Results:
        with_batch = [x.reshape(1, *x.shape) if ndim == 3 else x for x in qkv]
        results = _varying_as(qkv, _call(with_batch, Asked(problem, config, layout, return_lse), backend))
        return tuple(x[0] for x in results) if ndim == 3 else results

    def attend_all(size: int, mapped: list[bool], *qkv: Any) -> tuple[Results, tuple[bool, ...]]:
        wide = [x if m else jnp.broadcast_to(x, (size, *x.shape)) for x, m in zip(qkv, mapped, strict=True)]
        merged = [x.reshape(size * problem.batch, *x.shape[-3:]) for x in wide]
        together = _compiled(replace(problem, batch=size * problem.batch), config, layout, 4, return_lse, backend)
        batch = () if ndim == 3 else (problem.batch,)
        results = tuple(x.reshape(size, *batch, *x.shape[1:]) for x in together(*merged))
        return results, (True,) * len(results)

    batched = custom_vmap(attend)
    batched.def_vmap(attend_all)
    underived = jax.custom_jvp(batched)
    underived.defjvp(_refuse_derivative)
    return jax.jit(underived)


def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    raise ArgumentValueError(
        "a derivative by q, k or v is asked for (jax.grad, jax.vjp or jax.jvp), and S2O is for "
        "inference only; accepted: jax.lax.stop_gradient of q, k and v"
    )


def _varying_as(qkv: Sequence[Any], results: Results) -> Results:
    """With the axes of a jax.shard_map along which q, k or v varies: those of a callback have none, and jax.grad and
    jax.lax.scan go by them."""
    axes = frozenset[str]().union(*map(_axes, qkv))
    return tuple(_vary(x, tuple(sorted(axes - _axes(x)))) for x in results)


def _axes(x: Any) -> frozenset[str]:
    """Along which an array varies, as JAX has it by one of two names, by version; before 0.6 it does not know."""
    of_manual = getattr(x.aval, "manual_axis_type", None)
    return frozenset(getattr(x.aval, "vma", ()) if of_manual is None else of_manual.varying)


def _vary(x: Any, axes: tuple[str, ...]) -> Any:
    if not axes:
        return x
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)


def _call(qkv: list[Any], asked: Asked, backend: str) -> Results:
    p, q = asked.problem, qkv[0]
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if asked.return_lse:
        results.append(jax.ShapeDtypeStruct((p.batch, p.heads, p.seqlen_q), np.float32))
    if p.empty or p.seqlen_k == 0:  # nothing to launch
        return tuple(jnp.full(x.shape, fill, x.dtype) for x, fill in zip(results, (0, -jnp.inf), strict=False))
    if buffer_callback is None:
        found = jax.pure_callback(functools.partial(_through_host, asked, backend), results, *qkv)
        return tuple(found)
    if backend == "cupy":
        nbytes = at_addresses.workspace_bytes(p, asked.config, asked.layout)
        results.append(jax.ShapeDtypeStruct((nbytes,), np.uint8))
    found = buffer_callback(functools.partial(_in_place, asked), results)(*qkv)
    return tuple(found[: 1 + asked.return_lse])


def _in_place(asked: Asked, context: Any, out: Sequence[Any], *qkv: Any) -> None:
    """What XLA calls when its stream gets here, with buffers in C order that are its own."""
    kind, device = qkv[0].__dlpack_device__()
    if kind != CUDA:
        arrays = [np.asarray(x) for x in out]
        found = _attend([np.asarray(x) for x in qkv], asked, out=arrays[0])
        if asked.return_lse:
            arrays[1][...] = found[1]
        return
    o, *lse, workspace = out
    pointers = [_pointer(x) for x in (*qkv, o)] + ([_pointer(lse[0])] if lse else [0])
    stream = context.stream() if callable(context.stream) else context.stream
    at_addresses.run(
        pointers, (_pointer(workspace), workspace.shape[0]), asked.problem, asked.config, asked.layout, device=device,
        stream=stream,
    )  # fmt: skip


def _pointer(buffer: Any) -> int:
    """Where one of XLA's buffers begins, which DLPack alone says of every dtype."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.argtypes, get_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    capsule = buffer.__dlpack__()
    # A DLManagedTensor begins with its DLTensor, and that with the address.
    return ctypes.c_void_p.from_address(get_pointer(capsule, b"dltensor")).value or 0


def _through_host(asked: Asked, backend: str, *qkv: Any) -> Any:
    """Where XLA has no way to hand over its buffers."""
    arrays = [np.asarray(x) for x in qkv]
    if backend != "cupy":
        found = _attend(arrays, asked)
        return found if asked.return_lse else (found,)
    cupy = import_cupy()
    found = _attend([cupy.asarray(x) for x in arrays], asked)
    return tuple(cupy.asnumpy(x) for x in (found if asked.return_lse else (found,)))


def _attend(arrays: list[Any], asked: Asked, out: Any = None) -> Any:
    p = asked.problem
    options: Any = {"layout": asked.layout, "return_lse": asked.return_lse}
    return s2o_attention(
        *arrays, config=asked.config, scale=p.scale, softcap=p.softcap, is_causal=p.is_causal, out=out, **options
    )
