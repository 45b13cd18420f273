"""The public call: parse the arrays, check the problem, run a backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..arrays.arguments import check_out, common_framework
from ..arrays.frameworks.base import Framework
from ..arrays.lazy_cupy import import_cupy
from ..arrays.operand import address, operand
from ..arrays.place import Device
from ..plan.launches import KeySums
from ..problem import Problem, cached_validate
from ..spec import S2OConfig, check_tau
from ..stats import NOTHING_RAN, Ran, S2OStats

__all__ = ["s2o_attention"]

BACKENDS = ("auto", "cupy", "numpy")


def s2o_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    tau: float | None = None,
    config: S2OConfig | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    layout: str = "BHSD",
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """S2O attention: softmax attention that stops early along keys sorted by importance.

    Requirements
    ------------
    Arrays of one framework on one device: NumPy, CuPy, PyTorch or JAX, or any that implements
    ``__dlpack__``. On an NVIDIA GPU (compute capability 8.0 or newer) CuPy is needed and our CUDA
    kernels run; on the CPU the NumPy reference runs. Inference only: there is no backward.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim)
        Queries. The batch axis may be left out of q, k and v alike. head_dim is 1 to 256.
        float16 or bfloat16; on the CPU also float32 and float64.
    k, v : array, (batch, kv_heads, seqlen_k, head_dim)
        Keys and values of q's dtype; heads is a multiple of kv_heads (grouped-query attention).
        Any strides are read in place, but for a last axis that is not contiguous, which is copied.
    tau : float, optional
        Stop threshold >= 0, as a share of the softmax mass found so far; overrides ``config.tau``. 0 is dense
        attention.
    config : S2OConfig, optional
        How to order keys and when to stop. On the GPU block_m is 64 or 128, and block_n a multiple of
        64 up to 1024.
    scale : float, optional
        Finite factor of the scores; default 1 / sqrt(head_dim).
    softcap : float, default 0
        Scores become softcap * tanh(score / softcap), as in Gemma 2; 0 leaves them as they are. 0.001 to 1e6.
    is_causal : bool, default True
        Query i sees keys up to i + seqlen_k - seqlen_q (aligned bottom-right); seqlen_k >= seqlen_q.
    layout : {"BHSD", "BSHD"}, default "BHSD"
        Order of the axes of q, k, v and the output; "BSHD" is (batch, seqlen, heads, head_dim).
    return_lse : bool, default False
        Also return the log-sum-exp of each row's scores, capped ones with ``softcap``.
    return_stats : bool, default False
        Also return what was visited, and by which kernels.
    out : array, optional
        Where to write the output: as q in framework, shape, dtype and device, with a contiguous last
        axis, apart from q, k and v in memory. Not for JAX, whose arrays are immutable.
    stream : optional
        CUDA stream to run on: a CuPy or torch stream, an object with ``.ptr``, ``.cuda_stream`` or
        ``__cuda_stream__``, or an int handle. Default: the current stream of q's framework. The host
        waits for nothing, except with JAX, which has no public current stream.
    backend : {"auto", "cupy", "numpy"}, default "auto"
        "auto": by the device of the arrays. "numpy" on GPU arrays runs the reference on host copies.

    Returns
    -------
    o : array, like q
    lse : float32 array (batch, heads, seqlen_q), if ``return_lse``
        Natural logarithm; of the visited keys only. -inf, with o = 0, for a row that has no key.
    stats : S2OStats, if ``return_stats``
        Several results come as a tuple in this order.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted; the message names it, what came and what is accepted.
    S2OError
        The machine cannot run the call (no CuPy, too old a driver or card).

    Notes
    -----
    For inference prefill. Keys are ordered by the mean of a segment's queries, and rows of a tile stop
    together, so with tau > 0 which keys a row visits depends on *later queries* of its segment, and
    through the common stop on the keys that those see. Other segments, and with tau 0 every row, depend
    on nothing later. A model trained or decoded token by token sees slightly different rows.

    A call on GPU arrays can be captured into a CUDA graph, after one outside the capture has loaded the
    kernels. Results belong to the caller as ever; all other memory of the call belongs to the graph.

    Source: the S2O paper, Algorithm 1 (ordering), Algorithm 2 (dense pass over the segment) and
    Algorithm 3 (sparse pass with early stopping). The tile that triggers the stop is kept here.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import S2OConfig, s2o_attention
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 4, 512, 64), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 1, 2, 512, 64), dtype=np.float32)
    >>> o = s2o_attention(q, k, v)
    >>> o.shape, o.dtype.name
    ((1, 4, 512, 64), 'float32')

    With statistics; tau 0 visits everything:

    >>> config = S2OConfig(segment=128, block_m=64, block_n=64)
    >>> o, lse, stats = s2o_attention(q, k, v, tau=0, config=config, return_lse=True, return_stats=True)
    >>> lse.shape, stats.visited.shape, stats.density
    ((1, 4, 512), (1, 4, 4, 2), 1.0)
    """
    return attend(
        q, k, v, config=parse_config(config, tau), scale=scale, softcap=softcap, is_causal=is_causal,
        layout=layout, return_lse=return_lse, return_stats=return_stats, out=out, stream=stream, backend=backend,
    )  # fmt: skip


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    config: S2OConfig,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    layout: str = "BHSD",
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
    await_keys: Callable[[], None] | None = None,
    sums: KeySums | None = None,
) -> Any:
    """`s2o_attention`, while keys and values are on their way.

    ``await_keys`` is called once, on the device and stream of the call, before anything reads keys or values before
    those of the queries (the last seqlen_q): on a GPU after pass 1 is launched, if that reads none of them. It is not
    called where there is nothing to compute.

    ``sums``: on a GPU, of keys and values, for calls on one sequence to share. This one makes those that are missing.
    """
    framework, device = common_framework(q=q, k=k, v=v)
    backend = parse_backend(backend, device, stream)
    problem = cached_validate(
        tuple(map(framework.shape, (q, k, v))), tuple(map(framework.dtype, (q, k, v))), config, backend, layout,
        is_causal, scale, softcap,
    )  # fmt: skip
    host = backend == "numpy"
    run = _run_reference if host else _run_kernels
    return with_outputs(
        framework, device, {"q": q, "k": k, "v": v}, problem, config,
        functools.partial(run, framework, problem, config, layout, await_keys, sums),
        host=host, out=out, stream=stream, return_lse=return_lse, return_stats=return_stats,
    )  # fmt: skip


# run(natives, o, lse, visited): computes on native arrays and writes o, and lse and visited unless they are None.
Run = Callable[[tuple[Any, ...], Any, Any, Any], Ran]


def with_outputs(
    framework: Framework,
    device: Device,
    inputs: dict[str, Any],
    problem: Problem,
    config: S2OConfig,
    run: Run,
    *,
    host: bool,
    out: Any,
    stream: Any,
    return_lse: bool,
    return_stats: bool,
) -> Any:
    """The outputs that the caller wants, written by ``run`` on the device and stream of the call. ``inputs``: checked
    arrays of the caller, q first."""
    q = inputs["q"]
    shape = framework.shape(q)
    if out is not None:
        check_out(out, framework, inputs, shape, problem.dtype, device)
    arrays = (*inputs.values(),) if out is None else (*inputs.values(), out)
    with framework.scope(device, stream, arrays, host=host):
        if out is None:
            o = framework.output(shape, problem.dtype, q, host=host)
        else:
            o = framework.output_into(out, host=host)
        lse = None
        if return_lse:
            rows = (problem.batch, problem.heads, problem.seqlen_q)
            lse = framework.output(rows[-len(shape) + 1 :], "float32", q, host=host)

        visited = None
        if return_stats:
            visited = framework.output(problem.visited_shape(config), "int32", q, host=host)

        natives = [x.native if x is not None else None for x in (o, lse, visited)]
        ran = NOTHING_RAN
        if problem.empty or problem.seqlen_k == 0:
            without_keys(framework, *natives)
        else:
            given = [framework.contiguous_last_axis(framework.native(x, host=host)) for x in inputs.values()]
            ran = run(tuple(given), *natives)
        results = [o.finish()]
        if lse is not None:
            results.append(lse.finish())
        if return_stats:
            assert visited is not None
            results.append(S2OStats(visited.finish(), problem, config, *ran))
    return results[0] if len(results) == 1 else tuple(results)


def parse_config(config: Any, tau: Any) -> S2OConfig:
    if config is None:
        config = DEFAULT
    elif not isinstance(config, S2OConfig):
        raise TypeError(f"s2o_attention: config is a {type(config).__name__}; accepted: S2OConfig or None")
    return config if tau is None else _with_tau(config, check_tau(tau, "s2o_attention"))


DEFAULT = S2OConfig()


@functools.lru_cache(maxsize=256)  # making a config anew, with its checks, would take 20 microseconds of each call
def _with_tau(config: S2OConfig, tau: float) -> S2OConfig:
    return replace(config, tau=tau)


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


def _run_reference(
    framework: Framework, problem: Problem, config: S2OConfig, layout: str, await_keys: Callable[[], None] | None,
    sums: KeySums | None, natives: tuple[Any, ...], o: Any, lse: Any, visited: Any,
) -> Ran:  # fmt: skip
    from . import on_host as numpy_pipeline

    if await_keys is not None:
        await_keys()
    q, k, v, o = (bhsd(x, layout) for x in (*natives, o))
    lse = None if lse is None else lse.reshape(problem.batch, problem.heads, problem.seqlen_q)
    found = numpy_pipeline.run(q, k, v, o, lse, problem, config)
    if visited is not None:
        visited[...] = found
    return "numpy", None


def _run_kernels(
    framework: Framework, problem: Problem, config: S2OConfig, layout: str, await_keys: Callable[[], None] | None,
    sums: KeySums | None, natives: tuple[Any, ...], o: Any, lse: Any, visited: Any,
) -> Ran:  # fmt: skip
    import_cupy()
    from ..cuda import pipeline

    q, k, v = natives
    plan = pipeline.run(
        (operand(q, layout), operand(k, layout), operand(v, layout), operand(o, layout)),
        address(lse),
        address(visited),
        problem,
        config,
        stream=framework.stream(),
        memory=framework.memory(q) or pipeline.allocate,
        await_keys=await_keys,
        sums=sums,
    )
    return plan.path, plan.path_reason


def bhsd(x: Any, layout: str) -> Any:
    """A view [batch, heads, seqlen, head_dim] of an array in the caller's layout."""
    if x.ndim == 3:
        x = x[None]
    return x.transpose(0, 2, 1, 3) if layout == "BSHD" else x


def without_keys(framework: Framework, o: Any, lse: Any, visited: Any) -> None:
    """No query, or no key: o = 0 and lse = -inf wherever there is a row; no kernel is launched. Arrays are native."""
    for native, value in ((o, 0), (lse, float("-inf")), (visited, 0)):
        if native is not None and 0 not in native.shape:
            framework.fill(native, value)
