"""What a call is: rows of q, rows or pages of k and v, and the lengths of each sequence.

Three forms of q, k and v come in: batched, (batch, heads, seqlen, head_dim) in a layout; packed, (total, heads,
head_dim), one sequence behind the other; and paged, keys and values in the pages of a cache. All become *parts*:
neighbouring sequences that pose one problem. A Batch is known by shapes, strides, dtypes, lengths and options alone, so
the calls of a model's layers share one; no array is looked into.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays.operand import axes
from ..caches import remembered, remembered_or_made
from ..errors import ArgumentValueError
from ..plan.schedule_form import ScheduleForm
from ..problem import OnlyLayout, Problem, Shape, validate
from ..spec import Pass, S2OConfig
from .lengths import (
    PAGE_LAYOUTS,
    check_lengths,
    check_packed_keys,
    check_packed_queries,
    check_packed_shapes,
    check_paged_shapes,
    paged_lengths,
)  # fmt: skip

__all__ = ["Batch", "Cached", "Form", "Part", "batched", "packed", "paged"]

Form = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides in bytes, dtype
Axes = tuple[tuple[int, int, int, int], tuple[int, int, int]]  # shape and strides of an Operand


class Part(NamedTuple):
    """Sequences ``first`` to ``end``, half-open, that pose one problem, and where their rows begin."""

    first: int
    end: int
    begin_q: int  # in a packed q
    begin_k: int  # in packed k and v
    problem: Problem

    @property
    def rows_q(self) -> slice:
        return slice(self.begin_q, self.begin_q + self.problem.seqlen_q)

    @property
    def rows_k(self) -> slice:
        return slice(self.begin_k, self.begin_k + self.problem.seqlen_k)

    @property
    def sequences(self) -> slice:
        return slice(self.first, self.end)


class Batch:
    """What a call is. One object for all calls of one kind, which is what caches know it by."""

    def __init__(
        self, parts: list[Part], whole: Problem, config: S2OConfig | Pass, forms: tuple[Form, ...], *, layout: str,
        packed: bool = False, page_layout: str | None = None,
    ) -> None:  # fmt: skip
        # A problem without a query, or without a key, leaves nothing to compute.
        self.all_parts = tuple(parts)
        self.parts = tuple(x for x in parts if not (x.problem.empty or x.problem.seqlen_k == 0))
        self.idle = tuple(x for x in parts if x.problem.empty or x.problem.seqlen_k == 0)
        self.whole = whole  # of all sequences, as if they were as long as the longest
        self._config = config
        self.packed = packed  # q lies one sequence behind the other, as k and v do where they are not paged
        self.layout = layout
        self.paged = page_layout is not None
        self.page_layout = page_layout or layout
        # Of q, k, v and the page table: rows with gaps between their elements, which kernels do not read.
        of_rows = forms[: 4 if self.paged else 3]
        self.copied = tuple(shape[-1] > 1 and strides[-1] != _itemsize(dtype) for shape, strides, dtype in of_rows)
        self.is_copied = any(self.copied)
        self.shape_q, shape_k = forms[0][0], forms[1][0]
        self.total_q = self.shape_q[0] if packed else 0
        self.total_k = shape_k[0] if packed and not self.paged else 0
        self.schedule: ScheduleForm | None = None  # of gather_attention
        self._forms = forms

    def with_schedule(self, schedule: ScheduleForm, forms: tuple[Form, ...]) -> Batch:
        """The same call by a schedule, whose arrays ``forms`` has behind the others."""
        other = copy.copy(self)
        other.schedule, other._forms = schedule, forms
        return other

    @property
    def config(self) -> S2OConfig:
        """Of S2O."""
        assert isinstance(self._config, S2OConfig)
        return self._config

    @property
    def of_pass(self) -> Pass:
        return self._config if isinstance(self._config, Pass) else self._config.of_pass

    @property
    def alone(self) -> bool:
        """Whether one problem is all there is: q, k and v are used whole."""
        return len(self.all_parts) == 1 and not self.packed

    @property
    def visited_shapes(self) -> list[Shape]:
        """Of the key tiles visited: each sequence's of a packed call, or those of all."""
        if self.schedule is not None:
            shape = self.schedule.shape(self.whole).visited_shape(self.whole, self.schedule.block_m)
            return [shape if self.schedule.value_skip is None else (2, *shape)]  # the second is pairs left out
        return [x.visited_shape(self.of_pass) for x in self.problems]

    @property
    def problems(self) -> list[Problem]:
        """What statistics are about, likewise."""
        return [x.problem for x in self.all_parts] if self.packed else [self.whole]

    @property
    def lse_shape(self) -> Shape:
        if self.packed:
            return self.whole.heads, self.total_q
        rows = (self.whole.batch, self.whole.heads, self.whole.seqlen_q)
        return rows[4 - len(self.shape_q) :]

    @functools.cached_property
    def axes(self) -> tuple[Axes, Axes, Axes, Axes]:
        """Shapes and strides of the operands q, k, v and of an output in C order."""
        (q, q_strides, dtype), (k, k_strides, of_cache), (v, v_strides, _) = self._forms[:3]
        size, k_size = _itemsize(dtype), _itemsize(of_cache)
        out_strides = tuple(size * math.prod(q[axis + 1 :]) for axis in range(len(q)))
        return (
            axes(q, q_strides, self.layout, size),
            axes(k, k_strides, self.page_layout, k_size),
            axes(v, v_strides, self.page_layout, k_size),
            axes(q, out_strides, self.layout, size),
        )

    def of_forms(self, forms: tuple[Form, ...]) -> Batch:
        """The same call on arrays that lie in memory in another way."""
        return _of_forms(self, forms)


