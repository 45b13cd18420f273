"""S2O as a server calls it, on one GPU: a prompt in chunks, a packed batch of sequences, and a paged cache.

    python benchmarks/serving.py --input trace.npz --length 131072 --chunk 8192 --json serving.json
    python benchmarks/serving.py --input qkv.py --parts packed --sequences 16 --taus 0.01
    python benchmarks/serving.py --input trace.npz --parts paged --page-sizes 16,64 --json paged.json

chunked: the queries of each chunk attend to all keys up to its end, in one call a chunk; beside it the whole prompt in
one call, FlashAttention-2 on the same chunks (cuDNN cannot: its mask is aligned top-left) and dense attention at once.

packed: sequences of log-uniform lengths, --length tokens together, in one call of s2o_attention_varlen; beside it each
sequence alone (the sum of separate timings, and all of them queued), dense attention of one after the other, and
PyTorch's varlen_attn where there is one. Each sequence is a piece of --input, run as a text of its own where that is a
.py.

paged: the first chunk, the last one against all keys, and the whole prompt, by s2o_attention_paged from a cache whose
pages lie in no order; beside it the same call on one array, and pages gathered into one array first. "pass" wants the
same bits and at most 10 % more time than on one array. And from a cache of 8 bits, beside a 16-bit one with its values.

Errors are rel_l2 to dense attention in float32. Elsewhere "pass" says that chunks or packing give what the plain calls
give: at tau 0 outputs that differ by no more than rounding (unit roundoff, as rel_l2), else density and error within
10 %.
Ratios: S2O's time over the other's. Needs PyTorch with CUDA, and CuPy.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import _baselines
import _common
import _exact
import _paged
import _sources
import numpy as np

import s2o_cupy
from s2o_cupy import S2OConfig, S2OStats, s2o_attention, s2o_attention_paged
from s2o_cupy.spec import DEFAULT_TAU
from s2o_cupy.tools.patterns import PATTERNS
from s2o_cupy.tools.progress import Report, progress

Row = dict[str, Any]
Step = Callable[[str], None]
SLACK = 0.1  # of density and error, and of what pages cost

ERRORS: list[_common.Column] = [
    ("density", "density", ".4f"),
    ("plain density", "plain_density", ".4f"),
    ("within 10 %", "density_like", "s"),
    ("rel_l2", "rel_l2", ".5f"),
    ("plain rel_l2", "plain_rel_l2", ".5f"),
    ("within 10 %", "error_like", "s"),
    ("difference", "difference", ".5f"),
    ("rounding", "difference_like", "s"),
]
CHUNKED: list[_common.Column] = [
    ("tokens", "length", ",d"),
    ("chunk", "chunk", ",d"),
    ("order", "order", "s"),
    ("tau", "tau", "g"),
    ("chunks ms", "s2o_ms", ".2f"),
    ("one call ms", "plain_ms", ".2f"),
    ("FlashAttention-2 chunks ms", "flash2_chunks_ms", ".2f"),
    ("cuDNN one call ms", "cudnn_ms", ".2f"),
    ("/ one call", "x_plain", ".3f"),
    ("/ FA2 chunks", "x_flash2_chunks", ".3f"),
    ("/ cuDNN", "x_cudnn", ".3f"),
    *ERRORS,
    ("FA2 chunks' rel_l2", "flash2_chunks_rel_l2", ".5f"),
]
PACKED: list[_common.Column] = [
    ("tokens", "length", ",d"),
    ("sequences", "sequences", "d"),
    ("longest", "longest", ",d"),
    ("order", "order", "s"),
    ("tau", "tau", "g"),
    ("packed ms", "s2o_ms", ".2f"),
    ("alone ms", "plain_ms", ".2f"),
    ("queued ms", "queue_ms", ".2f"),
    ("cuDNN ms", "cudnn_ms", ".2f"),
    ("FlashAttention-2 ms", "flash2_ms", ".2f"),
    ("varlen_attn ms", "varlen_ms", ".2f"),
    ("/ alone", "x_plain", ".3f"),
    ("/ queued", "x_queue", ".3f"),
    ("/ cuDNN", "x_cudnn", ".3f"),
    ("/ varlen_attn", "x_varlen", ".3f"),
    *ERRORS,
    ("varlen_attn's rel_l2", "varlen_rel_l2", ".5f"),
]
PAGED: list[_common.Column] = [
    ("call", "call", "s"),
    ("queries", "seqlen_q", ",d"),
    ("keys", "seqlen_k", ",d"),
    ("page size", "page_size", "d"),
    ("order", "order", "s"),
    ("tau", "tau", "g"),
    ("paged ms", "s2o_ms", ".3f"),
    ("one array ms", "plain_ms", ".3f"),
    ("gathered first ms", "gather_ms", ".3f"),
    ("/ one array", "x_plain", ".3f"),
    ("/ gathered first", "x_gather", ".3f"),
    ("within 10 %", "cost_like", "s"),
    ("same bits", "bits_like", "s"),
    ("fp8 ms", "fp8_ms", ".3f"),
    ("fp8 / its values", "x_fp8", ".3f"),
    ("fp8 same bits", "fp8_bits_like", "s"),
]


# ---------------------------------------------------------------- all


def pooled_density(stats: Sequence[S2OStats]) -> float:
    """Pairs computed / pairs of dense attention, of several calls with as many heads."""
    pairs = [x.geometry.causal_pairs() for x in stats]
    return sum(x.density * n for x, n in zip(stats, pairs, strict=True)) / sum(pairs)


def said(good: bool) -> str:
    return "pass" if good else "FAIL"


def verdicts(row: Row, roundoff: float) -> dict[str, str]:
    """Whether a row is like the plain calls."""
    if row["tau"] == 0:
        return {"difference_like": said(row["difference"] <= roundoff)}
    near = lambda key: said(abs(row[key] / row[f"plain_{key}"] - 1) <= SLACK)  # noqa: E731
    found = {"error_like": near("rel_l2")}
    if "density" in row:
        found["density_like"] = near("density")
    return found


def roundoff(dtype: str) -> float:
    """The largest relative error of rounding to it."""
    return {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]


def rel_l2(parts: Sequence[np.ndarray]) -> float:
    """Of `_exact.sums` of parts of an output."""
    return _exact.pooled(np.sum(parts, axis=0))["rel_l2"]


def difference(o: Any, plain: Any) -> float:
    """Of outputs [batch, heads, seqlen, head_dim], as rel_l2."""
    return rel_l2([_exact.sums(o, plain)])


def timed(name: str, function: Callable[[], Any], args: argparse.Namespace) -> Row:
    """A baseline's column, without it where PyTorch cannot run it here."""
    try:
        return {f"{name}_ms": _common.time_ms(function, args.repeats)}
    except (RuntimeError, NotImplementedError) as error:  # a size or a mask that it does not take, or no memory
        print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return {}


