"""NSA with gradients, for training with PyTorch. Importing this imports PyTorch.

Forward it is :func:`s2o_cupy.nsa.nsa_attention`. Backward the selected branch goes by blocks of keys, as forward
(:func:`s2o_cupy.nsa.selected_attention_backward`), and PyTorch computes the other two, some rows at a time. Which
blocks a token attends to is a choice: it has no gradient.
"""

from __future__ import annotations

from typing import Any

from ..extras import with_extra

with with_extra(__name__, "PyTorch"):
    import torch
    from torch.autograd.function import once_differentiable

from ..nsa.attention import nsa_attention as attend
from ..nsa.attention import nsa_select, selected_attention
from ..nsa.config import NSAConfig
from ..nsa.gradients import selected_attention_backward

__all__ = ["nsa_attention"]

Tensor = Any  # torch.Tensor
ROWS = 1024  # queries of a branch that PyTorch computes at once


def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """:func:`s2o_cupy.nsa.nsa_attention` with a derivative with respect to each tensor.

    Parameters
    ----------
    q, k, v, k_cmp, v_cmp, gates, config, k_win, v_win, scale : as in :func:`s2o_cupy.nsa.nsa_attention`
        Tensors are (batch, heads, seqlen, head_dim), gates (batch, seqlen_q, 3) or (batch, heads, seqlen_q, 3), on the
        CPU or a GPU.

    Returns
    -------
    Tensor like q

    Raises
    ------
    As :func:`s2o_cupy.nsa.nsa_attention`. A second derivative is a RuntimeError.

    Notes
    -----
    Backward takes, beside the gradients, the memory of their sums in float32 and ``config.workspace_bytes``. Each
    branch is computed anew; nothing but the arguments is kept from the forward.

    Examples
    --------
    >>> import torch
    >>> from s2o_cupy.nsa import nsa_compress
    >>> from s2o_cupy.integrations.nsa import nsa_attention
    >>> q = torch.randn(1, 4, 200, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 1, 2, 200, 64)
    >>> o = nsa_attention(q, k, v, nsa_compress(k), nsa_compress(v), torch.rand(1, 200, 3))
    >>> o.sum().backward()
    >>> q.grad.shape
    torch.Size([1, 4, 200, 64])
    """
    return _Attention.apply(q, k, v, k_cmp, v_cmp, gates, k_win, v_win, config or NSAConfig(), scale)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, gates: Tensor, k_win: Tensor | None,
        v_win: Tensor | None, config: NSAConfig, scale: float | None,
    ) -> Tensor:  # fmt: skip
        ctx.config, ctx.scale = config, scale
        ctx.save_for_backward(q, k, v, k_cmp, v_cmp, gates, k_win, v_win)
        return attend(q, k, v, k_cmp, v_cmp, gates, config=config, k_win=k_win, v_win=v_win, scale=scale)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, k_cmp, v_cmp, gates, k_win, v_win = ctx.saved_tensors
        config, scale = ctx.config, q.shape[-1] ** -0.5 if ctx.scale is None else ctx.scale
        of_heads = gates[:, None] if gates.ndim == 3 else gates  # [B, H or 1, Lq, 3]
        sums = torch.float64 if q.dtype == torch.float64 else torch.float32
        of_branches = [(of_heads[..., i, None] * do).to(q.dtype) for i in range(3)]

        blocks = nsa_select(q, k_cmp, seqlen_k=k.shape[2], config=config, scale=scale)
        o, lse = selected_attention(
            q, k, v, blocks, config.block, scale=scale, return_lse=True, workspace_bytes=config.workspace_bytes
        )
        dq, dk, dv = selected_attention_backward(
            q, k, v, blocks, o, lse, of_branches[1].contiguous(), config.block, scale=scale,
            workspace_bytes=config.workspace_bytes,
        )  # fmt: skip
        dgates = torch.zeros(*q.shape[:3], 3, dtype=sums, device=q.device)
        dgates[..., 1] = (do.to(sums) * o.to(sums)).sum(-1)

        others = _Others(q, k.shape[2], do, scale, dq, dgates)
        dk_cmp, dv_cmp = others.add(
            0, k_cmp, v_cmp, of_branches[0],
            first=lambda p: 0, end=lambda p: torch.clamp((p - config.length + 1) // config.stride + 1, min=0),
        )  # fmt: skip
        own = k_win is not None
        dk_win, dv_win = others.add(
            2, k_win if own else k, v_win if own else v, of_branches[2],
            first=lambda p: torch.clamp(p - config.window + 1, min=0), end=lambda p: p + 1,
        )  # fmt: skip
        if not own:
            dk, dv = dk + dk_win, dv + dv_win
            dk_win = dv_win = None
        dgates = dgates.sum(dim=1) if gates.ndim == 3 else dgates
        found = (dq, dk, dv, dk_cmp, dv_cmp, dgates, dk_win, dv_win)
        given = (q, k, v, k_cmp, v_cmp, gates, k_win, v_win)
        return (*(None if x is None else x.to(of.dtype) for x, of in zip(found, given, strict=True)), None, None)


class _Others:
    """The branches in which a query attends to neighbouring keys, by PyTorch."""

    def __init__(self, q: Tensor, seqlen_k: int, do: Tensor, scale: float, dq: Tensor, dgates: Tensor) -> None:
        self.q, self.do, self.scale, self.dq, self.dgates = q, do, scale, dq, dgates
        self.offset = seqlen_k - q.shape[2]

    def add(self, branch: int, k: Tensor, v: Tensor, do: Tensor, *, first: Any, end: Any) -> tuple[Tensor, Tensor]:
        """A branch's part of dq and dgates is added to them. ``do``: its gradient. A query at position p sees the keys
        from ``first(p)`` to ``end(p) - 1``. Returns dk and dv."""
        q, group = self.q, self.q.shape[1] // k.shape[1]
        dk, dv = (torch.zeros_like(x, dtype=self.dq.dtype) for x in (k, v))
        for begin in range(0, q.shape[2], ROWS):
            p = torch.arange(begin, min(begin + ROWS, q.shape[2])) + self.offset
            seen = torch.stack([torch.as_tensor(first(p)).expand_as(p), end(p)])  # [first and end, rows]
            rows = torch.nonzero(seen[1] > seen[0]).flatten()  # those with a key are the last ones
            if len(rows) == 0:
                continue
            at = slice(begin + int(rows[0]), begin + len(p))
            low, high = seen[:, rows[0] :]
            keys = slice(int(low.min()), int(high.max()))
            j = torch.arange(keys.start, keys.stop)
            mask = ((j >= low[:, None]) & (j < high[:, None])).to(q.device)  # [rows, keys]
            with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
                leaves = [x.detach().requires_grad_() for x in (q[:, :, at], k[:, :, keys], v[:, :, keys])]
                of_heads = [x.repeat_interleave(group, dim=1) for x in leaves[1:]]
                o = torch.nn.functional.scaled_dot_product_attention(
                    leaves[0], *of_heads, attn_mask=mask, scale=self.scale
                )
            of_q, of_k, of_v = torch.autograd.grad(o, leaves, do[:, :, at])
            self.dq[:, :, at] += of_q
            dk[:, :, keys] += of_k
            dv[:, :, keys] += of_v
            self.dgates[:, :, at, branch] = (self.do[:, :, at].to(dk.dtype) * o.detach().to(dk.dtype)).sum(-1)
        return dk, dv
