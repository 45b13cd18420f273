"""How long a call keeps the host busy, by each way there is to call: arrays of each framework, and the integrations.

    python benchmarks/host.py --json host.json
    python benchmarks/host.py --tokens 16384 --turns 50 --processes 5

Microseconds from the call to its return, on a GPU with nothing to do, of calls behind each other, as of the layers of a
model. The ways take turns, a few calls each, so that a host that slows down does so for all of them. Turns count when
they no longer get faster or slower: kernels are loaded by then, and calls that come again are graphs. A process has its
own luck with memory, so several measure, one after the other, and first one that counts for nothing, which leaves
compiled kernels and Python's bytecode to them. A figure is the median of the processes' medians of turns; "from" and
"to" are the fastest and the slowest turn of all of them. "settled": whether turns no longer changed when they began to
count, in all processes.

"more" is what a way costs beyond s2o_attention on CuPy arrays. JAX has no stream that others could be told of, so a
call on its arrays waits for the GPU: of it "more" leaves out the GPU's own time.

A way is left out where its framework is not installed. Needs PyTorch with CUDA, and CuPy.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _common
import _digest
import cupy
import numpy as np
import torch

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged, s2o_attention_varlen

Row = dict[str, Any]
Ways = dict[str, Callable[[], Any]]
CUPY, WAITS = "CuPy", "JAX"
COLUMNS: list[_common.Column] = [
    ("call", "call", "s"),
    ("host us", "host_us", ".1f"),
    ("from", "from_us", ".1f"),
    ("to", "to_us", ".1f"),
    ("more", "more_us", "+.1f"),
    ("settled", "settled", ""),
]
PAGE = 64
TURN = 10  # calls that count of a turn
STEADY_TURNS = 5  # whose median must be that of as many before them
STEADY = 0.05  # give or take this share
WARMUP_TURNS = 30, 100  # at least, as what is slow may be so steadily at first, and at most


def ways(q: Any, k: Any, v: Any, config: S2OConfig) -> Ways:
    """Calls of one problem: q, k and v are PyTorch tensors [1, heads, seqlen, head_dim]."""
    from s2o_cupy.integrations.distributed import SequenceParallel
    from s2o_cupy.integrations.torch import attention

    seqlen = q.shape[2]
    q1, k1, v1 = (cupy.from_dlpack(x) for x in (q, k, v))
    q2, k2, v2 = (x[0].transpose(0, 1) for x in (q, k, v))
    starts = [0, seqlen]
    used = -(-seqlen // PAGE)
    k_pages, v_pages = (_pages(x, used) for x in (k, v))
    table = torch.arange(used, dtype=torch.int32, device=q.device)[None]
    parallel = SequenceParallel(seqlen, config=config)
    found: Ways = {
        CUPY: lambda: s2o_attention(q1, k1, v1, config=config),
        "PyTorch": lambda: s2o_attention(q, k, v, config=config),
        "PyTorch, s2o_attention_varlen": lambda: s2o_attention_varlen(q2, k2, v2, starts, config=config),
        "PyTorch, s2o_attention_paged": lambda: s2o_attention_paged(
            q, k_pages, v_pages, table, seqlen_k=seqlen, config=config
        ),
        "integrations.torch": lambda: attention(q, k, v, config=config),
        "integrations.distributed, one rank": lambda: parallel.attention(q, k, v),
    }
    if importlib.util.find_spec("transformers"):
        from s2o_cupy.integrations.transformers import register

        layer, run = SimpleNamespace(is_causal=True, training=False), register("s2o-host", config, min_seqlen=1)
        found["integrations.transformers"] = lambda: run(layer, q, k, v, None)
    if importlib.util.find_spec("jax"):
        import jax

        has_gpu = jax.default_backend() == "gpu"
        torch.cuda.set_device(q.device)  # JAX, when it starts, leaves the last GPU the current one
        if has_gpu:
            q3, k3, v3 = (jax.dlpack.from_dlpack(x) for x in (q, k, v))
            found[WAITS] = lambda: s2o_attention(q3, k3, v3, config=config)
    return found


def _pages(x: Any, used: int) -> Any:
    """Of k or v [1, kv_heads, seqlen, head_dim]: [used, PAGE, kv_heads, head_dim]."""
    rows = x[0].transpose(0, 1)
    pages = x.new_zeros(used * PAGE, *rows.shape[1:])
    pages[: len(rows)] = rows
    return pages.view(used, PAGE, *rows.shape[1:])


def turn_us(call: Callable[[], Any]) -> float:
    """Median microseconds of a turn's calls."""
    times = []
    for i in range(2 * TURN):  # the first ones find another way's code and data in the host's caches
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if i >= TURN:
            times.append((time.perf_counter() - began) * 1e6)
    return float(np.median(times))


