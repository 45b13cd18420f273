"""benchmarks/tasks.py --retrieval: how answers are scored, and runs with a tiny model, on the CPU."""

from __future__ import annotations

import json
import types

import numpy as np
import own_methods
import pytest
from benchmarks_on_cpu import BENCHMARKS, pretend_a_gpu

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "5.16")

import _common  # noqa: E402
import _retrieval  # noqa: E402
import _sources  # noqa: E402
import _turns  # noqa: E402
import tasks  # noqa: E402

from s2o_cupy.methods.own import IN_ARRAY_CODE  # noqa: E402
from s2o_cupy.methods.registry import METHODS  # noqa: E402
from s2o_cupy.tools.comparing import parse_method  # noqa: E402

KINDS = _retrieval.texts().KINDS


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Random ones."""
    folder = BENCHMARKS / "retrieval_model"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        network = _sources.module_of(str(folder / "network.py"))
    path = str(tmp_path_factory.mktemp("weights") / "weights.npz")
    random = network.initial(_retrieval.texts().VOCABULARY, 32, 2, 48, 0)
    _sources.module_of(str(folder / "loader.py")).store(path, random)
    return path


class Oracle:
    """A model that is sure of each next token, but for those behind the tokens of ``wrong``."""

    def __init__(self, wrong=()):
        self.wrong = torch.tensor([*wrong], dtype=torch.long)

    def base_model(self, ids, use_cache):
        following = ids.roll(-1, 1)
        following[torch.isin(ids, self.wrong)] = 0
        return types.SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(following, 1024).float())

    def lm_head(self, hidden):
        return 20 * hidden


def test_what_is_right_is_scored_so():
    made = _retrieval.prompts(4000, 2, 0)
    asked = _retrieval.answers_of(made)
    found = _retrieval.found_by(Oracle(), made, "cpu")
    every, *others = _retrieval.scores(asked, found, found, KINDS)
    assert [row["task"] for row in (every, *others)] == ["all", *KINDS]
    assert every["answers"] == sum(len(text.kinds) for text in made) == sum(row["answers"] for row in others)
    assert every["tokens"] == sum((text.question > 0).sum() for text in made)
    assert every["answers_middle"] + every["answers_end"] == every["answers"]
    assert every["answers_to_1024"] + every["answers_to_8192"] == every["answers"]
    assert every["answers_beyond"] == 0 and every["right_beyond"] is None
    for row in (every, *others):
        assert row["right"] == row["right_tokens"] == row["as_dense"] == 1 and row["loss"] < 1e-4
    at_end = [(text.question[0, -256:] > 0).any() for text in made]
    assert all(at_end) and every["answers_end"] >= 4


def test_what_is_wrong_is_found():
    """Of one answer a token, in the middle: of all others nothing changes."""
    made = _retrieval.prompts(4000, 1, 3)
    asked, dense = _retrieval.answers_of(made), _retrieval.found_by(Oracle(), made, "cpu")
    single = int(np.flatnonzero(asked.kind == KINDS.index("single"))[0])
    hit = dense.hit & ~((asked.answer == single) & (np.cumsum(asked.answer == single) == 2))
    likeliest = np.where(hit, dense.likeliest, 0)
    every, row, *_ = _retrieval.scores(asked, _retrieval.Found(likeliest, hit, dense.loss), dense, KINDS)
    assert every["right"] == every["as_dense"] == pytest.approx(1 - 1 / len(asked.kind))
    assert every["right_tokens"] == pytest.approx(1 - 1 / len(hit))
    assert row["right"] == pytest.approx(1 - 1 / row["answers"]) and row["tokens"] == 4 * row["answers"]
    place = "end" if asked.at_end[single] else "middle"
    other = {"end": "middle", "middle": "end"}[place]
    assert every[f"right_{place}"] < 1 == every[f"right_{other}"]
    assert every[f"right_tokens_{place}"] == pytest.approx(
        1 - 1 / (asked.at_end[asked.answer] == (place == "end")).sum()
    )
    farthest = asked.distance[asked.answer == single].max()
    near, far = ("to_1024", "to_8192") if farthest <= 1024 else ("to_8192", "to_1024")
    assert every[f"right_{near}"] < 1 == every[f"right_{far}"]


def test_answers_are_read_one_token_before():
    """A model that is wrong behind every ASK loses no answer, one that is wrong behind keys' last tokens loses many."""
    texts = _retrieval.texts()
    made = _retrieval.prompts(2000, 1, 0)
    assert _retrieval.found_by(Oracle([texts.ASK, texts.AND]), made, "cpu").hit.all()
    found = _retrieval.found_by(Oracle(range(texts.KEYS, texts.VALUES)), made, "cpu")
    asked = _retrieval.answers_of(made)
    (row,) = _retrieval.scores(asked, found, found, ["single"])[1:]
    assert (row["right"], row["right_tokens"], row["as_dense"]) == (0, 0.75, 1)  # of four tokens the first


