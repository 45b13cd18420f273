"""PyTorch operators, ``torch.ops.s2o_cupy.attention`` and ``attention_varlen``: calls that torch.compile and
torch.export keep whole.

Each field of an S2OConfig is an argument of the operator, so that a graph can hold it. Importing this imports PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints, overload

from ..errors import ArgumentTypeError, ArgumentValueError, arguments_of
from ..extras import with_extra

with with_extra(__name__, "PyTorch"):
    import torch

from ..api.attention import s2o_attention
from ..api.lengths import check_packed_shapes
from ..api.varlen import s2o_attention_varlen
from ..arrays.torch_transforms import check_derivatives
from ..by_head import check_tau
from ..problem import LAYOUTS, Problem, check_count, check_flag, check_scale, check_softcap, validate
from ..spec import Pass, S2OConfig, not_a_config
from .autocast import DEVICES, casting

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..api.options import OperatorOptions, PackedOperatorOptions

__all__ = ["attention", "attention_varlen", "check_arguments", "check_forward_mode", "problem_of"]

Tensor = Any  # torch.Tensor
Array = TypeVar("Array")


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
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: S2OConfig | None = None,
    tau: float | Sequence[float] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    layout: str = "BHSD",
    return_lse: bool = False,
) -> Any:
    """S2O attention of PyTorch tensors as one operator, for code that goes through ``torch.compile``.

    Outside of a graph it is :func:`s2o_cupy.s2o_attention` with some 30 microseconds of the host on top. Inference
    only. Under torch.autocast q, k and v are cast to its dtype, as scaled_dot_product_attention does, but for float64.

    Parameters
    ----------
    q : Tensor, (batch, heads, seqlen_q, head_dim)
        float16 or bfloat16; on the CPU also float32 and float64. The batch axis may be left out of q, k and v alike.
    k, v : Tensor, (batch, kv_heads, seqlen_k, head_dim)
        On q's device, in q's dtype; heads is a multiple of kv_heads.
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

    Returns
    -------
    o : Tensor, of q's shape, dtype and device, contiguous, from PyTorch's allocator
    lse : float32 Tensor (batch, heads, seqlen_q), if ``return_lse``

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted, or a derivative is asked for: a tensor requires grad while gradients are
        enabled, or the call is made in forward-mode AD (torch.func.jvp). While a graph is compiled with
        ``fullgraph=True``, PyTorch's own error holds the message.
    S2OError
        The machine cannot run the call.

    Examples
    --------
    >>> import torch
    >>> from s2o_cupy.integrations.torch import attention
    >>> q, k, v = torch.randn(3, 1, 2, 128, 64)
    >>> attention(q, k, v).shape
    torch.Size([1, 2, 128, 64])
    """
    if layout not in LAYOUTS:
        raise ArgumentValueError(f"layout is {layout!r}; accepted: {' or '.join(map(repr, LAYOUTS))}")
    scalars = _parse(q, k, v, config, tau, is_causal, layout.index("H") - 4)
    o, lse = torch.ops.s2o_cupy.attention.default(
        q, k, v, _scale(scale), _softcap(softcap), is_causal, layout, check_flag("return_lse", return_lse), *scalars
    )
    return (o, lse) if return_lse else o


# fmt: off
@overload
def attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int] | None = ..., *,
    return_lse: Literal[False] = ..., **options: Unpack[PackedOperatorOptions],
) -> Array: ...
@overload
def attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int] | None = ..., *,
    return_lse: Literal[True], **options: Unpack[PackedOperatorOptions],
) -> tuple[Array, Array]: ...
@overload
def attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int] | None = ..., *,
    return_lse: bool = ..., **options: Unpack[PackedOperatorOptions],
) -> Any: ...
# fmt: on
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int] | None = None,
    *,
    config: S2OConfig | None = None,
    tau: float | Sequence[float] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    return_lse: bool = False,
) -> Any:
    """S2O attention of packed sequences as one operator: :func:`s2o_cupy.s2o_attention_varlen` on PyTorch tensors.

    Parameters
    ----------
    q : Tensor, (total_q, heads, head_dim)
    k, v : Tensor, (total_k, kv_heads, head_dim)
    cu_seqlens_q : list or tuple of integers, (batch + 1,)
        Where each sequence begins in q, and total_q. Not a tensor: the host needs the lengths.
    cu_seqlens_k : list or tuple of integers, optional
        The same for k and v; default ``cu_seqlens_q``.
    config, tau, scale, softcap, is_causal, return_lse
        As of :func:`attention`.

    Returns
    -------
    o : Tensor, of q's shape, dtype and device, contiguous, from PyTorch's allocator
    lse : float32 Tensor (heads, total_q), if ``return_lse``

    Raises
    ------
    TypeError, ValueError, S2OError
        As of :func:`attention`. What is wrong with cu_seqlens shows when a graph runs, not when it is made.

    Examples
    --------
    >>> import torch
    >>> from s2o_cupy.integrations.torch import attention_varlen
    >>> q, k, v = torch.randn(3, 128, 2, 64)
    >>> attention_varlen(q, k, v, [0, 28, 128]).shape
    torch.Size([128, 2, 64])
    """
    with arguments_of("s2o_attention_varlen"):
        scalars = _parse(q, k, v, config, tau, is_causal, -2)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not (isinstance(x, (list, tuple)) or (x is None and name == "cu_seqlens_k")):
            raise ArgumentTypeError(
                f"{name} is a {type(x).__name__}; accepted: a list or tuple of integers",
                "s2o_attention_varlen",
            )
    o, lse = torch.ops.s2o_cupy.attention_varlen.default(
        q, k, v, cu_seqlens_q, cu_seqlens_k, _scale(scale), _softcap(softcap), is_causal,
        check_flag("return_lse", return_lse), *scalars,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def _parse(q: Any, k: Any, v: Any, config: Any, tau: Any, is_causal: Any, axis: int) -> list[Any]:
    """Check what the operators' schemas cannot; the config's fields, ``tau`` put in. ``axis``: of q's heads."""
    _check_tensors(q, k, v)
    if config is None:
        config = _DEFAULT
    elif not isinstance(config, S2OConfig):
        raise not_a_config(config)
    if not isinstance(is_causal, bool):
        raise ArgumentTypeError(f"is_causal is {is_causal!r}; accepted: True or False")
    scalars = scalars_of(config)
    by_head: tuple[tuple[str, Any], ...] = (("tau", config.tau), ("error", config.error))
    if tau is not None:
        of_heads = check_tau(tau)
        scalars[_TAU], scalars[_ERROR] = of_heads if isinstance(of_heads, tuple) else (of_heads,), None
        by_head = (("tau", of_heads),)
    for name, value in by_head:  # of one number the schema does not say whether it is for all heads
        if isinstance(value, tuple) and len(value) == 1 and q.ndim >= -axis:
            check_count(name, value, q.shape[axis])
    return scalars


