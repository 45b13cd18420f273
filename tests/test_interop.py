"""Arrays of every framework: the same bits from all, in the caller's framework, dtype and device.

Frameworks that are not installed are skipped. On a GPU the same tests run on its arrays.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import has_gpu, spin

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_varlen

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Producer:
    """An array library that knows DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class NamespacedProducer(Producer):
    """One that also names its array API namespace."""

    def __array_namespace__(self, api_version: Any = None) -> Any:
        return types.SimpleNamespace(__name__="namespaced", from_dlpack=NamespacedProducer)


@dataclass(frozen=True)
class Library:
    """One framework on one device: host array -> its array -> host array."""

    name: str
    device: str

    def make(self, x: np.ndarray) -> Any:
        if self.name == "torch":
            import torch

            bits = torch.from_numpy(x.view(np.int16) if x.dtype == BFLOAT16 else x.copy())
            return (bits.view(torch.bfloat16) if x.dtype == BFLOAT16 else bits).to(self.device)
        if self.name == "jax":
            import jax

            kind = "cpu" if self.device == "cpu" else "gpu"
            return jax.device_put(x, jax.devices(kind)[0])
        array = x.copy() if self.device == "cpu" else sys.modules["cupy"].asarray(x)
        return {"dlpack": Producer, "namespaced": NamespacedProducer}.get(self.name, lambda a: a)(array)

    def host(self, x: Any) -> np.ndarray:
        if self.name == "torch":
            import torch

            x = x.cpu()
            return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy()
        if self.name == "jax":
            return np.asarray(x)
        x = x.array if isinstance(x, Producer) else x
        return x if isinstance(x, np.ndarray) else x.get()


LIBRARIES = [
    Library(name, device) for device in ("cpu", "cuda") for name in ("native", "torch", "jax", "dlpack", "namespaced")
]


@pytest.fixture(
    params=[
        pytest.param(lib, id=f"{lib.name}-{lib.device}", marks=[] if lib.device == "cpu" else pytest.mark.gpu)
        for lib in LIBRARIES
    ]
)
def library(request):
    found = request.param
    if found.device == "cuda" and not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if found.name == "torch":
        torch = pytest.importorskip("torch")
        if found.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
    if found.name == "jax":
        jax = pytest.importorskip("jax")
        if found.device == "cuda" and jax.default_backend() != "gpu":
            pytest.skip("this JAX has no CUDA")
    return found


DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]


@pytest.fixture
def expected(qkv, config):
    """expected(library, dtype) -> host inputs in dtype, and the results of the native framework."""

    def compute(library, dtype, **options):
        host = [x.astype(dtype) for x in qkv(400, batch=2, heads=4, kv_heads=2)]
        native = Library("native", library.device)
        results = s2o_attention(*map(native.make, host), config=config, return_lse=True, **options)
        return host, [native.host(x) for x in results]

    return compute


def served(library, dtype):
    """Whether this library holds the dtype and its device's backend takes it."""
    if library.device == "cuda":
        return dtype.itemsize == 2
    if library.name == "jax":
        return dtype.itemsize < 8  # unless jax_enable_x64
    return dtype != BFLOAT16 or library.name in ("native", "torch")  # NumPy imports none through DLPack


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_same_bits_in_the_callers_framework(library, expected, config, dtype):
    if not served(library, dtype):
        pytest.skip(f"{library.name} on {library.device} has no {dtype.name}")
    host, (o, lse) = expected(library, dtype)
    given = [library.make(x) for x in host]
    got_o, got_lse, stats = s2o_attention(*given, config=config, return_lse=True, return_stats=True)
    if library.name != "dlpack":  # which has no way back: native arrays come out
        assert all(type(x) is type(given[0]) for x in (got_o, got_lse, stats.visited))
    assert library.host(got_o).dtype == dtype
    np.testing.assert_array_equal(library.host(got_o), o)
    assert library.host(got_lse).dtype == np.float32
    np.testing.assert_array_equal(library.host(got_lse), lse)
    assert library.host(stats.visited).dtype == np.int32
    assert 0 < stats.density < 1
    if library.name != "namespaced":  # a stub: its arrays cannot compute
        mean = library.host(stats.density_per_head).mean()
        assert mean == pytest.approx(stats.density, rel=1e-6)
    if library.name == "torch":
        assert got_o.device == got_lse.device == stats.visited.device == given[0].device
    if library.name == "jax":
        assert got_o.devices() == given[0].devices()
    for x, before in zip(given, host, strict=True):
        np.testing.assert_array_equal(library.host(x.array if isinstance(x, Producer) else x), before)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=lambda d: d.name)
