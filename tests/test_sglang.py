"""The plug-in for SGLang: which requests of a batch it gives to S2O, and that all attend as in dense attention.

Each test runs with a stand-in for SGLang and, where it is installed, with SGLang itself on the CPU: its registry, its
pools of tokens, its batches and its attention by PyTorch.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from served import HEAD_DIM, HEADS, SCALE, Served, on_gpu  # noqa: E402
from sglang_engine import CONTEXT, PLUGIN, Engine  # noqa: E402
from sglang_engine import engine as engine  # noqa: E402
from sglang_engine import ready as ready  # noqa: E402

from s2o_cupy import S2OConfig, s2o_attention  # noqa: E402
from s2o_cupy.integrations.plugins import register_with_sglang  # noqa: E402


@pytest.mark.parametrize(("budget", "ends"), [(226, True), (225, False), (-1, True)])
def test_a_prompt_that_goes_on(engine, monkeypatch, budget, ends):
    """One that fills a pass by itself, counted in whole pages."""
    served, runner = Served.make([(1, 300), (200, 500), (1, 64)]), engine.runner(16)
    backend = engine.plugin.make_backend(runner)
    server_args = types.SimpleNamespace(chunked_prefill_size=budget)
    monkeypatch.setattr(runner, "server_args", server_args, raising=False)
    runs = backend._s2o._plan(engine.batch(runner, served, 16), 0).runs
    assert [run.ends for run in runs if run.s2o] == [ends]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_batch_is_cut(engine, page_size, monkeypatch):
    """Each request attends exactly once, and to its own keys: S2O's at tau 0, which is dense."""
    served, runner = Served.make(), engine.runner(page_size)
    backend = engine.plugin.make_backend(runner)
    batch = engine.batch(runner, served, page_size)
    rest = backend._s2o.rest
    calls: list[Any] = []
    of_rest = rest.forward_extend
    monkeypatch.setattr(rest, "forward_extend", lambda *x, **y: calls.append((x, y)) or of_rest(*x, **y))
    backend.init_forward_metadata(batch)
    o = engine.run(backend, served, batch)
    torch.testing.assert_close(o, served.expected(), rtol=0, atol=2e-6)
    ((q, k, _, _, sub), options) = calls[0]
    assert q.shape[0] == k.shape[0] == sub.extend_num_tokens == 72 and options == {"save_kv_cache": False}
    assert sub.extend_seq_lens_cpu == sub.extend_seq_lens.tolist() == [1, 30, 1, 40]
    assert sub.seq_lens.tolist() == sub.seq_lens_cpu.tolist() == [300, 30, 64, 400]
    assert torch.equal(sub.req_pool_indices, batch.req_pool_indices[[0, 1, 4, 5]])
    assert engine.plugin.counts.calls == {"s2o": 3, "decoding": 2, "short": 1, "few queries": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rest", ["torch_native", "triton"])
def test_on_a_gpu(engine, page_size, dtype, rest):
    """From the pool where it lies, on PyTorch's stream; prompts, chunks, cached prefixes and decoding in one batch. At
    tau 0, which is dense: no element further off than rounding, S2O's and SGLang's alike."""
    if rest == "triton" and not engine.real:
        pytest.skip("the stand-in has one attention")
    served = on_gpu(dtype)
    engine.settings(min_seqlen=128)
    runner = engine.runner(page_size, served, rest)
    backend = engine.plugin.make_backend(runner)
    batch = engine.batch(runner, served, page_size)
    with torch.cuda.stream(torch.cuda.Stream()):
        backend.init_forward_metadata(batch)
        o = engine.run(backend, served, batch)
    torch.cuda.synchronize()
    served.assert_dense(o)
    assert engine.plugin.counts.calls == {"s2o": 4, "decoding": 2, "short": 1, "few queries": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 64])
