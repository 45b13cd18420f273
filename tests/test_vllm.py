"""The plug-in for vLLM: which requests of a batch it gives to S2O, and that all attend as in dense attention.

Each test runs with a stand-in for vLLM and, where it is installed, with vLLM itself: its registry, builder, metadata
and implementation, but for the kernel of FlashAttention, which needs a GPU.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import timeit
import types
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from served import (  # noqa: E402
    HEAD_DIM,
    HEADS,
    KINDS,
    KV_HEADS,
    LENGTHS,
    SCALE,
    Served,
    on_gpu,
)
from vllm_engine import PAGE, PLUGIN, in_cache  # noqa: E402
from vllm_engine import engine as engine  # noqa: E402

from s2o_cupy import S2OConfig, s2o_attention  # noqa: E402
from s2o_cupy.integrations import serving  # noqa: E402
from s2o_cupy.integrations.plugins import VLLM_BACKEND, register_with_vllm  # noqa: E402


@pytest.mark.parametrize("by_head", [False, True])
def test_a_batch_is_cut(engine, by_head):
    """Each request attends exactly once, and to its own keys: S2O's at tau 0, which is dense."""
    served = Served.make()
    cache, table = in_cache(served, by_head)
    metadata = engine.builder().build(0, engine.common(served, table))
    assert [(run.s2o, run.requests, run.tokens) for run, _ in metadata.parts] == [
        (False, slice(0, 2), slice(0, 31)),
        (True, slice(2, 4), slice(31, 361)),
        (False, slice(4, 6), slice(361, 402)),
        (True, slice(6, 7), slice(402, 472)),
    ]
    o = engine.run(served, cache, metadata, padding=8)
    torch.testing.assert_close(o[:472], served.expected(), rtol=0, atol=2e-6)
    assert o[472:].isnan().all()  # nobody's rows
    assert [(x["cu_seqlens_q"].tolist(), x["seqused_k"].tolist()) for x in engine.calls] == [
        ([0, 1, 31], [300, 30]),
        ([0, 1, 41], [64, 400]),
    ]
    assert [x["max_seqlen_q"] for x in engine.calls] == [30, 40]
    assert engine.plugin.counts.calls == {"s2o": 3, "decoding": 2, "short": 1, "few queries": 1}


@pytest.mark.parametrize(
    ("lengths", "budget", "threshold", "ends"),
    [
        ([(1, 300), (200, 500), (1, 64)], 203, 0, [True]), ([(1, 300), (200, 500), (1, 64)], 202, 0, [False]),
        (LENGTHS, 472, 0, [True, True]), (LENGTHS, 9999, 130, [True, False, True]),
        (LENGTHS, 9999, 200, [False, True, True]),
    ],
)  # fmt: skip
def test_prompts_that_go_on(engine, lengths, budget, threshold, ends):
    """One that fills a pass by itself, and a chunk of the longest length that is scheduled."""
    served = Served.make(lengths)
    _, table = in_cache(served)
    builder = engine.builder()
    builder._budget, builder._longest = budget, threshold
    metadata = builder.build(0, engine.common(served, table))
    assert [run.ends for run, _ in metadata.parts if run.s2o] == ends


@pytest.mark.parametrize("engine", ["pretended"], indirect=True)
@pytest.mark.parametrize(
    ("scheduler", "ends"),
    [
        ({"max_num_scheduled_tokens": 203, "max_num_batched_tokens": 202}, True),
        ({"max_num_scheduled_tokens": 202, "max_num_batched_tokens": 203}, False),
        ({"max_num_scheduled_tokens": None, "max_num_batched_tokens": 202}, False),
        ({"max_num_batched_tokens": 202}, False), ({"max_num_batched_tokens": 203}, True), ({}, True), (None, True),
        ({"max_num_batched_tokens": 300, "long_prefill_token_threshold": 200}, False),
    ],
)  # fmt: skip
def test_a_pass_has_as_many_tokens_as_the_scheduler_says(engine, scheduler, ends):
    """Those that it schedules, if it says so; without a scheduler a prompt always ends."""
    served = Served.make([(1, 300), (200, 500), (1, 64)])
    config = engine.config()
    del config.scheduler_config
    if scheduler is not None:
        config.scheduler_config = types.SimpleNamespace(**scheduler)
    builder = engine.plugin.S2OMetadataBuilder(None, ["model.layers.3.attn"], config, served.q.device)
    metadata = builder.build(0, engine.common(served, in_cache(served)[1]))
    assert [run.ends for run, _ in metadata.parts if run.s2o] == [ends]


