"""NSA's public functions on the CPU, and what all backends refuse."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from nsa_cases import SMALL, draw

from s2o_cupy.nsa import NSAConfig, nsa_attention, nsa_compress, nsa_select, selected_attention, window_attention
from s2o_cupy.reference.dense import dense_attention
from s2o_cupy.reference.nsa import forward as nsa


@pytest.fixture
def x(rng):
    return draw(rng, np.float64, 300, batch=2, head_dim=16)


def test_it_is_the_sum_of_its_parts(x):
    blocks = nsa_select(x.q, x.k_cmp, config=SMALL)
    o_cmp, _ = nsa.compressed(x.q, x.k_cmp, x.v_cmp, 300, length=32, stride=16)
    parts = [o_cmp, selected_attention(*x[:3], blocks), window_attention(*x[:3], SMALL.window)]
    o = nsa_attention(*x, config=SMALL)
    np.testing.assert_allclose(o, nsa.gate(x.gates, *parts), rtol=1e-12, atol=1e-12)
    assert o.dtype == np.float64 and blocks.dtype == np.int32


@pytest.mark.parametrize("lengths", [(300, 300), (70, 300)])
def test_everything_chosen_is_dense_attention(rng, lengths):
    x = draw(rng, np.float64, *lengths, head_dim=16)
    exact, exact_lse = dense_attention(*x[:3])
    everything = NSAConfig(top=5, window=300)
    for branch in (1, 2):
        x.gates[:] = np.eye(3)[branch]
        np.testing.assert_allclose(nsa_attention(*x, config=everything), exact, atol=1e-12)
    o, lse = window_attention(*x[:3], 1, 300, return_lse=True)
    np.testing.assert_allclose(o, exact, atol=1e-12)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-6)  # float32
    blocks = np.tile(np.arange(5), (1, 2, lengths[0], 1))
    np.testing.assert_allclose(selected_attention(*x[:3], blocks), exact, atol=1e-12)


def test_runs_of_one_token_are_dense_attention(x):
    x.gates[:] = [1, 0, 0]
    config = NSAConfig(length=1, stride=1)
    x = x._replace(k_cmp=nsa_compress(x.k, 1, 1), v_cmp=nsa_compress(x.v, 1, 1))
    np.testing.assert_allclose(nsa_attention(*x, config=config), dense_attention(*x[:3])[0], atol=1e-12)


@pytest.mark.parametrize("per_head", [False, True])
def test_layouts(x, per_head):
    gates = x.gates if per_head else x.gates[:, 0]
    expected = nsa_attention(*x[:5], gates, config=SMALL)
    swapped = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in x[:5]]
    of_gates = gates.swapaxes(1, 2) if per_head else gates
    o = nsa_attention(*swapped, of_gates, config=SMALL, layout="BSHD")
    np.testing.assert_array_equal(o.swapaxes(1, 2), expected)
    blocks = nsa_select(swapped[0], swapped[3], config=SMALL, layout="BSHD")
    np.testing.assert_array_equal(blocks, nsa_select(x.q, x.k_cmp, config=SMALL))
    for found, of_bhsd in (
        (selected_attention(*swapped[:3], blocks, layout="BSHD", return_lse=True),
         selected_attention(*x[:3], blocks, return_lse=True)),
        (window_attention(*swapped[:3], 40, layout="BSHD", return_lse=True),
         window_attention(*x[:3], 40, return_lse=True)),
    ):  # fmt: skip
        np.testing.assert_array_equal(found[0].swapaxes(1, 2), of_bhsd[0])
        np.testing.assert_array_equal(found[1], of_bhsd[1])


def test_keys_of_the_window(x, rng):
    x.gates[:] = [0, 0, 1]
    k, v = rng.standard_normal((2, *x.k.shape))
    o = nsa_attention(*x, config=SMALL, k_win=k, v_win=v)
    np.testing.assert_array_equal(o, window_attention(x.q, k, v, SMALL.window))


def test_an_output_of_the_caller(x):
    out = np.full(x.q.shape, np.nan)
    assert nsa_attention(*x, config=SMALL, out=out) is out
    np.testing.assert_array_equal(out, nsa_attention(*x, config=SMALL))


def test_a_scale(x):
    o = nsa_attention(*x, config=SMALL, scale=0.5)
    doubled = nsa_attention(x.q * 2, *x[1:], config=SMALL)  # 0.25 is the default
    np.testing.assert_allclose(o, doubled, atol=1e-12)


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_without_anything_to_compute(empty):
    shape = {"batch": (0, 2, 10, 16), "queries": (1, 2, 0, 16), "keys": (1, 2, 0, 16)}[empty]
    q = np.ones((1, 2, 0, 16) if empty == "keys" else shape)
    k = np.ones(shape)
    gates = np.ones((*q.shape[:3], 3))
    compressed = nsa_compress(k)
    assert nsa_attention(q, k, k, compressed, compressed, gates).shape == q.shape
    assert nsa_select(q, compressed, seqlen_k=k.shape[2]).shape == (q.shape[0], 2, q.shape[2], 16)


# ---------------------------------------------------------------- compressed keys


@pytest.mark.parametrize("runs", [(32, 16), (16, 16), (8, 2), (1, 1)])
@pytest.mark.parametrize("seqlen", [0, 7, 32, 100])
def test_means(rng, runs, seqlen):
    x = rng.standard_normal((2, 3, seqlen, 8))
    found = nsa_compress(x, *runs)
    np.testing.assert_allclose(found, nsa.compress(x, *runs), atol=1e-14)
    swapped = nsa_compress(x.swapaxes(1, 2), *runs, layout="BSHD")
    np.testing.assert_array_equal(swapped.swapaxes(1, 2), found)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_means_are_added_up_in_float32(rng, dtype):
    x = (rng.standard_normal((1, 1, 64, 8)) + 100).astype(dtype)
    found = nsa_compress(x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, nsa.compress(x.astype(np.float32), 32, 16).astype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torch_tensors(x, torch, dtype):
    """The same as NumPy arrays, and means with a derivative."""
    q, k, v, _, _, gates = (torch.from_numpy(np.asarray(a)).to(getattr(torch, dtype)) for a in x)
    o = nsa_attention(q, k, v, nsa_compress(k), nsa_compress(v), gates, config=SMALL)
    assert o.dtype == q.dtype
    arrays = [a.to(torch.float64).numpy().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
              for a in (q, k, v, gates)]  # fmt: skip
    expected = nsa_attention(*arrays[:3], nsa_compress(arrays[1]), nsa_compress(arrays[2]), arrays[3], config=SMALL)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(o.to(torch.float64).numpy(), expected.astype(np.float64), atol=tolerance)
    k = torch.ones(1, 1, 48, 2, requires_grad=True)
    nsa_compress(k)[:, :, 1].sum().backward()
    np.testing.assert_allclose(k.grad[0, 0, :, 0], [0] * 16 + [1 / 32] * 32)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"top": 0}, ValueError, "top is 0; accepted: an integer >= 1"),
        ({"local": 0}, ValueError, "local is 0; accepted: an integer >= 1"),
        ({"window": 1.5}, TypeError, r"window is 1.5 \(float\); accepted: an integer >= 1"),
        ({"block": True}, TypeError, "block is True"),
        ({"length": 40}, ValueError, "length is 40 with stride 16; accepted: a multiple of it"),
        ({"block": 100}, ValueError, "block is 100 with stride 16; accepted: a multiple of it"),
        ({"top": 2}, ValueError, "top is 2 with first 1 and local 2; accepted: no fewer than those two together"),
        ({"blocks": 64}, TypeError, "blocks is not a field; did you mean block"),
        ({"path": "fast"}, ValueError, "path is 'fast'; accepted: 'auto'"),
        ({"workspace_bytes": 1000}, ValueError, "workspace_bytes is 1000; accepted: an integer >= 1048576"),
    ],
)
def test_a_configuration_that_cannot_be(fields, error, message):
    with pytest.raises(error, match=f"NSAConfig: {message}"):
        NSAConfig(**fields)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": 3}, TypeError, "nsa_attention: config is a int; accepted: NSAConfig or None"),
        ({"k_cmp": "short"}, ValueError, r"k_cmp has shape \(2, 2, 16, 16\); accepted: \(2, 2, 17, 16\)"),
        ({"v_cmp": "float32"}, TypeError, "v_cmp is float32; accepted: float64, the dtype of q"),
        ({"gates": "short"}, ValueError, r"gates has shape .*; accepted: \(2, 300, 3\) or \(2, 4, 300, 3\)"),
        ({"gates": "int32"}, TypeError, "gates is int32; accepted: float32 or float64, the dtype of q"),
        ({"k_win": "same"}, TypeError, "v_win is missing; accepted: both of k_win and v_win, or neither"),
        ({"k_win": "short", "v_win": "same"}, ValueError, r"k_win has shape .*; accepted: \(2, 2, 300, 16\), as k"),
        ({"layout": "HND"}, ValueError, "nsa_attention: layout is 'HND'; accepted: 'BHSD' or 'BSHD'"),
        ({"q": "rows"}, ValueError, r"nsa_attention: q has shape \(4, 300, 16\); accepted: 4 axes \(BHSD\)"),
    ],
)
def test_arguments_that_are_refused(x, change, error, message):
    """``short``: an element less on the axis of tokens, or of gates' heads."""
    given = {**x._asdict(), "config": SMALL}
    for name, what in change.items():
        source = given.get(name, x.k)
        if what == "short":
            given[name] = source[:, :, :-1]
        elif what == "rows":
            given[name] = source[0]
        elif what in ("float32", "int32"):
            given[name] = source.astype(what)
        else:
            given[name] = source if what == "same" else what
    with pytest.raises(error, match=message):
        nsa_attention(**given)


