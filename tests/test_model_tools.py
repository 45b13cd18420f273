"""Models of transformers looked at and tuned: what is reported is what runs, and a target that is reached is reached by
the model that register gives it to."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.tools import error_per_head, metrics

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import LENGTH, SIZES, llama, logits_of, prompt  # noqa: E402

from s2o_cupy.integrations.model_tools import report, tune_model  # noqa: E402
from s2o_cupy.integrations.model_tuning import shared_out  # noqa: E402
from s2o_cupy.integrations.next_tokens import changes, last_hidden, next_tokens, text_losses  # noqa: E402
from s2o_cupy.integrations.transformers import Asked, capture, register  # noqa: E402
from s2o_cupy.plan import launch_plan  # noqa: E402
from s2o_cupy.tools import tune_layers  # noqa: E402
from s2o_cupy.tools.layer_curves import LayerCurves  # noqa: E402

CONFIG = S2OConfig(segment=64, block_m=64, block_n=32, unit=8)
SMALLER = S2OConfig(segment=32, block_m=16, block_n=16, unit=8)  # which take longer
OPTIONS = {"config": CONFIG, "min_seqlen": 100, "segments": 100}
TAUS = (1.0, 0.3, 0.1, 0.03)
pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(scope="module")
def model():
    """With larger weights than usual, so that what attention leaves out is seen in the loss."""
    found = llama(initializer_range=0.15)
    found.set_attn_implementation("sdpa")
    return found


def loss_of(model, ids, implementation):
    logits = logits_of(model, implementation, ids)[:, :-1]
    model.set_attn_implementation("sdpa")
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").double().numpy()


def standard_error(off):
    """Of the mean of a prompt's predictions, runs of 128 tokens taken for independent; the first is of tokens 1 to
    127."""
    sums = [(run - off.mean()).sum() for run in np.split(off, [127, 255, 383])]
    return (np.square(sums).sum() * 4 / 3) ** 0.5 / (LENGTH - 1)


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Cohere"])
def test_losses_in_chunks(name, ids):
    """Of models that cap or scale their logits too; nothing of the model stays changed."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    more = {"head_dim": 16, "final_logit_softcapping": 0.1} if name == "Gemma2" else {}
    tokens = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    model = kind(kind.config_class(**{**SIZES, **more, **tokens, "initializer_range": 0.3})).eval()
    logits = model(ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    for chunk in (7, LENGTH):
        found = next_tokens(model, ids[:, :-1], ids[:, 1:], chunk)
        np.testing.assert_allclose(found.loss, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found.hit, logits.argmax(-1) == ids[:, 1:])
    assert "forward" not in vars(model.base_model)
    with pytest.raises(ValueError, match="which gives no logits; accepted: a causal language model"):
        next_tokens(model.base_model, ids, ids)


def test_changes(model, ids):
    """Of the predictions as the definitions have it; none of the same."""
    hidden = last_hidden(model, ids)
    other = hidden + torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    p, q = (torch.log_softmax(model.lm_head(x).double(), -1)[:, :-1] for x in (hidden, other))
    losses = [-x.gather(2, ids[:, 1:, None])[..., 0] for x in (p, q)]
    right = [(x.argmax(-1) == ids[:, 1:]).to(torch.int8) for x in (p, q)]
    # A loss is a sum of float32 roundings of its logits and of their logarithm.
    rounding = {"rtol": 1e-4, "atol": 8 * 2**-24 * float(p.abs().max())}
    for chunk in (70, LENGTH):
        found = changes(model, hidden, other, ids, chunk)
        np.testing.assert_allclose(found.before, losses[0], **rounding)
        np.testing.assert_allclose(found.loss, losses[1] - losses[0], **rounding)
        np.testing.assert_allclose(found.moved, (p.exp() * (p - q)).sum(-1), **rounding)
        np.testing.assert_allclose(found.entropy, -(p.exp() * p).sum(-1), **rounding)
        np.testing.assert_array_equal(found.right, right[1] - right[0])
        assert set(np.unique(found.right)) == {-1, 0, 1} and found.moved.min() >= 0
    same = changes(model, hidden, hidden, ids)
    assert not same.loss.any() and not same.moved.any() and not same.right.any()


def test_changes_of_a_model_that_rules_tokens_out(model, ids):
    """Its logits of them are minus infinity: they count for nothing."""
    hidden = last_hidden(model, ids)
    other = hidden + torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    ids = ids % 90

    def ruled_out(module, args, logits):
        logits[..., 90:] = -torch.inf
        return logits

    hook = model.lm_head.register_forward_hook(ruled_out)
    found = changes(model, hidden, other, ids)
    hook.remove()
    p, q = (torch.log_softmax(model.lm_head(x).double()[..., :90], -1)[:, :-1] for x in (hidden, other))
    np.testing.assert_allclose(found.moved, (p.exp() * (p - q)).sum(-1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.entropy, -(p.exp() * p).sum(-1), rtol=1e-4, atol=1e-4)


def test_losses_of_a_text(model, ids):
    """Padding counts nowhere."""
    hidden = last_hidden(model, ids)
    mask = (torch.arange(LENGTH) > 99).long()[None]
    expected = next_tokens(model, ids[:, :-1], ids[:, 1:]).loss[0]
    # A token less is other shapes, whose products float32 may sum in another order: n roundings of a logit of n terms.
    logits = model.lm_head(hidden)
    rounding = {"rtol": 0, "atol": hidden.shape[-1] * 2**-24 * float(logits.abs().max())}
    np.testing.assert_allclose(text_losses(model, hidden, ids, mask), expected[100:], **rounding)
    np.testing.assert_allclose(text_losses(model, hidden, ids), expected, **rounding)


# ---------------------------------------------------------------- tune_model


def test_costs_between_and_beyond_the_probes():
    error = np.array([[0.8, 0.4], [0.4, 0.2], [0.2, 0.1], [0.1, 0.05], [0.0, 0.0]])
    layer = LayerCurves(0, (1.0, 0.1, 0.01, 0.001, 0.0001), error, 1 - error, np.array([0.2, 0.8]), 4, 4, 128, False)
    costs = shared_out(layer, [0, 2], [0.4, 0.004])
    np.testing.assert_allclose(costs.sum(1), [0.4, 0.04, 0.004, 0.001, 0])  # a power of tau; as the squared error
    np.testing.assert_allclose(costs[:4, 0], costs[:4, 1])  # 0.2 * 0.8 ** 2 of one, 0.8 * 0.4 ** 2 of the other
    assert (shared_out(layer, [0], [0.0]) == 0).all()


@pytest.mark.slow
def test_an_error_is_that_of_what_the_layers_get(model, ids):
    """Of the q, k and v of dense layers, as capture gives them."""
    found = tune_model(model, ids, error=0.2, taus=TAUS[1:], **OPTIONS)
    assert model.config._attn_implementation == "sdpa"
    assert [curves.layer for curves in found.curves] == [0, 1, 2] and found.loss is None
    for curves, taus, error in zip(found.curves, found.taus, found.errors(), strict=True):
        q, k, v = capture(model, ids, [curves.layer])
        for n, tau in enumerate(TAUS[1:]):
            exact = error_per_head(q, k, v, replace(CONFIG, tau=tau), segments=100)
            np.testing.assert_allclose(curves.error[n], exact.error[0], rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(curves.density[n], exact.density[0], rtol=1e-6)
            assert (tau <= taus[0]) == (exact.pooled_error <= 0.2)
        assert error <= 0.2


@pytest.mark.parametrize("by", [pytest.param("layer", marks=pytest.mark.slow), "head"])
def test_a_loss_is_reached_by_the_model_that_is_registered(model, ids, by, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_layers, "ORDERING_BY_QUERY", 0.125)  # of so few keys larger units are many
    dense, target = loss_of(model, ids, "sdpa"), 0.15
    seen = []
    found = tune_model(model, ids, loss=target, by=by, taus=TAUS, progress=lambda *x: seen.append(x), **OPTIONS)
    found.save(tmp_path / "tuned.json")
    s2o = register("s2o", tmp_path / "tuned.json")
    off = (loss_of(model, ids, "s2o") - dense).ravel()
    assert s2o.calls["s2o"] == 3 and s2o.min_seqlen == found.min_seqlen == 100
    assert float(off.mean()) == pytest.approx(found.loss.loss_difference, abs=1e-5) and float(off.mean()) <= target
    assert found.loss.standard_error == pytest.approx(standard_error(off), rel=1e-3)
    assert found.dense_loss == pytest.approx(float(dense.mean()), rel=1e-5)
    parts = found.loss.chosen_on, found.loss.held_back
    assert sum(part.tokens for part in parts) == LENGTH - 1
    of_all = sum(part.tokens * part.loss_difference for part in parts) / (LENGTH - 1)
    assert of_all == pytest.approx(found.loss.loss_difference)
    # The next faster choice was tried, and does not hold; or there is none.
    chosen = min((x for x in found.trials if x.holds), key=lambda x: x.work)
    assert chosen is found.loss and chosen.held_back.holds and chosen.chosen_on.value <= target
    faster = [x for x in found.trials if x.work < chosen.work]
    assert faster and not any(x.holds for x in faster)
    # Some layers have larger units, and their curves are of these; not so where heads have taus of their own.
    assert found.coarse == found.loss.coarse and bool(found.coarse) == ("units of 32" in found.table())
    assert bool(found.coarse) == (by == "layer")
    ordered = [bool(taus.any()) / (32 if n in found.coarse else 8) for n, taus in enumerate(found.taus)]
    assert chosen.work == pytest.approx(chosen.density + np.mean(ordered))
    for key, config in found.per_layer.items():
        assert config.unit == (32 if (key if isinstance(key, int) else key[0]) in found.coarse else 8)
    larger = tune_model(model, ids, error=0.9, taus=TAUS, **{**OPTIONS, "config": replace(CONFIG, unit=32)})
    for layer in found.coarse:
        np.testing.assert_allclose(found.curves[layer].error, larger.curves[layer].error, rtol=1e-5)
    assert found.density == pytest.approx(found.loss.density)
    done, totals = [x[0] for x in seen], {x[1] for x in seen}
    assert len(totals) == 1 and done == sorted(done) and done[-1] <= totals.pop()
    assert any("loss at density" in x[2] for x in seen) and f"{found.loss.loss_difference:+.4f}" in found.table()
    tried = replace(found, trials=(found.trials[0], *found.trials)).table()
    assert tried == found.table() and tried.count("   chosen") == 1  # what comes to the same is told once


@pytest.mark.slow
def test_units_that_cannot_be_larger_stay(model, ids, monkeypatch):
    for config in (replace(CONFIG, unit=64), replace(CONFIG, rank="mean", unit=1, pooled_queries=1)):
        found = tune_model(model, ids, loss=9.0, by="model", taus=(1.0,), **{**OPTIONS, "config": config})
        assert not found.coarse and not found.per_layer
    for ordering, coarse in ((0.0, ()), (3.0, (0, 1, 2))):  # a layer's density grows by more, or by less
        monkeypatch.setattr(tune_layers, "ORDERING_BY_QUERY", ordering / 8)
        assert tune_model(model, ids, loss=9.0, by="model", taus=(1.0,), **OPTIONS).coarse == coarse


@pytest.mark.slow
def test_layers_that_matter_little_get_larger_taus(ids):
    """A layer whose output reaches nothing takes the largest tau at no cost."""
    model = llama(initializer_range=0.15)
    model.model.layers[1].self_attn.o_proj.weight.zero_()
    found = tune_model(model, ids, density=0.7, taus=TAUS, **OPTIONS)
    assert found.taus[1][0] == 1.0 and min(found.taus[0][0], found.taus[2][0]) < 1.0
    assert found.density <= 0.7


def test_padded_rows_and_sliding_windows(ids):
    """The longest sequence is looked at; layers with a window, which S2O leaves nothing out of, have no tau."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=200, eos_token_id=None, bos_token_id=None,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    both, mask = torch.cat([ids.flip(1), ids]), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :100] = 0
    found = tune_model(model, both, error=0.2, taus=TAUS, attention_mask=mask, **OPTIONS)
    alone = tune_model(model, ids, error=0.2, taus=TAUS, **OPTIONS)
    assert [curves.layer for curves in found.curves] == [0, 2]
    for one, other in zip(found.curves, alone.curves, strict=True):
        np.testing.assert_allclose(one.error, other.error, rtol=1e-3, atol=1e-5)
    register(config=replace(CONFIG, tau=0.3), per_layer=found.per_layer, min_seqlen=100)
    told = report(model, both, attention_mask=mask)
    assert [x.ran for x in told.layers] == ["s2o", "dense window", "s2o"]
    exact = loss_of(model, ids, "sdpa")[0], loss_of(model, ids.flip(1)[:, 100:], "sdpa")[0]
    assert told.loss.dense == pytest.approx(np.concatenate(exact).mean(), rel=1e-4)


def test_what_tune_model_refuses(model, ids):
    few = {"taus": (1.0,), "by": "model", "config": replace(CONFIG, unit=64)}  # such units cannot be larger
    for match, other in (
        ("neither error, density nor loss is given; accepted: one of them", {}),
        ("error and loss are given", {"error": 0.1, "loss": 0.1}),
        ("error is 1; accepted: 0 < error < 1", {"error": 1}),
        ("loss is 0; accepted: a finite number above 0", {"loss": 0}),
        (r"S2O takes no layer of the model on these 500 tokens: short \(3\)", {"error": 0.5, "min_seqlen": 501}),
        ("no taus of the grid have loss at most 1e-12, nor has dense attention", {"loss": 1e-12, **few}),
        ("held_back is 'x'", {"loss": 1, "held_back": "x"}),
        ("held_back is 0.6; accepted: a number from 0 to 0.5", {"error": 0.5, "held_back": 0.6}),
        (r"no tau of the grid has density at most 0.01; the least is", {"density": 0.01, **few}),
        ("min_seqlen is 'x'; accepted: an integer >= 0", {"error": 0.5, "min_seqlen": "x"}),
        ("segments is 1; accepted: an integer >= 2", {"error": 0.5, "segments": 1}),
        ("by is 'token'; accepted: 'model', 'layer', 'head'", {"error": 0.5, "by": "token"}),
        ("taus is empty; accepted: ", {"error": 0.5, "taus": ()}),
        ("config is a dict; accepted: S2OConfig or None", {"error": 0.5, "config": {}}),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^tune_model: {match}"):
            tune_model(model, ids, **{**OPTIONS, "taus": TAUS, **other})
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("function", [tune_model, report])
def test_ids_are_checked_before_the_model_runs(model, ids, function, monkeypatch):
    register(config=CONFIG, min_seqlen=100)
    monkeypatch.setattr(type(model.base_model), "forward", lambda *_, **__: pytest.fail("the model ran"))
    for kind, came, given in (
        (TypeError, "is a ndarray", ids.numpy()),
        *([(TypeError, "is a list", ids.tolist()), (TypeError, "is a list", [])] if function is report else []),
        (TypeError, "is of float32", ids.float()),
        (ValueError, r"has shape \(500,\)", ids[0]),
        (ValueError, r"has shape \(1, 1\)", ids[:, :1]),
        (ValueError, r"has shape \(0, 500\)", ids[:0]),
    ):
        accepted = r"a PyTorch tensor \(batch, seqlen\) of int32 or int64, with at least 1 row and 2 tokens"
        with pytest.raises(kind, match=f"^{function.__name__}: input_ids {came}; accepted: {accepted}$"):
            function(model, given, **({"error": 0.1} if function is tune_model else {}))
    with pytest.raises(ValueError, match="^report: segments is 'x'; accepted: an integer >= 2"):
        report(model, ids, segments="x")


def test_ids_of_int32(model, ids):
    """Which losses do not take as they are."""
    register(config=CONFIG, min_seqlen=100)
    assert report(model, ids.int()).loss == report(model, ids).loss


def test_what_register_refuses_of_a_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        register("s2o", tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"per_layer came with the file '.*none.json'; accepted: one of them"):
        register("s2o", str(tmp_path / "none.json"), {0: CONFIG})


# ---------------------------------------------------------------- report


def test_report_is_what_runs(model, ids):
    """Each layer's own error on what S2O gives it; the loss that the model has."""
    other, longer = replace(SMALLER, tau=0.3), replace(SMALLER, segment=64, tau=0.1)
    per_layer = {1: None, (2, 1): other, (2, 3): longer}
    s2o = register(config=replace(SMALLER, tau=0.1), per_layer=per_layer, min_seqlen=100)
    seen = []
    found = report(model, ids, segments=100, progress=lambda *x: seen.append(x))
    assert model.config._attn_implementation == "sdpa" and not s2o.calls
    assert [x.ran for x in found.layers] == ["s2o", "layer", "s2o"] and found.calls == {"s2o": 2, "layer": 1}
    assert [x.layer for x in found.layers] == [0, 1, 2] and seen[-1][:2] == (3, 3)
    assert found.layers[1].density is None and found.layers[1].ms is None
    assert (found.layers[2].tau == [0.1, 0.3, 0.1, 0.1]).all()

    inputs = []
    hook = model.model.layers[2].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
    )
    loss = loss_of(model, ids, "s2o")
    hook.remove()
    attend = model.model.layers[2].self_attn
    shape = (1, LENGTH, -1, 16)
    cos, sin = model.model.rotary_emb(inputs[0], torch.arange(LENGTH)[None])
    q, k, v = (f(inputs[0]).view(shape).transpose(1, 2) for f in (attend.q_proj, attend.k_proj, attend.v_proj))
    q, k = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    q, k, v = (x.numpy() for x in (q, k, v))
    dense = s2o_attention(q, k, v, config=replace(SMALLER, tau=0))
    sparse = np.empty_like(dense)
    for h, config in enumerate((replace(SMALLER, tau=0.1), other, replace(SMALLER, tau=0.1), longer)):
        one = (q[:, h : h + 1], k[:, h // 2 :][:, :1], v[:, h // 2 :][:, :1])
        sparse[:, h : h + 1], stats = s2o_attention(*one, config=config, return_stats=True)
        assert found.layers[2].density[h] == pytest.approx(stats.density, rel=1e-4)
        assert found.layers[2].error[h] == pytest.approx(metrics.rel_l2(sparse[:, h], dense[:, h]), rel=1e-3)
    assert found.layers[2].pooled_error == pytest.approx(metrics.rel_l2(sparse, dense), rel=1e-3)
    assert found.layers[2].pooled_error > 0.02 and (found.layers[2].standard_error == 0).all()

    exact = loss_of(model, ids, "sdpa")
    assert found.loss.s2o == pytest.approx(float(loss.mean()), abs=1e-5)
    assert found.loss.difference == pytest.approx(float((loss - exact).mean()), abs=1e-5)
    assert abs(found.loss.difference) > 1e-5
    assert found.loss.standard_error == pytest.approx(standard_error((loss - exact).ravel()), rel=1e-2)


def test_a_sample_has_a_standard_error(model, ids):
    register(config=replace(SMALLER, tau=0.1), min_seqlen=100)
    found = report(model, ids, segments=6, loss=False)
    assert (found.segments, found.segments_total) == (6, 16) and found.loss is None
    assert all((x.standard_error > 0).any() for x in found.layers)


def test_the_table_the_json_and_the_picture(model, ids, tmp_path):
    register(config=replace(CONFIG, tau=0.2), per_layer={1: None, (2, 1): CONFIG}, min_seqlen=100)
    found, tau = report(model, ids), CONFIG.tau_of(LENGTH)
    lines = found.table().splitlines()
    assert lines[0] == "500 tokens, 3 calls of attention, 2 by S2O" and lines[1].startswith("loss ")
    assert lines[6].split() == ["1", "layer"] and lines[7].endswith(f"   0.2 {tau:g} 0.2 0.2, units of 8")
    assert lines[-2:] == ["     2  s2o: S2O", "     1  layer: per_layer says None for the layer"]
    assert " ms" not in found.table()
    timed = replace(found, layers=tuple(replace(x, ms=2.0, dense_ms=3.0) for x in found.layers)).table()
    assert "dense ms" in timed and timed.splitlines()[8].split() == ["all", "6.00", "9.00", "1.50", "x"]
    plain = json.loads(json.dumps(found.to_dict()))
    assert "2." in lines[7] and plain["layers"][2]["heads"]["2.1"]["unit"] == 8
    assert plain["layers"][2]["heads"]["2.1"]["tau"] == tau and plain["layers"][1]["heads"] == {}
    assert plain["loss"]["difference"] == found.loss.difference and plain["calls"] == {"s2o": 2, "layer": 1}
    pytest.importorskip("matplotlib")
    found.draw(tmp_path / "report.png")
    tune_model(model, ids, error=0.3, by="head", taus=TAUS, **OPTIONS).draw(tmp_path / "tuned.png")
    for name in ("report.png", "tuned.png"):
        assert (tmp_path / name).stat().st_size > 5_000


def test_the_report_says_head_by_head_what_was_dense(model, ids, monkeypatch):
    """As of a GPU, where some heads of a layer are dense: these have no tau, no error, and density 1."""
    monkeypatch.setattr(Asked, "dense_heads", property(lambda asked: DENSE_HEADS[asked.module.layer_idx]))
    other = replace(CONFIG, tau=0.3, unit=4, segment=32)
    register(config=replace(CONFIG, tau=0.2), per_layer={(1, 0): other, (2, 3): other}, min_seqlen=100)
    found = report(model, ids, segments=8, loss=False)
    assert [x.ran for x in found.layers] == ["dense", "partly dense", "partly dense"]
    assert found.calls == {"dense": 1, "partly dense": 2}
    for layer in found.layers:
        dense = np.array(DENSE_HEADS[layer.layer])
        assert (layer.dense == dense).all()
        assert (layer.density[dense] == 1).all() and not layer.error[dense].any()
        assert (layer.density[~dense] < 1).all() and layer.error[~dense].all()
    assert [x.told for x in found.layers] == [
        "dense", "dense 0.2 dense 0.2, units of 8", "0.2 dense 0.2 0.3, units of 8 - 8 4",
    ]  # fmt: skip
    assert found.layers[2].segments.tolist() == [8] * 4
    assert found.layers[2].segments_total.tolist() == [8, 8, 8, 16]
    assert (found.segments, found.segments_total) == (8, 16)
    said = "error and density by 8 of 16 segments of a head, or a larger part; error is rel_l2 against dense attention"
    lines = found.table().splitlines()
    assert lines[:2] == ["500 tokens, 3 calls of attention, 3 by S2O", said] and lines[4].endswith(" 0   dense")
    assert found.to_dict()["layers"][1]["heads"]["1.0"]["dense"] is True


DENSE_HEADS = ([True] * 4, [True, False, True, False], [False, True, False, False])  # of each layer


def test_report_comes_after_register(model, ids, monkeypatch):
    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, "s2o", raising=False)
    with pytest.raises(ValueError, match="report: no S2O is registered; accepted: after .*register"):
        report(model, ids)


def test_report_needs_what_register_returned(model, ids):
    with pytest.raises(TypeError, match="s2o is a S2OConfig; accepted: what register returned, or None"):
        report(model, ids, S2OConfig())
    other = register("s2o_of_another_name", replace(CONFIG, tau=0.1), min_seqlen=100)
    assert report(model, ids, other, loss=False).calls == {"s2o": 3}
    model.set_attn_implementation("s2o_of_another_name")
    assert report(model, ids, loss=False).layers[0].tau[0] == 0.1
    assert model.config._attn_implementation == "s2o_of_another_name"
    model.set_attn_implementation("sdpa")


@pytest.mark.gpu
def test_report_and_tuning_on_a_gpu(monkeypatch):
    """In bfloat16, with times; a call that is plain dense attention by its length has no error, and no tau."""
    monkeypatch.setattr(launch_plan, "DENSE_UP_TO", 8192)
    model = llama(head_dim=64, initializer_range=0.15).to("cuda", torch.bfloat16)
    ids = prompt(2000).cuda()
    config = replace(SMALL, segment=128, block_m=128, block_n=128)
    register(config=replace(config, tau=0.3, dense_up_to=None), min_seqlen=100)
    dense = report(model, ids)
    assert all(x.density.min() == 1 and x.error.max() == 0 and x.ms > 0 and x.dense_ms > 0 for x in dense.layers)
    options = {"taus": (3.0, 1.0, 0.3), "min_seqlen": 100, "segments": 100}
    with pytest.raises(ValueError, match="a call of 2,000 keys is plain dense attention"):
        tune_model(model, ids, loss=1, config=replace(config, dense_up_to=None), **options)
    for target in ({"density": 0.6}, {"loss": 5.0}):
        found = tune_model(model, ids, config=config, **target, **options)
        register("s2o", found.config, found.per_layer, min_seqlen=100)
        sparse = report(model, ids, segments=100)
        assert np.mean([x.mean_density for x in sparse.layers]) == pytest.approx(found.density, rel=0.1)
        assert found.density < 0.65 and sparse.layers[0].error.max() > 0.001
        assert all(0 < x.error.max() < 3 for x in sparse.layers)
