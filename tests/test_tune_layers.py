"""A tau for each layer or head from captured q, k and v: which choices there are, and what is written of them."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2o_cupy import S2OConfig
from s2o_cupy.plan import launch_plan
from s2o_cupy.spec import RANKS
from s2o_cupy.tools import cli, error_per_head, inputs
from s2o_cupy.tools.layer_curves import LayerCurves
from s2o_cupy.tools.layer_files import head_names, layer_file, layers_of, load_layers
from s2o_cupy.tools.layer_settings import plain_config, plain_per_layer, read_settings
from s2o_cupy.tools.tau_ladder import Unit, ladder
from s2o_cupy.tools.tune_layers import by_error, ordering, tune_layers

CONFIG = S2OConfig(segment=32, block_m=32, block_n=16, unit=8)
TAUS = (0.5, 0.1, 0.02)


# ---------------------------------------------------------------- the ladder


POINTS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=3, max_size=3)


@given(st.lists(POINTS, min_size=1, max_size=4))
def test_a_ladder_descends_and_pays_most_first(points):
    """Against every choice there is: none of the hull's choices has a sparser one of the same cost."""
    units = [Unit(*np.array(unit, float).T) for unit in points]
    total = lambda choice, field: sum(getattr(u, field)[n] for u, n in zip(units, choice, strict=True))  # noqa: E731
    choices = ladder(units)
    densities, costs = ([total(choice, field) for choice in choices] for field in ("density", "cost"))
    assert densities == sorted(densities) and costs == sorted(costs, reverse=True)
    for before, after in itertools.pairwise(choices):
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    assert costs[-1] == sum(unit.cost.min() for unit in units)
    assert densities[0] == sum(unit.density.min() for unit in units)
    everything = [(total(choice, "density"), total(choice, "cost")) for choice in np.ndindex(*(3 for _ in units))]
    for i in (i for i in range(len(choices)) if _on_hull(i, densities, costs)):
        assert not any(d < densities[i] and c <= costs[i] for d, c in everything)


def _on_hull(i, densities, costs):
    """Whether a choice of the ladder is a corner of the lower convex hull of the ladder itself."""
    left = [(costs[j] - costs[i]) / (densities[i] - densities[j]) for j in range(i) if densities[j] < densities[i]]
    right = [(costs[i] - costs[j]) / (densities[j] - densities[i]) for j in range(i + 1, len(costs))]
    return not left or not right or min(left) > max(right)


# ---------------------------------------------------------------- tuning


@pytest.fixture
def layers(qkv):
    """Of three layers, the second with scores that vary less, so that less is left out of it."""
    found = {n: inputs.QKV(*qkv(400, heads=4, kv_heads=2, head_dim=16)) for n in (0, 3, 5)}
    found[3] = inputs.QKV(found[3].q * 0.3, *found[3][1:])
    return found


def options(**changes):
    return {"config": CONFIG, "taus": TAUS, "segments": 1000, **changes}


def errors_of(layers, tau):
    return {n: error_per_head(*x, replace(CONFIG, tau=tau), segments=1000) for n, x in layers.items()}


@pytest.mark.parametrize("by", ["head", *(pytest.param(x, marks=pytest.mark.slow) for x in ("layer", "model"))])
def test_the_largest_taus_of_an_error(layers, by):
    """What each layer, each head, or every layer at one tau does, by calls of error_per_head."""
    target = 0.11
    found = tune_layers(layers, error=target, by=by, **options())
    at = {tau: errors_of(layers, tau) for tau in TAUS}
    if by == "head":
        reaching = lambda n, h: [tau for tau in TAUS if at[tau][n].error[0, h] <= target]  # noqa: E731
    else:
        reaching = lambda n, _: [tau for tau in TAUS if at[tau][n].pooled_error <= target]  # noqa: E731
    best = {(n, h): max(reaching(n, h), default=0.0) for n in layers for h in range(4)}
    if by == "model":
        best = dict.fromkeys(best, min(best.values()))
    assert {(n, h): tau for n, taus in zip(layers, found.taus, strict=True) for h, tau in enumerate(taus)} == best
    assert len({*best.values()}) > 1 or by == "model"
    for n, error in zip(layers, found.errors(), strict=True):
        assert error <= target * (1 + 1e-9)
        if by != "head" and best[n, 0]:
            assert error == pytest.approx(at[best[n, 0]][n].pooled_error, rel=1e-6)
    if by == "model":
        assert found.per_layer == {} and found.config == replace(CONFIG, tau=best[0, 0])
    else:
        config_of = lambda n, h: found.per_layer.get(n, found.per_layer.get((n, h)))  # noqa: E731
        assert all(config_of(n, h) == replace(CONFIG, tau=tau) for (n, h), tau in best.items())


