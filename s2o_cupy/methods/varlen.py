"""Packed sequences by a published method: each sequence where it lies, one after the other."""

from __future__ import annotations

import itertools
from typing import Any

from ..api.call import Call
from ..api.gather_varlen import PackedTurns
from ..api.habits import answers_habits
from ..arrays.torch_compile import outside_graphs
from ..errors import arguments_of
from ..problem import MAX_SEQLEN, OnlyLayout, check_by_head
from ..spec import S2OConfig, checked_int
from .attention import sparse_attention
from .own import as_method

__all__ = ["sparse_attention_varlen"]


@outside_graphs
@answers_habits
@arguments_of("sparse_attention_varlen")
def sparse_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    config: Any,
    dense_up_to: int = 0,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """`sparse_attention` of several sequences of any lengths, packed one behind the other.

    The same, bit for bit, as `sparse_attention` on each sequence. Sequences take turns.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k : as in `s2o_attention_varlen`
    config : as in `sparse_attention`
    dense_up_to : int, default 0
        Sequences of up to so many keys are dense; neighbours of them share a launch.
    is_causal, scale, softcap, return_lse, return_stats, out, stream, backend : as in `sparse_attention`

    Returns
    -------
    As `gather_attention_varlen`; with an S2OConfig all stats are S2OStats.

    Raises
    ------
    As `sparse_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy.methods import MeanPoolingConfig, sparse_attention_varlen
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 900, 2, 64))
    >>> sparse_attention_varlen(q, k, v, [0, 800, 900], config=MeanPoolingConfig(threshold=0.5)).shape
    (900, 2, 64)
    """
    dense_up_to = checked_int("dense_up_to", dense_up_to, 0, MAX_SEQLEN)
    arrays = Call({"q": q, "k": k, "v": v}, backend, stream, out)
    method = as_method(config, "config", "sparse_attention_varlen")
    own = method if isinstance(method, S2OConfig) else S2OConfig(tau=0, path=method.path)
    call = PackedTurns(arrays, cu_seqlens_q, cu_seqlens_k, is_causal, scale, softcap, own)
    short = [end - begin <= dense_up_to for begin, end in itertools.pairwise(call.starts_k)]
    for i, is_dense in enumerate(short):  # before any sequence is attended
        if is_dense:
            continue
        if isinstance(method, S2OConfig):
            check_by_head(call.problem(i, is_causal), method)
        else:
            method.check(call.problem(i, is_causal))

    def attend(first: int, end: int, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if short[first]:
            return call.dense(first, end, arrays, is_causal, options)
        return sparse_attention(*arrays, config=config, is_causal=is_causal, layout=OnlyLayout("BSHD"), **options)

    return call.run(attend, short, return_lse, return_stats)
