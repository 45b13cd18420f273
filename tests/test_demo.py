"""The demo: figures that are right, and one sentence before any work where it cannot do what was asked."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import has_gpu

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.plan import launch_plan
from s2o_cupy.reference import dense_attention
from s2o_cupy.spec import Geometry
from s2o_cupy.tools import cli, demo, inputs, metrics, plot
from s2o_cupy.tools.earlier_keys import segment_map

UNCHANGED = ["--no-picture", "--json"]


@pytest.fixture
def no_work(monkeypatch):
    """Fails where attention is computed."""
    for name in ("s2o_attention", "dense_attention"):
        monkeypatch.setattr(demo, name, lambda *_, **__: pytest.fail("attention was computed"))


@pytest.fixture
def by_reference(monkeypatch):
    """On the CPU, also where there is a GPU, which takes numbers of 16 bits."""
    monkeypatch.setattr(demo.info, "gpu_problem", lambda: "a test")


def file_of(tmp_path, q, k=None, v=None):
    np.savez(tmp_path / "a.npz", q=q, k=q if k is None else k, v=q if v is None else v)
    return str(tmp_path / "a.npz")


# ---------------------------------------------------------------- what it shows


def test_demo(tmp_path, capsys):
    """The recorded input, as the library's defaults compute it."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "demo.png"
    assert cli.main(["demo", "--json", "--plot", str(picture)]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["wrong"]) == (True, [])
    assert found["picture"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
    defaults = replace(S2OConfig(tau=0.1), dense_up_to=0)
    assert found["config"] == {name: getattr(defaults, name) for name in found["config"]}
    assert [row["head"] for row in found["heads"]] == [0, 1, 2, 3]
    local = found["heads"][1]  # most of its mass lies within its segment: of that of the earlier keys more is left out
    assert local["earlier_mass"] < 0.1 and 0.03 < local["earlier_mass_left_out"] < 0.1
    overall = found["overall"]
    # Hopper's pipeline visits one key tile more.
    density, error = (0.732, 0.0041) if found["path"] == "hopper" else (0.688, 0.0040)
    assert overall["density"] == pytest.approx(density, abs=0.01)
    assert overall["rel_l2"] == pytest.approx(error, abs=0.25 * error)
    assert overall["density"] == pytest.approx(np.mean([row["density"] for row in found["heads"]]), abs=1e-4)
    page = Path(__file__).parents[1] / "docs" / "algorithm.md"
    if found["path"] == "numpy" and page.exists():  # the picture there is of a call without a GPU
        told = " ".join(page.read_text(encoding="utf-8").split())
        assert f"{100 * overall['earlier_pairs_computed']:.1f} % of the pairs with earlier keys were computed" in told
        assert f"the others hold {100 * overall['earlier_mass_left_out']:.1f} % of these keys' softmax mass" in told
    taus, densities = zip(*((point["tau"], point["density"]) for point in found["sweep"]), strict=True)
    assert sorted(taus, reverse=True) == list(taus)
    assert sorted(densities) == list(densities)
    assert found["path"] in (("portable", "hopper") if has_gpu() else ("numpy",))


@pytest.mark.slow
@pytest.mark.usefixtures("by_reference")
def test_figures_are_those_of_the_call():
    qkv, config = inputs.builtin("trace", length=600, dtype="float32"), replace(demo.CONFIG, segment=128, tau=0.03)
    found = demo.run(qkv, config, picture=None)
    if found["backend"] == "cupy":
        pytest.skip("the GPU rounds otherwise")
    exact = dense_attention(*qkv)[0]
    for tau in (0.1, 0.03, 0.002):
        o, stats = s2o_attention(*qkv, config=config, tau=tau, return_stats=True)
        point = next(x for x in found["sweep"] if x["tau"] == tau)
        assert point == {"tau": tau, "density": stats.density, "rel_l2": metrics.rel_l2(o, exact)}
        if tau == config.tau:
            assert found["overall"]["rel_l2"] == point["rel_l2"]
    assert len(found["sweep"]) == len(demo.SWEEP) + 1


@pytest.mark.slow
def test_an_error_instead_of_a_tau(tmp_path, capsys):
    """The taus that it finds stand beside the sweep; the picture has a point for it."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    options = ["--length", "600", "--error", "0.05", "--segment", "64", "--block-n", "64", "--plot", str(picture)]
    assert cli.main(["demo", *options, "--json"]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["tau"] is None and found["adds_tail"] is False
    point = found["sweep"][-1]
    assert (point["tau"], point["rel_l2"]) == (None, found["overall"]["rel_l2"]) and len(found["sweep"]) == 8
    if found["path"] == "numpy":
        config = S2OConfig(error=0.05, segment=64, block_n=64, dense_up_to=0)
        _, stats = s2o_attention(*inputs.builtin("trace", 600), config=config, return_stats=True)
        assert found["overall"]["density"] == stats.density
    assert picture.stat().st_size > 50_000
    text = demo.table(found)
    assert "\nerror 0.05, segment 64" in text and "error 0.05 instead of a tau" in text
    assert f"\n error {found['overall']['density']:9.3f} {found['overall']['rel_l2']:9.4f}\n" in text


@pytest.mark.slow
def test_a_tau_for_each_head(tmp_path, capsys):
    """As s2o_attention takes it: its point stands beside the sweep."""
    pytest.importorskip("matplotlib")
    picture, options = tmp_path / "a.png", ["--length", "600", "--tau", "2,0.5,0.1,0"]
    assert cli.main(["demo", *options, "--plot", str(picture), "--json"]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    point = found["sweep"][-1]
    assert (point["tau"], point["rel_l2"]) == ([2, 0.5, 0.1, 0], found["overall"]["rel_l2"])
    assert len(found["sweep"]) == len(demo.SWEEP) + 1 and picture.stat().st_size > 50_000
    densities = [row["density"] for row in found["heads"]]
    assert densities[-1] == 1 > densities[0]
    if found["path"] == "numpy":
        config = replace(demo.CONFIG, tau=(2, 0.5, 0.1, 0))
        _, stats = s2o_attention(*inputs.builtin("trace", 600), config=config, return_stats=True)
        assert densities == pytest.approx(stats.density_per_head[0].tolist())
    text = demo.table(found)
    assert "\ntau 0 to 2 by head, segment 128" in text and "tau 0 to 2 by head instead of 0.1" in text
    assert f"\nby head {found['overall']['density']:9.3f} {found['overall']['rel_l2']:9.4f}\n" in text


def test_heads_that_a_picture_shows():
    """All of them, or eight with the chosen one among them."""
    assert demo._shown_heads(1, 4) == [0, 1, 2, 3]
    for head in range(32):
        shown = demo._shown_heads(head, 32)
        assert len(shown) == 8 and head in shown and shown == sorted(set(shown))


@pytest.mark.slow
def test_what_differs_from_the_defaults_is_said(capsys, monkeypatch):
    monkeypatch.setattr(launch_plan, "DENSE_UP_TO", 8192)
    assert cli.main(["demo", "--length", "600", "--block-n", "64", "--segment", "64", "--no-picture"]) == cli.OK
    text = capsys.readouterr().out
    assert "Not the library's defaults: segment 64 instead of 128, block_n 64 instead of 128\n" in text
    assert "segment 64, units of 8, tiles of 128 queries x 64 keys" in text
    assert "With 4 heads of 128 a GPU attends densely to up to 12,288 keys by default" in text
    assert "icture" not in text
    defaults = {name: getattr(S2OConfig(tau=0.1), name) for name in S2OConfig.__dataclass_fields__}
    assert demo._unlike_the_defaults(defaults, 30_000, 32, 128) == []
    assert demo._unlike_the_defaults(defaults, 3_000, 32, 128) == []  # nobody has asked for S2O all the same
    assert demo._unlike_the_defaults(defaults | {"dense_up_to": 0}, 7_169, 32, 128) == []
    assert "With 32 heads of 128" in demo._unlike_the_defaults(defaults | {"dense_up_to": 0}, 7_168, 32, 128)[-1]
    assert demo._unlike_the_defaults(defaults | {"tau": 0.05}, 131_072, 32, 128) == []  # the default of that length
    told = "Not the library's defaults: "
    assert demo._unlike_the_defaults(defaults, 131_072, 32, 128) == [f"{told}tau 0.1 instead of 0.05"]
    lines = demo._unlike_the_defaults(defaults | {"tail": "none", "dense_last": 0}, 30_000, 32, 128)
    assert lines == [f"{told}tail none instead of first_order, dense_last 0 instead of 256"]
    assert demo._unlike_the_defaults(defaults | {"tail": "first_order", "dense_last": 256}, 30_000, 32, 128) == []
    mean = S2OConfig(rank="mean", tau=0.02)  # its other fields follow
    others = {name: getattr(mean, name) for name in defaults}
    told = "Not the library's defaults: rank mean instead of query"
    assert demo._unlike_the_defaults(others, 30_000, 32, 128) == [told]


def test_no_time_of_a_cpu(capsys):
    """It would be of NumPy, and of a first call."""
    if has_gpu():
        pytest.skip("there is a GPU")
    found = demo.run(inputs.builtin("trace", length=300), picture=None)
    assert found["times_ms"] is None
    text = demo.table(found)
    assert "No GPU used: " in text
    assert re.search(r"\d ms|seconds", text) is None


def test_demo_says_which_kernels_ran():
    found = demo.run(inputs.builtin("trace", length=300), picture=None)
    if not has_gpu():
        assert (found["path"], found["path_reason"]) == ("numpy", None)
    times = {"s2o": 0.5, "dense": 0.25, "dense_by": "another"}
    found |= {"backend": "cupy", "gpu": "a GPU", "path": "hopper", "path_reason": None, "times_ms": times}
    assert "S2O 0.500 ms, dense 0.250 ms" in demo.table(found)
    assert "\nKernels: hopper.\n" in demo.table(found)
    found |= {"path": "portable", "path_reason": "scale is -1.0, not positive"}
    assert "\nKernels: portable, as scale is -1.0, not positive.\n" in demo.table(found)


def test_demo_on_a_file_at_tau_0(tmp_path, rng, capsys):
    x = rng.standard_normal((3, 2, 300, 16))
    file = file_of(tmp_path, *x)
    assert cli.main(["demo", file, "--tau", "0", "--dtype", "float16", *UNCHANGED]) == cli.OK
    overall = json.loads(capsys.readouterr().out)["overall"]
    assert overall["density"] == 1
    assert overall["rel_l2"] < 1e-3


# ---------------------------------------------------------------- values that are not finite


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize(("name", "value"), [("q", np.nan), ("k", np.nan), ("v", np.inf), ("v", -np.inf)])
def test_values_that_are_not_finite_are_found(tmp_path, rng, capsys, name, value):
    arrays = dict(zip("qkv", rng.standard_normal((3, 1, 2, 300, 16), dtype=np.float32), strict=True))
    arrays[name][0, 1, 7, 3:5] = value
    file = file_of(tmp_path, *arrays.values())
    assert cli.main(["demo", file, "--plot", str(tmp_path / "a.png")]) == cli.FOUND
    text, note = capsys.readouterr()
    said = f"the input {name} has 2 of 9,600 values that are not finite, the first {value} at [0, 1, 7, 3]"
    assert f"WRONG: {said}; outputs of it were not judged" in text and text.count("WRONG") == 1
    assert note == f"s2o demo: note: {said}: results of it are not S2O's fault\n"
    assert "No picture: " in text
    assert cli.main(["demo", file, *UNCHANGED]) == cli.FOUND
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert np.isinf(float(found["overall"]["rel_l2"])) == np.isnan(value)  # infinities may be the right ones


@pytest.mark.usefixtures("by_reference")
def test_an_output_that_is_not_finite_is_found(tmp_path, capsys):
    """Of finite inputs: a sum of values beyond float64, before it is divided by their number."""
    x = np.zeros((1, 1, 64, 16))
    assert cli.main(["demo", file_of(tmp_path, x, x, x + 1e308), *UNCHANGED]) == cli.FOUND
    wrong = json.loads(capsys.readouterr().out)["wrong"]
    assert wrong
    assert all("output" in words for words in wrong)


# ---------------------------------------------------------------- the picture


def test_demo_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["demo", "--length", "300"]) == cli.OK
    assert "No picture: it needs matplotlib" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("nowhere/a.png", "accepted: a file in a folder that exists"),
        ("folder.png", "accepted: a file in a folder that exists"),
        ("file/a.png", "accepted: a file in a folder that exists"),
        ("a", "accepted: a file that ends in .jpeg, .jpg, .pdf, .png, .svg or .webp"),
        ("a.npz", "accepted: a file that ends in .jpeg, .jpg, .pdf, .png, .svg or .webp"),
    ],
)
def test_where_no_picture_can_be_written(tmp_path, capsys, no_work, out, message):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--plot", str(tmp_path / out)]) == cli.UNABLE
    error = capsys.readouterr().err
    assert f"the picture is {str(tmp_path / out)!r}" in error
    assert message in error


def test_a_place_that_may_not_be_written_to(tmp_path, capsys, no_work, monkeypatch):
    """By what the system says: root may write anywhere."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    assert cli.main(["demo", "--plot", str(tmp_path / "a.png")]) == cli.UNABLE
    assert "accepted: a place that may be written to" in capsys.readouterr().err


def test_a_head_that_is_not_there(no_work):
    qkv = inputs.builtin("random", length=64, heads=2, head_dim=8)
    for head in (-1, 2):
        with pytest.raises(ValueError, match=f"the head to draw is {head}; accepted: 0 to 1, as q has 2"):
            demo.run(qkv, picture=None, head=head)


@pytest.mark.usefixtures("by_reference")
def test_the_default_head_is_there(tmp_path):
    pytest.importorskip("matplotlib")
    qkv = inputs.builtin("random", length=64, heads=1, head_dim=8)
    found = demo.run(qkv, replace(demo.CONFIG, segment=16), picture=str(tmp_path / "a.png"))
    assert found["picture"] == str(tmp_path / "a.png")


def test_a_demo_is_not_lost_with_its_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")

    def full(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert cli.main(["demo", "--length", "300", "--segment", "64", "--plot", str(tmp_path / "a.png")]) == cli.OK
    assert "rel_l2" in (out := capsys.readouterr().out) and "No picture: the disk is full" in out


@pytest.mark.parametrize("head", ["17.1", "3"])
def test_the_picture_calls_heads_as_the_table_does(tmp_path, capsys, monkeypatch, head):
    """By layer, where the file says it; and so they may be asked for."""
    pytest.importorskip("matplotlib")
    titles = []

    def seen(figure, *_, **__):
        titles.extend(axis.get_title("left") for axis in figure.axes)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", seen)
    file = tmp_path / "a.npz"
    inputs.save(file, inputs.builtin("random", 300, heads=4, kv_heads=2), [5, 17])
    options = ["--segment", "64", "--block-n", "64", "--picture-head", head, "--json"]
    assert cli.main(["demo", str(file), *options, "--plot", str(tmp_path / "a.png")]) == cli.OK
    names = [row["head"] for row in json.loads(capsys.readouterr().out)["heads"]]
    assert names == ["5.0", "5.1", "17.0", "17.1"]
    of = [title.removeprefix("Head ").split(" ")[0].strip(",:") for title in titles if title.startswith("Head")]
    assert of == ["17.1", "17.1", *names, "17.1"]


def test_demo_with_nothing_to_draw(capsys, tmp_path, no_work):
    pytest.importorskip("matplotlib")
    options = ["--length", "300", "--segment", "512", "--plot", str(tmp_path / "a.png")]
    assert cli.main(["demo", *options]) == cli.UNABLE
    assert "--no-picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("length", "segment", "drawn"), [(2816, 1024, 2), (2500, 1024, 1), (2560, 1024, 2), (100, 1024, 0), (256, 128, 1)]
)
def test_the_segment_to_draw(length, segment, drawn):
    """The last one, unless it has less than half its queries."""
    assert demo._drawn_segment(Geometry(length, length, segment)) == drawn


@pytest.mark.parametrize(
    ("shape", "patch"), [((3, 5), (2, 4)), ((384, 2560), (2, 4)), ((385, 2561), (3, 5)), ((1000, 4001), (6, 7))]
)
def test_thin_stripes_survive_the_picture_s_resolution(rng, shape, patch):
    """Each of at most 192 x 640 patches is as bright as its brightest pair."""
    mass, (rows, columns) = rng.random(shape), patch
    brightest = [
        [mass[i : i + rows, j : j + columns].max() for j in range(0, shape[1], columns)]
        for i in range(0, shape[0], rows)
    ]
    np.testing.assert_array_equal(plot._pool(mass), brightest)


def test_where_tiles_stopped_is_marked():
    """On the curve of each tile that visited a key: at the share of candidates visited, and of their mass found."""
    plt = pytest.importorskip("matplotlib.pyplot")
    q, k, v = inputs.builtin("trace", 300, dtype="float32")
    config = S2OConfig(segment=64, block_m=32, block_n=32, unit=8, window=16, tau=0.05, dense_up_to=0)
    view = segment_map(q, k, v, config, head=2, segment=4, scale=1 / math.sqrt(128))
    figure, axis = plt.subplots()
    plot._mass(axis, view, "2")
    marks = [line.get_xydata()[0] for line in axis.lines if line.get_marker() == "o"]
    plt.close(figure)
    assert len(marks) == (view.stops > 0).sum() == 2
    for tile, (x, y) in enumerate(marks):
        rows = view.mass[view.q_order][tile * 32 : (tile + 1) * 32]
        seen = rows[:, view.k_order[: view.stops[tile]]]
        assert (x, y) == pytest.approx((view.stops[tile] / view.mass.shape[1], seen.sum() / rows.sum()), rel=1e-4)


# ---------------------------------------------------------------- axes in the other order


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize(
    ("shape", "noted"),
    [((1, 64, 4, 8), True), ((1, 5, 4, 8), True), ((1, 4, 64, 8), False), ((1, 5, 5, 8), False), ((1, 5, 1, 8), False)],
)
def test_many_heads_of_few_tokens_are_noted(tmp_path, capsys, rng, shape, noted):
    file = file_of(tmp_path, rng.standard_normal(shape))
    assert cli.main(["demo", file, *UNCHANGED]) == cli.OK
    captured = capsys.readouterr()
    note = f"s2o demo: note: q has {shape[1]} heads of 4 tokens; if its axes are (batch, seqlen"
    assert (note in captured.err) == noted
    assert json.loads(captured.out)["ok"] is True
