"""benchmarks/tasks.py and the questions that it asks, and model.py with a pretrained model: a tiny one from a folder,
on the CPU in the place of a GPU."""

from __future__ import annotations

import json
import re
import string
import types

import pytest
from benchmarks_on_cpu import BENCHMARKS, pretend_a_gpu
from conftest import has_gpu
from in_process import run_script

# isort: split
import _common
import _pretrained
import _tasks
import model
import tasks


def encode(text):
    return [ord(letter) for letter in text]


def decode(ids):
    return "".join(map(chr, ids))


# ---------------------------------------------------------------- the questions


@pytest.mark.parametrize("task", _tasks.TASKS)
def test_samples_have_their_length_and_repeat(task):
    for length in (2000, 2001, 5000):
        one = _tasks.sample(task, encode, length, (0, 3), start=[2])
        assert len(one.ids) == length
        assert one.ids[0] == 2
        assert one == _tasks.sample(task, encode, length, (0, 3), start=[2])
        assert one != _tasks.sample(task, encode, length, (0, 4), start=[2])
        assert decode(one.ids[1:]).count("The grass is green.") > 5
    with pytest.raises(ValueError, match=r"in 100 tokens; accepted: \d+ or more"):
        _tasks.sample(task, encode, 100, (0, 3))
    told = decode(_tasks.sample(task, encode, 3000, (0, 3), ["Nothing here.", "Nor there."]).ids)
    assert told.count(" Nothing here. Nor there.") > 10


@pytest.mark.parametrize(("task", "keys"), [("needle", 1), ("needles", 4)])
def test_needles_answer(task, keys):
    places = []
    for seed in range(30):
        one = _tasks.sample(task, encode, 4000, (seed,))
        text, answer = decode(one.ids[: -one.answer]), decode(one.ids[-one.answer :])
        told = re.findall(r" One of the special magic numbers for ([\w-]+) is: (\d{7})\.", text)
        assert len(dict(told)) == len(told) == keys
        (asked,) = re.findall(r"What is the special magic number for ([\w-]+) ", text)
        assert answer == f" {dict(told)[asked]}"
        assert text.endswith(f"for {asked} mentioned in the provided text is:")
        places.append(text.index(f"for {asked} is: ") / len(text))
    assert min(places) < 0.2
    assert max(places) > 0.8  # anywhere


def test_variables_answer():
    for seed in range(10):
        one = _tasks.sample("variables", encode, 4000, (seed,))
        text, answer = decode(one.ids[: -one.answer]), decode(one.ids[-one.answer :])
        shown, asked = text.split("\n\n")  # an example, and the question
        for part, right in ((shown, shown.split("are:")[1]), (asked, answer)):
            values: dict[str, str] = {}
            for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", part):
                values[name] = values.get(value, value)
            (number,) = set(values.values())
            assert f"assigned the value {number} in the text above" in part
            assert right.split() == list(values)
            assert len(values) == 5
        assert number not in shown


def test_answers_are_read_where_they_stand():
    torch = pytest.importorskip("torch")

    def oracle(ids, use_cache, logits_to_keep):
        """Sure of each next token, but for one that it takes for 7."""
        following = ids[0].roll(-1)
        following[following == 5] = 7
        logits = 20 * torch.nn.functional.one_hot(following, 10).float()
        return types.SimpleNamespace(logits=logits[None, -logits_to_keep:])

    samples = [_tasks.Sample([1, 2, 3, 4], 2), _tasks.Sample([9, 8, 6, 5, 1], 3)]
    found, losses = tasks.answers(oracle, samples, "cpu")
    assert [x.tolist() for x in found] == [[3, 4], [6, 7, 1]]
    assert losses[0] == pytest.approx([0, 0], abs=1e-6)
    assert losses[1] == pytest.approx([0, 20, 0], abs=1e-6)


# ---------------------------------------------------------------- a model from a folder


