"""What every benchmark shares: arguments, where a figure came from, timing, and the search for a tau."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import _digest
import _missing  # noqa: F401  (says which package is missing)
import numpy as np
from _published import told, without_folders

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from s2o_cupy import S2OConfig  # noqa: E402
from s2o_cupy.by_head import check_one_error  # noqa: E402
from s2o_cupy.spec import PATHS, TAILS  # noqa: E402
from s2o_cupy.tools.info import gpu_problem  # noqa: E402

# ---------------------------------------------------------------- arguments

# Stages of a call that end a part of it. No event after each stage, as it keeps the next kernel from starting at once.
PART_ENDS = {
    "pass1": "pass1", "merge_last": "pass2", "key_moments": "tail", "rank_keys": "ordering", "pass2": "pass2",
    "add_tail": "tail",
}  # fmt: skip


def integers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def numbers(text: str) -> list[float]:
    return [float(x) for x in text.split(",")]


def errors(text: str) -> list[float]:
    """Of S2O: rel_l2 against dense attention."""
    try:
        return [check_one_error("error", x, "rel_l2") for x in numbers(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def names(text: str) -> list[str]:
    return [x for x in text.split(",") if x]


ORDER_FIELDS = ("rank", "pooled_queries", "window", "segment", "unit", "clusters")


def parse_order(text: str) -> dict[str, Any]:
    """ "rank:pooled queries:window:segment:unit:clusters", all but the rank optional."""
    rank, *rest = text.split(":")
    fields = ORDER_FIELDS[1:]
    order: dict[str, Any]
    try:
        order = {"rank": rank, **{name: int(x) for name, x in zip(fields, rest, strict=False)}}
        S2OConfig(**order)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    if len(rest) > len(fields):
        raise argparse.ArgumentTypeError(f"{text}: accepted: rank[:{'[:'.join(fields)}{']' * len(fields)}")
    return order


def orders(text: str) -> list[dict[str, Any]]:
    return [parse_order(x) for x in text.split(",")]


def fields(text: str) -> dict[str, Any]:
    """ "tau=0.02,segment=512": any of S2OConfig's fields, as it accepts them; None is a value too."""
    found: dict[str, Any] = {}
    for part in names(text):
        name, equals, value = part.partition("=")
        if not equals or name in found:
            raise argparse.ArgumentTypeError(f"{text}: {part}: accepted: FIELD=VALUE,..., each field once")
        found[name] = None if value == "None" else _number(value)
    try:
        S2OConfig(**found)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return found


def _number(text: str) -> int | float | str:
    """As one, if it is one."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def text_of_fields(config: S2OConfig) -> str:
    """What `fields` reads: the fields that are not the default's and do not follow from others, or "default"."""
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name in (*given, *given):  # twice: what follows from a field is left out before the field itself
        rest = {other: value for other, value in given.items() if other != name}
        with contextlib.suppress(ValueError):
            if S2OConfig(**rest) == config:
                given = rest
    return ",".join(f"{name}={str(value).removesuffix('.0')}" for name, value in given.items()) or "default"


def head_counts(text: str) -> list[tuple[int, int]]:
    """ "32:8,8:2": query heads and KV heads."""
    counts = []
    for pair in text.split(","):
        heads, kv_heads = map(int, pair.split(":"))
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            raise argparse.ArgumentTypeError(f"{pair}: accepted: heads:kv_heads, heads a multiple of kv_heads")
        counts.append((heads, kv_heads))
    return counts


def add_s2o(parser: argparse.ArgumentParser) -> None:
    """Options of every call but tau."""
    parser.add_argument(
        "--orders", type=orders, default=orders(S2OConfig().rank),
        help="comma-separated rank[:pooled_queries[:window[:segment[:unit]]]]",
    )  # fmt: skip
    parser.add_argument("--tail", choices=TAILS, default=S2OConfig.tail)
    parser.add_argument("--path", choices=PATHS, default="auto")
    parser.add_argument("--workspace-mib", type=int, default=S2OConfig.workspace_bytes >> 20)
    parser.add_argument(
        "--dense-up-to", type=int, help="keys up to which the call is plain dense attention; default: the library's"
    )


