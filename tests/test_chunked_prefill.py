"""A prompt in chunks against the keys so far: seqlen_q < seqlen_k, aligned bottom-right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.reference import dense_attention
from s2o_cupy.tools.metrics import rel_l2

LENGTH = 600


def in_chunks(device, q, k, v, cuts, **options):
    """Each chunk of queries with all keys up to its end; o and lse as float64 on the host."""
    options.setdefault("config", device.config)
    parts = [
        s2o_attention(*(device.array(x) for x in (q[:, :, a:b], k[:, :, :b], v[:, :, :b])), return_lse=True, **options)
        for a, b in pairwise((0, *cuts, q.shape[2]))
    ]
    return [np.concatenate([device.host(part[i]) for part in parts], 2) for i in (0, 1)]


@pytest.mark.parametrize("cuts", [(256, 512), (100, 101, 390), (599,), (1,), (600,)], ids=str)
def test_dense_at_tau_0(device, qkv, cuts):
    """Wherever the prompt is cut, dense attention within the rounding that one call may have."""
    q, k, v = qkv(LENGTH, heads=4, kv_heads=2)
    o, lse = in_chunks(device, q, k, v, cuts, tau=0)
    device.assert_dense(o, q, k, v)
    one, one_lse = in_chunks(device, q, k, v, (), tau=0)
    assert rel_l2(o, one) <= device.tolerance(q, k, v)
    np.testing.assert_allclose(lse, one_lse, rtol=0, atol=2e-2 if device.kind == "cuda" else 1e-5)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 90), max_size=4), st.integers(1, 40), st.integers(0, 50), st.integers(0, 2**32 - 1))
def test_any_cuts_and_segments(cuts, segment, window, seed):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, heads, 90, 8)) for heads in (2, 1, 1))
    config = S2OConfig(segment=segment, tau=0, block_m=16, block_n=16, window=window)
    cuts = sorted(cuts)
    parts = [
        s2o_attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], config=config) for a, b in pairwise((0, *cuts, 90))
    ]
    np.testing.assert_allclose(np.concatenate(parts, 2), dense_attention(q, k, v)[0], rtol=1e-9, atol=1e-12)


def test_same_bits_in_whole_segments(device, qkv):
    """With chunks of whole segments a sparse result is that of one call too, orders and stops included."""
    q, k, v = qkv(LENGTH, heads=4, kv_heads=2)
    for changes in (
        {}, {"window": 50}, {"segment": 64, "unit": 64}, {"unit": 1, "clusters": 2},
        {"rank": "weight", "unit": 1, "pooled_queries": 5}, {"tail": "first_order"},
        {"rank": "mean", "tail": "first_order"}, {"rank": "mean", "window": 50}, {"rank": "max"},
        {"segment": 192}, {"segment": 192, "rank": "mean", "tail": "first_order"},  # the last one is less than a q tile
    ):  # fmt: skip
        config = replace(device.config, **changes)
        segment = config.segment
        one = in_chunks(device, q, k, v, (), config=config)
        for cuts in ((segment,), (2 * segment, 3 * segment), tuple(range(segment, LENGTH, segment))):
            for x, y in zip(in_chunks(device, q, k, v, cuts, config=config), one, strict=True):
                np.testing.assert_array_equal(x, y)
    # Many steps of units, of which the last have no candidate, and scores far from 0: norms are the same.
    q, k, v = qkv(4096, heads=2, kv_heads=1)
    config = replace(device.config, segment=128, unit=4)
    one = in_chunks(device, 16 * q, k, v, (), config=config)
    for x, y in zip(in_chunks(device, 16 * q, k, v, (1152, 3200), config=config), one, strict=True):
        np.testing.assert_array_equal(x, y)
    long = (device.array(x) for x in qkv(3 * LENGTH, heads=4, kv_heads=2))
    assert s2o_attention(*long, config=device.config, return_stats=True)[1].density < 1  # tiles do stop
