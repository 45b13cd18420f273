"""S2O in Hugging Face models: ``attn_implementation="s2o"``.

S2O takes the long causal prefill; everything else a model asks for goes to its ordinary attention,
scaled_dot_product_attention ("sdpa"). Importing this imports PyTorch and transformers.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..extras import remedy, with_extra

with with_extra(__name__, "transformers"):
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

from ..api.habits import answers_habits
from ..api.run import parse_config
from ..methods.attention import sparse_attention
from ..methods.own import ACCEPTED, AnyMethod, config_named, pass_of
from ..methods.varlen import sparse_attention_varlen
from ..spec import MAX_HEAD_DIM, S2OConfig
from ..tools.layer_settings import MIN_SEQLEN, read_settings
from .autocast import to_autocast_dtype
from .capture import capture
from .causal_mask import CausalMask
from .fallbacks import OF_MODELS, CallCounts, why_not_tensors
from .head_groups import LayerConfigs
from .mask_functions import REASON, causal_mask
from .model_arguments import check_is_no_method, check_min_seqlen
from .packed_rows import pack, starts, unpack
from .plain import Weights, check_alone, plain_attention
from .sliding_window import window_attention
from .torch import attention, attention_varlen

__all__ = ["S2OAttention", "capture", "register"]

if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(f"{__name__} needs transformers 5.16 or newer; remedy: {remedy('transformers')}")

Tensor = Any  # torch.Tensor


@answers_habits
def register(
    name: str = "s2o",
    config: AnyMethod | str | os.PathLike[str] | None = None,
    per_layer: Mapping[int | tuple[int, int], AnyMethod | None] | None = None,
    min_seqlen: int | None = None,
    *,
    tau: float | Sequence[float] | None = None,
) -> S2OAttention:
    """Make S2O an attention implementation of transformers, under ``name``.

    A model takes it as ``from_pretrained(..., attn_implementation=name)`` or ``model.set_attn_implementation(name)``.
    S2O then runs where it can and pays; see :class:`S2OAttention` for where that is.

    Parameters
    ----------
    name : str, default "s2o"
        Registering a name again replaces what it stood for, also in models that use it.
    config : S2OConfig, another method or path, optional
        Of all layers and heads that ``per_layer`` does not name. Another method is what `sparse_attention` takes: the
        configuration of a published one, or a callable of one's own. A path: the JSON file that
        ``tune_model(...).save`` or ``s2o tune --json`` wrote, with both and perhaps with ``min_seqlen``.
    per_layer : mapping, optional
        ``{layer: S2OConfig}`` or ``{(layer, head): S2OConfig}``, counted from 0; both may be mixed, and the head
        decides. A layer, but not a head, may have another method. None instead of a layer's config leaves that layer to
        the ordinary attention. Heads of a layer that differ in more than tau take several calls; so do those with the
        default tau and others.
    min_seqlen : int, optional
        With fewer keys than this the ordinary attention runs. With more, up to ``dense_up_to``, S2O's dense kernels do,
        as ordering keys would cost more than it saves. Default: what the file says, else 8192.
    tau : float or sequence of float, optional
        Of all layers and heads that ``per_layer`` does not name; overrides ``config.tau`` and ``config.error``, as in
        :func:`s2o_cupy.s2o_attention`. Not with a file, which has its own.

    Returns
    -------
    S2OAttention
        What was registered. Its ``calls`` counts what ran, and why S2O did not; ``report()`` says it in words.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, what came and what is accepted.
    """
    if not isinstance(name, str):
        raise TypeError(f"register: name is a {type(name).__name__}; accepted: a string (a config comes as config=)")
    taken = name == "eager" or (
        not isinstance(AttentionInterface._global_mapping.get(name), S2OAttention | None)
    )
    if taken or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            f"register: name is {name!r}; accepted: letters, digits, '_', '-' and '.', "
            "and not a name that transformers has given already"
        )
    if config is None:
        check_is_no_method("register", name, takes_methods=True)
    if min_seqlen is not None:
        check_min_seqlen("register", min_seqlen)
    if isinstance(config, str | os.PathLike):
        for other, given in (("per_layer", per_layer), ("tau", tau)):
            if given is not None:
                raise ValueError(f"register: {other} came with the file {str(config)!r}; accepted: one of them")
        _check_file(config)
        config, per_layer, of_file = read_settings(config)
        min_seqlen = of_file if min_seqlen is None else min_seqlen
    if tau is not None:
        config = parse_config(config, tau, "register")
    registered = S2OAttention(LayerConfigs.parse(config, per_layer), MIN_SEQLEN if min_seqlen is None else min_seqlen)
    AttentionInterface.register(name, registered)
    AttentionMaskInterface.register(name, causal_mask)
    return registered


def _check_file(config: str | os.PathLike[str]) -> None:
    """Whether it may be the path of one, or else is the name of a method."""
    if isinstance(config, str) and re.fullmatch(r"[\w -]*", config) and not os.path.exists(config):
        named = config_named(config)
        raise ValueError(
            f"register: config is {config!r}, which is no file; {f'did you mean {named}? ' if named else ''}accepted: "
            f"a file that tune_model or s2o tune wrote, {ACCEPTED}"
        )


class _Call(NamedTuple):
    """What the attention of a layer is asked for, beside scale and config: which keys each query sees."""

    causal: bool
    mask: Tensor | None  # that sdpa would take; None with `causal` too
    window: int | None  # keys that a query sees, itself among them, if any query sees more without it
    # Of sequences with queries, in the rows of q and of k; None: whole rows are sequences.
    spans_q: tuple[tuple[int, int, int], ...] | None
    spans_k: tuple[tuple[int, int, int], ...] | None
    seqlen_q: int  # of the longest sequence
    seqlen_k: int

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        assert self.spans_q is not None and self.spans_k is not None
        return tuple((q[2] - q[1], k[2] - k[1]) for q, k in zip(self.spans_q, self.spans_k, strict=True))


class Asked(NamedTuple):
    """One call of a layer's attention."""

    module: Any
    query: Tensor  # [batch, heads, seqlen_q, head_dim]
    key: Tensor  # [batch, kv_heads, seqlen_k, head_dim], as many keys as the last query sees
    value: Tensor
    call: _Call
    groups: Any  # tuple of HeadGroup; None: per_layer says that the layer is not S2O's, or the call is not causal
    reason: str | None  # why S2O does not take it, one of fallbacks.REASONS
    scale: float | None
    softcap: float
    sinks: Tensor | None
    dropout: float
    is_causal: bool | None
    options: Mapping[str, Any]  # what else transformers gave

    @property
    def is_s2o(self) -> bool:
        """Whether S2O takes the call, all of its keys as well as some."""
        taken = self.reason is None and self.call.window is None
        return taken and isinstance(self.groups[0].config, S2OConfig)

    @property
    def runs(self) -> str:
        """What runs, as S2OAttention.calls counts it."""
        if not self.is_s2o:
            return self.reason or ("method" if self.call.window is None else "dense window")
        dense = self.dense_heads
        return "dense" if all(dense) else "partly dense" if any(dense) else "s2o"

    @property
    def dense_heads(self) -> list[bool]:
        """Of each query head of a call that S2O takes, whether nothing is left out for it, as S2O's kernels have it.
        The reference on a CPU takes S2O's way with any head."""
        found = [False] * self.query.shape[1]
        if self.query.is_cuda:
            for group in self.groups:
                for head, dense in group.dense_heads(*self.query.shape[1::2], self.call.seqlen_k):
                    found[head] = dense
        return found

    def s2o(self) -> Tensor:
        """[batch, seqlen_q, heads, head_dim]"""
        return _s2o(self.query, self.key, self.value, self.call, self.scale, self.softcap, self.sinks, self.groups)

    def ordinary(self) -> Tensor:
        """The model's ordinary attention: [batch, seqlen_q, heads, head_dim]."""
        query, key, value, mask = self.query, self.key, self.value, self.call.mask
        if isinstance(mask, CausalMask) and (mask.window is not None or mask.sequences is not None):
            mask = mask.make()[..., : mask.keys]
        weights = Weights(self.scale, self.softcap, self.sinks, self.dropout)
        if not weights.are_sdpas:
            check_alone(weights, self.options)
            no_mask = mask is None or isinstance(mask, CausalMask)
            is_causal = self.call.causal and no_mask and query.shape[2] > 1
            return plain_attention(query, key, value, None if no_mask else mask, is_causal, weights)
        if isinstance(mask, CausalMask):
            # None is sdpa's own way to say so, where there are as many queries as keys.
            seqlen_q, seqlen_k = query.shape[2], key.shape[2]
            mask = None
            if seqlen_q != seqlen_k:
                from torch.nn.attention.bias import causal_lower_right  # which takes seconds to import

                mask = causal_lower_right(seqlen_q, seqlen_k)
        options = {"dropout": self.dropout, "scaling": self.scale, "is_causal": self.is_causal}
        return sdpa_attention_forward(self.module, query, key, value, mask, **options, **self.options)[0]