def config_of(args: argparse.Namespace, order: dict[str, Any], **fields: Any) -> S2OConfig:
    return S2OConfig(
        path=args.path, tail=args.tail, workspace_bytes=args.workspace_mib << 20, dense_up_to=args.dense_up_to,
        **order, **fields,
    )  # fmt: skip


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where a GPU is usable")


def check_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Settle --device, or end with what is wrong with it."""
    gpu = has_gpu()
    args.device = args.device or ("cuda" if gpu else "cpu")
    if args.device == "cuda" and not gpu:
        parser.error("--device cuda needs an NVIDIA GPU, CuPy and PyTorch with CUDA")
    if args.device == "cuda" and args.dtype == "float32":
        parser.error("--dtype float32 needs --device cpu: the kernels take float16 and bfloat16")


# Arguments that are paths, of which a result keeps the names, in its command.
FILES = ("models", "hugging_face", "text", "tokens", "haystack", "weights", "rivals")


def settings(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The arguments, and what every row has in common."""
    kept = {k: v for k, v in vars(args).items() if k not in ("json", "input", "plot", *FILES)}
    if "method" in kept:  # of a method's file the name
        kept["method"] = [without_folders(x) for x in kept["method"]]
    shared = (k for k in ("segment", "rank", "unit", "clusters", "window") if rows and k in rows[0])
    return kept | {k: rows[0][k] for k in shared if len({row.get(k) for row in rows}) == 1}


# ---------------------------------------------------------------- results


def provenance(device: str = "cuda") -> dict[str, Any]:
    """Commit, device, versions and command of a run, and digests of the code that it ran."""
    commit = os.environ.get("S2O_COMMIT", "")
    if not commit:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = asked.stdout.strip() or "unknown"
    about = {"commit": commit, "date": datetime.date.today().isoformat(), **_machine(device), "command": told(sys.argv)}
    return about | _digest.digests()


def _machine(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"device": f"CPU ({platform.machine()})", "numpy": np.__version__}
    import cupy
    import torch

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cupy": cupy.__version__,
        "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
    }


def write_json(path: str | None, result: dict[str, Any]) -> None:
    if path:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_text(json.dumps(result, indent=1) + "\n")


def write_result(
    args: argparse.Namespace, rows: Sequence[dict[str, Any]], device: str = "cuda", note: str = ""
) -> None:
    """To --json, if given: where the rows come from, the arguments, and the rows. ``note``: what pages say below."""
    noted = {"note": note} if note else {}
    write_json(args.json, {**provenance(device), **noted, "settings": settings(args, rows), "rows": rows})


def describe(config: S2OConfig, seqlen_k: int = 0) -> dict[str, Any]:
    """A row's part on how keys were ordered; "order" is as `parse_order` reads it. "tau" of a default, which falls with
    the earlier keys, is that behind ``seqlen_k`` of them."""
    row = {name: getattr(config, name) for name in ORDER_FIELDS if config.rank == "query" or name != "clusters"}
    tau = None if config.error is not None else config.tau_of(seqlen_k)
    falls = config.tau is None and config.error is None
    return {"order": ":".join(map(str, row.values())), **row, "tau": tau, "tau_falls": falls}


def ratios(row: dict[str, Any], baselines: Sequence[str], column: str = "ms") -> dict[str, float]:
    """S2O's time over each baseline's, as columns x_NAME or, of queued times, x_NAME_queued."""
    ending = column.removesuffix("ms")
    return {
        f"x_{name}_{ending}".rstrip("_"): row[f"s2o_{column}"] / row[f"{name}_{column}"]
        for name in baselines
        if row.get(f"{name}_{column}")
    }


Column = tuple[str, str, str]  # heading, key of a row, format


