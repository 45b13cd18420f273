"""S2O in Hugging Face models: ``attn_implementation="s2o"``.

S2O takes the long causal prefill; everything else a model asks for goes to its ordinary attention,
scaled_dot_product_attention ("sdpa"). Importing this imports PyTorch and transformers.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..problem import BACKEND_DTYPES
from ..spec import MAX_HEAD_DIM, S2OConfig
from .autocast import autocast_dtype, to_autocast_dtype
from .capture import capture
from .causal_mask import CausalMask
from .head_groups import LayerConfigs
from .softcap import softcap_attention
from .torch import attention

__all__ = ["S2OAttention", "capture", "register"]

if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError("s2o_cupy needs transformers 5.16 or newer; remedy: pip install -U transformers")

Tensor = Any  # torch.Tensor


def register(
    name: str = "s2o",
    config: S2OConfig | None = None,
    per_layer: Mapping[int | tuple[int, int], S2OConfig | None] | None = None,
    min_seqlen: int = 8192,
) -> S2OAttention:
    """Make S2O an attention implementation of transformers, under ``name``.

    A model takes it as ``from_pretrained(..., attn_implementation=name)`` or ``model.set_attn_implementation(name)``.
    S2O then runs where it can and pays; see :class:`S2OAttention` for where that is.

    Parameters
    ----------
    name : str, default "s2o"
        Registering a name again replaces what it stood for, also in models that use it.
    config : S2OConfig, optional
        Of all layers and heads that ``per_layer`` does not name.
    per_layer : mapping, optional
        ``{layer: S2OConfig}`` or ``{(layer, head): S2OConfig}``, counted from 0; both may be mixed, and the head
        decides. None instead of a layer's config leaves that layer to the ordinary attention. Heads of a layer that
        differ take several calls.
    min_seqlen : int, default 8192
        With fewer keys than this the ordinary attention runs: ordering keys would cost more than it saves.

    Returns
    -------
    S2OAttention
        What was registered. Its ``calls`` counts what ran, and why S2O did not.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, what came and what is accepted.
    """
    taken = name == "eager" or (
        isinstance(name, str) and not isinstance(AttentionInterface._global_mapping.get(name), S2OAttention | None)
    )
    if taken or not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            f"register: name is {name!r}; accepted: letters, digits, '_', '-' and '.', "
            "and not a name that transformers has given already"
        )
    if isinstance(min_seqlen, bool) or not isinstance(min_seqlen, int) or min_seqlen < 0:
        raise ValueError(f"register: min_seqlen is {min_seqlen!r}; accepted: an integer >= 0")
    registered = S2OAttention(LayerConfigs.parse(config, per_layer), min_seqlen)
    AttentionInterface.register(name, registered)
    AttentionMaskInterface.register(name, causal_mask)
    return registered


class S2OAttention:
    """An attention function for transformers: S2O for long causal prefill, sdpa for everything else.

    S2O runs when all of this holds; otherwise sdpa does what it would have done by itself. Where a model caps its
    scores, which sdpa cannot, S2O does too, and plain tensor operations take sdpa's place:

    - causal self-attention without dropout, with gradients disabled or nothing that requires them,
    - at least ``min_seqlen`` keys, and at least one tile (``block_m``) of queries: not a decoding step,
    - no padding, packed sequences, 4D or other masks in the batch; a sliding or chunked window only where all keys
      still lie in it,
    - tensors that s2o_attention takes: head_dim up to 256, the same for values; float16 or bfloat16 on an NVIDIA GPU,
      under torch.autocast also float32, which is cast as for sdpa.

    Prefill in chunks and into a static cache counts as causal: the queries are the last of the keys seen so far.
    Attention sinks are refused, as sdpa has none.

    Attributes
    ----------
    calls : collections.Counter
        How often "s2o" ran, and each reason why it did not. Calls inside of a compiled graph are not counted.
    """

    def __init__(self, configs: LayerConfigs, min_seqlen: int) -> None:
        self.configs = configs
        self.min_seqlen = min_seqlen
        self.calls: Counter[str] = Counter()

    def __call__(
        self,
        module: Any,
        query: Tensor,  # [batch, heads, seqlen_q, head_dim]
        key: Tensor,  # [batch, kv_heads, seqlen_k, head_dim]
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # [batch, seqlen_q, heads, head_dim]
        if options.get("s_aux") is not None:
            raise ValueError(
                f"s2o: {type(module).__name__} asks for attention sinks (s_aux), which neither S2O nor sdpa has; "
                'accepted: models without; use attn_implementation="eager" for this one'
            )
        softcap = options.pop("softcap", None) or 0.0
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = attention_mask
        if isinstance(mask, CausalMask):  # no query sees what is behind mask.keys
            key, value = key[:, :, : mask.keys], value[:, :, : mask.keys]
        elif mask is None and causal and 1 < query.shape[2] < key.shape[2]:  # sdpa's meaning of such a call
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]

        groups = self.configs.groups(self._layer(module), query.shape[1], key.shape[1])
        reason = self._why_not(module, query, key, value, mask, dropout, causal, groups, options)
        if not torch.compiler.is_compiling():
            self.calls[reason or "s2o"] += 1
        if reason is None:
            return _s2o(query, key, value, scaling, softcap, groups), None
        if softcap:
            for name in ("position_bias", "cache"):
                if options.get(name) is not None:
                    raise ValueError(f"s2o: {name} and softcap came together; accepted: one of them")
            no_mask = mask is None or isinstance(mask, CausalMask)
            o = softcap_attention(
                query, key, value, None if no_mask else mask, is_causal=causal and no_mask and query.shape[2] > 1,
                scale=scaling, softcap=softcap, dropout=dropout,
            )  # fmt: skip
            return o, None
        if isinstance(mask, CausalMask):
            # None is sdpa's own way to say so, where there are as many queries as keys.
            seqlen_q, seqlen_k = query.shape[2], key.shape[2]
            mask = None if seqlen_q == seqlen_k else causal_lower_right(seqlen_q, seqlen_k)
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )

    def _layer(self, module: Any) -> int:
        layer = getattr(module, "layer_idx", None)
        if self.configs.last_layer < 0:
            return 0
        if layer is None:
            raise ValueError(
                f"register: per_layer names layers, but {type(module).__name__} has no layer_idx; accepted: None"
            )
        layers = getattr(getattr(module, "config", None), "num_hidden_layers", None)
        if layers is not None and self.configs.last_layer >= layers:
            raise ValueError(f"register: per_layer names layer {self.configs.last_layer}; accepted: 0 to {layers - 1}")
        return layer

    def _why_not(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        dropout: float,
        causal: bool,
        groups: Any,
        options: Mapping[str, Any],
    ) -> str | None:
        """Why a call is not S2O's, or None."""
        seqlen_q, seqlen_k = query.shape[2], key.shape[2]
        if not causal:
            return "not causal"
        if seqlen_q == 1:
            return "decoding"
        if mask is not None and not isinstance(mask, CausalMask):
            return "mask"
        if options.get("position_bias") is not None:
            return "position bias"
        if options.get("cache") is not None:
            return "paged cache"
        window = options.get("sliding_window")
        if window is not None and seqlen_k > window:
            return "sliding window"
        if seqlen_k < self.min_seqlen:
            return "short"
        if groups is None:
            return "layer"
        if seqlen_q < max(group.config.block_m for group in groups):
            return "few queries"
        if not query.shape[-1] == value.shape[-1] <= MAX_HEAD_DIM or query.shape[0] != key.shape[0]:
            return "shape"
        backend = {"cpu": "numpy", "cuda": "cupy"}.get(query.device.type, "")
        dtypes = [str(autocast_dtype(x)).removeprefix("torch.") for x in (query, key, value)]
        if not dtypes[0] == dtypes[1] == dtypes[2] or dtypes[0] not in BACKEND_DTYPES.get(backend, ()):
            return "device or dtype"
        if dropout > 0:
            return "dropout"
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            if not module.training and not torch.compiler.is_compiling():
                warnings.warn(
                    "s2o: gradients are enabled, so the model's ordinary attention runs; call the model under "
                    "torch.no_grad() or torch.inference_mode()",
                    stacklevel=4,
                )
            return "gradients"
        return None


