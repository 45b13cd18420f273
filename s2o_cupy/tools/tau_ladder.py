"""Which layers and heads take which tau, from the sparsest choice to the most exact one, each step where it pays most.

A unit (a head, a layer or all of them) has a density and a cost at each tau of a grid. The price of error is one for
all units: of all choices of taus with so small a cost, a choice of the ladder has about the smallest density. That is
Lagrange's rule; exact it is where no step is left between two corners of the lower convex hull of a unit's points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Unit", "ladder"]


class Unit(NamedTuple):
    """What gets one tau."""

    density: np.ndarray  # [taus], summed over its heads
    cost: np.ndarray  # [taus]: what its error costs, in any one measure that adds up over units


def ladder(units: Sequence[Unit]) -> list[tuple[int, ...]]:
    """Choices, each the number of a tau for every unit; from one to the next a single unit changes."""
    paths = [_path(unit) for unit in units]
    steps = []  # (what cost falls by for the density that it takes, unit, place on its path)
    for n, (unit, path) in enumerate(zip(units, paths, strict=True)):
        rates = _rates(unit, path)
        steps += [(rate, n, place) for place, rate in enumerate(rates, 1)]
    steps.sort(key=lambda step: (-step[0], step[1], step[2]))
    choice = [path[0] for path in paths]
    found = [tuple(choice)]
    for _, n, place in steps:
        choice[n] = paths[n][place]
        found.append(tuple(choice))
    return found


def _path(unit: Unit) -> list[int]:
    """Taus by ascending density, each of which costs less than all before it."""
    found: list[int] = []
    for n in np.lexsort((unit.cost, unit.density)).tolist():
        if not found or unit.cost[n] < unit.cost[found[-1]]:
            found.append(n)
    return found


def _rates(unit: Unit, path: list[int]) -> list[float]:
    """Of each step of a path how much cost falls for the density that it takes: that of the edge of the lower convex
    hull above which the step lies, so that rates fall along the path."""
    density, cost = unit.density[path], unit.cost[path]
    rates: list[float] = []
    here = 0
    while here < len(path) - 1:
        slopes = (cost[here] - cost[here + 1 :]) / (density[here + 1 :] - density[here])
        far = here + 1 + int(slopes.argmax())
        rates += [float(slopes.max())] * (far - here)
        here = far
    return rates
