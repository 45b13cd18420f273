"""S2O inside of jax.jit and jax.vmap: the bits of the same call outside, on XLA's own arrays."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
from conftest import SMALL
from pretended import pretend_gpu

from s2o_cupy import S2OConfig, clear_cache, s2o_attention

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import s2o_cupy.integrations.jax as integration  # noqa: E402
from s2o_cupy.api import at_addresses  # noqa: E402
from s2o_cupy.integrations.jax import attention  # noqa: E402
from s2o_cupy.problem import validate  # noqa: E402

needs_buffers = pytest.mark.skipif(integration.buffer_callback is None, reason="JAX has no buffer_callback")


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    clear_cache()  # what was compiled by another way than the usual one, or for a GPU that is not there


@pytest.fixture(params=["buffers", "host"])
def way(request, monkeypatch):
    """How arrays get to S2O."""
    if request.param == "host":
        monkeypatch.setattr(integration, "buffer_callback", None)
    elif integration.buffer_callback is None:
        pytest.skip("JAX has no buffer_callback")
    return request.param


@pytest.fixture
def arrays(qkv):
    return lambda *sizes, dtype="float32", **options: [jnp.asarray(x).astype(dtype) for x in qkv(*sizes, **options)]


def equal(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_inside_jit(arrays, way, dtype):
    q, k, v = arrays(200, 300, batch=2, heads=4, kv_heads=2, dtype=dtype)
    options = {"config": SMALL, "tau": 0.3, "scale": 0.2, "softcap": 20.0}

    @jax.jit
    def block(q, k, v):
        o, lse = attention(q, k, v, return_lse=True, **options)
        return o, lse, o + q

    expected = s2o_attention(q, k, v, return_lse=True, **options)
    o, lse, total = block(q, k, v)
    equal(o, expected[0])
    equal(lse, expected[1])
    equal(total, expected[0] + q)
    equal(jax.jit(lambda *x: attention(*x, **options))(q, k, v), expected[0])
    equal(attention(q, k, v, **options), expected[0])  # outside of jit too


@pytest.mark.parametrize("ndim", [3, 4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_layouts(arrays, ndim, is_causal):
    q, k, v = (x if ndim == 4 else x[0] for x in arrays(100, 130, heads=4, kv_heads=2))
    options = {"config": SMALL, "is_causal": is_causal, "return_lse": True}
    expected = s2o_attention(q, k, v, **options)
    found = jax.jit(lambda q, k, v: attention(q, k, v, **options))(q, k, v)
    for x, y in zip(found, expected, strict=True):
        equal(x, y)
    q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))
    o, lse = jax.jit(lambda *x: attention(*x, layout="BSHD", **options))(q, k, v)
    equal(o.swapaxes(-2, -3), expected[0])
    equal(lse, expected[1])


@pytest.mark.sampled(2)
def test_vmap_is_one_call(arrays, way, monkeypatch):
    """A mapped axis joins the batch, also twice, with arrays that are not mapped, and where there is no batch axis."""
    calls = []
    attend = integration._attend
    monkeypatch.setattr(integration, "_attend", lambda *x, **y: calls.append(x[0][0].shape) or attend(*x, **y))
    q, k, v = arrays(150, batch=6, heads=4, kv_heads=2)
    call = lambda *x: attention(*x, config=SMALL, return_lse=True)  # noqa: E731
    expected = s2o_attention(q, k, v, config=SMALL, return_lse=True)

    for x, y in zip(jax.vmap(call)(q, k, v), expected, strict=True):  # [heads, seqlen, head_dim] each
        equal(x, y)
    twice = jax.jit(jax.vmap(jax.vmap(call), in_axes=(1, 1, 1), out_axes=1))
    for x, y in zip(twice(*(x.reshape(2, 3, 1, *x.shape[1:]) for x in (q, k, v))), expected, strict=True):
        equal(x, y.reshape(2, 3, 1, *y.shape[1:]))
    assert calls == [(6, *q.shape[1:])] * 2
    o, _ = jax.jit(jax.vmap(call, in_axes=(0, None, None)))(q[:, None], k[:1], v[:1])
    equal(o[4], s2o_attention(q[4:5], k[:1], v[:1], config=SMALL))


def test_nothing_to_launch():
    q, k = jnp.zeros((1, 2, 0, 8)), jnp.zeros((1, 2, 5, 8))
    assert jax.jit(attention)(q, k, k).shape == q.shape
    o, lse = jax.jit(lambda q, k: attention(q, k, k, is_causal=False, return_lse=True))(k, q)
    assert not o.any() and (lse == -jnp.inf).all()
    assert jax.vmap(attention)(q, k, k).shape == q.shape


def test_a_layer_in_a_scan(arrays):
    q, k, v = arrays(100, heads=2, kv_heads=2)
    layers = lambda q: jax.lax.scan(lambda x, _: (attention(x, k, v, config=SMALL), None), q, length=3)[0]  # noqa: E731
    expected = q
    for _ in range(3):
        expected = s2o_attention(expected, k, v, config=SMALL)
    equal(jax.jit(layers)(q), expected)


def test_no_derivative(arrays):
    q, k, v = arrays(50, heads=2, kv_heads=2)
    loss = lambda q, k, v: attention(q, k, v, config=SMALL).sum()  # noqa: E731
    match = "a derivative by q, k or v is asked for .*inference only; accepted: jax.lax.stop_gradient"
    for derive in (
        lambda: jax.grad(loss)(q, k, v),
        lambda: jax.jit(jax.grad(loss, argnums=2))(q, k, v),
        lambda: jax.jvp(loss, (q, k, v), (q, k, v)),
        lambda: jax.vmap(jax.grad(loss))(q, k, v),
        lambda: jax.hessian(loss)(q, k, v),
    ):
        with pytest.raises(ValueError, match=match):
            derive()
    # By what comes after it, and with its inputs held fixed, there is one.
    after = jax.grad(lambda w: (attention(q, k, v, config=SMALL) * w).sum())(2.0)
    np.testing.assert_allclose(after, s2o_attention(q, k, v, config=SMALL).sum(), rtol=1e-5)
    held = jax.grad(lambda w: (w * attention(*(jax.lax.stop_gradient(w * x) for x in (q, k, v)))).sum())(1.0)
    np.testing.assert_allclose(held, attention(q, k, v).sum(), rtol=1e-5)


def test_what_is_refused_is_so_while_jax_traces(arrays):
    """Before anything is compiled or launched, and by the argument's name."""
    q, k, v = arrays(50, heads=4, kv_heads=2)

    def traced(*given, **options):
        return jax.eval_shape(lambda *x: attention(*x, **options), *given)

    assert traced(q, k, v).shape == q.shape
    for error, match, given, options in (
        (ValueError, "q has 4 heads, k and v have 3", (q, k[:, :1].repeat(3, 1), v[:, :1].repeat(3, 1)), {}),
        (TypeError, "dtypes differ: q bfloat16, k float32", (q.astype("bfloat16"), k, v), {}),
        (TypeError, "are int32; accepted", [x.astype("int32") for x in (q, k, v)], {}),
        (ValueError, "layout is 'SBHD'", (q, k, v), {"layout": "SBHD"}),
        (TypeError, "config is a dict", (q, k, v), {"config": {}}),
        (ValueError, "config.block_m is 8; accepted on the CPU", (q, k, v), {"config": S2OConfig(block_m=8)}),
        (ValueError, "config.error is 0.1, for which JAX has no memory", (q, k, v), {"config": S2OConfig(error=0.1)}),
        (ValueError, "tau has 2 numbers, q has 4 heads", (q, k, v), {"tau": (0.1, 0.2)}),
        (TypeError, "attention: causal is not an argument; did you mean is_causal", (q, k, v), {"causal": True}),
    ):
        with pytest.raises(error, match=match):
            traced(*given, **options)
    for name in ("tau", "scale", "softcap"):
        match = f"^integrations.jax.attention: {name} is traced, .*; accepted: a Python number, .*static_argnames"
        with pytest.raises(TypeError, match=match):
            jax.jit(lambda q, x, name=name: attention(q, q, q, **{name: x}))(q, 0.1)
    with pytest.raises(TypeError, match="^integrations.jax.attention: q is a ndarray; accepted: a jax.Array"):
        attention(np.asarray(q), k, v)


