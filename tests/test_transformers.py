"""S2O in Hugging Face models: the same logits as their own attention at tau 0, and that attention where S2O cannot."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SMALL

from s2o_cupy import S2OConfig, s2o_attention

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import LENGTH, llama, logits_of  # noqa: E402

import s2o_cupy.integrations.transformers as integration  # noqa: E402
from s2o_cupy.integrations import fallbacks  # noqa: E402
from s2o_cupy.integrations.causal_mask import CausalMask  # noqa: E402
from s2o_cupy.integrations.head_groups import HeadGroup  # noqa: E402
from s2o_cupy.integrations.transformers import capture, register  # noqa: E402

DENSE = replace(SMALL, segment=64, tau=0.0)
pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def logits(model):
    """logits(implementation, ids, ...) of the model."""
    yield functools.partial(logits_of, model)
    model.set_attn_implementation("sdpa")


def assert_close(x, y, atol=3e-6):
    torch.testing.assert_close(x, y, rtol=1e-5, atol=atol)


# ---------------------------------------------------------------- prefill


@pytest.mark.parametrize("batch", [1, 2])
def test_dense_at_tau_0(logits, ids, batch):
    s2o = register(config=DENSE, min_seqlen=100)
    ids = torch.cat([ids, ids.flip(1)])[:batch]
    assert_close(logits("s2o", ids), logits("sdpa", ids))
    assert s2o.calls == {"s2o": 3}


def test_an_all_ones_attention_mask_is_no_mask(logits, ids):
    s2o = register(config=DENSE, min_seqlen=100)
    assert_close(logits("s2o", ids, attention_mask=torch.ones_like(ids)), logits("sdpa", ids))
    assert s2o.calls == {"s2o": 3}


def test_chosen_when_a_model_is_made(ids):
    s2o = register("s2o_other", DENSE, min_seqlen=100)
    model = llama(attn_implementation="s2o_other")
    assert_close(model(ids).logits, llama()(ids).logits)
    assert s2o.calls == {"s2o": 3}


def test_sparse_is_what_s2o_attention_gives(model, ids, logits):
    """Layer by layer, on what the layers get; with the model's own scale and in its layout."""
    sparse_config = replace(SMALL, tau=0.5)
    register(config=sparse_config, min_seqlen=100)
    seen = []

    def spy(q, k, v, **options):
        o = s2o_attention(q, k, v, **options)
        seen.append((q, k, v, o, options))
        return o

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "attention", spy)
        sparse = logits("s2o", ids)
    assert len(seen) == 3
    q, k, v = capture(model, ids, [0])
    first, options = [x.transpose(1, 2).numpy() for x in seen[0][:4]], seen[0][4]
    for x, y in zip(first, (q, k, v), strict=False):
        np.testing.assert_array_equal(x, y)
    assert options == {"config": sparse_config, "scale": 16**-0.5, "softcap": 0.0, "layout": "BSHD"}
    assert seen[0][3].is_contiguous()
    assert not torch.allclose(sparse, logits("sdpa", ids), atol=1e-5)


