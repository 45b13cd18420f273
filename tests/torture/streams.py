"""Threads, streams and memory that is freed at once. The same bits, whatever runs beside."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged, s2o_attention_varlen

from .arrays import (
    NAN,
    assert_all,
    attend,
    forget_calls,
    packed_rows,
    pages_of,
    paths,
    qkv,
    randn,
    rounds,
    same,
    same_flag,
    sparse,
    spin,
    synchronize,
    to_cupy,
)  # fmt: skip
from .harness import Run, check


def made_late(seed: int, n: int = 4) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(queries, k, v, what each gives) of a call that takes a while."""
    q, k, v = qkv(seed, 1, 4, 2, 2500)
    queries = [q * (1 + 0.25 * i) for i in range(n)]
    expected = [attend(x, k, v, config=sparse()).clone() for x in queries]
    synchronize()
    return queries, k, v, expected


@check(30)
def repeats_on_a_busy_gpu(run: Run) -> str:
    """32,768 tokens again and again on two streams, while a third multiplies matrices."""
    q, k, v = qkv(run.seed, 1, 8, 2, 32768)
    matrix = randn(4, 4096, 4096, dtype=torch.bfloat16)
    streams, busy = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)], torch.cuda.Stream()
    notes = []
    for rank, path in (("weight", paths()[0]), ("mean", paths()[0]), ("weight", "portable")):
        config = S2OConfig(path=path, rank=rank, dense_up_to=0)
        o, lse, stats = attend(q, k, v, config=config, return_lse=True, return_stats=True)
        synchronize()
        flags: list[torch.Tensor] = []
        end = time.monotonic() + run.check.seconds / 4
        while time.monotonic() < end and len(flags) < 200:
            with torch.cuda.stream(busy):
                for _ in range(6):
                    torch.mm(matrix, matrix)
            with torch.cuda.stream(streams[len(flags) % 2]):
                found = attend(q, k, v, config=config, return_lse=True, return_stats=True)
                visited = (found[2].visited == stats.visited).all()
                flags.append(same_flag(found[0], o) & same_flag(found[1], lse) & visited)
            if len(flags) % 20 == 0:
                synchronize()
        assert_all(flags, f"repeats, {path}, rank {rank}")
        notes.append(f"{path}, {rank}: {len(flags)}")
    return "; ".join(notes)


