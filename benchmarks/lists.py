"""What attention to listed keys costs beside S2O's own pass 2 and beside dense attention, on one GPU, in one run.

    python benchmarks/lists.py --lengths 32768,131072 --densities 0.05,0.1,0.3 --json lists.json

Random q, k and v. A row of kind "s2o": key orders drawn at random, and tau set so that about so large a share of the
pairs is computed; ``pass2_ms`` is S2O's own pass 2, ``lists_ms`` the same orders given as lists, which must give the
same bits. A row of another kind: lists drawn at random among the keys before a segment, or before a q tile, for each
query head or for all of a KV head. ``efficiency`` is a rate over that of dense attention by cuDNN. Every figure is the
median of many launches.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import _baselines
import _common
import _sources
import cupy
import numpy as np
import torch
from _random_lists import KINDS, TILE, Kind, random_lists
from _random_order import RandomOrders, expected_tau
from speed import Pipeline

from s2o_cupy import S2OConfig
from s2o_cupy.arrays.operand import Call
from s2o_cupy.cuda.lists import ListPointers, attend_lists
from s2o_cupy.plan.schedule import ScheduleShape, order_lists

Row = dict[str, Any]


@dataclass
class Lists:
    """Lists on the GPU, CuPy arrays in C order, and what keeps them there."""

    shape: ScheduleShape
    entries: Any
    begins: Any
    keys: Any
    q_order: Any = None

    @property
    def pointers(self) -> ListPointers:
        assert all(x is None or x.flags.c_contiguous for x in (self.entries, self.begins, self.keys, self.q_order))
        q_order = 0 if self.q_order is None else self.q_order.data.ptr
        return ListPointers(self.entries.data.ptr, self.begins.data.ptr, self.keys.data.ptr, q_order)


class S2OStages(RandomOrders):
    """Random orders for S2O, and what S2O then hands to its pass 2, kept."""

    def begin(self, out: Any, config: S2OConfig) -> None:
        self.out, self.config = out, config
        self.chunks: list[Any] = []
        self.orders: list[Any] = []
        self.kept: dict[str, Any] = {}

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        super().__call__(stage, arrays)
        if stage == "pass1":
            self.kept |= {"out": self.out.copy(), "state": arrays["state"].copy()}
        elif stage == "rank_queries":
            self.kept["q_order"] = arrays["q_order"].copy()
        elif stage == "rank_keys":
            self.chunks.append(arrays["chunk"])
            self.orders.append(arrays["k_order"][: arrays["chunk"].elements].copy())

    def lists(self, heads: int) -> Lists:
        """S2O's orders as lists."""
        segment, length = self.geometry.segment, self.geometry.seqlen_q
        begins, keys = order_lists(self.chunks, self.geometry, heads)
        first = cupy.arange(0, self.geometry.segments * segment, segment, dtype=np.int32)[:, None]
        q_order = (self.kept["q_order"].reshape(heads, -1, segment) + first).reshape(heads, -1)[:, :length]
        shape = ScheduleShape(heads, unit=self.geometry.unit, segment=segment, resumed=True)
        on_gpu = (cupy.asarray(begins), cupy.asarray(keys), cupy.ascontiguousarray(q_order))
        return Lists(shape, cupy.concatenate(self.orders), *on_gpu)


