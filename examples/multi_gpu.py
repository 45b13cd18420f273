#!/usr/bin/env python3
"""Prefill attention of one long sequence on all GPUs of a machine: time, tokens/s, and the result of one GPU.

    torchrun --nproc-per-node 8 examples/multi_gpu.py --tokens 1048576
    torchrun --nproc-per-node 8 examples/multi_gpu.py --tokens 262144 --split heads --check
    python examples/multi_gpu.py

Without a GPU it runs small sizes on the CPU, over gloo; without torchrun, in one process. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.integrations.distributed import SequenceParallel


def start() -> torch.device:
    """Join the processes that torchrun started, if it did; this process's device."""
    gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    if gpu:
        torch.cuda.set_device(local)
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if "RANK" in os.environ:
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # keys leave before kernels that fill the GPU
        dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    return device


def make_input(tokens: int, heads: int, kv_heads: int, head_dim: int, device: torch.device, seed: int) -> list[Any]:
    """q, k, v (1, heads, tokens, head_dim) in which keys differ in importance by a few nats; alike on all ranks."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def normal(count: int, size: int) -> Any:
        return torch.randn(1, count, tokens, size, generator=generator, device=device, dtype=dtype)

    q, k, v = normal(heads, head_dim), normal(kv_heads, head_dim), normal(kv_heads, head_dim)
    direction = 3**0.5 * head_dim**-0.25
    return [q + direction, k + direction * normal(kv_heads, 1), v]


def seconds_of(call: Any, device: torch.device, repeats: int) -> float:
    """The fastest of some calls, each as long as the slowest rank takes."""
    best = float("inf")
    for run in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken = torch.tensor(time.perf_counter() - begin, device=device)
        if dist.is_initialized():
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        if run or not repeats:  # the first compiles kernels
            best = min(best, float(taken))
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, help="length of the sequence (default: 131072, or 2048 on the CPU)")
    parser.add_argument("--heads", type=int, help="query heads (default: 32, or 4 on the CPU)")
    parser.add_argument("--kv-heads", type=int, help="KV heads (default: 8, or 2 on the CPU)")
    parser.add_argument("--head-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--split", default="sequence", choices=("sequence", "heads"), help="default: %(default)s")
    parser.add_argument("--tau", type=float, default=0.01, help="default: %(default)s")
    parser.add_argument("--segment", type=int, help="queries of a segment (default: 128)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls, of which the fastest counts")
    parser.add_argument("--check", action="store_true", help="also run in one process, and compare")
    args = parser.parse_args(arguments)

    device = start()
    gpu = device.type == "cuda"
    tokens = args.tokens or (131_072 if gpu else 2048)
    heads, kv_heads = args.heads or (32 if gpu else 4), args.kv_heads or (8 if gpu else 2)
    config = S2OConfig(segment=args.segment or S2OConfig().segment, tau=args.tau)
    parallel = SequenceParallel(tokens, config=config, split=args.split)
    with torch.inference_mode():
        whole = make_input(tokens, heads, kv_heads, args.head_dim, device, seed=0)
        mine = [parallel.shard(x, axis=2) for x in whole]
        seconds = seconds_of(lambda: parallel.attention(*mine), device, args.repeats)
        backend = dist.get_backend() if dist.is_initialized() else "no group"
        if parallel.rank == 0:
            print(f"{parallel.world_size} x {torch.cuda.get_device_name() if gpu else 'CPU'} ({backend}), "
                  f"split {args.split}, {tokens:,} tokens, {heads} heads over {kv_heads}, head_dim {args.head_dim}: "
                  f"{seconds * 1e3:.1f} ms, {tokens / seconds:,.0f} tokens/s")  # fmt: skip
        if args.check:
            o = parallel.gather(parallel.attention(*mine), axis=2)
            alone = seconds_of(lambda: s2o_attention(*whole, config=config), device, args.repeats)
            same = torch.equal(o, s2o_attention(*whole, config=config))
            if parallel.rank == 0:
                print(f"one process: {alone * 1e3:.1f} ms, {tokens / alone:,.0f} tokens/s; "
                      f"{'the same bits' if same else 'DIFFERENT results'}")  # fmt: skip
            if not same:
                raise SystemExit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
