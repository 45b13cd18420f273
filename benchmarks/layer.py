"""S2O in one layer of a large model: a Llama layer with random weights, by default of Llama 3.1 8B, on one GPU.

    python benchmarks/layer.py --layer 4096x32x8 --input trace.npz --lengths 131072 --json layer.json

Random weights make no attention worth measuring, so the layer attends with q, k and v of --input; what the layer costs
without attention, what attention costs alone and what both cost together are timed each.

Attention is dense (transformers' "sdpa", held to one of PyTorch's kernels) or S2O, configured by --base and by every
--set. Ratios are to the first of --baselines. Needs PyTorch with CUDA, CuPy, transformers. For the loss of a whole
model see model.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import _common
import _exact
import _kinds
import _sources
from _kinds import Kind, attention, described, kinds, told

from s2o_cupy.methods import sparse_attention
from s2o_cupy.tools.progress import Report, progress

Row = dict[str, Any]
COLUMNS: list[_common.Column] = [
    ("tokens", "length", ",d"),
    ("attention", "attention", "s"),
    ("configuration", "config", "s"),
    ("density", "density", ".4f"),
    ("rel_l2", "rel_l2", ".5f"),
    ("attention ms", "attention_ms", ".2f"),
    ("rest ms", "rest_ms", ".2f"),
    ("layer ms", "layer_ms", ".2f"),
    ("layer ratio", "x_layer", ".3f"),
    ("attention ratio", "x_attention", ".3f"),
    ("peak GiB", "peak_gib", ".2f"),
]


def measure_layer(args: argparse.Namespace, layer: Any, qkv: Sequence[Any], exact: Any, kind: Kind) -> Row:
    from _small_llama import hooked, instead

    length = qkv[0].shape[2]
    row: Row = {"length": length, **described(kind, length)}
    with attention(kind) as name:
        alone = partial(layer.attention, name, *qkv)
        row["attention_ms"] = _common.time_ms(alone, args.repeats)
        if exact is not None:
            row["rel_l2"] = _exact.pooled(_exact.sums(alone().transpose(1, 2), exact))["rel_l2"]
        if not isinstance(kind, str):
            row["density"] = sparse_attention(*qkv, config=kind, return_stats=True)[1].density
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
        for kind in kinds(args):
            step(f"{length:,}: {told(kind)}")
            rows.append(case.row() | sizes | measure_layer(args, layer, qkv, exact, kind) | {"rest_ms": rest_ms})
        yield compared(rows)


def compared(rows: list[Row]) -> list[Row]:
    """With ratios to the first row, a dense one."""
    for row in rows:
        row |= {f"x_{name}": row[f"{name}_ms"] / rows[0][f"{name}_ms"] for name in ("layer", "attention")}
    return rows


def run(args: argparse.Namespace, report: Report) -> list[Row]:
    import torch
    import transformers

    done = itertools.count()
    total = len(args.lengths) * (1 + len(kinds(args)))
    rows: list[Row] = []
    with torch.inference_mode():
        for found in run_layer(args, lambda what: report(next(done), total, what)):
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
    parser.add_argument(
        "--layer", type=layer_sizes, default=(4096, 32, 8), help="hidden x heads x kv_heads (default: 4096x32x8)"
    )
    parser.add_argument("--intermediate", type=int, default=14336, help="default: %(default)s")
    parser.add_argument("--input", default="mixture", help=f"{_sources.HELP} (default: %(default)s)")
    parser.add_argument("--error", action="store_true", help="compare attention with float32 (slow)")
    parser.add_argument("--lengths", type=_common.integers, default=[131072], help="default: 131072")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    _kinds.add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    _kinds.check(parser, args)
    if not _common.has_gpu():
        parser.error("needs an NVIDIA GPU, CuPy and PyTorch with CUDA")
    return args


def main() -> None:
    args = parse()
    with progress("layer") as report:
        rows = run(args, report)
    print(_common.table(rows, COLUMNS))


if __name__ == "__main__":
    main()
