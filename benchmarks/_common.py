"""What every benchmark shares: inputs, timing, an exact answer to compare with, and where a figure came from."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def provenance() -> dict[str, Any]:
    """Commit, device, versions and command of a run."""
    commit = os.environ.get("S2O_COMMIT", "")
    if not commit:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = asked.stdout.strip() or "unknown"
    import cupy

    return {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cupy": cupy.__version__,
        "cuda_driver": cupy.cuda.runtime.driverGetVersion(),
        "command": _command(),
    }


def _command() -> str:
    """This run's command, as from the root of a checkout and without other folders of the machine that measured."""
    script, *arguments = sys.argv
    plain = (pathlib.Path(x).name if x[:1] in "/." else x for x in arguments)
    return shlex.join(["python", f"benchmarks/{pathlib.Path(script).name}", *plain])


def write_json(path: str | None, result: dict[str, Any]) -> None:
    if path:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_text(json.dumps(result, indent=1) + "\n")


def random_input(length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Standard normal q [1, heads, length, head_dim] and k, v [1, kv_heads, length, head_dim] on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = lambda n: (1, n, length, head_dim)  # noqa: E731
    return tuple(
        torch.randn(shape(n), generator=generator, device="cuda", dtype=torch.float32).to(dtype)
        for n in (heads, kv_heads, kv_heads)
    )


def trace_input(source: str, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v of a recorded trace, cut to ``length`` tokens.

    ``source`` is a trace file that `s2o_cupy.inputs.load` reads, or a Python file with a function
    ``qkv_32_8(length)`` that returns q [1, 32, length, 128] and k, v [1, 8, length, 128] as tensors.
    """
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location("trace_source", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return tuple(x.to("cuda", dtype) for x in module.qkv_32_8(length))
    from s2o_cupy import inputs

    arrays = [np.asarray(x, np.float32) for x in inputs.load(source)]
    if arrays[0].shape[-2] < length:
        raise ValueError(f"{source} has {arrays[0].shape[-2]} tokens; accepted: lengths up to that, got {length}")
    return tuple(
        torch.from_numpy(x if x.ndim == 4 else x[None])[:, :, :length].contiguous().to("cuda", dtype) for x in arrays
    )


def time_ms(function: Callable[[], Any], repeats: int = 20, warmup: int = 3) -> float:
    """Median milliseconds of the GPU, by events, over fresh launches."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(np.median(times))


def dense_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int = 2048) -> torch.Tensor:
    """Causal dense attention in float32 without TF32, [batch, heads, length, head_dim]; a chunk of rows at a time."""
    torch.backends.cuda.matmul.allow_tf32 = False
    length, group = q.shape[2], q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kh, vh = (x[b, h // group].float() for x in (k, v))
            for begin in range(0, length, rows):
                end = min(begin + rows, length)
                s = (q[b, h, begin:end].float() * q.shape[-1] ** -0.5) @ kh[:end].T
                s[:, begin:].masked_fill_(hidden[: end - begin, : end - begin], float("-inf"))
                out[b, h, begin:end] = s.softmax(-1) @ vh[:end]
    return out


def rel_l2(x: torch.Tensor, exact: torch.Tensor) -> float:
    """||x - exact|| / ||exact|| over all elements, accumulated in float64 head by head."""
    error = total = 0.0
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            reference = exact[b, h].double()
            error += float((x[b, h].double() - reference).square().sum())
            total += float(reference.square().sum())
    return (error / total) ** 0.5


def causal_flop(batch: int, heads: int, length: int, head_dim: int) -> float:
    """Floating-point operations of both matrix products of dense causal attention."""
    return 4.0 * batch * heads * head_dim * (length * (length + 1) / 2)
