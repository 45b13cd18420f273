"""One attention problem as plain numbers, and every rule that a call must obey.

Standard library only: no array and no GPU is needed to check a call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .by_head import checked_real
from .caches import remembered_or_made
from .errors import ArgumentTypeError, ArgumentValueError, warn_caller
from .spec import MAX_HEAD_DIM, Geometry, Pass, S2OConfig, is_one_of

__all__ = [
    "BACKEND_DTYPES", "LAYOUTS", "PLAIN", "OnlyLayout", "Problem", "cached_validate", "check_by_head", "check_count",
    "check_flag", "check_scale", "check_softcap", "validate",
]  # fmt: skip

LAYOUTS = ("BHSD", "BSHD")  # B batch, H heads, S seqlen, D head_dim
BACKEND_DTYPES = {
    "cupy": ("float16", "bfloat16"),
    "numpy": ("float16", "bfloat16", "float32", "float64"),
}
GPU_BLOCK_M = (64, 128)
GPU_BLOCK_N_UNIT, GPU_BLOCK_N_MAX = 64, 1024
CPU_BLOCK_UNIT, CPU_BLOCK_MAX = 16, 1024  # all that the GPU takes, and smaller tiles for short inputs
MAX_SCALE = 1e38  # what float32 holds, and room for a factor of log2(e)
MIN_SOFTCAP, MAX_SOFTCAP = 1e-3, 1e6  # less leaves no score, more changes none beyond the rounding of tanh
MAX_SEQLEN = 2**31 - 2**14  # positions are int32; kernels round them up to segments and tiles

PLAIN = Pass()

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """q is [batch, heads, seqlen_q, head_dim], k and v are [batch, kv_heads, seqlen_k, head_dim]."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    is_causal: bool
    scale: float
    softcap: float = 0.0
    drawn: int = 0  # of Geometry: only so many segments are attended
    share_of: int = 0  # query heads of the call that this one is a share of, and rounds as; 0: it has all heads

    def __hash__(self) -> int:  # kept: calls look their preparation up by it
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def all_heads(self) -> int:
        """Query heads of the call that this one is, or is a share of."""
        return self.share_of or self.heads

    @property
    def empty(self) -> bool:
        """No output row, so nothing to launch."""
        return 0 in (self.batch, self.heads, self.seqlen_q)

    def geometry(self, config: S2OConfig | Pass) -> Geometry:
        segment, window = config.segment, config.window
        if segment is None:  # one of all queries, whose own keys and window are all keys
            segment, window = max(1, self.seqlen_q), self.seqlen_k
        return Geometry(self.seqlen_q, self.seqlen_k, segment, window, self.is_causal, config.unit, self.drawn)

    def visited_shape(self, config: S2OConfig | Pass) -> tuple[int, int, int, int]:
        """[batch, heads, segments, tiles]: query tiles of each segment."""
        geometry = self.geometry(config)
        return self.batch, self.heads, geometry.segments, geometry.block_count(config.block_m)


class OnlyLayout(str):
    """A layout that the caller has no choice of."""

    __slots__ = ()


