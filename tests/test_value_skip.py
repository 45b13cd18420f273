"""Values that lists leave out: the rule by its words, what must equal what, and what is refused. No GPU."""

from __future__ import annotations

import numpy as np
import pytest
from schedules import FRAMEWORKS
from test_plan import a_problem

from s2o_cupy import Schedule, gather_attention
from s2o_cupy.methods import SpargeConfig, select, sparse_attention
from s2o_cupy.plan.paths import HOPPER, PORTABLE
from s2o_cupy.plan.schedule import ScheduleShape
from s2o_cupy.reference import dense_attention, s2o
from s2o_cupy.reference.lists import KeyLists, attend_lists
from s2o_cupy.reference.value_skip import ValueSkips
from s2o_cupy.spec import VALUE_KEYS, VALUE_ROWS
from s2o_cupy.tools import inputs, metrics

REFUSED = [0, 0.0, 1, float("nan"), float("inf"), (-1.0, 0.0)]


def in_order(seqlen_k):
    """All keys for a q tile, by position."""
    return KeyLists(np.arange(seqlen_k), np.zeros((1, 1, 1, 1), int), np.full((1, 1, 1, 1), seqlen_k))


def by_words(q, k, v, keys, limit, rows, block):
    """One q tile, a block and a group at a time, as the rule says it. Output and blocks left out, by group."""
    s = q @ k[keys].T / np.sqrt(q.shape[1])
    o, left_out = np.zeros_like(q), set()
    for first in range(0, len(q), rows):
        of = slice(first, first + rows)
        m, mass = np.full(s[of].shape[0], -np.inf), 0.0
        weight = np.zeros_like(s[of])
        for c in range(0, len(keys), block):
            here = s[of, c : c + block]
            m_new = np.maximum(m, here.max(axis=1))
            mass = mass * np.exp(m - m_new) + np.exp(here - m_new[:, None]).sum(axis=1)
            weight *= np.exp(m - m_new)[:, None]
            if max(here.max(axis=1) - m_new) <= limit:
                left_out.add((first // rows, c // block))
            else:
                weight[:, c : c + block] = np.exp(here - m_new[:, None])
            m = m_new
        o[of] = weight @ v[keys] / mass[:, None]
    return o, left_out


@pytest.mark.parametrize(("rows", "block"), [(32, 64), (64, 64), (16, 32), (50, 16)])
@pytest.mark.parametrize("limit", [-0.3, -1.0, -3.0])
def test_the_rule(rng, rows, block, limit):
    q, v = rng.standard_normal((100, 16)), rng.standard_normal((500, 16))
    k = rng.standard_normal((500, 16)) * np.linspace(4, 0.1, 500)[:, None]
    lists = in_order(500)
    keys = lists.positions(0, 0, 0, 0)
    skips = ValueSkips(limit, rows, block)
    state, _ = attend_lists(*(x[None, None] for x in (q, k, v)), lists, values=skips)
    expected, left_out = by_words(q, k, v, keys, limit, rows, block)
    np.testing.assert_allclose(s2o.finish(state)[0][0, 0], expected, atol=1e-12)
    assert set(zip(*map(tuple, np.nonzero(skips.found[0, 0, 0, 0])), strict=True)) == left_out
    sizes = [min(rows, 100 - g * rows) * min(block, 500 - c * block) for g, c in left_out]
    assert skips.skipped((1, 1, 1, 1)).item() == sum(sizes)
    assert 0 < len(left_out) < skips.found[0, 0, 0, 0].size


def test_margins_by_hand():
    """Of a row and blocks of one key each. A margin of just the limit is left out."""
    scores = np.array([0.0, -1, 2, 1, 1.5])
    skips = ValueSkips(-1.0, rows=1, keys=1)
    arrays = (x.reshape(1, 1, -1, 1) for x in (np.ones(1), scores, np.ones(5)))
    attend_lists(*arrays, in_order(5), values=skips)
    at, inf = (0, 0, 0, 0), np.inf
    np.testing.assert_array_equal(skips.margins[at], [[0, -1, 0, -1, -0.5]])  # to the maximum up to there
    np.testing.assert_array_equal(skips.from_first[at], [[inf, inf, 2, 1, 1.5]])  # to that after the first block
    np.testing.assert_array_equal(skips.found[at], [[False, True, False, True, False]])
    assert skips.pairs[at] == 2


def test_sums_and_stops_count_what_is_left_out(rng):
    """The lse, and where a q tile stops, are the same with the filter and without."""
    q, k, v = rng.standard_normal((3, 1, 1, 600, 16))
    q, k, lists = q[:, :, :128], k * np.linspace(4, 0.1, 600)[:, None], in_order(600)
    plain, visited = attend_lists(q, k, v, lists, tau=0.3, block_n=64)
    skips = ValueSkips(-0.5, 32)
    found, taken = attend_lists(q, k, v, lists, tau=0.3, block_n=64, values=skips)
    assert np.array_equal(visited, taken) and skips.skipped(taken.shape).any()
    np.testing.assert_allclose(s2o.finish(found)[1], s2o.finish(plain)[1], rtol=1e-12)
    np.testing.assert_allclose(found.l, plain.l, rtol=1e-12)


def test_what_is_given_is_left_out(rng):
    q, k, v = rng.standard_normal((3, 1, 1, 64, 16))
    lists = in_order(64)
    given = np.zeros((1, 1, 1, 1, 2, 1), bool)
    given[..., 1, :] = True
    skips = ValueSkips(-1.0, given=given)
    o = s2o.finish(attend_lists(q, k, v, lists, values=skips)[0])[0]
    assert (o[0, 0, 32:] == 0).all() and (o[0, 0, :32] != 0).all()
    assert skips.skipped((1, 1, 1, 1)).item() == 32 * 64


@pytest.mark.slow
def test_on_the_trace():
    """The lower the limit the less is left out, and the smaller the error; -inf leaves out nothing."""
    q, k, v = inputs.builtin("trace", dtype="float32", length=1536)
    exact, _ = dense_attention(q, k, v)
    shares, errors = [], []
    for limit in (-1.0, -3.0, -6.0, -np.inf, None):
        config = SpargeConfig(tau=1, theta=-1, value_skip=limit)
        o, stats = sparse_attention(q, k, v, config=config, return_stats=True)
        shares.append(stats.value_density)
        errors.append(metrics.rel_l1(o, exact))
        assert stats.density == 1.0
    assert shares == sorted(shares) and shares[0] < 0.8 and shares[-2:] == [1.0, 1.0]
    assert errors == sorted(errors, reverse=True) and errors[1] < 0.01


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks_and_limits_of_each_head(name, qkv):
    array = FRAMEWORKS[name]().array
    q, k, v = (array(x.astype(np.float32)) for x in qkv(300, heads=4, kv_heads=2, head_dim=16))
    config = SpargeConfig(tau=1, theta=-1, value_skip=(-0.01, -0.1, -1.0, -1e30))
    schedule = select(q, k, config)
    o, stats = gather_attention(q, k, v, schedule, return_stats=True)
    skipped = np.asarray(stats.skipped).sum(axis=(0, 2, 3))
    assert skipped[0] > 0 and skipped[-1] == 0 and stats.value_density < stats.density
    plain = sparse_attention(q, k, v, config=SpargeConfig(tau=1, theta=-1))
    np.testing.assert_allclose(np.asarray(o)[0, 3], np.asarray(plain)[0, 3], atol=1e-6)


def test_what_paths_leave_out_together():
    assert VALUE_ROWS == {"portable": 32, "hopper": 64} and VALUE_KEYS == 64
    assert {HOPPER.name, PORTABLE.name} == set(VALUE_ROWS)


@pytest.mark.parametrize("value", REFUSED, ids=str)
def test_numbers_that_are_not_below_0_are_refused(value):
    with pytest.raises(ValueError, match=r"value_skip(\[1\])? is .*; accepted: None, or a number below 0"):
        SpargeConfig(tau=0.9, theta=0, value_skip=value)
    with pytest.raises(ValueError, match=r"Schedule.from_block_mask: value_skip(\[\d\])? is .*a row's own maximum"):
        Schedule.from_block_mask(np.ones((1, 1, 1, 1), bool), segment=128, value_skip=value)


def test_what_else_is_refused(qkv):
    for value in ("x", True, [None]):
        with pytest.raises(TypeError, match=r"value_skip(\[0\])? is .*accepted: None, or a number below 0"):
            SpargeConfig(tau=0.9, theta=0, value_skip=value)
    with pytest.raises(ValueError, match="value_skip is empty"):
        SpargeConfig(tau=0.9, theta=0, value_skip=[])
    q, k, v = qkv(200, heads=4, kv_heads=2)
    with pytest.raises(ValueError, match="SpargeConfig: value_skip has 2 numbers; accepted: one, or 4"):
        select(q, k, SpargeConfig(tau=0.9, theta=0, value_skip=(-1.0, -2.0)))
    schedule = Schedule.from_block_mask(
        np.ones((1, 1, 2, 2), bool), seqlen_q=200, seqlen_k=200, segment=128, value_skip=(-1, -2)
    )
    with pytest.raises(ValueError, match="the schedule's value_skip has 2 numbers; accepted: one, or 4"):
        gather_attention(q, k, v, schedule)


@pytest.mark.parametrize(("seqlen_k", "blocks"), [(32, 1), (33, 2), (1000, 32)])
def test_kernels_have_room_for_blocks_of_32_values(seqlen_k, blocks):
    shape = ScheduleShape(list_heads=2, value_skip=-1.0)
    assert shape.more_params(a_problem(heads=2, kv_heads=1, seqlen_q=32, seqlen_k=seqlen_k))["values"] == {
        "blocks": blocks
    }
