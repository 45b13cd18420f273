"""Heads that take turns for their lists to be within the workspace: the bits of one call, and shorter lists."""

from __future__ import annotations

import numpy as np
import pytest
from schedules import FRAMEWORKS

from s2o_cupy.methods import VerticalSlashConfig, sparse_attention
from s2o_cupy.methods import attention as module

LISTS = 4 * 4 * sum(range(0, 1500, 128))  # bytes of those of a KV head with 4 query heads


@pytest.fixture
def turns(monkeypatch):
    """Heads of each selection."""
    found = []

    def observed(q, k, config, **options):
        found.append((q.shape, k.shape))
        return select(q, k, config, **options)

    select = module.select
    monkeypatch.setattr(module, "select", observed)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_bits_of_one_call(monkeypatch, turns, qkv, name, layout):
    framework = FRAMEWORKS[name]()
    arrays = [x.astype(np.float32) for x in qkv(1500, heads=12, kv_heads=3, head_dim=8, batch=2)]
    if layout == "BSHD":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    config = VerticalSlashConfig(verticals=40, slashes=40, workspace_bytes=1 << 20)
    options = {"config": config, "layout": layout, "return_lse": True}
    given = [framework.array(x) for x in arrays]
    expected = sparse_attention(*given, **options)
    assert len(turns) == 1  # within 1 MiB
    object.__setattr__(config, "workspace_bytes", 2 * 2 * LISTS)  # two KV heads of both sequences
    turns.clear()
    found = sparse_attention(*given, **options)
    heads = 1 if layout == "BHSD" else 2
    assert [q[heads] for q, _ in turns] == [8, 4] and [k[heads] for _, k in turns] == [2, 1]
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, framework.kind) and x.shape == y.shape
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    if name != "jax":
        out = framework.array(np.zeros_like(arrays[0]))
        assert sparse_attention(*given, config=config, layout=layout, out=out) is out
        np.testing.assert_array_equal(np.asarray(out), np.asarray(expected[0]))
    turns.clear()
    sparse_attention(*given, config=config, layout=layout, return_stats=True)
    assert len(turns) == 1  # statistics keep the schedule


def test_an_output_is_checked_as_a_whole(turns, qkv):
    """Before the first turn, which has right heads of it."""
    q, k, v = (x.astype(np.float32) for x in qkv(1500, heads=12, kv_heads=3, head_dim=8))
    config = VerticalSlashConfig(verticals=40, slashes=40, workspace_bytes=1 << 20)
    object.__setattr__(config, "workspace_bytes", LISTS)
    out = np.full((1, 20, 1500, 8), 7, np.float32)
    with pytest.raises(ValueError, match=r"^sparse_attention: out has shape \(1, 20, 1500, 8\); accepted: \(1, 12"):
        sparse_attention(q, k, v, config=config, out=out)
    assert turns == [] and (out == 7).all()
