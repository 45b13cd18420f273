"""Packed sequences that are attended densely: one launch, the bits of a call for each."""

from __future__ import annotations

import itertools
import types
from dataclasses import replace

import numpy as np
import pytest
from conftest import has_gpu, has_hopper
from packs import LENGTHS, differing
from pretended import record_launches

from s2o_cupy import S2OConfig, S2OError, s2o_attention_varlen
from s2o_cupy.arrays.operand import Operand, Paging
from s2o_cupy.caches import clear_cache
from s2o_cupy.plan.collecting import COLLECT_PACKED_PAGES, COLLECT_PAIRS, repays_collecting
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.launch_plan import COLLECT_ROWS, packed_pass1
from s2o_cupy.plan.packed_table import PackedTable
from s2o_cupy.problem import Problem
from s2o_cupy.selection.methods import make_plan

DENSE = S2OConfig(dense_up_to=1000)


# ---------------------------------------------------------------- what is launched


@pytest.fixture(params=["portable", "hopper"])
def recorded(request, monkeypatch):
    """Launches of a CUDA that only takes notes, tensor maps, and the module, with a path."""
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import packed, tensor_maps

    launches = record_launches(monkeypatch, 90, packed)
    maps = []  # (address, shape, strides, rows of a box) of each that was made
    for name in ("tensor_map", "page_map"):
        monkeypatch.setattr(tensor_maps, name, lambda *x: maps.append(x) or x[0].to_bytes(128, "little"))
    clear_cache()
    path = request.param
    yield types.SimpleNamespace(module=packed, launches=launches, maps=maps, config=replace(DENSE, path=path))
    clear_cache()


def begins(lengths):
    return list(zip(*(list(itertools.accumulate(x, initial=0))[:-1] for x in zip(*lengths, strict=True)), strict=True))


def without_maps(params):
    """Pass 1's parameters, and the addresses that its tensor maps of q, k and v are of."""
    if "attention" not in params.dtype.names:
        return params, []
    maps = params.tobytes()
    return params["attention"], [int.from_bytes(maps[i : i + 128], "little") for i in (0, 128, 256)]


def run(recorded, lengths, lse=0):
    """Each launch's (blocks, parameters as those of several sequences)."""
    problems = [Problem(1, 8, 2, seqlen_q, seqlen_k, 128, "bfloat16", True, 0.1) for seqlen_q, seqlen_k in lengths]
    table = PackedTable(begins(lengths), problems)
    total_q, total_k = (sum(x) for x in zip(*lengths, strict=True))
    q, out = (Operand(n << 20, (1, 8, total_q, 128), (0, 128, 1024)) for n in (1, 4))
    k, v = (Operand(n << 20, (1, 2, total_k, 128), (0, 128, 256)) for n in (2, 3))
    operands = (q, k, v, out)
    memory = lambda nbytes: (5 << 20, None)  # noqa: E731
    recorded.launches.clear()
    recorded.module.prepare(operands, table, recorded.config).run(operands, table, lse, stream=7, memory=memory)
    found = []
    for kernel, blocks, params, _ in recorded.launches:
        assert kernel.threads == (384 if recorded.config.path == "hopper" else 128)
        params, maps = without_maps(params)
        assert maps == ([1 << 20, 2 << 20, 3 << 20] if recorded.config.path == "hopper" else [])
        found.append((blocks, params))
    return found


