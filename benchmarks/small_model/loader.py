"""The small model's weights, as `benchmarks/model.py --models` wants a loader."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

HEADS, KV_HEADS, ROPE_THETA = 4, 2, 1e8


def load(path: str) -> dict[str, Any]:
    """By their Hugging Face names: bfloat16 on a GPU, float32 without one."""
    where: tuple[str, Any] = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with np.load(path) as stored:
        return {name: torch.from_numpy(stored[name]).to(*where) for name in stored.files}