@pytest.mark.parametrize("engine", ["pretended"], indirect=True)
@pytest.mark.parametrize("given", [{}, {"additional_config": None}, {"additional_config": {}},
                                   {"additional_config": "s2o"}], ids=str)  # fmt: skip
def test_settings_without_any_in_the_configuration(engine, given):
    """Also of a vLLM that has no place for them."""
    settings = engine.plugin.settings_of(types.SimpleNamespace(**given))
    assert settings == serving.ServingSettings.parse({}, "")


@pytest.mark.gpu
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu(engine, by_head, dtype):
    """From the cache where it lies, on PyTorch's stream; with vLLM the rest by its FlashAttention. At tau 0, which is
    dense: no element further off than rounding."""
    served = on_gpu(dtype)
    engine.on_a_gpu(served)
    cache, table = in_cache(served, by_head)
    builder, impl = engine.builder(min_seqlen=128), engine.impl({"min_seqlen": 128})
    with torch.cuda.stream(torch.cuda.Stream()):
        metadata = builder.build(0, engine.common(served, table))
        o = engine.run(served, cache, metadata, impl, padding=8)
    torch.cuda.synchronize()
    served.assert_dense(o[:-8])
    assert o[-8:].isnan().all()
    assert engine.plugin.counts.calls == {"s2o": 4, "decoding": 2, "short": 1, "few queries": 1}


@pytest.mark.gpu
def test_whole_batches_on_a_gpu(engine):
    """That are the server's own attention's, with the schedule that it makes ahead; and S2O's, bit for bit what it
    gives to each request's keys alone."""
    engine.on_a_gpu(Served.make(heads=8, head_dim=128).to("cuda", torch.bfloat16))
    settings = {"tau": 0.5, "segment": 128, "block_m": 128, "block_n": 128, "dense_up_to": 0, "min_seqlen": 512}
    for lengths in ([(1, 900), (1, 50), (40, 300)], [(1300, 1300), (257, 2049)]):
        served = Served.make(lengths, heads=8, head_dim=128).to("cuda", torch.bfloat16)
        cache, table = in_cache(served)
        metadata = engine.builder(**settings).build(0, engine.common(served, table))
        o = engine.run(served, cache, metadata, engine.impl(settings))
        if not metadata.parts:
            served.assert_dense(o)
            continue
        config = S2OConfig(tau=0.5, segment=128, block_m=128, block_n=128, dense_up_to=0)
        densities = []
        for i in range(len(lengths)):
            rows = slice(served.starts[i], served.starts[i + 1])
            alone, stats = s2o_attention(*served.request(i), config=config, scale=SCALE, return_stats=True)
            densities.append(stats.density)
            assert torch.equal(o[rows], alone[0].transpose(0, 1))
        assert min(densities) < 1
    assert engine.plugin.counts.calls == {"decoding": 2, "short": 1, "s2o": 2}


def test_s2o_leaves_out_what_it_would_alone(engine):
    """With a tau: the bits of s2o_attention to each request's keys."""
    settings = {"tau": 0.5, "unit": 4}
    served = Served.make()
    cache, table = in_cache(served)
    metadata = engine.builder().build(0, engine.common(served, table))
    o = engine.run(served, cache, metadata, engine.impl(settings))
    config = S2OConfig(tau=0.5, segment=64, block_m=64, block_n=64, unit=4)
    for i, kind in enumerate(KINDS):
        rows = slice(served.starts[i], served.starts[i + 1])
        if kind == "s2o":
            q, k, v = (x[None].transpose(1, 2) for x in (served.q[rows], served.k[i], served.v[i]))
            alone = s2o_attention(q, k, v, config=config, scale=SCALE)
            assert torch.equal(o[rows], alone[0].transpose(0, 1))
    assert (o - served.expected()).abs().max() > 1e-3


