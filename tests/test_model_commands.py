"""The commands tune-model and report: what they print is that of the functions, and one sentence where they cannot."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import LENGTH, SIZES, llama, prompt  # noqa: E402

from s2o_cupy.__main__ import main  # noqa: E402
from s2o_cupy.tools.layer_settings import read_settings  # noqa: E402

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model as from_pretrained reads it, and ids, on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    llama(initializer_range=0.15).save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", prompt()[0].numpy().astype(np.uint16))
    return tmp_path


COMMAND = ["--min-seqlen", "100", "--segment", "32", "--block-m", "64", "--block-n", "64", "--unit", "8"]


@pytest.mark.filterwarnings("ignore")
def test_the_commands(folder, capsys, monkeypatch):
    """From a model and a text to a tuned run, which report repeats."""
    where = [str(folder / "model"), str(folder / "ids.npy")]
    tuned = str(folder / "tuned.json")
    assert main(["tune-model", *where, "--error", "0.2", "--taus", "0.5,0.05", "--out", tuned, *COMMAND]) == 0
    assert "error at most 0.2, a tau for each layer" in capsys.readouterr().out
    _, per_layer, min_seqlen = read_settings(tuned)
    assert [*per_layer] == [0, 1, 2] and min_seqlen == 100
    picture = str(folder / "report.png")
    pytest.importorskip("matplotlib")
    assert main(["report", *where, "--settings", tuned, "--json", "--plot", picture]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [x["heads"][f"{x['layer']}.0"]["tau"] for x in found["layers"]] == [x.tau for x in per_layer.values()]
    assert found["tokens"] == LENGTH and found["picture"] == picture
    monkeypatch.chdir(folder)
    (folder / "text.txt").write_text("some words")
    (folder / "empty.npy").write_bytes(b"")
    for name, stored in (("short", [3]), ("beyond", [3, 97, 5]), ("negative", [3, -100, 5]), ("floats", [0.0] * 5)):
        np.save(name, np.array(stored))
    none = [str(folder / "none"), where[1]]
    tune_none = ["tune-model", *none]
    for message, arguments in (
        ("--length is 501; accepted: 2 to 500", ["report", *where, "--length", "501"]),
        ("s2o report: ", ["report", *none]),
        # Before a model is looked for.
        ("report: the picture is 'a.txt'; accepted", ["report", *none, "--plot", "a.txt"]),
        ("tune-model: the picture is 'a.txt'; accepted", [*tune_none, "--loss", "1", "--plot", "a.txt"]),
        ("s2o tune-model: loss is 0.0; accepted", [*tune_none, "--loss", "0"]),
        ("s2o tune-model: segments is 0; accepted", [*tune_none, "--loss", "1", "--segments", "0"]),
        ("s2o tune-model: seed is -1; accepted", [*tune_none, "--loss", "1", "--seed", "-1"]),
        ("s2o tune-model: held_back is 2.0; accepted", [*tune_none, "--loss", "1", "--held-back", "2"]),
        # After one is.
        ("S2O takes no layer", ["tune-model", *where, "--loss", "1"]),
        ("empty.npy: not a readable .npy array", ["report", where[0], "empty.npy"]),
        ("no such file; accepted: a file that tune_model", ["report", *where, "--settings", "none.json"]),
        ("--settings and --tau, --unit came together; accepted: --settings, or options of S2O",
         ["report", *where, "--settings", tuned, "--tau", "0.1", "--unit=8"]),
        ("model has no tokenizer that transformers can read (", ["report", where[0], "text.txt"]),
        ("such as tokenizer.json, beside the model's, or token ids in a .npy file", ["report", where[0], "text.txt"]),
        ("beyond.npy has the token id 97; accepted: 0 to 96, the model's", ["report", where[0], "beyond.npy"]),
        ("negative.npy has the token id -100; accepted: 0 to 96", ["report", where[0], "negative.npy"]),
        ("s2o report: MODEL is 'nofolder', which is no folder here; the Hugging Face Hub, or its cache, is asked",
         ["report", "nofolder", "none.npy"]),
        ("short.npy is 1 tokens; accepted: 2 or more", ["report", where[0], "short.npy"]),
        ("floats.npy: float64; accepted: token ids, integers", ["report", where[0], "floats.npy"]),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def refused(capsys, *arguments):
    """What a command says that cannot be done."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def test_what_is_wrong_is_said_before_a_model_is_loaded(folder, capsys, monkeypatch):
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    model, ids = folder / "model", folder / "ids.npy"
    np.save(folder / "two.npy", np.zeros((2, 350), int))
    np.save(folder / "short.npy", np.zeros(3, bool))
    np.save(folder / "marks.npy", np.zeros((2, LENGTH), bool))
    tune = ["tune-model", model, ids, "--loss", "1"]
    for message, arguments in (
        ("s2o report: segments is 1; accepted: an integer >= 2", ["report", model, ids, "--segments", "1"]),
        ("s2o report: seed is -1; accepted: an integer >= 0", ["report", model, ids, "--seed", "-1"]),
        ("nope.npy: no such file; accepted: a .npy file\n", [*tune, "--answers", folder / "nope.npy"]),
        ("short.npy: 3 of bool; accepted: bool, 500 or more", [*tune, "--answers", folder / "short.npy"]),
        ("marks.npy: shape (2, 500); accepted: (tokens,) or (1, tokens)", [*tune, "--answers", folder / "marks.npy"]),
        ("two.npy: shape (2, 350); accepted: (tokens,) or (1, tokens)", ["report", model, folder / "two.npy"]),
        ("--out is", [*tune, "--out", model / "config.json"]),
        ("a file in the folder that model is; accepted: a new file", [*tune, "--out", model / "config.json"]),
    ):
        assert message in refused(capsys, *arguments)


def test_a_model_that_cannot_be_read(folder, capsys):
    model, ids = folder / "model", folder / "ids.npy"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 32, "head_dim": 16}))
    assert f"MODEL is '{model}', of which transformers makes no model (" in refused(capsys, "report", model, ids)
    (model / "config.json").write_text(json.dumps(config))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "makes no model (SafetensorError: " in refused(capsys, "tune-model", model, ids, "--loss", "1")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GPT2", "OPT"])
def test_texts_beyond_a_table_of_positions(folder, name, capsys):
    options = {"n_positions": 256} if name == "GPT2" else {"word_embed_proj_dim": 64}
    config = getattr(transformers, f"{name}Config")(**SIZES | {"max_position_embeddings": 256} | options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "table")
    arguments = ["report", folder / "table", folder / "ids.npy"]
    assert "ids.npy is 500 tokens, the model has 256 positions; accepted: --length 256" in refused(capsys, *arguments)
    assert main([*map(str, arguments), "--length", "256", *COMMAND]) == 0


@pytest.mark.filterwarnings("ignore")
def test_rotary_positions_have_no_end(folder):
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    assert main(["report", str(folder / "model"), str(folder / "ids.npy"), *COMMAND]) == 0


@pytest.mark.filterwarnings("ignore")
def test_a_report_is_not_lost_with_its_picture(folder, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from s2o_cupy.integrations.model_report import ModelReport

    def full(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(ModelReport, "draw", full)
    arguments = ["report", str(folder / "model"), str(folder / "ids.npy"), "--plot", str(folder / "a.png"), *COMMAND]
    assert main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens"] == LENGTH and "s2o report: the disk is full" in err
