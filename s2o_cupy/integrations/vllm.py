"""S2O in vLLM: ``vllm serve ... --attention-backend CUSTOM``.

vLLM's FlashAttention backend with one change: requests with long prompts attend by S2O, from the pages of the cache.
Decoding, short prompts and whatever else S2O does not take stay FlashAttention's. Importing this imports vLLM; vLLM
does that by itself, when the backend is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..extras import with_extra
from ..spec import S2OConfig

with with_extra(__name__, "PyTorch"):
    import torch

from .serving import Cache, Counts, Run, ServingSettings, attend, cut, ended, kind_of_request, scales_of, why_not_shape
from .versions import VLLM, warn_if_newer

try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
    from vllm.v1.attention.backends.flash_attn import (
        FlashAttentionBackend,
        FlashAttentionImpl,
        FlashAttentionMetadata,
        FlashAttentionMetadataBuilder,
    )
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    # Lengths on the host, and what says that queries see other keys than the causal ones.
    _needed = {"seq_lens_cpu_upper_bound", "is_prefilling", "mm_req_doc_ranges", "rswa_prefix_lens"}
    if _missing := _needed - {x.name for x in fields(CommonAttentionMetadata)}:
        raise ImportError(f"vLLM's CommonAttentionMetadata lacks {', '.join(sorted(_missing))}")
except ImportError as error:
    raise ImportError(VLLM.cannot(__name__, error)) from error

__all__ = ["S2OBackend", "report"]

Tensor = Any  # torch.Tensor

FP8 = ("fp8", "fp8_e4m3")  # vLLM's names of caches of e4m3

counts = Counts("vLLM", "vllm.s2o_cupy")  # of this process
warn_if_newer(VLLM, counts.kinds.log)


def report() -> str:
    """What ran in this process: a line for each kind of request, counted once for each layer that it met."""
    return counts.report()


def settings_of(vllm_config: Any) -> ServingSettings:
    """``--additional-config '{"s2o": {...}}'``."""
    additional = getattr(vllm_config, "additional_config", None)
    given = additional.get("s2o", {}) if isinstance(additional, dict) else {}
    owner = 'vLLM: additional_config["s2o"]'
    return ServingSettings.parse(given, owner).within(_layers(vllm_config), owner)


def _layers(vllm_config: Any) -> int | None:
    """Of the model, and behind them those of its draft model; None where the configuration does not say."""
    drafted = getattr(vllm_config, "speculative_config", None)
    models = [getattr(vllm_config, "model_config", None)]
    models += [] if drafted is None else [getattr(drafted, "draft_model_config", None)]
    counts = [getattr(model, "get_total_num_hidden_layers", None) for model in models]
    return None if None in counts else sum(count() for count in counts if count is not None)


class S2OBackend(FlashAttentionBackend):
    """What vLLM asks a backend for. Everything but this is FlashAttention's."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # as vLLM looks it up

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return S2OImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return S2OMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # S2O's requests are those of the lengths on the host

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # segments of queries begin where a chunk does, which depends on the batch


@dataclass
class S2OMetadata(FlashAttentionMetadata):
    """FlashAttention's of the whole batch, for layers that are not S2O's, and how the batch is cut for the others."""

    parts: tuple[tuple[Run, FlashAttentionMetadata | None], ...] = ()  # None: S2O's; empty: nothing is S2O's
    kinds: Counter[str] = field(default_factory=Counter)  # of the requests