def s2o_row(pipeline: Pipeline, config: S2OConfig, density: float, repeats: int) -> Row:
    """S2O's pass 2, and the same by lists."""
    geometry = pipeline.problem.geometry(config)
    pipeline.change = RandomOrders(geometry)
    tau = expected_tau(density, geometry, config)
    tau = _common.find_tau(
        lambda tau: pipeline.stats(_with(config, tau)).density, density, rising=False, low=tau / 8, high=tau * 8
    )
    config = _with(config, tau)
    pass2_ms = pipeline.parts_ms(config, repeats)["pass2"]
    stages = S2OStages(geometry)
    stages.drawn = pipeline.change.drawn
    stages.begin(pipeline.out, config)
    stats = pipeline.run(config, stages)
    expected, out = pipeline.out.copy(), stages.kept["out"]
    lists = stages.lists(pipeline.problem.heads)
    call = partial(_call, pipeline, lists, config, out, state=stages.kept["state"].data.ptr)
    call()
    if not bool((out.view(np.uint16) == expected.view(np.uint16)).all()):
        raise SystemExit("lists.py: S2O's orders as lists gave other bits than S2O")
    lists_ms = _common.time_ms(call, repeats)  # starts from another output each time: the same work
    rates = pipeline.rates(config, {"pass2": pass2_ms})
    return {
        "kind": "s2o", "density": stats.density, "pass2_ms": pass2_ms, "lists_ms": lists_ms,
        "ratio": lists_ms / pass2_ms, "lists_tflops": rates["pass2_tflops"] * pass2_ms / lists_ms,
    }  # fmt: skip


def _with(config: S2OConfig, tau: float) -> S2OConfig:
    return S2OConfig(segment=config.segment, tau=tau, rank=config.rank, path=config.path, dense_up_to=0)


def _call(pipeline: Pipeline, lists: Lists, config: S2OConfig, out: Any, **more: Any) -> None:
    operands = (*pipeline.operands[:3], pipeline.operands[3]._replace(pointer=out.data.ptr))
    stream = torch.cuda.current_stream().cuda_stream
    call = Call(operands, 0, 0, pipeline.problem)
    attend_lists(call, lists.pointers, lists.shape, config.of_pass, stream=stream, **more)


def random_row(pipeline: Pipeline, config: S2OConfig, density: float, kind: Kind, args: Any) -> Row:
    drawn = random_lists(pipeline.problem, density, *kind)
    lists = Lists(drawn.shape, cupy.from_dlpack(drawn.entries), cupy.asarray(drawn.begins), cupy.asarray(drawn.keys))
    tiles = replace(config, block_m=kind.block_m)
    ms = _common.time_ms(partial(_call, pipeline, lists, tiles, pipeline.out), args.repeats)
    of = "segment" if not kind.per_tile else "q tile" if kind.block_m == TILE else f"q tile of {kind.block_m}"
    name = f"{of}, {'head' if kind.of_heads else 'KV head'}, unit {kind.unit}"
    share = drawn.pairs / (pipeline.problem.heads * pipeline.problem.geometry(config).causal_pairs())
    return {
        "kind": name, "density": share, "lists_ms": ms,
        "lists_tflops": 4 * pipeline.problem.head_dim * drawn.pairs / ms / 1e9,
    }  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=_common.integers, default=[32768, 131072], help="multiples of 1,024")
    parser.add_argument("--densities", type=_common.numbers, default=[0.05, 0.1, 0.3])
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--path", choices=("auto", "portable", "hopper"), default="auto")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    if any(length % 1024 for length in args.lengths):
        parser.error(f"--lengths: {args.lengths}; accepted: multiples of 1024")
    return args


def main() -> None:
    args = parse()
    rows: list[Row] = []
    for length in args.lengths:
        sizes = {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
        q, k, v = _sources.load(_sources.Case("random", length), args.dtype, "cuda", **sizes)
        pipeline = Pipeline(q, k, v)
        config = S2OConfig(tau=0.0, rank="mean", path=args.path, dense_up_to=0)
        cudnn = _common.time_ms(partial(_baselines.available()["cudnn"], q, k, v), args.repeats)
        dense = _common.causal_flop(1, args.heads, length, args.head_dim) / cudnn / 1e9
        for density in args.densities:
            found = [s2o_row(pipeline, config, density, args.repeats)]
            found += [random_row(pipeline, config, density, kind, args) for kind in KINDS]
            for row in found:
                row = {"length": length, "target_density": density, "cudnn_ms": cudnn, **row}
                row["efficiency"] = row["lists_tflops"] / dense
                rows.append(row)
                said = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
                print(" ".join(said), flush=True)
    result = {**_common.provenance(), "settings": _common.settings(args, rows), "rows": rows}
    _common.write_json(args.json, result)


if __name__ == "__main__":
    main()
