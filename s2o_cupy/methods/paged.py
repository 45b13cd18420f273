"""Methods on keys and values in the pages of a cache."""

from __future__ import annotations

from typing import Any

from ..api.batch import Cached, paged
from ..api.call import Call
from ..api.gather import gather_attention, gather_attention_paged
from ..api.habits import answers_habits
from ..api.paged import check_rows, s2o_attention_paged
from ..arrays.torch_compile import outside_graphs
from ..errors import arguments_of
from ..problem import MAX_SEQLEN
from ..spec import S2OConfig, checked_int
from .attention import select
from .own import as_method

__all__ = ["sparse_attention_paged"]


@outside_graphs
@answers_habits
@arguments_of("sparse_attention_paged")
def sparse_attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    *,
    seqlen_k: int,
    config: Any,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "NHD",
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """`sparse_attention` to keys and values in a paged cache.

    The result is, bit for bit, that of `sparse_attention` to the same keys and values in one array, on the same
    ``path``. Attention reads them where they lie. A selection reads neighbouring keys, of which a copy is made for it;
    where a method permutes keys (PBS-Attn, and SpargeAttn with a ``permutation``) attention reads copies too, of the
    keys and of the values.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim)
    k_pages, v_pages, page_table, layout : as in `s2o_attention_paged`
    seqlen_k : int
        Keys of each sequence.
    config, is_causal, scale, softcap, return_lse, return_stats, out, stream, backend : as in `sparse_attention`

    Returns
    -------
    As `sparse_attention`.

    Raises
    ------
    As `sparse_attention` and `gather_attention_paged`.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy.methods import MeanPoolingConfig, sparse_attention_paged
    >>> rng = np.random.default_rng(0)
    >>> k_pages, v_pages = rng.standard_normal((2, 100, 16, 2, 64), dtype=np.float32)
    >>> page_table = rng.permutation(100).astype(np.int32).reshape(2, 50)
    >>> q = rng.standard_normal((2, 4, 300, 64), dtype=np.float32)
    >>> config = MeanPoolingConfig(threshold=0.5)
    >>> sparse_attention_paged(q, k_pages, v_pages, page_table, seqlen_k=800, config=config).shape
    (2, 4, 300, 64)
    """
    options = {
        "is_causal": is_causal, "scale": scale, "softcap": softcap, "layout": layout, "return_lse": return_lse,
        "return_stats": return_stats, "out": out, "stream": stream, "backend": backend,
    }  # fmt: skip
    seqlen_k = checked_int("seqlen_k", seqlen_k, 0, MAX_SEQLEN)
    method = as_method(config)
    if isinstance(method, S2OConfig):
        return s2o_attention_paged(q, k_pages, v_pages, page_table, seqlen_k=seqlen_k, config=method, **options)
    inputs = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
    call = Call(inputs, backend, stream)
    framework, infos, host = call.framework, call.infos, call.host
    forms, of_pass = tuple([x.form for x in infos]), method.of_pass
    batch = paged(forms, None, Cached(seqlen_k, layout), of_pass, call.backend, is_causal, scale, softcap)
    if host:
        from ..api.on_host import check_entries

        check_entries(framework.on_host(k_pages), framework.on_host(page_table), batch)
    else:
        check_rows(infos[1], infos[2])

    def in_one_array(pages: Any) -> Any:
        with call.scope():
            native, table = (framework.describe(x).native for x in (pages, page_table))
            with framework.graphs_own(native, host=host):
                return _collected(native, table, seqlen_k, layout, unchecked=not host)

    k = in_one_array(k_pages)
    of_selection = {"is_causal": is_causal, "scale": scale, "stream": stream, "backend": call.backend}
    schedule = select(q, k, config, **of_selection)
    if not schedule.form.order_batch:
        return gather_attention_paged(q, k_pages, v_pages, page_table, schedule, path=method.path, **options)
    return gather_attention(
        q, k, in_one_array(v_pages), schedule, path=method.path, **{**options, "layout": "BHSD"}
    )


def _collected(pages: Any, table: Any, seqlen_k: int, layout: str, unchecked: bool) -> Any:
    """[batch, kv_heads, seqlen_k, head_dim] of pages, by the framework's own indexing: nothing waits."""
    from array_api_compat import array_namespace

    xp = array_namespace(pages)
    page_size = pages.shape[1 if layout == "NHD" else 2]
    entries = -(-seqlen_k // page_size)
    named = xp.reshape(table[:, :entries], (-1,))
    if unchecked:  # a number that is no page's would end PyTorch's use of the GPU
        named = xp.clip(named, 0, pages.shape[0] - 1)
    found = xp.take(pages, named, axis=0)  # [batch * entries, ...]
    if layout == "HND":
        found = xp.permute_dims(found, (0, 2, 1, 3))
    kv_heads, head_dim = found.shape[2:]
    rows = xp.reshape(found, (table.shape[0], entries * page_size, kv_heads, head_dim))[:, :seqlen_k]
    return xp.permute_dims(rows, (0, 2, 1, 3))
