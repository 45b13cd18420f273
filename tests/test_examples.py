"""The examples run from end to end, small and on the CPU."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import has_gpu
from in_process import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="needs a source checkout")


def run(script, *arguments, ranks=0):
    """What a script prints without a GPU: here, or where there is one from a process that does not see it; or from
    several processes of torchrun's."""
    if not ranks and not has_gpu():
        result = run_script(EXAMPLES / script, *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *launcher, str(EXAMPLES / script), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def llama():
    pytest.importorskip("torch")
    pytest.importorskip("transformers", "5.16")
    return runpy.run_path(str(EXAMPLES / "llama.py"))


def test_llama(llama, capsys):
    """At tau 0 S2O's loss is that of dense attention; else it is close, and not the same."""
    arguments = ["--tokens", "700", "--device", "cpu", "--repeats", "1", "--tau"]
    dense = llama["main"]([*arguments, "0"])
    assert abs(dense["s2o"][1] - dense["sdpa"][1]) < 1e-5
    sparse = llama["main"]([*arguments, "0.5"])
    assert sparse["sdpa"][1] == dense["sdpa"][1]
    assert 0 < abs(sparse["s2o"][1] - dense["sdpa"][1]) < 0.05
    assert 5 < dense["sdpa"][1] < 6.5  # bytes, by a model that knows nothing: ln(256) is 5.5
    printed = capsys.readouterr().out
    assert printed.startswith("tiny random Llama, 700 tokens, float32, cpu\n")
    assert len(re.findall(r"^ +(sdpa|s2o) +[\d.]+ +[\d,]+ +\d\.\d{5}$", printed, re.MULTILINE)) == 4
    assert "not all layers" not in printed


def test_llama_says_where_s2o_did_not_run(llama, capsys):
    llama["main"](["--tokens", "300", "--device", "cpu", "--repeats", "1", "--min-seqlen", "1000"])
    said = capsys.readouterr().out
    assert "not all layers ran S2O:\ncalls  kind   layers  meaning\n    4  short  0-1     fewer keys than min_s" in said


def test_llama_with_a_model_and_a_text(llama, tmp_path, capsys):
    """A folder as from_pretrained takes it, with a tokenizer of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "model"
    llama["tiny_model"]().save_pretrained(folder)
    letters = {letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyz ")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    (tmp_path / "text").write_text("some words of a book " * 20)
    options = ["--model", str(folder), "--text", str(tmp_path / "text"), "--device", "cpu", "--repeats", "1"]
    found = llama["main"]([*options, "--tokens", "300", "--segment", "64", "--min-seqlen", "128", "--tau", "0"])
    assert abs(found["s2o"][1] - found["sdpa"][1]) < 1e-5
    with pytest.raises(SystemExit, match="--tokens 3000: the text has 420; give fewer"):
        llama["main"]([*options, "--tokens", "3000"])


def test_llama_has_the_library_s_defaults(llama, tmp_path, monkeypatch):
    """A tiny model has shorter segments, so that there are some."""
    class Seen(Exception):
        pass

    def register(_, config, **__):
        raise Seen(config)

    from s2o_cupy import S2OConfig

    monkeypatch.setitem(llama["main"].__globals__, "register", register)
    monkeypatch.setitem(llama["main"].__globals__, "tokens_of", lambda *_: llama["torch"].zeros(1, 4, dtype=int))
    llama["tiny_model"]().save_pretrained(tmp_path)
    model = ["--model", str(tmp_path)]
    for options, config in (
        (model, S2OConfig()), ([*model, "--tau", "0.3", "--segment", "64"], S2OConfig(tau=0.3, segment=64)),
        ([], S2OConfig(segment=128)), (["--tau", "0"], S2OConfig(segment=128, tau=0)),
    ):  # fmt: skip
        with pytest.raises(Seen) as seen:
            llama["main"]([*options, "--device", "cpu"])
        assert seen.value.args[0].values == config.values


def test_a_trace(tmp_path):
    """Heads and tokens of an input, with the layers of those that are all there; else one line says why not."""
    from s2o_cupy.tools import inputs
    from s2o_cupy.tools.layer_files import layers_of

    source, made = tmp_path / "a.npz", tmp_path / "b.npz"
    q, k, v = inputs.builtin("random", 100, heads=4, kv_heads=2, head_dim=16)
    inputs.save(source, inputs.QKV(q, k, v), [3, 7])
    for options, heads, layers in (([], 4, (3, 7)), (["--heads", "2,3"], 2, (7,)), (["--heads", "1,3"], 2, None)):
        run("make_trace.py", str(source), str(made), "--length", "60", *options)
        assert inputs.load(made).q.shape == (1, heads, 60, 16) and layers_of(made) == layers
    inputs.save(tmp_path / "chunk.npz", inputs.QKV(q[:, :, 60:], k, v))
    for name, options, message in (
        ("chunk.npz", ["--length", "20"], "--length 20 with 40 queries and 100 keys; accepted: 1 or more, of an input"),
        ("a.npz", ["--length", "-1"], "--length -1 with 100 queries"),
        ("a.npz", ["--heads", "a"], "--heads a: accepted: numbers, separated by commas"),
    ):
        result = run_script(EXAMPLES / "make_trace.py", tmp_path / name, made, *options)
        assert result.returncode == 1 and message in result.stderr and "Traceback" not in result.stderr
    run("make_trace.py", str(tmp_path / "chunk.npz"), str(made))
    assert inputs.load(made).q.shape == (1, 4, 40, 16)


def test_llama_by_itself():
    pytest.importorskip("torch")
    pytest.importorskip("transformers", "5.16")
    assert "tokens/s" in run("llama.py", "--tokens", "200", "--repeats", "1")


@pytest.mark.parametrize(
    ("split", "ranks"),
    [("sequence", 0), ("heads", 0), *(pytest.param(x, 2, marks=pytest.mark.slow) for x in ("sequence", "heads"))],
)
def test_multi_gpu(ranks, split):
    pytest.importorskip("torch")
    printed = run("multi_gpu.py", "--tokens", "700", "--split", split, "--repeats", "1", "--check", ranks=ranks)
    backend = "gloo" if ranks else "no group"
    assert printed.startswith(f"{max(1, ranks)} x CPU ({backend}), split {split}, 700 tokens, 4 heads over 2,")
    assert len(re.findall(r"[\d.]+ ms, [\d,]+ tokens/s", printed)) == 2
    assert printed.endswith("the same bits\n")
