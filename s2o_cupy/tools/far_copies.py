"""Tokens that a text repeats: what a head that looks for an earlier occurrence ("induction") is for."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["far_copies"]


def far_copies(ids: Any, n: int = 8, distance: int = 4096) -> np.ndarray:
    """Which predictions of a text can be read off an earlier place, and only off one far back.

    Prediction t is of token t + 1. It counts where the last n ids, those up to t, stood in the text before; where
    their latest earlier occurrence ends more than ``distance`` tokens before t, so that no nearer one gives the same
    hint; and where the token after that occurrence is the one to predict. With a ``distance`` of 0 every repeat counts.

    Parameters
    ----------
    ids : integers [length + 1]
        The text, the last prediction's token included.
    n : int
        Ids that must agree. 8 are too many to agree by chance outside of names and phrases that come again.
    distance : int
        In tokens. 4,096 is 32 default segments: the occurrence is a candidate and lies outside any usual window.

    Returns
    -------
    bool [length]

    Examples
    --------
    >>> from s2o_cupy.tools.far_copies import far_copies
    >>> far_copies([1, 2, 3, 4, 5, 1, 2, 3, 4, 6], n=3, distance=4)
    array([False, False, False, False, False, False, False,  True, False])
    """
    ids = np.asarray(ids, np.int64)
    context = ids[:-1]
    if n < 1 or len(context) < n:
        return np.zeros(len(context), bool)
    # A number for the n ids that end at each place, from n - 1 on: one id further back at a time, without collisions.
    number = np.unique(context, return_inverse=True)[1]
    for back in range(1, n):
        number = np.unique(number[1:] * (ids.max() + 1) + context[:-back], return_inverse=True)[1]
    by_number = np.argsort(number, kind="stable")  # places of the same ids in the order of the text
    again = 1 + np.flatnonzero(number[by_number[1:]] == number[by_number[:-1]])
    now, before = by_number[again] + n - 1, by_number[again - 1] + n - 1
    found = np.zeros(len(context), bool)
    found[now] = (now - before > distance) & (ids[now + 1] == ids[before + 1])
    return found
