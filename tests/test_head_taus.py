"""A tau for each head in one call: every head has the bits of a call with its tau alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL, has_gpu
from packs import assert_same_bits, bits, on_the_cpu, starts
from ragged_pages import differing, in_pages

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged, s2o_attention_varlen
from s2o_cupy.plan.head_taus import HEADS, launches
from s2o_cupy.plan.launch_plan import is_dense
from s2o_cupy.problem import validate

TAUS = (0.5, 0.01, 0.0, 0.1)


def of_each(run, config):
    """``run(config)`` -> arrays whose head axis comes first, from a call for each tau."""
    alone = [run(config.with_tau(tau)) for tau in TAUS]
    return [[x[h] for h, x in enumerate(each)] for each in zip(*alone, strict=True)]


def assert_as_alone(run, config):
    together, alone = run(config.with_tau(TAUS)), of_each(run, config)
    for got, want in zip(together, alone, strict=True):
        for h in range(len(TAUS)):
            np.testing.assert_array_equal(bits(got[h]), bits(want[h]), err_msg=f"head {h}")
    return together


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tail", ["none", "first_order"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_each_head_has_the_bits_of_its_own_tau(device, qkv, head_dim, tail):
    q, k, v = (device.array(x) for x in qkv(900, batch=2, heads=4, kv_heads=2, head_dim=head_dim))

    def run(config):
        o, lse, stats = s2o_attention(q, k, v, config=config, return_lse=True, return_stats=True)
        return [x.swapaxes(0, 1) for x in (o, lse, stats.visited)]

    _, _, visited = assert_as_alone(run, replace(device.config, tail=tail))
    of_heads = [int(visited[h].sum()) for h in range(4)]
    # The smaller tau, the more; at 0.01 a tile may visit all of so few keys, as at 0.
    assert of_heads[0] < of_heads[3] < of_heads[1] <= of_heads[2]


def test_packed_and_paged(device, packed, rng):
    lengths_q, lengths_k = [300, 65, 0, 401], [300, 70, 9, 530]
    host = packed(lengths_q, lengths_k)
    q, k, v = (device.array(x) for x in host)
    table, put = in_pages(rng, host[1], lengths_k, 16, "NHD")
    caches = [device.array(put(x)) for x in host[1:]]

    def of_arrays(config):
        o, lse, _ = s2o_attention_varlen(
            q, k, v, starts(lengths_q), starts(lengths_k), config=config, return_lse=True, return_stats=True
        )
        return o.swapaxes(0, 1), lse

    def of_pages(config):
        o, lse = s2o_attention_paged(
            q, *caches, device.xp.asarray(table), seqlen_k=lengths_k, cu_seqlens_q=starts(lengths_q), config=config,
            return_lse=True,
        )  # fmt: skip
        return o.swapaxes(0, 1), lse

    first, second = assert_as_alone(of_arrays, device.config), assert_as_alone(of_pages, device.config)
    np.testing.assert_array_equal(bits(first[0]), bits(second[0]))
    options = {"config": device.config.with_tau(TAUS)}
    assert not differing(device, rng, host, lengths_q, lengths_k, 16, "HND", **options)


def test_sequences_of_a_cache_in_turn(device, qkv, rng):
    """Some attended densely, some not, of one batch."""
    q, k, v = (x.astype(device.dtype) for x in qkv(100, 700, batch=3, heads=4, kv_heads=2))
    lengths = [700, 300, 700]
    rows = [np.concatenate([x[i, :, :n].swapaxes(0, 1) for i, n in enumerate(lengths)]) for x in (k, v)]
    table, put = in_pages(rng, rows[0], lengths, 16, "NHD")
    queries, *caches, entries = (device.xp.asarray(x) for x in (q, put(rows[0]), put(rows[1]), table))

    def run(config):
        found = s2o_attention_paged(queries, *caches, entries, seqlen_k=lengths, config=config, return_lse=True)
        return [x.swapaxes(0, 1) for x in found]

    assert_as_alone(run, replace(device.config, dense_up_to=400))


def test_by_keyword_and_in_what_form(device, qkv):
    q, k, v = (device.array(x) for x in qkv(400, heads=4))
    expected = s2o_attention(q, k, v, config=device.config.with_tau(TAUS))
    for tau in (TAUS, list(TAUS), np.array(TAUS)):
        found, stats = s2o_attention(q, k, v, tau=tau, config=device.config, return_stats=True)
        np.testing.assert_array_equal(bits(found), bits(expected))
        assert stats.config.tau == TAUS
        np.testing.assert_array_equal(device.host(stats.tau_per_head), np.float32([TAUS]).astype(np.float64))
    _, stats = s2o_attention(q, k, v, config=device.config, return_stats=True)
    np.testing.assert_array_equal(device.host(stats.tau_per_head), np.full((1, 4), np.float32(0.05), np.float64))


def test_a_tuple_of_one_number_is_that_number(device, qkv):
    q, k, v = (device.array(x) for x in qkv(400, heads=4))
    one, each = (s2o_attention(q, k, v, tau=tau, config=device.config) for tau in (0.05, [0.05] * 4))
    np.testing.assert_array_equal(bits(one), bits(each))


@pytest.mark.parametrize("bad", [(0.1, 0.2, 0.3), [0.1], (0.1,) * 8])
def test_a_wrong_number_of_them(device, qkv, packed, bad):
    message = rf"tau has {len(bad)} numbers, q has 4 heads; accepted: one number for all heads, or one for each"
    q, k, v = (device.array(x) for x in qkv(100, heads=4))
    with pytest.raises(ValueError, match=message):
        s2o_attention(q, k, v, tau=bad)
    q, k, v = (device.array(x) for x in packed([100], [100]))
    with pytest.raises(ValueError, match=message):
        s2o_attention_varlen(q, k, v, [0, 100], config=S2OConfig(tau=bad))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tau": []}, ValueError, "S2OConfig: tau is empty; accepted: a number, or one for each query head"),
        ({"tau": [0.1, -1]}, ValueError, r"S2OConfig: tau\[1\] is -1; accepted: a number >= 0"),
        ({"tau": {0.1, 0.2}}, TypeError, r"S2OConfig: tau is \{0.1, 0.2\} \(set\)"),
        ({"tau": [0.1, "x"]}, TypeError, r"S2OConfig: tau\[1\] is 'x'"),
        ({"tau": "0.1"}, TypeError, "S2OConfig: tau is '0.1'"),
        ({"tau": [[0.1]]}, TypeError, r"S2OConfig: tau\[0\] is \[0.1\]"),
        ({"tau": 0.1, "error": 0.1}, ValueError, "S2OConfig: tau is 0.1 and error is 0.1; accepted: one of them"),
        ({"error": 0}, ValueError, r"S2OConfig: error is 0; accepted: 0 < error < 1 \(an output of zeros has 1\), or"),
        ({"error": 1}, ValueError, "S2OConfig: error is 1; accepted: 0 < error < 1"),
        ({"error": (0.5, 1.5)}, ValueError, r"S2OConfig: error\[1\] is 1.5; accepted: 0 < error < 1"),
        ({"error": [0.1, float("nan")]}, ValueError, r"S2OConfig: error\[1\] is nan; accepted"),
        ({"error": float("inf")}, ValueError, "S2OConfig: error is inf; accepted: 0 < error < 1"),
        ({"error": [0.1, float("inf")]}, ValueError, r"S2OConfig: error\[1\] is inf; accepted"),
        ({"error": "x"}, TypeError, "S2OConfig: error is 'x'"),
    ],
)
def test_what_a_config_refuses(options, error, message):
    with pytest.raises(error, match=message):
        S2OConfig(**options)


def test_configs_with_numbers_by_head():
    config = S2OConfig(tau=[0.1, 1])
    assert config.tau == (0.1, 1.0) and hash(config) == hash(S2OConfig(tau=(0.1, 1.0)))
    assert config.of_heads(1, 2) == S2OConfig(tau=(1.0,)) and S2OConfig(tau=0.3).of_heads(1, 2) == S2OConfig(tau=0.3)
    assert config.with_tau(0.5) == S2OConfig(tau=0.5) and config != S2OConfig(tau=(0.1, 0.1))
    asked = S2OConfig(error=[0.1, 0.2])
    assert asked.tau is None and asked.error == (0.1, 0.2) and asked.of_heads(0, 1).error == (0.1,)
    assert asked.with_tau(0.3) == S2OConfig(tau=0.3) and replace(asked, error=None) == S2OConfig()
    assert replace(S2OConfig(), error=0.1) == S2OConfig(error=0.1)
    assert S2OConfig() != S2OConfig(tau=0.02) and S2OConfig().with_error(0.1).with_tau(0.02) == S2OConfig(tau=0.02)


def test_the_default_tau_falls_with_the_earlier_keys():
    """From 32,768 of them on by the square root; what is given stays."""
    config = S2OConfig()
    assert config.tau is None and not config.never_stops
    assert [config.tau_of(n) for n in (0, 1, 8192, 32768)] == [0.1] * 4
    assert config.tau_of(131_072) == 0.05 and config.tau_of(524_288) == 0.025
    assert config.tau_of(65_536) == pytest.approx(0.1 / 2**0.5) and config.tau_of(32_769) < 0.1
    assert config.taus(3, 131_072) == (0.05,) * 3
    for tau in (0.02, (0.1, 0.2)):
        assert S2OConfig(tau=tau).tau_of(1 << 20) == tau
    with pytest.raises(ValueError, match=r"error is 0\.1, whose taus a call finds"):
        S2OConfig(error=0.1).tau_of(1)


@pytest.mark.parametrize("keys", [0, 128, 32_768, 32_896, 131_072, 1 << 20])
def test_kernels_are_told_how_the_default_falls(keys):
    """What AttentionParams::tau_of makes of it is `tau_of`; other configs have one tau, or numbers of their own."""
    told = S2OConfig().of_pass
    with np.errstate(divide="ignore"):
        in_kernels = told.tau * min(1.0, 1 / np.sqrt(np.float64(keys * told.tau_falls)))
    assert in_kernels == pytest.approx(S2OConfig().tau_of(keys), rel=1e-15)
    for config, tau in ((S2OConfig(tau=0.3), 0.3), (S2OConfig(tau=(0.1, 0.2)), 0.0), (S2OConfig(error=0.1), 0.0)):
        assert (config.of_pass.tau, config.of_pass.tau_falls) == (tau, 0.0)


@pytest.mark.slow
def test_segments_have_the_default_of_their_keys(device, rng):
    """The bits of calls for each with that tau by name, which more keys than the largest visit."""
    heads, first = 2, 4 << 15  # queries begin behind so many keys
    config = replace(device.config, tau=None, segment=64, dense_up_to=0)
    q = rng.standard_normal((1, heads, 128, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, heads, first + 128, 16)).astype(np.float32)
    q, k, v = (device.array(x) for x in (q, k, v))
    o, stats = s2o_attention(q, k, v, config=config, return_stats=True)
    assert np.all(device.host(stats.tau_per_head) == np.float32(config.tau_of(first + 64)))
    for n in range(2):
        rows, keys = slice(64 * n, 64 * n + 64), first + 64 * n + 64
        part = (q[:, :, rows], k[:, :, :keys], v[:, :, :keys])
        own = config.tau_of(keys - 64)
        # A GPU's reciprocal square root may be off by a factor of 2^-20, which decides nothing here.
        for tau, same in ((own, True), (own * (1 + 2**-20), True), (4 * own, False)):
            alone = s2o_attention(*part, config=config.with_tau(tau))
            assert np.array_equal(device.host(alone), device.host(o[:, :, rows])) == same
    larger = s2o_attention(q, k, v, config=config.with_tau(4 * config.tau_of(first)), return_stats=True)[1]
    assert stats.density > larger.density


def test_all_heads_at_0_are_dense():
    shape = (1, 4, 20_000, 64)
    for tau, dense in (((0.0,) * 4, True), ((0.0, 0.0, 0.0, 0.1), False)):
        config = S2OConfig(tau=tau)
        problem = validate([shape] * 3, ["bfloat16"] * 3, config=config, backend="cupy")
        assert is_dense(problem, config) is dense
        assert config.never_stops is dense
        assert replace(config, tail="first_order").adds_tail is not dense


def test_more_heads_than_a_launch_takes():
    from s2o_cupy.plan.build import Builder, Workspace

    heads = 2 * HEADS + 3
    config = S2OConfig(tau=[h / 1000 for h in range(heads - 1)] + [1e300])
    problem = validate([(2, heads, 300, 8)] * 3, ["bfloat16"] * 3, config=config, backend="cupy")
    found = launches(Builder(problem, problem.geometry(config), {}, Workspace({}, 0, 0)), problem, config)
    values = np.concatenate([x.params["values"][: x.params["count"]] for x in found])
    assert [int(x.params["first"]) for x in found] == [0, HEADS, 2 * HEADS] and all(x.blocks == 2 for x in found)
    np.testing.assert_array_equal(values[:-1], np.arange(heads - 1).astype(np.float32) / np.float32(1000))
    assert np.isinf(values[-1])


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
def test_graphs_hold_them(path_config, gpu):
    """Replayed calls, and a call that its caller captures though nobody has prepared it."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    config = path_config.with_tau(TAUS)
    with stream:
        q, k, v = gpu(900, heads=4, head_dim=128)
        out = cupy.empty_like(q)
        expected = s2o_attention(q, k, v, config=config)
        for _ in range(3):
            _, stats = s2o_attention(q, k, v, config=config, out=out, return_stats=True)
            assert_same_bits(out, expected)
        stream.begin_capture()
        other = s2o_attention(q[:, :, 100:], k, v, config=config)
        graph = stream.end_capture()
        graph.launch(stream=stream)
        stream.synchronize()
        assert_same_bits(other, s2o_attention(q[:, :, 100:], k, v, config=config))


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_frameworks_and_their_operators(name, qkv):
    q, k, v = qkv(300, heads=4, kv_heads=2, head_dim=16)
    expected = s2o_attention(q, k, v, config=SMALL.with_tau(TAUS))
    module = pytest.importorskip(name)
    attention = pytest.importorskip(f"s2o_cupy.integrations.{name}").attention
    arrays = on_the_cpu(name, module, q, k, v)
    for options in ({"config": SMALL.with_tau(TAUS)}, {"config": SMALL, "tau": TAUS}):
        np.testing.assert_array_equal(np.asarray(s2o_attention(*arrays, **options)), expected)
        np.testing.assert_array_equal(np.asarray(attention(*arrays, **options)), expected)
