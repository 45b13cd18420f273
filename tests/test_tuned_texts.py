"""What tune_model does with texts: several at once, parts held back, answers, easy ones, and when it is interrupted."""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest

from s2o_cupy import S2OConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import llama, prompt  # noqa: E402

from s2o_cupy.__main__ import main  # noqa: E402
from s2o_cupy.integrations.model_tools import report, tune_model  # noqa: E402
from s2o_cupy.integrations.model_tuning import _Search  # noqa: E402
from s2o_cupy.integrations.next_tokens import Changes  # noqa: E402
from s2o_cupy.integrations.transformers import register  # noqa: E402
from s2o_cupy.tools.layer_curves import LayerCurves, merged  # noqa: E402
from s2o_cupy.tools.layer_settings import read_settings  # noqa: E402
from s2o_cupy.tools.progress import progress  # noqa: E402

CONFIG = S2OConfig(segment=32, block_m=16, block_n=16, unit=64)  # such units cannot be larger
TAUS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
LOSS = 0.005
OPTIONS = {"loss": LOSS, "by": "model", "taus": TAUS, "config": CONFIG, "min_seqlen": 100}
pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(scope="module")
def model():
    found = llama(initializer_range=0.15)
    found.set_attn_implementation("sdpa")
    return found


@pytest.fixture
def pretended(monkeypatch):
    """pretended(moved): a model whose predictions move by ``moved(tau, predictions)`` with that tau in all layers, of
    which ``entropy(predictions)`` is the loss with dense attention too. Returns the list of taus that were tried."""

    def pretend(moved, entropy=lambda of: 2.0):
        tried = []

        def curves(self, config, of):
            density = np.linspace(0.1, 0.6, len(of.grid))[:, None].repeat(4, 1)
            alone = LayerCurves(0, of.grid, 1 - density, density, np.full(4, 0.25), 4, 8, 4000, False)
            return [alone], [torch.zeros(0) for _ in self.texts]

        def changes(self, s2o, attend):
            n = len(self.of.place)
            tau = s2o.configs.layers.get(0, s2o.configs.default).tau
            if not s2o.configs.layers:
                tried.append(tau)
            found, dense = np.zeros((2, n))
            found[:], dense[:] = moved(tau, self.of) if tau else 0.0, entropy(self.of)
            return Changes(dense, np.zeros(n), found, np.zeros(n, np.int8), dense)

        monkeypatch.setattr(_Search, "curves", curves)
        monkeypatch.setattr(_Search, "_changes", changes)
        return tried

    return pretend


@pytest.mark.slow
def test_several_texts(model):
    """Of different lengths: as one model runs on each, and every token counts alike."""
    texts = [prompt(300), prompt(700)[:, 200:]]
    config = replace(CONFIG, segment=64, block_m=32, block_n=32)
    options = {**OPTIONS, "by": "layer", "taus": (1.0, 0.1), "segments": 100, "config": config}
    found = tune_model(model, texts, **{**options, "loss": 0.4})
    alone = [tune_model(model, text, **{**options, "loss": None, "error": 0.99}) for text in texts]
    for layer, (curves, first, second) in enumerate(zip(found.curves, *(x.curves for x in alone), strict=True)):
        assert curves.layer == layer and curves.segments == first.segments + second.segments
        weights = np.array([300**2, 500**2]) / (300**2 + 500**2)
        for name in ("density", "share", "squared"):
            expected = weights[0] * getattr(first, name) + weights[1] * getattr(second, name)
            np.testing.assert_allclose(getattr(curves, name), expected, rtol=1e-6)
    s2o = register("s2o", found.config, found.per_layer, min_seqlen=100)
    told = [report(model, text, s2o).loss for text in texts]
    of_all = (299 * told[0].difference + 499 * told[1].difference) / 798
    assert found.loss.loss_difference == pytest.approx(of_all, abs=1e-5)
    assert found.loss.chosen_on.tokens + found.loss.held_back.tokens == 798
    with pytest.raises(ValueError, match=r"on these 90 tokens, text 2: short \(3\)"):
        tune_model(model, [texts[0], texts[0][:, :90]], **options)


