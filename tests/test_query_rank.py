"""``rank="query"``: units of neighbouring keys, by the softmax weight that any single query gives a group of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_unit_order import own_mass

from s2o_cupy import S2OConfig
from s2o_cupy.reference import ordering, s2o
from s2o_cupy.spec import BLOCK_UNITS, CENTRE_KEYS, CLUSTERS, NEAR_KEYS, UNITS, Geometry

LOG2E = math.log2(math.e)


@given(
    units=st.integers(1, 5), unit=st.sampled_from([1, 2, 4, 8, 16]), clusters=st.sampled_from(CLUSTERS),
    kinds=st.integers(1, 6), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_groups_part_the_keys_of_a_unit(units, unit, clusters, kinds, seed):
    """Shares sum to 1, and the groups' means to the unit's; keys of few kinds are groups of one kind each, and as many
    keys as groups a group each."""
    rng = np.random.default_rng(seed)
    directions = 10 * rng.standard_normal((kinds, 3))
    k = directions[rng.integers(0, kinds, units * unit)][None, None]  # [1, 1, Lk, 3]
    found = ordering.unit_clusters(k, Geometry(8, units * unit, 8, is_causal=False, unit=unit), clusters)
    assert found.keys.shape == (1, 1, units, clusters, 3)
    np.testing.assert_allclose(found.shares.sum(axis=-1), 1)
    np.testing.assert_allclose((found.shares[..., None] * found.keys).sum(axis=3), found.means, atol=1e-9)
    assert (found.keys[found.shares == 0] == 0).all()
    of_units = k.reshape(units, unit, 3)
    if unit == clusters:
        np.testing.assert_array_equal(found.keys[0, 0], of_units)
        return
    for u in range(units):
        there = len(np.unique(of_units[u], axis=0))
        assert (found.shares[0, 0, u] > 0).sum() == min(there, clusters)
        if there <= clusters:  # each a kind of its own
            for mean in found.keys[0, 0, u][found.shares[0, 0, u] > 0]:
                assert np.isclose(of_units[u], mean).all(axis=1).any()


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_no_more_groups_than_keys(rng, unit):
    """Others would be empty, take memory and decide nothing. Kernels know 2, 4 or 8."""
    q, k = rng.standard_normal((2, 1, 1, 96, 8))
    geometry, config = Geometry(96, 96, 32, unit=unit), S2OConfig(segment=32, unit=unit, tail="none")
    assert config.groups == min(max(unit, 2), 8) and config.clusters == 8
    own = own_mass(q, k, geometry, 0.5)
    orders = s2o.key_order(q, k, geometry, config, 0.5, own).keys
    found = ordering.unit_clusters(k, geometry, 8)
    norms = ordering.query_norms(q, *key_means(k, geometry), own, geometry, 0.5)
    for n in range(3):
        with np.errstate(divide="ignore"):
            scores = ordering.query_weights(q, norms, found.keys, found.shares, n, geometry, 0.5)
        units = s2o.ordered_units(scores.astype(np.float16), n, geometry, config)
        np.testing.assert_array_equal(orders[n], s2o.unit_positions(units, n, geometry))


def test_a_key_unlike_its_neighbours_is_a_group(rng):
    k = 0.1 * rng.standard_normal((1, 1, 32, 8))
    k[0, 0, 21] += 5
    found = ordering.unit_clusters(k, Geometry(8, 32, 8, is_causal=False, unit=16), 4)
    alone = found.shares[0, 0, 1] == 1 / 16
    assert any(np.array_equal(mean, k[0, 0, 21]) for mean in found.keys[0, 0, 1][alone])


def key_means(k, geometry):
    """Of units and of blocks, and keys less those."""
    means = ordering.unit_clusters(k, geometry, 2).means
    blocks = ordering.block_keys(means)
    return means, blocks, ordering.sampled_keys(k, blocks, geometry)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("offset", [0, 7])
def test_a_norm_is_the_log_of_a_query_s_mass(rng, is_causal, offset):
    """Written out for single queries: whole blocks by their mean, other units by theirs, and what pass 1 has found."""
    length, unit = 64 * 6, 2
    q, k = rng.standard_normal((1, 2, length, 8)), rng.standard_normal((1, 1, length + offset, 8))
    geometry, scale = Geometry(length, length + offset, 64, is_causal=is_causal, unit=unit), 0.4
    own = own_mass(q, k, geometry, scale)
    found = ordering.query_norms(q, *key_means(k, geometry), own, geometry, scale)
    weight = lambda row, key: math.exp(scale * float(row @ key))  # noqa: E731
    for n, i in ((1, 64), (3, 200), (5, 383)):
        begin, behind = geometry.dense_keys(n)
        units = [u for u in range(geometry.units) if (u + 1) * unit <= begin or (not is_causal and u * unit >= behind)]
        blocks = [b for b in range(geometry.units // BLOCK_UNITS)
                  if set(range(b * BLOCK_UNITS, (b + 1) * BLOCK_UNITS)) <= {*units}]  # fmt: skip
        single = [u for u in units if u // BLOCK_UNITS not in blocks]
        block = lambda b: k[0, 0, b * BLOCK_UNITS * unit : (b + 1) * BLOCK_UNITS * unit].mean(axis=0)  # noqa: E731
        last = len(blocks) if is_causal else geometry.units // BLOCK_UNITS
        keys = [(b * BLOCK_UNITS + u) * unit for b in range(last) for u in (8, 24, 40, 56)]
        scores = [scale * q[0, 1, i] @ (k[0, 0, key] - block(key // unit // BLOCK_UNITS)) for key in keys]
        more = math.exp(np.mean(np.square(scores)) / 4) if last else 1  # half of what normal scores would add
        mass = sum(BLOCK_UNITS * weight(q[0, 1, i], block(b)) for b in blocks)
        mass += sum(weight(q[0, 1, i], k[0, 0, u * unit : (u + 1) * unit].mean(axis=0)) for u in single)
        mass = mass * more + math.exp(own[0, 1, i]) / unit
        of_blocks = [key for key in keys if key // unit // BLOCK_UNITS in blocks]
        mass = max(mass, *(weight(q[0, 1, i], k[0, 0, key]) / unit for key in of_blocks), 0)
        assert found[0, 1, i] == pytest.approx(math.log2(mass))
    without = is_causal and offset == 0  # a candidate is the first segment then
    assert (found[:, :, :64] == 0).all() == without


def test_a_norm_of_keys_less_a_centre(rng):
    """All scores of a query are less by that with the centre, and so is the log of its mass."""
    length, scale = 64 * 4, 0.4
    q, k = rng.standard_normal((2, 4, length, 8)), rng.standard_normal((2, 2, length, 8))
    geometry, centre = Geometry(length, length, 64, unit=2), rng.standard_normal((2, 2, 8))
    arguments = q, *key_means(k, geometry), own_mass(q, k, geometry, scale), geometry, scale
    by_centre = scale * np.einsum("bhld,bhd->bhl", q, centre.repeat(2, axis=1)) / math.log(2)
    found, whole = ordering.query_norms(*arguments, centre), ordering.query_norms(*arguments)
    np.testing.assert_allclose(found[:, :, 64:], (whole - by_centre)[:, :, 64:], rtol=1e-9, atol=1e-9)
    assert (found[:, :, :64] == 0).all()


def test_norms_are_nearer_to_the_mass_by_what_scores_vary(rng):
    """Of queries of all lengths that look at normal keys. Half of what varies is less than the whole."""
    q, k = rng.standard_normal((1, 1, 2048, 16)), rng.standard_normal((1, 1, 2048, 16))
    q *= np.tile(np.linspace(0, 1, 128), 16)[:, None]
    geometry, n = Geometry(2048, 2048, 128, unit=8), 15
    means, blocks, sampled = key_means(k, geometry)
    own, rows = own_mass(q, k, geometry, 0.5), slice(*geometry.queries(n))
    exact = np.log2(np.exp(0.5 * q[0, 0, rows] @ k[0, 0, : 128 * n].T).sum(axis=1) + np.exp(own[0, 0, rows])) - 3
    found, without = (
        ordering.query_norms(q, means, blocks, x, own, geometry, 0.5)[0, 0, rows]
        for x in (sampled, sampled._replace(deviations=0 * sampled.deviations))
    )
    assert (without <= found).all()
    assert np.std(found - exact) < 0.6 * np.std(without - exact)
    assert (found < exact + 0.05).all()


def test_no_norm_is_less_than_what_a_single_key_weighs(rng):
    """Of queries whose scores have a standard deviation of 20 nats, norms by means are far too small; and none is more
    than the mass by a sampled key."""
    q, k = rng.standard_normal((1, 1, 2048, 16)), rng.standard_normal((1, 1, 2048, 16))
    geometry, n, scale = Geometry(2048, 2048, 128, unit=8), 15, 5.0
    means, blocks, sampled = key_means(k, geometry)
    own, rows = own_mass(q, k, geometry, scale), slice(*geometry.queries(n))
    scores = scale * LOG2E * q[0, 0, rows] @ k[0, 0, : 128 * n].T
    exact = np.logaddexp2(np.logaddexp2.reduce(scores, axis=1), own[0, 0, rows] * LOG2E) - 3
    found = ordering.query_norms(q, means, blocks, sampled, own, geometry, scale)[0, 0, rows]
    taken = np.arange(3 * 4) * 128 + 64
    assert (found >= scores[:, taken].max(axis=1) - 3 - 1e-9).all()
    without = sampled._replace(keys=0 * sampled.keys)
    by_means = ordering.query_norms(q, means, blocks, without, own, geometry, scale)[0, 0, rows]
    np.testing.assert_allclose(found, np.maximum(by_means, scores[:, taken].max(axis=1) - 3))
    assert np.median(exact - by_means) > 5 and (found > by_means + 1).mean() > 0.2
    raised = found > by_means
    assert (found <= exact + 1e-9)[raised].all()


def test_what_scores_vary_by_is_bounded():
    """Half of what normal scores would add, which is half of their variance in nats; at most four times as much."""
    deviations = np.array([0.0, 0.5, 2.0, 2.354, 2.355, 8.0, 1e200])  # nats
    scores = np.stack([deviations, -deviations], axis=-1) / 2 / math.log(2)  # of halves, in log2 units
    found = 2 ** ordering.excess(scores)[:, 0]
    np.testing.assert_allclose(found[:4], np.exp(deviations[:4] ** 2 / 4))
    assert (found[4:] == 4).all()
    assert (ordering.excess(np.empty((2, 3, 0))) == np.zeros((2, 3, 1))).all()


@pytest.mark.parametrize(
    ("keys", "count"), [(384, 0), (512, 4), (512 * 3 + 128, 12), (512 * 16, 64), (512 * 40, 64), (512 * 128, 64)]
)
def test_sampled_keys_are_of_the_prefix_alone(keys, count):
    """Of whole blocks before the segment, evenly apart, and of a block's keys each in its turn."""
    segment, blocks = keys // 128, keys // 512
    places = ordering.telling(segment, Geometry(keys + 128, keys + 128, 128, unit=8))
    assert len(places) == count
    assert (np.diff(places) > 0).all() and (places < 4 * blocks).all()
    assert (np.bincount(places % 4, minlength=4) == count // 4).all()
    if blocks > 1:
        assert np.ptp(np.diff(np.unique(places // 4))) <= 1
    assert np.array_equal(places, ordering.telling(segment, Geometry(8 * keys, 8 * keys, 128, unit=8)))
    without = Geometry(128, keys, 128, is_causal=False, unit=8)
    assert np.array_equal(places, ordering.telling(0, without))


def test_a_norm_that_is_not_finite_is_0(rng):
    q, k = rng.standard_normal((2, 1, 1, 64, 4))
    q[0, 0, 40] = np.nan
    geometry = Geometry(64, 64, 32, unit=4)
    norms = ordering.query_norms(q, *key_means(k, geometry), own_mass(q, k, geometry, 0.5), geometry, 0.5)
    assert norms[0, 0, 40] == 0 and np.isfinite(norms).all()


@pytest.mark.parametrize("place", [200])
@pytest.mark.parametrize("clusters", CLUSTERS)
def test_what_one_query_alone_looks_for_comes_first(rng, place, clusters):
    """One query of 128 gives one key of 1,024 nearly all its mass; those beside it look the other way, so that the mean
    of eight queries shows nothing. First but for the keys right before the segment, which are not estimated."""
    q, k = 0.3 * rng.standard_normal((2, 1, 1, 1152, 32))
    k[0, 0, place] *= 7 / np.linalg.norm(k[0, 0, place])
    q[0, 0, 1024 + 72 : 1024 + 80] -= 3 * k[0, 0, place] / 7
    q[0, 0, 1024 + 77] = 3 * k[0, 0, place]
    geometry, scale = Geometry(1152, 1152, 128, unit=16), 0.1
    scores = q[0, 0, 1024 + 77] @ k[0, 0, : 1024 + 78].T * scale
    assert np.exp(scores[place]) / np.exp(scores).sum() > 0.9
    own = own_mass(q, k, geometry, scale)
    first = {}
    for config in (S2OConfig(clusters=clusters), S2OConfig(rank="weight")):
        order = s2o.key_order(q, k, geometry, config, scale, own).keys[8][0, 0]
        first[config.rank] = int(np.flatnonzero(order == place)[0]) // 16  # units before its own
    assert first["query"] == NEAR_KEYS // 16 and first["weight"] > 4, first


@pytest.mark.parametrize("window", [0, 20, NEAR_KEYS])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("seqlen_k", [300, 430, 331])
def test_keys_right_before_a_segment_come_first(rng, seqlen_k, unit, window):
    """And are among those that q tiles wait for: whole units of them, as far as pass 1 has not visited them."""
    q, k = rng.standard_normal((300, 8)), rng.standard_normal((seqlen_k, 8))
    q, k = q[None, None], k[None, None]
    geometry, config = Geometry(300, seqlen_k, 100, window, unit=unit), S2OConfig(segment=100, unit=unit, tau=1.5)
    found = s2o.key_order(q, k, geometry, config, 0.3, own_mass(q, k, geometry, 0.3))
    for n, (order, least) in enumerate(zip(found.keys, found.least, strict=True)):
        start = geometry.queries(n)[0] + geometry.offset
        first = max(0, start - NEAR_KEYS) // unit * unit
        near = np.arange(first, max(first, geometry.dense_keys(n)[0]))
        np.testing.assert_array_equal(np.sort(order[0, 0, : len(near)]), near)
        assert least[0, 0] == len(near)  # no other weighs 0.75


@pytest.mark.parametrize("other", [{"tail": "none"}, {"error": 0.1}, {"is_causal": False}])
def test_elsewhere_order_is_by_weight_alone(rng, other):
    q, k = rng.standard_normal((2, 1, 1, 300, 8))
    options = {name: x for name, x in other.items() if name != "is_causal"}
    geometry = Geometry(300, 300, 100, 0, other.get("is_causal", True), 4)
    config = S2OConfig(segment=100, unit=4, **options)
    scores = ordering.segment_scores(q, k, geometry, config, 0.3, own_mass(q, k, geometry, 0.3))
    assert all(np.isfinite(x).all() for x in scores)


def test_the_centre_is_of_keys_before_every_segment_that_is_ordered():
    assert Geometry(4096, 4096, 128, unit=16).leading_units == CENTRE_KEYS // 16
    assert Geometry(4096, 4096, 32, unit=16).leading_units == 2  # segment 1 has 32 keys before it
    assert Geometry(4096, 4096 + 40, 128, unit=16).leading_units == 2  # segment 0 has 40
    assert Geometry(100, 100, 128, unit=16).leading_units == 1  # nothing is ordered


@given(
    segment=st.integers(1, 300), unit=st.sampled_from(UNITS), window=st.integers(0, 200), offset=st.integers(0, 300),
    length=st.integers(1, 3000), cut=st.tuples(st.integers(0, 40), st.integers(1, 40)),
)  # fmt: skip
def test_a_chunk_of_whole_segments_has_the_centre_of_the_whole(segment, unit, window, offset, length, cut):
    """Products of 8 bits are of keys less the centre: with another one a chunk, or what a GPU of several computes,
    would have other bits. A chunk in which nothing is ordered needs none."""
    begin = min(cut[0], (length - 1) // segment) * segment
    end = min(begin + cut[1] * segment, length)
    whole = Geometry(length, length + offset, segment, window, unit=unit)
    chunk = Geometry(end - begin, end + offset, segment, window, unit=unit)
    drawn = replace(whole, drawn=min(3, whole.segments))  # as an error's search takes them
    for part in (chunk, drawn):
        if any(part.ranked(n) for n in range(part.segments)):
            assert part.leading_units == whole.leading_units
    last = whole.segments - 1
    assert whole.leading_units <= next((whole.ranked(n) for n in range(last + 1) if whole.ranked(n)), 1)


def test_pass_1_s_mass_is_asked_for(rng):
    q, k = rng.standard_normal((2, 1, 1, 64, 4))
    with pytest.raises(ValueError, match="own is None; accepted with rank='query': the lse of pass 1"):
        s2o.key_order(q, k, Geometry(64, 64, 32, unit=16), S2OConfig(segment=32), 0.5)


@pytest.mark.parametrize(("rank", "depends"), [("query", True), ("weight", False), ("max", False)])
def test_a_cap_reaches_the_order_by_what_pass_1_has_found(rng, rank, depends):
    q, k, v = 3 * rng.standard_normal((3, 1, 1, 128, 8))
    config = S2OConfig(rank=rank, segment=32, unit=4 if rank != "max" else 1, block_m=16, block_n=16, tail="none")
    without, capped = (s2o.s2o(q, k, v, config, softcap=softcap).k_order.keys for softcap in (0.0, 2.0))
    assert any((x != y).any() for x, y in zip(without, capped, strict=True)) == depends