@pytest.mark.parametrize(
    "lengths",
    [[(1, 1)], [(300, 300), (1, 70), (128, 128), (257, 900)], [(n % 200 + 1, n % 200 + 3) for n in range(300)]],
    ids=["one", "few", "300"],
)
def test_each_tile_of_each_sequence_once(recorded, lengths):
    """As the kernel finds them: the last sequence whose first tile is not behind."""
    seen = set()
    found = run(recorded, lengths)
    for blocks, params in found:
        q_tiles, sequences = int(params["q_tiles"]), int(params["sequences"])
        assert blocks == (min(132, q_tiles) if recorded.config.path == "hopper" else q_tiles)
        for work in range(q_tiles):
            n = np.searchsorted(params["first_q_tile"][:sequences], work, "right") - 1
            *key, near = params["of"][n].tolist()
            local, tiles = work - params["first_q_tile"][n], -(-key[2] // 128)
            seen.add((*key, int(local // near // tiles * near + local % near), int(local // near % tiles)))
    assert sum(int(params["q_tiles"]) for _, params in found) == len(seen)
    assert seen == {
        (*begin, *length, head, tile)
        for length, begin in zip(lengths, begins(lengths), strict=True)
        for head in range(8)
        for tile in range(-(-length[0] // 128))
    }
    assert len(found) == -(-len(lengths) // 128)


def test_arrays_that_begin_elsewhere_are_judged_by_themselves(recorded):
    """Off 16 bytes other kernels load them, also where sequences and strides are those of a call before."""
    table = PackedTable(begins([(300, 300)]), [Problem(1, 8, 2, 300, 300, 128, "bfloat16", True, 0.1)])
    of_q, of_k = ((1, 8, 300, 128), (0, 128, 1024)), ((1, 2, 300, 128), (0, 128, 256))
    q, k, v, out = (Operand(n << 20, *of) for n, of in ((1, of_q), (2, of_k), (3, of_k), (4, of_q)))
    config = replace(recorded.config, path="auto")
    aligned, again, off = (
        recorded.module.prepare((q, k, v._replace(pointer=at), out), table, config)
        for at in (3 << 20, 5 << 20, (3 << 20) + 8)
    )
    assert again is aligned and aligned.kernel.aligned and not off.kernel.aligned


def test_longest_work_first(recorded):
    ((_, params),) = run(recorded, [(10, 20), (5, 900), (200, 200)])
    assert params["of"]["seqlen_k"][:3].tolist() == [900, 200, 20]


def test_addresses(recorded):
    """Of all rows; each launch has a counter of its own, and a later call its own addresses."""
    for lse in (0, 9 << 20):
        for i, (_, params) in enumerate(run(recorded, [(3, 4)] * 129, lse)):
            assert [int(params[name]["data"]) for name in ("q", "k", "v", "out")] == [n << 20 for n in (1, 2, 3, 4)]
            assert (int(params["lse"]), int(params["state"])) == (lse, 0)
            assert int(params["next_q_tile"]) == (5 << 20) + 4 * i
            assert (int(params["geometry"]["seqlen_q"]), int(params["geometry"]["seqlen_k"])) == (387, 516)


def test_a_refused_map_leaves_no_addresses(recorded, monkeypatch):
    """A call after one that failed writes its own."""
    if recorded.config.path != "hopper":
        pytest.skip("the portable kernels take no maps")
    run(recorded, [(3, 4)] * 2, lse=9 << 20)

    from s2o_cupy.cuda import tensor_maps

    def refuse(*arguments):
        raise S2OError("the driver refuses")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_maps, "tensor_map", refuse)
        with pytest.raises(S2OError):
            run(recorded, [(3, 4)] * 2, lse=10 << 20)
    ((_, params),) = run(recorded, [(3, 4)] * 2, lse=9 << 20)
    assert int(params["lse"]) == 9 << 20


@pytest.mark.parametrize(
    ("stride", "lengths", "fits"),
    [(512, [1, 5], True), (-512, [1, 5], False), (-512, [2, 5], True), (516, [1, 5], False), (516, [2, 5], True)],
)
def test_single_rows_have_no_stride(stride, lengths, fits):
    """So what is true of all rows together may not be of them."""
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import packed

    problems = [Problem(1, 4, 4, n, n, 128, "bfloat16", True, 0.1) for n in lengths]
    table = PackedTable(begins([(n, n) for n in lengths]), problems)
    assert packed.fits((Operand(0, (1, 4, sum(lengths), 128), (0, 128, stride)),) * 4, table) is fits


@pytest.mark.parametrize("compute_capability", [80, 90, 120])
@pytest.mark.parametrize(
    ("head_dim", "softcap", "aligned"),
    [(64, 0.0, True), (128, 0.0, True), (128, 0.0, False), (128, 30.0, True), (128, 30.0, False), (256, 0.0, True)],
)
def test_kernels_that_are_compiled_ahead(compute_capability, head_dim, softcap, aligned):
    from s2o_cupy.tools.catalogue import kernels_for

    problem = Problem(1, 8, 2, 1, 1, head_dim, "bfloat16", True, 0.1, softcap)
    plan = make_plan(problem, DENSE, DeviceLimits.of_architecture(compute_capability), aligned)
    assert packed_pass1(plan) in kernels_for(compute_capability)


# ---------------------------------------------------------------- keys in pages

Q, K, V, OUT, MEMORY, TABLE = (n << 20 for n in range(1, 7))  # addresses


def run_in_pages(recorded, lengths, page_size, **changes):
    """Launches where sequence i has row 2 i + 1 of the page table, in order."""
    problems = [
        replace(Problem(1, 8, 2, *x, 128, "bfloat16", is_causal=True, scale=0.1), **changes) for x in lengths
    ]  # fmt: skip
    p, total_q = problems[0], sum(x for x, _ in lengths)
    first_q = [begin_q for begin_q, _ in begins(lengths)]
    table = PackedTable([(begin_q, 2 * i + 1) for i, begin_q in enumerate(first_q)], problems)
    q, out = (Operand(x, (1, p.heads, total_q, p.head_dim), (0, p.head_dim, p.heads * p.head_dim)) for x in (Q, OUT))
    cache = (999, p.kv_heads, page_size, p.head_dim)
    strides = (page_size * p.kv_heads * p.head_dim, p.head_dim, p.kv_heads * p.head_dim)
    operands = (q, Operand(K, cache, strides), Operand(V, cache, strides), out)
    paging = Paging(TABLE, 70, page_size, 999)
    asked = []
    recorded.launches.clear()
    recorded.maps.clear()
    launch = recorded.module.prepare(operands, table, recorded.config, paging)
    launch.run(operands, table, 0, stream=7, paging=paging, memory=lambda n: asked.append(n) or (MEMORY, None))
    return types.SimpleNamespace(launches=recorded.launches, launch=launch, asked=asked, table=table)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 256])
def test_sequences_in_pages_share_a_launch(recorded, page_size):
    """Each with its row of the page table where packed keys would say where they begin; boxes end with their page."""
    lengths = [(300, 301), (1, 70), (128, 128), (257, 900)]
    found = run_in_pages(recorded, lengths, page_size)
    ((ran, _, params, _),) = found.launches
    hopper, boxes = recorded.config.path == "hopper", page_size >= 16
    assert ran.threads == (384 if hopper else 128)
    functions = {(False, False): "pass1_packed", (False, True): "pass1_packed"}
    functions |= {(True, False): "pass1_packed_gathered_sm90", (True, True): "pass1_packed_sm90"}
    if page_size == 16:  # a box has whole rows
        functions[True, True] = "pass1_packed_whole_rows_sm90"
    kernel = found.launch.kernel
    assert (kernel.function, kernel.paged) == (functions[hopper, boxes], True)
    if hopper and boxes:
        assert [(x[0], x[3]) for x in recorded.maps] == [(Q, 128), *((x, min(128, page_size)) for x in (K, V))]
        assert recorded.maps[1][1] == (999, 2, page_size, 128)
    params, _ = without_maps(params)
    assert params["pages"].tolist() == (TABLE, 70, page_size.bit_length() - 1)
    assert int(params["geometry"]["seqlen_q"]) == 686
    of = params["of"][: int(params["sequences"])]
    rows = {tuple(x)[:4] for x in of.tolist()}
    assert rows == {(0, 1, 300, 301), (300, 3, 1, 70), (301, 5, 128, 128), (429, 7, 257, 900)}


def test_another_page_table_is_seen(recorded):
    """Though all else is as before."""
    run_in_pages(recorded, [(3, 4)] * 2, 16)
    other = run_in_pages(recorded, [(3, 4)] * 2, 16)
    launch, table = other.launch, other.table
    q = Operand(Q, (1, 8, 6, 128), (0, 128, 1024))
    cache = Operand(K, (999, 2, 16, 128), (4096, 128, 256))
    recorded.launches.clear()
    launch.run(
        (q, cache, cache, q), table, 0, stream=7, paging=Paging(9 << 20, 70, 16, 999), memory=lambda n: (MEMORY, None)
    )
    ((_, _, params, _),) = recorded.launches
    params, _ = without_maps(params)
    assert int(params["pages"]["table"]) == 9 << 20


LONG = [(900, 1000), (4000, 4000), (3000, 3000)]  # queries enough to repay a copy


@pytest.mark.parametrize("keys_at_a_time", [8000, 7000, 4000])
def test_small_pages_of_many_queries_are_collected(recorded, keys_at_a_time):
    """On Hopper, in as many rounds as the workspace makes; pass 1 is then that of arrays."""
    row = 2 * 2 * 128 * 2  # bytes of a key and its value, of all KV heads
    recorded.config = replace(recorded.config, dense_up_to=5000, workspace_bytes=max(1 << 20, keys_at_a_time * row))
    found = run_in_pages(recorded, LONG, 8)
    if recorded.config.path == "portable":
        assert found.launch.kernel.paged and len(found.launches) == 1
        return
    assert (found.launch.kernel.function, found.launch.kernel.paged) == ("pass1_packed_sm90", False)
    collects, passes = found.launches[::2], found.launches[1::2]
    of_rounds = {8000: [[4000, 3000, 1000]], 7000: [[4000, 3000], [1000]], 4000: [[4000], [3000, 1000]]}[keys_at_a_time]
    rows = {4000: 3, 3000: 5, 1000: 1}  # of the page table
    before = 256  # counters come first
    assert found.asked == [before + row * max(map(sum, of_rounds))]
    for keys, (kernel, blocks, collect, _), (_, _, mapped, _) in zip(of_rounds, collects, passes, strict=True):
        n, chunks = len(keys), 2 * sum(keys) * 16
        assert (kernel.threads, blocks) == (256, -(-chunks // 1024))
        assert (int(collect["k"]["data"]), int(collect["v"]["data"])) == (K, V)
        assert (int(collect["seqlen_k"]), int(collect["chunks"]), int(collect["row_chunks"])) == (sum(keys), chunks, 16)
        assert collect["pages"].tolist() == (TABLE, 70, 3)
        starts = [0, *itertools.accumulate(keys)][:-1]
        assert int(collect["sequences"]) == n
        assert collect["first_key"][:n].tolist() == starts
        assert collect["table_row"][:n].tolist() == [rows[x] for x in keys]
        addresses = [MEMORY + before, MEMORY + before + row * sum(keys) // 2]
        assert [int(collect["keys"]), int(collect["values"])] == addresses
        params, maps = without_maps(mapped)
        assert maps == [Q, *addresses]
        of = params["of"]
        assert (of["begin_k"][:n].tolist(), of["seqlen_k"][:n].tolist()) == (starts, keys)
    assert {x[1] for x in recorded.maps if x[0] != Q} == {(1, 2, sum(keys), 128) for keys in of_rounds}


@pytest.mark.parametrize(
    ("page_size", "config", "lengths"),
    [
        (16, {}, LONG),  # the copy engine brings boxes
        (8, {"workspace_bytes": 4000 * 1024 - 1}, LONG),  # the longest does not fit
        (8, {}, [(1, 4000)] * 100),  # each key has few queries
    ],
)
def test_others_are_not(recorded, page_size, config, lengths):
    recorded.config = replace(recorded.config, **{"dense_up_to": 5000} | config)
    found = run_in_pages(recorded, lengths, page_size)
    assert found.launch.kernel.paged and len(found.launches) == 1


def test_what_repays_a_copy():
    """Query rows of a KV head, 4 of them a query, and the keys that they see."""
    problem = Problem(1, 8, 2, 4096, 4096, 128, "bfloat16", is_causal=True, scale=0.1)
    few = replace(problem, seqlen_q=COLLECT_ROWS // 4 - 1, seqlen_k=COLLECT_ROWS // 4 - 1)
    assert repays_collecting([problem]) and not repays_collecting([few])
    assert repays_collecting([few, replace(problem, seqlen_q=1, seqlen_k=1)])
    n = COLLECT_PAIRS // 2 - 1  # with so many queries and keys, 4 n (n + 1) / 2 pairs
    long = replace(problem, seqlen_q=n, seqlen_k=n)
    short = replace(problem, seqlen_q=n - 1, seqlen_k=n - 1)
    assert repays_collecting([long] * 10) and not repays_collecting([short] * 10)
    assert repays_collecting([replace(short, is_causal=False)] * 10)  # each key twice as many


def test_of_a_cache_only_rows_of_queries_lie_together():
    """Its own strides are the same to every sequence."""
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import packed

    problems = [Problem(1, 4, 4, *x, 128, "bfloat16", is_causal=True, scale=0.1) for x in ((3, 9), (2, 2))]
    rows = Operand(0, (1, 4, 5, 128), (0, 128, -512))
    cache = Operand(0, (9, 4, 1, 128), (512, 128, 0))
    of_pages = PackedTable([(0, 0), (3, 1)], problems)
    assert packed.fits((rows, cache, cache, rows), of_pages, Paging(0, 9, 1, 9))
    single = PackedTable([(0, 0), (3, 1)], [replace(problems[0], seqlen_q=1), problems[1]])
    assert not packed.fits((rows, cache, cache, rows), single, Paging(0, 9, 1, 9))


@pytest.mark.parametrize("compute_capability", [80, 90, 120])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("head_dim", "softcap"), [(64, 0.0), (128, 0.0), (128, 30.0), (256, 0.0)])
def test_kernels_of_pages_that_are_compiled_ahead(compute_capability, page_size, head_dim, softcap):
    from s2o_cupy.tools.catalogue import kernels_for

    problem = Problem(1, 8, 2, 1, 1, head_dim, "bfloat16", True, 0.1, softcap)
    plan = make_plan(problem, DENSE, DeviceLimits.of_architecture(compute_capability), True, True, page_size)
    kernel = packed_pass1(plan)
    assert kernel.paged and kernel in kernels_for(compute_capability)
    if compute_capability == 90:
        assert COLLECT_PACKED_PAGES in kernels_for(compute_capability)


# ---------------------------------------------------------------- on a GPU


@pytest.fixture(params=[("portable", "float16"), ("portable", "bfloat16"), ("hopper", "bfloat16")], ids="-".join)
def gpu(request, rng):
    """arrays(lengths_q, lengths_k, ...) on the GPU, and a configuration."""
    path, dtype = request.param
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if path == "hopper" and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    import cupy
    import ml_dtypes

    def arrays(lengths_q, lengths_k, heads=4, kv_heads=2, head_dim=128):
        of_q, of_k = (sum(lengths_q), heads, head_dim), (sum(lengths_k), kv_heads, head_dim)
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        return [cupy.asarray(rng.standard_normal(shape).astype(kind)) for shape in (of_q, of_k, of_k)]

    return types.SimpleNamespace(arrays=arrays, config=replace(DENSE, path=path), path=path)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("head_dim", [20, 64, 80, 128, 136, 256])
def test_the_bits_of_a_loop(gpu, is_causal, head_dim):
    if gpu.path == "hopper" and head_dim % 8:
        pytest.skip("the Hopper kernels do not take it")
    lengths = LENGTHS[is_causal]
    assert differing(*gpu.arrays(*lengths, head_dim=head_dim), *lengths, gpu.config, is_causal=is_causal) == []


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 5.0}], ids=str)
def test_options(gpu, options):
    assert differing(*gpu.arrays(*LENGTHS[True]), *LENGTHS[True], gpu.config, **options) == []


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{"dense_up_to": 200}, {"dense_up_to": None, "tau": 0.0}], ids=str)
def test_some_and_all(gpu, config):
    """Beside sequences that take turns; and all, however long."""
    lengths = [1500, 65, 3000, 130], [1500, 200, 3100, 130]
    config = replace(gpu.config, segment=256, **config)
    assert differing(*gpu.arrays(*lengths, heads=32, kv_heads=8), *lengths, config) == []


@pytest.mark.gpu
def test_many(gpu):
    """Three launches."""
    lengths = [n * 37 % 290 for n in range(300)]
    assert differing(*gpu.arrays(lengths, lengths), lengths, lengths, gpu.config) == []


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e4], ids=str)
def test_neighbours_change_no_bit(gpu, value):
    """Nor do scores that round otherwise, of rows that come along in a tile of the copy engine's."""
    lengths = [100, 77, 200], [110, 77, 260]
    arrays = gpu.arrays(*lengths)
    starts = [0, 100, 177, 377]
    call = lambda: s2o_attention_varlen(*arrays, starts, [0, 110, 187, 447], config=gpu.config)  # noqa: E731
    before = call().get()
    arrays[0][100:177] = value
    arrays[1][110:187] = value
    arrays[2][110:187] = value
    after = call().get()
    for rows in (slice(0, 100), slice(177, 377)):
        np.testing.assert_array_equal(after[rows].view(np.uint16), before[rows].view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1, 1, 1], [300, 1, 65]], ids=str)
