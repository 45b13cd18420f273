"""The last queries of a call attend to all their keys, as they lie, and the others are as without."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from packs import bits, starts
from ragged_pages import differing

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_varlen
from s2o_cupy.plan.last_queries import parts_of
from s2o_cupy.spec import Geometry
from s2o_cupy.tools import error_per_head, metrics

STOPS = 0.3


def dense_from(config, seqlen_q, seqlen_k=None, is_causal=True):
    return config.dense_from(Geometry(seqlen_q, seqlen_k or seqlen_q, config.segment, 0, is_causal, config.unit))


def test_the_default():
    for seqlen_q, expected in ((7167, 56), (7168, 54), (7169, 54), (131072, 1022)):
        assert dense_from(S2OConfig(), seqlen_q) == expected
    assert dense_from(S2OConfig(), 8192, 100_000) == 64  # a chunk need not be the last
    assert dense_from(S2OConfig(), 8192, is_causal=False) == 64
    assert dense_from(S2OConfig(rank="mean"), 131072) == 128
    # Longer segments are taken whole, where they are few queries.
    assert dense_from(S2OConfig(segment=1024), 28671) == 28 and dense_from(S2OConfig(segment=1024), 28672) == 27


@pytest.mark.parametrize(("last", "expected"), [(0, 10), (1, 9), (27, 9), (28, 8), (300, 6), (1000, 0), (9999, 0)])
def test_whole_segments(last, expected):
    """900 queries: segments of 97, the last of 27."""
    config = S2OConfig(segment=97, dense_last=last)
    assert dense_from(config, 900) == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rank", ["weight", "mean"])
@pytest.mark.parametrize("tail", ["none", "first_order"])
def test_rows_and_visits(device, qkv, tail, rank):
    q, k, v = (device.array(x) for x in qkv(900, 1100, batch=2, heads=4, kv_heads=2))
    few = {"unit": 1, "pooled_queries": 1} if rank == "mean" else {}
    config = replace(device.config, tau=STOPS, tail=tail, rank=rank, **few)

    def run(config):
        o, lse, stats = s2o_attention(q, k, v, config=config, return_lse=True, return_stats=True)
        return o, lse, device.host(stats.visited), float(stats.density)

    last = replace(config, dense_last=200)
    first = last.dense_from(Geometry(900, 1100, config.segment))
    rows = first * config.segment
    assert 0 < rows < 900
    found, without, dense = map(run, (last, config, config.with_tau(0.0)))
    for x, at in ((0, rows), (1, rows), (2, first)):
        np.testing.assert_array_equal(bits(found[x][:, :, :at]), bits(without[x][:, :, :at]))
    np.testing.assert_array_equal(found[2][:, :, first:], dense[2][:, :, first:])
    # Float32 sums of up to 1,100 of the same terms in another order; weights, what passes or parts hand over and
    # outputs are rounded to the dtype, in both: six roundings of at most eps / 2, as random ones together 1.23 eps.
    o, o_at_0, lse, lse_at_0 = (device.host(x)[:, :, rows:] for x in (found[0], dense[0], found[1], dense[1]))
    sums = 1100 * 2.0**-24
    assert metrics.rel_l2(o, o_at_0) < 2 * float(ml_dtypes.finfo(device.dtype).eps) + sums
    np.testing.assert_allclose(lse, lse_at_0, rtol=0, atol=2 * sums)
    assert (without[2][:, :, first:] < dense[2][:, :, first:]).any()
    assert without[3] < found[3] < dense[3]


def test_taus_of_heads_and_packed_sequences(device, packed):
    """Each sequence has last queries of its own."""
    lengths = [300, 65, 0, 401]
    q, k, v = (device.array(x) for x in packed(lengths, lengths))
    config = replace(device.config, tau=(STOPS, 0.1, STOPS, 0.5), dense_last=70)
    o = s2o_attention_varlen(q, k, v, starts(lengths), config=config)
    for begin, end in zip(starts(lengths)[:-1], starts(lengths)[1:], strict=True):
        alone = s2o_attention(*(x[begin:end].swapaxes(0, 1) for x in (q, k, v)), config=config)
        np.testing.assert_array_equal(bits(o[begin:end]), bits(alone.swapaxes(0, 1)))


def test_ragged_pages(device, packed, rng):
    lengths_q, lengths_k = [300, 65, 0, 401], [300, 70, 9, 530]
    host, config = packed(lengths_q, lengths_k), replace(device.config, tau=STOPS, dense_last=70)
    assert not differing(device, rng, host, lengths_q, lengths_k, 16, "HND", config=config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("segments", [1, 3])
def test_chunks_of_a_prompt(device, qkv, segments):
    """A call for each is told which of its queries are among the prompt's last: together they are the whole call."""
    q, k, v = (device.array(x) for x in qkv(900, heads=4, kv_heads=2))
    config = replace(device.config, tau=STOPS, dense_last=200)
    whole, chunk = s2o_attention(q, k, v, config=config), segments * config.segment
    for begin in range(0, 900, chunk):
        end = min(begin + chunk, 900)
        own = config.of_chunk(begin, end, 900)
        o = s2o_attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], config=own)
        np.testing.assert_array_equal(bits(o), bits(whole[:, :, begin:end]))


