"""What calls launch and copy on a stream, and at which addresses: dense and sparse ones, several in turn, the search
for taus, selections of other methods; a CUDA that takes notes stands for the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import SMALL
from pretended import Launched, record_launches

from s2o_cupy import S2OConfig
from s2o_cupy.arrays.operand import Call, Operand, Operands, Paging, Scale
from s2o_cupy.caches import clear_cache
from s2o_cupy.methods import MeanPoolingConfig, PBSConfig, SpargeConfig, VerticalSlashConfig, XAttentionConfig
from s2o_cupy.problem import Problem

STREAM, MEMORY = 7, 1 << 40
Q, K, V, OUT, LSE, VISITED, TAUS = (i << 32 for i in range(1, 8))
DENSE = S2OConfig(segment=128, dense_up_to=1 << 20)


class Copied(NamedTuple):
    to: int
    to_pitch: int
    of: int
    of_pitch: int
    width: int
    height: int
    kind: int
    stream: int


class Cleared(NamedTuple):
    address: int
    value: int
    nbytes: int
    stream: int


@pytest.fixture
def install(monkeypatch):
    """install(compute_capability) -> notes of what follows, in order."""
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import pipeline, program, tables, tensor_maps
    from s2o_cupy.methods import launches

    def start(compute_capability: int) -> list[Any]:
        clear_cache()
        notes: list[Any] = record_launches(monkeypatch, compute_capability, pipeline, launches)
        runtime = SimpleNamespace(
            getDevice=lambda: 0, memcpyDeviceToDevice=3,
            memsetAsync=lambda *x: notes.append(Cleared(*x)), memcpy2DAsync=lambda *x: notes.append(Copied(*x)),
        )  # fmt: skip
        for module in (pipeline, launches):
            monkeypatch.setattr(module, "runtime", runtime)
        at_once = SimpleNamespace(run=lambda key, stream, launch: launch(stream))
        monkeypatch.setattr(program, "GraphCache", lambda cuda: at_once)
        monkeypatch.setattr(tables, "cupy", Tables())
        for module in (launches, tensor_maps):  # a map of which nothing is known but where its array begins
            monkeypatch.setattr(module, "tensor_map", lambda pointer, *_: pointer.to_bytes(128, "little"))
        monkeypatch.setattr(tensor_maps, "box_map", tensor_maps.tensor_map)
        return notes

    yield start
    clear_cache()


class Tables:
    """CuPy, as `on_device` uses it. What is copied there is there once its stream has been waited for."""

    def __init__(self) -> None:
        self.copied: list[Any] = []
        self.waits = 0
        stream = SimpleNamespace(synchronize=self._synchronize)
        self.cuda = SimpleNamespace(get_current_stream=lambda: stream)

    def _synchronize(self) -> None:
        self.waits += 1

    def asarray(self, x: np.ndarray) -> Any:
        self.copied.append(x)
        return SimpleNamespace(data=SimpleNamespace(ptr=x.ctypes.data), host=x)


def operands(heads: int, kv_heads: int, seqlen: int, batch: int = 1) -> Operands:
    def of(pointer, heads):
        return Operand(pointer, (batch, heads, seqlen, 64), (heads * seqlen * 64, seqlen * 64, 64))

    return of(Q, heads), of(K, kv_heads), of(V, kv_heads), of(OUT, heads)


def a_call(seqlen: int, lse: int = 0, visited: int = 0, batch: int = 1) -> Call:
    problem = Problem(batch, 4, 2, seqlen, seqlen, 64, "bfloat16", True, 0.125)
    return Call(operands(4, 2, seqlen, batch), lse, visited, problem)


class Memory:
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, nbytes: int) -> tuple[int, Any]:
        self.asked.append(nbytes)
        return MEMORY, self


def attention(x: Launched) -> Any:
    return x.params["attention"] if "attention" in x.params.dtype.names else x.params


def launches_of(notes: list[Any]) -> list[Launched]:
    return [x for x in notes if isinstance(x, Launched)]


def pointers_of(x: Launched) -> dict[str, int]:
    """By name what each pointer of a launch's parameters is, and what its tensor maps are of."""
    data, struct = x.params.tobytes(), x.kernel.family.params
    places = [*struct.pointers, *((f"map {at // 128}", at) for at in range(0, struct.map_bytes, 128))]
    return {name: int.from_bytes(data[at : at + 8], "little") for name, at in places}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_call_visits_is_counted_from_0(install, capability, batch):
    """What a dense call visits is known, and written by a kernel of its own; a sparse one counts."""
    from s2o_cupy.cuda import pipeline

    for config in (DENSE, SMALL):
        notes = install(capability)
        call = a_call(700, LSE, VISITED, batch)
        pipeline.run(call, config, stream=STREAM, memory=Memory())
        size = int(np.prod(call.problem.visited_shape(config.of_pass)))
        launched = launches_of(notes)
        assert {x.stream for x in notes} == {STREAM}
        if config is DENSE:
            every, dense = launched
            assert every.kernel.role == "every_tile" and every.params["visited"] == VISITED
            assert every.params["count"] == size and dense.kernel.role == "pass1"
        else:
            cleared = Cleared(VISITED, 0, 4 * size, STREAM)
            assert notes.count(cleared) == 1 and notes.index(cleared) < notes.index(launched[0])
            assert {int(attention(x)["visited"]) for x in launched if x.kernel.role == "pass2"} == {VISITED}
        assert attention(launched[-1])["lse"] == LSE and attention(launched[-1])["out"]["data"] == OUT


