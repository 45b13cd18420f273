"""The rules of a schedule as its constructors are given them, and what they come to."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..arrays.frameworks import framework_of
from ..by_head import check_one_tau, check_value_skip
from ..errors import ArgumentTypeError, ArgumentValueError
from ..plan.schedule_form import ScheduleForm
from ..problem import GPU_BLOCK_M, MAX_SEQLEN
from ..spec import MAX_SEGMENT

__all__ = ["INTEGERS", "UNITS", "Rules", "check_blocks", "check_number", "form_of", "shape_of"]

INTEGERS = ("int32", "int64")
UNITS = (1, 64, 128)  # neighbouring keys that one entry of a list stands for


class Rules(NamedTuple):
    """What all constructors of a schedule are given besides lists, not checked yet."""

    seqlen_q: Any
    seqlen_k: Any
    unit: Any
    block_m: Any = 128
    per_segment: Any = False
    segment: Any = None
    window: Any = 0
    sinks: Any = 0
    is_causal: Any = True
    k_order: Any = None
    tau: Any = 0.0
    value_skip: Any = None

    @classmethod
    def parse(cls, where: str, seqlen_q: Any, seqlen_k: Any, unit: Any, further: Mapping[str, Any]) -> Rules:
        """Errors begin with ``where``, here and below."""
        for name in further:
            if name not in FURTHER:
                raise ArgumentTypeError(f"{name} is no argument; accepted beside its own: {', '.join(FURTHER)}", where)
        return cls(seqlen_q, seqlen_k, unit, **further)


FURTHER = Rules._fields[3:]


def check_number(name: str, value: Any, choices: Sequence[int], where: str) -> None:
    """Raise unless it is one of some integers."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value not in choices:
        *most, last = choices
        raise ArgumentValueError(f"{name} is {value!r}; accepted: {', '.join(map(str, most))} or {last}", where)


def form_of(where: str, shape: tuple[Any, ...], rules: Rules) -> ScheduleForm:
    """The checked form. ``shape``: the lists' (batch, list heads, lists); None: as many lists as there must be."""
    seqlen_q, seqlen_k, unit, block_m, per_segment, segment, window, sinks, is_causal, k_order, tau, skip = rules
    for name, value, least, most in (
        ("seqlen_q", seqlen_q, 0, MAX_SEQLEN), ("seqlen_k", seqlen_k, 0, MAX_SEQLEN), ("window", window, 0, MAX_SEQLEN),
        ("sinks", sinks, 0, MAX_SEQLEN), ("segment", 1 if segment is None else segment, 1, MAX_SEGMENT),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
            raise ArgumentValueError(f"{name} is {value!r}; accepted: an integer from {least} to {most}", where)
    for name, value in (("is_causal", is_causal), ("per_segment", per_segment)):
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"{name} is {value!r}; accepted: True or False", where)
    check_number("unit", unit, UNITS, where)
    check_number("block_m", block_m, GPU_BLOCK_M, where)
    if is_causal and seqlen_q > seqlen_k:
        raise ArgumentValueError(
            f"seqlen_q {seqlen_q} exceeds seqlen_k {seqlen_k}; accepted with is_causal=True: no more queries "
            "than keys",
            where,
        )
    if segment is None and (per_segment or window or sinks):
        name = "per_segment" if per_segment else "window" if window else "sinks"
        raise ArgumentValueError(
            f"{name} is given without a segment; accepted: with segment=, the queries of one", where
        )
    if segment is not None and not per_segment and segment % block_m:
        raise ArgumentValueError(
            f"segment is {segment} with lists of q tiles; accepted: a multiple of block_m ({block_m}), or "
            "per_segment=True",
            where,
        )
    if sinks and not is_causal:
        raise ArgumentValueError(
            f"sinks is {sinks} with is_causal=False; accepted: 0, as lists can hold the first keys",
            where,
        )
    if sinks > seqlen_k:
        raise ArgumentValueError(f"sinks is {sinks}; accepted: up to seqlen_k, {seqlen_k}", where)
    batch, heads, lists = shape
    order: tuple[int, ...] = (0, 0, seqlen_k)
    if k_order is not None:
        order = shape_of(where, "k_order", k_order, INTEGERS, 3, "(batch or 1, heads, kv_heads or 1, seqlen_k)")
        if order[2] != seqlen_k:
            raise ArgumentValueError(
                f"k_order has shape {order}; accepted: {seqlen_k}, seqlen_k, on its last axis", where
            )
    form = ScheduleForm(
        int(batch), int(heads), order[0], order[1], int(seqlen_q), int(seqlen_k), unit, block_m, per_segment,
        None if segment is None else int(segment), int(window), int(sinks), is_causal, check_one_tau("tau", tau, where),
        value_skip=check_value_skip(skip, where),
    )  # fmt: skip
    if lists not in (None, form.rows):
        what = f"segments of {segment}" if per_segment else f"q tiles of {block_m}"
        raise ArgumentValueError(
            f"there are {lists} lists; accepted: {form.rows}, {what} in seqlen_q ({seqlen_q})", where
        )
    return form


def check_blocks(where: str, form: ScheduleForm) -> None:
    """Raise where the dense part cuts a block in two, or the diagonal does."""
    dense, block = form.dense, form.unit
    if dense is None:
        if form.is_causal:
            raise ArgumentValueError(
                "segment is None and is_causal is True; accepted: a segment, such as "
                f"{max(block, form.block_m)}, as of a block on the diagonal each row sees another part",
                where,
            )
        return
    if form.sinks % block:
        raise ArgumentValueError(f"sinks is {form.sinks}; accepted: a multiple of block ({block})", where)
    for n in range(dense.segments):
        begin, end = dense.dense_keys(n)
        if begin % block or not (form.is_causal or end % block == 0 or end == form.seqlen_k):
            raise ArgumentValueError(
                f"the dense part of segment {n} has keys {begin} to {end - 1}, which cuts a block of {block}; "
                "accepted: segment and seqlen_k - seqlen_q - window that are multiples of it (window="
                f"{(form.seqlen_k - form.seqlen_q) % block} serves the latter)",
                where,
            )


def shape_of(where: str, name: str, x: Any, dtypes: tuple[str, ...], ndim: int, axes: str) -> tuple[int, ...]:
    """Of an array argument, or an error."""
    framework = framework_of(name, x)
    framework.check(name, x)
    dtype = framework.dtype(x)
    if dtype not in dtypes:
        raise ArgumentTypeError(f"{name} is {dtype}; accepted: {' or '.join(dtypes)}", where)
    shape = tuple(int(n) for n in x.shape)
    if len(shape) != ndim:
        raise ArgumentValueError(f"{name} has shape {shape}; accepted: {axes}", where)
    return shape