def test_blocks_that_are_refused(x):
    blocks = nsa_select(x.q, x.k_cmp, config=SMALL)
    with pytest.raises(TypeError, match="blocks is float64; accepted: int32 or int64"):
        selected_attention(*x[:3], blocks.astype(float))
    with pytest.raises(ValueError, match=r"blocks has shape \(2, 1, 300, 5\); accepted: \(2, 2, 300\)"):
        selected_attention(*x[:3], blocks[:, :1])
    blocks[0, 0, 10, 4] = 5
    with pytest.raises(ValueError, match="blocks has 5; accepted: up to 4, the last block"):
        selected_attention(*x[:3], blocks)


def test_integers_of_numpy(x):
    sinks, seqlen_k = np.int64(4), np.int64(x.k.shape[2])
    window = window_attention(*x[:3], np.int32(40), sinks)
    np.testing.assert_array_equal(window, window_attention(*x[:3], 40, 4))
    of_all = window_attention(*x[:3], x.k.shape[2])
    np.testing.assert_array_equal(window_attention(*x[:3], 2**70), of_all)  # beyond 64 bits
    everything = [nsa_attention(*x, config=replace(SMALL, window=window)) for window in (x.k.shape[2], 2**70)]
    np.testing.assert_array_equal(*everything)
    blocks = nsa_select(x.q, x.k_cmp, seqlen_k=seqlen_k, config=SMALL)
    np.testing.assert_array_equal(blocks, nsa_select(x.q, x.k_cmp, config=SMALL))


