"""S2O in SGLang: ``--prefill-attention-backend s2o``.

The attention that SGLang decodes with, with one change: requests with long prompts attend by S2O, from the pool of
tokens. Short prompts and whatever else S2O does not take stay that attention's. Importing this imports SGLang; SGLang
does that by itself, when the backend is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..extras import with_extra

with with_extra(__name__, "PyTorch"):
    import torch

from .serving import Cache, Counts, Run, ServingSettings, attend, cut, ended, kind_of_request, scales_of, why_not_shape
from .versions import SGLANG, warn_if_newer

try:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.cp.utils import is_cp_active
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.runtime_context import get_parallel

    if not hasattr(KVWriteLoc, "for_layer"):
        raise ImportError("SGLang's KVWriteLoc lacks for_layer")
except ImportError as error:
    raise ImportError(SGLANG.cannot(__name__, error)) from error

__all__ = ["make_backend", "report"]

Tensor = Any  # torch.Tensor

SETTINGS = "S2O_CONFIG"  # environment variable

counts = Counts("SGLang", "s2o_cupy.integrations.sglang")  # of this process
warn_if_newer(SGLANG, counts.kinds.log)


def report() -> str:
    """What ran in this process: a line for each kind of request, counted once for each layer that it met."""
    return counts.report()


def make_backend(runner: Any) -> Any:
    """The backend of a model runner: the attention that it decodes with, or the ``backend`` of the settings, with S2O
    for long prompts. A draft model's runner gets that attention as it is.

    Raises
    ------
    ValueError
        No other attention is named, or a setting is not accepted; the message says what is.
    """
    settings = ServingSettings.parse(os.environ.get(SETTINGS) or {}, f"SGLang: {SETTINGS}")
    name = settings.backend or runner.decode_attention_backend_str
    if name == "s2o" or name not in ATTENTION_BACKENDS:
        raise ValueError(
            f"SGLang: S2O is an attention for prefill, and {name!r} is not one for the rest; accepted: "
            "--prefill-attention-backend s2o, with --attention-backend or --decode-attention-backend another, or none"
        )
    if getattr(runner, "use_mla_backend", False):
        raise ValueError("SGLang: S2O does not attend to the latents of MLA models; accepted: models with MHA or GQA")
    backend, rest = ATTENTION_BACKENDS[name](runner), ATTENTION_BACKENDS[name](runner)
    if runner.is_draft_worker:
        return backend
    settings.within(_layers(runner), f"SGLang: {SETTINGS}")
    backend.__class__ = _with_s2o(type(backend))
    backend._s2o = _Prefill(runner, settings, rest)
    return backend


def _layers(runner: Any) -> int | None:
    """Of the runner's model, None where it does not say. Some have two attentions in each of their layers."""
    model = getattr(runner, "model_config", None)
    counts = [getattr(model, name, None) for name in ("num_hidden_layers", "num_attention_layers")]
    return max((x for x in counts if isinstance(x, int)), default=None)


def _scales(layer: Any) -> Any:
    return scales_of(layer.k_scale, layer.v_scale, layer.tp_k_head_num)


def _with_s2o(attention: Any) -> type:
    """A class of backends like ``attention``, whose prefill asks S2O first."""

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        self._s2o.plan = None
        attention.init_forward_metadata(self, forward_batch)

    def forward_extend(
        self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        o = self._s2o.forward(self, q, k, v, layer, forward_batch, save_kv_cache, options)
        if o is not None:
            return o
        return attention.forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache, **options)

    body = {"__module__": __name__, "init_forward_metadata": init_forward_metadata, "forward_extend": forward_extend}
    return type(f"S2O{attention.__name__}", (attention,), body)


@dataclass
class _Plan:
    """How one forward pass is cut: the same for all of its layers."""

    of: Any  # ForwardBatch
    layer: int  # the last that used it
    kinds: Sequence[str]  # of the requests
    runs: tuple[Run, ...]
    page_table: Tensor | None = None  # int32 [requests, pages]
    rest: Any = None  # ForwardBatch of the requests that are not S2O's
    rows: Tensor | None = None  # theirs in q


