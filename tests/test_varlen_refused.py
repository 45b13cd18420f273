"""Packed sequences: what is refused, with its name, what came and what is accepted, before anything is written."""

from __future__ import annotations

import re

import numpy as np
import pytest

from s2o_cupy import s2o_attention_varlen
from s2o_cupy.problem import MAX_SEQLEN


@pytest.fixture
def call(device, packed):
    """call(**changes): two sequences of 10 and 20 queries, 15 and 25 keys, with arguments changed."""
    q, k, v = (device.array(x) for x in packed([10, 20], [15, 25]))
    usual = {"q": q, "k": k, "v": v, "cu_seqlens_q": [0, 10, 30], "cu_seqlens_k": [0, 15, 40]}
    return lambda **changes: s2o_attention_varlen(
        **(usual | {name: change(q) if callable(change) else change for name, change in changes.items()})
    )


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize(
    ("error", "given_", "message"),
    [
        (ValueError, [], "{} is empty; accepted: 0, then ascending to {total}"),
        (ValueError, [1, 15, "total"], "{} begins with 1; accepted: 0, then ascending"),
        (ValueError, [-1, 15, "total"], "{} begins with -1"),
        (ValueError, [0, "total", 12, "total"], "{} descends from {total} to 12 at sequence 1; accepted: 0, then"),
        (ValueError, [0, 15], "{} ends with 15; accepted: 0, then ascending to {total}, the rows of"),
        (ValueError, [0, 15, 1000], "{} ends with 1000; accepted: 0, then ascending to {total}"),
        (TypeError, [0, 15.0, "total"], "{}[1] is a float; accepted: a list or tuple of integers, or a"),
        (TypeError, [0, True, "total"], "{}[1] is a bool; accepted: a list"),
        (TypeError, "0, 10", "{} is a str; accepted: a list or tuple of integers, or a one-dimensional array of"),
        (TypeError, 30, "{} is a int; accepted: a list"),
        (TypeError, {0, 10, 30}, "{} is a set; accepted: a list"),
        (TypeError, np.array([0.0, 10.0]), "{} is float64; accepted: a list or tuple of integers, or a"),
        (TypeError, np.array([0, 10], np.uint8), "{} is uint8; accepted: a list"),
        (ValueError, np.array([[0, 10]]), "{} has shape (1, 2); accepted: (batch + 1,)"),
    ],
    ids=str,
)
def test_cu_seqlens_that_are_refused(call, name, error, given_, message):
    total = {"cu_seqlens_q": 30, "cu_seqlens_k": 40}[name]
    if isinstance(given_, list):
        given_ = [total if x == "total" else x for x in given_]
    with pytest.raises(error, match=re.escape("s2o_attention_varlen: " + message.format(name, total=total))):
        call(**{name: given_})


def test_exchanged_axes_are_meant_only_where_they_would_fit(call):
    hint = ". Did you mean q.swapaxes(0, 1)? Axes are (total_q, heads, head_dim)"
    for starts, change, asked in (
        ([0, 10, 30], lambda q: q.swapaxes(0, 1), True),
        ([0, 10, 29], lambda q: q.swapaxes(0, 1), False),
        ([0, 30, 12], lambda q: q.swapaxes(0, 1), False),
        ([0, 10, 29], lambda q: q, False),
        ([], lambda q: q, False),
    ):
        with pytest.raises(ValueError, match="cu_seqlens_q .*; accepted: 0, then ascending") as caught:
            call(q=change, cu_seqlens_q=starts)
        assert str(caught.value).endswith(hint) == asked, starts


def test_cu_seqlens_that_do_not_fit_together(call):
    with pytest.raises(ValueError, match=r"cu_seqlens_q has 3 entries, cu_seqlens_k 4; accepted: batch \+ 1 in both"):
        call(cu_seqlens_k=[0, 15, 40, 40])
    with pytest.raises(ValueError, match=r"cu_seqlens_k is None, but q has 30 rows and k 40; accepted: None only"):
        call(cu_seqlens_k=None)
    with pytest.raises(ValueError, match="sequence 1 has 20 queries and 12 keys; accepted .*bottom-right"):
        call(cu_seqlens_k=[0, 28, 40])
    call(cu_seqlens_k=[0, 28, 40], is_causal=False)


