"""Under torch.autocast attention computes in autocast's dtype, as PyTorch's scaled_dot_product_attention does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["autocast_dtype", "casting", "to_autocast_dtype"]

Tensor = Any  # torch.Tensor
DEVICES = ("cuda", "cpu")  # of tensors that S2O takes


def autocast_dtype(x: Tensor) -> Any:
    """The torch.dtype that attention computes in: of a float64 tensor, and without autocast, its own."""
    kind = x.device.type
    if kind in DEVICES and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def to_autocast_dtype(*tensors: Tensor) -> list[Tensor]:
    return [x.to(autocast_dtype(x)) for x in tensors]


def casting(operator: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """What an operator does under autocast for devices of a kind: itself, on q, k and v in that dtype."""

    def cast_and_run(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        q, k, v = to_autocast_dtype(q, k, v)
        with torch.autocast(kind, enabled=False):
            return operator(q, k, v, *others)

    return cast_and_run
