"""CUDA graphs that the caller captures, replayed while other calls use and free memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
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
    qkv,
    rounds,
    same,
    same_flag,
    sparse,
    synchronize,
    to_cupy,
)  # fmt: skip
from .exact import dense, wrong_dense
from .harness import Run, check
from .streams import in_threads

Outputs = Sequence[torch.Tensor]


def captured(call: Callable[[], Outputs], warm: bool = True, **mode: Any) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """The graph of a call, and what it writes to."""
    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
            call()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **mode):
        outputs = call()
    return graph, outputs


def disturb(turn: int) -> None:
    """Other calls, and memory that comes and goes full of NaN."""
    attend(*qkv(90 + turn % 3, 1, 8, 2, (5000, 9000, 2000)[turn % 3]), config=sparse(segment=512))
    junk = [torch.full((1 << n,), NAN, device="cuda") for n in (10, 14, 18, 20, 24)]
    del junk
    if turn % 3 == 0:
        gc.collect()
        torch.cuda.empty_cache()
    if turn % 5 == 4:
        forget_calls()


@check(25)
def interleaved(run: Run) -> str:
    """Five graphs alive, replayed in random order on new data; each has the bits of a call then."""
    S = 3000
    q, k, v = qkv(run.seed, 1, 4, 2, S)
    rows = packed_rows(q, k, v)

    def everything(config: S2OConfig) -> Outputs:
        o, lse, stats = attend(q, k, v, config=config, return_lse=True, return_stats=True)
        return [o, lse, stats.visited]

    packed = S2OConfig(tau=0.02, dense_up_to=S // 2)
    calls: dict[str, Callable[[], Outputs]] = {
        "sparse": lambda: everything(sparse()),
        "many rounds": lambda: everything(rounds()),
        "dense": lambda: everything(S2OConfig(tau=0)),
        "packed": lambda: [s2o_attention_varlen(*rows, [0, S // 3, S - 7, S], config=packed)],
        "one after the other": lambda: [attend(attend(q, k, v, config=sparse()), k, v, config=rounds())],
    }
    graphs = {name: captured(call) for name, call in calls.items()}
    turns = 0
    while turns < 24 and not run.late():
        for n, x in enumerate((q, k, v)):
            x.copy_(x.roll(1 + n + turns, dims=2))
        disturb(turns)
        order = run.rng("order", turns).sample(list(graphs), len(graphs))
        for name in order:
            graphs[name][0].replay()
        for name in order:
            for found, expected in zip(graphs[name][1], calls[name](), strict=True):
                assert same(found, expected), f"turn {turns}: the graph {name!r} is not the call"
        turns += 1
    return f"{turns} turns of {len(graphs)} graphs"


@check(10)
def two_streams_at_once(run: Run) -> str:
    """Two graphs at the same time."""
    arrays = [qkv(run.seed, 1, 8, 2, 6000), qkv(run.seed + 5, 1, 4, 4, 4000, None, 64)]

    def of(given: Sequence[torch.Tensor]) -> Callable[[], Outputs]:
        return lambda: [attend(*given, config=sparse())]

    graphs = [captured(of(given)) for given in arrays]
    expected = [attend(*x, config=sparse()).clone() for x in arrays]
    streams, flags = [torch.cuda.Stream(), torch.cuda.Stream()], []
    synchronize()
    for _ in range(50):
        for stream, (graph, (o,)), want in zip(streams, graphs, expected, strict=True):
            with torch.cuda.stream(stream):
                o.fill_(NAN)
                graph.replay()
                flags.append(same_flag(o, want))
    assert_all(flags, "replays")
    return f"{len(flags)} replays"


@check(15)
def of_cupy(run: Run) -> str:
    """CuPy's capture: a call's memory belongs to the graph, whatever the pool does."""
    import cupy
    import numpy as np

    stream, flags = cupy.cuda.Stream(non_blocking=True), []
    kinds = ((0, 3000, 128), (5, 2000, 256))
    data = [[to_cupy(x).copy() for x in qkv(run.seed + n, 1, 4, 2, S, None, D)] for n, S, D in kinds]
    synchronize()
    with stream:
        made = []
        for arrays in data:
            s2o_attention(*arrays, config=sparse())
            stream.synchronize()
            stream.begin_capture()
            o = s2o_attention(*arrays, config=sparse())
            made.append((arrays, o, stream.end_capture()))
        for turn in range(30):
            for (q, _, _), _, _ in made:
                raw = q.view(np.int16)
                raw[...] = cupy.roll(raw, 1, axis=2)
            junk = [cupy.full(1 << n, 0x7FFF, np.int16) for n in (12, 18, 22, 24)]
            del junk
            if turn % 4 == 0:
                cupy.get_default_memory_pool().free_all_blocks()
            for _, _, graph in made:
                graph.launch(stream=stream)
            for arrays, o, _ in made:
                again = s2o_attention(*arrays, config=sparse())
                flags.append((o.view(np.int16) == again.view(np.int16)).all())
        stream.synchronize()
    assert_all(flags, "replays of CuPy's graphs")
    return f"{len(flags)} replays"


@check(10)
def follows_the_page_table(run: Run) -> str:
    """A graph of a paged call reads the table and the pages as they are when it is replayed."""
    q, k, v = qkv(run.seed, 1, 4, 2, 3000)
    caches = pages_of(k, v, [3000], 16, run.rng("pages"))
    graph, (o,) = captured(lambda: [s2o_attention_paged(q, *caches, seqlen_k=3000, config=sparse())])
    for turn in range(6):
        keys, values = k.roll(turn, 2), v.roll(turn, 2)
        for cache, x in zip(caches, pages_of(keys, values, [3000], 16, run.rng("pages", turn)), strict=True):
            cache.copy_(x)
        graph.replay()
        assert same(o, attend(q, keys, values, config=sparse())), f"table {turn}"
    return "6 tables"


@check(15)
def first_call_in_a_capture(run: Run) -> str:
    """Nothing loaded yet: it is captured, or refused; the device and the calls after it are as good as ever."""
    from s2o_cupy.cuda import compiler

    notes = []
    x = qkv(run.seed, 1, 2, 1, 1777)
    exact = dense(*x)
    for name, config in (("sparse", sparse(segment=320)), ("dense", S2OConfig(tau=0))):
        forget_calls()
        compiler._loaded.clear()

        def call(config: S2OConfig = config) -> Outputs:
            o, stats = attend(*x, config=config, return_stats=True)
            return [o, stats.visited]

        try:
            graph, (o, _) = captured(call, warm=False)
            graph.replay()
            synchronize()
        except Exception as error:
            notes.append(f"{name}: {type(error).__name__}")
        else:
            assert same(o, attend(*x, config=config)), f"{name}: what was captured is wrong"
            notes.append(f"{name}: captured")
        synchronize()
        found = wrong_dense(attend(*x, tau=0), None, exact)
        assert not found, f"after {notes}: {found}"
    return ", ".join(notes)


@check(15)
def beside_other_threads(run: Run) -> str:
    """A thread captures while another makes, captures and replays calls of its own."""
    one, two = qkv(run.seed, 1, 4, 2, 3000), qkv(run.seed + 5, 1, 4, 2, 3500)
    expected = [attend(*x, config=rounds()).clone() for x in (one, two)]
    synchronize()
    made, beside = [], [0]

    def work(number: int, stop: Any) -> None:
        if number == 0:
            for _ in range(5):
                made.append(captured(lambda: [attend(*one, config=rounds())], False, capture_error_mode="thread_local"))
                time.sleep(0.2)
            stop.set()
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            out = torch.empty_like(two[0])
            while not stop.is_set():
                attend(*two, config=rounds(), out=out.fill_(NAN))
                beside[0] += 1
                assert bool(same_flag(out, expected[1])), f"call {beside[0]} beside a capture"

    in_threads(2, work)
    for graph, (o,) in made:
        graph.replay()
        synchronize()
        assert same(o, expected[0])
    return f"{len(made)} captures, {beside[0]} calls beside them"
