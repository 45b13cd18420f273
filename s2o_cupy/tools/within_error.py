"""Attention whose error the caller names: each head with the largest tau that keeps to it on a sample of segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..api.attention import s2o_attention
from ..api.habits import answers_habits
from ..api.run import parse_config
from ..by_head import check_one_error
from ..errors import arguments_of
from ..spec import S2OConfig
from .inputs import QKV
from .sampled import Sample
from .tuning import TAUS, parse_taus

__all__ = ["WITHIN_TAUS", "attention_within"]

WITHIN_TAUS = TAUS


@answers_habits
@arguments_of("attention_within")
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
        rel_l2 against dense attention, ||o - dense|| / ||dense||, of each head. Between 0 and 1.
    config : S2OConfig, optional
        All but tau and error, which are not looked at.
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
    `S2OConfig` takes an error itself, with which a call does not wait (docs/tuning.md).

    Examples
    --------
    >>> from s2o_cupy import S2OConfig
    >>> from s2o_cupy.tools import attention_within, inputs
    >>> q, k, v = inputs.builtin("slash", length=1024, head_dim=32)
    >>> o, taus = attention_within(q, k, v, 0.05, config=S2OConfig(block_n=64), segments=4)
    >>> o.shape, taus.shape
    ((1, 4, 1024, 32), (4,))
    """
    error = check_one_error("error", error, "attention_within")
    function = "attention_within"
    grid, config = parse_taus(function, taus), parse_config(config, None, function).with_tau(0.0)
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "softcap": softcap, "layout": layout}
    sample = Sample(QKV(q, k, v), config, segments=segments, seed=seed, function=function, **options)
    found = np.zeros((sample.problem.batch, sample.problem.heads))
    for tau in grid:  # the largest first
        open_heads = found == 0
        if not open_heads.any():
            break
        found[open_heads & (sample.estimate(tau).error <= error)] = tau
    of_heads = found.min(axis=0)
    return s2o_attention(q, k, v, config=config.with_tau(of_heads), **options), of_heads
