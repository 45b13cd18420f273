"""Error and density of a call from a sample of its segments.

A segment's order depends on its own queries and the keys up to its end alone, so a call on the sampled segments gives
the very rows that the whole call would give; on a GPU those of `S2OConfig.dense_last` within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..api.attention import s2o_attention
from ..api.habits import answers_habits
from ..api.on_host import bhsd
from ..api.run import parse_config
from ..arrays.frameworks import to_host
from ..errors import ArgumentValueError, arguments_of
from ..plan import strata
from ..spec import S2OConfig, checked_int, tau_text
from .inputs import QKV
from .problems import problem_of

__all__ = ["ErrorEstimate", "Sample", "check_segments", "error_per_head"]

MIN_SEGMENTS = 2  # of one nobody knows how far it may be off
NO_STEP: Callable[[str], None] = lambda _: None  # noqa: E731


@dataclass(frozen=True)
class ErrorEstimate:
    """Error and density of one call, from a sample of its segments.

    Attributes
    ----------
    tau : float, or a tuple of one for each query head; None
        Of the call; None is the default, which each segment has its own of.
    error, standard_error : float64 numpy.ndarray, (batch, heads)
        Each head's rel_l2 against dense attention, ||o - dense|| / ||dense||, and the standard error of the sample; 0
        if every segment was taken.
    density : float64 numpy.ndarray, (batch, heads)
        Pairs computed / pairs of dense attention.
    share : float64 numpy.ndarray, (batch, heads)
        Each head's part of the squared norm of dense attention's output: pooled_error ** 2 is the sum of
        share * error ** 2.
    pooled_error, pooled_standard_error, pooled_density : float
        The same over all heads of the batch together.
    segments : tuple of int
        The segments that were taken, ascending.
    segments_total : int
        How many there are.
    """

    tau: Any
    error: np.ndarray
    standard_error: np.ndarray
    density: np.ndarray
    share: np.ndarray
    pooled_error: float
    pooled_standard_error: float
    pooled_density: float
    segments: tuple[int, ...]
    segments_total: int


@answers_habits
@arguments_of("error_per_head")
def error_per_head(
    q: Any,
    k: Any,
    v: Any,
    config: S2OConfig | None = None,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "BHSD",
    segments: int = 32,
    seed: int = 0,
) -> ErrorEstimate:
    """Estimate each head's error against dense attention, and its density, from a sample of segments.

    S2O and dense attention (tau 0) run on the sampled segments alone. Segments are drawn from equal parts of the
    sequence, two from each, and each part counts by its size.

    Parameters
    ----------
    q, k, v : array
        As `s2o_attention` takes them, of any framework.
    config : S2OConfig, optional
        What to look at. S2O is measured at any length: a call that would be plain dense attention, by ``dense_up_to``,
        makes no error.
    is_causal, scale, softcap, layout : optional
        As of `s2o_attention`. Without causality only a call of one segment is accepted.
    segments : int, default 32
        How many to take, at least 2; all if there are fewer.
    seed : int, default 0
        Of the draw.

    Returns
    -------
    ErrorEstimate

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted, or dense attention's output is not finite.

    Notes
    -----
    Both outputs are rounded to the dtype of the inputs, so an error near its rounding (2^-9 of bfloat16, 2^-12 of
    float16) is of the dtype. The call waits for the device.

    Examples
    --------
    >>> from s2o_cupy import S2OConfig
    >>> from s2o_cupy.tools import error_per_head, inputs
    >>> q, k, v = inputs.builtin("slash", length=1024, head_dim=32)
    >>> found = error_per_head(q, k, v, S2OConfig(tau=0.1, block_n=64), segments=4)
    >>> found.error.shape, len(found.segments), found.segments_total
    ((1, 4), 4, 8)
    """
    function = "error_per_head"
    config = parse_config(config, None, function)
    if config.error is not None:
        raise ArgumentValueError(
            f"config.error is {config.error}; accepted: a tau, or one for each query head, as "
            "S2OStats.tau_per_head of a call with that error has them (config.with_found_taus(stats.tau_per_head[0]), "
            "which has their tail='none')",
            function,
        )
    sample = Sample(
        QKV(q, k, v), config, segments=segments, seed=seed, function=function, is_causal=is_causal, scale=scale,
        softcap=softcap, layout=layout,
    )  # fmt: skip
    return sample.estimate(config.tau)


def check_segments(function: str, segments: Any) -> None:
    if isinstance(segments, bool) or not isinstance(segments, (int, np.integer)) or segments < MIN_SEGMENTS:
        raise ArgumentValueError(f"segments is {segments!r}; accepted: an integer >= {MIN_SEGMENTS}", function)


class Sample:
    """Some segments of a call, and dense attention on them."""

    def __init__(
        self, qkv: QKV, config: S2OConfig, *, segments: int, seed: int, function: str = "tune", **options: Any
    ) -> None:
        """The arguments of `error_per_head`, checked; nothing is computed yet. Errors begin with ``function``.
        ``options``: is_causal, scale, softcap and layout."""
        self.function = function
        self.problem, _, self.arrays = problem_of(*qkv, config, **options)
        self.geometry = self.problem.geometry(config)
        if self.problem.empty or not self.problem.seqlen_k:
            came = f"q is {tuple(qkv.q.shape)}, k is {tuple(qkv.k.shape)}"
            raise ArgumentValueError(f"{came}; accepted: at least one head, query and key", function)
        if not self.problem.is_causal and self.geometry.segments > 1:
            raise ArgumentValueError(
                f"is_causal is False, with {self.geometry.segments} segments, which depend on keys after "
                "them too; accepted: True, or a single segment (seqlen_q up to config.segment)",
                function,
            )
        check_segments(function, segments)
        seed = checked_int("seed", seed, 0, owner=function)
        self.config, self.options = config, options
        self.layout: str = options.get("layout", "BHSD")
        self.strata = strata.draw(self.geometry.segments, int(segments), seed)
        self.dense: list[np.ndarray] = []  # outputs [batch, heads, queries, head_dim] of the sampled segments

    @property
    def segments(self) -> tuple[int, ...]:
        """The sampled ones."""
        return tuple(n for stratum in self.strata for n in stratum.drawn)

    def attend_densely(self, step: Callable[[str], None] = NO_STEP) -> None:
        """Dense attention of the sampled segments; ``step`` is called after each."""
        for n in self.segments:
            o, _ = self._attend(n, replace(self.config.with_tau(0), dense_up_to=None))
            finite = np.isfinite(o.astype(np.float64)).all(axis=(2, 3))  # [batch, heads]
            if not finite.all():
                b, h = np.argwhere(~finite)[0].tolist()
                raise ArgumentValueError(
                    f"dense attention's output is not finite in segment {n}, batch {b}, head {h}; "
                    "accepted: finite q, k and v",
                    self.function,
                )
            self.dense.append(o)
            step("dense")

    def estimate(self, tau: float | Sequence[float] | None, step: Callable[[str], None] = NO_STEP) -> ErrorEstimate:
        """What S2O gives at ``tau``, None the default; ``step`` is called after each segment."""
        if not self.dense:
            self.attend_densely()
        config = replace(self.config.with_tau(tau), dense_up_to=0, dense_last=0)
        dense_from = self.config.dense_from(self.geometry)
        found = []  # four sums [batch, heads] of each segment
        for n, dense in zip(self.segments, self.dense, strict=True):
            o, stats = self._attend(n, config if n < dense_from else config.with_tau(0.0))
            exact = dense.astype(np.float64)
            all_pairs = float(stats.geometry.causal_pairs())
            computed = to_host(stats.density_per_head).astype(np.float64) * all_pairs
            found.append(
                (
                    np.square(o.astype(np.float64) - exact).sum(axis=(2, 3)),
                    np.square(exact).sum(axis=(2, 3)),
                    computed,
                    np.full(computed.shape, all_pairs),
                )
            )
            step(f"tau {tau_text(tau)}")
        difference, size, computed, pairs = (np.stack(x) for x in zip(*found, strict=True))  # [drawn, batch, heads]
        error, standard_error = _root(*strata.ratio(difference, size, self.strata))
        density, _ = strata.ratio(computed, pairs, self.strata)
        share, _ = strata.ratio(size, np.broadcast_to(size.sum((1, 2), keepdims=True), size.shape), self.strata)
        of_all = [x.sum(axis=(1, 2)) for x in (difference, size, computed, pairs)]  # [drawn]
        pooled_error, pooled_standard_error = _root(*strata.ratio(of_all[0], of_all[1], self.strata))
        pooled_density, _ = strata.ratio(of_all[2], of_all[3], self.strata)
        return ErrorEstimate(
            tau, error, standard_error, density, share, float(pooled_error), float(pooled_standard_error),
            float(pooled_density), self.segments, self.geometry.segments,
        )  # fmt: skip

    def _attend(self, n: int, config: S2OConfig) -> tuple[np.ndarray, Any]:
        """Segment ``n`` alone: its output [batch, heads, queries, head_dim] on the host, and the call's stats."""
        begin, end = self.geometry.queries(n)
        seen = end + self.geometry.offset if self.problem.is_causal else self.problem.seqlen_k
        q, k, v = self.arrays
        rows, keys = self._of_sequence(begin, end), self._of_sequence(0, seen)
        o, stats = s2o_attention(q[rows], k[keys], v[keys], config=config, return_stats=True, **self.options)
        return bhsd(to_host(o), self.layout), stats

    def _of_sequence(self, begin: int, end: int) -> tuple[Any, ...]:
        """An index of that part of the seqlen axis, with or without a batch axis."""
        behind = len(self.layout) - self.layout.index("S") - 1
        return (..., slice(begin, end), *(slice(None),) * behind)


def _root(share: np.ndarray, standard_error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The square root of a number, and its standard error."""
    root = np.sqrt(share)
    with np.errstate(divide="ignore", invalid="ignore"):
        return root, np.where(standard_error == 0, 0.0, standard_error / (2 * root))
