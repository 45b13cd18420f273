"""What NSA's forward costs beside dense attention by cuDNN, on one GPU, in one run.

    python benchmarks/nsa.py --lengths 8192,16384,65536,131072 --groups 1,2,4,8 --json nsa.json

Random normal q, k and v, whose compressed keys are means and whose gates are random: without a trained model's q and k
this shows speed only. ``ms`` and ``cudnn_ms`` are medians of single calls, from the host's call on; ``queued_ms`` and
``cudnn_queued_ms`` are of calls that wait for each other on the GPU. ``speedup`` is cuDNN's time over NSA's. The other
columns are the stages of one call, one after the other, timed between events.

    python benchmarks/nsa.py --lengths 65536 --rivals fsa=FOLDER,fla=FOLDER --input FILE --json beside.json

times ours and others' kernels in turns, forward and with the backward; what of, `_nsa_rivals` and `_nsa_beside` say.
"""

from __future__ import annotations

import argparse
import collections
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import _baselines
import _common
import _nsa_beside
import _nsa_rivals
import _sources
import torch

from s2o_cupy.arrays.operand import operand
from s2o_cupy.cuda.pipeline import allocate
from s2o_cupy.nsa import NSAConfig, nsa_attention, nsa_compress
from s2o_cupy.nsa import launches as nsa
from s2o_cupy.problem import Problem

Row = dict[str, Any]
SETTINGS = {"64": NSAConfig(), "128": NSAConfig(block=128, top=8)}  # by the keys of a block


class Case:
    """Inputs of one length and group."""

    def __init__(self, length: int, group: int, args: argparse.Namespace) -> None:
        of = {"device": "cuda", "dtype": getattr(torch, args.dtype)}
        self.q = torch.randn(1, args.kv_heads * group, length, args.head_dim, **of)
        self.k, self.v = torch.randn(2, 1, args.kv_heads, length, args.head_dim, **of)
        self.k_cmp, self.v_cmp = nsa_compress(self.k), nsa_compress(self.v)
        self.gates = torch.rand(1, length, 3, device="cuda")
        self.out = torch.empty_like(self.q)

    def attend(self, config: NSAConfig) -> Any:
        return nsa_attention(self.q, self.k, self.v, self.k_cmp, self.v_cmp, self.gates, config=config, out=self.out)

    def stages(self, config: NSAConfig) -> Row:
        """Milliseconds of each, added up over rounds."""
        q, k, v, k_cmp, v_cmp, out = (
            operand(x, "BHSD") for x in (self.q, self.k, self.v, self.k_cmp, self.v_cmp, self.out)
        )
        (batch, heads, length, head_dim), kv_heads = q.shape, k.shape[1]
        dtype = str(self.q.dtype).removeprefix("torch.")
        problem = Problem(batch, heads, kv_heads, length, length, head_dim, dtype, True, head_dim**-0.5)
        gates = nsa.Gates(self.gates.data_ptr(), (3 * length, 0, 3), True)
        events: list[tuple[str, Any]] = []

        def mark(name: str) -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append((name, event))

        keys = nsa.Pair(k, v)
        branches = nsa.Branches(keys, nsa.Pair(k_cmp, v_cmp), keys, gates)
        for _ in range(2):  # the first compiles
            events.clear()
            torch.cuda._sleep(20_000_000)  # the GPU waits, so that no launch is late
            mark("begin")
            nsa.attend(
                q, branches, out, problem, config, stream=torch.cuda.current_stream().cuda_stream, memory=allocate,
                observe=mark,
            )  # fmt: skip
            torch.cuda.synchronize()
        found: collections.Counter[str] = collections.Counter()
        for (_, before), (name, after) in itertools.pairwise(events):
            found[name.removeprefix("nsa_") + "_ms"] += before.elapsed_time(after)
        return dict(found)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=_common.integers, default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--groups", type=_common.integers, default=[1, 2, 4, 8], help="query heads of a KV head")
    parser.add_argument("--blocks", type=_common.names, default=["64"], help="64 (16 of them), 128 (8)")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rivals", type=_nsa_rivals.folders, help=f"{_nsa_rivals.ACCEPTED}; time these beside ours")
    parser.add_argument("--input", default="random", help=f"with --rivals: {_sources.HELP} (default: %(default)s)")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    if not set(args.blocks) <= set(SETTINGS):
        parser.error(f"--blocks: {','.join(args.blocks)}; accepted: {', '.join(SETTINGS)}")
    if args.input != "random" and not args.rivals:
        parser.error(f"--input {args.input}; accepted: random, and others with --rivals")
    return args


def tell(row: Row) -> None:
    print(*(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def beside(args: argparse.Namespace, device: str = "cuda") -> Row:
    """Ours and others', as a result. It is written after each case, so that what a later one does to the GPU costs no
    row."""
    result: Row = {}
    if args.input == "random":
        print("q, k and v are random: no model's, whose selections differ", flush=True)
    told: list[str] = []

    def note(line: str) -> None:
        if line not in told:
            told.append(line)
            print(line, flush=True)

    rows: list[Row] = []
    kept = {"input": _sources.Case(args.input).row()["input"], "rivals": {}, "includes": {}, "told": told}
    kept["rivals"] = {name: _nsa_rivals.commit(folder) for name, folder in args.rivals.items()}
    try:
        for found, includes in _nsa_beside.rows(args, SETTINGS, note, device):
            rows += found
            for row in found:
                tell(row)
            kept["includes"] |= includes
            result = {**_common.provenance(), "settings": _common.settings(args, rows), **kept, "rows": rows}
            _common.write_json(args.json, result)
    except _nsa_beside.GpuLost as error:
        raise SystemExit(f"the GPU is lost for this process: {error}; {len(rows)} rows are kept") from error
    return result


def main() -> None:
    args = parse()
    if args.rivals:
        beside(args)
        return
    rows: list[Row] = []
    for length in args.lengths:
        for group in args.groups:
            case = Case(length, group, args)
            cudnn = partial(_baselines.available()["cudnn"], case.q, case.k, case.v)
            cudnn_ms = _common.time_ms(cudnn, args.repeats, limit_s=2)
            cudnn_queued = _common.queued_ms(cudnn, cudnn_ms)
            for block in args.blocks:
                config = SETTINGS[block]
                ms = _common.time_ms(partial(case.attend, config), args.repeats, limit_s=2)
                queued = _common.queued_ms(partial(case.attend, config), ms)
                row = {"length": length, "group": group, "block": int(block), "ms": ms, "cudnn_ms": cudnn_ms}
                row |= {"speedup": cudnn_ms / ms, "queued_ms": queued, "cudnn_queued_ms": cudnn_queued}
                row |= {"queued_speedup": cudnn_queued / queued, **case.stages(config)}
                rows.append(row)
                tell(row)
    result = {**_common.provenance(), "settings": _common.settings(args, rows), "rows": rows}
    _common.write_json(args.json, result)


if __name__ == "__main__":
    main()
