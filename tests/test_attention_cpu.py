"""What s2o_attention computes, case by case. On the CPU always; on a GPU too when one is present."""

from __future__ import annotations

import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from conftest import has_hopper
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s2o_cupy import S2OConfig, S2OStats, s2o_attention
from s2o_cupy.problem import Problem
from s2o_cupy.spec import STOP_LAG

INPUTS = ("q", "k", "v")
LENGTH = 400  # four segments


# -- dense at tau 0, in every geometry ------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 31, 63, 64, 65, 67, 127, 128, 129, 131, 191, 255, 256, 257, 401])
def test_tau_0_is_dense_at_every_length(device, qkv, length):
    q, k, v = qkv(length)
    device.assert_dense(device.attend(q, k, v, tau=0), q, k, v)


@pytest.mark.parametrize(
    "changes",
    [
        {"segment": 1, "block_m": 64},
        {"segment": 100},
        {"segment": 1000},
        {"window": 1},
        {"window": 200},
        {"window": 5000},
        {"unit": 1},
        {"unit": 128},
        {"rank": "mean"},
        {"rank": "max"},
        {"rank": "max", "pooled_queries": 3},
        {"block_m": 128, "block_n": 128},
        {"block_n": 1024},
    ],
    ids=str,
)
def test_tau_0_is_dense_in_every_configuration(device, qkv, config, changes):
    """Any order of keys and queries gives dense attention when nothing is left out."""
    q, k, v = qkv(333)
    device.assert_dense(device.attend(q, k, v, tau=0, config=replace(config, **changes)), q, k, v)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 300), (100, 300), (200, 201), (256, 512)])
def test_query_and_key_lengths_differ(device, qkv, seqlen_q, seqlen_k, is_causal):
    q, k, v = qkv(seqlen_q, seqlen_k)
    device.assert_dense(device.attend(q, k, v, tau=0, is_causal=is_causal), q, k, v, is_causal=is_causal)


def test_without_causality_queries_may_outnumber_keys(device, qkv):
    q, k, v = qkv(300, 100)
    device.assert_dense(device.attend(q, k, v, tau=0, is_causal=False), q, k, v, is_causal=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (8, 1), (16, 2), (6, 2)])
def test_grouped_query_attention(device, qkv, heads, kv_heads):
    q, k, v = qkv(200, batch=2, heads=heads, kv_heads=kv_heads)
    device.assert_dense(device.attend(q, k, v, tau=0), q, k, v)


@pytest.mark.parametrize("head_dim", [1, 7, 16, 63, 64, 65, 80, 96, 127, 128, 129, 192, 256])
def test_every_head_dim(device, qkv, head_dim):
    q, k, v = qkv(200, head_dim=head_dim)
    device.assert_dense(device.attend(q, k, v, tau=0), q, k, v)


@pytest.mark.parametrize("scale", [0, 0.0, 1.0, 0.03, -0.1, np.float32(0.2)])
def test_scale(device, qkv, scale):
    q, k, v = qkv(200)
    device.assert_dense(device.attend(q, k, v, tau=0, scale=scale), q, k, v, scale=scale)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"softcap": 30}, {"softcap": 1.0, "scale": -0.4}], ids=str)
def test_softcap(device, qkv, head_dim, options):
    q, k, v = qkv(300, head_dim=head_dim)
    device.assert_dense(device.attend(q, k, v, tau=0, **options), q, k, v, **options)


def test_lse_of_capped_scores(device, qkv, config):
    from s2o_cupy.reference.dense import dense_attention

    q, k, v = qkv(200)
    _, exact = dense_attention(*(device.round(x) for x in (q, k, v)), softcap=1.5)
    _, lse = s2o_attention(*map(device.array, (q, k, v)), tau=0, config=config, softcap=1.5, return_lse=True)
    np.testing.assert_allclose(device.host(lse), exact, rtol=0, atol=2.0**-11 * 1.5 + 1e-5)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seqlen_q=st.integers(1, 90),
    more_keys=st.integers(0, 60),
    segment=st.integers(1, 100),
    block_m=st.sampled_from([16, 32, 48]),
    block_n=st.sampled_from([16, 32, 48]),
    window=st.integers(0, 50),
    head_dim=st.integers(1, 32),
    is_causal=st.booleans(),
)
def test_tau_0_is_dense_for_any_sizes(qkv, seqlen_q, more_keys, segment, block_m, block_n, window, head_dim, is_causal):
    """On the CPU, whose tiles may be small."""
    from conftest import DEVICES

    device = DEVICES["cpu"]
    config = S2OConfig(segment=segment, block_m=block_m, block_n=block_n, window=window)
    q, k, v = qkv(seqlen_q, seqlen_q + more_keys, head_dim=head_dim)
    o = device.attend(q, k, v, tau=0, config=config, is_causal=is_causal)
    device.assert_dense(o, q, k, v, is_causal=is_causal)


