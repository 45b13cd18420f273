"""The PyTorch operator: what s2o_attention gives, whole in compiled and exported graphs."""

from __future__ import annotations

import json
import math
import shutil
import time
import zipfile
from dataclasses import fields, replace

import numpy as np
import pytest
from conftest import SMALL, has_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_fixtures import fresh_graphs as fresh_graphs
from torch_fixtures import tensors as tensors

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_varlen

torch = pytest.importorskip("torch")

from s2o_cupy.integrations.torch import attention, attention_varlen, scalars_of  # noqa: E402

BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=[
        pytest.mark.slow,
        pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("rank", [None, "weight", "mean", "max"])
def test_a_graph_is_given_plain_numbers(rank):
    """Some versions of PyTorch put no subclass of int or str into a graph, as a default that was not given is one."""
    values = S2OConfig(rank=rank).values
    assert {type(x) for x in values} <= {int, float, str, type(None)}
    assert values == tuple(getattr(S2OConfig(rank=rank), field.name) for field in fields(S2OConfig))


class Layer(torch.nn.Module):  # type: ignore[name-defined, misc]
    """A model's use: the config is an attribute, and other operators are around the call."""

    def __init__(self, config: S2OConfig | None = None) -> None:
        super().__init__()
        self.config = config

    def forward(self, q, k, v, **options):
        result = attention(q * 1, k, v, config=self.config, **options)
        return result[0] + 1 if isinstance(result, tuple) else result + 1


configs = st.builds(
    S2OConfig,
    segment=st.integers(1, 8192),
    tau=st.one_of(st.floats(0, 1e300), st.just(math.inf), st.integers(0, 3)),
    block_m=st.integers(1, 1024),
    block_n=st.integers(1, 1024),
    rank=st.just("max"),
    pooled_queries=st.one_of(st.none(), st.integers(1, 64)),
    window=st.integers(0, 2**40),
    workspace_bytes=st.integers(1 << 20, 1 << 50),
    path=st.sampled_from(["auto", "portable", "hopper"]),
    dense_up_to=st.none() | st.integers(0, 1 << 20),
)


def operator_arguments(q, k, v, config, *, layout="BHSD", return_lse=False):
    return q, k, v, None, 0.0, True, layout, return_lse, *scalars_of(config)


def assert_equal(x, y):
    assert x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
    assert torch.equal(x, y)


# ---------------------------------------------------------------- the same as s2o_attention


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("batch", [True, False])
def test_same_results_as_the_call(tensors, layout, batch):
    q, k, v = tensors(200, 300, batch=2 if batch else 1, heads=4, kv_heads=2)
    if not batch:
        q, k, v = q[0], k[0], v[0]
    if layout == "BSHD":
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    options = {"config": SMALL, "tau": 0.2, "scale": 0.3, "softcap": 2, "layout": layout}
    o, lse = attention(q, k, v, return_lse=True, **options)
    for x, y in zip((o, lse), s2o_attention(q, k, v, return_lse=True, **options), strict=True):
        assert_equal(x, y)
    assert o.is_contiguous()
    assert_equal(attention(q, k, v, **options), o)
    full = attention(q, k, v, config=SMALL, is_causal=False, layout=layout)
    assert_equal(full, s2o_attention(q, k, v, config=SMALL, is_causal=False, layout=layout))
    assert_equal(attention(q, k, v, layout=layout), s2o_attention(q, k, v, layout=layout))


def test_a_tau_takes_an_error_s_place(tensors):
    """As in s2o_attention: S2OConfig has one of the two, and what no tile visited counts as with any given tau."""
    q, k, v = tensors(300, heads=2)
    for tail in (None, "first_order"):
        config = replace(SMALL, tail=tail).with_error(1e-6)
        found = attention(q, k, v, config=config, tau=0.5)
        assert_equal(found, s2o_attention(q, k, v, config=config, tau=0.5))
        assert torch.equal(found, attention(q, k, v, config=SMALL, tau=0.5))
        assert not torch.equal(found, attention(q, k, v, config=config))


def test_operator_obeys_pytorchs_rules(tensors):
    """Schema, fake implementation and tracing, static and dynamic, by PyTorch's own checker."""
    q, k, v = tensors(100, 200, heads=4, kv_heads=2)
    for layout, return_lse in (("BHSD", True), ("BSHD", True), ("BHSD", False)):
        given = [x.transpose(1, 2) for x in (q, k, v)] if layout == "BSHD" else [q, k, v]
        arguments = operator_arguments(*given, SMALL, layout=layout, return_lse=return_lse)
        torch.library.opcheck(torch.ops.s2o_cupy.attention.default, arguments)


def test_every_field_of_a_config_is_an_argument():
    names = [argument.name for argument in torch.ops.s2o_cupy.attention.default._schema.arguments]
    assert names[-len(fields(S2OConfig)) :] == [field.name for field in fields(S2OConfig)]


def test_a_field_says_what_graphs_without_it_mean():
    """Those exported before it was there. Older fields are in every graph, and an argument without a default."""
    came_later = {field.name: field.metadata["before"] for field in fields(S2OConfig) if field.metadata}
    assert came_later == {"clusters": 0}
    for operator in (torch.ops.s2o_cupy.attention, torch.ops.s2o_cupy.attention_varlen):
        arguments = operator.default._schema.arguments
        assert {x.name: x.default_value for x in arguments if x.has_default_value()} == came_later


@settings(deadline=None, max_examples=30)
@given(configs)
def test_a_config_arrives_as_it_was(config):
    seen = []

    def call(q, k, v, *, config, **options):
        seen.append(config)
        return q

    q = torch.zeros(1, 1, 1, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("s2o_cupy.integrations.torch.s2o_attention", call)
        attention(q, q, q, config=config)
        attention(q, q, q, config=config, tau=0.75)
    assert seen == [config, replace(config, tau=0.75)]


# ---------------------------------------------------------------- graphs


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_graph(tensors, backend):
    q, k, v = tensors(200, heads=4, kv_heads=2)
    model = Layer(SMALL)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_equal(compiled(q, k, v), model(q, k, v))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    options = {"tau": 0.5, "scale": 0.3, "softcap": 2.0, "is_causal": False, "layout": "BSHD", "return_lse": True}
    assert_equal(compiled(*turned, **options), model(*turned, **options))


def test_a_graph_with_a_config_of_defaults(tensors):
    q, k, v = tensors(200)
    for config in (None, S2OConfig(), S2OConfig(rank="mean")):
        compiled = torch.compile(Layer(config), fullgraph=True, backend="eager")
        assert_equal(compiled(q, k, v), Layer(config)(q, k, v))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [None, True])
def test_another_config_is_another_graph(tensors, dynamic):
    """Scalars in a graph are constants: they may not outlive the config. Before any backend sees the graph."""
    q, k, v = tensors(500, heads=2)
    model = Layer(replace(SMALL, tau=0))
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic)
    before = compiled(q, k, v)
    for change in ({"tau": 0.05}, {"tau": math.inf}, {"tau": 1e-3, "segment": 64}, {"segment": 256}):
        model.config = replace(SMALL, **change)
        assert_equal(compiled(q, k, v), model(q, k, v))
        assert not torch.equal(compiled(q, k, v), before)
    model.config = replace(SMALL, tau=0)  # equal, though another object
    assert_equal(compiled(q, k, v), before)


