"""NSA beside others' kernels (`nsa.py --rivals`): times in turns, and whether the same is computed.

A row is a length, a group, a part and a pass. ``selected`` is attention to the same given blocks; ``whole`` is all that
a result's "includes" says of each side. ``x_NAME`` is a side's time over ours, so above 1 where ours is faster.
``NAME_o``, ``NAME_dq``, ``NAME_dk``, ``NAME_dv`` are differences from ours, as a share of the root mean square; of the
whole they hold what other selections make of it. ``NAME_same`` tells whether all of them are within `TOLERANCE`.
``NAME_error`` is that from attention in float32, of some rows. ``NAME_blocks`` is the share of ours that a side selects
too, and ``NAME_compressed``, ``NAME_near`` are the differences of the compressed and the window branch alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _nsa_rivals as rivals
import _sources
import torch
from _nsa_rivals import Inputs, Side

from s2o_cupy.nsa import NSAConfig

Row = dict[str, Any]
Tell = Callable[[str], None]
TOLERANCE = 4 * 2.0**-8  # some roundings of bfloat16: others keep parts of sums in it
SAMPLE = 64  # rows of `exact`
GRADIENTS = ("o", "dq", "dk", "dv")


class GpuLost(Exception):
    """A kernel has left the GPU in an error, from which a process does not recover."""


def rows(
    args: argparse.Namespace, settings: Mapping[str, NSAConfig], tell: Tell, device: str = "cuda"
) -> Iterator[tuple[list[Row], dict[str, str]]]:
    """Those of each length, group and kind of block, and what each side includes."""
    kernels = rivals.load(args.rivals, tell)
    if not kernels:
        raise SystemExit("--rivals: none is left to time")
    for length in args.lengths:
        of_input = None
        if args.input != "random":
            of_input = _sources.load(_sources.Case(args.input, length), args.dtype, device)
        for group, block in itertools.product(args.groups, args.blocks):
            at: Row = {"length": length, "group": group, "block": int(block)}
            found = None
            with _telling(_where(at), tell):
                q, k, v, borrowed = _heads(args, of_input, length, group, device)
                at |= {"kv_heads": k.shape[1], "head_dim": k.shape[3]}
                if borrowed:
                    at["query_heads"] = "query heads of neighbouring KV heads among them"
                found = of_case(Inputs.of(q, k, v, settings[block]), kernels, at, args.repeats, tell)
                del q, k, v
            if found is not None:
                yield found


def _where(at: Row) -> str:
    return " ".join(f"{name} {at[name]}" for name in ("length", "group", "block"))


def _heads(args: argparse.Namespace, of_input: Any, length: int, group: int, device: str) -> tuple[Any, Any, Any, bool]:
    """q, k and v, and whether an input's own groups are smaller."""
    if of_input is None:
        sizes = {"heads": args.kv_heads * group, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
        return *_sources.load(_sources.Case("random", length), args.dtype, device, **sizes), False
    q, k, v = of_input
    own = q.shape[1] // k.shape[1]
    if group <= own:
        return *(x.contiguous() for x in _sources.pick_heads(q, k, v, args.kv_heads * group, args.kv_heads)), False
    _sources.pick_heads(q, k, v, args.kv_heads, args.kv_heads)  # refuses too many KV heads
    kept = [g * k.shape[1] // args.kv_heads for g in range(args.kv_heads)]
    heads = [(g * own + i) % q.shape[1] for g in kept for i in range(group)]
    return q[:, heads].contiguous(), k[:, kept].contiguous(), v[:, kept].contiguous(), True


def of_case(
    x: Inputs, kernels: Mapping[str, Any], at: Row, repeats: int, tell: Tell
) -> tuple[list[Row], dict[str, str]]:
    where = _where(at)
    window, whose = rivals.window(x.q, tell)
    ours = rivals.Ours(x)
    sides: dict[str, Side] = {ours.name: ours}
    makers = {}
    for name, found in kernels.items():
        makers[name] = functools.partial(rivals.KNOWN[name], found, window=window)
        with _telling(f"{name} at {where}", tell):
            sides[name] = makers[name](x=x)
    exact = Exact(x)
    found_rows = []
    for part, training in itertools.product(("selected", "whole"), (False, True)):
        calls = {name: getattr(side, part + "_training" * training) for name, side in sides.items()}
        row: Row = {**at, "part": part, "pass": "forward+backward" if training else "forward"}
        told = functools.partial(_tell_at, tell, f"{where} {part} {row['pass']}")
        outputs = _outputs(calls, sides, told)
        row |= differences(outputs, same=part == "selected")
        if part == "whole":
            row["window_of_rivals"] = whose
        elif not training:
            row |= {f"{name}_error": exact.error(o[0]) for name, o in outputs.items()}
        del outputs
        row |= in_turns(calls, repeats, told)
        for name in [*sides][1:]:
            if f"{name}_ms" in row and "s2o_ms" in row:
                row[f"x_{name}"] = row[f"{name}_ms"] / row["s2o_ms"]
        if part == "whole" and not training:
            branches = {"compressed": 0} if whose == "none" else {"compressed": 0, "near": 2}
            row |= _branches(x, sides, makers, branches, told)
        found_rows.append(row)
    return found_rows, {name: side.includes for name, side in sides.items()}


def _outputs(calls: Mapping[str, Callable[[], Any]], sides: Mapping[str, Side], tell: Tell) -> dict[str, Any]:
    """Of each side o, and the gradients where there are some, in our order of axes. A side that fails gives none."""
    found = {}
    for name, call in calls.items():
        with _telling(name, tell):
            made = call()
            made = made[:4] if isinstance(made, tuple) else (made,)
            found[name] = tuple(sides[name].bhsd(x) for x in made)
            _settled()
    return found


def differences(outputs: Mapping[str, Sequence[Any]], same: bool = True) -> Row:
    row: Row = {}
    for name, theirs in outputs.items():
        if name == "s2o" or "s2o" not in outputs:
            continue
        found = {f"{name}_{of}": rel_l2(a, b) for of, a, b in zip(GRADIENTS, theirs, outputs["s2o"], strict=False)}
        row |= found
        if same:
            row[f"{name}_same"] = all(x <= TOLERANCE for x in found.values())
    return row


def rel_l2(x: Any, of: Any) -> float:
    """Head by head, so that no large array is made in float32."""
    squares = [(((a.float() - b.float()) ** 2).sum(), (b.float() ** 2).sum()) for a, b in zip(x[0], of[0], strict=True)]
    off, whole = (float(sum(parts)) for parts in zip(*squares, strict=True))
    return (off / whole) ** 0.5 if whole else off


def _branches(
    x: Inputs,
    sides: Mapping[str, Side],
    makers: Mapping[str, Callable[..., Side]],
    branches: Mapping[str, int],
    tell: Tell,
) -> Row:
    row: Row = {}
    for called, branch in branches.items():
        only = x.only(branch)
        of_ours = rivals.Ours(only).whole()
        for name in [*sides][1:]:
            with _telling(f"{name}, {called} branch alone", tell):
                side = makers[name](x=only)
                row[f"{name}_{called}"] = rel_l2(side.bhsd(side.whole()), of_ours)
    for name, side in [*sides.items()][1:]:
        with _telling(f"{name}, its blocks", tell):
            blocks = side.blocks()
            if blocks is not None:
                own = x.blocks[0]
                shared = torch.stack([(a[:, :, None] == b[:, None]).any(-1) for a, b in zip(own, blocks, strict=True)])
                row[f"{name}_blocks"] = float((shared & (own >= 0)).sum() / (own >= 0).sum())
    return row


class Exact:
    """Attention to the given blocks in float32, of some rows."""

    def __init__(self, x: Inputs) -> None:
        length, (kv_heads, block) = x.q.shape[2], (x.k.shape[1], x.config.block)
        self.rows = torch.linspace(0, length - 1, min(SAMPLE, length), device=x.q.device).round().long()
        made = []
        for head, q in enumerate(x.q[0][:, self.rows].float().unflatten(0, (kv_heads, -1))):
            blocks = x.blocks[0, head][self.rows].long()
            keys = (blocks[:, :, None] * block + torch.arange(block, device=blocks.device)).flatten(1)  # [rows, keys]
            seen = (keys >= 0) & (keys <= self.rows[:, None])
            k, v = (of[0, head][keys.clamp(0, length - 1)].float() for of in (x.k, x.v))
            scores = torch.einsum("grd,rkd->grk", q, k) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            made.append(torch.einsum("grk,rkd->grd", weights, v))
        self.o = torch.cat(made)[None]

    def error(self, o: Any) -> float:
        return rel_l2(o[:, :, self.rows], self.o)


def in_turns(
    calls: Mapping[str, Callable[[], Any]], repeats: int, tell: Tell, warmup: int = 2, limit_s: float = 10
) -> Row:
    """Median milliseconds of each, from the host's call on: one call of each, then again. No more than three turns past
    ``limit_s`` of calls. One that fails is left out from there on."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        for name in [*times]:
            try:
                ms = _timed(calls[name])
            except Exception as error:  # whatever another's code raises
                _settled(error)
                tell(f"{name} failed: {rivals.short(error)}")
                del times[name]
                continue
            if turn >= warmup:
                times[name].append(ms)
        if turn >= warmup + 2 and sum(map(sum, times.values())) > limit_s * 1e3:
            break
    return {f"{name}_ms": statistics.median(ms) for name, ms in times.items()}


def _timed(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    made = call()
    end.record()
    torch.cuda.synchronize()
    del made
    return begin.elapsed_time(end)


@contextlib.contextmanager
def _telling(what: str, tell: Tell) -> Iterator[None]:
    """What fails inside is told, and left out."""
    try:
        yield
    except GpuLost:
        raise
    except Exception as error:  # whatever another's code raises
        _settled(error)
        tell(f"{what} left out: {rivals.short(error)}")


def _settled(cause: BaseException | None = None) -> None:
    """Wait for the GPU; raise where it is lost for this process."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise GpuLost(rivals.short(cause or error)) from error


def _tell_at(tell: Tell, where: str, what: str) -> None:
    tell(f"{where}: {what}")
