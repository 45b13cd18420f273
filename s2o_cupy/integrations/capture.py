"""Queries, keys and values of a model's layers, as an input file for diff, benchmarks and tuning."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from ..extras import with_extra

with with_extra(__name__, "transformers"):
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

from ..arrays.frameworks import to_host
from ..errors import warn_caller
from ..tools.inputs import QKV, save
from ..tools.layer_files import layer_file
from .autocast import to_autocast_dtype
from .implementations import lent
from .plain import Weights, check_alone, plain_attention

__all__ = ["capture"]

NAME = "s2o_capture"
_wanted: ContextVar[dict[int, QKV | None]] = ContextVar("s2o_capture")
_unsaid: ContextVar[dict[str, list[int]]] = ContextVar("s2o_capture_unsaid")  # what arrays lack, with its layers


class _Captured(Exception):
    """All layers have been seen: the rest of the model need not run."""


def capture(
    model: Any, input_ids: Any, layers: Sequence[int], path: str | os.PathLike[str] | None = None, **inputs: Any
) -> QKV:
    """What the attention of some layers gets, after the rotary embedding, for one prompt.

    The model runs its ordinary attention, without gradients and without a cache, up to the last of the layers. Arrays
    do not say by what their scores are scaled and capped, nor a window or sinks: a UserWarning tells what else the
    model has than tools assume.

    Parameters
    ----------
    model : PreTrainedModel
        Of transformers, with attention that goes through its AttentionInterface, as that of Llama does.
    input_ids : Tensor, (batch, seqlen)
        Tokens without padding, on the model's device.
    layers : sequence of int
        Which layers, counted from 0.
    path : path, optional
        Where to write a ``.npz`` or ``.safetensors`` file that :func:`s2o_cupy.tools.inputs.load` reads, and that names
        its heads by layer. A path without an ending, or that of a folder: there, a ``.safetensors`` file of each layer.
    **inputs
        Further arguments of the model's forward.

    Returns
    -------
    QKV
        NumPy arrays q (batch, layers * heads, seqlen, head_dim), k and v (batch, layers * kv_heads, seqlen, head_dim)
        in the model's dtype, or that of torch.autocast. Layers follow each other in the order given: head h of the i-th
        is i * heads + h.

    Raises
    ------
    ValueError
        A layer is not there or never ran, or the layers' heads differ; the message says what is accepted.
    """
    count = model.config.get_text_config().num_hidden_layers
    layers = list(layers)
    if not layers or not all(type(n) is int and 0 <= n < count for n in layers) or len(set(layers)) < len(layers):
        raise ValueError(f"capture: layers is {layers}; accepted: different numbers from 0 to {count - 1}")
    wanted: dict[int, QKV | None] = dict.fromkeys(layers)
    unsaid: dict[str, list[int]] = {}
    token, other = _wanted.set(wanted), _unsaid.set(unsaid)
    try:
        with lent(model, NAME), torch.no_grad():
            model.base_model(input_ids, use_cache=False, **inputs)
    except _Captured:
        pass
    finally:
        _wanted.reset(token)
        _unsaid.reset(other)
    found = [x for x in wanted.values() if x is not None]
    if len(found) < len(layers):
        missing = [n for n, x in wanted.items() if x is None]
        raise ValueError(f"capture: layers {missing} never called the AttentionInterface; accepted: others")
    shapes = {(x.q.shape, x.k.shape) for x in found}
    if len(shapes) > 1:
        raise ValueError(f"capture: the layers have q and k of shapes {sorted(shapes)}; accepted: layers of one shape")
    qkv = QKV(*(np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)))
    if path is not None:
        _write(Path(path), dict(zip(layers, found, strict=True)), qkv)
    for what, of in unsaid.items():  # last: a warning may be an error
        warn_caller(f"capture: layers {of} have {what}: arrays do not say it, and tools would judge other attention")
    return qkv


def _write(path: Path, by_layer: dict[int, QKV], qkv: QKV) -> None:
    if path.suffix and not path.is_dir():
        save(path, qkv, list(by_layer))
        return
    path.mkdir(exist_ok=True)
    for layer, arrays in by_layer.items():
        save(path / layer_file(layer), arrays, [layer])


def _record(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    wanted = _wanted.get()
    layer = getattr(module, "layer_idx", None)
    if layer in wanted and getattr(module, "is_causal", True):
        wanted[layer] = QKV(*map(to_host, to_autocast_dtype(query, key, value)))
        if what := _beside(query.shape[-1], key.shape[-2], options):
            _unsaid.get().setdefault(what, []).append(layer)
        if all(x is not None for x in wanted.values()):
            raise _Captured
    return _ordinary(module, query, key, value, attention_mask, **options), None


def _beside(head_dim: int, seqlen_k: int, options: Mapping[str, Any]) -> str:
    """In words, what attention has beside q, k and v."""
    scale, softcap, window = (options.get(name) for name in ("scaling", "softcap", "sliding_window"))
    has = {
        f"scale {scale!r} (give tools --scale)": scale is not None
        and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-4),
        f"softcap {softcap!r} (give tools --softcap)": softcap,
        f"a window of {window} keys (tools know none)": window is not None and window < seqlen_k,
        "sinks (tools know none)": options.get("s_aux") is not None,
        "biases by position (tools know none)": options.get("position_bias") is not None,
    }
    return ", ".join(words for words, so in has.items() if so)


def _ordinary(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **options: Any,
) -> Any:
    """Without the caps and sinks that sdpa has not, layers behind the first would get something else."""
    weights = Weights(scaling, softcap or 0.0, s_aux, dropout)
    if weights.are_sdpas:
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given, **options)[0]
    check_alone(weights, options)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = causal and attention_mask is None and query.shape[2] > 1
    return plain_attention(query, key, value, attention_mask, is_causal, weights)


AttentionInterface.register(NAME, _record)
AttentionMaskInterface.register(NAME, sdpa_mask)
