"""Time s2o_attention and its parts against dense attention, on one GPU, in one run.

    python benchmarks/speed.py --lengths 8192,32768,131072 --input trace.npz --json benchmarks/results/speed.json
    python benchmarks/speed.py --lengths 8192,32768 --head-counts 32:8,8:2,64:8 --head-dims 64,128
    python benchmarks/speed.py --lengths 32768,131072 --random-order 0.05,0.1,0.3

Prints a table and writes JSON. Every figure is the median of many warmed-up launches; ratios are taken inside the
run. ``pass 2`` is judged by its floating-point rate on the tiles it visited.

NAME_ms is a call by itself, launching included where the GPU waits for it; NAME_queued_ms a call among calls that wait
for the GPU, which is what it costs inside a model; host_us how long the host is busy with a call (on PyTorch tensors;
host_us_cupy on CuPy arrays). FlashAttention-3 is a baseline where it is installed.

--random-order times nothing but pass 2, on random q, k and v, with key orders drawn at random and tau set so that
about so large a share of the pairs is computed: what gathering costs whatever the input.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import _baselines
import _common
import _exact
import _sources
import cupy
import numpy as np
import torch
from _random_order import RandomOrders, expected_tau

from s2o_cupy import S2OConfig, S2OStats, s2o_attention
from s2o_cupy.arrays.operand import Call, address, operand
from s2o_cupy.cuda.pipeline import run
from s2o_cupy.plan.launch_plan import is_dense
from s2o_cupy.problem import Problem

Row = dict[str, Any]


class Pipeline:
    """The stages of a call on q, k and v, with an observer that may change what a stage left."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, change: Callable[..., None] | None = None
    ) -> None:
        batch, heads, length, head_dim = q.shape
        dtype, scale = str(q.dtype)[6:], head_dim**-0.5
        self.problem = Problem(batch, heads, k.shape[1], length, length, head_dim, dtype, True, scale)
        self.q, self.k, self.v = (cupy.from_dlpack(x) for x in (q, k, v))
        self.out, self.change = cupy.empty_like(self.q), change
        q, k, v, out = (operand(x, "BHSD") for x in (self.q, self.k, self.v, self.out))
        self.operands = q, k, v, out

    def run(self, config: S2OConfig, observe: Callable[..., None] | None) -> S2OStats:
        visited = cupy.empty(self.problem.visited_shape(config), np.int32)
        stream = cupy.cuda.get_current_stream().ptr
        call = Call(self.operands, 0, address(visited), self.problem)
        plan = run(call, config, stream=stream, observe=observe)
        return S2OStats(visited, self.problem, config, plan.path, plan.path_reason)

    def stats(self, config: S2OConfig) -> S2OStats:
        return self.run(config, self.change)

    def parts_ms(self, config: S2OConfig, repeats: int) -> dict[str, float]:
        """Median milliseconds of ordering, the tail's sums, pass 1 and pass 2, on the GPU: a call goes before the
        first event, or pass 1, the first launch, would be charged with what the host does until then."""
        times: dict[str, list[float]] = {part: [] for part in ("ordering", "tail", "pass1", "pass2")}
        for repeat in range(repeats + 2):
            marks: list[tuple[str, Any]] = []

            def mark(part: str, marks: list[tuple[str, Any]] = marks) -> None:
                event = cupy.cuda.Event()
                event.record()
                marks.append((part, event))

            def observe(stage: str, arrays: Mapping[str, Any], mark: Callable[[str], None] = mark) -> None:
                if stage not in _common.PART_ENDS:
                    return
                mark(_common.PART_ENDS[stage])
                if self.change:
                    self.change(stage, arrays)
                    mark("change")

            self.run(config, self.change)
            mark("begin")
            self.run(config, observe)
            marks[-1][1].synchronize()
            if repeat >= 2:
                total = dict.fromkeys((*times, "change"), 0.0)
                for (_, before), (part, after) in itertools.pairwise(marks):
                    total[part] += cupy.cuda.get_elapsed_time(before, after)
                for part in times:
                    times[part].append(total[part])
        return {part: float(np.median(ms)) for part, ms in times.items()}

    def rates(self, config: S2OConfig, parts: dict[str, float]) -> Row:
        """Density, and the rates of both passes on the (query, key) pairs that they have to compute."""
        density, geometry = self.stats(config).density, self.problem.geometry(config)
        dense = is_dense(self.problem, config)
        first = geometry.causal_pairs() if dense else geometry.dense_pairs()
        pairs = {"pass1": first, "pass2": density * geometry.causal_pairs() - first}
        flop = 4 * self.problem.head_dim * self.problem.batch * self.problem.heads
        rates = {f"{part}_tflops": flop * pairs[part] / ms / 1e9 for part, ms in parts.items() if part in pairs and ms}
        return {"density": density, "dense": dense, **rates}


