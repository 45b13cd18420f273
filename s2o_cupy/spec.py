"""What S2O is, in numbers: configuration, geometry, shared constants and errors.

Standard library only. The reference, the plan and (rendered as ``constexpr``) the kernels all
read these definitions, so that each is written once.
"""

from __future__ import annotations

import difflib
import functools
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

__all__ = [
    "ORDER_HEAD",
    "KERNEL_CONSTANTS",
    "KEY_BUCKETS",
    "KEY_LEVELS",
    "LAYER_MIX",
    "MAX_HEAD_DIM",
    "MAX_SEGMENT",
    "MIDDLE",
    "MIDDLE_FROM",
    "PATHS",
    "RANKS",
    "STOP_LAG",
    "STRATUM",
    "Geometry",
    "S2OConfig",
    "S2OError",
]

# How keys are ordered (reference.key_order is the definition). Up to ORDER_HEAD candidates by KEY_BUCKETS parts of the
# range of their scores; float16 tells integers from 1024 to 2047 apart, so its arithmetic rounds to a bucket by itself.
ORDER_HEAD = 8192
KEY_BUCKETS = 1024
# More are dealt to strata of STRATUM, and each is sorted by KEY_LEVELS parts of its own range: as many levels times
# indices as there are finite float16 that are not negative.
STRATUM = 256
KEY_LEVELS = 124
LAYER_MIX = 0x61C88647  # spreads the squares of small numbers over 32 bits
# Of more than MIDDLE_FROM the first MIDDLE are dealt again: the head of the order would hold too few of so many strata.
MIDDLE_FROM = 1 << 18
MIDDLE = 1 << 16

# Key tiles a kernel still visits after the tile whose gain is too small for every row, by path. Hopper's pipeline has
# the next tile's products in flight when it learns of the stop; waiting would cost more than using them.
STOP_LAG: Mapping[str, int] = {"portable": 0, "hopper": 1}
PATHS = ("auto", "portable", "hopper")
TAILS = ("mean", "none")

MAX_HEAD_DIM = 256
MAX_SEGMENT = 8192  # a query's offset is 13 bits of the 32 by which a segment's queries are sorted
MAX_POOLED_QUERIES = {"max": 64, "auto": 256}
RANKS = ("mean", "max", "auto")
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

# rank="auto" (reference.s2o.probe and refined_segments are the definition). Every PROBE_EVERY-th segment is probed,
# and the last PROBE_WINDOW probes before a segment decide on it.
PROBE_EVERY = 4
PROBE_WINDOW = 4
PROBE_RUNS = 128  # of queries: the pooled queries of a probe
PROBE_SAMPLES = 1024  # candidates looked at, at most
PROBE_OWN_STEP = 4  # of the keys that pass 1 reads, every so many-th is looked at
PROBE_TOP = 10  # the best tenth of the sample is compared
PROBE_DEFICIT = 7864 / 2**20  # mass, 0.0075, that the mean's best tenth may miss before segments are refined
SMALLEST_REFINED_SCALE = 1e-30  # norms in units of a dot product could overflow with less; all scores are alike

# Rendered into every kernel as `constexpr int` in namespace s2o::spec.
KERNEL_CONSTANTS: Mapping[str, int] = {
    "kMaxSegment": MAX_SEGMENT,
    "kStratum": STRATUM,
    "kKeyLevels": KEY_LEVELS,
    "kLayerMix": LAYER_MIX,
    "kMiddleFrom": MIDDLE_FROM,
    "kMiddle": MIDDLE,
    "kOrderHead": ORDER_HEAD,
    "kKeyBuckets": KEY_BUCKETS,
    "kProbeEvery": PROBE_EVERY,
    "kProbeWindow": PROBE_WINDOW,
    "kProbeSamples": PROBE_SAMPLES,
    "kProbeOwnStep": PROBE_OWN_STEP,
    "kProbeTop": PROBE_TOP,
    "kProbeDeficit": round(PROBE_DEFICIT * 2**20),
}


class S2OError(RuntimeError):
    """The machine cannot run the call (no GPU, too old a driver or card); the message says the remedy."""


