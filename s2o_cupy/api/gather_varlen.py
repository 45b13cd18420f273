"""Packed sequences by schedules: each sequence where it lies, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.frameworks import to_host
from ..arrays.lengths import parse_starts
from ..arrays.torch_compile import outside_graphs
from ..errors import ArgumentTypeError, ArgumentValueError, arguments_of
from ..problem import OnlyLayout, Problem, check_flag
from ..schedules.check import check_lists
from ..schedules.schedule import Schedule
from ..spec import S2OConfig, check_path
from .call import Call
from .gather import check_causal, check_fits, gather_attention
from .habits import answers_habits
from .in_parts import Part, in_parts
from .lengths import check_lengths, check_packed_keys, check_packed_queries, check_packed_shapes
from .varlen import s2o_attention_varlen

__all__ = ["PackedTurns", "gather_attention_varlen"]


@outside_graphs
@answers_habits
@arguments_of("gather_attention_varlen")
def gather_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    schedules: Sequence[Schedule | None],
    cu_seqlens_k: Any = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool | None = None,
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
    path: str = "auto",
) -> Any:
    """`gather_attention` of several sequences of any lengths, packed one behind the other: a schedule for each.

    The same, bit for bit, as `gather_attention` on each sequence. Sequences take turns; neighbours without a schedule
    are dense and share a launch.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k : as in `s2o_attention_varlen`
    schedules : list or tuple, (batch,)
        Of each sequence a Schedule with a batch of 1 for its lengths, or None: dense attention.
    is_causal : bool, optional
        What the schedules say, and what dense sequences are; by default of these True.
    scale, softcap, return_lse, return_stats, out, stream, backend, path : as in `gather_attention`

    Returns
    -------
    o : array, like q
    lse : float32 array (heads, total_q), if ``return_lse``
    stats : list of GatherStats, and of S2OStats for dense sequences, if ``return_stats``
        Several results come as a tuple in this order.

    Raises
    ------
    As `gather_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import Schedule, gather_attention_varlen
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 300, 2, 64))
    >>> schedule = Schedule.from_block_mask(np.tri(2, 2, -1, dtype=bool)[None, None], segment=128)
    >>> gather_attention_varlen(q, k, v, [0, 256, 300], [schedule, None]).shape
    (300, 2, 64)
    """
    if not isinstance(schedules, (list, tuple)):
        raise ArgumentTypeError(f"schedules is a {type(schedules).__name__}; accepted: a list or tuple")
    for i, x in enumerate(schedules):
        if not (x is None or isinstance(x, Schedule)):
            raise ArgumentTypeError(f"schedules[{i}] is a {type(x).__name__}; accepted: a Schedule, or None")
    check_path(path)
    arrays = Call({"q": q, "k": k, "v": v}, backend, stream, out)
    of_all = True if is_causal is None else is_causal
    each = [of_all if x is None else x.form.is_causal for x in schedules]
    call = PackedTurns(
        arrays, cu_seqlens_q, cu_seqlens_k, of_all, scale, softcap, S2OConfig(tau=0, path=path), each
    )
    if len(schedules) != call.sequences:
        raise ArgumentValueError(
            f"schedules has {len(schedules)} elements; accepted: {call.sequences}, one for each sequence"
        )
    for i, x in enumerate(schedules):
        if x is not None:
            check_causal(x.form, is_causal, f"schedules[{i}]")
            check_fits(x.form, call.problem(i, x.form.is_causal), f"schedules[{i}]")
    if arrays.host:  # before any sequence is attended
        for i, x in enumerate(schedules):
            if x is not None:
                try:
                    check_lists(x.form, {name: to_host(array) for name, array in x.arrays.items()})
                except ArgumentValueError as error:
                    raise ArgumentValueError(f"schedules[{i}]: {error.args[0]}") from None

    def attend(first: int, end: int, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        schedule = schedules[first]
        if schedule is None:
            return call.dense(first, end, arrays, of_all, options)
        q, k, v = arrays
        return gather_attention(q, k, v, schedule, layout=OnlyLayout("BSHD"), is_causal=is_causal, path=path, **options)

    return call.run(attend, [x is None for x in schedules], return_lse, return_stats)


class PackedTurns:
    """Packed sequences that take turns: the arrays, where sequences begin, and results put together. ``config``: of
    those that S2O attends to, and whose path dense ones take. ``each_causal``: of sequences that are not all alike."""

    def __init__(
        self, call: Call, cu_seqlens_q: Any, cu_seqlens_k: Any, is_causal: Any, scale: Any, softcap: Any,
        config: S2OConfig, each_causal: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        self.call, self.path = call, config.path
        shapes, dtypes = tuple(tuple(x.shape) for x in call.infos), tuple(x.dtype for x in call.infos)
        check_packed_shapes(shapes, dtypes, config, call.backend, is_causal, scale, softcap)
        self.starts_q = parse_starts("cu_seqlens_q", cu_seqlens_q)
        self.starts_k = self.starts_q
        if cu_seqlens_k is not None:
            self.starts_k = parse_starts("cu_seqlens_k", cu_seqlens_k)
        check_packed_queries(self.starts_q, shapes[0])
        check_packed_keys(self.starts_q, self.starts_k, shapes[1][0])
        each = zip(itertools.pairwise(self.starts_q), itertools.pairwise(self.starts_k), strict=True)
        for i, ((begin_q, end_q), (begin_k, end_k)) in enumerate(each):
            check_lengths(i, end_q - begin_q, end_k - begin_k, each_causal[i] if i < len(each_causal) else is_causal)
        self.sequences = len(self.starts_q) - 1
        self.options = {"scale": scale, "softcap": softcap, "backend": call.backend}

    def problem(self, i: int, is_causal: bool) -> Problem:
        """Sizes of sequence ``i``."""
        (_, heads, head_dim), (_, kv_heads, _) = (x.shape for x in self.call.infos[:2])
        seqlen_q, seqlen_k = (starts[i + 1] - starts[i] for starts in (self.starts_q, self.starts_k))
        return Problem(1, heads, kv_heads, seqlen_q, seqlen_k, head_dim, self.call.infos[0].dtype, is_causal, 1.0)

    def dense(self, first: int, end: int, arrays: tuple[Any, ...], is_causal: bool, options: dict[str, Any]) -> Any:
        """Sequences ``first`` to ``end`` together."""
        starts = ([x - part[first] for x in part[first : end + 1]] for part in (self.starts_q, self.starts_k))
        config = S2OConfig(tau=0, path=self.path)
        return s2o_attention_varlen(*arrays, *starts, config=config, is_causal=is_causal, **options)

    def run(
        self, attend: Callable[..., Any], together: Sequence[bool], return_lse: bool, return_stats: bool
    ) -> Any:
        """``attend`` for each turn: a sequence, or neighbours that go ``together``."""
        return_lse, return_stats = check_flag("return_lse", return_lse), check_flag("return_stats", return_stats)
        options = {**self.options, "return_lse": return_lse, "return_stats": return_stats}

        def part(first: int, end: int) -> Part:
            rows = slice(self.starts_q[first], self.starts_q[end])
            keys = slice(self.starts_k[first], self.starts_k[end])

            def attend_turn(natives: Sequence[Any], out: Any) -> Any:
                q, k, v = natives
                return attend(first, end, (q[rows], k[keys], v[keys]), {**options, "out": out})

            return Part(rows, (slice(None), rows), attend_turn)

        total_q, heads, _ = self.call.infos[0].shape
        o, lse, last = in_parts(
            self.call, [part(*turn) for turn in self._turns(together)], (heads, total_q) if return_lse else None,
            axis=(0, -1),
        )  # fmt: skip
        results = [o]
        if return_lse:
            results.append(lse)
        if return_stats:
            results.append([x for found in last for x in (found if isinstance(found, list) else [found])])
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def _turns(together: Sequence[bool]) -> list[tuple[int, int]]:
        turns: list[tuple[int, int]] = []
        for i, joins in enumerate(together):
            if joins and turns and together[i - 1]:
                turns[-1] = (turns[-1][0], i + 1)
            else:
                turns.append((i, i + 1))
        return turns
