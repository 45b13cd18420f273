"""Pages of 8 bits, e4m3: the bits of a 16-bit cache with the same values."""

from __future__ import annotations

import re
import types
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import SMALL, SMALL_HOPPER, Device, has_gpu, has_hopper
from packs import bits, starts
from pages import paged, random_table
from pretended import pretend_gpu
from ragged_pages import in_pages

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged
from s2o_cupy.arrays.operand import Layout, Operand, Paging, Scale
from s2o_cupy.methods import MeanPoolingConfig, sparse_attention_paged
from s2o_cupy.plan.collecting import most_collected_keys
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.launch_plan import check_fp8_keys
from s2o_cupy.plan.launches import launches, workspace
from s2o_cupy.problem import Problem
from s2o_cupy.reference.fp8 import from_e4m3
from s2o_cupy.selection.methods import make_plan
from s2o_cupy.tools import diff
from s2o_cupy.tools.catalogue import kernels_for
from s2o_cupy.tools.diff_fp8 import fp8_cache

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def quantized(x: np.ndarray, scale: Any) -> np.ndarray:
    """[batch, kv_heads, seqlen_k, head_dim] as bytes of e4m3."""
    of_heads = np.asarray(scale, np.float32).reshape(-1, 1, 1)
    with np.errstate(invalid="ignore"):
        return (x / of_heads).astype(E4M3)


def on_device(device: Device, cache: np.ndarray) -> Any:
    """CuPy has no such dtype: there it is bytes."""
    return cache if device.kind == "cpu" else device.xp.asarray(cache.view(np.uint8))


def as_given(device: Device, scale: Any) -> Any:
    return scale if isinstance(scale, float) else device.xp.asarray(np.array(scale, np.float32))


def assert_bits_of_16(
    device: Device, q: Any, k: Any, v: Any, rng: Any, page_size: int = 16, layout: Any = "NHD",
    scales: tuple[Any, Any] = (0.5, 0.25), **given_options: Any,
) -> Any:  # fmt: skip
    """A call on pages of 8 bits, one on 16-bit pages and one on arrays with the same values; what it gave, and its
    arrays."""
    options: dict[str, Any] = {"config": device.config, "return_lse": True, "return_stats": True} | given_options
    q = device.xp.asarray(q.astype(device.dtype))
    eights = [quantized(x, scale) for x, scale in zip((k, v), scales, strict=True)]
    values = [from_e4m3(x, np.array(s, np.float32), device.dtype) for x, s in zip(eights, scales, strict=True)]
    lengths = [k.shape[2]] * len(k)
    table, pages = random_table(rng, lengths, page_size)
    of = lambda x: paged(x, table, pages, page_size, layout, lengths)  # noqa: E731
    k_pages, v_pages = (on_device(device, of(x)) for x in eights)
    k_wide, v_wide, *arrays = map(device.xp.asarray, (*map(of, values), *values))
    table = device.xp.asarray(table)
    given = dict(zip(("k_scale", "v_scale"), (as_given(device, s) for s in scales), strict=True))
    out = device.poisoned(q.shape)
    on_pages: dict[str, Any] = {"seqlen_k": k.shape[2], "layout": layout, **options}
    found = s2o_attention_paged(q, k_pages, v_pages, table, out=out, **given, **on_pages)
    assert found[0] is out
    of_pages = s2o_attention_paged(q, k_wide, v_wide, table, **on_pages)
    of_arrays = s2o_attention(q, arrays[0], arrays[1], **options)
    for other in (of_pages, of_arrays):
        for x, y in ((found[0], other[0]), (found[1], other[1]), (found[2].visited, other[2].visited)):
            np.testing.assert_array_equal(bits(x), bits(y))
    assert (found[2].path, found[2].density) == (of_arrays[2].path, of_arrays[2].density)
    return found, (q, k_pages, v_pages, table), given


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 1), (128, 16), (256, 256), (72, 8)])
def test_bits_of_a_16_bit_cache(device, qkv, rng, layout, head_dim, page_size):
    q, k, v = qkv(301, 779, batch=2, heads=4, kv_heads=2, head_dim=head_dim)
    assert_bits_of_16(device, q, k, v, rng, page_size, layout)


