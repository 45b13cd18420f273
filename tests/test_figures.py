"""The list of measured figures (benchmarks/_published.py) and what makes them (benchmarks/figures.py, `make figures`):
every result is in the list, every command is one that its script takes, pages show nothing else, and what is older than
the code it times is named."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from benchmark_modules import BENCHMARKS

import _published  # isort: skip
import figures  # isort: skip

ROOT = BENCHMARKS.parent
# How many figures may be stale. The number goes down, or up where code has changed and not all were measured anew.
MOST_STALE = 16
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS_TORCH = {"speed", "lists", "nsa", "host", "many_gpus", "video"}
WITH_CUPY = NEEDS_TORCH - {"many_gpus"}
# Scripts that measure an error, loss or answers in every run, or that the output has the same bits as another call's;
# and those that time what has none.
JUDGED = {"quality", "scaling", "serving", "ragged", "lists", "many_gpus", "methods", "tasks", "video"}
WITHOUT_ERROR = {
    "host": "the host's time alone", "nsa": "a rate on random input, of which no error is asked",
    "server": "of a model whose weights are made up; answers of another stand beside it",
}  # fmt: skip

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="needs a source checkout")


def text_of(page):
    return page.read_text(encoding="utf-8")


# ---------------------------------------------------------------- the list


def test_results_are_those_of_the_list():
    """No file is left over, none is missing without being told, and no figure is there twice."""
    there = {path.stem for path in _published.RESULTS.glob("*.json")}
    listed = [*_published.FIGURES, *_published.NOTEBOOK]
    assert len(listed) == len(set(listed)) and not {*listed} & {*_published.TRAINED}
    assert there <= {*listed}, "results that benchmarks/_published.py does not list"
    missing = {*listed} - there
    assert all(_published.why_stale(name) == "not measured yet" for name in missing)


def test_pages_show_figures_of_the_list():
    for page in PAGES:
        shown = set(re.findall(r"<!-- figures:([\w-]+)", text_of(page)))
        assert shown <= {*_published.FIGURES}, page.name
        linked = set(re.findall(r"results/([\w-]+)\.json", text_of(page)))
        of_notebook = {*_published.NOTEBOOK} if page.parent.name == "notebook" else set()
        assert linked <= {*_published.FIGURES} | of_notebook, page.name


def test_every_figure_is_shown():
    for name in _published.FIGURES:
        assert figures.readers(name), f"{name}: no page shows it"


@pytest.mark.parametrize("name", _published.FIGURES)
def test_commands_are_those_that_scripts_take(name, monkeypatch, tmp_path):
    """With inputs of the clone, or of models that the list says how to train."""
    script, *arguments = shlex.split(_published.FIGURES[name].command)
    assert not {"--json", "--plot"} & {*arguments}
    module = Path(script).stem
    if module in NEEDS_TORCH:
        pytest.importorskip("torch")
    if module in WITH_CUPY:
        pytest.importorskip("cupy")
    for file in re.findall(r"[\w/]+\.(?:py|npz|npy)", " ".join(arguments)):
        made = [x for x, model in _published.TRAINED.items() if model.file == file]
        assert made or (ROOT / file).is_file(), file
        assert {*made} <= {*_published.FIGURES[name].needs}
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    found = importlib.import_module(module)
    if "--rivals" in arguments:
        for side in found._nsa_rivals.KNOWN.values():
            for file in (tmp_path / _published.RIVALS / side.name / x for x in side.files):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
    monkeypatch.setattr("_common.has_gpu", lambda: True)
    if module == "many_gpus":
        monkeypatch.setattr(found.torch.cuda, "device_count", lambda: _published.FIGURES[name].gpus)
    args = found.parse([*arguments, "--json", f"{name}.json"])
    assert args.json == f"{name}.json"


@pytest.mark.parametrize("name", _published.TRAINED)
def test_what_is_trained_is_trained_by_the_script(name):
    model = _published.TRAINED[name]
    script, *arguments = shlex.split(model.command)
    source = text_of(ROOT / script)
    for option in re.findall(r"--[\w-]+", model.command):
        assert f'"{option}"' in source, option
    assert arguments[arguments.index("--out") + 1] == model.file
    assert any(name in figure.needs for figure in _published.FIGURES.values())


def test_no_speed_without_its_error_loss_or_answers():
    for name, figure in _published.FIGURES.items():
        script, *arguments = shlex.split(figure.command)
        module = Path(script).stem
        judged = module in JUDGED or module in WITHOUT_ERROR or "--error" in arguments
        judged |= "--random-order" in arguments  # orders drawn at random: a rate, whatever is left out
        if module == "model":
            parts = arguments[arguments.index("--parts") + 1] if "--parts" in arguments else "loss"
            judged |= bool({"loss", "error"} & {*parts.split(",")})
        assert judged, name


def test_the_second_model_is_looked_at_last_and_nothing_can_be_chosen_on_it():
    """The default, the one before and another method at its default."""
    last = [*_published.FIGURES][-1]
    command = shlex.split(_published.FIGURES[last].command)
    given = {name: value for name, value in pairwise(command) if name in ("--set", "--base", "--method")}
    assert last == "retrieval_2" and given == {"--method": "meanpooling", "--set": "rank=weight,tail=none"}
    trained = shlex.split(_published.TRAINED["second_retrieval"].command)
    assert {"--seed", "--layers", "--hidden", "--head-dim"} <= {*trained}  # another seed and shape than the first
    # Others but time calls on its q, k and v: they ask it nothing.
    scripts = {name: figure.command.split()[0] for name, figure in _published.FIGURES.items()
               if "second_retrieval" in figure.needs}  # fmt: skip
    assert scripts.pop("retrieval_2") == "benchmarks/tasks.py"
    assert {*scripts.values()} == {f"benchmarks/{name}.py" for name in ("speed", "serving", "nsa")}


# ---------------------------------------------------------------- what is older than the code


def test_stale_figures_are_named():
    """Those of the stored list, and no others."""
    stale, allowed = _published.stale(), _published.allowed()
    told = "\n".join(f"{name}: {why}" for name, why in stale.items())
    print(f"{len(stale)} stale figures, of at most {MOST_STALE}:\n{told}")
    assert not {*stale} - {*allowed}, f"older than what they time; `make figures FIGURES_ARGS=--stale`:\n{told}"
    assert not {*allowed} - {*stale}, "no longer stale: take them out of benchmarks/results/stale.txt"
    assert len(allowed) == len({*allowed}) <= MOST_STALE


def test_why_a_figure_is_stale(tmp_path, monkeypatch):
    command = _published.FIGURES["host"].command
    name, path = "host", tmp_path / "host.json"
    assert _published.why_stale(name, tmp_path) == "not measured yet"
    monkeypatch.setattr(_published._digest, "since", lambda result, root: result["since"])
    about = {"since": "", "command": f"python {command} --json host.json"}
    for more, why in (
        ({}, ""),
        ({"since": "kernels have changed since"}, "kernels have changed since"),
        ({"command": "python benchmarks/host.py --turns 3 --json host.json"}, "measured by another command: "),
    ):
        path.write_text(json.dumps(about | more))
        found = _published.why_stale(name, tmp_path)
        assert found.startswith(why) and bool(found) == bool(why)


def test_a_command_is_told_as_results_keep_it():
    words = shlex.split(_published.FIGURES["small_methods"].command)
    assert _published.told(words).startswith(
        "python benchmarks/methods.py --models small_1=loader.py:small_1.npz:text.npz,small_2=loader.py:small_2.npz:"
    )


def test_numbers_of_the_readme():
    """Those typed in sentences are those of the files."""
    readme = " ".join(text_of(ROOT / "README.md").split())
    calls = [row for row in _published.result_of("speed_query")["rows"] if row["length"] == 131072]
    ratio = {row["rank"]: row["s2o_ms"] / row["cudnn_ms"] for row in calls}
    right = {}
    for name in ("retrieval", "retrieval_2"):
        for row in _published.result_of(name)["rows"]:
            if row["task"] == "all" and row["attention"] == "s2o" and row["length"] == 131072:
                right[name, row["rank"]] = f"{100 * row['right']:.3g}"
    one, other = right["retrieval_2", "query"], right["retrieval", "query"]
    assert f"{ratio['query']:.2f} of cuDNN's at 128K tokens; right answers of a retrieval model, {one} %" in readme
    weight = right["retrieval_2", "weight"]
    assert f"{ratio['weight']:.2f} of cuDNN's time at 128K tokens, but {weight} % right" in readme
    assert f"chosen with another retrieval model, which answers {other} %." in readme
    losses = [row["loss_difference"] for row in _published.result_of("small_loss")["rows"] if row.get("default")]
    assert max(losses) < 0
    least, most = -max(losses), -min(losses)
    assert f"loss of two small models {least:.3f} to {most:.3f} nats below dense attention's" in readme


def rows_of(name, **of):
    return [row for row in _published.result_of(name)["rows"] if all(row.get(key) == x for key, x in of.items())]


def test_numbers_of_pages():
    """Those of docs/accuracy.md, tuning.md and limits.md that new figures change."""
    pages = (ROOT / "docs" / f"{name}.md" for name in ("accuracy", "tuning", "limits"))
    accuracy, tuning, limits = (" ".join(text_of(page).split()) for page in pages)
    default = rows_of("small_loss", default=True)
    more = [row["loss_difference"] for row in default]
    assert f"{-max(more):.3f} to {-min(more):.3f} nats a token less than dense attention" in accuracy
    best, *_, worst = sorted(default, key=lambda row: row["copies_loss_difference"])
    less, more = -best["copies_loss_difference"], worst["copies_loss_difference"]
    copied = f"from {less:.3f} less ({best['length']:,} tokens) to {more:.3f} more ({worst['length']:,})"
    assert f"on copied tokens {copied}" in accuracy
    off = max(default, key=lambda row: row["worst_rows_above_half"])
    share = 100 * off["worst_rows_above_half"]
    assert f"at {off['length']:,} tokens up to {share:.1f} % of a layer's" in accuracy
    lost = {}
    for length in (32768, 131072):
        of = {"task": "all", "attention": "s2o", "rank": "weight", "length": length}
        right = [row["right"] for name in ("retrieval", "retrieval_2") for row in rows_of(name, **of)]
        lost[length] = sorted(round(100 * (1 - x)) for x in right)
    (a, b), (c, d) = lost.values()
    assert f"{a} to {b} % of answers lost at 32,768 tokens, {c} to {d} % at 131,072" in accuracy
    errors = [row["rel_l2"] for row in rows_of("speed_query", rank="query")]
    assert f"[rel_l2](figures/time.md#the-default) is {min(errors):.2f} to {max(errors):.2f}" in accuracy

    asked = [row for row in rows_of("small_asked") if row.get("config", "").startswith("error=")]
    over = max(max(row["rel_l2_by_layer"]) / float(row["config"].removeprefix("error=")) for row in asked)
    assert f"erred by up to {over:.2f} times what was asked" in tuning
    portable = {row["length"]: row for row in rows_of("speed_portable", rank="query")}
    long, short = (portable[n]["s2o_ms"] / portable[n]["cudnn_ms"] for n in (131072, 32768))
    assert f"take {long:.1f} of cuDNN's dense time at 131,072 tokens, {short:.1f} at 32,768" in limits


# ---------------------------------------------------------------- what makes them


def run(*arguments):
    command = [sys.executable, str(BENCHMARKS / "figures.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_plan_needs_no_gpu(monkeypatch, tmp_path):
    done = run("--dry-run", "--only", "speed_query,retrieval_2,host", "--train")
    assert done.returncode == 0
    names = re.findall(r"^ *[\d.]+ min  (\w+)$", done.stdout, re.MULTILINE)
    assert names == ["second_retrieval", "speed_query", "host", "retrieval_2"]
    assert "--json build/figures/speed_query.json" in done.stdout and "min in all on one H200" in done.stdout
    assert "second_retrieval" in run("--list").stdout
    done = run("--check")
    assert done.returncode == int(bool(_published.stale())) and "figures are stale" in done.stdout


def test_refused(monkeypatch, capsys):
    assert "--only: none; accepted: speed_query" in run("--only", "none").stderr
    monkeypatch.setattr(figures, "gpus", lambda: 0)
    assert figures.main(["--only", "host"]) == 2
    assert "no usable GPU: an NVIDIA GPU, PyTorch with CUDA and CuPy are needed" in capsys.readouterr().err


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """An empty one, in whose place a script writes what it was called with."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pathlib\n"
        "into = pathlib.Path(sys.argv[-1])\n"
        "'bad' in sys.argv and sys.exit(3)\n"
        "'none' in sys.argv or into.write_text('{\"made\": true}')\n"
    )
    results = tmp_path / "results"
    results.mkdir()
    (results / "stale.txt").write_text("# why\nfirst\nsecond\nthird\n")
    made = {
        "first": _published.Figure("script.py", 1, ("model",)), "second": _published.Figure("script.py bad", 2),
        "third": _published.Figure("script.py none", 1), "fourth": _published.Figure("script.py", 1, gpus=2),
        "fifth": _published.Figure("script.py", 1, ("failing",)),
    }  # fmt: skip
    models = {
        "model": _published.Trained("build/figures/model", "script.py --out build/figures/model", 3, "one"),
        "failing": _published.Trained("build/figures/failing", "script.py bad --out build/figures/failing", 3, "one"),
    }
    for module in (_published, figures):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "FIGURES", made)
        monkeypatch.setattr(module, "TRAINED", models)
    monkeypatch.setattr(figures, "MADE", tmp_path / "build" / "figures")
    monkeypatch.setattr(_published, "RESULTS", results)
    monkeypatch.setattr(_published, "STALE", results / "stale.txt")
    monkeypatch.setattr(_published, "stale", lambda: dict.fromkeys(("second", "third", "fourth", "fifth"), "why"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "figures.py").write_text("open('drawn', 'w').close()\n")
    return tmp_path


def test_a_step_says_what_it_lacks(monkeypatch, tmp_path):
    """GPUs, a package, or a folder with others' code."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    of_rivals = figures.Step("one", [], 1, folder="build/rivals")
    assert figures.Step("one", [], 1, gpus=2).lacks(1) == "needs 2 GPUs, and there are 1"
    assert figures.Step("one", [], 1, package="no_such").lacks(1) == "needs no_such, which is not installed"
    assert of_rivals.lacks(1) == "needs build/rivals, which is not there"
    (tmp_path / "build" / "rivals").mkdir(parents=True)
    assert of_rivals.lacks(1) == ""


def test_what_is_made_and_what_failed(clone, monkeypatch, capfd):
    """It goes on after a failure, a result is put in its place once it is whole, and the end says what failed."""
    monkeypatch.setattr(figures, "gpus", lambda: 1)
    assert figures.main([]) == 1
    out, err = capfd.readouterr()
    assert "needs 2 GPUs: left out" in out and "12 min in all" in out and "figures: 2 of 7 steps done" in out
    assert out.index("1 of 7, model") < out.index("2 of 7, first")
    assert [line.removeprefix("figures: ") for line in err.splitlines() if line.startswith("figures: ")] == [
        "second: ended with 3", "third: wrote no result", "fourth: needs 2 GPUs, and there are 1",
        "failing: ended with 3", "fifth: needs failing, whose training failed",
    ]  # fmt: skip
    assert [path.name for path in (clone / "results").glob("*.json")] == ["first.json"]
    assert (clone / "drawn").exists()
    assert (clone / "results" / "stale.txt").read_text() == "# why\nsecond\nthird\n"
    assert [step.name for step in figures.steps(["first"])] == ["first"]  # the model is there by now
    assert [step.name for step in figures.steps(["first"], train=True)] == ["model", "first"]


def test_side_by_side(clone, monkeypatch, capfd):
    """Each step on GPUs of its own, a figure behind its model's training, the others meanwhile."""
    at_once, now, seen = [], set(), {}
    lock, both = threading.Lock(), threading.Event()

    def run(step, gpus):
        with lock:
            assert now.isdisjoint(gpus)
            now.update(gpus)
            at_once.append(len(now))
            seen[step.name] = len(gpus), [*seen]
            if len(now) == 2:
                both.set()
        both.wait(10)  # the first waits for a second beside it
        if step.name == "model":
            (clone / "build" / "figures" / "model").write_text("")
        with lock:
            now.difference_update(gpus)
        return "" if step.name != "failing" else "ended with 3"

    monkeypatch.setattr(figures, "gpus", lambda: 2)
    monkeypatch.setattr(figures, "run", run)
    assert figures.main(["--side-by-side"]) == 1
    out, err = capfd.readouterr()
    assert max(at_once) == 2 and "on GPU 0" in out and "on GPU 1" in out
    assert {name: count for name, (count, _) in seen.items()} == {
        "model": 1, "first": 1, "second": 1, "third": 1, "fourth": 2, "failing": 1
    }  # fmt: skip
    assert "model" in seen["first"][1] and "fifth: needs failing, whose training failed" in err


def test_side_by_side_a_step_sees_its_gpus_alone_and_has_a_log(clone, monkeypatch):
    (clone / "script.py").write_text("import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])")
    (clone / "build" / "figures").mkdir(parents=True)
    step = figures.Step("third", ["script.py"], 1)
    assert figures.run(step, [1, 3]) == "wrote no result"
    assert (clone / "build" / "figures" / "third.log").read_text() == "sees 1,3\n"


def test_an_interrupt_ends_it(clone, monkeypatch, capfd):
    """The terminal's, which comes while the first step runs and which that gets too."""
    runs, given_up = threading.Event(), threading.Event()

    class Worker(threading.Thread):
        def join(self, timeout=None):
            if not given_up.is_set():
                assert runs.wait(10)
                raise KeyboardInterrupt
            super().join(timeout)

    def interrupted(step):
        runs.set()
        assert given_up.wait(10)
        return "ended with -2"

    give_up = figures.Maker._give_up
    monkeypatch.setattr(figures.Maker, "_give_up", lambda self: give_up(self) or given_up.set())
    monkeypatch.setattr(figures.threading, "Thread", Worker)
    monkeypatch.setattr(figures, "gpus", lambda: 2)
    monkeypatch.setattr(figures, "run", interrupted)
    assert figures.main(["--only", "fourth,second"]) == 1
    err = capfd.readouterr().err  # in the list's order "second" comes first
    assert "second: ended with -2" in err and "fourth: interrupted" in err and (clone / "drawn").exists()


def test_a_result_that_cannot_be_written_is_a_failure(clone, monkeypatch, capfd):
    """And keeps no other step waiting."""
    monkeypatch.setattr(figures, "gpus", lambda: 2)
    (clone / "build" / "figures" / "second.log").mkdir(parents=True)
    assert figures.main(["--side-by-side", "--only", "first,second"]) == 1
    assert "second.log" in capfd.readouterr().err and (clone / "results" / "first.json").exists()