def test_the_cache_is_read_where_it_lies(engine, monkeypatch):
    """Keys and values side by side: two views of the cache, of its memory and strides."""
    served = Served.make()
    cache, table = in_cache(served)
    seen = []
    monkeypatch.setattr(serving, "s2o_attention_paged", lambda *x, **options: seen.append((x, options)))
    metadata = engine.builder().build(0, engine.common(served, table))
    engine.run(served, cache, metadata)
    (q, k_pages, v_pages, page_table), options = seen[0]
    assert k_pages.data_ptr() == cache.data_ptr() and v_pages.data_ptr() == cache.data_ptr() + 4 * HEAD_DIM
    assert k_pages.shape == v_pages.shape == (len(cache), PAGE, KV_HEADS, HEAD_DIM)
    assert k_pages.stride() == (PAGE * KV_HEADS * 2 * HEAD_DIM, KV_HEADS * 2 * HEAD_DIM, 2 * HEAD_DIM, 1)
    assert torch.equal(page_table, table[2:4]) and page_table.data_ptr() == table[2:].data_ptr() - table.data_ptr() + (
        metadata.block_table.data_ptr()
    )
    assert options["cu_seqlens_q"] == [0, 200, 330] and options["seqlen_k"] == [200, 500]
    assert q.shape[0] == 330 and options["out"].shape == q.shape


def test_a_padded_batch(engine):
    served = Served.make()
    cache, table = in_cache(served)
    metadata = engine.builder().build(0, engine.common(served, table, padding=3))
    assert metadata.parts[-1][0].requests == slice(6, 10)  # with S2O's last
    torch.testing.assert_close(engine.run(served, cache, metadata), served.expected(), rtol=0, atol=2e-6)
    assert sum(engine.plugin.counts.calls.values()) == len(LENGTHS)


@pytest.mark.parametrize(
    ("lengths", "kinds"),
    [
        ([(1, 900), (1, 50)], {"decoding": 2}),
        ([(99, 99), (1, 50)], {"short": 1, "decoding": 1}),
        ([(63, 900), (1, 50)], {"few queries": 1, "decoding": 1}),
        ([(1, 900), (1, 500), (30, 30)], {"decoding": 2, "short": 1}),
        ([(70, 70), (63, 900)], {"short": 1, "few queries": 1}),
        ([(300, 300), (150, 900)], {"s2o": 2}),
    ],
)
def test_whole_batches(engine, lengths, kinds):
    served = Served.make(lengths)
    cache, table = in_cache(served)
    metadata = engine.builder().build(0, engine.common(served, table))
    torch.testing.assert_close(engine.run(served, cache, metadata), served.expected(), rtol=0, atol=2e-6)
    assert engine.plugin.counts.calls == kinds
    assert len(engine.calls) == ("s2o" not in kinds)


