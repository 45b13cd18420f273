"""S2O and schedules: outputs and statistics of a call, written by the backend that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays.array_info import ArrayInfo
from ..arrays.frameworks.base import Framework, Output
from ..by_head import check_tau
from ..caches import remembered
from ..problem import check_flag
from ..schedules.schedule import Schedule
from ..schedules.stats import GatherStats
from ..spec import S2OConfig, not_a_config
from ..stats import NOTHING_RAN, Given, S2OStats
from . import on_gpu
from .batch import Batch
from .call import Call
from .results import Results
from .scales import Scales

__all__ = ["parse_config", "run"]

DEFAULT = S2OConfig()


def parse_config(config: Any, tau: Any, owner: str = "") -> S2OConfig:
    """The configuration of a call, with its own ``tau`` if it has one. ``owner``: of both, for errors."""
    if config is None:
        config = DEFAULT
    elif not isinstance(config, S2OConfig):
        raise not_a_config(config, owner)
    return config if tau is None else _with_tau(config, check_tau(tau, owner), config.given)


@remembered  # making a config anew, with its checks, would take 20 microseconds of each call
def _with_tau(config: S2OConfig, tau: float | tuple[float, ...], given: tuple[str, ...]) -> S2OConfig:
    """``given``: fields of ``config``, in which equal ones may differ."""
    return config.with_tau(tau)


def run(
    batch: Batch, call: Call, *, return_lse: bool, return_stats: bool, await_keys: Callable[[], None] | None = None,
    schedule: Schedule | None = None, scales: Scales | None = None, config: S2OConfig | None = None,
) -> Any:  # fmt: skip
    """Run ``batch`` on the inputs of ``call``: q, k and v and, of a paged call, the page table and arrays of its
    ``scales``, of `gather_attention` the arrays of its ``schedule``.

    ``await_keys``, for keys and values that are on their way, is called once, on the device and stream of the call,
    before anything reads keys or values before those of the queries (the last seqlen_q): on a GPU after pass 1 is
    launched, if that reads none of them. It is not called where there is nothing to compute.

    ``config``: the caller's own, which statistics have. That of ``batch`` may be an equal one, other fields of which
    were given.
    """
    framework = call.framework
    if return_lse is not False and return_lse is not True:
        return_lse = check_flag("return_lse", return_lse)
    if return_stats is not False and return_stats is not True:
        return_stats = check_flag("return_stats", return_stats)
    call.check_out(batch.whole.dtype)
    with call.scope():
        o = call.output(batch.whole.dtype)
        lse = call.result(batch.lse_shape, "float32") if return_lse else None
        visited: list[Output] | None = None
        if return_stats:
            visited = [call.result(shape, "int32") for shape in batch.visited_shapes]

        taus: Output | None = None
        if schedule is None and batch.config.error is not None:
            taus = call.result((batch.whole.batch, batch.whole.heads), "float32")

        ran = [NOTHING_RAN] * len(batch.parts)
        if batch.parts:
            native_lse = None if lse is None else lse.native
            found_taus = None if taus is None else taus.native
            to_visit = None if visited is None else [x.native for x in visited]
            if call.host:
                from . import on_host

                if await_keys is not None:
                    await_keys()
                ran = on_host.run(batch, call.on_host(), Results(o.native, native_lse, to_visit, found_taus), scales)
            else:
                batch, infos = _readable(batch, call)
                made = Results(call.where_output_is(o), native_lse, to_visit, found_taus)
                ran = on_gpu.run(batch, framework, infos, made, await_keys, scales)
        if batch.idle:
            _without_keys(batch, framework, o, lse, visited)
            if taus is not None and 0 not in taus.native.shape:
                framework.fill(taus.native, 0)
        results = [o.finish()]
        if lse is not None:
            results.append(lse.finish())
        if visited is not None and schedule is not None:
            path, path_reason, _ = ran[0] if ran else NOTHING_RAN
            found = visited[0].finish()
            tiles, skipped = (found, None) if schedule.form.value_skip is None else (found[0], found[1])
            results.append(GatherStats(tiles, schedule, batch.whole, path, path_reason, skipped))
        elif visited is not None:
            how = {part.first: x for part, x in zip(batch.parts, ran, strict=True)}
            of_taus = None if taus is None else taus.finish()
            given = Given.of((*call.inputs.values(),), batch.layout) if batch.alone and not batch.paged else None
            stats = [
                S2OStats(x.finish(), problem, config or batch.config, *how.get(i, NOTHING_RAN), of_taus, given)
                for i, (x, problem) in enumerate(zip(visited, batch.problems, strict=True))
            ]
            results.append(stats if batch.packed else stats[0])
    return results[0] if len(results) == 1 else tuple(results)


def _readable(batch: Batch, call: Call) -> tuple[Batch, tuple[ArrayInfo, ...]]:
    """What kernels on the current stream can read: rows with gaps between their elements are copied."""
    infos = call.exchanged()
    if not batch.is_copied:
        return batch, infos
    readable = list(infos)
    for i, copied in enumerate(batch.copied):
        if copied:
            readable[i] = call.copied(infos[i])
    return batch.of_forms(tuple([x.form for x in readable])), tuple(readable)


def _without_keys(
    batch: Batch, framework: Framework, o: Output, lse: Output | None, visited: list[Output] | None
) -> None:
    """No query, or no key: o = 0 and lse = -inf wherever there is a row; no kernel is launched."""

    def fill(native: Any, value: float) -> None:
        if 0 not in native.shape:
            framework.fill(native, value)

    for part in batch.idle:
        rows_of_o: slice = slice(None)
        rows_of_lse: slice | tuple[slice, slice] = rows_of_o
        if batch.packed:
            rows_of_o, rows_of_lse = part.rows_q, (slice(None), part.rows_q)
        elif not batch.alone:
            rows_of_o = rows_of_lse = part.sequences
        fill(o.native[rows_of_o], 0)
        if lse is not None:
            fill(lse.native[rows_of_lse], float("-inf"))
        if visited is not None:
            fill(visited[part.first if batch.packed else 0].native, 0)