def _s2o(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float, groups: Any
) -> Tensor:
    """[batch, heads, seqlen, head_dim] -> [batch, seqlen, heads, head_dim], contiguous."""
    q, k, v = (x.transpose(1, 2) for x in to_autocast_dtype(query, key, value))
    if len(groups) == 1:
        return attention(q, k, v, config=groups[0].config, scale=scaling, softcap=softcap, layout="BSHD")
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in groups:
        k_part, v_part = k[:, :, group.kv_heads], v[:, :, group.kv_heads]
        o[:, :, group.heads] = attention(
            q[:, :, group.heads], k_part, v_part, config=group.config, scale=scaling, softcap=softcap, layout="BSHD"
        )
    return o


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: Any = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask function that goes with :class:`S2OAttention`: sdpa's, but none is made where S2O needs none.

    sdpa_mask already leaves out the mask of a whole causal prompt. A chunk of queries against a longer cache, and a
    prompt that does not fill a static cache, have a :class:`CausalMask` here.
    """
    plain = allow_is_causal_skip and q_length > 1 and (local_size is None or kv_length < local_size)
    if plain and attention_mask is None and q_length == kv_length and type(q_offset) is int and q_offset == kv_offset:
        return None  # sdpa_mask agrees, but not in every graph
    if plain and q_length != kv_length and not torch.compiler.is_compiling():
        keys = int(q_offset) + q_length - kv_offset  # those up to the last query
        seen = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + keys]
        if q_length <= keys <= kv_length and (seen is None or (seen.shape[1] == keys and bool(seen.all()))):
            return CausalMask(batch_size, q_length, kv_length, keys, device)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        device=device,
        **options,
    )
