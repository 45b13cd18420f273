"""Calls like one before take a short way: the same launches on their own arrays, and what is refused is refused still.

PyTorch's tensors pretend to be on a GPU whose driver takes notes."""

from __future__ import annotations

import numpy as np
import pytest
from pretended import interrupted_before, record_launches

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.api import attention
from s2o_cupy.arrays.array_info import Device
from s2o_cupy.caches import clear_cache

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

SPARSE = S2OConfig(segment=128, dense_up_to=0)
DENSE = S2OConfig(dense_up_to=1000)


@pytest.fixture
def gpu(monkeypatch):
    """launched(q, k, v, ...): what a call launches, what it returns, and whether it took the long way."""
    from s2o_cupy.arrays.frameworks import torch as frameworks
    from s2o_cupy.cuda import graphs, pipeline

    clear_cache()
    monkeypatch.setattr(graphs.GraphCache, "is_capturing", lambda self, stream: True)  # no driver knows the stream
    launches = record_launches(monkeypatch, 90, pipeline)
    found = frameworks.TorchFramework
    monkeypatch.setattr(frameworks, "device_of", lambda device: Device("cuda", 0))
    monkeypatch.setattr(found, "_is_current", lambda self, ordinal, host=False: ordinal == gpu.current)
    monkeypatch.setattr(found, "_stream_of", lambda self, ordinal: gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.current)
    long_way, kept = [], []
    run = attention.run
    monkeypatch.setattr(attention, "run", lambda *given, **options: long_way.append(1) or run(*given, **options))

    def memory(self, like):
        def allocate(nbytes):
            kept.append(np.zeros(nbytes, np.uint8))
            return kept[-1].ctypes.data, kept[-1]

        return allocate

    monkeypatch.setattr(found, "memory", memory)

    def gpu(*arrays, **options):
        launches.clear()
        long_way.clear()
        result = s2o_attention(*arrays, **options)
        return [x._replace(params=_numbers(x)) for x in launches], result, bool(long_way)

    gpu.current, gpu.stream = 0, 7
    yield gpu
    clear_cache()


def _numbers(launch):
    return {name: launch.params[name].tobytes() for name in launch.params.dtype.names}


def tensors(seqlen=300, heads=4, head_dim=64, dtype=torch.bfloat16):
    return [torch.zeros(1, n, seqlen, head_dim, dtype=dtype) for n in (heads, 2, 2)]


def where(x):
    """The address of the array ``x`` as launches' parameters hold it."""
    return np.uint64(x.data_ptr()).tobytes()


@pytest.mark.parametrize("options", [{}, {"config": SPARSE}, {"tau": 0, "scale": -0.5, "softcap": 20.0}], ids=str)
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_second_call_launches_what_the_first_did(gpu, options, return_lse):
    """On its own arrays and stream: of the parameters only addresses differ."""
    options = {**options, "return_lse": return_lse}
    first, of_first, long_way = gpu(*tensors(), **options)
    assert long_way
    gpu.stream = 8
    arrays = tensors()
    second, of_second, long_way = gpu(*arrays, **options)
    assert not long_way
    assert [(x.kernel, x.blocks) for x in first] == [(x.kernel, x.blocks) for x in second]
    assert {x.stream for x in first} == {7} and {x.stream for x in second} == {8}
    results = of_second if return_lse else [of_second]
    expected = of_first if return_lse else [of_first]
    assert [(x.shape, x.dtype, x.stride()) for x in results] == [(x.shape, x.dtype, x.stride()) for x in expected]
    for x in (*arrays, *results):
        assert any(where(x) in value for launch in second for value in launch.params.values())


