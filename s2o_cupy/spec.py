"""What S2O is, in numbers: configuration, geometry, shared constants and errors.

Standard library only. The reference, the plan and (rendered as ``constexpr``) the kernels all
read these definitions, so that each is written once.
"""

from __future__ import annotations

import difflib
import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from .by_head import check_error, check_tau
from .errors import ArgumentError, ArgumentTypeError, ArgumentValueError

__all__ = [
    "ERROR_SEGMENTS",
    "FIRST_LADDER",
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
    "OUTLIER_SHIFT",
    "UNITS",
    "VALUE_KEYS",
    "VALUE_ROWS",
    "Geometry",
    "Pass",
    "S2OConfig",
    "S2OError",
    "MOMENT_KEYS",
    "TAIL_DOUBT",
    "TAIL_REACH",
    "TAIL_SAMPLES",
    "moment_group",
    "moment_keys",
    "check_path",
    "checked_int",
    "names_its_fields",
    "not_a_config",
    "tau_text",
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
# Rows that leave out a block of values together (Schedule.value_skip): those that are multiplied at a time. On the
# portable path half as many with head_dim above 128 or block_m 64. And keys of such a
# block; half as many there where rows of a head_dim from 65 to 128 do not start on 16 bytes.
VALUE_ROWS: Mapping[str, int] = {"portable": 32, "hopper": 64}
VALUE_KEYS = 64
PATHS = ("auto", "portable", "hopper")
TAILS = ("none", "first_order")

MAX_HEAD_DIM = 256
MAX_SEGMENT = 8192  # a query's offset is 13 bits of the 32 by which a segment's queries are sorted
MAX_POOLED_QUERIES = {"max": 64, "weight": 256}
RANKS = ("query", "weight", "max", "mean")
UNIT_RANKS = ("query", "weight")  # that order units of several keys
DEFAULT_UNIT = {"query": 8, "weight": 16}
UNITS = (1, 2, 4, 8, 16, 32, 64, 128)  # neighbouring keys that may be ordered together
DENSE_LAST = 256  # queries at the end of a call that attend to all their keys
DENSE_LAST_PART = 32  # where they are at most one in so many
# An outlier counts for its part of the unit, and of that for 2 ** -OUTLIER_SHIFT: it decides where it outweighs its
# neighbours by far, as a sequence's first key does. Choosing every unit by its largest key would bias what is visited.
OUTLIER_SHIFT = 4
BLOCK_UNITS = 64  # neighbouring units whose mean key stands for them in a query's norm
CLUSTERS = (2, 4)  # groups of keys of a unit that rank="query" may tell apart
CENTRE_KEYS = 128  # first keys at most, of which the mean is taken off all keys before they are rounded to 8 bits
CENTRE_PART = 16  # keys are scaled as if one of the first were at least such a part of that mean away from it
# Powers of two by which rows are scaled to 8 bits (raw_kernels/selection/unit_tile.cuh).
KEY_EXPONENT, QUERY_EXPONENT, MOST_EXPONENT = 4, 7, 9
DEFAULT_TAU = 0.02  # of segments with up to LONG_FROM candidates
DEFAULT_TAU_WITH_TAIL = 0.1  # the same with rank="query", where the tail counts what is left
LONG_FROM = 1 << 15
# How an error finds its taus (reference.error_taus is the definition).
FIRST_LADDER = (0.6, 0.15, 0.0375, 0.0094, 0.0023, 0.0006, 0.00015, 0.0)  # the last one's walk ends with the keys
ERROR_SEGMENTS = 32  # that are sampled, all if there are no more
DRAW_STEP = 0x61C88647  # of 2^32, by the golden ratio: where in its run of neighbours each sampled segment stands
WEIGHT_RUN = 8  # queries behind a pooled query of rank="weight", where nobody says how many there are
TAIL_SAMPLES = 128  # unvisited candidates that say how much all of them weigh
TAIL_DOUBT = 8  # so many of them that share the weight evenly are believed by half
TAIL_REACH = 100  # log2 of how many times all that a row has found one of them may weigh
MOMENT_KEYS = 4096  # keys at most that means and covariances are taken from
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

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
    "kMostPooled": MAX_POOLED_QUERIES["weight"],
    "kTailSamples": TAIL_SAMPLES,
    "kMomentKeys": MOMENT_KEYS,
    "kTailDoubt": TAIL_DOUBT,
    "kTailReach": TAIL_REACH,
    "kOutlierShift": OUTLIER_SHIFT,
    "kBlockUnits": BLOCK_UNITS,
    "kCentrePart": CENTRE_PART,
    "kKeyExponent": KEY_EXPONENT,
    "kQueryExponent": QUERY_EXPONENT,
    "kMostExponent": MOST_EXPONENT,
    "kLadder": len(FIRST_LADDER),
    "kErrorSegments": ERROR_SEGMENTS,
    "kDrawStep": DRAW_STEP,
}