def scalars_of(config: S2OConfig) -> list[Any]:
    """The fields as the operators take them: a schema has numbers or lists of them, not both."""
    scalars = list(config.values)
    for at in (_TAU, _ERROR):
        if isinstance(scalars[at], float):
            scalars[at] = (scalars[at],)
    return scalars


def check_arguments(q: Any, k: Any, v: Any, scale: Any, softcap: Any) -> tuple[Any, Any]:
    """Check what an operator's schema cannot; scale and softcap as it takes them."""
    _check_tensors(q, k, v)
    return _scale(scale), _softcap(softcap)


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError(f"{name} is a {type(x).__name__}; accepted: a torch.Tensor")
        check_derivatives(name, x)


def _scale(scale: Any) -> Any:
    return scale if scale is None or type(scale) is float else check_scale(scale)


def _softcap(softcap: Any) -> Any:
    return softcap if type(softcap) is float else check_softcap(softcap)


# ---------------------------------------------------------------- configs as scalars

_SCHEMA_TYPES: dict[Any, str] = {int: "int", float: "float", bool: "bool", str: "str"}
_SCHEMA_TYPES |= {kind | None: f"{name}?" for kind, name in _SCHEMA_TYPES.items()}
_SCHEMA_TYPES[float | Sequence[float] | None] = "float[]?"

_HINTS = get_type_hints(S2OConfig)
_NAMES = tuple(field.name for field in fields(S2OConfig))
_TAU, _ERROR = _NAMES.index("tau"), _NAMES.index("error")
_DEFAULT = S2OConfig()


def _config(*scalars: Any) -> S2OConfig:
    return _known_config(*(tuple(x) if isinstance(x, list) else x for x in scalars))


@functools.lru_cache(maxsize=256)
def _known_config(*scalars: Any) -> S2OConfig:
    one = lambda x: x[0] if isinstance(x, tuple) and len(x) == 1 else x  # noqa: E731
    # PyTorch leaves out arguments at the end that are their default.
    return S2OConfig(**{name: one(x) for name, x in zip(_NAMES, scalars, strict=False)})


