"""Packed sequences that are attended densely: one launch, the bits of a call for each."""

from __future__ import annotations

import itertools
import types
from dataclasses import replace

import numpy as np
import pytest
from conftest import has_gpu, has_hopper
from packs import LENGTHS, differing

from s2o_cupy import S2OConfig, S2OError, s2o_attention_varlen
from s2o_cupy.arrays.operand import Operand
from s2o_cupy.plan.launch_plan import DeviceLimits, make_plan, packed_pass1
from s2o_cupy.plan.packed_table import PackedTable
from s2o_cupy.problem import Problem

DENSE = S2OConfig(dense_up_to=1000)


# ---------------------------------------------------------------- what is launched


@pytest.fixture(params=["portable", "hopper"])
def recorded(request, monkeypatch):
    """Launches of a pretended GPU: (blocks, threads, a copy of the parameters); and the module, with a path."""
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import packed

    launches = []

    def launch(function, blocks, y, z, threads, *rest):
        program = next(p for p in programs if p.address.ctypes.data == rest[-2])
        launches.append((blocks, threads, program.params.copy()))

    programs = []

    class PackedPass(packed.PackedPass):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            programs.append(self)

    runtime = types.SimpleNamespace(getDevice=lambda: 0, memsetAsync=lambda *arguments: None)
    monkeypatch.setattr(packed, "PackedPass", PackedPass)
    monkeypatch.setattr(packed, "runtime", runtime)
    monkeypatch.setattr(packed, "driver", types.SimpleNamespace(launchKernel=launch))
    monkeypatch.setattr(packed, "device_limits", lambda device: DeviceLimits.of_architecture(90))
    monkeypatch.setattr(packed, "tensor_map", lambda pointer, *arguments: pointer.to_bytes(128, "little"))
    loaded = types.SimpleNamespace(ptr=1)
    monkeypatch.setattr(packed.compiler, "load", lambda kernel, device: loaded)
    packed.prepared.cache_clear()
    yield types.SimpleNamespace(module=packed, launches=launches, config=replace(DENSE, path=request.param))
    packed.prepared.cache_clear()


def begins(lengths):
    return list(zip(*(list(itertools.accumulate(x, initial=0))[:-1] for x in zip(*lengths, strict=True)), strict=True))


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
    for blocks, threads, params in recorded.launches:
        assert threads == (384 if recorded.config.path == "hopper" else 128)
        if "maps" in params.dtype.names:
            maps = params["maps"].tobytes()
            assert [int.from_bytes(maps[i : i + 128], "little") for i in (0, 128, 256)] == [1 << 20, 2 << 20, 3 << 20]
            params = params["attention"]
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
        q_tiles, sequences = int(params["attention"]["q_tiles"]), int(params["sequences"])
        assert blocks == (min(132, q_tiles) if recorded.config.path == "hopper" else q_tiles)
        for work in range(q_tiles):
            n = np.searchsorted(params["first_q_tile"][:sequences], work, "right") - 1
            *key, near = params["of"][n].tolist()
            local, tiles = work - params["first_q_tile"][n], -(-key[2] // 128)
            seen.add((*key, int(local // near // tiles * near + local % near), int(local // near % tiles)))
    assert sum(int(params["attention"]["q_tiles"]) for _, params in found) == len(seen)
    assert seen == {
        (*begin, *length, head, tile)
        for length, begin in zip(lengths, begins(lengths), strict=True)
        for head in range(8)
        for tile in range(-(-length[0] // 128))
    }
    assert len(found) == -(-len(lengths) // 128)


def test_longest_work_first(recorded):
    ((_, params),) = run(recorded, [(10, 20), (5, 900), (200, 200)])
    assert params["of"]["seqlen_k"][:3].tolist() == [900, 200, 20]


def test_addresses(recorded):
    """Of all rows; each launch has a counter of its own, and a later call its own addresses."""
    for lse in (0, 9 << 20):
        for i, (_, params) in enumerate(run(recorded, [(3, 4)] * 129, lse)):
            params = params["attention"]
            assert [int(params[name]["data"]) for name in ("q", "k", "v", "out")] == [n << 20 for n in (1, 2, 3, 4)]
            assert (int(params["lse"]), int(params["state"])) == (lse, 0)
            assert int(params["next_q_tile"]) == (5 << 20) + 4 * i
            assert (int(params["geometry"]["seqlen_q"]), int(params["geometry"]["seqlen_k"])) == (387, 516)


def test_a_refused_map_leaves_no_addresses(recorded, monkeypatch):
    """A call after one that failed writes its own."""
    if recorded.config.path != "hopper":
        pytest.skip("the portable kernels take no maps")
    run(recorded, [(3, 4)] * 2, lse=9 << 20)

    def refuse(*arguments):
        raise S2OError("the driver refuses")

    with monkeypatch.context() as patch:
        patch.setattr(recorded.module, "tensor_map", refuse)
        with pytest.raises(S2OError):
            run(recorded, [(3, 4)] * 2, lse=10 << 20)
    ((_, params),) = run(recorded, [(3, 4)] * 2, lse=9 << 20)
    assert int(params["attention"]["lse"]) == 9 << 20


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
    from s2o_cupy.plan.catalogue import kernels_for

    problem = Problem(1, 8, 2, 1, 1, head_dim, "bfloat16", True, 0.1, softcap)
    plan = make_plan(problem, DENSE, DeviceLimits.of_architecture(compute_capability), aligned)
    assert packed_pass1(plan) in kernels_for(compute_capability)


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