@pytest.mark.parametrize("config", [DENSE, S2OConfig(segment=128, dense_up_to=0)], ids=["dense", "sparse"])
@pytest.mark.parametrize("observe", [None, lambda stage, arrays: None], ids=["", "observed"])
def test_every_call_has_its_own_arrays(install, config, observe):
    """Also where the kernel knows them by maps, which are made anew for other arrays."""
    from s2o_cupy.cuda import pipeline

    notes = install(90)
    for further in (0, 0, 1 << 20, 0):
        call = a_call(700)
        moved = tuple(x._replace(pointer=x.pointer + further) for x in call.operands)
        pipeline.run(call._replace(operands=moved), config, stream=STREAM, memory=Memory(), observe=observe)
        first = next(x for x in launches_of(notes) if x.kernel.role == "pass1")
        tensors = [int(attention(first)[name]["data"]) for name in ("q", "k", "v", "out")]
        maps = [address for name, address in pointers_of(first).items() if name.startswith("map")]
        assert tensors == [x + further for x in (Q, K, V, OUT)] and maps == tensors[:3]
        notes.clear()


@pytest.mark.parametrize("tail", ["none", "first_order"])
def test_the_second_pass_has_maps_of_its_own(install, tail):
    """Of q, k, v, out and the tail's covariances, in each round of a call; made anew for other arrays."""
    from s2o_cupy.cuda import pipeline

    config = S2OConfig(rank="weight", segment=128, dense_up_to=0, workspace_bytes=1 << 20, tail=tail)
    notes = install(90)
    for further in (0, 0, 1 << 20, 0):
        call = a_call(20_000)
        moved = tuple(x._replace(pointer=x.pointer + further) for x in call.operands)
        pipeline.run(call._replace(operands=moved), config, stream=STREAM, memory=Memory())
        rounds = [x for x in launches_of(notes) if x.kernel.role in ("pass2_boxes", "pass2_boxes_tail")]
        assert len(rounds) > 1
        for x in rounds:
            pointers = pointers_of(x)
            *arrays, covariances = (pointers[f"map {i}"] for i in range(5))
            assert arrays == [a + further for a in (Q, K, V, OUT)]
            assert covariances == (pointers["covariances"] if tail == "first_order" else 0)
        notes.clear()


@pytest.mark.parametrize("in_bytes", [False, True])
def test_a_cache_is_read_by_the_call_s_page_table(install, in_bytes):
    """Of 8 bits it is the first launch alone that reads it, by scales of the call; others have what that writes."""
    from s2o_cupy.cuda import pipeline

    notes, table, of_k, of_v = install(80), 1 << 41, 1 << 42, 1 << 43
    scales = (Scale(pointer=of_k), Scale(pointer=of_v)) if in_bytes else None
    q, _, _, out = operands(4, 2, 700)
    k, v = (Operand(at, (50, 2, 16, 64), (2048, 1024, 64)) for at in (K, V))
    call = a_call(700)._replace(operands=(q, k, v, out), paging=Paging(table, 0, 16, 50, scales))
    launched = pipeline.run(call, DENSE, stream=STREAM, memory=Memory())
    assert (launched.path, launched.graphs) == ("portable", "launched")
    first, *others = launches_of(notes)
    pointers, pass1, keys = pointers_of(first), first, [K, V]
    assert pointers["pages"] == table
    if in_bytes:
        (pass1,), keys = others, [pointers["keys"], pointers["values"]]
        assert [pointers[x] for x in ("k_pages", "v_pages", "k_scale", "v_scale")] == [K, V, of_k, of_v]
        assert MEMORY <= keys[0] < keys[1]
    assert [int(attention(pass1)[name]["data"]) for name in ("k", "v")] == keys


