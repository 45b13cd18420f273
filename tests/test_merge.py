"""merge_states: attention over two sets of keys, from the attention over each."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2o_cupy import merge_states, s2o_attention
from s2o_cupy.reference import dense_attention
from s2o_cupy.tools.metrics import rel_l2

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def attend(q, k, v, keys):
    """Dense attention over some of the keys, without a mask, in float64."""
    return dense_attention(q, k[:, :, keys], v[:, :, keys], is_causal=False)


@st.composite
def cases(draw):
    """q, k, v in float64, and where the keys are cut into parts (some may be empty)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    seqlen_q, seqlen_k, head_dim = draw(st.integers(1, 5)), draw(st.integers(1, 24)), draw(st.integers(1, 8))
    q = rng.standard_normal((1, kv_heads * group, seqlen_q, head_dim)) * draw(st.sampled_from([0.1, 1.0, 30.0]))
    k, v = rng.standard_normal((2, 1, kv_heads, seqlen_k, head_dim))
    cuts = sorted(draw(st.lists(st.integers(0, seqlen_k), min_size=1, max_size=4)))
    return q, k, v, [slice(a, b) for a, b in zip([0, *cuts], [*cuts, seqlen_k], strict=True)]


@settings(deadline=None, max_examples=150)
@given(cases())
def test_parts_merge_into_the_whole(case):
    q, k, v, parts = case
    exact, exact_lse = attend(q, k, v, slice(None))
    o, lse = attend(q, k, v, parts[0])
    for part in parts[1:]:
        o, lse = merge_states(o, lse, *attend(q, k, v, part))
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(o, exact, rtol=1e-12, atol=1e-13 * float(abs(v).max()))


@settings(deadline=None, max_examples=60)
@given(cases(), st.sampled_from(list(EPS)))
def test_rounding_is_that_of_the_dtype(case, dtype):
    """Each part is rounded before, and the result once: 2 roundings and float32 in between."""
    q, k, v, parts = case
    first, rest = parts[0], slice(parts[0].stop, None)
    exact, exact_lse = attend(q, k, v, slice(None))
    lse_dtype = np.float64 if dtype == "float64" else np.float32
    target = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    given = []
    for keys in (first, rest):
        o, lse = attend(q, k, v, keys)
        given += [o.astype(target), lse.astype(lse_dtype)]
    o, lse = merge_states(*given)
    assert o.dtype == target and lse.dtype == lse_dtype
    # A score's own rounding is of its products, which may be much larger than their sum.
    products = math.sqrt(q.shape[3]) * float(abs(q).max() * abs(k).max()) if k.size else 0.0
    eps, size = EPS[dtype], max(1.0, float(abs(exact_lse).max()), products)
    lse_eps = EPS[np.dtype(lse_dtype).name] * 4 * size
    assert float(abs(lse - exact_lse).max()) <= lse_eps
    allowed = (2.1 * eps + 4 * lse_eps) * float(abs(v).max()) + 2 * float(ml_dtypes.finfo(target).smallest_subnormal)
    assert float(abs(o.astype(np.float64) - exact).max()) <= allowed