@pytest.mark.parametrize("by", ["layer", pytest.param("head", marks=pytest.mark.slow)])
def test_an_error_of_just_what_is_asked_for_is_taken(layers, by):
    found = tune_layers(layers, error=0.1, by=by, **options())
    curves = found.curves[0]
    error = curves.error[1, 2] if by == "head" else np.sqrt(curves.squared[1].sum())  # at the second tau
    again = tune_layers(layers, error=float(error), by=by, **options())
    assert again.taus[0][2] >= TAUS[1]
    assert tune_layers(layers, error=float(np.nextafter(error, 0)), by=by, **options()).taus[0][2] < again.taus[0][2]


def test_an_error_that_no_tau_reaches_is_dense(layers, monkeypatch):
    monkeypatch.setattr(launch_plan, "DENSE_UP_TO", 8192)
    found = tune_layers(layers, error=1e-9, **options())
    assert all((taus == 0).all() for taus in found.taus) and found.density == 1 and found.errors() == [0, 0, 0]
    assert "tau 0 is dense attention" in found.table() and "On a GPU a call of 400 keys is plain dense" in found.table()


@pytest.mark.slow
def test_a_density_is_spent_where_it_pays(layers):
    """No denser than asked for; and with less error than the one tau that is as sparse."""
    config = replace(CONFIG, segment=64, block_m=32, block_n=32)
    taus = options(taus=(1, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02), config=config)
    for density in (0.6, 0.7):
        found = tune_layers(layers, density=density, by="head", **taus)
        one = tune_layers(layers, density=density, by="model", **taus)
        assert one.density <= density and found.density <= density
        assert sum(np.square(found.errors())) < sum(np.square(one.errors()))
    measured = {n: error_per_head(*x, replace(config, tau=0.1), segments=1000).density for n, x in layers.items()}
    for curves in found.curves:
        np.testing.assert_allclose(curves.density[4], measured[curves.layer][0])
    with pytest.raises(ValueError, match=r"no tau of the grid has density at most 0.01; the least is 0\.\d+"):
        tune_layers(layers, density=0.01, **options())


def test_sequences_of_a_batch_count_together(qkv):
    q, k, v = qkv(300, batch=2, heads=2, kv_heads=1, head_dim=16)
    whole = error_per_head(q, k, v, replace(CONFIG, tau=0.1), segments=1000)
    curves = tune_layers({0: (q, k, v)}, error=0.99, **options()).curves[0]
    assert np.sqrt(curves.squared[1].sum()) == pytest.approx(whole.pooled_error)
    np.testing.assert_allclose(curves.share.sum(), 1)


