"""S2O on real attention inputs against dense attention: density, error, time and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ..api.attention import s2o_attention
from ..arrays.frameworks import to_host
from ..plan import launch_plan
from ..reference import dense_attention
from ..spec import Geometry, S2OConfig, tau_text
from . import info, metrics
from .earlier_keys import EarlierKeys, segment_maps
from .finite import not_finite, not_finite_of
from .inputs import QKV, to_gpu
from .plot import check_picture, sweep_label
from .progress import Report

__all__ = ["CONFIG", "run", "table"]

# The library's defaults, but that S2O runs on short inputs too, which a GPU would attend densely.
CONFIG = S2OConfig(dense_up_to=0)

MAPS = 8  # heads that a picture has room for
LONG = 8192  # keys from which a call is longer than its launches, and S2O has something to leave out
SWEEP = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)


def run(
    qkv: QKV,
    config: S2OConfig = CONFIG,
    *,
    source: str = "the recorded trace",
    picture: str | None = "s2o_demo.png",
    head: int | None = None,
    names: Sequence[str] | None = None,
    progress: Report | None = None,
) -> dict[str, Any]:
    """S2O on ``qkv``, causal, on the GPU where one is usable and in NumPy otherwise.

    Returns what the command prints, as plain values: figures per head and over all, among them what of the earlier
    keys' softmax mass was left out (`earlier_keys`), times of a GPU in milliseconds (None without one), a sweep of tau,
    the picture's path (None without ``picture`` or matplotlib), and ``wrong``: in words, which arrays hold values that
    are not finite. ``head`` is the one to draw by position, by default 1. ``names``: what heads are called, by default
    0, 1, ...
    """
    q, k, v = (x[None] if x.ndim == 3 else x for x in qkv)
    if config.tau is None and config.error is None:
        config = config.with_tau(config.tau_of(k.shape[2]))
    if q.shape[0] != 1 or 0 in q.shape:
        raise ValueError(f"demo: q is {q.shape}; accepted: a batch of one, and at least one head and token")
    geometry = Geometry(q.shape[2], k.shape[2], config.segment, config.window, unit=config.unit)
    head, names = _check_head(head, q.shape[1]), names or [*map(str, range(q.shape[1]))]
    picture_problem = _check_picture(picture, geometry) if picture else None
    report = progress or (lambda *_: None)
    scale = 1 / math.sqrt(q.shape[3])
    problem = info.gpu_problem()
    is_number = isinstance(config.tau, float)
    of_sweep = {*SWEEP, config.tau} if isinstance(config.tau, float) else {*SWEEP}
    taus: list[Any] = [*sorted(of_sweep, reverse=True), *([] if is_number else [config.tau])]
    chosen = _stop({"tau": config.tau, "error": config.error})
    of_input = not_finite_of((q, k, v))
    steps = 4 + len(taus)

    report(0, steps, chosen)
    arrays = (q, k, v) if problem else to_gpu(QKV(q, k, v))
    call: Callable[..., Any] = lambda **options: s2o_attention(*arrays, scale=scale, **options)  # noqa: E731
    with np.errstate(invalid="ignore", over="ignore"):  # said in words below
        o, stats = call(config=config, return_stats=True)
        o = to_host(o)
        report(1, steps, "dense, float64")
        exact = dense_attention(q, k, v, scale=scale)[0]  # float64 [1, H, L, D]
    density = to_host(stats.density_per_head)[0]
    heads: list[dict[str, Any]] = [
        {**_errors(o[:, h], exact[:, h]), "head": h if name == str(h) else name, "density": float(density[h])}
        for h, name in enumerate(names)
    ]
    overall = _errors(o, exact) | {"density": stats.density}
    wrong = [f"the input {words}; outputs of it were not judged" for words in of_input]
    for name, x in {"dense attention's output": exact, f"S2O's output at {chosen}": o}.items():
        wrong += [] if of_input else not_finite(name, x)

    report(2, steps, "the earlier keys")
    views = []  # of the heads to draw
    drawn, shown = _drawn_segment(geometry), _shown_heads(head, q.shape[1])
    every = EarlierKeys()
    with np.errstate(invalid="ignore", over="ignore"):
        visited = to_host(stats.visited)
        for h, row in enumerate(heads):
            found = EarlierKeys()
            for view in segment_maps(q, k, v, config, visited, head=h, scale=scale):
                found = found.with_more(EarlierKeys.of(view))
                if view.segment == drawn and view.head in shown:
                    views.append(view)
            row |= found.to_dict()
            every = every.with_more(found)
    overall |= every.to_dict()

    sweep = []
    for step, tau in enumerate(taus):
        report(3 + step, steps, chosen if tau == config.tau else f"tau {tau:g}")
        point = {"tau": tau, "density": overall["density"], "rel_l2": overall["rel_l2"]}
        if tau != config.tau:
            with np.errstate(invalid="ignore", over="ignore"):
                o_tau, stats_tau = call(config=config, tau=tau, return_stats=True)
            o_tau = to_host(o_tau)
            wrong += [] if of_input else not_finite(f"S2O's output at tau {tau:g}", o_tau)
            point |= {"density": stats_tau.density, "rel_l2": metrics.rel_l2(o_tau, exact)}
        sweep.append(point)

    report(steps - 1, steps, "picture")
    if picture and wrong:
        picture_problem = "there are values that are not finite"
    path = picture if picture and not picture_problem else None
    if path:
        from . import plot

        points = sorted((plot.SweepPoint(**point) for point in sweep), key=lambda x: x.density)
        try:
            plot.draw(path, views, head, points, config, source, overall, names)
        except OSError as error:  # a full disk is no reason to lose what was found
            path, picture_problem = None, str(error)
    return {
        "ok": not wrong,
        "wrong": wrong,
        "source": source,
        "shapes": {"q": list(q.shape), "k": list(k.shape), "dtype": q.dtype.name},
        "config": {name: getattr(config, name) for name in config.__dataclass_fields__},
        "adds_tail": config.adds_tail,
        "backend": "numpy" if problem else "cupy",
        "gpu_problem": problem,
        "gpu": None if problem else _gpu_name(),
        "path": stats.path,
        "path_reason": stats.path_reason,
        "heads": heads,
        "overall": overall,
        "times_ms": None if problem else _gpu_times(call, arrays, config, scale),
        "sweep": sweep,
        "picture": path,
        "picture_problem": picture_problem,
    }


def table(found: dict[str, Any]) -> str:
    """:func:`run`'s answer as text for a terminal."""
    shapes, config, times = found["shapes"], found["config"], found["times_ms"]
    _, heads, seqlen_q, head_dim = shapes["q"]
    seqlen_k = shapes["k"][2]
    of_prompt = "" if seqlen_q == seqlen_k else f"the last {seqlen_q:,} queries of "
    lines = [
        f"S2O on {found['source']}: {heads} heads, {shapes['k'][1]} KV heads, {of_prompt}{seqlen_k:,} tokens, "
        f"head_dim {head_dim}, {shapes['dtype']}, causal",
        f"{_stop(config)}, segment {config['segment']}, units of {config['unit']}, tiles of {config['block_m']} "
        f"queries x {config['block_n']} keys; density = pairs computed / causal pairs; errors against dense in float64",
        *_unlike_the_defaults(config, seqlen_k, heads, head_dim),
        "",
        f"{'head':>6} {'density':>9} {'rel_l2':>9} {'cosine':>10} {'earlier keys: mass':>20} {'left out of it':>15}",
    ]
    for row in [*found["heads"], {"head": "all", **found["overall"]}]:
        lines.append(
            f"{row['head']:>6} {row['density']:>9.3f} {row['rel_l2']:>9.4f} {row['cosine']:>10.6f} "
            f"{row['earlier_mass']:>20.1%} {row['earlier_mass_left_out']:>15.1%}"
        )
    overall = found["overall"]
    rest = "estimates from a sample (tail)" if found["adds_tail"] else "does not count"
    width = 6 if all(isinstance(p["tau"], float | None) for p in found["sweep"]) else len("by head")
    lines += [
        "S2O chooses among the keys before each segment, which hold "
        f"{overall['earlier_mass']:.1%} of the softmax mass.",
        f"Of the pairs with them {overall['earlier_pairs_computed']:.1%} were computed; the others hold "
        f"{overall['earlier_mass_left_out']:.1%} of that mass, which S2O {rest}.",
        "",
        f"{'tau':>{width}} {'density':>9} {'rel_l2':>9}   (all heads)",
    ]
    for p in found["sweep"]:
        lines.append(f"{sweep_label(p['tau']):>{width}} {p['density']:>9.3f} {p['rel_l2']:>9.4f}")
    lines.append("")
    if found["backend"] == "cupy":
        lines += [
            f"Time on {found['gpu']}: S2O {times['s2o']:.3f} ms, dense {times['dense']:.3f} ms",
            f"(dense: {times['dense_by']}; medians of CUDA events"
            f"{'; launching is most of it at such a length' if seqlen_k < LONG else ''}).",
            f"Kernels: {found['path']}{', as ' + found['path_reason'] if found['path_reason'] else ''}.",
        ]
    else:
        lines.append(f"No GPU used: {found['gpu_problem']}. NumPy's reference ran; its time says nothing of a GPU's.")
    if seqlen_k < LONG:
        lines.append(
            "Savings grow with the context, and this one is short: `s2o demo retrieval`, which `make demo` puts in "
            ".venv/bin, shows one of 16,384 tokens."
        )
    if found["picture"]:
        lines.append(f"Picture: {found['picture']}")
    elif found["picture_problem"]:
        lines.append(f"No picture: {found['picture_problem']}")
    lines += [f"WRONG: {words}" for words in found["wrong"]]
    return "\n".join(lines)