@pytest.mark.parametrize(
    "other",
    [
        {"tau": 0.25}, {"scale": 0.5}, {"softcap": 30.0}, {"is_causal": False}, {"layout": "BSHD"},
        {"return_lse": True}, {"config": SPARSE}, {"return_stats": True}, {"backend": "cupy"},
        {"out": torch.zeros(1, 64, 64, 64).bfloat16()},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_other_options_are_another_call(gpu, other):
    arrays = [torch.zeros(1, 64, 64, 64).bfloat16() for _ in range(3)]  # in either layout
    gpu(*arrays)
    assert not gpu(*arrays)[2]
    launched, _, long_way = gpu(*arrays, **other)
    assert long_way and launched


def test_an_output_of_the_caller_s(gpu):
    """It is written where it lies, however it does, and lies apart from q, k and v in each call."""
    q, k, v = tensors()
    outs = [torch.zeros(1, 300, 4, 64, dtype=q.dtype).transpose(1, 2) for _ in range(2)]
    expected, result, long_way = gpu(q, k, v, out=outs[0])
    assert long_way and result is outs[0]
    launched, result, long_way = gpu(q, k, v, out=outs[1])
    assert not long_way and result is outs[1]
    assert [x.kernel for x in launched] == [x.kernel for x in expected]
    params = [b"".join(launch.params.values()) for launch in launched]
    assert any(where(outs[1]) in x for x in params) and not any(where(outs[0]) in x for x in params)
    assert gpu(q, k, v)[2], "an own output is another call"
    memory = torch.zeros(q.numel() + 4 * 64, dtype=q.dtype)
    of_q = memory[: q.numel()].view(1, 300, 4, 64).transpose(1, 2)
    for further in (256, 0):
        shared = memory[further : further + q.numel()].view(1, 300, 4, 64).transpose(1, 2)
        gpu(of_q, k, v, out=outs[0])
        with pytest.raises(ValueError, match="out and q overlap in memory"):
            gpu(of_q, k, v, out=shared)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[:, :, :200], k, v),
        lambda q, k, v: (q, k.half().bfloat16().mT.contiguous().mT, v.mT.contiguous().mT),
        lambda q, k, v: (q.half(), k.half(), v.half()),
        lambda q, k, v: (torch.nn.Parameter(q, requires_grad=False), k, v),
        lambda q, k, v: (q.unfold(3, 64, 64)[..., 0, :], k, torch.as_strided(v, v.shape, (0, 0, 64, 1))),
    ],
    ids=["shape", "gaps", "dtype", "subclass", "strides"],
)
def test_other_arrays_are_another_call(gpu, change):
    arrays = tensors()
    gpu(*arrays)
    launched, _, long_way = gpu(*change(*arrays))
    assert long_way and launched


def test_arrays_that_begin_elsewhere(gpu):
    """Off 16 bytes other kernels load them, as in a first call."""
    whole = torch.zeros(2 * 300 * 64 + 4, dtype=torch.bfloat16)
    q, k, v = tensors(heads=2)
    off = whole[4:].view(1, 2, 300, 64)
    expected, _, _ = gpu(q, k, off)
    clear_cache()
    aligned, _, _ = gpu(q, k, v)
    launched, _, long_way = gpu(q, k, off)
    assert not long_way and [x.kernel for x in launched] == [x.kernel for x in expected] != [x.kernel for x in aligned]


@pytest.mark.parametrize(
    ("options", "match"),
    [({"is_causal": 1}, "is_causal is 1; accepted: True or False"), ({"return_lse": 0}, "return_lse is 0"),
     ({"softcap": False}, "softcap is False"), ({"tau": [-1.0]}, "tau"), ({"layout": "HSBD"}, "layout is 'HSBD'")],
)  # fmt: skip
def test_what_is_refused_is_refused_after_a_call_like_it(gpu, options, match):
    """1 is not True."""
    arrays = tensors()
    gpu(*arrays)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=match):
            gpu(*arrays, **options)


def test_tensors_that_stand_for_more_are_refused_after_a_call_like_them(gpu):
    q, k, v = tensors()
    gpu(q, k, v)
    with pytest.raises(ValueError, match="q requires grad"):
        gpu(q.clone().requires_grad_(), k, v)
    with torch.no_grad():
        assert gpu(q.clone().requires_grad_(), k, v)[2]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ValueError, match="q has a tangent"):
            gpu(dual, k, v)
    negative = torch.complex(torch.zeros(2, 300, 64), torch.zeros(2, 300, 64)).conj().imag
    assert negative.is_neg()
    with pytest.raises(TypeError, match="k is a view with its negative bit set"):
        gpu(q, negative, v)
    with pytest.raises(TypeError, match="q is torch.sparse_coo"):
        gpu(q.to_sparse(), k, v)
    with pytest.raises(TypeError, match="q is a nested tensor"):
        gpu(torch.nested.nested_tensor([q[0], q[0]]), k, v)
    with pytest.raises(TypeError, match=r"a tensor of a torch\.func transform"):  # which says that it lies at 0
        torch.func.functionalize(lambda x: gpu(x, k, v)[1])(q)
    gpu(q, k, v, return_lse=True)  # whose outputs are wrappers there too
    with pytest.raises(TypeError, match=r"a tensor of a torch\.func transform"):
        torch.func.functionalize(lambda x: gpu(q, k, v, return_lse=True)[1])(q)
    with pytest.raises(TypeError, match="different frameworks"):
        gpu(q, k.float().numpy(), v)
    with pytest.raises(TypeError, match=r"a tensor of torch\.vmap"):
        torch.vmap(lambda x: gpu(x, k, v)[1])(torch.stack([q, q]))