def test_float64_is_computed_in_float64(qkv, config):
    from s2o_cupy.reference.dense import dense_attention

    q, k, v = (x.astype(np.float64) for x in qkv(300))
    o, lse = s2o_attention(q, k, v, tau=0, config=config, return_lse=True)
    exact, exact_lse = dense_attention(q, k, v)
    assert o.dtype == np.float64
    np.testing.assert_allclose(o, exact, rtol=0, atol=1e-13)
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


def test_lse(device, qkv, config):
    """Natural logarithm, float32, in (batch, heads, seqlen_q) whatever the layout."""
    from s2o_cupy.reference.dense import dense_attention

    q, k, v = qkv(200, batch=2)
    _, exact = dense_attention(*(device.round(x) for x in (q, k, v)))
    for layout in ("BHSD", "BSHD"):
        given = [device.array(x if layout == "BHSD" else x.swapaxes(1, 2)) for x in (q, k, v)]
        _, lse = s2o_attention(*given, tau=0, config=config, layout=layout, return_lse=True)
        assert lse.dtype == np.float32
        np.testing.assert_allclose(device.host(lse), exact, rtol=0, atol=1e-5)


# -- nothing to attend to, one thing to attend to -------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 2, 10, 64), (2, 0, 10, 64), (2, 2, 0, 64), (0, 0, 0, 64), (0, 10, 64)], ids=str)
def test_empty_output(device, shape, config, monkeypatch):
    """Nothing is launched: a backend that would run fails."""
    for backend in ("on_gpu", "on_host"):
        monkeypatch.setattr(f"s2o_cupy.api.{backend}.run", lambda *arguments, **_: pytest.fail("a backend ran"))
    q = device.array(np.zeros(shape))
    o, lse, stats = s2o_attention(q, q, q, config=config, return_lse=True, return_stats=True)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (shape[:-1], np.float32)
    assert stats.density == 0.0
    assert stats.visited.shape[:2] == (shape if len(shape) == 4 else (1, *shape))[:2]


def test_no_query_but_keys(device, qkv, config):
    q, k, v = qkv(0, 10)
    assert device.attend(q, k, v, config=config).shape == q.shape


def test_no_key(device, config):
    """Without causality queries may find no key at all: o is 0, lse is -inf, and no tile is visited."""
    q, k = device.array(np.ones((1, 2, 5, 64))), device.array(np.ones((1, 1, 0, 64)))
    out = device.poisoned((1, 2, 5, 64))
    o, lse, stats = s2o_attention(
        q, k, k, out=out, config=config, is_causal=False, return_lse=True, return_stats=True
    )
    assert stats.visited.size > 0 and not device.host(stats.visited).any()
    assert (device.host(o) == 0).all()
    assert np.isneginf(device.host(lse)).all()


@pytest.mark.parametrize("tau", [0, 0.01, 1e30])
def test_one_token_is_v(device, qkv, tau):
    q, k, v = qkv(1, heads=4, kv_heads=2)
    o = device.attend(q, k, v, tau=tau)
    np.testing.assert_array_equal(o, device.round(v).repeat(2, axis=1))


# -- what is written, what is read ----------------------------------------------------------------


def test_every_element_is_written(device, qkv, config):
    """Outputs of s2o_attention's own start as whatever memory held; out= starts as NaN."""
    q, k, v = qkv(333, batch=2)
    given = [device.array(x) for x in (q, k, v)]
    o, lse = s2o_attention(*given, config=config, return_lse=True)
    into = device.attend(q, k, v, config=config)
    assert np.isfinite(device.host(lse)).all()
    np.testing.assert_array_equal(device.host(o), into)


