"""Arguments as other attention functions name them: the error says what is meant."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged, s2o_attention_varlen
from s2o_cupy.api import habits

X = np.zeros((1, 2, 8, 4), np.float32)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("causal", "did you mean is_causal?"),
        ("softmax_scale", "did you mean scale?"),
        ("sm_scale", "did you mean scale?"),
        ("attn_mask", "there is no mask but is_causal=; for padding pack the sequences: s2o_attention_varlen"),
        ("dropout_p", "there is no dropout, as S2O is for inference; leave it out"),
        ("enable_gqa", "leave it out: k and v may always have fewer heads than q"),
        ("alibi_slopes", "there is no bias on the scores"),
        ("window_size", r"flash_attn_func\(window_size=\) of s2o_cupy.integrations.drop_in"),
        ("return_attn_probs", "return_lse=True returns"),
        ("cu_seqlens_q", "packed sequences: s2o_attention_varlen"),
        ("block_table", "paged caches: s2o_attention_paged"),
        ("segment", r"it is a field of S2OConfig: config=S2OConfig\(segment=...\)"),
        ("retrun_lse", "did you mean return_lse?"),
        ("anything", "accepted: q, k, v, tau, config,"),
    ],
)
def test_names_of_others(name, hint):
    with pytest.raises(TypeError, match=rf"^s2o_attention: {name} is not an argument; .*{hint}"):
        s2o_attention(X, X, X, **{name: None})


def test_functions_for_other_arrays():
    packed = X[0].swapaxes(0, 1)
    with pytest.raises(TypeError, match="s2o_attention_varlen: max_seqlen_q is not an argument; leave it out"):
        s2o_attention_varlen(packed, packed, packed, [0, 8], max_seqlen_q=8)
    for name, meant in (("block_table", "page_table"), ("k_cache", "k_pages"), ("cache_seqlens", "seqlen_k")):
        with pytest.raises(TypeError, match=f"s2o_attention_paged: {name} is not an argument; did you mean {meant}"):
            s2o_attention_paged(X, **{name: X})


def test_arguments_without_a_name():
    with pytest.raises(TypeError, match="s2o_attention: 4 arguments come without a name; accepted: up to 3, the "
                       "others by name: tau, config,"):  # fmt: skip
        s2o_attention(X, X, X, None)


def test_functions_that_pass_other_names_on():
    """As a report passes a model's own inputs; what they need themselves is missed all the same."""

    @habits.answers_habits
    def function(model, ids, s2o=None, *, seed=0, **inputs):
        return model, ids, s2o, seed, inputs

    assert function(1, 2, 3, seed=4, attention_mask=5) == (1, 2, 3, 4, {"attention_mask": 5})
    with pytest.raises(TypeError, match="function: ids is missing; accepted: model, ids"):
        function(1, attention_mask=5)
    with pytest.raises(TypeError, match="function: 4 arguments come without a name; accepted: up to 3, .*: seed"):
        function(1, 2, 3, 4)


def test_an_error_of_what_a_function_does_stays():
    @habits.answers_habits
    def function(q, *, tau=None):
        return q + tau

    with pytest.raises(TypeError, match="unsupported operand"):
        function(1)
    with pytest.raises(TypeError, match="function: causal is not an argument") as caught:
        function("q", causal=True)
    assert caught.value.__suppress_context__


def test_hints_name_what_exists():
    known = set()
    for function in (s2o_attention, s2o_attention_varlen, s2o_attention_paged):
        known |= inspect.signature(function).parameters.keys()
    assert set(habits._SAME.values()) <= known
    # A name that a function has is no habit of others there, but may be in another one.
    assert not habits._SAME.keys() & known
    assert not (habits._SAME.keys() | habits._HINTS.keys()) & set(S2OConfig.__dataclass_fields__)


def test_arrays_that_lie_as_bshd():
    """Refused where nothing else can be meant, and with a warning where the shapes are possible."""
    q, k = np.zeros((1, 4096, 8, 4), np.float32), np.zeros((1, 4096, 2, 4), np.float32)
    with pytest.raises(ValueError, match="Did you mean layout='BSHD'"):
        s2o_attention(q, k, k)
    with pytest.warns(UserWarning, match="q has 4096 heads of 8 queries each; if .* layout='BSHD'"):
        s2o_attention(q, q, q)
    q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)  # and the other way round
    with pytest.raises(ValueError, match="Did you mean layout='BHSD'"):
        s2o_attention(q, k, k, layout="BSHD")
    with pytest.warns(UserWarning, match="q has 4096 heads of 8 queries each; if .* layout='BHSD'"):
        s2o_attention(q, q, q, layout="BSHD")
