"""What benchmarks/serving.py draws, cuts, lays out and judges, how it calls PyTorch's own packed attention, and, with
PyTorch on the CPU in the place of a GPU, what it reports."""

from __future__ import annotations

import itertools
import json
import sys
import types

import numpy as np
import pytest
from benchmarks_on_cpu import CPU, pretend_a_gpu, rows_on_a_gpu
from conftest import has_gpu

import s2o_cupy
from s2o_cupy import S2OConfig, s2o_attention

# isort: split
import _baselines
import _common
import serving


def test_lengths():
    lengths = serving.draw_lengths(131072, 16)
    assert lengths == serving.draw_lengths(131072, 16)
    assert lengths != serving.draw_lengths(131072, 16, seed=1)
    assert (sum(lengths), len(lengths)) == (131072, 16)
    assert max(lengths) > 8 * min(lengths) > 0
    assert serving.draw_lengths(5, 5) == [1] * 5
    assert serving.draw_lengths(100, 1) == [100]
    with pytest.raises(ValueError, match="accepted: 1 to 3 sequences"):
        serving.draw_lengths(3, 4)
    logs = np.log(serving.draw_lengths(10**9, 10_000))
    assert np.histogram(logs, 4)[0].std() < 100  # as many short as long


def test_chunks():
    assert serving.chunks(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert serving.chunks(8, 8) == [(0, 8)]


def test_density_of_chunks_is_that_of_one_call(qkv):
    q, k, v = qkv(600, heads=4, kv_heads=2, head_dim=32)
    config = S2OConfig(segment=64, tau=0.1, block_m=32, block_n=32, rank="mean")
    o, stats = s2o_attention(q, k, v, config=config, return_stats=True)
    out = np.full_like(o, np.nan)
    attend = lambda *x, **options: s2o_attention(*x, config=config, return_stats=True, **options)  # noqa: E731
    results = serving.in_chunks(attend, q, k, v, 128, out)
    assert serving.pooled_density([x for _, x in results]) == pytest.approx(stats.density, rel=1e-12)
    np.testing.assert_array_equal(out, o)
    assert serving.difference(out, o) == 0


def test_verdicts():
    row = {"density": 0.1, "plain_density": 0.105, "rel_l2": 0.05, "plain_rel_l2": 0.06, "difference": 0.003}
    assert serving.verdicts(row | {"tau": 0.01}, 2.0**-8) == {"error_like": "FAIL", "density_like": "pass"}
    assert serving.verdicts(row | {"tau": 0}, 2.0**-8) == {"difference_like": "pass"}
    assert serving.verdicts(row | {"tau": 0}, 2.0**-11) == {"difference_like": "FAIL"}
    del row["density"]
    assert serving.verdicts(row | {"tau": 0.01}, 2.0**-8) == {"error_like": "FAIL"}


def test_roundoff(torch):
    for dtype in ("bfloat16", "float16"):
        assert serving.roundoff(dtype) == torch.finfo(getattr(torch, dtype)).eps / 2


def test_pages_of_a_benchmark(torch):
    k, v = torch.randn(2, 1, 2, 100, 8)
    cache = serving._paged.Cache(k, v, 16)
    assert len(cache.k) == 14 and len(set(cache.table[0].tolist())) == 7
    for x, y in zip(cache.gathered(90), (k, v), strict=True):
        assert torch.equal(x, y[:, :, :90])
    eight, wide = cache.rounded
    assert eight.k.dtype == torch.float8_e4m3fn and torch.equal(eight.v.float(), wide.v)
    assert 0 < (wide.k - cache.k).abs().max() < 0.25 and wide.table is cache.table


def test_packed_sequences_are_pieces_of_the_input(torch, tmp_path, rng):
    q, k, v = (rng.standard_normal((h, 100, 8), np.float32) for h in (4, 2, 2))
    np.savez(tmp_path / "x.npz", q=q, k=k, v=v)
    args = types.SimpleNamespace(
        input=str(tmp_path / "x.npz"), length=90, sequences=3, seed=0, dtype="float32", heads=0, kv_heads=0, head_dim=0
    )
    packed = serving.load_packed(args, CPU)
    assert packed.cu_seqlens == [0, *np.cumsum(serving.draw_lengths(90, 3))]
    np.testing.assert_array_equal(packed.q.transpose(0, 1), q[:, :90])
    sequences = packed.alone()
    assert [x[1].shape[2] for x in sequences] == serving.draw_lengths(90, 3)
    np.testing.assert_array_equal(torch.cat([x[2] for x in sequences], 2)[0], v[:, :90])


@pytest.mark.parametrize("kind", ["absent", "causal", "window", "grouped"])
def test_varlen_attn_of_several_versions(torch, monkeypatch, kind):
    """Its arguments have changed; what takes no grouped heads gets repeated ones."""

    def attend(q, k, v, cu_q, cu_k, max_q, max_k):
        assert cu_q.dtype == torch.int32
        assert (cu_q.tolist(), max_q, max_k) == ([0, 10, 40], 30, 30)
        parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in ((0, 10), (10, 40))]
        attention = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([attention(*x, is_causal=True, enable_gqa=True).transpose(0, 1) for x in parts])

    def causal(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, return_aux=None):
        assert is_causal
        return attend(q, k, v, cu_q, cu_k, max_q, max_k)

    def window(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1)):
        assert window_size == (-1, 0)
        if q.shape[1] != k.shape[1]:
            raise RuntimeError("heads")
        return attend(q, k, v, cu_q, cu_k, max_q, max_k)

    def grouped(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        assert (enable_gqa, k.shape[1]) == (True, 2)
        return causal(q, k, v, cu_q, cu_k, max_q, max_k, window_size == (-1, 0))

    found = {"causal": causal, "window": window, "grouped": grouped}.get(kind)
    module = types.SimpleNamespace(varlen_attn=found) if found else None
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    q, k = torch.randn(40, 4, 8), torch.randn(40, 2, 8)
    call = _baselines.varlen(q, k, k, [0, 10, 40])
    if found is None:
        assert call is None
    else:
        torch.testing.assert_close(call(), attend(q, k, k, torch.tensor([0, 10, 40], dtype=torch.int32), 0, 30, 30))


# ---------------------------------------------------------------- what it reports


@pytest.fixture
def no_gpu_needed(torch, monkeypatch):
    names = {"chunked": "run_chunked", "packed": "run_packed", "paged": "run_paged"}
    pretend_a_gpu(monkeypatch, [(serving, name) for name in names.values()])
    monkeypatch.setattr(serving, "PARTS", {part: getattr(serving, name) for part, name in names.items()})


def packed_attention(q, k, v, cu_seqlens, *, config=None, return_stats=False):
    import torch

    parts = [
        s2o_attention(q[a:b], k[a:b], v[a:b], config=config, layout="BSHD", return_stats=True)
        for a, b in itertools.pairwise(cu_seqlens)
    ]
    o = torch.cat([o for o, _ in parts])
    return (o, [stats for _, stats in parts]) if return_stats else o


@pytest.mark.parametrize("varlen", [None, packed_attention])
def test_serving(no_gpu_needed, monkeypatch, tmp_path, varlen):
    monkeypatch.setattr(s2o_cupy, "s2o_attention_varlen", varlen, raising=False)
    args = serving.parse([
        "--length", "700", "--chunk", "128", "--sequences", "5", "--heads", "4", "--kv-heads", "2", "--head-dim", "32",
        "--orders", "mean:1:0:64", "--dense-up-to", "0", "--taus", "0,1000", "--parts", "chunked,packed",
        "--json", str(tmp_path / "s.json"),
    ])  # fmt: skip
    steps: list = []
    rows = serving.run(args, lambda *told: steps.append(told))
    assert json.loads((tmp_path / "s.json").read_text())["rows"] == rows
    assert [done for done, _, _ in steps] == list(range(steps[0][1]))
    exact, sparse, packed_exact, packed_sparse = rows
    assert [row["part"] for row in rows] == ["chunked", "chunked", "packed", "packed"]
    for row in (exact, sparse):
        assert row["same_bits"]  # chunks of whole segments
        assert (row["x_plain"], row["x_flash2_chunks"], row["x_cudnn"]) == (1, 1, 1)
        assert row["flash2_chunks_rel_l2"] < 0.01
    assert (exact["difference_like"], exact["density"]) == ("pass", 1)
    assert (sparse["density_like"], sparse["error_like"]) == ("pass", "pass")
    assert sparse["density"] < 0.9
    assert sparse["rel_l2"] > 2 * exact["rel_l2"]
    for row in (packed_exact, packed_sparse):
        assert sum(row["lengths"]) == row["length"] == 700
        assert (row["plain_ms"], row["queue_ms"], row["cudnn_ms"]) == (5 * 2, 2, 2)
        assert ("s2o_ms" in row) == ("x_plain" in row) == ("difference" in row) == (varlen is not None)
        if varlen:
            assert row["same_bits"]
            assert row["density"] == row["plain_density"]
    assert packed_sparse["plain_rel_l2"] > 2 * packed_exact["plain_rel_l2"]
    for columns in (serving.CHUNKED, serving.PACKED):
        assert len(_common.table(rows[:2], columns).splitlines()) == 3


def test_serving_from_pages(no_gpu_needed, tmp_path):
    args = serving.parse([
        "--length", "500", "--chunk", "128", "--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--parts", "paged",
        "--orders", "mean:1:0:64", "--taus", "0.1", "--page-sizes", "16,64", "--json", str(tmp_path / "s.json"),
    ])  # fmt: skip
    rows = serving.run(args, lambda *told: None)
    lengths = {"first chunk": (128, 128), "last chunk": (128, 500), "prompt": (500, 500)}
    assert [(row["call"], row["page_size"]) for row in rows] == list(itertools.product(lengths, (16, 64)))
    for row in rows:
        assert (row["seqlen_q"], row["seqlen_k"]) == lengths[row["call"]]
        assert (row["bits_like"], row["cost_like"], row["x_plain"], row["x_gather"]) == ("pass", "pass", 1, 1)
    assert len(_common.table(rows, serving.PAGED).splitlines()) == 1 + len(rows)
    assert list(serving.paged_calls(100, 128)) == ["prompt"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
def test_serving_on_a_gpu(tmp_path):
    rows = rows_on_a_gpu(
        tmp_path / "s.json", "serving.py", "--length", 32768, "--sequences", 4, "--heads", 8, "--kv-heads", 2,
        "--dense-up-to", 0,
    )  # fmt: skip
    for row in rows:
        assert row["plain_ms"] > 0
        assert row.get("s2o_ms", 1) > 0
        # What pages cost is no test's business: others may be using the GPU.
        assert "FAIL" not in [value for key, value in row.items() if key != "cost_like"]
        for other in ("flash2_chunks_rel_l2", "varlen_rel_l2"):
            assert row.get(other, 0) < 0.01
