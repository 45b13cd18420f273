"""S2O in a model: loss and prefill time of a small trained Llama, or the time of one layer of a large one, on one GPU.

    python benchmarks/model.py --weights llama.npz --tokens ids.npy --loader llama.py --json model.json
    python benchmarks/model.py --layer 4096x32x8 --input trace.npz --lengths 131072 --json layer.json

With --weights: loss in nats per token, its difference to dense attention, and time of the prefill (with a KV cache,
up to the logits of the last token), of which attention is what CUDA events around transformers' attention function
say. With --layer (hidden size x heads x KV heads): a Llama layer with random weights, by default of Llama 3.1 8B.
Random weights make no attention worth measuring, so the layer attends with q, k and v of --input; what the layer costs
without attention, what attention costs alone and what both cost together are timed each.

Attention is dense (transformers' "sdpa", held to one of PyTorch's kernels) or S2O (the default configuration, then
every one of --orders and --taus). Ratios are to the first of --baselines. Needs PyTorch with CUDA, CuPy, transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import _baselines
import _common
import _exact
import _sources
import numpy as np

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.tools.progress import Report, progress

Row = dict[str, Any]
WHERE: list[_common.Column] = [
    ("tokens", "length", ",d"),
    ("attention", "attention", "s"),
    ("order", "order", "s"),
    ("tau", "tau", "g"),
    ("density", "density", ".4f"),
]
MODEL: list[_common.Column] = [
    *WHERE,
    ("nats / token", "loss", ".5f"),
    ("to dense", "loss_difference", "+.5f"),
    ("loader's own", "loader_loss", ".5f"),
    ("prefill ms", "prefill_ms", ".2f"),
    ("attention ms", "attention_ms", ".2f"),
    ("rest ms", "rest_ms", ".2f"),
    ("prefill ratio", "x_prefill", ".3f"),
    ("attention ratio", "x_attention", ".3f"),
    ("peak GiB", "peak_gib", ".2f"),
]
LAYER: list[_common.Column] = [
    *WHERE,
    ("rel_l2", "rel_l2", ".5f"),
    ("attention ms", "attention_ms", ".2f"),
    ("rest ms", "rest_ms", ".2f"),
    ("layer ms", "layer_ms", ".2f"),
    ("layer ratio", "x_layer", ".3f"),
    ("attention ratio", "x_attention", ".3f"),
    ("peak GiB", "peak_gib", ".2f"),
]


# ---------------------------------------------------------------- kinds of attention


def configs(args: argparse.Namespace) -> list[S2OConfig]:
    """The default configuration first, each once."""
    chosen = (_common.config_of(args, order, tau=tau) for order in args.orders for tau in args.taus)
    return list(dict.fromkeys([S2OConfig(), *chosen]))


@contextlib.contextmanager
def attention(kind: str | S2OConfig) -> Iterator[str]:
    """transformers' name for a baseline or for S2O under a configuration, which is what runs inside."""
    if isinstance(kind, str):
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel(_baselines.sdpa_backends()[kind]):
            yield "sdpa"
        return
    from s2o_cupy.integrations.transformers import register

    s2o = register("s2o", kind, min_seqlen=0)
    yield "s2o"
    if set(s2o.calls) - {"s2o"}:
        raise RuntimeError(f"S2O did not run throughout, so these are not its figures: {dict(s2o.calls)}")


def described(kind: str | S2OConfig) -> Row:
    if isinstance(kind, str):
        return {"attention": kind}
    return {"attention": "s2o", **_common.describe(kind), "default": kind == S2OConfig()}


def compared(rows: list[Row], columns: Sequence[str]) -> list[Row]:
    """With ratios to the first row, a dense one."""
    for row in rows:
        row |= {f"x_{name}": row[f"{name}_ms"] / rows[0][f"{name}_ms"] for name in columns}
    return rows


# ---------------------------------------------------------------- the model


def prefill(model: Any, ids: Any) -> Any:
    return model(ids[None], use_cache=True, logits_to_keep=1).logits


