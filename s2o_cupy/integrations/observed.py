"""A model under an attention function that a tool gives it for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from ..tools.inputs import QKV
from .autocast import to_autocast_dtype
from .implementations import lent
from .mask_functions import causal_mask
from .transformers import Asked, S2OAttention

__all__ = ["longest_sequence", "observed"]

Tensor = Any  # torch.Tensor
NAME = "s2o_observed"
_function: ContextVar[Callable[..., Any]] = ContextVar("s2o_observed")


@contextmanager
def observed(model: Any, s2o: S2OAttention, attend: Callable[[Asked], Tensor]) -> Iterator[None]:
    """Each layer's attention is ``attend(asked)``, what it asks of ``s2o``: [batch, seqlen_q, heads, head_dim]."""

    def function(*args: Any, **options: Any) -> tuple[Tensor, None]:
        return attend(s2o.asked(*args, **options)), None

    token = _function.set(function)
    try:
        with lent(model, NAME), torch.no_grad():
            yield
    finally:
        _function.reset(token)


def longest_sequence(asked: Asked) -> QKV:
    """q [batch, heads, seqlen_q, head_dim], k and v of what a layer asks for; of a padded or packed batch, the
    sequence with the most keys."""
    q, k, v = to_autocast_dtype(asked.query, asked.key, asked.value)
    spans_q, spans_k = asked.call.spans_q, asked.call.spans_k
    if spans_q is None or spans_k is None:
        return QKV(q, k, v)
    longest = max(range(len(spans_k)), key=lambda n: spans_k[n][2] - spans_k[n][1])
    (row, begin, end), (_, first, last) = spans_q[longest], spans_k[longest]
    one = slice(row, row + 1)
    return QKV(q[one, :, begin:end], k[one, :, first:last], v[one, :, first:last])


def _attend(*args: Any, **options: Any) -> Any:
    return _function.get()(*args, **options)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, causal_mask)
