"""BLASST: the blocks that its rule leaves out, one after the other as its kernel goes, and attention to the others."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import has_gpu
from gpu_rounding import UNIT, allowed_error
from hypothesis import given
from hypothesis import strategies as st
from schedules import FRAMEWORKS, masked_attention, meant

from s2o_cupy.methods import BLASSTConfig, select, sparse_attention
from s2o_cupy.reference.methods.blasst import attended
from s2o_cupy.tools import compare
from s2o_cupy.tools.comparing import parse_method

THRESHOLDS = (0.0, 1e-3, 0.05, 0.3, 1.0)


def drawn(seqlen_q, seqlen_k, seed, dtype=np.float64):
    """q, k and v of 4 heads, 2 KV heads, whose blocks differ by nats, so that thresholds leave some of them out."""
    rng = np.random.default_rng(seed)
    q = 2 + rng.standard_normal((1, 4, seqlen_q, 16))
    k, v = rng.standard_normal((2, 1, 2, seqlen_k, 16))
    return tuple(x.astype(dtype) for x in (q, k + rng.standard_normal((1, 2, seqlen_k, 1)).cumsum(2) / 8, v))


@given(
    st.integers(1, 400), st.integers(0, 300), st.sampled_from(THRESHOLDS), st.sampled_from((64, 128)),
    st.sampled_from((64, 128)), st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_the_rule(seqlen_q, more, threshold, block, block_m, is_causal, seed):
    """In float64 the reference's mask, as no two blocks are so alike that rounding decides; and dense attention under
    it."""
    q, k, v = drawn(seqlen_q, seqlen_q + more, seed)
    config = BLASSTConfig(threshold=threshold, block=block, block_m=block_m, workspace_bytes=1 << 20)
    mask = attended(q, k, config, is_causal, 0.25)
    assert np.array_equal(meant(select(q, k, config, is_causal=is_causal), 1, 4), mask)
    o, lse = sparse_attention(q, k, v, config=config, is_causal=is_causal, return_lse=True)
    exact, of_rows = masked_attention(q, k, v, mask)
    np.testing.assert_allclose(o, exact, atol=1e-12)
    np.testing.assert_allclose(lse, of_rows, rtol=2**-23, atol=2**-20)  # a float32, and exp of scores up to 16


def test_a_larger_threshold_leaves_out_more():
    q, k, v = drawn(700, 900, 0)
    rows = compare(q, k, v, [BLASSTConfig(threshold=x) for x in THRESHOLDS], repeats=1).rows
    densities, errors = ([getattr(row, name) for row in rows] for name in ("pooled_density", "pooled_error"))
    assert densities[0] == 1 and errors[0] < 1e-6  # a threshold of 0 is dense attention
    assert densities[1:] == sorted(densities[1:], reverse=True) and densities[-1] < 0.8
    assert errors[-1] > 1e-3


def test_by_hand():
    """Scores of one row whose blocks have the maxima 0, 5, 1, 3, 6 and, of a short last one, -1. Of ln(threshold) = -3
    the third is left out, 4 below the second, and the last, 7 below the fifth; a tile of two rows keeps them where the
    other row does."""
    k = np.full((1, 1, 5 * 64 + 10, 2), -9.0)
    k[0, 0, 5::64, 0] = 0, 5, 1, 3, 6, -1
    k[..., 1] = 1
    q = np.array([[1.0, 0.0]])[None, None]
    config = BLASSTConfig(threshold=np.exp(-3), block=64)
    listed = lambda q: meant(select(q, k, config, is_causal=False, scale=1.0), 1, 1)[0, 0, 0, ::64].tolist()  # noqa: E731
    assert listed(q) == [True, True, False, True, True, False]
    other = np.array([[0.0, 1.0]])[None, None]  # to which all keys are alike
    assert listed(np.concatenate((q, other), axis=2)) == [True] * 6


def test_a_scale_factor_is_over_the_number_of_keys():
    q, k, _ = drawn(300, 700, 1)
    both = BLASSTConfig(scale_factor=70), BLASSTConfig(threshold=0.1)
    of_server, plain = (meant(select(q, k, config), 1, 4) for config in both)
    assert np.array_equal(of_server, plain) and plain.sum() < 4 * np.tri(300, 700, 400).sum()
    assert BLASSTConfig(scale_factor=1000).threshold_of(500) == 1
    assert parse_method("blasst", "--method") == BLASSTConfig(scale_factor=1000)
    assert parse_method("blasst:threshold=0.1", "--method") == BLASSTConfig(threshold=0.1)


def test_what_is_not_finite_is_kept():
    q, k, _ = drawn(300, 700, 1)
    k[0, 0, 5] = np.nan  # of the first block of KV head 0: of every running maximum after it
    mask = meant(select(q, k, BLASSTConfig(threshold=1)), 1, 4)[0]
    assert mask[0].sum() == np.tri(300, 700, 400).sum() > mask[2].sum()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(name):
    framework, host = FRAMEWORKS[name](), drawn(128, 384, 2, np.float32)
    config = BLASSTConfig(threshold=1)
    o = sparse_attention(*map(framework.array, host), config=config)
    assert isinstance(o, framework.kind)
    exact, stats = sparse_attention(*host, config=config, return_stats=True)
    np.testing.assert_allclose(np.asarray(o), exact, atol=1e-6)
    assert stats.density < 1


def test_half_precision_is_scored_in_float32():
    """3.25 below 256, which bfloat16 has as 3 below it, is below ln(threshold) = -3.1."""
    torch = pytest.importorskip("torch")
    k = torch.zeros(1, 1, 128, 2, dtype=torch.bfloat16)
    k[..., 0], k[:, :, 64:, 1] = 16, -3.25
    q = torch.tensor([16.0, 1.0], dtype=torch.bfloat16)[None, None, None]
    schedule = select(q, k, BLASSTConfig(threshold=np.exp(-3.1), block=64), is_causal=False, scale=1.0)
    assert meant(schedule, 1, 1)[0, 0, 0, ::64].tolist() == [True, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "BLASSTConfig: neither threshold nor scale_factor is given; accepted: threshold or scale_factor"),
        ({"threshold": 0.1, "scale_factor": 3}, "BLASSTConfig: both are given; accepted: threshold or scale_factor"),
        ({"scale_factor": -1}, "BLASSTConfig: scale_factor is -1; accepted: 0 or more"),
        ({"threshold": -0.1}, "BLASSTConfig: threshold is -0.1; accepted: a number from 0 to 1"),
        ({"threshold": 1.1}, "BLASSTConfig: threshold is 1.1; accepted: a number from 0 to 1"),
        ({"threshold": "x"}, "BLASSTConfig: threshold is 'x'"),
        ({"threshold": 0.1, "block": 32}, "BLASSTConfig: block is 32; accepted: 64 or 128"),
        ({"threshold": 0.1, "block_m": 256}, "BLASSTConfig: block_m is 256; accepted: 64 or 128"),
        ({"threshold": 0.1, "workspace_bytes": 3}, "BLASSTConfig: workspace_bytes is 3"),
        ({"lambda_": 0.1}, "lambda_"),
    ],
)
def test_refused(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        BLASSTConfig(**fields)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
@pytest.mark.parametrize("block_m", [64, 128])
def test_on_a_gpu(path, block_m):
    import cupy

    host = drawn(700, 900, 4, np.float16)
    config = BLASSTConfig(threshold=0.05, block_m=block_m)
    mask = attended(*(x.astype(np.float64) for x in host[:2]), config, True, 0.25)
    q, k, v = map(cupy.asarray, host)
    schedule = select(q, k, config)
    schedule.check()
    assert (meant(schedule, 1, 4) != mask).mean() < 0.01  # where rounding decides
    exact, _ = masked_attention(*host, meant(schedule, 1, 4))
    weight, _ = masked_attention(*host[:2], np.abs(host[2]), meant(schedule, 1, 4))
    # The dense part is a launch of its own, which rounds once more: an output is of at most its weight.
    allowed = allowed_error("float16", weight, *host[:2]) + weight * UNIT["float16"]
    o = sparse_attention(q, k, v, config=config).get()
    assert (np.abs(o.astype(np.float64) - exact) <= allowed).all()
