"""Time of attention as the layers of a model meet it: whole prefills, one kind of attention and another in turns.

A GPU that runs one cheap kernel again and again is cooler, faster and has other caches than one that runs a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from _kinds import Kind, attention
from _small_llama import hooked


def prefill(model: Any, ids: Any) -> Any:
    """With a KV cache, up to the logits of the last token."""
    return model(ids[None], use_cache=True, logits_to_keep=1).logits


def in_turns(model: Any, ids: Any, kinds: Sequence[Kind], repeats: int, warmup: int = 2) -> list[tuple[float, float]]:
    """For each kind the median milliseconds of a prefill, and of all its calls of attention together.

    One prefill with each kind, then again. Attention's time is that between CUDA events around transformers' attention
    function: all of a call, its preparation included.
    """
    times = [[_timed(model, ids, kind) for kind in kinds] for _ in range(warmup + repeats)]
    medians = np.median(times[warmup:], axis=0)  # [kinds, 2]
    return [(float(whole), float(part)) for whole, part in medians]


def _timed(model: Any, ids: Any, kind: Kind) -> tuple[float, float]:
    import torch

    def event() -> Any:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    spans: list[tuple[Any, Any]] = []

    def timed(function: Any, *args: Any, **options: Any) -> Any:
        begin = event()
        out = function(*args, **options)
        spans.append((begin, event()))
        return out

    with attention(kind) as name:
        model.set_attn_implementation(name)
        with hooked(name, timed):
            begin = event()
            prefill(model, ids)
            end = event()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), sum(one.elapsed_time(other) for one, other in spans)