def test_what_starts_from_0_is_cleared_first(install):
    """At the beginning of the workspace, and no more than there is."""
    from s2o_cupy.cuda import pipeline

    notes, memory = install(90), Memory()
    pipeline.run(a_call(700), SMALL, stream=STREAM, memory=memory)
    first, *others = notes
    assert isinstance(first, Cleared) and first[:2] == (MEMORY, 0) and 0 < first.nbytes <= memory.asked[0]
    assert not any(isinstance(x, Cleared) for x in others)


@pytest.mark.parametrize("context", [0, 1])
def test_the_first_launch_of_a_thread_has_a_context(install, monkeypatch, context):
    """Where nothing is cleared, which would make the device's current."""
    from s2o_cupy.cuda import pipeline, program

    notes, memory = install(80), Memory()
    monkeypatch.setattr(program.driver, "ctxGetCurrent", lambda: context)
    monkeypatch.setattr(program, "runtime", SimpleNamespace(getDevice=lambda: 3, setDevice=notes.append))
    pipeline.run(a_call(300), DENSE, stream=STREAM, memory=memory)
    assert [x if isinstance(x, int) else x.kernel.role for x in notes] == [3] * (context == 0) + ["pass1"]


def test_an_error_needs_taus(install):
    """Those that somebody has found, which kernels then read; a dense call needs none."""
    from s2o_cupy.cuda import pipeline

    notes, config = install(90), S2OConfig(segment=128, error=0.1, dense_up_to=500)
    with pytest.raises(ValueError, match="error is 0.1, whose taus nobody has found here; accepted: a tau"):
        pipeline.run(a_call(700), config, stream=STREAM, memory=Memory())
    assert notes == []
    pipeline.run(a_call(300), config, stream=STREAM, memory=Memory())
    pipeline.run(a_call(700), config, stream=STREAM, memory=Memory(), taus=TAUS)
    taus = {pointers_of(x).get("taus", 0) for x in launches_of(notes) if x.kernel.role == "pass2"}
    assert taus == {TAUS}