@pytest.mark.slow
def test_one_text_is_a_batch_or_a_list(model):
    rows = torch.cat([prompt(300), prompt(600)[:, 300:]])
    options = {**OPTIONS, "taus": (0.5,), "loss": 9.0, "segments": 100}
    batch, listed = tune_model(model, rows, **options), tune_model(model, [rows[:1], rows[1:]], **options)
    for one, other in ((batch.loss, listed.loss), (batch.loss.held_back, listed.loss.held_back)):
        assert one.loss_difference == pytest.approx(other.loss_difference, abs=1e-6)
    assert merged(batch.curves[:1]) is batch.curves[0]


def test_a_head_whose_output_is_0_has_no_error():
    """Of several texts: nothing is divided by its share of the output."""
    errors, one = np.array([[0.0, 0.3]]), np.ones((1, 2))
    curves = LayerCurves(0, (0.1,), errors, one, np.array([0.0, 1.0]), 2, 4, 300, False)
    with np.errstate(all="raise"):
        found = merged([curves, replace(curves, seqlen_k=500)])
    np.testing.assert_allclose(found.error, errors)


def test_a_part_held_back_tightens(model, pretended):
    """Taus that hold where they were chosen and not elsewhere give way to the next that hold there too."""
    tried = pretended(lambda tau, of: np.where(of.held_back, 4, 1) * 0.01 * tau)
    found = tune_model(model, prompt(4000), **OPTIONS)
    assert found.config.tau == 0.1 and found.loss.holds and not found.notes
    assert found.loss.held_back_worse == pytest.approx(0.003)
    assert 0.5 in tried and len(tried) <= 6  # which holds on the part chosen on
    assert "the part held back is 0.0030 nats a token worse" in found.table()
    assert any(line.endswith("too much: all, held back") for line in found.table().splitlines())
    assert tune_model(model, prompt(4000), **OPTIONS, held_back=0).config.tau == 0.5
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["loss"]["held_back_worse"] == found.loss.held_back_worse and plain["interrupted"] is False


@pytest.mark.parametrize("group", ["hardest part", "copied", "answers"])
def test_what_is_hard_decides(model, pretended, group):
    """Few tokens that lose most, of which the mean shows nothing."""
    ids = prompt(6000)
    ids[0, 4000:4200] = ids[0, 1000:1200]
    ids[0, 5200:5300] = ids[0, 2200:2300]
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[0, ::50] = True
    hard = {"hardest part": lambda of: of.stretch == 4, "copied": lambda of: of.copied, "answers": lambda of: of.answer}
    times = {"hardest part": 2, "copied": 4, "answers": 4}[group]
    pretended(lambda tau, of: times * np.where(hard[group](of), 9 * LOSS * tau, 0.0))
    found = tune_model(model, ids, answers=answers, **OPTIONS)
    assert found.config.tau == 0.1
    assert {x.chosen_on.tightest.name for x in found.trials if not x.holds} == {group}
    if group == "answers":
        assert tune_model(model, ids, **OPTIONS).config.tau > 0.1
        assert tune_model(model, [ids, ids], answers=[None, answers], **OPTIONS).config.tau == 0.1


def test_nothing_but_dense_attention_holds(model, pretended):
    pretended(lambda tau, of: 1.0)
    with pytest.warns(UserWarning, match="no taus of the grid hold loss at most 0.005: every layer attends densely"):
        found = tune_model(model, prompt(4000), **OPTIONS)
    assert found.config.tau == 0 and found.density == 1 and found.errors() == [0] and found.loss.work == 1


def test_no_choice_holds_on_the_part_held_back(model, pretended, monkeypatch):
    """Not even dense attention in S2O's place: what is said is what fails, not what was chosen on."""
    pretended(lambda tau, of: 0.0)
    changes = _Search._changes

    def rounded(self, s2o, attend):  # at every tau, 0 too
        return changes(self, s2o, attend)._replace(moved=np.where(self.of.held_back, 0.02, 0.001))

    monkeypatch.setattr(_Search, "_changes", rounded)
    with pytest.raises(ValueError, match=r"by rounding: 0\.02 \(all, held back\); accepted: a larger loss"):
        tune_model(model, prompt(4000), **OPTIONS)


