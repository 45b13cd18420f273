"""Attention to keys and values in the pages of a cache, as serving engines keep them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.arguments import common_framework
from ..arrays.frameworks import framework_of
from ..arrays.frameworks.base import Framework
from ..arrays.lazy_cupy import import_cupy
from ..arrays.lengths import INTEGERS, is_integer, parse_integers
from ..arrays.operand import Paging, address, operand
from ..problem import MAX_SEQLEN, Problem, Shape, cached_validate
from ..spec import S2OConfig
from ..stats import Ran
from .attention import parse_backend, parse_config, with_outputs, without_keys

__all__ = ["s2o_attention_paged"]

# A layout of pages -> the same order of axes as one of q, k and v, with pages for the batch.
LAYOUTS = {"NHD": "BSHD", "HND": "BHSD"}


def s2o_attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    *,
    seqlen_k: Any,
    tau: float | None = None,
    config: S2OConfig | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
    layout: str = "NHD",
    return_lse: bool = False,
    return_stats: bool = False,
    out: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> Any:
    """`s2o_attention` to keys and values in a paged cache, read where they lie.

    The result is, bit for bit, that of `s2o_attention` to the same keys and values in one array, on the same ``path``.

    Parameters
    ----------
    q : array, (batch, heads, seqlen_q, head_dim)
        Queries, the last of each sequence if causal. On the GPU rows of q, of both caches and of the output start on
        16 bytes and head_dim is a multiple of 8. A view in another order of axes costs nothing.
    k_pages, v_pages : array, (pages, page_size, kv_heads, head_dim)
        The cache, of q's framework, device and dtype. page_size is a power of two. Strides are read in place but for
        the last axis, which is contiguous.
    page_table : int32 array, (batch, pages_per_sequence)
        On q's device: entry i of a sequence is the page of its keys i * page_size and on. Only the entries of the
        first seqlen_k keys are read. On the GPU they are not checked, as the host would wait for it: an entry that is
        no page of the cache reads memory that is not the cache's.
    seqlen_k : int, or list, tuple, or int32 or int64 array, (batch,)
        Keys of each sequence. Neighbours of one length share their launches; others take turns. Best on the host: an
        array on a GPU is copied there, for which the host waits, and while a CUDA graph is captured it is refused.
        A graph keeps the lengths that it was captured with, and follows the page table.
    layout : {"NHD", "HND"}, default "NHD"
        Order of the axes of a page; "HND" is (pages, kv_heads, page_size, head_dim).
    return_stats : bool, default False
        As of `s2o_attention`; all sequences must be of one length.
    tau, config, scale, softcap, is_causal, return_lse, out, stream, backend
        As of `s2o_attention`.

    Returns
    -------
    As `s2o_attention`.

    Raises
    ------
    TypeError, ValueError
        An argument is not accepted; the message names it, what came and what is accepted.
    S2OError
        The machine cannot run the call (no CuPy, too old a driver or card).

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import s2o_attention_paged
    >>> rng = np.random.default_rng(0)
    >>> k_pages, v_pages = rng.standard_normal((2, 40, 16, 2, 64), dtype=np.float32)
    >>> page_table = rng.permutation(40).astype(np.int32).reshape(2, 20)
    >>> q = rng.standard_normal((2, 4, 100, 64), dtype=np.float32)
    >>> s2o_attention_paged(q, k_pages, v_pages, page_table, seqlen_k=[300, 317]).shape
    (2, 4, 100, 64)
    """
    config = parse_config(config, tau)
    inputs = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
    framework, device = common_framework(**inputs)
    backend = parse_backend(backend, device, stream)
    arrays = inputs.values()
    batch = _cached_batch(
        tuple(map(framework.shape, arrays)), tuple(map(framework.dtype, arrays)), _given_lengths(seqlen_k), config,
        backend, layout, is_causal, scale, softcap,
    )  # fmt: skip
    if return_stats and len(set(batch.lengths)) > 1:
        raise ValueError(
            f"s2o_attention_paged: return_stats with seqlen_k {list(batch.lengths)}; accepted: one length for all "
            "sequences"
        )
    host = backend == "numpy"
    if not host:
        _check_rows(framework, inputs)
    run = functools.partial(_run, framework, batch, config, LAYOUTS[layout], host)
    return with_outputs(
        framework, device, inputs, batch.longest, config, run,
        host=host, out=out, stream=stream, return_lse=return_lse, return_stats=return_stats,
    )  # fmt: skip


class Group(NamedTuple):
    """Neighbours of one length, from ``first`` to ``end``, half-open."""

    first: int
    end: int
    problem: Problem


class Batch(NamedTuple):
    """What a call comes to, by what is known of its arrays without looking into them."""

    lengths: tuple[int, ...]  # of each sequence
    longest: Problem  # of all sequences, as if they were of the longest one's length
    groups: tuple[Group, ...]
    idle: tuple[slice, ...]  # sequences without keys


def _batch(
    shapes: tuple[Shape, ...], dtypes: tuple[str, ...], seqlen_k: int | tuple[int, ...], config: S2OConfig,
    backend: str, layout: str, is_causal: bool, scale: float | None, softcap: float,
) -> Batch:  # fmt: skip
    """Of q, k_pages, v_pages and page_table; or an error that says what is accepted."""
    lengths = _check(shapes, dtypes, seqlen_k, layout)
    of_q, of_pages = shapes[:2]
    kv_heads, head_dim = of_pages[2 if layout == "NHD" else 1], of_pages[3]
    longest = max(lengths, default=of_q[2])  # of no sequence: as long as it takes to be accepted
    problems = {}
    for length in {longest, *lengths}:
        of_k = (of_q[0], kv_heads, length, head_dim)
        problems[length] = cached_validate(
            (of_q, of_k, of_k), (dtypes[0],) * 3, config, backend, "BHSD", is_causal, scale, softcap
        )
    return Batch(tuple(lengths), problems[longest], *_groups(problems, lengths))


_remembered_batch = functools.lru_cache(maxsize=1024, typed=True)(_batch)  # typed: 1 is not True


def _cached_batch(*arguments: Any) -> Batch:
    """`_batch`, remembered: its checks would take half as long as a short call."""
    try:
        return _remembered_batch(*arguments)
    except TypeError:  # not accepted, or not hashable, which has better words there
        return _batch(*arguments)


def _check(of_arrays: tuple[Shape, ...], dtypes_of_arrays: tuple[str, ...], seqlen_k: Any, layout: Any) -> list[int]:
    """What `s2o_attention` does not check; the length of each sequence."""
    if layout not in LAYOUTS:
        raise ValueError(f"s2o_attention_paged: layout is {layout!r}; accepted: {' or '.join(map(repr, LAYOUTS))}")
    names = "pages, page_size, kv_heads, head_dim" if layout == "NHD" else "pages, kv_heads, page_size, head_dim"
    axes = {
        "q": "batch, heads, seqlen_q, head_dim", "k_pages": names, "v_pages": names,
        "page_table": "batch, pages_per_sequence",
    }  # fmt: skip
    shapes = dict(zip(axes, of_arrays, strict=True))
    for name, shape in shapes.items():
        if len(shape) != axes[name].count(",") + 1:
            raise ValueError(
                f"s2o_attention_paged: {name} has {len(shape)} axes, shape {shape}; accepted: ({axes[name]})"
            )
    if shapes["k_pages"] != shapes["v_pages"]:
        raise ValueError(
            f"s2o_attention_paged: k_pages is {shapes['k_pages']} and v_pages is {shapes['v_pages']}; "
            "accepted: the same shape for both"
        )
    dtypes = dict(zip(axes, dtypes_of_arrays, strict=True))
    if dtypes["page_table"] != "int32":
        raise TypeError(f"s2o_attention_paged: page_table is {dtypes['page_table']}; accepted: int32")
    if not dtypes["q"] == dtypes["k_pages"] == dtypes["v_pages"]:
        raise TypeError(
            f"s2o_attention_paged: dtypes differ: q {dtypes['q']}, k_pages {dtypes['k_pages']}, v_pages "
            f"{dtypes['v_pages']}; accepted: one dtype for all three, as nothing is cast silently"
        )
    batch, entries = shapes["page_table"]
    if batch != shapes["q"][0]:
        raise ValueError(
            f"s2o_attention_paged: page_table has batch {batch}, q has {shapes['q'][0]}; accepted: the same batch"
        )
    pages, page_size = shapes["k_pages"][0], shapes["k_pages"][1 if layout == "NHD" else 2]
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(
            f"s2o_attention_paged: page_size is {page_size} (axis {1 if layout == 'NHD' else 2} of k_pages, layout "
            f"{layout!r}); accepted: a power of two"
        )
    if pages * page_size > MAX_SEQLEN:
        raise ValueError(
            f"s2o_attention_paged: k_pages has {pages} pages of {page_size} keys; accepted: up to {MAX_SEQLEN} keys"
        )
    lengths = _lengths(seqlen_k, batch)
    longest = max(lengths, default=0)
    if longest > entries * page_size or (longest and pages == 0):
        raise ValueError(
            f"s2o_attention_paged: seqlen_k is {longest}, but page_table has {entries} pages of {page_size} keys for a "
            f"sequence and k_pages {pages} pages; accepted: seqlen_k <= pages_per_sequence * page_size"
        )
    return lengths


def _given_lengths(seqlen_k: Any) -> int | tuple[int, ...]:
    if is_integer(seqlen_k):
        return int(seqlen_k)
    return parse_integers("s2o_attention_paged", "seqlen_k", seqlen_k, "batch", f"an integer, {INTEGERS}")


def _lengths(seqlen_k: int | tuple[int, ...], batch: int) -> list[int]:
    """One length for each sequence."""
    lengths = [seqlen_k] * batch if isinstance(seqlen_k, int) else list(seqlen_k)
    if len(lengths) != batch:
        raise ValueError(
            f"s2o_attention_paged: seqlen_k has {len(lengths)} lengths; accepted: an integer, or {batch}, the batch"
        )
    for x in lengths:
        if x < 0:
            raise ValueError(f"s2o_attention_paged: seqlen_k is or holds {x}; accepted: integers >= 0")
    return lengths


def _check_rows(framework: Framework, inputs: dict[str, Any]) -> None:
    """A whole cache is never copied, as it would have to be for rows with gaps."""
    for name in ("k_pages", "v_pages") if framework.mutable else ():  # JAX's arrays are contiguous
        extent = framework.extent(inputs[name])
        if extent.shape[-1] > 1 and extent.strides[-1] != extent.itemsize:
            raise ValueError(
                f"s2o_attention_paged: {name} has a stride of {extent.strides[-1]} bytes on its last axis; "
                f"accepted: a contiguous last axis ({extent.itemsize} bytes)"
            )


def _groups(problems: dict[int, Problem], lengths: list[int]) -> tuple[tuple[Group, ...], tuple[slice, ...]]:
    """Runs of sequences of one length; and those without keys."""
    groups, idle = [], []
    first = 0
    for length, same in itertools.groupby(lengths):
        end = first + len(list(same))
        if length:
            groups.append(Group(first, end, replace(problems[length], batch=end - first)))
        else:
            idle.append(slice(first, end))
        first = end
    return tuple(groups), tuple(idle)


def _run(
    framework: Framework,
    batch: Batch,
    config: S2OConfig,
    layout: str,
    host: bool,
    natives: tuple[Any, ...],
    *outputs: Any,
) -> Ran:
    if host:
        _check_entries(natives[1], natives[3], batch.lengths, layout)
        ran = _run_reference(batch.groups, config, layout, natives, *outputs)
    else:
        ran = _run_kernels(framework, batch.groups, config, layout, natives, *outputs)
    for part in batch.idle:
        without_keys(framework, *(None if x is None else x[part] for x in outputs))
    return ran[0]  # of statistics all sequences are one group


def _check_entries(k_pages: np.ndarray, table: np.ndarray, lengths: Sequence[int], layout: str) -> None:
    """On the host, where nobody waits for them."""
    pages, page_size = k_pages.shape[0], k_pages.shape[1 if layout == "BSHD" else 2]
    for b, (entries, length) in enumerate(zip(table, lengths, strict=True)):
        for i, page in enumerate(entries[: -(-length // page_size)].tolist()):
            if not 0 <= page < pages:
                raise ValueError(
                    f"s2o_attention_paged: page_table[{b}, {i}] is {page}; accepted: 0 to {pages - 1}, the pages of "
                    f"k_pages, in the entries of the first seqlen_k ({length}) keys"
                )


def _run_reference(
    groups: Sequence[Group], config: S2OConfig, layout: str, natives: tuple[Any, ...], o: Any, lse: Any, visited: Any
) -> list[Ran]:
    """The reference on the keys and values that it gathers."""
    from . import on_host as numpy_pipeline

    q, k_pages, v_pages, table = natives
    for first, end, problem in groups:
        part = slice(first, end)
        k, v = (gathered(x, table[part], problem.seqlen_k, layout) for x in (k_pages, v_pages))
        mine = None if lse is None else lse[part]
        found = numpy_pipeline.run(q[part], k, v, o[part], mine, problem, config)
        if visited is not None:
            visited[part] = found
    return [("numpy", None)] * len(groups)


def gathered(pages: np.ndarray, entries: np.ndarray, seqlen_k: int, layout: str) -> np.ndarray:
    """[batch, kv_heads, seqlen_k, head_dim] of the pages that ``entries`` [batch, pages_per_sequence] name."""
    pages = pages if layout == "BSHD" else pages.swapaxes(1, 2)  # [pages, page_size, kv_heads, head_dim]
    page_size, kv_heads, head_dim = pages.shape[1:]
    found = pages[entries[:, : -(-seqlen_k // page_size)]]
    return found.reshape(len(entries), -1, kv_heads, head_dim)[:, :seqlen_k].swapaxes(1, 2)


def _run_kernels(
    framework: Framework, groups: Sequence[Group], config: S2OConfig, layout: str, natives: tuple[Any, ...], o: Any,
    lse: Any, visited: Any,
) -> list[Ran]:  # fmt: skip
    import_cupy()
    from ..cuda import pipeline

    q, out = (operand(x, "BHSD") for x in (natives[0], o))
    k, v = (operand(x, layout) for x in natives[1:3])
    table = framework_of("page_table", natives[3]).extent(natives[3])
    paging = Paging(table.pointer, table.strides[0] // table.itemsize, k.shape[2], k.shape[0])
    stream, memory = framework.stream(), framework.memory(natives[0]) or pipeline.allocate
    if len(groups) == 1 and groups[0].problem.batch == q.shape[0]:
        plan = pipeline.run(
            (q, k, v, out), address(lse), address(visited), groups[0].problem, config,
            stream=stream, paging=paging.sequences(0, q.shape[0]), memory=memory,
        )  # fmt: skip
        return [(plan.path, plan.path_reason)]
    first_lse, lse_bytes = address(lse), 4 * q.shape[1] * q.shape[2]  # of a sequence
    calls = [
        pipeline.Call(
            (q.sequences(first, end), k, v, out.sequences(first, end)),
            first_lse and first_lse + first * lse_bytes,
            0,  # with statistics all sequences are one group
            problem,
            paging.sequences(first, end),
        )
        for first, end, problem in groups
    ]
    plans = pipeline.run_in_turn(calls, config, lse_stride=q.shape[2], stream=stream, memory=memory)
    return [(plan.path, plan.path_reason) for plan in plans]
