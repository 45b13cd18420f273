"""Dense causal attention by others, on PyTorch tensors: q [batch, heads, seqlen, head_dim], k and v alike."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

Dense = Callable[[Any, Any, Any], Any]

# Where builds of FlashAttention-3 put their functions. Not every module of these names is one: see `_flash3`.
FLASH3_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "flash_attn.flash_attn_interface")
FLASH3_OF_VLLM = "vllm.vllm_flash_attn"


def available() -> dict[str, Dense]:
    """Baselines by the names that columns of results start with."""
    found: dict[str, Dense] = {name: functools.partial(_sdpa, backend) for name, backend in sdpa_backends().items()}
    flash3 = _flash3()
    return found | ({"flash3": flash3} if flash3 else {})


def sdpa_backends() -> dict[str, Any]:
    """Those of PyTorch's scaled_dot_product_attention, as `torch.nn.attention.sdpa_kernel` takes them."""
    from torch.nn.attention import SDPBackend

    return {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def flash2_lower_right(q: Any, k: Any, v: Any) -> Any:
    """FlashAttention-2 of the last queries of a longer sequence; cuDNN's mask is aligned top-left only."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]), enable_gqa=True)


def varlen(q: Any, k: Any, v: Any, cu_seqlens: Sequence[int]) -> Callable[[], Any] | None:
    """PyTorch's causal attention of packed sequences, q (total, heads, head_dim), ready to call; None without one.

    KV heads are repeated here, outside of the call, where it takes as many of them as query heads only.
    """
    import torch

    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    cu = torch.tensor(list(cu_seqlens), dtype=torch.int32, device=q.device)
    longest = int(cu.diff().max())
    for repeat in (1, q.shape[1] // k.shape[1]):
        keys, values = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
        call = functools.partial(varlen_attn, q, keys, values, cu, cu, longest, longest, **options)
        try:
            call()
        except (RuntimeError, ValueError, NotImplementedError):
            continue
        return call
    return None


TITLES = {"cudnn": "cuDNN", "flash2": "FlashAttention-2", "flash3": "FlashAttention-3"}


def _sdpa(backend: Any, q: Any, k: Any, v: Any) -> Any:
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@functools.cache
def _flash3() -> Dense | None:
    """FlashAttention-3 where it is installed and runs on this GPU: its own package's, or that of vLLM's."""
    import torch

    for name, find in (*((name, _of_package) for name in FLASH3_MODULES), (FLASH3_OF_VLLM, _of_vllm)):
        try:
            call = find(importlib.import_module(name))
            x = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device="cuda")
            call(x, x, x)
            torch.cuda.synchronize()
        except Exception:  # absent, or built for another PyTorch, CUDA or GPU: a baseline less
            continue
        return call
    return None


def _of_package(module: Any) -> Dense:
    # FlashAttention-2 has a function of the same name; only the third packs query heads.
    if "pack_gqa" not in inspect.signature(module.flash_attn_func).parameters:
        raise ImportError("this is not FlashAttention-3")
    return functools.partial(_flash3_call, module.flash_attn_func)


def _of_vllm(module: Any) -> Dense:
    return functools.partial(_flash3_packed, module.flash_attn_varlen_func)


def _flash3_call(function: Any, q: Any, k: Any, v: Any) -> Any:
    out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)  # takes (batch, seqlen, heads, head_dim)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _flash3_packed(function: Any, q: Any, k: Any, v: Any) -> Any:
    """By the function for sequences one behind the other, which here are as long as each other."""
    batch, length, length_k = q.shape[0], q.shape[2], k.shape[2]
    out = function(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)),  # [tokens, heads, head_dim]
        max_seqlen_q=length, cu_seqlens_q=_begins(batch, length, q.device), max_seqlen_k=length_k,
        cu_seqlens_k=_begins(batch, length_k, q.device), causal=True, fa_version=3,
    )  # fmt: skip
    return out.unflatten(0, (batch, length)).transpose(1, 2)


@functools.cache
def _begins(batch: int, length: int, device: Any) -> Any:
    import torch

    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length
