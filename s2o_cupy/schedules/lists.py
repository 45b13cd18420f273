"""Lists from what callers have, by operations of the arrays' own framework, so that nothing waits for a GPU.

xp is the namespace of the array API standard. Bs is the lists' batch, HL the list heads, R the lists of a list head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays.frameworks import framework_of
from ..arrays.narrowed import as_int32, at_least, at_most
from ..plan.schedule_form import ScheduleForm

__all__ = ["Lists", "csr_lists", "in_c_order", "mask_lists", "padded_lists", "sinks_of"]


class Lists(NamedTuple):
    """KeyLists of raw_kernels/common/listed_rows.cuh."""

    entries: Any  # int32 [any]
    begins: Any  # int64 [Bs, HL, R]
    keys: Any  # int32 [Bs, HL, R]


def mask_lists(mask: Any, form: ScheduleForm) -> Lists:
    """``mask``: bool [Bs, HL, R, C], a key block of form.unit keys each. What the dense part and the sinks hold, and
    what is in the future, is taken out."""
    from array_api_compat import array_namespace, device

    xp, where = array_namespace(mask), device(mask)
    blocks = mask.shape[-1]
    c = xp.arange(blocks, dtype=xp.int32, device=where)  # [C]
    kept = mask
    if form.dense is not None:
        begin, end = c * form.unit, at_most(xp, (c + 1) * form.unit, form.seqlen_k)  # [C]
        before, after = (x[:, None] for x in _dense_keys(xp, where, form))  # [R, 1]
        listed = end[None] <= before  # [R, C]
        if not form.is_causal:
            listed = listed | (begin[None] >= after)
        kept = kept & listed & (begin >= form.sinks)[None]
    ones = xp.astype(kept, xp.int32)
    counts = xp.sum(ones, axis=-1, dtype=xp.int32)  # [Bs, HL, R]
    begins = _strided(xp, where, counts.shape, blocks)
    # Chosen blocks first, in order, and behind them the others, which nobody reads: where each one goes in its row.
    upto = xp.cumulative_sum(ones, axis=-1, dtype=xp.int32)
    place = xp.where(kept, upto - 1, counts[..., None] + c - upto)  # [Bs, HL, R, C]
    places = xp.reshape(begins[..., None] + place, (-1,))
    values = xp.reshape(xp.broadcast_to(c, mask.shape), (-1,))
    entries = framework_of("mask", mask).put(xp.empty_like(values), places, values)
    at_end = xp.sum(ones[..., blocks - 1 :], axis=-1, dtype=xp.int32)  # whether the last block is chosen
    short = blocks * form.unit - form.seqlen_k
    return Lists(entries, begins, counts * form.unit - at_end * short)


def padded_lists(rows: Any, counts: Any, form: ScheduleForm) -> Lists:
    """``rows``: integers [Bs, HL, R, W], of which the first ``counts`` [Bs, HL, R] are entries."""
    from array_api_compat import array_namespace, device

    xp = array_namespace(rows, counts)
    begins = _strided(xp, device(rows), counts.shape, rows.shape[-1])
    entries = in_c_order(as_int32(rows))
    return Lists(entries, begins, _keys(xp, entries, begins, counts, form))


def csr_lists(indptr: Any, indices: Any, form: ScheduleForm) -> Lists:
    """``indptr``: integers [Bs, HL, R + 1], places in ``indices``; or [Bs * HL * R + 1], of all lists in turn."""
    from array_api_compat import array_namespace

    xp = array_namespace(indptr, indices)
    shape = (form.batch, form.list_heads, form.rows)
    ends, begins = xp.reshape(indptr[..., 1:], shape), xp.reshape(indptr[..., :-1], shape)
    entries = in_c_order(as_int32(indices))
    begins = in_c_order(xp.astype(begins, xp.int64), shape)
    return Lists(entries, begins, _keys(xp, entries, begins, ends - xp.astype(begins, ends.dtype), form))


def sinks_of(like: Any, form: ScheduleForm) -> Lists:
    """A list of sinks for each segment [N], on the device of ``like``."""
    from array_api_compat import array_namespace, device

    assert form.dense is not None and form.segment is not None
    xp, where, segments = array_namespace(like), device(like), form.dense.segments
    first = xp.arange(segments, dtype=xp.int32, device=where) * form.segment
    before = at_least(xp, first + (form.dense.offset - form.window), 0)
    return Lists(
        xp.arange(form.sinks, dtype=xp.int32, device=where),
        xp.zeros((segments,), dtype=xp.int64, device=where),
        xp.astype(at_most(xp, before, form.sinks), xp.int32),
    )


def _keys(xp: Any, entries: Any, begins: Any, counts: Any, form: ScheduleForm) -> Any:
    """Keys of lists of ``counts`` entries: a list that ends with the last, short unit has fewer."""
    most = (2**31 - 1) // form.unit  # so that 32 bits hold as many keys, which are too many as well
    counts = at_most(xp, at_least(xp, counts, -most), most)
    keys = xp.astype(counts, xp.int32) * form.unit
    short = form.units * form.unit - form.seqlen_k
    if short == 0 or entries.shape[0] == 0:
        return keys
    last = begins + xp.astype(counts, xp.int64) - 1
    last = at_most(xp, at_least(xp, last, 0), entries.shape[0] - 1)
    found = xp.reshape(xp.take(entries, xp.reshape(last, (-1,)), axis=0), keys.shape)
    return keys - xp.astype((counts > 0) & (found == form.units - 1), xp.int32) * short


def _dense_keys(xp: Any, where: Any, form: ScheduleForm) -> tuple[Any, Any]:
    """First dense key and the end of the dense keys for each list, [R]."""
    assert form.dense is not None and form.segment is not None
    segment = xp.arange(form.rows, dtype=xp.int32, device=where) * form.list_rows // form.segment
    begin = segment * form.segment + (form.dense.offset - form.window)
    end = at_most(xp, (segment + 1) * form.segment, form.seqlen_q) + form.dense.offset
    clip = lambda x: at_most(xp, at_least(xp, x, 0), form.seqlen_k)  # noqa: E731
    return clip(begin), clip(end)


def _strided(xp: Any, where: Any, shape: tuple[int, ...], width: int) -> Any:
    """Where rows of ``width`` elements begin."""
    lists = shape[0] * shape[1] * shape[2]
    return xp.reshape(xp.arange(lists, dtype=xp.int64, device=where) * width, shape)


def in_c_order(x: Any, shape: tuple[int, ...] = (-1,)) -> Any:
    """In C order, which kernels read, in one row or in ``shape``."""
    from array_api_compat import array_namespace

    framework = framework_of("array", x)
    x = array_namespace(x).reshape(x, shape)
    info = framework.describe(x)
    expected, strides = info.itemsize, []
    for n in reversed(info.shape):
        strides.append(expected)
        expected *= n
    in_order = all(n == 1 or s == t for n, s, t in zip(info.shape, info.strides, reversed(strides), strict=True))
    return x if in_order or 0 in info.shape else framework.contiguous(info.native)