def test_packed_sequences(library, qkv, config, dtype):
    """The bits of native arrays, with cu_seqlens of this framework too."""
    if not served(library, dtype):
        pytest.skip(f"{library.name} on {library.device} has no {dtype.name}")
    host = [np.ascontiguousarray(x[0].swapaxes(0, 1)).astype(dtype) for x in qkv(300, 400, heads=4, kv_heads=2)]
    starts = [0, 1, 1, 170, 300], [0, 20, 20, 220, 400]
    native = Library("native", library.device)
    options = {"config": config, "return_lse": True, "return_stats": True}
    o, lse, stats = s2o_attention_varlen(*map(native.make, host), *starts, **options)
    given = [library.make(x) for x in host]
    for cu_seqlens in (starts, [library.make(np.array(x, np.int32)) for x in starts]):
        got_o, got_lse, got_stats = s2o_attention_varlen(*given, *cu_seqlens, **options)
        if library.name != "dlpack":
            assert all(type(x) is type(given[0]) for x in (got_o, got_lse, got_stats[0].visited))
        np.testing.assert_array_equal(library.host(got_o), native.host(o))
        np.testing.assert_array_equal(library.host(got_lse), native.host(lse))
        for x, y in zip(got_stats, stats, strict=True):
            np.testing.assert_array_equal(library.host(x.visited), native.host(y.visited))
    if library.name != "jax":
        out = library.make(np.full_like(host[0], np.nan))
        assert s2o_attention_varlen(*given, *starts, config=config, out=out) is out
        np.testing.assert_array_equal(library.host(out), native.host(o))
    if library.device == "cuda":
        got = s2o_attention_varlen(*given, *starts, config=config, backend="numpy")
        np.testing.assert_array_equal(
            library.host(got), s2o_attention_varlen(*host, *starts, config=config)
        )


def test_cu_seqlens_that_have_no_values():
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    x = np.zeros((4, 1, 8), np.float32)
    with pytest.raises(TypeError, match="cu_seqlens_q is a JAX tracer"):
        jax.jit(lambda starts: s2o_attention_varlen(x, x, x, starts))(jax.numpy.array([0, 4]))
    with pytest.raises(ValueError, match="cu_seqlens_k is on meta; accepted: the host"):
        s2o_attention_varlen(x, x, x, [0, 4], torch.zeros(2, dtype=torch.int64, device="meta"))


def test_bfloat16_through_jax(config, qkv):
    jax = pytest.importorskip("jax")
    host = [x.astype(BFLOAT16) for x in qkv(100)]
    o = s2o_attention(*(jax.device_put(x, jax.devices("cpu")[0]) for x in host), config=config)
    assert o.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(np.asarray(o), s2o_attention(*host, config=config))


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_jax_arrays_in_another_order(qkv, platform):
    """A layout that JAX gives an array changes where its elements lie, not what comes out."""
    jax = pytest.importorskip("jax")
    from jax.experimental.layout import Format, Layout

    from s2o_cupy.arrays.frameworks.jax import _in_c_order

    if platform == "gpu" and jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    config = S2OConfig(segment=64, block_m=64, block_n=64, dense_up_to=0)
    plain = [jax.device_put(x.astype(np.float16), jax.devices(platform)[0]) for x in qkv(100)]
    rows_first = [jax.device_put(x, Format(Layout((0, 2, 1, 3)), x.sharding)) for x in plain]
    assert [_in_c_order(x) for x in (*plain, *rows_first)] == [True] * 3 + [False] * 3
    expected = s2o_attention(*plain, config=config)
    np.testing.assert_array_equal(np.asarray(s2o_attention(*rows_first, config=config)), np.asarray(expected))