def test_lengths_share_a_graph(tensors):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(Layer(SMALL), fullgraph=True, dynamic=True, backend=backend)
    for length in (150, 250, 301, 400):
        given = tensors(length)
        assert_equal(compiled(*given), Layer(SMALL)(*given))
    assert len(graphs) == 1


def test_export(tensors, tmp_path):
    q, k, v = tensors(200)
    exported = torch.export.export(Layer(SMALL), (q, k, v))
    torch.export.save(exported, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    assert_equal(loaded(q, k, v), Layer(SMALL)(q, k, v))


def test_a_graph_that_was_exported_before_clusters(tensors, tmp_path):
    """Its file has all arguments but that one, which came after."""
    q, k, v = tensors(200)
    model = Layer(replace(SMALL, rank="weight"))
    torch.export.save(torch.export.export(model, (q, k, v)), tmp_path / "now.pt2")
    with zipfile.ZipFile(tmp_path / "now.pt2") as now, zipfile.ZipFile(tmp_path / "before.pt2", "w") as before:
        for name in now.namelist():
            data = now.read(name)
            if name.endswith("model.json"):
                graph = json.loads(data)
                for node in graph["graph_module"]["graph"]["nodes"]:
                    node["inputs"] = [x for x in node["inputs"] if x["name"] != "clusters"]
                data = json.dumps(graph).encode()
            before.writestr(name, data)
    assert_equal(torch.export.load(tmp_path / "before.pt2").module()(q, k, v), model(q, k, v))


def test_shapes_without_data(tensors):
    meta = [x.to("meta") for x in tensors(20, 30, heads=4, kv_heads=2)]
    o, lse = attention(*meta, return_lse=True)
    assert (o.shape, o.dtype, o.device.type) == (meta[0].shape, meta[0].dtype, "meta")
    assert (lse.shape, lse.dtype) == ((1, 4, 20), torch.float32)
    with pytest.raises(ValueError, match="q has 4 heads, k and v have 3; accepted: heads a multiple of kv_heads"):
        attention(meta[0], *(x.expand(1, 2, 30, 64).repeat(1, 2, 1, 1)[:, :3] for x in meta[1:]))


# ---------------------------------------------------------------- packed sequences


class PackedLayer(torch.nn.Module):  # type: ignore[name-defined, misc]
    def forward(self, q, k, v, *cu_seqlens):
        return attention_varlen(q * 1, k, v, *cu_seqlens, config=SMALL) + 1


@pytest.fixture
def packed(tensors):
    """packed(total_q, total_k) -> q, k, v [total, heads, head_dim]."""
    return lambda *totals: [x[0].transpose(0, 1).contiguous() for x in tensors(*totals, heads=4, kv_heads=2)]


STARTS = [0, 1, 1, 200], [0, 30, 100, 300]


def test_packed_same_results_as_the_call(packed):
    q, k, v = packed(200, 300)
    for options in ({}, {"tau": 0.2, "scale": 0.3, "softcap": 2.0}, {"is_causal": False}):
        o, lse = attention_varlen(q, k, v, *STARTS, config=SMALL, return_lse=True, **options)
        expected = s2o_attention_varlen(q, k, v, *STARTS, config=SMALL, return_lse=True, **options)
        assert_equal(o, expected[0])
        assert_equal(lse, expected[1])
        assert o.is_contiguous()
        assert_equal(attention_varlen(q, k, v, *STARTS, config=SMALL, **options), o)
    own = q, k[:200], v[:200], (0, 50, 200)
    assert_equal(attention_varlen(*own), s2o_attention_varlen(*own))


def test_packed_operator_obeys_pytorchs_rules(packed):
    q, k, v = packed(200, 300)
    config = scalars_of(SMALL)
    operator = torch.ops.s2o_cupy.attention_varlen.default
    torch.library.opcheck(operator, (q, k, v, *STARTS, None, 0.0, True, True, *config))
    torch.library.opcheck(operator, (q, k[:200], v[:200], [0, 50, 200], None, 0.3, 5.0, True, False, *config))
    names = [argument.name for argument in operator._schema.arguments]
    assert names[-len(config) :] == [field.name for field in fields(S2OConfig)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_whole_graph(packed, backend):
    given = packed(200, 300)
    compiled = torch.compile(PackedLayer(), fullgraph=True, backend=backend)
    for starts in (STARTS, ([0, 150, 200], [0, 150, 300])):
        assert_equal(compiled(*given, *starts), PackedLayer()(*given, *starts))
    exported = torch.export.export(PackedLayer(), (*given, *STARTS)).module()
    assert_equal(exported(*given, *STARTS), PackedLayer()(*given, *STARTS))


def test_packed_lengths_share_a_graph(packed):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(PackedLayer(), fullgraph=True, dynamic=True, backend=backend)
    for total, first in ((150, 40), (250, 130), (301, 7), (400, 300)):
        given = packed(total, total + 77)
        starts = [0, first, total], [0, first + 33, total + 77]
        assert_equal(compiled(*given, *starts), PackedLayer()(*given, *starts))
    assert len(graphs) == 1


def test_packed_arguments_that_are_refused(packed):
    q, k, v = packed(20, 30)
    starts = [0, 20], [0, 30]
    with pytest.raises(TypeError, match="cu_seqlens_q is a Tensor; accepted: a list or tuple of integers"):
        attention_varlen(q, k, v, torch.tensor(starts[0]), starts[1])
    with pytest.raises(ValueError, match="cu_seqlens_k ends with 29; accepted: 0, then ascending to 30"):
        attention_varlen(q, k, v, [0, 20], [0, 29])
    with pytest.raises(ValueError, match=r"q has 4 axes, .*; accepted: 3 axes \(total_q, heads, head_dim\)"):
        attention_varlen(q[None], k, v, *starts)
    with pytest.raises(ValueError, match="tau is -1; accepted: a number >= 0"):
        attention_varlen(q, k, v, *starts, tau=-1)
    meta = [x.to("meta") for x in (q, k, v)]
    o, lse = attention_varlen(*meta, *starts, return_lse=True)
    assert (o.shape, lse.shape, lse.dtype) == (q.shape, (4, 20), torch.float32)
    with pytest.raises(ValueError, match=r"k is \(30, 2, 64\) and v is \(20, 2, 64\)"):
        attention_varlen(*meta[:2], meta[2][:20], *starts)
    q.requires_grad_()
    with pytest.raises(ValueError, match="q requires grad.*inference only"):
        attention_varlen(q, k, v, *starts)


# ---------------------------------------------------------------- what is refused


def test_gradients(tensors):
    q, k, v = tensors(20)
    k.requires_grad_()
    with pytest.raises(ValueError, match=r"k requires grad.*inference only.*torch.no_grad\(\), or pass k.detach\(\)"):
        attention(q, k, v)
    with pytest.raises(ValueError, match="k requires grad.*inference only"):
        torch.ops.s2o_cupy.attention(*operator_arguments(q, k, v, SMALL))
    with pytest.raises(ValueError, match="k requires grad"):
        torch.compile(Layer(SMALL), backend="eager")(q, k, v)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="k requires grad|raised exception"):
        torch.compile(Layer(SMALL), fullgraph=True, backend="aot_eager")(q, k, v)
    with torch.no_grad():
        o = torch.compile(Layer(SMALL), fullgraph=True, backend="aot_eager")(q, k, v)
        assert not o.requires_grad
        assert_equal(o, Layer(SMALL)(q, k.detach(), v))


def test_bad_arguments(tensors):
    q, k, v = tensors(20)
    for error, match, options in (
        (TypeError, "scale is '1' .*; accepted: a finite Python number", {"scale": "1"}),
        (ValueError, "scale is nan; accepted: a finite number", {"scale": math.nan}),
        (TypeError, "softcap is None .*; accepted: 0", {"softcap": None}),
        (ValueError, "softcap is -1.0; accepted: 0", {"softcap": -1.0}),
        (TypeError, "tau is 'x' .*; accepted: a number >= 0", {"tau": "x"}),
        (ValueError, "tau is -1; accepted: a number >= 0", {"tau": -1}),
        (ValueError, "layout is 'SBHD'; accepted: 'BHSD' or 'BSHD'", {"layout": "SBHD"}),
        (TypeError, "is_causal is 1; accepted: True or False", {"is_causal": 1}),
        (TypeError, "config is a dict; accepted: S2OConfig or None", {"config": {}}),
    ):
        with pytest.raises(error, match=match):
            attention(q, k, v, **options)
    with pytest.raises(TypeError, match=r"k is a ndarray; accepted: a torch.Tensor"):
        attention(q, np.zeros((1, 1, 20, 64)), v)
    with pytest.raises(ValueError, match="q on cpu, k on meta, v on .*; accepted: one device"):
        attention(q.cpu(), k.to("meta"), v.to("meta"))
    assert_equal(attention(q, k, v, scale=np.float32(0.5)), attention(q, k, v, scale=0.5))


def test_errors_of_shapes_come_when_a_graph_is_made(tensors):
    q, k, v = tensors(20)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="accepted: the same shape for both"):
        torch.compile(Layer(), fullgraph=True, backend="eager")(q, k, v[:, :, :10])


