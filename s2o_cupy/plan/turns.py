"""KV heads in turns: some of them at a time, where what is made of all would take much memory.

Pure: no array, no GPU, no CuPy.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..arrays.operand import ENTRY_BYTES, ITEM_BYTES
from .build import Builder
from .method import Setting

__all__ = ["bytes_before", "heads_in_turns"]


def heads_in_turns(batch: int, kv_heads: int, of_head: int, most: int) -> list[range]:
    """KV heads of all sequences in turns of up to ``most`` bytes, of which each head takes ``of_head``: whole sequences
    or, of a longer one, some of its heads. Kernels count heads from a turn's first, so that no turn begins within a
    sequence and ends in another."""
    at_once = max(1, most // max(1, of_head))
    if at_once >= kv_heads:
        return [range(x.start * kv_heads, x.stop * kv_heads) for x in even_turns(batch, at_once // kv_heads)]
    of_one = even_turns(kv_heads, at_once)
    return [range(b * kv_heads + x.start, b * kv_heads + x.stop) for b in range(batch) for x in of_one]


def even_turns(count: int, most: int) -> list[range]:
    """As few turns as can be of up to ``most``, of about one size."""
    size = -(-count // -(-count // most))
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def bytes_before(
    build: Builder, setting: Setting, head: int, tensors: Iterable[str], arrays: Iterable[str]
) -> dict[str, int]:
    """Of `Builder.launch` what is ``further`` where kernels count KV heads from ``head`` on, of those of all sequences:
    for ``tensors``, k or v, and for ``arrays`` [KV heads, ...] of the workspace."""
    if head == 0:
        return {}
    sequence, of_sequence = divmod(head, setting.problem.kv_heads)
    found = {"pages": sequence * build.pages["stride"] * ENTRY_BYTES}
    for name in tensors:
        strides = build.tensors[name]
        batch = 0 if setting.inputs.paged else strides["batch"]
        found[name] = (sequence * batch + of_sequence * strides["head"]) * ITEM_BYTES
    for name in arrays:
        found[name] = head * build.memory.places[name].nbytes // setting.kv_heads
    return found