class S2OMetadataBuilder(FlashAttentionMetadataBuilder):
    """Cuts each batch into runs of S2O's requests and FlashAttention's, once for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.settings = settings_of(vllm_config)
        scheduler = getattr(vllm_config, "scheduler_config", None)
        self._budget: int | None = getattr(scheduler, "max_num_scheduled_tokens", None) or getattr(
            scheduler, "max_num_batched_tokens", None
        )
        self._longest: int = getattr(scheduler, "long_prefill_token_threshold", 0)  # chunk of a prompt, if not 0
        self._whole: str | None = None  # why no batch is cut now

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> S2OMetadata:
        common = common_attn_metadata
        of_batch = super().build(common_prefix_len, common, fast_build)
        reason = self._whole or self._why_not(common)
        # Upper bounds, which for requests in prefill are the lengths; a batch that only decodes is not looked into.
        longest = kind_of_request(common.max_query_len, common.max_seq_len, self.settings)
        if reason is not None or (longest != "s2o" and common.max_query_len <= 1):
            return _metadata(of_batch, (), Counter({reason or longest: common.num_reqs}))
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        keys = common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()
        lengths = [(end - begin, n) for begin, end, n in zip(starts, starts[1:], keys, strict=False)]
        kinds = [kind_of_request(*pair, self.settings) for pair in lengths]
        of_prompts = None
        if common.is_prefilling is not None:  # or drafted tokens are checked, whose lengths are only bounds
            of_prompts = common.is_prefilling[: common.num_reqs].tolist()
            pairs = zip(kinds, of_prompts, strict=True)
            kinds = ["drafted tokens" if x == "s2o" and not of_prompt else x for x, of_prompt in pairs]
        counted = Counter(kind for kind, (seqlen_q, _) in zip(kinds, lengths, strict=True) if seqlen_q)
        if "s2o" not in counted:
            return _metadata(of_batch, (), counted)
        ends = ended(lengths, self._budget, of_prompts=of_prompts)
        ends = [end and seqlen_q != self._longest for end, (seqlen_q, _) in zip(ends, lengths, strict=True)]
        parts = tuple((run, None if run.s2o else self._of_run(common, run)) for run in cut(lengths, kinds, ends))
        return _metadata(of_batch, parts, counted)

    def _why_not(self, common: CommonAttentionMetadata) -> str | None:
        """Why no request of a batch is S2O's, or None."""
        if common.causal is not True:
            return "not causal"
        if self.dcp_world_size > 1:
            return "context parallel"
        if common.mm_req_doc_ranges is not None:
            return "mask"
        if common.rswa_prefix_lens is not None:
            return "sliding window"
        return None if common.seq_lens_cpu_upper_bound is not None else "drafted tokens"

    def _of_run(self, common: CommonAttentionMetadata, run: Run) -> FlashAttentionMetadata:
        """FlashAttention's metadata of neighbouring requests. Without its schedule made ahead, whose one buffer holds
        that of the whole batch."""
        requests, tokens = run.requests, run.tokens
        bounds = slice(requests.start, requests.stop + 1)
        of_run = common.replace(
            query_start_loc=common.query_start_loc[bounds] - tokens.start,
            query_start_loc_cpu=common.query_start_loc_cpu[bounds] - tokens.start,
            seq_lens=common.seq_lens[requests],
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[requests],
            num_reqs=len(run.lengths),
            num_actual_tokens=tokens.stop - tokens.start,
            max_query_len=max(seqlen_q for seqlen_q, _ in run.lengths),
            max_seq_len=max(seqlen_k for _, seqlen_k in run.lengths),
            block_table_tensor=common.block_table_tensor[requests],
            slot_mapping=common.slot_mapping[tokens],
            is_prefilling=None if common.is_prefilling is None else common.is_prefilling[requests],
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        return super().build(0, of_run, fast_build=True)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> S2OMetadata:
        return self._uncut("graph", super().build_for_cudagraph_capture, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> S2OMetadata:
        return self._uncut("drafted tokens", super().build_for_drafting, common_attn_metadata, draft_index)

    def _uncut(self, why: str, build: Any, *arguments: Any) -> S2OMetadata:
        """What ``build``, which calls ``self.build``, makes of a batch that is FlashAttention's."""
        self._whole = why
        try:
            return build(*arguments)
        finally:
            self._whole = None

    def update_block_table(self, metadata: S2OMetadata, blk_table: Tensor, slot_mapping: Tensor) -> S2OMetadata:
        update = super().update_block_table
        of_batch = update(metadata, blk_table, slot_mapping)
        of_batch.parts = tuple(
            (run, None if x is None else update(x, blk_table[run.requests], slot_mapping[run.tokens]))
            for run, x in metadata.parts
        )
        return of_batch


def _metadata(
    of_batch: FlashAttentionMetadata, parts: Sequence[tuple[Run, FlashAttentionMetadata | None]], kinds: Counter[str]
) -> S2OMetadata:
    found = {x.name: getattr(of_batch, x.name) for x in fields(of_batch)}
    return S2OMetadata(**found, parts=tuple(parts), kinds=kinds)


class S2OImpl(FlashAttentionImpl):
    """A layer's attention: runs of S2O's requests by S2O, other runs by FlashAttention, each where its rows lie."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.settings = settings_of(get_current_vllm_config_or_none())
        self._never = self._why_never()

    def _why_never(self) -> str | None:
        """Why no request is S2O's in this layer, or None."""
        if self.attn_type != AttentionType.DECODER:
            return "not causal"
        if self.sliding_window != (-1, -1):
            return "sliding window"
        if self.sinks is not None:
            return "sinks"
        if self.alibi_slopes is not None:
            return "bias"
        quantized = is_quantized_kv_cache(self.kv_cache_dtype) and self.kv_cache_dtype not in FP8
        return "cache dtype" if quantized else None

    def forward(
        self,
        layer: Any,
        query: Tensor,  # [tokens, heads, head_dim]; of padding behind those of the batch
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,  # [pages, kv_heads, page_size, 2 * head_dim], key beside value; strides in any order
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,  # like query
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        scales = (output_scale, output_block_scale)
        if not isinstance(attn_metadata, S2OMetadata):  # a run that measures memory
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        config = self._config(layer)
        of_cache = self._scales_of_cache(layer, kv_cache)
        reason = self._never or self._why_not(query, kv_cache, config, attn_metadata, scales, of_cache is not None)
        for kind, times in attn_metadata.kinds.items():
            counts.add_now(reason if reason is not None and kind == "s2o" else kind, times)
        if reason is not None or config is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)

        k_pages, v_pages = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)  # [pages, page_size, kv_heads, D]
        q, cache = query, Cache(k_pages, v_pages, attn_metadata.block_table, *(of_cache or ()))
        if query.dtype != output.dtype:  # vLLM rounds them too where FlashAttention multiplies 8 bits
            q = unquantized(query, layer._q_scale, output.dtype)
        for run, of_run in attn_metadata.parts:
            if of_run is None:
                attend(run, q, cache, output, config, self.scale, self.logits_soft_cap or 0.0)
            else:
                rows = [None if x is None else x[run.tokens] for x in (query, key, value)]
                super().forward(layer, *rows, kv_cache, of_run, output[run.tokens])
        return output

    def _why_not(
        self, query: Tensor, kv_cache: Tensor, config: S2OConfig | None, metadata: S2OMetadata, scales: Sequence[Any],
        fp8: bool,
    ) -> str | None:  # fmt: skip
        """Why a batch is FlashAttention's, one of its kinds; None if parts of it are S2O's."""
        if not metadata.parts:
            return next(iter(metadata.kinds), "short")
        if config is None:
            return "layer"
        if kv_cache.dim() != 4:  # of a version to come
            return "token pool"
        if query.dtype != kv_cache.dtype and not fp8:
            return "cache dtype"
        if any(x is not None for x in scales):
            return "arguments"
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return "graph"
        return why_not_shape(self.head_size, kv_cache.shape[-1] - self.head_size, kv_cache.shape[2])

    def _scales_of_cache(self, layer: Any, kv_cache: Tensor) -> tuple[Any, Any] | None:
        """Those of keys and values, if it is a cache of e4m3 that S2O takes."""
        if self.kv_cache_dtype not in FP8 or kv_cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
            return None
        return scales_of(layer._k_scale, layer._v_scale, self.num_kv_heads)

    def _config(self, layer: Any) -> S2OConfig | None:
        if not self.settings.per_layer:
            return self.settings.config
        return self.settings.of_layer(extract_layer_index(layer.layer_name))


def unquantized(query: Tensor, scale: Tensor, dtype: Any) -> Tensor:
    """``scale``, of all heads or of those of each KV head, times queries [tokens, heads, head_dim] of e4m3."""
    scale = scale.reshape(-1, 1, 1)
    rows = query.to(dtype).unflatten(1, (len(scale), -1))
    return torch.mul(rows, scale, out=rows).flatten(1, 2)
