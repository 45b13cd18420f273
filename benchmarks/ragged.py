"""Ragged queries over a paged cache, as serving engines send them, beside the same batch packed in arrays.

    python benchmarks/ragged.py --json ragged.json
    python benchmarks/ragged.py --pages 16,256 --batches "8x4096,32x512+3584"

A batch is named COUNTxQUERIES or COUNTxQUERIES+PREFIX: so many sequences of so many queries, after a cached prefix of
so many keys; "mixed" is 24 lengths from 64 to 8192, drawn at random on a logarithmic scale. Times are of calls that
wait for each other on the GPU, in turns, so that a GPU that slows down does so for all. Needs PyTorch with CUDA, and
CuPy.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import _common
import numpy as np

from s2o_cupy import S2OConfig, s2o_attention_paged, s2o_attention_varlen

Row = dict[str, Any]
BATCHES = "32x512,32x1024,32x2048,8x4096,2x32768,mixed,32x512+3584"
COLUMNS: list[_common.Column] = [
    ("batch", "batch", "s"),
    ("tokens", "tokens", ",d"),
    ("page size", "page_size", "d"),
    ("packed ms", "packed_ms", ".3f"),
    ("paged ms", "paged_ms", ".3f"),
    ("paged / packed", "x_packed", ".3f"),
]
TURNS = 5


def lengths_of(name: str, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Queries and keys of each sequence."""
    if name == "mixed":
        queries = [int(x) for x in np.exp(rng.uniform(np.log(64), np.log(8192), 24))]
        return queries, queries
    count, _, rest = name.partition("x")
    length, _, prefix = rest.partition("+")
    queries = [int(length)] * int(count)
    return queries, [n + int(prefix or 0) for n in queries]


def calls(
    rng: np.random.Generator, lengths_q: list[int], lengths_k: list[int], page_sizes: list[int], args: Any
) -> dict[int, Callable[[], Any]]:
    """By page size, 0 for the packed call; all of the same queries, keys and values."""
    import torch

    randn = lambda *shape: torch.randn(shape, dtype=getattr(torch, args.dtype), device="cuda")  # noqa: E731
    starts = lambda lengths: [0, *itertools.accumulate(lengths)]  # noqa: E731
    q = randn(sum(lengths_q), args.heads, args.head_dim)
    k, v = (randn(sum(lengths_k), args.kv_heads, args.head_dim) for _ in range(2))
    config = S2OConfig()
    found: dict[int, Callable[[], Any]] = {
        0: lambda: s2o_attention_varlen(q, k, v, starts(lengths_q), starts(lengths_k), config=config)
    }
    for page_size in page_sizes:
        counts = [-(-n // page_size) for n in lengths_k]
        order = torch.from_numpy(rng.permutation(sum(counts))).to("cuda")
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
        k_pages, v_pages = (randn(sum(counts), page_size, args.kv_heads, args.head_dim) for _ in range(2))
        sequences = zip(itertools.pairwise(starts(counts)), itertools.pairwise(starts(lengths_k)), strict=True)
        for i, ((first, end), (a, b)) in enumerate(sequences):
            table[i, : end - first] = order[first:end].int()
            for pages, rows in ((k_pages, k), (v_pages, v)):
                filled = rows.new_zeros((end - first) * page_size, *rows.shape[1:])
                filled[: b - a] = rows[a:b]
                pages[order[first:end]] = filled.view(end - first, page_size, *rows.shape[1:])
        found[page_size] = functools.partial(
            s2o_attention_paged, q, k_pages, v_pages, table, seqlen_k=lengths_k, cu_seqlens_q=starts(lengths_q),
            config=config,
        )  # fmt: skip
    expected = found[0]()
    for page_size in page_sizes:
        assert torch.equal(found[page_size](), expected), f"pages of {page_size} change the result"
    return found


def measure(name: str, args: Any) -> list[Row]:
    rng = np.random.default_rng(0)
    lengths_q, lengths_k = lengths_of(name, rng)
    given = calls(rng, lengths_q, lengths_k, args.pages, args)
    first = {page_size: _common.time_ms(call) for page_size, call in given.items()}
    times: dict[int, list[float]] = {page_size: [] for page_size in given}
    for _, (page_size, call) in itertools.product(range(TURNS), given.items()):
        times[page_size].append(_common.queued_ms(call, first[page_size], groups=2))
    ms = {page_size: float(np.median(x)) for page_size, x in times.items()}
    return [
        {
            "batch": name, "tokens": sum(lengths_q), "page_size": page_size, "packed_ms": ms[0],
            "paged_ms": ms[page_size], "x_packed": ms[page_size] / ms[0],
        }
        for page_size in args.pages
    ]  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=_common.names, default=BATCHES.split(","))
    parser.add_argument("--pages", type=_common.integers, default=[16, 64, 256])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    args.device = None
    _common.check_device(parser, args)
    if args.device == "cpu":
        parser.error("needs an NVIDIA GPU, CuPy and PyTorch with CUDA")
    return args


def main() -> None:
    args = parse()
    rows = [row for name in args.batches for row in measure(name, args)]
    print(_common.table(rows, COLUMNS))
    _common.write_result(args, rows)


if __name__ == "__main__":
    main()