@pytest.mark.slow
def test_a_run(weights, monkeypatch, tmp_path):
    pretend_a_gpu(monkeypatch, [(_retrieval, "run_retrieval")])
    monkeypatch.setattr(_turns.in_turns, "__defaults__", (0,))  # no warm-up of times that are made up
    args = tasks.parse([
        "--retrieval", "--weights", weights, "--lengths", "1024", "--samples", "1", "--repeats", "1", "--baselines",
        "cudnn", "--base", "tau=0", "--set", "tau=1000,segment=128,block_n=64,block_m=64,tail=none", "--method",
        "ashape", "--method", f"{own_methods.__file__}:LargestKeys:share=0.3", "--tasks",
        "single,multi_query,frequent_words", "--json", str(tmp_path / "r.json"),
    ])  # fmt: skip
    steps: list = []
    rows = tasks.run(args, lambda *told: steps.append(told))
    written = (tmp_path / "r.json").read_text()
    assert json.loads(written)["rows"] == rows
    assert str(tmp_path) not in written and "weights" not in json.loads(written)["settings"]
    assert [done for done, _, _ in steps] == list(range(steps[0][1]))
    assert [row["attention"] for row in rows[::4]] == ["cudnn", "s2o", "s2o", "ashape", "largestkeys"]
    assert [row["task"] for row in rows[:4]] == ["all", "single", "multi_query", "frequent_words"]
    dense, exact, sparse, method, own = rows[::4]
    assert own["config"] == "share=0.3" and 0 < own["density"] < 1
    assert json.loads(written)["settings"]["method"] == ["ashape", "own_methods.py:LargestKeys:share=0.3"]
    assert dense["density"] is None and exact["density"] == 1 > sparse["density"] > 0 < method["density"]
    assert dense["x_attention"] == 1 and exact["attention_ms"] == dense["attention_ms"] == 2  # 1 ms a layer
    assert dense["as_dense"] == 1 and "density" not in rows[1]
    assert exact["loss"] == pytest.approx(dense["loss"], rel=1e-3)
    assert max(exact["rel_l2_by_layer"]) < 0.01 < max(sparse["rel_l2_by_layer"])
    assert {row["answers"] for row in rows[::4]} == {dense["answers"]} == {sum(row["answers"] for row in rows[1:4])}
    assert len(_common.table(rows, _retrieval.COLUMNS).splitlines()) == 21


@pytest.mark.slow
def test_a_run_without_a_gpu(weights, monkeypatch):
    """Small, by the reference, without times; the methods are those asked for."""
    monkeypatch.setattr(_common, "has_gpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = tasks.parse(["--retrieval", "--weights", weights])
    assert (args.lengths, args.samples, args.baselines, args.method) == ([2048], 2, ["sdpa"], [])
    args = tasks.parse(["--retrieval", "--weights", weights, "--lengths", "1024", "--samples", "1"])
    rows = tasks.run(args, lambda *told: None)
    assert [(row["attention"], row.get("config")) for row in rows[::7]] == [("sdpa", None), ("s2o", "default")]
    assert rows[7]["density"] < 1 and "x_attention" not in rows[0]


def test_defaults_on_a_gpu(weights, monkeypatch):
    pretend_a_gpu(monkeypatch, [])
    args = tasks.parse(["--retrieval", "--weights", weights])
    assert args.lengths == [32768, 65536, 131072] and args.base == {} and args.samples == 8
    assert {type(parse_method(x, "--method")) for x in args.method} == {*METHODS, *IN_ARRAY_CODE}
    assert args.tasks == [*KINDS]
    args = tasks.parse(["--hugging-face", "x"])
    assert (args.lengths, args.base, args.samples, args.method) == ([8192], {"dense_up_to": 0}, 100, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "nowhere.npz"], "there is no nowhere.npz; benchmarks/retrieval_model/train.py makes one"),
        (["--tasks", "single,needle"], "accepted: one or more of single, multi_key, multi_value,"),
        (["--tasks", ","], "accepted: one or more of single"),
        (["--haystack", "x"], "accepted: --haystack with --hugging-face"),
        (["--lengths", "2048,100"], "100; accepted: 1024 or more"),
        (["--hugging-face", "x"], "not allowed with argument"),
    ],
)
def test_refused(arguments, message, weights, capsys):
    given = arguments if "--weights" in arguments else ["--weights", weights, *arguments]
    with pytest.raises(SystemExit, match="2"):
        tasks.parse(["--retrieval", *given])
    assert message in capsys.readouterr().err


def test_weights_are_not_for_pretrained_models(monkeypatch, capsys):
    pretend_a_gpu(monkeypatch, [])
    with pytest.raises(SystemExit, match="2"):
        tasks.parse(["--hugging-face", "x", "--weights", "y"])
    assert "--weights with --retrieval" in capsys.readouterr().err
