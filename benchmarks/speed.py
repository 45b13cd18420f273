"""Time s2o_attention and its parts against dense attention, on one GPU, in one run.

    python benchmarks/speed.py --lengths 8192,32768,131072 --input trace.npz --json benchmarks/results/speed.json

Prints a table and writes JSON. Every figure is the median of many warmed-up launches; ratios are taken inside the
run. ``pass 2`` is judged by its floating-point rate on the tiles it visited.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import Any

import _common
import cupy
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from s2o_cupy import S2OConfig, S2OStats, s2o_attention
from s2o_cupy.interop import address, operand
from s2o_cupy.pipeline import run
from s2o_cupy.problem import Problem
from s2o_cupy.spec import PATHS

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BASELINES = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def dense(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def parts_ms(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: S2OConfig, repeats: int
) -> tuple[dict[str, float], float, float]:
    """Median milliseconds of ordering, pass 1 and pass 2; density; and the (query, key) pairs that pass 2 computed."""
    batch, heads, length, head_dim = q.shape
    problem = Problem(batch, heads, k.shape[1], length, length, head_dim, str(q.dtype)[6:], True, head_dim**-0.5)
    nq, nk, nv = (cupy.from_dlpack(x) for x in (q, k, v))
    out, visited = cupy.empty_like(nq), cupy.empty(problem.visited_shape(config), np.int32)
    operands = (operand(nq, "BHSD"), operand(nk, "BHSD"), operand(nv, "BHSD"), operand(out, "BHSD"))
    times: dict[str, list[float]] = {"ordering": [], "pass1": [], "pass2": []}
    of_stage = {"pass1": "pass1", "pass2": "pass2"}
    for repeat in range(repeats + 2):
        marks: list[tuple[str, Any]] = [("begin", cupy.cuda.Event())]
        marks[0][1].record()

        def observe(stage: str, _: Any, marks: list[tuple[str, Any]] = marks) -> None:
            event = cupy.cuda.Event()
            event.record()
            marks.append((of_stage.get(stage, "ordering"), event))

        stream = cupy.cuda.get_current_stream().ptr
        run(operands, 0, address(visited), problem, config, stream=stream, observe=observe)
        marks[-1][1].synchronize()
        if repeat >= 2:
            total = dict.fromkeys(times, 0.0)
            for (_, before), (part, after) in itertools.pairwise(marks):
                total[part] += cupy.cuda.get_elapsed_time(before, after)
            for part, ms in total.items():
                times[part].append(ms)
    density, geometry = S2OStats(visited, problem, config).density, problem.geometry(config)
    pairs = batch * heads * (density * geometry.causal_pairs() - geometry.dense_pairs())
    return {part: float(np.median(ms)) for part, ms in times.items()}, density, pairs


def parse_order(text: str) -> dict[str, Any]:
    """ "rank:representatives:window:segment", all but the rank optional."""
    rank, *rest = text.split(":")
    names = ("representatives", "window", "segment")
    return {"rank": rank, **{name: int(x) for name, x in zip(names, rest, strict=False)}}


class Input:
    """q, k and v of one length, and what is measured on them once: dense baselines and the exact output."""

    def __init__(self, args: argparse.Namespace, length: int) -> None:
        dtype = DTYPES[args.dtype]
        if args.input == "random":
            q, k, v = _common.random_input(length, args.heads, args.kv_heads, args.head_dim, dtype)
        else:
            q, k, v = _common.trace_input(args.input, length, dtype)
        self.args, self.q, self.k, self.v = args, q, k, v
        self.batch, self.heads, self.length, self.head_dim = q.shape
        self.flop = _common.causal_flop(self.batch, self.heads, length, self.head_dim)
        self.row: dict[str, Any] = {
            "length": length, "heads": self.heads, "kv_heads": k.shape[1], "head_dim": self.head_dim,
        }  # fmt: skip
        self.exact = _common.dense_float32(q, k, v) if args.error else None
        for name in args.baselines:
            baseline = partial(dense, BASELINES[name], q, k, v)
            ms = _common.time_ms(baseline, args.repeats)
            self.row |= {f"{name}_ms": ms, f"{name}_tflops": self.flop / ms / 1e9}
            if self.exact is not None:
                self.row[f"{name}_rel_l2"] = _common.rel_l2(baseline(), self.exact)

    def measure(self, order: dict[str, Any], tau: float) -> dict[str, Any]:
        args, q, k, v = self.args, self.q, self.k, self.v
        config = S2OConfig(tau=tau, path=args.path, workspace_bytes=args.workspace_mib << 20, **order)
        row = {
            **self.row,
            "tau": tau, "rank": config.rank, "representatives": config.representatives,
            "window": config.window, "segment": config.segment,
        }  # fmt: skip
        row["s2o_ms"] = _common.time_ms(lambda: s2o_attention(q, k, v, config=config), args.repeats)
        parts, row["density"], pairs = parts_ms(q, k, v, config, args.repeats)
        row |= {f"{part}_ms": ms for part, ms in parts.items()}
        row["pass2_tflops"] = 4 * self.head_dim * pairs / parts["pass2"] / 1e9 if parts["pass2"] else 0.0
        for name in args.baselines:
            row[f"x_{name}"] = row["s2o_ms"] / row[f"{name}_ms"]
            row[f"pass2_rate_x_{name}"] = row["pass2_tflops"] / row[f"{name}_tflops"]
        if self.exact is not None:
            row["rel_l2"] = _common.rel_l2(s2o_attention(q, k, v, config=config), self.exact)
        if args.memory:
            torch.cuda.empty_cache()
            cupy.get_default_memory_pool().free_all_blocks()
            before = torch.cuda.mem_get_info()[0]
            out = s2o_attention(q, k, v, config=config)
            torch.cuda.synchronize()
            row["extra_gib"] = (before - torch.cuda.mem_get_info()[0] - out.nbytes) / 2**30
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    integers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    numbers = lambda text: [float(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("--input", default="random", help='"random", a trace file, or a .py with qkv_32_8(length)')
    parser.add_argument("--lengths", type=integers, default=[8192, 32768, 131072])
    parser.add_argument("--taus", type=numbers, default=[0.01])
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--orders", type=lambda text: [parse_order(x) for x in text.split(",")], default=[parse_order("mean")],
        help="comma-separated rank[:representatives[:window[:segment]]]",
    )  # fmt: skip
    parser.add_argument("--path", choices=PATHS, default="auto")
    parser.add_argument("--workspace-mib", type=int, default=S2OConfig.workspace_bytes >> 20)
    parser.add_argument("--baselines", type=lambda text: text.split(","), default=list(BASELINES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--error", action="store_true", help="compare with float32 dense attention (slow)")
    parser.add_argument("--memory", action="store_true", help="memory in use beyond inputs and output")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()

    rows = []
    for length in args.lengths:
        source = Input(args, length)
        for order, tau in itertools.product(args.orders, args.taus):
            rows.append(source.measure(order, tau))
            said = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in rows[-1].items())
            print(" ".join(said), flush=True)
    settings = {k: v for k, v in vars(args).items() if k not in ("json", "input")}
    # What every row has in common.
    settings |= {k: rows[0][k] for k in ("segment", "rank", "window") if len({row[k] for row in rows}) == 1}
    _common.write_json(args.json, {**_common.provenance(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