@pytest.fixture
def pretrained(tmp_path):
    """A random Llama and a tokenizer of single characters."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", "5.16")
    tokenizers = pytest.importorskip("tokenizers")
    every = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    words = tokenizers.models.WordLevel({x: i for i, x in enumerate(string.printable)}, unk_token="?")
    letters = tokenizers.Tokenizer(words)
    letters.pre_tokenizer = every
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / "tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(string.printable), max_position_embeddings=2000, initializer_range=0.3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


SPARSE = "segment=128,tau=1000,block_n=16,block_m=16,tail=none,rank=mean,dense_up_to=0"


@pytest.mark.slow
def test_tasks(pretrained, monkeypatch, tmp_path):
    pretend_a_gpu(monkeypatch, [(tasks, "run_tasks")])
    loaded = _pretrained.model
    # In 16 bits which of two tokens is likelier may hang on how a machine's products are rounded.
    monkeypatch.setattr(_pretrained, "model", lambda *of: loaded(*of).float())
    args = tasks.parse([
        "--hugging-face", str(pretrained), "--lengths", "1500", "--samples", "2", "--tasks", "needle,variables",
        "--set", "tau=0", "--set", SPARSE, "--json", str(tmp_path / "t.json"),
    ])  # fmt: skip
    steps: list = []
    rows = tasks.run(args, lambda *told: steps.append(told))
    written = (tmp_path / "t.json").read_text()
    assert json.loads(written)["rows"] == rows
    assert str(tmp_path) not in written
    assert [done for done, _, _ in steps] == list(range(steps[0][1]))
    assert [row["task"] for row in rows] == ["needle"] * 5 + ["variables"] * 5
    assert [row.get("config") for row in rows[2:4]] == ["dense_up_to=0", "tau=0,dense_up_to=0"]
    for dense, other, default, exact, sparse in (rows[:5], rows[5:]):
        assert dense["as_dense"] == other["as_dense"] == exact["as_dense"] == 1
        assert dense["density"] is None
        assert exact["density"] == 1 >= default["density"] > sparse["density"]
        assert exact["loss"] == pytest.approx(dense["loss"], rel=0.01)
        assert abs(sparse["loss"] - dense["loss"]) > 1e-4
        for row in (dense, other, default, exact, sparse):
            assert (row["model"], row["samples"], row["length"]) == ("tiny", 2, 1500)
            assert 0 <= row["right"] <= row["right_tokens"] < 1
    assert len(_common.table(rows, tasks.COLUMNS).splitlines()) == 11
    args.lengths = [2001]
    with pytest.raises(SystemExit, match="2001 for a model of 2000 tokens"):
        tasks.run(args, lambda *told: None)


@pytest.mark.slow
def test_model_of_a_folder(pretrained, monkeypatch, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    pretend_a_gpu(monkeypatch, [(model, "run_models")])
    text = "Pack my box with five dozen liquor jugs! " * 30
    (tmp_path / "text.txt").write_text(text)
    args = model.parse([
        "--hugging-face", str(pretrained), "--text", str(tmp_path / "text.txt"), "--lengths", "1000",
        "--base", SPARSE, "--copy-distance", "40", "--json", str(tmp_path / "m.json"),
    ])  # fmt: skip
    dense, _, sparse = model.run(args, lambda *told: None)
    assert str(tmp_path) not in (tmp_path / "m.json").read_text()
    ids = torch.tensor([[string.printable.index(x) for x in text[:1001]]])
    found = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.bfloat16)
    with torch.inference_mode():
        loss = found(ids, labels=ids).loss
    assert dense["model"] == "tiny"
    assert dense["loss"] == pytest.approx(float(loss), rel=0.01)
    assert dense["copies"] == pytest.approx((1000 - 41 - 7) / 1000)
    assert abs(sparse["copies_loss_difference"]) > 1e-4
    assert sparse["density"] < 0.9


def test_gguf_files_are_told_from_folders(tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert _pretrained.places(str(tmp_path)) == (str(tmp_path), {})
    assert _pretrained.places(str(tmp_path / "some.gguf")) == (str(tmp_path), {"gguf_file": "some.gguf"})
    with pytest.raises(SystemExit, match="neither a folder nor a .gguf file"):
        _pretrained.places(str(tmp_path / "other.gguf"))


# ---------------------------------------------------------------- the command line


def test_help():
    result = run_script(BENCHMARKS / "tasks.py", "--help")
    assert result.returncode == 0
    for option in ("--hugging-face", "--tasks", "--base", "--set", "--haystack"):
        assert option in result.stdout


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_it_needs_a_gpu():
    result = run_script(BENCHMARKS / "tasks.py", "--hugging-face", "x")
    assert result.returncode == 2
    assert "needs an NVIDIA GPU" in result.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (tasks, [], "--hugging-face"),
        (
            tasks,
            ["--hugging-face", "x", "--tasks", "needle,chess"],
            "accepted: one or more of needle, needles, variables",
        ),
        (model, ["--hugging-face", "x"], "accepted: one of them with --hugging-face"),
        (model, ["--hugging-face", "x", "--text", "y", "--tokens", "z"], "accepted: one of them"),
        (model, ["--hugging-face", "x", "--models", "A=a:b:c"], "not allowed with argument"),
        (model, ["--models", "A=a:b:c", "--text", "y"], "none with --models"),
    ],
)
def test_refused(script, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.parse(arguments)
    assert message in capsys.readouterr().err
