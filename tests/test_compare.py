"""Methods side by side: the figures of each are those of its own call, and one sentence where it cannot be."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conftest import has_gpu
from schedules import FRAMEWORKS
from stand_ins import integer_weights

from s2o_cupy import S2OConfig
from s2o_cupy.methods import MeanPoolingConfig, SpargeConfig, VerticalSlashConfig, XAttentionConfig, sparse_attention
from s2o_cupy.methods.registry import METHODS
from s2o_cupy.reference import ordering
from s2o_cupy.tools import cli, compare, inputs, metrics, plot
from s2o_cupy.tools import comparing as tool
from s2o_cupy.tools.finite import all_finite

CONFIGS = (S2OConfig(tau=0.3, dense_up_to=0), XAttentionConfig(threshold=0.3), MeanPoolingConfig(threshold=0.3))


def expected(q, k, v, config, **options):
    """rel_l2 and density of each head, and of all."""
    o, stats = sparse_attention(q, k, v, config=config, return_stats=True, **options)
    dense = sparse_attention(q, k, v, config=S2OConfig(tau=0), **options)
    o, dense = (np.asarray(x) for x in (o, dense))
    if options.get("layout") == "BSHD":
        o, dense = o.swapaxes(-2, -3), dense.swapaxes(-2, -3)
    of_head = [[metrics.rel_l2(a, b) for a, b in zip(*x, strict=True)] for x in zip(o, dense, strict=True)]
    return of_head, np.asarray(stats.density_per_head), metrics.rel_l2(o, dense), stats.density


@pytest.mark.parametrize("options", [{}, {"layout": "BSHD"}, {"is_causal": False}, {"scale": 0.4, "softcap": 3.0}])
def test_figures_are_those_of_the_calls(options, qkv):
    q, k, v = qkv(500, 600, batch=2, heads=4, kv_heads=2, head_dim=16)
    configs = CONFIGS if options.get("is_causal", True) else CONFIGS[::2]
    if options.get("layout") == "BSHD":
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    found = compare(q, k, v, configs, repeats=1, **options)
    assert found.backend == "numpy" and len(found.rows) == len(configs)
    assert found.dense_milliseconds is None  # NumPy's time says nothing of a GPU's
    for row, config in zip(found.rows, configs, strict=True):
        error, density, pooled_error, pooled_density = expected(q, k, v, config, **options)
        assert row.config == config and row.milliseconds is None
        np.testing.assert_allclose(row.error, error, rtol=1e-9)
        np.testing.assert_allclose(row.density, density, rtol=1e-6)
        assert row.pooled_error == pytest.approx(pooled_error, rel=1e-9) and pooled_error > 1e-3
        assert row.pooled_density == pytest.approx(pooled_density) and pooled_density < 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(name, qkv):
    q, k, v = (x.astype(np.float32) for x in qkv(300, heads=2, kv_heads=1, head_dim=16))
    framework = FRAMEWORKS[name]()
    ours = compare(q, k, v, CONFIGS[1:2], repeats=1).rows[0]
    found = compare(*map(framework.array, (q, k, v)), CONFIGS[1:2], repeats=1).rows[0]
    np.testing.assert_allclose(found.error, ours.error, rtol=1e-4)
    np.testing.assert_array_equal(found.density, ours.density)


def test_without_a_batch_and_progress(qkv):
    q, k, v = (x[0] for x in qkv(300, heads=2, kv_heads=1, head_dim=16))
    steps = []
    found = compare(q, k, v, CONFIGS, repeats=2, progress=lambda *x: steps.append(x))
    assert found.rows[0].error.shape == (1, 2)
    assert [done for done, *_ in steps] == list(range(1, steps[0][1] + 1))
    assert [what for *_, what in steps[:4]] == ["dense", "s2o", "xattention", "meanpooling"]


def test_the_default_is_everything_that_takes_the_mask(qkv):
    q, k, v = qkv(300, heads=2, kv_heads=1, head_dim=16)
    found = compare(q, k, v, repeats=1)
    assert [type(row.config) for row in found.rows] == [S2OConfig, *METHODS]
    assert found.rows[0].config == S2OConfig(dense_up_to=0)
    other = compare(q, k, v, repeats=1, is_causal=False)
    assert XAttentionConfig not in {type(row.config) for row in other.rows} and len(other.rows) >= 2


def test_what_a_row_is_called(qkv):
    rows = compare(*qkv(200), [S2OConfig(tau=0.02, dense_up_to=0, segment=256), XAttentionConfig(),
                               XAttentionConfig(stride=16, threshold=0.8)], repeats=1).rows  # fmt: skip
    assert [(row.name, row.settings) for row in rows] == [
        ("s2o", "tau=0.02, segment=256"), ("xattention", ""), ("xattention", "stride=16, threshold=0.8")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("configs", "options", "message"),
    [
        ([], {}, "compare: configs is empty; accepted: at least one"),
        (XAttentionConfig(), {}, "compare: configs is a XAttentionConfig; accepted: some of S2OConfig, MeanPooling"),
        (["xattention"], {}, r"compare: configs\[0\] is a str; accepted: S2OConfig, MeanPoolingConfig"),
        ([XAttentionConfig()], {"is_causal": False}, "XAttentionConfig: is_causal is False"),
        (None, {"repeats": 0}, "compare: repeats is 0; accepted: an integer >= 1"),
        (None, {"layout": "SBHD"}, "layout is 'SBHD'"),
    ],
)
def test_what_is_refused(configs, options, message, qkv, monkeypatch):
    monkeypatch.setattr(tool, "sparse_attention", lambda *_, **__: pytest.fail("attention was computed"))
    with pytest.raises((TypeError, ValueError), match=message):
        compare(*qkv(200), configs, **options)


def test_nothing_and_what_is_not_finite(qkv, monkeypatch):
    q, k, v = qkv(200)
    with pytest.raises(ValueError, match="compare: q is .* accepted: at least one head, query and key"):
        compare(q[:, :, :0], k, v)
    v = v.copy()
    v[0, 0, 3] = np.nan
    monkeypatch.setattr(tool, "sparse_attention", lambda *_, **__: pytest.fail("attention was computed"))
    said = r"^compare: v has .* values that are not finite, the first nan at \[0, 0, 3, 0\]; accepted: finite q, k"
    with pytest.raises(ValueError, match=said):
        compare(q, k, v)
    for make in FRAMEWORKS.values():
        try:
            framework = make()
        except pytest.skip.Exception:
            continue
        with pytest.raises(ValueError, match=said.replace("0, 3, 0", "3, 0, 0")):
            compare(*(framework.array(x.swapaxes(1, 2)) for x in (q, k, v)), layout="BSHD")


@pytest.mark.parametrize("shape", [(70, 3, 8), (3, 70, 8), (2, 70, 3, 8), (2, 3, 70, 8)])
def test_every_element_is_looked_at(shape):
    """Of any framework's array, with a batch or without, whichever of its axes are heads; one at each corner."""
    for make in FRAMEWORKS.values():
        try:
            framework = make()
        except pytest.skip.Exception:
            continue
        for corner in itertools.product(*((0, n - 1) for n in shape)):
            x = np.zeros(shape, np.float32)
            assert all_finite(framework.array(x))
            x[corner] = np.inf
            assert not all_finite(framework.array(x)), corner