@pytest.mark.parametrize("arrange", ["descending", "unaligned rows", "heads first"])
def test_strides(gpu, arrange, lengths):
    """Single rows have none, so kernels that take them alone may refuse all together."""
    import cupy

    q, k, v = gpu.arrays(lengths, lengths)
    if arrange == "descending":
        q, k, v = (x[::-1] for x in (q, k, v))
    elif arrange == "heads first":
        q, k, v = (cupy.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (q, k, v))
    else:
        wide = [cupy.zeros((len(x), x.shape[1] * 128 + 4), x.dtype) for x in (q, k, v)]
        for x, y in zip(wide, (q, k, v), strict=True):
            x[:, :-4] = y.reshape(len(y), -1)
        q, k, v = (x[:, :-4].reshape(len(x), -1, 128) for x in wide)
    config = replace(gpu.config, path="auto" if gpu.path == "hopper" else "portable")
    assert differing(q, k, v, lengths, lengths, config) == []


@pytest.mark.gpu
def test_a_captured_graph(gpu):
    """It keeps its lengths, whatever other calls of the same arrays do in between."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    lengths, others = [300, 1, 128], [100, 200, 129]
    with stream:
        q, k, v = gpu.arrays(lengths, lengths)
        call = lambda x: s2o_attention_varlen(q, k, v, np.cumsum([0, *x]).tolist(), config=gpu.config)  # noqa: E731
        call(lengths)
        stream.begin_capture()
        o = call(lengths)
        graph = stream.end_capture()
        for _ in range(3):
            q[...] = cupy.roll(q, 1, axis=0)
            call(others)
            graph.launch(stream=stream)
            np.testing.assert_array_equal(o.view(np.uint16).get(), call(lengths).view(np.uint16).get())