def tau_text(tau: float | Sequence[float] | None) -> str:
    """In words short enough for a line."""
    if tau is None:
        return "default"
    if isinstance(tau, (int, float)):
        return f"{tau:g}"
    return f"{min(tau):g} to {max(tau):g} by head"


class S2OError(RuntimeError):
    """The machine cannot run the call (no GPU, too old a driver or card); the message says the remedy."""


def checked_int(name: str, value: Any, low: int, high: int | None = None, owner: str = "") -> int:
    """``value``, of Python or NumPy, as an int, or an error that says what is accepted."""
    accepted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{name} is {value!r} ({type(value).__name__}); accepted: {accepted}", owner)
    number = value if isinstance(value, int) else int(value)  # a default stays one
    if number < low or (high is not None and number > high):
        raise ArgumentValueError(f"{name} is {number}; accepted: {accepted}", owner)
    return number


def check_path(path: Any, owner: str = "") -> None:
    if path not in PATHS:
        raise ArgumentValueError(f"path is {path!r}; accepted: {', '.join(map(repr, PATHS))}", owner)


class _Default:
    """Of a field's value: it was not given but found, and is found anew by ``dataclasses.replace``. That passes on what
    the attributes hold, so that a value itself must say it; `S2OConfig.values` are plain."""

    __slots__ = ()


class _DefaultInt(_Default, int):
    __slots__ = ()


class _DefaultText(_Default, str):
    __slots__ = ()


def _plain(value: Any) -> Any:
    """A field's value as a number or name like any other."""
    if isinstance(value, _Default):
        return int(value) if isinstance(value, int) else str(value)
    return value


_Class = TypeVar("_Class")


def names_its_fields(cls: type[_Class]) -> type[_Class]:
    """Errors of the dataclass's fields begin with its name. A field that it has not is answered with those that it has,
    and with the nearest of them."""
    make = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        try:
            for name in given:
                if name not in known:
                    near = difflib.get_close_matches(name, known, n=1)
                    meant = f"did you mean {near[0]}? " if near else ""
                    raise ArgumentTypeError(f"{name} is not a field; {meant}accepted: {', '.join(known)}")
            make(self, *args, **given)
        except ArgumentError as error:
            error.args = error.args[0], cls.__name__
            raise

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def not_a_config(config: Any, owner: str = "") -> ArgumentTypeError:
    """What to raise where ``config`` should have been an S2OConfig, with what was probably meant."""
    meant = ""
    if isinstance(config, Mapping):
        meant = ", such as S2OConfig(**config)"
    elif isinstance(config, type):
        meant = f", an object: {config.__name__}()"
    elif isinstance(config, numbers.Real) and not isinstance(config, bool):
        meant = f", such as S2OConfig(tau={config})"
    return ArgumentTypeError(f"config is a {type(config).__name__}; accepted: S2OConfig or None{meant}", owner)