@pytest.mark.slow
def test_a_sample_counts_them(qkv):
    q, k, v = qkv(900, heads=4, kv_heads=2)
    config = S2OConfig(segment=64, block_m=16, block_n=16, tau=STOPS, dense_last=200)
    found = error_per_head(q, k, v, config, segments=100)
    o, stats = s2o_attention(q, k, v, config=config, return_stats=True)
    dense = s2o_attention(q, k, v, tau=0.0)
    np.testing.assert_allclose(found.error[0], [metrics.rel_l2(o[:, h], dense[:, h]) for h in range(4)], rtol=1e-4)
    np.testing.assert_allclose(found.density, stats.density_per_head, rtol=1e-6)


@pytest.mark.parametrize("last", [-1, 1.5, True, "all"])
def test_what_is_refused(last):
    with pytest.raises((TypeError, ValueError), match=r"S2OConfig: dense_last is .*; accepted: an int"):
        S2OConfig(dense_last=last)


def test_a_share_of_the_heads(device, qkv, monkeypatch):
    """Ranks that share the heads of a call cut keys as one call of all heads does, and so round as it does."""
    pytest.importorskip("torch")
    import s2o_cupy.integrations.distributed as module
    from s2o_cupy.problem import cached_validate

    config, seqlen = replace(device.config, dense_last=100), 300 if device.kind == "cpu" else 6000
    if device.kind != "cpu":
        last = Geometry(seqlen, seqlen, config.segment)
        assert len({parts_of(last, last.segments - 1, heads) for heads in (8, 32)}) == 2  # or nothing is shown
    arrays = [device.array(x.swapaxes(1, 2)) for x in qkv(seqlen, heads=32, kv_heads=8)]
    shapes = tuple(tuple(x.shape) for x in arrays)
    backend = "numpy" if device.kind == "cpu" else "cupy"
    problem = cached_validate(shapes, (device.dtype,) * 3, config, backend, "BSHD", True, None, 0.0)

    run, shares = module.run, []

    def seen(batch, call, **options):
        shares.append(batch.whole.share_of)
        return run(batch, call, **options)

    monkeypatch.setattr(module, "run", seen)

    def attend(begin, end):
        part = [x[:, :, begin // n : end // n] for x, n in zip(arrays, (1, 4, 4), strict=True)]
        out = device.poisoned(part[0].shape)
        return out, module._attend(*part, out, problem, config, True)

    whole, lse = attend(0, 32)
    for begin, end in ((0, 8), (12, 20)):
        o, of_heads = attend(begin, end)
        np.testing.assert_array_equal(bits(o), bits(whole[:, :, begin:end]))
        np.testing.assert_array_equal(device.host(of_heads), device.host(lse)[:, begin:end])
    assert shares == [32] * 3