@pytest.mark.parametrize(
    ("lengths", "changes", "options"),
    [
        ((1, 1), {}, {}),
        ((1, 300), {}, {}),
        ((200, 333), {"rank": "weight"}, {}),
        ((300, 700), {"rank": "query"}, {}),
        ((500, 700), {"rank": "max", "pooled_queries": 3, "segment": 100}, {}),
        ((1100, 1900), {"segment": 64, "unit": 8}, {}),
        ((500, 700), {"tail": "first_order"}, {}),
        ((200, 333), {"tau": 0.0}, {}),
        ((300, 500), {"dense_up_to": 10_000}, {}),
        ((300, 700), {}, {"is_causal": False}),
        ((300, 500), {}, {"scale": -0.1}),
        ((300, 500), {}, {"softcap": 2.0}),
    ],
    ids=str,
)
def test_problems(device, qkv, rng, lengths, changes, options):
    q, k, v = qkv(*lengths, heads=3, kv_heads=3, head_dim=72)
    assert_bits_of_16(device, q, k, v, rng, config=replace(device.config, **changes), **options)


@pytest.mark.parametrize(
    "scales", [(1.0, 1.0), (0.3, 7.0), ([], 0.3), ([0.1], [0.7]), ([0.3, 2.5], [5.0, 0.01])], ids=str
)
def test_scales(device, qkv, rng, scales):
    """Numbers, and arrays of none, one or one for each KV head; a product that is no 16-bit number is rounded once."""
    scales = [0.6 if x == [] else x for x in scales]
    q, k, v = qkv(130, 300, batch=2, heads=4, kv_heads=2)
    found, arrays, given = assert_bits_of_16(device, q, k, v, rng, scales=tuple(scales))
    if scales[0] == 0.6:
        given["k_scale"] = device.xp.asarray(np.float32(0.6))
        o = s2o_attention_paged(*arrays, seqlen_k=300, config=device.config, **given)
        np.testing.assert_array_equal(bits(o), bits(found[0]))


@pytest.mark.parametrize("head_dim", [64, 72])
def test_a_cache_of_other_strides(device, qkv, rng, head_dim):
    """Keys and values side by side, where values may start on 8 bytes, and every other one of some scales."""
    q, k, v = (x.astype(device.dtype) for x in qkv(200, 300, heads=4, kv_heads=2, head_dim=head_dim))
    table, pages = random_table(rng, [300], 16)
    eights = [paged(quantized(x, 1.0), table, pages, 16, "HND", [300]) for x in (k, v)]
    both = device.xp.asarray(np.concatenate(eights, axis=-1).view(np.uint8))  # [pages, kv_heads, 16, 2 * head_dim]
    scales = device.xp.asarray(np.array([1, 9, 2, 9], np.float32))[::2]
    q, table = device.xp.asarray(q), device.xp.asarray(table)
    options: dict[str, Any] = {"seqlen_k": 300, "config": device.config, "layout": "HND"}
    options |= {"k_scale": scales, "v_scale": scales}
    o = s2o_attention_paged(q, both[..., :head_dim], both[..., head_dim:], table, **options)
    values = [from_e4m3(quantized(x, 1.0), np.array([1, 2]), device.dtype) for x in (k, v)]
    expected = s2o_attention(q, *map(device.xp.asarray, values), config=device.config)
    np.testing.assert_array_equal(bits(o), bits(expected))


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_every_byte(device, scale):
    """The output of a single key is its value. 0x7f and 0xff are NaN, and so are all columns of a row with one."""
    codes = np.arange(256, dtype=np.uint8).reshape(32, 1, 1, 8)
    values = codes.view(E4M3).astype(np.float32) * np.float32(scale)
    q, table = device.array(np.ones((32, 1, 1, 8))), device.xp.asarray(np.arange(32, dtype=np.int32)[:, None])
    k = device.xp.zeros((32, 1, 1, 8), np.uint8)
    o = s2o_attention_paged(q, k, device.xp.asarray(codes), table, seqlen_k=1, k_scale=1.0, v_scale=scale)
    expected = values.astype(device.dtype).astype(np.float64)[:, :, 0, None]
    found = device.host(o)
    is_nan = np.isnan(expected)
    assert is_nan.sum() == 2 and np.isnan(found[is_nan]).all()
    whole = ~is_nan.any(axis=-1)
    np.testing.assert_array_equal(found[whole], expected[whole])


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("row", [5, 299])
def test_numbers_that_are_none(device, qkv, rng, name, row):
    arrays = dict(zip("qkv", qkv(300, heads=2), strict=True))
    arrays[name][:, -1, row, 7] = np.nan
    with np.errstate(invalid="ignore"):
        assert_bits_of_16(device, *arrays.values(), rng, 32)


