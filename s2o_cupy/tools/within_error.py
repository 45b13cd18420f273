"""Attention whose error the caller names: each head with the largest tau that keeps to it on a sample of segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..api.attention import s2o_attention
from ..api.run import parse_config
from ..arrays.arguments import describe
from ..spec import S2OConfig
from .sampled import Sample
from .tune import TAUS, parse_taus, positive

__all__ = ["WITHIN_TAUS", "attention_within", "runs_of_heads"]

WITHIN_TAUS = (0.5, 0.2, *TAUS)


def attention_within(
    q: Any,
    k: Any,
    v: Any,
    error: float,
    *,
    config: S2OConfig | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    layout: str = "BHSD",
    segments: int = 32,
    seed: int = 0,
    taus: Sequence[float] = WITHIN_TAUS,
) -> tuple[Any, np.ndarray]:
    """`s2o_attention` with an error instead of a tau: each head takes the largest tau of a grid whose error, estimated
    as by `error_per_head`, is at most ``error``; dense attention where none is.

    Parameters
    ----------
    q, k, v : array
        As `s2o_attention` takes them, of any framework.
    error : float
        rel_l2 against dense attention, ||o - dense|| / ||dense||, of each head. Above 0.
    config : S2OConfig, optional
        All but tau, which is not looked at.
    is_causal, scale, softcap, layout, segments, seed : optional
        As of `error_per_head`.
    taus : sequence of float
        The grid, at least one number above 0. Heads come to lie between about 0.4 and 1 of ``error``, and further below
        where the largest tau errs less.

    Returns
    -------
    o : array, like q
    taus : float64 numpy.ndarray, (heads,)
        What each head ran with; of a batch the smallest that its sequences ask for.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted.

    Notes
    -----
    The estimate is of a sample, so the error of a head may be above ``error`` (docs/tuning.md says how far off it was
    found to be). The call waits for the device, and costs a dense call on the sampled segments and one at each tau that
    is tried beside the call itself: for many calls on inputs of one kind take the taus that one of them has found.
    Heads that share a tau share launches.

    Examples
    --------
    >>> from s2o_cupy import S2OConfig, attention_within, inputs
    >>> q, k, v = inputs.builtin("slash", length=1024, head_dim=32)
    >>> o, taus = attention_within(q, k, v, 0.05, config=S2OConfig(block_n=64), segments=4)
    >>> o.shape, taus.shape
    ((1, 4, 1024, 32), (4,))
    """
    error = positive("attention_within: error is", error, "a finite number above 0")
    grid, config = parse_taus("attention_within", taus), parse_config(config, None)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "softcap": softcap, "layout": layout}
    sample = Sample(q, k, v, config, segments=segments, seed=seed, **options)
    found = np.zeros((sample.problem.batch, sample.problem.heads))
    for tau in grid:  # the largest first
        open_heads = found == 0
        if not open_heads.any():
            break
        found[open_heads & (sample.estimate(tau).error <= error)] = tau
    of_heads = found.min(axis=0)
    return _by_head(q, k, v, config, of_heads, options), of_heads


def runs_of_heads(taus: Sequence[float], group: int) -> Iterator[tuple[slice, slice]]:
    """Query heads that one call can take, and their KV heads: neighbours of one KV head with one tau, or, where all
    query heads of neighbouring KV heads have it, all of these."""
    heads, begin = len(taus), 0
    while begin < heads:
        end = begin + 1
        while end < heads and taus[end] == taus[begin]:
            end += 1
        if begin % group or end - begin < group:  # within a KV head
            end = min(end, (begin // group + 1) * group)
        else:
            end -= end % group
        yield slice(begin, end), slice(begin // group, -(-end // group))
        begin = end


def _by_head(q: Any, k: Any, v: Any, config: S2OConfig, taus: np.ndarray, options: dict[str, Any]) -> Any:
    """A call for each run of heads."""
    from array_api_compat import array_namespace, is_jax_array

    _, infos = describe(q=q, k=k, v=v)
    q, k, v = (x.native for x in infos)  # of a DLPack producer what can be sliced
    layout = options["layout"]
    axis = q.ndim - len(layout) + layout.index("H")  # with or without a batch axis
    before = (slice(None),) * axis
    of_heads = lambda x, part: x[before + (part,)]  # noqa: E731, RUF005 - Python 3.10 has no star here
    xp, one_by_one = array_namespace(q), is_jax_array(q)  # whose arrays are not written
    o = None if one_by_one else xp.empty_like(q)
    parts = []
    for heads, kv_heads in runs_of_heads(taus.tolist(), q.shape[axis] // k.shape[axis]):
        part = of_heads(q, heads), of_heads(k, kv_heads), of_heads(v, kv_heads)
        into = None if one_by_one else of_heads(o, heads)
        found = s2o_attention(*part, config=replace(config, tau=float(taus[heads.start])), out=into, **options)
        parts.append(found)
    return xp.concat(parts, axis=axis) if one_by_one else o