def test_on_another_device_the_long_way_is_taken(gpu, monkeypatch):
    """Which makes the arrays' own current."""
    from contextlib import nullcontext

    from s2o_cupy.arrays.frameworks.torch import TorchFramework

    entered = []
    monkeypatch.setattr(TorchFramework, "_other_scope", lambda *given: entered.append(given[1]) or nullcontext())
    arrays = tensors()
    gpu(*arrays)
    gpu.current = 1
    _, _, long_way = gpu(*arrays)
    assert long_way and entered == [Device("cuda", 0)]


@pytest.mark.parametrize("config", [S2OConfig(error=0.1, dense_up_to=400), None], ids=["error", "no queries"])
def test_what_is_more_than_launches_is_not_known(gpu, config):
    """Taus that are looked for, and calls that launch nothing."""
    arrays = tensors()
    if config is None:
        arrays = arrays[0][:, :, :0], *arrays[1:]
    for _ in range(3):
        assert gpu(*arrays, config=config)[2]


def test_a_call_that_failed_is_not_known(gpu, monkeypatch):
    def refuse(*given, **options):
        raise RuntimeError("no memory")

    arrays = tensors()
    with monkeypatch.context() as broken:
        broken.setattr(attention, "run", refuse)
        with pytest.raises(RuntimeError, match="no memory"):
            s2o_attention(*arrays)
    assert gpu(*arrays)[2]


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["few pointers", "many"])
@pytest.mark.parametrize("where_it_is", ["pointers", "maps"])
def test_a_call_after_an_interrupted_one_has_its_own_arrays(gpu, monkeypatch, config, where_it_is):
    """The interrupt comes when the other's addresses are in the parameters and nobody has taken a note of it."""
    from s2o_cupy.arrays.frameworks.torch import TorchFramework
    from s2o_cupy.cuda.pipeline import Prepared
    from s2o_cupy.cuda.program import Program

    armed = interrupted_before(monkeypatch, Program if where_it_is == "pointers" else Prepared, "_addresses")
    workspace = np.zeros(1 << 24, np.uint8)  # of all calls
    monkeypatch.setattr(TorchFramework, "memory", lambda self, like: lambda nbytes: (workspace.ctypes.data, workspace))
    arrays, others = tensors(head_dim=128), tensors(head_dim=128)
    out = torch.zeros_like(arrays[0])
    expected = gpu(*arrays, out=out, config=config)[0]
    armed.append(True)
    with pytest.raises(KeyboardInterrupt):
        gpu(*others, out=out, config=config)
    armed.clear()
    launched = gpu(*arrays, out=out, config=config)[0]
    assert launched == expected and not any(where(others[0]) in x for of in launched for x in of.params.values())


def test_a_thread_s_first_call_has_a_context_before_its_maps(gpu, monkeypatch):
    """Also where the call is like one of another thread, and nothing is cleared, which would make one."""
    from types import SimpleNamespace

    from s2o_cupy.cuda import program, tensor_maps

    first, others = tensors(head_dim=128), tensors(head_dim=128)
    gpu(*first, config=DENSE)
    notes = []
    monkeypatch.setattr(program.driver, "ctxGetCurrent", lambda: 0)
    monkeypatch.setattr(
        program, "runtime", SimpleNamespace(getDevice=lambda: 0, setDevice=lambda device: notes.append("context"))
    )
    monkeypatch.setattr(tensor_maps, "tensor_map", lambda *of: notes.append("map") or bytes(128))
    _, _, long_way = gpu(*others, config=DENSE)
    assert not long_way and notes[0] == "context" and "map" in notes


def test_clear_cache_forgets(gpu):
    arrays = tensors()
    gpu(*arrays)
    clear_cache()
    assert gpu(*arrays)[2]