def test_a_prompt_in_chunks_on_a_gpu(engine, page_size):
    """Each chunk attends to what the chunks before it have put into the pool. With a tau: the bits of one call."""
    engine.settings(tau=0.2, segment=128, block_m=128, block_n=128, dense_up_to=0, min_seqlen=512)
    whole = Served.make([(2600, 2600)], heads=8, head_dim=128).to("cuda", torch.bfloat16)
    runner, table = engine.runner(page_size, whole), whole.table(page_size)
    backend = engine.plugin.make_backend(runner)
    chunks = []
    for begin, end in ((0, 1024), (1024, 2048), (2048, 2600)):
        k, v = ([x[:end] for x in of] for of in (whole.k, whole.v))
        chunk = Served([(end - begin, end)], whole.q[begin:end], k, v, [0, end - begin])
        batch = engine.batch(runner, chunk, page_size, table)
        backend.init_forward_metadata(batch)
        chunks.append(engine.run(backend, chunk, batch))
    assert engine.plugin.counts.calls == {"s2o": 3}
    config = S2OConfig(tau=0.2, segment=128, block_m=128, block_n=128, dense_up_to=0)
    expected, stats = s2o_attention(*whole.request(0), config=config, scale=SCALE, return_stats=True)
    assert stats.density < 1
    assert torch.equal(torch.cat(chunks), expected[0].transpose(0, 1))


def test_s2o_leaves_out_what_it_would_alone(engine):
    """With a tau: the bits of s2o_attention to each request's keys, which it has put into the pool."""
    engine.settings(tau=0.5, unit=4)
    served, runner = Served.make([(300, 300), (150, 400)]), engine.runner(16)
    backend = engine.plugin.make_backend(runner)
    batch = engine.batch(runner, served, 16)
    backend.init_forward_metadata(batch)
    o = engine.run(backend, served, batch)
    config = S2OConfig(tau=0.5, segment=64, block_m=64, block_n=64, unit=4)
    for i in (0, 1):
        rows = slice(served.starts[i], served.starts[i + 1])
        q, k, v = (x[None].transpose(1, 2) for x in (served.q[rows], served.k[i], served.v[i]))
        assert torch.equal(o[rows], s2o_attention(q, k, v, config=config, scale=SCALE)[0].transpose(0, 1))
    assert (o - served.expected()).abs().max() > 1e-3
    assert engine.plugin.counts.calls == {"s2o": 2}


def test_no_request_of_s2os(engine):
    served, runner = Served.make([(1, 300), (30, 30), (40, 400)]), engine.runner(1)
    backend = engine.plugin.make_backend(runner)
    batch = engine.batch(runner, served, 1)
    backend.init_forward_metadata(batch)
    torch.testing.assert_close(engine.run(backend, served, batch), served.expected(), rtol=0, atol=2e-6)
    assert engine.plugin.counts.calls == {"decoding": 1, "short": 1, "few queries": 1}


def test_layers_share_a_plan_and_passes_do_not(ready):
    """A batch's object can come again with other requests, as of a CUDA graph's runner."""
    engine, backend, served, batch = ready
    engine.run(backend, served, batch)
    plan = backend._s2o.plan
    engine.run(backend, served, batch, engine.layer(layer_id=0))  # another pass
    assert backend._s2o.plan is not plan
    plan = backend._s2o.plan
    assert backend._s2o._plan(batch, layer=7) is plan
    backend.init_forward_metadata(batch)
    assert backend._s2o.plan is None


def test_rows_of_padding(ready):
    """Behind those of the batch: they are written, and read by nobody."""
    engine, backend, served, batch = ready
    some = [(200, 200), (130, 500)]
    served = Served.make(some)
    batch = engine.batch(backend._s2o.runner, served, 16)
    backend.init_forward_metadata(batch)
    o = engine.run(backend, served, batch)
    padded = replace(served, q=torch.cat([served.q, torch.full((6, HEADS, HEAD_DIM), torch.nan)]))
    with torch.no_grad():
        again = backend.forward_extend(padded.q.flatten(1), None, None, engine.layer(), batch)
    assert torch.equal(again[:330].view(o.shape), o) and (again[330:] == 0).all()


