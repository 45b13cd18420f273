"""Calls that come again with the same addresses, which the library replays as CUDA graphs: never an old result."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from s2o_cupy import S2OConfig, s2o_attention_paged

from .arrays import DRY, NAN, attend, forget_calls, of_size, pages_of, paths, qkv, randn, rounds, same, synchronize
from .harness import Run, check

LENGTH = of_size(2000, 200)


def plainly(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a call gives that nothing was prepared for: no graph, no parameters of an earlier one."""
    forget_calls()
    return call().clone()


@check(10, dry=True)
def new_contents(run: Run) -> str:
    """Other contents at the same addresses."""
    calls = 0
    for path in paths():
        config = rounds(path=path)
        data = [qkv(run.seed + 5 * i, 1, 8, 2, LENGTH) for i in range(of_size(4, 2))]
        expected = [plainly(partial(attend, *(t.clone() for t in x), config=config)) for x in data]
        arrays, out = [torch.empty_like(x) for x in data[0]], torch.empty_like(data[0][0])
        for turn in range(of_size(24, 4)):
            for array, x in zip(arrays, data[turn % len(data)], strict=True):
                array.copy_(x)
            attend(*arrays, config=config, out=out.fill_(NAN))
            assert same(out, expected[turn % len(data)]), f"{path}, call {turn}"
            calls += 1
    return f"{calls} calls"


@check(15, dry=True)
def other_shapes(run: Run) -> str:
    """The same memory as other shapes, layouts and dtypes, in random order."""
    S, turns = LENGTH, of_size(4, 1)
    memory = [randn(run.seed + i, 8 * S * 64, dtype=torch.bfloat16) for i in range(3)]
    out = torch.empty_like(memory[0])
    kinds = [
        ((1, 8, S, 64), "BHSD"), ((1, S, 8, 64), "BSHD"), ((1, 4, S, 128), "BHSD"), ((2, 4, S, 64), "BHSD"),
        ((1, 2, S, 256), "BHSD"), ((1, 4, 2 * S, 64), "BHSD"), ((1, S, 4, 128), "BSHD"),
    ]  # fmt: skip
    kinds = kinds[: of_size(7, 2)]
    expected = {}
    for shape, layout in kinds:
        arrays = [x.view(shape).clone() for x in memory]
        expected[shape, layout] = plainly(partial(attend, *arrays, config=rounds(), layout=layout))
    for turn in range(turns):
        for shape, layout in run.rng("order", turn).sample(kinds, len(kinds)):
            for _ in range(3):
                o = out.view(shape).fill_(NAN)
                attend(*(x.view(shape) for x in memory), config=rounds(), layout=layout, out=o)
                assert same(o, expected[shape, layout]), f"{shape}, {layout}, turn {turn}"
    return f"{3 * turns * len(kinds)} calls of {len(kinds)} shapes"


@check(15, dry=True)
def other_numbers(run: Run) -> str:
    """Other scales, caps, masks, configurations and outputs on the same arrays, in random order."""
    arrays = qkv(run.seed, 1, 8, 2, LENGTH)
    out = torch.empty_like(arrays[0])
    kinds: list[tuple[S2OConfig, dict[str, Any]]] = [
        (rounds(), {}), (rounds(tau=0.2), {}), (rounds(), {"tau": 0.3}), (rounds(), {"scale": 0.3}),
        (rounds(), {"scale": 0.05}), (rounds(), {"scale": -0.1}), (rounds(), {"softcap": 3.0}),
        (rounds(), {"softcap": 20.0}), (rounds(), {"is_causal": False}), (rounds(rank="mean"), {}),
        (rounds(rank="max"), {}), (rounds(tail="first_order"), {}), (rounds(unit=16), {}), (rounds(segment=512), {}),
        (rounds(window=100), {}),
        (rounds(tau=0.0), {}), (rounds(path=paths()[-1]), {}), (rounds(block_m=64), {}), (rounds(), {"tau": 1e30}),
    ]  # fmt: skip
    kinds = kinds[: of_size(len(kinds), 4)]
    expected = []
    for config, options in kinds:
        forget_calls()
        cloned = [x.clone() for x in arrays]
        o, lse, stats = attend(*cloned, config=config, return_lse=True, return_stats=True, **options)
        expected.append((o.clone(), lse.clone(), stats.visited.clone()))
    turns = of_size(5, 1)
    for turn in range(turns):
        rng = run.rng("order", turn)
        for i in rng.sample(range(len(kinds)), len(kinds)):
            config, options = kinds[i]
            ask = {"return_lse": rng.random() < 0.5, "return_stats": rng.random() < 0.5}
            found = attend(*arrays, config=config, out=out.fill_(NAN), **ask, **options)
            assert same(out, expected[i][0]), f"o, turn {turn}, {config}, {options}"
            if ask["return_lse"]:
                assert same(found[1], expected[i][1]), f"lse, turn {turn}, {config}, {options}"
            if ask["return_stats"]:
                assert bool((found[-1].visited == expected[i][2]).all()), f"visited, turn {turn}, {config}, {options}"
    return f"{turns * len(kinds)} calls of {len(kinds)} kinds"