def test_an_output_that_is_not_finite(qkv):
    """Of finite inputs: a sum of values beyond float64."""
    q, k, v = (x.astype(np.float64) for x in qkv(200))
    with pytest.raises(ValueError, match="compare: dense attention's output is not finite; accepted: smaller values"):
        compare(q, k, np.full_like(v, 1.7e308))


def test_the_fields_of_s2o_are_not_arguments(qkv):
    with pytest.raises(TypeError, match=re.escape("a field of S2OConfig: configs=[S2OConfig(tau=...), ...]")):
        compare(*qkv(200), tau=0.1)


# ---------------------------------------------------------------- the command


ARGUMENTS = ["compare", "slash", "--length", "600", "--head-dim", "32", "--repeats", "1"]


def test_the_table(capsys):
    assert cli.main([*ARGUMENTS, "--method", "s2o:tau=0.1", "--method", "xattention:stride=16,threshold=0.5"]) == cli.OK
    text = capsys.readouterr().out
    for name in ("dense", r"s2o \(tau=0.1\)", r"xattention \(stride=16, threshold=0.5\)"):
        assert re.search(rf"^{name} +\d\.\d\d\d +\d\.\d{{4}} ", text, re.M)
    assert ("No GPU used" in text) == (not has_gpu())


def test_json_and_the_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "compare.png"
    assert cli.main([*ARGUMENTS, "--json", "--plot", str(picture), "--method", "meanpooling"]) == cli.OK
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == "slash" and found["picture"] == str(picture) and found["problem"]["seqlen_q"] == 600
    (row,) = found["rows"]
    assert row["method"] == "meanpooling" and MeanPoolingConfig(**row["config"]) == MeanPoolingConfig()
    assert np.shape(row["error"]) == np.shape(row["density"]) == (1, 4)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_a_result_is_not_lost_with_its_picture(tmp_path, capsys, monkeypatch):
    """Nor is it two texts of JSON then."""
    pytest.importorskip("matplotlib")

    def full(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(plot, "draw_methods", full)
    arguments = [*ARGUMENTS, "--json", "--plot", str(tmp_path / "a.png"), "--method", "meanpooling"]
    assert cli.main(arguments) == cli.UNABLE
    out, err = capsys.readouterr()
    assert json.loads(out)["source"] == "slash" and "s2o compare: the disk is full" in err


@pytest.fixture
def axis_of(monkeypatch):
    """What a picture of methods would show."""
    pyplot, drawn = pytest.importorskip("matplotlib.pyplot"), []
    monkeypatch.setattr(pyplot.Figure, "savefig", lambda self, path, **options: drawn.extend(self.axes))

    def draw(methods, **options):
        plot.draw_methods("a.png", methods, ("time", "error"), "Methods", **options)
        assert not pyplot.get_fignums()  # none stays open
        return drawn.pop()

    return draw


def test_a_picture_of_errors(axis_of):
    """An exact method's is as small as any that is shown. Near dense attention's time there is a line at it."""
    axis = axis_of({"S2O": [(0.9, 0.0, "exact"), (0.5, 0.02, "tau=0.1")], "pbs": [(0.4, 0.1, "default")]})
    s2o, pbs, dense = axis.lines
    assert s2o.get_xydata().tolist() == [[0.5, 0.02], [0.9, plot.SMALLEST_ERROR]]
    assert pbs.get_xydata().tolist() == [[0.4, 0.1]] and list(dense.get_xdata()) == [1, 1]
    assert [x.get_text() for x in axis.get_legend().get_texts()] == ["S2O", "pbs"]
    assert (axis.get_title("left"), axis.get_xlabel(), axis.get_ylabel()) == ("Methods", "time", "error")
    assert axis.get_yscale() == "log"
    assert [(x.get_text(), x.xy) for x in axis.texts] == [
        ("tau=0.1", (0.5, 0.02)), ("exact", (0.9, plot.SMALLEST_ERROR)), ("default", (0.4, 0.1))
    ]  # fmt: skip
    assert axis.get_xlim()[0] == 0
    quick = axis_of({"pbs": [(0.4, 0.1, "default")]})
    assert len(quick.lines) == 1  # far from dense attention


def test_a_picture_of_errors_below_0(axis_of):
    """As they are, beside a line at 0."""
    axis = axis_of({"S2O": [(0.6, -0.02, "tau=0.1"), (0.3, 0.0, "tau=1")]}, linear_to=0.01)
    s2o, none = axis.lines
    assert s2o.get_xydata().tolist() == [[0.3, 0.0], [0.6, -0.02]] and list(none.get_ydata()) == [0, 0]
    assert axis.get_yscale() == "symlog" and axis.yaxis.get_transform().linthresh == 0.01


def test_neighbours_in_a_picture_have_other_marks(axis_of):
    lines = axis_of({f"method {i}": [(0.1 * i, 0.1, "")] for i in range(1, 12)}).lines[:11]
    marks = [x.get_marker() for x in lines]
    assert all(len(set(marks[i : i + 8])) == 8 for i in range(4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "flash"], "--method has 'flash'; accepted: s2o, meanpooling"),
        (["--method", "xattention:stride"], "--method has 'xattention:stride'; accepted: xattention:FIELD=VALUE"),
        (["--method", "xattention:stride=3"], "XAttentionConfig: stride is 3; accepted: 8 or 16"),
        (["--method", "xattention:length=3"], "length"),
        (["--plot", "compare.txt"], "compare: the picture is 'compare.txt'; accepted: a file that ends in"),
        (["--method", "xattention", "--no-causal"], "XAttentionConfig: is_causal is False"),
    ],
)
def test_wrong_arguments(arguments, message, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tool, "sparse_attention", lambda *_, **__: pytest.fail("attention was computed"))
    assert cli.main([*ARGUMENTS, *arguments]) == cli.UNABLE
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
def test_on_a_gpu(monkeypatch):
    """Every method, on arrays of CuPy and of PyTorch, whose figures agree."""
    q, k, v = inputs.builtin("trace", dtype="bfloat16")
    configs = [x for x in tool.default_configs() if not isinstance(x, VerticalSlashConfig)]
    # Of the reference's stops, which lag a key tile behind on Hopper, and its order, which is of 8-bit integers here
    # too: by exact scores so few keys stop elsewhere, which moves the error by more than kernels do.
    monkeypatch.setattr(ordering, "query_weights", partial(integer_weights, ordering.query_weights))
    on_gpu = [replace(x, path="portable") if isinstance(x, S2OConfig) else x for x in configs]
    found = compare(*inputs.to_gpu(inputs.QKV(q, k, v)), on_gpu, repeats=3)
    assert found.backend == "cupy" and found.dense_milliseconds > 0
    on_host = compare(q, k, v, configs, repeats=1)
    for mine, other in zip(found.rows, on_host.rows, strict=True):
        assert mine.milliseconds > 0 and other.milliseconds is None
        assert abs(mine.pooled_density - other.pooled_density) <= 0.03
        assert other.pooled_error * 0.9 - 2e-3 <= mine.pooled_error <= other.pooled_error * 1.1 + 2e-3
    torch = pytest.importorskip("torch")
    arrays = (torch.from_numpy(x.astype(np.float32)).cuda().bfloat16() for x in (q, k, v))
    on_torch = compare(*arrays, on_gpu, repeats=1)
    for mine, other in zip(found.rows, on_torch.rows, strict=True):
        np.testing.assert_allclose(mine.error, other.error, rtol=1e-3, atol=1e-6)


def test_spargeattn_by_one_of_its_rules():
    assert tool.parse_method("sparge", "--method") == SpargeConfig(tau=0.9, theta=-0.1)
    assert tool.parse_method("sparge:tau=0.5,theta=0.2", "--method") == SpargeConfig(tau=0.5, theta=0.2)
    assert tool.parse_method("sparge:topk=0.1", "--method") == SpargeConfig(topk=0.1, theta=-0.1)
    for text in ("sparge:topk=0.1,tau=0.5", "sparge:topk=0.1,tau =0.5"):
        with pytest.raises(TypeError, match="tau and topk are both given"):
            tool.parse_method(text, "--method")