# ---------------------------------------------------------------- time


def test_overhead_on_the_host():
    """Less than twice s2o_attention's own time on top of it, on a call that launches nothing. Microseconds are for
    benchmarks/host.py to say: a machine that others use may be three times slower from one run to the next."""
    q = torch.zeros(1, 2, 0, 64)
    config = replace(SMALL, tau=0.25)

    def microseconds(call):
        begin = time.process_time()
        for _ in range(200):
            call(q, q, q, config=config)
        return (time.process_time() - begin) / 200 * 1e6

    microseconds(attention)
    # By turns, as other processes slow both down alike.
    taken = [(microseconds(attention), microseconds(s2o_attention)) for _ in range(20)]
    operator, call = (min(of_one) for of_one in zip(*taken, strict=True))
    assert operator < 3 * call


@pytest.mark.gpu
def test_the_callers_stream(qkv):
    """A graph that is captured on a side stream: nothing of a call may run elsewhere."""
    if not (has_gpu() and torch.cuda.is_available()):
        pytest.skip("needs a GPU, and CuPy and PyTorch with CUDA")
    q, k, v = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in qkv(1500, heads=4))
    config = replace(SMALL, segment=256)
    expected = attention(q, k, v, config=config)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = q * 1
        o = attention(late, k, v, config=config)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(o, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, config=config)
    o.zero_()
    graph.replay()
    assert torch.equal(o, expected)
