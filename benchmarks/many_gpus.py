"""Prefill of one sequence on several GPUs against one GPU's call, in one run; does every GPU give the same bits?

    python benchmarks/many_gpus.py --json many_gpus.json
    python benchmarks/many_gpus.py --ranks 2 --lengths 131072,524288 --splits sequence,heads
    torchrun --nproc-per-node 4 benchmarks/many_gpus.py

A process for each GPU: as many as there are, --ranks of them, or those that torchrun started. Every GPU first makes the
whole call by itself, of which the fastest counts, and that is also what its rows of the common call are compared with.
A time is the median of several warmed-up calls into a poisoned output, from a barrier to the slowest rank's end.

gather is sending all keys and values by themselves, attend the calls on a rank's chunks with all keys there: what is
left of the time is what gathering did not hide. Split by heads gather is not told, and attend is a call on the whole
sequence with a rank's heads. Parts and attend are those of the slowest rank, balance the fastest rank's attend over the
slowest's; host is until a call returns. Without a GPU the NumPy reference runs over gloo, and times say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import _common
import _exact
import _sources
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from s2o_cupy import s2o_attention
from s2o_cupy.integrations.distributed import SPLITS, SequenceParallel, _Gathering

Row = dict[str, Any]
COLUMNS: list[_common.Column] = [
    ("tokens", "length", ",d"),
    ("ranks", "ranks", "d"),
    ("split", "split", "s"),
    ("order", "order", "s"),
    ("density", "density", ".4f"),
    ("1 GPU ms", "one_ms", ".2f"),
    ("ms", "many_ms", ".2f"),
    ("host ms", "host_ms", ".2f"),
    ("x", "speedup", ".3f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("gather ms", "gather_ms", ".2f"),
    ("GB/s", "gather_gb_s", ".0f"),
    ("attend ms", "attend_ms", ".2f"),
    ("balance", "balance", ".3f"),
    ("pass 1 ms", "pass1_ms", ".2f"),
    ("ordering ms", "ordering_ms", ".2f"),
    ("pass 2 ms", "pass2_ms", ".2f"),
    ("extra GiB", "extra_gib", ".2f"),
    ("same bits", "equal", ""),
    ("rel_l2", "rel_l2", ".2g"),
]


# ---------------------------------------------------------------- ranks


def synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def of_all_ranks(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest_ms(function: Callable[[], Any], args: argparse.Namespace, before: Callable[[], Any] = bool) -> list[float]:
    """Each rank's median milliseconds of a call that all make together; of a common call, up to the slowest's end."""
    times: list[float] = []
    for repeat in range(args.warmup + args.repeats):
        before()
        synchronize()
        dist.barrier()
        began = time.perf_counter()
        function()
        synchronize()
        if repeat >= args.warmup:
            times.append((time.perf_counter() - began) * 1e3)
    each = np.array(of_all_ranks(times))  # [ranks, repeats]
    return [float(x) for x in (*np.median(each, 1), np.median(each.max(0)))]


def host_ms(function: Callable[[], Any], args: argparse.Namespace) -> float:
    """Milliseconds until a call returns, of the slowest rank; on a GPU it is not done then."""
    times: list[float] = []
    for _ in range(args.repeats):
        synchronize()
        dist.barrier()
        began = time.perf_counter()
        function()
        times.append((time.perf_counter() - began) * 1e3)
    return max(float(np.median(of)) for of in of_all_ranks(times))


# ---------------------------------------------------------------- one length


class Input:
    """q, k and v of one length, alike on every rank, and one GPU's result."""

    def __init__(self, args: argparse.Namespace, length: int, order: dict[str, Any]) -> None:
        self.args, self.length, self.config = args, length, _common.config_of(args, order, tau=args.tau)
        where = f"cuda:{torch.cuda.current_device()}" if args.device == "cuda" else "cpu"
        sizes = {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
        loaded = _sources.load(_sources.Case(args.input, length), args.dtype, where, **sizes)
        tensors = (x if isinstance(x, torch.Tensor) else torch.from_numpy(x) for x in loaded)
        # [1, length, heads, head_dim] in memory, as models have them
        self.q, self.k, self.v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
        self.o = torch.empty_like(self.q)
        call = partial(s2o_attention, self.q, self.k, self.v, config=self.config)
        *each, _ = slowest_ms(partial(call, out=self.o), args, partial(self.o.fill_, float("nan")))
        self.row: Row = {
            "input": _sources.Case(args.input).row()["input"], "length": length, "heads": self.q.shape[1],
            "kv_heads": self.k.shape[1], "head_dim": self.q.shape[3], "ranks": dist.get_world_size(),
            **_common.describe(self.config, length), "density": call(return_stats=True)[1].density, "one_ms": min(each),
        }  # fmt: skip

    def measure(self, split: str) -> Row:
        args = self.args
        parallel = SequenceParallel(self.length, config=self.config, split=split)
        mine = [parallel.shard(x.transpose(1, 2), 1).transpose(1, 2) for x in (self.q, self.k, self.v)]
        expected, out = parallel.shard(self.o, 2), torch.empty_like(mine[0])
        poison = partial(out.fill_, float("nan"))
        call = partial(parallel.attention, *mine, out=out)
        row: Row = self.row | {"split": split, "many_ms": slowest_ms(call, args, poison)[-1]}
        row["host_ms"] = host_ms(call, args)
        row["speedup"] = row["one_ms"] / row["many_ms"]
        row["tokens_per_s"] = self.length / row["many_ms"] * 1e3
        row |= same(out, expected)
        if args.device == "cuda":
            row["extra_gib"] = max(of_all_ranks(extra_gib(call)))
        return row | (Parts(parallel, mine, out, args).row() if split == "sequence" else self.of_heads(parallel))

    def of_heads(self, parallel: SequenceParallel) -> Row:
        """A rank's heads of the whole sequence, one call."""
        ranks, rank = parallel.world_size, parallel.rank
        mine = [x.unflatten(1, (ranks, -1))[:, rank] for x in (self.q, self.k, self.v)]
        *each, attend_ms = slowest_ms(partial(s2o_attention, *mine, config=self.config), self.args)
        return {"attend_ms": attend_ms, "balance": min(each) / max(each)}


def same(o: torch.Tensor, expected: torch.Tensor) -> Row:
    """Whether the ranks' outputs have the bits of one GPU's call, and how far apart they are."""
    sums = np.sum(of_all_ranks(_exact.sums(o, expected)), axis=0)
    equal = all(of_all_ranks(torch.equal(o, expected) and not bool(expected.isnan().any())))
    return {"equal": equal, "rel_l2": _exact.pooled(sums)["rel_l2"]}


def extra_gib(call: Callable[[], Any]) -> float:
    """What a call takes from PyTorch beside its output; NCCL's own buffers are not in it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


class Parts:
    """Where the time of a call split by rows goes: each part alone, on every rank at once."""

    def __init__(
        self, parallel: SequenceParallel, mine: Sequence[torch.Tensor], out: torch.Tensor, args: argparse.Namespace
    ) -> None:
        self.parallel, self.args = parallel, args
        self.q, self.k, self.v, self.out = (x.transpose(1, 2) for x in (*mine, out))  # [1, length, heads, head_dim]
        self.kv = self.gather()

    def gather(self) -> torch.Tensor:
        gathering, rounds = _Gathering(self.parallel, self.k, self.v), self.parallel.zigzag.rounds
        gathering.send(rounds)
        gathering.wait(rounds)
        return gathering.kv

    def chunks(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """q, k, v and out of each of this rank's calls."""
        done = 0
        for _, begin, end in self.parallel.zigzag.runs(self.parallel.rank):
            rows = slice(done, done := done + end - begin)
            k, v = self.kv[:end].permute(1, 2, 0, 3, 4)
            yield self.q[:, rows], k, v, self.out[:, rows]

    def attend(self) -> None:
        for q, k, v, out in self.chunks():
            s2o_attention(q, k, v, config=self.parallel.config, layout="BSHD", out=out)

    def row(self) -> Row:
        gather_ms = slowest_ms(self.gather, self.args)[-1]
        *each, attend_ms = slowest_ms(self.attend, self.args)
        received = self.kv.nbytes * (1 - self.parallel.length / max(1, len(self.kv)))
        row = {
            "gather_ms": gather_ms, "gather_gb_s": received / gather_ms / 1e6, "attend_ms": attend_ms,
            "balance": min(each) / max(each),
        }  # fmt: skip
        if self.args.device == "cuda":
            stages = of_all_ranks(self.stages_ms())
            row |= {f"{name}_ms": max(ms[name] for ms in stages) for name in stages[0]}
        return row

    def stages_ms(self) -> dict[str, float]:
        """Median milliseconds of pass 1, ordering, the tail's sums and pass 2 on this rank."""
        from s2o_cupy.arrays.operand import Call, operand
        from s2o_cupy.cuda.pipeline import run
        from s2o_cupy.problem import validate

        times: dict[str, list[float]] = {part: [] for part in ("pass1", "ordering", "tail", "pass2")}
        for repeat in range(1 + self.args.repeats):
            marks: list[tuple[str, torch.cuda.Event]] = []

            def mark(stage: str, _: Mapping[str, Any] | None = None, marks: list[Any] = marks) -> None:
                if stage != "begin" and stage not in _common.PART_ENDS:
                    return
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                marks.append((_common.PART_ENDS.get(stage, stage), event))

            for q, k, v, out in self.chunks():
                shapes = [tuple(x.shape) for x in (q, k, v)]
                config = self.parallel.config
                problem = validate(shapes, [self.args.dtype] * 3, config=config, backend="cupy", layout="BSHD")
                config = self.parallel._chunk_config(problem)
                q, k, v, out = (operand(x, "BSHD") for x in (q, k, v, out))
                mark("begin")
                stream = torch.cuda.current_stream().cuda_stream
                run(Call((q, k, v, out), 0, 0, problem), config, stream=stream, observe=mark)
            torch.cuda.synchronize()
            total = dict.fromkeys(times, 0.0)
            for (_, before), (stage, after) in itertools.pairwise(marks):
                if stage in total:
                    total[stage] += before.elapsed_time(after)
            if repeat:
                for stage in times:
                    times[stage].append(total[stage])
        return {stage: float(np.median(ms)) for stage, ms in times.items()}


# ---------------------------------------------------------------- all of it


def run(args: argparse.Namespace) -> None:
    """What every rank does; the first one tells."""
    rows: list[Row] = []
    first, began = dist.get_rank() == 0, time.perf_counter()
    for length, order in itertools.product(args.lengths, args.orders):
        found = Input(args, length, order)
        for split in args.splits:
            rows.append(found.measure(split))
            if first:
                print(f"{length:,} tokens, {split}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
                # After each row, so that an interrupted run leaves what it has measured.
                _common.write_result(args, rows, args.device)
        del found
        if args.device == "cuda":
            _common.release_memory()
    if first:
        print(_common.table(rows, COLUMNS))


@contextmanager
def group(args: argparse.Namespace, gpu: int, **options: Any) -> Iterator[None]:
    device = None
    if args.device == "cuda":
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # keys leave before kernels that fill the GPU
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", device_id=device, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def spawned(rank: int, args: argparse.Namespace, folder: str) -> None:
    if args.device == "cpu":
        torch.set_num_threads(1)
    with group(args, rank, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=args.ranks):
        run(args)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="processes; default: the GPUs of this machine, or 2 on the CPU")
    parser.add_argument("--input", default="mixture", help=f"{_sources.HELP} (default: %(default)s)")
    parser.add_argument("--lengths", type=_common.integers, default=[131_072, 524_288, 1_048_576])
    parser.add_argument("--splits", type=_common.names, default=["sequence"], help=f"of {', '.join(SPLITS)}")
    parser.add_argument("--tau", type=float, help="default: the library's, which falls with the earlier keys")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), help="default: float32 on the CPU only")
    parser.add_argument("--heads", type=int, default=32, help="of a pattern (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="of a pattern (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="of a pattern (default: %(default)s)")
    _common.add_s2o(parser)
    _common.add_device(parser)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    _common.check_device(parser, args)
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.device == "cpu" and args.dtype == "bfloat16":
        parser.error("--dtype bfloat16 needs --device cuda: NumPy gives PyTorch none")
    if args.repeats < 1 or args.warmup < 0:
        parser.error("--repeats, --warmup: accepted: 1 or more, 0 or more")
    unknown = [split for split in args.splits if split not in SPLITS]
    if unknown:
        parser.error(f"--splits: {unknown[0]!r}; accepted: {', '.join(SPLITS)}")
    if "RANK" in os.environ:  # torchrun says
        args.ranks = int(os.environ["WORLD_SIZE"])
    elif args.device == "cuda":
        gpus = torch.cuda.device_count()
        args.ranks = args.ranks or gpus
        if not 1 <= args.ranks <= gpus:
            parser.error(f"--ranks: {args.ranks}; accepted: 1 to {gpus}, the GPUs of this machine")
    else:
        args.ranks = args.ranks or 2
    return args


def main() -> None:
    args = parse()
    if "RANK" in os.environ:
        with group(args, int(os.environ["LOCAL_RANK"])):
            run(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (args, folder), nprocs=args.ranks)


if __name__ == "__main__":
    main()
