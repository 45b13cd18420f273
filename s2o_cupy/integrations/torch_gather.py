"""A PyTorch operator, ``torch.ops.s2o_cupy.gather_attention``: attention by lists of keys that a graph may compute.

It takes the tensors of a schedule, and its rules as plain arguments. Importing this imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentValueError
from ..extras import with_extra

with with_extra(__name__, "PyTorch"):
    import torch

from ..api.gather import gather_attention as attend
from ..schedules.schedule import Schedule
from ..spec import Pass
from .autocast import DEVICES, casting
from .torch import check_arguments, check_forward_mode, fake_results, problem_of

__all__ = ["gather_attention", "schedule_arguments"]

Tensor = Any  # torch.Tensor


def gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries: Tensor,
    begins: Tensor,
    keys: Tensor,
    *,
    unit: int = 1,
    k_order: Tensor | None = None,
    block_m: int = 128,
    per_segment: bool = False,
    segment: int | None = None,
    window: int = 0,
    sinks: int = 0,
    is_causal: bool = True,
    tau: float = 0.0,
    value_skip: float | Sequence[float] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "BHSD",
    return_lse: bool = False,
    path: str = "auto",
) -> Any:
    """:func:`s2o_cupy.gather_attention` as one operator, for code that goes through ``torch.compile``.

    The schedule is that of `Schedule.from_lists`; `schedule_arguments` gives the arguments of one that there is.
    Inference only. Under torch.autocast q, k and v are cast to its dtype.

    Parameters
    ----------
    q, k, v : Tensor
        As of `attention` in s2o_cupy.integrations.torch.
    entries : int32 Tensor, (any,)
    begins, keys : int64 and int32 Tensors, (batch or 1, list heads, lists)
    k_order : int32 Tensor, (batch or 1, heads, kv_heads or 1, seqlen_k), optional
        Tensors on q's device; they may be results of the same graph. What is in them is checked on the CPU only.
    unit, block_m, per_segment, segment, window, sinks, is_causal, tau, value_skip
        Rules of the schedule, as in `Schedule.from_csr`.
    scale, softcap, layout, return_lse, path : as in `s2o_cupy.gather_attention`

    Returns
    -------
    o : Tensor, of q's shape, dtype and device, contiguous, from PyTorch's allocator
    lse : float32 Tensor (batch, heads, seqlen_q), if ``return_lse``

    Raises
    ------
    TypeError, ValueError, S2OError
        As `s2o_cupy.gather_attention`. What is wrong with the lists' shapes shows when a graph runs.

    Examples
    --------
    >>> import torch
    >>> from s2o_cupy.integrations.torch_gather import gather_attention
    >>> q, k, v = torch.randn(3, 1, 2, 256, 64)
    >>> entries = torch.tensor([0], dtype=torch.int32)  # the first block, for the second q tile
    >>> begins, keys = torch.zeros(1, 1, 2, dtype=torch.int64), torch.tensor([[[0, 128]]], dtype=torch.int32)
    >>> gather_attention(q, k, v, entries, begins, keys, unit=128, segment=128).shape
    torch.Size([1, 2, 256, 64])
    """
    scale, softcap = check_arguments(q, k, v, scale, softcap)
    limits = None
    if value_skip is not None:
        limits = [float(x) for x in value_skip] if isinstance(value_skip, Sequence) else [float(value_skip)]
    o, lse = torch.ops.s2o_cupy.gather_attention.default(
        q, k, v, entries, begins, keys, k_order, unit, block_m, per_segment, segment, window, sinks, is_causal,
        float(tau), limits, scale, softcap, layout, bool(return_lse), path,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def schedule_arguments(schedule: Schedule) -> dict[str, Any]:
    """What `gather_attention` and the operator take of a schedule, by name.

    Raises
    ------
    ValueError
        Its queries are in an order of their own, as those of a SpargeConfig with a permutation are.

    Examples
    --------
    >>> import torch
    >>> from s2o_cupy import Schedule
    >>> from s2o_cupy.integrations.torch_gather import gather_attention, schedule_arguments
    >>> q, k, v = torch.randn(3, 1, 2, 256, 64)
    >>> schedule = Schedule.from_block_mask(torch.ones(1, 2, 2, 2, dtype=torch.bool), segment=128)
    >>> gather_attention(q, k, v, **schedule_arguments(schedule)).shape
    torch.Size([1, 2, 256, 64])
    """
    form = schedule.form
    if form.q_ordered:
        raise ArgumentValueError("the schedule has a q_order; accepted: one without", "schedule_arguments")
    rules = ("unit", "block_m", "per_segment", "segment", "window", "sinks", "is_causal", "tau", "value_skip")
    tensors = {name: getattr(schedule, name) for name in ("entries", "begins", "keys", "k_order")}
    return tensors | {name: getattr(form, name) for name in rules}


# ---------------------------------------------------------------- the operator


def _run(
    q: Tensor, k: Tensor, v: Tensor, entries: Tensor, begins: Tensor, keys: Tensor, k_order: Tensor | None, unit: int,
    block_m: int, per_segment: bool, segment: int | None, window: int, sinks: int, is_causal: bool, tau: float,
    value_skip: Sequence[float] | None, scale: float | None, softcap: float, layout: str, return_lse: bool, path: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_forward_mode()
    axis = -2 if layout == "BHSD" else -3
    limits: Any = value_skip if value_skip is None or len(value_skip) != 1 else value_skip[0]
    schedule = Schedule.from_lists(
        entries, begins, keys, seqlen_q=q.shape[axis], seqlen_k=k.shape[axis], unit=unit, k_order=k_order,
        block_m=block_m, per_segment=per_segment, segment=segment, window=window, sinks=sinks, is_causal=is_causal,
        tau=tau, value_skip=limits,
    )  # fmt: skip
    result = attend(
        q, k, v, schedule, scale=scale, softcap=softcap, layout=layout, return_lse=return_lse, path=path
    )
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


def _fake(
    q: Tensor, k: Tensor, v: Tensor, entries: Tensor, begins: Tensor, keys: Tensor, k_order: Tensor | None, unit: int,
    block_m: int, per_segment: bool, segment: int | None, window: int, sinks: int, is_causal: bool, tau: float,
    value_skip: Sequence[float] | None, scale: float | None, softcap: float, layout: str, return_lse: bool, path: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Shapes, dtypes and devices of the results without data. Blind to the lists' lengths, for which a graph would be
    one for these alone."""
    check_forward_mode()
    problem = problem_of(q, k, v, Pass(block_m, path=path), scale, softcap, is_causal, layout)
    for name, x, axes, dtype in (
        ("entries", entries, 1, torch.int32), ("begins", begins, 3, torch.int64), ("keys", keys, 3, torch.int32),
    ):  # fmt: skip
        if x.ndim != axes or (x.dtype != dtype and name != "entries"):
            raise ArgumentValueError(
                f"{name} is {x.dtype} of {x.ndim} axes; accepted: {dtype} of {axes}",
                "gather_attention",
            )
    return fake_results(q, (problem.batch, problem.heads, problem.seqlen_q)[4 - q.ndim :] if return_lse else (0,))


_library = torch.library.Library("s2o_cupy", "FRAGMENT")
_library.define(
    "gather_attention(Tensor q, Tensor k, Tensor v, Tensor entries, Tensor begins, Tensor keys, Tensor? k_order, "
    "int unit, int block_m, bool per_segment, int? segment, int window, int sinks, bool is_causal, float tau, "
    "float[]? value_skip, float? scale, float softcap, str layout, bool return_lse, str path) "
    "-> (Tensor o, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("gather_attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("s2o_cupy::gather_attention", _fake, lib=_library)
for _kind in DEVICES:
    _operator = torch.ops.s2o_cupy.gather_attention.default
    _library.impl(_operator, casting(_operator, _kind), f"Autocast{_kind.upper()}")
