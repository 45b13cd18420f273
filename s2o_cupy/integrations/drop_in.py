"""S2O behind the signatures of PyTorch's and flash-attn's functions, for code that calls those.

Argument names, layouts, defaults and the alignment of causal masks are theirs. What S2O has not got is refused by
name. What only S2O has, ``config`` and ``tau``, comes by name. Inference only. Importing this imports PyTorch.

Mind the default of both: attention that is *not* causal.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from ..api.habits import answers_habits
from ..errors import ArgumentError, ArgumentTypeError, ArgumentValueError, arguments_of
from ..extras import with_extra

with with_extra(__name__, "PyTorch"):
    import torch

from ..api.lengths import check_lengths, check_packed_keys, check_packed_queries
from ..api.run import parse_config
from ..arrays.lengths import parse_starts
from ..spec import S2OConfig
from .autocast import to_autocast_dtype
from .sliding_window import window_attention
from .torch import attention, attention_varlen, problem_of

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "scaled_dot_product_attention"]

Tensor = Any  # torch.Tensor


class _in_its_axes(arguments_of):
    """`arguments_of` a function that has no layout to choose: its errors say the ``axes`` that it takes instead."""

    def __init__(self, function: str, axes: str) -> None:
        super().__init__(function)
        self.axes = axes

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, ArgumentError):
            error.function = self.function
            message, asked, _ = str(error.args[0]).partition(" Did you mean layout=")
            if asked:
                instead = f"Did you mean q.transpose(1, 2)? Axes are {self.axes}"
                error.args = (f"{message} {instead}", *error.args[1:])


@answers_habits
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: S2OConfig | None = None,
    tau: float | Sequence[float] | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` by S2O.

    Parameters
    ----------
    query : Tensor, (batch, heads, seqlen_q, head_dim), or (heads, seqlen_q, head_dim)
        Dtypes and devices as of :func:`s2o_cupy.integrations.torch.attention`.
    key, value : Tensor, (batch, heads, seqlen_k, head_dim), or without the batch axis
    attn_mask : None, or what ``torch.nn.attention.bias`` returns, optional
        ``causal_upper_left(seqlen_q, seqlen_k)`` or ``causal_lower_right(seqlen_q, seqlen_k)``. No tensor.
    dropout_p : float, default 0
        Only 0.
    is_causal : bool, default False
        Aligned *top-left*, as PyTorch's: query i sees keys up to i. With fewer queries than keys the last keys are
        then not seen at all; for chunks of a prompt ask for ``causal_lower_right``.
    scale : float, optional
        Default 1 / sqrt(head_dim).
    enable_gqa : bool, default False
        Whether key and value may have fewer heads than query, a divisor of them.
    config : S2OConfig, optional
    tau : float or sequence of float, optional
        Overrides ``config.tau`` and ``config.error``.

    Returns
    -------
    Tensor
        Of query's shape, dtype and device.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted: the message names it, what came and what is accepted.
    """
    function = "scaled_dot_product_attention"
    _check_dropout(function, "dropout_p", dropout_p)
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    lower_right = False
    if attn_mask is not None:
        from torch.nn.attention.bias import CausalBias, CausalVariant  # which takes seconds to import

        if not isinstance(attn_mask, CausalBias):
            raise ArgumentValueError(
                f"attn_mask is a {type(attn_mask).__name__}, and S2O takes no mask; accepted: None, "
                "is_causal=True, or causal_lower_right of torch.nn.attention.bias (for padding: "
                "flash_attn_varlen_func)",
                function,
            )
        if is_causal:
            raise ArgumentValueError("attn_mask and is_causal=True came together; accepted: one of them", function)
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (seqlen_q, seqlen_k):
            raise ArgumentValueError(
                f"attn_mask is for {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys; "
                f"accepted: for {seqlen_q} and {seqlen_k}, those of query and key",
                function,
            )
        is_causal, lower_right = True, attn_mask.variant == CausalVariant.LOWER_RIGHT
    if not enable_gqa and query.ndim > 2 and query.shape[-3] != key.shape[-3]:
        raise ArgumentValueError(
            f"query has {query.shape[-3]} heads, key has {key.shape[-3]}; accepted: as many, "
            "or enable_gqa=True",
            function,
        )
    if is_causal and not lower_right:
        if seqlen_q > seqlen_k:
            raise ArgumentValueError(
                f"is_causal=True with {seqlen_q} queries and {seqlen_k} keys, aligned top-left; accepted: "
                "no more queries than keys",
                function,
            )
        key, value = key[..., :seqlen_q, :], value[..., :seqlen_q, :]  # no query sees those behind
    with _in_its_axes(function, "(batch, heads, seqlen, head_dim)"):
        return attention(query, key, value, config=config, tau=tau, scale=scale, is_causal=is_causal)


