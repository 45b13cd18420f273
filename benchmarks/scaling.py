"""Cost of s2o_attention against length at a fixed tau, and at a fixed error, beside dense attention.

    python benchmarks/scaling.py --errors 0.06 --json scaling.json --plot scaling.png
    python benchmarks/scaling.py --input my_qkv.py --lengths 8192,32768,131072 --heads 32 --kv-heads 8

A length that the input does not have is measured on the pattern "mixture", and its row says so.
rel_l2 and rel_l1 are those of some whole segments, evenly spread, against dense attention of their rows in float32:
at a million tokens an exact answer for all of them would take longer than everything else. For --errors the tau is
searched on the same segments, each with only the keys up to its end, which is how the whole call treats it. Memory is
what a call takes beside its inputs and output. Without a GPU the NumPy reference runs, by default at short lengths, and
nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import _baselines
import _common
import _draw
import _exact
import _sources
import numpy as np

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.plan.launch_plan import dense_limit
from s2o_cupy.spec import Geometry
from s2o_cupy.tools.progress import Report, progress

Row = dict[str, Any]
FALLBACK = "mixture"
LENGTHS = {"cuda": [8192 << i for i in range(8)], "cpu": [2048, 4096, 8192]}  # the reference: seconds for these
LENGTHS_HELP = "default: 8192 to 1048576, each twice the one before; on a CPU 2048, 4096, 8192"
COLUMNS: list[_common.Column] = [
    ("input", "input", "s"),
    ("tokens", "length", ",d"),
    ("order", "order", "s"),
    ("goal", "goal", "s"),
    ("tau", "tau", ".4g"),
    ("density", "density", ".4f"),
    ("rel_l2", "rel_l2", ".4f"),
    ("rel_l1", "rel_l1", ".4f"),
    ("S2O ms", "s2o_ms", ".3f"),
    ("cuDNN ms", "cudnn_ms", ".3f"),
    ("S2O / cuDNN", "x_cudnn", ".3f"),
    ("FlashAttention-2 ms", "flash2_ms", ".3f"),
    ("FlashAttention-3 ms", "flash3_ms", ".3f"),
    ("extra GiB", "extra_gib", ".2f"),
]


def sampled_segments(geometry: Geometry, count: int) -> list[int]:
    """``count`` segments, each in the middle of an equal part of all of them."""
    count = min(count, geometry.segments)
    return [(2 * i + 1) * geometry.segments // (2 * count) for i in range(count)]


class Sample:
    """Some segments with their exact output: what an error is measured on."""

    def __init__(self, q: Any, k: Any, v: Any, segment: int, count: int) -> None:
        geometry = Geometry(q.shape[2], k.shape[2], segment)
        self.q, self.k, self.v = q, k, v
        self.ranges = [geometry.queries(n) for n in sampled_segments(geometry, count)]
        self.exact = [_exact.dense(q, k, v, first, last) for first, last in self.ranges]

    @property
    def rows(self) -> int:
        return sum(last - first for first, last in self.ranges)

    def errors_of(self, o: Any) -> dict[str, float]:
        """Of the whole call's output."""
        return self._errors([o[:, :, first:last] for first, last in self.ranges])

    def errors_at(self, config: S2OConfig) -> dict[str, float]:
        """Of calls that compute nothing but the sample. A segment's result depends on no other segment's queries; but
        a GPU would attend densely to its fewer keys, where it does not to those of the whole call."""
        if self.k.shape[2] > dense_limit(config, *self.q.shape[1::2]):
            config = dataclasses.replace(config, dense_up_to=0)
        return self._errors(
            [
                s2o_attention(self.q[:, :, first:last], self.k[:, :, :last], self.v[:, :, :last], config=config)
                for first, last in self.ranges
            ]
        )

    def _errors(self, outputs: Sequence[Any]) -> dict[str, float]:
        parts = [_exact.sums(o, exact) for o, exact in zip(outputs, self.exact, strict=True)]
        return _exact.pooled(np.sum(parts, axis=0))


def load(args: argparse.Namespace, length: int) -> tuple[str, Any, Any, Any]:
    """The input's name and q, k, v, from --input where it has that length and else the synthetic mixture."""
    if args.input != FALLBACK and length <= (args.input_up_to or length):
        try:
            q, k, v = _load(args, args.input, length)
            return _sources.Case(args.input).row()["input"], *_sources.pick_heads(q, k, v, args.heads, args.kv_heads)
        except (ValueError, RuntimeError) as error:  # too short, or too long for the program or the memory
            print(f"{length:,} tokens: {error}; using {FALLBACK}", file=sys.stderr)
    return FALLBACK, *_load(args, FALLBACK, length)