def test_layers_and_heads(model, ids, logits):
    """A head's output is what S2O with its own config gives it alone."""
    sparse, other = replace(SMALL, tau=0.5), replace(SMALL, segment=64, tau=0.1)
    per_layer = {0: None, 1: sparse, (1, 2): other, (2, 0): other, (2, 3): other}
    s2o = register(config=DENSE, per_layer=per_layer, min_seqlen=100)
    query, key, value = (torch.from_numpy(x) for x in capture(model, ids, [1]))
    for layer, expected in ((1, [sparse, sparse, other, sparse]), (2, [other, DENSE, DENSE, other])):
        module = model.model.layers[layer].self_attn
        o, weights = s2o(module, query, key, value, None, scaling=0.25, dropout=0.0)
        assert weights is None and o.shape == (1, LENGTH, 4, 16) and o.is_contiguous()
        for h, config in enumerate(expected):
            one = (query[:, h : h + 1], key[:, h // 2 :][:, :1], value[:, h // 2 :][:, :1])
            alone = s2o_attention(*one, config=config, scale=0.25)
            torch.testing.assert_close(o[:, :, h], alone[:, 0], rtol=0, atol=0)
    s2o.calls.clear()
    logits("s2o", ids)
    assert s2o.calls == {"s2o": 2, "layer": 1}


def test_a_layer_or_head_that_is_not_there(ids, logits):
    register(config=DENSE, per_layer={3: SMALL}, min_seqlen=100)
    with pytest.raises(ValueError, match="per_layer names layer 3; accepted: 0 to 2"):
        logits("s2o", ids)
    register(config=DENSE, per_layer={(0, 4): SMALL}, min_seqlen=100)
    with pytest.raises(ValueError, match="per_layer names head 4 of layer 0; accepted: 0 to 3"):
        logits("s2o", ids)
    s2o = register(config=DENSE, per_layer={0: SMALL}, min_seqlen=100)
    with pytest.raises(ValueError, match="per_layer names layers, but Identity has no layer_idx"):
        q = torch.zeros(1, 1, 200, 8)
        s2o(torch.nn.Identity(), q, q, q, None)


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("mask", [False, True])
def test_prefill_in_chunks(model, ids, logits, kind, mask):
    """No mask of queries x keys is made, and the result is that of the whole prompt."""
    s2o = register(config=DENSE, min_seqlen=100)
    whole = logits("sdpa", ids)
    cache = (
        transformers.DynamicCache(config=model.config)
        if kind == "dynamic"
        else transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 50)
    )
    parts = []
    for begin, end in ((0, 200), (200, 328), (328, 499), (499, 500)):
        options = {"attention_mask": torch.ones(1, end, dtype=torch.long)} if mask else {}
        parts.append(logits("s2o", ids[:, begin:end], past_key_values=cache, **options))
    assert_close(torch.cat(parts, 1), whole)
    assert s2o.calls == {"s2o": 9, "decoding": 3}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(model, ids, cache):
    s2o = register(config=DENSE, min_seqlen=100)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    expected = model.generate(ids, **options)
    model.set_attn_implementation("s2o")
    assert torch.equal(model.generate(ids, **options), expected)
    model.set_attn_implementation("sdpa")
    assert s2o.calls == {"s2o": 3, "decoding": 9}


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_chunks_that_s2o_does_not_take(model, ids, logits, kind):
    """sdpa gets the same meaning without a mask in memory: short chunks, and a model in training."""
    s2o = register(config=DENSE, min_seqlen=10_000)
    whole = logits("sdpa", ids)
    cache = (
        transformers.DynamicCache(config=model.config)
        if kind == "dynamic"
        else transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 50)
    )
    parts = [logits("s2o", ids[:, a:b], past_key_values=cache) for a, b in ((0, 10), (10, 300), (300, 500))]
    assert_close(torch.cat(parts, 1), whole)
    assert s2o.calls == {"short": 9}


def test_fewer_queries_than_keys(qkv):
    """Without a mask they are the first tokens, as sdpa reads such a call; a mask says which keys each of them sees."""
    q, k, v = (torch.from_numpy(x) for x in qkv(150, 200, heads=4, kv_heads=2))
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 2
    s2o = register(config=DENSE, min_seqlen=100)
    seen = torch.ones(1, 1, 150, 200, dtype=torch.bool).tril(50)
    for mask, reason in ((None, "s2o"), (seen, "mask")):
        s2o.calls.clear()
        expected = integration.sdpa_attention_forward(module, q, k, v, mask)[0]
        assert_close(s2o(module, q, k, v, mask)[0], expected)
        assert s2o.calls == {reason: 1}


# ---------------------------------------------------------------- what sdpa does instead


def test_masks_of_the_callers(logits, ids):
    s2o = register(config=DENSE, min_seqlen=100)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[..., 5] = False
    mask[..., 5, 5] = True
    assert torch.equal(logits("s2o", ids, attention_mask=mask), logits("sdpa", ids, attention_mask=mask))
    assert s2o.calls == {"mask": 3}


