"""SGLang, or what stands for it where it is not installed, as its plug-in meets it."""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pretended_sglang  # noqa: E402
from served import SCALE, SETTINGS, Served, installed  # noqa: E402

PLUGIN = "s2o_cupy.integrations.sglang"
KIT = installed("sglang.test.kits.attention_unittest.attention_methods.dense_attention")
CONTEXT = 512


class Engine:
    """SGLang, or what stands for it, with a runner, its pools and an S2O backend."""

    def __init__(self, monkeypatch: Any, real: bool) -> None:
        self.real, self.monkeypatch = real, monkeypatch
        if real:
            self.kit = KIT or pytest.skip("SGLang is not installed")
        else:
            pretended_sglang.install(monkeypatch)
        monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
        import s2o_cupy.integrations.sglang as plugin

        monkeypatch.setitem(sys.modules, PLUGIN, plugin)
        self.plugin = plugin
        plugin.counts.calls.clear()
        self.info = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
        self.settings()

    def settings(self, **settings: Any) -> None:
        self.monkeypatch.setenv("S2O_CONFIG", json.dumps(SETTINGS | settings))

    def runner(self, page_size: int, served: Served | None = None, backend: str = "torch_native") -> Any:
        """For batches like ``served``, with its heads, dtype and device."""
        served = served or Served.make()
        heads, kv_heads, head_dim = served.heads
        requests = len(served.lengths)
        context = CONTEXT + -(-max(seqlen_k for _, seqlen_k in served.lengths) // 64) * 64  # whole pages
        if self.real:
            case = self.kit.DenseAttentionCase(
                name="served", backend=backend, forward_mode=self.info.ForwardMode.EXTEND, num_heads=heads,
                num_kv_heads=kv_heads, page_size=page_size, prefix_lens=(0,) * requests, extend_lens=(1,) * requests,
            )  # fmt: skip
            model = self.kit.TinyModelConfig(
                num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, hidden_size=64, context_len=context,
                sliding_window_size=None,
            )  # fmt: skip
            return self.kit.MockModelRunner(
                case=case, model_config=model, dtype=served.q.dtype, device=served.q.device.type,
                max_context_len=context, head_dim=head_dim,
            )  # fmt: skip
        return types.SimpleNamespace(
            decode_attention_backend_str=backend, is_draft_worker=False, use_mla_backend=False, page_size=page_size,
            token_to_kv_pool=pretended_sglang.Pool(served.like(requests * context, kv_heads, head_dim)),
            req_to_token_pool=types.SimpleNamespace(req_to_token=served.like(requests + 1, context).int()),
            kv_index_translator=types.SimpleNamespace(is_translating=False, bind_own_plan=lambda batch: None),
        )  # fmt: skip

    def layer(self, served: Served | None = None, **changes: Any) -> Any:
        heads, kv_heads, head_dim = (served or Served.make([(1, 1)])).heads
        if self.real:
            from sglang.srt.layers.radix_attention import RadixAttention

            layer = RadixAttention(heads, head_dim, SCALE, kv_heads, layer_id=0)
        else:
            layer = types.SimpleNamespace(
                tp_q_head_num=heads, tp_k_head_num=kv_heads, qk_head_dim=head_dim, v_head_dim=head_dim, scaling=SCALE,
                layer_id=0, logit_cap=0.0, sliding_window_size=-1, is_cross_attention=False, use_irope=False,
                k_scale=None, v_scale=None, attn_type=pretended_sglang.AttentionType.DECODER,
                pos_encoding_mode="NONE", logit_capping_method="tanh", xai_temperature_len=-1,
            )  # fmt: skip
        for name, value in changes.items():
            setattr(layer, name, value)
        return layer

    def batch(self, runner: Any, served: Served, page_size: int, table: Any = None) -> Any:
        """Its cached keys are put into the pool, the new ones are not; a request's row of req_to_token is any. With the
        ``table`` of a batch before, whose keys are there, nothing is put into the pool."""
        cached_before, table = table is not None, served.table(page_size) if table is None else table
        count, device = len(served.lengths), served.q.device
        rows = torch.randperm(count, generator=torch.Generator().manual_seed(2)).int().to(device)
        places, positions = [], []
        buffers = runner.token_to_kv_pool.get_kv_buffer(0)
        for i, (seqlen_q, seqlen_k) in enumerate(served.lengths):
            at = torch.arange(seqlen_k, device=device)
            tokens = table[i][at // page_size].long() * page_size + at % page_size
            runner.req_to_token_pool.req_to_token[rows[i], :seqlen_k] = tokens.int()
            cached = tokens[: seqlen_k - seqlen_q]
            for buffer, x in zip(buffers, (served.k[i], served.v[i]), strict=True):
                if not cached_before:
                    buffer[tokens] = torch.nan
                    buffer[cached] = x[: len(cached)]
            places.append(tokens[len(cached) :])
            positions.append(at[len(cached) :])
        lengths_q, lengths_k = ([pair[j] for pair in served.lengths] for j in (0, 1))
        prefixes = [k - q for q, k in served.lengths]
        batch = self.info.ForwardBatch(
            forward_mode=self.info.ForwardMode.MIXED, batch_size=count, input_ids=torch.cat(positions),  # any
            req_pool_indices=rows, seq_lens=torch.tensor(lengths_k, device=device),
            seq_lens_cpu=torch.tensor(lengths_k), out_cache_loc=torch.cat(places), seq_lens_sum=sum(lengths_k),
            positions=torch.cat(positions),
        )  # fmt: skip
        runner.kv_index_translator.bind_own_plan(batch)
        batch.extend_seq_lens, batch.extend_prefix_lens = (
            torch.tensor(x, device=device) for x in (lengths_q, prefixes)
        )
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = lengths_q, prefixes
        batch.extend_num_tokens = served.starts[-1]
        return batch

    def run(self, backend: Any, served: Served, batch: Any, layer: Any = None, **options: Any) -> Any:
        """[tokens, heads, head_dim]"""
        new = [
            torch.cat([x[n - m :] for x, (m, n) in zip(of, served.lengths, strict=True)]) for of in (served.k, served.v)
        ]
        with torch.no_grad():
            o = backend.forward_extend(served.q.flatten(1), *new, layer or self.layer(served), batch, **options)
        return o.view(served.q.shape)


@pytest.fixture(params=["pretended", "sglang"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch, real=request.param == "sglang")


@pytest.fixture
def ready(engine: Engine) -> Any:
    """(engine, backend, served, batch), its metadata initialised; pages of 16 tokens."""
    served, runner = Served.make(), engine.runner(16)
    backend = engine.plugin.make_backend(runner)
    batch = engine.batch(runner, served, 16)
    backend.init_forward_metadata(batch)
    return engine, backend, served, batch