@pytest.mark.parametrize("length", [65, 200])
def test_memory_around_the_arrays(device, qkv, config, length):
    """NaN just before and after every input is not read; guards around the output stay."""
    host = qkv(length, head_dim=80)
    expected = device.attend(*host, config=config)

    def embedded(x):
        buffer = device.array(np.full(x.size + 2 * 512, np.nan))
        view = buffer[512:-512].reshape(x.shape)
        view[...] = device.array(x)
        return buffer, view

    buffers, given = zip(*map(embedded, (*host, np.full(host[0].shape, 7.0))), strict=True)
    before = [device.host(b).copy() for b in buffers]
    o = s2o_attention(*given[:3], out=given[3], config=config)
    np.testing.assert_array_equal(device.host(o), expected)
    for buffer, old in zip(buffers[:3], before[:3], strict=True):
        np.testing.assert_array_equal(device.host(buffer), old)  # inputs are never written
    guards = np.r_[device.host(buffers[3])[:512], device.host(buffers[3])[-512:]]
    assert np.isnan(guards).all()


def _strided(x, how):
    """An array equal to ``x`` [B, H, S, D] that lies otherwise in memory; x on any device."""
    xp = np if isinstance(x, np.ndarray) else __import__("cupy")
    b, h, s, d = x.shape
    if how == "BSHD transposed":
        return xp.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if how == "head_dim outermost":
        return xp.ascontiguousarray(x.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0)
    big = xp.zeros((b, 2 * h + 1, s + 5, d + 8), x.dtype)
    if how == "sliced":
        view = big[:, 1::2, 3 : s + 3, 8:]
    elif how == "one element in":
        view = big.reshape(-1)[1 : 1 + x.size].reshape(x.shape)
    elif how == "odd row stride":
        view = xp.zeros((b, h, s, d + 1), x.dtype)[..., :d]
    elif how == "every second element":
        view = xp.zeros((b, h, s, 2 * d), x.dtype)[..., ::2]
    elif how == "sequence backwards":
        view = xp.zeros(x.shape, x.dtype)[:, :, ::-1]
    elif how == "all axes backwards":
        view = xp.zeros(x.shape, x.dtype)[::-1, ::-1, ::-1, ::-1]
    else:
        raise ValueError(how)
    view[...] = x
    return view


@pytest.mark.parametrize(
    "how",
    [
        "BSHD transposed",
        "head_dim outermost",
        "sliced",
        "one element in",
        "odd row stride",
        "every second element",
        "sequence backwards",
        "all axes backwards",
    ],
)
def test_strides_do_not_matter(device, qkv, config, how):
    q, k, v = host = qkv(200, batch=2, kv_heads=2, head_dim=80)
    not_hopper = how in ("one element in", "odd row stride", "sequence backwards", "all axes backwards")
    if not_hopper and device.kind == "cuda":
        # The Hopper kernels do not take it.
        config = replace(config, path="portable")
    expected = device.attend(*host, config=config)
    given = [_strided(device.array(x), how) for x in host]
    np.testing.assert_array_equal(device.host(s2o_attention(*given, config=config)), expected)
    if given[0].strides[-1] == given[0].itemsize:  # out has to have a contiguous last axis
        out = _strided(device.poisoned(q.shape), how)
        s2o_attention(*given, out=out, config=config)
        np.testing.assert_array_equal(device.host(out), expected)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_stride_0_inputs(device, rng, config, axis):
    shape = [2, 2, 200, 64]
    host = [rng.standard_normal([1 if a == axis else n for a, n in enumerate(shape)]) for _ in INPUTS]
    given = [device.xp.broadcast_to(device.array(x), shape) for x in host]
    assert given[0].strides[axis] == 0
    expected = device.attend(*(np.broadcast_to(x, shape) for x in host), config=config)
    np.testing.assert_array_equal(device.host(s2o_attention(*given, config=config)), expected)


@pytest.mark.parametrize("ndim", [3, 4])
def test_layouts_and_ranks_agree(device, qkv, config, ndim):
    host = qkv(200, batch=1)
    expected = device.attend(*host, config=config)
    given = [x.swapaxes(1, 2) if ndim == 4 else x[0].swapaxes(0, 1) for x in host]
    o = device.attend(*given, config=config, layout="BSHD")
    np.testing.assert_array_equal(o if ndim == 4 else o[None], expected.swapaxes(1, 2))
    if ndim == 3:
        np.testing.assert_array_equal(device.attend(*(x[0] for x in host), config=config), expected[0])


