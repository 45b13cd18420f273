"""FlashAttention-3 as a baseline of benchmarks: found in its own package or in vLLM's, by stand-ins for both."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
from benchmark_modules import BENCHMARKS as BENCHMARKS

from s2o_cupy.reference import dense_attention
from s2o_cupy.tools import metrics

# isort: split
import _baselines


def test_flash3_where_it_is_installed(monkeypatch):
    """By its own signature; FlashAttention-2 has a function of the same name."""
    torch = pytest.importorskip("torch")
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def second(q, k, v, dropout_p=0.0, causal=False):
        raise AssertionError("this is FlashAttention-2")

    def third(q, k, v, causal=False, pack_gqa=None):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        return out.transpose(1, 2), "lse"

    assert "pack_gqa" in inspect.signature(third).parameters
    first, other, _ = _baselines.FLASH3_MODULES
    monkeypatch.setitem(sys.modules, first, types.SimpleNamespace(flash_attn_func=second))
    _baselines._flash3.cache_clear()
    assert "flash3" not in _baselines.available()
    monkeypatch.setitem(sys.modules, other, types.SimpleNamespace(flash_attn_func=third))
    monkeypatch.setitem(sys.modules, other.split(".")[0], types.SimpleNamespace(__path__=[]))
    _baselines._flash3.cache_clear()
    q, k = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8)
    found = _baselines.available()["flash3"](q, k, k)
    _baselines._flash3.cache_clear()
    assert metrics.rel_l2(found.numpy(), dense_attention(q.numpy(), k.numpy(), k.numpy())[0]) < 1e-5


def test_flash3_of_vllm():
    """Sequences one behind the other, each as long as the others."""
    torch = pytest.importorskip("torch")

    def packed(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, causal, fa_version):
        assert (max_seqlen_q, max_seqlen_k, causal, fa_version) == (20, 20, True, 3)
        assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == [0, 20, 40]
        parts = [x.unflatten(0, (2, 20)).transpose(1, 2) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    q, k = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8)
    found = _baselines._of_vllm(types.SimpleNamespace(flash_attn_varlen_func=packed))(q, k, k)
    assert metrics.rel_l2(found.numpy(), dense_attention(q.numpy(), k.numpy(), k.numpy())[0]) < 1e-5