def ratios(row: Row, names: Sequence[str]) -> Row:
    return _common.ratios(row, names) if "s2o_ms" in row else {}


def s2o_configs(args: argparse.Namespace) -> Iterator[S2OConfig]:
    for order, tau in itertools.product(args.orders, args.taus):
        yield _common.config_of(args, order, tau=tau)


# ---------------------------------------------------------------- chunks


def chunks(length: int, chunk: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + chunk, length)) for begin in range(0, length, chunk)]


def in_chunks(attend: Callable[..., Any], q: Any, k: Any, v: Any, chunk: int, out: Any) -> list[Any]:
    """attend(q, k, v, out=) of each chunk's queries and the keys up to its end; what each call returned."""
    return [
        attend(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], out=out[:, :, begin:end])
        for begin, end in chunks(q.shape[2], chunk)
    ]


def dense_chunks(q: Any, k: Any, v: Any, chunk: int) -> list[Any]:
    """FlashAttention-2 of the same; a list of its outputs, which costs less than writing them into one."""
    with only("flash2"):
        return in_chunks(lambda q, k, v, out: _baselines.flash2_lower_right(q, k, v), q, k, v, chunk, q)


def only(name: str) -> Any:
    from torch.nn.attention import sdpa_kernel

    return sdpa_kernel(_baselines.sdpa_backends()[name])


