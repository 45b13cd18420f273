"""The reference read as a specification: S2O in NumPy against dense attention in float64."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference_cases import Case, cases, make

from s2o_cupy.reference import compute_dtype, dense_attention, s2o
from s2o_cupy.spec import RANKS, Geometry, S2OConfig


def tolerance(q, k, v, scale=None, dtype=np.float64):
    """Bounds on |o - dense| and |lse - dense| from rounding alone, to first order.

    A score is a sum of D products, so it is off by at most D + 2 roundings of sum|q_d k_d| * scale <=
    |q| |k| scale =: S, and score - m by one more of 2S. exp turns that into a relative error of every
    weight (plus 4 ulp of its own), and a sum of Lk weights, rescaled at most Lk times, adds 3 Lk
    roundings. o is a weighted mean of v: numerator and denominator each carry this error.
    """
    eps = np.finfo(dtype).eps
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    largest = [np.linalg.norm(x, axis=-1).max(initial=0).astype(float) for x in (q, k)]
    score = scale * largest[0] * largest[1]
    weight = eps * ((q.shape[-1] + 4) * score + 3 * k.shape[2] + 4)
    return 2 * weight * np.abs(v).max(initial=0) + 1e-300, 2 * weight + eps * (score + 50)


def check_dense(result, q, k, v, *, scale=None, softcap=0.0, is_causal=True, dtype=np.float64):
    o, lse = dense_attention(q, k, v, scale=scale, softcap=softcap, is_causal=is_causal)
    tol_o, tol_lse = tolerance(q, k, v, scale, dtype)
    assert result.o.dtype == result.lse.dtype == dtype
    np.testing.assert_allclose(result.o, o, rtol=0, atol=tol_o)
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=tol_lse)


# ---------------------------------------------------------------- dense_attention


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (5, 9), (9, 5), (300, 300), (3, 0)])
def test_dense_attention_is_the_textbook_softmax(seqlen_q, seqlen_k, is_causal):
    q, k, v, _ = make(Case(2, 4, 2, seqlen_q, seqlen_k, 3))
    o, lse = dense_attention(q, k, v, scale=0.7, is_causal=is_causal)
    tol_o, tol_lse = (2 * x for x in tolerance(q, k, v, 0.7))  # both sides round
    for b, h, i in np.ndindex(2, 4, seqlen_q):
        end = max(0, i + seqlen_k - seqlen_q + 1) if is_causal else seqlen_k
        e = np.exp(0.7 * k[b, h // 2, :end] @ q[b, h, i])
        expected = e @ v[b, h // 2, :end] / e.sum() if end else np.zeros(3)
        np.testing.assert_allclose(o[b, h, i], expected, rtol=0, atol=tol_o)
        if end:
            np.testing.assert_allclose(lse[b, h, i], np.log(e.sum()), rtol=0, atol=tol_lse)
        else:
            assert lse[b, h, i] == -np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_dense_attention_hides_the_future_and_shows_the_past(bad):
    q, k, v, _ = make(Case())
    o, _ = dense_attention(q, k, v)
    v[0, 0, 25, 3] = bad
    changed, _ = dense_attention(q, k, v)
    np.testing.assert_array_equal(changed[:, :, :25], o[:, :, :25])
    np.testing.assert_array_equal(np.delete(changed, 3, axis=3), np.delete(o, 3, axis=3))
    np.testing.assert_array_equal(changed[:, :, 25:, 3], np.full((1, 2, 15), bad))  # not laundered
    k[0, 0, 25] = np.nan
    changed, _ = dense_attention(q, k, v)
    np.testing.assert_array_equal(changed[:, :, :25], o[:, :, :25])
    assert np.isnan(changed[:, :, 25:]).all()


def test_compute_dtype():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert compute_dtype(np.float64) == np.float64
    assert {compute_dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32)} == {np.dtype(np.float32)}
    with pytest.raises(TypeError, match="int32"):
        compute_dtype(np.int32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "v_len"), [(3, 2, 8), (2, 2, 7)], ids=["heads do not divide", "v is short"]
)
def test_shapes_that_do_not_fit_are_named(heads, kv_heads, v_len):
    q, k = np.zeros((1, heads, 8, 4)), np.zeros((1, kv_heads, 8, 4))
    with pytest.raises(ValueError, match=r"shapes \(1, "):
        s2o.s2o(q, k, k[:, :, :v_len], S2OConfig())


# ---------------------------------------------------------------- tau = 0 is dense attention

SHAPES = [
    *(Case(seqlen_q=n, seqlen_k=n, config={"segment": 32}) for n in (1, 2, 31, 32, 33, 127, 128, 129, 211)),
    Case(seqlen_q=1, seqlen_k=100),  # decoding
    Case(seqlen_q=37, seqlen_k=101),  # a chunk after a context
    Case(seqlen_q=37, seqlen_k=45),  # 0 < offset < segment
    Case(2, 8, 1),  # GQA 8:1, and MQA
    Case(2, 8, 4),
    Case(1, 3, 3),
    *(Case(head_dim=d) for d in (1, 2, 7, 64, 128, 256)),
    Case(config={"segment": 1}),
    Case(config={"segment": 40}),
    Case(config={"segment": 1000}),
    Case(config={"block_m": 128, "block_n": 128}),
    Case(config={"block_m": 1, "block_n": 1}),
    Case(config={"block_m": 5, "block_n": 3}),
    Case(config={"window": 5}),
    Case(config={"window": 500}),
    Case(seqlen_k=51, config={"window": 20}),
    Case(config={"rank": "max"}),
    Case(config={"rank": "max", "pooled_queries": 5}),  # does not divide the segment
    Case(seqlen_q=35, seqlen_k=35, config={"rank": "max", "pooled_queries": 16}),  # 3 queries for 16 runs
    Case(config={"rank": "max", "pooled_queries": 64}),  # more than the segment
    Case(is_causal=False),
    Case(seqlen_q=41, seqlen_k=13, is_causal=False),
    Case(seqlen_q=13, seqlen_k=41, is_causal=False, config={"window": 3, "rank": "max"}),
    Case(seqlen_q=41, seqlen_k=13),  # causal rows that see no key
    Case(seqlen_q=3, seqlen_k=0, is_causal=False),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_tau_0_is_dense(case, dtype):
    q, k, v, config = make(case, dtype)
    result = s2o.s2o(q, k, v, config, is_causal=case.is_causal)
    check_dense(result, q, k, v, is_causal=case.is_causal, dtype=dtype)


@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_has_a_definition_and_is_told_of(rank):
    """In the reference, which is exact at tau 0 and leaves something out at another, and in words."""
    q, k, v, config = make(Case(config={"rank": rank, "segment": 8}, seqlen_q=64, seqlen_k=64))
    check_dense(s2o.s2o(q, k, v, config), q, k, v)
    sparse = s2o.s2o(q, k, v, dataclasses.replace(config, tau=0.5, tail="none"))
    assert sparse.visited.sum() < s2o.s2o(q, k, v, config).visited.sum()
    docs = Path(__file__).resolve().parent.parent / "docs"
    if docs.is_dir():  # not in a package
        for page in ("reference.md", "algorithm.md"):
            assert f'"{rank}"' in (docs / page).read_text(encoding="utf-8"), page


@given(cases())
@settings(deadline=None, max_examples=60)
def test_tau_0_is_dense_for_any_shape(case):
    q, k, v, config = make(case)
    result = s2o.s2o(q, k, v, config, is_causal=case.is_causal)
    check_dense(result, q, k, v, is_causal=case.is_causal)
    geometry = case.geometry(config)
    assert (
        result.visited.max(axis=(0, 1, 3)) == [-(-len(x[0, 0]) // config.block_n) for x in result.k_order.keys]
    ).all()
    for n in range(geometry.segments):  # tiles without rows visit nothing
        first, end = geometry.queries(n)
        assert (result.visited[:, :, n, -(-(end - first) // config.block_m) :] == 0).all()


@given(cases(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_tau_0_is_dense_in_any_order(case, random):
    q, k, v, config = make(case)
    geometry = case.geometry(config)
    scale = 1 / math.sqrt(case.head_dim)
    q_order = np.full((1, case.heads, geometry.segments, config.segment), -1, np.int32)
    k_order = []
    for n in range(geometry.segments):
        first, end = geometry.queries(n)
        rows, keys = list(range(end - first)), s2o.candidate_positions(n, geometry).tolist()
        k_order.append(np.empty((1, case.heads, len(keys)), np.int32))
        for h in range(case.heads):
            random.shuffle(rows)
            random.shuffle(keys)
            q_order[0, h, n, : end - first], k_order[n][0, h] = rows, keys
    state = s2o.pass1(q, k, v, geometry, scale)
    state, _ = s2o.pass2(q, k, v, state, q_order, s2o.KeyOrder(k_order), geometry, config, scale)
    o, lse = s2o.finish(state)
    result = s2o.Result(o, lse, None, q_order, k_order, state)
    check_dense(result, q, k, v, is_causal=case.is_causal)


@pytest.mark.parametrize("scale", [0.0, 1.5, -0.4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_any_scale(scale, is_causal):
    q, k, v, config = make(Case())
    check_dense(
        s2o.s2o(q, k, v, config, scale=scale, is_causal=is_causal), q, k, v, scale=scale, is_causal=is_causal
    )


@pytest.mark.parametrize("softcap", [0.5, 3.0])
@pytest.mark.parametrize("is_causal", [True, False])
def test_capped_scores(softcap, is_causal):
    """The definition, by hand; then S2O at tau 0 by that of dense attention, with a negative scale too."""
    q, k, v, config = make(Case(seqlen_q=50, seqlen_k=70))
    kh, vh = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    for scale in (0.7, -0.7):
        s = softcap * np.tanh(scale * (q @ kh.swapaxes(-1, -2)) / softcap)
        if is_causal:
            s = np.where(np.tri(50, 70, 20, dtype=bool), s, -np.inf)
        p = np.exp(s)
        o, lse = dense_attention(q, k, v, scale=scale, softcap=softcap, is_causal=is_causal)
        np.testing.assert_allclose(o, p @ vh / p.sum(-1, keepdims=True), atol=1e-12)
        np.testing.assert_allclose(lse, np.log(p.sum(-1)), atol=1e-12)
        result = s2o.s2o(q, k, v, config, scale=scale, softcap=softcap, is_causal=is_causal)
        check_dense(result, q, k, v, scale=scale, softcap=softcap, is_causal=is_causal)
    assert np.abs(o - dense_attention(q, k, v, scale=scale, is_causal=is_causal)[0]).max() > 0.01


def test_orders_do_not_depend_on_softcap_and_stops_do():
    q, k, v, config = make(Case(seqlen_q=200, seqlen_k=200, config={"tau": 0.1, "rank": "weight"}))
    plain, capped = s2o.s2o(q, k, v, config, scale=2.0), s2o.s2o(q, k, v, config, scale=2.0, softcap=0.5)
    np.testing.assert_array_equal(plain.q_order, capped.q_order)
    for x, y in zip(plain.k_order.keys, capped.k_order.keys, strict=True):
        np.testing.assert_array_equal(x, y)
    assert capped.visited.sum() > plain.visited.sum()  # flatter weights: more keys matter
    hardly = s2o.s2o(q, k, v, config, scale=2.0, softcap=1e6)
    np.testing.assert_allclose(hardly.o, plain.o, atol=1e-6)


def test_negative_scale_orders_by_importance():
    q, k, v, config = make(Case(config={"tau": 0.3}))
    negative, positive = s2o.s2o(q, k, v, config, scale=-0.5), s2o.s2o(-q, k, v, config, scale=0.5)
    np.testing.assert_array_equal(negative.o, positive.o)
    np.testing.assert_array_equal(negative.visited, positive.visited)
    order = s2o.query_order(-q, k, Case().geometry(config), config.block_m)
    np.testing.assert_array_equal(negative.q_order, order)
    np.testing.assert_array_equal(positive.q_order, order)


@pytest.mark.parametrize("what", ["equal keys", "zero queries", "scale 0"])
def test_equal_scores_give_the_mean_of_visible_values(what):
    q, k, v, config = make(Case(seqlen_k=47))
    if what == "equal keys":
        k[:] = k[:, :, :1]
    if what == "zero queries":
        q[:] = 0
    scale = 0.0 if what == "scale 0" else None
    o = s2o.s2o(q, k, v, config, scale=scale).o
    atol, _ = tolerance(q, k, v, scale)
    for i in range(40):
        np.testing.assert_allclose(
            o[0, :, i], np.tile(v[0, :, : i + 8].mean(axis=1), (2, 1)), rtol=0, atol=atol
        )


def test_low_precision_inputs_are_computed_in_float32():
    q, k, v, config = make(Case(), np.float16)
    check_dense(s2o.s2o(q, k, v, config), q, k, v, dtype=np.float32)


# ---------------------------------------------------------------- causality


@given(
    cases(is_causal=True),
    st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
    st.sampled_from(["k", "v", "both"]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.data(),
)
@settings(deadline=None, max_examples=80)
def test_keys_after_a_segment_never_change_it(case, bad, which, tau, data):
    """Not a bit, neither through ordering (0 < offset < segment is drawn too) nor through stopping."""
    case = case._replace(seqlen_k=max(case.seqlen_q, case.seqlen_k), config=case.config | {"tau": tau})
    q, k, v, config = make(case, np.float32)
    geometry = case.geometry(config)
    before = s2o.s2o(q, k, v, config)
    row = geometry.queries(data.draw(st.integers(0, geometry.segments - 1)))[
        1
    ]  # rows [0, row) must not change
    for x, name in ((k, "k"), (v, "v")):
        if which in (name, "both"):
            x[:, :, row + geometry.offset :] = bad
    q[:, :, row:] = bad
    after = s2o.s2o(q, k, v, config)
    np.testing.assert_array_equal(after.o[:, :, :row], before.o[:, :, :row])
    np.testing.assert_array_equal(after.lse[:, :, :row], before.lse[:, :, :row])


@given(
    cases(is_causal=True),
    st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
    st.sampled_from(["k", "v", "both"]),
    st.sampled_from([0.0, 0.05]),
    st.data(),
)
@settings(deadline=None, max_examples=80)
def test_later_keys_of_a_segment_reach_its_rows_only_through_the_stop(case, bad, which, tau, data):
    """Rows of one q tile stop together, and a later row's mass depends on later keys.

    Given the orders and how many key tiles each q tile visits (at tau = 0 it is all of them), a future
    key changes no bit of any earlier row. With rank="query" what later rows find has a part in the order.
    """
    assume(case.config["rank"] != "query")
    case = case._replace(seqlen_k=max(case.seqlen_q, case.seqlen_k), config=case.config | {"tau": tau})
    q, k, v, config = make(case, np.float32)
    geometry, scale = case.geometry(config), 0.3
    before = s2o.s2o(q, k, v, config, scale=scale)
    row = data.draw(st.integers(0, case.seqlen_q - 1))
    for x, name in ((k, "k"), (v, "v")):
        if which in (name, "both"):
            x[:, :, row + geometry.offset :] = bad
    if tau == 0:
        after = s2o.s2o(q, k, v, config, scale=scale)
        o, lse = after.o, after.lse
    else:
        state = s2o.pass1(q, k, v, geometry, scale)
        state, _ = s2o.pass2(
            q, k, v, state, before.q_order, before.k_order, geometry, config, scale, visited=before.visited
        )
        o, lse = s2o.finish(state)
    np.testing.assert_array_equal(o[:, :, :row], before.o[:, :, :row])
    np.testing.assert_array_equal(lse[:, :, :row], before.lse[:, :, :row])


def test_visible_nan_is_not_laundered():
    q, k, v, config = make(Case(config={"tau": 0.5}), np.float32)
    v[0, 0, 20, 2] = np.nan  # in segment 1: rows 20 to 31 see it in pass 1
    o = s2o.s2o(q, k, v, config).o
    assert np.isnan(o[:, :, 20:32, 2]).all()
    assert np.isfinite(o[:, :, :20]).all()
    k[0, 0, 3] = np.nan  # its score is NaN: it is ordered first, so that every later segment meets it
    o = s2o.s2o(q, k, v, config).o
    assert np.isnan(o[:, :, 3:]).all()
    assert np.isfinite(o[:, :, :3]).all()


def test_a_nan_query_spoils_its_own_row_only():
    q, k, v, config = make(Case(), np.float32)
    expected = s2o.s2o(q, k, v, config)
    q[0, 1, 21] = np.nan
    result = s2o.s2o(q, k, v, config)
    assert np.isnan(result.o[0, 1, 21]).all()
    others = np.arange(40) != 21
    np.testing.assert_array_equal(result.o[0, 0], expected.o[0, 0])
    tol, _ = tolerance(np.nan_to_num(q), k, v, dtype=np.float32)  # the NaN reorders the segment's keys
    np.testing.assert_allclose(result.o[0, 1, others], expected.o[0, 1, others], rtol=0, atol=2 * tol)


# ---------------------------------------------------------------- symmetry


def test_scaling_v_scales_o():
    q, k, v, config = make(Case(config={"tau": 0.1}), np.float32)
    one, four = s2o.s2o(q, k, v, config), s2o.s2o(q, k, 4 * v, config)
    np.testing.assert_array_equal(four.o, 4 * one.o)  # a power of two is exact
    np.testing.assert_array_equal(four.visited, one.visited)


def test_permuting_heads_permutes_outputs():
    q, k, v, config = make(Case(heads=6, kv_heads=3, config={"tau": 0.1}), np.float32)
    kv_heads = np.array([2, 0, 1])
    heads = np.array([5, 4, 0, 1, 3, 2])  # inside the groups too
    result = s2o.s2o(q, k, v, config)
    permuted = s2o.s2o(q[:, heads], k[:, kv_heads], v[:, kv_heads], config)
    for name in ("o", "lse", "visited", "q_order"):
        np.testing.assert_array_equal(getattr(permuted, name), getattr(result, name)[:, heads])


def test_gqa_is_mha_with_repeated_keys():
    q, k, v, config = make(Case(2, 6, 2, config={"tau": 0.1, "rank": "max"}), np.float32)
    grouped = s2o.s2o(q, k, v, config)
    repeated = s2o.s2o(q, k.repeat(3, axis=1), v.repeat(3, axis=1), config)
    np.testing.assert_array_equal(repeated.o, grouped.o)


def test_progress_counts_segments():
    q, k, v, config = make(Case())
    calls = []
    s2o.s2o(q, k, v, config, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


# ---------------------------------------------------------------- ordering


def test_pooled_queries_average_runs_of_queries():
    q, _, _, config = make(Case(seqlen_q=21, config={"rank": "max", "pooled_queries": 5}))
    geometry = Geometry(21, 21, config.segment)
    pooled, counts = s2o.pooled_queries(q, geometry, config)  # runs of ceil(16 / 5) = 4 queries
    assert pooled.shape == (1, 2, 2, 5, 8)
    np.testing.assert_array_equal(counts, [[4, 4, 4, 4, 0], [4, 1, 0, 0, 0]])
    four = q[:, :, 12] + q[:, :, 13] + q[:, :, 14] + q[:, :, 15]
    np.testing.assert_allclose(pooled[:, :, 0, 3], four / 4, rtol=0, atol=1e-15 * np.abs(q).max() * 4)
    np.testing.assert_array_equal(pooled[:, :, 1, 1], q[:, :, 20])


@pytest.mark.parametrize("is_causal", [True, False])
def test_key_scores_are_the_largest_over_pooled_queries(is_causal):
    q, k, _, config = make(
        Case(heads=4, kv_heads=2, seqlen_q=35, config={"rank": "max", "pooled_queries": 4})
    )
    geometry = Geometry(35, 40, 16, 0, is_causal)
    pooled, counts = s2o.pooled_queries(q, geometry, config)
    assert counts[2].tolist() == [3, 0, 0, 0]
    for n in range(3):
        scores = s2o.key_scores(pooled, counts, k, n, geometry)
        positions = s2o.candidate_positions(n, geometry)
        assert scores.dtype == np.float32
        assert scores.shape == (1, 4, len(positions))
        for h in range(4):
            dots = pooled[0, h, n, counts[n] > 0] @ k[0, h // 2, positions].T
            # float64 dot products, rounded to float32 at the end: half a unit in the last place.
            np.testing.assert_allclose(scores[0, h], dots.max(axis=0), rtol=2**-24 + 1e-12, atol=1e-14)


def test_key_order_is_absolute_and_skips_the_dense_keys():
    q, k, _, config = make(Case(config={"window": 3, "rank": "weight"}))
    geometry = Geometry(40, 40, 16, 3, is_causal=False)
    order = s2o.key_order(q, k, geometry, config, q.shape[-1] ** -0.5).keys
    for n, keys in enumerate(order):
        dense = range(*geometry.dense_keys(n))
        assert keys.dtype == np.int32
        for h in range(2):
            assert sorted(keys[0, h].tolist()) == [j for j in range(40) if j not in dense]
