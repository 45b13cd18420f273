"""What packed and paged calls are checked for beyond one problem's rules: axes, lengths and where sequences begin."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentTypeError, ArgumentValueError
from ..problem import MAX_SEQLEN, OnlyLayout, Problem, Shape, validate
from ..spec import Pass, S2OConfig, is_one_of

__all__ = [
    "PAGE_LAYOUTS", "check_lengths", "check_packed_keys", "check_packed_queries", "check_packed_shapes",
    "check_paged_shapes", "paged_lengths",
]  # fmt: skip

# A layout of pages -> the same order of axes as one of q, k and v, with pages for the batch.
PAGE_LAYOUTS = {"NHD": "BSHD", "HND": "BHSD"}


# ---------------------------------------------------------------- packed


def check_packed_shapes(
    shapes: Sequence[Shape], dtypes: Sequence[str], config: S2OConfig | Pass, backend: str, is_causal: Any,
    scale: Any, softcap: Any,
) -> Problem:  # fmt: skip
    """What all sequences have in common: a problem without queries and keys."""
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) != 3:
            heads = "heads" if name == "q" else "kv_heads"
            raise ArgumentValueError(
                f"{name} has {len(shape)} axes, shape {tuple(shape)}; accepted: 3 axes "
                f"(total_{'q' if name == 'q' else 'k'}, {heads}, head_dim), sequences packed one behind the other"
            )
    if shapes[1] != shapes[2]:
        raise ArgumentValueError(
            f"k is {tuple(shapes[1])} and v is {tuple(shapes[2])} as "
            "(total_k, kv_heads, head_dim); accepted: the same shape for both"
        )
    without_rows = tuple((0, *shape[1:]) for shape in shapes)
    return validate(
        without_rows, dtypes, config=config, backend=backend, layout=OnlyLayout("BSHD"), is_causal=is_causal,
        scale=scale, softcap=softcap,
    )  # fmt: skip


def check_packed_queries(starts: tuple[int, ...], of_q: Shape, batch: int | None = None) -> None:
    """``of_q``: the shape of q."""
    try:
        _check_starts("cu_seqlens_q", starts, "q", of_q[0])
    except ArgumentValueError as error:
        if len(of_q) == 3 and starts and starts[-1] == of_q[1] != of_q[0]:
            raise ArgumentValueError(
                f"{error.args[0]}. Did you mean q.swapaxes(0, 1)? Axes are (total_q, heads, head_dim)"
            ) from None
        raise
    if batch is not None and len(starts) != batch + 1:
        raise ArgumentValueError(
            f"cu_seqlens_q has {len(starts)} entries with {batch} sequences in page_table; "
            f"accepted: batch + 1, {batch + 1}"
        )


def check_packed_keys(starts_q: tuple[int, ...], starts_k: tuple[int, ...], total: int) -> None:
    _check_starts("cu_seqlens_k", starts_k, "k", total)
    if len(starts_q) != len(starts_k):
        raise ArgumentValueError(
            f"cu_seqlens_q has {len(starts_q)} entries, cu_seqlens_k {len(starts_k)}; accepted: batch + 1 in both"
        )


def _check_starts(name: str, starts: tuple[int, ...], array: str, total: int) -> None:
    accepted = f"accepted: 0, then ascending to {total}, the rows of {array}"
    if not starts or starts[0] != 0:
        came = f"begins with {starts[0]}" if starts else "is empty"
        raise ArgumentValueError(f"{name} {came}; {accepted}")
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        if begin > end:
            raise ArgumentValueError(f"{name} descends from {begin} to {end} at sequence {i}; {accepted}")
    if starts[-1] != total:
        raise ArgumentValueError(f"{name} ends with {starts[-1]}; {accepted}")


def check_lengths(i: int, seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    """Of sequence ``i``."""
    longest = max(seqlen_q, seqlen_k)
    if longest > MAX_SEQLEN:
        raise ArgumentValueError(f"sequence {i} has {longest} rows; accepted: up to {MAX_SEQLEN}")
    if is_causal and seqlen_q > seqlen_k:
        raise ArgumentValueError(
            f"sequence {i} has {seqlen_q} queries and {seqlen_k} keys; accepted with is_causal=True: seqlen_k >= "
            "seqlen_q, as the causal mask is aligned bottom-right (the last query sees the last key)"
        )


# ---------------------------------------------------------------- paged


def check_paged_shapes(shapes: Sequence[Shape], dtypes: Sequence[str], layout: Any, packed: bool) -> None:
    """Of q, k_pages, v_pages and page_table."""
    if not is_one_of(layout, PAGE_LAYOUTS):
        raise ArgumentValueError(f"layout is {layout!r}; accepted: {' or '.join(map(repr, PAGE_LAYOUTS))}")
    pages = "pages, page_size, kv_heads, head_dim" if layout == "NHD" else "pages, kv_heads, page_size, head_dim"
    axes = {
        "q": "total_q, heads, head_dim" if packed else "batch, heads, seqlen_q, head_dim",
        "k_pages": pages,
        "v_pages": pages,
        "page_table": "batch, pages_per_sequence",
    }
    of = dict(zip(axes, shapes, strict=True))
    for name, shape in of.items():
        if len(shape) != axes[name].count(",") + 1:
            raise ArgumentValueError(
                f"{name} has {len(shape)} axes, shape {tuple(shape)}; accepted: ({axes[name]})"
                + (" with cu_seqlens_q" if packed and name == "q" else "")
            )
    if of["k_pages"] != of["v_pages"]:
        raise ArgumentValueError(
            f"k_pages is {of['k_pages']} and v_pages is {of['v_pages']}; accepted: the same shape for both"
        )
    dtype = dict(zip(axes, dtypes, strict=True))
    if dtype["page_table"] != "int32":
        raise ArgumentTypeError(f"page_table is {dtype['page_table']}; accepted: int32")
    if not dtype["q"] == dtype["k_pages"] == dtype["v_pages"]:
        raise ArgumentTypeError(
            f"dtypes differ: q {dtype['q']}, k_pages {dtype['k_pages']}, v_pages "
            f"{dtype['v_pages']}; accepted: one dtype for all three, as nothing is cast silently"
        )
    if not packed and of["page_table"][0] != of["q"][0]:
        raise ArgumentValueError(
            f"page_table has batch {of['page_table'][0]}, q has {of['q'][0]}; accepted: the same batch"
        )


def paged_lengths(seqlen_k: int | tuple[int, ...], of_pages: Shape, of_table: Shape, layout: str) -> list[int]:
    """The keys of each sequence, which its pages hold."""
    axis = 1 if layout == "NHD" else 2
    pages, page_size, (batch, entries) = of_pages[0], of_pages[axis], of_table
    if page_size < 1 or page_size & (page_size - 1):
        raise ArgumentValueError(
            f"page_size is {page_size} (axis {axis} of k_pages, layout {layout!r}); accepted: a power of two"
        )
    if pages * page_size > MAX_SEQLEN:
        raise ArgumentValueError(f"k_pages has {pages} pages of {page_size} keys; accepted: up to {MAX_SEQLEN} keys")
    lengths = [seqlen_k] * batch if isinstance(seqlen_k, int) else list(seqlen_k)
    if len(lengths) != batch:
        raise ArgumentValueError(f"seqlen_k has {len(lengths)} lengths; accepted: an integer, or {batch}, the batch")
    for x in lengths:
        if x < 0:
            raise ArgumentValueError(f"seqlen_k is or holds {x}; accepted: integers >= 0")
    longest = max(lengths, default=0)
    if longest > entries * page_size or (longest and pages == 0):
        other = of_pages[3 - axis]  # what page_size would be in the other layout
        fits = other & (other - 1) == 0 and longest <= entries * other
        meant = f". Did you mean layout={'HND' if layout == 'NHD' else 'NHD'!r}? These shapes fit it" if fits else ""
        raise ArgumentValueError(
            f"seqlen_k is {longest}, but page_table has {entries} pages of {page_size} keys for a "
            f"sequence and k_pages {pages} pages; accepted: seqlen_k <= pages_per_sequence * page_size{meant}"
        )
    return lengths