@pytest.mark.parametrize(
    ("changes", "options", "kind"),
    [
        ({"sliding_window_size": 64}, {}, "sliding window"),
        ({"use_irope": True}, {}, "sliding window"),
        ({"is_cross_attention": True}, {}, "not causal"),
        ({"xai_temperature_len": 8}, {}, "bias"),
        ({"pos_encoding_mode": "ALIBI"}, {}, "bias"),
        ({"logit_cap": 3.0, "logit_capping_method": "other"}, {}, "bias"),
        ({"v_head_dim": 16}, {}, "shape"),
        ({}, {"sinks": torch.zeros(HEADS)}, "sinks"),
        ({}, {"q_rope": torch.zeros(3)}, "arguments"),
        ({}, {"sinks": None, "return_lse": False}, None),
    ],
)
def test_layers_that_are_not_s2os(ready, changes, options, kind, caplog):
    """The whole batch, by the attention that SGLang decodes with."""
    engine, backend, served, batch = ready
    whole: list[Any] = []
    engine.monkeypatch.setattr(
        type(backend).__mro__[1], "forward_extend", lambda self, *x, **y: whole.append((x, y)) or x[0]
    )
    layer = engine.layer(**changes)
    with caplog.at_level(logging.INFO, "s2o_cupy.integrations.sglang"):
        engine.run(backend, served, batch, layer, **options)
        engine.run(backend, served, batch, layer, **options)
    counts = engine.plugin.counts.calls
    if kind is None:
        assert counts["s2o"] == 6 and len(whole) == 2  # of the requests beside S2O's
        return
    assert [x[0][4] for x in whole] == [batch] * 2 and whole[0][1] == options
    assert counts[kind] == 6 and "s2o" not in counts
    (said,) = [x for x in caplog.records if f"of the kind '{kind}'" in x.message]
    assert "SGLang's own attention takes" in said.message


@pytest.mark.parametrize("engine", ["pretended"], indirect=True)
@pytest.mark.parametrize("more_axes", [-1, 2])
def test_pools_of_another_form(engine, more_axes):
    """A buffer has tokens or pages, heads and their elements, and no axes but these."""
    served = Served.make([(300, 300), (150, 900)])
    runner = engine.runner(16, served)
    batch = engine.batch(runner, served, 16)
    whole, pool = runner.token_to_kv_pool.get_kv_buffer(0), runner.token_to_kv_pool
    forms = [x.flatten(1) if more_axes < 0 else x[None, None] for x in whole]
    engine.monkeypatch.setattr(pool, "get_kv_buffer", lambda _: forms)
    backend = engine.plugin.make_backend(runner)
    engine.monkeypatch.setattr(type(backend).__mro__[1], "forward_extend", lambda self, *x, **y: x[0])
    engine.run(backend, served, batch)
    assert engine.plugin.counts.calls == {"token pool": 2}


class Fp8Pool:
    """What another pool holds, in 8 bits."""

    def __init__(self, pool: Any, scale: float) -> None:
        self.bytes = [self._bytes(x, scale) for x in pool.get_kv_buffer(0)]

    @staticmethod
    def _bytes(x: Any, scale: Any) -> Any:
        return (x / scale).to(torch.float8_e4m3fn).view(torch.uint8)

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        k, v = (x.view(torch.float8_e4m3fn) for x in self.bytes)
        return k, v

    def set_kv_buffer(self, layer: Any, loc: Any, k: Any, v: Any, k_scale: Any, v_scale: Any) -> None:
        for buffer, rows, scale in zip(self.bytes, (k, v), (k_scale, v_scale), strict=True):
            rows.div_(1.0 if scale is None else scale)  # as SGLang's pool does
            buffer[loc.loc] = self._bytes(rows, 1.0)


@pytest.mark.parametrize("engine", ["pretended"], indirect=True)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_a_cache_of_8_bits(engine, scale):
    """With the layer's scales: bit for bit s2o_attention to what the pool's bytes stand for."""
    served = Served.make([(300, 300), (150, 900)]).to("cpu", torch.bfloat16)
    engine.settings(tau=0.5)
    runner = engine.runner(16, served)
    batch = engine.batch(runner, served, 16)
    runner.token_to_kv_pool = Fp8Pool(runner.token_to_kv_pool, scale or 1.0)
    backend = engine.plugin.make_backend(runner)
    of_layer = None if scale is None else torch.nn.Parameter(torch.tensor([scale]), requires_grad=False)
    before = [x.clone() for x in (*served.k, *served.v)]
    o = engine.run(backend, served, batch, engine.layer(served, k_scale=of_layer, v_scale=of_layer))
    assert engine.plugin.counts.calls == {"s2o": 2}
    assert all(torch.equal(x, y) for x, y in zip(before, (*served.k, *served.v), strict=True))
    config = S2OConfig(tau=0.5, segment=64, block_m=64, block_n=64)
    for i in range(2):
        q, k, v = served.request(i)
        k, v = (((x / (scale or 1)).to(torch.float8_e4m3fn).float() * (scale or 1)).bfloat16() for x in (k, v))
        expected = s2o_attention(q, k, v, config=config, scale=SCALE)[0].transpose(0, 1)
        assert torch.equal(o[served.starts[i] : served.starts[i + 1]], expected)


