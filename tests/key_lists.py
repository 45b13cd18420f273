"""Lists of keys as tests make them. Importing this needs no GPU and no CuPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from s2o_cupy.reference.lists import KeyLists


def nowhere(unit: int) -> int:
    """An entry of lists or of a page table that must not be read: it stands for ``unit`` keys far outside of k and v.

    2^30 rows from their beginning, less a unit: kernels compute keys in 32 bits and, on Hopper, places of rows in units
    of 16 bytes, and where those wrap they end far outside too.
    """
    return (1 << 30) // unit - 1


def list_heads(kind: str, heads: int, kv_heads: int) -> int:
    return {"one": 1, "kv_heads": kv_heads, "heads": heads}[kind]


def tiles_of(seqlen_q: int, segment: int | None, block_m: int) -> Iterator[tuple[int, int, int, int]]:
    """(segment, q tile, first query, end) of every q tile."""
    segment = segment or seqlen_q
    for first in range(0, seqlen_q, segment):
        end = min(first + segment, seqlen_q)
        for begin in range(first, end, block_m):
            yield first // segment, (begin - first) // block_m, begin, min(begin + block_m, end)


def lists_shape(
    q_shape: Sequence[int], list_heads: int, segment: int | None, block_m: int, per_tile: bool
) -> tuple[int, ...]:
    batch, _, seqlen_q, _ = q_shape
    segment = segment or seqlen_q
    shape = (batch, list_heads, -(-seqlen_q // segment))
    return (*shape, -(-min(segment, seqlen_q) // block_m)) if per_tile else shape


def make_lists(lists: Any, unit: int, seqlen_k: int = 1 << 20, rng: np.random.Generator | None = None) -> KeyLists:
    """KeyLists of nested sequences of entries, [batch][list head][segment] or [..][..][..][q tile].

    Entries are in units; a unit that ends past ``seqlen_k`` is short, and stands last. Lists lie apart, at places of no
    alignment and in no order (``rng``), with entries between them that must not be read.
    """
    depth, inner = 0, lists
    while isinstance(inner, (list, tuple)) and len(inner) and isinstance(inner[0], (list, tuple)):
        depth, inner = depth + 1, inner[0]
    shape, level = [], lists
    for _ in range(depth):
        shape.append(len(level))
        level = level[0]
    begins, keys = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    places = list(np.ndindex(*shape))
    if rng is not None:
        rng.shuffle(places)
    entries: list[int] = [nowhere(unit)]
    for i, at in enumerate(places):
        of = lists
        for x in at:
            of = of[x]
        begins[at] = len(entries)
        keys[at] = sum(min(unit, seqlen_k - entry * unit) for entry in of)
        entries += [*of, *[nowhere(unit)] * (1 + i % 3)]
    return KeyLists(np.array(entries, np.int32), begins, keys, unit)


def all_keys(
    q_shape: Sequence[int], seqlen_k: int, unit: int, *, rng: np.random.Generator, per_tile: bool = False,
    block_m: int = 128,
) -> KeyLists:  # fmt: skip
    """Every key, for one list head, in random orders that end with the short unit."""
    return _drawn(rng, lists_shape(q_shape, 1, None, block_m, per_tile), seqlen_k, unit, lambda units: units)


def random_lists(
    rng: np.random.Generator, q_shape: Sequence[int], seqlen_k: int, *, list_heads: int, unit: int,
    segment: int | None = None, block_m: int = 128, per_tile: bool = False,
) -> KeyLists:  # fmt: skip
    """Some of the keys, none in a fifth of the lists, in random orders that end with the short unit, if it is there."""
    shape = lists_shape(q_shape, list_heads, segment, block_m, per_tile)
    return _drawn(rng, shape, seqlen_k, unit, lambda n: 0 if rng.random() < 0.2 else int(rng.integers(1, n + 1)))


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], seqlen_k: int, unit: int, count: Any) -> KeyLists:
    units = -(-seqlen_k // unit)

    def draw() -> list[int]:
        found = rng.permutation(units)[: count(units)]
        return [*found[found != units - 1].tolist(), *found[found == units - 1].tolist()]

    def nest(shape: tuple[int, ...]) -> list[Any]:
        return [nest(shape[1:]) for _ in range(shape[0])] if shape else draw()

    return make_lists(nest(shape), unit, seqlen_k, rng)