class _Prefill:
    """S2O's part of a backend. ``rest``: a second backend of SGLang's, for requests that came with S2O's."""

    def __init__(self, runner: Any, settings: ServingSettings, rest: Any) -> None:
        self.runner = runner
        self.settings = settings
        self.rest = rest
        self.plan: _Plan | None = None

    def forward(
        self, backend: Any, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any,
        save_kv_cache: bool, options: Mapping[str, Any],
    ) -> Tensor | None:  # fmt: skip
        """[tokens, heads * head_dim], or None if nothing of a batch is S2O's. k and v are None if in the cache."""
        config = self.settings.of_layer(layer.layer_id)
        reason = self._why_not_batch(backend, batch, rows=q.shape[0])
        if reason is not None:
            counts.add_now(reason, batch.batch_size)
            return None
        plan = self._plan(batch, layer.layer_id)
        if "s2o" in plan.kinds:
            reason = "layer" if config is None else self._why_not_layer(q, layer, options)
        for kind in plan.kinds:
            counts.add_now(reason if reason is not None and kind == "s2o" else kind)
        if reason is not None or config is None or "s2o" not in plan.kinds:
            return None

        pool = self.runner.token_to_kv_pool
        if save_kv_cache and k is not None:
            swa_loc = getattr(backend.forward_metadata, "swa_out_cache_loc", None)
            at = KVWriteLoc.for_layer(batch, layer, swa_loc=swa_loc)
            # Of another dtype it divides them in place; what is left to SGLang reads them too.
            divided = layer.k_scale is not None and pool.get_kv_buffer(layer.layer_id)[0].dtype != k.dtype
            new = [x.clone() if divided and x is not None else x for x in (k, v)]
            pool.set_kv_buffer(layer, at, *new, layer.k_scale, layer.v_scale)
        if plan.page_table is None:
            self._prepare(plan)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [tokens, heads, head_dim]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[sum(batch.extend_seq_lens_cpu) :] = 0  # padding
        if plan.rest is not None:
            rows = plan.rows
            some = [None if x is None else x[rows] for x in (k, v)]
            o = self.rest.forward_extend(q[rows].flatten(1), *some, layer, plan.rest, save_kv_cache=False)
            out[rows] = o.view(-1, *out.shape[1:])
        k_pages, v_pages = (self._pages(x, layer) for x in pool.get_kv_buffer(layer.layer_id))
        scales = () if k_pages.dtype == q.dtype else _scales(layer)
        cache = Cache(k_pages, v_pages, plan.page_table, *scales)
        for run in plan.runs:
            if run.s2o:
                attend(run, q, cache, out, config, layer.scaling, layer.logit_cap)
        return out.flatten(1)

    def _why_not_batch(self, backend: Any, batch: Any, rows: int) -> str | None:
        """Why no request of a batch is S2O's, or None."""
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED) or batch.extend_seq_lens_cpu is None:
            return "drafted tokens"
        if batch.encoder_lens is not None:
            return "not causal"
        if is_cp_active(batch) or get_parallel().attn_dcp_size > 1:
            return "context parallel"
        masks = (
            batch.multi_item_delimiter_indices, getattr(batch.spec_info, "custom_mask", None),
            getattr(backend.forward_metadata, "custom_mask", None),
            getattr(backend.forward_metadata, "image_token_ranges", None),
        )  # fmt: skip
        if any(x is not None for x in masks):
            return "mask"
        if self.runner.kv_index_translator.is_translating or getattr(backend, "_kv_shard_pool", None) is not None:
            return "token pool"
        if getattr(backend, "fa_skip_kv_cache", False):
            return "token pool"
        if batch.req_pool_indices.is_cuda and torch.cuda.is_current_stream_capturing():
            return "graph"
        # More rows are padding; fewer come of a graph whose batch stands for another.
        return "graph" if sum(batch.extend_seq_lens_cpu) > rows else None

    def _why_not_layer(self, q: Tensor, layer: Any, options: Mapping[str, Any]) -> str | None:
        """Why a layer is not S2O's, or None."""
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            return "not causal"
        if layer.sliding_window_size > -1 or layer.use_irope:
            return "sliding window"
        given = [name for name, x in options.items() if x is not None and x is not False]
        if given:
            return "sinks" if given == ["sinks"] else "arguments"
        capped = layer.logit_cap > 0 and layer.logit_capping_method != "tanh"
        if layer.pos_encoding_mode != "NONE" or layer.xai_temperature_len > 0 or capped:
            return "bias"
        pool = self.runner.token_to_kv_pool
        k_buffer, v_buffer = pool.get_kv_buffer(layer.layer_id)
        fp8 = k_buffer.dtype == v_buffer.dtype == torch.float8_e4m3fn != q.dtype
        if fp8 and (getattr(pool, "k_scale_buffer", None) is not None or _scales(layer) is None):  # of blocks
            return "cache dtype"
        if not (fp8 or k_buffer.dtype == v_buffer.dtype == q.dtype):
            return "cache dtype"
        if not 3 <= k_buffer.dim() <= 4:
            return "token pool"
        return why_not_shape(layer.qk_head_dim, layer.v_head_dim, self.runner.page_size)

    def _plan(self, batch: Any, layer: int) -> _Plan:
        """Made anew for each pass: layers of one pass come in ascending order. A batch's object may be used again."""
        plan = self.plan
        if plan is None or plan.of is not batch or layer <= plan.layer:
            queries, before = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
            lengths = [(int(n), int(n) + int(cached)) for n, cached in zip(queries, before, strict=True)]
            kinds = [kind_of_request(*pair, self.settings) for pair in lengths]
            # `orig_seq_lens` would say it, on the device: the host does not wait for that.
            budget = getattr(getattr(self.runner, "server_args", None), "chunked_prefill_size", None)
            ends = ended(lengths, budget, self.runner.page_size)
            plan = self.plan = _Plan(batch, layer, kinds, cut(lengths, kinds, ends))
        plan.layer = layer
        return plan

    def _prepare(self, plan: _Plan) -> None:
        """The page table of all requests, and the batch of those that are not S2O's."""
        batch, page_size = plan.of, self.runner.page_size
        longest = max(seqlen_k for run in plan.runs for _, seqlen_k in run.lengths)
        tokens = self.runner.req_to_token_pool.req_to_token[batch.req_pool_indices.long(), :longest:page_size]
        plan.page_table = (tokens // page_size).int().contiguous()
        requests = [i for run in plan.runs if not run.s2o for i in range(run.requests.start, run.requests.stop)]
        if not requests:
            return
        on_host = [i for run in plan.runs if not run.s2o for i in range(run.tokens.start, run.tokens.stop)]
        device = batch.req_pool_indices.device
        rows, some = (torch.tensor(x, device=device) for x in (on_host, requests))
        queries, before = ([x[i] for i in requests] for x in (batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu))
        keys = [int(n) + int(cached) for n, cached in zip(queries, before, strict=True)]
        rest = ForwardBatch(
            forward_mode=batch.forward_mode,
            batch_size=len(requests),
            input_ids=batch.input_ids[rows],
            req_pool_indices=batch.req_pool_indices[some],
            seq_lens=batch.seq_lens[some],
            seq_lens_cpu=torch.tensor(keys, dtype=torch.int32),
            out_cache_loc=batch.out_cache_loc[rows],
            seq_lens_sum=sum(keys),
            positions=batch.positions[rows],
        )
        rest.extend_seq_lens, rest.extend_prefix_lens = batch.extend_seq_lens[some], batch.extend_prefix_lens[some]
        rest.extend_seq_lens_cpu, rest.extend_prefix_lens_cpu = queries, before
        rest.extend_num_tokens = len(on_host)
        if batch.extend_start_loc is not None:
            rest.extend_start_loc = rest.extend_seq_lens.cumsum(0, dtype=torch.int32) - rest.extend_seq_lens
        self.runner.kv_index_translator.bind_own_plan(rest)
        self.rest.init_forward_metadata(rest)
        plan.rest, plan.rows = rest, rows

    def _pages(self, buffer: Tensor, layer: Any) -> Tensor:
        """[pages, page_size, kv_heads, head_dim], a view of a pool's buffer of tokens, or of pages by head."""
        if buffer.dim() == 4:
            return buffer.transpose(1, 2)
        return buffer.unflatten(0, (-1, self.runner.page_size))
