"""S2OConfig(error=...): each head with the largest tau whose error on sampled segments is what was asked for."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from conftest import has_gpu
from packs import bits, on_the_cpu

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged, s2o_attention_varlen
from s2o_cupy.plan.error_search import sampled
from s2o_cupy.reference import dense_attention, s2o
from s2o_cupy.reference.error_taus import LEAST_ERROR, chosen_tau, error_taus, second_ladder
from s2o_cupy.spec import FIRST_LADDER
from s2o_cupy.tools import error_per_head, inputs

SMALL = S2OConfig(segment=64, block_m=64, block_n=64, unit=8, dense_up_to=0)


def asked(device, error, **options):
    return replace(device.config.with_error(error), **options)


def errors_of(device, o, exact):
    """rel_l2 of each head, [heads]."""
    dense = dense_attention(*exact)[0]
    squared = lambda x: np.square(x).sum(axis=(0, 2, 3))  # noqa: E731
    return np.sqrt(squared(device.host(o) - dense) / squared(dense))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("length", "error"), [(2000, 0.03), (2000, 0.1), pytest.param(5000, 0.03, marks=pytest.mark.slow)]
)
def test_errors_come_near_what_was_asked_for(device, qkv, length, error):
    """Between 0.4 and 1.3 of it, as is promised of layers; of 2,000 tokens all segments are looked at. Heads that one
    key tile serves better stay below."""
    host = qkv(length, heads=4, kv_heads=2)
    arrays, exact = [device.array(x) for x in host], [device.round(x) for x in host]
    o, stats = s2o_attention(*arrays, config=asked(device, error), return_stats=True)
    found, taus = errors_of(device, o, exact), device.host(stats.tau_per_head)[0]
    assert taus.shape == (4,) and (taus > 0).all()
    assert (found < 1.3 * error).all()
    stopped = np.isfinite(taus)
    assert stopped.any() or error == 0.1  # which all heads keep to after Hopper's two key tiles
    assert not stopped.any() or (found[stopped] > 0.4 * error).any()
    expected = s2o_attention(*arrays, config=stats.config.with_found_taus(taus.tolist()))
    np.testing.assert_array_equal(bits(o), bits(expected))


@pytest.mark.parametrize("length", [2000, 5000])  # of 5,000 tokens not all segments are sampled
@pytest.mark.parametrize("block_m", [64, 128])
def test_the_gpu_s_taus_are_the_reference_s(device, qkv, length, block_m):
    """Two outputs that are rounded by up to 2^-9 change an error of 0.03 by (2^-8 / 0.03)^2 / 2, a hundredth; a q tile
    that stops elsewhere, as its gain is next to tau, by its share of a segment. Keys are ordered by products that the
    reference has too: of 16 bits, where the default's are of 8. On the CPU it is the reference that runs."""
    if device.kind != "cuda":
        pytest.skip("nothing to compare the reference with")
    host = qkv(length, heads=4, kv_heads=2)
    arrays, exact = [device.array(x) for x in host], [device.round(x) for x in host]
    config = asked(device, (0.1, 0.03, 0.05, 0.2), block_m=block_m, rank="weight")
    _, stats = s2o_attention(*arrays, config=config, return_stats=True)
    lag = 1 if stats.path == "hopper" else 0
    sample = sampled(stats.problem, config)
    assert len(sample.segments) == (32 if length > 32 * config.segment else -(-length // config.segment))
    expected = error_taus(*exact, config, *sample, scale=stats.problem.scale, stop_lag=lag)
    np.testing.assert_allclose(device.host(stats.tau_per_head), expected.astype(np.float64), rtol=0.1)


def test_sequences_of_a_batch_have_taus_of_their_own(device, qkv):
    arrays = [device.array(x) for x in qkv(700, batch=2, heads=4, kv_heads=2)]
    config = asked(device, (0.2, 0.1, 0.05, 0.02))
    o, stats = s2o_attention(*arrays, config=config, return_stats=True)
    assert stats.tau_per_head.shape == (2, 4) and stats.config is config
    for b in range(2):
        alone, of_one = s2o_attention(*(x[b] for x in arrays), config=config, return_stats=True)
        np.testing.assert_array_equal(bits(o[b]), bits(alone))
        np.testing.assert_array_equal(bits(stats.tau_per_head[b]), bits(of_one.tau_per_head[0]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{"scale": -0.2}, {"softcap": 2.0}, {"layout": "BSHD"}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 33])
def test_options(device, qkv, options, head_dim):
    arrays = [device.array(x) for x in qkv(500, heads=4, kv_heads=2, head_dim=head_dim)]
    if "layout" in options:
        arrays = [x.swapaxes(1, 2) for x in arrays]
    path = "auto" if device.kind == "cuda" else device.config.path
    config = asked(device, 0.1, path=path, tail="first_order")
    o, lse, stats = s2o_attention(*arrays, config=config, return_lse=True, return_stats=True, **options)
    taus = device.host(stats.tau_per_head)[0].tolist()
    again = s2o_attention(*arrays, config=config.with_found_taus(taus), return_lse=True, **options)
    for x, y in zip((o, lse), again, strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.slow
def test_the_estimate_of_error_per_head_agrees(qkv):
    """More segments than are sampled, and other ones: the same rule."""
    q, k, v = qkv(4800, heads=4, kv_heads=2, head_dim=16)
    _, stats = s2o_attention(q, k, v, config=replace(SMALL, error=0.1), return_stats=True)
    estimate = error_per_head(q, k, v, stats.config.with_found_taus(stats.tau_per_head[0]))
    assert len(estimate.segments) == 32 < estimate.segments_total
    between = np.isfinite(stats.tau_per_head) & (stats.tau_per_head > 0)
    assert between.any()
    # Two samples of other segments, each off by its standard error.
    off = np.abs(estimate.error - 0.1)[between]
    assert (off <= 3 * math.sqrt(2) * estimate.standard_error[between]).all()


def test_nothing_to_find(device, qkv):
    q, k, v = (device.array(x) for x in qkv(300, heads=4))
    if device.kind == "cuda":  # plain dense attention
        o, stats = s2o_attention(q, k, v, config=S2OConfig(error=0.1, dense_up_to=300), return_stats=True)
        assert (device.host(stats.tau_per_head) == 0).all()
        np.testing.assert_array_equal(bits(o), bits(s2o_attention(q, k, v, tau=0)))
    o, stats = s2o_attention(q[:, :, :0], k, v, config=asked(device, 0.1), return_stats=True)
    assert o.shape == (1, 4, 0, 64) and stats.tau_per_head.shape == (1, 4)
    _, stats = s2o_attention(q[:, :, :60], k[:, :, :60], v[:, :, :60], config=asked(device, 0.1), return_stats=True)
    assert (device.host(stats.tau_per_head) == math.inf).all()  # one segment, all of it dense: no tau errs


def test_what_is_not_finite_is_attended_densely(device, qkv):
    q, k, v = qkv(500, heads=4, kv_heads=2)
    v[:, 1, 3] = np.inf
    arrays = [device.array(x) for x in (q, k, v)]
    _, stats = s2o_attention(*arrays, config=asked(device, 0.1), return_stats=True)
    taus = device.host(stats.tau_per_head)[0]
    assert (taus[:2] > 0).all() and (taus[2:] == 0).all()


def by_words(q, k, v, config, **options):
    """error_taus of all segments of one sequence: whole calls, whose errors nobody samples."""
    dense = dense_attention(q, k, v, **options)[0]
    norm = lambda x: np.sqrt(np.square(x).sum(axis=(0, 2, 3)))  # noqa: E731

    def errors(taus):  # of heads at their taus
        call = replace(config.with_tau(taus), tail="none")
        return norm(s2o.s2o(q, k, v, call, **options).o - dense) / norm(dense)

    heads = range(q.shape[1])
    points = [{} for _ in heads]
    for of_heads in ([FIRST_LADDER for _ in heads], None):
        ladders = of_heads or [second_ladder(points[h], config.errors(len(heads))[h]) for h in heads]
        for taus in zip(*ladders, strict=True):
            for h, error in zip(heads, errors(taus), strict=True):
                points[h][taus[h]] = float(error)
    return [[chosen_tau(points[h], config.errors(len(heads))[h]) for h in heads]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes", [{"unit": 8}, {"tail": "first_order"}, {"rank": "weight"}, {"rank": "max", "window": 50}], ids=str
)
@pytest.mark.parametrize("options", [{"scale": 0.4}, {"scale": -0.4, "softcap": 3.0}], ids=str)
def test_the_definition_by_whole_calls(rng, changes, options):
    """With keys before the first query, so that the first of three segments has candidates too."""
    q = rng.standard_normal((1, 4, 180, 16))
    k, v = rng.standard_normal((2, 1, 2, 350, 16))
    config = S2OConfig(error=(0.02, 0.1, 0.3, 0.05), segment=64, block_m=32, block_n=32, **changes)
    found = error_taus(q, k, v, config, range(3), [1.0] * 3, **options)
    # Sums in another order; taus that are the larger the more an error next to them moves.
    np.testing.assert_allclose(found, by_words(q, k, v, config, **options), rtol=1e-5)
    assert len(set(found[0])) == 4 and np.isfinite(found).all() and (found > 0).all()


def test_ladders_and_choice():
    errors = dict(zip(FIRST_LADDER, (0.4, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02, 0.0), strict=True))
    ladder = second_ladder(errors, 0.15)
    assert list(ladder) == sorted(ladder, reverse=True) and len(ladder) == 8
    assert FIRST_LADDER[2] < ladder[-1] < ladder[0] < FIRST_LADDER[1]
    assert max(second_ladder(errors, 0.01)) < FIRST_LADDER[-2] and second_ladder(errors, 0.5)[0] == math.inf
    assert chosen_tau(errors, 0.1) == pytest.approx(FIRST_LADDER[2]) and chosen_tau(errors, 0.01) == 0
    assert chosen_tau(errors, 0.5) == FIRST_LADDER[0]
    between = math.sqrt(FIRST_LADDER[2] * FIRST_LADDER[1])
    assert chosen_tau(errors, 0.1 * math.sqrt(2)) == pytest.approx(between)  # half way, in logarithms
    assert chosen_tau({0.1: 0.0, 0.2: math.inf}, 0.1) == 0.1 == chosen_tau({0.1: 0.05, math.inf: 0.2}, 0.1)
    start = LEAST_ERROR * 0.1  # of an interpolation whose nearer end has no error
    for error in (0.0, start / 2, start):
        part = math.log(1 / LEAST_ERROR) / math.log(0.2 / start)  # of the way to 0.2
        assert chosen_tau({0.1: error, 0.2: 0.2}, 0.1) == pytest.approx(0.1 * 2**part)
    assert chosen_tau({0.1: 0.1, 0.2: 0.2}, 0.1) == 0.1
    almost = math.nextafter(0.2, 0)
    assert chosen_tau({0.1: 0.1, 0.2: 0.2}, almost) == pytest.approx(0.2) and chosen_tau({0.1: 0.1}, 0.2) == 0.1
    assert chosen_tau({0.1: math.nan, 0.2: 0.05}, 0.1) == 0.2


def test_where_it_is_refused(qkv, packed):
    config = S2OConfig(error=0.1)
    q, k, v = packed([100], [100])
    accepted = "accepted: a tau, or one for each query head, as s2o_attention with that error finds.*tail='none'"
    with pytest.raises(ValueError, match=f"s2o_attention_varlen: config.error is 0.1; {accepted}"):
        s2o_attention_varlen(q, k, v, [0, 100], config=config)
    pages, table = np.zeros((4, 16, 2, 64), np.float32), np.zeros((1, 4), np.int32)
    with pytest.raises(ValueError, match=f"s2o_attention_paged: config.error is 0.1; {accepted}"):
        s2o_attention_paged(np.zeros((1, 4, 8, 64), np.float32), pages, pages, table, seqlen_k=30, config=config)
    with pytest.raises(ValueError, match=r"error has 3 numbers, q has 4 heads"):
        s2o_attention(*qkv(100, heads=4), config=S2OConfig(error=(0.1, 0.1, 0.1)))
    with pytest.raises(ValueError, match="config.error with is_causal=False and 2 segments"):
        s2o_attention(*qkv(200), config=config, is_causal=False)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
def test_calls_that_come_again(path_config, gpu):
    """Replayed, and captured by the caller: each time what the arrays then hold leads to."""
    import cupy

    config = path_config.with_error(0.1)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        q, k, v = gpu(3000, heads=4, head_dim=128)
        fresh = lambda: s2o_attention(q.copy(), k.copy(), v.copy(), config=config, return_stats=True)  # noqa: E731
        out = cupy.empty_like(q)
        results = []
        for i in range(4):
            q *= 1 + i / 4
            _, stats = s2o_attention(q, k, v, config=config, out=out, return_stats=True)
            o, other = fresh()
            results.append((out == o).all() & (stats.tau_per_head == other.tau_per_head).all())
        stream.begin_capture()
        o, stats = s2o_attention(q, k, v, config=config, return_stats=True)
        graph = stream.end_capture()
        for _ in range(3):
            q /= 2
            graph.launch(stream=stream)
            expected, other = fresh()
            results.append((expected == o).all() & (stats.tau_per_head == other.tau_per_head).all())
        stream.synchronize()
        assert all(map(bool, results))


# ---------------------------------------------------------------- S2OStats.error_per_head


@pytest.mark.sampled(3)
@pytest.mark.parametrize("asks", ["tau", "taus", "error"])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_stats_estimate_the_error(device, qkv, asks, layout):
    """Of few segments all are taken: the estimate is the error."""
    host = qkv(900, batch=2, heads=4, kv_heads=2)
    config = {
        "tau": device.config, "taus": device.config.with_tau((0.5, 0.01, 0.0, 0.1)), "error": asked(device, 0.1)
    }[asks]  # fmt: skip
    q, k, v = (device.array(x.swapaxes(1, 2) if layout == "BSHD" else x) for x in host)
    o, stats = s2o_attention(q, k, v, config=config, layout=layout, return_stats=True)
    dense = dense_attention(*(device.round(x) for x in host))[0]
    o = device.host(o).swapaxes(1, 2) if layout == "BSHD" else device.host(o)
    squared = lambda x: np.square(x).sum(axis=(2, 3))  # noqa: E731
    found = stats.error_per_head
    assert found.dtype == np.float64 and found is stats.error_per_head
    # Two outputs, each rounded by up to 2^-8; float32.
    exactness, rounding = (0.05, 2.0**-7) if device.kind == "cuda" else (1e-4, 1e-4)
    np.testing.assert_allclose(found, np.sqrt(squared(o - dense) / squared(dense)), rtol=exactness, atol=rounding)


def test_stats_of_one_sequence_and_of_dense_calls(device, qkv):
    q, k, v = (device.array(x[0]) for x in qkv(700, heads=4))
    _, stats = s2o_attention(q, k, v, config=asked(device, 0.1), return_stats=True)
    assert stats.error_per_head.shape == (1, 4) and (stats.error_per_head > 0).all()
    if device.kind == "cuda":
        _, stats = s2o_attention(q, k, v, config=S2OConfig(dense_up_to=700), return_stats=True)
        assert (stats.error_per_head == 0).all()
    _, stats = s2o_attention(q[:, :0], k, v, return_stats=True)
    assert (stats.error_per_head == 0).all()


def test_stats_that_cannot_tell(device, qkv, packed):
    q, k, v = (device.array(x) for x in qkv(700, heads=4))
    _, stats = s2o_attention(q * 1, k, v, config=device.config, return_stats=True)
    with pytest.raises(ValueError, match="q, k or v of the call are gone; accepted: keep them"):
        _ = stats.error_per_head
    q, k, v = (device.array(x) for x in packed([700], [700]))
    _, (stats,) = s2o_attention_varlen(q, k, v, [0, 700], config=device.config, return_stats=True)
    with pytest.raises(ValueError, match="accepted: statistics of s2o_attention; for a packed or paged call"):
        _ = stats.error_per_head


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_stats_of_frameworks(name, qkv):
    module = pytest.importorskip(name)
    arrays = qkv(700, heads=4)
    _, expected = s2o_attention(*arrays, config=SMALL, return_stats=True)
    arrays_of = on_the_cpu(name, module, *arrays)
    _, stats = s2o_attention(*arrays_of, config=SMALL, return_stats=True)
    np.testing.assert_allclose(stats.error_per_head, expected.error_per_head, rtol=1e-4)


def test_stats_go_to_other_processes(qkv):
    """Without q, k and v, which are not there."""
    q, k, v = qkv(700, heads=4)
    _, stats = s2o_attention(q, k, v, config=SMALL, return_stats=True)
    found = pickle.loads(pickle.dumps(stats))
    assert found.density == stats.density and (found.visited == stats.visited).all()
    for name in ("problem", "config", "path", "path_reason"):
        assert getattr(found, name) == getattr(stats, name)
    with pytest.raises(ValueError, match="S2OStats.error_per_head: accepted"):
        _ = found.error_per_head


@pytest.mark.slow
def test_the_whole_sequence_decides(qkv):
    """Unlike with a tau: rows far before a change stop elsewhere, as docs/tuning.md says."""
    q, k, v = qkv(1500, heads=4, kv_heads=2)
    config = replace(SMALL, dense_up_to=None).with_error(0.02)
    before, stats = s2o_attention(q, k, v, config=config, return_stats=True)
    v[:, :, 1400:] *= 100
    after, other = s2o_attention(q, k, v, config=config, return_stats=True)
    assert (stats.tau_per_head != other.tau_per_head).any() and (before[:, :, 64:1344] != after[:, :, 64:1344]).any()


def test_a_large_or_small_number_is_what_float32_holds(qkv):
    q, k, v = qkv(300, heads=4)
    _, stats = s2o_attention(q, k, v, config=replace(SMALL, tau=1e300), return_stats=True)
    assert (stats.tau_per_head == math.inf).all()


def test_an_estimate_needs_taus(qkv):
    with pytest.raises(ValueError, match="^error_per_head: config.error is 0.1; accepted: a tau, .*tail='none'"):
        error_per_head(*qkv(300, heads=4), S2OConfig(error=0.1))


@pytest.mark.parametrize("changes", [{"dense_last": 128}, {"tail": "first_order"}], ids=str)
def test_what_the_search_leaves_out_of_account(changes):
    """Dense last queries, and a tail, while taus are tried."""
    q, k, v = inputs.builtin("slash", length=1024, head_dim=32)
    config = S2OConfig(error=0.05, block_n=64)
    (_, plain), (_, stats) = (
        s2o_attention(q, k, v, config=x, return_stats=True) for x in (config, replace(config, **changes))
    )
    np.testing.assert_array_equal(stats.tau_per_head, plain.tau_per_head)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "of_asked", "worst"), [(1024, 1.02, 1.36), (2816, 0.98, 1.00)])
def test_what_short_calls_err_by(length, of_asked, worst):
    """All segments are taken, but a head's error has few steps, between which the taus that are tried may lie:
    docs/tuning.md says these figures."""
    q, k, v = (x.astype(np.float32) for x in inputs.builtin("trace", length=length))
    o, stats = s2o_attention(q, k, v, config=S2OConfig(error=0.02), return_stats=True)
    assert len(sampled(stats.problem, stats.config).segments) == -(-length // 128)
    dense = dense_attention(q, k, v)[0]
    squared = lambda x, axes=None: np.square(x).sum(axis=axes)  # noqa: E731
    assert np.sqrt(squared(o - dense) / squared(dense)) / 0.02 == pytest.approx(of_asked, abs=0.01)
    by_head = np.sqrt(squared(o - dense, (0, 2, 3)) / squared(dense, (0, 2, 3)))
    assert by_head.max() / 0.02 == pytest.approx(worst, abs=0.01)
