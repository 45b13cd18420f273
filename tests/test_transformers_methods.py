"""Other methods than S2O in models of transformers: published ones and one's own, by register, and in the report."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from own_methods import LargestKeys, everything

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import LENGTH, llama, logits_of, prompt  # noqa: E402

from s2o_cupy import S2OConfig  # noqa: E402
from s2o_cupy.integrations.model_tools import report, tune_model  # noqa: E402
from s2o_cupy.integrations.transformers import capture, register  # noqa: E402
from s2o_cupy.methods import MeanPoolingConfig, select  # noqa: E402
from s2o_cupy.tools import compare  # noqa: E402

POOLED = MeanPoolingConfig(threshold=0.3, keep_first=False)
pytestmark = pytest.mark.usefixtures("without_gradients")


def pooled(q, k, *, is_causal, scale):
    """A method of one's own that chooses what a published one does."""
    return select(q, k, POOLED, is_causal=is_causal, scale=scale)


@pytest.fixture(scope="module")
def model():
    """With larger weights than usual, so that what attention leaves out is seen."""
    return llama(initializer_range=0.15)


@pytest.fixture(scope="module")
def ids():
    return prompt()


def test_every_layer_runs_the_method(model, ids):
    """One's own and the published one that chooses the same keys give the same bits; one that chooses all is dense."""
    dense = logits_of(model, "sdpa", ids)
    found = {}
    for name, config in (("published", POOLED), ("own", pooled), ("all", everything)):
        s2o = register(config=config, min_seqlen=100)
        found[name] = logits_of(model, "s2o", ids)
        assert s2o.calls == {"method": 3}
        assert "the method that register was given, in S2O's place" in s2o.report()
    assert torch.equal(found["own"], found["published"])
    torch.testing.assert_close(found["all"], dense, rtol=1e-4, atol=1e-4)  # as S2O's at tau 0
    assert (found["own"] - dense).abs().max() > 0.01


def test_layers_differ(model, ids):
    layers = {0: LargestKeys(0.3), 1: None, 2: S2OConfig(tau=0)}
    s2o = register(config=S2OConfig(tau=0), per_layer=layers, min_seqlen=100)
    mixed = logits_of(model, "s2o", ids)
    assert s2o.calls == {"method": 1, "layer": 1, "s2o": 1}
    s2o = register(config=LargestKeys(0.3), per_layer={1: None, 2: None}, min_seqlen=100)
    torch.testing.assert_close(mixed, logits_of(model, "s2o", ids), rtol=1e-4, atol=1e-4)
    for error, match, arguments in (
        (ValueError, "layer 0 has largestkeys, and there are entries", (LargestKeys(), {(0, 1): S2OConfig()})),
        (TypeError, r"per_layer\[\(0, 1\)\] is a LargestKeys; accepted: S2OConfig$", (None, {(0, 1): LargestKeys()})),
        (TypeError, r"per_layer\[0\] is the class LargestKeys; accepted: an instance", (None, {0: LargestKeys})),
        (TypeError, "config is a int; accepted: None, S2OConfig, .*, or a method of your own", (3, {})),
    ):
        with pytest.raises(error, match=f"^register: {match}"):
            register("s2o", *arguments)


def test_short_calls_padding_and_windows_are_as_with_s2o(ids):
    """Each row's tokens are attended to by themselves; a sliding window is exact; a short call is the model's own."""
    model = llama(initializer_range=0.15)
    s2o = register(config=LargestKeys(0.3), min_seqlen=LENGTH + 1)
    dense = logits_of(model, "s2o", ids)
    assert s2o.calls == {"short": 3} and torch.equal(dense, logits_of(model, "sdpa", ids))
    register(config=LargestKeys(0.3), min_seqlen=100)
    alone = logits_of(model, "s2o", ids[:, 100:])
    rows, mask = torch.cat([ids, ids]), torch.ones(2, LENGTH, dtype=torch.int64)
    rows[1, :100], mask[1, :100] = 0, 0
    padded = logits_of(model, "s2o", rows, attention_mask=mask)
    torch.testing.assert_close(padded[1:, 100:], alone, rtol=1e-4, atol=1e-4)

    torch.manual_seed(0)
    config = transformers.MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, sliding_window=50,
    )  # fmt: skip
    windowed = transformers.MistralForCausalLM(config).eval()
    s2o = register(config=LargestKeys(0.01), min_seqlen=100)
    torch.testing.assert_close(
        logits_of(windowed, "s2o", ids), logits_of(windowed, "sdpa", ids), rtol=1e-4, atol=1e-4
    )
    assert s2o.calls == {"dense window": 1}


