"""Whether a schedule keeps what it promises. Waits for the GPU, as all arrays are looked into."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import ArgumentValueError
from ..plan.schedule_form import ScheduleForm

__all__ = ["check_lists"]


def check_lists(form: ScheduleForm, arrays: Mapping[str, np.ndarray], *, is_sorted: bool = False) -> None:
    """``arrays``: by form.array_names, on the host. Raises ValueError that names the first list that breaks a promise.
    """
    entries, begins, keys = (arrays[name] for name in ("entries", "begins", "keys"))
    order = arrays.get("k_order")
    for name, seqlen in (("k_order", form.seqlen_k), ("q_order", form.seqlen_q)):
        if name in arrays:
            _check_order(name, arrays[name], seqlen)
    batch, heads = max(form.batch, form.order_batch), max(form.list_heads, form.order_heads)
    checked = set()
    for b in range(batch):
        for h in range(heads):
            at = min(b, form.batch - 1), h * form.list_heads // heads
            of = None if order is None else order[min(b, len(order) - 1), h * form.order_heads // heads]
            bounds = _unit_bounds(of, form)
            for row in range(form.rows):
                place = (*at, row)
                listed = _List(f"list {list(map(int, place))} ({_axes(form)})", form)
                if place not in checked:
                    listed.check_entries(entries, int(begins[place]), int(keys[place]), is_sorted)
                    checked.add(place)
                listed.check_keys(entries, int(begins[place]), int(keys[place]), row, of, bounds)


def _axes(form: ScheduleForm) -> str:
    return f"batch, list head, {'segment' if form.per_segment else 'q tile'}"


def _check_order(name: str, order: np.ndarray, seqlen: int) -> None:
    every = np.arange(seqlen)
    for place in np.ndindex(*order.shape[:2]):
        row = order[place]
        if not np.array_equal(np.sort(row), every):
            found, times = np.unique(row, return_counts=True)
            wrong = found[(found < 0) | (found >= seqlen) | (times > 1)]
            raise ArgumentValueError(
                f"{name}{list(map(int, place))} holds {int(wrong[0])} out of range or twice; "
                f"accepted: a permutation of 0 to {seqlen - 1}",
                "Schedule.check",
            )


def _unit_bounds(order: np.ndarray | None, form: ScheduleForm) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest key position of each unit, [units]."""
    begins = np.arange(form.units, dtype=np.int64) * form.unit
    if order is None:
        return begins, np.minimum(begins + form.unit, form.seqlen_k) - 1
    if form.units == 0:
        return begins, begins
    return np.minimum.reduceat(order, begins), np.maximum.reduceat(order, begins)


class _List:
    """One list. ``name``: for errors."""

    def __init__(self, name: str, form: ScheduleForm) -> None:
        self.name, self.form = name, form

    def refuse(self, what: str, accepted: str) -> None:
        raise ArgumentValueError(f"{self.name} {what}; accepted: {accepted}", "Schedule.check")

    def check_entries(self, entries: np.ndarray, begin: int, keys: int, is_sorted: bool) -> None:
        form = self.form
        if not 0 <= keys <= form.seqlen_k:
            self.refuse(f"has {keys} keys", f"0 to {form.seqlen_k}, seqlen_k")
        count = -(-keys // form.unit)
        if not 0 <= begin <= begin + count <= len(entries):
            self.refuse(f"has entries {begin} to {begin + count - 1}", f"places in the {len(entries)} entries")
        found = entries[begin : begin + count]
        outside = np.flatnonzero((found < 0) | (found >= form.units))
        if len(outside):
            i = int(outside[0])
            self.refuse(f"has {int(found[i])} as its entry {i}", f"0 to {form.units - 1}, units of {form.unit} keys")
        ordered = np.sort(found)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            self.refuse(f"has {int(twice[0])} twice", "each entry once")
        if is_sorted and not np.array_equal(ordered, found):
            self.refuse("does not ascend", "ascending entries, as is_sorted says")
        short = form.units * form.unit - form.seqlen_k
        if short and count:
            at = np.flatnonzero(found == form.units - 1)
            if len(at) and (at[0] != count - 1 or keys > count * form.unit - short):
                place = f"has the short unit {form.units - 1} as its entry {int(at[0])} of {count}"
                self.refuse(place, "it stands last")

    def check_keys(
        self, entries: np.ndarray, begin: int, keys: int, row: int, order: np.ndarray | None,
        bounds: tuple[np.ndarray, np.ndarray],
    ) -> None:  # fmt: skip
        """That every row of the list's queries sees each key, and none counts twice."""
        form, dense = self.form, self.form.dense
        if keys == 0 or (dense is None and not form.is_causal):
            return
        first_query = row * form.list_rows
        if dense is None:
            low, limit, after = 0, first_query + form.seqlen_k - form.seqlen_q + 1, form.seqlen_k
        else:
            limit, after = dense.dense_keys(first_query // dense.segment)
            low, after = min(form.sinks, limit), form.seqlen_k if form.is_causal else after
        units = entries[begin : begin - (-keys // form.unit)]
        lowest, highest = (x[units] for x in bounds)
        doubtful = (lowest < low) | ((highest >= limit) & (lowest < after))
        for i in np.flatnonzero(doubtful):
            at = np.arange(i * form.unit, min(keys, (i + 1) * form.unit)) - i * form.unit + units[i] * form.unit
            positions = at if order is None else order[at]
            self._check_positions(positions, low, limit, after, first_query)

    def _check_positions(self, positions: np.ndarray, low: int, limit: int, after: int, first_query: int) -> None:
        form = self.form
        for position in positions.tolist():
            if position < low:
                self.refuse(f"has key {position}, one of the {form.sinks} sinks", f"keys from {low} on")
            if form.is_causal and position >= first_query + form.seqlen_k - form.seqlen_q + 1:
                self.refuse(
                    f"has key {position}, which is in the future of its query {first_query}", f"keys before {limit}"
                )
            if limit <= position < after:
                self.refuse(
                    f"has key {position}, which the dense part holds",
                    f"keys before {limit}" + ("" if form.is_causal else f" or from {after} on"),
                )
