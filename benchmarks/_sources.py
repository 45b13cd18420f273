"""Inputs of a benchmark: trace files, programs that make q, k and v, and synthetic patterns.

NumPy arrays on the CPU, PyTorch tensors on the GPU, where patterns are made as well.
"""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import _common  # noqa: F401  (finds s2o_cupy)
import numpy as np

from s2o_cupy.arrays.frameworks import to_host
from s2o_cupy.tools import inputs
from s2o_cupy.tools.patterns import PATTERNS

HELP = (
    'a trace file, a .py with qkv_32_8(length[, offset[, layers]]), "trace" or "retrieval" (recorded), or a pattern: '
    + ", ".join(PATTERNS)
)


@dataclass(frozen=True)
class Case:
    """One input. ``length`` None is a file's whole; offset and layers are only for what has them."""

    input: str
    length: int | None = None
    offset: int = 0
    layers: tuple[int, ...] | None = None

    def __str__(self) -> str:
        parts = [pathlib.Path(self.input).name, "" if self.length is None else f"{self.length:,}"]
        parts += [f"from {self.offset:,}"] if self.offset else []
        parts += [f"layers {':'.join(map(str, self.layers))}"] if self.layers else []
        return " ".join(filter(None, parts))

    def row(self) -> dict[str, Any]:
        """What a result says of it, without the machine's folders."""
        layers = ":".join(map(str, self.layers)) if self.layers else None
        return {"input": pathlib.Path(self.input).name, "offset": self.offset or None, "layers": layers}


def parse_layers(text: str) -> list[tuple[int, ...]]:
    """ "0:2:4:6,1:3:5:6": sets of layers."""
    return [tuple(int(x) for x in part.split(":")) for part in text.split(",")]


def is_program(source: str) -> bool:
    return source.endswith(".py")


def cases(
    sources: Sequence[str],
    lengths: Sequence[int] | None,
    offsets: Sequence[int] = (0,),
    layers: Sequence[tuple[int, ...]] | None = None,
    default_length: int = 8192,
) -> list[Case]:
    """Every source at every length, offset and set of layers that make a difference to it."""
    found = []
    any_length: list[int | None] = [*lengths] if lengths else [None]
    for source in sources:
        whole = source not in PATTERNS and not is_program(source)
        for length, offset, chosen in itertools.product(
            any_length if lengths or whole else [default_length],
            [0] if source in PATTERNS else offsets,
            layers if layers and is_program(source) else [None],
        ):
            found.append(Case(source, length, offset, chosen))
    return found


def load(
    case: Case,
    dtype: str,
    device: str,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    seed: int = 0,
) -> tuple[Any, Any, Any]:
    """q [batch, heads, seqlen, head_dim], k and v of a case; sizes and seed are for patterns, others have theirs."""
    if case.input in PATTERNS:
        assert case.length is not None
        if device == "cpu":
            return inputs.builtin(case.input, case.length, heads, kv_heads, head_dim, dtype, seed)
        arrays = PATTERNS[case.input](TorchRandom(seed, device), case.length, heads, kv_heads, head_dim)
        return _place([x[None] for x in arrays], dtype, device)
    if is_program(case.input):
        return _place(_program(case), dtype, device)
    return _place(_file(case), dtype, device)


class TorchRandom:
    """What `s2o_cupy.tools.patterns` draws from, on a GPU."""

    def __init__(self, seed: int, device: str) -> None:
        import torch

        self.options: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(seed)}

    def standard_normal(self, size: Any, dtype: Any) -> Any:
        import torch

        return torch.randn(size, dtype=torch.float32, **self.options)

    def permutation(self, x: int) -> Any:
        import torch

        return torch.randperm(x, **self.options)


def _file(case: Case) -> list[Any]:
    arrays = inputs.builtin(case.input) if case.input in inputs.RECORDED else inputs.load(case.input)
    q, k, v = (x if x.ndim == 4 else x[None] for x in arrays)
    if case.length is None and case.offset == 0:
        return [q, k, v]
    tokens = q.shape[2]
    if k.shape[2] != tokens:
        raise ValueError(f"{case.input}: {tokens} queries of {k.shape[2]} tokens cannot be cut; leave the length out")
    length = tokens - case.offset if case.length is None else case.length
    if not 0 < length <= tokens - case.offset:
        raise ValueError(f"{case}: the file has {tokens} tokens; accepted: lengths up to {tokens - case.offset}")
    return [x[:, :, case.offset : case.offset + length] for x in (q, k, v)]


def module_of(path: str) -> Any:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location("trace_source", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _program(case: Case) -> list[Any]:
    """What the file's qkv_32_8 returns; it is given no more arguments than the case needs."""
    module = module_of(case.input)
    if case.layers is not None:
        found = module.qkv_32_8(case.length, case.offset, case.layers)
    elif case.offset:
        found = module.qkv_32_8(case.length, case.offset)
    else:
        found = module.qkv_32_8(case.length)
    if found[0].shape[2] != case.length:
        raise ValueError(f"{case}: it gave {found[0].shape[2]} tokens")
    return list(found)


def _place(arrays: Sequence[Any], dtype: str, device: str) -> tuple[Any, Any, Any]:
    """In the dtype and on the device of the benchmark, contiguous."""
    if device == "cpu":
        host = [np.ascontiguousarray(to_host(x)) for x in arrays]
        return inputs.cast(inputs.QKV(*host), dtype)
    import torch

    # torch takes no bfloat16 from NumPy, so that goes by way of float32.
    tensors = (x if isinstance(x, torch.Tensor) else torch.from_numpy(np.asarray(x, np.float32)) for x in arrays)
    q, k, v = (x.contiguous().to(device, getattr(torch, dtype)) for x in tensors)
    return q, k, v


def pick_heads(q: Any, k: Any, v: Any, heads: int, kv_heads: int) -> tuple[Any, Any, Any]:
    """``kv_heads`` KV heads, spread over those there are, each with its first ``heads // kv_heads`` query heads."""
    group, wanted = q.shape[1] // k.shape[1], heads // kv_heads
    if kv_heads > k.shape[1] or wanted > group:
        raise ValueError(
            f"{heads} query and {kv_heads} KV heads of an input with {q.shape[1]} and {k.shape[1]}; accepted: up to "
            f"{k.shape[1]} KV heads with {group} query heads each"
        )
    kept = [g * k.shape[1] // kv_heads for g in range(kv_heads)]
    return q[:, [g * group + i for g in kept for i in range(wanted)]], k[:, kept], v[:, kept]
