"""NSA's reference: what each stage must equal, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from s2o_cupy.reference.dense import dense_attention
from s2o_cupy.reference.nsa import forward as nsa

TOLERANCE = 1e-12  # of float64 sums of a few hundred terms of size 1
LENGTH, STRIDE, BLOCK = 8, 4, 16
RULES = {"block": BLOCK, "top": 6, "first": 1, "local": 2}


@pytest.fixture
def arrays(rng):
    """arrays(seqlen_q, seqlen_k, batch=, heads=, kv_heads=) -> q, k, v in float64."""

    def make(seqlen_q, seqlen_k=None, *, batch=2, heads=4, kv_heads=2, head_dim=8):
        q = rng.standard_normal((batch, heads, seqlen_q, head_dim))
        k, v = rng.standard_normal((2, batch, kv_heads, seqlen_k or seqlen_q, head_dim))
        return q, k, v

    return make


def assert_close(found, expected):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE)


def weights_of(q, k, v, **lengths):
    """Compressed attention, and what blocks weigh."""
    lengths = {"length": LENGTH, "stride": STRIDE} | lengths
    k_cmp, v_cmp = (nsa.compress(x, **lengths) for x in (k, v))
    o, lse = nsa.compressed(q, k_cmp, v_cmp, k.shape[2], **lengths)
    return nsa.importance(q, k_cmp, lse, k.shape[2], block=BLOCK, **lengths), o, lse


def blocks_of(q, k, v):
    return nsa.top_blocks(weights_of(q, k, v)[0], k.shape[2], **RULES)


# ---------------------------------------------------------------- equal to dense attention


@pytest.mark.parametrize("lengths", [(1, 1), (100, 100), (37, 133)])
def test_all_blocks_are_dense_attention(arrays, lengths):
    q, k, v = arrays(*lengths)
    weight, _, _ = weights_of(q, k, v)
    blocks = nsa.top_blocks(weight, k.shape[2], block=BLOCK, top=-(-k.shape[2] // BLOCK) + 3, first=1, local=2)
    assert_close(nsa.selected(q, k, v, blocks, block=BLOCK), dense_attention(q, k, v))


@pytest.mark.parametrize("lengths", [(1, 1), (100, 100), (37, 133)])
def test_a_window_of_all_keys_is_dense_attention(arrays, lengths):
    q, k, v = arrays(*lengths)
    assert_close(nsa.window(q, k, v, lengths[1]), dense_attention(q, k, v))
    assert_close(nsa.window(q, k, v, 1, sinks=lengths[1]), dense_attention(q, k, v))


@pytest.mark.parametrize("lengths", [(1, 1), (100, 100), (37, 133)])
def test_runs_of_one_key_are_dense_attention(arrays, lengths):
    q, k, v = arrays(*lengths)
    one = {"length": 1, "stride": 1}
    k_cmp, v_cmp = nsa.compress(k, **one), nsa.compress(v, **one)
    np.testing.assert_array_equal(k_cmp, k)
    assert_close(nsa.compressed(q, k_cmp, v_cmp, k.shape[2], **one), dense_attention(q, k, v))


# ---------------------------------------------------------------- the compressed branch


def test_compressed_keys_by_hand():
    x = np.arange(11.0).reshape(1, 1, 11, 1)
    np.testing.assert_array_equal(nsa.compress(x, 4, 2)[0, 0, :, 0], [1.5, 3.5, 5.5, 7.5])
    assert nsa.compress(x[:, :, :3], 4, 2).shape == (1, 1, 0, 1)
    np.testing.assert_array_equal(nsa.visible_compressed(np.arange(9), 4, 2), [0, 0, 0, 1, 1, 2, 2, 3, 3])


def test_the_first_tokens_see_no_compressed_key(arrays):
    q, k, v = arrays(40)
    weight, o, lse = weights_of(q, k, v)
    assert (o[:, :, : LENGTH - 1] == 0).all() and np.isneginf(lse[:, :, : LENGTH - 1]).all()
    assert (weight[:, :, : LENGTH - 1] == 0).all()
    assert (o[:, :, LENGTH - 1 :] != 0).any(axis=-1).all() and np.isfinite(lse[:, :, LENGTH - 1 :]).all()


def test_a_compressed_key_is_seen_when_its_run_is(arrays):
    """It changes no row before its last token, and each one after."""
    q, k, v = arrays(60)
    k_cmp, v_cmp = (nsa.compress(x, LENGTH, STRIDE) for x in (k, v))
    options = {"length": LENGTH, "stride": STRIDE}
    before = nsa.compressed(q, k_cmp, v_cmp, 60, **options)[0]
    k_cmp[:, :, 5] = v_cmp[:, :, 5] = np.nan
    changed = nsa.compressed(q, k_cmp, v_cmp, 60, **options)[0]
    end = 5 * STRIDE + LENGTH - 1
    np.testing.assert_array_equal(changed[:, :, :end], before[:, :, :end])
    assert np.isnan(changed[:, :, end:]).all()


# ---------------------------------------------------------------- importance


@pytest.mark.parametrize(
    ("length", "block", "expected"),
    [(8, 16, [1, 2, 2, 2, 1]), (4, 16, [1, 1, 1, 1]), (8, 8, [1, 2, 1]), (12, 8, [1, 2, 2, 1])],
)
@pytest.mark.parametrize("j", [0, 2])
def test_how_often_a_compressed_key_counts(j, length, block, expected):
    """One query and one compressed key that has all of its weight at a time; for block 0 there is none before key 0."""
    seqlen, stride = 64, 4
    count = nsa.compressed_count(seqlen, length, stride)
    found = []
    for c in range(count):
        q, k_cmp = np.ones((1, 1, 1, 1)), np.full((1, 1, count, 1), -1e3)
        k_cmp[0, 0, c] = 0
        options = {"length": length, "stride": stride}
        _, lse = nsa.compressed(q, k_cmp, k_cmp, seqlen, **options)
        found.append(nsa.importance(q, k_cmp, lse, seqlen, block=block, **options)[0, 0, 0, j])
    first = j * block // stride - (length // stride - 1)
    expected, first = expected[max(-first, 0) :], max(first, 0)
    np.testing.assert_array_equal(np.flatnonzero(found), first + np.arange(len(expected)))
    np.testing.assert_allclose(np.array(found)[first : first + len(expected)], expected)


def test_weights_are_added_over_the_group(arrays):
    q, k, v = arrays(90)
    of_all, _, _ = weights_of(q, k, v)
    of_each, _, _ = weights_of(q, np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1))
    np.testing.assert_allclose(of_all, of_each.reshape(2, 2, 2, 90, -1).sum(axis=2), rtol=TOLERANCE)


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize("lengths", [(200, 200), (37, 200)])
def test_what_is_always_chosen(arrays, lengths):
    q, k, v = arrays(*lengths)
    blocks = blocks_of(q, k, v)
    assert blocks.shape == (2, 2, lengths[0], 6) and blocks.dtype == np.int32
    for i in range(lengths[0]):
        own = (i + lengths[1] - lengths[0]) // BLOCK
        for row in blocks[:, :, i].reshape(-1, 6):
            there = row[row >= 0]
            assert len(there) == min(6, own + 1) and (np.diff(there) > 0).all() and (row[len(there) :] == -1).all()
            assert {0, own, max(0, own - 1)} <= set(there.tolist()) and there.max() == own


def test_the_others_are_those_of_most_weight_and_of_equals_the_first():
    weight = np.zeros((1, 1, 10, 10))
    weight[0, 0, 9] = [9, 1, 3, 3, np.nan, 0, 3, 2, 9, 9]
    of_last = lambda top: nsa.top_blocks(weight, 10, block=1, top=top, first=1, local=2)[0, 0, 9].tolist()  # noqa: E731
    assert of_last(4) == [0, 4, 8, 9]
    assert of_last(6) == [0, 2, 3, 4, 8, 9]
    assert of_last(7) == [0, 2, 3, 4, 6, 8, 9]
    assert of_last(12) == [*range(10), -1, -1]


def test_no_later_token_has_influence(arrays):
    q, k, v = arrays(130)
    before = blocks_of(q, k, v)
    for x in (q, k, v):
        x[:, :, 100:] = 7.0
    np.testing.assert_array_equal(blocks_of(q, k, v)[:, :, :100], before[:, :, :100])


# ---------------------------------------------------------------- the selected branch


def test_heads_of_a_group_share_blocks(arrays):
    """The same as with a KV head, and a row of blocks, for each query head."""
    q, k, v = arrays(130)
    blocks = blocks_of(q, k, v)
    assert blocks.shape[1] == k.shape[1]
    expected = nsa.selected(q, *(np.repeat(x, 2, axis=1) for x in (k, v, blocks)), block=BLOCK)
    assert_close(nsa.selected(q, k, v, blocks, block=BLOCK), expected)


def test_selected_keys_directly(arrays):
    q, k, v = arrays(37, 130)
    blocks = blocks_of(q, k, v)
    o, lse = nsa.selected(q, k, v, blocks, block=BLOCK)
    for i in (0, 20, 36):
        p = i + 93
        keys = [j for c in blocks[1, 1, i] if c >= 0 for j in range(c * BLOCK, (c + 1) * BLOCK) if j <= p]
        rows = q[1:, 3:, i : i + 1], k[1:, 1:, keys], v[1:, 1:, keys]
        exact, exact_lse = dense_attention(*rows, is_causal=False)
        assert_close((o[1, 3, i], lse[1, 3, i]), (exact[0, 0, 0], exact_lse[0, 0, 0]))


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(130, 130), (37, 130), (16, 16), (17, 17)])
def test_by_blocks_of_keys_is_by_tokens(arrays, heads, lengths):
    q, k, v = arrays(*lengths, heads=heads)
    blocks = blocks_of(q, k, v)
    begins, entries = nsa.invert(blocks, -(-lengths[1] // BLOCK))
    o, lse = nsa.partials(q, k, v, begins, entries, blocks.shape[3], block=BLOCK)
    assert_close(nsa.merge(o, lse), nsa.selected(q, k, v, blocks, block=BLOCK))


def test_inverted_lists(arrays):
    q, k, v = arrays(130)
    blocks = blocks_of(q, k, v)
    count = -(-130 // BLOCK)
    begins, entries = nsa.invert(blocks, count)
    assert (begins[..., 0] == 0).all()
    np.testing.assert_array_equal(begins[..., -1], (blocks >= 0).sum(axis=(2, 3)))
    for b, kv in np.ndindex(2, 2):
        assert (entries[b, kv, begins[b, kv, -1] :] == -1).all()
        for c in range(count):
            listed = entries[b, kv, begins[b, kv, c] : begins[b, kv, c + 1]]
            assert (np.diff(listed) > 0).all() and len(listed) == (blocks[b, kv] == c).sum()
            assert (blocks[b, kv].reshape(-1)[listed] == c).all()


def test_parts_without_keys_merge_to_nothing():
    o, lse = nsa.merge(np.ones((1, 2, 3, 4)), np.array([[[-np.inf] * 3, [0.0, -np.inf, 0.0]]]))
    np.testing.assert_array_equal(o[0, :, 0], [0, 1])
    np.testing.assert_array_equal(lse, [[-np.inf, np.log(2)]])


def test_a_token_without_blocks_has_no_output(arrays):
    q, k, v = arrays(20)
    blocks = np.full((2, 2, 20, 3), -1, np.int32)
    blocks[:, :, 7, 1] = 0
    o, lse = nsa.selected(q, k, v, blocks, block=BLOCK)
    assert np.isfinite(lse[:, :, 7]).all()
    rest = np.arange(20) != 7
    assert (o[:, :, rest] == 0).all() and np.isneginf(lse[:, :, rest]).all()


# ---------------------------------------------------------------- window and gates


def test_window_and_sinks_directly(arrays):
    q, k, v = arrays(30, 90)
    o, lse = nsa.window(q, k, v, 16, sinks=3)
    for i in (0, 29):
        keys = [0, 1, 2, *range(i + 60 - 15, i + 61)]
        exact, exact_lse = dense_attention(q[:1, :1, i : i + 1], *(x[:1, :1, keys] for x in (k, v)), is_causal=False)
        assert_close((o[0, 0, i], lse[0, 0, i]), (exact[0, 0, 0], exact_lse[0, 0, 0]))


def test_keys_outside_of_the_window_have_no_influence(arrays):
    q, k, v = arrays(90)
    before = nsa.window(q, k, v, 16)
    k[:, :, 50] = v[:, :, 50] = np.nan
    after = nsa.window(q, k, v, 16)
    rest = np.r_[:50, 66:90]
    np.testing.assert_array_equal(after[0][:, :, rest], before[0][:, :, rest])
    assert np.isnan(after[0][:, :, 50:66]).all()


@pytest.mark.parametrize("per_head", [False, True])
def test_gates(rng, per_head):
    branches = rng.standard_normal((3, 2, 4, 10, 8))
    shape = (2, 4, 10) if per_head else (2, 10)
    for i, o in enumerate(branches):
        np.testing.assert_array_equal(nsa.gate(np.broadcast_to(np.eye(3)[i], (*shape, 3)), *branches), o)
    one, other = rng.random((2, *shape, 3))
    assert_close(
        [nsa.gate(2 * one + other, *branches)], [2 * nsa.gate(one, *branches) + nsa.gate(other, *branches)]
    )


def test_lse(arrays):
    """The log of the sum of exp(scores) over what is seen."""
    q, k, v = arrays(50)
    s = np.einsum("bhid,bhjd->bhij", q, np.repeat(k, 2, axis=1)) / np.sqrt(8)
    i, j = np.ogrid[:50, :50]
    with np.errstate(divide="ignore"):
        expected = np.log(np.where((j <= i) & (j > i - 10), np.exp(s), 0).sum(axis=-1))
    np.testing.assert_allclose(nsa.window(q, k, v, 10)[1], expected, rtol=1e-12)
