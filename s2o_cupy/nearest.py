"""What a name was probably meant to be, for errors.

Standard library only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["meant", "nearest"]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of the ``known`` names that is most like it, whatever the case; None if none is. ``cutoff``: how much
    alike they are at least, 1 for equal ones."""
    by_lower = {x.lower(): x for x in reversed([*known])}
    near = difflib.get_close_matches(name.lower(), by_lower, 1, cutoff)
    return by_lower[near[0]] if near else None


def meant(name: str, known: Iterable[str]) -> str:
    """``"did you mean x? "`` if one of the ``known`` names is like it; else nothing."""
    near = nearest(name, known)
    return "" if near is None else f"did you mean {near}? "