@pytest.mark.parametrize("engine", ["pretended"], indirect=True)
@pytest.mark.parametrize("fp8", [False, True])
def test_keys_and_values_are_copied_only_where_the_pool_divides_them(engine, fp8):
    """A model may come with scales that a cache of its own dtype does not use."""
    served = Served.make([(300, 300)]).to("cpu", torch.bfloat16)
    runner = engine.runner(16, served)
    batch = engine.batch(runner, served, 16)
    if fp8:
        runner.token_to_kv_pool = Fp8Pool(runner.token_to_kv_pool, 0.5)
    backend, copied = engine.plugin.make_backend(runner), []
    clone = torch.Tensor.clone
    engine.monkeypatch.setattr(torch.Tensor, "clone", lambda x, **options: copied.append(x) or clone(x, **options))
    scale = torch.tensor([0.5])
    engine.run(backend, served, batch, engine.layer(served, k_scale=scale, v_scale=scale))
    assert engine.plugin.counts.calls == {"s2o": 1}
    assert len(copied) == (2 if fp8 else 0)


@pytest.mark.parametrize("engine", ["pretended"], indirect=True)
@pytest.mark.parametrize("kind", ["blocks", "e5m2", "scales"])
def test_caches_of_8_bits_that_are_not_s2os(engine, kind):
    """With a scale for each block (mxfp8), of other numbers, or with scales that are nobody's."""
    served = Served.make([(300, 300), (150, 900)]).to("cpu", torch.bfloat16)
    runner = engine.runner(16, served)
    batch = engine.batch(runner, served, 16)
    pool = runner.token_to_kv_pool = Fp8Pool(runner.token_to_kv_pool, 1.0)
    if kind == "blocks":
        pool.k_scale_buffer = [torch.ones(1)]
    if kind == "e5m2":
        engine.monkeypatch.setattr(pool, "get_kv_buffer", lambda _: [x.view(torch.float8_e5m2) for x in pool.bytes])
    backend = engine.plugin.make_backend(runner)
    engine.monkeypatch.setattr(type(backend).__mro__[1], "forward_extend", lambda self, *x, **y: x[0])
    engine.run(backend, served, batch, engine.layer(served, k_scale=torch.ones(3) if kind == "scales" else None))
    assert engine.plugin.counts.calls == {"cache dtype": 2}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"encoder_lens": torch.zeros(7)}, "not causal"),
        ({"spec_info": types.SimpleNamespace(custom_mask=torch.ones(3))}, "mask"),
        ({"multi_item_delimiter_indices": [torch.ones(1)] * 7}, "mask"),
        ({"extend_seq_lens_cpu": None}, "drafted tokens"),
        ({"extend_seq_lens_cpu": [1, 30, 200, 130, 1, 40, 80]}, "graph"),
        ({"forward_mode": "TARGET_VERIFY"}, "drafted tokens"),
    ],
)
def test_batches_that_are_not_s2os(ready, changes, kind):
    engine, backend, served, batch = ready
    engine.monkeypatch.setattr(
        type(backend).__mro__[1], "forward_extend", lambda self, *x, **y: served.q.flatten(1)
    )
    for name, value in changes.items():
        setattr(batch, name, engine.info.ForwardMode[value] if name == "forward_mode" else value)
    engine.run(backend, served, batch)
    assert engine.plugin.counts.calls == {kind: 7}


def test_keys_of_other_ranks_are_not_seen(ready):
    engine, backend, served, batch = ready
    engine.monkeypatch.setattr(type(backend).__mro__[1], "forward_extend", lambda self, *x, **y: served.q.flatten(1))
    engine.monkeypatch.setattr(engine.plugin, "is_cp_active", lambda batch: True)
    engine.run(backend, served, batch)
    assert engine.plugin.counts.calls == {"context parallel": 7}


@pytest.mark.parametrize(("name", "value"), [("_kv_shard_pool", object()), ("fa_skip_kv_cache", True)])
def test_caches_that_hold_no_keys(ready, name, value):
    engine, backend, served, batch = ready
    engine.monkeypatch.setattr(type(backend).__mro__[1], "forward_extend", lambda self, *x, **y: served.q.flatten(1))
    setattr(backend, name, value)
    engine.run(backend, served, batch)
    assert engine.plugin.counts.calls == {"token pool": 7}


