"""Attention by a schedule that the caller brings."""

from __future__ import annotations

from typing import Any

from ..arrays.torch_compile import outside_graphs
from ..caches import remembered
from ..errors import ArgumentTypeError, ArgumentValueError, arguments_of
from ..plan.schedule_form import ScheduleForm
from ..problem import Problem, check_flag
from ..schedules.schedule import Schedule
from ..spec import check_path
from .batch import Batch, Cached, Form, batched, paged
from .call import Call
from .habits import answers_habits
from .paged import check_rows
from .run import run

__all__ = ["gather_attention", "gather_attention_paged"]


@outside_graphs
@answers_habits
@arguments_of("gather_attention")
def gather_attention(
    q: Any,
    k: Any,
    v: Any,
    schedule: Schedule,
    *,
    is_causal: bool | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "BHSD",
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
    path: str = "auto",
) -> Any:
    """Attention to the keys that a schedule names, on the kernels of S2O.

    Parameters
    ----------
    q, k, v : arrays as `s2o_attention` takes them
    schedule : Schedule
        Of q's framework, on q's device, for these lengths. What is in it is not checked on a GPU (`Schedule.check`),
        where a wrong entry reads what lies anywhere; on the CPU it is, at each call.
    is_causal : bool, optional
        What the schedule says; given, it must be the same.
    scale, softcap, layout, return_lse, return_stats, out, stream, backend : as in `s2o_attention`
    path : str
        Kernels to run on the GPU, as in `S2OConfig`. The Hopper kernels take block_m 64 up to head_dim 128.

    Returns
    -------
    o : array, like q
    lse : float32 array (batch, heads, seqlen_q), if ``return_lse``
        Natural logarithm, over the keys that were visited; -inf, with o = 0, for a row without a key.
    stats : GatherStats, if ``return_stats``
        Several results come as a tuple in this order.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted; the message names it, what came and what is accepted.
    S2OError
        The machine cannot run the call (no CuPy, too old a driver or card).

    Notes
    -----
    Nothing waits for the GPU, and a call can be captured into a CUDA graph after one outside of the capture. Up to
    three launches: the dense part, the sinks, the lists. Between them outputs are rounded to q's dtype. With a k_order,
    sinks or lists that all sequences share, sequences take turns.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import Schedule, gather_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 512, 64))
    >>> mask = np.tri(4, 4, -1, dtype=bool)[None, None]  # blocks of 128 queries and keys, before the diagonal
    >>> o, stats = gather_attention(q, k, v, Schedule.from_block_mask(mask, segment=128), return_stats=True)
    >>> o.shape, stats.density
    ((1, 2, 512, 64), 1.0)
    """
    inputs = _with_schedule({"q": q, "k": k, "v": v}, schedule, is_causal)
    call = Call(inputs, backend, stream, out)
    return _attend(call, schedule, layout, scale, softcap, return_lse, return_stats, path)


@outside_graphs
@answers_habits
@arguments_of("gather_attention_paged")
def gather_attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    schedule: Schedule,
    *,
    is_causal: bool | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "NHD",
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
    path: str = "auto",
) -> Any:
    """`gather_attention` to keys and values in a paged cache, read where they lie.

    The result is, bit for bit, that of `gather_attention` to the same keys and values in one array, on the same
    ``path``: schedules name positions in a sequence, whatever page they are in.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim)
    k_pages, v_pages, page_table, layout : as in `s2o_attention_paged`
    schedule : Schedule
        Without a k_order. All sequences have the seqlen_k that it is for.
    is_causal, scale, softcap, return_lse, return_stats, out, stream, backend, path : as in `gather_attention`

    Returns
    -------
    As `gather_attention`.

    Raises
    ------
    As `gather_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import Schedule, gather_attention_paged
    >>> rng = np.random.default_rng(0)
    >>> k_pages, v_pages = rng.standard_normal((2, 40, 16, 2, 64), dtype=np.float32)
    >>> page_table = rng.permutation(40).astype(np.int32).reshape(2, 20)
    >>> q = rng.standard_normal((2, 4, 128, 64), dtype=np.float32)
    >>> schedule = Schedule.from_block_mask(rng.random((1, 4, 1, 5)) < 0.5, 64, seqlen_k=320, segment=128)
    >>> gather_attention_paged(q, k_pages, v_pages, page_table, schedule).shape
    (2, 4, 128, 64)
    """
    pages = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
    call = Call(_with_schedule(pages, schedule, is_causal), backend, stream, out)
    return _attend(call, schedule, layout, scale, softcap, return_lse, return_stats, path)