def test_numpy_backend_for_gpu_arrays(library, expected, config):
    """The reference on host copies; results return to the device."""
    if library.device == "cpu":
        pytest.skip("needs a GPU")
    dtype = np.dtype(np.float16)
    host, (o, _) = expected(Library("native", "cpu"), dtype)
    given = [library.make(x) for x in host]
    got = s2o_attention(*given, config=config, backend="numpy")
    assert library.name == "dlpack" or type(got) is type(given[0])
    np.testing.assert_array_equal(library.host(got), o)
    if library.name != "jax":
        out = library.make(np.full_like(o, np.nan))
        assert s2o_attention(*given, config=config, backend="numpy", out=out) is out
        np.testing.assert_array_equal(library.host(out), o)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=lambda d: d.name)
def test_out(library, expected, config, dtype):
    if not served(library, dtype):
        pytest.skip(f"{library.name} on {library.device} has no {dtype.name}")
    host, (o, _) = expected(library, dtype)
    given = [library.make(x) for x in host]
    out = library.make(np.full_like(o, np.nan))
    if library.name == "jax":
        with pytest.raises(TypeError, match="out is a JAX array, which is immutable; accepted: None"):
            s2o_attention(*given, config=config, out=out)
        return
    assert s2o_attention(*given, config=config, out=out) is out
    np.testing.assert_array_equal(library.host(out), o)
    with pytest.raises(ValueError, match="out and q overlap"):
        s2o_attention(*given, config=config, out=given[0])


def test_strided_tensors(library, expected, config):
    """BSHD by its strides and by its layout, without a copy on the way in."""
    if library.name != "torch":
        pytest.skip("about PyTorch's strides")
    host, (o, _) = expected(library, np.dtype(np.float16))
    bshd = [library.make(x).transpose(1, 2).contiguous() for x in host]
    np.testing.assert_array_equal(library.host(s2o_attention(*(x.transpose(1, 2) for x in bshd), config=config)), o)
    got = s2o_attention(*bshd, config=config, layout="BSHD")
    assert got.is_contiguous()
    np.testing.assert_array_equal(library.host(got.transpose(1, 2)), o)
    expanded = [x[:, :1].expand(-1, 2, -1, -1) for x in map(library.make, host)]
    same = s2o_attention(*(x.contiguous() for x in expanded), config=config)
    np.testing.assert_array_equal(library.host(s2o_attention(*expanded, config=config)), library.host(same))


def test_empty(library):
    empty = library.make(np.zeros((0, 2, 5, 64), np.float16))
    o, lse = s2o_attention(empty, empty, empty, return_lse=True)
    assert library.host(o).shape == (0, 2, 5, 64)
    assert library.host(lse).shape == (0, 2, 5)


# -- what a framework's arrays can be besides data ------------------------------------------------


def test_tensors_that_require_grad(library, qkv):
    if library.name != "torch":
        pytest.skip("about PyTorch")
    import torch

    q, k, v = (library.make(x.astype(np.float16)) for x in qkv(10))
    k.requires_grad_()
    with pytest.raises(ValueError, match=r"k requires grad.*inference only.*no_grad\(\), or pass k.detach"):
        s2o_attention(q, k, v)
    expected = s2o_attention(q, k.detach(), v)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            o = s2o_attention(q, k, v)
        assert not o.requires_grad
        assert torch.equal(o, expected)
    o = s2o_attention(q, torch.nn.Parameter(k.detach(), requires_grad=False), v)
    assert torch.equal(o, expected)