@answers_habits
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    config: S2OConfig | None = None,
    tau: float | Sequence[float] | None = None,
) -> Any:
    """``flash_attn.flash_attn_func`` by S2O.

    Parameters
    ----------
    q : Tensor, (batch, seqlen_q, heads, head_dim)
        Dtypes and devices as of :func:`s2o_cupy.integrations.torch.attention`.
    k, v : Tensor, (batch, seqlen_k, kv_heads, head_dim)
        heads is a multiple of kv_heads.
    dropout_p : float, default 0
        Only 0.
    softmax_scale : float, optional
        Default 1 / sqrt(head_dim).
    causal : bool, default False
        Aligned bottom-right; seqlen_k >= seqlen_q.
    window_size : (left, right), default (-1, -1)
        With ``causal``, or a right of 0: a query sees ``left`` keys before its own, exactly, whatever tau is; -1, as
        many as there are. ``causal`` hides the keys right of a query, whatever ``right`` says, as of flash-attn.
        Without either only (-1, -1).
    softcap : float, default 0
        Scores become softcap * tanh(score / softcap); 0 leaves them as they are.
    alibi_slopes : None
    deterministic : bool, default False
        Either: a call that is repeated gives the same bits.
    return_attn_probs : bool, default False
        Return ``(out, softmax_lse, None)``: there are no probabilities in memory.
    config : S2OConfig, optional
    tau : float or sequence of float, optional
        Overrides ``config.tau`` and ``config.error``.

    Returns
    -------
    out : Tensor, of q's shape, dtype and device
    softmax_lse : float32 Tensor (batch, heads, seqlen_q), and None, if ``return_attn_probs``

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted: the message names it, what came and what is accepted.
    """
    function, of_flash = "flash_attn_func", "(batch, seqlen, heads, head_dim)"
    _check_flash(function, dropout_p, alibi_slopes)
    causal, window = _parse_window(function, window_size, causal)
    if window is not None:  # which sequences have that are packed
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4:
                raise ArgumentValueError(f"{name} has {x.ndim} axes; accepted with window_size: {of_flash}", function)
    if window is not None and window < k.shape[1]:
        config = parse_config(config, tau)
        q, k, v = to_autocast_dtype(q, k, v)
        with _in_its_axes(function, of_flash):
            problem_of(q, k, v, config, softmax_scale, softcap, is_causal=True, layout="BSHD")
        batch, seqlen_q, heads = q.shape[:3]
        lengths = [(seqlen_q, k.shape[1])] * batch
        q_packed, k_packed, v_packed = (x.flatten(0, 1) for x in (q, k, v))
        o, lse = window_attention(
            q_packed, k_packed, v_packed, lengths, window, config=config, scale=softmax_scale, softcap=softcap
        )
        o, lse = o.view(q.shape), lse.view(heads, batch, seqlen_q).transpose(0, 1)
    else:
        with _in_its_axes(function, of_flash):
            o, lse = attention(
                q, k, v, config=config, tau=tau, scale=softmax_scale, softcap=softcap, is_causal=causal, layout="BSHD",
                return_lse=True,
            )  # fmt: skip
    return (o, lse, None) if return_attn_probs else o