def test_the_longest_sequence():
    """One of more rows is refused for them, one of as many for what else is wrong."""
    for n, message in (
        (MAX_SEQLEN + 1, f"sequence 1 has {MAX_SEQLEN + 1} rows; accepted: up to {MAX_SEQLEN}"),
        (MAX_SEQLEN, f"sequence 1 has {MAX_SEQLEN} queries and 5 keys; accepted with is_causal=True"),
    ):
        q, k = (np.broadcast_to(np.zeros((1, 2, 64), np.float32), (rows, 2, 64)) for rows in (n + 1, 6))
        with pytest.raises(ValueError, match=message):
            s2o_attention_varlen(q, k, k, [0, 1, n + 1], [0, 1, 6])


def test_arrays_that_are_refused(call, device):
    for name, axes in (("q", "(total_q, heads, head_dim)"), ("k", "(total_k, kv_heads, head_dim)"), ("v", "(total_k")):
        message = f"{name} has 4 axes, shape (1, 30, 4, 64); accepted: 3 axes {axes}"
        with pytest.raises(ValueError, match=re.escape(message)):
            call(**{name: lambda q: q[None]})
    with pytest.raises(ValueError, match=re.escape("k is (40, 2, 64) and v is (30, 4, 64) as (total_k, kv_heads,")):
        call(v=lambda q: q)
    make = lambda *shape: device.array(np.zeros(shape))  # noqa: E731
    with pytest.raises(ValueError, match="q has 4 heads, k and v have 3; accepted: heads a multiple of kv_heads"):
        call(k=make(40, 3, 64), v=make(40, 3, 64))
    with pytest.raises(ValueError, match=r"so that q has the more of them$"):  # there is no other layout to mean
        call(q=make(30, 2, 64), k=make(40, 5, 64), v=make(40, 5, 64))
    with pytest.raises(ValueError, match="q has head_dim 64, k and v have 32; accepted: the same head_dim"):
        call(k=make(40, 2, 32), v=make(40, 2, 32))
    with pytest.raises(ValueError, match="head_dim is 257; accepted: 1 to 256"):
        call(q=make(30, 4, 257), k=make(40, 2, 257), v=make(40, 2, 257))
    other = np.float16 if device.dtype != np.float16 else np.float32
    with pytest.raises(TypeError, match=r"dtypes differ: q .*; accepted: one dtype"):
        call(q=lambda q: q.astype(other))
    with pytest.raises(TypeError, match="q is a list; accepted: NumPy, CuPy"):
        call(q=[1.0])


def test_options_that_are_refused(call):
    for error, match, options in (
        (ValueError, "scale is nan; accepted: a finite number", {"scale": float("nan")}),
        (ValueError, "softcap is -1; accepted: 0", {"softcap": -1}),
        (ValueError, "tau is -1; accepted: a number >= 0", {"tau": -1}),
        (TypeError, "is_causal is 1; accepted: True or False", {"is_causal": 1}),
        (TypeError, "config is a dict; accepted: S2OConfig or None", {"config": {}}),
        (ValueError, "backend is 'gpu'; accepted: 'auto', 'cupy', 'numpy'", {"backend": "gpu"}),
        (ValueError, r"out has shape \(29, 4, 64\); accepted: \(30, 4, 64\)", {"out": lambda q: q[:29].copy()}),
        (ValueError, "out and q overlap in memory", {"out": lambda q: q}),
    ):
        with pytest.raises(error, match=match):
            call(**options)


def test_a_stream_on_the_cpu(packed):
    with pytest.raises(ValueError, match="stream is given, but q, k and v are on the CPU"):
        s2o_attention_varlen(*packed([10], [10]), [0, 10], stream=0)


def test_a_refused_call_writes_nothing(device, packed):
    q, k, v = (device.array(x) for x in packed([10], [10]))
    out = device.poisoned(q.shape)
    with pytest.raises(ValueError, match="ends with 9"):
        s2o_attention_varlen(q, k, v, [0, 9], out=out)
    assert np.isnan(device.host(out)).all()