def test_training(ids):
    """Dropout and gradients are sdpa's."""
    s2o = register(config=DENSE, min_seqlen=100)
    model = llama(attention_dropout=0.5, attn_implementation="s2o")
    with torch.enable_grad():
        model.train()
        model(ids, labels=ids).loss.backward()
        assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
        assert s2o.calls == {"dropout": 3}
        model.eval()
        model(ids, labels=ids).loss.backward()
        assert s2o.calls == {"dropout": 3, "gradients": 3}
    model(ids)
    assert s2o.calls["s2o"] == 3


@pytest.mark.parametrize("trained", ["", "mlp"], ids=["all", "mlp"])
def test_reentrant_checkpoints(ids, trained):
    """Their layers run without gradients first, and then with them: the same attention both times, also where its own
    weights are frozen."""
    s2o = register(config=DENSE.with_tau(0.5), min_seqlen=100)
    losses, gradients = [], []
    for name in ("sdpa", "s2o"):
        torch.manual_seed(0)
        model = llama(attn_implementation=name).train()
        for parameter, x in model.named_parameters():
            x.requires_grad_(trained in parameter)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
        with torch.enable_grad():
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
        losses.append(loss.detach())
        layer = model.model.layers[0]
        gradients.append((layer.mlp.up_proj if trained else layer.self_attn.q_proj).weight.grad)
    assert s2o.calls == {"gradients": 6}
    assert torch.equal(*losses) and torch.equal(*gradients)
    with torch.inference_mode():  # nothing will be run again
        model(ids)
    assert s2o.calls["s2o"] == 3


def test_each_reason_by_itself(qkv):
    """The output is sdpa's, bit for bit, and the reason is counted."""
    q, k, v = (torch.from_numpy(x) for x in qkv(200, heads=4, kv_heads=2))
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 2

    def agree(reason, q=q, k=k, v=v, mask=None, min_seqlen=100, config=DENSE, **options):
        s2o = register(config=config, min_seqlen=min_seqlen)
        o, _ = s2o(module, q, k, v, mask, **options)
        assert torch.equal(o, integration.sdpa_attention_forward(module, q, k, v, mask, **options)[0])
        assert s2o.calls == {reason: 1}

    with torch.enable_grad():
        for i in range(3):
            agree("gradients", *(x.clone().requires_grad_(i == j) for j, x in enumerate((q, k, v))))
    agree("not causal", is_causal=False)
    agree("decoding", q=q[:, :, :1])
    agree("short", min_seqlen=201)
    agree("few queries", config=replace(DENSE, block_m=256))
    agree("sliding window", sliding_window=199)
    agree("position bias", position_bias=torch.zeros(1, 4, 200, 200))
    for name in ("position_bias", "cache"):  # sdpa would leave the cap out
        with pytest.raises(ValueError, match=f"s2o: {name} and softcap came together; accepted: one of them"):
            register(config=DENSE, min_seqlen=100)(
                module, q, k, v, None, softcap=2.0, **{name: torch.zeros(1, 4, 200, 200)}
            )
    wide = [torch.cat([x] * 5, -1) for x in (q, k, v)]
    agree("shape", *wide)
    agree("shape", v=v[..., :32])
    agree("shape", q=q, k=k.expand(2, -1, -1, -1).contiguous(), v=v.expand(2, -1, -1, -1).contiguous())
    s2o = register(config=DENSE, min_seqlen=200)
    s2o(module, q, k, v, None, sliding_window=200)
    assert s2o.calls == {"s2o": 1}


def test_dtypes_of_a_device():
    s2o = register(config=DENSE, min_seqlen=100)
    q = torch.zeros(1, 1, 200, 8, device="meta")
    module = torch.nn.Module().eval()
    s2o(module, q, q, q, None)
    assert s2o.calls == {"device or dtype": 1}


# ---------------------------------------------------------------- registering


def test_a_name_again_replaces(logits, ids):
    first, second = register(config=DENSE, min_seqlen=100), register(config=DENSE, min_seqlen=100)
    logits("s2o", ids)
    assert (first.calls, second.calls) == (Counter(), {"s2o": 3})


