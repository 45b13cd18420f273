"""The definition of the keys' order: buckets, strata, and the head of the order that is sorted again."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from s2o_cupy.reference import key_order
from s2o_cupy.spec import KEY_BUCKETS, KEY_LEVELS, LAYER_MIX, MIDDLE, MIDDLE_FROM, ORDER_HEAD, ORDER_WHOLE, STRATUM


def buckets(scores, count=KEY_BUCKETS):
    """score_buckets of one row, element by element, with exact products."""
    scores = [np.float16(x) for x in scores]
    finite = [x for x in scores if np.isfinite(x)] or [np.float16(0)]
    most = max(finite)
    with np.errstate(all="ignore"):
        span = np.float32(most) - np.float32(min(finite))
        factor = np.float16(min(np.float32(count - 2) / span, np.float32(65504)))
        result = []
        for x in scores:
            below = most - x  # float16
            if np.isnan(below):
                result.append(0)
            elif np.isinf(below):
                result.append(count - 1 if below > 0 else 0)
            else:  # round() takes a fraction to the nearest integer, halves to an even one
                result.append(min(round(Fraction(float(below)) * Fraction(float(factor)) + 1025) - 1024, count - 1))
    return result


def stratified(scores):
    """stratified_order of one row: strata one after the other, in plain Python."""
    dealt = [[c for c in stratum if c >= 0] for stratum in key_order.strata(len(scores)).tolist()]
    ranked = []
    for stratum in dealt:
        level = dict(zip(stratum, buckets([scores[c] for c in stratum], KEY_LEVELS), strict=True))
        ranked.append(sorted(stratum, key=lambda c: (level[c], c)))
    longest = max(map(len, ranked), default=0)
    return [stratum[rank] for rank in range(longest) for stratum in ranked if rank < len(stratum)]


def unusual(count, seed):
    """Random scores, some of which are equal, infinite or no numbers."""
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal(count) * rng.choice([0.01, 1, 100])).astype(np.float16)
    for value in (np.nan, np.inf, -np.inf, 0.0, scores[0]):
        scores[rng.random(count) < rng.choice([0, 0.01])] = value
    return scores


def test_weights_are_powers_of_two():
    """2 to what is returned is e^(scale * score), and an infinite score's is infinite, as of one beyond float16."""
    scores = np.array([0.0, 1.0, -2.5, 7.25, 1e6, -1e6, np.inf, np.nan])
    with np.errstate(over="ignore"):
        weights = key_order.log_weights(scores, 0.3)
    assert weights.dtype == np.float16
    np.testing.assert_allclose(np.exp2(weights[:4].astype(np.float64)), np.exp(0.3 * scores[:4]), rtol=2e-3)
    np.testing.assert_array_equal(weights[4:], [np.inf, -np.inf, np.inf, np.nan])


@given(hnp.arrays(np.float16, hnp.array_shapes(min_dims=1, max_dims=1, min_side=0, max_side=50)))
@settings(max_examples=100)
def test_order_keys_is_a_stable_descending_sort_of_buckets(scores):
    """Hypothesis draws NaN, both infinities, subnormals and the largest numbers."""
    order = key_order.order_keys(scores)
    assert order.dtype == np.int32
    bucket = buckets(scores)
    assert key_order.score_buckets(scores).tolist() == bucket
    assert order.tolist() == sorted(range(len(scores)), key=lambda c: (bucket[c], c))


def test_order_keys_sorts_clear_margins_and_keeps_near_ties():
    scores = np.array([0.0, 3.0, 3.001, 10.0, -5.0, 3.0], np.float16)  # a bucket is 15 / 1022 = 0.015
    assert key_order.order_keys(scores).tolist() == [3, 1, 2, 5, 0, 4]


@pytest.mark.parametrize(
    ("scores", "order"),
    [
        ([2.0, 2.0, 2.0], [0, 1, 2]),  # constant
        ([np.nan, np.nan], [0, 1]),
        ([1.0, np.nan, 2.0, np.inf, -np.inf], [1, 3, 2, 0, 4]),  # NaN and inf share bucket 0
        ([-np.inf, 1.0, -np.inf], [1, 0, 2]),
        ([-np.inf, np.nan, np.inf], [1, 2, 0]),  # nothing is finite
        ([-60000, 60000, -np.inf, 0.0], [1, 3, 0, 2]),  # what is more than float16 below shares the last bucket
        ([-30000, 30000, 0.0], [1, 2, 0]),
        ([0.0, 6e-8, 0.0], [0, 1, 2]),  # no factor of float16 tells so small a range apart
        ([1.0, 1e30, 2.0, -1e30], [1, 2, 0, 3]),  # infinite in float16
        ([], []),
    ],
)
def test_order_keys_corner_cases(scores, order):
    with np.errstate(over="ignore"):
        assert key_order.order_keys(np.array(scores).astype(np.float16)).tolist() == order


def test_order_keys_treats_rows_apart():
    scores = np.random.default_rng(0).standard_normal((2, 3, 500)).astype(np.float16)
    scores[1, 1] *= 1000
    order = key_order.order_keys(scores)
    for b, h in np.ndindex(2, 3):
        np.testing.assert_array_equal(order[b, h], key_order.order_keys(scores[b, h]))
        # Scores ascend by no more than a bucket, and by the rounding of a distance and of its place to ten bits.
        ranked = scores[b, h][order[b, h]].astype(np.float64)
        lowest = np.minimum.accumulate(ranked)
        assert (ranked - lowest <= np.ptp(ranked) * (1 / (KEY_BUCKETS - 2) + 2**-10)).all()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16, 17, 1024, 1025, 2048, 8193, 10_000, 100_001, 131_072])
