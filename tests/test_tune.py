"""Error and density from a sample of segments, and the tau that is found by them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from test_interop import Producer

import s2o_cupy
from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.plan import launch_plan
from s2o_cupy.tools import cli, inputs, metrics, sampled
from s2o_cupy.tools.sampled import error_per_head
from s2o_cupy.tools.tuning import TAUS, tune

ALL = 1 << 20  # segments
SMALL = S2OConfig(segment=32, tau=0.1, block_m=32, block_n=16, unit=8)
TARGETS = (0.3, 0.1, 0.03)


@pytest.fixture
def no_work(monkeypatch):
    """Fails where attention is computed."""
    monkeypatch.setattr(sampled, "s2o_attention", lambda *_, **__: pytest.fail("attention was computed"))


def whole(q, k, v, config, **options):
    """Of one call: rel_l2 and density by head, and over all heads."""
    o, stats = s2o_attention(q, k, v, config=config, return_stats=True, **options)
    dense = s2o_attention(q, k, v, config=replace(config, tau=0), **options)
    o, dense = (x if isinstance(x, np.ndarray) else x.get() for x in (o, dense))
    if options.get("layout") == "BSHD":
        o, dense = o.swapaxes(-2, -3), dense.swapaxes(-2, -3)
    by_head = np.array([[metrics.rel_l2(a, b) for a, b in zip(*x, strict=True)] for x in zip(o, dense, strict=True)])
    density = stats.density_per_head
    density = density if isinstance(density, np.ndarray) else density.get()
    return by_head, density, metrics.rel_l2(o, dense), stats.density


def agree(found, expected, rtol):
    error, density, pooled_error, pooled_density = expected
    np.testing.assert_allclose(found.error, error, rtol=rtol)
    np.testing.assert_allclose(found.density, density, rtol=1e-5)
    assert found.pooled_error == pytest.approx(pooled_error, rel=rtol)
    assert found.pooled_density == pytest.approx(pooled_density, rel=1e-5)


# ---------------------------------------------------------------- the estimate


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"window": 20}, {"tail": "first_order"}, {"unit": 1, "rank": "weight", "pooled_queries": 3},
        {"rank": "mean", "unit": 1, "pooled_queries": 1},
        {"rank": "max", "unit": 1, "tail": "first_order", "window": 7},
    ],
    ids=str,
)  # fmt: skip
def test_all_segments_are_the_whole_call(changes, qkv):
    """By each order: a segment alone has the rows of the whole call. The last is short; keys precede the queries."""
    q, k, v = qkv(300, 370, batch=2, heads=4, kv_heads=2, head_dim=16)
    config = replace(SMALL, block_m=16, **changes)  # two q tiles a segment
    found = error_per_head(q, k, v, config, segments=ALL)
    assert found.segments == tuple(range(10)) and found.segments_total == 10 and found.tau == config.tau
    assert found.error.shape == found.standard_error.shape == found.density.shape == (2, 4)
    assert found.error.dtype == found.density.dtype == np.float64
    assert (found.standard_error == 0).all() and found.pooled_standard_error == 0
    expected = whole(q, k, v, config)
    assert expected[2] > 0.01 and expected[3] < 0.95  # something is left out
    agree(found, expected, 1e-4)


def test_all_segments_on_every_device(device, qkv):
    """On a GPU both outputs are rounded, one pass over all keys differently from two: so far they may be apart. On a
    CPU float32 sums have another order, by 1e-6, and halves of a tail agree by quotients of their small differences."""
    q, k, v = (device.array(x) for x in qkv(3000, heads=4, kv_heads=2))
    config = replace(device.config, tau=1)
    expected = whole(q, k, v, config)
    assert expected[2] > 0.01 and expected[3] < 0.95
    agree(error_per_head(q, k, v, config, segments=ALL), expected, 5e-4 if device.kind == "cpu" else 0.03)


def test_every_argument_reaches_the_calls(qkv):
    q, k, v = qkv(200, heads=2, head_dim=16)
    options = {"scale": 0.4, "softcap": 3.0}
    expected = whole(q, k, v, SMALL, **options)
    agree(error_per_head(q, k, v, SMALL, segments=ALL, **options), expected, 1e-4)
    assert expected[2] != pytest.approx(whole(q, k, v, SMALL)[2], rel=0.01)
    bshd = (x.swapaxes(1, 2) for x in (q, k, v))
    agree(error_per_head(*bshd, SMALL, segments=ALL, layout="BSHD", **options), expected, 1e-4)
    agree(error_per_head(q[0], k[0], v[0], SMALL, segments=ALL, **options), expected, 1e-4)


@pytest.mark.slow
def test_a_sample_is_within_its_standard_errors(qkv):
    q, k, v = qkv(1600, heads=2, head_dim=16)
    truth = error_per_head(q, k, v, SMALL, segments=ALL)
    off, density = [], []
    for seed in range(12):
        found = error_per_head(q, k, v, SMALL, segments=21, seed=seed)
        assert len(found.segments) == 21 and found.segments_total == 50
        assert 0 < found.pooled_standard_error < 0.3 * truth.pooled_error
        off.append((found.pooled_error - truth.pooled_error) / found.pooled_standard_error)
        off += ((found.error - truth.error) / found.standard_error).ravel().tolist()
        density.append(found.pooled_density)
    assert np.abs(off).max() < 4 and (np.abs(off) < 2).mean() > 0.8
    # A segment waits for what its own queries look for, so that densities differ; what is drawn, 21 of 50, by a fifth.
    np.testing.assert_allclose(density, truth.pooled_density, rtol=0.2)
    np.testing.assert_allclose(np.mean(density), truth.pooled_density, rtol=0.05)
    assert 0.3 < np.std(off) < 2  # neither is the standard error too large
    same = error_per_head(q, k, v, SMALL, segments=21, seed=11)
    assert same.segments == found.segments and same.pooled_error == found.pooled_error


def test_arrays_of_other_frameworks(qkv):
    q, k, v = qkv(200, heads=2, head_dim=16)
    expected = error_per_head(q, k, v, SMALL, segments=4)
    found = error_per_head(*map(Producer, (q, k, v)), SMALL, segments=4)  # which cannot be sliced
    np.testing.assert_array_equal(found.error, expected.error)
    torch = pytest.importorskip("torch")
    found = error_per_head(*(torch.from_numpy(x) for x in (q, k, v)), SMALL, segments=4)
    np.testing.assert_array_equal(found.error, expected.error)
    jax = pytest.importorskip("jax")
    found = error_per_head(*(jax.device_put(x, jax.devices("cpu")[0]) for x in (q, k, v)), SMALL, segments=4)
    np.testing.assert_array_equal(found.density, expected.density)
    assert found.pooled_error == expected.pooled_error


def test_only_the_sampled_segments_are_computed(monkeypatch, qkv):
    """Each with the keys up to its end, once by S2O and once densely."""
    calls = []

    def attend(q, k, v, **options):
        calls.append((q.shape[2], k.shape[2], options["config"].tau, options["config"].dense_up_to))
        return s2o_attention(q, k, v, **options)

    monkeypatch.setattr(sampled, "s2o_attention", attend)
    found = error_per_head(*qkv(330, 400, head_dim=16), SMALL, segments=4)
    of_each = [(min(32, 330 - 32 * n), min(32 * n + 32, 330) + 70) for n in found.segments]
    assert len(of_each) == 4
    # A short segment must not become plain dense attention because it has few keys.
    assert calls == [(*x, 0, None) for x in of_each] + [(*x, SMALL.tau, 0) for x in of_each]


def test_without_causality(qkv):
    """A single segment is the whole call. Of several each depends on keys after it."""
    q, k, v = qkv(30, 200, head_dim=16)
    found = error_per_head(q, k, v, SMALL, is_causal=False)
    assert found.segments == (0,)
    agree(found, whole(q, k, v, SMALL, is_causal=False), 1e-4)
    q, k, v = qkv(64, 200, head_dim=16)
    with pytest.raises(ValueError, match="is_causal is False, with 2 segments.*accepted: True, or a single segment"):
        error_per_head(q, k, v, SMALL, is_causal=False)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"segments": 1}, ValueError, "segments is 1; accepted: an integer >= 2"),
        ({"segments": 2.5}, ValueError, "segments is 2.5"),
        ({"segments": True}, ValueError, "segments is True"),
        ({"config": 0.1}, TypeError, "config is a float; accepted: S2OConfig"),
        ({"softcap": -1}, ValueError, "softcap is -1"),
        ({"layout": "BHDS"}, ValueError, "layout is 'BHDS'"),
        ({"q": np.zeros((1, 2, 0, 8), np.float32)}, ValueError, "accepted: at least one head, query and key"),
        ({"q": np.zeros((1, 2, 64, 9), np.float32)}, ValueError, "head_dim"),
        ({"q": np.zeros((1, 2, 65, 8), np.float32)}, ValueError, "seqlen_q 65 exceeds seqlen_k 64"),
        ({"q": [[1.0]]}, TypeError, "q is a list"),
    ],
    ids=str,
)
def test_what_is_refused(changes, error, message, no_work):
    x = np.zeros((1, 2, 64, 8), np.float32)
    with pytest.raises(error, match=message):
        error_per_head(**({"q": x, "k": x, "v": x, "config": SMALL} | changes))


def test_values_that_are_not_finite(qkv):
    q, k, v = qkv(128, heads=4, kv_heads=2, head_dim=16)
    v[0, 1, 70, 3] = np.nan
    with pytest.raises(ValueError, match="not finite in segment 2, batch 0, head 2; accepted: finite q, k and v"):
        error_per_head(q, k, v, SMALL)


# ---------------------------------------------------------------- tune


@pytest.fixture
def medium(qkv):
    return qkv(500, heads=4, kv_heads=2, head_dim=16)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", [0.01, 0.02])
def test_the_largest_tau_of_an_error(error, medium):
    """With all segments: what the whole call makes."""
    found = tune(*medium, error=error, config=SMALL, segments=ALL)
    assert found.config == replace(SMALL, tau=found.config.tau)
    assert whole(*medium, found.config)[2] <= error * (1 + 1e-5)
    assert found.estimate.tau == found.config.tau and found.estimate.pooled_error <= error
    taus = [point.tau for point in found.points]
    assert taus == sorted(taus, reverse=True) and set(TAUS) < set(taus) and found.config.tau not in TAUS
    assert all(1.4 < higher / lower < 2.6 for higher, lower in pairwise(TAUS))  # about evenly, in logarithms
    of_grid = [point for point in found.points if point.tau in TAUS]
    assert all(point.pooled_error > error for point in of_grid if point.tau > found.config.tau)
    after = taus[taus.index(found.config.tau) - 1]  # the next larger one: near, and too large
    assert after < 1.2 * found.config.tau and whole(*medium, replace(SMALL, tau=after))[2] > error


def test_the_smallest_tau_of_a_density(medium):
    found = tune(*medium, density=0.6, config=SMALL, segments=ALL)
    assert whole(*medium, found.config)[3] <= 0.6
    smaller = max(point.tau for point in found.points if point.tau < found.config.tau)
    assert smaller > found.config.tau / 1.2 and whole(*medium, replace(SMALL, tau=smaller))[3] > 0.6


def test_taus_of_heads(medium):
    """The tau of the grid that each head alone would have."""
    for name, value in (("error", 0.05), ("density", 0.6)):
        found = tune(*medium, config=SMALL, segments=ALL, taus=TARGETS, **{name: value})
        of_taus = {tau: whole(*medium, replace(SMALL, tau=tau))[0 if name == "error" else 1] for tau in TARGETS}
        best = max if name == "error" else min
        for b, h in np.ndindex(1, 4):
            reaching = [tau for tau, of_heads in of_taus.items() if of_heads[b, h] <= value]
            assert found.head_taus[b, h] == (best(reaching) if reaching else pytest.approx(np.nan, nan_ok=True))


def test_the_ends_of_the_grid(medium):
    """Nothing lies between the grid and what is not asked for; a single tau will do."""
    found = tune(*medium, error=0.99, taus=[0.05, 0.2, 0.05], config=SMALL, segments=4)
    assert found.config.tau == 0.2 and [point.tau for point in found.points] == [0.2, 0.05]
    found = tune(*medium, density=1, taus=(0.05, 0.2), config=SMALL, segments=4)
    assert found.config.tau == 0.05
    assert tune(*medium, error=0.99, taus=(0.2,), segments=2).config == S2OConfig(tau=0.2)
    np.testing.assert_array_equal(found.head_taus, np.full((1, 4), 0.05))


def test_a_target_that_no_tau_reaches_says_the_nearest(medium):
    arguments = {"config": SMALL, "segments": 4, "taus": (0.5, 0.2)}
    with pytest.raises(ValueError, match=r"no tau of 0.5, 0.2 has error at most 1e-09; the nearest is tau 0.2, with"):
        tune(*medium, error=1e-9, **arguments)
    message = r"has density at most 0.01; the nearest is tau 0.5, with density 0\.\d+; accepted: at least that, or l"
    with pytest.raises(ValueError, match=message):
        tune(*medium, density=0.01, **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, ValueError, "neither error nor density is given; accepted: one of them"),
        ({"error": 0.1, "density": 0.1}, ValueError, "both error and density are given"),
        ({"error": 0}, ValueError, "tune: error is 0; accepted: 0 < error < 1"),
        ({"error": 1}, ValueError, "tune: error is 1; accepted: 0 < error < 1"),
        ({"error": float("nan")}, ValueError, "error is nan"),
        ({"error": float("inf")}, ValueError, "error is inf"),
        ({"error": "0.1"}, TypeError, "error is '0.1' .str."),
        ({"density": 1.5}, ValueError, "density is 1.5; accepted: a number above 0, up to 1"),
        ({"density": True}, TypeError, "density is True"),
        ({"error": 0.1, "taus": ()}, ValueError, "taus is empty"),
        ({"error": 0.1, "taus": 0.1}, TypeError, "taus is 0.1 .float."),
        ({"error": 0.1, "taus": (0.1, 0)}, ValueError, "taus has 0; accepted: at least one finite number above 0"),
        ({"error": 0.1, "taus": (10**400,)}, ValueError, "taus has 1000"),
        ({"error": 0.1, "taus": "0.1"}, TypeError, "taus has '0'"),
        ({"error": 0.1, "config": {}}, TypeError, "config is a dict"),
        ({"error": 0.1, "segments": 0}, ValueError, "segments is 0"),
        ({"error": 0.1, "is_causal": False}, ValueError, "is_causal is False"),
    ],
    ids=str,
)
def test_what_tune_refuses(changes, error, message, no_work):
    x = np.zeros((1, 2, 64, 8), np.float32)
    with pytest.raises(error, match=message):
        tune(x, x, x, **({"config": SMALL} | changes))


def test_progress_ends(medium):
    seen = []
    tune(*medium, error=0.1, config=SMALL, segments=4, taus=TARGETS, progress=lambda *x: seen.append(x))
    done, totals = [x[0] for x in seen], {x[1] for x in seen}
    assert totals == {4 * (1 + 3 + 4)} and done == sorted(done) and done[-1] in totals
    assert {x[2] for x in seen[:8]} == {"dense", "tau 0.3"}


def test_what_is_said(medium, monkeypatch):
    q, k, v = (np.concatenate([x, 2 * x]) for x in medium)
    config = replace(SMALL, dense_up_to=None)
    monkeypatch.setattr(launch_plan, "DENSE_UP_TO", 8192)
    found = tune(q, k, v, error=0.08, config=config, segments=6, taus=(0.1, 0.01))
    text = found.table()
    assert f"tau {found.config.tau:g} for error at most 0.08: error 0.0" in text
    assert "by 6 of 16 segments" in text and "1:3 " in text and text.count("chosen") == 1
    assert "On a GPU a call of 500 keys is plain dense attention" in text
    assert "On a GPU" not in replace(found, config=replace(found.config, dense_up_to=0)).table()
    plain = json.loads(json.dumps(found.to_dict()))
    assert S2OConfig(**plain["config"]) == found.config
    assert plain["estimate"]["pooled_error"] == found.estimate.pooled_error
    assert plain["estimate"]["error"] == found.estimate.error.tolist()
    assert [point["tau"] for point in plain["points"]] == [point.tau for point in found.points]
    nothing = replace(found, head_taus=np.full((2, 4), np.nan))
    assert nothing.to_dict()["head_taus"] == [[None] * 4] * 2 and "none" in nothing.table()


def test_public_names():
    assert s2o_cupy.tools.tune is tune and s2o_cupy.tools.error_per_head is error_per_head
    assert {"tune", "error_per_head"} <= {*s2o_cupy.tools.__all__}


# ---------------------------------------------------------------- the command


OPTIONS = [
    "--segment", "32", "--block-m", "64", "--block-n", "64", "--unit", "8", "--segments", "6", "--taus", "0.2,0.02",
]  # fmt: skip


@pytest.fixture
def file(tmp_path, qkv):
    q, k, v = (x.astype(np.float16) for x in qkv(700, head_dim=16))
    np.savez(tmp_path / "a.npz", q=q, k=k, v=v)
    return str(tmp_path / "a.npz")


def test_the_command(file, capsys):
    """On the GPU where there is one: the result of the function on the same arrays."""
    assert cli.main(["tune", file, "--density", "0.6", "--json", "--seed", "3", *OPTIONS]) == cli.OK
    printed = json.loads(capsys.readouterr().out)
    config = S2OConfig(**printed["config"])
    assert config == S2OConfig(segment=32, block_m=64, block_n=64, unit=8, tau=config.tau)
    assert printed["source"] == file and printed["picture"] is None
    arrays = inputs.load(file)
    if printed["backend"] == "cupy":
        arrays = inputs.to_gpu(arrays)
    found = tune(*arrays, density=0.6, config=replace(config, tau=0.5), segments=6, seed=3, taus=(0.2, 0.02))
    assert found.config == config and found.points[0].segments == tuple(printed["points"][0]["segments"])
    assert printed["estimate"]["pooled_density"] == found.estimate.pooled_density <= 0.6

    assert cli.main(["tune", "slash", "--length", "600", "--head-dim", "16", "--heads", "2", "--dtype", "float16",
                     "--error", "0.9", *OPTIONS]) == cli.OK  # fmt: skip
    assert "tau 0.2 for error at most 0.9" in capsys.readouterr().out


def test_the_picture(file, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "tune.png"
    assert cli.main(["tune", file, "--error", "0.5", "--plot", str(picture), *OPTIONS]) == cli.OK
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither error nor density is given; accepted: one of them"),
        (["--error", "0.5", "--density", "1"], "not allowed with"),
        (["--error", "0.5", "--tau", "0.1"], "--tau is not accepted; did you mean --taus?"),
        (["--error", "0.5", "--taus", "0.1,x"], "--taus has 'x'; accepted: numbers, separated by commas"),
        (["--error", "-1"], "error is -1.0; accepted: 0 < error < 1"),
        (["--error", "1"], "error is 1.0; accepted: 0 < error < 1"),
        (["--error", "0.5", "--segments", "1"], "segments is 1; accepted: an integer >= 2"),
        (["--error", "0.5", "--plot", "a.txt"], "the picture is 'a.txt'; accepted: a file that ends in"),
        (["--error", "1e-12", "--taus", "9", "--length", "600", "--segments", "2"], "no tau of 9 has error at most"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    try:
        status = cli.main(["tune", *arguments])
    except SystemExit as end:
        status = end.code
    found = capsys.readouterr()
    assert (status, found.out) == (cli.UNABLE, "")
    assert message in found.err and "Traceback" not in found.err


def test_a_picture_without_matplotlib(file, capsys, monkeypatch, no_work):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["tune", file, "--error", "0.5", "--plot", "a.png", *OPTIONS]) == cli.UNABLE
    assert "no picture: it needs matplotlib" in capsys.readouterr().err