# ---------------------------------------------------------------- the operator


def check_forward_mode() -> None:
    """PyTorch takes tangents off before it calls what runs below, so whether there are any cannot be asked there."""
    if torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        raise ArgumentValueError(
            "the operator is called in forward-mode AD, as of torch.func.jvp, and S2O is for inference "
            "only (it has no derivative); accepted: a call outside of it, or under torch.inference_mode()"
        )


def _run(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float, is_causal: bool, layout: Any,
    return_lse: bool, *scalars: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_forward_mode()
    result = s2o_attention(
        q, k, v, config=_config(*scalars), scale=scale, softcap=softcap, is_causal=is_causal, layout=layout,
        return_lse=return_lse,
    )  # fmt: skip
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


def _fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float, is_causal: bool, layout: Any,
    return_lse: bool, *scalars: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Shapes, dtypes and devices of the results without data; the same errors as a call."""
    check_forward_mode()
    problem = problem_of(q, k, v, _config(*scalars), scale, softcap, is_causal, layout)
    return fake_results(q, (problem.batch, problem.heads, problem.seqlen_q)[4 - q.ndim :] if return_lse else (0,))


def _run_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int] | None,
    scale: float | None, softcap: float, is_causal: bool, return_lse: bool, *scalars: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_forward_mode()
    result = s2o_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, config=_config(*scalars), scale=scale, softcap=softcap,
        is_causal=is_causal, return_lse=return_lse,
    )  # fmt: skip
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


def _fake_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int] | None,
    scale: float | None, softcap: float, is_causal: bool, return_lse: bool, *scalars: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `_fake`, but blind to cu_seqlens: a graph that asked for their order would be one for these lengths alone."""
    check_forward_mode()
    _check_devices(q, k, v)
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    with arguments_of("s2o_attention_varlen"):
        problem = check_packed_shapes(
            shapes, _dtypes(q, k, v), _config(*scalars), _backend(q), is_causal, scale, softcap
        )
    return fake_results(q, (problem.heads, q.shape[0]) if return_lse else (0,))


def fake_results(q: Tensor, of_lse: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """An output like q, and an lse of that shape."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return o, torch.empty(of_lse, dtype=torch.float32, device=q.device)


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, config: S2OConfig | Pass, scale: Any, softcap: Any, is_causal: Any, layout: Any
) -> Problem:
    """The problem that tensors pose; raises what a call would."""
    _check_devices(q, k, v)
    return validate(
        [x.shape for x in (q, k, v)], _dtypes(q, k, v), config=config, backend=_backend(q), layout=layout,
        is_causal=is_causal, scale=scale, softcap=softcap,
    )  # fmt: skip


def _check_devices(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.device == k.device == v.device:
        raise ArgumentValueError(
            f"q, k and v are on different devices: q on {q.device}, k on {k.device}, v on {v.device}; "
            "accepted: one device for all three"
        )


def _dtypes(*tensors: Tensor) -> tuple[str, ...]:
    return tuple(str(x.dtype).removeprefix("torch.") for x in tensors)


def _backend(q: Tensor) -> str:
    return "cupy" if q.device.type == "cuda" else "numpy"


def _argument(field: Field[Any]) -> str:
    """Of the operators' schemas. Graphs exported before the field was there lack it: it has the value of then."""
    before = f"={field.metadata['before']}" if "before" in field.metadata else ""
    return f"{_SCHEMA_TYPES[_HINTS[field.name]]} {field.name}{before}"


_library = torch.library.Library("s2o_cupy", "DEF")
_CONFIG = ", ".join(map(_argument, fields(S2OConfig)))
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, float? scale, float softcap, bool is_causal, str layout, bool return_lse, "
    f"{_CONFIG}) -> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("s2o_cupy::attention", _fake, lib=_library)
_library.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, SymInt[] cu_seqlens_q, SymInt[]? cu_seqlens_k, float? scale, "
    f"float softcap, bool is_causal, bool return_lse, {_CONFIG}) -> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("attention_varlen", _run_varlen, "CompositeExplicitAutograd")
torch.library.register_fake("s2o_cupy::attention_varlen", _fake_varlen, lib=_library)
for _kind in DEVICES:
    for _operator in (torch.ops.s2o_cupy.attention.default, torch.ops.s2o_cupy.attention_varlen.default):
        _library.impl(_operator, casting(_operator, _kind), f"Autocast{_kind.upper()}")
