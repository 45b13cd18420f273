"""What s2o_attention_paged refuses, and what it hands to the GPU backend, on a machine without a GPU."""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
import pytest
from pretended import pretend_gpu
from schedules import random_schedule

from s2o_cupy import gather_attention_paged, s2o_attention_paged
from s2o_cupy.arrays.frameworks.numpy import NumpyFramework
from s2o_cupy.methods import MeanPoolingConfig, sparse_attention_paged


def arguments(**changes: Any) -> dict[str, Any]:
    cache = np.zeros((6, 16, 2, 64), np.float32)
    given = {
        "q": np.zeros((2, 4, 30, 64), np.float32), "k_pages": cache, "v_pages": cache,
        "page_table": np.zeros((2, 3), np.int32), "seqlen_k": 40,
    }  # fmt: skip
    return given | changes


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout": "BHSD"}, ValueError, "layout is 'BHSD'; accepted: 'NHD' or 'HND'"),
        ({"q": zeros(4, 30, 64)}, ValueError, r"q has 3 axes, shape \(4, 30, 64\); accepted: \(batch, heads, seqlen_q"),
        ({"k_pages": zeros(6, 16, 128)}, ValueError, r"k_pages has 3 axes.*\(pages, page_size, kv_heads, head_dim\)"),
        ({"v_pages": zeros(6, 16, 128)}, ValueError, "v_pages has 3 axes"),
        ({"v_pages": zeros(5, 16, 2, 64)}, ValueError, r"k_pages is \(6, 16, 2, 64\) and v_pages is \(5, 16, 2, 64\)"),
        ({"page_table": zeros(2, 3)}, TypeError, "page_table is float32; accepted: int32"),
        ({"page_table": zeros(2, 3, dtype=np.int64)}, TypeError, "page_table is int64; accepted: int32"),
        ({"page_table": zeros(6, dtype=np.int32)}, ValueError, r"page_table has 1 axes.*\(batch, pages_per_sequence\)"),
        ({"page_table": zeros(3, 3, dtype=np.int32)}, ValueError, "page_table has batch 3, q has 2; accepted"),
        ({"page_table": [[0, 1, 2]]}, TypeError, "page_table is a list; accepted: NumPy"),
        ({"q": zeros(2, 4, 30, 64, dtype=np.float16)}, TypeError, "q float16, k_pages float32, v_pages float32; acc"),
        (
            {"layout": "HND", "k_pages": zeros(6, 2, 12, 64), "v_pages": zeros(6, 2, 12, 64)}, ValueError,
            r"page_size is 12 \(axis 2 of k_pages, layout 'HND'\); accepted: a power",
        ),
        ({"k_pages": zeros(6, 24, 2, 64), "v_pages": zeros(6, 24, 2, 64)}, ValueError, "page_size is 24 .*of two"),
        ({"k_pages": zeros(6, 0, 2, 64), "v_pages": zeros(6, 0, 2, 64)}, ValueError, "page_size is 0 .*of two"),
        ({"page_table": np.full((2, 3), 6, np.int32)}, ValueError, r"page_table\[0, 0\] is 6; accepted: 0 to 5"),
        ({"page_table": np.full((2, 3), -1, np.int32)}, ValueError, r"page_table\[0, 0\] is -1; accepted"),
        ({"page_table": np.array([[0, 1, 2], [3, 4, 6]], np.int32)}, ValueError, r"page_table\[1, 2\] is 6"),  # 8 keys
        ({"k_pages": zeros(0, 16, 2, 64), "v_pages": zeros(0, 16, 2, 64)}, ValueError, "k_pages 0 pages; accepted"),
        ({"seqlen_k": 49}, ValueError, "seqlen_k is 49, but page_table has 3 pages of 16 keys.*accepted: seqlen_k <= "),
        ({"seqlen_k": -1}, ValueError, "seqlen_k is or holds -1; accepted: integers >= 0"),
        ({"seqlen_k": 40.0}, TypeError, "seqlen_k is a float; accepted: an integer, a list or tuple of integers, or"),
        ({"seqlen_k": True}, TypeError, "seqlen_k is a bool"),
        ({"seqlen_k": [40, None]}, TypeError, r"seqlen_k\[1\] is a NoneType"),
        ({"seqlen_k": np.array(40)}, ValueError, r"seqlen_k has shape \(\); accepted: \(batch,\)"),
        ({"seqlen_k": np.array([40.0, 40.0])}, TypeError, "seqlen_k is float64; accepted: an integer, a list"),
        ({"seqlen_k": [40]}, ValueError, r"seqlen_k has 1 lengths; accepted: an integer, or 2, the batch"),
        ({"seqlen_k": [40, 41], "return_stats": True}, ValueError, r"return_stats with seqlen_k .*\(\[40, 41\]\); "),
        ({"seqlen_k": [40, 41], "return_stats": np.True_}, ValueError, r"return_stats with seqlen_k .*\(\[40, 41\]"),
        ({"seqlen_k": 29}, ValueError, "seqlen_q 30 exceeds seqlen_k 29"),
        ({"q": zeros(2, 3, 30, 64)}, ValueError, "q has 3 heads, k and v have 2"),
        ({"q": zeros(2, 4, 30, 32)}, ValueError, "q has head_dim 32, k and v have 64"),
        ({"out": zeros(2, 4, 30, 32)}, ValueError, r"out has shape \(2, 4, 30, 32\)"),
        ({"config": 3}, TypeError, "config is a int"),
        ({"backend": "cupy"}, ValueError, "backend is \"cupy\", but q, k and v are on the CPU"),
        ({"stream": 0}, ValueError, "stream is given"),
    ],
)  # fmt: skip
def test_refused(changes, error, message):
    with pytest.raises(error, match=f"^s2o_attention(_paged)?: .*{message}") as caught:
        s2o_attention_paged(**arguments(**changes))
    assert "\n" not in str(caught.value)