@pytest.mark.parametrize(
    ("options", "settings", "kind"),
    [
        ({"sliding_window": 64}, {}, "sliding window"),
        ({"alibi_slopes": [0.5] * HEADS}, {}, "bias"),
        ({"sinks": torch.zeros(HEADS)}, {}, "sinks"),
        ({"attn_type": "encoder_only"}, {}, "not causal"),
        ({}, {"per_layer": {"3": None}}, "layer"),
    ],
)
def test_layers_that_are_not_s2os(engine, options, settings, kind, monkeypatch, caplog):
    """The whole batch, with FlashAttention's own metadata of it."""
    if engine.real and "sinks" in options:
        monkeypatch.setattr(engine.flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    served = Served.make()
    cache, table = in_cache(served)
    impl = engine.impl(settings, **options)
    whole = []
    monkeypatch.setattr(type(impl).__mro__[1], "forward", lambda self, *arguments: whole.append(arguments))
    metadata = engine.builder().build(0, engine.common(served, table))
    with caplog.at_level(logging.INFO, "vllm.s2o_cupy"):
        logging.getLogger("vllm").propagate = True
        engine.run(served, cache, metadata, impl)
        engine.run(served, cache, metadata, impl)
    assert len(whole) == 2 and whole[0][5] is metadata
    assert all(x is y for x, y in zip(whole[1], engine.given, strict=False)) and whole[1][7:] == (None, None)
    assert engine.plugin.counts.calls[kind] == 6 and "s2o" not in engine.plugin.counts.calls
    said = [x for x in caplog.records if f"of the kind '{kind}'" in x.message]
    assert len(said) == 1 and "vLLM's own attention takes" in said[0].message


def test_a_cache_of_another_dtype(engine, monkeypatch):
    served = Served.make()
    cache, table = in_cache(served)
    impl = engine.impl()
    monkeypatch.setattr(type(impl).__mro__[1], "forward", lambda self, *arguments: None)
    engine.run(served, cache.half(), engine.builder().build(0, engine.common(served, table)), impl)
    assert engine.plugin.counts.calls["cache dtype"] == 3


@pytest.mark.parametrize("engine", ["pretended"], indirect=True)
@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("queries", ["16 bits", "8 bits"])
def test_a_cache_of_8_bits(engine, of_heads, queries):
    """Bytes of e4m3 with the layer's scales: bit for bit s2o_attention to what they stand for. vLLM may round queries
    likewise, with a scale of their own."""
    served = Served.make([(300, 300), (150, 900)]).to("cpu", torch.bfloat16)
    wide, table = in_cache(served)
    layer, shape = engine.layer(), (KV_HEADS,) if of_heads else ()
    layer._k_scale, layer._v_scale, layer._q_scale = (torch.full(shape, x) for x in (0.02, 0.03, 0.5))
    if of_heads:
        layer._v_scale[1] = 0.01
    by_head = torch.stack([x.expand(KV_HEADS) for x in (layer._k_scale, layer._v_scale)], 1)  # [kv_heads, 2]
    by_column = by_head.repeat_interleave(HEAD_DIM, 1)[:, None]  # [kv_heads, 1, 2 * head_dim]
    eight = (wide / by_column).to(torch.float8_e4m3fn)
    values = (eight.float() * by_column).bfloat16()
    q = served.q if queries == "16 bits" else (served.q / 0.5).to(torch.float8_e4m3fn)
    impl = engine.impl({"tau": 0.5}, kv_cache_dtype="fp8")
    metadata = engine.builder(tau=0.5).build(0, engine.common(served, table))
    output, key = torch.full_like(served.q, torch.nan), served.like(len(q), KV_HEADS, HEAD_DIM)
    o = impl.forward(layer, q, key, key, eight.view(torch.uint8), metadata, output)
    assert engine.plugin.counts.calls == {"s2o": 2}

    served.q = served.q if queries == "16 bits" else (q.float() * 0.5).bfloat16()
    expected = engine.run(served, values, metadata, engine.impl({"tau": 0.5}))
    assert torch.equal(o, expected)


@pytest.mark.parametrize("engine", ["pretended"], indirect=True)
@pytest.mark.parametrize(("dtype", "scales"), [("fp8_e5m2", 1), ("fp8_per_token_head", 1), ("fp8", 3)])
def test_caches_of_8_bits_that_are_not_s2os(engine, dtype, scales, monkeypatch):
    served = Served.make([(300, 300), (150, 900)])
    cache, table = in_cache(served)
    impl, layer = engine.impl(kv_cache_dtype=dtype), engine.layer()
    layer._k_scale = torch.ones(scales)
    monkeypatch.setattr(type(impl).__mro__[1], "forward", lambda self, *arguments: None)
    metadata = engine.builder().build(0, engine.common(served, table))
    q, key = served.q, served.like(len(served.q), KV_HEADS, HEAD_DIM)
    impl.forward(layer, q, key, key, cache.to(torch.float8_e4m3fn), metadata, torch.empty_like(q))
    assert engine.plugin.counts.calls == {"cache dtype": 2}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"causal": False}, "not causal"),
        ({"seq_lens_cpu_upper_bound": None}, "drafted tokens"),
        ({"mm_req_doc_ranges": {2: [(3, 9)]}}, "mask"),
        ({"rswa_prefix_lens": torch.ones(len(LENGTHS))}, "sliding window"),
    ],
)
def test_batches_that_are_not_s2os(engine, changes, kind):
    served = Served.make()
    metadata = engine.builder().build(0, engine.common(served, served.table(PAGE), **changes))
    assert metadata.parts == () and metadata.kinds == {kind: len(LENGTHS)}