def test_what_register_refuses():
    for match, arguments in (
        ("name is 'sdpa'; accepted: letters, .* and not a name that transformers has given", {"name": "sdpa"}),
        ("name is 'eager'; accepted", {"name": "eager"}),
        ("name is ''", {"name": ""}),
        (r"name is 'paged\|s2o'", {"name": "paged|s2o"}),
        ("min_seqlen is -1; accepted: an integer >= 0", {"min_seqlen": -1}),
        ("min_seqlen is 1.5; accepted", {"min_seqlen": 1.5}),
    ):
        with pytest.raises(ValueError, match=match):
            register(**arguments)
    for match, positional, named in (
        (r"register: name is a S2OConfig; accepted: a string \(a config comes as config=\)", [DENSE], {}),
        (r"config is a dict; accepted: None, S2OConfig, .*; such as S2OConfig\(\*\*c", ["s2o", {"tau": 0.1}], {}),
        (r"config is a float; accepted: None, S2OConfig, .*; such as S2OConfig\(tau=0.1\)", ["s2o", 0.1], {}),
        (r"config is the class S2OConfig; accepted: an instance, S2OConfig\(", ["s2o", S2OConfig], {}),
        (r"register: tau is '0.1' \(str\); accepted: a number >= 0", [], {"tau": "0.1"}),
        (r"segment is not an argument; it is a field of S2OConfig: config=S2OConfig\(segment=", [], {"segment": 9}),
        ("register: threshold is not an argument; did you mean tau", [], {"threshold": 0.1}),
    ):
        with pytest.raises(TypeError, match=match):
            register(*positional, **named)
    with pytest.raises(FileNotFoundError, match=r"no.json: no such file; accepted: a file that tune_model or s2o tune"):
        register("s2o", "no.json")
    for name, meant in (
        ("xattention", r"did you mean XAttentionConfig\(\.\.\.\)\? "), ("flexprefil", "did you mean FlexPrefillConfig"),
        ("query", r"did you mean S2OConfig\(rank='query'\)\? "), ("nothing", ""),
    ):  # fmt: skip
        accepted = "accepted: a file that tune_model or s2o tune wrote, S2OConfig, MeanPoolingConfig, "
        with pytest.raises(ValueError, match=f"register: config is '{name}', which is no file; {meant}.*{accepted}"):
            register("s2o", name)
    with pytest.raises(TypeError, match=r"register: per_layer\[3\] is a str; accepted: None .* mean PBSConfig\("):
        register("s2o", per_layer={3: "pbs"})
    for name in ("xattention", "XAttentionConfig", "x-attention"):
        said = f"register: name is '{name}', a method, but S2O would run; accepted: config=XAttentionConfig"
        with pytest.raises(ValueError, match=rf"{said}\(...\) with it, or another name"):
            register(name)
    with pytest.raises(ValueError, match=r"register: tau came with the file 'no.json'; accepted: one of them"):
        register("s2o", "no.json", tau=0.1)
    assert register().min_seqlen == 8192 and register().configs.default == S2OConfig()


def test_a_tau_by_itself():
    """As of s2o_attention: in place of the config's tau or error."""
    assert register(tau=0.25).configs.default == S2OConfig(tau=0.25)
    asked = S2OConfig(segment=64, error=0.1)
    assert register("s2o", asked, tau=[0.5, 0]).configs.default == S2OConfig(segment=64, tau=(0.5, 0))


# ---------------------------------------------------------------- torch.compile


