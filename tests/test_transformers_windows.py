"""Layers of Hugging Face models with sliding windows, capped scores and attention sinks: exactly what they ask for."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from conftest import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import SIZES, logits_of, prompt  # noqa: E402

from s2o_cupy.integrations import plain, sliding_window  # noqa: E402
from s2o_cupy.integrations.causal_mask import CausalMask  # noqa: E402
from s2o_cupy.integrations.sliding_window import window_attention  # noqa: E402
from s2o_cupy.integrations.transformers import register  # noqa: E402
from s2o_cupy.reference.dense import dense_attention  # noqa: E402

DENSE = replace(SMALL, segment=64, tau=0.0)
LENGTH = 500
WINDOW = 200
EAGER = {"attn_implementation": "eager"}
TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


@pytest.fixture(scope="module")
def ids():
    return prompt(LENGTH)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def assert_close(x, y, atol=3e-6):
    torch.testing.assert_close(x, y, rtol=1e-5, atol=atol)


def layers(*kinds):
    return {"layer_types": [f"{kind}_attention" for kind in kinds], "sliding_window": WINDOW}


def model_of(name, **options):
    """A model whose first attention is transformers' own, "eager": the definition."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    return kind(kind.config_class(**{**SIZES, **TOKENS, "initializer_range": 0.2, **EAGER, **options})).eval()


MODELS = {
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {"use_sliding_window": True, **layers("full", "sliding", "full")},
    "Qwen3": {"use_sliding_window": True, "head_dim": 16, **layers("sliding", "full", "sliding")},
    "Gemma2": {
        "head_dim": 16, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1,
        **layers("sliding", "full", "full"),
    },
    "Gemma3": {"head_dim": 16, "query_pre_attn_scalar": 1, **layers("sliding", "sliding", "full")},
    "GptOss": {
        "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, **layers("sliding", "full", "sliding")
    },
}  # fmt: skip


def counts(**calls):
    return {name.replace("_", " "): n for name, n in calls.items() if n}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, ids):
    """A prompt, the same in chunks and decoded, and a prompt within the window."""
    model = model_of(name, **MODELS[name])
    kinds = MODELS[name].get("layer_types", ["sliding_attention"] * 3)
    windows, others = kinds.count("sliding_attention"), kinds.count("full_attention")
    expected = model(ids).logits
    s2o = register(config=DENSE, min_seqlen=100)
    assert_close(logits_of(model, "s2o", ids), expected, atol=3e-5)
    assert s2o.calls == counts(dense_window=windows, s2o=others)
    s2o.calls.clear()
    cache = transformers.DynamicCache(config=model.config)
    chunks = (0, 150), (150, 350), (350, 499), (499, LENGTH)
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in chunks]
    assert_close(torch.cat(parts, 1), expected, atol=3e-5)
    assert s2o.calls == counts(dense_window=2 * windows, s2o=3 * others + windows, decoding=3)
    s2o.calls.clear()
    assert_close(model(ids[:, :150]).logits, expected[:, :150], atol=3e-5)
    assert s2o.calls == {"s2o": 3}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["Mistral", "GptOss"])
def test_padded_rows(name, ids):
    model = model_of(name, **MODELS[name])
    ids = torch.cat([ids, ids.flip(1), ids.roll(9)])
    mask = torch.ones_like(ids)
    mask[1, :100], mask[2, :350] = 0, 0
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    s2o = register(config=DENSE, min_seqlen=100)
    assert_close(logits_of(model, "s2o", ids, attention_mask=mask)[mask.bool()], expected, atol=3e-5)
    assert sum(s2o.calls.values()) == s2o.calls["dense window"] + s2o.calls["s2o"] == 3
    s2o.calls.clear()
    cache = transformers.DynamicCache(config=model.config)
    chunks = (0, 150), (150, 400), (400, LENGTH)
    parts = [model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in chunks]
    assert_close(torch.cat(parts, 1)[mask.bool()], expected, atol=3e-5)
    assert s2o.calls["dense window"] + s2o.calls["s2o"] == 9
    # What takes the place of S2O sees the same.
    s2o = register(config=DENSE, min_seqlen=LENGTH + 1)
    assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected, atol=3e-5)
    assert s2o.calls == {"short": 3}