def test_an_output_in_the_cache_is_refused():
    cache = zeros(8, 16, 4, 64)
    out = cache.reshape(2, 4, 64, 64)[:, :, :30]
    with pytest.raises(ValueError, match="out and v_pages overlap in memory"):
        s2o_attention_paged(**arguments(k_pages=zeros(8, 16, 4, 64), v_pages=cache, out=out))


def test_a_cache_of_too_many_keys():
    cache = np.broadcast_to(zeros(1, 16, 2, 64), (1 << 27, 16, 2, 64))
    with pytest.raises(ValueError, match=r"k_pages has 134217728 pages of 16 keys; accepted: up to \d+ keys"):
        s2o_attention_paged(**arguments(k_pages=cache, v_pages=cache))


def test_what_is_refused_stays_so_after_a_call_like_it():
    """Checks are remembered, and 1 equals True, and 0.0 False."""
    arrays = [zeros(1, 4, 30, 64), *[zeros(6, 16, 2, 64)] * 2, zeros(1, 3, dtype=np.int32)]
    s2o_attention_paged(*arrays, seqlen_k=40, is_causal=True, softcap=0.0)
    for options in ({"is_causal": 1}, {"softcap": False}, {"scale": True}):
        with pytest.raises(TypeError, match=f"{next(iter(options))} is .*; accepted"):
            s2o_attention_paged(*arrays, seqlen_k=40, **options)
    with pytest.raises(ValueError, match="seqlen_k is 60, but page_table has 3 pages of 16 keys"):
        s2o_attention_paged(*arrays, seqlen_k=60)
    with pytest.raises(TypeError, match="dtypes differ"):
        s2o_attention_paged(arrays[0].astype(np.float64), *arrays[1:], seqlen_k=40)


# ---------------------------------------------------------------- the way to the GPU, without one


@pytest.fixture
def pretended_gpu(monkeypatch):
    """NumPy arrays that claim to be on a GPU; what the pipeline is given, a list of problems for each call."""
    calls: list[list[Any]] = []

    def run_in_turn(problems, config, *, lse_stride, stream, memory):
        assert lse_stride == problems[0][0][0].shape[2]
        calls.append(problems)
        return [types.SimpleNamespace(path="portable", path_reason="a reason", graphs="launched")] * len(problems)

    def run(call, config, *, stream, memory, await_keys, taus):
        return run_in_turn([call], config, lse_stride=call.operands[0].shape[2], stream=stream, memory=memory)[0]

    pretend_gpu(monkeypatch, run=run, run_in_turn=run_in_turn)
    return calls


def test_lengths_on_the_gpu_during_a_capture(pretended_gpu, monkeypatch):
    """Before, they are read, for which the host waits."""
    arrays = [zeros(2, 4, 30, 64, dtype=np.float16), *[zeros(6, 16, 2, 64, dtype=np.float16)] * 2]
    arrays.append(zeros(2, 3, dtype=np.int32))
    monkeypatch.setattr(NumpyFramework, "is_capturing", lambda self: False)
    s2o_attention_paged(*arrays, seqlen_k=np.array([40, 48]))
    assert [problem.seqlen_k for _, _, _, problem, _ in pretended_gpu[0]] == [40, 48]
    monkeypatch.setattr(NumpyFramework, "is_capturing", lambda self: True)
    with pytest.raises(ValueError, match="seqlen_k is on cuda:0 while a CUDA graph is captured.*; accepted: a list"):
        s2o_attention_paged(*arrays, seqlen_k=np.array([40, 48]))


