"""Causal attention in a sliding window, exactly, by two dense calls on packed sequences.

With a window of w keys, the query's own among them, positions are cut into blocks of w - 1. A query sees two things:

- of its own block, what is not behind it: causal attention;
- of the block before, what is not behind the *end* of its window: the nth query of the block sees all but the first n
  keys. From back to front, queries and keys, that is causal attention as well, aligned bottom-right.

The two results have no key in common and merge by their log-sum-exps. As many pairs are computed as a window has, with
the tiles that masks cut: the cost grows with tokens times window.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..merge import merge_states
from ..methods.own import AnyMethod, pass_of
from ..spec import Pass, S2OConfig
from .packed_rows import starts
from .torch import attention_varlen

__all__ = ["window_attention"]

Tensor = Any  # torch.Tensor
Rows = tuple[int, int]  # first row, one behind the last

MERGED_ROWS = 1 << 14  # at a time, as a merge computes in float32 and makes several such arrays


class _Call(NamedTuple):
    """Rows of the packed q, k and v, and the lengths of the sequences in them."""

    rows_q: list[Rows]  # none: all of q
    rows_k: list[Rows]
    lengths_q: list[int]
    lengths_k: list[int]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[tuple[int, int]],
    window: int,
    *,
    config: AnyMethod,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed sequences in which a query sees the last ``window`` of its keys, itself among them.

    Parameters
    ----------
    q : Tensor, (total_q, heads, head_dim)
    k, v : Tensor, (total_k, kv_heads, head_dim)
    lengths : sequence of (seqlen_q, seqlen_k)
        Of each sequence, packed in this order; seqlen_q <= seqlen_k, and the last query sees the last key.
    window : int
        At least 2.
    config : S2OConfig, or another method
        Of which only what does not decide the result is used: nothing is left out, whatever its tau.
    scale, softcap
        As of :func:`s2o_cupy.s2o_attention`.

    Returns
    -------
    o : Tensor, of q's shape, dtype and device
    lse : float32 Tensor (heads, total_q)
    """
    own, before = _calls(tuple(lengths), window)
    dense = _dense(pass_of(config))
    attend = functools.partial(attention_varlen, config=dense, scale=scale, softcap=softcap, return_lse=True)
    if not own.lengths_q:  # no sequence has a query
        return torch.empty_like(q), q.new_empty((q.shape[1], 0), dtype=torch.float32)
    k_own, v_own = (_joined([x[begin:end] for begin, end in own.rows_k]) for x in (k, v))
    o, lse = attend(q, k_own, v_own, starts(own.lengths_q), starts(own.lengths_k))
    if before.lengths_q:
        k_before, v_before = _flipped(k, before.rows_k), _flipped(v, before.rows_k)
        cu_seqlens = starts(before.lengths_q), starts(before.lengths_k)
        o_before, lse_before = attend(_flipped(q, before.rows_q), k_before, v_before, *cu_seqlens)
        end = 0  # of a sequence's rows of o_before, which are its last ones from back to front
        for first, last in before.rows_q:
            end += last - first
            for row in range(first, last, MERGED_ROWS):
                rows = slice(row, min(row + MERGED_ROWS, last))
                back = slice(end - (rows.stop - first), end - (row - first))
                o[rows], lse[:, rows] = merge_states(
                    o[rows], lse[:, rows], o_before[back].flip(0), lse_before[:, back].flip(1), layout="BSHD"
                )
    return o, lse


@functools.lru_cache(maxsize=64)
def _calls(lengths: tuple[tuple[int, int], ...], window: int) -> tuple[_Call, _Call]:
    """To a query's own block, with all queries as they lie, and to the block before, with the rows of each sequence
    from back to front."""
    block = window - 1
    own, before = _Call([], [], [], []), _Call([], [], [], [])
    begin_q = begin_k = 0
    for seqlen_q, seqlen_k in lengths:
        # The keys that the first query sees no more count for nothing: `offset` keys are left before it.
        offset = min(seqlen_k - seqlen_q, block)
        begin, end = begin_k + seqlen_k - seqlen_q - offset, begin_k + seqlen_k  # position 0 is key `begin`
        blocks = list(itertools.pairwise([*range(0, end - begin, block), end - begin]))
        for first, last in blocks:
            if last > offset:  # queries have no business in the first block if all of it lies before them
                own.lengths_q.append(last - max(first, offset))
                own.lengths_k.append(last - first)
        if seqlen_q:
            own.rows_k.append((begin + (block if offset == block else 0), end))
        if len(blocks) > 1:
            before.rows_q.append((begin_q + block - offset, begin_q + seqlen_q))
            before.rows_k.append((begin, begin + (len(blocks) - 1) * block))
            before.lengths_q.extend(last - first for first, last in reversed(blocks[1:]))
            before.lengths_k.extend([block] * (len(blocks) - 1))
        begin_q, begin_k = begin_q + seqlen_q, begin_k + seqlen_k
    return own, before


@functools.lru_cache(maxsize=64)
def _dense(of_pass: Pass) -> S2OConfig:
    return S2OConfig(tau=0.0, block_m=of_pass.block_m, block_n=of_pass.block_n, path=of_pass.path)


def _flipped(x: Tensor, rows: list[Rows]) -> Tensor:
    return _joined([x[begin:end].flip(0) for begin, end in rows])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
