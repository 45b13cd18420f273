"""A-shape: dense attention under its mask, on every path."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import has_gpu
from gpu_rounding import allowed_error
from schedules import FRAMEWORKS, masked_attention, meant

from s2o_cupy import gather_attention
from s2o_cupy.methods import AShapeConfig, select, sparse_attention
from s2o_cupy.reference.methods.a_shape import attended

CONFIGS = [{"initial": 5, "window": 100}, {"initial": 0, "window": 0}, {"initial": 300, "window": 64},
           {"initial": 128}]  # fmt: skip


@pytest.mark.parametrize("lengths", [(500, 500), (300, 700), (1, 300), (128, 128), (0, 10)], ids=str)
@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_the_mask(qkv, lengths, options):
    q, k, v = qkv(*lengths, batch=2, heads=4, kv_heads=2, head_dim=16)
    config = AShapeConfig(**options)
    mask = attended(*lengths, config)
    schedule = select(q, k, config)
    schedule.check()
    if lengths[0]:
        assert np.array_equal(meant(schedule, 1, 1)[0, 0], mask)
    o, lse, stats = sparse_attention(q, k, v, config=config, return_lse=True, return_stats=True)
    exact, of_rows = masked_attention(q, k, v, np.broadcast_to(mask, (2, 4, *mask.shape)))
    np.testing.assert_allclose(o, exact, atol=1e-5)
    np.testing.assert_allclose(lse, of_rows, atol=1e-5)
    visible = np.tri(*lengths, lengths[1] - lengths[0]).sum()
    assert stats.density == pytest.approx(mask.sum() / visible if visible else 0)


def test_a_window_of_all_is_dense():
    assert attended(300, 300, AShapeConfig(window=300)).sum() == np.tri(300).sum()
    first, last = np.flatnonzero(attended(1000, 1000, AShapeConfig(initial=2, window=256))[700])[[0, 2]]
    assert (first, last) == (0, 640 - 256)  # the block of query 700 begins with 640


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(name, qkv):
    framework = FRAMEWORKS[name]()
    arrays = [framework.array(x.astype(np.float32)) for x in qkv(300, heads=4, kv_heads=2, head_dim=16)]
    o = sparse_attention(*arrays, config=AShapeConfig(initial=3, window=64))
    assert isinstance(o, framework.kind)
    exact = sparse_attention(*(np.asarray(x) for x in arrays), config=AShapeConfig(initial=3, window=64))
    np.testing.assert_array_equal(np.asarray(o), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_on_a_gpu(path, qkv, options):
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    import cupy

    host = [x.astype(np.float16) for x in qkv(700, 900, heads=4, kv_heads=2, head_dim=64)]
    q, k, v = (cupy.asarray(x) for x in host)
    config = AShapeConfig(**options, path=path)
    o = sparse_attention(q, k, v, config=config)
    seen = np.broadcast_to(attended(700, 900, config), (1, 4, 700, 900))
    exact, _ = masked_attention(*host, seen)
    weight, _ = masked_attention(*host[:2], np.abs(host[2]), seen)
    assert (np.abs(o.get().astype(np.float64) - exact) <= allowed_error("float16", weight, *host[:2])).all()
    assert (gather_attention(q, k, v, select(q, k, config), path=path) == o).all()


def test_what_is_refused(qkv):
    q, k, v = qkv(200)
    with pytest.raises(ValueError, match="AShapeConfig: window is -1; accepted: an integer from 0"):
        AShapeConfig(window=-1)
    with pytest.raises(ValueError, match="AShapeConfig: is_causal is False; accepted: True"):
        sparse_attention(q, k, v, config=AShapeConfig(), is_causal=False)