def test_keys_of_other_ranks_are_not_seen(engine):
    served = Served.make()
    builder = engine.builder()
    builder.dcp_world_size = 2
    metadata = builder.build(0, engine.common(served, served.table(PAGE)))
    assert metadata.parts == () and metadata.kinds == {"context parallel": len(LENGTHS)}


def test_drafted_tokens_are_not_s2os(engine):
    """Of a request that is past its prompt the host knows an upper bound of the length alone."""
    served = Served.make([(100, 300), (100, 300)])
    common = engine.common(served, served.table(PAGE), is_prefilling=torch.tensor([False, True]))
    metadata = engine.builder().build(0, common)
    assert [run.s2o for run, _ in metadata.parts] == [False, True]
    assert metadata.kinds == {"drafted tokens": 1, "s2o": 1}


def test_no_part_of_a_cuda_graph_and_of_a_draft_model(engine):
    """A graph would keep the lengths that it was captured with."""
    served = Served.make()
    builder, common = engine.builder(), engine.common(served, served.table(PAGE))
    assert builder.build_for_cudagraph_capture(common).kinds == {"graph": len(LENGTHS)}
    assert builder.build_for_drafting(common, 0).kinds == {"drafted tokens": len(LENGTHS)}
    assert len(builder.build(0, common).parts) == 4


def test_another_group_of_layers(engine):
    """Which has the same batch with pages of its own."""
    served = Served.make()
    cache, table = in_cache(served)
    builder = engine.builder()
    metadata = builder.build(0, engine.common(served, torch.zeros_like(table)))
    moved = builder.update_block_table(metadata, table, torch.arange(472))
    torch.testing.assert_close(engine.run(served, cache, moved), served.expected(), rtol=0, atol=2e-6)


def test_a_run_that_measures_memory(engine):
    served = Served.make()
    cache, _ = in_cache(served)
    assert (engine.run(served, cache, None) == 0).all()


def test_what_is_not_s2os_costs_a_server_little(engine, monkeypatch):
    """A layer of a step that S2O does not take, such as decoding: it launches nothing, and takes microseconds of the
    hundreds that a layer takes. The bound is ten times what was measured, as others use the machine too."""
    served = Served.make([(1, 900), (1, 50)])
    cache, table = in_cache(served)
    metadata, impl, layer = engine.builder().build(0, engine.common(served, table)), engine.impl(), engine.layer()
    monkeypatch.setattr(engine.plugin.FlashAttentionImpl, "forward", lambda *_: None)
    call = functools.partial(impl.forward, layer, served.q, None, None, cache, metadata, served.q)
    assert min(timeit.repeat(call, number=100, repeat=20)) / 100 < 12e-6


def test_settings_of_a_layer(engine):
    """By its number in the name that vLLM gives it."""
    impl = engine.impl({"per_layer": {"3": {"tau": 0.5}, "4": None}})
    layer = engine.layer()
    assert impl._config(layer) == replace(impl.settings.config, tau=0.5)
    layer.layer_name = "model.layers.4.attn"
    assert impl._config(layer) is None
    layer.layer_name = "model.layers.5.attn"
    assert impl._config(layer) is impl.settings.config