def test_read_only_inputs(device, qkv, config):
    q, k, v = qkv(200)
    expected = device.attend(q, k, v, config=config)
    given = [device.array(x) for x in (q, k, v)]
    if device.kind == "cpu":  # CuPy arrays have no such flag
        for x in given:
            x.flags.writeable = False
    before = [device.host(x).copy() for x in given]
    np.testing.assert_array_equal(device.host(s2o_attention(*given, config=config)), expected)
    for x, old in zip(given, before, strict=True):
        np.testing.assert_array_equal(device.host(x), old)


# -- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 1e30, float("inf")])
def test_huge_tau_leaves_no_row_empty(device, qkv, config, tau):
    q, k, v = qkv(LENGTH)
    o, lse, stats = s2o_attention(
        *(device.array(x) for x in (q, k, v)), tau=tau, config=config, return_lse=True, return_stats=True
    )
    assert np.isfinite(device.host(o)).all()
    assert np.isfinite(device.host(lse)).all()
    if tau > 1:  # the tile that triggers the stop is kept, and what a path visits before it knows
        lag = STOP_LAG["hopper" if config.block_n == 128 and device.kind == "cuda" else "portable"]
        assert device.host(stats.visited).max() == 1 + lag


def test_density_falls_as_tau_grows(device, qkv, config):
    q, k, v = (device.array(x) for x in qkv(700 * (config.block_n // 64) ** 2))
    densities = []
    for tau in (0, 1e-4, 1e-2, 0.1, 1.0, 100.0):
        _, stats = s2o_attention(q, k, v, tau=tau, config=config, return_stats=True)
        densities.append(stats.density)
    assert densities[0] == 1.0
    assert densities == sorted(densities, reverse=True)
    assert densities[-1] < 0.8


def test_tau_overrides_the_configuration(device, qkv, config):
    q, k, v = qkv(LENGTH * (config.block_n // 64) ** 2)
    by_config = device.attend(q, k, v, config=replace(config, tau=0.2))
    np.testing.assert_array_equal(device.attend(q, k, v, tau=0.2, config=config), by_config)
    assert not np.array_equal(device.attend(q, k, v, tau=0, config=config), by_config)


def test_stats(device, qkv, config):
    """Density by its definition, from visited tiles counted one by one."""
    seqlen = 333 * (config.block_n // 64) ** 2
    given = [device.array(x) for x in qkv(seqlen, batch=2, heads=3, kv_heads=3)]
    config = replace(config, window=20, tau=0.1)
    block_m, block_n = config.block_m, config.block_n
    o, stats = s2o_attention(*given, config=config, return_stats=True)
    visited = stats.visited
    assert isinstance(visited, type(o))
    assert (visited.shape, visited.dtype) == ((2, 3, -(-seqlen // 128), 128 // block_m), np.int32)

    pairs = np.zeros((2, 3))
    tiles = device.host(visited).astype(int)
    for n, first in enumerate(range(0, seqlen, 128)):
        rows = min(128, seqlen - first)
        window = first - max(0, first - 20) // config.unit * config.unit  # from the start of a unit on
        pairs += rows * (rows + 1) // 2 + rows * window
        for t, start in enumerate(range(0, 128, block_m)):
            keys = np.minimum(tiles[:, :, n, t] * block_n, first - window)
            np.testing.assert_array_equal(device.host(stats.stop_positions)[:, :, n, t], keys)
            pairs += np.clip(rows - start, 0, block_m) * keys
    share = pairs / (seqlen * (seqlen + 1) // 2)
    assert 0 < share.min() < share.max() < 1
    assert isinstance(stats.density_per_head, type(o))
    np.testing.assert_allclose(device.host(stats.density_per_head), share, rtol=1e-6)
    assert stats.density == pytest.approx(share.mean(), rel=1e-12)
    assert repr(stats).startswith(f"S2OStats(density: {stats.density:.4g}, visited: ")
    assert (stats.config, stats.problem.heads) == (config, 3)


def test_statistics_are_printed_whatever_has_become_of_their_arrays(qkv):
    """What is printed while something else fails must not fail itself."""
    _, stats = s2o_attention(*qkv(40), return_stats=True)
    assert repr(replace(stats, visited="gone")).startswith("S2OStats(visited: 1x")


def test_stats_say_which_kernels_ran(device, qkv, config):
    given = [device.array(x) for x in qkv(300)]

    def ran(**changes):
        stats = s2o_attention(*given, config=replace(config, **changes), return_stats=True)[1]
        return stats.path, stats.path_reason

    if device.kind == "cpu":
        assert ran() == ("numpy", None)
    elif config.block_m == 128:
        assert ran() == ran(path="hopper") == ran(tau=0, dense_up_to=None) == ("hopper", None)
        assert ran(path="portable") == ("portable", None)
    else:
        reason = "block_n is 64, not 128" if has_hopper() else None
        assert ran() == ("portable", reason)
        assert ran(path="portable") == ("portable", None)


# -- what must not matter -------------------------------------------------------------------------


def test_scaling_v_scales_the_output(device, qkv):
    q, k, v = qkv(LENGTH)
    once, twice = device.attend(q, k, v), device.attend(q, k, 2 * v)
    normal = np.abs(once) >= ml_dtypes.finfo(device.dtype).tiny  # below, float16 rounds more coarsely
    assert normal.mean() > 0.9
    np.testing.assert_array_equal(twice[normal], 2 * once[normal])


def test_permuting_heads_permutes_outputs(device, qkv):
    q, k, v = qkv(LENGTH, heads=4, kv_heads=4)
    order = [2, 0, 3, 1]
    expected = device.attend(q, k, v)[:, order]
    np.testing.assert_array_equal(device.attend(q[:, order], k[:, order], v[:, order]), expected)


def test_batch_entries_are_independent(device, qkv):
    q, k, v = qkv(200, batch=3)
    one = [device.attend(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(3)]
    np.testing.assert_array_equal(device.attend(q, k, v), np.concatenate(one))


def test_repeats_give_the_same_bits(device, qkv):
    q, k, v = qkv(LENGTH, heads=4, kv_heads=2)
    first = device.attend(q, k, v)
    for _ in range(5):
        np.testing.assert_array_equal(device.attend(q, k, v), first)


@pytest.mark.parametrize(("batch", "heads"), [(65535, 1), (1, 65536), (70, 1000)])
def test_many_heads(device, qkv, config, batch, heads):
    """Past 65535, where dimensions y and z of a CUDA grid end; the CPU has no grid."""
    if device.kind == "cpu":
        batch, heads = -(-batch // 1000), -(-heads // 100)
    q, k, v = qkv(2, batch=batch, heads=heads, head_dim=4)
    o = device.attend(q, k, v, tau=0)
    np.testing.assert_array_equal(o[:, :, 0], np.broadcast_to(device.round(v)[:, :, 0], o[:, :, 0].shape))
    device.assert_dense(o, q, k, v)


@pytest.mark.parametrize(
    ("path", "options", "reason"),
    [
        ("hopper", {}, "seqlen_k is 300, and dense_up_to 10,240"),  # of two heads of 64
        ("portable", {"dense_up_to": 300}, "seqlen_k is 300, and dense_up_to 300"),
        ("portable", {"dense_up_to": 299}, None),
        ("hopper", {"tau": 0}, "tau is 0"),
        ("hopper", {"tau": 0, "dense_up_to": 0}, None),
        ("numpy", {}, None),
    ],
)
def test_statistics_say_why_a_call_was_dense(path, options, reason, monkeypatch):
    monkeypatch.setattr("s2o_cupy.plan.launch_plan.DENSE_UP_TO", 8192)  # as it is outside of tests
    config = S2OConfig(**options)
    problem = Problem(1, 2, 1, 300, 300, 64, "float16", True, 0.125)
    stats = S2OStats(np.zeros(problem.visited_shape(config), np.int32), problem, config, path)
    assert stats.dense_reason == reason
    assert (f"dense: {reason}" in repr(stats)) == (reason is not None)


@pytest.mark.parametrize("rank", ["query", "weight", "max", "mean"])
def test_scores_beyond_float16_are_no_matter_of_warnings(qkv, rank):
    arrays = [300 * x for x in qkv(500, heads=2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s2o_attention(*arrays, config=S2OConfig(rank=rank, segment=128), scale=1.0)
