"""The ordinary attention of models with capped scores or attention sinks, in place of sdpa, which has neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Weights", "check_alone", "plain_attention"]

Tensor = Any  # torch.Tensor

SCORES = 1 << 26  # of a chunk of queries: 256 MiB in float32


class Weights(NamedTuple):
    """How a layer makes weights of its scores."""

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    softcap: float = 0.0  # scores are softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [heads]: one more score of each row, which counts for the softmax and has no value
    dropout: float = 0.0

    @property
    def are_sdpas(self) -> bool:
        """Whether scaled_dot_product_attention makes such weights."""
        return not self.softcap and self.sinks is None


def check_alone(weights: Weights, options: Mapping[str, Any]) -> None:
    """Raise ValueError if a layer asks beside capped scores or sinks for what plain_attention would leave out."""
    for name in ("position_bias", "cache"):
        if options.get(name) is not None:
            which = "softcap" if weights.softcap else "s_aux"
            raise ValueError(f"s2o: {name} and {which} came together; accepted: one of them")


def plain_attention(
    query: Tensor,  # [batch, heads, seqlen_q, head_dim]
    key: Tensor,  # [batch, kv_heads, seqlen_k, head_dim]
    value: Tensor,  # [batch, kv_heads, seqlen_k, head_dim of values]
    mask: Tensor | None,  # [batch or 1, heads or 1, seqlen_q, seqlen_k]: bool, or added to the scores
    is_causal: bool,
    weights: Weights,
) -> Tensor:  # [batch, seqlen_q, heads, head_dim of values]
    """Dense attention with softmax in float32.

    A chunk of queries at a time, so that memory does not grow with seqlen_q * seqlen_k. ``is_causal`` is aligned
    bottom-right. What a row holds whose mask hides every key nobody reads.
    """
    batch, heads, seqlen_q, head_dim = query.shape
    kv_heads, seqlen_k = key.shape[1:3]
    scale, softcap, sinks, dropout = weights
    scale = head_dim**-0.5 if scale is None else scale
    positions = torch.arange(seqlen_k, device=query.device)
    step = max(1, SCORES // max(1, batch * heads * seqlen_k))
    parts = []
    for begin in range(0, seqlen_q, step):
        end = min(begin + step, seqlen_q)
        # Heads that share keys stand side by side: [batch, kv_heads, heads of each * rows, head_dim]
        q = query[:, :, begin:end].reshape(batch, kv_heads, -1, head_dim)
        s = (q @ key.transpose(-1, -2)).float().view(batch, heads, end - begin, seqlen_k)
        s = softcap * torch.tanh(s * (scale / softcap)) if softcap else s * scale
        if is_causal:
            rows = torch.arange(begin, end, device=query.device)[:, None] + (seqlen_k - seqlen_q)
            s = s.masked_fill(positions > rows, float("-inf"))
        if mask is not None:
            part = mask[:, :, begin:end, :seqlen_k]
            s = s.masked_fill(~part, torch.finfo(s.dtype).min) if part.dtype == torch.bool else s + part
        if sinks is not None:
            s = torch.cat((s, sinks.to(s).view(1, -1, 1, 1).expand(*s.shape[:3], 1)), -1)
        p = torch.dropout(torch.softmax(s, -1)[..., :seqlen_k], dropout, dropout > 0).to(value.dtype)
        found = p.reshape(batch, kv_heads, -1, seqlen_k) @ value
        parts.append(found.view(batch, heads, end - begin, -1).transpose(1, 2))
    return torch.cat(parts, 1)
