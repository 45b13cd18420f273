"""Packed sequences: read where they lie; short ones share a launch on a GPU, others run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ..arrays.lengths import parse_starts
from ..arrays.torch_compile import outside_graphs
from ..errors import arguments_of
from ..spec import S2OConfig
from .batch import packed
from .call import Call
from .habits import answers_habits
from .run import parse_config, run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..stats import S2OStats
    from .options import PackedOptions

__all__ = ["s2o_attention_varlen"]

Array = TypeVar("Array")


# fmt: off
@overload
def s2o_attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = ..., *,
    return_lse: Literal[False] = ..., return_stats: Literal[False] = ..., **options: Unpack[PackedOptions],
) -> Array: ...
@overload
def s2o_attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = ..., *,
    return_lse: Literal[True], return_stats: Literal[False] = ..., **options: Unpack[PackedOptions],
) -> tuple[Array, Array]: ...
@overload
def s2o_attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = ..., *,
    return_lse: Literal[False] = ..., return_stats: Literal[True], **options: Unpack[PackedOptions],
) -> tuple[Array, list[S2OStats]]: ...
@overload
def s2o_attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = ..., *,
    return_lse: Literal[True], return_stats: Literal[True], **options: Unpack[PackedOptions],
) -> tuple[Array, Array, list[S2OStats]]: ...
@overload
def s2o_attention_varlen(
    q: Array, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = ..., *,
    return_lse: bool = ..., return_stats: bool = ..., **options: Unpack[PackedOptions],
) -> Any: ...
# fmt: on
@outside_graphs
@answers_habits
@arguments_of("s2o_attention_varlen")
def s2o_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    tau: float | Sequence[float] | None = None,
    config: S2OConfig | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """S2O attention of several sequences of any lengths that are packed one behind the other.

    The same, bit for bit, as :func:`s2o_cupy.s2o_attention` on each sequence. Nothing is copied or padded: sequence i
    is ``q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]`` with ``k[cu_seqlens_k[i]:cu_seqlens_k[i + 1]]``, where it lies.

    Parameters
    ----------
    q : array, (total_q, heads, head_dim)
        Frameworks, devices and dtypes are those of :func:`s2o_cupy.s2o_attention`.
    k, v : array, (total_k, kv_heads, head_dim)
    cu_seqlens_q : list, tuple, or int32 or int64 array, (batch + 1,)
        Where each sequence begins in q, and total_q: 0, then ascending. Equal neighbours are an empty sequence. Best
        on the host: an array on a GPU is copied there, for which the host waits, and while a CUDA graph is captured it
        is refused. A graph keeps the lengths that it was captured with.
    cu_seqlens_k : like cu_seqlens_q, optional
        The same for k and v; default ``cu_seqlens_q``.
    tau, config, scale, softcap, stream, backend
        As in :func:`s2o_cupy.s2o_attention`; the same for all sequences.
    is_causal : bool, default True
        Aligned bottom-right in each sequence, which then has at least as many keys as queries.
    return_lse : bool, default False
        Also return the log-sum-exp of each row's scores.
    return_stats : bool, default False
        Also return what was visited, and by which kernels.
    out : array, optional
        Where to write the output: like q, as in :func:`s2o_cupy.s2o_attention`.

    Returns
    -------
    o : array, like q
    lse : float32 array (heads, total_q), if ``return_lse``
        As flash-attn's functions for packed sequences return it. -inf, with o = 0, for a row that has no key.
    stats : list of S2OStats, one for each sequence, if ``return_stats``
        Several results come as a tuple in this order.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched. An argument is not accepted; the message names it, what came and what is accepted.
    S2OError
        The machine cannot run the call.

    Notes
    -----
    On a GPU all sequences that are attended densely (``S2OConfig.dense_up_to``: short ones) share one launch. Longer
    ones, which fill a GPU by themselves, take turns on one stream and in one workspace, sized to the largest need.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import s2o_attention, s2o_attention_varlen
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((500, 4, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 500, 2, 64), dtype=np.float32)
    >>> o, lse = s2o_attention_varlen(q, k, v, [0, 200, 500], return_lse=True)
    >>> o.shape, lse.shape
    ((500, 4, 64), (4, 500))
    >>> bool((o[200:] == s2o_attention(q[200:], k[200:], v[200:], layout="BSHD")).all())
    True
    """
    config = parse_config(config, tau)
    call = Call({"q": q, "k": k, "v": v}, backend, stream, out)
    starts_q = parse_starts("cu_seqlens_q", cu_seqlens_q)
    starts_k = None if cu_seqlens_k is None else parse_starts("cu_seqlens_k", cu_seqlens_k)
    forms = tuple([x.form for x in call.infos])
    batch = packed(forms, starts_q, starts_k, config, call.backend, is_causal, scale, softcap)
    return run(batch, call, return_lse=return_lse, return_stats=return_stats, config=config)
