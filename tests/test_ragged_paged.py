"""Queries of any number for each sequence over a paged cache, in one call: the bits of a call for each sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import SMALL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packs import LENGTHS, starts
from pretended import pretend_gpu
from ragged_pages import differing, in_pages

from s2o_cupy import s2o_attention_paged
from s2o_cupy.arrays.frameworks.numpy import NumpyFramework


def assert_the_loop(*arguments: Any, **options: Any) -> None:
    assert differing(*arguments, **options) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dense_up_to", [0, 200, 1000], ids=["ordered", "both", "dense"])
def test_the_bits_of_the_loop(device, packed, rng, is_causal, page_size, layout, dense_up_to):
    lengths = LENGTHS[is_causal]
    config = replace(device.config, dense_up_to=dense_up_to)
    assert_the_loop(device, rng, packed(*lengths), *lengths, page_size, layout, config=config, is_causal=is_causal)


@pytest.mark.parametrize("head_dim", [72, 128, 256])
@pytest.mark.parametrize("dense_up_to", [0, 1000])
def test_head_dims(device, packed, rng, head_dim, dense_up_to):
    lengths = [65, 300, 1], [130, 300, 40]
    config = replace(device.config, dense_up_to=dense_up_to)
    assert_the_loop(device, rng, packed(*lengths, head_dim=head_dim), *lengths, 16, "NHD", config=config)


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 3.0}, {"tau": 0}, {"scale": -0.2}])
def test_options(device, packed, rng, options):
    lengths = [65, 300, 1], [130, 300, 40]
    assert_the_loop(device, rng, packed(*lengths), *lengths, 16, "HND", **options)


def test_sequences_without_queries_or_keys(device, packed, rng):
    """Such as slots of a server's batch that nobody uses: o = 0 and lse = -inf where there are rows without keys."""
    lengths = [0, 130, 0, 40], [200, 130, 0, 0]
    assert_the_loop(device, rng, packed(*lengths), *lengths, 16, "NHD", is_causal=False)
    lengths = [0, 0], [20, 0]
    assert_the_loop(device, rng, packed(*lengths), *lengths, 16, "NHD")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 90)), max_size=4), st.sampled_from([1, 8, 32]))
def test_any_lengths(packed, rng, lengths, page_size):
    from conftest import DEVICES

    lengths_q, lengths_k = [q for q, _ in lengths], [q + more for q, more in lengths]
    arrays = packed(lengths_q, lengths_k, head_dim=8)
    if lengths:
        assert_the_loop(DEVICES["cpu"], rng, arrays, lengths_q, lengths_k, page_size, "NHD")


def test_one_call_for_all_that_are_long(monkeypatch, packed, rng):
    """What the GPU gets: the caller's rows where they lie, each sequence with its own row of the page table."""
    recorded: list[Any] = []

    def run_in_turn(calls, config, *, lse_stride, stream, memory):
        assert lse_stride == 430
        recorded.append(calls)
        return [type("Plan", (), {"path": "portable", "path_reason": None, "graphs": "launched"})] * len(calls)

    pretend_gpu(monkeypatch, run_in_turn=run_in_turn)
    lengths_q, lengths_k = [300, 0, 130], [300, 50, 200]
    q, k, _ = (x.astype(np.float16) for x in packed(lengths_q, lengths_k))
    table, put = in_pages(rng, k, lengths_k, 16, "NHD")
    cache = put(k)
    s2o_attention_paged(
        q, cache, cache, table, seqlen_k=np.array(lengths_k), cu_seqlens_q=np.array(starts(lengths_q)), return_lse=True,
        config=replace(SMALL, dense_up_to=0),
    )  # fmt: skip
    ((first, second),) = recorded
    at = lambda x: x.__array_interface__["data"][0]  # noqa: E731
    for (operands, lse, visited, problem, paging), i, begin in ((first, 0, 0), (second, 2, 300)):
        assert [x.pointer for x in operands[:3]] == [at(q[begin:]), at(cache), at(cache)]
        assert operands[0].shape == (1, 4, lengths_q[i], 64)
        assert paging == (at(table[i:]), 0, 16, len(cache), None)
        assert (problem.seqlen_q, problem.seqlen_k) == (lengths_q[i], lengths_k[i])
        assert lse - first[1] == 4 * begin
        assert visited == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": [0, 30]}, r"cu_seqlens_q has 2 entries with 2 sequences in page_table; accepted: .*3"),
        ({"cu_seqlens_q": [0, 10, 31]}, r"cu_seqlens_q ends with 31; accepted: 0, then ascending to 30, the rows of q"),
        ({"cu_seqlens_q": [0, 31, 30]}, r"cu_seqlens_q descends from 31 to 30 at sequence 1"),
        ({"cu_seqlens_q": [1, 2, 30]}, r"cu_seqlens_q begins with 1; accepted: 0, then"),
        ({"seqlen_k": [20, 9]}, r"sequence 1 has 10 queries and 9 keys; accepted with is_causal=True"),
        ({"seqlen_k": [20, 70]}, r"seqlen_k is 70, but page_table has 4 pages of 16 keys"),
        ({"q": np.zeros((2, 4, 30, 64), np.float32)}, r"q has 4 axes.*accepted: \(total_q, heads, head_dim\) with cu_"),
    ],
)
def test_refused(changes, message):
    arguments = {
        "q": np.zeros((30, 4, 64), np.float32),
        "k_pages": np.zeros((9, 16, 2, 64), np.float32),
        "v_pages": np.zeros((9, 16, 2, 64), np.float32),
        "page_table": np.zeros((2, 4), np.int32),
        "seqlen_k": [20, 20],
        "cu_seqlens_q": [0, 20, 30],
    }
    s2o_attention_paged(**arguments)
    with pytest.raises(ValueError, match=f"^s2o_attention_paged: {message}"):
        s2o_attention_paged(**(arguments | changes))


def test_starts_on_the_gpu_during_a_capture(monkeypatch):
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(NumpyFramework, "is_capturing", lambda self: True)
    arrays = [np.zeros(shape, np.float16) for shape in ((30, 4, 64), *[(9, 16, 2, 64)] * 2)]
    with pytest.raises(ValueError, match="cu_seqlens_q is on cuda:0 while a CUDA graph .*; accepted: a list"):
        s2o_attention_paged(*arrays, np.zeros((1, 4), np.int32), seqlen_k=40, cu_seqlens_q=np.array([0, 30]))
