"""vLLM, or what stands for it where it is not installed, as its plug-in meets it."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pretended_vllm  # noqa: E402
from served import (  # noqa: E402
    SCALE,
    SETTINGS,
    Served,
    dense_from_pages,
    installed,
)

PLUGIN = "s2o_cupy.integrations.vllm"
PAGE = 16
REAL = installed("vllm.v1.attention.backends.flash_attn")


class Engine:
    """vLLM, or what stands for it, with a layer of S2O's and the batch of served.py."""

    def __init__(self, monkeypatch: Any, real: bool) -> None:
        self.real = real
        if real and REAL is None:
            pytest.skip("vLLM is not installed")
        if not real:
            pretended_vllm.install(monkeypatch)
        monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
        import s2o_cupy.integrations.vllm as plugin

        monkeypatch.setitem(sys.modules, PLUGIN, plugin)
        self.plugin = plugin
        plugin.counts.calls.clear()
        self.monkeypatch = monkeypatch
        self.calls: list[dict[str, Any]] = []  # FlashAttention's

        def kernel(**arguments: Any) -> None:
            self.calls.append(arguments)
            dense_from_pages(**arguments)

        self.flash_attn = importlib.import_module("vllm.v1.attention.backends.flash_attn")
        # vLLM 0.26 calls the function itself; later ones through an object.
        self.kernel_name = "_FA4_DENSE_ATTENTION_KERNEL"
        if not hasattr(self.flash_attn, self.kernel_name):
            self.kernel_name = "flash_attn_varlen_func"
        self.flash_attn_kernel: Any = getattr(self.flash_attn, self.kernel_name, None)
        monkeypatch.setattr(self.flash_attn, self.kernel_name, kernel, raising=False)
        self.like = Served.make()  # whose heads, dtype and device are the model's

    def on_a_gpu(self, served: Served) -> None:
        """With the heads and dtype of ``served``, and with FlashAttention's own kernel, if vLLM is there."""
        self.like = served
        if self.real:

            def kernel(**arguments: Any) -> None:
                self.calls.append(arguments)
                self.flash_attn_kernel(**arguments)

            self.monkeypatch.setattr(self.flash_attn, self.kernel_name, kernel)

    def config(self, **settings: Any) -> Any:
        additional = {"s2o": SETTINGS | settings}
        if not self.real:
            scheduler = types.SimpleNamespace(max_num_batched_tokens=8192, long_prefill_token_threshold=0)
            return types.SimpleNamespace(additional_config=additional, scheduler_config=scheduler)
        from vllm.config import DeviceConfig, VllmConfig

        config = VllmConfig(additional_config=additional, device_config=DeviceConfig(device=self.like.q.device.type))
        config.model_config = types.SimpleNamespace(
            get_num_attention_heads=lambda _: self.like.heads[0], get_num_kv_heads=lambda _: self.like.heads[1],
            get_head_size=lambda: self.like.heads[2], rswa_window=None, is_mm_prefix_lm=False,
            hf_config=types.SimpleNamespace(model_type="llama"),
        )  # fmt: skip
        return config

    def builder(self, **settings: Any) -> Any:
        spec: Any = None
        if self.real:
            from vllm.v1.kv_cache_interface import FullAttentionSpec

            _, kv_heads, head_dim = self.like.heads
            spec = FullAttentionSpec(
                block_size=PAGE, num_kv_heads=kv_heads, head_size=head_dim, dtype=self.like.q.dtype
            )
        config = self.config(**settings)
        return self.plugin.S2OMetadataBuilder(spec, ["model.layers.3.attn"], config, self.like.q.device)

    def impl(self, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        config = self.config(**(settings or {}))
        self.monkeypatch.setattr(self.plugin, "get_current_vllm_config_or_none", lambda: config)
        arguments: dict[str, Any] = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | options
        heads, kv_heads, head_dim = self.like.heads
        impl = self.plugin.S2OImpl(heads, head_dim, SCALE, kv_heads, **arguments)
        if not self.like.q.is_cuda:
            impl.vllm_flash_attn_version = 2
        return impl

    def layer(self) -> Any:
        one = torch.ones((), device=self.like.q.device)
        return types.SimpleNamespace(layer_name="model.layers.3.attn", _q_scale=one, _k_scale=one, _v_scale=one)

    def common(self, served: Served, table: Any, padding: int = 0, **changes: Any) -> Any:
        """The batch's metadata; ``padding``: requests without a query behind it, as CUDA graphs have them."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lengths = served.lengths + [(0, 0)] * padding
        begins = torch.tensor(served.starts + served.starts[-1:] * padding, dtype=torch.int32)
        keys = torch.tensor([n for _, n in lengths], dtype=torch.int32)
        device = served.q.device
        fields: dict[str, Any] = {
            "query_start_loc": begins.to(device), "query_start_loc_cpu": begins, "seq_lens": keys.to(device),
            "num_reqs": len(lengths),
            "num_actual_tokens": served.starts[-1], "max_query_len": max(q for q, _ in lengths),
            "max_seq_len": int(keys.max()), "block_table_tensor": torch.cat([table, table[:1].expand(padding, -1)]),
            "slot_mapping": torch.arange(served.starts[-1], device=device), "seq_lens_cpu_upper_bound": keys,
            "is_prefilling": torch.tensor([q > 1 for q, _ in lengths]),
        }  # fmt: skip
        return CommonAttentionMetadata(**(fields | changes))

    def run(self, served: Served, cache: Any, metadata: Any, impl: Any = None, padding: int = 0) -> Any:
        """Outputs of the batch, and of ``padding`` rows behind it, which are NaN before."""
        rows = served.starts[-1] + padding
        heads, kv_heads, head_dim = served.heads
        query = served.like(rows, heads, head_dim)
        query[: len(served.q)] = served.q
        key = served.like(rows, kv_heads, head_dim)  # is in the cache already
        output = served.like(rows, heads, head_dim, fill=torch.nan)
        impl = impl or self.impl()
        self.given = (self.layer(), query, key, key, cache, metadata, output)
        return impl.forward(*self.given)


@pytest.fixture(params=["pretended", "vllm"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch, real=request.param == "vllm")


def in_cache(served: Served, by_head: bool = False) -> tuple[Any, Any]:
    """(cache [pages, kv_heads, PAGE, 2 * head_dim], page table): tokens, or heads, outermost in a page."""
    _, kv_heads, head_dim = served.heads
    table = served.table(PAGE)
    pages = int(table.max()) + 2
    if by_head:
        cache = served.like(pages, kv_heads, PAGE, 2 * head_dim, fill=torch.nan)
    else:
        cache = served.like(pages, PAGE, kv_heads, 2 * head_dim, fill=torch.nan).transpose(1, 2)
    k_pages, v_pages = cache.transpose(1, 2).split(head_dim, dim=-1)
    served.put(k_pages, v_pages, table)
    return cache, table
