"""NSA with gradients, for training with PyTorch. Importing this imports PyTorch.

Forward it is :func:`s2o_cupy.nsa.nsa_attention`. Backward the selected branch goes by blocks of keys, as forward
(:func:`s2o_cupy.nsa.selected_attention_backward`), and PyTorch's attention computes the other two (`nsa_branches`).
Which blocks a token attends to is a choice: it has no gradient.
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
from .nsa_branches import Branches

__all__ = ["nsa_attention"]

Tensor = Any  # torch.Tensor
TURNS = 16  # PyTorch attends with a part of workspace_bytes of queries at once, one of so many


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
    config = NSAConfig() if config is None else config
    return _Attention.apply(q, k, v, k_cmp, v_cmp, gates, k_win, v_win, config, scale)


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

        others = Branches(q, do, k.shape[2], scale, dq, dgates, config.workspace_bytes // TURNS)
        dk_cmp, dv_cmp = others.compressed(k_cmp, v_cmp, of_branches[0], config.length, config.stride)
        own = k_win is not None
        dk_win, dv_win = others.window(k_win if own else k, v_win if own else v, of_branches[2], config.window)
        if not own:
            dk, dv = dk + dk_win, dv + dv_win
            dk_win = dv_win = None
        dgates = dgates.sum(dim=1) if gates.ndim == 3 else dgates
        found = (dq, dk, dv, dk_cmp, dv_cmp, dgates, dk_win, dv_win)
        given = (q, k, v, k_cmp, v_cmp, gates, k_win, v_win)
        return (*(None if x is None else x.to(of.dtype) for x, of in zip(found, given, strict=True)), None, None)