@pytest.mark.parametrize("config", [DENSE, SMALL], ids=["dense", "sparse"])
def test_calls_in_turn_share_a_workspace(install, config):
    """Of the largest need. An lse whose heads lie apart is written behind it and copied before the next call's is."""
    from s2o_cupy.cuda import pipeline

    notes, memory, alone = install(90), Memory(), []
    lengths = (300, 701, 500)
    for n in lengths:
        alone.append(pipeline.workspace_bytes(a_call(n).operands, a_call(n).problem, config))
    calls = [a_call(n, LSE + 4 * at) for n, at in zip(lengths, (0, 300, 0), strict=True)]
    launched = pipeline.run_in_turn(calls, config, lse_stride=701, stream=STREAM, memory=memory)
    assert len(launched) == 3 and all(x.plan.dense == (config is DENSE) for x in launched)
    assert memory.asked == [max(alone) + 4 * 4 * 500]
    behind = MEMORY + max(alone)
    copied = [x for x in notes if isinstance(x, Copied)]
    assert copied == [Copied(LSE, 4 * 701, behind, 4 * n, 4 * n, 4, 3, STREAM) for n in (300, 500)]
    order = []  # queries of what writes an lse, and where; those of a copy
    for x in notes:
        if isinstance(x, Copied):
            order.append(x.width // 4)
        elif isinstance(x, Launched) and x.kernel.role in ("pass1", "pass2") and attention(x)["lse"]:
            order.append((int(attention(x)["geometry"]["seqlen_q"]), int(attention(x)["lse"])))
    assert list(dict.fromkeys(order)) == [(300, behind), 300, (701, LSE + 1200), (500, behind), 500]


def test_heads_without_gaps_and_calls_without_an_lse_are_not_copied(install):
    from s2o_cupy.cuda import pipeline

    notes, memory = install(90), Memory()
    calls = [a_call(300, LSE), a_call(300)]
    pipeline.run_in_turn(calls, DENSE, lse_stride=300, stream=STREAM, memory=memory)
    pipeline.run_in_turn([a_call(300)], DENSE, lse_stride=999, stream=STREAM, memory=memory)
    assert not any(isinstance(x, Copied) for x in notes)
    assert [int(attention(x)["lse"]) for x in launches_of(notes)] == [LSE, 0, 0]


@pytest.mark.parametrize("capability", [80, 90])
def test_pass_1_alone_leaves_its_state(install, capability):
    """Where it is said to be, for as long as its memory is kept; it counts nothing as visited."""
    from s2o_cupy.cuda import pipeline
    from s2o_cupy.spec import Pass

    notes, memory = install(capability), Memory()
    state, keeper = pipeline.run_pass1(a_call(700, LSE, VISITED), Pass(segment=128), stream=STREAM, memory=memory)
    (launched,) = launches_of(notes)
    (nbytes,) = memory.asked
    assert keeper is memory and state == attention(launched)["state"]
    assert MEMORY <= state <= MEMORY + nbytes - 4 * 700 * 8
    assert not any(isinstance(x, Cleared) and x.address == VISITED for x in notes)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_search_for_taus(install, capability):
    """A first choice before anything is attended to, one after each walk; the last one's are the caller's."""
    from s2o_cupy.cuda import within

    notes, memory = install(capability), Memory()
    call = a_call(5000)
    within.find_taus(call.operands, TAUS, call.problem, S2OConfig(error=0.1, dense_up_to=0), stream=STREAM,
                     memory=memory)  # fmt: skip
    launched = launches_of(notes)
    roles = [x.kernel.role for x in launched]
    chosen = [i for i, x in enumerate(roles) if x == "choose_taus"]
    walks = [i for i, x in enumerate(roles) if x == "pass2_ladder"]
    assert len(chosen) == 3 and chosen[0] < roles.index("pass1") < walks[0] < chosen[1] < walks[-1] < chosen[2]
    assert chosen[2] == len(roles) - 1 and all(pointers_of(launched[i])["taus"] == TAUS for i in chosen)
    assert [int(launched[i].params["done"]) for i in chosen] == [0, 1, 2]
    assert all(attention(launched[i])["lse"] == 0 for i in walks)
    assert {x.stream for x in notes} == {STREAM}


# ---------------------------------------------------------------- selections of other methods

MADE = {"entries": 11 << 32, "begins": 12 << 32, "keys": 13 << 32}
ORDERS = {"k_order": 14 << 32, "q_order": 15 << 32}
METHODS = [
    (MeanPoolingConfig(), True), (PBSConfig(share="kv_head"), True), (PBSConfig(scores="antidiagonal"), True),
    (XAttentionConfig(), True), (VerticalSlashConfig(verticals=30, slashes=30), True),
    (SpargeConfig(tau=0.5, theta=0.1), True), (SpargeConfig(tau=0.5, theta=0.1, permutation=(4, 8, 32)), False),
]  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("config", "is_causal"), METHODS, ids=lambda x: type(x).__name__)
def test_a_selection_reads_q_and_k_and_writes_lists(install, capability, config, is_causal):
    """Every pointer starts from one of the caller's arrays, the workspace or a table, and all lists are written."""
    from s2o_cupy.methods import launches

    notes, memory = install(capability), Memory()
    q, k, *_ = operands(4, 2, 1024)
    problem = Problem(1, 4, 2, 1024, 1024, 64, "bfloat16", is_causal, 0.125)
    made = MADE | ({} if is_causal else ORDERS)
    launches.run(q, k, made, problem, config, stream=STREAM, memory=memory)
    launched, (nbytes,) = launches_of(notes), memory.asked
    assert len(launched) == len(notes) and {x.stream for x in launched} == {STREAM}
    reached = set()
    for x in launched:
        assert x.blocks > 0
        for name, address in pointers_of(x).items():
            inside = MEMORY <= address < MEMORY + max(1, nbytes)
            near = [of for of, first in {"q": Q, "k": K, **made}.items() if first <= address < first + (1 << 32)]
            reached |= {*near}
            assert address == 0 or inside or near or name == "tokens", name
    assert {*made} <= reached and "k" in reached and "q" in reached


