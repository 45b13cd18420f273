"""Attention to keys and values in the pages of a cache, as serving engines keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ..arrays.array_info import ArrayInfo
from ..arrays.lengths import parse_lengths, parse_starts
from ..arrays.torch_compile import outside_graphs
from ..errors import ArgumentValueError, arguments_of
from ..problem import check_flag
from ..spec import S2OConfig
from .batch import Cached, paged
from .call import Call
from .habits import answers_habits
from .run import parse_config, run
from .scales import check_scales, is_fp8_cache, parse_scale

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import PagedOptions

__all__ = ["check_rows", "s2o_attention_paged"]

Array = TypeVar("Array")


# fmt: off
@overload
def s2o_attention_paged(
    q: Array, k_pages: Any, v_pages: Any, page_table: Any, *, seqlen_k: Any,
    return_lse: Literal[False] = ..., return_stats: Literal[False] = ..., **options: Unpack[PagedOptions],
) -> Array: ...
@overload
def s2o_attention_paged(
    q: Array, k_pages: Any, v_pages: Any, page_table: Any, *, seqlen_k: Any,
    return_lse: Literal[True], return_stats: Literal[False] = ..., **options: Unpack[PagedOptions],
) -> tuple[Array, Array]: ...
@overload
def s2o_attention_paged(
    q: Array, k_pages: Any, v_pages: Any, page_table: Any, *, seqlen_k: Any,
    return_lse: Literal[False] = ..., return_stats: Literal[True], **options: Unpack[PagedOptions],
) -> tuple[Array, Any]: ...
@overload
def s2o_attention_paged(
    q: Array, k_pages: Any, v_pages: Any, page_table: Any, *, seqlen_k: Any,
    return_lse: Literal[True], return_stats: Literal[True], **options: Unpack[PagedOptions],
) -> tuple[Array, Array, Any]: ...
@overload
def s2o_attention_paged(
    q: Array, k_pages: Any, v_pages: Any, page_table: Any, *, seqlen_k: Any,
    return_lse: bool = ..., return_stats: bool = ..., **options: Unpack[PagedOptions],
) -> Any: ...
# fmt: on
@outside_graphs
@answers_habits
@arguments_of("s2o_attention_paged")
def s2o_attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    *,
    seqlen_k: Any,
    cu_seqlens_q: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    tau: float | Sequence[float] | None = None,
    config: S2OConfig | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    layout: str = "NHD",
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """`s2o_attention` to keys and values in a paged cache, read where they lie, but for those of 8 bits and in
    some dense calls those of small pages.

    The result is, bit for bit, that of `s2o_attention` to the same keys and values in one array, on the same ``path``.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim), or with ``cu_seqlens_q`` (total_q, heads, head_dim)
        Queries, the last of each sequence if causal. On the GPU rows of q, of both caches and of the output start on
        16 bytes, of a cache of 8 bits on 8, and head_dim is a multiple of 8. A view in another order of axes costs
        nothing.
    k_pages, v_pages : array, (pages, page_size, kv_heads, head_dim)
        The cache, of q's framework, device and dtype, or 8 bits: float8_e4m3fn, or its bytes as uint8 with both scales.
        page_size is a power of two. Strides are read in place but for the last axis, which is contiguous.
    page_table : int32 array, (batch, pages_per_sequence)
        On q's device: entry i of a sequence is the page of its keys i * page_size and on. Only the entries of the
        first seqlen_k keys are read. On the GPU they are not checked, as the host would wait for it: an entry that is
        no page of the cache reads memory that is not the cache's.
    seqlen_k : int, or list, tuple, or int32 or int64 array, (batch,)
        Keys of each sequence. Neighbours of one length share their launches; others take turns. Best on the host: an
        array on a GPU is copied there, for which the host waits, and while a CUDA graph is captured it is refused.
        A graph keeps the lengths that it was captured with, and follows the page table.
    cu_seqlens_q : list, tuple, or int32 or int64 array, (batch + 1,), optional
        Queries of any number for each sequence, packed one sequence behind the other: where each begins in q, and
        total_q. 0, then ascending; equal neighbours are a sequence without queries. As serving engines send a batch of
        prompts, chunks of prompts and prompts with a cached prefix. Best on the host, like seqlen_k. All sequences that
        are attended densely (``S2OConfig.dense_up_to``: short ones) share a launch, longer ones take turns.
    k_scale, v_scale : float, or float32 array, () or (1,) or (kv_heads,), default 1 of float8_e4m3fn
        Of a cache of 8 bits: a key is k_scale times what is in its page, the product in float32, rounded to q's dtype.
        Arrays are on q's device, and nothing waits for them.
    layout : {"NHD", "HND"}, default "NHD"
        Order of the axes of a page; "HND" is (pages, kv_heads, page_size, head_dim).
    return_stats : bool, default False
        As of `s2o_attention`; all sequences must be of one length. With ``cu_seqlens_q`` of any length, and a list of
        S2OStats, one for each sequence.
    tau, config, scale, softcap, is_causal, return_lse, out, stream, backend
        As of `s2o_attention`.

    Returns
    -------
    As `s2o_attention`; with ``cu_seqlens_q`` as `s2o_attention_varlen`: o like q, lse (heads, total_q).

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted; the message names it, what came and what is accepted.
    S2OError
        The machine cannot run the call (no CuPy, too old a driver or card).

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import s2o_attention_paged
    >>> rng = np.random.default_rng(0)
    >>> k_pages, v_pages = rng.standard_normal((2, 40, 16, 2, 64), dtype=np.float32)
    >>> page_table = rng.permutation(40).astype(np.int32).reshape(2, 20)
    >>> q = rng.standard_normal((2, 4, 100, 64), dtype=np.float32)
    >>> s2o_attention_paged(q, k_pages, v_pages, page_table, seqlen_k=[300, 317]).shape
    (2, 4, 100, 64)

    100 new queries of the first sequence and 30 of the second, in one call:

    >>> q = rng.standard_normal((130, 4, 64), dtype=np.float32)
    >>> cu_seqlens_q = [0, 100, 130]
    >>> s2o_attention_paged(q, k_pages, v_pages, page_table, seqlen_k=[300, 317], cu_seqlens_q=cu_seqlens_q).shape
    (130, 4, 64)

    A cache of 8 bits:

    >>> import ml_dtypes
    >>> k_pages, v_pages = ((x / 0.5).astype(ml_dtypes.float8_e4m3fn) for x in (k_pages, v_pages))
    >>> s2o_attention_paged(
    ...     q, k_pages, v_pages, page_table, seqlen_k=[300, 317], cu_seqlens_q=cu_seqlens_q, k_scale=0.5, v_scale=0.5
    ... ).shape
    (130, 4, 64)
    """
    config = parse_config(config, tau)
    parsed = {"k_scale": parse_scale("k_scale", k_scale), "v_scale": parse_scale("v_scale", v_scale)}
    arrays = {name: x for name, x in parsed.items() if not isinstance(x, float)}
    inputs = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "page_table": page_table, **arrays}
    call = Call(inputs, backend, stream, out)
    of_q, of_k, of_v = call.infos[:3]
    fp8 = is_fp8_cache(of_q, of_k, of_v, k_scale, v_scale)
    starts_q = None if cu_seqlens_q is None else parse_starts("cu_seqlens_q", cu_seqlens_q)
    cached = Cached(parse_lengths("seqlen_k", seqlen_k), layout, fp8)
    forms = tuple([x.form for x in call.infos[:4]])
    batch = paged(forms, starts_q, cached, config, call.backend, is_causal, scale, softcap)
    check_scales(dict(zip(arrays, call.infos[4:], strict=True)), batch.whole.kv_heads)
    if check_flag("return_stats", return_stats) and not batch.packed and len(batch.all_parts) > 1:
        lengths = [x.problem.seqlen_k for x in batch.all_parts]
        raise ArgumentValueError(
            f"return_stats with seqlen_k of {len(lengths)} different lengths in turn ({lengths}); "
            "accepted: one length for all sequences, or cu_seqlens_q, with which each has statistics of its own"
        )
    if not call.host:
        check_rows(of_k, of_v)
    scales = None
    if fp8:
        k, v = (x if isinstance(x, float) else None for x in parsed.values())
        scales = k, v
    return run(batch, call, return_lse=return_lse, return_stats=return_stats, scales=scales, config=config)


def check_rows(k_pages: ArrayInfo, v_pages: ArrayInfo) -> None:
    """A whole cache is never copied, as it would have to be for rows with gaps."""
    for name, info in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not info.has_contiguous_rows:
            raise ArgumentValueError(
                f"{name} has a stride of {info.strides[-1]} bytes on its last axis; "
                f"accepted: a contiguous last axis ({info.itemsize} bytes)"
            )
