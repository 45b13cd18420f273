"""Gradients of NSA's compressed and window branch by PyTorch's own attention, whose kernels have no mask for either:
queries are laid out so that plain masks do. Importing this imports PyTorch.

Compressed: ``stride`` queries in a row see the same keys, and the next ``stride`` one key more. With the place in its
run as a head of its own a run is one row, and the mask is causal.

Window: with ``window + rows`` keys behind ``rows`` queries, each such part has the same mask. Query heads of a KV head
are rows, so that no key is copied for them.
"""

# mypy: disable-error-code="call-arg"
# A starred generator counts as any number of arguments there.

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

__all__ = ["Branches"]

Tensor = Any  # torch.Tensor
# cuDNN's is the fastest backward, and not always PyTorch's choice.
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


class Branches:
    """Adds each branch's part to the gradients of q and of the gates.

    Parameters
    ----------
    q, do : (batch, heads, seqlen_q, head_dim)
        Queries, and the gradient of the call's output.
    seqlen_k : int
        The last query is at position ``seqlen_k - 1``.
    dq : as q, float32 or float64
    dgates : (batch, heads, seqlen_q, 3), in dq's dtype
    at_once_bytes : int
        PyTorch attends with about so many bytes of queries at once, and never with less than a part of the window or
        one query of each run.
    """

    def __init__(
        self, q: Tensor, do: Tensor, seqlen_k: int, scale: float, dq: Tensor, dgates: Tensor, at_once_bytes: int
    ) -> None:
        self.q, self.do, self.scale, self.dq, self.dgates = q, do, scale, dq, dgates
        self.seqlen_k, self.offset = seqlen_k, seqlen_k - q.shape[2]
        self.at_once = max(1, at_once_bytes // q.element_size())

    def compressed(self, k: Tensor, v: Tensor, gated: Tensor, length: int, stride: int) -> tuple[Tensor, Tensor]:
        """``gated``: do times the branch's gate. Returns dk and dv, as k in dq's dtype."""
        q, (batch, heads, _, dim) = self.q, self.q.shape
        dk, dv = (torch.zeros_like(x, dtype=self.dq.dtype) for x in (k, v))
        seen_from = length - 1  # the first position that sees a key
        rows = slice(max(seen_from - self.offset, 0), q.shape[2])
        if rows.start >= rows.stop or not q.numel():
            return dk, dv
        first, front = divmod(rows.start + self.offset - seen_from, stride)
        runs = k.shape[2] - first
        pads = (0, 0, front, runs * stride - front - (rows.stop - rows.start))

        def in_runs(x: Tensor) -> Tensor:  # [B, H, stride, runs, D]
            return pad(x[:, :, rows], pads).view(batch, heads, runs, stride, dim).transpose(2, 3)

        def in_rows(x: Tensor) -> Tensor:  # [B, H, rows, ...], of [B, H, stride, runs, ...]
            return x.transpose(2, 3).flatten(2, 3)[:, :, front : front + rows.stop - rows.start]

        mask = None
        if first or self.scale <= 0:  # PyTorch's is_causal scales the -inf that it masks by
            mask = torch.ones(runs, k.shape[2], dtype=torch.bool, device=q.device).tril(first)
        of_q = q.new_empty(batch, heads, stride, runs, dim)
        of_gates = self.dq.new_empty(batch, heads, stride, runs)
        places = max(1, self.at_once // (batch * heads * runs * dim))
        queries, others = in_runs(q), [in_runs(x) for x in (gated, self.do)]
        for at in (slice(i, i + places) for i in range(0, stride, places)):
            found = _gradients(*(x[:, :, at].flatten(1, 2) for x in (queries, *others)), k, v, self.scale, mask)
            of_q[:, :, at] = found.q.unflatten(1, (heads, -1))
            of_gates[:, :, at] = found.gate.unflatten(1, (heads, -1))
            dk += found.k
            dv += found.v
        self.dq[:, :, rows] += in_rows(of_q)
        self.dgates[:, :, rows, 0] = in_rows(of_gates)
        return dk, dv

    def window(self, k: Tensor, v: Tensor, gated: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """As `compressed`."""
        dk, dv = (torch.zeros_like(x, dtype=self.dq.dtype) for x in (k, v))
        if not self.q.numel():
            return dk, dv
        window = min(window, self.seqlen_k)
        first = max(window - self.offset, 0)  # rows before this one see all keys up to their own
        if first:
            j = torch.arange(window, device=k.device)
            mask = j <= j[self.offset :, None]  # [first, window]
            self._add(slice(0, first), slice(0, window), 1, mask, k, v, gated, dk, dv)
        at_once = math.ceil(window / 2)  # half as many keys again as a row sees are multiplied
        i, j = torch.arange(at_once, device=k.device)[:, None], torch.arange(3 * at_once, device=k.device)
        mask = (j > i) & (j <= i + window)
        many = max(1, self.at_once // (math.prod(self.q.shape) // self.q.shape[2] * at_once))
        while first < self.q.shape[2]:
            count = min(many, math.ceil((self.q.shape[2] - first) / at_once))
            before = first + self.offset - window
            rows, keys = slice(first, first + count * at_once), slice(before, before + (count + 2) * at_once)
            self._add(rows, keys, count, mask, k, v, gated, dk, dv)
            first = rows.stop
        return dk, dv

    def _add(
        self, rows: slice, keys: slice, count: int, mask: Tensor, k: Tensor, v: Tensor, gated: Tensor, dk: Tensor,
        dv: Tensor,
    ) -> None:  # fmt: skip
        """``count`` parts of mask.shape rows and keys, each as far behind the one before as it has rows. More than one
        have a multiple of their rows as keys."""
        many, many_keys = mask.shape
        (batch, heads, _, dim), kv_heads = self.q.shape, k.shape[1]
        of_part = (kv_heads, heads // kv_heads)

        def in_parts(x: Tensor) -> Tensor:  # [parts * B, Hkv, G * many, D]
            x = x[:, :, rows]
            x = pad(x, (0, 0, 0, count * many - x.shape[2])).view(batch, *of_part, count, many, dim)
            return x.permute(3, 0, 1, 2, 4, 5).reshape(count * batch, kv_heads, -1, dim)

        def in_rows(x: Tensor) -> Tensor:  # [B, H, rows, ...], of [parts * B, Hkv, G * many, ...]
            x = x.view(count, batch, *of_part, many, *x.shape[3:])
            return x.permute(1, 2, 3, 0, 4, *range(5, x.ndim)).flatten(3, 4).flatten(1, 2)[:, :, : self._rows(rows)]

        def of_parts(x: Tensor) -> Tensor:  # [parts * B, Hkv, many_keys, D]
            x = x[:, :, keys]
            x = pad(x, (0, 0, 0, keys.stop - keys.start - x.shape[2])).unfold(2, many_keys, many)
            return x.permute(2, 0, 1, 4, 3).reshape(count * batch, kv_heads, many_keys, dim)

        found = _gradients(
            *(in_parts(x) for x in (self.q, gated, self.do)), of_parts(k), of_parts(v), self.scale,
            mask.repeat(of_part[1], 1),
        )  # fmt: skip
        self.dq[:, :, rows] += in_rows(found.q)
        self.dgates[:, :, rows, 2] = in_rows(found.gate)
        step = many if count > 1 else many_keys
        for total, x in ((dk, found.k), (dv, found.v)):
            x = x.view(count, batch, kv_heads, many_keys, dim).permute(1, 2, 0, 3, 4)
            for first in range(0, many_keys, step):  # of all parts at once: these do not overlap
                at = slice(keys.start + first, min(keys.start + first + count * step, k.shape[2]))
                total[:, :, at] += x[:, :, :, first : first + step].flatten(2, 3)[:, :, : at.stop - at.start]

    def _rows(self, rows: slice) -> int:
        return min(rows.stop, self.q.shape[2]) - rows.start


class _Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor  # [B, H, rows], float32 or float64


def _gradients(
    q: Tensor, gated: Tensor, do: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> _Gradients:
    """Causal without a mask. ``mask``: bool [rows, keys], where a row sees a key; each row sees one."""
    with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        keys, values = leaves[1:]
        if mask is not None and (group := q.shape[1] // k.shape[1]) > 1:  # PyTorch's kernels with a mask have no groups
            keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        with sdpa_kernel(BACKENDS, set_priority=True):
            o = scaled_dot_product_attention(
                leaves[0], keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=mask is None
            )
    of_q, of_k, of_v = torch.autograd.grad(o, leaves, gated)
    wide = torch.promote_types(q.dtype, torch.float32)
    return _Gradients(of_q, of_k, of_v, (do.to(wide) * o.detach().to(wide)).sum(-1))
