"""Queries of any number for each sequence over a paged cache, in one call: the bits of a call for each sequence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, Device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packs import LENGTHS, bits, starts
from pages import paged, random_table
from pretended import pretend_gpu

from s2o_cupy import s2o_attention, s2o_attention_paged
from s2o_cupy.arrays.frameworks.numpy import NumpyFramework


def in_pages(rng: Any, rows: np.ndarray, lengths: list[int], page_size: int, layout: str) -> tuple[Any, Any]:
    """A page table for keys packed one sequence behind the other, and what puts such rows into a cache; NaN, where no
    key of any sequence is."""
    table, pages = random_table(rng, lengths, page_size)

    def put(packed_rows: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(lengths), rows.shape[1], max(1, *lengths), rows.shape[2]), rows.dtype)
        for i, (begin, end) in enumerate(itertools.pairwise(starts(lengths))):
            padded[i, :, : end - begin] = packed_rows[begin:end].swapaxes(0, 1)
        return paged(padded, table, pages, page_size, layout, lengths)

    return table, put


def assert_the_loop(
    device: Device, rng: Any, arrays: Any, lengths_q: list[int], lengths_k: list[int], page_size: int, layout: Any,
    **options: Any,
) -> None:  # fmt: skip
    """One call, into an output of NaN, against a call for each sequence on keys in one array."""
    options.setdefault("config", device.config)
    q, k, v = (x.astype(device.dtype) for x in arrays)
    table, put = in_pages(rng, k, lengths_k, page_size, layout)
    inputs = [device.xp.asarray(x) for x in (q, put(k), put(v), table)]
    out = device.poisoned(q.shape)
    o, lse, stats = s2o_attention_paged(
        *inputs, seqlen_k=lengths_k, cu_seqlens_q=starts(lengths_q), layout=layout, out=out, return_lse=True,
        return_stats=True, **options,
    )  # fmt: skip
    assert o is out
    assert lse.shape == (q.shape[1], q.shape[0])
    assert len(stats) == len(lengths_q)
    q, k, v = (device.xp.asarray(x) for x in (q, k, v))
    rows = zip(itertools.pairwise(starts(lengths_q)), itertools.pairwise(starts(lengths_k)), strict=True)
    for i, ((a, b), (c, d)) in enumerate(rows):
        own = s2o_attention(
            q[a:b], k[c:d], v[c:d], layout="BSHD", return_lse=True, return_stats=True, **options
        )
        for x, y in ((o[a:b], own[0]), (lse[:, a:b], own[1]), (stats[i].visited, own[2].visited)):
            np.testing.assert_array_equal(bits(x), bits(y), err_msg=f"sequence {i}")
        assert (stats[i].path, stats[i].path_reason) == (own[2].path, own[2].path_reason)
        assert stats[i].density == own[2].density


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
        assert paging == (at(table[i:]), 0, 16, len(cache))
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
