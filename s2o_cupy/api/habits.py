"""Arguments as other attention functions name them: the error says what is meant here.

The names are those of PyTorch, flash-attn, FlashInfer, xFormers, Triton's kernels, transformers and vLLM.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, cast

from ..errors import ArgumentTypeError, without_names
from ..nearest import meant as near
from ..spec import S2OConfig

__all__ = ["answers_habits"]

Function = TypeVar("Function", bound=Callable[..., Any])

_NO_MASK = "there is no mask but is_causal=; for padding pack the sequences: s2o_attention_varlen"
_SAME = {  # by another name
    "causal": "is_causal",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "scaling": "scale",
    "logits_soft_cap": "softcap",
    "logit_cap": "softcap",
    "soft_cap": "softcap",
    "tensor_layout": "layout",
    "input_layout": "layout",
    "qkv_format": "layout",
    "kv_layout": "layout",
    "query": "q",
    "key": "k",
    "value": "v",
    "k_cache": "k_pages",
    "v_cache": "v_pages",
    "block_table": "page_table",
    "block_tables": "page_table",
    "seqused_k": "seqlen_k",
    "cache_seqlens": "seqlen_k",
    "seq_lens": "seqlen_k",
    "threshold": "tau",
    "cu_seqlens": "cu_seqlens_q",
    "cu_seq_lens_q": "cu_seqlens_q",
}
_SCALES = ("k_scale", "v_scale", "q_scale", "k_descale", "v_descale", "q_descale")
_HINTS = {
    **dict.fromkeys(("attn_mask", "attention_mask", "mask", "attn_bias", "key_padding_mask", "custom_mask"), _NO_MASK),
    **dict.fromkeys(("bias", "alibi_slopes"), "there is no bias on the scores"),
    **dict.fromkeys(("dropout_p", "dropout"), "there is no dropout, as S2O is for inference; leave it out"),
    "enable_gqa": "leave it out: k and v may always have fewer heads than q, of which theirs are a divisor",
    **dict.fromkeys(
        ("window_size", "sliding_window", "window_left"),
        "a sliding window is attended exactly by flash_attn_func(window_size=) of s2o_cupy.integrations.drop_in",
    ),
    "deterministic": "leave it out: a call that is repeated gives the same bits",
    **dict.fromkeys(
        ("return_attn_probs", "return_softmax_lse", "need_weights", "output_attentions"),
        "weights are never in memory; return_lse=True returns their log-sum-exps",
    ),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_seqlen"), "leave it out: cu_seqlens say it"),
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k"), "packed sequences: s2o_attention_varlen"
    ),
    "page_table": "paged caches: s2o_attention_paged",
    **dict.fromkeys(_SCALES, "scales of 8-bit pages: s2o_attention_paged"),
}


# What an argument that must come is, where others lack it.
_NEEDED = {
    "cu_seqlens_q": "where each sequence begins in q, and the rows of q: [0, ..., total_q]",
    "seqlen_k": "how many keys each sequence has in its pages: an integer, or one for each sequence",
    "page_table": "the pages of each sequence, int32 (batch, pages_per_sequence)",
    "schedule": "the keys that each tile of queries attends to, such as Schedule.from_block_mask(mask, block=128)",
    "error": "the rel_l2 against dense attention to keep to, such as 0.05",
    "config": "an S2OConfig, or the configuration of another method",
}


def answers_habits(function: Function) -> Function:
    """``function``, whose errors for an argument that it has not, or that is missing, name what is meant."""
    every = inspect.signature(function).parameters
    takes_others = any(x.kind is x.VAR_KEYWORD for x in every.values())
    known = {name: x for name, x in every.items() if x.kind is not x.VAR_KEYWORD}
    names = frozenset(known)
    options = [name for name, x in known.items() if x.kind is x.KEYWORD_ONLY]
    positional = len(known) - len(options)
    needed = [name for name, x in known.items() if x.default is x.empty]
    first = len([name for name in needed if name not in options])  # of those, without a name

    def misfit(arguments: tuple[Any, ...], given: dict[str, Any]) -> str | None:
        """Why ``function`` has no place for these arguments."""
        if not takes_others and not names.issuperset(given):
            unknown = next(name for name in given if name not in known)
            return f"{unknown} is not an argument; {_hint(unknown, known)}"
        if len(arguments) > positional:
            accepted = f"up to {positional}, the others by name: {', '.join(options)}"
            return f"{without_names(len(arguments))}; accepted: {accepted}"
        for name in needed[min(len(arguments), first) :]:
            if name not in given:
                what = f", {_NEEDED[name]}" if name in _NEEDED else ""
                return f"{name} is missing{what}; accepted: {', '.join(needed)}"
        return None

    @functools.wraps(function)
    def call(*arguments: Any, **given: Any) -> Any:
        try:
            return function(*arguments, **given)
        except TypeError:  # its signature refused them, or what it does: only the first has another answer here
            reason = misfit(arguments, given)
            if reason is None:
                raise
            raise ArgumentTypeError(reason, function.__name__) from None

    return cast("Function", call)


def _hint(unknown: str, known: Any) -> str:
    meant = _SAME.get(unknown)
    if meant in known:
        return f"did you mean {meant}?"
    meant = meant or unknown
    if meant in _SCALES and "k_scale" in known:
        return "8-bit pages have k_scale and v_scale, and queries no scale of their own"
    if meant in _HINTS:
        return _HINTS[meant]
    if meant in (field.name for field in fields(S2OConfig)):
        for name, text in (("config", "S2OConfig({}=...)"), ("configs", "[S2OConfig({}=...), ...]")):
            if name in known:
                return f"it is a field of S2OConfig: {name}={text.format(meant)}"
    return f"{near(unknown, known)}accepted: {', '.join(known)}"
