"""q, k and v to time calls on, for ``--input``: those of the last four of five layers of the second retrieval model,
with head_dim 128, on a text of the wanted length; 32 query heads over 8 KV heads.

`make figures` trains the model, into build/figures: `train.py` of this folder with another seed and shape. Needs
PyTorch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER)]

import loader  # noqa: E402
import network  # noqa: E402
import numpy as np  # noqa: E402
import texts  # noqa: E402
import torch  # noqa: E402

WEIGHTS = FOLDER.parent.parent / "build" / "figures" / "retrieval_2.npz"
SEED = 77  # of the text; training draws others
LAYERS = 4


def qkv_32_8(length: int, offset: int = 0) -> tuple[Any, Any, Any]:
    """[1, heads, length, head_dim] each, after the rotary embedding, on the device that the weights are on; another
    text for each ``offset``."""
    if not WEIGHTS.exists():
        raise ValueError(f"{WEIGHTS.name}: there is none in build/figures; `make figures` trains it")
    weights = loader.load(str(WEIGHTS))
    table = weights["model.embed_tokens.weight"]
    ids = torch.from_numpy(texts.prompt(length, SEED + offset).ids.astype(np.int64)).to(table.device)
    layers = network.qkv_by_layer(weights, ids, table.dtype)[-LAYERS:]
    q, k, v = (torch.cat(parts, 1) for parts in zip(*layers, strict=True))
    return q, k, v