def validate(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    *,
    config: S2OConfig | Pass = PLAIN,
    backend: str,
    layout: str = "BHSD",
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Problem:
    """The Problem that q, k and v of these ``shapes`` and ``dtypes`` pose to ``backend``. ``config``: a Pass where not
    S2O chooses keys. ``layout``: where the axes look as if they were in the other order, the caller is asked about it
    unless it is an `OnlyLayout`.

    Raises
    ------
    TypeError, ValueError
        Names the argument, what came and what is accepted.
    """
    _check_layout(layout)
    q, k, v = _parse_shapes([tuple(shape) for shape in shapes], layout)
    problem = Problem(
        batch=q[0],
        heads=q[1],
        kv_heads=k[1],
        seqlen_q=q[2],
        seqlen_k=k[2],
        head_dim=q[3],
        dtype=_check_dtypes(dtypes, backend),
        is_causal=_check_causal(is_causal),
        scale=_default_scale(q[3]) if scale is None else check_scale(scale),
        softcap=check_softcap(softcap),
    )
    other, may_differ = "BHSD" if layout == "BSHD" else "BSHD", not isinstance(layout, OnlyLayout)
    try:
        _check_sizes(problem, q, k, v)
    except ArgumentValueError as error:
        if may_differ and _fits_other_layout(problem, q, k, v):
            raise ArgumentValueError(f"{error.args[0]}. Did you mean layout={other!r}? These shapes fit it") from None
        raise
    # Heads of a model are rarely more than its tokens: these are likely to be the tokens.
    many_heads = problem.heads > max(problem.seqlen_q, problem.seqlen_k) > 1
    if may_differ and many_heads and _fits_other_layout(problem, q, k, v):
        warn_caller(
            f"q has {problem.heads} heads of {problem.seqlen_q} queries each; if its axes are ({_AXES[other]}), "
            f"pass layout={other!r}, or swap them for a function without it"
        )
    if isinstance(config, S2OConfig):
        check_by_head(problem, config)
    if backend == "cupy":
        _check_gpu_blocks(config)
    else:
        _check_on_cpu(config)
    return problem


@remembered_or_made
def cached_validate(
    shapes: tuple[Shape, ...], dtypes: tuple[str, ...], config: S2OConfig | Pass, backend: str, layout: Any,
    is_causal: Any, scale: Any, softcap: Any,
) -> Problem:  # fmt: skip
    """`validate`, remembered."""
    return validate(
        shapes, dtypes, config=config, backend=backend, layout=layout, is_causal=is_causal, scale=scale, softcap=softcap
    )


def _check_layout(layout: Any) -> None:
    if not is_one_of(layout, LAYOUTS):
        raise ArgumentValueError(f"layout is {layout!r}; accepted: {' or '.join(map(repr, LAYOUTS))}")


def _parse_shapes(shapes: list[Shape], layout: str) -> tuple[Shape, ...]:
    """Shapes as given -> [batch, heads, seqlen, head_dim] each."""
    without_batch = layout.replace("B", "", 1)
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) not in (3, 4):
            raise ArgumentValueError(
                f"{name} has {len(shape)} axes, shape {shape}; accepted: 4 axes ({layout}) or "
                f"3 ({without_batch}; S is the sequence, H the heads, D the head dimension)"
            )
    if len({len(shape) for shape in shapes}) > 1:
        raise ArgumentValueError(
            f"q, k and v have {', '.join(str(len(s)) for s in shapes)} axes; "
            "accepted: the same number for all three, with or without a batch axis"
        )
    full = [(1, *shape) if len(shape) == 3 else shape for shape in shapes]
    return tuple((s[0], s[2], s[1], s[3]) if layout == "BSHD" else s for s in full)


def _check_dtypes(dtypes: Sequence[str], backend: str) -> str:
    accepted = BACKEND_DTYPES[backend]
    if len(set(dtypes)) > 1:
        came = ", ".join(f"{name} {dtype}" for name, dtype in zip("qkv", dtypes, strict=True))
        raise ArgumentTypeError(
            f"dtypes differ: {came}; accepted: one dtype for all three "
            f"({', '.join(accepted)}), as nothing is cast silently"
        )
    dtype = dtypes[0]
    if dtype in accepted:
        return dtype
    message = f"q, k and v are {dtype}; accepted on backend {backend!r}: {', '.join(accepted)}"
    if backend == "cupy" and dtype in BACKEND_DTYPES["numpy"]:
        message += '; cast the inputs to bfloat16 (.astype or .to), or pass backend="numpy" (slow)'
    raise ArgumentTypeError(message)


def _check_causal(is_causal: Any) -> bool:
    return check_flag("is_causal", is_causal)


def check_flag(name: str, value: Any) -> bool:
    """``value`` as a bool, or an error that says what is accepted."""
    if type(value).__name__ in ("bool", "bool_"):  # Python's and NumPy's
        return bool(value)
    raise ArgumentTypeError(f"{name} is {value!r}; accepted: True or False")


def check_scale(scale: Any) -> float:
    """``scale`` as a float, or an error that says what is accepted."""
    value = checked_real("scale", scale, "a finite Python number, or None for 1 / sqrt(head_dim)")
    if not abs(value) <= MAX_SCALE:  # NaN and infinities fail too
        raise ArgumentValueError(
            f"scale is {scale}; accepted: a finite number up to {MAX_SCALE:g} in size, or None for 1 / sqrt(head_dim)"
        )
    return value