def test_sparse_tensors():
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(TypeError, match="k is torch.sparse_coo; accepted: dense tensors"):
        s2o_attention(q, q.to_sparse(), q)


@pytest.mark.parametrize("name", ["q", "v", "out"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_negative_bit_is_refused(qkv, name, dtype):
    """Memory holds the numbers with the other sign, and memory is what kernels read."""
    torch = pytest.importorskip("torch")
    given = dict(zip("qkv", (torch.from_numpy(x).to(getattr(torch, dtype)) for x in qkv(10)), strict=True))
    given["out"] = torch.empty_like(given["q"])
    with pytest.raises(TypeError, match=rf"{name} is a view with its negative bit set; accepted: {name}\.resolve_neg"):
        s2o_attention(**given | {name: torch._neg_view(given[name])})
    s2o_attention(**given | {name: torch._neg_view(given[name]).resolve_neg()})


OTHER_TENSORS = {
    "conjugate": (lambda t, x: t.complex(x, x).conj(), "are complex64; accepted"),
    "float8": (lambda t, x: x.to(t.float8_e4m3fn), "are float8_e4m3fn; accepted"),
    "quantised": (lambda t, x: t.quantize_per_tensor(x, 0.1, 0, t.qint8), "are qint8; accepted"),
    "integers": (lambda t, x: x.int(), "are int32; accepted"),
    "nested": (lambda t, x: t.nested.nested_tensor([x[0], x[0]]), "q is a nested tensor; accepted: dense tensors"),
}


@pytest.mark.parametrize("kind", OTHER_TENSORS)
@pytest.mark.filterwarnings("ignore")  # torch's, of kinds that it calls beta or deprecated
def test_tensors_of_other_kinds(kind):
    torch = pytest.importorskip("torch")
    make, message = OTHER_TENSORS[kind]
    x = make(torch, torch.ones(1, 2, 10, 16))
    with pytest.raises(TypeError, match=message):
        s2o_attention(x, x, x)


def test_tensors_without_data():
    torch = pytest.importorskip("torch")
    q = torch.zeros(1, 1, 4, 8, device="meta")
    with pytest.raises(ValueError, match="q, k and v are on meta; accepted: the CPU or an NVIDIA GPU"):
        s2o_attention(q, q, q)


def test_tracers():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1, 1, 4, 8))
    call = lambda x: s2o_attention(x, x, x)  # noqa: E731
    for transformed in (jax.jit(call), jax.vmap(call), jax.grad(lambda x: call(x).sum())):
        with pytest.raises(TypeError, match=r"q is a JAX tracer.*inside of jax.jit.* s2o_cupy.integrations.jax"):
            transformed(x)


def test_read_only_producers(qkv, config):
    host = qkv(100)
    expected = s2o_attention(*host, config=config)
    for x in host:
        x.flags.writeable = False
    np.testing.assert_array_equal(s2o_attention(*map(Producer, host), config=config), expected)
    q, k, v = map(Producer, host)
    with pytest.raises(ValueError, match="out is read-only"):
        s2o_attention(q, k, v, out=q)


def test_a_producer_that_numpy_cannot_import():
    x = Producer(np.zeros((1, 1, 4, 8), BFLOAT16))
    with pytest.raises(TypeError, match="NumPy cannot import this Producer.*bfloat16 as a PyTorch"):
        s2o_attention(x, x, x)


def test_a_producer_on_an_unknown_device():
    class Elsewhere(Producer):
        def __dlpack_device__(self):
            return 8, 0  # Metal

    x = Elsewhere(np.zeros((1, 1, 4, 8)))
    with pytest.raises(ValueError, match="on DLPack device type 8; accepted: the CPU or an NVIDIA GPU"):
        s2o_attention(x, x, x)