def test_a_static_cache(ids):
    model = model_of("Mistral", **MODELS["Mistral"])
    expected = model(ids).logits
    s2o = register(config=DENSE, min_seqlen=100)
    model.set_attn_implementation("s2o")
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 20)
    chunks = (0, 150), (150, 350), (350, LENGTH)
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in chunks]
    assert_close(torch.cat(parts, 1), expected, atol=3e-5)
    assert s2o.calls == {"s2o": 3, "dense window": 6}


def test_a_window_leaves_nothing_out(ids):
    """Whatever tau the config has, which the other layers use."""
    model = model_of("Mistral", **MODELS["Mistral"])
    expected = model(ids).logits
    register(config=replace(SMALL, tau=0.5, dense_up_to=0), per_layer={(1, 2): DENSE}, min_seqlen=100)
    assert_close(logits_of(model, "s2o", ids), expected, atol=3e-5)


def test_chunked_attention_is_left_to_the_model(ids):
    """Llama 4: chunks are no window."""
    model = model_of(
        "Llama4", head_dim=16, attention_chunk_size=WINDOW, intermediate_size_mlp=96, num_local_experts=2,
        layer_types=["chunked_attention", "chunked_attention", "full_attention"], no_rope_layers=[1, 1, 0],
    )  # fmt: skip
    expected = model(ids).logits
    s2o = register(config=DENSE, min_seqlen=100)
    assert_close(logits_of(model, "s2o", ids), expected, atol=3e-5)
    assert s2o.calls == {"chunked attention": 2, "s2o": 1}


@settings(deadline=None)
@given(
    window=st.integers(2, 80), softcap=st.sampled_from([0.0, 1.5]),
    lengths=st.lists(st.tuples(st.integers(1, 120), st.integers(0, 60)), min_size=1, max_size=3),
)  # fmt: skip
def test_windows_of_packed_sequences(window, softcap, lengths):
    """Queries at the end of their keys, in blocks that begin and end anywhere."""
    lengths = [(n, n + before) for n, before in lengths]
    rng = np.random.default_rng(0)
    q = rng.standard_normal((sum(n for n, _ in lengths), 2, 8), dtype=np.float32)
    k, v = rng.standard_normal((2, sum(n for _, n in lengths), 1, 8), dtype=np.float32)
    with mock.patch.object(sliding_window, "MERGED_ROWS", 50):
        o, lse = window_attention(
            *map(torch.from_numpy, (q, k, v)), lengths, window, config=replace(SMALL, tau=0.5), softcap=softcap
        )
    begin_q = begin_k = 0
    for n, m in lengths:
        rows, keys = slice(begin_q, begin_q := begin_q + n), slice(begin_k, begin_k := begin_k + m)
        s = np.einsum("qhd,kd->hqk", q[rows].astype(np.float64), k[keys, 0]) / 8**0.5
        s = softcap * np.tanh(s / softcap) if softcap else s
        visible = np.tri(n, m, m - n, dtype=bool) & ~np.tri(n, m, m - n - window, dtype=bool)
        weights = np.where(visible, np.exp(s), 0)
        exact = np.einsum("hqk,kd->qhd", weights / weights.sum(-1, keepdims=True), v[keys, 0])
        np.testing.assert_allclose(o[rows].numpy(), exact, atol=2e-6)
        np.testing.assert_allclose(lse[:, rows].numpy(), np.log(weights.sum(-1)), atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [128, 1024, 4096])
