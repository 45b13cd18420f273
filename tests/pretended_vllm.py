"""A vLLM that is not installed: of its modules what the plug-in uses, with its names and the meaning that they have
there. ``test_vllm.py`` runs the same tests with the real one, where it is."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from typing import Any

import torch
from served import dense_from_pages

MODULES = (
    "vllm", "vllm.config", "vllm.model_executor", "vllm.model_executor.models", "vllm.model_executor.models.utils",
    "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.v1.attention.backends",
    "vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.registry", "vllm.v1.kv_cache_interface",
)  # fmt: skip
current_config: Any = None
Tensor = Any


def install(monkeypatch: Any) -> types.ModuleType:
    this = sys.modules[__name__]
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, this)
    monkeypatch.setattr(AttentionBackendEnum, "path", None)
    return this


def get_current_vllm_config_or_none() -> Any:
    return current_config


def extract_layer_index(layer_name: str) -> int:
    (index,) = [int(part) for part in layer_name.split(".") if part.isdecimal()]
    return index


def is_quantized_kv_cache(dtype: str) -> bool:
    return dtype.startswith("fp8")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class _Custom:
    path: str | None = None

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self) -> str:
        assert self.path is not None
        return self.path


class AttentionBackendEnum:
    CUSTOM = _Custom()
    path = None


def register_backend(backend: _Custom, class_path: str) -> None:
    backend.path = class_path


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: Any = True
    is_prefilling: Tensor | None = None
    seq_lens_cpu_upper_bound: Tensor | None = None
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Tensor | None = None
    _num_computed_tokens_cache: Tensor | None = None
    _token_to_req_indices_cache: Tensor | None = None

    def replace(self, **changes: Any) -> CommonAttentionMetadata:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass
class FlashAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: Any = True


class FlashAttentionMetadataBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.dcp_world_size = 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        common = common_attn_metadata
        return FlashAttentionMetadata(
            common.num_actual_tokens, common.max_query_len, common.query_start_loc, common.max_seq_len,
            common.seq_lens, common.block_table_tensor, common.slot_mapping, common.causal,
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttentionMetadata:
        return self.build(0, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> Any:
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class FlashAttentionImpl:
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: Any,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None = None,
        attn_type: Any = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: Any = None,
    ) -> None:  # fmt: skip
        self.head_size, self.scale, self.kv_cache_dtype = head_size, scale, kv_cache_dtype
        self.num_kv_heads = num_kv_heads
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        self.logits_soft_cap, self.attn_type, self.sinks = logits_soft_cap or 0, attn_type, sinks

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        if attn_metadata is None:
            return output.fill_(0)
        n = attn_metadata.num_actual_tokens
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        _FA4_DENSE_ATTENTION_KERNEL(
            q=query[:n], k=k, v=v, out=output[:n], cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len, seqused_k=attn_metadata.seq_lens,
            block_table=attn_metadata.block_table, softmax_scale=self.scale,
        )  # fmt: skip
        return output


class FlashAttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True


_FA4_DENSE_ATTENTION_KERNEL = dense_from_pages
