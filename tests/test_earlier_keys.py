"""What the keys before each segment hold of the softmax mass, and what of that S2O left out: counted pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.reference import s2o as stages
from s2o_cupy.tools import demo, inputs
from s2o_cupy.tools.earlier_keys import EarlierKeys, SegmentMap, segment_map, segment_maps

CONFIG = S2OConfig(segment=64, block_m=32, block_n=32, unit=8, window=16, tau=0.05, dense_up_to=0)


def pair_by_pair(q, k, v, config, head):
    """(queries, pairs with earlier keys, those computed, their mass, that of those computed)."""
    geometry_offset, kv = k.shape[2] - q.shape[2], head * k.shape[1] // q.shape[1]
    one = q[:, head : head + 1], k[:, kv : kv + 1], v[:, kv : kv + 1]
    found = stages.s2o(*one, config)
    scale = 1 / math.sqrt(q.shape[3])
    queries = pairs = computed = 0
    mass = computed_mass = 0.0
    for i in range(q.shape[2]):
        n, at = divmod(i, config.segment)
        s = one[0][0, 0, i] @ one[1][0, 0, : i + geometry_offset + 1].T * scale
        p = np.exp(s - s.max(), dtype=np.float64)
        p /= p.sum()
        place = found.q_order[0, 0, n].tolist().index(at)  # which row of the permuted queries it is
        seen = found.k_order.keys[n][0, 0][: found.visited[0, 0, n, place // config.block_m] * config.block_n]
        queries, pairs, computed = queries + 1, pairs + len(found.k_order.keys[n][0, 0]), computed + len(seen)
        mass, computed_mass = mass + p[found.k_order.keys[n][0, 0]].sum(), computed_mass + p[seen].sum()
    return queries, pairs, computed, mass, computed_mass


@pytest.mark.parametrize("queries", [300, 130])  # of a prompt, and of its end
def test_sums_are_those_of_all_pairs(queries):
    q, k, v = inputs.builtin("trace", 300, dtype="float32")
    q = q[:, :, -queries:]
    visited = np.asarray(s2o_attention(q, k, v, config=CONFIG, return_stats=True)[1].visited)
    for head in (0, 3):
        total = EarlierKeys()
        for view in segment_maps(q, k, v, CONFIG, visited, head=head, scale=1 / math.sqrt(128)):
            assert view.first == 300 - queries + 64 * view.segment
            assert view.visited.shape == view.mass.shape and view.visited.sum() == EarlierKeys.of(view).computed_pairs
            total = total.with_more(EarlierKeys.of(view))
        expected = pair_by_pair(q, k, v, CONFIG, head)
        assert total[:3] == expected[:3] and 0 < expected[2] < expected[1]
        # Each mass is a sum of float32 softmax terms, of an error of some 1e-7 each; all are positive.
        np.testing.assert_allclose(total[3:], expected[3:], rtol=1e-5)
        said = total.to_dict()
        assert said["earlier_mass"] == pytest.approx(total.mass / queries)
        assert said["earlier_mass_left_out"] == pytest.approx(1 - expected[4] / expected[3], rel=1e-3)
        assert said["earlier_pairs_computed"] == pytest.approx(expected[2] / expected[1])


def test_one_segment_by_the_references_decisions():
    q, k, v = inputs.builtin("trace", 300, dtype="float32")
    visited = np.asarray(s2o_attention(q, k, v, config=CONFIG, return_stats=True)[1].visited)
    scale = 1 / math.sqrt(128)
    mine = segment_map(q, k, v, CONFIG, head=2, segment=4, scale=scale)
    views = list(segment_maps(q, k, v, CONFIG, visited, head=2, scale=scale))
    assert [x.segment for x in views] == list(range(5)) and mine.first == 256
    for name in SegmentMap._fields:
        np.testing.assert_array_equal(getattr(mine, name), getattr(views[4], name))


def test_nothing_before_the_first_segment():
    q, k, v = inputs.builtin("trace", 60, dtype="float32")
    (view,) = segment_maps(q, k, v, CONFIG, head=0, scale=1)
    assert EarlierKeys.of(view).to_dict() == {
        "earlier_mass": 0.0, "earlier_pairs_computed": 1.0, "earlier_mass_left_out": 0.0,
    }  # fmt: skip


def test_shares_of_mass_that_is_not_finite_or_rounds_up():
    """NaN is not hidden, and never more mass is computed than there is."""
    for computed, left_out in ((math.nan, math.nan), (0.5 + 1e-9, 0.0), (0.25, 0.5)):
        found = EarlierKeys(queries=1, pairs=2, computed_pairs=1, mass=0.5, computed_mass=computed).to_dict()
        assert found["earlier_mass_left_out"] == pytest.approx(left_out, nan_ok=True)


@pytest.mark.slow
def test_the_recorded_prompt():
    """What S2O is for: a quarter of the pairs is computed, and two heads that look for single places keep nearly all of
    what these hold."""
    found = demo.run(inputs.builtin("retrieval"), picture=None)
    assert found["overall"]["density"] < 0.3 and found["overall"]["earlier_pairs_computed"] < 0.3
    assert [row["head"] for row in found["heads"]] == [0, 1, 2, 3]
    looking = [row for row in found["heads"] if row["earlier_mass"] > 0.8]
    assert len(looking) == 2 and all(row["earlier_mass_left_out"] < 0.03 for row in looking)
    text = demo.table(found)
    assert "the last 1,024 queries of 16,384 tokens" in text and "is plain dense attention" not in text
    row = next(line for line in text.splitlines() if line.lstrip().startswith("all"))
    assert row.endswith(f"{found['overall']['earlier_mass_left_out']:.1%}")


def test_tiles_of_a_short_last_segment():
    q, k, v = (x[:, :, :280] for x in inputs.builtin("trace", 300, dtype="float32"))
    views = list(segment_maps(q, k, v, CONFIG, head=0, scale=1))
    assert [(len(x.mass), len(x.q_order), len(x.stops)) for x in views] == [(64, 64, 2)] * 4 + [(24, 24, 1)]


def test_orders_of_a_call_whose_taus_an_error_found(qkv):
    """With a tail, of which a part of tau is asked for besides: the visits are those of the call."""
    q, k, v = qkv(600, heads=4, kv_heads=2)
    config = S2OConfig(error=0.1, tail="first_order", block_m=64, block_n=64)
    stats = s2o_attention(q, k, v, config=config, return_stats=True)[1]
    maps = [*segment_maps(q, k, v, config, stats.visited, head=3, scale=0.125)]
    assert len(maps) == stats.visited.shape[2]
