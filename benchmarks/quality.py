"""Density, error and time of s2o_attention over inputs, orders and taus, for each head and pooled.

    python benchmarks/quality.py --input trace --taus 0.02,0.01,0.005 --per-head
    python benchmarks/quality.py --input my_qkv.py --lengths 32768 --offsets 0,65536 --plot quality.png
    python benchmarks/quality.py --input patterns --lengths 16384 --orders mean,max:16:128 --json quality.json

Errors are against dense attention in float32: rel_l2 is ||o - exact|| / ||exact|| and rel_l1 is
sum |o - exact| / sum |exact|, over the whole output or one head's. On an NVIDIA GPU (PyTorch with CUDA, and CuPy)
the kernels run, and are timed with dense attention in the same run; elsewhere the NumPy reference runs, whose time
says nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import _baselines
import _common
import _draw
import _exact
import _sources

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.arrays.frameworks import to_host
from s2o_cupy.tools.layer_files import head_names
from s2o_cupy.tools.patterns import PATTERNS
from s2o_cupy.tools.progress import Report, progress

Row = dict[str, Any]
WHERE: list[_common.Column] = [
    ("input", "input", "s"),
    ("tokens", "length", ",d"),
    ("offset", "offset", ",d"),
    ("layers", "layers", "s"),
    ("order", "order", "s"),
    ("tau", "tau", "g"),
]
POOLED: list[_common.Column] = [
    *WHERE,
    ("density", "density", ".4f"),
    ("rel_l2", "rel_l2", ".5f"),
    ("rel_l1", "rel_l1", ".5f"),
    ("S2O ms", "s2o_ms", ".3f"),
    ("cuDNN ms", "cudnn_ms", ".3f"),
    ("S2O / cuDNN", "x_cudnn", ".3f"),
    ("NumPy s", "numpy_s", ".1f"),
]
PER_HEAD: list[_common.Column] = [
    *WHERE,
    ("head", "head", "s"),
    ("density", "density", ".4f"),
    ("rel_l2", "rel_l2", ".5f"),
    ("rel_l1", "rel_l1", ".5f"),
    ("estimate", "estimate", ".5f"),
]


def measure_case(args: argparse.Namespace, case: _sources.Case, step: Any) -> list[Row]:
    """A row for each order and tau."""
    step(f"{case}: exact")
    q, k, v = _sources.load(
        case, args.dtype, args.device,
        heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim, seed=args.seed,
    )  # fmt: skip
    exact = _exact.dense(q, k, v)
    common: Row = case.row() | {
        "length": k.shape[2], "heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[3],
        "head_names": head_names(case.input, q.shape[1]),
    }  # fmt: skip
    if args.device != "cpu":
        common |= baseline_times(args, q, k, v)
    rows = []
    for order, tau in itertools.product(args.orders, args.taus):
        config = _common.config_of(args, order, tau=tau, block_m=args.block_m, block_n=args.block_n)
        row = common | _common.describe(config)
        step(f"{case}: {row['order']}, tau {tau:g}")
        rows.append(row | measure(args, q, k, v, exact, config))
        rows[-1] |= _common.ratios(rows[-1], args.baselines)
    return rows


def baseline_times(args: argparse.Namespace, q: Any, k: Any, v: Any) -> Row:
    found = _baselines.available()
    return {
        f"{name}_ms": _common.time_ms(functools.partial(found[name], q, k, v), args.repeats)
        for name in args.baselines
        if name in found and q.shape[2] == k.shape[2]  # theirs is aligned top-left
    }


def measure(args: argparse.Namespace, q: Any, k: Any, v: Any, exact: Any, config: S2OConfig) -> Row:
    began = time.perf_counter()
    o, stats = s2o_attention(q, k, v, config=config, return_stats=True)
    seconds = time.perf_counter() - began
    sums = _exact.sums(o, exact)
    row: Row = {
        "density": stats.density,
        **_exact.pooled(sums),
        "head_density": to_host(stats.density_per_head).mean(0).tolist(),
        "head_rel_l2": _exact.rel_l2(sums.sum(1)).tolist(),
        "head_rel_l1": _exact.rel_l1(sums.sum(1)).tolist(),
    }
    if args.estimate:
        row["head_estimate"] = stats.error_per_head[0].tolist()
    if args.device == "cpu":
        return row | {"numpy_s": seconds}
    return row | {"s2o_ms": _common.time_ms(lambda: s2o_attention(q, k, v, config=config), args.repeats)}


def heads_of(row: Row) -> list[Row]:
    """A row for each head."""
    keys = ("density", "rel_l2", "rel_l1", *(["estimate"] if "head_estimate" in row else []))
    return [
        row | {"head": name, **dict(zip(keys, values, strict=True))}
        for name, *values in zip(row["head_names"], *(row[f"head_{key}"] for key in keys), strict=True)
    ]


def run(args: argparse.Namespace, report: Report) -> list[Row]:
    cases = _sources.cases(args.input, args.lengths, args.offsets, args.layers, 8192 if args.device != "cpu" else 2048)
    total, done = len(cases) * (1 + len(args.orders) * len(args.taus)), itertools.count()
    rows: list[Row] = []
    for case in cases:
        rows += measure_case(args, case, lambda what: report(next(done), total, what))
        # After each case, so that an interrupted run leaves what it has measured.
        _common.write_result(args, rows, args.device)
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", default=["trace"], help=f'{_sources.HELP}; "patterns" is all of them')
    parser.add_argument("--lengths", type=_common.integers, help="default: whole files; 8192 of others, 2048 on a CPU")
    parser.add_argument("--offsets", type=_common.integers, default=[0], help="first tokens, of files and programs")
    parser.add_argument("--layers", type=_sources.parse_layers, help="sets of layers of a .py, such as 0:2:4:6,1:3:5:6")
    parser.add_argument("--taus", type=_common.numbers, default=[0.02, 0.01, 0.005, 0.003])
    _common.add_s2o(parser)
    parser.add_argument("--block-m", type=int, default=S2OConfig.block_m)
    parser.add_argument("--block-n", type=int, default=S2OConfig.block_n)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=8, help="of a pattern (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=2, help="of a pattern (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="of a pattern (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of a pattern (default: %(default)s)")
    _common.add_device(parser)
    parser.add_argument("--baselines", type=_common.names, default=["cudnn", "flash2"], help="timed on a GPU")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--per-head", action="store_true", help="print each head's figures too; JSON always has them")
    parser.add_argument("--estimate", action="store_true", help="each head's error by S2OStats.error_per_head, too")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--plot", help="draw error against time, or on a CPU against density, into this .png")
    args = parser.parse_args(argv)
    _common.check_device(parser, args)
    if args.dense_up_to is None:
        args.dense_up_to = 0  # orders are to be judged, at short lengths too
    args.input = [x for name in args.input for x in (PATTERNS if name == "patterns" else [name])]
    return args


def main() -> None:
    args = parse()
    with progress("quality") as report:
        rows = run(args, report)
    print(_common.table(rows, POOLED))
    if args.per_head:
        print()
        print(_common.table([head for row in rows for head in heads_of(row)], PER_HEAD))
    if args.plot:
        _draw.quality(args.plot, rows)


if __name__ == "__main__":
    main()
