"""select and sparse_attention on the CPU: the reference's stages, and what methods must equal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from schedules import FRAMEWORKS

from s2o_cupy import S2OConfig, Schedule, gather_attention, s2o_attention
from s2o_cupy.methods import (
    FlexPrefillConfig,
    MeanPoolingConfig,
    PBSConfig,
    SpargeConfig,
    VerticalSlashConfig,
    XAttentionConfig,
    select,
    sparse_attention,
)
from s2o_cupy.methods.grid import BlockGrid
from s2o_cupy.reference import dense_attention
from s2o_cupy.reference.methods import blocks, pbs
from s2o_cupy.tools import inputs, metrics

CONFIGS = {
    "MeanPooling": MeanPoolingConfig(),
    "MeanPooling 64": MeanPoolingConfig(block=64, threshold=0.5),
    "PBS": PBSConfig(),
    "PBS 64": PBSConfig(block=64, segment=192, share="kv_head", threshold=0.5),
    "Sparge": SpargeConfig(tau=0.9, theta=-0.1),
    "Sparge topk": SpargeConfig(topk=0.3, theta=0.3),
    "XAttention": XAttentionConfig(),
    "FlexPrefill": FlexPrefillConfig(),
    "vertical-slash": VerticalSlashConfig(verticals=40, slashes=50),
}


def draw(rng, seqlen_q, seqlen_k=None, *, batch=1, heads=4, kv_heads=2, head_dim=16):
    """Blocks differ, so that choices are neither all nor nothing."""
    seqlen_k = seqlen_k or seqlen_q
    q, k = (
        rng.standard_normal((batch, h, n, head_dim)) + 2 * np.repeat(
            rng.standard_normal((batch, h, -(-n // 64), head_dim)), 64, axis=2)[:, :, :n]
        for h, n in ((heads, seqlen_q), (kv_heads, seqlen_k))
    )  # fmt: skip
    return q, k, rng.standard_normal(k.shape)


def columns_of(schedule):
    """Columns that lists hold, bool [B, H, R, C]."""
    form = schedule.form
    found = np.zeros((form.batch, form.list_heads, form.rows, form.units), bool)
    for at in np.ndindex(found.shape[:3]):
        begin, count = schedule.begins[at], -(-schedule.keys[at] // form.unit)
        found[at][schedule.entries[begin : begin + count]] = True
    return found


def assert_dense(rng, config, *lengths, **options):
    q, k, v = draw(rng, *lengths)
    o, lse, stats = sparse_attention(q, k, v, config=config, return_lse=True, return_stats=True, **options)
    expected, expected_lse = dense_attention(q, k, v, **options)
    np.testing.assert_allclose(o, expected, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
    assert stats.density == 1.0


# ---------------------------------------------------------------- numbers of the built-in trace


TRACE = [  # density, rel_l2 and rel_l1 in float64, of formulas written down apart from these files
    (MeanPoolingConfig(), 0.575, 0.1229, 0.0347),
    (PBSConfig(), 0.646, 0.1252, 0.0260),
    (SpargeConfig(tau=0.9, theta=-0.1), 0.432, 0.1850, 0.0717),
    (SpargeConfig(tau=0.9, theta=0.3), 0.460, 0.1525, 0.0596),
]


@pytest.fixture(scope="module")
def trace():
    q, k, v = (x.astype(np.float64) for x in inputs.builtin("trace"))
    return q, k, v, dense_attention(q, k, v)[0]


def assert_numbers(o, stats, dense, density, rel_l2, rel_l1):
    assert stats.density == pytest.approx(density, abs=6e-4)
    assert metrics.rel_l2(o, dense) == pytest.approx(rel_l2, abs=6e-5)
    assert metrics.rel_l1(o, dense) == pytest.approx(rel_l1, abs=6e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("config", "density", "rel_l2", "rel_l1"), TRACE, ids=str)
def test_the_trace(trace, config, density, rel_l2, rel_l1):
    q, k, v, dense = trace
    o, stats = sparse_attention(q, k, v, config=config, return_stats=True)
    assert_numbers(o, stats, dense, density, rel_l2, rel_l1)


def test_the_trace_by_importance_over_whole_segments(trace, monkeypatch):
    """With segments of 1,024 the last 768 keys are no whole one. That softmax is here over all keys; the numbers are of
    one over those of whole segments, and the same where it is made so."""
    q, k, v, dense = trace
    whole = lambda q, k, rows, scale: np.pad(  # noqa: E731
        pbs.importance(q, k[:, :, :2048], rows, scale), [(0, 0), (0, 0), (0, 768)]
    )
    config = PBSConfig(segment=1024)
    order = pbs.segment_order(whole(q, k, 128, 128**-0.5), 1024, 4)
    monkeypatch.setattr(pbs, "segment_order", lambda *_: order)
    o, stats = sparse_attention(q, k, v, config=config, return_stats=True)
    assert_numbers(o, stats, dense, 0.758, 0.0829, 0.0149)


# ---------------------------------------------------------------- the calls


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("lengths", [(400, 400), (200, 500), (1, 300), (130, 385)], ids=str)
def test_sparse_attention_is_gather_attention_by_what_is_selected(rng, config, lengths):
    q, k, v = draw(rng, *lengths, batch=2)
    schedule = select(q, k, config, scale=0.3)
    schedule.check()
    expected = gather_attention(q, k, v, schedule, scale=0.3, softcap=5.0, return_lse=True)
    found = sparse_attention(q, k, v, config=config, scale=0.3, softcap=5.0, return_lse=True)
    for x, y in zip(found, expected, strict=True):
        assert x.tobytes() == y.tobytes()
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    other = sparse_attention(*swapped, config=config, scale=0.3, softcap=5.0, layout="BSHD")
    np.testing.assert_array_equal(other.swapaxes(1, 2), found[0])


def test_an_s2o_config_is_s2o_attention(rng):
    q, k, v = draw(rng, 600)
    config = S2OConfig(tau=0.05)
    np.testing.assert_array_equal(sparse_attention(q, k, v, config=config), s2o_attention(q, k, v, config=config))


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("config", [PBSConfig(), SpargeConfig(tau=0.5, theta=0.2, permutation=(2, 9, 16))], ids=str)
def test_schedules_are_of_the_framework_of_q(rng, name, config):
    framework = FRAMEWORKS[name]()
    q, k, v = (x.astype(np.float32) for x in draw(rng, 300))
    options = {"is_causal": config.permutation is None} if isinstance(config, SpargeConfig) else {}
    schedule = select(*map(framework.array, (q, k)), config, **options)
    assert all(isinstance(x, framework.kind) for x in schedule.arrays.values())
    o = sparse_attention(*map(framework.array, (q, k, v)), config=config, **options)
    assert isinstance(o, framework.kind)
    np.testing.assert_array_equal(np.asarray(o), sparse_attention(q, k, v, config=config, **options))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_heads_are_independent(rng, config):
    q, k, _ = draw(rng, 900, heads=4, kv_heads=4)
    found = columns_of(select(q, k, config))
    turned = columns_of(select(q[:, ::-1], k[:, ::-1], config))
    np.testing.assert_array_equal(turned[:, ::-1], found)
    np.testing.assert_array_equal(columns_of(select(q[:, 1:2], k[:, 1:2], config)), found[:, 1:2])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_queries(config):
    schedule = select(np.zeros((2, 4, 0, 8)), np.zeros((2, 2, 300, 8)), config)
    assert schedule.entries.size == 0 and schedule.keys.shape == (2, 4, 0)


# ---------------------------------------------------------------- rules of choice


WEIGHTS = st.lists(st.floats(0, 1).map(lambda x: x if x > 1e-3 else 0.0), min_size=1, max_size=12)


@example([0.5, 0.0, 0.5], 1.0)
@given(WEIGHTS, st.floats(0.05, 1))
def test_reach_is_the_shortest_prefix(weights, threshold):
    w = np.array(weights)
    taken = blocks.reach(w, threshold)
    if threshold == 1:
        assert (taken == (w > 0)).all()
        return
    order = sorted(range(len(w)), key=lambda i: (-w[i], i))
    assert set(np.flatnonzero(taken)) == set(order[: taken.sum()])  # a prefix
    limit = threshold * w.sum()
    if w.sum() == 0:
        assert not taken.any()
    else:
        assert w[taken].sum() >= limit * (1 - 1e-12)
        assert w[taken].sum() - w[order[taken.sum() - 1]] < limit * (1 + 1e-12)


@example([0.5, 0.0, 0.5], 1.0)
@given(WEIGHTS, st.floats(0.05, 1))
def test_within_is_the_longest_prefix(weights, threshold):
    w = np.array(weights)
    taken = blocks.within(w, threshold)
    if threshold == 1:
        assert (taken == (w > 0)).all()
        return
    order = sorted(range(len(w)), key=lambda i: (-w[i], i))
    count = int(taken.sum())
    assert set(np.flatnonzero(taken)) == set(order[:count])
    limit = threshold * w.sum()
    if w.sum() == 0:
        assert count == 0
    else:
        assert count >= 1 and (count == 1 or w[taken].sum() <= limit * (1 + 1e-12))
        assert count == len(w) or w[order[: count + 1]].sum() > limit * (1 - 1e-12)


def test_a_threshold_that_a_prefix_hits_exactly():
    w = np.array([1, 4, 2, 1, 0.0]) / 8
    assert blocks.reach(w, 0.5).tolist() == [False, True, False, False, False]
    assert blocks.within(w, 0.5).tolist() == [False, True, False, False, False]
    assert blocks.reach(w, 0.51).tolist() == [False, True, True, False, False]
    assert blocks.within(w, 0.51).tolist() == [False, True, False, False, False]
    assert blocks.within(w, 0.1).tolist() == [False, True, False, False, False]  # one at least
    assert blocks.within(w, 0.875).tolist() == [True, True, True, False, False]  # of equal ones the first
    assert blocks.reach(np.array([0.5, np.nan]), 0.1).all()


@given(st.integers(1, 900), st.integers(0, 700), st.sampled_from([(64, 64, 192), (128, 128, 256), (128, 64, 128)]))
def test_places_of_lists(seqlen_q, before, sizes):
    block_q, block_k, segment = sizes
    align = segment if block_q == block_k else block_k
    grid = BlockGrid(seqlen_q, seqlen_q + before, block_q, block_k, segment, align=align)
    dense = grid.form(1, 1).dense
    places = 0
    for row in range(grid.rows):
        assert grid.begin(row) == places
        first, end = dense.dense_keys(row * block_q // segment)
        assert first == grid.listed(row) * block_k  # no key is in both parts, none in neither
        assert grid.visible(row) == -(-min((row + 1) * block_q + before, grid.seqlen_k) // block_k)
        places += grid.listed(row)
    assert grid.entries == places


# ---------------------------------------------------------------- what must equal dense attention


WHOLE = [
    MeanPoolingConfig(threshold=1, keep_first=False), PBSConfig(threshold=1, keep_first=False),
    PBSConfig(threshold=1, keep_first=False, scores="antidiagonal"), SpargeConfig(tau=1, theta=-1),
    SpargeConfig(tau=(1, 1), theta=-1), XAttentionConfig(threshold=1), FlexPrefillConfig(gamma=1),
]  # fmt: skip


def underflowing(rng):
    """float32 q, k and v of 1,024 tokens and two heads, whose scores of blocks are far apart."""
    q, k, v = np.zeros((1, 2, 1024, 64)), np.zeros((1, 2, 1024, 64)), rng.standard_normal((1, 2, 1024, 64))
    q[..., 0] = 1
    k[:, :, 5, 0], k[:, :, 128:256, 0] = 2000, 1200
    return [x.astype(np.float32) for x in (q, k, v)]


@pytest.mark.parametrize("lengths", [(700, 700), (300, 900)], ids=str)
@pytest.mark.parametrize(
    "config",
    [MeanPoolingConfig(threshold=1), PBSConfig(threshold=1), PBSConfig(segment=1024), SpargeConfig(tau=1, theta=-1),
     SpargeConfig(tau=0.1, theta=1.1)], ids=str,
)  # fmt: skip
def test_what_is_dense_attention(rng, config, lengths):
    if config == PBSConfig(segment=1024) and lengths[0] < lengths[1]:
        config = replace(config, threshold=1)  # keys before the queries are candidates
    assert_dense(rng, config, *lengths)


@pytest.mark.parametrize("config", [MeanPoolingConfig(threshold=1), SpargeConfig(tau=1, theta=0)], ids=str)
@pytest.mark.parametrize("lengths", [(300, 500), (500, 300)], ids=str)
def test_what_is_dense_attention_without_causality(rng, config, lengths):
    assert_dense(rng, config, *lengths, is_causal=False)


@pytest.mark.parametrize(
    ("config", "is_causal"), [(x, True) for x in WHOLE] + [(x, False) for x in WHOLE if not x.causal_only], ids=str
)
def test_what_is_dense_attention_where_weights_of_blocks_underflow(rng, config, is_causal):
    """Key 5 outweighs all others, but the mean of its block does not: the softmax over blocks gives it 0."""
    q, k, v = underflowing(rng)
    o, stats = sparse_attention(q, k, v, config=config, is_causal=is_causal, return_stats=True)
    assert stats.density == 1.0
    expected, _ = dense_attention(*(x.astype(np.float64) for x in (q, k, v)), is_causal=is_causal)
    np.testing.assert_allclose(o, expected, atol=1e-4)


# ---------------------------------------------------------------- PBS-Attn


def test_an_order_is_a_permutation_inside_segments(rng):
    importance = rng.random((2, 4, 1000)).astype(np.float32)
    importance[0, 0, 300] = np.nan
    order = pbs.segment_order(importance, 256, 4)
    for n in range(0, 768, 256):
        of_segment = order[..., n : n + 256]
        assert (np.sort(of_segment) == np.arange(n, n + 256)).all()
        found = np.take_along_axis(importance, of_segment, axis=-1)
        assert (np.diff(found[1]) <= found[1, :, :-1] * 2.0**-15).all()  # 24 leading bits: 15 of the fraction
    assert order[0, 0, 256] == 300
    np.testing.assert_array_equal(order[..., 768:], np.broadcast_to(np.arange(768, 1000), (2, 4, 232)))


def test_importance_by_hand(rng):
    q, k, _ = draw(rng, 40, 300)
    found = pbs.importance(q, k, 128, 0.2)
    s = q[0, 3] @ k[0, 1].T * 0.2  # more last queries are asked for than there are
    p = np.exp(s) / np.exp(s).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found[0, 3], p.mean(axis=0), rtol=1e-6)
    few = pbs.importance(q, k, 8, 0.2)
    np.testing.assert_allclose(few[0, 3], p[-8:].mean(axis=0), rtol=1e-6)


def test_heads_that_share_an_order(rng):
    q, k, _ = draw(rng, 900)
    each, shared = (select(q, k, PBSConfig(share=share)).k_order for share in ("head", "kv_head"))
    assert each.shape == (1, 4, 900) and shared.shape == (1, 2, 900)
    importance = pbs.importance(q, k, 128, 0.25)
    np.testing.assert_array_equal(each, pbs.segment_order(importance, 256, 4))
    mean = importance.reshape(1, 2, 2, 900).mean(axis=2)
    np.testing.assert_array_equal(shared, pbs.segment_order(mean, 256, 2))


def test_segments_of_a_block_are_mean_pooling_of_candidates(rng):
    """An order inside a block changes no mean."""
    q, k, _ = draw(rng, 1300)
    config = PBSConfig(segment=128)
    grid = BlockGrid(1300, 1300, 128, 128, 128, own=False)
    scores = blocks.block_scores(blocks.block_means(q, 128), blocks.block_means(k, 128), 0.25)
    expected = blocks.choose(scores, grid, "reach", 0.9, kept=np.zeros((1, 4), int))
    np.testing.assert_array_equal(columns_of(select(q, k, config)), expected)


def test_later_segments_have_no_influence_but_by_the_order(rng, monkeypatch):
    q, k, _ = draw(rng, 1300)
    before = select(q, k, PBSConfig())
    order, columns = before.k_order.copy(), columns_of(before)
    q[:, :, 768:], k[:, :, 768:] = (x[:, :, 768:][:, :, ::-1] for x in (q, k))
    assert (select(q, k, PBSConfig()).k_order != order).any()
    monkeypatch.setattr(pbs, "segment_order", lambda *_: order)
    np.testing.assert_array_equal(columns_of(select(q, k, PBSConfig()))[:, :, :6], columns[:, :, :6])


def test_the_block_of_key_0_is_kept(rng):
    """Wherever in the first segment the order has put it."""
    q, k, _ = draw(rng, 1300)
    k[:, :, 0] = -20 * q[:, ::2, -128:].mean(axis=2)  # the last queries want it least
    schedule = select(q, k, PBSConfig(threshold=0.01))
    kept = pbs.first_column(schedule.k_order, 128)
    assert (kept == 1).any()
    columns = columns_of(schedule)
    assert all(columns[0, h, 2:, kept[0, h]].all() for h in range(4))
    assert not all(columns_of(select(q, k, PBSConfig(threshold=0.01, keep_first=False)))[0, h, 2:, kept[0, h]].all()
                   for h in range(4))  # fmt: skip


# ---------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("config", "fields", "error", "message"),
    [
        (MeanPoolingConfig, {"block": 32}, ValueError, r"MeanPoolingConfig: block is 32; accepted: 64 or 128"),
        (MeanPoolingConfig, {"threshold": 0}, ValueError, r"threshold is 0; accepted: a number above 0, up to 1"),
        (MeanPoolingConfig, {"threshold": "x"}, TypeError, r"threshold is 'x' \(str\)"),
        (MeanPoolingConfig, {"treshold": 1}, TypeError, r"did you mean threshold\?"),
        (MeanPoolingConfig, {"keep_first": 1}, TypeError, r"keep_first is 1; accepted: True or False"),
        (PBSConfig, {"keep_first": 1}, TypeError, r"PBSConfig: keep_first is 1; accepted: True or False"),
        (MeanPoolingConfig, {"path": "fast"}, ValueError, r"MeanPoolingConfig: path is 'fast'"),
        (MeanPoolingConfig, {"block": 64.0}, ValueError, r"block is 64.0; accepted: 64 or 128"),
        (PBSConfig, {"block": 64.0}, ValueError, r"block is 64.0; accepted: 64 or 128"),
        (PBSConfig, {"block": np.array([64, 128])}, ValueError, r"block is array.*; accepted: 64 or 128"),
        (XAttentionConfig, {"stride": 8.0}, ValueError, r"stride is 8.0; accepted: 8 or 16"),
        (PBSConfig, {"segment": 200}, ValueError, r"PBSConfig: segment is 200; accepted: a multiple of block \(128"),
        (PBSConfig, {"segment": 64}, ValueError, r"segment is 64; accepted: an integer from 128 to 8192"),
        (PBSConfig, {"share": "heads"}, ValueError, r"share is 'heads'; accepted: 'head' or 'kv_head'"),
        (PBSConfig, {"workspace_bytes": 1}, ValueError, r"PBSConfig: workspace_bytes is 1; accepted"),
        (SpargeConfig, {"tau": 1.5, "theta": 0}, ValueError, r"SpargeConfig: tau is 1.5"),
        (SpargeConfig, {"tau": (0.5, 2), "theta": 0}, ValueError, r"tau\[1\] is 2; accepted"),
        (SpargeConfig, {"topk": 0, "theta": 0}, ValueError, r"SpargeConfig: topk is 0"),
        (SpargeConfig, {"theta": 0}, TypeError, r"tau and topk are both missing; accepted: one of them"),
        (SpargeConfig, {"tau": 0.5, "topk": 0.1, "theta": 0}, TypeError, r"tau and topk are both given; accepted"),
        (SpargeConfig, {"tau": np.array(0.5), "theta": 0}, TypeError, r"tau is array\(0.5\) \(ndarray\); accepted"),
        (SpargeConfig, {"tau": 0.5, "theta": ()}, ValueError, r"theta is empty; accepted: a number, or one for each"),
        (SpargeConfig, {"tau": 0.5, "theta": float("nan")}, ValueError, r"theta is nan; accepted: a finite number"),
        (SpargeConfig, {"tau": 0.5, "theta": 0, "permutation": (2, 3)}, TypeError, r"accepted: None, or three sizes"),
        (SpargeConfig, {"tau": 0.5, "theta": 0, "permutation": (2, 3, 0)}, ValueError, r"permutation\[2\] is 0"),
    ],
)
def test_configurations_that_are_refused(config, fields, error, message):
    with pytest.raises(error, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"config": None}, TypeError, r"config is a NoneType; accepted: .*MeanPoolingConfig, PBSConfig, SpargeConfig"),
        ({"config": PBSConfig(), "is_causal": False}, ValueError, r"PBSConfig: is_causal is False; accepted: True"),
        ({"config": SpargeConfig(tau=(0.5, 0.6), theta=0)}, ValueError, r"tau has 2 numbers; accepted: one, or 4"),
        ({"config": SpargeConfig(topk=(0.5, 0.6), theta=0)}, ValueError, r"topk has 2 numbers; accepted: one, or 4"),
        ({"config": SpargeConfig(tau=0.5, theta=0, permutation=(1, 2, 3))}, ValueError, r"is_causal is True; accepted"),
        ({"config": SpargeConfig(tau=0.5, theta=0, permutation=(9, 9, 9)), "is_causal": False}, ValueError,
         r"permutation has 729 tokens, seqlen_q is 200"),
        ({"config": PBSConfig(path="hopper")}, ValueError, r"path is 'hopper', which names GPU kernels"),
        ({"config": PBSConfig(), "layout": "SBHD"}, ValueError, r"layout is 'SBHD'"),
        ({"config": PBSConfig(), "backend": "cupy"}, ValueError, r'backend is "cupy", but'),
    ],
)  # fmt: skip
def test_calls_that_are_refused(rng, options, error, message):
    q, k, v = draw(rng, 200)
    with pytest.raises(error, match=message):
        sparse_attention(q, k, v, **options)
    with pytest.raises(error, match=message):
        select(q, k, **options)


def test_a_schedule_may_be_changed_and_kept(rng):
    """What select gives is a Schedule as any other."""
    q, k, v = draw(rng, 900)
    schedule = select(q, k, MeanPoolingConfig())
    columns = columns_of(schedule)
    same = Schedule.from_block_mask(columns, 128, seqlen_q=900, seqlen_k=900, segment=128)
    np.testing.assert_array_equal(gather_attention(q, k, v, same), gather_attention(q, k, v, schedule))