def _stop(config: dict[str, Any]) -> str:
    """What decides when a tile of queries stops, in words."""
    if config["tau"] is None:
        return f"error {tau_text(config['error'])}"
    return f"tau {tau_text(config['tau'])}"


def _unlike_the_defaults(config: dict[str, Any], seqlen_k: int, heads: int, head_dim: int) -> list[str]:
    """Lines of what differs from a plain call on such an input."""
    lines = []
    of_rank = S2OConfig(rank=config["rank"])
    of_segment = replace(of_rank, segment=config["segment"])
    default = {field.name: getattr(of_rank, field.name) for field in fields(S2OConfig)}
    default |= {"rank": S2OConfig().rank, "pooled_queries": of_segment.pooled_queries}
    of_error = config["error"] is not None
    default["tau"], default["dense_last"] = of_rank.tau_of(seqlen_k), of_rank.last_of_prompt(seqlen_k)
    default["tail"] = "first_order" if of_rank.adds_tail and not of_error else "none"
    default["tau"] = None if of_error else default["tau"]
    changed = [
        f"{name} {tau_text(config[name]) if name == 'tau' else config[name]} instead of {value}"
        for name, value in default.items()
        if name not in ("dense_up_to", "error") and config[name] not in (None, value)
    ]
    if config["error"] is not None:
        changed.append(f"error {tau_text(config['error'])} instead of a tau")
    if changed:
        lines.append(f"Not the library's defaults: {', '.join(changed)}")
    limit = launch_plan.dense_by_default(heads, head_dim)
    if config["dense_up_to"] == 0 and seqlen_k <= limit:
        lines.append(
            f"With {heads} heads of {head_dim} a GPU attends densely to up to {limit:,} keys by default, as an order "
            "would take longer than it saves; here S2O runs all the same, to show what it leaves out"
        )
    return lines


