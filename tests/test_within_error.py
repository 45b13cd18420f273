"""Attention whose error the caller names."""

import numpy as np
import pytest
from conftest import has_gpu

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.reference import dense_attention
from s2o_cupy.tools import attention_within, inputs

SMALL = S2OConfig(segment=64, block_m=64, block_n=32, unit=8)


def errors(o, q, k, v, **options):
    """rel_l2 of each head, [heads]."""
    exact = dense_attention(*(x.astype(np.float64) for x in (q, k, v)), is_causal=True, **options)[0]
    return np.linalg.norm(o - exact, axis=(2, 3))[0] / np.linalg.norm(exact, axis=(2, 3))[0]


@pytest.mark.parametrize("error", [0.02, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.01, 0.03))])
def test_each_head_keeps_to_the_error(error):
    """With all segments drawn the estimate is the error itself."""
    q, k, v = inputs.builtin("trace", length=1500, dtype="float32")
    o, taus = attention_within(q, k, v, error, config=SMALL, segments=1000)
    found = errors(o, q, k, v)
    assert (found <= error * (1 + 1e-4)).all()  # both sides in float32
    assert (found[(taus > 0) & (taus < 0.5)] > 0.3 * error).any()
    for h, tau in enumerate(taus):
        kv = slice(h // 2, h // 2 + 1)
        alone = s2o_attention(q[:, h : h + 1], k[:, kv], v[:, kv], tau=tau, config=SMALL)
        np.testing.assert_allclose(o[:, h : h + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_sample_comes_near_it():
    q, k, v = inputs.builtin("trace", length=2800, dtype="float32")
    o, _ = attention_within(q, k, v, 0.05, config=SMALL, segments=16)
    found = errors(o, q, k, v)
    assert (found < 1.5 * 0.05).all()


def test_dense_where_no_tau_keeps_to_it(qkv):
    q, k, v = qkv(300, heads=4, kv_heads=2, head_dim=16)
    o, taus = attention_within(q, k, v, 1e-6, config=SMALL, segments=1000, taus=[1000.0])
    assert (taus == 0).all()
    assert errors(o, q, k, v).max() < 1e-5  # float32 beside float64


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("batch", [1, 2])
def test_layouts_and_batches(qkv, layout, batch):
    q, k, v = qkv(300, heads=4, kv_heads=2, head_dim=16, batch=batch)
    given_as = [x.swapaxes(1, 2) if layout == "BSHD" else x for x in (q, k, v)]
    o, taus = attention_within(*given_as, 0.05, config=SMALL, segments=4, layout=layout)
    assert o.shape == given_as[0].shape and taus.shape == (4,)
    if batch == 1:
        flat, same = attention_within(*(x[0] for x in given_as), 0.05, config=SMALL, segments=4, layout=layout)
        np.testing.assert_array_equal(flat, o[0])
        np.testing.assert_array_equal(same, taus)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_frameworks(name, qkv):
    q, k, v = qkv(300, heads=4, kv_heads=2, head_dim=16)
    module = pytest.importorskip(name)
    of = module.from_numpy if name == "torch" else lambda x: module.device_put(x, module.devices("cpu")[0])
    o, taus = attention_within(*(of(x) for x in (q, k, v)), 0.05, config=SMALL, segments=4)
    expected, same = attention_within(q, k, v, 0.05, config=SMALL, segments=4)
    np.testing.assert_allclose(np.asarray(o), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(taus, same)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"error": 0}, "attention_within: error is 0; accepted: 0 < error < 1"),
        ({"error": 1}, "attention_within: error is 1; accepted: 0 < error < 1"),
        ({"error": "x"}, "attention_within: error is 'x'"),
        ({"error": 0.1, "taus": []}, "attention_within: taus is empty"),
        ({"error": 0.1, "taus": 3}, "attention_within: taus is 3"),
        ({"error": 0.1, "segments": 1}, "attention_within: segments is 1; accepted: an integer >= 2"),
    ],
)
def test_what_is_refused(qkv, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        attention_within(*qkv(100, heads=2, head_dim=8), **options)


def test_a_config_s_own_taus_are_not_looked_at(qkv):
    q, k, v = qkv(300, heads=4, kv_heads=2, head_dim=16)
    expected, taus = attention_within(q, k, v, 0.05, config=SMALL, segments=4)
    for config in (SMALL.with_tau((0.1, 0.2, 0.3)), SMALL.with_error(0.3)):
        o, same = attention_within(q, k, v, 0.05, config=config, segments=4)
        np.testing.assert_array_equal(o, expected)
        np.testing.assert_array_equal(same, taus)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_on_a_gpu(dtype):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).to("cuda", getattr(torch, dtype)) for x in inputs.builtin("trace", dtype="float32"))
    o, _ = attention_within(q, k, v, 0.1, config=S2OConfig(dense_up_to=0), segments=1000)
    found = errors(o.double().cpu().numpy(), *(x.double().cpu().numpy() for x in (q, k, v)))
    assert (found < 0.1 + 2.0**-7).all()  # two outputs, each rounded by up to 2^-8