def test_a_selection_s_addresses_are_those_of_the_call(install):
    """Prepared once; a second call with other arrays launches the same kernels there."""
    from s2o_cupy.methods import launches

    notes, memory = install(90), Memory()
    q, k, *_ = operands(4, 2, 1024)
    problem = Problem(1, 4, 2, 1024, 1024, 64, "bfloat16", True, 0.125)
    moved = {name: x + 4096 for name, x in MADE.items()}
    found = []
    for pointers, made in (((Q, K), MADE), ((Q + 512, K + 1024), moved)):
        of_q, of_k = (x._replace(pointer=pointer) for x, pointer in zip((q, k), pointers, strict=True))
        launches.run(of_q, of_k, made, problem, MeanPoolingConfig(), stream=STREAM, memory=memory)
        found.append(launches_of(notes))
        notes.clear()
    by = {Q: 512, K: 1024, **dict.fromkeys(MADE.values(), 4096)}
    for x, y in zip(*found, strict=True):
        assert (x.kernel, x.blocks) == (y.kernel, y.blocks)
        ends = pointers_of(y)
        for name, address in pointers_of(x).items():
            assert ends[name] - address == by.get(address >> 32 << 32, 0)


class Views:
    """CuPy, as those use it who look inside: an array is its address, shape and dtype."""

    ndarray = staticmethod(lambda shape, dtype, pointer: (pointer, shape, dtype))
    cuda = SimpleNamespace(
        UnownedMemory=lambda address, nbytes, keeper, device=0: (address, nbytes, keeper),
        MemoryPointer=lambda memory, offset: memory[0] + offset,
    )


def test_who_looks_inside_sees_the_workspace(install, monkeypatch):
    """After each launch its stage, and arrays where the kernels have them."""
    from s2o_cupy.cuda import pipeline
    from s2o_cupy.methods import launches

    notes, told = install(90), []
    monkeypatch.setattr(launches, "cupy", Views)
    monkeypatch.setattr(pipeline, "cupy", Views)
    q, k, *_ = operands(4, 2, 1024)
    problem = Problem(1, 4, 2, 1024, 1024, 64, "bfloat16", True, 0.125)

    def observe(stage, arrays):
        told.append(stage)
        reached = {*pointers_of(launches_of(notes)[-1]).values()}
        places = {name: x for name, x in arrays.items() if name not in ("plan", "chunk")}
        assert {MEMORY} <= {pointer for pointer, *_ in places.values()} and len(launches_of(notes)) == len(told)
        assert reached & {pointer for pointer, *_ in places.values()}

    launches.run(q, k, MADE, problem, MeanPoolingConfig(), stream=STREAM, memory=Memory(), observe=observe)
    assert len(told) == len(launches_of(notes)) > 1
    notes.clear()
    told.clear()
    pipeline.run(a_call(700), SMALL, stream=STREAM, memory=Memory(), observe=observe)
    assert told[0] == "pass1" and "pass2" in told and len(told) == len(launches_of(notes))


# ---------------------------------------------------------------- tables


def test_a_table_is_copied_once_and_is_there(monkeypatch):
    """Flat, and waited for: other streams read it. One of other numbers, another dtype or device is another."""
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import tables

    cupy = Tables()
    monkeypatch.setattr(tables, "cupy", cupy)
    x = np.arange(6, dtype=np.int32).reshape(2, 3) + 1_000_003
    first = tables.on_device(x, 1001)
    assert cupy.waits == 1 and first.host.shape == (6,) and first.host.dtype == np.int32
    np.testing.assert_array_equal(first.host, x.ravel())
    assert tables.on_device(x.copy(), 1001) is first
    clear_cache()  # a graph may still read it
    assert tables.on_device(x, 1001) is first and cupy.waits == 1
    for other in (tables.on_device(x + 1, 1001), tables.on_device(x.view(np.float32), 1001), tables.on_device(x, 1002)):
        assert other is not first
    assert len(cupy.copied) == cupy.waits == 4
