"""Schedules as tests make and read them. Importing this needs no GPU, no CuPy and no framework."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from key_lists import nowhere

from s2o_cupy import Schedule
from s2o_cupy.arrays.frameworks import to_host
from s2o_cupy.plan.schedule_form import ScheduleForm
from s2o_cupy.reference.dense import capped


class Framework(NamedTuple):
    kind: Any
    array: Callable[[Any], Any]


def _torch() -> Framework:
    torch = pytest.importorskip("torch")
    return Framework(torch.Tensor, lambda x: torch.from_numpy(np.ascontiguousarray(x)))


def _jax() -> Framework:
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]  # tests send float32, which a GPU does not take
    return Framework(jax.Array, lambda x: jax.device_put(x, cpu))


FRAMEWORKS: dict[str, Callable[[], Framework]] = {
    "numpy": lambda: Framework(np.ndarray, np.asarray), "torch": _torch, "jax": _jax,
}  # fmt: skip


def listed(schedule: Schedule, b: int, h: int, r: int) -> Any:
    """Key numbers, int [C], of a list in turn, before k_order."""
    entries, begins, keys = (to_host(x) for x in (schedule.entries, schedule.begins, schedule.keys))
    unit, i = schedule.form.unit, np.arange(keys[b, h, r])
    return entries[begins[b, h, r] + i // unit].astype(np.int64) * unit + i % unit


def tile_limits(form: ScheduleForm, r: int) -> tuple[int, int, int]:
    """Keys of list r that are its own to name: from the first to before the second, and from the third on."""
    first = r * form.list_rows
    dense = form.dense
    if dense is None:
        limit = first + form.seqlen_k - form.seqlen_q + 1 if form.is_causal else form.seqlen_k
        return 0, limit, form.seqlen_k
    begin, end = dense.dense_keys(first // dense.segment)
    return min(form.sinks, begin), begin, form.seqlen_k if form.is_causal else end


def meant(schedule: Schedule, batch: int, heads: int) -> Any:
    """The mask that a schedule means: bool [batch, heads, Lq, Lk]."""
    form = schedule.form
    mask = np.zeros((batch, heads, form.seqlen_q, form.seqlen_k), bool)
    order = None if schedule.k_order is None else to_host(schedule.k_order)
    for b, h, r in np.ndindex(batch, heads, form.rows):
        first = r * form.list_rows
        rows = slice(first, min(first + form.list_rows, form.seqlen_q))
        keys = listed(schedule, min(b, form.batch - 1), h * form.list_heads // heads, r)
        if order is not None:
            keys = order[min(b, len(order) - 1), h * form.order_heads // heads][keys]
        mask[b, h, rows, keys] = True
    query, key = np.arange(form.seqlen_q)[:, None] + form.seqlen_k - form.seqlen_q, np.arange(form.seqlen_k)
    if form.segment is not None:
        first = np.arange(form.seqlen_q)[:, None] // form.segment * form.segment + form.seqlen_k - form.seqlen_q
        end = np.minimum(first + form.segment, form.seqlen_k)
        own = (key >= first - form.window) & (key < end)
        mask |= own & (key <= query) if form.is_causal else own
        mask |= (key < form.sinks) & (key <= query) if form.sinks else False
    return mask


def masked_attention(
    q: Any, k: Any, v: Any, mask: Any, *, scale: float | None = None, softcap: float = 0.0
) -> tuple[Any, Any]:
    """Output and lse of dense attention in float64 under ``mask``, bool [B, H, Lq, Lk]; 0 and -inf without a key."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))  # [B, H, Lk, D]
    s = capped(q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale), softcap)
    s = np.where(mask, s, -np.inf)  # [B, H, Lq, Lk]
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(top), 0, top))
    mass = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return p @ v / np.where(mass == 0, 1, mass), (top + np.log(mass))[..., 0]


RULES: tuple[dict[str, Any], ...] = (
    {"is_causal": False},
    {"is_causal": True},
    {"is_causal": True, "segment": 128},
    {"is_causal": True, "segment": 256, "window": 37, "sinks": 20},
    {"is_causal": True, "segment": 200, "window": 300, "sinks": 5, "per_segment": True},
    {"is_causal": False, "segment": 128, "window": 10},
    {"is_causal": False, "segment": 90, "per_segment": True},
)  # every kind of dense part


def random_schedule(
    rng: np.random.Generator, seqlen_q: int, seqlen_k: int, *, batch: int = 1, list_heads: int = 1, unit: int = 1,
    order: tuple[int, int] | None = None, block_m: int = 128, share: float = 0.5, array: Any = np.asarray, **rules: Any,
) -> Schedule:  # fmt: skip
    """Lists of about ``share`` of the units that a list may name, in random orders, a fifth of them empty. ``order``:
    batch and heads of a k_order. Entries that belong to no list lead nowhere. ``array``: from NumPy's to others."""
    rules = {"block_m": block_m, "is_causal": True} | rules
    blank = Schedule.from_csr(
        *_rows([[]] * batch * list_heads * _lists(seqlen_q, rules)), seqlen_q=seqlen_q, seqlen_k=seqlen_k, unit=unit,
        batch=batch, list_heads=list_heads, **rules,
    ).form  # fmt: skip
    k_order = None
    if order is not None:
        k_order = np.stack([[_order(rng, blank) for _ in range(order[1])] for _ in range(order[0])]).astype(np.int32)
    lists = []
    for _, _, r in np.ndindex(batch, list_heads, blank.rows):
        low, limit, after = tile_limits(blank, r)
        orders = [np.arange(seqlen_k)] if k_order is None else k_order.reshape(-1, seqlen_k)
        allowed = np.ones(blank.units, bool)
        for x in orders:
            bad = ~(((x >= low) & (x < limit)) | (x >= after))
            allowed &= ~np.logical_or.reduceat(bad, np.arange(0, seqlen_k, unit))
        units = rng.permutation(np.flatnonzero(allowed))
        units = units[: 0 if rng.random() < 0.2 else int(np.ceil(share * len(units)))]
        last = units == blank.units - 1
        lists.append([*units[~last].tolist(), *units[last].tolist()])
    indptr, indices = _rows(lists)
    return Schedule.from_csr(
        array(indptr), array(indices), seqlen_q=seqlen_q, seqlen_k=seqlen_k, unit=unit, batch=batch,
        list_heads=list_heads, k_order=None if k_order is None else array(k_order), **rules,
    )  # fmt: skip


def _order(rng: np.random.Generator, form: ScheduleForm) -> Any:
    """A permutation inside the stretches of keys between one segment's dense part and the next one's."""
    ends = {0, form.seqlen_k}
    for r in range(form.rows):
        ends |= set(tile_limits(form, r))
    bounds = sorted(x for x in ends if x <= form.seqlen_k)
    return np.concatenate([rng.permutation(np.arange(a, b)) for a, b in itertools.pairwise(bounds)])


def _lists(seqlen_q: int, rules: dict[str, Any]) -> int:
    return -(-seqlen_q // (rules["segment"] if rules.get("per_segment") else rules["block_m"]))


def _rows(lists: list[Any]) -> tuple[Any, Any]:
    """indptr and indices, between which entries of no list stand at the end."""
    ends = np.cumsum([0, *map(len, lists)])
    return ends, np.array([*(e for x in lists for e in x), nowhere(1)], np.int32)