def test_what_is_refused(layers):
    for match, changes in (
        ("neither error nor density is given", {}),
        ("both error and density are given", {"error": 0.1, "density": 0.1}),
        ("tune: error is 1; accepted: 0 < error < 1", {"error": 1}),
        ("by is 'token'; accepted: 'model', 'layer', 'head'", {"error": 0.1, "by": "token"}),
        ("taus is empty", {"error": 0.1, "taus": ()}),
    ):
        with pytest.raises(ValueError, match=match):
            tune_layers(layers, **options(**changes))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_names_its_layers(layers, tmp_path, ending, dtype):
    if ending == ".safetensors":
        pytest.importorskip("safetensors")
    stacked = inputs.cast(inputs.QKV(*(np.concatenate(x, 1) for x in zip(*layers.values(), strict=True))), dtype)
    path = tmp_path / f"three{ending}"
    inputs.save(path, stacked, [0, 3, 5])
    assert layers_of(path) == layers_of([str(path)]) == (0, 3, 5)
    assert head_names(path, 12)[3:6] == ["0.3", "3.0", "3.1"]
    back = load_layers(path)
    assert list(back) == [0, 3, 5]
    for n, arrays in back.items():
        for x, y in zip(arrays, inputs.cast(layers[n], dtype), strict=True):
            np.testing.assert_array_equal(x, y)
    for x, y in zip(inputs.load(path), stacked, strict=True):  # the file is one input too
        np.testing.assert_array_equal(x, y)
    inputs.save(path, stacked)
    assert layers_of(path) is None and head_names(path, 2) == ["0", "1"]
    with pytest.raises(ValueError, match="does not say of which layers its heads are; accepted: a folder or a file"):
        load_layers(path)


def test_a_folder_of_layers(layers, tmp_path):
    pytest.importorskip("safetensors")
    for n, arrays in layers.items():
        inputs.save(tmp_path / layer_file(n), arrays)
    found = load_layers(tmp_path)
    assert list(found) == [0, 3, 5] and len(found) == 3
    np.testing.assert_array_equal(found[3].q, layers[3].q)
    expected = tune_layers(layers, error=0.3, **options())
    assert tune_layers(tmp_path, error=0.3, **options()).to_dict() == expected.to_dict()


@pytest.mark.parametrize("command", ["demo", "tune"])
def test_a_folder_of_layers_is_for_by_alone(layers, tmp_path, capsys, command):
    for layer, qkv in layers.items():
        inputs.save(tmp_path / layer_file(layer), inputs.QKV(*qkv), [layer])
    options = ["--no-picture"] if command == "demo" else ["--density", "0.9"]
    assert cli.main([command, str(tmp_path), *options]) == cli.UNABLE
    listed = ", ".join(map(str, sorted(layers)))
    said = f"{tmp_path}: holds layers {listed}; accepted: one of its files, or give tune --by"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("stored", ["a,b", [[0, 1]]])
def test_names_need_no_layers(layers, tmp_path, capsys, stored):
    """What a file wrongly says of them stops only what needs them."""
    qkv = inputs.QKV(*layers[min(layers)])
    if isinstance(stored, str):
        numpy = pytest.importorskip("safetensors.numpy")
        numpy.save_file(qkv._asdict(), file := tmp_path / "a.safetensors", {"layers": stored})
    else:
        np.savez(file := tmp_path / "a.npz", **qkv._asdict(), layers=np.array(stored))
    assert cli.main(["tune", str(file), "--error", "0.99", *COMMAND]) == cli.OK
    assert cli.main(["demo", str(file), "--no-picture", "--block-m", "64", "--block-n", "64"]) == cli.OK
    capsys.readouterr()
    assert cli.main(["tune", str(file), "--error", "0.99", "--by", "head", *COMMAND]) == cli.UNABLE
    assert str(file) in capsys.readouterr().err


def test_settings_are_read_as_written(layers, tmp_path):
    found = tune_layers(layers, error=0.3, by="head", **options())
    found.save(tmp_path / "tuned.json")
    assert read_settings(tmp_path / "tuned.json") == (found.config, found.per_layer, None)
    per_layer = {3: None, (1, 0): S2OConfig(tau=0.1), 1: S2OConfig(rank="mean"), (1, 10): S2OConfig(tau=0)}
    base = S2OConfig(tau=0.3)
    plain = {"config": plain_config(base), "per_layer": plain_per_layer(base, per_layer)}
    (tmp_path / "a.json").write_text(json.dumps(plain))
    assert read_settings(tmp_path / "a.json") == (base, per_layer, None)
    assert list(plain["per_layer"]) == ["1", "1.0", "1.10", "3"] and plain["per_layer"]["1.0"] == {"tau": 0.1}