def test_other_arguments_that_are_refused(x):
    with pytest.raises(ValueError, match="window_attention: sinks is -1; accepted: an integer >= 0"):
        window_attention(*x[:3], 10, -1)
    with pytest.raises(TypeError, match=r"window_attention: sinks is 1.5 \(float\); accepted: an integer >= 0"):
        window_attention(*x[:3], 10, 1.5)
    with pytest.raises(ValueError, match="window_attention: window is 0; accepted: an integer >= 1"):
        window_attention(*x[:3], 0)
    blocks = nsa_select(x.q, x.k_cmp, config=SMALL)
    with pytest.raises(ValueError, match="selected_attention: block is 0; accepted: an integer >= 1"):
        selected_attention(*x[:3], blocks, 0)
    with pytest.raises(ValueError, match="selected_attention: workspace_bytes is 5; accepted: an integer >= 1048576"):
        selected_attention(*x[:3], blocks, workspace_bytes=5)
    with pytest.raises(TypeError, match="nsa_select: seqlen_k is True"):
        nsa_select(x.q, x.k_cmp, seqlen_k=True)
    with pytest.raises(ValueError, match=r"k_cmp has shape .* of seqlen_k 100"):
        nsa_select(x.q[:, :, :50], x.k_cmp, seqlen_k=100)
    with pytest.raises(TypeError, match="x is int64; accepted: float16, bfloat16, float32 or float64"):
        nsa_compress(np.ones((1, 1, 40, 8), np.int64))
    with pytest.raises(TypeError, match="^nsa_compress: x is a str; accepted: NumPy"):
        nsa_compress("keys")
    for shape in ((40, 8), (2, 40, 8), (1, 1, 2, 40, 8)):
        message = f"nsa_compress: x has shape {shape}; accepted: 4 axes (BSHD)"
        with pytest.raises(ValueError, match=re.escape(message)):
            nsa_compress(np.ones(shape), layout="BSHD")
