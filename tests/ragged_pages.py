"""Queries of any number for each sequence over a paged cache: what is not as in a call for each sequence.

Importing this needs no GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from conftest import Device
from packs import starts, unlike_alone
from pages import paged, random_table

from s2o_cupy import s2o_attention_paged


def in_pages(rng: Any, rows: np.ndarray, lengths: list[int], page_size: int, layout: Any) -> tuple[Any, Any]:
    """A page table for keys packed one sequence behind the other, and what puts such rows into a cache; NaN, where no
    key of any sequence is."""
    table, pages = random_table(rng, lengths, page_size)

    def put(packed_rows: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(lengths), rows.shape[1], max(1, *lengths), rows.shape[2]), rows.dtype)
        for i, (begin, end) in enumerate(itertools.pairwise(starts(lengths))):
            padded[i, :, : end - begin] = packed_rows[begin:end].swapaxes(0, 1)
        return paged(padded, table, pages, page_size, layout, lengths)

    return table, put


def differing(
    device: Device, rng: Any, arrays: Any, lengths_q: list[int], lengths_k: list[int], page_size: int, layout: Any,
    **options: Any,
) -> list[str]:  # fmt: skip
    """What of which sequence is not, bit for bit, that of a call of its own on keys in one array. ``arrays``: q
    [total_q, heads, head_dim], k and v [total_k, kv_heads, head_dim] on the host; the output is NaN before."""
    options.setdefault("config", device.config)
    q, k, v = (x.astype(device.dtype) for x in arrays)
    table, put = in_pages(rng, k, lengths_k, page_size, layout)
    inputs = [device.xp.asarray(x) for x in (q, put(k), put(v), table)]
    out = device.poisoned(q.shape)
    o, lse, stats = s2o_attention_paged(
        *inputs, seqlen_k=lengths_k, cu_seqlens_q=starts(lengths_q), layout=layout, out=out, return_lse=True,
        return_stats=True, **options,
    )  # fmt: skip
    assert o is out
    assert lse.shape == (q.shape[1], q.shape[0])
    assert len(stats) == len(lengths_q)
    q, k, v = (device.xp.asarray(x) for x in (q, k, v))
    return unlike_alone((o, lse, stats), q, k, v, lengths_q, lengths_k, **options)
