"""What a name was probably meant to be, for errors."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["meant"]


def meant(name: str, known: Sequence[str]) -> str:
    """``"did you mean x? "`` if one of the ``known`` names is like it, whatever the case; else nothing."""
    by_lower = {x.lower(): x for x in reversed(known)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[near[0]]}? " if near else ""
