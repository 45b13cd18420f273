"""Heads that take turns where the lists of all of them together would take much memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays.arguments import describe
from ..methods.base import MethodConfig
from ..problem import cached_validate
from .run import parse_backend

__all__ = ["in_turns"]

LIST_BYTES = 4  # of an entry


def in_turns(
    attend: Callable[..., Any], arrays: tuple[Any, Any, Any], config: MethodConfig, is_causal: bool,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """``attend(q, k, v, **options)`` of some KV heads at a time, so that the lists of a turn are within the config's
    workspace_bytes, or of one KV head. Heads do not depend on each other: the same bits. None if all are within.

    ``options``: those of `sparse_attention`, without return_stats, as lists of a turn are gone after it.
    """
    from array_api_compat import array_namespace, device

    framework, infos = describe(**dict(zip("qkv", arrays, strict=True)))
    stream, out, layout = options["stream"], options["out"], options["layout"]
    backend = parse_backend(options["backend"], infos[0].device, stream)
    problem = cached_validate(
        tuple(x.shape for x in infos), tuple(x.dtype for x in infos), config.kernels_config(), backend, layout,
        is_causal, options["scale"], options["softcap"],
    )  # fmt: skip
    config.check(problem)
    if problem.empty:
        return None
    group = problem.heads // problem.kv_heads
    of_kv_head = LIST_BYTES * config.grid(problem).entries * problem.batch * group
    at_a_time = max(1, config.workspace_bytes // max(1, of_kv_head))
    if at_a_time >= problem.kv_heads:
        return None
    after: tuple[slice, ...] = (slice(None),) * (2 if layout == "BHSD" else 1)  # axes behind that of heads
    with framework.scope(
        infos[0].device, stream, arrays if out is None else (*arrays, out), host=backend == "numpy"
    ):
        q, k, v = (framework.describe(x).native for x in arrays)
        xp, into = array_namespace(q), out
        if out is None and framework.mutable:
            into = xp.empty(q.shape, dtype=q.dtype, device=device(q))
        outputs, sums = [], []
        for first in range(0, problem.kv_heads, at_a_time):
            end = min(first + at_a_time, problem.kv_heads)
            of_q, of_k = (..., slice(first * group, end * group), *after), (..., slice(first, end), *after)
            found = attend(
                q[of_q], k[of_k], v[of_k], **{**options, "stream": None, "out": None if into is None else into[of_q]}
            )
            o, *lse = found if isinstance(found, tuple) else (found,)
            outputs.append(o)
            sums += lse
        if into is None:
            into = xp.concat(outputs, axis=-1 - len(after))
        return (into, xp.concat(sums, axis=-2)) if sums else into
