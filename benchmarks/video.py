"""Attention among all tokens of a video, not causal: S2O and lists of blocks beside dense attention, on one GPU.

    python benchmarks/video.py --heads 7,24 --errors 0.05,0.02 --json video.json

109,632 tokens of head_dim 128, the size that diffusers' video transformers have. q, k and v are made from a seed
(`_video.py`): no model's, so the density is this input's alone; times at a density carry over. For each error the
largest tau of S2O, or share of the mass that a method may leave out, is looked for at which rel_l2 against dense
attention in float32, of every 16th row, is at most that. Times are medians, in turns with cuDNN's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import _common
import torch
from _video import Grid, qkv

from s2o_cupy import S2OConfig
from s2o_cupy.methods import MeanPoolingConfig, SpargeConfig, sparse_attention
from s2o_cupy.methods.hilbert import token_order
from s2o_cupy.tools.progress import progress

Row = dict[str, Any]
EVERY = 16  # rows of an output that are compared
STEPS = 7  # taus that are tried for an error
COLUMNS: list[_common.Column] = [
    ("tokens", "length", ",d"),
    ("heads", "heads", "d"),
    ("method", "method", "s"),
    ("error asked", "asked", "g"),
    ("left out", "left_out", "g"),
    ("density", "density", ".4f"),
    ("rel_l2", "rel_l2", ".4f"),
    ("ms", "ms", ".2f"),
    ("cuDNN ms", "cudnn_ms", ".2f"),
    ("ms / cuDNN", "x_cudnn", ".3f"),
]
CURVE = "S2O, curve"  # tokens along a Hilbert curve before the call, as a model can lay them out once for all layers
# Of what a method may leave out, which is tau of S2O and 1 - what the others want of the mass of blocks, and the grid.
METHODS: dict[str, Callable[[float, Grid], Any]] = {
    "S2O": lambda x, grid: S2OConfig(tau=x),
    CURVE: lambda x, grid: S2OConfig(tau=x),
    "S2O, rank=weight": lambda x, grid: S2OConfig(rank="weight", tail="none", tau=x),
    "mean pooling": lambda x, grid: MeanPoolingConfig(threshold=1 - x),
    "Sparge": lambda x, grid: SpargeConfig(tau=1 - x, theta=-1, permutation=grid[:3]),
}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's by cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of every 16th query, in float32: [heads, rows, head_dim]."""
    torch.backends.cuda.matmul.allow_tf32 = False
    out = []
    for head in range(q.shape[1]):
        keys, values = k[0, head].float(), v[0, head].float()
        parts = q[0, head, ::EVERY].float().split(1024)
        out.append(torch.cat([(x @ keys.T * x.shape[-1] ** -0.5).softmax(-1) @ values for x in parts]))
    return torch.stack(out)


def error(o: torch.Tensor, exact: torch.Tensor) -> float:
    return float((o[0, :, ::EVERY].float() - exact).norm() / exact.norm())


class Attention:
    """A method on q, k and v, by what it leaves out; its outputs are in the order of the tokens as they came."""

    def __init__(self, name: str, given: Sequence[torch.Tensor], grid: Grid) -> None:
        self.config, self.given, self.grid, self.places = METHODS[name], given, grid, None
        if name == CURVE:
            order = torch.as_tensor(token_order(grid[:3], grid.tokens), dtype=torch.int64, device=given[0].device)
            self.given, self.places = [x[:, :, order].contiguous() for x in given], order.argsort()

    def __call__(self, left_out: float, **more: Any) -> Any:
        return sparse_attention(*self.given, config=self.config(left_out, self.grid), is_causal=False, **more)

    def error(self, left_out: float, exact: torch.Tensor) -> float:
        o = self(left_out)
        return error(o if self.places is None else o[:, :, self.places], exact)


def in_turns(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Milliseconds of each, the median."""
    times = [[_common.time_ms(call, 1, 1) for call in calls] for _ in range(repeats)]
    return [statistics.median(x) for x in zip(*times, strict=True)]


def measure(args: argparse.Namespace, heads: int, step: Callable[[str], None]) -> list[Row]:
    step(f"{heads} heads: exact")
    given = qkv(args.grid, heads, args.seed)
    exact, by_cudnn = exact_rows(*given), partial(dense, *given)
    common: Row = {"length": args.grid.tokens, "heads": heads}
    rows: list[Row] = [{**common, "method": "cuDNN", "density": 1.0, "rel_l2": error(by_cudnn(), exact)}]
    for name, asked in itertools.product(args.methods, args.errors):
        step(f"{heads} heads: {name}, error {asked:g}")
        attention = Attention(name, given, args.grid)
        measured = partial(attention.error, exact=exact)
        left_out = _common.find_tau(measured, asked * 0.98, rising=True, low=1e-4, high=0.9, steps=STEPS)
        ms, cudnn_ms = in_turns([partial(attention, left_out), by_cudnn], args.repeats)
        rows.append({
            **common, "method": name, "config": str(METHODS[name](left_out, args.grid)), "asked": asked,
            "left_out": left_out, "density": attention(left_out, return_stats=True)[1].density,
            "rel_l2": measured(left_out), "ms": ms, "cudnn_ms": cudnn_ms, "x_cudnn": ms / cudnn_ms,
        })  # fmt: skip
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=_common.integers, default=[7, 24])
    parser.add_argument("--errors", type=_common.errors, default=[0.05, 0.02])
    parser.add_argument("--methods", type=lambda x: x.split(";"), default=[*METHODS], help="names with ; between them")
    parser.add_argument("--grid", type=lambda x: Grid(*_common.integers(x)), default=Grid(), help="31,44,80,512")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    if wrong := set(args.methods) - set(METHODS):
        parser.error(f"--methods: {', '.join(sorted(wrong))}; accepted: {'; '.join(METHODS)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    rows: list[Row] = []
    total, done = len(args.heads) * (1 + len(args.methods) * len(args.errors)), itertools.count()
    with progress("video") as report:
        for heads in args.heads:
            rows += measure(args, heads, lambda what: report(next(done), total, what))
            _common.write_result(args, rows)
            _common.release_memory()
    print(_common.table(rows, COLUMNS))


if __name__ == "__main__":
    main()
