"""A sample of things in a row by strata, and ratios of sums over all of them by what the sampled ones give."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["Stratum", "draw", "ratio"]


class Stratum(NamedTuple):
    """Neighbours, some of which were drawn, each with the same chance."""

    size: int
    drawn: tuple[int, ...]  # ascending


def draw(total: int, count: int, seed: int) -> tuple[Stratum, ...]:
    """``count`` of ``range(total)``, without repeats: two from each of equal runs of neighbours, of the first three if
    count is odd. Two, as one would not tell how much neighbours differ. All of them if there are no more than count."""
    if count >= total:
        return (Stratum(total, tuple(range(total))),)
    strata = count // 2
    rng = np.random.default_rng(seed)
    runs = np.array_split(np.arange(total), strata)
    counts = [len(part) for part in np.array_split(np.arange(count), strata)]
    return tuple(
        Stratum(len(run), tuple(sorted(rng.choice(run, n, replace=False).tolist())))
        for run, n in zip(runs, counts, strict=True)
    )


def ratio(above: np.ndarray, below: np.ndarray, strata: tuple[Stratum, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of ``above`` over all things divided by that of ``below``, and its standard error.

    Both are float64 [drawn, ...], not negative, in the order of the strata. The ratio estimator of stratified samples,
    its variance by linearisation (Cochran, Sampling Techniques, chapters 5 and 6); 0 of strata that were taken whole.
    0 / 0 is 0, and any other number / 0 infinite.
    """
    weights = np.repeat([x.size / len(x.drawn) for x in strata], [len(x.drawn) for x in strata])  # [drawn]
    of_above, of_below = (np.tensordot(weights, x, axes=1) for x in (above, below))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(of_above == 0, 0.0, of_above / of_below)
        off = above - found * below  # [drawn, ...]
    variance, first = np.zeros(found.shape), 0
    for size, drawn in strata:
        count = len(drawn)
        if count < size:
            variance += size * (size - count) * off[first : first + count].var(axis=0, ddof=1) / count
        first += count
    with np.errstate(divide="ignore", invalid="ignore"):
        return found, np.where(variance == 0, 0.0, np.sqrt(variance) / of_below)