def test_a_tensor_of_pytorch(qkv, rng):
    torch = pytest.importorskip("torch")
    q, k, v = (x.astype(np.float32) for x in qkv(100, 200, heads=4, kv_heads=2))
    table, pages = random_table(rng, [200], 16)
    caches = [paged(quantized(x, 0.5), table, pages, 16, "NHD", [200]) for x in (k, v)]
    q16 = torch.from_numpy(q).bfloat16()
    eights = [torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in caches]
    scale = torch.tensor(0.5)
    options = {"seqlen_k": 200, "k_scale": scale, "v_scale": scale, "tau": 0.01}
    o = s2o_attention_paged(q16, *eights, torch.from_numpy(table), **options)
    values = [torch.from_numpy(from_e4m3(quantized(x, 0.5), 0.5, np.float32)).bfloat16() for x in (k, v)]
    assert torch.equal(o, s2o_attention(q16, *values, tau=0.01))


# ---------------------------------------------------------------- batches


def test_sequences_of_their_own_lengths(device, qkv, rng):
    lengths = [400, 400, 123, 0, 801]
    q, k, v = (x.astype(device.dtype) for x in qkv(90, 801, batch=5, heads=4, kv_heads=2))
    table, pages = random_table(rng, lengths, 64)
    eights = [quantized(x, 0.5) for x in (k, v)]
    caches = [on_device(device, paged(x, table, pages, 64, "NHD", lengths)) for x in eights]
    k, v = (device.xp.asarray(from_e4m3(x, 0.5, device.dtype)) for x in eights)
    q, table = device.xp.asarray(q), device.xp.asarray(table)
    options = {"config": device.config, "is_causal": False, "return_lse": True}
    o, lse = s2o_attention_paged(q, *caches, table, seqlen_k=lengths, k_scale=0.5, v_scale=0.5, **options)
    for b, n in enumerate(lengths):
        expected = s2o_attention(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **options)
        for x, y in zip((o[b : b + 1], lse[b : b + 1]), expected, strict=True):
            np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workspace_bytes", [1 << 28, 1 << 20], ids=["one launch", "in turns"])
def test_packed_queries(device, rng, workspace_bytes):
    """Short sequences share a launch and the kernel that reads their pages, or as many as the workspace holds; longer
    ones take turns. NHD pages of 8 rows."""
    lengths_q, lengths_k = [130, 0, 1, 64, 300, 100], [130, 9, 70, 350, 700, 350]
    config = replace(device.config, dense_up_to=400, workspace_bytes=workspace_bytes)
    q = rng.standard_normal((sum(lengths_q), 4, 256)).astype(device.dtype)
    k, v = (rng.standard_normal((sum(lengths_k), 2, 256)).astype(E4M3) for _ in range(2))
    # Keys of one launch: of the dense ones, up to 400, all 900 or fewer than the two longest together have.
    at_once = most_collected_keys(replace(PROBLEM, head_dim=256), config)
    assert at_once >= 900 if workspace_bytes > 1 << 20 else 350 <= at_once < 700
    scales = np.array([0.5, 0.3], np.float32)
    wide = [from_e4m3(x.swapaxes(0, 1), scales, device.dtype).swapaxes(0, 1) for x in (k, v)]
    table, put = in_pages(rng, k, lengths_k, 8, "NHD")
    eights, table = [on_device(device, put(x)) for x in (k, v)], device.xp.asarray(table)
    other, put = in_pages(rng, wide[0], lengths_k, 8, "NHD")
    sixteens, other = [device.xp.asarray(put(x)) for x in wide], device.xp.asarray(other)
    q = device.xp.asarray(q)
    options = {"seqlen_k": lengths_k, "cu_seqlens_q": starts(lengths_q), "config": config, "return_lse": True}
    given = {"k_scale": device.xp.asarray(scales), "v_scale": device.xp.asarray(scales)}
    found = s2o_attention_paged(q, *eights, table, out=device.poisoned(q.shape), **given, **options)
    expected = s2o_attention_paged(q, *sixteens, other, **options)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


