"""S2O behind the signatures of PyTorch's and flash-attn's functions: what those compute, at tau 0."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest
from conftest import SMALL

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

from s2o_cupy import s2o_attention  # noqa: E402
from s2o_cupy.integrations.drop_in import (  # noqa: E402
    flash_attn_func,
    flash_attn_varlen_func,
    scaled_dot_product_attention,
)

DENSE = replace(SMALL, segment=64, tau=0.0)
SPARSE = replace(SMALL, tau=0.5)
TORCH = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def tensors(qkv):
    """(batch, heads, seqlen, head_dim)"""
    return lambda *sizes, **options: tuple(torch.from_numpy(x) for x in qkv(*sizes, **options))


def assert_close(x, y):
    torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5)


def defaults(function):
    return {name: x.default for name, x in inspect.signature(function).parameters.items() if x.kind != x.KEYWORD_ONLY}


# ---------------------------------------------------------------- scaled_dot_product_attention


def test_the_signature_is_pytorchs():
    text = re.search(r"\((.*?)\) ->", TORCH.__doc__, re.DOTALL)[1]
    empty = inspect.Parameter.empty
    theirs = dict([*x.split("="), empty][:2] for x in re.split(r",\s*", text))
    ours = {name: x if x is empty else repr(x) for name, x in defaults(scaled_dot_product_attention).items()}
    assert list(ours.items()) == list(theirs.items())


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((100,), {}),
        ((100,), {"is_causal": True}),
        ((70, 100), {"scale": 0.3}),
        ((70, 100), {"is_causal": True}),  # top-left: the last 30 keys are not seen
        ((70, 100), {"attn_mask": causal_upper_left(70, 100)}),
        ((70, 100), {"attn_mask": causal_lower_right(70, 100)}),
        ((100, 70), {}),
    ],
)
def test_pytorchs_function(tensors, sizes, options):
    q, k, v = tensors(*sizes, batch=2, heads=4, kv_heads=4)
    assert_close(scaled_dot_product_attention(q, k, v, **options, config=DENSE), TORCH(q, k, v, **options))
    found = scaled_dot_product_attention(q[0], k[0], v[0], **options, tau=0)
    assert_close(found, TORCH(q[:1], k[:1], v[:1], **options)[0])
    q, k, v = tensors(*sizes, heads=4, kv_heads=2)
    found = scaled_dot_product_attention(q, k, v, **options, enable_gqa=True, config=DENSE)
    assert_close(found, TORCH(q, *(x.repeat_interleave(2, 1) for x in (k, v)), **options))


def test_it_is_s2o(tensors):
    q, k, v = tensors(300, heads=2, kv_heads=2)
    found = scaled_dot_product_attention(q, k, v, is_causal=True, config=SPARSE)
    assert torch.equal(found, s2o_attention(q, k, v, config=SPARSE))
    assert not torch.allclose(found, TORCH(q, k, v, is_causal=True), atol=1e-4)


def test_in_a_graph(tensors):
    q, k, v = tensors(100, heads=2, kv_heads=2)
    compiled = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, config=SPARSE), fullgraph=True,
        backend="eager",
    )  # fmt: skip
    assert torch.equal(compiled(q, k, v), s2o_attention(q, k, v, config=SPARSE))


def test_what_pytorchs_function_has_and_s2o_has_not(tensors):
    q, k, v = tensors(100, heads=4, kv_heads=2)
    mask = torch.ones(100, 100, dtype=torch.bool)
    for match, arrays, options in (
        ("attn_mask is a Tensor, and S2O takes no mask; accepted: None, is_causal", (q, q, q), {"attn_mask": mask}),
        ("attn_mask and is_causal=True came together", (q, q, q),
         {"attn_mask": causal_lower_right(100, 100), "is_causal": True}),
        ("attn_mask is for 9 queries and 100 keys; accepted: for 100 and 100", (q, q, q),
         {"attn_mask": causal_lower_right(9, 100)}),
        ("dropout_p is 0.1, and S2O is for inference; accepted: 0.0", (q, q, q), {"dropout_p": 0.1}),
        ("query has 4 heads, key has 2; accepted: as many, or enable_gqa=True", (q, k, v), {}),
        ("is_causal=True with 100 queries and 50 keys, aligned top-left", (q, q[:, :, :50], q[:, :, :50]),
         {"is_causal": True}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"scaled_dot_product_attention: {match}"):
            scaled_dot_product_attention(*arrays, **options)


# ---------------------------------------------------------------- flash_attn

# flash_attn 2.8, flash_attn/flash_attn_interface.py
FLASH = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip


def test_the_signatures_are_flash_attns():
    ours = defaults(flash_attn_func)
    assert list(ours) == ["q", "k", "v", *FLASH] and FLASH.items() <= ours.items()
    ours = defaults(flash_attn_varlen_func)
    packed = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert list(ours) == ["q", "k", "v", *packed, *FLASH, "block_table"] and FLASH.items() <= ours.items()


def exactly(q, k, v, causal, window, scale=None, softcap=0.0):
    """o and lse of (seqlen, heads, head_dim), by the definition in flash-attn's docstring."""
    (n, heads, _), (m, kv_heads, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    rows, columns = torch.arange(n)[:, None] + m - n, torch.arange(m)
    right = 0 if causal else window[1]
    if window[0] >= 0:
        s = s.masked_fill(columns < rows - window[0], -torch.inf)
    if right >= 0:
        s = s.masked_fill(columns > rows + right, -torch.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [(-1, -1), (1, 0), (20, -1), (63, 0), (64, 7), (500, 0), (-1, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attns_function(tensors, window, causal):
    if window[1] != 0 and window[0] >= 0 and not causal:
        pytest.skip("refused")
    q, k, v = (x.transpose(1, 2) for x in tensors(150, 200, batch=2, heads=4, kv_heads=2))
    found = flash_attn_func(
        q, k, v, softmax_scale=0.2, causal=causal, window_size=window, return_attn_probs=True, config=DENSE
    )
    assert len(found) == 3 and found[2] is None
    for row in range(2):
        o, lse = exactly(q[row], k[row], v[row], causal, window, scale=0.2)
        assert_close(found[0][row], o)
        assert_close(found[1][row], lse)
    o = flash_attn_func(q, k, v, 0.0, 0.2, causal, window, deterministic=True, tau=0)
    assert_close(o, found[0])


@pytest.mark.parametrize("window", [(-1, -1), (20, 0)])
def test_capped_scores(tensors, packed, window):
    """Of a call with the window's two calls, and of one without."""
    q, k, v = (x.transpose(1, 2) for x in tensors(90, 120, heads=4, kv_heads=2))
    options = {"softmax_scale": 1.0, "causal": True, "window_size": window, "softcap": 2.0, "config": DENSE}
    exact = exactly(q[0], k[0], v[0], True, window, scale=1.0, softcap=2.0)
    found = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert_close(found[0][0], exact[0])
    assert_close(found[1][0], exact[1])
    assert_close(flash_attn_varlen_func(q[0], k[0], v[0], [0, 90], [0, 120], **options), exact[0])


@pytest.mark.parametrize("window", [(-1, -1), (20, 0)])
@pytest.mark.parametrize("kind", ["lists", "tensors"])
def test_flash_attns_function_for_packed_sequences(packed, window, kind):
    """The second sequence has no query."""
    starts_q, starts_k = [0, 90, 90, 100], [0, 90, 120, 200]
    q, k, v = (torch.from_numpy(x) for x in packed([100], [200]))
    starts = (starts_q, starts_k) if kind == "lists" else map(torch.tensor, (starts_q, starts_k))
    o, lse, _ = flash_attn_varlen_func(
        q, k, v, *starts, 90, 90, causal=True, window_size=window, return_attn_probs=True, config=DENSE
    )
    for i in (0, 2):
        rows, keys = (slice(*x[i : i + 2]) for x in (starts_q, starts_k))
        exact = exactly(q[rows], k[keys], v[keys], True, window)
        assert_close(o[rows], exact[0])
        assert_close(lse[:, rows], exact[1])
    empty = flash_attn_varlen_func(q[:0], k, v, [0, 0], [0, 200], causal=True, window_size=window)
    assert empty.shape == (0, 4, q.shape[-1])


def test_what_flash_attn_has_and_s2o_has_not(tensors):
    q, k, v = (x.transpose(1, 2) for x in tensors(50, heads=2))
    varlen = (q[0], k[0], v[0], [0, 50], [0, 50], 50, 50)
    for match, options in (
        ("dropout_p is 0.1", {"dropout_p": 0.1}),
        ("alibi_slopes is a Tensor, and S2O adds no bias; accepted: None", {"alibi_slopes": torch.ones(2)}),
        (r"window_size is \(3, 3\) with causal=False; accepted: \(-1, -1\), or with", {"window_size": (3, 3)}),
        (r"window_size is \(-1, 3\) with causal=False", {"window_size": (-1, 3)}),
        (r"window_size is \(0, 0\) with causal=True", {"window_size": (0, 0)}),
    ):
        for function, arrays in ((flash_attn_func, (q, k, v)), (flash_attn_varlen_func, varlen)):
            with pytest.raises(ValueError, match=f"{function.__name__}: {match}"):
                function(*arrays, **options)
    for window in (7, None, (1, 2, 3), (0.5, 0)):
        with pytest.raises(TypeError, match=r"window_size is .*; accepted: \(left, right\), integers"):
            flash_attn_func(q, k, v, causal=True, window_size=window)
    with pytest.raises(ValueError, match=r"block_table is a Tensor; accepted: None \(for paged.*s2o_attention_paged"):
        flash_attn_varlen_func(*varlen, block_table=torch.zeros(1, 1))


def test_windows_under_autocast(tensors):
    """Tensors are cast as those of other calls are, before their dtypes are compared."""
    q, k, v = (x.transpose(1, 2) for x in tensors(50, heads=2))
    mixed = q.float(), k.bfloat16(), v.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        o = flash_attn_func(*mixed, causal=True, window_size=(5, 0))
    expected = flash_attn_func(*(x.bfloat16() for x in mixed), causal=True, window_size=(5, 0))
    assert torch.equal(o, expected)


def test_shapes_are_checked_before_windows(tensors):
    q, k, v = (x.transpose(1, 2) for x in tensors(50, heads=2, batch=2))
    options = {"causal": True, "window_size": (5, 0)}
    with pytest.raises(ValueError, match="seqlen_q 50 exceeds seqlen_k 40"):
        flash_attn_func(q, k[:, :40], v[:, :40], **options)
    with pytest.raises(ValueError, match="q has batch 2, k and v have 1"):
        flash_attn_func(q, k[:1], v[:1], **options)
    with pytest.raises(ValueError, match=r"q has 3 axes; accepted with window_size: \(batch, seqlen, heads"):
        flash_attn_func(q[0], k[0], v[0], **options)
    with pytest.raises(TypeError, match="config is a dict"):
        flash_attn_func(q, k, v, **options, config={})
    with pytest.raises(ValueError, match="flash_attn_varlen_func: sequence 0 has 50 queries and 40 keys"):
        flash_attn_varlen_func(q[0], k[0], v[0], [0, 50, 50], [0, 40, 50], **options)
    with pytest.raises(ValueError, match="flash_attn_varlen_func: cu_seqlens_q"):
        flash_attn_varlen_func(q[0], k[0], v[0], [0, 40], [0, 50], **options)
