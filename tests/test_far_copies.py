"""Which tokens a text repeats, and which it copies from far away."""

from __future__ import annotations

import numpy as np
import pytest

from s2o_cupy.tools.far_copies import far_copies


def by_definition(ids, n, distance):
    found = np.zeros(len(ids) - 1, bool)
    for t in range(n - 1, len(ids) - 1):
        last = list(ids[t - n + 1 : t + 1])
        earlier = [e for e in range(n - 1, t) if list(ids[e - n + 1 : e + 1]) == last]
        found[t] = bool(earlier) and t - earlier[-1] > distance and ids[earlier[-1] + 1] == ids[t + 1]
    return found


def test_planted_text():
    """A phrase of 20 ids stands three times in ids that do not come again otherwise."""
    ids = np.arange(100_000, 120_000)
    phrase = np.arange(20)
    for begin in (1000, 5000, 15000):
        ids[begin : begin + 20] = phrase
    # The ninth id of the phrase is the first to follow eight that stood before, and its last is the last.
    third = set(range(15007, 15019))
    assert set(np.flatnonzero(far_copies(ids))) == third  # the second is 4,000 tokens away
    assert set(np.flatnonzero(far_copies(ids, distance=3999))) == set(range(5007, 5019)) | third
    assert set(np.flatnonzero(far_copies(ids, n=18))) == {15017, 15018}
    assert not far_copies(ids, n=20).any()  # what follows the phrase is never the same
    ids[15010] = 7  # other ids follow, and for eight more the last ones are new
    assert set(np.flatnonzero(far_copies(ids))) == {15007, 15008, 15018}
    ids[15010], ids[9000:9020] = 10, phrase
    assert set(np.flatnonzero(far_copies(ids))) == third  # the nearest occurrence counts, 6,000 tokens away
    ids[12000:12020] = phrase
    assert not far_copies(ids).any()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_as_defined(n, rng):
    ids = rng.integers(0, 3, 200).astype(np.uint16)
    for distance in (0, 1, 7 if n > 1 else 2):
        expected = by_definition(ids, n, distance)
        np.testing.assert_array_equal(far_copies(ids, n, distance), expected)
        assert expected.any() or n == 8


def test_short_texts():
    assert far_copies([5, 5], 3).tolist() == [False]
    assert far_copies([5, 5, 5], 1, 0).tolist() == [False, True]
