"""That all ranks of a group make the same call: where they do not, bytes of one meaning would arrive as another, or
nothing would arrive at all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

__all__ = ["Agreement", "agreement_of"]

CALLS = 1024  # that are remembered

Terms = Mapping[str, Any]  # what must be the same on all ranks, by name: numbers, strings, None


class Agreement:
    """The calls that the ranks of one group have agreed on.

    Ranks exchange the terms of a call that is new, and remember it: another such call sends nothing. What they remember
    is the same everywhere, as they make the same calls in the same order. So only all of them may forget, and
    `s2o_cupy.caches.clear_cache`, which one rank may call, does not.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._calls: set[Any] = set()

    def knows(self, call: Any) -> bool:
        """Whether the ranks have agreed on ``call``, which stands for its terms."""
        return call in self._calls

    def reach(self, call: Any, terms: Terms, x: Any) -> None:
        """Compare the terms of ``call`` with those of all other ranks, which do the same, and remember it.

        ``x``: a tensor on the device of the call, if there is one. Raises ValueError, the same on every rank, if terms
        differ.
        """
        of_ranks: list[Any] = [None] * dist.get_world_size(self.group)
        # NCCL sends from the current device.
        with torch.cuda.device(x.device) if x is not None and x.is_cuda else nullcontext():
            dist.all_gather_object(of_ranks, dict(terms), group=self.group)
        differences = _differences(of_ranks)
        if differences:
            raise ValueError(
                f"SequenceParallel: the ranks make different calls: {'; '.join(differences)}; accepted: the same on all"
            )
        if len(self._calls) == CALLS:
            self._calls.clear()
        self._calls.add(call)


def _differences(of_ranks: list[Terms]) -> list[str]:
    """In words, for each term that differs: who has what."""
    found = []
    for name in dict.fromkeys(name for terms in of_ranks for name in terms):
        ranks: dict[str, list[int]] = {}
        for rank, terms in enumerate(of_ranks):
            ranks.setdefault(repr(terms[name]) if name in terms else "absent", []).append(rank)
        if len(ranks) > 1:
            has = [f"{value} on rank{'s'[: len(who) - 1]} {_listed(who)}" for value, who in ranks.items()]
            found.append(f"{name} is {', '.join(has)}")
    return found


def _listed(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


_agreements: WeakKeyDictionary[Any, Agreement] = WeakKeyDictionary()  # by process group: as long as that lives


def agreement_of(group: Any) -> Agreement:
    """The one agreement of a process group; None is that of all processes."""
    key = dist.group.WORLD if group is None else group
    if key not in _agreements:
        _agreements[key] = Agreement(group)
    return _agreements[key]
