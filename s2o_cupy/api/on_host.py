"""The CPU backend: the NumPy reference on each part of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentValueError
from ..plan.error_search import sampled, searched
from ..plan.schedule_form import ScheduleForm
from ..problem import Problem
from ..reference import s2o
from ..reference.dense import quiet
from ..reference.error_taus import error_taus
from ..reference.fp8 import from_e4m3
from ..reference.gather import gather
from ..reference.lists import KeyLists
from ..reference.value_skip import ValueSkips
from ..schedules.check import check_lists
from ..spec import S2OConfig
from ..stats import Ran
from .batch import Batch
from .results import Results
from .scales import Scales, check_each

__all__ = ["attend", "bhsd", "blas_ready", "check_entries", "run"]

RAN: Ran = ("numpy", None, None)


def run(batch: Batch, natives: Sequence[np.ndarray], results: Results, scales: Scales | None = None) -> list[Ran]:
    """Attend each part. ``natives``: q, k and v, of a paged call also the page table, and arrays of ``scales``, of a
    cache of 8 bits."""
    if batch.schedule is not None:
        return _gather(batch, batch.schedule, natives, results)
    o, lse, visited, taus = results
    q, k, v, *table = natives
    if table:
        check_entries(k, table[0], batch)
    of_cache = None
    if scales is not None:
        arrays = iter(natives[4:])
        of_cache = [
            check_each(name, next(arrays)) if value is None else value
            for name, value in zip(("k_scale", "v_scale"), scales, strict=True)
        ]
    for x in batch.parts:
        if batch.packed:
            q_part, o_part = (bhsd(rows[x.rows_q], "BSHD") for rows in (q, o))
            lse_part = None if lse is None else lse[None, :, x.rows_q]  # [1, heads, seqlen_q]
        else:
            q_part, o_part = (bhsd(rows, batch.layout)[x.sequences] for rows in (q, o))
            of_all = (-1, *o_part.shape[1:3])
            lse_part = None if lse is None else lse.reshape(of_all)[x.sequences]
        if table:
            k_part, v_part = (
                gathered(pages, table[0][x.sequences], x.problem.seqlen_k, batch.page_layout) for pages in (k, v)
            )
            if of_cache is not None:
                k_part, v_part = (
                    from_e4m3(rows, scale, q.dtype) for rows, scale in zip((k_part, v_part), of_cache, strict=True)
                )
        elif batch.packed:
            k_part, v_part = (bhsd(rows[x.rows_k], "BSHD") for rows in (k, v))
        else:
            k_part, v_part = (bhsd(rows, batch.layout) for rows in (k, v))
        found = attend(q_part, k_part, v_part, o_part, lse_part, x.problem, batch.config, taus)
        if visited is not None:
            visited[x.first if batch.packed else 0][...] = found
    return [RAN] * len(batch.parts)


def _gather(batch: Batch, form: ScheduleForm, natives: Sequence[np.ndarray], results: Results) -> list[Ran]:
    """By a schedule, whose arrays ``natives`` has behind the others. Nobody waits for them here: they are checked."""
    o, lse, visited, _ = results
    arrays = dict(zip(form.array_names, natives[4 if batch.paged else 3 :], strict=True))
    check_lists(form, arrays)
    problem, (q, k, v) = batch.whole, natives[:3]
    if batch.paged:
        check_entries(k, natives[3], batch)
        k, v = (gathered(x, natives[3], problem.seqlen_k, batch.page_layout) for x in (k, v))
    else:
        k, v = (bhsd(x, batch.layout) for x in (k, v))
    q, k, v = (blas_ready(x) for x in (bhsd(q, batch.layout), k, v))
    shape = (problem.batch, form.list_heads, *((form.rows,) if form.per_segment else (1, form.rows)))
    begins, keys = (_of_all(arrays[name], problem.batch).reshape(shape) for name in ("begins", "keys"))
    order, q_order = arrays.get("k_order"), arrays.get("q_order")
    values = None if form.value_skip is None else ValueSkips(form.value_skip)
    found, of_rows, taken = gather(
        q, k, v, KeyLists(arrays["entries"], begins, keys, form.unit), form.dense, sinks=form.sinks,
        k_order=None if order is None else _of_all(order, problem.batch), block_m=form.block_m, scale=problem.scale,
        softcap=problem.softcap, tau=form.tau, q_order=q_order,
        values=values,
    )  # fmt: skip
    bhsd(o, batch.layout)[...] = found
    if lse is not None:
        lse.reshape(of_rows.shape)[...] = of_rows
    if visited is not None:
        visited[0][...] = taken if values is None else np.stack([taken, values.skipped(taken.shape)])
    return [RAN]


def _of_all(x: np.ndarray, batch: int) -> np.ndarray:
    """What all sequences share, for each of them."""
    return np.broadcast_to(x, (batch, *x.shape[1:]))


def attend(
    q: np.ndarray,  # [batch, heads, seqlen_q, head_dim], any strides
    k: np.ndarray,  # [batch, kv_heads, seqlen_k, head_dim]
    v: np.ndarray,  # [batch, kv_heads, seqlen_k, head_dim]
    out: np.ndarray,  # [batch, heads, seqlen_q, head_dim], written
    lse: np.ndarray | None,  # [batch, heads, seqlen_q] float32, written
    problem: Problem,
    config: S2OConfig,
    taus: np.ndarray | None = None,  # [batch, heads] float32, written: of a config with an error
) -> np.ndarray:  # visited, int32 [batch, heads, segments, tiles]
    """float16 and bfloat16 are computed in float32 and rounded once, in the output."""
    q, k, v = (blas_ready(x) for x in (q, k, v))
    options: dict[str, Any] = {"scale": problem.scale, "softcap": problem.softcap, "is_causal": problem.is_causal}
    if taus is None:
        return _attend(q, k, v, out, lse, config, options)
    taus[...] = error_taus(q, k, v, searched(problem, config)[1], *sampled(problem, config), **options)
    visited = []
    for b, of_sequence in enumerate(taus.tolist()):
        at, its_lse = slice(b, b + 1), None if lse is None else lse[b : b + 1]
        visited.append(_attend(q[at], k[at], v[at], out[at], its_lse, config.with_found_taus(of_sequence), options))
    return np.concatenate(visited)


@quiet  # casts of NaN and of what another dtype does not hold
def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray | None, config: S2OConfig,
    options: dict[str, Any],
) -> np.ndarray:  # fmt: skip
    result = s2o.s2o(q, k, v, config, **options)
    out[...] = result.o
    if lse is not None:
        lse[...] = result.lse
    return result.visited


def bhsd(x: Any, layout: str) -> Any:
    """A view [batch, heads, seqlen, head_dim] of an array in ``layout``, with or without the batch axis."""
    if x.ndim == 3:
        x = x[None]
    return x.transpose(0, 2, 1, 3) if layout == "BSHD" else x


def gathered(pages: np.ndarray, entries: np.ndarray, seqlen_k: int, layout: str) -> np.ndarray:
    """[batch, kv_heads, seqlen_k, head_dim] of the pages that ``entries`` [batch, pages_per_sequence] name."""
    pages = pages if layout == "BSHD" else pages.swapaxes(1, 2)  # [pages, page_size, kv_heads, head_dim]
    page_size, kv_heads, head_dim = pages.shape[1:]
    found = pages[entries[:, : -(-seqlen_k // page_size)]]
    return found.reshape(len(entries), -1, kv_heads, head_dim)[:, :seqlen_k].swapaxes(1, 2)


def check_entries(k_pages: np.ndarray, table: np.ndarray, batch: Batch) -> None:
    """On the host, where nobody waits for them."""
    pages, page_size = k_pages.shape[0], k_pages.shape[1 if batch.page_layout == "BSHD" else 2]
    for part in batch.parts:
        length = part.problem.seqlen_k
        for b in range(part.first, part.end):
            for i, page in enumerate(table[b, : -(-length // page_size)].tolist()):
                if not 0 <= page < pages:
                    raise ArgumentValueError(
                        f"page_table[{b}, {i}] is {page}; accepted: 0 to {pages - 1}, the pages "
                        f"of k_pages, in the entries of the first seqlen_k ({length}) keys"
                    )


def blas_ready(x: np.ndarray) -> np.ndarray:
    """In the dtype computed in, C order and aligned: strides then change neither speed nor rounding."""
    if x.dtype.name in ("float16", "bfloat16"):
        return x.astype(np.float32, order="C")
    return np.require(x, x.dtype.newbyteorder("="), ["C", "A"])
