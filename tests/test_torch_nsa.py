"""NSA for training: its gradients against autograd of attention that is dense and masked, in float64."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from conftest import has_gpu
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from nsa_cases import SMALL, draw

from s2o_cupy.nsa import NSAConfig, nsa_select, selected_attention, selected_attention_backward

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if has_gpu() else ["cpu"]
NAMES = ("q", "k", "v", "k_cmp", "v_cmp", "gates", "k_win", "v_win")


def dense(torch, q, k, v, k_cmp, v_cmp, gates, k_win, v_win, blocks, config, scale):
    """The definition, each branch under a mask of its own."""
    p = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]  # [Lq, 1]
    j, c = torch.arange(k.shape[2]), torch.arange(k_cmp.shape[2])
    group = q.shape[1] // k.shape[1]
    chosen = (blocks[..., None] == j // config.block).any(dim=3).repeat_interleave(group, dim=1)
    branches = (
        (k_cmp, v_cmp, c * config.stride + config.length - 1 <= p),
        (k, v, chosen & (j <= p)),
        (k_win, v_win, (j <= p) & (j > p - config.window)),
    )
    g = gates[:, None] if gates.ndim == 3 else gates
    o = 0
    for i, (keys, values, seen) in enumerate(branches):
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        s = (q @ keys.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
        o = o + g[..., i, None] * (torch.nan_to_num(torch.softmax(s, dim=-1)) @ values)
    return o


def tensors(torch, rng, dtype, lengths, *, per_head=True, own_window=False, device="cpu", config=SMALL, **shape):
    """Those of NAMES, as leaves; the last two None unless ``own_window``."""
    x, other = (draw(rng, np.float64, *lengths, config=config, **shape) for _ in range(2))
    gates = x.gates if per_head else x.gates[:, 0]
    arrays = [*x[:5], gates, *(other[1:3] if own_window else (None, None))]
    return [None if a is None else torch.from_numpy(a).to(device=device, dtype=dtype).requires_grad_() for a in arrays]


def assert_gradients(torch, rng, given, config, rtol, least=0.0, scale=None):
    """Within ``rtol`` of a gradient's largest entry, or of ``least``."""
    from s2o_cupy.integrations.nsa import nsa_attention

    q, k, v, k_cmp, v_cmp, gates, k_win, v_win = given
    o = nsa_attention(q, k, v, k_cmp, v_cmp, gates, config=config, k_win=k_win, v_win=v_win, scale=scale)
    do = torch.from_numpy(rng.standard_normal(tuple(o.shape))).to(o)
    leaves = [x for x in given if x is not None]
    found = torch.autograd.grad(o, leaves, do)
    blocks = nsa_select(q.detach(), k_cmp.detach(), seqlen_k=k.shape[2], config=config, scale=scale).cpu()
    wide = [None if x is None else x.detach().cpu().double().requires_grad_() for x in given]
    windows = wide[6:] if k_win is not None else wide[1:3]
    exact = dense(torch, *wide[:6], *windows, blocks, config, q.shape[-1] ** -0.5 if scale is None else scale)
    expected = torch.autograd.grad(exact, [x for x in wide if x is not None], do.cpu().double())
    torch.testing.assert_close(o.detach().cpu().double(), exact, rtol=rtol, atol=rtol)
    names = [name for name, x in zip(NAMES, given, strict=True) if x is not None]
    for name, x, y, of in zip(names, found, expected, leaves, strict=True):
        assert x.shape == of.shape and x.dtype == of.dtype, name
        largest = max(float(y.abs().max()) if y.numel() else 0, least)
        torch.testing.assert_close(x.cpu().double(), y, rtol=0, atol=rtol * largest, msg=name)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("own_window", [False, True])
def test_against_a_dense_mask(torch, rng, per_head, own_window):
    given = tensors(
        torch, rng, torch.float64, (90, 300), batch=2, per_head=per_head, own_window=own_window, head_dim=16
    )
    assert_gradients(torch, rng, given, SMALL, rtol=1e-12)  # float64 sums of some hundred terms


@pytest.mark.parametrize("scale", [-0.5, 0.0, 0.3])
def test_any_scale(torch, rng, scale):
    """From the first key on and behind others: compressed keys then have a mask."""
    for lengths in ((150, 150), (90, 300)):
        given = tensors(torch, rng, torch.float64, lengths, head_dim=16)
        assert_gradients(torch, rng, given, SMALL, rtol=1e-12, least=1.0, scale=scale)


def test_backward_inside_autocast(torch, rng):
    """As outside of it: sums stay float32."""
    from s2o_cupy.integrations.nsa import nsa_attention

    leaves = tensors(torch, rng, torch.float32, (90, 300), head_dim=16)[:6]
    o = nsa_attention(*leaves, config=SMALL)
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, leaves, do, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(o, leaves, do)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@drawn(
    seqlen_q=st.integers(1, 150), before=st.sampled_from([0, 0, 1, 7, 40]), window=st.integers(1, 200),
    of=st.sampled_from([(4, 4), (8, 4), (16, 8)]), turns=st.sampled_from([16, 1 << 17, 1 << 20]),
    group=st.sampled_from([1, 2]),
)  # fmt: skip
def test_any_lengths(seqlen_q, before, window, of, turns, group):
    """Windows longer than all keys, runs that begin before the first query, and one part of a branch at once."""
    torch, rng = pytest.importorskip("torch"), np.random.default_rng(seqlen_q)
    length, stride = of
    config = NSAConfig(16, 4, window=window, length=length, stride=stride, workspace_bytes=1 << 20)
    given = tensors(
        torch, rng, torch.float64, (seqlen_q, seqlen_q + before), heads=2 * group, kv_heads=2, head_dim=8,
        own_window=True, config=config,
    )  # fmt: skip
    with mock.patch("s2o_cupy.integrations.nsa.TURNS", turns):  # of one key terms of size 1 cancel
        assert_gradients(torch, rng, given, config, rtol=1e-12, least=1.0)