def test_a_platform_that_is_none_of_ours(arrays, monkeypatch):
    monkeypatch.setattr(integration, "_platform", lambda q: "tpu")
    with pytest.raises(ValueError, match="q is on tpu; accepted: a CPU or an NVIDIA GPU"):
        attention(*arrays(20))


def test_compiled_once(arrays):
    q, k, v = arrays(70, batch=1)
    attention(q, k, v, config=SMALL)
    problem = validate([x.shape for x in (q, k, v)], ["float32"] * 3, config=SMALL, backend="numpy")
    compiled = integration._compiled(problem, SMALL, "BHSD", 4, False, "numpy")
    assert compiled._cache_size() == 1
    attention(q, k, v, config=SMALL)
    assert compiled._cache_size() == 1


THROUGH_HOST = "import s2o_cupy.integrations.jax as integration; integration.buffer_callback = None"
SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.integrations.jax import attention

config = S2OConfig(segment=64, block_m=32, block_n=32)
mesh = Mesh(np.array(jax.devices()), ("x",))
qkv = jax.random.normal(jax.random.key(0), (3, 2, 4, 100, 16))
expected = np.asarray(s2o_attention(*qkv, config=config))
q, k, v = jax.device_put(list(qkv), NamedSharding(mesh, P("x")))
call = lambda q, k, v: attention(q, k, v, config=config)
mapped = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
assert len(mapped(q, k, v).devices()) == 2
assert np.array_equal(mapped(q, k, v), expected)

