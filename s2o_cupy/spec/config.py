"""S2O's configuration, and what of it the passes read."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..by_head import check_error, check_tau
from ..errors import ArgumentTypeError, ArgumentValueError
from ..nearest import nearest
from .constants import (
    CLUSTERS,
    DEFAULT_TAU,
    DEFAULT_TAU_WITH_TAIL,
    DENSE_LAST,
    DENSE_LAST_PART,
    LONG_FROM,
    MAX_SEGMENT,
    MOST_WEIGHED,
    NEAR_KEYS,
    PATHS,
    TAILS,
    UNITS,
    WEIGHT_RUN,
)
from .fields import (
    Default,
    DefaultInt,
    DefaultText,
    checked_int,
    is_one_of,
    names_its_fields,
    plain,
    takes_defaults_for_given,
)  # fmt: skip
from .geometry import Geometry

__all__ = [
    "DEFAULT_UNIT", "MAX_POOLED_QUERIES", "ORDER_OF_RANK", "RANKS", "UNIT_RANKS", "Pass", "S2OConfig", "check_path",
    "not_a_config", "tau_text",
]  # fmt: skip


@dataclass(frozen=True)
class _Rank:
    """An order of keys: its defaults, and what of it may be chosen."""

    order: str  # the file in s2o_cupy/selection/orders that scores keys
    segment: int = 1024
    unit: int | None = None  # neighbouring keys that are ordered together; None: it orders single keys
    run: int | None = None  # queries behind a pooled query; None: their number does not follow the segment
    pooled_queries: int = 1  # where it does not
    most_pooled: int | None = None  # that may be given; None: no other number than the default
    pools: bool = True  # whether segments have pooled queries

    def few(self, segment: int) -> int:
        """Pooled queries of a segment where nobody says how many."""
        return min(-(-segment // self.run) if self.run else self.pooled_queries, self.most_pooled or segment, segment)


_BY_RANK = {
    "query": _Rank("query", 128, unit=8, run=1, pools=False),
    "weight": _Rank("weight", 128, unit=16, run=WEIGHT_RUN, most_pooled=MOST_WEIGHED),
    "max": _Rank("pooled", pooled_queries=16, most_pooled=64),
    "mean": _Rank("pooled"),
}
RANKS = tuple(_BY_RANK)
ORDER_OF_RANK = {name: rank.order for name, rank in _BY_RANK.items()}
DEFAULT_UNIT = {name: rank.unit for name, rank in _BY_RANK.items() if rank.unit is not None}
UNIT_RANKS = tuple(DEFAULT_UNIT)  # that order units of several keys
MAX_POOLED_QUERIES = {name: rank.most_pooled for name, rank in _BY_RANK.items() if rank.most_pooled is not None}


def check_path(path: Any, owner: str = "") -> None:
    if not is_one_of(path, PATHS):
        raise ArgumentValueError(f"path is {path!r}; accepted: {', '.join(map(repr, PATHS))}", owner)


def tau_text(tau: float | Sequence[float] | None) -> str:
    """In words short enough for a line."""
    if tau is None:
        return "default"
    if isinstance(tau, (int, float)):
        return f"{tau:g}"
    return f"{min(tau):g} to {max(tau):g} by head"


def not_a_config(config: Any, owner: str = "") -> ArgumentTypeError:
    """What to raise where ``config`` should have been an S2OConfig, with what was probably meant."""
    meant = ""
    if isinstance(config, Mapping):
        meant = ", such as S2OConfig(**config)"
    elif isinstance(config, type):
        meant = f", an object: {config.__name__}()"
    elif isinstance(config, numbers.Real) and not isinstance(config, bool):
        meant = f", such as S2OConfig(tau={config})"
    elif isinstance(config, str):
        rank = nearest(config, RANKS)
        others = "; sparse_attention takes other methods, by their configurations"
        meant = others if rank is None else f", such as S2OConfig(rank={rank!r})"
    elif ".methods." in type(config).__module__:
        meant = "; sparse_attention takes the others"
    return ArgumentTypeError(f"config is a {type(config).__name__}; accepted: S2OConfig or None{meant}", owner)


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

    @property
    def params(self) -> dict[str, Any]:
        """Fields that kernels are given as they are, by their names in AttentionParams."""
        return {"tau_falls": self.tau_falls}


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
        Stop threshold: a tile of queries stops after the key tile that adds less than ``tau`` of the softmax mass found
        so far to every one of its rows. With rank "query" and its ``tail`` it takes four such key tiles in a row (of 64
        keys five), or a sixteenth of the earlier keys if that is more, as long as units are to come that hold a key of
        half of ``tau`` of the mass of any of its segment's queries or more, by the estimate that orders keys: a few
        queries whose keys come first do not end it before others have had their turn. 0 never stops and gives dense
        attention. A number for all heads, or one for each query head, all in one call. Default: 0.1 with rank "query"
        and its ``tail``, else 0.02, for segments with up to 32,768 earlier keys, beyond less by the square root of
        their number, as errors grow with it: half as much for 131,072 (`tau_of`).
    block_m : int, default 128
        Queries of a tile that stop together. The GPU takes 64 or 128, the CPU multiples of 16 up to 1024.
    block_n : int, default 128
        Keys of a tile between two stop checks. The GPU takes multiples of 64 up to 1024, the CPU of 16.
    rank : {"query", "weight", "max", "mean"}, default "query", with pooled_queries "weight"
        A key's score: "query", the largest softmax weight that any single query of the segment gives it (with its
        ``tail`` the last 64 keys before a causal segment come first); "weight", that any of its pooled queries does,
        which is cheaper and loses what one query alone looks for; "max", the largest dot product with a pooled query;
        "mean" (the paper, Algorithm 1), its dot product with the mean of all of the segment's queries.
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
        scored by its mean. 8, the default, which scores each key of a unit of 8 by itself; 4 or 2, which take a half or
        a quarter of the products and find fewer of the single keys that a query may look for. A unit has no more groups
        than keys, and at least 2.
    window : int, default 0
        Keys just before the segment that are attended densely as well, and what is left of the unit that they begin in.
    workspace_bytes : int, default 256 MiB
        Bound on what the scores and key orders of a round take of the GPU's memory. Segments are taken in rounds to
        stay within it; one segment of one head always fits. Where rounds differ, each array is as large as any of them
        needs it: up to half more in all. What stands for units of keys comes besides: with rank "query" up to 18 bytes
        for each unit and dimension of a KV head (docs/ordering.md, "Memory"). A dense call copies keys
        and values from small pages only within it. The last queries of a prompt (``dense_last``) come before and take
        up to a quarter of it, or what one segment of a KV head's query heads takes.
    path : {"auto", "portable", "hopper"}, default "auto"
        Kernels to run on the GPU: "hopper" (compute capability 9.0: wgmma) where the device and the problem allow it,
        else "portable" (8.0 and newer: mma.sync). A path by name is an error where it cannot run, as on the CPU.
    dense_up_to : int, optional
        Keys (seqlen_k) up to which the GPU computes plain dense attention, as ordering would cost more than it saves.
        Default, as was measured, by query heads of a call, whatever the batch: 7,168 with 17 or more, 8,192 with 13 to
        16, 9,216 with 11 or 12, 10,240 with 9 or 10, 11,264 with 8, 12,288 with up to 7. Of a head_dim up to 64 7,168
        with 11 or more, 8,192 with 9 or 10, 9,216 with 8, 10,240 with up to 7; above 128 8,192 or more. And any length
        at tau 0, which is dense by definition.
        0: never. The reference on the CPU ignores it.
    tail : {"none", "first_order"}, optional
        What the candidates count for that a tile of queries did not visit: "none" (the paper), nothing;
        "first_order", as much as a sample of them says, at their mean value and what it changes by with the score, and
        at the sample's own values as far as its halves agree.
        Default: "first_order" with ``rank="query"`` and no error, else "none". What is sampled speaks for the rest only
        where the order has found what single queries look for.
    dense_last : int, optional
        Queries at the end that attend to all their keys, rounded up to whole segments: a prompt ends with what is
        asked of it, and single rows there decide what is generated. Default, with rank "query" or "weight" in a causal
        call of a whole prompt (seqlen_q is seqlen_k): 256, or a longer segment, where they are at most one in 28; else
        0.
    error : float or sequence of float, optional
        Instead of tau: rel_l2 against dense attention, ||o - dense|| / ||dense||, between 0 and 1, for all heads or one
        for each query head. Each head gets the largest tau whose error, estimated on a sample of segments, is at most
        this; 0 where none is. An estimate, not a bound (docs/tuning.md), made with ``tail="none"``. Sampled segments
        are of the whole sequence, and so each row depends on all of it. On the GPU their outputs, and several for each
        q tile that runs, come on top of ``workspace_bytes``.

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
    # Of rank="query" alone; otherwise 0. "before": what it is in a PyTorch graph exported before the field was there.
    clusters: int = field(default=None, metadata={"before": 0})  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._default("rank", "weight" if self._is_given("pooled_queries") else "query")
        if not is_one_of(self.rank, RANKS):
            raise ArgumentValueError(f"rank is {self.rank!r}; accepted: {', '.join(map(repr, RANKS))}")
        rank = _BY_RANK[self.rank]
        self._default("segment", rank.segment)
        self._set("segment", checked_int("segment", self.segment, 1, MAX_SEGMENT))
        self._set_tau()
        self._set("block_m", checked_int("block_m", self.block_m, 1, 1024))
        self._set("block_n", checked_int("block_n", self.block_n, 1, 1024))
        self._default("unit", rank.unit or 1)
        self._set("unit", checked_int("unit", self.unit, 1))
        if self.unit not in (UNITS if self.orders_units else (1,)):
            accepted = ", ".join(map(str, UNITS)) if self.orders_units else "1, or rank='query' or 'weight'"
            raise ArgumentValueError(f"unit is {self.unit} with rank={self.rank!r}; accepted: {accepted}")
        self._default("pooled_queries", rank.few(self.segment))
        self._set("pooled_queries", checked_int("pooled_queries", self.pooled_queries, 1, rank.most_pooled))
        if rank.most_pooled is None and rank.run is None and self.pooled_queries != 1:
            raise ArgumentValueError(
                f"pooled_queries is {self.pooled_queries} with rank={self.rank!r}, which has one; "
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
        if self.tail is not None and not is_one_of(self.tail, TAILS):
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
        return value is not None and not isinstance(value, Default)

    def _default(self, name: str, value: int | str) -> None:
        """Of a field that was not given, or whose value is a default found before."""
        if not self._is_given(name):
            self._set(name, DefaultText(value) if isinstance(value, str) else DefaultInt(value))

    @functools.cached_property
    def given(self) -> tuple[str, ...]:
        """The names of fields that have no default of their own finding."""
        return tuple(field.name for field in fields(self) if self._is_given(field.name))

    @functools.cached_property
    def values(self) -> tuple[Any, ...]:
        """The fields in order, those that were not given as plain numbers and names too."""
        return tuple(plain(getattr(self, field.name)) for field in fields(self))

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
        rank = _BY_RANK[self.rank]
        fixed = {
            "unit": rank.unit is None, "pooled_queries": rank.most_pooled is None, "clusters": self.rank != "query",
        }  # fmt: skip
        return tuple(name for name, is_fixed in fixed.items() if is_fixed)

    @property
    def orders_units(self) -> bool:
        """Whether units of several keys are ordered, by softmax weights."""
        return self.rank in UNIT_RANKS

    @property
    def pools_queries(self) -> bool:
        """Whether segments have pooled queries."""
        return _BY_RANK[self.rank].pools

    @property
    def groups(self) -> int:
        """Of rank="query": groups that the keys of a unit are parted into, by kernels that know 2, 4 or 8; with fewer
        keys than `clusters` the others would have none."""
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
    def wants_tail(self) -> bool:
        """Whether unvisited candidates would count, if there were any."""
        by_default = self.rank == "query" and self.error is None
        return by_default if self.tail is None else self.tail != "none"

    @property
    def adds_tail(self) -> bool:
        """Whether unvisited candidates count. At tau 0 there are none."""
        return self.wants_tail and not self.never_stops

    @property
    def near_keys(self) -> int:
        """How many keys right before a causal segment come first in its order: those of heads whose tau is 0, too, as
        what a head yields depends on no other."""
        return NEAR_KEYS if self.rank == "query" and self.wants_tail else 0

    @property
    def has_least_keys(self) -> bool:
        """Whether tiles of queries visit all that weighs a part of tau, by the estimate of single queries: what is
        sampled of the rest speaks for it then."""
        return self.rank == "query" and self.adds_tail

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
            candidates = checked_int("candidates", candidates, 0, owner="S2OConfig.tau_of")
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
        owner = "S2OConfig.of_chunk"
        seqlen = checked_int("seqlen", seqlen, 1, owner=owner)
        end = checked_int("end", end, 1, seqlen, owner)
        begin = checked_int("begin", begin, 0, end - 1, owner)
        for name, x in (("begin", begin), ("end", end)):
            if x % self.segment and x != seqlen:
                raise ArgumentValueError(f"{name} is {x}; accepted: whole segments, of {self.segment}", owner)
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
        if taus is None:
            accepted = "a number, or one for each query head, such as S2OStats.tau_per_head[0]"
            raise ArgumentTypeError(f"taus is None; accepted: {accepted}", "S2OConfig.with_found_taus")
        return replace(self, tau=taus, error=None, tail=self.tail or "none")

    def with_error(self, error: float | Sequence[float]) -> S2OConfig:
        """The same with this error in the place of its tau."""
        return replace(self, tau=None, error=error)
