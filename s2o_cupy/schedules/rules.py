"""The rules of a schedule as its constructors are given them, and what they come to."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..arrays.frameworks import framework_of
from ..by_head import check_one_tau, check_value_skip
from ..plan.schedule_form import ScheduleForm
from ..problem import GPU_BLOCK_M, MAX_SEQLEN
from ..spec import MAX_SEGMENT

__all__ = ["INTEGERS", "UNITS", "Rules", "check_blocks", "form_of", "shape_of"]

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
                raise TypeError(f"{where}: {name} is no argument; accepted beside its own: {', '.join(FURTHER)}")
        return cls(seqlen_q, seqlen_k, unit, **further)


FURTHER = Rules._fields[3:]


def form_of(where: str, shape: tuple[Any, ...], rules: Rules) -> ScheduleForm:
    """The checked form. ``shape``: the lists' (batch, list heads, lists); None: as many lists as there must be."""
    seqlen_q, seqlen_k, unit, block_m, per_segment, segment, window, sinks, is_causal, k_order, tau, skip = rules
    for name, value, least, most in (
        ("seqlen_q", seqlen_q, 0, MAX_SEQLEN), ("seqlen_k", seqlen_k, 0, MAX_SEQLEN), ("window", window, 0, MAX_SEQLEN),
        ("sinks", sinks, 0, MAX_SEQLEN), ("segment", 1 if segment is None else segment, 1, MAX_SEGMENT),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
            raise ValueError(f"{where}: {name} is {value!r}; accepted: an integer from {least} to {most}")
    for name, value in (("is_causal", is_causal), ("per_segment", per_segment)):
        if not isinstance(value, bool):
            raise TypeError(f"{where}: {name} is {value!r}; accepted: True or False")
    if unit not in UNITS:
        raise ValueError(f"{where}: unit is {unit!r}; accepted: 1, 64 or 128")
    if block_m not in GPU_BLOCK_M:
        raise ValueError(f"{where}: block_m is {block_m!r}; accepted: 64 or 128")
    if is_causal and seqlen_q > seqlen_k:
        raise ValueError(
            f"{where}: seqlen_q {seqlen_q} exceeds seqlen_k {seqlen_k}; accepted with is_causal=True: no more queries "
            "than keys"
        )
    if segment is None and (per_segment or window or sinks):
        name = "per_segment" if per_segment else "window" if window else "sinks"
        raise ValueError(f"{where}: {name} is given without a segment; accepted: with segment=, the queries of one")
    if segment is not None and not per_segment and segment % block_m:
        raise ValueError(
            f"{where}: segment is {segment} with lists of q tiles; accepted: a multiple of block_m ({block_m}), or "
            "per_segment=True"
        )
    if sinks and not is_causal:
        raise ValueError(
            f"{where}: sinks is {sinks} with is_causal=False; accepted: 0, as lists can hold the first keys"
        )
    if sinks > seqlen_k:
        raise ValueError(f"{where}: sinks is {sinks}; accepted: up to seqlen_k, {seqlen_k}")
    batch, heads, lists = shape
    order: tuple[int, ...] = (0, 0, seqlen_k)
    if k_order is not None:
        order = shape_of(where, "k_order", k_order, INTEGERS, 3, "(batch or 1, heads, kv_heads or 1, seqlen_k)")
        if order[2] != seqlen_k:
            raise ValueError(f"{where}: k_order has shape {order}; accepted: {seqlen_k}, seqlen_k, on its last axis")
    form = ScheduleForm(
        int(batch), int(heads), order[0], order[1], int(seqlen_q), int(seqlen_k), unit, block_m, per_segment,
        None if segment is None else int(segment), int(window), int(sinks), is_causal, check_one_tau("tau", tau, where),
        value_skip=check_value_skip(skip, where),
    )  # fmt: skip
    if lists not in (None, form.rows):
        what = f"segments of {segment}" if per_segment else f"q tiles of {block_m}"
        raise ValueError(f"{where}: there are {lists} lists; accepted: {form.rows}, {what} in seqlen_q ({seqlen_q})")
    return form


def check_blocks(where: str, form: ScheduleForm) -> None:
    """Raise where the dense part cuts a block in two, or the diagonal does."""
    dense, block = form.dense, form.unit
    if dense is None:
        if form.is_causal:
            raise ValueError(
                f"{where}: segment is None and is_causal is True; accepted: a segment, such as "
                f"{max(block, form.block_m)}, as of a block on the diagonal each row sees another part"
            )
        return
    if form.sinks % block:
        raise ValueError(f"{where}: sinks is {form.sinks}; accepted: a multiple of block ({block})")
    for n in range(dense.segments):
        begin, end = dense.dense_keys(n)
        if begin % block or not (form.is_causal or end % block == 0 or end == form.seqlen_k):
            raise ValueError(
                f"{where}: the dense part of segment {n} has keys {begin} to {end - 1}, which cuts a block of {block}; "
                "accepted: segment and seqlen_k - seqlen_q - window that are multiples of it (window="
                f"{(form.seqlen_k - form.seqlen_q) % block} serves the latter)"
            )


def shape_of(where: str, name: str, x: Any, dtypes: tuple[str, ...], ndim: int, axes: str) -> tuple[int, ...]:
    """Of an array argument, or an error."""
    framework = framework_of(name, x)
    framework.check(name, x)
    dtype = framework.dtype(x)
    if dtype not in dtypes:
        raise TypeError(f"{where}: {name} is {dtype}; accepted: {' or '.join(dtypes)}")
    shape = tuple(int(n) for n in x.shape)
    if len(shape) != ndim:
        raise ValueError(f"{where}: {name} has shape {shape}; accepted: {axes}")
    return shape