def test_windows_on_a_gpu(window):
    """Against sdpa with the mask, in bfloat16: three sequences, one of them a chunk of its prompt."""
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = [(3000, 3000), (700, 5000), (50, 50)]
    sizes = ((3750, 8), (8050, 2), (8050, 2))
    q, k, v = (torch.randn(*size, 128, generator=generator, device="cuda", dtype=torch.bfloat16) for size in sizes)
    o, lse = window_attention(q, k, v, lengths, window, config=replace(SMALL, tau=0.5, block_m=128, block_n=128))
    assert lse.isfinite().all()
    begin_q = begin_k = 0
    for n, m in lengths:
        rows, keys = slice(begin_q, begin_q := begin_q + n), slice(begin_k, begin_k := begin_k + m)
        mask = CausalMask(1, n, m, m, "cuda", window=window).make()
        exact = plain.plain_attention(
            *(x.transpose(0, 1)[None].float() for x in (q[rows], k[keys], v[keys])), mask, False, plain.Weights()
        )
        error = (o[rows].float() - exact[0]).norm() / exact.norm()
        assert error < 5e-3


# ---------------------------------------------------------------- what stands in for sdpa


def test_soft_capped_scores_matter(ids):
    options = MODELS["Gemma2"]
    capped, hardly = (
        model_of("Gemma2", **{**options, "attn_logit_softcapping": cap})(ids).logits for cap in (0.5, 50.0)
    )
    assert (capped - hardly).abs().max() > 0.01


def test_chunks_of_queries_where_scores_are_capped(ids, monkeypatch):
    model = model_of("Gemma2", **MODELS["Gemma2"])
    expected = model(ids).logits
    s2o = register(config=DENSE, min_seqlen=LENGTH + 1)
    monkeypatch.setattr(plain, "SCORES", 4 * LENGTH * 7)
    assert_close(logits_of(model, "s2o", ids), expected, atol=3e-5)
    assert s2o.calls == {"short": 3}


@pytest.mark.parametrize("seqlen_q", [1, 70, 200])
@pytest.mark.parametrize("sinks", [False, True])
def test_plain_attention(qkv, seqlen_q, sinks):
    q, k, v = qkv(seqlen_q, 200, batch=2, heads=4, kv_heads=2)
    exact, lse = dense_attention(q, k, v, softcap=1.5)
    if sinks:
        sinks = np.array([-1.0, 0.0, 3.0, 8.0], dtype=np.float32)
        exact = exact / (1 + np.exp(sinks[:, None] - lse))[..., None]
    exact = exact.transpose(0, 2, 1, 3)
    mask = np.tri(seqlen_q, 200, 200 - seqlen_q, dtype=bool)[None, None]
    added = np.where(mask, 0, -np.inf).astype(np.float32)
    for said in (None, mask, added):
        o = plain.plain_attention(
            *(torch.from_numpy(x) for x in (q, k, v)), None if said is None else torch.from_numpy(said),
            said is None, plain.Weights(softcap=1.5, sinks=None if sinks is False else torch.from_numpy(sinks)),
        )  # fmt: skip
        np.testing.assert_allclose(o.numpy(), exact, atol=1e-6)


def test_sinks_of_heads_with_configs_of_their_own(qkv):
    """A head has its own sink, also where heads take several calls."""
    q, k, v = (torch.from_numpy(x) for x in qkv(200, heads=4, kv_heads=2))
    sinks = torch.tensor([-1.0, 0.0, 3.0, 8.0])
    module = torch.nn.Module().eval()
    module.layer_idx = 0
    s2o = register(config=DENSE, per_layer={(0, 1): replace(DENSE, segment=32)}, min_seqlen=100)
    o, _ = s2o(module, q, k, v, None, s_aux=sinks)
    exact = plain.plain_attention(q, k, v, None, True, plain.Weights(sinks=sinks))
    assert_close(o, exact, atol=1e-5)
    assert s2o.calls == {"s2o": 1}
