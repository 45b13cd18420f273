"""gather_attention on the CPU: float64 dense attention under the mask that a schedule means."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from key_lists import list_heads
from pages import paged, random_table
from schedules import FRAMEWORKS, RULES, masked_attention, meant, random_schedule

from s2o_cupy import GatherStats, S2OConfig, Schedule, gather_attention, gather_attention_paged, s2o_attention
from s2o_cupy.reference.dense import dense_attention

TOLERANCE = 1e-12  # of float64 sums of a few hundred terms of size 1, a few hundred units of 2.2e-16 each


def draw_qkv(rng, seqlen_q, seqlen_k, *, batch=1, heads=2, kv_heads=1, head_dim=8):
    q = rng.standard_normal((batch, heads, seqlen_q, head_dim))
    k, v = rng.standard_normal((2, batch, kv_heads, seqlen_k, head_dim))
    return q, k, v


def assert_close(found, expected):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE)


# ---------------------------------------------------------------- what a schedule means


@given(st.data())
def test_any_schedule_is_dense_attention_under_its_mask(data):
    draw = data.draw
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3]))
    rules = dict(draw(st.sampled_from(RULES)))
    seqlen_q = draw(st.integers(1, 400))
    seqlen_k = draw(st.integers(max(seqlen_q, rules.get("sinks", 0)) if rules["is_causal"] else 1, 600))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    heads, kind = kv_heads * group, st.sampled_from(["one", "kv_heads", "heads"])
    order = None
    if draw(st.booleans()):
        order = draw(st.sampled_from([1, batch])), list_heads(draw(kind), heads, kv_heads)
    schedule = random_schedule(
        rng, seqlen_q, seqlen_k, batch=draw(st.sampled_from([1, batch])), unit=draw(st.sampled_from([1, 64, 128])),
        list_heads=list_heads(draw(kind), heads, kv_heads), order=order, block_m=draw(st.sampled_from([64, 128]))
        if rules.get("segment") != 200 else 128, share=draw(st.sampled_from([0.1, 0.5, 1.0])), **rules,
    )  # fmt: skip
    schedule.check()
    q, k, v = draw_qkv(rng, seqlen_q, seqlen_k, batch=batch, heads=heads, kv_heads=kv_heads)
    options = {"scale": draw(st.sampled_from([None, 0.3, -0.5])), "softcap": draw(st.sampled_from([0.0, 2.0]))}
    o, lse, stats = gather_attention(q, k, v, schedule, return_lse=True, return_stats=True, **options)
    mask = meant(schedule, batch, heads)
    expected_o, expected_lse = masked_attention(q, k, v, mask, **options)
    assert_close([o], [expected_o])
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)  # it is float32
    pairs = np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q).sum() if rules["is_causal"] else seqlen_q * seqlen_k
    assert stats.density == pytest.approx(mask.sum() / (batch * heads * pairs))
    by_head = np.broadcast_to(mask, (batch, heads, *mask.shape[2:])).sum(axis=(2, 3)) / pairs
    np.testing.assert_allclose(stats.density_per_head, by_head, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("segment", [128, 256])
def test_a_mask_of_all_blocks_is_dense_causal_attention(rng, segment):
    q, k, v = draw_qkv(rng, 700, 700)
    mask = np.ones((1, 1, 6, 6), bool)
    for sinks in (0, 128):
        schedule = Schedule.from_block_mask(mask, seqlen_q=700, seqlen_k=700, segment=segment, sinks=sinks)
        o, stats = gather_attention(q, k, v, schedule, return_stats=True)
        assert_close([o], [dense_attention(q, k, v)[0]])
        assert stats.density == 1.0


def test_a_permutation_of_all_keys_changes_nothing(rng):
    q, k, v = draw_qkv(rng, 300, 333)
    order = rng.permutation(333).astype(np.int32)[None, None]
    mask = np.ones((1, 1, 3, 6), bool)
    schedule = Schedule.from_block_mask(mask, 64, seqlen_q=300, seqlen_k=333, is_causal=False, k_order=order)
    schedule.check()
    assert_close([gather_attention(q, k, v, schedule)], [dense_attention(q, k, v, is_causal=False)[0]])


def test_a_block_through_k_order_is_its_keys(rng):
    """The same keys as permuted blocks and as positions: the same bits."""
    q, k, v = draw_qkv(rng, 256, 512)
    order = np.concatenate([rng.permutation(256), 256 + rng.permutation(128), np.arange(384, 512)]).astype(np.int32)
    mask = rng.random((1, 1, 2, 4)) < 0.7
    rules = {"seqlen_q": 256, "seqlen_k": 512, "segment": 128}
    blocks = Schedule.from_block_mask(mask, k_order=order[None, None], **rules)
    lists = [
        [order[c * 128 : (c + 1) * 128] for c in range(4) if mask[0, 0, t, c] and (c + 1) * 128 <= 256 + t * 128]
        for t in range(2)
    ]
    flat = [np.concatenate([*x, np.zeros(0, np.int32)]) for x in lists]
    indptr = np.cumsum([0, *map(len, flat)])
    with_positions = Schedule.from_csr(indptr, np.concatenate(flat).astype(np.int32), **rules)
    expected = gather_attention(q, k, v, with_positions, return_lse=True)
    for x, y in zip(gather_attention(q, k, v, blocks, return_lse=True), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_stop_leaves_keys_out(rng):
    """Keys that matter come first; the others are not visited, and count for nothing."""
    q, k, v = draw_qkv(rng, 100, 1500, head_dim=16)
    q, k = np.abs(q), k + np.linspace(1, -1, 1500)[:, None]  # descending scores
    positions = np.arange(1500, dtype=np.int32)[None, None, None]
    counts = np.array([[[1500]]])
    rules = {"seqlen_q": 100, "seqlen_k": 1500, "is_causal": False}
    schedule = Schedule.from_tokens(positions, counts, tau=0.05, **rules)
    o, stats = gather_attention(q, k, v, schedule, return_stats=True)
    visited = int(stats.visited[0, 0, 0, 0])
    assert 1 < visited < 12 and stats.density == pytest.approx(stats.visited.sum() * 128 / 3000)
    first = Schedule.from_tokens(positions, np.array([[[visited * 128]]]), **rules)
    np.testing.assert_array_equal(o[:, 0], gather_attention(q, k, v, first)[:, 0])


def test_keys_that_are_not_named_have_no_influence(rng):
    q, k, v = draw_qkv(rng, 300, 700)
    schedule = random_schedule(rng, 300, 700, unit=64, segment=128, sinks=3, share=0.3)
    expected = gather_attention(q, k, v, schedule)
    unseen = ~meant(schedule, 1, 2).any(axis=(0, 1, 2))
    assert unseen.sum() > 20
    k[:, :, unseen] = v[:, :, unseen] = np.nan
    np.testing.assert_array_equal(gather_attention(q, k, v, schedule), expected)


def test_rows_without_a_key(rng):
    q, k, v = draw_qkv(rng, 256, 256)
    rules = {"seqlen_q": 256, "seqlen_k": 256, "is_causal": False}
    schedule = Schedule.from_tokens(np.zeros((1, 1, 2, 1), np.int32), np.array([[[0, 1]]]), **rules)
    o, lse = gather_attention(q, k, v, schedule, return_lse=True)
    assert (o[:, :, :128] == 0).all() and np.isneginf(lse[:, :, :128]).all() and np.isfinite(lse[:, :, 128:]).all()
    with_own = Schedule.from_tokens(
        np.zeros((1, 1, 2, 1), np.int32), np.array([[[0, 0]]]), segment=256, seqlen_q=256, seqlen_k=256
    )
    assert_close([gather_attention(q, k, v, with_own)], [dense_attention(q, k, v)[0]])


def test_s2o_at_tau_0_is_the_schedule_of_all_earlier_keys(rng):
    q, k, v = draw_qkv(rng, 500, 500)
    mask = np.ones((1, 1, 4, 4), bool)
    schedule = Schedule.from_block_mask(mask, seqlen_q=500, seqlen_k=500, segment=128)
    expected = s2o_attention(q, k, v, tau=0, config=S2OConfig(segment=128))
    assert_close([gather_attention(q, k, v, schedule)], [expected])


# ---------------------------------------------------------------- arrays of any framework, and the other arguments


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(rng, name):
    framework = FRAMEWORKS[name]()
    host = [x.astype(np.float32) for x in draw_qkv(rng, 200, 300, batch=2, heads=4, kv_heads=2)]
    rules = {"batch": 2, "list_heads": 2, "unit": 64, "segment": 128, "sinks": 4, "order": (1, 2), "share": 1.0}
    by_numpy, schedule = (
        random_schedule(np.random.default_rng(1), 200, 300, array=x, **rules) for x in (np.asarray, framework.array)
    )
    expected = gather_attention(*host, by_numpy, return_lse=True)
    q, k, v = map(framework.array, host)
    *found, stats = gather_attention(q, k, v, schedule, return_lse=True, return_stats=True)
    for x, y in zip(found, expected, strict=True):
        assert isinstance(x, framework.kind)
        np.testing.assert_array_equal(np.asarray(x), y)
    assert isinstance(stats, GatherStats) and isinstance(stats.visited, framework.kind)
    assert stats.path == "numpy" and 0 < stats.density < 1 and "path: numpy" in repr(stats)
    assert stats.density == pytest.approx(meant(by_numpy, 2, 4).sum() / (8 * np.tri(200, 300, 100).sum()))
    by_head = meant(by_numpy, 2, 4).sum(axis=(2, 3)) / np.tri(200, 300, 100).sum()
    assert isinstance(stats.density_per_head, framework.kind)
    np.testing.assert_allclose(np.asarray(stats.density_per_head), by_head, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_computed_in_float32(rng, dtype):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k, v = (x.astype(kind) for x in draw_qkv(rng, 150, 300))
    schedule = random_schedule(rng, 150, 300, segment=128, share=1.0)
    found = gather_attention(q, k, v, schedule)
    assert found.dtype == kind
    expected = gather_attention(*(x.astype(np.float32) for x in (q, k, v)), schedule).astype(kind)
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_layouts_axes_and_out(rng):
    q, k, v = draw_qkv(rng, 200, 300, heads=4, kv_heads=2)
    schedule = random_schedule(rng, 200, 300, segment=128, share=1.0)
    expected, of_rows = gather_attention(q, k, v, schedule, return_lse=True)
    bshd = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    np.testing.assert_array_equal(gather_attention(*bshd, schedule, layout="BSHD").swapaxes(1, 2), expected)
    without_batch, lse = gather_attention(q[0], k[0], v[0], schedule, return_lse=True)
    np.testing.assert_array_equal(without_batch, expected[0])
    np.testing.assert_array_equal(lse, of_rows[0])
    out = np.full(q.shape, np.nan)
    assert gather_attention(q, k, v, schedule, out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_no_query_and_no_key(rng):
    q, k, v = draw_qkv(rng, 0, 30)
    schedule = Schedule.from_tokens(np.zeros((1, 1, 0, 1), np.int32), np.zeros((1, 1, 0), np.int32), seqlen_q=0,
                                    seqlen_k=30)  # fmt: skip
    assert gather_attention(q, k, v, schedule).shape == q.shape
    q, k, v = draw_qkv(rng, 30, 0)
    schedule = Schedule.from_tokens(np.zeros((1, 1, 1, 1), np.int32), np.zeros((1, 1, 1), np.int32), seqlen_q=30,
                                    seqlen_k=0, is_causal=False)  # fmt: skip
    o, lse, stats = gather_attention(q, k, v, schedule, return_lse=True, return_stats=True)
    assert (o == 0).all() and np.isneginf(lse).all() and stats.density == 0 and stats.path is None


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_have_the_bits_of_arrays(rng, rules, layout):
    q, k, v = draw_qkv(rng, 200, 300, batch=3, heads=4, kv_heads=2)
    schedule = random_schedule(rng, 200, 300, batch=3, list_heads=2, unit=64, **rules)
    table, pages = random_table(rng, [300] * 3, 16)
    k_pages, v_pages = (paged(x, table, pages, 16, layout, [300] * 3) for x in (k, v))
    expected = gather_attention(q, k, v, schedule, return_lse=True)
    *found, stats = gather_attention_paged(
        q, k_pages, v_pages, table, schedule, layout=layout, return_lse=True, return_stats=True
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    assert stats.density == gather_attention(q, k, v, schedule, return_stats=True)[1].density


def test_what_is_refused_of_pages(rng):
    q, k, v = draw_qkv(rng, 100, 128)
    pages, table = (k.reshape(8, 16, 1, 8), v.reshape(8, 16, 1, 8)), np.arange(8, dtype=np.int32)[None]
    with pytest.raises(ValueError, match="gather_attention_paged: the schedule has a k_order; accepted: one without"):
        gather_attention_paged(q, *pages, table, random_schedule(rng, 100, 128, order=(1, 1)))
    with pytest.raises(ValueError, match="gather_attention_paged: the schedule is for seqlen_q 90; accepted: 100"):
        gather_attention_paged(q, *pages, table, random_schedule(rng, 90, 128))
    with pytest.raises(ValueError, match="page_table has 8 entries|pages_per_sequence|seqlen_k"):
        gather_attention_paged(q, *pages, table, random_schedule(rng, 100, 129))
    table[0, 3] = 9
    with pytest.raises(ValueError, match=r"page_table\[0, 3\] is 9; accepted: 0 to 7"):
        gather_attention_paged(q, *pages, table, random_schedule(rng, 100, 128))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": None}, "gather_attention: schedule is a NoneType; accepted: Schedule"),
        ({"is_causal": False}, "is_causal is False, of the schedule True; accepted: the same, or None"),
        ({"q": np.zeros((2, 4, 100, 8))}, "the schedule is for seqlen_q 200; accepted: 100, of q, k and v"),
        ({"k": np.zeros((2, 2, 301, 8)), "v": np.zeros((2, 2, 301, 8))}, "the schedule is for seqlen_k 300"),
        ({"q": np.zeros((2, 6, 200, 8)), "k": np.zeros((2, 3, 300, 8)), "v": np.zeros((2, 3, 300, 8))},
         r"the schedule's lists have 4 heads; accepted: 1, 3 \(kv_heads\) or 6 \(heads\)"),
        ({"q": np.zeros((3, 4, 200, 8)), "k": np.zeros((3, 2, 300, 8)), "v": np.zeros((3, 2, 300, 8))},
         "the schedule's lists have a batch of 2; accepted: 1 or q's, 3"),
        ({"path": "hopper"}, "^gather_attention: path is 'hopper', which names GPU kernels"),
        ({"path": "fast"}, "path is 'fast'; accepted"),
        ({"stream": 0}, "stream is given, but q, k and v are on the CPU"),
        ({"out": np.zeros((2, 4, 200, 9))}, "out has shape"),
        ({"scale": "big"}, "scale is 'big'"),
    ],
)  # fmt: skip
def test_what_is_refused(rng, changes, message):
    q, k, v = draw_qkv(rng, 200, 300, batch=2, heads=4, kv_heads=2)
    schedule = random_schedule(rng, 200, 300, batch=2, list_heads=4, segment=128)
    given = {"q": q, "k": k, "v": v, "schedule": schedule} | changes
    with pytest.raises((TypeError, ValueError), match=message):
        gather_attention(given.pop("q"), given.pop("k"), given.pop("v"), given.pop("schedule"), **given)


def test_a_schedule_of_another_framework_is_refused(rng):
    torch = pytest.importorskip("torch")
    q, k, v = draw_qkv(rng, 200, 300)
    with pytest.raises(TypeError, match="come from different frameworks: .*schedule.entries PyTorch"):
        gather_attention(q, k, v, random_schedule(rng, 200, 300, array=torch.from_numpy))


def test_the_cpu_checks_the_lists(rng):
    q, k, v = draw_qkv(rng, 100, 100)
    schedule = Schedule.from_tokens(np.array([[[[3, 100]]]]), np.array([[[2]]]), seqlen_q=100, seqlen_k=100)
    with pytest.raises(ValueError, match=r"Schedule\.check: list \[0, 0, 0\] .* has 100 as its entry 1"):
        gather_attention(q, k, v, schedule)