# ---------------------------------------------------------------- refused


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def of_cache(**changes: Any) -> dict[str, Any]:
    cache = zeros(6, 16, 2, 64, dtype=E4M3)
    given = {"q": zeros(2, 4, 30, 64), "k_pages": cache, "v_pages": cache, "page_table": zeros(2, 3, dtype=np.int32)}
    return given | {"seqlen_k": 40} | changes


WIDE = {name: zeros(6, 16, 2, 64) for name in ("k_pages", "v_pages")}
BYTES = {name: zeros(6, 16, 2, 64, dtype=np.uint8) for name in ("k_pages", "v_pages")}
OTHERS = {
    name: {x: zeros(6, 16, 2, 64, dtype=getattr(ml_dtypes, name)) for x in ("k_pages", "v_pages")}
    for name in ("float8_e5m2", "float8_e4m3fnuz")
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (OTHERS["float8_e5m2"], TypeError, "k_pages is float8_e5m2, as v_pages is; accepted: float32 as q, float8_"),
        (OTHERS["float8_e4m3fnuz"] | {"k_scale": 1.0}, TypeError, "k_pages is float8_e4m3fnuz, .*; accepted: float32"),
        (BYTES, TypeError, "k_pages is uint8.*; accepted: .* as uint8 with k_scale and v_scale"),
        (BYTES | {"k_scale": 10**400}, ValueError, "k_scale is beyond what a float holds; accepted: a number"),
        ({"k_pages": WIDE["k_pages"]}, TypeError, "v_pages is .*4m3fn, with k_pages float32 and .*; accepted: .*both"),
        (BYTES | {"k_pages": WIDE["k_pages"], "k_scale": 1.0}, TypeError, "v_pages is uint8, with k_pages float32 and"),
        (WIDE | {"k_scale": 1.0}, ValueError, "k_scale is given, but k_pages is float32; accepted: scales of a cache"),
        (WIDE | {"v_scale": 1.0}, ValueError, "v_scale is given, but k_pages is float32"),
        ({"q": zeros(2, 4, 30, 64, dtype=E4M3)}, TypeError, "q, k and v are float8_e4m3fn; accepted"),
        ({"k_scale": 0.0}, ValueError, "k_scale is 0.0; accepted: a number from 1.2e-38 to 3.4e\\+38"),
        ({"v_scale": 1e39}, ValueError, "v_scale is 1e\\+39; accepted"),
        ({"v_scale": np.array([1j])}, TypeError, "v_scale is complex128; accepted"),
        (BYTES | {"k_scale": 1.0}, TypeError, "k_pages is uint8.*; k_scale came alone"),
        ({"v_pages": BYTES["v_pages"], "k_scale": 1.0, "v_scale": 1.0}, TypeError, "v_pages is uint8, with k_pages fl"),
        ({"k_scale": True}, TypeError, "k_scale is a bool; accepted: a number, or an array of float32"),
        ({"k_scale": np.array([1.0, -1.0], np.float32)}, ValueError, r"k_scale\[1\] is -1.0; accepted: a number from"),
        (BYTES | {"v_scale": 1.0}, TypeError, "k_pages is uint8.*; v_scale came alone"),
        ({"k_scale": np.array(-1.0)}, ValueError, "k_scale is -1.0; accepted"),
        ({"v_scale": float("nan")}, ValueError, "v_scale is nan; accepted"),
        ({"v_scale": True}, TypeError, "v_scale is a bool; accepted"),
        ({"v_scale": [1.0, 1.0]}, TypeError, "v_scale is a list; accepted"),
        ({"v_scale": zeros(2, dtype=np.float64)}, TypeError, "v_scale is float64; accepted: a number, or an array of "),
        ({"k_scale": zeros(3)}, ValueError, r"k_scale has shape \(3,\); accepted: .* kv_heads, \(2,\)"),
        ({"k_scale": zeros(2, 1)}, ValueError, r"k_scale has shape \(2, 1\); accepted"),
    ],
)  # fmt: skip
def test_refused(changes, error, message):
    with pytest.raises(error, match=f"^s2o_attention_paged: {message}") as caught:
        s2o_attention_paged(**of_cache(**changes))
    assert "\n" not in str(caught.value)