def test_a_pool_whose_numbers_are_translated(ready):
    engine, backend, served, batch = ready
    engine.monkeypatch.setattr(type(backend).__mro__[1], "forward_extend", lambda self, *x, **y: served.q.flatten(1))
    backend._s2o.runner.kv_index_translator.is_translating = True
    engine.run(backend, served, batch)
    assert engine.plugin.counts.calls == {"token pool": 7}


def test_layers_with_settings_of_their_own(ready):
    engine, _, served, batch = ready
    engine.settings(per_layer={"0": None})
    runner = engine.runner(16)
    backend = engine.plugin.make_backend(runner)
    batch = engine.batch(runner, served, 16)
    backend.init_forward_metadata(batch)
    torch.testing.assert_close(engine.run(backend, served, batch), served.expected(), rtol=0, atol=2e-6)
    assert engine.plugin.counts.calls["layer"] == 3


def test_a_path_that_the_gpu_has_not_is_refused_when_the_server_starts(engine, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    said = r"^SGLang: S2O_CONFIG: S2OConfig: path is 'hopper', but the GPU has compute capability 8.0, not"
    engine.settings(path="hopper")
    with pytest.raises(ValueError, match=said):
        engine.plugin.make_backend(engine.runner(1))


@pytest.mark.parametrize(("counts", "last"), [((4, 4), 3), ((4, 8), 7), ((4, 2), 3), ((None, None), 99)])
def test_layers_that_the_model_has_not(engine, counts, last):
    """An error where the server starts; a model may have two attentions in each of its layers."""
    names = ("num_hidden_layers", "num_attention_layers")
    runner = engine.runner(1)
    runner.model_config = types.SimpleNamespace(**dict(zip(names, counts, strict=True)))
    make = engine.plugin.make_backend
    engine.settings(per_layer={str(last): None})
    assert make(runner)._s2o.settings.per_layer == {last: None}
    if counts[0] is not None:
        engine.settings(per_layer={"0": None, str(last + 1): None})
        said = rf"SGLang: S2O_CONFIG: per_layer names {last + 1}; accepted: 0 to {last}, as the model has {last + 1} "
        with pytest.raises(ValueError, match=said):
            make(runner)
        runner.is_draft_worker = True  # whose layers are its own
        make(runner)


def test_whose_attention_takes_the_rest(engine):
    runner = engine.runner(1)
    make = engine.plugin.make_backend
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry").ATTENTION_BACKENDS
    assert isinstance(make(runner), type(registry["torch_native"](runner)))
    runner.decode_attention_backend_str = "s2o"
    with pytest.raises(ValueError, match="'s2o' is not one for the rest; accepted: --prefill-attention-backend s2o, w"):
        make(runner)
    engine.settings(backend="torch_native")
    assert type(make(runner)).__name__.startswith("S2O")
    engine.settings(backend="nothing")
    with pytest.raises(ValueError, match="'nothing' is not one for the rest"):
        make(runner)
    engine.settings()
    runner.decode_attention_backend_str = "torch_native"
    runner.is_draft_worker = True
    assert not type(make(runner)).__name__.startswith("S2O")
    runner.use_mla_backend = True
    with pytest.raises(ValueError, match="S2O does not attend to the latents of MLA models"):
        make(runner)


def test_the_entry_point(engine, monkeypatch):
    """Registers a name, and imports nothing of the plug-in until it is asked for."""
    choices = importlib.import_module("sglang.srt.arg_groups.choices").ATTENTION_BACKEND_CHOICES
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry").ATTENTION_BACKENDS
    before = list(choices)
    monkeypatch.delitem(sys.modules, PLUGIN)
    register_with_sglang()
    register_with_sglang()  # as often as there are processes, or more
    assert choices.count("s2o") == 1 and set(before) <= set(choices) and PLUGIN not in sys.modules
    runner = engine.runner(1)
    assert type(registry["s2o"](runner)).__name__.startswith("S2O")
    assert PLUGIN in sys.modules


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(monkeypatch, real=True)
    register_with_sglang()
    return engine


def test_sglang_takes_the_name(sglang):
    """On its command line, and as one half of its backend for prefill and decoding."""
    from argparse import ArgumentParser

    from sglang.srt.model_executor.model_runner_components import attention_backend_setup as setup
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(["--model-path", "x", "--prefill-attention-backend", "s2o"])
    assert given.prefill_attention_backend == "s2o"
    backend = setup._build_resolved_backend(
        model_runner=sglang.runner(16), init_new_workspace=False,
        resolved=setup.ResolvedAttentionBackendStr(prefill="s2o", decode="torch_native"),
    )  # fmt: skip
    assert type(backend.prefill_backend).__name__ == "S2OTorchNativeAttnBackend"
    assert type(backend.decode_backend).__name__ == "TorchNativeAttnBackend"


@pytest.mark.parametrize("layout", ["shuffled_pages", "interleaved_pages"])
@pytest.mark.parametrize("backend", ["torch_native", "triton"])
def test_sglangs_own_cases(sglang, layout, backend, monkeypatch):
    """Those of its attention unit tests, whose prompts are short: with S2O for all that has a tile of 16 queries."""
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton runs on a CPU with TRITON_INTERPRET=1")
    # A CPU takes tiles that no GPU does.
    monkeypatch.setattr("s2o_cupy.integrations.serving._check_runs", lambda *_: None)
    sglang.settings(min_seqlen=1, block_m=16, segment=16, backend=backend)
    kit, testcase = sglang.kit, types.SimpleNamespace(skipTest=pytest.fail)
    cases = (*kit.make_dense_input_config_cases("s2o"), *kit.make_dense_attention_config_cases("s2o"))
    longer = kit.DenseAttentionCase(
        name="longer", backend="s2o", forward_mode=sglang.info.ForwardMode.EXTEND, num_heads=4, num_kv_heads=2,
        page_size=16, prefix_lens=(0, 200, 64, 0), extend_lens=(30, 70, 100, 1),
    )  # fmt: skip
    for case in (*cases, longer):
        with torch.no_grad():
            fixture = kit.build_dense_attention_fixture(
                testcase, case, max_context_len=CONTEXT, device="cpu", dtype=torch.float32, loc_layout=layout
            )
            o, expected = kit.run_dense_fixture_eager(fixture), kit.expected_dense_fixture_output(fixture)
        torch.testing.assert_close(o, expected, rtol=0, atol=2e-6, msg=case.name)
    assert sglang.plugin.counts.calls["s2o"] > 5


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "layout"), [("bfloat16", "shuffled_pages"), ("float16", "interleaved_pages")])
@pytest.mark.parametrize("rest", ["torch_native", "triton"])
def test_sglangs_own_cases_on_a_gpu(sglang, rest, dtype, layout):
    """As they are, which is the rest's attention under S2O's class, and with all lengths times 65, which keeps places
    in a page and is S2O's from 64 queries on. Against SGLang's reference, by its tolerance."""
    sglang.settings(min_seqlen=1, backend=rest)
    kit, testcase = sglang.kit, types.SimpleNamespace(skipTest=pytest.fail)
    times_longer = (1, 65) if layout == "shuffled_pages" or rest == "triton" else (1,)
    for times in times_longer:
        for case in kit.make_dense_cases("s2o"):
            case = replace(
                case, prefix_lens=tuple(n * times for n in case.prefix_lens),
                extend_lens=tuple(n * times for n in case.extend_lens),
            )  # fmt: skip
            with torch.no_grad():
                fixture = kit.build_dense_attention_fixture(
                    testcase, case, max_context_len=64 * (times + 1), device="cuda", dtype=getattr(torch, dtype),
                    loc_layout=layout,
                )  # fmt: skip
                o, expected = kit.run_dense_fixture_eager(fixture), kit.expected_dense_fixture_output(fixture)
            torch.testing.assert_close(o, expected, rtol=kit.DENSE_RTOL, atol=kit.DENSE_ATOL, msg=case.name)
    assert (sglang.plugin.counts.calls["s2o"] >= 10) == (65 in times_longer)


def test_without_sglang(monkeypatch):
    for name in ("sglang", "sglang.srt.layers.attention.attention_registry"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    with pytest.raises(ImportError, match=r"integrations.sglang: .*needs SGLang 0.5.22 or newer, .*; remedy: pip"):
        import s2o_cupy.integrations.sglang  # noqa: F401
