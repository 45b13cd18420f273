"""Queries, keys and values of a model's layers, as they reach its attention."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

from s2o_cupy.tools import inputs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import LENGTH, SIZES, llama, logits_of  # noqa: E402

from s2o_cupy.integrations.transformers import capture  # noqa: E402
from s2o_cupy.tools.layer_files import layer_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_gradients")


def test_capture(model, ids, tmp_path):
    """What reaches a layer's attention, after the rotary embedding; the rest of the model does not run."""
    before = model.config._attn_implementation
    ran = []
    hook = model.model.layers[2].register_forward_hook(lambda *_: ran.append(2))
    q, k, v = capture(model, ids, [1, 0], tmp_path / "trace.npz")
    hook.remove()
    assert not ran and model.config._attn_implementation == before
    assert q.shape == (1, 8, LENGTH, 16) and k.shape == v.shape == (1, 4, LENGTH, 16)
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(ids))
    shape = (1, LENGTH, -1, 16)
    attend = layer.self_attn
    cos, sin = model.model.rotary_emb(hidden, torch.arange(LENGTH)[None])
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    first_q, first_k = apply_rotary_pos_emb(
        attend.q_proj(hidden).view(shape).transpose(1, 2), attend.k_proj(hidden).view(shape).transpose(1, 2), cos, sin
    )
    np.testing.assert_array_equal(q[:, 4:], first_q)  # layer 0 was named second
    np.testing.assert_array_equal(k[:, 2:], first_k)
    np.testing.assert_array_equal(v[:, 2:], attend.v_proj(hidden).view(shape).transpose(1, 2))
    for x, y in zip(inputs.load(tmp_path / "trace.npz"), (q, k, v), strict=True):
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, y)


def test_capture_in_bfloat16(ids, tmp_path):
    model = llama(dtype=torch.bfloat16).to(torch.bfloat16)
    model.set_attn_implementation("eager")
    q, k, v = capture(model, ids[:, :50], [2], tmp_path / "trace.npz")
    assert model.config._attn_implementation == "eager"
    assert q.dtype == k.dtype == v.dtype == np.dtype(ml_dtypes.bfloat16)
    for x, y in zip(inputs.load(tmp_path / "trace.npz"), (q, k, v), strict=True):
        assert x.tobytes() == y.tobytes() and x.shape == y.shape


def test_a_folder_has_a_file_for_each_layer(model, ids, tmp_path):
    arrays = capture(model, ids, [2, 0], tmp_path / "layers")
    assert sorted(path.name for path in (tmp_path / "layers").iterdir()) == [layer_file(0), layer_file(2)]
    for i, layer in enumerate((2, 0)):
        for x, y in zip(inputs.load(tmp_path / "layers" / layer_file(layer)), arrays, strict=True):
            heads = y.shape[1] // 2
            np.testing.assert_array_equal(x, y[:, i * heads : (i + 1) * heads])


def test_layers_that_attend_by_themselves_are_told(ids):
    model = llama()
    model.model.layers[1].forward = lambda hidden, *_, **options: hidden
    with pytest.raises(ValueError, match=r"layers \[1\] never called the AttentionInterface; accepted: others"):
        capture(model, ids, [0, 1])


def test_what_capture_refuses(model, ids, tmp_path):
    for layers in ([], [3], [-1], [0, 0], [True], ["0"]):
        with pytest.raises(ValueError, match=r"layers is .*; accepted: different numbers from 0 to 2"):
            capture(model, ids, layers)
    with pytest.raises(ValueError, match=r"trace.pt: a file that ends in '.pt'; accepted: .npz, .safetensors"):
        capture(model, ids[:, :8], [0], tmp_path / "trace.pt")
    assert model.config._attn_implementation == "sdpa"


def test_capture_under_autocast(model, ids):
    """What attention computes with: queries and keys leave the rotary embedding in float32, values are in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(model, ids[:, :50], [0])
    assert {x.dtype.name for x in captured} == {"bfloat16"}


@pytest.mark.parametrize("name", ["GptOss", "Gemma2"])
@pytest.mark.parametrize("padded", [False, True])
def test_sinks_and_capped_scores(name, padded, ids):
    """They change what the next layer gets. With padding the layers have a mask."""
    torch.manual_seed(0)
    more = {
        "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1},
        "Gemma2": {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16},
    }[name]
    tokens = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = kind.config_class(
        **SIZES, **more, **tokens, head_dim=16, sliding_window=100, layer_types=["full_attention"] * 3,
        initializer_range=0.3,
    )  # fmt: skip
    model = kind(config).eval()
    if name == "GptOss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(3.0)
    options = {"attention_mask": (torch.arange(LENGTH) >= 20).long()[None]} if padded else {}
    found = capture(model, ids, [0, 1, 2], **options)
    values = []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda *x: values.append(x[-1].view(1, LENGTH, 2, 16)))
    logits_of(model, "eager", ids, **options)
    expected = torch.cat(values, 2).transpose(1, 2)
    seen = slice(20 if padded else 0, None)
    np.testing.assert_allclose(found.v[:, :, seen], expected[:, :, seen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("Llama", {}, {}),
        ("Granite", {"attention_multiplier": 0.5}, {"[1, 2] have scale 0.5 (give tools --scale):"}),
        ("Mistral", {"sliding_window": LENGTH}, {}),
        ("Mistral", {"sliding_window": 100}, {"[1, 2] have a window of 100 keys (tools know none):"}),
        ("Gemma2", {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 64, "sliding_window": 100, "head_dim": 16,
                    "layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
         {"[1] have scale 0.125 (give tools --scale), softcap 0.5 (give tools --softcap):",
          "[2] have scale 0.125 (give tools --scale), softcap 0.5 (give tools --softcap), a window of 100 keys "
          "(tools know none):"}),
    ],
)  # fmt: skip
def test_what_arrays_do_not_say_is_warned_of(name, more, said, ids):
    """Tools would find other taus without it."""
    tokens = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = kind(kind.config_class(**SIZES, **tokens, **more))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(model.eval(), ids, [1, 2])
    found = {str(x.message) for x in caught if str(x.message).startswith("capture: ")}
    assert len(found) == len(said) and all(any(words in x for x in found) for words in said)
    assert all(x.filename == __file__ for x in caught if str(x.message) in found)
