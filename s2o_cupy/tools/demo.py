"""S2O on real attention inputs against dense attention: density, error, time and a picture."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..api.attention import s2o_attention
from ..arrays.frameworks import to_host
from ..reference import dense_attention
from ..spec import S2OConfig
from . import metrics
from .info import gpu_problem
from .inputs import QKV
from .progress import Report

__all__ = ["CONFIG", "run", "table"]

# Smaller segments and tiles than the library's defaults, which are meant for contexts of 8K and more.
CONFIG = S2OConfig(segment=256, tau=0.02, block_m=64, block_n=64, dense_up_to=0)

SWEEP = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002)


def run(
    qkv: QKV,
    config: S2OConfig = CONFIG,
    *,
    source: str = "the recorded trace",
    picture: str | None = "s2o_demo.png",
    head: int = 1,
    progress: Report | None = None,
) -> dict[str, Any]:
    """S2O on ``qkv``, causal, on the GPU where one is usable and in NumPy otherwise.

    Returns what the command prints, as plain values: figures per head and over all, times in
    milliseconds, a sweep of tau, and the picture's path (None without ``picture`` or matplotlib).
    """
    q, k, v = (x[None] if x.ndim == 3 else x for x in qkv)
    if q.shape[0] != 1 or 0 in q.shape:
        raise ValueError(f"demo: q is {q.shape}; accepted: a batch of one, and at least one head and token")
    if head < 0:
        raise ValueError(f"demo: the head to draw is {head}; accepted: 0 or more (the last one if there are fewer)")
    head = min(head, q.shape[1] - 1)
    report = progress or (lambda *_: None)
    scale = 1 / math.sqrt(q.shape[3])
    problem = gpu_problem()
    steps = 3 + len(SWEEP)

    report(0, steps, "dense, float64")
    began = time.perf_counter()
    exact = dense_attention(q, k, v, scale=scale)[0]  # float64 [1, H, L, D]
    numpy_dense = (time.perf_counter() - began) * 1e3

    report(1, steps, "S2O")
    arrays = (q, k, v) if problem else _to_gpu(q, k, v)
    call: Callable[..., Any] = lambda **options: s2o_attention(*arrays, scale=scale, **options)  # noqa: E731
    began = time.perf_counter()
    o, stats = call(config=config, return_stats=True)
    times = {"s2o": (time.perf_counter() - began) * 1e3, "dense": numpy_dense, "dense_by": "NumPy, float64"}
    if not problem:
        times = _gpu_times(call, arrays, config, scale)
    o = to_host(o)
    density = to_host(stats.density_per_head)[0]
    heads = [_errors(o[:, h], exact[:, h]) | {"head": h, "density": float(density[h])} for h in range(q.shape[1])]

    sweep = []
    for step, tau in enumerate(sorted({*SWEEP, config.tau}, reverse=True)):
        report(2 + step, steps, f"tau {tau:g}")
        o_tau, stats_tau = call(config=config, tau=tau, return_stats=True)
        sweep.append({"tau": tau, "density": stats_tau.density, "rel_l2": metrics.rel_l2(to_host(o_tau), exact)})

    report(steps - 1, steps, "picture")
    drawn = _draw(picture, QKV(q, k, v), config, sweep, head, scale, source) if picture else None
    return {
        "source": source,
        "shapes": {"q": list(q.shape), "k": list(k.shape), "dtype": q.dtype.name},
        "config": {name: getattr(config, name) for name in config.__dataclass_fields__},
        "backend": "numpy" if problem else "cupy",
        "gpu_problem": problem,
        "gpu": None if problem else _gpu_name(),
        "path": stats.path,
        "path_reason": stats.path_reason,
        "heads": heads,
        "overall": _errors(o, exact) | {"density": stats.density},
        "times_ms": times,
        "sweep": sweep,
        "picture": drawn,
        "picture_problem": "it needs matplotlib (pip install matplotlib)" if picture and not drawn else None,
    }


def table(found: dict[str, Any]) -> str:
    """:func:`run`'s answer as text for a terminal."""
    shapes, config, times = found["shapes"], found["config"], found["times_ms"]
    _, heads, length, head_dim = shapes["q"]
    lines = [
        f"S2O on {found['source']}: {heads} heads, {shapes['k'][1]} KV heads, {length:,} tokens, "
        f"head_dim {head_dim}, {shapes['dtype']}, causal",
        f"tau {config['tau']:g}, segment {config['segment']}, tiles of {config['block_m']} queries x "
        f"{config['block_n']} keys; density = pairs computed / causal pairs; errors against dense in float64",
        "",
        f"{'head':>6} {'density':>9} {'rel_l2':>9} {'cosine':>10}",
    ]
    for row in [*found["heads"], {"head": "all", **found["overall"]}]:
        lines.append(f"{row['head']:>6} {row['density']:>9.3f} {row['rel_l2']:>9.4f} {row['cosine']:>10.6f}")
    lines += ["", f"{'tau':>6} {'density':>9} {'rel_l2':>9}   (all heads)"]
    lines += [f"{p['tau']:>6g} {p['density']:>9.3f} {p['rel_l2']:>9.4f}" for p in found["sweep"]]
    lines.append("")
    if found["backend"] == "cupy":
        lines += [
            f"Time on {found['gpu']}: S2O {times['s2o']:.3f} ms, dense {times['dense']:.3f} ms",
            f"(dense: {times['dense_by']}; medians of CUDA events; launching is most of it at such a length).",
            f"Kernels: {found['path']}{', as ' + found['path_reason'] if found['path_reason'] else ''}.",
        ]
    else:
        lines += [
            f"No GPU used: {found['gpu_problem']}.",
            f"NumPy on the CPU took {times['s2o']:.0f} ms for S2O, {times['dense']:.0f} ms for dense in float64. "
            "These times say nothing of the GPU.",
        ]
    lines.append("Savings grow with the context: a short one has few keys that can be left out.")
    if found["picture"]:
        lines.append(f"Picture: {found['picture']}")
    elif found["picture_problem"]:
        lines.append(f"No picture: {found['picture_problem']}")
    return "\n".join(lines)


