"""An SGLang that is not installed: of its modules what the plug-in uses, with its names and the meaning that they have
there. ``test_sglang.py`` runs the same tests with the real one, where it is."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from typing import Any

import torch
from served import dense_from_pages

MODULES = (
    "sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.arg_groups.choices", "sglang.srt.layers",
    "sglang.srt.layers.attention", "sglang.srt.layers.attention.attention_registry", "sglang.srt.layers.cp",
    "sglang.srt.layers.cp.utils", "sglang.srt.layers.radix_attention", "sglang.srt.mem_cache",
    "sglang.srt.mem_cache.memory_pool", "sglang.srt.model_executor",
    "sglang.srt.model_executor.forward_batch_info", "sglang.srt.runtime_context",
)  # fmt: skip
Tensor = Any


def install(monkeypatch: Any) -> types.ModuleType:
    this = sys.modules[__name__]
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, this)
    monkeypatch.setitem(globals(), "choices", this)
    monkeypatch.setitem(globals(), "ATTENTION_BACKENDS", {"torch_native": Dense})
    monkeypatch.setitem(globals(), "ATTENTION_BACKEND_CHOICES", ["torch_native"])
    return this


ATTENTION_BACKENDS: dict[str, Any] = {}
ATTENTION_BACKEND_CHOICES: list[str] = []


def add_attention_backend_choices(names: list[str]) -> None:
    ATTENTION_BACKEND_CHOICES.extend(names)


def register_attention_backend(name: str) -> Any:
    return lambda make: ATTENTION_BACKENDS.setdefault(name, make)


def is_cp_active(forward_batch: Any) -> bool:
    return False


def get_parallel() -> Any:
    return types.SimpleNamespace(attn_dcp_size=1)


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class ForwardMode(enum.Enum):
    EXTEND = 1
    MIXED = 2
    TARGET_VERIFY = 3


@dataclasses.dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    input_ids: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    seq_lens_sum: int
    seq_lens_cpu: Tensor | None = None
    positions: Tensor | None = None
    encoder_lens: Tensor | None = None
    spec_info: Any = None
    multi_item_delimiter_indices: Any = None
    extend_seq_lens: Tensor | None = None
    extend_prefix_lens: Tensor | None = None
    extend_start_loc: Tensor | None = None
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    extend_num_tokens: int | None = None


@dataclasses.dataclass
class KVWriteLoc:
    loc: Tensor

    @classmethod
    def for_layer(cls, forward_batch: ForwardBatch, layer: Any, *, swa_loc: Tensor | None = None) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc)


class Pool:
    """Of tokens: a page is ``page_size`` neighbours."""

    def __init__(self, buffer: Tensor) -> None:  # [tokens, kv_heads, head_dim]
        self.buffers = tuple(torch.full_like(buffer, torch.nan) for _ in "kv")

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.buffers

    def set_kv_buffer(
        self, layer: Any, loc_info: KVWriteLoc, cache_k: Tensor, cache_v: Tensor, k_scale: Any, v_scale: Any
    ) -> None:
        for buffer, rows in zip(self.buffers, (cache_k, cache_v), strict=True):
            buffer[loc_info.loc] = rows


class Dense:
    """SGLang's own attention: keys one by one, as ``req_to_token`` says."""

    forward_metadata: Any = None

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.forward_metadata = types.SimpleNamespace(of=forward_batch)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: ForwardBatch, save_kv_cache: bool = True
    ) -> Tensor:
        batch, pool = forward_batch, self.runner.token_to_kv_pool
        assert self.forward_metadata.of is batch and batch.extend_seq_lens is not None
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc), k, v, None, None)
        o = torch.empty_like(q).view(len(q), layer.tp_q_head_num, -1)
        begins = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0), (1, 0))
        k_pages, v_pages = (x[:, None] for x in pool.get_kv_buffer(0))
        table = self.runner.req_to_token_pool.req_to_token[batch.req_pool_indices]
        dense_from_pages(q.view(o.shape), k_pages, v_pages, o, begins, batch.seq_lens, table, layer.scaling)
        return o.flatten(1)