def test_short_sequences_have_no_compressed_keys(torch, rng):
    given = tensors(torch, rng, torch.float64, (20, 20), head_dim=8)
    assert_gradients(torch, rng, given, SMALL, rtol=1e-12)


@pytest.mark.parametrize(("batch", "lengths"), [(0, (64, 64)), (1, (0, 64)), (1, (0, 0))])
def test_without_queries_there_are_gradients_of_zeros(torch, rng, batch, lengths):
    from s2o_cupy.integrations.nsa import nsa_attention

    given = tensors(torch, rng, torch.float32, lengths, batch=batch, head_dim=8)[:6]
    found = torch.autograd.grad(nsa_attention(*given, config=SMALL).sum(), given)
    assert all(x.shape == of.shape and not x.any() for x, of in zip(found, given, strict=True))


def test_only_what_is_asked_for(torch, rng):
    from s2o_cupy.integrations.nsa import nsa_attention

    given = [x.detach() for x in tensors(torch, rng, torch.float32, (64, 64), head_dim=8)[:6]]
    assert not nsa_attention(*given, config=SMALL).requires_grad
    given[0].requires_grad_()
    nsa_attention(*given, config=SMALL).sum().backward()
    assert given[0].grad.abs().sum() > 0 and all(x.grad is None for x in given[1:])


def test_no_second_derivative(torch, rng):
    from s2o_cupy.integrations.nsa import nsa_attention

    given = tensors(torch, rng, torch.float32, (64, 64), head_dim=8)[:6]
    do = torch.ones_like(given[0], requires_grad=True)
    (gradient,) = torch.autograd.grad(nsa_attention(*given, config=SMALL), given[0], do, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("lse", np.zeros((1, 4, 64), np.float64), ValueError, "lse is float64 with shape .* accepted: float32 with"),
        ("do", np.zeros((1, 4, 63, 8), np.float32), ValueError, "do has shape .* accepted: .* as q"),
        ("blocks", np.zeros((1, 4, 64, 2), np.int32), ValueError, "blocks has shape .* the blocks of a token"),
    ],
)
def test_wrong_arguments(rng, name, value, error, message):
    q, do = rng.standard_normal((2, 1, 4, 64, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, 2, 64, 8)).astype(np.float32)
    blocks = np.zeros((1, 2, 64, 2), np.int32)
    o, lse = selected_attention(q, k, v, blocks, return_lse=True)
    given = {"q": q, "k": k, "v": v, "blocks": blocks, "o": o, "lse": lse, "do": do} | {name: value}
    with pytest.raises(error, match=message):
        selected_attention_backward(**given)


# ---------------------------------------------------------------- on a GPU

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("config", [SMALL, NSAConfig(block=128, top=4, window=300)], ids=["64", "128"])
@pytest.mark.parametrize("gpu", [pytest.param(True, marks=on_gpu)])
def test_on_a_gpu(torch, rng, dtype, group, config, gpu):
    given = tensors(
        torch, rng, getattr(torch, dtype), (500, 700), batch=2, heads=2 * group, head_dim=80 if group == 3 else 128,
        device="cuda", config=config,
    )  # fmt: skip
    # Eight units in the last place of the largest: o, do, P, dS and a branch's part are rounded to 16 bits on the way,
    # and each gradient sums products of two of these.
    assert_gradients(torch, rng, given, config, rtol=2.0**-6 if dtype == "bfloat16" else 2.0**-8)


@pytest.mark.parametrize("gpu", [pytest.param(True, marks=on_gpu)])
def test_rounds_and_repeats(torch, rng, gpu):
    """The same bits of calls that are repeated; of rounds, keys' gradients within float32's rounding."""
    q, k, v, *_ = (x.detach() for x in tensors(torch, rng, torch.bfloat16, (3000, 3000), heads=8, device="cuda")[:6])
    blocks = torch.from_numpy(np.stack([rng.permutation(47)[:5] for _ in range(6000)])).view(1, 2, 3000, 5).cuda()
    o, lse = selected_attention(q, k, v, blocks, return_lse=True)
    do = torch.randn_like(q)
    first = selected_attention_backward(q, k, v, blocks, o, lse, do)
    for _ in range(3):
        again = selected_attention_backward(q, k, v, blocks, o, lse, do)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    rounds = selected_attention_backward(q, k, v, blocks, o, lse, do, workspace_bytes=1 << 20)
    assert torch.equal(first[0], rounds[0])
    for x, y in zip(first[1:], rounds[1:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