def test_lists_are_of_16_bits():
    """Attention by a schedule reads the pages where they lie."""
    with pytest.raises(TypeError, match="dtypes differ: q float32, k_pages float8_e4m3fn"):
        sparse_attention_paged(**of_cache(config=MeanPoolingConfig(threshold=0.5)))


@pytest.mark.parametrize("head_dim", [64, 36])
def test_rows_that_the_gpu_does_not_take(head_dim):
    """As of 16 bits: a multiple of 8 elements. An fp8 row may begin on any 8 bytes."""
    problem = replace(PROBLEM, head_dim=head_dim)
    aligned = head_dim % 8 == 0
    if not aligned:
        with pytest.raises(ValueError, match=r"head_dim \(36\) is no multiple of 8; accepted"):
            make_plan(problem, S2OConfig(), LIMITS, aligned, fp8=True)
        return
    assert make_plan(problem, S2OConfig(), LIMITS, aligned, fp8=True).collect_pages is not None


def test_more_keys_than_a_launch_reads():
    """Into 64 GiB."""
    problem = replace(PROBLEM, seqlen_k=2**26, kv_heads=8, heads=8)
    with pytest.raises(ValueError, match="seqlen_k is 67108864 with batch 1, .* of an fp8 cache; acc") as caught:
        check_fp8_keys(problem)
    most = int(re.findall(r"accepted: up to (\d+)", str(caught.value))[0])
    keys_and_values = 2 * 8 * most * problem.head_dim * 2  # bytes
    assert 0.999 * 2**36 < keys_and_values <= 2**36
    check_fp8_keys(replace(problem, seqlen_k=most))
    with pytest.raises(ValueError, match=f"accepted: up to {most},"):
        check_fp8_keys(replace(problem, seqlen_k=most + 1))


# ---------------------------------------------------------------- what is launched

PROBLEM = Problem(1, 4, 2, 1000, 20_000, 64, "bfloat16", True, 0.125)
LIMITS = DeviceLimits.of_architecture(90)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dense", [False, True])
def test_one_kernel_comes_before_the_others(capability, dense):
    """They are those of keys and values in arrays, which lie in the workspace: 2 x 2 bytes of each element of a key."""
    limits = DeviceLimits.of_architecture(capability)
    config = S2OConfig(dense_up_to=30_000) if dense else S2OConfig()
    layout = Layout(((0, 0, 64), (4096, 64, 128), (4096, 64, 128), (0, 0, 64)), True, PAGING)
    operands = layout.operands(PROBLEM)
    plan, of_arrays = (make_plan(PROBLEM, config, limits, True, True, 0, fp8) for fp8 in (True, False))
    memory, without = workspace(plan, PROBLEM, config), workspace(of_arrays, PROBLEM, config)
    assert sum(memory.places[name].nbytes for name in ("keys", "values")) == 2 * 2 * 2 * 20_000 * 64
    assert set(memory.places) - set(without.places) == {"keys", "values"}
    first, *others = launches(plan, PROBLEM, config, operands, memory, PAGING)
    arrays = {name: operands[name] for name in ("q", "k", "v", "out")}
    expected = launches(of_arrays, PROBLEM, config, arrays, without)
    assert [x.kernel for x in others] == [x.kernel for x in expected]
    assert first.kernel in kernels_for(capability) and first.kernel.name == "fp8_pages-bfloat16-d128"
    assert first.params["k_scale"]["value"] == 3.0 and first.params["v_scale"]["stride"] == 1
    assert {base for _, base, _ in first.pointers} == {"k_pages", "v_pages", "k_scale", "v_scale", "pages", "workspace"}