@pytest.mark.parametrize("rank", RANKS)
def test_another_segment_may_be_written_into_a_file(rank, tmp_path):
    """What follows from it is not in the file; the rest stays."""
    base = S2OConfig(rank=rank)
    (tmp_path / "a.json").write_text(json.dumps({"config": plain_config(base), "per_layer": {"1": {"segment": 64}}}))
    assert read_settings(tmp_path / "a.json").per_layer == {1: replace(S2OConfig(**plain_config(base)), segment=64)}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", ValueError, "not JSON"),
        ("[]", ValueError, 'no object with "config"'),
        ('{"config": {}, "per_layr": {}}', ValueError, "per_layr is no entry; did you mean per_layer?"),
        ('{"config": {}, "min_seqln": 4}', ValueError, "min_seqln is no entry; did you mean min_seqlen?"),
        ('{"config": {}, "per_layer": [1]}', ValueError, "per_layer is a list; accepted: an object"),
        ('{"config": {}, "per_layer": {"a": {}}}', ValueError, "per_layer has 'a'; accepted: a layer such as"),
        ('{"config": {}, "per_layer": {"1": 2}}', ValueError, "per_layer has 2 for 1; accepted: fields of S2OConfig"),
        ('{"config": {"taw": 1}, "per_layer": {"0": {}}}', TypeError, "config: S2OConfig: taw is not a field; did you"),
        ('{"config": {}, "min_seqlen": true}', ValueError, "min_seqlen is True; accepted: an integer >= 0, or null"),
        ('{"config": {}, "per_layer": {"0": {"tua": 1}}}', TypeError, r"per_layer\[0\]: S2OConfig: tua is not a field"),
        ('{"config": {}, "per_layer": {"1.2": {"tau": -1}}}', ValueError, r"per_layer\[1.2\]: S2OConfig: tau is -1;"),
    ],
)
def test_settings_that_are_refused(text, error, message, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(error, match=f"a.json: {message}"):
        read_settings(tmp_path / "a.json")


def test_a_folder_is_no_file_of_settings(tmp_path):
    said = f"{tmp_path}: a folder; accepted: a file that tune_model or s2o tune wrote"
    with pytest.raises(IsADirectoryError, match=f"^{re.escape(said)}"):
        read_settings(tmp_path)


def test_what_ordering_takes():
    """As was measured of the default at 131,072 tokens: 30.9 ms for scores, 1.5 for norms and 2.3 for orders beside 255
    of dense attention. It is that of each group of keys, and less of larger units."""
    assert ordering(S2OConfig()) == pytest.approx((30.9 + 1.5 + 2.3) / 255, rel=0.05)
    assert ordering(S2OConfig(clusters=4)) == ordering(S2OConfig(unit=16)) == ordering(S2OConfig()) / 2
    assert ordering(S2OConfig(rank="weight")) == 0.01


# ---------------------------------------------------------------- the command and the picture


COMMAND = [
    "--segment", "32", "--block-m", "64", "--block-n", "64", "--unit", "8", "--segments", "6", "--taus", "0.5,0.02",
]  # fmt: skip


@pytest.fixture
def file(layers, tmp_path):
    stacked = inputs.QKV(*(np.concatenate(x, 1).astype(np.float16) for x in zip(*layers.values(), strict=True)))
    inputs.save(tmp_path / "three.npz", stacked, [0, 3, 5])
    return str(tmp_path / "three.npz")


def test_the_command(file, capsys, tmp_path):
    assert cli.main(["tune", file, "--error", "0.3", "--by", "layer", "--json", *COMMAND]) == cli.OK
    text = capsys.readouterr().out
    (tmp_path / "tuned.json").write_text(text)
    config, per_layer, _ = read_settings(tmp_path / "tuned.json")
    assert config.segment == 32 and [*per_layer] == [0, 3, 5]
    assert json.loads(text)["heads"]["3.1"]["tau"] == per_layer[3].tau
    # Without --by the input is one, and its heads are named.
    assert cli.main(["tune", file, "--error", "0.99", *COMMAND]) == cli.OK
    assert "\n      5.3 " in capsys.readouterr().out
    assert cli.main(["demo", file, "--no-picture", "--json", "--block-m", "64", "--block-n", "64"]) == cli.OK
    assert [row["head"] for row in json.loads(capsys.readouterr().out)["heads"]][4:6] == ["3.0", "3.1"]


def test_the_command_takes_the_options_of_an_input(file, tmp_path, capsys):
    """Those of the dtype; of files no sizes, as without --by."""
    rounded = tmp_path / "rounded.npz"
    stacked = inputs.cast(inputs.load(file), "bfloat16")  # it is of float16
    inputs.save(rounded, stacked, [0, 3, 5])
    heads = []
    for options in ([file], [file, "--dtype", "bfloat16"], [str(rounded)]):
        assert cli.main(["tune", *options, "--error", "0.3", "--by", "layer", "--json", *COMMAND]) == cli.OK
        heads.append(json.loads(capsys.readouterr().out)["heads"])
    assert heads[0] != heads[1] == heads[2]
    for size in ("--length", "--heads", "--kv-heads", "--head-dim"):
        assert cli.main(["tune", file, "--error", "0.3", "--by", "layer", size, "4"]) == cli.UNABLE
        assert f"s2o tune: {size} is 4; accepted only with a built-in input" in capsys.readouterr().err


def test_the_command_needs_files_of_layers(capsys):
    for arguments, named in (([], "trace"), (["a.npy", "b.npy"], "a.npy, b.npy")):
        assert cli.main(["tune", *arguments, "--error", "0.3", "--by", "layer", "--length", "99"]) == cli.UNABLE
        assert f"s2o tune: {named}: does not say of which layers its heads are" in capsys.readouterr().err


def test_the_picture(file, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "tuned.png"
    arguments = ["tune", file, "--density", "0.9", "--by", "head", "--plot", str(picture), *COMMAND]
    assert cli.main(arguments) == cli.OK
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5_000
    assert "density at most 0.9, a tau for each head" in capsys.readouterr().out


def test_one_tau_for_all_layers_has_the_error_in_all():
    """Also where the errors of one rise as tau falls."""
    def of(layer, *errors):
        found = np.array(errors)[:, None]
        return LayerCurves(layer, (0.5, 0.1, 0.05), found, found, np.ones(1), 8, 8, 4096, False)

    curves = [of(0, 0.2, 0.05, 0.05), of(1, 0.05, 0.2, 0.05)]
    assert [float(x[0]) for x in by_error(curves, 0.1, "layer")] == [0.1, 0.5]
    assert [float(x[0]) for x in by_error(curves, 0.1, "model")] == [0.05, 0.05]
    assert [float(x[0]) for x in by_error(curves, 0.01, "model")] == [0.0, 0.0]


def test_layers_of_a_file_are_told_apart(tmp_path):
    for layers, message in (
        ([3, 3], r"layers is \[3, 3\]; accepted: different numbers from 0 on"),
        ([-1, 3], r"layers is \[-1, 3\]; accepted: different"),
        ([1, 3, 5], "q has 4 heads of 3 layers; accepted: as many each"),
    ):
        inputs.save(tmp_path / "a.npz", inputs.builtin("random", 100, kv_heads=2), layers)
        with pytest.raises(ValueError, match=f"a.npz: {message}"):
            load_layers(tmp_path / "a.npz")
    broken = tmp_path / "a.safetensors"
    broken.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="a.safetensors: not a readable .safetensors file .a header of"):
        load_layers(broken)
