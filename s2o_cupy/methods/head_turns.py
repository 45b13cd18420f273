"""Heads that take turns where the lists of all of them together would take much memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..api.call import Call
from ..api.in_parts import Part, in_parts
from ..problem import cached_validate
from .base import MethodConfig

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
    call = Call(dict(zip("qkv", arrays, strict=True)), options["backend"], options["stream"], options["out"])
    infos, layout = call.infos, options["layout"]
    problem = cached_validate(
        tuple(x.shape for x in infos), tuple(x.dtype for x in infos), config.of_pass, call.backend, layout,
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

    def part(first: int) -> Part:
        end = min(first + at_a_time, problem.kv_heads)
        of_q, of_k = (..., slice(first * group, end * group), *after), (..., slice(first, end), *after)

        def attend_heads(natives: Sequence[Any], out: Any) -> Any:
            q, k, v = natives
            return attend(q[of_q], k[of_k], v[of_k], **{**options, "stream": None, "out": out})

        return Part(of_q, (..., of_q[1], slice(None)), attend_heads)

    lse_shape = (problem.batch, problem.heads, problem.seqlen_q)[4 - len(infos[0].shape) :]
    o, lse, _ = in_parts(
        call, list(map(part, range(0, problem.kv_heads, at_a_time))), lse_shape if options["return_lse"] else None,
        axis=(-1 - len(after), -2),
    )  # fmt: skip
    return o if lse is None else (o, lse)
