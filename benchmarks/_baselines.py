"""Dense causal attention by others, on PyTorch tensors: q [batch, heads, seqlen, head_dim], k and v alike."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

Dense = Callable[[Any, Any, Any], Any]

# Where builds of FlashAttention-3 put their functions. Not every module of these names is one: see `_flash3`.
FLASH3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "flash_attn.flash_attn_interface")


def available() -> dict[str, Dense]:
    """Baselines by the names that columns of results start with."""
    from torch.nn.attention import SDPBackend

    found: dict[str, Dense] = {
        "flash2": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
        "cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    }
    flash3 = _flash3()
    return found | ({"flash3": flash3} if flash3 else {})


TITLES = {"cudnn": "cuDNN", "flash2": "FlashAttention-2", "flash3": "FlashAttention-3"}


def _sdpa(backend: Any, q: Any, k: Any, v: Any) -> Any:
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@functools.cache
def _flash3() -> Dense | None:
    """FlashAttention-3 where it is installed and runs on this GPU."""
    import torch

    for name in FLASH3_MODULES:
        try:
            function = importlib.import_module(name).flash_attn_func
            # FlashAttention-2 has a function of the same name; only the third packs query heads.
            if "pack_gqa" not in inspect.signature(function).parameters:
                continue
            x = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device="cuda")
            _flash3_call(function, x, x, x)
            torch.cuda.synchronize()
        except Exception:  # absent, or built for another PyTorch, CUDA or GPU: a baseline less
            continue
        return functools.partial(_flash3_call, function)
    return None


def _flash3_call(function: Any, q: Any, k: Any, v: Any) -> Any:
    out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)  # takes (batch, seqlen, heads, head_dim)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