def test_the_report(model, ids):
    """Density and error of a layer are those of a comparison on what it got."""
    per_layer = {1: None, 2: S2OConfig(tau=0.3, segment=128)}
    s2o = register(config=LargestKeys(0.3), per_layer=per_layer, min_seqlen=100)
    model.set_attn_implementation("s2o")
    found = report(model, ids, segments=100)
    assert [x.ran for x in found.layers] == ["method", "layer", "s2o"]
    assert [x.method for x in found.layers] == ["largestkeys, share=0.3", None, None]
    mine, _, other = found.layers
    (row,) = compare(*capture(model, ids, [0]), [LargestKeys(0.3)], repeats=1).rows
    np.testing.assert_allclose(mine.density, row.density[0], rtol=1e-6)
    np.testing.assert_allclose(mine.error, row.error[0], rtol=1e-3)  # sums of squares in float32 here
    assert mine.pooled_error == pytest.approx(row.pooled_error, rel=1e-3) and row.pooled_error > 0.01
    assert mine.tau is mine.standard_error is None and other.tau is not None
    table = found.table()
    assert "3 calls of attention, 1 by S2O, 1 by another method" in table.splitlines()[0]
    assert "error and density of another method by whole calls" in table
    (line,) = (x for x in table.splitlines() if x.endswith("largestkeys, share=0.3"))
    assert f"{mine.mean_density:.3f}" in line
    layer = json.loads(json.dumps(found.to_dict()))["layers"][0]
    assert layer["method"] == "largestkeys, share=0.3" and set(layer["heads"]["0.1"]) == {"density", "error"}
    assert found.loss is not None and abs(found.loss.difference) > 1e-4
    del s2o
    everywhere = register(config=functools.partial(everything), min_seqlen=100)
    plain = report(model, ids, everywhere)
    assert plain.calls == {"method": 3} and plain.table().splitlines()[4].endswith("   method")
    assert plain.loss is not None and abs(plain.loss.difference) < 1e-5


def test_beside_what_is_tuned(model, ids):
    """Each method's loss is that of the model with it, whatever was tuned for."""
    options = {"config": S2OConfig(segment=32, block_m=16, block_n=16, unit=8), "min_seqlen": 100, "taus": (0.3,)}
    steps: list = []
    found = tune_model(
        model, ids, error=0.9, **options, beside=[LargestKeys(0.3), POOLED, S2OConfig(tau=0)],
        progress=lambda *x: steps.append(x),
    )  # fmt: skip
    assert [(x.name, x.settings) for x in found.beside] == [
        ("largestkeys", "share=0.3"), ("meanpooling", "threshold=0.3, keep_first=False"), ("s2o", "tau=0")
    ]  # fmt: skip
    assert [done for done, *_ in steps] == list(range(1, steps[0][1] + 1))
    for x, method in zip(found.beside, (LargestKeys(0.3), POOLED), strict=False):
        s2o = register(config=method, min_seqlen=100)
        model.set_attn_implementation("s2o")
        expected = report(model, ids, s2o)
        assert x.loss_difference == pytest.approx(expected.loss.difference, abs=1e-5)
        assert abs(x.loss_difference) > 1e-4 and x.moved > 1e-4
        assert x.density == pytest.approx(np.mean([layer.mean_density for layer in expected.layers]), rel=1e-5)
    assert found.beside[2].density == 1 and abs(found.beside[2].loss_difference) < 1e-5
    assert any(line.endswith("largestkeys (share=0.3)") for line in found.table().splitlines())
    assert json.loads(json.dumps(found.to_dict()))["beside"][0]["density"] == found.beside[0].density
    for match, beside in (
        (r"beside is a LargestKeys; accepted: a list or tuple of methods", LargestKeys()),
        (r"beside\[1\] is the class LargestKeys; accepted: an instance", [POOLED, LargestKeys]),
    ):
        with pytest.raises(TypeError, match=f"^tune_model: {match}"):
            tune_model(model, ids, error=0.9, **options, beside=beside)
