"""Calls under PyTorch's modes: derivatives are refused, torch.vmap is right or refused, and autocast casts as for
PyTorch's own attention."""

from __future__ import annotations

import pytest
from conftest import SMALL, has_gpu

from s2o_cupy import s2o_attention, s2o_attention_varlen

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

from s2o_cupy.integrations.torch import attention, attention_varlen, scalars_of  # noqa: E402


@pytest.fixture
def qkv(qkv):
    """qkv(seqlen, ...) -> float32 tensors."""
    return lambda *lengths, **shape: [torch.from_numpy(x) for x in qkv(*lengths, **shape)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request):
    if request.param == "cuda" and not (has_gpu() and torch.cuda.is_available()):
        pytest.skip("needs a GPU, and CuPy and PyTorch with CUDA")
    return request.param


def call(q, k, v):
    return s2o_attention(q, k, v, config=SMALL)


def operator(q, k, v):
    return attention(q, k, v, config=SMALL)


def bare_operator(q, k, v):
    """As it stands in a graph."""
    return torch.ops.s2o_cupy.attention(q, k, v, None, 0.0, True, "BHSD", False, *scalars_of(SMALL))[0]


def packed_call(q, k, v):
    return s2o_attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), [0, q.shape[2]], config=SMALL)


def packed_operator(q, k, v):
    return attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), [0, q.shape[2]], config=SMALL)


FORMS = [call, operator, bare_operator, packed_call, packed_operator]

# ---------------------------------------------------------------- derivatives


@pytest.mark.parametrize("attend", FORMS)
def test_forward_mode_is_refused(qkv, attend):
    """With a tangent in any of the tensors. Without an error it would be lost, a derivative of 0."""
    q, k, v = qkv(20)
    refused = pytest.raises(ValueError, match="forward-mode AD.*inference only.*accepted")
    with refused:
        torch.func.jvp(lambda q: attend(q, k, v), (q,), (torch.ones_like(q),))
    with refused:
        torch.func.jacfwd(lambda scale: attend(q, k * scale, v))(torch.ones(()))
    with forward_ad.dual_level(), refused:
        attend(q, k, forward_ad.make_dual(v, torch.ones_like(v)))


@pytest.mark.parametrize("attend", FORMS)
def test_what_has_no_tangent_is_attended(qkv, attend):
    q, k, v = qkv(20)
    expected = attend(q, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with torch.inference_mode():  # asks for no derivative
            assert torch.equal(attend(dual, k, v), expected)
        if attend in (call, packed_call):
            assert torch.equal(attend(q, k, v), expected)


def test_forward_mode_is_refused_in_a_graph(qkv):
    q, k, v = qkv(20)
    derivative = torch.compile(
        lambda q: torch.func.jvp(lambda q: operator(q, k, v), (q,), (q,))[1], fullgraph=True, backend="aot_eager"
    )
    refused = "forward-mode AD|raised exception ArgumentValueError"
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=refused):
        derivative(q)


def test_gradients_of_torch_func_are_refused(qkv):
    q, k, v = qkv(20)
    for attend in (call, operator, packed_call, packed_operator):
        with pytest.raises(ValueError, match="q requires grad.*inference only"):
            torch.func.grad(lambda q, attend=attend: attend(q, k, v).sum())(q)


def test_an_output_that_a_gradient_needs(qkv, kind):
    """PyTorch counts what is written in place, and refuses a gradient of what was there before."""
    q, k, v = (x.to(kind, torch.float16) for x in qkv(10))
    weight, out = torch.ones_like(q, requires_grad=True), torch.full_like(q, 2)
    loss = (weight * out).sum()
    for _ in range(2):  # again, as the second call is known
        before = out._version
        s2o_attention(q, k, v, out=out)
        assert out._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():  # a tensor without a count
        s2o_attention(q, k, v, out=torch.empty_like(q))


# ---------------------------------------------------------------- vmap


def test_vmap(qkv):
    """The operator runs once for each; a call, which sees tensors without an address, says so."""
    q, k, v = qkv(20, batch=3)
    several = [x[:, None] for x in (q, k, v)]
    assert torch.equal(torch.vmap(operator)(*several)[:, 0], operator(q, k, v))
    each = torch.vmap(operator, (0, None, None))(several[0], k[:1], v[:1])
    assert torch.equal(each[1], operator(q[1:2], k[:1], v[:1]))
    for attend in (call, packed_call):
        with pytest.raises(TypeError, match="is a tensor of torch.vmap; accepted: the operator s2o_cupy.integrations"):
            torch.vmap(attend)(*several)


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attend", [operator, bare_operator, packed_operator])
def test_autocast_is_that_of_pytorchs_attention(qkv, kind, attend, dtype):
    q, k, v = (x.to(kind) for x in qkv(200))
    expected = attend(*(x.to(dtype) for x in (q, k, v)))
    mixed = q, k.to(dtype), v.half()
    with torch.autocast(kind, dtype):
        o = attend(*mixed)
        assert o.dtype == torch.nn.functional.scaled_dot_product_attention(q, q, q).dtype == dtype
        assert torch.equal(attend(q, k, v), expected)
        with torch.autocast(kind, enabled=False), pytest.raises(TypeError, match="dtypes differ.*nothing is cast"):
            attend(*mixed)
    with pytest.raises(TypeError, match="dtypes differ.*nothing is cast"):
        attend(*mixed)


def test_autocast_leaves_float64(qkv):
    q, k, v = (x.double() for x in qkv(20))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(operator(q, k, v), call(q, k, v))


def test_autocast_in_a_graph(qkv, kind):
    """Around it and in it."""
    q, k, v = (x.to(kind) for x in qkv(200))
    expected = operator(*(x.bfloat16() for x in (q, k, v)))

    def inside(q, k, v):
        with torch.autocast(kind, torch.bfloat16):
            return operator(q, k, v)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(inside, fullgraph=True, backend="aot_eager")(q, k, v.bfloat16()), expected)
    with torch.autocast(kind, torch.bfloat16):
        around = torch.compile(operator, fullgraph=True, backend="aot_eager")
        assert torch.equal(around(q, k, v.bfloat16()), expected)
    torch._dynamo.reset()
