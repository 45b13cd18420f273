"""The attention backend for diffusers, in diffusers' own dispatcher and in a model of its own."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from conftest import SMALL

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers", "0.36")

from diffusers import FluxTransformer2DModel  # noqa: E402
from diffusers.models import attention_dispatch  # noqa: E402

from s2o_cupy import S2OConfig, s2o_attention  # noqa: E402
from s2o_cupy.integrations.diffusers import register  # noqa: E402

DENSE = replace(SMALL, tau=0.0)
LOGGER = "s2o_cupy.integrations.diffusers"


@pytest.fixture
def qkv_of_tokens(rng):
    """[batch, seqlen, heads, head_dim], as diffusers has them."""
    return torch.from_numpy(rng.standard_normal((3, 2, 300, 4, 32), dtype="float32"))


def dispatch(*arrays: Any, **options: Any) -> Any:
    with torch.inference_mode(), attention_dispatch.attention_backend("s2o"):
        return attention_dispatch.dispatch_attention_fn(*arrays, **options)


def native(*arrays: Any, **options: Any) -> Any:
    return attention_dispatch.dispatch_attention_fn(*arrays, **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_dense(qkv_of_tokens, is_causal, scale):
    s2o = register("s2o", DENSE, min_seqlen=256)
    options = {"is_causal": is_causal, "scale": scale}
    torch.testing.assert_close(
        dispatch(*qkv_of_tokens, **options), native(*qkv_of_tokens, **options), rtol=0, atol=2e-6
    )
    assert s2o.calls == {"s2o": 1}


def test_the_bits_of_a_call(qkv_of_tokens):
    config = replace(SMALL, tau=0.5)
    register("s2o", config, min_seqlen=256)
    o = dispatch(*qkv_of_tokens)
    assert torch.equal(o, s2o_attention(*qkv_of_tokens, layout="BSHD", config=config, is_causal=False))
    assert (o - native(*qkv_of_tokens)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "options", "kind"),
    [
        (lambda q, k, v: (q, k[:, :255], v[:, :255]), {}, "short"),
        (lambda q, k, v: (q[:, :63], k, v), {}, "few queries"),
        (lambda q, k, v: (q, k, v), {"attn_mask": torch.ones(2, 300, dtype=torch.bool)}, "mask"),
        (lambda q, k, v: (q[:, :200], k, v), {"is_causal": True}, "causal"),
        (lambda q, k, v: (q, k, v[..., :16]), {}, "shape"),
        (lambda q, k, v: (q, k, v), {"dropout_p": 1.0}, "dropout"),
    ],
)
def test_what_the_native_backend_takes(qkv_of_tokens, change, options, kind, caplog):
    s2o = register("s2o", DENSE, min_seqlen=256)
    arrays = change(*qkv_of_tokens)
    with caplog.at_level(logging.INFO, LOGGER):
        found = dispatch(*arrays, **options)
        dispatch(*arrays, **options)
    assert torch.equal(found, native(*arrays, **options))
    assert s2o.calls == {kind: 2}
    (said,) = caplog.records
    assert f"the native backend takes calls of the kind '{kind}'" in said.message
    assert kind in s2o.report()


def test_other_devices(qkv_of_tokens):
    s2o = register("s2o", DENSE, min_seqlen=256)
    assert s2o(*(x.to("meta") for x in qkv_of_tokens)).shape == (2, 300, 4, 32)
    assert s2o.calls == {"device or dtype": 1}


def test_gradients(qkv_of_tokens):
    s2o = register("s2o", DENSE, min_seqlen=256)
    q, k, v = qkv_of_tokens
    with attention_dispatch.attention_backend("s2o"):
        attention_dispatch.dispatch_attention_fn(q.requires_grad_(), k, v).sum().backward()
    assert q.grad is not None and s2o.calls == {"gradients": 1}


def test_a_model():
    """Flux, of random weights: its text and its image attend together, and to all."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 400, 4), "encoder_hidden_states": torch.randn(1, 48, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.ones(1), "img_ids": torch.randn(400, 3),
        "txt_ids": torch.zeros(48, 3),
    }  # fmt: skip
    s2o = register("s2o", DENSE, min_seqlen=256)
    with torch.inference_mode():
        expected = model(**inputs).sample
        model.set_attention_backend("s2o")
        try:
            found = model(**inputs).sample
        finally:
            model.reset_attention_backend()
            attention_dispatch._AttentionBackendRegistry.set_active_backend(
                attention_dispatch.AttentionBackendName.NATIVE
            )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert s2o.calls == {"s2o": 2}


def test_in_a_graph(qkv_of_tokens):
    """Whole, and counted each time that it runs."""
    s2o = register("s2o", DENSE, min_seqlen=256)
    compiled = torch.compile(lambda q, k, v: s2o(q, k, v), fullgraph=True, backend="eager")
    with torch.inference_mode():
        for _ in range(2):
            found = compiled(*qkv_of_tokens)
    assert torch.equal(found, s2o(*qkv_of_tokens)) and s2o.calls == {"s2o": 3}


def test_names():
    names = attention_dispatch.AttentionBackendName
    before = len(names)
    register("s2o_other")
    assert names("s2o_other") is names["S2O_OTHER"] and names("s2o_other") in list(names) and len(names) == before + 1
    assert register("s2o_other") is attention_dispatch._AttentionBackendRegistry._backends[names("s2o_other")]
    assert len(names) == before + 1
    for name in ("native", "_flash_3", "S2O", "", None):
        with pytest.raises(ValueError, match=f"name is {name!r}; accepted: small letters"):
            register(name)
    with pytest.raises(ValueError, match="name is 'xattention', a method, but S2O would run; accepted: another name"):
        register("xattention")
    with pytest.raises(TypeError, match="config is a float; accepted: S2OConfig or None"):
        register("s2o", 0.1)
    assert register("s2o", tau=0.25).config.tau == 0.25
    with pytest.raises(ValueError, match=r"register: config.error is 0.1, for which attention must be causal"):
        register("s2o", S2OConfig(error=0.1))
    assert register("s2o", S2OConfig(error=0.1), tau=0.25).config.error is None  # which tau overrides
    with pytest.raises(ValueError, match="min_seqlen is -1; accepted: an integer >= 0"):
        register("s2o", min_seqlen=-1)