@pytest.mark.slow
def test_compiled_prefill(model, ids, logits):
    """Whole graphs that hold the operator: a prompt, and a chunk whose mask was made outside of the graph."""
    graphs = []

    def backend(graph, _):
        graphs.append(sum("s2o_cupy.attention" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    register(config=DENSE, min_seqlen=100)
    expected = logits("s2o", ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.equal(compiled(ids, past_key_values=transformers.DynamicCache(config=model.config)).logits, expected)
    assert graphs == [3]
    graphs.clear()
    mask = CausalMask(1, LENGTH, LENGTH + 20, LENGTH, "cpu")
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 20)
    assert torch.equal(compiled(ids, attention_mask=mask, past_key_values=cache).logits, expected)
    assert graphs == [3]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("device", "config", "seqlen_k", "kind"),
    [
        ("cuda", S2OConfig(dense_up_to=8192), 8192, "dense"), ("cuda", S2OConfig(dense_up_to=8192), 8193, "s2o"),
        ("cuda", S2OConfig(tau=0), 9000, "dense"), ("cuda", S2OConfig(tau=0, dense_up_to=0), 300, "s2o"),
        ("cuda", S2OConfig(dense_up_to=0), 300, "s2o"), ("cpu", S2OConfig(), 300, "s2o"),
        ("cpu", S2OConfig(tau=0), 300, "s2o"),
        ("cuda", S2OConfig(), 10_240, "dense"), ("cuda", S2OConfig(), 10_241, "s2o"),  # of 3 heads of 64
    ],
)  # fmt: skip
def test_a_dense_call_of_s2os_is_told_from_others(device, config, seqlen_k, kind, monkeypatch):
    """On a GPU, where it leaves nothing out; the reference on a CPU runs S2O at any length."""
    monkeypatch.setattr("s2o_cupy.plan.launch_plan.DENSE_UP_TO", 8192)
    query = SimpleNamespace(is_cuda=device == "cuda", shape=(2, 4, 300, 64))
    call = integration._Call(True, None, None, None, None, 300, seqlen_k)
    groups = (HeadGroup(config, slice(0, 3), slice(0, 3)), HeadGroup(config, [3], [3]))
    asked = integration.Asked(None, query, query, query, call, groups, None, None, 0.0, None, 0.0, None, {})
    assert asked.runs == kind and kind in fallbacks.WORDS


@pytest.mark.parametrize(
    ("configs", "seqlen_k", "dense"),
    [
        ([S2OConfig(tau=(0.1, 0, 0.1)), S2OConfig(tau=0.1)], 20_000, [False, True, False, False]),
        ([S2OConfig(tau=(0.1, 0.1, 0.1)), S2OConfig(tau=0)], 20_000, [False, False, False, True]),
        ([S2OConfig(tau=(0.1, 0, 0.1), dense_up_to=0), S2OConfig()], 20_000, [False] * 4),  # visits all keys in order
        ([S2OConfig(dense_up_to=300), S2OConfig(dense_up_to=299)], 300, [True, True, True, False]),
        ([S2OConfig(error=0.1), S2OConfig(tau=0)], 20_000, [False, False, False, True]),
        ([S2OConfig(tau=(0, 0, 0)), S2OConfig(tau=0)], 20_000, [True] * 4),
    ],
    ids=str,
)  # fmt: skip
def test_each_head_is_dense_or_not(configs, seqlen_k, dense, monkeypatch):
    """By the call that it is in, and by its own tau. A layer of both kinds is told from those of one."""
    monkeypatch.setattr("s2o_cupy.plan.launch_plan.DENSE_UP_TO", 8192)
    query = SimpleNamespace(is_cuda=True, shape=(2, 4, 300, 64))
    call = integration._Call(True, None, None, None, None, 300, seqlen_k)
    groups = (HeadGroup(configs[0], slice(0, 3), slice(0, 3)), HeadGroup(configs[1], [3], [3]))
    asked = integration.Asked(None, query, query, query, call, groups, None, None, 0.0, None, 0.0, None, {})
    assert asked.dense_heads == dense
    assert asked.runs == ("dense" if all(dense) else "partly dense" if any(dense) else "s2o")


def test_the_limit_of_dense_calls_is_that_of_each_call(monkeypatch):
    """A few heads are dense up to more keys than many, though their config be the same."""
    monkeypatch.setattr("s2o_cupy.plan.launch_plan.DENSE_UP_TO", 8192)
    many, few = HeadGroup(S2OConfig(), slice(0, 16), slice(0, 4)), HeadGroup(S2OConfig(), [16, 18], [4, 5])
    assert many.dense_heads(20, 128, 12_000) == [(head, False) for head in range(16)]
    assert few.dense_heads(20, 128, 12_000) == [(16, True), (18, True)]