# Results vary along x as q, k and v do: a gradient is summed over the shards, once, and a scan may carry them.
split, whole = P("x"), P()
loss = lambda w, *x: jax.lax.psum(sum((y * w).sum() for y in attention(*x, config=config, return_lse=True)), "x")
loss = jax.shard_map(loss, mesh=mesh, in_specs=(whole, split, split, split), out_specs=whole)
total = sum(x.sum() for x in s2o_attention(*qkv, config=config, return_lse=True))
for derive in (jax.grad(loss), jax.jit(jax.grad(loss))):
    np.testing.assert_allclose(derive(2.0, q, k, v), total, rtol=1e-4)

twice = lambda q, k, v: jax.lax.scan(lambda x, _: (call(x, k, v), None), q, length=2)[0]
each = lambda q, k, v: jax.vmap(twice)(q[:, None], k[:, None], v[:, None])[:, 0]
empty = lambda q, k, v: twice(q[:, :, :0], k, v)
same_keys = lambda q, k, v: twice(q, k[:1], v[:1])


def expected_of(q, k, v):
    return s2o_attention(s2o_attention(q, k, v, config=config), k, v, config=config)


expected, of_first = expected_of(*qkv), expected_of(qkv[0], *(x[:1].repeat(2, 0) for x in qkv[1:]))
for body, specs, expected in (
    (twice, split, expected), (each, split, expected), (empty, split, expected[:, :, :0]),
    (same_keys, (split, whole, whole), of_first),
):
    for check in (True, False):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=split, check_vma=check)
        assert np.array_equal(jax.jit(mapped)(*qkv), expected)