class Input:
    """q, k and v of one length, and what is measured on them once: dense baselines and the exact output."""

    def __init__(self, args: argparse.Namespace, length: int, heads: int, kv_heads: int, head_dim: int) -> None:
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        q, k, v = _sources.load(_sources.Case(args.input, length), args.dtype, "cuda", **sizes)
        self.args, self.q, self.k, self.v = args, q, k, v
        self.batch, self.heads, self.length, self.head_dim = q.shape
        self.flop = _common.causal_flop(self.batch, self.heads, length, self.head_dim)
        self.row: Row = {
            "length": length, "heads": self.heads, "kv_heads": k.shape[1], "head_dim": self.head_dim,
        }  # fmt: skip
        self.exact = _exact.dense(q, k, v) if args.error else None
        self.baselines = args.baselines
        for name in self.baselines:
            baseline = partial(_baselines.available()[name], q, k, v)
            ms = _common.time_ms(baseline, args.repeats)
            self.row |= {f"{name}_ms": ms, f"{name}_tflops": self.flop / ms / 1e9}
            self.row[f"{name}_queued_ms"] = _common.queued_ms(baseline, ms)
            if self.exact is not None:
                self.row[f"{name}_rel_l2"] = self.rel_l2(baseline())

    def rel_l2(self, o: torch.Tensor) -> float:
        return _exact.pooled(_exact.sums(o, self.exact))["rel_l2"]

    def measure(self, order: dict[str, Any], tau: float | None) -> Row:
        args, q, k, v = self.args, self.q, self.k, self.v
        config = _common.config_of(args, order, tau=tau)
        row = {**self.row, **_common.describe(config, k.shape[2])}
        call = partial(s2o_attention, q, k, v, config=config)
        row["s2o_ms"] = _common.time_ms(call, args.repeats)
        row["s2o_queued_ms"] = _common.queued_ms(call, row["s2o_ms"])
        row["host_us"] = _common.host_us(call, row["s2o_ms"])
        pipeline = Pipeline(q, k, v)
        of_cupy = partial(s2o_attention, pipeline.q, pipeline.k, pipeline.v, config=config)
        row["host_us_cupy"] = _common.host_us(of_cupy, row["s2o_ms"])
        parts = pipeline.parts_ms(config, args.repeats)
        row |= {f"{part}_ms": ms for part, ms in parts.items()}
        row |= pipeline.rates(config, parts)
        row |= _common.ratios(row, self.baselines) | _common.ratios(row, self.baselines, "queued_ms")
        row |= self.rates(row)
        if self.exact is not None:
            row["rel_l2"] = self.rel_l2(call())
        if args.memory:
            row["extra_gib"] = _common.extra_gib(call)
        return row

    def measure_random_order(self, order: dict[str, Any], densities: list[float]) -> list[Row]:
        """Pass 2 alone, at about each of the densities."""
        rows = []
        self.args.dense_up_to = 0
        config = _common.config_of(self.args, order)
        pipeline = Pipeline(self.q, self.k, self.v)
        geometry = pipeline.problem.geometry(config)
        pipeline.change = RandomOrders(geometry)
        for density in densities:
            # Where all scores were equal it would be this; those of random q and k are nearly so.
            tau = expected_tau(density, geometry, config)
            tau = _common.find_tau(
                lambda tau: pipeline.stats(_common.config_of(self.args, order, tau=tau)).density,
                density, rising=False, low=tau / 8, high=tau * 8,
            )  # fmt: skip
            config = _common.config_of(self.args, order, tau=tau)
            row = {**self.row, **_common.describe(config), "order": "random", "target_density": density}
            row["pass2_ms"] = pipeline.parts_ms(config, self.args.repeats)["pass2"]
            row |= pipeline.rates(config, {"pass2": row["pass2_ms"]})
            rows.append(row | self.rates(row))
        return rows

    def rates(self, row: Row) -> dict[str, float]:
        """The rates of the passes over each baseline's."""
        return {
            f"{part}_rate_x_{name}": row[f"{part}_tflops"] / row[f"{name}_tflops"]
            for part in ("pass1", "pass2")
            for name in self.baselines
            if f"{part}_tflops" in row
        }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default="random", help=f"{_sources.HELP} (default: %(default)s)")
    parser.add_argument("--lengths", type=_common.integers, default=[8192, 32768, 131072])
    parser.add_argument("--taus", type=_common.numbers, default=[None], help="default: the library's of each length")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=32, help="of a pattern (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="of a pattern (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="of a pattern (default: %(default)s)")
    parser.add_argument("--head-counts", type=_common.head_counts, help="several heads:kv_heads, such as 32:8,8:2")
    parser.add_argument("--head-dims", type=_common.integers, help="several, such as 64,128")
    _common.add_s2o(parser)
    parser.add_argument("--baselines", type=_common.names, help="of cudnn, flash2 and flash3; default: those there are")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--error", action="store_true", help="compare with float32 dense attention (slow)")
    parser.add_argument("--memory", action="store_true", help="memory in use beyond inputs and output")
    parser.add_argument("--random-order", type=_common.numbers, help="densities, such as 0.05,0.1,0.3: see above")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    patterned = args.input in _sources.PATTERNS
    if (args.head_counts or args.head_dims) and not patterned:
        parser.error(f"--head-counts, --head-dims: {args.input} has its own; accepted with a pattern")
    if args.random_order and args.input != "random":
        parser.error("--random-order: accepted with --input random")
    return args


def main() -> None:
    args = parse()
    found = _baselines.available()
    args.baselines = [name for name in args.baselines or found if name in found]
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        said = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        print(" ".join(said), flush=True)

    counts = args.head_counts or [(args.heads, args.kv_heads)]
    for head_dim, (heads, kv_heads), length in itertools.product(
        args.head_dims or [args.head_dim], counts, args.lengths
    ):
        source = Input(args, length, heads, kv_heads, head_dim)
        for order in args.orders:
            if args.random_order:
                for row in source.measure_random_order(order, args.random_order):
                    add(row)
            else:
                for tau in args.taus:
                    add(source.measure(order, tau))
    _common.write_result(args, rows)


if __name__ == "__main__":
    main()
