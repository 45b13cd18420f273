"""The mask function that transformers calls for S2O: sdpa's, but masks that S2O understands are not made.

Models tell transformers which keys a query may see by a function of two positions. What such a function means is
known here of those that transformers itself makes, by their code; any other is made into a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .causal_mask import CausalMask, Sequences

__all__ = ["causal_mask"]

Tensor = Any  # torch.Tensor
REASON = "s2o_reason"  # an attribute of a mask that was made: why


class _Meaning(NamedTuple):
    """Causal, in a window, among the tokens of one packed sequence."""

    window: int | None = None
    packed: Tensor | None = None  # [batch, seqlen]: the number of a token's sequence


def _code(make: Callable[..., Any], *arguments: Any) -> Any:
    return getattr(make(*arguments), "__code__", None)


_AND = _code(masking_utils.and_masks, causal_mask_function)
_WINDOW = _code(masking_utils.sliding_window_overlay, 1)
_CHUNK = _code(masking_utils.chunked_overlay, 1, None)
_PACKED = _code(masking_utils.packed_sequence_mask_function, None)
# Older versions of transformers pack by masks alone, and have no such function.
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", lambda *_: None)
_REMAPPED = _code(_remap, causal_mask_function, None)


def _meaning(function: Any) -> _Meaning | str:
    """What a mask function of transformers means, or why S2O cannot follow it."""
    if function is causal_mask_function:
        return _Meaning()
    if getattr(function, "__code__", None) is not _AND:
        return "mask function"
    parts = _closure(function).get("mask_functions", ())
    codes = [getattr(part, "__code__", None) for part in parts]
    if codes == [_WINDOW, causal_mask_function.__code__]:
        return _Meaning(window=_closure(parts[0])["sliding_window"])
    if codes == [_CHUNK, causal_mask_function.__code__]:
        return "chunked attention"
    if len(codes) != 2 or _PACKED not in codes:
        return "mask function"
    packed, other = parts if codes[0] == _PACKED else parts[::-1]  # by version of transformers
    if getattr(other, "__code__", None) is _REMAPPED:  # positions ascend by 1 in a sequence: causal stays causal
        other = _closure(other)["mask_function"]
    inner = _meaning(other)
    return inner if isinstance(inner, str) else inner._replace(packed=_closure(packed)["packed_sequence_mask"])


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: Any = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask function that goes with S2OAttention: sdpa's, but none is made where S2O needs none.

    sdpa_mask already leaves out the mask of a whole causal prompt. A chunk of queries against a longer cache, a prompt
    that does not fill a static cache, a sliding window, padding at the ends of rows, and packed sequences have a
    :class:`CausalMask` here.
    """

    def make(reason: str) -> Tensor | None:
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            device=device,
            **options,
        )
        if mask is not None and not torch.compiler.is_compiling():
            setattr(mask, REASON, reason)
        return mask

    plain = allow_is_causal_skip and q_length > 1 and (local_size is None or kv_length < local_size)
    if plain and attention_mask is None and q_length == kv_length and type(q_offset) is int and q_offset == kv_offset:
        return None  # sdpa_mask agrees, but not in every graph
    if q_length == 1 or torch.compiler.is_compiling():
        return make("mask")
    meaning = _meaning(mask_function)
    if isinstance(meaning, str):
        return make(meaning)
    if meaning.packed is None and not allow_is_causal_skip:  # the caller wants one in memory
        return make("mask")
    keys = int(q_offset) + q_length - kv_offset  # those up to the last query
    seen = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + keys]  # [batch, keys]
    if not q_length <= keys <= kv_length or (seen is not None and seen.shape[1] != keys):
        return make("mask")
    sequences: Sequences | None = None
    if meaning.packed is not None:
        if seen is not None or q_length != kv_length:
            return make("mask")
        sequences = _packed(meaning.packed)
    elif seen is not None:
        padded = _padded(seen)
        if padded is None:
            return make("scattered padding")
        if any((begin, end) != (0, keys) for _, begin, end in padded) or len(padded) < batch_size:
            sequences = padded
    window = None if meaning.window is None or keys <= meaning.window else meaning.window
    if window is None and sequences is None and q_length == kv_length:
        return None
    return CausalMask(batch_size, q_length, kv_length, keys, device, window, sequences)


def _padded(seen: Tensor) -> Sequences | None:
    """The tokens of each row; None if padding lies between them. The host waits for the mask."""
    seen = seen.bool()
    first, count = seen.int().argmax(1), seen.sum(1)
    last = seen.shape[1] - 1 - seen.flip(1).int().argmax(1)
    sequences = []
    for row, (begin, end, tokens) in enumerate(torch.stack((first, last + 1, count), 1).tolist()):
        if tokens and end - begin != tokens:
            return None
        if tokens:
            sequences.append((row, begin, end))
    return tuple(sequences)


def _packed(numbers: Tensor) -> Sequences:
    """Where the number of a token's sequence (batch, seqlen) changes. The host waits for it."""
    batch, seqlen = numbers.shape
    starts: list[list[int]] = [[0] for _ in range(batch)]
    for row, before in (numbers[:, 1:] != numbers[:, :-1]).nonzero().tolist():
        starts[row].append(before + 1)
    return tuple(
        (row, begin, end)
        for row, begins in enumerate(starts)
        for begin, end in zip(begins, [*begins[1:], seqlen], strict=True)
    )