def _errors(o: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    return {"rel_l2": metrics.rel_l2(o, exact), "cosine": metrics.cosine(o, exact)}


def _to_gpu(*arrays: np.ndarray) -> tuple[Any, ...]:
    import cupy

    return tuple(cupy.asarray(x) for x in arrays)


def _gpu_name() -> str:
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()


def _gpu_times(call: Callable[..., Any], arrays: tuple[Any, ...], config: S2OConfig, scale: float) -> dict[str, Any]:
    """Milliseconds by CUDA events: median of 50 runs after warming up."""
    from cupyx.profiler import benchmark

    def median(function: Callable[[], Any]) -> float:
        return float(np.median(benchmark(function, n_warmup=5, n_repeat=50).gpu_times)) * 1e3

    dense, by = _dense_on_gpu(call, arrays, config, scale)
    return {"s2o": median(lambda: call(config=config)), "dense": median(dense), "dense_by": by}


def _dense_on_gpu(
    call: Callable[..., Any], arrays: tuple[Any, ...], config: S2OConfig, scale: float
) -> tuple[Callable[[], Any], str]:
    """torch's dense attention where PyTorch can use the GPU, else S2O with tau 0."""
    try:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        if not torch.cuda.is_available():
            raise ImportError("this PyTorch has no CUDA")
        q, k, v = (torch.from_dlpack(x) for x in arrays)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        dense = lambda: scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)  # noqa: E731
        # torch and CuPy are both on the default stream, where the events are recorded.
        return dense, f"scaled_dot_product_attention of torch {torch.__version__}"
    except Exception:  # PyTorch is only to compare with: any trouble with it means the other way
        return (lambda: call(config=config, tau=0)), "this library with tau 0"


def _draw(
    path: str,
    qkv: QKV,
    config: S2OConfig,
    sweep: list[dict[str, float]],
    head: int,
    scale: float,
    source: str,
) -> str | None:
    """Write the picture of ``head``'s last full segment; None without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    from . import plot

    segment = max(qkv.q.shape[2] // config.segment - 1, 0)
    view = plot.segment_map(*qkv, config, head=head, segment=segment, scale=scale)
    if not view.mass.size:
        raise ValueError(
            f"demo: segment {config.segment} leaves no earlier keys to draw of {qkv.q.shape[2]} tokens; "
            "accepted: a segment of at most half of them, or --no-picture"
        )
    plot.draw(path, view, [plot.SweepPoint(**point) for point in sweep], config, source)
    return path
