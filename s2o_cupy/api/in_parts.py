"""A call as several of parts of its arrays, one after the other, whose results go into one output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .call import Call

__all__ = ["Part", "in_parts"]


class Part(NamedTuple):
    of_o: Any  # index of its part of the output
    of_lse: Any  # and of lse
    # attend(arrays, out) -> o, and after it lse and what else is asked for. ``arrays``: natives of the whole call's.
    attend: Callable[[Sequence[Any], Any], Any]


def in_parts(
    call: Call, parts: Sequence[Part], lse_shape: tuple[int, ...] | None, axis: tuple[int, int]
) -> tuple[Any, Any, list[Any]]:
    """Output, lse (None without ``lse_shape``), and the last result of each part. ``axis`` of the output and of lse
    along which parts follow each other.

    ``out`` is checked as a whole before anything is launched: a part of it might be right where all of it is not.
    """
    from array_api_compat import array_namespace, device

    framework, out = call.framework, call.out
    call.check_out(call.infos[0].dtype)
    with call.scope():
        natives = [framework.describe(x).native for x in call.inputs.values()]
        q = natives[0]
        xp, where, mutable = array_namespace(q), device(q), framework.mutable
        make = lambda shape, dtype: xp.empty(shape, dtype=dtype, device=where) if mutable else None  # noqa: E731
        o = make(q.shape, q.dtype) if out is None else out
        lse = None if lse_shape is None else make(lse_shape, xp.float32)
        outputs, sums, last = [], [], []
        for part in parts:
            with framework.graphs_own(q, host=call.host):  # a part's lse is copied and forgotten
                found = part.attend(natives, None if o is None else o[part.of_o])
            found = found if isinstance(found, tuple) else (found,)
            outputs.append(found[0])
            last.append(found[-1])
            if lse is not None:
                lse[part.of_lse] = found[1]
            elif lse_shape is not None:
                sums.append(found[1])
        if o is None:
            o = xp.concat(outputs, axis=axis[0]) if outputs else q[:0]
        if lse is None and lse_shape is not None:
            lse = xp.concat(sums, axis=axis[1]) if sums else xp.zeros(lse_shape, dtype=xp.float32, device=where)
        return o, lse, last