def _check_head(head: int | None, heads: int) -> int:
    """Which head to draw."""
    if head is None:
        return min(1, heads - 1)
    if not 0 <= head < heads:
        raise ValueError(f"demo: the head to draw is {head}; accepted: 0 to {heads - 1}, as q has {heads}")
    return head


def _shown_heads(head: int, heads: int) -> list[int]:
    """Which heads have a map in the picture: all, or so many, evenly spread, with the chosen one among them."""
    if heads <= MAPS:
        return list(range(heads))
    spread = [i * heads // MAPS for i in range(MAPS)]
    return sorted({*(x for x in spread if x != min(spread, key=lambda y: abs(y - head))), head})


def _drawn_segment(geometry: Geometry) -> int:
    """The last segment, or the one before if that has less than half its queries."""
    last = geometry.segments - 1
    first, end = geometry.queries(last)
    return last - (last > 0 and end - first < geometry.segment / 2)


def _check_picture(path: str, geometry: Geometry) -> str | None:
    """Why there will be no picture, in words for a reader; or an error if it was asked for as it cannot be."""
    if problem := check_picture(path, "demo"):
        return problem
    if geometry.candidates(_drawn_segment(geometry)) == 0:
        raise ValueError(
            f"demo: segment {geometry.segment} leaves no earlier keys to draw of {geometry.seqlen_k} tokens; "
            "accepted: a segment of at most half of them, or --no-picture"
        )
    return None


def _errors(o: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    return {"rel_l2": metrics.rel_l2(o, exact), "cosine": metrics.cosine(o, exact)}


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
        plain = replace(config.with_tau(0), dense_up_to=None)
        return (lambda: call(config=plain)), "this library with tau 0"