@remembered
def _of_forms(batch: Batch, forms: tuple[Form, ...]) -> Batch:
    other = copy.copy(batch)
    other._forms, other.copied, other.is_copied = forms, (False,) * len(batch.copied), False
    other.__dict__.pop("axes", None)
    return other


def _itemsize(dtype: str) -> int:
    sizes = {"uint8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "float64": 8}
    return sizes[dtype]


@remembered_or_made
def batched(
    forms: tuple[Form, ...], config: S2OConfig | Pass, backend: str, layout: Any, is_causal: Any, scale: Any,
    softcap: Any, share_of: int = 0,
) -> Batch:  # fmt: skip
    """q, k and v in ``layout``: one problem. ``share_of``: of `Problem`."""
    problem = validate(
        [x[0] for x in forms], [x[2] for x in forms], config=config, backend=backend, layout=layout,
        is_causal=is_causal, scale=scale, softcap=softcap,
    )  # fmt: skip
    problem = replace(problem, share_of=share_of)
    return Batch([Part(0, problem.batch, 0, 0, problem)], problem, config, forms, layout=layout)


@remembered_or_made
def packed(
    forms: tuple[Form, ...], starts_q: tuple[int, ...], starts_k: tuple[int, ...] | None, config: S2OConfig,
    backend: str, is_causal: Any, scale: Any, softcap: Any,
) -> Batch:  # fmt: skip
    """q, k and v, each with sequences packed one behind the other."""
    q, k, _ = forms
    _check_no_error(config)
    base = check_packed_shapes([x[0] for x in forms], [x[2] for x in forms], config, backend, is_causal, scale, softcap)
    check_packed_queries(starts_q, q[0])
    if starts_k is None:
        starts_k = starts_q
        if k[0][0] != q[0][0]:
            raise ArgumentValueError(
                f"cu_seqlens_k is None, but q has {q[0][0]} rows and k {k[0][0]}; "
                "accepted: None only for sequences with as many keys as queries"
            )
    else:
        check_packed_keys(starts_q, starts_k, k[0][0])
    lengths = [end - begin for begin, end in itertools.pairwise(starts_k)]
    parts = _one_each(base, starts_q, starts_k[:-1], lengths)
    return Batch(parts, base, config, forms, layout="BSHD", packed=True)


class Cached(NamedTuple):
    """Keys and values in the pages of a cache."""

    seqlen_k: int | tuple[int, ...]  # of all sequences, or of each
    layout: Any  # the order of a page's axes
    fp8: bool = False  # the pages have 8 bits, and are checked already


@remembered_or_made
def paged(
    forms: tuple[Form, ...], starts_q: tuple[int, ...] | None, cached: Cached, config: S2OConfig | Pass, backend: str,
    is_causal: Any, scale: Any, softcap: Any,
) -> Batch:  # fmt: skip
    """q, k_pages, v_pages and page_table; q is batched, or packed if ``starts_q`` is given."""
    q, k_pages, _, page_table = forms
    seqlen_k, layout, fp8 = cached
    _check_no_error(config)
    dtypes = [q[2], q[2], q[2], page_table[2]] if fp8 else [x[2] for x in forms]
    check_paged_shapes([x[0] for x in forms], dtypes, layout, packed=starts_q is not None)
    lengths = paged_lengths(seqlen_k, k_pages[0], page_table[0], layout)
    kv_heads, head_dim = k_pages[0][2 if layout == "NHD" else 1], k_pages[0][3]
    dtypes = [q[2]] * 3
    if starts_q is not None:
        no_keys = (0, kv_heads, head_dim)
        shapes = [q[0], no_keys, no_keys]
        base = check_packed_shapes(shapes, dtypes, config, backend, is_causal, scale, softcap)
        check_packed_queries(starts_q, q[0], batch=len(lengths))
        parts = _one_each(base, starts_q, [0] * len(lengths), lengths)
        return Batch(parts, base, config, forms, layout="BSHD", packed=True, page_layout=PAGE_LAYOUTS[layout])

    longest = max(lengths, default=q[0][2])  # of no sequence: as long as it takes to be accepted
    problems = {}
    for length in {longest, *lengths}:
        of_k = (q[0][0], kv_heads, length, head_dim)
        problems[length] = validate(
            (q[0], of_k, of_k), dtypes, config=config, backend=backend, layout=OnlyLayout("BHSD"), is_causal=is_causal,
            scale=scale, softcap=softcap,
        )  # fmt: skip
    parts, first = [], 0
    for length, same in itertools.groupby(lengths):  # neighbours of one length
        end = first + len(list(same))
        parts.append(Part(first, end, 0, 0, replace(problems[length], batch=end - first)))
        first = end
    return Batch(parts, problems[longest], config, forms, layout="BHSD", page_layout=PAGE_LAYOUTS[layout])


def _check_no_error(config: S2OConfig | Pass) -> None:
    if isinstance(config, S2OConfig) and config.error is not None:
        raise ArgumentValueError(
            f"config.error is {config.error}; accepted: a tau, or one for each query head, as "
            "s2o_attention with that error finds on one of the sequences (config.with_found_taus(stats.tau_per_head[0])"
            ", which has their tail='none'), or tune"
        )


def _one_each(base: Problem, starts_q: tuple[int, ...], begins_k: Any, lengths_k: list[int]) -> list[Part]:
    """A part for each sequence of a packed q; sequences of the same lengths share a problem."""
    problems: dict[tuple[int, int], Problem] = {}
    parts = []
    each = zip(itertools.pairwise(starts_q), begins_k, lengths_k, strict=True)
    for i, ((begin_q, end_q), begin_k, length_k) in enumerate(each):
        lengths = end_q - begin_q, length_k
        if lengths not in problems:
            check_lengths(i, *lengths, base.is_causal)
            problems[lengths] = replace(base, seqlen_q=lengths[0], seqlen_k=lengths[1])
        parts.append(Part(i, i + 1, begin_q, begin_k, problems[lengths]))
    return parts