def run_chunked(args: argparse.Namespace, step: Step, device: str = "cuda") -> list[Row]:
    import torch

    step("chunked: input")
    case = _sources.Case(args.input, args.length)
    q, k, v = _sources.load(case, args.dtype, device, **sizes(args))
    exact, out = _exact.dense(q, k, v), torch.empty_like(q)
    common: Row = case.row() | heads_of(q, k) | {"part": "chunked", "length": args.length, "chunk": args.chunk}
    step("chunked: dense")
    for name, function in _baselines.available().items():
        if name in args.baselines:
            common |= timed(name, partial(function, q, k, v), args)
    if "flash2" in args.baselines:
        common |= timed("flash2_chunks", partial(dense_chunks, q, k, v, args.chunk), args)
        if "flash2_chunks_ms" in common:  # a check that it is the same attention
            found = torch.cat(dense_chunks(q, k, v, args.chunk), 2)
            common["flash2_chunks_rel_l2"] = difference(found, exact)
            del found
    rows = []
    for config in s2o_configs(args):
        row = common | _common.describe(config)
        step(f"chunked: {row['order']}, tau {config.tau:g}")
        def attend(q: Any, k: Any, v: Any, config: S2OConfig = config, **options: Any) -> Any:
            own = config.of_chunk(k.shape[2] - q.shape[2], k.shape[2], args.length)
            return s2o_attention(q, k, v, config=own, **options)

        plain, stats = attend(q, k, v, return_stats=True)
        results = in_chunks(partial(attend, return_stats=True), q, k, v, args.chunk, out)
        row["density"], row["plain_density"] = pooled_density([x for _, x in results]), stats.density
        row["rel_l2"], row["plain_rel_l2"] = difference(out, exact), difference(plain, exact)
        row["difference"] = difference(out, plain)
        row["same_bits"] = bool((out == plain).all())
        row["s2o_ms"] = _common.time_ms(lambda: in_chunks(attend, q, k, v, args.chunk, out), args.repeats)
        row["plain_ms"] = _common.time_ms(lambda: attend(q, k, v, out=out), args.repeats)
        row |= verdicts(row, roundoff(args.dtype)) | ratios(row, ("plain", "flash2_chunks", *args.baselines))
        rows.append(row)
    return rows


# ---------------------------------------------------------------- a packed batch


def draw_lengths(total: int, count: int, seed: int = 0, spread: float = 128.0) -> list[int]:
    """``count`` lengths that add up to ``total``, log-uniform: the longest up to ``spread`` times the shortest."""
    if not 0 < count <= total:
        raise ValueError(f"{count} sequences of {total} tokens together; accepted: 1 to {total} sequences")
    shares = np.exp(np.random.default_rng(seed).uniform(0, np.log(spread), count))
    ends = np.rint(np.cumsum(shares) / shares.sum() * (total - count)).astype(int)
    return (np.diff(ends, prepend=0) + 1).tolist()


class Packed:
    """Sequences in one tensor each of q, k and v: [total, heads, head_dim]."""

    def __init__(self, sequences: Sequence[Sequence[Any]]) -> None:
        """Each q, k and v of [1, heads, seqlen, head_dim]."""
        import torch

        lengths = [q.shape[2] for q, _, _ in sequences]
        self.cu_seqlens = [0, *itertools.accumulate(lengths)]
        parts = zip(*sequences, strict=True)
        self.q, self.k, self.v = (torch.cat([x[0].transpose(0, 1) for x in part]) for part in parts)

    def alone(self, x: Any = None) -> list[Any]:
        """(q, k, v) of each sequence, or its part of ``x``: views [1, heads, seqlen, head_dim]."""
        cut = lambda x, a, b: x[a:b].transpose(0, 1)[None]  # noqa: E731
        pairs = itertools.pairwise(self.cu_seqlens)
        if x is not None:
            return [cut(x, *pair) for pair in pairs]
        return [tuple(cut(part, *pair) for part in (self.q, self.k, self.v)) for pair in pairs]


def load_packed(args: argparse.Namespace, device: str) -> Packed:
    """Pieces of the input one after the other; of a pattern, each from a seed of its own."""
    sequences, offset = [], 0
    for i, length in enumerate(draw_lengths(args.length, args.sequences, args.seed)):
        case = _sources.Case(args.input, length, 0 if args.input in PATTERNS else offset)
        sequences.append(_sources.load(case, args.dtype, device, **sizes(args), seed=args.seed + i))
        offset += length
    return Packed(sequences)


def packed_call(packed: Packed, config: S2OConfig) -> Callable[..., Any] | None:
    """s2o_attention_varlen of a batch, None where this s2o_cupy has no such function."""
    varlen = getattr(s2o_cupy, "s2o_attention_varlen", None)
    return varlen and partial(varlen, packed.q, packed.k, packed.v, packed.cu_seqlens, config=config)