def _with_schedule(inputs: dict[str, Any], schedule: Any, is_causal: Any) -> dict[str, Any]:
    """``inputs``, q, k and v or those of a paged call, and the schedule's arrays behind them."""
    if not isinstance(schedule, Schedule):
        raise ArgumentTypeError(
            f"schedule is a {type(schedule).__name__}; accepted: Schedule, such as "
            "Schedule.from_block_mask(mask, block=128)"
        )
    form, is_paged = schedule.form, "page_table" in inputs
    check_causal(form, is_causal)
    if is_paged and form.order_batch:
        raise ArgumentValueError("the schedule has a k_order; accepted: one without")
    return {**inputs, **{f"schedule.{name}": x for name, x in schedule.arrays.items()}}


def _attend(
    call: Call, schedule: Schedule, layout: Any, scale: Any, softcap: Any, return_lse: bool, return_stats: bool,
    path: Any,
) -> Any:  # fmt: skip
    check_path(path)
    if call.host and path != "auto":
        raise ArgumentValueError(
            f"path is {path!r}, which names GPU kernels, and this call runs on the CPU; accepted there: 'auto'"
        )
    forms, form = tuple([x.form for x in call.infos]), schedule.form
    of_pass, scores = _of_pass(form, path), (form.is_causal, scale, softcap)
    if "page_table" in call.inputs:
        plain = paged(forms[:4], None, Cached(form.seqlen_k, layout), of_pass, call.backend, *scores)
        if not call.host:
            check_rows(call.infos[1], call.infos[2])
    else:
        plain = batched(forms[:3], of_pass, call.backend, layout, *scores)
    batch = _fitted(plain, forms, form)
    return run(batch, call, return_lse=return_lse, return_stats=return_stats, schedule=schedule)


_of_pass = remembered(ScheduleForm.of_pass)


@remembered
def _fitted(plain: Batch, forms: tuple[Form, ...], form: ScheduleForm) -> Batch:
    """The call of ``plain`` by a schedule that fits it."""
    check_fits(form, plain.whole)
    return plain.with_schedule(form, forms)


def check_causal(form: ScheduleForm, is_causal: Any, whose: str = "the schedule") -> None:
    """Raise unless ``is_causal`` is what a schedule says, or None."""
    if is_causal is not None and check_flag("is_causal", is_causal) != form.is_causal:
        raise ArgumentValueError(
            f"is_causal is {is_causal!r}, of {whose} {form.is_causal}; accepted: the same, or None"
        )


def check_fits(form: ScheduleForm, problem: Problem, whose: str = "the schedule") -> None:
    """Raise unless a schedule, for errors ``whose``, is for a problem."""
    for name, found, expected in (
        ("seqlen_q", form.seqlen_q, problem.seqlen_q), ("seqlen_k", form.seqlen_k, problem.seqlen_k),
    ):  # fmt: skip
        if found != expected:
            raise ArgumentValueError(f"{whose} is for {name} {found}; accepted: {expected}, of q, k and v")
    heads, kv_heads, batch = problem.heads, problem.kv_heads, problem.batch
    for name, of_batch, of_heads in (
        ("lists", form.batch, form.list_heads), ("k_order", form.order_batch or 1, form.order_heads or 1),
    ):  # fmt: skip
        if of_batch not in (1, batch):
            raise ArgumentValueError(f"{whose}'s {name} have a batch of {of_batch}; accepted: 1 or q's, {batch}")
        if of_heads not in (1, kv_heads, heads):
            raise ArgumentValueError(
                f"{whose}'s {name} have {of_heads} heads; accepted: 1, {kv_heads} (kv_heads) or {heads} (heads)"
            )
    if isinstance(form.value_skip, tuple) and len(form.value_skip) != heads:
        raise ArgumentValueError(
            f"{whose}'s value_skip has {len(form.value_skip)} numbers; accepted: one, or {heads}, one "
            "for each query head"
        )
