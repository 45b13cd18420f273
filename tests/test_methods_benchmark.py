"""benchmarks/methods.py with PyTorch on the CPU in the place of a GPU and timings that are made up."""

from __future__ import annotations

import json
import pathlib

import own_methods
import pytest
from benchmarks_on_cpu import BENCHMARKS
from in_process import run_script
from test_model_benchmark import arguments, folder, no_gpu_needed, small_llama  # noqa: F401

from s2o_cupy.methods.registry import METHODS
from s2o_cupy.tools.comparing import parse_method

# isort: split
import methods
import model


def test_every_method_is_measured_by_default(no_gpu_needed):  # noqa: F811
    args = methods.parse(["--models", "A=a.py:b.npz:c.npy"])
    assert {type(parse_method(x, "--method")) for x in args.method} == set(METHODS)
    assert (args.parts, args.baselines, args.plot) == (["loss", "time"], ["cudnn"], None)
    assert [x["tau"] for x in args.set] == [float(tau) for tau in methods.TAUS]
    own = methods.parse(["--models", "A=a.py:b.npz:c.npy", "--method", "pbs", "--set=tau=0.3", "--parts", "loss"])
    assert (own.method, own.parts, own.set) == (["pbs"], ["loss"], [{"tau": 0.3}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "flash"], "--method has 'flash'; accepted: s2o, meanpooling"),
        (["--method", "s2o:tau=0.1"], "accepted: another method than S2O, which --set configures"),
        (["--method", "pbs:segment=100"], "PBSConfig: segment is 100"),
    ],
)
def test_refused(options, message, no_gpu_needed, capsys):  # noqa: F811
    with pytest.raises(SystemExit, match="2"):
        methods.parse(["--models", "A=a.py:b.npz:c.npy", *options])
    assert message in capsys.readouterr().err


def test_help():
    result = run_script(BENCHMARKS / "methods.py", "--help")
    assert result.returncode == 0 and all(x in result.stdout for x in ("--plot", "--method", "--models"))


@pytest.mark.slow
def test_a_method_of_ones_own(no_gpu_needed, small_llama, folder, torch):  # noqa: F811
    """By its file, in the same table; the result names no folder."""
    (folder / "mine.py").write_text(pathlib.Path(own_methods.__file__).read_text())
    _, two_models, *rest = arguments(folder)
    args = methods.parse([
        "--models", two_models.partition(",")[0], *rest, "--lengths", "390", "--set", "tau=0", "--parts",
        "loss,error,time", "--repeats", "1", "--method", f"{folder}/mine.py:LargestKeys:share=0.3", "--method",
        f"{folder}/mine.py:everything", "--method", "blasst:threshold=1,block=64,block_m=64",
    ])  # fmt: skip
    *_, mine, dense, blasst = model.run(args, lambda *told: None)
    assert [(row["attention"], row["config"]) for row in (mine, dense, blasst)] == [
        ("largestkeys", "share=0.3"), ("everything", "default"), ("blasst", "threshold=1, block=64, block_m=64")
    ]  # fmt: skip
    written = (folder / "m.json").read_text()
    assert str(folder) not in written
    assert json.loads(written)["settings"]["method"][:2] == ["mine.py:LargestKeys:share=0.3", "mine.py:everything"]
    assert mine["density"] < 1 and abs(mine["loss_difference"]) > 1e-5 and mine["worst_rel_l2"] > 0.01
    assert dense["density"] == 1 and abs(dense["loss_difference"]) < 1e-5 and dense["worst_rel_l2"] < 1e-5
    assert blasst["worst_rel_l2"] > 0 and blasst["density"] < 1
    assert mine["attention_ms"] == 2
    with pytest.raises(SystemExit, match="2"):
        methods.parse(["--models", "A=a.py:b.npz:c.npy", "--method", f"{folder}/mine.py:other"])


@pytest.mark.slow
def test_methods(no_gpu_needed, small_llama, folder, torch):  # noqa: F811
    """Those that choose everything have dense attention's loss; others have not."""
    pytest.importorskip("matplotlib")
    picture = folder / "p.png"
    every = ["xattention:threshold=1", "pbs:threshold=1,segment=128"]
    few = ["xattention:threshold=0.01,stride=16", "meanpooling:threshold=0.01,keep_first=False"]
    _, two_models, *rest = arguments(folder)
    args = methods.parse([
        "--models", two_models.partition(",")[0], *rest, "--lengths", "390", "--base", "dense_up_to=0,tau=0", "--set",
        "tau=0", "--plot", str(picture), "--parts", "loss,error,time", "--repeats", "1",
        *(x for method in every + few for x in ("--method", method)),
    ])  # fmt: skip
    rows = model.run(args, lambda *told: None)
    written = json.loads((folder / "m.json").read_text())
    assert written["rows"] == rows and written["settings"]["method"] == every + few
    _, _, *found = rows
    assert [(row["attention"], row["config"]) for row in found] == [
        ("xattention", "threshold=1"), ("pbs", "segment=128, threshold=1"),
        ("xattention", "stride=16, threshold=0.01"), ("meanpooling", "threshold=0.01, keep_first=False"),
    ]  # fmt: skip
    for row in found[:2]:
        assert row["density"] == 1 and abs(row["loss_difference"]) < 1e-5 and row["worst_rel_l2"] < 1e-5
    for row in found[2:]:
        assert row["density"] < 1 and abs(row["loss_difference"]) > 1e-5 and row["worst_rel_l2"] > 0.01
        assert (row["prefill_ms"], row["attention_ms"], row["x_attention"]) == (5, 2, 1)
    written_to = methods.draw(str(picture), rows)
    assert written_to == [str(folder / "p_A_390.png")]
    assert (folder / "p_A_390.png").read_bytes().startswith(b"\x89PNG")