def table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    """Rows as text; a column that no row has is left out."""
    used = [c for c in columns if any(row.get(c[1]) is not None for row in rows)]
    cells = [[heading for heading, _, _ in used]]
    for row in rows:
        cells.append(["" if row.get(key) is None else format(row[key], form) for _, key, form in used])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


# ---------------------------------------------------------------- measuring


def has_gpu() -> bool:
    """Whether the kernels and a PyTorch to compare them with can run."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() and gpu_problem() is None


def time_ms(function: Callable[[], Any], repeats: int = 20, warmup: int = 3, limit_s: float = math.inf) -> float:
    """Median milliseconds of the GPU, by events, over fresh launches; no more than three repeats past ``limit_s``."""
    import torch

    times: list[float] = []
    began = time.perf_counter()
    late = lambda: time.perf_counter() - began > limit_s  # noqa: E731
    for _ in range(warmup):
        function()
        torch.cuda.synchronize()
        if late():
            break
    while len(times) < repeats and not (late() and len(times) >= 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def queued_ms(function: Callable[[], Any], ms: float, groups: int = 5) -> float:
    """Median milliseconds of a call among calls that wait for each other on the GPU, about 20 ms of them a group.

    A call goes before the first event, so that the host is ahead from the start: its time counts only where it is
    longer than the GPU's. ``ms`` is what `time_ms` found.
    """
    import torch

    calls, times = max(2, min(50, math.ceil(20 / ms))), []
    for _ in range(groups):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        function()
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return float(np.median(times))


def host_us(function: Callable[[], Any], ms: float) -> float:
    """Median microseconds until a call on an idle GPU returns to the caller. ``ms`` is what `time_ms` found."""
    import torch

    times = []
    for _ in range(max(5, min(50, math.ceil(1000 / ms)))):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return float(np.median(times)) * 1e6


def release_memory() -> None:
    """Give the GPU back what the pools of PyTorch and CuPy hold and nobody uses; each sees only its own."""
    import cupy
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()


def extra_gib(function: Callable[[], Any]) -> float:
    """Memory that a call on PyTorch tensors takes beside the array it returns, at most and of PyTorch, from which its
    workspace comes; its first call's, as a graph of it would hold its memory already."""
    import torch

    from s2o_cupy import clear_cache

    clear_cache()
    release_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before - out.nbytes) / 2**30


def peak_gib(function: Callable[[], Any], but: Sequence[Any] = ()) -> float:
    """The most memory of the GPU that is in use during a call: what PyTorch holds before it, and what it takes.

    ``but``: tensors there that are the benchmark's own business.
    """
    import torch

    release_memory()
    held, before = torch.cuda.memory_allocated() - sum(x.nbytes for x in but), torch.cuda.mem_get_info()[0]
    function()
    torch.cuda.synchronize()
    return (held + before - torch.cuda.mem_get_info()[0]) / 2**30


def causal_flop(batch: int, heads: int, length: int, head_dim: int) -> float:
    """Floating-point operations of both matrix products of dense causal attention."""
    return 4.0 * batch * heads * head_dim * (length * (length + 1) / 2)


def find_tau(
    measure: Callable[[float], float],
    target: float,
    *,
    rising: bool,
    low: float = 1e-6,
    high: float = 1.0,
    tolerance: float = 0.02,
    steps: int = 16,
) -> float:
    """The tau between ``low`` and ``high`` at which ``measure`` is nearest to ``target``, by bisection.

    ``rising``: whether it rises with tau (an error does) or falls (a density). It may do so in steps; a target
    that is out of reach gives a tau near one end.
    """
    best, distance = low, math.inf
    for _ in range(steps):
        tau = float(f"{math.sqrt(low * high):.3g}")  # as it will be told
        value = measure(tau)
        if abs(value - target) < distance:
            best, distance = tau, abs(value - target)
        if distance <= tolerance * target:
            break
        if (value > target) == rising:
            high = tau
        else:
            low = tau
    return best
