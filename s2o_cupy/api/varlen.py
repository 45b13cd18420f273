"""Packed sequences: read where they lie; short ones share a launch on a GPU, others run one after the other."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays.arguments import check_out, common_framework
from ..arrays.frameworks.base import Framework, Output
from ..arrays.lazy_cupy import import_cupy
from ..arrays.lengths import parse_integers
from ..arrays.operand import address, operand
from ..plan.launch_plan import is_dense
from ..plan.packed_table import PackedTable
from ..plan.rounds import MAX_GRID
from ..problem import MAX_SEQLEN, Problem, Shape, cached_validate
from ..spec import S2OConfig
from ..stats import NOTHING_RAN, Ran, S2OStats
from .attention import bhsd, parse_backend, parse_config, without_keys

__all__ = ["check_packed", "s2o_attention_varlen"]


def s2o_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    tau: float | None = None,
    config: S2OConfig | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """S2O attention of several sequences of any lengths that are packed one behind the other.

    The same, bit for bit, as :func:`s2o_cupy.s2o_attention` on each sequence. Nothing is copied or padded: sequence i
    is ``q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]`` with ``k[cu_seqlens_k[i]:cu_seqlens_k[i + 1]]``, where it lies.

    Parameters
    ----------
    q : array, (total_q, heads, head_dim)
        Frameworks, devices and dtypes are those of :func:`s2o_cupy.s2o_attention`.
    k, v : array, (total_k, kv_heads, head_dim)
    cu_seqlens_q : list, tuple, or int32 or int64 array, (batch + 1,)
        Where each sequence begins in q, and total_q: 0, then ascending. Equal neighbours are an empty sequence. Best
        on the host: an array on a GPU is copied there, for which the host waits, and while a CUDA graph is captured it
        is refused. A graph keeps the lengths that it was captured with.
    cu_seqlens_k : like cu_seqlens_q, optional
        The same for k and v; default ``cu_seqlens_q``.
    tau, config, scale, softcap, stream, backend
        As in :func:`s2o_cupy.s2o_attention`; the same for all sequences.
    is_causal : bool, default True
        Aligned bottom-right in each sequence, which then has at least as many keys as queries.
    return_lse : bool, default False
        Also return the log-sum-exp of each row's scores.
    return_stats : bool, default False
        Also return what was visited, and by which kernels.
    out : array, optional
        Where to write the output: like q, as in :func:`s2o_cupy.s2o_attention`.

    Returns
    -------
    o : array, like q
    lse : float32 array (heads, total_q), if ``return_lse``
        As flash-attn's functions for packed sequences return it. -inf, with o = 0, for a row that has no key.
    stats : list of S2OStats, one for each sequence, if ``return_stats``
        Several results come as a tuple in this order.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched. An argument is not accepted; the message names it, what came and what is accepted.
    S2OError
        The machine cannot run the call.

    Notes
    -----
    On a GPU all sequences that are attended densely (``S2OConfig.dense_up_to``: short ones) share one launch. Longer
    ones, which fill a GPU by themselves, take turns on one stream and in one workspace, sized to the largest need.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import s2o_attention, s2o_attention_varlen
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((500, 4, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 500, 2, 64), dtype=np.float32)
    >>> o, lse = s2o_attention_varlen(q, k, v, [0, 200, 500], return_lse=True)
    >>> o.shape, lse.shape
    ((500, 4, 64), (4, 500))
    >>> bool((o[200:] == s2o_attention(q[200:], k[200:], v[200:], layout="BSHD")).all())
    True
    """
    config = parse_config(config, tau)
    framework, device = common_framework(q=q, k=k, v=v)
    backend = parse_backend(backend, device, stream)
    shapes = tuple(map(framework.shape, (q, k, v)))
    dtypes = tuple(map(framework.dtype, (q, k, v)))
    base = check_packed(shapes, dtypes, config, backend, is_causal, scale, softcap)
    parse_starts = functools.partial(parse_integers, "s2o_attention_varlen", axis="batch + 1")
    starts_q = parse_starts("cu_seqlens_q", cu_seqlens_q)
    starts_k = None if cu_seqlens_k is None else parse_starts("cu_seqlens_k", cu_seqlens_k)
    batch = _split(base, shapes[0][0], shapes[1][0], starts_q, starts_k)
    if out is not None:
        check_out(out, framework, {"q": q, "k": k, "v": v}, shapes[0], base.dtype, device)

    host = backend == "numpy"
    arrays = (q, k, v) if out is None else (q, k, v, out)
    with framework.scope(device, stream, arrays, host=host):
        if out is None:
            o = framework.output(shapes[0], base.dtype, q, host=host)
        else:
            o = framework.output_into(out, host=host)
        lse = None
        if return_lse:
            lse = framework.output((base.heads, shapes[0][0]), "float32", q, host=host)
        visited: list[Output] | None = None
        if return_stats:
            shape = [x.problem.visited_shape(config) for x in batch.sequences]
            visited = [framework.output(x, "int32", q, host=host) for x in shape]

        ran: list[Ran] = [NOTHING_RAN] * len(batch.sequences)
        if batch.working:
            natives = [framework.contiguous_last_axis(framework.native(x, host=host)) for x in (q, k, v)]
            if host:
                _run_reference(natives, o, lse, visited, batch, config, ran)
            else:
                _run_kernels(framework, natives, o, lse, visited, batch, config, ran)
        for i in batch.idle:
            rows = batch.sequences[i].rows_q
            part_lse = None if lse is None else lse.native[:, rows]
            without_keys(framework, o.native[rows], part_lse, None if visited is None else visited[i].native)
        results = [o.finish()]
        if lse is not None:
            results.append(lse.finish())
        if visited is not None:
            each = zip(visited, batch.sequences, ran, strict=True)
            results.append([S2OStats(output.finish(), x.problem, config, *how) for output, x, how in each])
    return results[0] if len(results) == 1 else tuple(results)


# ---------------------------------------------------------------- what came


class Sequence(NamedTuple):
    """Rows of one sequence in the packed arrays, half-open, and its problem."""

    begin_q: int
    end_q: int
    begin_k: int
    end_k: int
    problem: Problem

    @property
    def idle(self) -> bool:
        """Without a query, or without a key."""
        return self.problem.empty or self.problem.seqlen_k == 0

    @property
    def rows_q(self) -> slice:
        return slice(self.begin_q, self.end_q)

    @property
    def rows_k(self) -> slice:
        return slice(self.begin_k, self.end_k)


class Batch:
    """The sequences of a call: one object for all calls with these lengths, which is what caches know it by."""

    def __init__(self, sequences: tuple[Sequence, ...]) -> None:
        self.sequences = sequences
        self.working = [i for i, x in enumerate(sequences) if not x.idle]
        self.idle = [i for i, x in enumerate(sequences) if x.idle]


def check_packed(
    shapes: tuple[Shape, ...], dtypes: tuple[str, ...], config: S2OConfig, backend: str, is_causal: Any, scale: Any,
    softcap: Any,
) -> Problem:  # fmt: skip
    """What all sequences have in common: a problem without queries and keys."""
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) != 3:
            heads = "heads" if name == "q" else "kv_heads"
            raise ValueError(
                f"s2o_attention_varlen: {name} has {len(shape)} axes, shape {tuple(shape)}; accepted: 3 axes "
                f"(total_{'q' if name == 'q' else 'k'}, {heads}, head_dim), sequences packed one behind the other"
            )
    if shapes[1] != shapes[2]:
        raise ValueError(
            f"s2o_attention_varlen: k is {tuple(shapes[1])} and v is {tuple(shapes[2])} as "
            "(total_k, kv_heads, head_dim); accepted: the same shape for both"
        )
    without_rows = tuple((0, *shape[1:]) for shape in shapes)
    return cached_validate(without_rows, dtypes, config, backend, "BSHD", is_causal, scale, softcap)


@functools.lru_cache(maxsize=64)  # the layers of a model share it
def _split(
    base: Problem, total_q: int, total_k: int, starts_q: tuple[int, ...], starts_k: tuple[int, ...] | None
) -> Batch:
    _check_starts("cu_seqlens_q", starts_q, "q", total_q)
    if starts_k is None:
        if total_k != total_q:
            raise ValueError(
                f"s2o_attention_varlen: cu_seqlens_k is None, but q has {total_q} rows and k {total_k}; "
                "accepted: None only for sequences with as many keys as queries"
            )
        starts_k = starts_q
    else:
        _check_starts("cu_seqlens_k", starts_k, "k", total_k)
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"s2o_attention_varlen: cu_seqlens_q has {len(starts_q)} entries, cu_seqlens_k {len(starts_k)}; "
            "accepted: batch + 1 in both"
        )
    problems: dict[tuple[int, int], Problem] = {}
    sequences = []
    rows = zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True)
    for i, ((begin_q, end_q), (begin_k, end_k)) in enumerate(rows):
        lengths = end_q - begin_q, end_k - begin_k
        if lengths not in problems:
            _check_lengths(i, *lengths, base.is_causal)
            problems[lengths] = replace(base, seqlen_q=lengths[0], seqlen_k=lengths[1])
        sequences.append(Sequence(begin_q, end_q, begin_k, end_k, problems[lengths]))
    return Batch(tuple(sequences))


def _check_starts(name: str, starts: tuple[int, ...], array: str, total: int) -> None:
    accepted = f"accepted: 0, then ascending to {total}, the rows of {array}"
    if not starts or starts[0] != 0:
        came = f"begins with {starts[0]}" if starts else "is empty"
        raise ValueError(f"s2o_attention_varlen: {name} {came}; {accepted}")
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin > end:
            raise ValueError(
                f"s2o_attention_varlen: {name} descends from {begin} to {end} at sequence {i}; {accepted}"
            )
    if starts[-1] != total:
        raise ValueError(f"s2o_attention_varlen: {name} ends with {starts[-1]}; {accepted}")


def _check_lengths(i: int, seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    longest = max(seqlen_q, seqlen_k)
    if longest > MAX_SEQLEN:
        raise ValueError(f"s2o_attention_varlen: sequence {i} has {longest} rows; accepted: up to {MAX_SEQLEN}")
    if is_causal and seqlen_q > seqlen_k:
        raise ValueError(
            f"s2o_attention_varlen: sequence {i} has {seqlen_q} queries and {seqlen_k} keys; accepted with "
            "is_causal=True: seqlen_k >= seqlen_q, as the causal mask is aligned bottom-right "
            "(the last query sees the last key)"
        )


# ---------------------------------------------------------------- the sequences


def _run_reference(
    natives: list[Any], o: Output, lse: Output | None, visited: list[Output] | None, batch: Batch, config: S2OConfig,
    ran: list[Ran],
) -> None:  # fmt: skip
    from . import on_host as numpy_pipeline

    q, k, v = natives
    for i in batch.working:
        x = batch.sequences[i]
        found = numpy_pipeline.run(
            bhsd(q[x.rows_q], "BSHD"),
            bhsd(k[x.rows_k], "BSHD"),
            bhsd(v[x.rows_k], "BSHD"),
            bhsd(o.native[x.rows_q], "BSHD"),
            None if lse is None else lse.native[None, :, x.rows_q],  # [1, heads, seqlen_q]
            x.problem,
            config,
        )
        ran[i] = ("numpy", None)
        if visited is not None:
            visited[i].native[...] = found


@functools.lru_cache(maxsize=64)
def _together(batch: Batch, config: S2OConfig) -> tuple[list[int], PackedTable | None, list[int]]:
    """Sequences that may share launches, their table, and the others. The first are those that are attended densely, if
    32 bits hold their rows and q tiles."""
    last, dense = batch.sequences[-1], {i for i in batch.working if is_dense(batch.sequences[i].problem, config)}
    if not dense or max(last.end_q * last.problem.heads, last.end_k) > MAX_GRID:
        return [], None, batch.working
    together = [batch.sequences[i] for i in sorted(dense)]
    table = PackedTable([(x.begin_q, x.begin_k) for x in together], [x.problem for x in together])
    return sorted(dense), table, [i for i in batch.working if i not in dense]


def _run_kernels(
    framework: Framework, natives: list[Any], o: Output, lse: Output | None, visited: list[Output] | None, batch: Batch,
    config: S2OConfig, ran: list[Ran],
) -> None:  # fmt: skip
    import_cupy()
    from ..cuda import pipeline

    q, k, v, out = (operand(x, "BSHD") for x in (*natives, o.native))
    first_lse = 0 if lse is None else address(lse.native)
    stream, memory = framework.stream(), framework.memory(natives[0]) or pipeline.allocate
    to_visit = [0] * len(batch.sequences) if visited is None else [address(output.native) for output in visited]
    together, table, in_turn = _together(batch, config)
    launch = None
    if table is not None:
        from ..cuda import packed

        if packed.fits((q, k, v, out), table):
            launch = packed.prepare((q, k, v, out), table, config)  # before any other is launched
        else:
            in_turn = batch.working
    if in_turn:
        calls = []
        for i in in_turn:
            x = batch.sequences[i]
            rows_q, rows_k = (x.begin_q, x.end_q), (x.begin_k, x.end_k)
            parts = (q.rows(*rows_q), k.rows(*rows_k), v.rows(*rows_k), out.rows(*rows_q))
            calls.append(pipeline.Call(parts, first_lse and first_lse + 4 * x.begin_q, to_visit[i], x.problem))
        lse_stride = out.shape[2]  # total_q
        plans = pipeline.run_in_turn(calls, config, lse_stride=lse_stride, stream=stream, memory=memory)
        for i, plan in zip(in_turn, plans, strict=True):
            ran[i] = (plan.path, plan.path_reason)
    if table is not None and launch is not None:
        launch.run((q, k, v, out), table, first_lse, stream=stream, memory=memory)
        for i in together:
            ran[i] = (launch.plan.path, launch.plan.path_reason)
            if to_visit[i]:
                pipeline.write_every_tile(to_visit[i], batch.sequences[i].problem, config, stream)