def attention_ms(run: Callable[[], Any], name: str, repeats: int) -> float:
    """Median over runs of the milliseconds that all calls of an attention function took together."""
    import torch
    from _small_llama import hooked

    spans: list[tuple[Any, Any]] = []

    def timed(function: Any, *args: Any, **options: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = function(*args, **options)
        end.record()
        spans.append((begin, end))
        return out

    totals = []
    with hooked(name, timed):
        for _ in range(repeats):
            spans.clear()
            run()
            torch.cuda.synchronize()
            totals.append(sum(begin.elapsed_time(end) for begin, end in spans))
    return float(np.median(totals))


def density(run: Callable[[], Any], name: str, config: S2OConfig) -> float:
    """Mean over the calls of a run."""
    from _small_llama import hooked

    found: list[float] = []

    def observed(function: Any, module: Any, q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
        found.append(s2o_attention(q, k, v, config=config, return_stats=True)[1].density)
        return function(module, q, k, v, *args, **options)

    with hooked(name, observed):
        run()
    return float(np.mean(found))


def measure_model(args: argparse.Namespace, model: Any, ids: Any, targets: Any, kind: str | S2OConfig) -> Row:
    from _small_llama import mean_loss

    run = partial(prefill, model, ids)
    with attention(kind) as name:
        model.set_attn_implementation(name)
        row = {"length": len(ids), **described(kind), "loss": mean_loss(model, ids, targets)}
        if isinstance(kind, S2OConfig):
            row["density"] = density(run, name, kind)
        row["prefill_ms"] = _common.time_ms(run, args.repeats)
        row["attention_ms"] = attention_ms(run, name, args.repeats)
        row["rest_ms"] = row["prefill_ms"] - row["attention_ms"]
        row["peak_gib"] = _common.peak_gib(run)
    return row


def run_model(args: argparse.Namespace, step: Callable[[str], None], device: str = "cuda") -> Iterator[list[Row]]:
    """The rows of each length."""
    import _small_llama

    module = _sources.module_of(args.loader)
    weights = module.load(args.weights)
    model = _small_llama.load(module, weights)
    for length in args.lengths:
        ids, targets = _small_llama.tokens(args.tokens, length, device)
        rows: list[Row] = []
        for kind in (*args.baselines, *configs(args)):
            step(f"{length:,}: {told(kind)}")
            rows.append(measure_model(args, model, ids, targets, kind))
            rows[-1]["loss_difference"] = rows[-1]["loss"] - rows[0]["loss"]
        if hasattr(module, "nll"):
            rows[0]["loader_loss"] = float(module.nll(weights, ids, targets).double().mean())
        yield compared(rows, ("prefill", "attention"))


# ---------------------------------------------------------------- the layer


def measure_layer(args: argparse.Namespace, layer: Any, qkv: Sequence[Any], exact: Any, kind: str | S2OConfig) -> Row:
    from _small_llama import hooked, instead

    row: Row = {"length": qkv[0].shape[2], **described(kind)}
    with attention(kind) as name:
        alone = partial(layer.attention, name, *qkv)
        row["attention_ms"] = _common.time_ms(alone, args.repeats)
        if exact is not None:
            row["rel_l2"] = _exact.pooled(_exact.sums(alone().transpose(1, 2), exact))["rel_l2"]
        if isinstance(kind, S2OConfig):
            row["density"] = s2o_attention(*qkv, config=kind, return_stats=True)[1].density
        with hooked(name, instead(*qkv)):
            row["layer_ms"] = _common.time_ms(partial(layer, name), args.repeats)
            own = [*qkv, *([] if exact is None else [exact])]
            row["peak_gib"] = _common.peak_gib(partial(layer, name), own)
    return row


def run_layer(args: argparse.Namespace, step: Callable[[str], None], device: str = "cuda") -> Iterator[list[Row]]:
    """The rows of each length."""
    import torch
    from _small_llama import Layer, as_in_a_layer, hooked, skip

    hidden, heads, kv_heads = args.layer
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads}
    for length in args.lengths:
        step(f"{length:,}: input")
        case = _sources.Case(args.input, length)
        qkv: list[Any] = list(_sources.load(case, args.dtype, device, **sizes))
        found = {"heads": qkv[0].shape[1], "kv_heads": qkv[1].shape[1], "head_dim": qkv[0].shape[3]}
        if found != sizes:
            raise SystemExit(f"--layer: {args.input} has {found}; accepted: an input with {sizes}")
        exact = _exact.dense(*qkv) if args.error else None
        qkv = [as_in_a_layer(x) for x in qkv]
        layer = Layer(args.layer, args.intermediate, length, getattr(torch, args.dtype), device)
        with hooked("sdpa", skip):
            rest_ms = _common.time_ms(layer, args.repeats)
        rows: list[Row] = []
        for kind in (*args.baselines, *configs(args)):
            step(f"{length:,}: {told(kind)}")
            rows.append(case.row() | sizes | measure_layer(args, layer, qkv, exact, kind) | {"rest_ms": rest_ms})
        yield compared(rows, ("layer", "attention"))


# ---------------------------------------------------------------- both


def told(kind: str | S2OConfig) -> str:
    return kind if isinstance(kind, str) else f"S2O, {kind.rank}, tau {kind.tau:g}"


def run(args: argparse.Namespace, report: Report) -> list[Row]:
    import torch
    import transformers

    done = itertools.count()
    total = len(args.lengths) * (len(args.baselines) + len(configs(args)) + bool(args.layer))
    rows: list[Row] = []
    with torch.inference_mode():
        for found in (run_layer if args.layer else run_model)(args, lambda what: report(next(done), total, what)):
            rows += found
            # After each length, so that an interrupted run leaves what it has measured.
            result = _common.provenance() | {"transformers": transformers.__version__}
            _common.write_json(args.json, {**result, "settings": _common.settings(args, rows), "rows": rows})
    return rows


def layer_sizes(text: str) -> tuple[int, int, int]:
    """ "4096x32x8": hidden size, heads and KV heads."""
    hidden, heads, kv_heads = map(int, text.split("x"))
    if min(hidden, heads, kv_heads) < 1 or hidden % heads or heads % kv_heads:
        raise argparse.ArgumentTypeError(f"{text}: accepted: hidden x heads x kv_heads, each a multiple of the next")
    return hidden, heads, kv_heads


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="weights of a small Llama, as --loader reads them")
    parser.add_argument("--tokens", help="a .npy of token ids to read with it")
    parser.add_argument("--loader", help="a .py with load(path), HEADS, KV_HEADS and ROPE_THETA")
    parser.add_argument("--layer", type=layer_sizes, help="hidden x heads x kv_heads, such as 4096x32x8")
    parser.add_argument("--intermediate", type=int, default=14336, help="of --layer (default: %(default)s)")
    parser.add_argument("--input", default="mixture", help=f"of --layer: {_sources.HELP} (default: %(default)s)")
    parser.add_argument("--error", action="store_true", help="of --layer: compare attention with float32 (slow)")
    parser.add_argument("--lengths", type=_common.integers, help="default: 32768,131072; of --layer 131072")
    parser.add_argument("--taus", type=_common.numbers, default=[0.02, 0.01, 0.005, 0.002])
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16", help="of --layer")
    _common.add_s2o(parser)
    parser.add_argument("--baselines", type=_common.names, default=["cudnn", "flash2"], help="ratios: to the first")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    model = (args.weights, args.tokens, args.loader)
    if any(model) == bool(args.layer) or (any(model) and not all(model)):
        parser.error("accepted: --weights, --tokens and --loader, or --layer")
    if not args.baselines or set(args.baselines) - {"cudnn", "flash2"}:
        parser.error("--baselines: accepted: one or both of cudnn and flash2")
    args.lengths = args.lengths or ([131072] if args.layer else [32768, 131072])
    if not _common.has_gpu():
        parser.error("needs an NVIDIA GPU, CuPy and PyTorch with CUDA")
    return args


def main() -> None:
    args = parse()
    with progress("model") as report:
        rows = run(args, report)
    print(_common.table(rows, LAYER if args.layer else MODEL))


if __name__ == "__main__":
    main()
