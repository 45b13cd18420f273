"""The fastest of many settings that holds: on the part of the texts that it is chosen on, and on that held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .must_hold import Bound, Part, plain

__all__ = ["Trial", "fastest"]

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class Trial:
    """A setting with which the model's loss was measured.

    Attributes
    ----------
    density : float
        Mean of the tuned layers.
    work : float
        The same with what ordering takes: a part of dense attention's time.
    loss_difference, standard_error : float
        Mean nats a token beyond dense attention's, over all predictions, and its standard error, runs of 128 tokens
        taken for independent.
    chosen_on, held_back : Part
        What it does to these parts of the texts. ``held_back`` is None where nothing is held back.
    coarse : tuple of int
        Layers whose units are `COARSER` times as large.
    """

    density: float
    work: float
    loss_difference: float
    standard_error: float
    chosen_on: Part
    held_back: Part | None = None
    coarse: tuple[int, ...] = ()

    @property
    def holds(self) -> bool:
        """On both parts."""
        return self.chosen_on.holds and (self.held_back is None or self.held_back.holds)

    @property
    def held_back_worse(self) -> float | None:
        """Nats a token by which the held-back part is worse than the part chosen on: of each the mean loss beyond dense
        attention's or how far predictions moved, whichever is larger. Below 0 it is better."""
        return None if self.held_back is None else self.held_back.value - self.chosen_on.value

    def line(self) -> str:
        """For a table of what was tried."""
        moved = max(x.moved for x in (self.chosen_on, self.held_back) if x is not None)
        told = f"   {len(self.coarse)} layers with larger units" if self.coarse else ""
        told += "" if self.holds else f"   too much: {self.missed.name}{self.of_held_back}"
        return f"{self.density:>9.3f} {self.loss_difference:>+14.4f} {self.standard_error:>8.4f} {moved:>8.4f}{told}"

    @property
    def missed(self) -> Bound:
        """What is passed by most, or reached first, of the part that does not hold; of what is chosen on first."""
        return (self.held_back if self.of_held_back and self.held_back else self.chosen_on).tightest

    @property
    def of_held_back(self) -> str:
        """In words, whether the part that does not hold is the one held back."""
        return ", held back" if self.held_back is not None and self.chosen_on.holds and not self.holds else ""

    def table(self) -> list[str]:
        """What must hold, and what was measured of it on each part."""
        held = {} if self.held_back is None else {x.name: x for x in self.held_back.bounds}
        chosen = {x.name: x for x in self.chosen_on.bounds}
        number = lambda bound: "" if bound is None else f"{bound.value:.4f}"  # noqa: E731
        heading = f"{'what must hold':<15} {'at most':>9} {'chosen on':>10}"
        lines = ["", heading + (f" {'held back':>10}" if held else "")]
        for name in dict.fromkeys([*chosen, *held]):
            one, other = chosen.get(name), held.get(name)
            most = next(x.most for x in (one, other) if x is not None)
            where = [x.where for x in (one, other) if x is not None and x.where]
            line = f"{name:<15} {most:>9.4f} {number(one):>10}" + (f" {number(other):>10}" if held else "")
            lines.append(line + (f"   {'; '.join(where)}" if where else ""))
        if self.held_back_worse is not None:
            worse = "worse" if self.held_back_worse > 0 else "better"
            lines.append(f"the part held back is {abs(self.held_back_worse):.4f} nats a token {worse} than the other")
        return [*lines, ""]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        parts = {"chosen_on": plain(self.chosen_on), "held_back": plain(self.held_back)}
        return {**vars(self), "coarse": [*self.coarse], **parts, "held_back_worse": self.held_back_worse}


def fastest(choices: Sequence[Choice], measure: Callable[[Choice], Trial]) -> tuple[Choice, Trial] | None:
    """Of choices from the fastest to the most exact one the first that holds, by bisection; None if the last does not.

    What is chosen on decides first. Where the held-back part does not hold then, closer choices are tried, until it
    does too.
    """
    known: dict[int, Trial] = {}

    def trial(n: int) -> Trial:
        if n not in known:
            known[n] = measure(choices[n])
        return known[n]

    def first(low: int, holds: Callable[[Trial], bool]) -> int:
        """From ``low`` on, or the last."""
        high = len(choices) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(trial(middle)) else (middle + 1, high)
        return low

    n = first(0, lambda x: x.chosen_on.holds)
    if not trial(n).holds:
        n = first(min(n + 1, len(choices) - 1), lambda x: x.holds)
    return (choices[n], trial(n)) if trial(n).holds else None
