"""select and sparse_attention on the CPU: the reference's stages, and what methods must equal."""

from __future__ import annotations

import numpy as np
import pytest

from s2o_cupy import (
    MeanPoolingConfig,
    gather_attention,
    inputs,
    metrics,
    select,
    sparse_attention,
)
from s2o_cupy.reference import dense_attention

CONFIGS = {"MeanPooling": MeanPoolingConfig()}


def draw(rng, seqlen_q, seqlen_k=None, *, batch=1, heads=4, kv_heads=2, head_dim=16, size=1.0):
    q = rng.standard_normal((batch, heads, seqlen_q, head_dim)) * size
    k, v = rng.standard_normal((2, batch, kv_heads, seqlen_k or seqlen_q, head_dim))
    return q, k, v


def columns_of(schedule):
    """Columns that lists hold, bool [B, H, R, C]."""
    form = schedule.form
    found = np.zeros((form.batch, form.list_heads, form.rows, form.units), bool)
    for at in np.ndindex(found.shape[:3]):
        begin, count = schedule.begins[at], -(-schedule.keys[at] // form.unit)
        found[at][schedule.entries[begin : begin + count]] = True
    return found


# ---------------------------------------------------------------- numbers of the built-in trace


@pytest.mark.parametrize(
    ("config", "density", "rel_l2", "rel_l1"), [(MeanPoolingConfig(), 0.575, 0.1229, 0.0347)], ids=str
)
def test_the_trace(trace, config, density, rel_l2, rel_l1):
    q, k, v, dense = trace
    o, stats = sparse_attention(q, k, v, config=config, return_stats=True)
    assert stats.density == pytest.approx(density, abs=1e-3)
    assert metrics.rel_l2(o, dense) == pytest.approx(rel_l2, rel=2e-3)
    assert metrics.rel_l1(o, dense) == pytest.approx(rel_l1, rel=2e-3)


@pytest.fixture(scope="module")
def trace():
    q, k, v = (x.astype(np.float64) for x in inputs.builtin("trace"))
    return q, k, v, dense_attention(q, k, v)[0]


# ---------------------------------------------------------------- the calls


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("lengths", [(700, 700), (300, 900), (1, 400), (128, 128), (640, 1025)], ids=str)
def test_sparse_attention_is_gather_attention_by_what_is_selected(rng, config, lengths):
    q, k, v = draw(rng, *lengths, batch=2)
    schedule = select(q, k, config, scale=0.3)
    schedule.check()
    expected = gather_attention(q, k, v, schedule, scale=0.3, return_lse=True)
    found = sparse_attention(q, k, v, config=config, scale=0.3, return_lse=True)
    for x, y in zip(found, expected, strict=True):
        assert x.tobytes() == y.tobytes()
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    other = sparse_attention(*swapped, config=config, scale=0.3, layout="BSHD")
    np.testing.assert_array_equal(other.swapaxes(1, 2), found[0])