@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
@pytest.mark.parametrize("call", [s2o_attention_paged, sparse_attention_paged, gather_attention_paged])
def test_rows_with_gaps_are_refused_by_their_name(pretended_gpu, call, name):
    """A whole cache is never copied."""
    given = arguments(q=zeros(2, 4, 30, 64, dtype=np.float16))
    given |= dict.fromkeys(("k_pages", "v_pages"), zeros(6, 16, 2, 64, dtype=np.float16))
    given[name] = zeros(6, 16, 2, 128, dtype=np.float16)[..., ::2]
    if call is sparse_attention_paged:
        given["config"] = MeanPoolingConfig()
    elif call is gather_attention_paged:
        given["schedule"] = random_schedule(np.random.default_rng(0), 30, given.pop("seqlen_k"), batch=2)
    message = rf"^{call.__name__}: {name} has a stride of 4 bytes on its last axis; accepted: .* \(2 bytes\)"
    with pytest.raises(ValueError, match=message):
        call(**given)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_the_gpu_backend_gets(pretended_gpu, layout):
    at = lambda x: x.__array_interface__["data"][0]  # noqa: E731
    q, cache = zeros(4, 4, 30, 64, dtype=np.float16), zeros(9, 2, 32, 2, 64, dtype=np.float16)
    k, v = (cache[:, i] if layout == "NHD" else cache[:, i].swapaxes(1, 2) for i in range(2))
    table = zeros(4, 7, dtype=np.int32)[:, :5]
    out = np.empty_like(q)
    inputs = (q, k, v, table)
    s2o_attention_paged(*inputs, seqlen_k=[40, 40, 50, 40], layout=layout, out=out, return_lse=True)
    s2o_attention_paged(*inputs, seqlen_k=160, layout=layout, out=out)
    lengths = [(0, 2, 40), (2, 1, 50), (3, 1, 40), (0, 4, 160)]
    assert [len(call) for call in pretended_gpu] == [3, 1]  # one call for all lengths
    problems = list(itertools.chain(*pretended_gpu))
    for (first, batch, seqlen_k), (operands, lse, visited, problem, paging) in zip(lengths, problems, strict=True):
        assert (problem.batch, problem.heads, problem.kv_heads) == (batch, 4, 2)
        assert (problem.seqlen_q, problem.seqlen_k, problem.head_dim) == (30, seqlen_k, 64)
        assert [x.pointer for x in operands] == [at(q[first:]), at(k), at(v), at(out[first:])]
        assert operands[0].shape == operands[3].shape == (batch, 4, 30, 64)
        for x in operands[1:3]:  # [pages, kv_heads, page_size, head_dim]
            assert (x.shape, x.strides) == ((9, 2, 32, 64), (2 * 32 * 2 * 64, 64, 2 * 64))
        assert paging == (at(table[first:]), 7 if batch > 1 else 0, 32, 9, None)
        assert (lse != 0) == (seqlen_k != 160) and visited == 0
    assert problems[1][1] - problems[0][1] == 2 * 4 * 30 * 4
    s2o_attention_paged(q[:1], k, v, table[:1], seqlen_k=160, layout=layout)
    expected = (at(table), 0, 32, 9, None)
    assert pretended_gpu[-1][0][4] == expected  # of one sequence tables of any length are prepared once
    _, stats = s2o_attention_paged(*inputs, seqlen_k=160, layout=layout, return_stats=True)
    assert (stats.path, stats.path_reason) == ("portable", "a reason")
    _, stats = s2o_attention_paged(*inputs, seqlen_k=0, is_causal=False, layout=layout, return_stats=True)
    assert (stats.path, stats.path_reason) == (None, None)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_that_a_method_gets(pretended_gpu, rng, layout):
    """In one array. A number that is no page's, which nobody checks, is taken for another's: no index leads outside."""
    pages = rng.standard_normal((6, 16, 2, 64)).astype(np.float16)
    table = np.array([[0, 5, 3], [2, 6, -1]], np.int32)
    given = []

    def noted(q, k, *, is_causal, scale):
        given.append(k)
        raise NotImplementedError("there is no GPU to go on with")

    cache = pages if layout == "NHD" else pages.swapaxes(1, 2)
    q = zeros(2, 4, 30, 64, dtype=np.float16)
    with pytest.raises(NotImplementedError):
        sparse_attention_paged(q, cache, cache, table, seqlen_k=40, config=noted, layout=layout)
    (k,) = given
    np.testing.assert_array_equal(k.swapaxes(1, 2), pages[table.clip(0, 5)].reshape(2, 48, 2, 64)[:, :40])