def _default_scale(head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if head_dim > 0 else 1.0


def check_softcap(softcap: Any) -> float:
    """``softcap`` as a float, or an error that says what is accepted."""
    accepted = f"0 (off), or a number from {MIN_SOFTCAP:g} to {MAX_SOFTCAP:g}"
    value = checked_real("softcap", softcap, accepted)
    if not (value == 0 or MIN_SOFTCAP <= value <= MAX_SOFTCAP):  # NaN fails too
        raise ArgumentValueError(f"softcap is {softcap}; accepted: {accepted}")
    return value


def _check_sizes(problem: Problem, q: Shape, k: Shape, v: Shape) -> None:
    if k != v:
        raise ArgumentValueError(
            f"k is {k} and v is {v} as (batch, kv_heads, seqlen_k, head_dim); accepted: the same shape for both"
        )
    for axis, name in ((0, "batch"), (3, "head_dim")):
        if q[axis] != k[axis]:
            raise ArgumentValueError(f"q has {name} {q[axis]}, k and v have {k[axis]}; accepted: the same {name}")
    if not 1 <= problem.head_dim <= MAX_HEAD_DIM:
        raise ArgumentValueError(f"head_dim is {problem.head_dim}; accepted: 1 to {MAX_HEAD_DIM} (the limit)")
    heads, kv_heads = problem.heads, problem.kv_heads
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ArgumentValueError(
            f"q has {heads} heads, k and v have {kv_heads}; "
            "accepted: heads a multiple of kv_heads (grouped-query attention)"
            + (", so that q has the more of them" if 0 < heads < kv_heads else "")
        )
    for name, length in (("q", problem.seqlen_q), ("k", problem.seqlen_k)):
        if length > MAX_SEQLEN:
            raise ArgumentValueError(f"seqlen_{name} is {length}; accepted: up to {MAX_SEQLEN}")
    if problem.is_causal and problem.seqlen_q > problem.seqlen_k:
        raise ArgumentValueError(
            f"seqlen_q {problem.seqlen_q} exceeds seqlen_k {problem.seqlen_k}; accepted with is_causal=True: seqlen_k "
            ">= seqlen_q, as the causal mask is aligned bottom-right (the last query sees the last key)"
        )


def check_count(name: str, value: Any, heads: int) -> None:
    """Of numbers by head: as many as there are query heads."""
    if isinstance(value, tuple) and len(value) != heads:
        raise ArgumentValueError(
            f"{name} has {len(value)} numbers, q has {heads} heads; accepted: one number "
            "for all heads, or one for each query head"
        )


def check_by_head(problem: Problem, config: S2OConfig) -> None:
    """Raise unless numbers by head are as many as heads, and an error can be asked for."""
    for name, value in (("tau", config.tau), ("error", config.error)):
        check_count(name, value, problem.heads)
    if config.error is not None and not problem.is_causal and problem.geometry(config).segments > 1:
        raise ArgumentValueError(
            f"config.error with is_causal=False and {problem.geometry(config).segments} segments, which "
            "depend on keys after them too; accepted: a tau, is_causal=True, or a single segment"
        )


_AXES = {"BHSD": "batch, heads, seqlen, head_dim", "BSHD": "batch, seqlen, heads, head_dim"}


def _fits_other_layout(problem: Problem, q: Shape, k: Shape, v: Shape) -> bool:
    """Whether the shapes, of one layout, are a likely problem in the other: with more keys than heads of them."""
    q, k, v = ((s[0], s[2], s[1], s[3]) for s in (q, k, v))
    swapped = replace(problem, heads=q[1], kv_heads=k[1], seqlen_q=q[2], seqlen_k=k[2])
    try:
        _check_sizes(swapped, q, k, v)
    except ArgumentValueError:
        return False
    return swapped.seqlen_k > swapped.kv_heads


def _check_on_cpu(config: S2OConfig | Pass) -> None:
    if config.path != "auto":
        raise ArgumentValueError(
            f"config.path is {config.path!r}, which names GPU kernels, and this call runs on the CPU; "
            "accepted there: 'auto'"
        )
    for name, value in (("block_m", config.block_m), ("block_n", config.block_n)):
        if value % CPU_BLOCK_UNIT or value > CPU_BLOCK_MAX:
            raise ArgumentValueError(
                f"config.{name} is {value}; accepted on the CPU: multiples of {CPU_BLOCK_UNIT} up to {CPU_BLOCK_MAX}"
            )


def _check_gpu_blocks(config: S2OConfig | Pass) -> None:
    if config.block_m not in GPU_BLOCK_M:
        raise ArgumentValueError(
            f"config.block_m is {config.block_m}; accepted on the GPU: {' or '.join(map(str, GPU_BLOCK_M))}"
        )
    if config.block_n % GPU_BLOCK_N_UNIT or config.block_n > GPU_BLOCK_N_MAX:
        raise ArgumentValueError(
            f"config.block_n is {config.block_n}; accepted on the GPU: "
            f"multiples of {GPU_BLOCK_N_UNIT} up to {GPU_BLOCK_N_MAX}"
        )
