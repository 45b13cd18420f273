"""What benchmarks/serving.py draws, cuts, lays out and judges, and how it calls PyTorch's own packed attention."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from benchmark_modules import CPU

from s2o_cupy import S2OConfig, s2o_attention

# isort: split
import _baselines
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