PAGING = Paging(0, 0, 16, 2000, (Scale(3.0), Scale(stride=1)))


def test_scales_reach_the_gpu(qkv, monkeypatch):
    """Numbers as they are, arrays by where they lie."""
    given = []

    def run(call, config, **rest):
        given.append(call.paging)
        return types.SimpleNamespace(path="portable", path_reason=None, graphs="off")

    pretend_gpu(monkeypatch, run=run)
    q, k, v = qkv(20, 32, batch=2, heads=4, kv_heads=2)
    k_pages, v_pages = (quantized(x, 1.0).reshape(4, 16, 2, 64) for x in (k, v))
    table, of_heads = np.arange(4, dtype=np.int32).reshape(2, 2), np.array([0.5, 2.0], np.float32)
    for k_scale, v_scale, stride in ((3.0, of_heads, 1), (3.0, of_heads[:1], 0)):
        s2o_attention_paged(
            q.astype(np.float16), k_pages, v_pages, table, seqlen_k=32, k_scale=k_scale, v_scale=v_scale
        )
        assert given.pop().scales == (Scale(3.0), Scale(pointer=of_heads.ctypes.data, stride=stride))


def test_a_layout_does_not_know_addresses():
    q, cache = Operand(1 << 20, (1, 4, 9, 64), (0, 64, 256)), Operand(1 << 21, (9, 2, 16, 64), (2048, 64, 128))
    paging = Paging(1 << 10, 5, 16, 9, (Scale(pointer=1 << 12), Scale(0.5)))
    layout = Layout.of((q, cache, cache, q), paging)
    assert layout.paging == Paging(0, 5, 16, 9, (Scale(), Scale(0.5)))
    assert layout.is_fp8 and layout.page_size == 0


@pytest.mark.parametrize(
    ("of_q", "of_cache", "row", "aligned"), [(0, 8, 64, True), (0, 4, 64, False), (8, 0, 64, False), (0, 0, 68, False)]
)
def test_rows_of_8_bits_begin_on_8_bytes(of_q, of_cache, row, aligned):
    """And those of q on 16, as ever."""
    q = Operand((1 << 20) + of_q, (1, 4, 1000, 64), (4 * 64 * 1000, 64 * 1000, 64))
    cache = Operand((1 << 21) + of_cache, (2000, 2, 16, 64), (2 * 16 * row, 16 * row, row))
    layout = Layout.of((q, cache, cache, q), PAGING)
    assert layout.is_aligned(layout.operands(PROBLEM)) == aligned


# ---------------------------------------------------------------- calls that come again, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["portable", "hopper"])
@pytest.mark.parametrize("dense", [False, True])
def test_replays_follow_what_is_at_the_addresses(qkv, rng, path, dense):
    """Scales too; and other addresses are followed."""
    import cupy

    device = on_path(path)
    config = replace(device.config, dense_up_to=10_000 if dense else 0)
    q, k, v = qkv(300, 700, heads=4, kv_heads=2, head_dim=128)
    scales = [0.5, 2.0], [0.25, 0.125]
    _, arrays, given = assert_bits_of_16(device, q, k, v, rng, scales=scales, config=config)
    q, k_pages, v_pages, table = arrays
    options = {"seqlen_k": 700, "config": config}
    out, said = cupy.empty_like(q), []
    for _ in range(6):
        # The pool gives the same memory to the statistics of each, which are let go before anything else is asked for.
        said.append(s2o_attention_paged(*arrays, **given, **options, out=out, return_stats=True)[1].graphs)
        o = out.copy()
        fresh = s2o_attention_paged(
            q, k_pages.copy(), v_pages.copy(), table, **{name: x.copy() for name, x in given.items()}, **options
        )
        np.testing.assert_array_equal(bits(o), bits(fresh))
        del o, fresh
        k_pages[...] = cupy.roll(k_pages, 1, axis=3)
        given["v_scale"] *= 2
    if not dense and hasattr(cupy.cuda.Stream, "begin_capture"):
        assert said.count("replayed") >= 4, said