def run_packed(args: argparse.Namespace, step: Step, device: str = "cuda") -> list[Row]:
    step("packed: input")
    packed = load_packed(args, device)
    sequences = packed.alone()
    lengths = [q.shape[2] for q, _, _ in sequences]
    exact = [_exact.dense(*qkv) for qkv in sequences]
    common: Row = _sources.Case(args.input).row() | heads_of(*sequences[0][:2])
    common |= {"part": "packed", "length": sum(lengths), "sequences": len(lengths), "longest": max(lengths)}
    common["lengths"] = lengths
    step("packed: dense")
    for name, function in _baselines.available().items():
        if name in args.baselines:
            common |= timed(name, partial(one_by_one, function, sequences), args)
    if varlen := _baselines.varlen(packed.q, packed.k, packed.v, packed.cu_seqlens):
        common |= timed("varlen", varlen, args)
        common["varlen_rel_l2"] = error(packed.alone(varlen()), exact)
    rows = []
    for config in s2o_configs(args):
        row = common | _common.describe(config)
        step(f"packed: {row['order']}, tau {config.tau:g}")
        rows.append(row | measure_packed(args, packed, exact, config))
        rows[-1] |= ratios(rows[-1] | row, ("plain", "queue", "varlen", *args.baselines))
    return rows


def measure_packed(args: argparse.Namespace, packed: Packed, exact: Sequence[Any], config: S2OConfig) -> Row:
    attend, sequences = partial(s2o_attention, config=config), packed.alone()
    results = [attend(*qkv, return_stats=True) for qkv in sequences]
    plain = [o for o, _ in results]
    row: Row = {"tau": config.tau, "plain_density": pooled_density([stats for _, stats in results])}
    row["plain_rel_l2"] = error(plain, exact)
    row["plain_ms"] = sum(_common.time_ms(partial(attend, *qkv), args.repeats) for qkv in sequences)
    row["queue_ms"] = _common.time_ms(partial(one_by_one, attend, sequences), args.repeats)
    call = packed_call(packed, config)
    if call is None:
        return row
    o = packed.alone(call())
    row["rel_l2"], row["difference"] = error(o, exact), error(o, plain)
    row["same_bits"] = all(bool((x == y).all()) for x, y in zip(o, plain, strict=True))
    if "return_stats" in inspect.signature(s2o_cupy.s2o_attention_varlen).parameters:
        found = call(return_stats=True)[1]
        row["density"] = pooled_density(found) if isinstance(found, list | tuple) else found.density
    row["s2o_ms"] = _common.time_ms(call, args.repeats)
    return row | verdicts(row, roundoff(args.dtype))


def one_by_one(function: Callable[..., Any], sequences: Sequence[Any]) -> list[Any]:
    return [function(*qkv) for qkv in sequences]


def error(o: Sequence[Any], exact: Sequence[Any]) -> float:
    """rel_l2 over all sequences."""
    return rel_l2([_exact.sums(*pair) for pair in zip(o, exact, strict=True)])


# ---------------------------------------------------------------- a paged cache


def paged_calls(length: int, chunk: int) -> dict[str, tuple[int, int]]:
    """Queries from, to: they see the keys up to there."""
    found = {"prompt": (0, length)}
    return {"first chunk": (0, chunk), "last chunk": (length - chunk, length)} | found if chunk < length else found


def run_paged(args: argparse.Namespace, step: Step, device: str = "cuda") -> list[Row]:
    import torch

    step("paged: input")
    case = _sources.Case(args.input, args.length)
    q, k, v = _sources.load(case, args.dtype, device, **sizes(args))
    common: Row = case.row() | heads_of(q, k) | {"part": "paged", "length": args.length}
    step("paged: pages")
    caches = [_paged.Cache(k, v, page_size, args.seed) for page_size in args.page_sizes]
    rows = []
    for config in s2o_configs(args):
        described = common | _common.describe(config)
        step(f"paged: {described['order']}, tau {config.tau:g}")
        for name, (begin, end) in paged_calls(args.length, args.chunk).items():
            queries = q[:, :, begin:end]
            out = torch.empty_like(queries)
            attend = partial(s2o_attention, config=config, out=out)
            plain = partial(attend, queries, k[:, :, :end], v[:, :, :end])
            row = described | {"call": name, "seqlen_q": end - begin, "seqlen_k": end}
            for cache in caches:
                rows.append(row | measure_paged(args, cache, queries, end, config, plain, attend))
    return rows