def is_steady(turns: Sequence[float]) -> bool:
    """Whether the last turns were as fast as those before them."""
    if len(turns) < 2 * STEADY_TURNS:
        return False
    before, last = np.median(np.reshape(turns[-2 * STEADY_TURNS :], (2, STEADY_TURNS)), axis=1)
    return bool(abs(last - before) <= STEADY * before)


def measure(calls: Ways, turns: int, turn: Callable[[Callable[[], Any]], float] = turn_us) -> list[Row]:
    """A row of this process for each way; ``turn`` makes a turn's calls."""
    warmup: dict[str, list[float]] = {name: [] for name in calls}
    least, most = WARMUP_TURNS
    settled = False
    while not settled and len(warmup[CUPY]) < most:
        for name, call in calls.items():
            warmup[name].append(turn(call))
        settled = len(warmup[CUPY]) >= least and all(map(is_steady, warmup.values()))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(turn(call))
    return [
        {
            "call": name, "host_us": float(np.median(us)), "from_us": min(us), "to_us": max(us), "settled": settled,
            "warmup_turns": len(warmup[name]),
        }
        for name, us in times.items()
    ]  # fmt: skip


def of_all(processes: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of several processes as one for each way."""
    rows: list[Row] = []
    for same in zip(*processes, strict=True):
        row = dict(same[0])
        row |= {name: float(np.median([x[name] for x in same])) for name in ("host_us", "gpu_us")}
        row |= {"from_us": min(x["from_us"] for x in same), "to_us": max(x["to_us"] for x in same)}
        row |= {"settled": all(x["settled"] for x in same), "warmup_turns": max(x["warmup_turns"] for x in same)}
        rows.append(row | {"process_us": [x["host_us"] for x in same]})
    (plain,) = (row["host_us"] for row in rows if row["call"] == CUPY)
    for row in rows:
        row["more_us"] = row["host_us"] - plain - (row["gpu_us"] if row["call"] == WAITS else 0.0)
    return rows


def in_processes(args: argparse.Namespace) -> list[list[Row]]:
    """What each of ``--processes`` measures, after one that counts for nothing."""
    names = ("tokens", "heads", "kv_heads", "head_dim", "turns")
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(1 + args.processes):
            path = Path(folder, f"{i}.json")
            subprocess.run([sys.executable, __file__, *options, "--processes=0", f"--json={path}"], check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip
            result = json.loads(path.read_text())
            found.append(result["rows"])
            _digest.add_loaded(result["python"])
    return found[1:]


def in_this_process(args: argparse.Namespace) -> list[Row]:
    torch.manual_seed(0)
    q = torch.randn(1, args.heads, args.tokens, args.head_dim, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 1, args.kv_heads, args.tokens, args.head_dim, dtype=torch.bfloat16, device="cuda")
    config = S2OConfig(dense_up_to=0)  # all kernels of a call, also of a short one
    problem = {"length": args.tokens, "heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    with torch.inference_mode():
        calls = ways(q, k, v, config)
        for call in calls.values():
            call()
        gc.collect()
        gc.freeze()  # what imports have left is not looked through while calls are timed
        rows = measure(calls, args.turns)
        gpu_us = 1e3 * _common.queued_ms(calls[CUPY], _common.time_ms(calls[CUPY]))
    return [problem | row | {"gpu_us": gpu_us} for row in rows]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--turns", type=int, default=20, help="that count; those before are as many as it takes")
    parser.add_argument("--processes", type=int, default=3, help="that count; 0: this one only (default: %(default)s)")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    args.dtype, args.device = "bfloat16", None
    _common.check_device(parser, args)
    if args.device == "cpu":
        parser.error("needs an NVIDIA GPU, CuPy and PyTorch with CUDA")
    return args


def main() -> None:
    args = parse()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU's memory
    rows = of_all(in_processes(args) if args.processes else [in_this_process(args)])
    print(_common.table(rows, COLUMNS))
    _common.write_result(args, rows)


if __name__ == "__main__":
    main()