try:
    attention(q, k, v)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_shards(way):
    """Of two devices: each attends its own by shard_map, in a loss and a scan too."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("JAX has no jax.shard_map")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    program = THROUGH_HOST + SHARDED if way == "host" else SHARDED
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert re.search("q is sharded over 2 devices; accepted: .* jax.shard_map", found.stdout)


# ---------------------------------------------------------------- a GPU that is not there


@needs_buffers
def test_where_a_buffer_begins():
    """XLA's own buffers, of every dtype that S2O takes."""
    found = []

    def look(context, out, x):
        array = np.asarray(x)
        found.append((integration._pointer(x), array.ctypes.data, x.__dlpack_device__()))
        np.asarray(out)[...] = array

    for dtype in ("float16", "bfloat16", "float32"):
        x = jnp.ones((3, 5), dtype)
        jax.block_until_ready(integration.buffer_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype))(x))
    assert len(found) == 3
    assert all(pointer == address != 0 and kind == 1 for pointer, address, (kind, _) in found)


class Buffer:
    """One of XLA's, on a GPU."""

    def __init__(self, array, device=3):
        self.array, self.shape, self.device = array, array.shape, device

    def __dlpack__(self):
        return self.array.view(np.int16 if self.array.itemsize == 2 else self.array.dtype).__dlpack__()

    def __dlpack_device__(self):
        return integration.CUDA, self.device


@pytest.fixture
def pretended(monkeypatch):
    """What the pipeline is called with, and the device and stream it is called on."""
    calls, scopes = [], []
    pretend_gpu(
        monkeypatch, run=lambda *x, **y: calls.append((x, y)), workspace_bytes=lambda *x: calls.append(x) or 1000,
        allocate=lambda nbytes: ("CuPy's", nbytes),
    )  # fmt: skip
    monkeypatch.setattr(at_addresses, "cupy_scope", lambda *x: scopes.append(x) or contextlib.nullcontext())
    return types.SimpleNamespace(calls=calls, scopes=scopes)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("stream", ["method", "property"])