class S2OAttention:
    """An attention function for transformers: S2O for long causal prefill, sdpa for everything else.

    S2O runs when all of this holds; otherwise sdpa does what it would have done by itself. Where a model caps its
    scores or has attention sinks, which sdpa cannot, S2O does too, and plain tensor operations take sdpa's place:

    - causal self-attention without dropout, with gradients disabled or nothing that requires them; of a module in
      train() only torch.inference_mode() says that it will not be run again with them,
    - at least ``min_seqlen`` keys, and at least one tile (``block_m``) of queries: not a decoding step; of a batch of
      sequences the longest counts,
    - no mask but of padding at the ends of rows, or of packed sequences: each sequence is attended by itself, and
      nothing is computed for padding, where the output is 0,
    - tensors that s2o_attention takes: head_dim up to 256, the same for values; float16 or bfloat16 on an NVIDIA GPU,
      under torch.autocast also float32, which is cast as for sdpa.

    A layer with a sliding window has exactly that attention, by dense calls that leave nothing out, whatever tau is.
    Prefill in chunks and into a static cache counts as causal: the queries are the last of the keys seen so far.

    Attributes
    ----------
    calls : collections.Counter
        How often "s2o" ran, "partly dense", "dense", "method" or "dense window" for it, and each reason why none did,
        in compiled graphs too. The log says each reason once.
    """

    def __init__(self, configs: LayerConfigs, min_seqlen: int) -> None:
        self.configs = configs
        self.min_seqlen = min_seqlen
        words = OF_MODELS.expected | {"short": f"fewer keys than min_seqlen, {min_seqlen:,} (register(min_seqlen=))"}
        self._counts = CallCounts(replace(OF_MODELS, expected=words))
        self._weights_asked = False

    @property
    def calls(self) -> Counter[str]:
        return self._counts.calls

    def report(self) -> str:
        """A line for each kind of call, the most frequent first: how many, of which kind, in which layers, and what
        that means; and a line if S2O took none."""
        return self._counts.report()

    def __call__(
        self,
        module: Any,
        query: Tensor,  # [batch, heads, seqlen_q, head_dim]
        key: Tensor,  # [batch, kv_heads, seqlen_k, head_dim]
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # [batch, seqlen_q, heads, head_dim]
        asked = self.asked(module, query, key, value, attention_mask, **options)
        layer = getattr(module, "layer_idx", None)
        self._counts.add(asked.runs, -1 if layer is None else layer)
        if options.get("output_attentions") and not torch.compiler.is_compiling():
            self._say_no_weights()
        return (asked.s2o() if asked.reason is None else asked.ordinary()), None

    def _say_no_weights(self) -> None:
        """Once."""
        if not self._weights_asked:
            self._weights_asked = True
            logging.getLogger(OF_MODELS.log).warning(
                "s2o: output_attentions=True gives no attention weights, as neither S2O nor sdpa has them in memory: "
                'attentions come back empty. model.set_attn_implementation("eager") has them. This is said once.'
            )

    def asked(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> Asked:
        """What a layer asks for, as transformers calls an attention function, and whether S2O takes it."""
        sinks, softcap = options.pop("s_aux", None), options.pop("softcap", None) or 0.0
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = attention_mask
        if isinstance(mask, CausalMask):  # no query sees what is behind mask.keys
            key, value = key[:, :, : mask.keys], value[:, :, : mask.keys]
        elif mask is None and causal and 1 < query.shape[2] < key.shape[2]:  # sdpa's meaning of such a call
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]

        call = _parse(mask, causal, query.shape[2], key.shape[2])
        # An encoder beside the model that per_layer is of has other layers, or no numbers of them.
        groups = self.configs.groups(self._layer(module), query.shape[1], key.shape[1]) if causal else None
        reason = self._why_not(query, key, value, call, dropout, groups, options)
        if reason is None and _is_recomputed(module):
            reason = "gradients"
        return Asked(
            module, query, key, value, call, groups, reason, scaling, softcap, sinks, dropout, is_causal, options
        )

    def _layer(self, module: Any) -> int:
        layer = getattr(module, "layer_idx", None)
        if self.configs.last_layer < 0:
            return 0
        if layer is None:
            raise ValueError(
                f"register: per_layer names layers, but {type(module).__name__} has no layer_idx; accepted: None"
            )
        config = getattr(module, "config", None)
        # Beside a decoder num_hidden_layers is the encoder's.
        layers = getattr(config, "decoder_layers", getattr(config, "num_hidden_layers", None))
        if layers is not None and self.configs.last_layer >= layers:
            raise ValueError(f"register: per_layer names layer {self.configs.last_layer}; accepted: 0 to {layers - 1}")
        return layer

    def _why_not(
        self, query: Tensor, key: Tensor, value: Tensor, call: _Call, dropout: float, groups: Any,
        options: Mapping[str, Any],
    ) -> str | None:  # fmt: skip
        """Why a call is not S2O's, one of fallbacks.REASONS, or None."""
        if not call.causal:
            return "not causal"
        if query.shape[2] == 1:
            return "decoding"
        if call.mask is not None and not isinstance(call.mask, CausalMask):
            return "mask" if torch.compiler.is_compiling() else getattr(call.mask, REASON, "mask")
        if options.get("position_bias") is not None:
            return "position bias"
        if options.get("cache") is not None:
            return "paged cache"
        window = options.get("sliding_window")
        if call.window == 1 or (call.mask is None and window is not None and call.seqlen_k > window):
            return "sliding window"
        if call.seqlen_k < self.min_seqlen:
            return "short"
        if groups is None:
            return "layer"
        if call.seqlen_q < max(pass_of(group.config).block_m for group in groups):
            return "few queries"
        if not query.shape[-1] == value.shape[-1] <= MAX_HEAD_DIM or query.shape[0] != key.shape[0]:
            return "shape"
        return why_not_tensors(query, key, value, dropout)


def _is_recomputed(module: Any) -> bool:
    """Whether a layer that trains is run without gradients, as by a reentrant checkpoint: it is run again with them,
    then by the model's own attention, of which both have to be. Also where its own weights are frozen, as gradients may
    go through it."""
    if not getattr(module, "training", False) or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not torch.is_inference_mode_enabled()  # in which nothing is run again


def _parse(mask: Tensor | None, causal: bool, seqlen_q: int, seqlen_k: int) -> _Call:
    if not causal or not isinstance(mask, CausalMask) or (mask.sequences is None and mask.window is None):
        return _Call(causal, mask, None, None, None, seqlen_q, seqlen_k)
    sequences = mask.sequences
    if sequences is None:
        sequences = tuple((row, 0, seqlen_k) for row in range(mask.shape[0]))
    offset = seqlen_k - seqlen_q  # the key position of the first query
    spans_k = tuple(span for span in sequences if span[2] > offset)  # with a query
    spans_q = tuple((row, max(begin - offset, 0), end - offset) for row, begin, end in spans_k)
    longest_q, longest_k = (max((end - begin for _, begin, end in x), default=0) for x in (spans_q, spans_k))
    window = mask.window if mask.window is not None and mask.window < longest_k else None
    return _Call(causal, mask, window, spans_q, spans_k, longest_q, longest_k)


def _s2o(
    query: Tensor, key: Tensor, value: Tensor, call: _Call, scaling: float | None, softcap: float,
    sinks: Tensor | None, groups: Any,
) -> Tensor:  # fmt: skip
    """[batch, heads, seqlen, head_dim] -> [batch, seqlen, heads, head_dim], contiguous."""
    q, k, v = (x.transpose(1, 2) for x in to_autocast_dtype(query, key, value))
    batch, seqlen_q = q.shape[:2]
    if call.spans_q is not None and call.spans_k is not None:
        q, k, v = pack(q, call.spans_q), pack(k, call.spans_k), pack(v, call.spans_k)  # [total, heads, head_dim]
    if len(groups) == 1 or call.window is not None:  # in a window no config leaves anything out
        o = _attend(q, k, v, call, groups[0].config, scaling, softcap, sinks)
    else:
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in groups:
            part = (q[..., group.heads, :], k[..., group.kv_heads, :], v[..., group.kv_heads, :])
            of_heads = None if sinks is None else sinks[group.heads]
            o[..., group.heads, :] = _attend(*part, call, group.config, scaling, softcap, of_heads)
    return o if call.spans_q is None else unpack(o, call.spans_q, batch, seqlen_q)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, config: AnyMethod, scale: float | None, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """[batch, seqlen, heads, head_dim], or [total, heads, head_dim] of packed sequences."""
    options: dict[str, Any] = {"config": config, "scale": scale, "softcap": softcap}
    if call.window is not None:
        o, lse = window_attention(q, k, v, call.lengths, call.window, **options)
        return o if sinks is None else _with_sinks(o, lse, sinks)
    if sinks is not None:
        options["return_lse"] = True
    # Graphs of PyTorch can hold S2O, and no other method.
    whole: Callable[..., Any] = attention if isinstance(config, S2OConfig) else sparse_attention
    packed: Callable[..., Any] = attention_varlen if isinstance(config, S2OConfig) else sparse_attention_varlen
    if call.spans_q is None:
        found = whole(q, k, v, layout="BSHD", **options)
    else:
        cu_seqlens_q, cu_seqlens_k = (starts([pair[i] for pair in call.lengths]) for i in (0, 1))
        found = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return found if sinks is None else _with_sinks(found[0], found[1], sinks)


def _with_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """``o`` with each head's sink among the scores: a key that has no value. lse: [..., heads, seqlen_q]."""
    share = torch.sigmoid(lse - sinks.float()[:, None])
    return o * share.transpose(-1, -2)[..., None].to(o.dtype)