@pytest.mark.gpu
def test_a_captured_graph_reads_the_pages_anew(qkv, rng):
    import cupy

    device, stream = on_path("auto"), cupy.cuda.Stream(non_blocking=True)
    with stream:
        _, arrays, given = assert_bits_of_16(device, *qkv(300, 700, heads=4, kv_heads=2), rng, scales=([0.5], [2.0]))
        options = {"seqlen_k": 700, "config": device.config}
        stream.begin_capture()
        o = s2o_attention_paged(*arrays, **given, **options)
        graph = stream.end_capture()
        for _ in range(3):
            arrays[1][...] = cupy.roll(arrays[1], 1, axis=3)
            given["k_scale"] *= 2
            graph.launch(stream=stream)
            np.testing.assert_array_equal(bits(o), bits(s2o_attention_paged(*arrays, **given, **options)))


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["portable", "hopper"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_many_tiles(qkv, rng, path, dense, dtype, page_size):
    device = replace(on_path(path), dtype=np.dtype(getattr(ml_dtypes, dtype, dtype)))
    config = replace(device.config, segment=256, tau=0.05, dense_up_to=10_000 if dense else 0)
    q, k, v = qkv(1700, 2300, heads=32, kv_heads=8, head_dim=128)
    assert_bits_of_16(device, q, k, v, rng, page_size, scales=([0.25] * 4 + [0.5] * 4, 0.3), config=config)


def on_path(path: str) -> Device:
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if path == "hopper" and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    config = SMALL_HOPPER if path == "hopper" else replace(SMALL, path=path)
    return Device("cuda", np.dtype(ml_dtypes.bfloat16), config)


# ---------------------------------------------------------------- diff


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_what_diff_has_read(rng, dtype):
    """Rounded to the nearest, each head by its own scale, and in pages all over."""
    k, v = (rng.standard_normal((2, 2, 150, 64)).astype(dtype) for _ in range(2))
    k[:, 1] *= 10
    v[1, 0, 3, 5] = np.nan
    cache = fp8_cache(k, v)
    for x, pages, scale, values in zip((k, v), cache.pages, cache.scales, cache.values, strict=True):
        eights = (x.astype(np.float32) / scale[:, None, None]).astype(E4M3)
        codes = np.stack([pages[table].reshape(-1, 2, 64)[:150].swapaxes(0, 1) for table in cache.table])
        codes[codes == 255] = 127
        np.testing.assert_array_equal(codes, eights.view(np.uint8) & np.where(np.isnan(eights), 127, 255))
        expected = (eights.astype(np.float32) * scale[:, None, None]).astype(dtype)
        np.testing.assert_array_equal(values.astype(np.float32), expected.astype(np.float32))
    assert cache.scales[0][1] > 5 * cache.scales[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["portable", "hopper"])
@pytest.mark.parametrize("rank", ["query", "weight"])
def test_diff(qkv, path, rank):
    device = on_path(path)
    q, k, v = (x.astype(device.dtype) for x in qkv(300, 700, batch=2, heads=4, kv_heads=2, head_dim=128))
    report = diff(q, k, v, replace(device.config, rank=rank), fp8=True)
    assert report.ok, report.table()
    assert report.rows[0].stage == "fp8 pages" and report.rows[0].compared == 2 * k.size