def _checked_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value``, of Python or NumPy, as an int, or an error that says what is accepted."""
    accepted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"S2OConfig: {name} is {value!r} ({type(value).__name__}); accepted: {accepted}")
    number = value if isinstance(value, int) else int(value)  # a _Default stays one
    if number < low or (high is not None and number > high):
        raise ValueError(f"S2OConfig: {name} is {number}; accepted: {accepted}")
    return number


def check_tau(tau: Any, owner: str = "S2OConfig") -> float:
    """``tau`` as a float, or an error that says what is accepted."""
    if isinstance(tau, bool) or not isinstance(tau, numbers.Real):
        raise TypeError(f"{owner}: tau is {tau!r} ({type(tau).__name__}); accepted: a number >= 0")
    try:
        value = float(tau)
    except OverflowError as error:
        raise ValueError(
            f"{owner}: tau is beyond what a float holds; accepted: a number >= 0 (math.inf stops after one key tile)"
        ) from error
    if not value >= 0:  # NaN fails too
        raise ValueError(f"{owner}: tau is {tau}; accepted: a number >= 0 (0 never stops: dense attention)")
    return value


class _Default(int):
    """A field's value that was not given: ``dataclasses.replace`` with another rank finds that rank's own."""


_Class = TypeVar("_Class")


def _names_unknown_fields(cls: type[_Class]) -> type[_Class]:
    """A field that the dataclass has not is answered with those that it has, and with the nearest of them."""
    make = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                meant = f"did you mean {near[0]}? " if near else ""
                raise TypeError(f"{cls.__name__}: {name} is not a field; {meant}accepted: {', '.join(known)}")
        make(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_names_unknown_fields
@dataclass(frozen=True)
class S2OConfig:
    """How S2O orders keys and when it stops.

    Parameters
    ----------
    segment : int, default 1024
        Queries per segment. A segment's own keys are attended densely; every earlier key is a candidate.
    tau : float, default 0.01
        Stop threshold: a tile of queries stops after the key tile that adds less than ``tau`` of the
        softmax mass found so far to every one of its rows. 0 never stops and gives dense attention.
    block_m : int, default 128
        Queries of a tile that stop together. The GPU takes 64 or 128, the CPU multiples of 16 up to 1024.
    block_n : int, default 128
        Keys of a tile between two stop checks. The GPU takes multiples of 64 up to 1024, the CPU of 16.
    rank : {"auto", "mean", "max"}, default "auto"
        A key's score: "mean" (the paper, Algorithm 1), its dot product with the mean of the segment's
        queries; "max", the largest of its dot products with several pooled queries. "auto": "mean", but where samples
        say that this would miss keys, the largest softmax weight that any of many pooled queries gives the key.
    pooled_queries : int, optional
        How many pooled queries a segment has, each the mean of a run of consecutive queries; default 16 for
        ``rank="max"``, 256 for "auto" (at most a segment's queries), 1 for "mean".
    window : int, default 0
        Keys just before the segment that are attended densely as well.
    workspace_bytes : int, default 256 MiB
        Bound on the GPU memory of scores and key orders. Segments are taken in turn to stay within it;
        one segment of one head always fits. A dense call copies keys and values from small pages only within it.
    path : {"auto", "portable", "hopper"}, default "auto"
        Kernels to run on the GPU: "hopper" (compute capability 9.0: wgmma) where the device and the problem allow it,
        else "portable" (8.0 and newer: mma.sync). A path by name is an error where it cannot run, as on the CPU.
    dense_up_to : int, optional
        Keys (seqlen_k) up to which the GPU computes plain dense attention, as ordering would cost more than it saves.
        Default: 8192, as was measured, and any length at tau 0, which is dense by definition. 0: never. The reference
        on the CPU ignores it.
    tail : {"mean", "none"}, default "mean"
        What the candidates count for that a tile of queries did not visit: "mean", what their mean key and mean value
        would, as many times as there are unvisited ones; "none" (the paper), nothing.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.
    """

    segment: int = 1024
    tau: float = 0.01
    block_m: int = 128
    block_n: int = 128
    rank: str = "auto"
    pooled_queries: int | None = None
    window: int = 0
    workspace_bytes: int = 256 << 20
    path: str = "auto"
    dense_up_to: int | None = None
    tail: str = "mean"

    def __post_init__(self) -> None:
        self._set("segment", _checked_int("segment", self.segment, 1, MAX_SEGMENT))
        self._set("tau", check_tau(self.tau))
        self._set("block_m", _checked_int("block_m", self.block_m, 1, 1024))
        self._set("block_n", _checked_int("block_n", self.block_n, 1, 1024))
        if self.rank not in RANKS:
            raise ValueError(f"S2OConfig: rank is {self.rank!r}; accepted: {', '.join(map(repr, RANKS))}")
        if self.pooled_queries is None or isinstance(self.pooled_queries, _Default):
            default = {"mean": 1, "max": 16, "auto": 256}[self.rank]
            self._set("pooled_queries", _Default(min(default, self.segment)))
        most = MAX_POOLED_QUERIES.get(self.rank)
        self._set("pooled_queries", _checked_int("pooled_queries", self.pooled_queries, 1, most))
        if self.rank == "mean" and self.pooled_queries != 1:
            raise ValueError(
                f"S2OConfig: pooled_queries is {self.pooled_queries} with rank='mean', which has one; "
                "accepted: 1, or rank='max' or 'auto'"
            )
        self._set("window", _checked_int("window", self.window, 0))
        self._set("workspace_bytes", _checked_int("workspace_bytes", self.workspace_bytes, 1 << 20))
        if self.dense_up_to is not None:
            self._set("dense_up_to", _checked_int("dense_up_to", self.dense_up_to, 0))
        if self.tail not in TAILS:
            raise ValueError(f"S2OConfig: tail is {self.tail!r}; accepted: {', '.join(map(repr, TAILS))}")
        if self.path not in PATHS:
            raise ValueError(f"S2OConfig: path is {self.path!r}; accepted: {', '.join(map(repr, PATHS))}")
        _ = self.values  # found here, so that torch.compile meets nothing but a tuple

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the one way into a frozen dataclass

    @functools.cached_property
    def values(self) -> tuple[Any, ...]:
        """The fields in order, a default that was not given as a plain int."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(int(x) if isinstance(x, _Default) else x for x in values)

    def __hash__(self) -> int:  # kept: calls look their preparation up by it
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.values)

    @property
    def run(self) -> int:
        """Queries behind one pooled query: equal runs, the last may be shorter."""
        assert self.pooled_queries is not None
        return -(-self.segment // self.pooled_queries)

    @property
    def probe_run(self) -> int:
        """Queries behind a pooled query of a probe."""
        return -(-self.segment // PROBE_RUNS)

    @functools.cached_property
    def coarse(self) -> S2OConfig:
        """How segments are ordered that are not refined: as this says, or with ``rank="auto"`` by the mean."""
        return replace(self, rank="mean", pooled_queries=1) if self.rank == "auto" else self

    @property
    def adds_tail(self) -> bool:
        """Whether unvisited candidates count. At tau 0 there are none."""
        return self.tail != "none" and self.tau > 0

    def probes(self, scale: float) -> bool:
        """Whether segments are probed at all."""
        return self.rank == "auto" and abs(scale) >= SMALLEST_REFINED_SCALE


@dataclass(frozen=True)
class Geometry:
    """Which keys a segment attends densely and which are candidates of pass 2.

    Query i stands at key position i + seqlen_k - seqlen_q (bottom-right alignment). Ranges are
    half-open pairs (begin, end); the same formulas stand in raw_kernels/common/geometry.cuh.
    """

    seqlen_q: int
    seqlen_k: int
    segment: int
    window: int = 0
    is_causal: bool = True

    @property
    def offset(self) -> int:
        return self.seqlen_k - self.seqlen_q

    @property
    def segments(self) -> int:
        return -(-self.seqlen_q // self.segment)

    def queries(self, n: int) -> tuple[int, int]:
        """Query positions of segment ``n``."""
        return n * self.segment, min((n + 1) * self.segment, self.seqlen_q)

    def dense_keys(self, n: int) -> tuple[int, int]:
        """Keys that pass 1 reads for segment ``n``: its own and the window before them."""
        begin, end = self.queries(n)
        clip = lambda x: min(max(x, 0), self.seqlen_k)  # noqa: E731
        return clip(begin + self.offset - self.window), clip(end + self.offset)

    def candidates(self, n: int) -> int:
        """How many keys pass 2 may visit: those before the dense ones; without causality also those after."""
        begin, end = self.dense_keys(n)
        return begin if self.is_causal else self.seqlen_k - (end - begin)

    @property
    def first_ordered(self) -> int:
        """The first segment with candidates, or ``segments``."""
        return next((n for n in range(self.segments) if self.candidates(n) > 0), self.segments)

    def probed(self) -> range:
        """The segments that ``rank="auto"`` probes."""
        return range(self.first_ordered, self.segments, PROBE_EVERY)

    def guide_keys(self, n: int) -> int:
        """Leading keys whose mean orders the queries: one segment of them, never a future one."""
        visible = self.queries(n)[0] + self.offset if self.is_causal else self.seqlen_k
        return max(0, min(self.segment, visible))

    def block_count(self, block_m: int) -> int:
        """Query tiles of a full segment."""
        return -(-min(self.segment, self.seqlen_q) // block_m)

    def causal_pairs(self) -> int:
        """(query, key) pairs that dense attention computes for one head."""
        if not self.is_causal:
            return self.seqlen_q * self.seqlen_k
        return self.seqlen_q * (self.offset + 1) + self.seqlen_q * (self.seqlen_q - 1) // 2

    def dense_pairs(self) -> int:
        """(query, key) pairs that pass 1 computes for one head."""
        total = 0
        for n in range(self.segments):
            (first, last), (begin, end) = self.queries(n), self.dense_keys(n)
            rows = last - first
            total += rows * (end - begin)
            if self.is_causal:
                total -= rows * (rows - 1) // 2
        return total