def test_a_text_that_is_too_easy(model, pretended):
    """A small loss, or repeats; and the tokens that the model is unsure of decide."""
    unsure = lambda of: of.place % 40 == 0  # noqa: E731
    pretended(lambda tau, of: np.where(unsure(of), 0.09 * tau, 0.0), lambda of: np.where(unsure(of), 2.0, 0.05))
    with pytest.warns(UserWarning, match=r"^tune_model: text . is too easy .*: its loss .* is 0.10 nats") as told:
        assert tune_model(model, [prompt(4000), prompt(4000)], **OPTIONS).config.tau == 0.1  # at most 2 * 0.005
    assert [x.message.args[0][12:18] for x in told] == ["text 1", "text 2"]
    pretended(lambda tau, of: 0.0)
    with pytest.warns(UserWarning, match=r"text 1 is too easy .*: its loss .* is 2.00 nats a token, and 9\d%") as told:
        found = tune_model(model, [prompt(300).repeat(1, 10), prompt(4000)], **OPTIONS)
    assert len(told) == len(found.notes) == 1 and f"note: {found.notes[0]}" in found.table()
    assert told[0].filename == __file__ and found.to_dict()["notes"] == [*found.notes]


def test_what_is_verified_is_kept_when_it_is_interrupted(model, pretended, monkeypatch):
    pretended(lambda tau, of: 0.02 * tau)
    measure = _Search._changes
    for stop, tau in ((1, None), (2, 0.1), (3, 0.1)):  # 0.1 holds, 0.5 does not, 0.2 would be the last
        left = [stop + 4]  # four taus are probed before

        def changes(self, s2o, attend, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return measure(self, s2o, attend)

        monkeypatch.setattr(_Search, "_changes", changes)
        if tau is None:
            with pytest.raises(KeyboardInterrupt):
                tune_model(model, prompt(4000), **OPTIONS)
            continue
        with pytest.warns(UserWarning, match=f"interrupted after {stop - 1} tries .* the fastest setting that was"):
            found = tune_model(model, prompt(4000), **OPTIONS)
        assert found.config.tau == tau and found.interrupted and found.loss.holds and len(found.trials) == stop - 1


def test_the_file_says_from_where_on_s2o_runs(model, pretended, tmp_path):
    pretended(lambda tau, of: 0.0)
    path = tmp_path / "tuned.json"
    tune_model(model, prompt(4000), **{**OPTIONS, "min_seqlen": 1234}).save(path)
    assert read_settings(path).min_seqlen == register("s2o", path).min_seqlen == 1234
    assert register("s2o", path, min_seqlen=7).min_seqlen == 7 and register("s2o").min_seqlen == 8192
    path.write_text('{"config": {}}')
    assert read_settings(path).min_seqlen is None and register("s2o", path).min_seqlen == 8192
    path.write_text('{"config": {}, "min_seqlen": -1}')
    with pytest.raises(ValueError, match=r"tuned.json: min_seqlen is -1; accepted: an integer >= 0, or null"):
        register("s2o", path)


def test_the_time_left_is_shown(model, pretended, capsys):
    pretended(lambda tau, of: 0.0)
    with progress("tune-model") as told:
        line = told.__self__

        def slow(*args):
            line.begin, line.last = time.monotonic() - 600, time.monotonic() - 60
            told(*args)

        tune_model(model, prompt(4000), progress=slow, **OPTIONS)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(" min left, " in line for line in lines) and "loss at density 0.100: +0.0000" in lines[-1]


def test_what_is_refused_of_texts(model, monkeypatch):
    monkeypatch.setattr(type(model.base_model), "forward", lambda *_, **__: pytest.fail("the model ran"))
    ids, marked = prompt(300), torch.ones(1, 300, dtype=torch.bool)
    mask = torch.ones_like(ids)
    padded = torch.cat([mask, mask * (torch.arange(300) == 299)])  # in row 1 one token, behind which none is predicted
    for kind, match, given, more in (
        (TypeError, r"input_ids\[1\] is a list", [ids, [1]], {}),
        (TypeError, r"input_ids\[0\] is a str", ["hello"], {}),
        (TypeError, "input_ids is a str; accepted: a PyTorch tensor", "hello", {}),
        (ValueError, "input_ids is empty; accepted: a PyTorch tensor, or several", [], {}),
        (ValueError, "input_ids has the id 100000; accepted: 0 to ", ids * 0 + 100_000, {}),
        (ValueError, r"input_ids\[1\] has the id -1; accepted: 0 to ", [ids, ids * 0 - 1], {}),
        (ValueError, r"input_ids\[0\] has shape \(300,\)", [ids[0]], {}),
        (ValueError, "attention_mask came with 2 texts; accepted: with one", [ids] * 2, {"attention_mask": mask}),
        (TypeError, "attention_mask is a list; accepted: a PyTorch tensor", ids, {"attention_mask": [1]}),
        (ValueError, r"attention_mask has shape \(2, 300\); accepted", ids, {"attention_mask": padded}),
        (ValueError, "attention_mask leaves nothing to predict in row 1; accepted: .* two neighbouring tokens",
         torch.cat([ids, ids]), {"attention_mask": padded}),
        (TypeError, "answers is a list; accepted: a PyTorch tensor", ids, {"answers": [marked]}),
        (TypeError, "answers is of int64", ids, {"answers": mask}),
        (ValueError, r"answers has shape \(1, 299\)", ids, {"answers": marked[:, 1:]}),
        (ValueError, "answers marks no token that is predicted", ids, {"answers": torch.arange(300)[None] == 0}),
        (ValueError, "answers is 1 masks with 2 texts", [ids] * 2, {"answers": [marked]}),
        (ValueError, "answers is a Tensor with 2 texts", [ids] * 2, {"answers": marked}),
        (TypeError, r"answers\[1\] is a int", [ids] * 2, {"answers": [None, 3]}),
    ):
        with pytest.raises(kind, match=f"^tune_model: {match}"):
            tune_model(model, given, **OPTIONS, **more)
    with pytest.raises(TypeError, match="^tune_model: model is a str; accepted: a model of transformers, loaded"):
        tune_model("folder", ids, **OPTIONS)


def test_the_command_shows_warnings_of_others(model, pretended, tmp_path, monkeypatch):
    """Notes are in the result; what PyTorch, say, warns of is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pretended(lambda tau, of: 0.0, lambda of: 0.3)
    tried = _Search._changes

    def warning(self, s2o, attend):
        warnings.warn("of another library", UserWarning, stacklevel=2)
        return tried(self, s2o, attend)

    monkeypatch.setattr(_Search, "_changes", warning)
    model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "text.npy", prompt(4000)[0].numpy())
    command = ["tune-model", str(tmp_path / "model"), str(tmp_path / "text.npy"), "--loss", "0.005", "--by", "model"]
    with pytest.warns(UserWarning) as told:
        assert main([*command, "--taus", "1", "--min-seqlen", "100", "--unit", "64"]) == 0
    assert {str(x.message) for x in told} == {"of another library"}


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_command(model, pretended, tmp_path, capsys, monkeypatch):
    """Several texts, answers, a note for each easy one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pretended(lambda tau, of: np.where(of.answer, 0.09 * tau, 0.0), lambda of: 0.3)
    model.save_pretrained(tmp_path / "model")
    for n in range(2):
        np.save(tmp_path / f"{n}.npy", prompt(5000)[0, n * 1000 :].numpy().astype(np.uint16))
        np.save(tmp_path / f"answers_{n}.npy", np.arange(5000 - n * 1000) % 50 == 0)
    texts, marks = ([str(tmp_path / f"{name}{n}.npy") for n in range(2)] for name in ("", "answers_"))
    command = ["tune-model", str(tmp_path / "model"), *texts, "--loss", "0.005", "--by", "model", "--taus", "1,0.2,0.1"]
    command += ["--min-seqlen", "100", "--unit", "64", "--json", "--out", str(tmp_path / "tuned.json")]
    answers = [x for mark in marks for x in ("--answers", mark)]
    for more, tau in (([], 1.0), (answers, 0.2), (["--length", "3000", "--held-back", "0", *answers], 0.2)):
        assert main([*command, *more]) == 0
        out, err = capsys.readouterr()
        found = json.loads(out)
        assert found["config"]["tau"] == tau == read_settings(tmp_path / "tuned.json").config.tau
        assert found["tokens"] == ([3000, 3000] if "--length" in more else [5000, 4000]) and found["texts"] == texts
        assert (found["loss"]["held_back"] is None) == ("--held-back" in more)
        assert err.count("s2o tune-model: note: text ") == len(found["notes"]) == 2
    np.save(marks[0], np.zeros(5000))
    for message, more in (
        ("--answers came 1 times with 2 texts; accepted: once for each", answers[:2]),
        ("answers_0.npy: 5000 of float64; accepted: bool, 5000 or more", answers),
        ("--length is 4500; accepted: 2 to 4000, the tokens of", ["--length", "4500"]),
        ("held_back is 0.7; accepted: a number from 0 to 0.5", ["--held-back", "0.7"]),
    ):
        assert main([*command, *more]) == 2
        assert message in capsys.readouterr().err