@pytest.mark.parametrize("byte_order", ["<", ">"])
def test_byte_order(qkv, config, byte_order):
    host = qkv(100)
    o = s2o_attention(*(x.astype(byte_order + "f4") for x in host), config=config)
    assert o.dtype == np.float32
    np.testing.assert_array_equal(o, s2o_attention(*host, config=config))


def test_memory_mapped_and_misaligned_arrays(tmp_path, qkv, config):
    host = qkv(100)
    expected = s2o_attention(*host, config=config)
    mapped = []
    for name, x in zip("qkv", host, strict=True):
        np.save(tmp_path / name, x)
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    np.testing.assert_array_equal(s2o_attention(*mapped, config=config), expected)
    shifted = []
    for x in host:
        raw = np.zeros(x.nbytes + 1, np.uint8)
        raw[1:] = np.frombuffer(x.tobytes(), np.uint8)
        shifted.append(raw[1:].view(np.float32).reshape(x.shape))
    assert not shifted[0].flags.aligned
    np.testing.assert_array_equal(s2o_attention(*shifted, config=config), expected)


# -- mixtures -------------------------------------------------------------------------------------


def test_mixed_frameworks(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = qkv(10)
    with pytest.raises(TypeError, match="q NumPy, k PyTorch, v NumPy; accepted: one framework"):
        s2o_attention(q, torch.from_numpy(k), v)
    with pytest.raises(TypeError, match="out is a PyTorch array, q is NumPy; accepted: NumPy"):
        s2o_attention(q, k, v, out=torch.empty(q.shape))


def test_mixed_devices(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in qkv(10))
    with pytest.raises(ValueError, match="q on cpu, k on meta, v on cpu; accepted: one device.*move them"):
        s2o_attention(q, k.to("meta"), v)
    with pytest.raises(ValueError, match="out is on meta; accepted: cpu as q"):
        s2o_attention(q, k, v, out=torch.empty(q.shape, device="meta"))


# -- streams on a GPU -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("explicit", [False, True], ids=["current stream", "stream="])
def test_a_slow_producer_on_a_side_stream(library, qkv, config, explicit):
    """Inputs that are still being computed when the call is made, with no synchronisation by hand."""
    if library.device == "cpu" or library.name not in ("torch", "native"):
        pytest.skip("about streams of CuPy and PyTorch")
    host = [x.astype(np.float16) for x in qkv(2000, heads=8)]
    expected = library.host(s2o_attention(*map(library.make, host), config=config))
    if library.name == "torch":
        import torch

        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        sources = [library.make(x) for x in host]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            given = [x * 1 for x in sources]
            o = s2o_attention(*given, config=config, stream=other if explicit else None)
            assert torch.cuda.current_stream() == side
            if explicit:
                side.wait_stream(other)
            o = o * 1
        torch.cuda.current_stream().wait_stream(side)
    else:
        import cupy

        side = cupy.cuda.Stream(non_blocking=True)
        sources = [library.make(x) for x in host]
        cupy.cuda.Device().synchronize()
        with side:
            spin(milliseconds=50)
            given = [x * 1 for x in sources]
        with contextless(side) if explicit else side:
            o = s2o_attention(*given, config=config, stream=side if explicit else None)
        side.synchronize()
    np.testing.assert_array_equal(library.host(o), expected)


def contextless(stream):
    """Not entering a stream: it is passed by hand."""
    import contextlib

    return contextlib.nullcontext(stream)


@pytest.mark.gpu
def test_the_current_device_is_restored(library, qkv, config):
    if library.device == "cpu":
        pytest.skip("needs a GPU")
    import cupy

    arrays = [library.make(x.astype(np.float16)) for x in qkv(10)]  # may change the device, where there are several
    before = cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr
    s2o_attention(*arrays, config=config)
    with pytest.raises(ValueError, match="scale"):
        s2o_attention(*arrays, scale=float("nan"))
    assert (cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr) == before