def test_strata_hold_every_candidate_once(count):
    dealt = key_order.strata(count)
    assert dealt.shape[1] == STRATUM and dealt.shape[0] % 4 == 0
    there = dealt >= 0
    assert np.sort(dealt[there]).tolist() == list(range(count))
    assert (np.diff(dealt.astype(np.int64), axis=1)[there[:, 1:]] > 0).all()  # in ascending position, then nothing
    sizes = there.sum(axis=1)
    assert sizes.max() - sizes.min() <= 4


@pytest.mark.parametrize("count", [5, 100, 1025, 5000, 20_011])
def test_candidates_are_dealt_as_the_words_say(count):
    """Chunks of eight neighbours to pairs of strata, layer by layer."""
    dealt = key_order.strata(count)
    pairs = len(dealt) // 2
    expected = [[] for _ in dealt]
    for layer in range(STRATUM // 4):
        chunks = range(layer * pairs, (layer + 1) * pairs)
        whole = (chunks[-1] + 1) * 8 <= count
        begin = (layer**2 * LAYER_MIX % 2**32) * pairs // 2**32 if whole else 0
        for i, chunk in enumerate(chunks):
            pair = (i + begin) % pairs
            turned = whole and layer // 8 % 2 == 1  # the other way round
            for candidate in range(chunk * 8, chunk * 8 + 8):
                expected[2 * pair + (candidate % 2 != turned)].append(candidate)
    assert [[c for c in stratum if c >= 0] for stratum in dealt.tolist()] == [
        [c for c in stratum if c < count] for stratum in expected
    ]


@pytest.mark.parametrize("count", [8_192, 65_536, 131_072])
def test_keys_at_equal_distances_do_not_meet_in_a_stratum(count):
    """No stratum gets much more than its share of every n-th key; if layers began alike, one would get all of some."""
    dealt = key_order.strata(count)
    for distance in (2, 8, 16, 64, 512, 1000, 1024, 1536, 2048, 4096, len(dealt) * 4, len(dealt) * 4 + 8):
        share = count / distance / len(dealt)
        assert ((dealt % distance == 0) & (dealt >= 0)).sum(axis=1).max() <= 3 + 2 * share


@given(st.integers(1, 3000), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_the_stratified_order_takes_from_all_strata_in_turn(count, seed):
    scores = unusual(count, seed)
    order = key_order.stratified_order(scores)
    assert order.dtype == np.int32
    assert order.tolist() == stratified(scores)


@pytest.mark.parametrize("count", [ORDER_HEAD + 1, *(ORDER_WHOLE + more for more in (0, 1, 8, ORDER_WHOLE)), 20_001])
def test_the_front_of_a_long_row_is_sorted_again(count):
    scores = unusual(count, count)
    order = key_order.order_keys(scores)
    assert np.sort(order).tolist() == list(range(count))
    if count <= ORDER_WHOLE:
        bucket = buckets(scores)
        assert order.tolist() == sorted(range(count), key=lambda c: (bucket[c], c))
        return
    rough = key_order.stratified_order(scores)
    np.testing.assert_array_equal(order[ORDER_HEAD:], rough[ORDER_HEAD:])
    bucket = buckets(scores[rough[:ORDER_HEAD]])
    assert order[:ORDER_HEAD].tolist() == [rough[i] for i in sorted(range(ORDER_HEAD), key=lambda i: (bucket[i], i))]


def test_a_very_long_row_is_dealt_twice():
    scores = unusual(MIDDLE_FROM + 1, 3)
    order = key_order.order_keys(scores)
    assert np.sort(order).tolist() == list(range(MIDDLE_FROM + 1))
    first = key_order.stratified_order(scores)
    np.testing.assert_array_equal(order[MIDDLE:], first[MIDDLE:])
    second = first[:MIDDLE][key_order.stratified_order(scores[first[:MIDDLE]])]
    np.testing.assert_array_equal(order[ORDER_HEAD:MIDDLE], second[ORDER_HEAD:])
    bucket = key_order.score_buckets(scores[second[:ORDER_HEAD]])
    np.testing.assert_array_equal(order[:ORDER_HEAD], second[:ORDER_HEAD][np.argsort(bucket, kind="stable")])


@pytest.mark.parametrize("count", [16_385, 30_000, 131_072, MIDDLE_FROM, MIDDLE_FROM + 1, 1 << 20, 1 << 22])
def test_what_matters_most_comes_first(count):
    """A span of neighbours far above the rest, which strata deal to few, comes first; and NaN before it."""
    rng = np.random.default_rng(count)
    scores = rng.standard_normal(count).astype(np.float16)
    at = count // 3 + 5
    scores[at : at + 64] = 8 + rng.random(64).astype(np.float16)
    lost = rng.choice(count - 1000, 10, replace=False)
    lost = lost[(lost < at) | (lost >= at + 64)]
    scores[lost] = np.nan
    order = key_order.order_keys(scores)
    assert set(order[: len(lost)].tolist()) == set(lost.tolist())
    assert set(order[len(lost) : len(lost) + 64].tolist()) == set(range(at, at + 64))


def test_a_long_row_s_front_is_near_a_full_sort():
    """What strata misplace: of the best 2,000 of 100,000 keys one in a thousand comes later than by a full sort."""
    scores = np.random.default_rng(0).standard_normal((4, 100_000)).astype(np.float16)
    order = key_order.order_keys(scores)
    for row in range(4):
        best = set(np.argsort(-scores[row].astype(np.float64), kind="stable")[:2000].tolist())
        assert len(best & set(order[row, :2050].tolist())) >= 1998
