"""Behind every door: the outputs that the caller wants, written by a backend on the device and stream of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays.arguments import check_out
from ..arrays.array_info import ArrayInfo, Device
from ..arrays.frameworks import framework_of
from ..arrays.frameworks.base import Framework, Output
from ..by_head import check_tau
from ..caches import remembered
from ..spec import S2OConfig, not_a_config
from ..stats import NOTHING_RAN, Given, S2OStats
from . import on_gpu
from .batch import Batch

__all__ = ["parse_backend", "parse_config", "run"]

BACKENDS = ("auto", "cupy", "numpy")
DEFAULT = S2OConfig()


def parse_config(config: Any, tau: Any, function: str = "s2o_attention") -> S2OConfig:
    """The configuration of a call of ``function``, with its own ``tau`` if it has one."""
    if config is None:
        config = DEFAULT
    elif not isinstance(config, S2OConfig):
        raise not_a_config(function, config)
    return config if tau is None else _with_tau(config, check_tau(tau, function))


@remembered  # making a config anew, with its checks, would take 20 microseconds of each call
def _with_tau(config: S2OConfig, tau: float | tuple[float, ...]) -> S2OConfig:
    return config.with_tau(tau)


def parse_backend(backend: Any, device: Device, stream: Any) -> str:
    """ "cupy" or "numpy"."""
    if backend not in BACKENDS:
        raise ValueError(f"s2o_attention: backend is {backend!r}; accepted: {', '.join(map(repr, BACKENDS))}")
    if device.kind not in ("cpu", "cuda"):
        raise ValueError(
            f"s2o_attention: q, k and v are on {device}; accepted: the CPU or an NVIDIA GPU (move them there)"
        )
    if backend == "cupy" and device.kind == "cpu":
        raise ValueError(
            's2o_attention: backend is "cupy", but q, k and v are on the CPU; '
            'move them to a GPU (cupy.asarray, .to("cuda"), jax.device_put), or pass backend="auto"'
        )
    if stream is not None and device.kind == "cpu":
        raise ValueError("s2o_attention: stream is given, but q, k and v are on the CPU; accepted: None")
    if backend == "auto":
        return "cupy" if device.kind == "cuda" else "numpy"
    return backend


def run(
    batch: Batch,
    framework: Framework,
    inputs: dict[str, Any],
    infos: tuple[ArrayInfo, ...],
    *,
    host: bool,
    out: Any,
    stream: Any,
    return_lse: bool,
    return_stats: bool,
    await_keys: Callable[[], None] | None = None,
) -> Any:
    """Run ``batch`` on ``inputs``, arrays of ``framework`` of which ``infos`` were found: q, k, v and, of a paged call,
    the page table, of `gather_attention` the arrays of its schedule."""
    q, of_q = inputs["q"], infos[0]
    arrays = (*inputs.values(),)
    out_info = None
    if out is not None:
        out_info = check_out(out, framework, dict(zip(inputs, infos, strict=True)), batch.whole.dtype)
        arrays = (*arrays, out)
    with framework.scope(of_q.device, stream, arrays, host=host):
        if out_info is None:
            o = framework.output(of_q.shape, batch.whole.dtype, q, host=host)
        else:
            o = framework.output_into(out, out_info, host=host)
        lse = framework.output(batch.lse_shape, "float32", q, host=host) if return_lse else None
        visited: list[Output] | None = None
        if return_stats:
            visited = [framework.output(shape, "int32", q, host=host) for shape in batch.visited_shapes]

        taus: Output | None = None
        if batch.config.error is not None:
            taus = framework.output((batch.whole.batch, batch.whole.heads), "float32", q, host=host)

        ran = [NOTHING_RAN] * len(batch.parts)
        if batch.parts:
            native_lse = None if lse is None else lse.native
            found_taus = None if taus is None else taus.native
            to_visit = None if visited is None else [x.native for x in visited]
            if host:
                from . import on_host

                if await_keys is not None:
                    await_keys()
                natives = [framework.on_host(x) for x in inputs.values()]
                ran = on_host.run(batch, natives, o.native, native_lse, to_visit, found_taus)
            else:
                batch, infos = _readable(batch, framework, inputs, infos, stream)
                written = o.native if out_info is None else out_info
                ran = on_gpu.run(
                    batch, framework, infos, written, native_lse, to_visit, await_keys=await_keys, taus=found_taus
                )
        if batch.idle:
            _without_keys(batch, framework, o, lse, visited)
            if taus is not None and 0 not in taus.native.shape:
                framework.fill(taus.native, 0)
        results = [o.finish()]
        if lse is not None:
            results.append(lse.finish())
        if visited is not None:
            how = {part.first: x for part, x in zip(batch.parts, ran, strict=True)}
            of_taus = None if taus is None else taus.finish()
            given = None
            if batch.alone and not batch.paged and batch.schedule is None:
                given = Given.of((*inputs.values(),), batch.layout)
            stats = [
                S2OStats(x.finish(), problem, batch.config, *how.get(i, NOTHING_RAN), of_taus, given)
                for i, (x, problem) in enumerate(zip(visited, batch.problems, strict=True))
            ]
            results.append(stats if batch.packed else stats[0])
    return results[0] if len(results) == 1 else tuple(results)


def _readable(
    batch: Batch, framework: Framework, inputs: dict[str, Any], infos: tuple[ArrayInfo, ...], stream: Any
) -> tuple[Batch, tuple[ArrayInfo, ...]]:
    """What kernels on the current stream can read: rows with gaps between their elements are copied."""
    if framework.imports and stream is not None:  # the exchange orders the producer's stream and this one
        infos = tuple([framework.describe(x) for x in inputs.values()])
    if not any(batch.copied):
        return batch, infos
    readable = list(infos)
    for i, copied in enumerate(batch.copied):
        if copied:
            with framework.graphs_own(infos[i].native):
                native = framework.contiguous(infos[i].native)
            readable[i] = framework_of("array", native).describe(native)
    return batch.of_forms(tuple(x.form for x in readable)), tuple(readable)


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
