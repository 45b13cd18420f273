"""Models under torch.autocast. Their attention gets float32 queries and keys, and values of another dtype or, from a
cache, float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import SMALL, has_gpu

from s2o_cupy import s2o_attention

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "5.16")

from tiny_llama import llama, prompt  # noqa: E402

from s2o_cupy.integrations.transformers import register  # noqa: E402

DENSE = replace(SMALL, tau=0.0)
pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request):
    if request.param == "cuda" and not (has_gpu() and torch.cuda.is_available()):
        pytest.skip("needs a GPU, and CuPy and PyTorch with CUDA")
    return request.param


@pytest.fixture
def mixed(qkv, kind):
    """Float32 q and k, bfloat16 v, and the same in bfloat16: (1, 4 or 2 heads, 200, 64)."""
    q, k, v = (torch.from_numpy(x).to(kind) for x in qkv(200, heads=4, kv_heads=2))
    return (q, k, v.bfloat16()), [x.bfloat16() for x in (q, k, v)]


class Layer(torch.nn.Module):  # type: ignore[name-defined, misc]
    layer_idx = 0
    num_key_value_groups = 2


@pytest.mark.parametrize("cache", [True, False])
def test_a_model(kind, cache):
    """Its logits are as close to those in float32 as PyTorch's attention brings them: within twice that error."""
    s2o = register(config=DENSE, min_seqlen=100)
    model, ids = llama().to(kind), prompt(300).to(kind)
    exact = model(ids).logits
    found = {}
    for implementation in ("sdpa", "s2o"):
        model.set_attn_implementation(implementation)
        with torch.autocast(kind, torch.bfloat16):
            found[implementation] = model(ids, use_cache=cache).logits.float()
    assert s2o.calls == {"s2o": 3}
    error = {name: (logits - exact).norm() for name, logits in found.items()}
    assert 0 < error["s2o"] <= 2 * error["sdpa"]


@pytest.mark.parametrize("per_layer", [None, {(0, 2): SMALL}])
def test_a_layer_computes_in_the_dtype_of_autocast(mixed, kind, per_layer):
    """Also where heads have configs of their own, and take several calls."""
    given, cast = mixed
    s2o = register(config=DENSE, per_layer=per_layer, min_seqlen=100)
    with torch.autocast(kind, torch.bfloat16):
        o = s2o(Layer().eval(), *given, None)[0]
    expected = s2o_attention(*cast, config=DENSE).transpose(1, 2)
    if per_layer:
        expected[:, :, 2] = s2o_attention(*cast, config=SMALL)[:, 2]
    assert torch.equal(o, expected)
    assert s2o.calls == {"s2o": 1}


def test_in_a_graph(mixed, kind):
    given, cast = mixed
    s2o = register(config=DENSE, min_seqlen=100)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: s2o(Layer(), q, k, v, None)[0], fullgraph=True, backend="eager")
    with torch.autocast(kind, torch.bfloat16):
        assert torch.equal(compiled(*given), s2o_attention(*cast, config=DENSE).transpose(1, 2))
    torch._dynamo.reset()


def test_capped_scores_of_what_s2o_does_not_take(mixed, kind):
    given, _ = mixed
    s2o = register(config=DENSE, min_seqlen=1000)
    with torch.autocast(kind, torch.bfloat16):
        o = s2o(Layer(), *given, None, softcap=5.0)[0]
    assert o.dtype == torch.bfloat16 and o.isfinite().all()
    assert s2o.calls == {"short": 1}


def test_other_dtypes_than_autocasts_are_not_s2os(mixed):
    """Without autocast PyTorch's own error says what it accepts."""
    given, _ = mixed
    s2o = register(config=DENSE, min_seqlen=100)
    with pytest.raises(RuntimeError, match="same dtype"):
        s2o(Layer(), *given, None)
    assert s2o.calls == {"device or dtype": 1}
