"""The small model that comes with the repository: it can be run from a clone, it copies from far away, and S2O on it
costs what a short run says."""

from __future__ import annotations

import json
import platform

import numpy as np
import pytest
from benchmarks_on_cpu import BENCHMARKS, CPU

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "5.16")

import _common  # noqa: E402
import _small_llama  # noqa: E402
import _sources  # noqa: E402
import model  # noqa: E402

from s2o_cupy.integrations.next_tokens import next_tokens  # noqa: E402

FOLDER = BENCHMARKS / "small_model"


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="the text is of Python 3.11.7")
def test_the_text_is_that_of_python():
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")[196_608:][:131_073]
    with np.load(FOLDER / "text.npz") as stored:
        assert stored["ids"].tobytes() == text


@pytest.fixture(scope="module")
def small():
    loader = _sources.module_of(str(FOLDER / "loader.py"))
    weights = {name: x.to(CPU, torch.float32) for name, x in loader.load(FOLDER / "weights.npz").items()}
    return _small_llama.load(loader, weights)


@pytest.fixture(scope="module")
def text():
    return np.load(FOLDER / "text.npz")["ids"]


def test_its_files_are_small(text):
    assert text.shape == (131073,) and text.dtype == np.uint8
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 1.5e6
    assert b"PYTHON SOFTWARE FOUNDATION LICENSE" in (FOLDER / "LICENSE-PSF.txt").read_bytes()
    assert b"The try statement specifies" in text.tobytes() or b"Python" in text.tobytes()


def test_it_knows_the_text(small, text):
    """Far better than the letters' frequencies would let it."""
    ids = torch.from_numpy(text[:2049].astype(np.int64))[None]
    loss = next_tokens(small, ids[:, :-1], ids[:, 1:]).loss
    share = np.bincount(text) / len(text)
    assert loss.mean() < 0.75 * -(share[share > 0] * np.log(share[share > 0])).sum()


def test_it_copies_from_far_away(small, text):
    """A piece said again 100,000 positions later costs a fraction of what it cost first."""
    ids = torch.from_numpy(np.concatenate([text[:600], text[200:500]]).astype(np.int64))[None]
    places = torch.arange(ids.shape[1])[None]
    places[:, 600:] += 100_000
    options = {"position_ids": places[:, :-1], "attention_mask": torch.ones_like(ids[:, :-1])}
    loss = next_tokens(small, ids[:, :-1], ids[:, 1:], **options).loss[0]
    assert loss[620:].mean() < 0.5 * loss[220:499].mean()


@pytest.mark.slow
def test_a_short_run(tmp_path, monkeypatch, capsys):
    """As without a GPU: loss and errors, dense and by S2O, with a tuned one beside them."""
    monkeypatch.setattr(_common, "has_gpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert model.parse(["--small"]).lengths == [4096]
    args = model.parse(["--small", "--lengths", "1024", "--tune", "error=0.2", "--json", str(tmp_path / "small.json")])
    rows = model.run(args, lambda *told: None)
    assert [(row["attention"], row.get("config")) for row in rows] == [
        ("sdpa", None), ("s2o", "default"), ("s2o", "tuned, error=0.2,by=layer")
    ]  # fmt: skip
    dense, default, tuned = rows
    assert dense["loss_difference"] == 0 and 0.2 < default["density"] < 1 and "attention_ms" not in default
    assert 0 < abs(default["loss_difference"]) < 0.05
    assert default["loss"] == pytest.approx(dense["loss"] + default["loss_difference"])
    assert tuned["worst_rel_l2"] < 0.25
    assert json.loads((tmp_path / "small.json").read_text())["device"].startswith("CPU")
    with pytest.raises(SystemExit):
        model.parse(["--small", "--parts", "time"])
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_what_it_was_trained_on():
    """Copies are copies, positions jump, and both halves are of the text or of random bytes."""
    train = _sources.module_of(str(FOLDER / "train.py"))
    text = np.frombuffer(b"abcdefghij" * 500, np.uint8)
    ids, positions, copies = train.batch(text, np.random.default_rng(0), 40, 256, 0.5)
    assert ids.shape == positions.shape == copies.shape == (40, 256)
    assert not copies[:, :128].any() and 0.5 < copies[:, 128:].mean() < 0.95
    jumps = np.diff(positions, axis=1)
    assert (np.delete(jumps, 127, axis=1) == 1).all() and jumps[:, 127].min() >= 2 and jumps[:, 127].max() > 10_000
    assert positions.min() >= 0 and positions.max() < train.POSITIONS
    assert 0.3 < (ids[:, :128].max(1) > 127).mean() < 0.7  # random bytes
    for row, copied in zip(ids, copies, strict=True):
        first = row[:128].astype(np.uint8).tobytes()
        begins = np.flatnonzero(np.diff(copied.astype(int)) == 1) + 1
        assert all(row[b : b + 20].astype(np.uint8).tobytes() in first for b in begins if copied[b : b + 20].all())


def test_what_it_is_trained_on_with_long():
    """Last come sequences of every position, which do not jump, at rates that fall from a fifth on."""
    train = _sources.module_of(str(FOLDER / "train.py"))
    text = np.frombuffer(b"abcdefghij" * 10_000, np.uint8)
    ids, positions, copies = train.batch(text, np.random.default_rng(0), *train.LONG[-1][1:])
    assert (positions == np.arange(train.POSITIONS)).all() and 0.5 < copies[0, train.POSITIONS // 2 :].mean() < 0.95
    short, of_long = ([(3, 1, 64, 0.0), (2, 1, 128, 0.0)] for _ in range(2))
    train.STAGES, train.LONG = short, of_long
    steps = [(rate, ids.shape) for rate, (ids, *_) in train.stages(text, np.random.default_rng(0), True)]
    assert [shape for _, shape in steps] == [(1, 64)] * 3 + [(1, 128)] * 2 + [(1, 64)] * 3 + [(1, 128)] * 2
    assert max(rate for rate, _ in steps[5:]) <= train.RATE / 5
    assert len(list(train.stages(text, np.random.default_rng(0), False))) == 5


def test_docstrings(tmp_path):
    train = _sources.module_of(str(FOLDER / "train.py"))
    for name, text in {
        "b.py": 'def f():\n    """Of a function."""\n\nclass C:\n    """Of a class."""\n    def g(self): pass\n',
        "a/a.py": '"""Of a module."""\n',
        "test/c.py": '"""Of a test."""\n',
        "broken.py": '"""Of nothing"""\n1 +\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert train.docstrings(tmp_path) == b"Of a module.\n\nOf a function.\n\nOf a class."