@pytest.mark.parametrize("lse_garbage", [0.0, np.nan, np.inf])
def test_a_part_without_a_key_changes_no_bit(rng, lse_garbage):
    o, lse = rng.standard_normal((2, 3, 5, 8), dtype=np.float32), rng.standard_normal((2, 3, 5), dtype=np.float32)
    nothing = np.full_like(o, lse_garbage), np.full_like(lse, -np.inf)
    for merged in (merge_states(o, lse, *nothing), merge_states(*nothing, o, lse)):
        np.testing.assert_array_equal(merged[0], o)
        np.testing.assert_array_equal(merged[1], lse)
    o, lse = merge_states(*nothing, *nothing)
    np.testing.assert_array_equal(o, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_nothing_is_laundered():
    """A NaN reaches its row from either side, even where its part weighs nothing; no other row."""
    o1, lse1 = np.ones((4, 2), np.float32), np.float32([0, np.nan, 0, 0])
    o2, lse2 = o1 * np.float32([[1], [1], [np.nan], [np.nan]]), np.float32([0, 0, 0, -1e4])
    o, lse = merge_states(o1, lse1, o2, lse2)
    np.testing.assert_array_equal(np.isnan(o).all(axis=1), [False, True, True, True])
    np.testing.assert_array_equal(np.isnan(lse), [False, True, False, False])


def test_far_apart_and_large():
    o = np.float32([[1.0], [2.0]])
    got, lse = merge_states(o, np.float32([5e4, -5e4]), -o, np.float32([-5e4, -5e4]))
    np.testing.assert_array_equal(got, np.float32([[1.0], [0.0]]))
    np.testing.assert_allclose(lse, np.float32([5e4, -5e4 + math.log(2)]))


@pytest.mark.parametrize("ndim", [3, 4])
def test_layouts(rng, ndim):
    shape = (2, 3, 5, 8)[4 - ndim :]
    o1, o2 = rng.standard_normal((2, *shape), dtype=np.float32)
    lse1, lse2 = rng.standard_normal((2, *shape[:-1]), dtype=np.float32)
    o, lse = merge_states(o1, lse1, o2, lse2)
    turned, turned_lse = merge_states(o1.swapaxes(-2, -3), lse1, o2.swapaxes(-2, -3), lse2, layout="BSHD")
    np.testing.assert_array_equal(turned.swapaxes(-2, -3), o)
    np.testing.assert_array_equal(turned_lse, lse)


def test_s2o_results_merge(device, qkv):
    """A chunk's own keys, causally, and the cache before it without a mask, in each backend's dtype."""
    q, k, v = qkv(130, 400, heads=4, kv_heads=2)
    a, b, c = (device.array(x) for x in (q, k, v))
    one = s2o_attention(a, b[:, :, :270], c[:, :, :270], tau=0, config=device.config, is_causal=False, return_lse=True)
    other = s2o_attention(a, b[:, :, 270:], c[:, :, 270:], tau=0, config=device.config, return_lse=True)
    o, lse = merge_states(*one, *other)
    assert o.dtype == device.dtype and lse.dtype == np.float32
    # Two parts, each rounded to the dtype, and the result: three roundings where one call makes one.
    assert rel_l2(device.host(o), device.exact(q, k, v)) <= 3 * device.tolerance(q, k, v)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_frameworks(rng, library):
    o1, o2 = rng.standard_normal((2, 1, 3, 5, 8), dtype=np.float32)
    lse1, lse2 = rng.standard_normal((2, 1, 3, 5), dtype=np.float32)
    lse2[0, 0, :2] = -np.inf
    expected = merge_states(o1, lse1, o2, lse2)
    if library == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(x) for x in (o1, lse1, o2, lse2)]
        half = merge_states(*(x.to(torch.bfloat16) if x.ndim == 4 else x for x in given))
        assert half[0].dtype == torch.bfloat16 and half[1].dtype == torch.float32
        assert rel_l2(half[0].float().numpy(), expected[0]) < 2.0**-7
    else:
        jax = pytest.importorskip("jax")
        given = [jax.device_put(x, jax.devices("cpu")[0]) for x in (o1, lse1, o2, lse2)]
        jitted = jax.jit(merge_states)(*given)
        np.testing.assert_allclose(jitted[0], expected[0], rtol=1e-5, atol=1e-6)
    for x, y in zip(merge_states(*given), expected, strict=True):
        assert type(x) is type(given[0]) and x.dtype == given[0].dtype
        np.testing.assert_allclose(np.asarray(x), y, rtol=2e-6, atol=1e-6)


def test_what_is_refused():
    o, lse = np.zeros((2, 5, 8), np.float32), np.zeros((2, 5), np.float32)
    half = lse.astype(np.float16)
    for match, arguments in (
        ("o1 is a list; accepted: NumPy, CuPy", ([], lse, o, lse)),
        ("lse2 is a NoneType; accepted: NumPy, CuPy", (o, lse, o, None)),
        ("o1 is float32 and o2 float64; accepted: one dtype for both, of float16", (o, lse, o.astype(float), lse)),
        ("lse1 is float16 and lse2 float16; accepted: one dtype for both, of float32, float64", (o, half, o, half)),
        ("o1 is int32 and o2 int32", (o.astype("i4"), lse, o.astype("i4"), lse)),
    ):
        with pytest.raises(TypeError, match=match):
            merge_states(*arguments)
    for match, arguments in (
        (r"o2 is \(2, 4, 8\) with o1 \(2, 5, 8\); accepted: \(2, 5, 8\)", (o, lse, o[:, :4], lse)),
        (r"lse2 is \(5, 2\) with o1 \(2, 5, 8\); accepted: \(2, 5\)", (o, lse, o, lse.T)),
        (r"o1 is \(8,\); accepted for layout 'BHSD': 2 or more axes", (o[0, 0], lse[0], o[0, 0], lse[0])),
    ):
        with pytest.raises(ValueError, match=match):
            merge_states(*arguments)
    with pytest.raises(ValueError, match=r"lse1 is \(2, 5\) with o1 \(2, 5, 8\); accepted: \(5, 2\)"):
        merge_states(o, lse, o, lse, layout="BSHD")
    with pytest.raises(ValueError, match="layout is 'SBHD'; accepted: 'BHSD' or 'BSHD'"):
        merge_states(o, lse, o, lse, layout="SBHD")
    with pytest.raises(ValueError, match=r"o1 is \(5, 8\); accepted for layout 'BSHD': 4 axes \(BSHD\) or 3 \(SHD\)"):
        merge_states(o[0], lse[0], o[0], lse[0], layout="BSHD")


def test_mixed_frameworks():
    torch = pytest.importorskip("torch")
    o, lse = np.zeros((2, 5, 8), np.float32), np.zeros((2, 5), np.float32)
    with pytest.raises(TypeError, match="o1 NumPy, lse1 PyTorch, o2 NumPy, lse2 NumPy; accepted: one framework"):
        merge_states(o, torch.from_numpy(lse), o, lse)
    tensors = [torch.from_numpy(x) for x in (o, lse, o, lse)]
    with pytest.raises(ValueError, match="o2 on meta, lse2 on cpu; accepted: one device"):
        merge_states(*tensors[:2], tensors[2].to("meta"), tensors[3])