@answers_habits
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    config: S2OConfig | None = None,
    tau: float | Sequence[float] | None = None,
) -> Any:
    """``flash_attn.flash_attn_varlen_func`` by S2O: sequences of any lengths, packed one behind the other.

    Parameters
    ----------
    q : Tensor, (total_q, heads, head_dim)
    k, v : Tensor, (total_k, kv_heads, head_dim)
    cu_seqlens_q, cu_seqlens_k : int32 Tensor, or list or tuple of integers, (batch + 1,)
        Where each sequence begins, and the total. Lists are best: a tensor on a GPU is copied to the host, which
        waits for it.
    max_seqlen_q, max_seqlen_k : int, optional
        Not used: cu_seqlens say it.
    block_table : None
        For paged caches see :func:`s2o_cupy.s2o_attention_paged`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, config, tau
        As of :func:`flash_attn_func`.

    Returns
    -------
    out : Tensor, of q's shape, dtype and device
    softmax_lse : float32 Tensor (heads, total_q), and None, if ``return_attn_probs``

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted: the message names it, what came and what is accepted.
    """
    function = "flash_attn_varlen_func"
    _check_flash(function, dropout_p, alibi_slopes)
    if block_table is not None:
        raise ArgumentValueError(
            f"block_table is a {type(block_table).__name__}; accepted: None (for paged caches call "
            "s2o_cupy.s2o_attention_paged, whose page_table it is)",
            function,
        )
    causal, window = _parse_window(function, window_size, causal)
    # Lists, as an operator takes them: those of a tensor on a GPU are copied to the host.
    begins_q, begins_k = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (cu_seqlens_q, cu_seqlens_k))
    if window is None:
        o, lse = attention_varlen(
            q, k, v, begins_q, begins_k, config=config, tau=tau, scale=softmax_scale, softcap=softcap,
            is_causal=causal, return_lse=True,
        )  # fmt: skip
    else:
        with arguments_of(function):
            lengths = _lengths(begins_q, begins_k, q.shape, k.shape[0])
        o, lse = window_attention(
            q, k, v, lengths, window, config=parse_config(config, tau), scale=softmax_scale, softcap=softcap
        )
    return (o, lse, None) if return_attn_probs else o


def _lengths(begins_q: Any, begins_k: Any, of_q: tuple[int, ...], total_k: int) -> list[tuple[int, int]]:
    """(seqlen_q, seqlen_k) of each packed sequence."""
    begins_q, begins_k = parse_starts("cu_seqlens_q", begins_q), parse_starts("cu_seqlens_k", begins_k)
    check_packed_queries(begins_q, of_q)
    check_packed_keys(begins_q, begins_k, total_k)
    pairs = zip(itertools.pairwise(begins_q), itertools.pairwise(begins_k), strict=True)
    lengths = [(q[1] - q[0], k[1] - k[0]) for q, k in pairs]
    for i, (seqlen_q, seqlen_k) in enumerate(lengths):
        check_lengths(i, seqlen_q, seqlen_k, True)
    return lengths


def _check_dropout(function: str, name: str, dropout: Any) -> None:
    if dropout != 0:
        raise ArgumentValueError(f"{name} is {dropout!r}, and S2O is for inference; accepted: 0.0", function)


def _check_flash(function: str, dropout_p: Any, alibi_slopes: Any) -> None:
    _check_dropout(function, "dropout_p", dropout_p)
    if alibi_slopes is not None:
        raise ArgumentValueError(
            f"alibi_slopes is a {type(alibi_slopes).__name__}, and S2O adds no bias; accepted: None",
            function,
        )


def _parse_window(function: str, window_size: Any, causal: bool) -> tuple[bool, int | None]:
    """Whether attention is causal, and how many keys a query sees, itself among them."""
    try:
        left, right = (operator.index(n) for n in window_size)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"window_size is {window_size!r}; accepted: (left, right), integers, -1 for all keys",
            function,
        ) from None
    causal = causal or right == 0
    if left < 0 and (right < 0 or causal):
        return causal, None
    if not causal or left == 0:
        raise ArgumentValueError(
            f"window_size is {(left, right)} with causal={causal}; accepted: (-1, -1), or with causal=True "
            "(left, 0) with left >= 1",
            function,
        )
    return True, left + 1