def test_the_entry_point(engine, monkeypatch, caplog):
    """Registers a name, imports nothing of the plug-in, and leaves another plug-in's backend where it is."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if engine.real:
        from vllm.v1.attention.backends import registry

        monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    else:
        monkeypatch.setattr(custom, "path", None)
    monkeypatch.delitem(sys.modules, PLUGIN)
    register_with_vllm()
    register_with_vllm()  # as often as there are processes, or more
    assert custom.get_path() == VLLM_BACKEND and PLUGIN not in sys.modules
    module, name = VLLM_BACKEND.rsplit(".", 1)
    assert module == PLUGIN and name == engine.plugin.S2OBackend.__name__
    register_backend(custom, "other.Backend")
    with caplog.at_level(logging.INFO, "vllm.s2o_cupy"):
        logging.getLogger("vllm").propagate = True
        register_with_vllm()
    assert custom.get_path() == "other.Backend"
    assert "VLLM_PLUGINS=s2o makes it S2O" in caplog.text


def test_what_vllm_asks_a_backend(engine):
    backend = engine.plugin.S2OBackend
    assert (backend.get_name(), backend.get_impl_cls(), backend.get_builder_cls()) == (
        "CUSTOM", engine.plugin.S2OImpl, engine.plugin.S2OMetadataBuilder,
    )  # fmt: skip
    assert not backend.supports_device_cpu_query_lens_mismatch() and not backend.supports_batch_invariance()


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_vllm_finds_and_accepts_it(engine, monkeypatch):
    """By the name that a command line gives; with its own check of what a model needs."""
    from vllm.config import AttentionConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    register_with_vllm()
    backend = AttentionConfig(backend="custom").backend
    assert backend is registry.AttentionBackendEnum.CUSTOM is registry.AttentionBackendEnum["CUSTOM"]
    assert backend.get_class() is engine.plugin.S2OBackend
    needs = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder",
    }  # fmt: skip
    assert backend.get_class().validate_configuration(**needs) == []
    if "use_adaptive_verification" in inspect.signature(backend.get_class().validate_configuration).parameters:
        (reason,) = backend.get_class().validate_configuration(**needs, use_adaptive_verification=True)
        assert "query lens mismatch" in reason
    reasons = backend.get_class().validate_configuration(**needs, use_batch_invariant=True)
    assert reasons == ["batch invariance not supported"]
    assert registry.AttentionBackendEnum.FLASH_ATTN.get_class().validate_configuration(**needs) == []


def test_without_vllm(monkeypatch):
    for name in ("vllm", "vllm.config"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    with pytest.raises(ImportError, match=r"integrations.vllm: .*needs vLLM 0.26 or newer, .*; remedy: pip install"):
        import s2o_cupy.integrations.vllm  # noqa: F401


def test_a_path_that_the_gpu_has_not_is_refused_when_the_server_starts(engine, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    said = r"^vLLM: .*: S2OConfig: path is 'hopper', but the GPU has compute capability 8.0, not 9.0; accepted: 'auto'"
    for start in (lambda: engine.builder(path="hopper"), lambda: engine.impl({"path": "hopper"})):
        with pytest.raises(ValueError, match=said):
            start()


@pytest.mark.parametrize("drafted", [0, 1])
def test_layers_that_the_model_has_not(engine, drafted):
    """An error where the server starts; a draft model's layers are numbered behind the model's."""
    model, draft = (types.SimpleNamespace(get_total_num_hidden_layers=lambda n=n: n) for n in (4, 1))
    made, last = engine.config, 3 + drafted

    def config(**settings):
        given = types.SimpleNamespace(**vars(made(**settings)))
        given.model_config = model
        given.speculative_config = types.SimpleNamespace(draft_model_config=draft) if drafted else None
        return given

    engine.monkeypatch.setattr(engine, "config", config)
    settings = engine.plugin.settings_of(config(per_layer={str(last): None}))
    assert settings.per_layer == {last: None}
    beyond = {"per_layer": {"3": None, str(last + 1): None}}
    said = rf"vLLM: .*: per_layer names {last + 1}; accepted: 0 to {last}, as the model has {last + 1} layers"
    for start in (lambda: engine.plugin.settings_of(config(**beyond)), lambda: engine.impl(beyond)):
        with pytest.raises(ValueError, match=said):
            start()