def calls_of_all_kinds(seed: int) -> list[Callable[[], torch.Tensor]]:
    """Calls of many shapes, head sizes and doors."""
    made: list[Callable[[], torch.Tensor]] = []
    kinds: list[tuple[int, int, int, int, dict[str, Any]]] = [
        (6000, 128, 8, 2, {"segment": 512, "unit": 1, "workspace_bytes": 1 << 20}),
        (3000, 128, 4, 4, {}),
        (300, 64, 2, 1, {"tau": 0.0}),
        (2000, 256, 2, 1, {"tau": 0.05, "tail": "first_order"}),
        (3000, 80, 6, 2, {"segment": 1000, "rank": "max"}),
        (1500, 33, 4, 2, {"tau": 0.1, "segment": 128, "block_m": 64, "block_n": 64}),
        (1500, 128, 16, 2, {"segment": 128, "path": "portable", "unit": 1, "workspace_bytes": 1 << 20}),
        (17, 8, 1, 1, {}),
    ]
    for i, (S, D, H, Hk, fields) in enumerate(kinds):
        q, k, v = qkv(seed + 9 * i, 1, H, Hk, S, S, D, torch.float16 if i % 2 else torch.bfloat16)
        config = sparse(**fields)
        made.append(partial(attend, q, k, v, config=config))
        if i in (0, 2, 3):
            pages = pages_of(k, v, [S], (16, 0, 1, 64)[i], random.Random(i))
            made.append(partial(s2o_attention_paged, q, *pages, seqlen_k=S, config=config))
        if i in (1, 2):
            starts = [0, S // 3, S // 3, S - 5, S]
            made.append(partial(s2o_attention_varlen, *packed_rows(q, k, v), starts, config=config))
    return made


def in_threads(count: int, work: Callable[[int, threading.Event], None]) -> None:
    """``work(number, stop)`` in as many threads, with no gradients; the first error of any, and all have ended."""
    errors: list[BaseException] = []
    stop = threading.Event()

    def run(number: int) -> None:
        try:
            with torch.no_grad():
                work(number, stop)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    synchronize()
    if errors:
        raise errors[0]


@check(20)
def threads_of_many_streams(run: Run) -> str:
    """8 threads of 4 streams call everything at once, from the first call on, which prepares it."""
    calls = calls_of_all_kinds(run.seed)
    expected = [call().clone() for call in calls]
    synchronize()
    forget_calls()
    counts = [0] * 8

    def work(number: int, stop: threading.Event) -> None:
        rng = run.rng("thread", number)
        streams = [torch.cuda.Stream() for _ in range(4)]
        # Once at least, also where others kept the machine while calls were prepared.
        while not stop.is_set() and not (counts[number] and run.late()):
            chosen, flags = rng.sample(range(len(calls)), 4), []
            for stream, index in zip(streams, chosen, strict=True):
                with torch.cuda.stream(stream):
                    flags.append(same_flag(calls[index](), expected[index]))
            for stream in streams:
                stream.synchronize()
            assert all(map(bool, flags)), f"thread {number}: of calls {chosen} some differ"
            counts[number] += 4

    in_threads(8, work)
    assert all(counts), f"calls of each thread: {counts}"
    return f"{sum(counts)} calls of {len(calls)} kinds"


@check(12)
def threads_of_one_problem(run: Run) -> str:
    """8 threads share a prepared call, its buffer of parameters and its graphs; each has arrays of its own."""
    config = rounds()
    data = [qkv(run.seed + 10 * i, 1, 4, 2, 3000) for i in range(8)]
    expected = [attend(*x, config=config).clone() for x in data]
    synchronize()
    forget_calls()
    counts = [0] * 8

    def work(number: int, stop: threading.Event) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [torch.empty_like(data[number][0]) for _ in range(3)]
            while not run.late() and not stop.is_set():
                out = outs[counts[number] % 3].fill_(NAN)
                attend(*data[number], config=config, out=out)
                assert bool(same_flag(out, expected[number])), f"thread {number}, call {counts[number]}"
                counts[number] += 1

    in_threads(8, work)
    return f"{sum(counts)} calls"


@check(15)
def inputs_freed_at_once(run: Run) -> str:
    """Queries that are made late on a side stream, used, freed and overwritten at once."""
    queries, k, v, expected = made_late(run.seed)
    side = torch.cuda.Stream()
    flags: list[torch.Tensor] = []
    with torch.cuda.stream(side):
        while not run.late() and len(flags) < 500:
            i = len(flags) % 4
            spin(0.3)
            q = queries[i] * 1.0
            o = attend(q, k, v, config=sparse())
            del q
            junk = [torch.full_like(k, NAN) for _ in range(6)]
            flags.append(same_flag(o, expected[i]))
            del o, junk
    assert_all(flags, "calls on freed queries")
    return f"{len(flags)} calls"


@check(15)
def inputs_freed_under_a_given_stream(run: Run) -> str:
    """stream= waits for the one that makes q; q's memory, freed at once, is not given out while it is read."""
    import cupy

    queries, k, v, expected = made_late(run.seed)
    current, notes = torch.cuda.Stream(), []
    foreign = cupy.cuda.Stream(non_blocking=True)
    kinds = {"torch": torch.cuda.Stream(), "cupy": foreign, "handle": foreign.ptr, "per thread": 2}
    for kind, given in kinds.items():
        flags: list[torch.Tensor] = []
        end = time.monotonic() + run.check.seconds / 5
        while time.monotonic() < end:
            i = len(flags) % 4
            with torch.cuda.stream(current):
                spin(0.3)
                q = queries[i] * 1.0
                o = attend(q, k, v, config=sparse(), stream=given)
                del q
                junk = [torch.full_like(queries[0], NAN) for _ in range(3)]  # on a stream that does not wait
                del junk
            synchronize()
            flags.append(same_flag(o, expected[i]))
        assert_all(flags, f"stream= of kind {kind}")
        notes.append(f"{kind}: {len(flags)}")
    return ", ".join(notes)


@check(10)
def cupy_arrays_freed_at_once(run: Run) -> str:
    """CuPy's inputs, copies, workspace and outputs from one stream's pool, freed and overwritten at once."""
    import cupy
    import numpy as np

    queries, k, v, expected = made_late(run.seed)
    keys, values = to_cupy(k), to_cupy(v)
    source = [to_cupy(x).view(np.int16) for x in queries]
    want = [to_cupy(x).view(np.int16) for x in expected]
    side = cupy.cuda.Stream(non_blocking=True)
    flags: list[Any] = []
    synchronize()
    with side:
        while not run.late() and len(flags) < 400:
            i = len(flags) % 4
            raw = source[i].copy()
            if len(flags) % 3 == 2:  # gaps between elements: the library's copy is freed when the call returns
                wide = cupy.zeros((*raw.shape[:-1], 2 * raw.shape[-1]), np.int16)
                wide[..., ::2] = raw
                raw = wide[..., ::2]
                q = wide.view(keys.dtype)[..., ::2]
                del wide
            else:
                q = raw.view(keys.dtype)
            o = s2o_attention(q, keys, values, config=sparse())
            del q, raw
            junk = [cupy.full(source[0].shape, 0x7FFF, np.int16) for _ in range(3)]
            flags.append((o.view(np.int16) == want[i]).all())
            del o, junk
        side.synchronize()
    assert_all(flags, "calls of CuPy arrays")
    return f"{len(flags)} calls"


@check(15)
def handles_of_all_kinds(run: Run) -> str:
    """stream= a stream of PyTorch, of CuPy, or a handle: 0, legacy 1, per-thread 2. The current stream is restored."""
    import cupy

    (q0, *_), k, v, (expected, *_) = made_late(run.seed, 1)
    foreign = cupy.cuda.Stream(non_blocking=True)
    given = {"torch": torch.cuda.Stream(), "cupy": foreign, "0": 0, "1": 1, "2": 2, "handle": foreign.ptr}
    for turn in range(4):  # launched, captured, replayed
        for name, stream in given.items():
            for current in (None, torch.cuda.Stream()):
                with torch.cuda.stream(current) if current else contextlib.nullcontext():
                    spin(2)
                    q = q0 * 1.0
                    o = attend(q, k, v, config=sparse(), stream=stream)
                    synchronize()
                    assert same(o, expected), f"stream={name}, turn {turn}"
                    restored = torch.cuda.current_stream() == (current or torch.cuda.default_stream())
                    assert restored, f"stream={name} stays current"
    return f"{4 * 2 * len(given)} calls"


@check(15)
def streams_that_end(run: Run) -> str:
    """CuPy's streams, destroyed while a call runs and before its tensors are freed; handles that come again."""
    import gc

    import cupy

    config = rounds()
    q, k, v = qkv(run.seed, 1, 4, 2, 2000)
    expected = attend(q, k, v, config=config).clone()
    out, calls = torch.empty_like(q), 0
    synchronize()
    for turn in range(40):
        stream = cupy.cuda.Stream(non_blocking=True)
        for _ in range(1 + turn % 3):
            out.fill_(NAN)
            o = attend(q, k, v, config=config, out=out, stream=stream)
            calls += 1
        if turn % 2:
            del stream
            gc.collect()
        synchronize()
        assert same(o, expected), f"stream {turn}"
    del q, k, v, out, o
    gc.collect()
    made = [torch.ones(1 << 20, device="cuda") for _ in range(4)]
    synchronize()
    torch.cuda.empty_cache()
    forget_calls()
    assert all(bool((x == 1).all()) for x in made)
    return f"{calls} calls on 40 streams"


@check(5)
def streams_that_are_none(run: Run) -> str:
    """What is no stream is refused with what is accepted, and leaves nothing behind."""
    q, k, v = qkv(run.seed, 1, 2, 1, 300)
    expected = attend(q, k, v).clone()
    for stream in ("x", -1, True, 1.5, object()):
        try:
            attend(q, k, v, stream=stream)
        except TypeError as error:
            assert "accepted" in str(error), error
        else:
            raise AssertionError(f"stream={stream!r} is taken")
        assert same(attend(q, k, v), expected)
    return "5 refused"


@check(10)
def jax_arrays_freed_at_once(run: Run) -> str:
    """JAX's arrays on the GPU, deleted as soon as the call returns."""
    from .harness import Skip

    try:
        import jax
        import jax.numpy as jnp

        assert jax.devices()[0].platform in ("gpu", "cuda")
    except Exception as error:
        raise Skip(f"JAX has no GPU here: {error}") from error
    import numpy as np

    q, k, v = (jax.random.normal(key, (1, 4, 2500, 128), "bfloat16") for key in jax.random.split(jax.random.key(0), 3))
    expected = np.asarray(s2o_attention(q * 1, k, v, config=sparse()).astype("float32"))
    again = jax.jit(lambda x: x * jnp.bfloat16(1))
    calls = 0
    while not run.late() and calls < 150:
        x = again(q)
        o = s2o_attention(x, k, v, config=sparse())
        if calls % 2:
            x.delete()
        del x
        junk = [jnp.full(q.shape, jnp.nan, "bfloat16") for _ in range(3)]
        assert (np.asarray(o.astype("float32")) == expected).all(), f"call {calls}"
        del junk, o
        calls += 1
    return f"{calls} calls"
