"""What a call on some arrays would be, before anything is computed."""

from __future__ import annotations

from typing import Any

from ..api.call import parse_backend
from ..arrays.arguments import describe
from ..problem import Problem, validate
from ..spec import Pass, S2OConfig

__all__ = ["problem_of"]


def problem_of(
    q: Any, k: Any, v: Any, config: S2OConfig | Pass, **options: Any
) -> tuple[Problem, str, tuple[Any, ...]]:
    """The problem of a call of `s2o_attention`, its backend and q, k and v as their framework has them (of a DLPack
    producer what can be sliced), or the call's error. ``options``: is_causal, scale, softcap and layout."""
    _, infos = describe({"q": q, "k": k, "v": v})
    backend = parse_backend("auto", infos[0].device, None)
    shapes, dtypes = [x.shape for x in infos], [x.dtype for x in infos]
    return validate(shapes, dtypes, config=config, backend=backend, **options), backend, tuple(x.native for x in infos)
