"""Where a backend writes what a call gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Results"]


class Results(NamedTuple):
    """Native arrays; None is not asked for. On a GPU ``o`` may also be what is known of the caller's ``out``."""

    o: Any
    lse: Any  # float32
    visited: Sequence[Any] | None  # each sequence's of a packed call, or that of all
    taus: Any  # float32 [batch, heads], of a config with an error