def measure_paged(
    args: argparse.Namespace, cache: _paged.Cache, q: Any, seqlen_k: int, config: S2OConfig, plain: Callable[[], Any],
    attend: Callable[..., Any],
) -> Row:  # fmt: skip
    """``plain()`` and ``attend(q, k, v)`` write the same memory."""

    def from_pages(of: _paged.Cache) -> Callable[..., Any]:
        return partial(
            s2o_attention_paged, q, of.k, of.v, of.table, seqlen_k=seqlen_k, layout=of.layout, config=config
        )

    call = from_pages(cache)
    expected = plain().clone()
    row: Row = {"page_size": cache.page_size, "same_bits": bool((call() == expected).all())}
    call = partial(call, out=plain())
    row["s2o_ms"] = _common.time_ms(call, args.repeats)
    row["gather_ms"] = _common.time_ms(lambda: attend(q, *cache.gathered(seqlen_k)), args.repeats)
    row["plain_ms"] = _common.time_ms(plain, args.repeats)
    row |= ratios(row, ("plain", "gather"))
    eight, wide = map(from_pages, cache.rounded)
    row["fp8_bits_like"] = said(bool((eight() == wide()).all()))
    row["wide_ms"] = _common.time_ms(partial(wide, out=plain()), args.repeats)
    row["fp8_ms"] = _common.time_ms(partial(eight, out=plain()), args.repeats)
    row["x_fp8"] = row["fp8_ms"] / row["wide_ms"]
    return row | {"bits_like": said(row["same_bits"]), "cost_like": said(row["x_plain"] <= 1 + SLACK)}


# ---------------------------------------------------------------- the script


def sizes(args: argparse.Namespace) -> dict[str, int]:
    """Of a pattern."""
    return {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}


def heads_of(q: Any, k: Any) -> Row:
    return {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[3]}


PARTS: dict[str, Callable[..., list[Row]]] = {"chunked": run_chunked, "packed": run_packed, "paged": run_paged}


def run(args: argparse.Namespace, report: Report) -> list[Row]:
    done = itertools.count()
    total = len(args.parts) * (2 + len(args.orders) * len(args.taus))
    rows: list[Row] = []
    for part in args.parts:
        rows += PARTS[part](args, lambda what: report(next(done), total, what))
        _common.write_result(args, rows)
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default="mixture", help=f"{_sources.HELP} (default: %(default)s)")
    parser.add_argument("--parts", type=_common.names, default=[*PARTS], help="chunked, packed, paged (default: all)")
    parser.add_argument("--length", type=int, default=131072, help="of the prompt, and of all packed sequences")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--page-sizes", type=_common.integers, default=[16, 64, 256], help="(default: 16,64,256)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, pages and patterns (default: %(default)s)")
    parser.add_argument("--taus", type=_common.numbers, default=[0.0, DEFAULT_TAU])
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=32, help="of a pattern (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="of a pattern (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="of a pattern (default: %(default)s)")
    _common.add_s2o(parser)
    parser.add_argument("--baselines", type=_common.names, default=["cudnn", "flash2"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    if not args.parts or set(args.parts) - set(PARTS):
        parser.error(f"--parts: accepted: {', '.join(PARTS)}")
    if min(args.chunk, args.sequences) < 1 or args.length < args.sequences:
        parser.error("--chunk, --sequences: accepted: 1 or more; --length at least as many as --sequences")
    if not _common.has_gpu():
        parser.error("needs an NVIDIA GPU, CuPy and PyTorch with CUDA")
    return args


def main() -> None:
    args = parse()
    if "packed" in args.parts and not hasattr(s2o_cupy, "s2o_attention_varlen"):
        print("this s2o_cupy has no s2o_attention_varlen: packed batches run one by one only", file=sys.stderr)
    with progress("serving") as report:
        rows = run(args, report)
    for part, columns in (("chunked", CHUNKED), ("packed", PACKED), ("paged", PAGED)):
        if found := [row for row in rows if row["part"] == part]:
            print(f"{part}\n{_common.table(found, columns)}\n")


if __name__ == "__main__":
    main()