def _load(args: argparse.Namespace, source: str, length: int) -> tuple[Any, Any, Any]:
    sizes = {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    return _sources.load(_sources.Case(source, length), args.dtype, args.device, **sizes)


def measure_length(args: argparse.Namespace, length: int, step: Callable[[str], None]) -> list[Row]:
    """A row for each order and each tau or error."""
    step(f"{length:,}: input")
    source, q, k, v = load(args, length)
    common: Row = {
        "input": source, "length": length, "heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[3],
    }  # fmt: skip
    if args.device != "cpu":
        _common.release_memory()
        step(f"{length:,}: dense")
        common |= baseline_times(args, q, k, v)
    rows = []
    for order in args.orders:
        config = _common.config_of(args, order)
        if args.device != "cpu":  # before others leave memory to a pool, from which the call would take it
            common |= {"extra_gib": _common.extra_gib(functools.partial(s2o_attention, q, k, v, config=config))}
        step(f"{length:,}: exact rows")
        sample = Sample(q, k, v, config.segment, args.sample)
        goals = [(f"tau {tau:g}", None, tau) for tau in args.taus]
        for error in args.errors:
            step(f"{length:,}: tau for an error of {error:g}")
            goals.append((f"error {error:g}", error, tau_for(sample, config, error)))
        for goal, error, tau in goals:
            chosen = dataclasses.replace(config, tau=tau)
            row = common | {"goal": goal, "target_error": error} | _common.describe(chosen)
            step(f"{length:,}: {row['order']}, {goal}")
            rows.append(row | measure(args, q, k, v, sample, chosen))
            rows[-1] |= _common.ratios(rows[-1], args.baselines)
    return rows


def tau_for(sample: Sample, config: S2OConfig, error: float) -> float:
    return _common.find_tau(
        lambda tau: sample.errors_at(dataclasses.replace(config, tau=tau))["rel_l2"], error, rising=True
    )


def baseline_times(args: argparse.Namespace, q: Any, k: Any, v: Any) -> Row:
    found = _baselines.available()
    times: Row = {}
    for name in args.baselines:
        if name in found:
            try:
                times[f"{name}_ms"] = _common.time_ms(
                    functools.partial(found[name], q, k, v), args.repeats, limit_s=args.limit_s
                )
            except RuntimeError as error:  # out of memory, or a length that it does not take
                print(f"{q.shape[2]:,} tokens, {name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return times


def measure(args: argparse.Namespace, q: Any, k: Any, v: Any, sample: Sample, config: S2OConfig) -> Row:
    o, stats = s2o_attention(q, k, v, config=config, return_stats=True)
    row: Row = {"density": stats.density, **sample.errors_of(o), "sampled_rows": sample.rows}
    if args.device == "cpu":
        return row
    del o, stats
    call = functools.partial(s2o_attention, q, k, v, config=config)
    row["s2o_ms"] = _common.time_ms(call, args.repeats, limit_s=args.limit_s)
    return row


def run(args: argparse.Namespace, report: Report) -> list[Row]:
    of_order = 1 + len(args.taus) + 2 * len(args.errors)
    total = len(args.lengths) * (1 + (args.device != "cpu") + len(args.orders) * of_order)
    rows: list[Row] = []
    done = itertools.count()
    for length in args.lengths:
        rows += measure_length(args, length, lambda what: report(next(done), total, what))
        # After each length, so that an interrupted run leaves what it has measured.
        _common.write_result(args, rows, args.device)
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default=FALLBACK, help=f"{_sources.HELP} (default: %(default)s)")
    parser.add_argument("--input-up-to", type=int, help="longest length to take from --input; default: what it has")
    parser.add_argument("--lengths", type=_common.integers, help=LENGTHS_HELP)
    parser.add_argument("--taus", type=_common.numbers, default=[0.01])
    parser.add_argument("--errors", type=_common.errors, default=[], help="rel_l2 at which to measure, such as 0.06")
    parser.add_argument("--sample", type=int, default=4, help="segments that errors are measured on")
    _common.add_s2o(parser)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128, help="of a pattern (default: %(default)s)")
    _common.add_device(parser)
    parser.add_argument("--baselines", type=_common.names, default=["cudnn", "flash2", "flash3"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=10.0, help="seconds of a timing; three repeats it always has")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--plot", help="draw time, density, error and memory against length into this .png")
    args = parser.parse_args(argv)
    _common.check_device(parser, args)
    if args.sample < 1:
        parser.error("--sample: accepted: 1 or more")
    if args.lengths is None:
        args.lengths = LENGTHS[args.device]
    return args


def main() -> None:
    args = parse()
    with progress("scaling") as report:
        rows = run(args, report)
    print(_common.table(rows, COLUMNS))
    if args.plot:
        _draw.scaling(args.plot, rows)


if __name__ == "__main__":
    main()