def takes_defaults_for_given(cls: type[_Class]) -> type[_Class]:
    """What another config has found is given where somebody passes it. ``dataclasses.replace`` is told by its naming
    every field."""
    make, count = cls.__init__, len(fields(cls))  # type: ignore[arg-type]

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if len(given) < count:
            args, given = tuple(map(_plain, args)), {name: _plain(x) for name, x in given.items()}
        make(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@dataclass(frozen=True)
class Pass:
    """What the passes read, whatever chooses their keys: S2O, a method, the caller's schedule, or nothing, as in NSA's
    dense attention. Fields and defaults as in S2OConfig."""

    block_m: int = 128
    block_n: int = 128
    path: str = "auto"
    segment: int | None = None  # None: pass 1 is dense attention of all queries
    window: int = 0
    unit: int = DEFAULT_UNIT["query"]  # nothing of dense attention depends on it
    tau: float = 0.0  # of all heads; each head's own lie in an array
    tau_falls: float = 0.0  # 0, or how tau falls with the keys before a segment (AttentionParams::tau_of)

    def __post_init__(self) -> None:
        check_path(self.path, "S2OConfig")


@names_its_fields
@takes_defaults_for_given
@dataclass(frozen=True)
class S2OConfig:
    """How S2O orders keys and when it stops.

    A field that is None, or not given, has a default that follows the fields that are given; ``dataclasses.replace``
    finds it anew. What is given stays, or is refused beside another rank.

    Parameters
    ----------
    segment : int, optional
        Queries per segment, which share one order of keys; default 128, with ``rank="mean"`` or "max" 1,024. A
        segment's own keys are attended densely; every earlier key is a candidate.
    tau : float or sequence of float, optional
        Stop threshold: a tile of queries stops after the key tile that adds less than ``tau`` of the
        softmax mass found so far to every one of its rows. 0 never stops and gives dense attention. A number for all
        heads, or one for each query head, all in one call. Default: 0.1 with rank "query" and its ``tail``, else 0.02,
        for segments with up to 32,768 earlier keys, beyond less by the square root of their number, as errors grow with
        it: half as much for 131,072 (`tau_of`).
    block_m : int, default 128
        Queries of a tile that stop together. The GPU takes 64 or 128, the CPU multiples of 16 up to 1024.
    block_n : int, default 128
        Keys of a tile between two stop checks. The GPU takes multiples of 64 up to 1024, the CPU of 16.
    rank : {"query", "weight", "max", "mean"}, default "query", with pooled_queries "weight"
        A key's score: "query", the largest softmax weight that any single query of the segment gives it; "weight", that
        any of its pooled queries does, which is cheaper and loses what one query alone looks for; "max", the largest
        dot product with a pooled query; "mean" (the paper, Algorithm 1), its dot product with the mean of all of the
        segment's queries.
    unit : int, optional
        Neighbouring keys scored together, by the means of their groups (``clusters``), with "weight" by their mean and
        the key furthest from it, and visited together: a power of two up to 128, default 8 with ``rank="query"`` and
        16 with "weight". The others order single keys, as the paper does: 1.
    pooled_queries : int, optional
        How many pooled queries a segment has, each the mean of a run of consecutive queries; default with "weight" one
        for each 8 queries, up to 256, with "max" 16 (at most a segment's queries), with "mean" 1. With "query" each
        query is one, and no other number is accepted.
    clusters : int, optional
        Of ``rank="query"``: the keys of a unit are told apart as so many groups of keys that lie close together, each
        scored by its mean. 4, the default, or 2, which takes half the time and finds fewer of the single keys that a
        query may look for. Units of 1 or 2 keys have 2 groups.
    window : int, default 0
        Keys just before the segment that are attended densely as well, and what is left of the unit that they begin in.
    workspace_bytes : int, default 256 MiB
        Bound on the GPU memory of scores and key orders. Segments are taken in turn to stay within it;
        one segment of one head always fits. What stands for units of keys comes besides: with rank "query" up to 13
        bytes for each element of a key, for each unit of each KV head (docs/ordering.md, "Memory"). A dense call
        copies keys and values from small pages only within it. The last queries of a prompt (``dense_last``) take up to
        a quarter more, or what one segment of a KV head's query heads takes.
    path : {"auto", "portable", "hopper"}, default "auto"
        Kernels to run on the GPU: "hopper" (compute capability 9.0: wgmma) where the device and the problem allow it,
        else "portable" (8.0 and newer: mma.sync). A path by name is an error where it cannot run, as on the CPU.
    dense_up_to : int, optional
        Keys (seqlen_k) up to which the GPU computes plain dense attention, as ordering would cost more than it saves.
        Default: 8192, as was measured, and any length at tau 0, which is dense by definition. 0: never. The reference
        on the CPU ignores it.
    tail : {"none", "first_order"}, optional
        What the candidates count for that a tile of queries did not visit: "none" (the paper), nothing;
        "first_order", as much as a sample of them says, at their mean value and what it changes by with the score.
        Default: "first_order" with ``rank="query"`` and no error, else "none". What is sampled speaks for the rest only
        where the order has found what single queries look for.
    dense_last : int, optional
        Queries at the end that attend to all their keys, rounded up to whole segments: a prompt ends with what is
        asked of it, and single rows there decide what is generated. Default, with rank "query" or "weight" in a causal
        call of a whole prompt (seqlen_q is seqlen_k): 256, or a longer segment, where they are at most one in 32; else
        0.
    error : float or sequence of float, optional
        Instead of tau: rel_l2 against dense attention, ||o - dense|| / ||dense||, for all heads or one for each query
        head. Each head gets the largest tau whose error, estimated on a sample of segments, is at most this; 0 where
        none is. An estimate, not a bound (docs/tuning.md), made with ``tail="none"``. Sampled segments are of the whole
        sequence, and so each row depends on all of it. On the GPU their outputs, and several for each q tile that runs,
        come on top of ``workspace_bytes``.

    Raises
    ------
    TypeError, ValueError
        A field has a wrong type or value; the message names the field and what is accepted.
    """

    segment: int = None  # type: ignore[assignment]  # an int from __post_init__ on, as unit and pooled_queries
    tau: float | Sequence[float] | None = None  # a number, or a tuple; None with an error and by default
    block_m: int = 128
    block_n: int = 128
    rank: str = None  # type: ignore[assignment]
    unit: int = None  # type: ignore[assignment]
    pooled_queries: int = None  # type: ignore[assignment]
    window: int = 0
    workspace_bytes: int = 256 << 20
    path: str = "auto"
    dense_up_to: int | None = None
    tail: str | None = None
    error: float | Sequence[float] | None = None
    dense_last: int | None = None
    clusters: int = None  # type: ignore[assignment]  # of rank="query" alone; otherwise 0

    def __post_init__(self) -> None:
        self._default("rank", "weight" if self._is_given("pooled_queries") else "query")
        if self.rank not in RANKS:
            raise ArgumentValueError(f"rank is {self.rank!r}; accepted: {', '.join(map(repr, RANKS))}")
        self._default("segment", 128 if self.orders_units else 1024)
        self._set("segment", checked_int("segment", self.segment, 1, MAX_SEGMENT))
        self._set_tau()
        self._set("block_m", checked_int("block_m", self.block_m, 1, 1024))
        self._set("block_n", checked_int("block_n", self.block_n, 1, 1024))
        self._default("unit", DEFAULT_UNIT.get(self.rank, 1))
        self._set("unit", checked_int("unit", self.unit, 1))
        if self.unit not in (UNITS if self.orders_units else (1,)):
            accepted = ", ".join(map(str, UNITS)) if self.orders_units else "1, or rank='query' or 'weight'"
            raise ArgumentValueError(f"unit is {self.unit} with rank={self.rank!r}; accepted: {accepted}")
        most = MAX_POOLED_QUERIES.get(self.rank)
        few = {
            "mean": 1, "max": 16, "weight": min(-(-self.segment // WEIGHT_RUN), MAX_POOLED_QUERIES["weight"]),
            "query": self.segment,
        }  # fmt: skip
        self._default("pooled_queries", min(few[self.rank], self.segment))
        self._set("pooled_queries", checked_int("pooled_queries", self.pooled_queries, 1, most))
        if self.rank == "mean" and self.pooled_queries != 1:
            raise ArgumentValueError(
                f"pooled_queries is {self.pooled_queries} with rank='mean', which has one; "
                "accepted: 1, or rank='weight' or 'max'"
            )
        if self.rank == "query" and self.pooled_queries != self.segment:
            raise ArgumentValueError(
                f"pooled_queries is {self.pooled_queries} with rank='query', where each of the segment's "
                f"{self.segment} queries is one; accepted: None, or rank='weight' or 'max'"
            )
        by_query = self.rank == "query"
        self._default("clusters", CLUSTERS[-1] if by_query else 0)
        self._set("clusters", checked_int("clusters", self.clusters, 0))
        if self.clusters not in (CLUSTERS if by_query else (0,)):
            accepted = " or ".join(map(str, CLUSTERS)) if by_query else "None, or rank='query'"
            raise ArgumentValueError(f"clusters is {self.clusters} with rank={self.rank!r}; accepted: {accepted}")
        self._set("window", checked_int("window", self.window, 0))
        self._set("workspace_bytes", checked_int("workspace_bytes", self.workspace_bytes, 1 << 20))
        if self.dense_up_to is not None:
            self._set("dense_up_to", checked_int("dense_up_to", self.dense_up_to, 0))
        if self.dense_last is not None:
            self._set("dense_last", checked_int("dense_last", self.dense_last, 0))
        if self.tail is not None and self.tail not in TAILS:
            raise ArgumentValueError(f"tail is {self.tail!r}; accepted: {', '.join(map(repr, TAILS))}")
        check_path(self.path)
        _ = self.values, self.of_pass  # found here, so that torch.compile meets nothing but values

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the one way into a frozen dataclass

    def _set_tau(self) -> None:
        """At most one of tau and error."""
        if self.error is not None:
            if self.tau is not None:
                raise ArgumentValueError(
                    f"tau is {self.tau} and error is {self.error}; accepted: one of them, as an error finds its taus"
                )
            self._set("error", check_error(self.error))
        elif self.tau is not None:
            self._set("tau", check_tau(self.tau))

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not isinstance(value, _Default)

    def _default(self, name: str, value: int | str) -> None:
        """Of a field that was not given, or whose value is a default found before."""
        if not self._is_given(name):
            self._set(name, _DefaultText(value) if isinstance(value, str) else _DefaultInt(value))

    @functools.cached_property
    def values(self) -> tuple[Any, ...]:
        """The fields in order, those that were not given as plain numbers and names too."""
        return tuple(_plain(getattr(self, field.name)) for field in fields(self))

    def __hash__(self) -> int:  # kept: calls look their preparation up by it
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.values)

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash: that of a name is another one in another process."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @functools.cached_property
    def of_pass(self) -> Pass:
        """What the passes of a call that is not dense read."""
        falls = self.tau is None and self.error is None
        tau = self.default_tau if falls else self.tau if isinstance(self.tau, float) else 0.0
        return Pass(
            self.block_m, self.block_n, self.path, self.segment, self.window, self.unit, tau,
            1 / LONG_FROM if falls else 0.0,
        )  # fmt: skip

    @property
    def without_choice(self) -> tuple[str, ...]:
        """Fields of which the rank leaves one value alone, of the segment at most."""
        return {
            "query": ("pooled_queries",), "weight": ("clusters",), "max": ("unit", "clusters"),
            "mean": ("unit", "pooled_queries", "clusters"),
        }[self.rank]  # fmt: skip

    @property
    def orders_units(self) -> bool:
        """Whether units of several keys are ordered, by softmax weights."""
        return self.rank in UNIT_RANKS

    @property
    def groups(self) -> int:
        """Of rank="query": groups that the keys of a unit are parted into, by kernels that know 2 or 4; with fewer keys
        than `clusters` the others would have none."""
        return min(self.clusters, max(CLUSTERS[0], self.unit))

    @property
    def run(self) -> int:
        """Queries behind one pooled query: equal runs, the last may be shorter."""
        return -(-self.segment // self.pooled_queries)

    @property
    def never_stops(self) -> bool:
        """Whether every head's tau is 0: dense attention."""
        return self.tau is not None and not any(self.tau if isinstance(self.tau, tuple) else (self.tau,))

    @property
    def adds_tail(self) -> bool:
        """Whether unvisited candidates count. At tau 0 there are none."""
        by_default = self.rank == "query" and self.error is None
        return (by_default if self.tail is None else self.tail != "none") and not self.never_stops

    @property
    def default_tau(self) -> float:
        """tau of a segment with few earlier keys, where none is given."""
        return DEFAULT_TAU_WITH_TAIL if self.rank == "query" and self.adds_tail else DEFAULT_TAU

    def tau_of(self, candidates: int) -> float | tuple[float, ...]:
        """tau of a segment with so many earlier keys, of a config without an error: the one given, or the default."""
        if self.error is not None:
            accepted = "whose taus a call finds; accepted here: a tau"
            raise ArgumentValueError(f"error is {self.error}, {accepted}", "S2OConfig")
        if self.tau is None:
            return self.default_tau * math.sqrt(LONG_FROM / max(candidates, LONG_FROM))
        return self.tau  # type: ignore[return-value]  # a sequence is a tuple from __post_init__ on

    def taus(self, heads: int, candidates: int) -> tuple[float, ...]:
        """The same for each query head."""
        tau = self.tau_of(candidates)
        return tau if isinstance(tau, tuple) else (tau,) * heads

    def last_of_prompt(self, seqlen: int) -> int:
        """How many queries at the end of a prompt of ``seqlen`` tokens attend to all their keys, by `dense_last`."""
        if self.dense_last is not None:
            return self.dense_last
        last = max(DENSE_LAST, self.segment)
        return last if self.orders_units and seqlen >= DENSE_LAST_PART * last else 0

    def dense_from(self, geometry: Geometry) -> int:
        """The first of the segments at the end that never stop, by `dense_last`; if none does, how many there are."""
        is_prompt = geometry.is_causal and geometry.offset == 0
        last = self.last_of_prompt(geometry.seqlen_q) if is_prompt else self.dense_last
        return max(0, geometry.seqlen_q - last) // geometry.segment if last else geometry.segments

    def errors(self, heads: int) -> tuple[float, ...]:
        """Of each query head, of a config with an error."""
        if self.error is None:
            raise ArgumentValueError("error is None; accepted here: an error, whose taus a call finds", "S2OConfig")
        return tuple(self.error) if isinstance(self.error, Sequence) else (self.error,) * heads

    def of_chunk(self, begin: int, end: int, seqlen: int) -> S2OConfig:
        """For queries [begin, end), whole segments, of a causal prompt of ``seqlen`` tokens in a call of their own with
        the keys before ``end``: which of them are among the prompt's dense last ones."""
        dense = self.dense_from(Geometry(seqlen, seqlen, self.segment, unit=self.unit)) * self.segment
        return replace(self, dense_last=max(0, end - max(begin, dense)))

    def of_heads(self, begin: int, end: int) -> S2OConfig:
        """For these query heads alone, half-open."""
        if isinstance(self.tau, tuple):
            return self.with_tau(self.tau[begin:end])
        return self.with_error(self.error[begin:end]) if isinstance(self.error, tuple) else self

    def with_tau(self, tau: float | Sequence[float] | None) -> S2OConfig:
        """The same with this tau, or the default, whatever tau or error it had."""
        return replace(self, tau=tau, error=None)

    def with_found_taus(self, taus: float | Sequence[float]) -> S2OConfig:
        """The same call with the taus that its error has found: with an error the default tail is "none"."""
        return replace(self, tau=taus, error=None, tail=self.tail or "none")

    def with_error(self, error: float | Sequence[float]) -> S2OConfig:
        """The same with this error in the place of its tau."""
        return replace(self, tau=None, error=error)


def moment_group(keys: int) -> int:
    """The group of segments with so many leading keys: one for each number up to 15, then eight for each power of two,
    so that there are few. The same formula as in raw_kernels/tail/moment_groups.cuh."""
    shift = max(0, keys.bit_length() - 4)
    return keys if keys < 16 else 8 * shift + (keys >> shift)


def moment_keys(group: int) -> int:
    """The fewest leading keys of a group: those that its moments are taken from."""
    shift = max(0, group // 8 - 1)
    return group if group < 16 else (group - 8 * shift) << shift


@dataclass(frozen=True)
class Geometry:
    """Which keys a segment attends densely and which are candidates of pass 2.

    Query i stands at key position i + seqlen_k - seqlen_q (bottom-right alignment). Candidates are whole units of
    ``unit`` keys from key 0 on; without causality the last may be short. Ranges are half-open pairs (begin, end); the
    same formulas stand in raw_kernels/common/geometry.cuh.
    """

    seqlen_q: int
    seqlen_k: int
    segment: int
    window: int = 0
    is_causal: bool = True
    unit: int = 1
    drawn: int = 0  # above 0: only so many segments are attended, one from each of as many equal runs of neighbours

    @property
    def offset(self) -> int:
        return self.seqlen_k - self.seqlen_q

    @property
    def all_segments(self) -> int:
        return -(-self.seqlen_q // self.segment)

    @property
    def segments(self) -> int:
        return self.drawn or self.all_segments

    @property
    def runs(self) -> tuple[int, int, int]:
        """How many there are, segments of one at least, and how many, the first ones, have one more."""
        return self.segments, *divmod(self.all_segments, self.segments)

    def run(self, n: int) -> tuple[int, int]:
        """The run of neighbours among all segments that number ``n`` stands for."""
        _, least, longer = self.runs
        return n * least + min(n, longer), (n + 1) * least + min(n + 1, longer)

    def place(self, n: int) -> int:
        """Which of all segments number ``n`` is."""
        if not self.drawn:
            return n
        begin, end = self.run(n)
        return begin + ((n * DRAW_STEP + 2**31) % 2**32 * (end - begin) >> 32)

    @property
    def units(self) -> int:
        """Whole units of keys."""
        return self.seqlen_k // self.unit

    def queries(self, n: int) -> tuple[int, int]:
        """Query positions of segment ``n``."""
        begin = self.place(n) * self.segment
        return begin, min(begin + self.segment, self.seqlen_q)

    def dense_keys(self, n: int) -> tuple[int, int]:
        """Keys that pass 1 reads for segment ``n``: its own, the window before them, and the rest of a unit that this
        begins in; without causality also of the unit that its own end in."""
        begin, end = self.queries(n)
        clip = lambda x: min(max(x, 0), self.seqlen_k)  # noqa: E731
        dense_begin, dense_end = clip(begin + self.offset - self.window), clip(end + self.offset)
        dense_begin -= dense_begin % self.unit
        return dense_begin, dense_end if self.is_causal else clip(-(-dense_end // self.unit) * self.unit)

    def candidates(self, n: int) -> int:
        """How many keys pass 2 may visit: those before the dense ones; without causality also those after."""
        begin, end = self.dense_keys(n)
        return begin if self.is_causal else self.seqlen_k - (end - begin)

    def ranked(self, n: int) -> int:
        """How many whole units are among them: these are put in order. A short one comes last."""
        return self.candidates(n) // self.unit

    @property
    def leading_units(self) -> int:
        """Units that the centre of rank="query" is the mean of: of at most CENTRE_KEYS first keys, all of them before
        each segment that has candidates. At least 1, where nothing is ordered too.

        A call of some whole segments of a causal prompt has as many as that of all its segments, and so the same bits:
        what counts is where the first segment with a candidate would begin, had the call its neighbours before it."""
        if not self.is_causal:
            return max(1, min(CENTRE_KEYS // self.unit, self.units))
        n = next((n for n in range(self.segments) if self.ranked(n) > 0), None)
        if n is None:
            return 1
        keys = self.queries(n)[0] + self.offset - self.window  # before the segment and its window
        keys -= (keys - self.unit) // self.segment * self.segment  # before the first one that has a whole unit of them
        return max(1, min(CENTRE_KEYS, keys) // self.unit)

    def moment_group(self, n: int) -> int:
        """The group of leading keys that stands for segment ``n``'s candidates; without causality all keys do."""
        return moment_group(self.dense_keys(n)[0] if self.is_causal else self.seqlen_k)

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