@check(15, dry=True)
def given_out_again(run: Run) -> str:
    """Arrays that are freed, and others of other sizes and values at their addresses."""
    sizes = [(LENGTH, 128, 4), (LENGTH // 2, 128, 8), (LENGTH, 64, 8)]
    seeds = {(i, n): run.seed + 100 + 10 * i + n for i in range(len(sizes)) for n in range(2)}

    def arrays(i: int, n: int) -> tuple[torch.Tensor, ...]:
        S, D, H = sizes[i]
        return qkv(seeds[i, n], 1, H, 2, S, None, D)

    expected = {key: plainly(partial(attend, *arrays(*key), config=rounds())) for key in seeds}
    seen, calls = set(), 0
    for turn in range(of_size(20, 1)):
        for i in range(len(sizes)):
            key = i, (turn + i) % 2
            given = arrays(*key)
            for _ in range(3):
                o = attend(*given, config=rounds())
                assert same(o, expected[key]), f"turn {turn}, size {i}"
                seen.add((given[0].data_ptr(), o.data_ptr()))
                calls += 1
            del given, o
        if turn % 4 == 3 and not DRY:
            torch.cuda.empty_cache()
    return f"{calls} calls at {len(seen)} pairs of addresses"


@check(10, dry=True)
def other_roles(run: Run) -> str:
    """q that is k or v, k and v exchanged: the same addresses in other places."""
    buffers = [randn(run.seed + i, 1, 4, LENGTH, 64, dtype=torch.bfloat16) for i in range(3)]
    roles = [(0, 0, 0), (0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 2, 1), (1, 1, 1)]
    expected = {r: plainly(partial(attend, *(buffers[i].clone() for i in r), config=rounds())) for r in roles}
    out = torch.empty_like(buffers[0])
    turns = of_size(5, 1)
    for turn in range(turns):
        for role in roles:
            attend(*(buffers[i] for i in role), config=rounds(), out=out.fill_(NAN))
            assert same(out, expected[role]), f"turn {turn}, {role}"
    return f"{turns * len(roles)} calls"


@check(10, dry=True)
def other_pages(run: Run) -> str:
    """Another page table, other lengths and other pages at the same addresses."""
    q, k, v = qkv(run.seed, 1, 4, 2, LENGTH)
    q = q[:, :, :128]
    caches = pages_of(k, v, [LENGTH], 16, run.rng("pages"))
    out = torch.empty_like(q)
    turns = of_size(30, 3)
    for turn in range(turns):
        rng = run.rng("turn", turn // 3)
        length = rng.choice([LENGTH, LENGTH - 1, LENGTH - 50, LENGTH // 2 + 100])
        keys, values = k.roll(turn // 3, 2), v.roll(turn // 3, 2)
        for cache, x in zip(caches, pages_of(keys, values, [LENGTH], 16, rng), strict=True):
            cache.copy_(x)
        s2o_attention_paged(q, *caches, seqlen_k=length, config=rounds(), out=out.fill_(math.nan))
        expected = attend(q.clone(), *(x[:, :, :length].clone() for x in (keys, values)), config=rounds())
        assert same(out, expected), f"turn {turn}, seqlen_k {length}"
    return f"{turns} calls"


@check(10)
def other_streams(run: Run) -> str:
    """The same arrays on four streams in turn, of three priorities and the default one."""
    arrays = qkv(run.seed, 1, 4, 2, LENGTH)
    expected = plainly(lambda: attend(*arrays, config=rounds()))
    out = torch.empty_like(arrays[0])
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1), torch.cuda.Stream(), torch.cuda.default_stream()]
    synchronize()
    for turn in range(80):
        with torch.cuda.stream(streams[turn % 4]):
            attend(*arrays, config=rounds(), out=out.fill_(NAN))
            assert same(out, expected), f"call {turn}"
    return "80 calls"


@check(5)
def graphs_are_used(run: Run) -> str:
    """The third call of many launches with the same addresses is one graph: launching it takes no kernel launch."""
    from s2o_cupy.cuda.graphs import GraphCache

    arrays = qkv(run.seed, 1, 8, 2, LENGTH)
    out = torch.empty_like(arrays[0])
    launched = []
    cache: Any = GraphCache
    run_plainly = cache.run

    def counted(self: Any, addresses: Any, stream: int, launch: Callable[[int], None]) -> Any:
        launched.append(0)

        def note(into: int) -> None:
            launched[-1] += 1
            launch(into)

        return run_plainly(self, addresses, stream, note)

    cache.run = counted
    try:
        for _ in range(4):
            attend(*arrays, config=rounds(), out=out)
    finally:
        cache.run = run_plainly
    synchronize()
    assert launched == [1, 1, 0, 0], f"launches of four equal calls: {launched} (plain, captured, replayed, replayed)"
    return "plain, captured, replayed, replayed"
