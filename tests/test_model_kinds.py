"""Reports, tuning and per_layer of models that are no plain decoder: with experts, images or an encoder."""

from __future__ import annotations

import pytest
from conftest import SMALL

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import SIZES, logits_of  # noqa: E402

from s2o_cupy.integrations.implementations import lent  # noqa: E402
from s2o_cupy.integrations.model_tools import report, tune_model  # noqa: E402
from s2o_cupy.integrations.next_tokens import next_tokens  # noqa: E402
from s2o_cupy.integrations.transformers import register  # noqa: E402

DENSE = SMALL.with_tau(0)
TOKENS = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
EXPERTS = {"num_experts_per_tok": 1, "num_local_experts": 2, "head_dim": 16}
EYE = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16,
}  # fmt: skip
IMAGE = 96  # the id of a token that stands for a part of an image
pytestmark = pytest.mark.usefixtures("without_gradients")


def of_kind(name, **options):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**TOKENS, initializer_range=0.15, **options)).eval()


def mixtral():
    return of_kind("MixtralForCausalLM", **SIZES, **EXPERTS)


def llama4():
    """Which gives itself as its base model."""
    return of_kind("Llama4ForCausalLM", **SIZES, **EXPERTS, intermediate_size_mlp=64)


def gpt2():
    return of_kind("GPT2LMHeadModel", n_embd=64, n_layer=3, n_head=4, vocab_size=97)


def llava():
    """Its eye, a CLIP, does not number its layers."""
    return of_kind(
        "LlavaForConditionalGeneration", vision_config=transformers.CLIPVisionConfig(**EYE),
        text_config=transformers.LlamaConfig(**SIZES, **TOKENS, initializer_range=0.15), image_token_index=IMAGE,
        vision_feature_layer=-1,
    )  # fmt: skip


def bart():
    """With fewer layers in its encoder."""
    sizes = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 64)
    return of_kind("BartForConditionalGeneration", **sizes, encoder_layers=2, decoder_layers=4, vocab_size=97)


@pytest.fixture
def ids(ids):
    return ids.masked_fill(ids == IMAGE, 0)


def with_image(ids):
    """The arguments of llava."""
    ids = ids.clone()
    ids[0, 10:14] = IMAGE
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("make", [mixtral, llama4, gpt2, llava])
def test_losses(make, ids):
    """The model's own, of models that read more of their layers' output than hidden states."""
    model, s2o = make(), register(config=DENSE, min_seqlen=100)
    logits = logits_of(model, "sdpa", ids)[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").numpy()
    found = next_tokens(model, ids[:, :-1], ids[:, 1:], chunk=200)
    assert found.loss == pytest.approx(expected, abs=1e-4)
    measured = report(model, ids, s2o, segments=2)
    assert measured.calls == {"s2o": 3}
    assert measured.loss.dense == pytest.approx(expected.mean(), abs=1e-4)
    assert measured.loss.s2o == pytest.approx(expected.mean(), abs=1e-4)


def test_a_model_whose_layers_do_not_run_alone(ids):
    sizes = {"d_model": 64, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 97, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    said = "^model is a T5ForConditionalGeneration, whose layers do not run without .*; accepted: a causal language"
    with pytest.raises(ValueError, match=said):
        report(model, ids, register(), decoder_input_ids=ids)


@pytest.mark.parametrize("make", [mixtral, llava])
def test_a_density_is_tuned_for(make, ids):
    """What each layer costs is measured with it alone, by a setting for that layer of the text."""
    inputs = {} if make is mixtral else {"pixel_values": with_image(ids)["pixel_values"]}
    ids = ids if make is mixtral else with_image(ids)["input_ids"]
    found = tune_model(make(), ids, density=0.9, config=SMALL, min_seqlen=100, taus=(0.1, 0.5), segments=2, **inputs)
    assert set(found.per_layer) == {0, 1, 2} and found.density <= 0.9


def test_per_layer_beside_an_eye(ids):
    """It is of the text's layers, whatever the eye's are called."""
    model, inputs = llava(), with_image(ids)
    expected = model(**inputs).logits
    s2o = register(config=DENSE, per_layer={2: None}, min_seqlen=100)
    model.set_attn_implementation("s2o")
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
    assert s2o.calls == {"not causal": 2, "s2o": 2, "layer": 1}


def test_per_layer_beside_an_encoder(ids):
    """It is of the decoder's layers, however many the encoder has."""
    model = bart()
    options = {"decoder_input_ids": ids}
    expected = logits_of(model, "sdpa", ids, **options)
    s2o = register(config=DENSE, per_layer={1: DENSE, 3: None}, min_seqlen=100)
    torch.testing.assert_close(logits_of(model, "s2o", ids, **options), expected, rtol=1e-4, atol=1e-4)
    assert s2o.calls == {"not causal": 6, "s2o": 3, "layer": 1}  # cross-attention too
    register(config=DENSE, per_layer={4: None}, min_seqlen=100)
    with pytest.raises(ValueError, match="per_layer names layer 4; accepted: 0 to 3"):
        logits_of(model, "s2o", ids, **options)


def test_each_part_gets_its_attention_back():
    """Parts of parts too, and those whose config is a copy."""
    vision = transformers.SiglipVisionConfig(**EYE, projection_dim=64)
    text = transformers.GemmaConfig(**SIZES, **TOKENS, head_dim=16)
    inner = transformers.PaliGemmaConfig(text_config=text, vision_config=vision)
    model = transformers.ColPaliForRetrieval(transformers.ColPaliConfig(vlm_config=inner))
    config = model.config.vlm_config
    other = bart()
    copy = other.model.decoder.config = transformers.BartConfig.from_dict(other.config.to_dict())
    parts = (model.config, config, config.text_config, config.vision_config, other.config, copy)
    its_own = ["sdpa", "eager", "sdpa", "eager", "eager", "sdpa"]
    for part, name in zip(parts, its_own, strict=True):
        part._attn_implementation_internal = name
    register()
    with lent(model, "s2o"), lent(other, "s2o"):
        assert {part._attn_implementation for part in parts} == {"s2o"}
    assert [part._attn_implementation for part in parts] == its_own
