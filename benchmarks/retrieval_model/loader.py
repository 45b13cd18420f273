"""The retrieval model's weights, as `benchmarks/model.py --models` wants a loader: bytes, and a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

HEADS, KV_HEADS, ROPE_THETA = 8, 2, 1e8


def load(path: str) -> dict[str, Any]:
    """By their Hugging Face names: bfloat16 on a GPU, float32 without one."""
    where: tuple[str, Any] = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    return {name: x.to(*where) for name, x in on_cpu(path).items()}


def on_cpu(path: str) -> dict[str, Any]:
    """The same in float32 on the CPU."""
    with np.load(path) as stored:
        weights = {name: stored[name].astype(np.float32) for name in stored.files}
    scales = {name: weights.pop(name) for name in list(weights) if name.endswith(".scale")}
    return {name: torch.from_numpy(x * scales.get(f"{name}.scale", 1)) for name, x in weights.items()}


def store(path: str, weights: Mapping[str, Any]) -> None:
    """What `load` reads: matrices as int8 with a float32 scale for each row, vectors as float32."""
    arrays = {}
    for name, weight in weights.items():
        x = weight.detach().float().cpu().numpy()
        if x.ndim == 2:
            scale = np.maximum(np.abs(x).max(1, keepdims=True), 1e-12) / 127
            x, arrays[f"{name}.scale"] = np.round(x / scale).astype(np.int8), scale.astype(np.float32)
        arrays[name] = x
    np.savez_compressed(path, **arrays)
