"""torch.compile around the calls: they run between two graphs, and nothing of them is traced."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from conftest import SMALL, has_gpu
from torch_fixtures import fresh_graphs as fresh_graphs

from s2o_cupy import s2o_attention, s2o_attention_paged, s2o_attention_varlen

torch = pytest.importorskip("torch")

PAGE_SIZE = 16


def batched(q, k, v):
    return s2o_attention(q, k, v, config=SMALL)


def packed(q, k, v):
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (total, heads, head_dim)
    return s2o_attention_varlen(q, k, v, [0, 70, len(q)], config=SMALL)


def paged(q, k, v):
    """Keys and values in pages that lie in the order of the sequence."""
    k, v = (x[0].transpose(0, 1).unflatten(0, (-1, PAGE_SIZE)) for x in (k, v))
    table = torch.arange(len(k), dtype=torch.int32, device=k.device)[None]
    return s2o_attention_paged(q, k, v, table, seqlen_k=len(k) * PAGE_SIZE, config=SMALL)


CALLS = [batched, packed, paged]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def tensors(request, qkv):
    """tensors(seqlen) -> bfloat16 q, k, v, which NumPy has no name for."""
    if request.param == "cuda" and not (has_gpu() and torch.cuda.is_available()):
        pytest.skip("needs a GPU, and CuPy and PyTorch with CUDA")
    return lambda n: [torch.from_numpy(x).to(request.param, torch.bfloat16) for x in qkv(n)]


@pytest.fixture
def graphs():
    """What the graphs hold that `backend(graphs)` got, one list for each."""
    return []


def backend(graphs):
    def compile_graph(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    return compile_graph


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_runs_between_two_graphs(tensors, graphs, call):
    compiled = torch.compile(lambda q, k, v: call(q * 2, k, v) + 1, backend=backend(graphs), dynamic=True)
    frames = []
    for length in (160, 320):
        q, k, v = tensors(length)
        assert torch.equal(compiled(q, k, v), call(q * 2, k, v) + 1)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert graphs[0][0] is operator.mul and graphs[-1] == [operator.add]
    assert not any("s2o" in str(target) for graph in graphs for target in graph)
    assert frames[0] == frames[-1]  # another length compiles nothing again


def test_a_call_compiled_by_itself_is_the_call(qkv, graphs):
    q, k, v = (torch.from_numpy(x) for x in qkv(200))
    compiled = torch.compile(s2o_attention, backend=backend(graphs))
    for _ in range(2):
        assert torch.equal(compiled(q, k, v, config=SMALL), batched(q, k, v))
    assert graphs == []


def test_errors_are_those_of_the_call():
    q = torch.zeros(1, 2, 20, 64)
    compiled = torch.compile(lambda q, k: batched(q * 1, k, k), backend="eager")
    with pytest.raises(ValueError, match="seqlen_q 20 exceeds seqlen_k 10; accepted"):
        compiled(q, q[:, :, :10])


def test_numpy_arrays(qkv, graphs):
    """torch.compile traces NumPy too."""
    q, k, v = qkv(200)
    compiled = torch.compile(lambda q, k, v: batched(q * np.float32(2), k, v), backend=backend(graphs))
    np.testing.assert_array_equal(compiled(q, k, v), batched(q * np.float32(2), k, v))
    assert all("s2o" not in str(target) for graph in graphs for target in graph)


@pytest.mark.parametrize("call", CALLS)
def test_a_whole_graph_takes_the_operator(call):
    q = torch.zeros(1, 2, 160, 64)
    compiled = torch.compile(lambda q: call(q * 1, q, q), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attention_varlen of s2o_cupy.integrations.torch"):
        compiled(q)


def test_nsa_compress_is_traced_whole():
    """Its operations are the framework's own, with their derivative."""
    from s2o_cupy.nsa import nsa_compress

    x = torch.randn(1, 2, 96, 8, requires_grad=True)
    compiled = torch.compile(lambda x: nsa_compress(x, 32, 16), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), nsa_compress(x, 32, 16))
    assert torch.autograd.grad(compiled(x).sum(), x)[0].count_nonzero() == x.numel()
