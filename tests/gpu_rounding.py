"""How far what the kernels compute may be from attention in float64. Importing this needs no GPU and no CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from s2o_cupy.tools.diffing import UNIT, _lse_allowed, _score_error

__all__ = ["allowed_error", "assert_within_rounding", "beyond_rounding"]


def beyond_rounding(
    o: Any, lse: Any, exact: tuple[Any, Any], weight: Any, q: Any, k: Any, *, scale: float | None = None,
    softcap: float = 0.0, launches: int = 1,
) -> list[str]:  # fmt: skip
    """What of output ``o`` and ``lse`` of kernels is further than rounding from ``exact`` ones of the same q and k.

    ``weight``: the exact output for absolute values, sum p |v| / l. ``launches``: that took turns, each of which rounds
    the output.

    A score is off by head_dim roundings of its products' sum, and by tanh; a weight and the output are rounded once.
    """
    reach = _reach(q, k, scale, softcap)
    allowed = _allowed(str(q.dtype), weight, reach, launches)
    exact_o, exact_lse = exact
    none = np.isneginf(exact_lse)
    within = {
        "o": (np.abs(o.astype(np.float64) - exact_o) <= allowed).all(),
        "rows without keys": (np.isneginf(lse) == none).all(),
        "lse": (np.abs(lse[~none] - exact_lse[~none]) <= _lse_allowed(exact_lse, reach)[~none]).all(),
    }
    return [name for name, right in within.items() if not right]


def allowed_error(dtype: str, weight: Any, q: Any, k: Any, *, scale: float | None = None) -> Any:
    """How far an output in ``dtype`` may be from the exact one, by element; of q and k only the values count."""
    return _allowed(dtype, weight, _reach(q, k, scale, 0.0), 1)


def _reach(q: Any, k: Any, scale: float | None, softcap: float) -> Any:
    """Of a row's scores, [batch, heads, seqlen_q]."""
    head_dim, group = q.shape[-1], q.shape[1] // k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    return _score_error(q.astype(np.float64), k.astype(np.float64), group, head_dim, scale, softcap)


def _allowed(dtype: str, weight: Any, reach: Any, launches: int) -> Any:
    unit = UNIT[dtype]
    allowed = weight * ((1 + launches) * unit + np.expm1(2 * reach[..., None]) + 2.0**-18)
    return allowed + (2.0**-24 if unit == UNIT["float16"] else 1e-30)


def assert_within_rounding(*arguments: Any, **options: Any) -> None:
    assert beyond_rounding(*arguments, **options) == []