def test_what_the_gpu_is_handed(pretended, layout, return_lse, stream):
    shapes = {"BHSD": ((2, 4, 20, 64), (2, 2, 30, 64)), "BSHD": ((2, 20, 4, 64), (2, 30, 2, 64))}[layout]
    q, o = np.zeros((2, *shapes[0]), np.float16)
    k, v = np.zeros((2, *shapes[1]), np.float16)
    lse, workspace = np.zeros((2, 4, 20), np.float32), np.zeros(1000, np.uint8)
    problem = validate([q.shape, k.shape, v.shape], ["float16"] * 3, config=SMALL, backend="cupy", layout=layout)
    context = types.SimpleNamespace(stream=7 if stream == "property" else lambda: 7)
    out = [o, lse, workspace] if return_lse else [o, workspace]
    asked = integration.Asked(problem, SMALL, layout, return_lse)
    assert integration._in_place(asked, context, [Buffer(x) for x in out], *map(Buffer, (q, k, v))) is None
    (((call, config), options),) = pretended.calls
    operands, of_lse, visited, used, _ = call
    assert [x.pointer for x in operands] == [x.ctypes.data for x in (q, k, v, o)]
    assert {x.shape for x in operands} == {(2, 4, 20, 64), (2, 2, 30, 64)}
    in_order = lambda x: tuple(n // 2 for n in (x if layout == "BHSD" else x.swapaxes(1, 2)).strides[:3])  # noqa: E731
    assert [x.strides for x in operands] == [in_order(x) for x in (q, k, v, o)]
    assert (of_lse, visited, used, config) == (lse.ctypes.data if return_lse else 0, 0, problem, SMALL)
    assert options.pop("stream") == 7
    memory = options.pop("memory")
    assert memory(1000)[0] == workspace.ctypes.data and memory(1001) == ("CuPy's", 1001)
    assert not options
    assert pretended.scopes == [(("cuda", 3), 7)]


@needs_buffers
def test_the_workspace_is_an_output_that_nobody_gets(pretended, arrays, monkeypatch):
    """XLA makes room for it; its size is asked for while JAX traces, of the whole batch that is mapped."""
    monkeypatch.setattr(integration, "_platform", lambda q: "gpu")
    q, k, v = arrays(20, batch=3, dtype="bfloat16")
    call = lambda *x: attention(*x, config=SMALL, return_lse=True)  # noqa: E731
    text = str(jax.make_jaxpr(call)(q, k, v))
    assert re.search(r"bf16\[3,2,20,64\] \w+:f32\[3,2,20\] \w+:u8\[1000\] = buffer_callback", text)
    assert [x.shape for x in jax.eval_shape(call, q, k, v)] == [(3, 2, 20, 64), (3, 2, 20)]
    clear_cache()  # JAX may remember what it traced for a batch of 3
    pretended.calls.clear()
    text = str(jax.make_jaxpr(jax.vmap(call))(q, k, v))
    assert "bf16[3,2,20,64]" in text and "u8[1000]" in text
    assert {x[1].batch for x in pretended.calls} == {1, 3}  # first as it is written, then as it is run
    with pytest.raises(TypeError, match="float32; accepted.*cast the inputs to bfloat16"):
        call(*arrays(20))


# ---------------------------------------------------------------- on a GPU


def gpu():
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX has no GPU")


@pytest.fixture
def on_gpu(arrays):
    """arrays(...) on the GPU, which is also where JAX computes."""
    device = gpu()
    with jax.default_device(device):
        yield lambda *sizes, **options: [
            jax.device_put(x, device) for x in arrays(*sizes, **{"dtype": "bfloat16", "head_dim": 128, **options})
        ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_on_a_gpu(on_gpu, way, dtype, layout, path_config):
    """The bits of the call outside of jit; arrays that are made just before, and read just after, on XLA's stream."""
    q, k, v = on_gpu(2000, batch=2, heads=8, kv_heads=2, dtype=dtype)
    if layout == "BSHD":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options = {"config": path_config, "layout": layout, "return_lse": True}

    @jax.jit
    def block(q, k, v):
        o, lse = attention(q * 2 / 2, k * 2 / 2, v * 2 / 2, **options)
        return o, lse, (o.astype("float32") + 1).sum()

    expected = s2o_attention(q, k, v, **options)
    for _ in range(4):  # plainly, captured, replayed
        o, lse, total = block(q, k, v)
        equal(o, expected[0])
        equal(lse, expected[1])
        np.testing.assert_allclose(total, (expected[0].astype("float32") + 1).sum(), rtol=1e-4)


@pytest.mark.gpu
@needs_buffers
def test_vmap_and_scan_on_a_gpu(on_gpu, path_config):
    q, k, v = on_gpu(1500, batch=4, heads=4, kv_heads=4)
    call = lambda *x: attention(*x, config=path_config)  # noqa: E731
    equal(jax.jit(jax.vmap(call))(q, k, v), s2o_attention(q, k, v, config=path_config))
    layers = jax.jit(lambda q: jax.lax.scan(lambda x, _: (call(x, k, v), None), q, length=5)[0])
    expected = q
    for _ in range(5):
        expected = s2o_attention(expected, k, v, config=path_config)
    equal(layers(q), expected)


@pytest.mark.gpu
@needs_buffers
def test_nothing_goes_through_the_host(on_gpu, path_config):
    """With transfers forbidden, and with many calls in flight before the first is read."""
    q, k, v = on_gpu(3000, heads=4, kv_heads=2)
    block = jax.jit(lambda q: attention(q, k, v, config=path_config))
    expected = s2o_attention(s2o_attention(q, k, v, config=path_config), k, v, config=path_config)
    jax.block_until_ready(block(q))
    with jax.transfer_guard("disallow"):
        found = [block(block(q)) for _ in range(20)]
    for x in found:
        equal(x, expected)
