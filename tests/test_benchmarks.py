"""Benchmarks: what they measure against, what they search for, and what quality.py and scaling.py report on the CPU."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from benchmark_modules import BENCHMARKS
from conftest import has_gpu
from in_process import run_script

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.plan.rounds import Chunk
from s2o_cupy.reference import dense_attention
from s2o_cupy.spec import Geometry
from s2o_cupy.tools import inputs, metrics

# isort: split
import _common
import _exact
import _random_order
import _sources
import quality
import scaling


def run(script, *arguments):
    return run_script(BENCHMARKS / script, *arguments, S2O_COMMIT="here")


def succeed(script, *arguments):
    result = run(script, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---------------------------------------------------------------- arguments


def test_orders():
    assert _common.orders("query,mean,max:4:128:512,weight:8:0:64:32") == [
        {"rank": "query"},
        {"rank": "mean"},
        {"rank": "max", "pooled_queries": 4, "window": 128, "segment": 512},
        {"rank": "weight", "pooled_queries": 8, "window": 0, "segment": 64, "unit": 32},
    ]
    assert _common.describe(S2OConfig(rank="max", window=64, tau=0.5)) == {
        "order": "max:16:64:1024:1", "rank": "max", "pooled_queries": 16, "window": 64, "segment": 1024, "unit": 1,
        "tau": 0.5, "tau_falls": False,
    }  # fmt: skip
    default = _common.describe(S2OConfig(), 131_072)
    assert default["order"] == "query:128:0:128:8:8" and _common.parse_order(default["order"])["clusters"] == 8
    assert (default["tau"], default["tau_falls"], _common.describe(S2OConfig(error=0.1))["tau"]) == (0.05, True, None)
    for text, message in (
        ("best", "rank is 'best'"), ("mean:x", "invalid literal"), ("max:1:2:3:1:5", "clusters is 5"),
        ("query:128:0:128:8:8:1", "accepted: rank"),
        ("mean:1:0:64:16", "unit is 16 with rank='mean'"),
    ):  # fmt: skip
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            _common.orders(text)


def test_errors_to_measure_at():
    assert _common.errors("0.05,0.02") == [0.05, 0.02]
    with pytest.raises(argparse.ArgumentTypeError, match="^0.05,1: rel_l2: error is 1.0; accepted: 0 < error < 1"):
        _common.errors("0.05,1")


def test_head_counts():
    assert _common.head_counts("32:8,4:4") == [(32, 8), (4, 4)]
    with pytest.raises(argparse.ArgumentTypeError, match="heads a multiple of kv_heads"):
        _common.head_counts("6:4")


def test_help_of_host():
    pytest.importorskip("cupy")
    pytest.importorskip("torch")
    assert "--tokens" in succeed("host.py", "--help")


@pytest.mark.parametrize("script", ["quality.py", "scaling.py", "speed.py"])
def test_help(script):
    if script == "speed.py":
        pytest.importorskip("cupy")
        pytest.importorskip("torch")
    text = succeed(script, "--help")
    for option in ("--input", "--lengths", "--taus", "--orders", "--json"):
        assert option in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed.py", "--input", "trace", "--head-counts", "4:2"], "trace has its own"),
        (["speed.py", "--input", "sinks", "--random-order", "0.1"], "accepted with --input random"),
        (["quality.py", "--orders", "best"], "rank is 'best'"),
        (["scaling.py", "--sample", "0"], "accepted: 1 or more"),
    ],
)
def test_refused(arguments, message):
    if arguments[0] == "speed.py":
        pytest.importorskip("cupy")
        pytest.importorskip("torch")
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_the_gpu_is_asked_for_in_vain():
    result = run("quality.py", "--device", "cuda")
    assert result.returncode == 2
    assert "needs an NVIDIA GPU" in result.stderr


# ---------------------------------------------------------------- the exact answer, and errors


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_dense_rows(qkv, framework, monkeypatch):
    monkeypatch.setattr(_exact, "CPU_SCORES", 1000)  # several chunks
    arrays = qkv(70, 100, batch=2, heads=4, kv_heads=2, head_dim=16)
    expected = dense_attention(*arrays)[0]
    if framework == "torch":
        torch = pytest.importorskip("torch")
        arrays = [torch.from_numpy(x) for x in arrays]
    for first, last in ((0, None), (0, 1), (33, 60)):
        found = _exact.dense(*arrays, first, last)
        assert type(found) is type(arrays[0])
        assert metrics.rel_l2(np.asarray(found), expected[:, :, first:last]) < 1e-6


def test_errors_are_those_of_metrics(rng):
    o, exact = rng.standard_normal((2, 2, 3, 50, 8)).astype(np.float32)
    sums = _exact.sums(o, exact)
    assert _exact.pooled(sums) == pytest.approx(
        {"rel_l2": metrics.rel_l2(o, exact), "rel_l1": metrics.rel_l1(o, exact)}, rel=1e-12
    )
    for b, h in np.ndindex(2, 3):
        assert _exact.rel_l2(sums)[b, h] == pytest.approx(metrics.rel_l2(o[b, h], exact[b, h]), rel=1e-12)
        assert _exact.rel_l1(sums)[b, h] == pytest.approx(metrics.rel_l1(o[b, h], exact[b, h]), rel=1e-12)
    parts = [_exact.sums(o[:, :, part], exact[:, :, part]) for part in (slice(0, 20), slice(20, 50))]
    np.testing.assert_allclose(sum(parts), sums)


# ---------------------------------------------------------------- sources


PROGRAM = """
import torch
def qkv_32_8({signature}):
    x = torch.arange(length, dtype=torch.float32).reshape(1, 1, length, 1) + {value}
    return [x.expand(1, n, length, 4).bfloat16() for n in (4, 2, 2)]
"""


@pytest.mark.parametrize("extra", ["", ", offset=0", ", offset=0, layers=(1, 2)"])
def test_programs_get_what_they_take(tmp_path, extra):
    pytest.importorskip("torch")
    value = "10 * offset + sum(layers)" if "layers" in extra else "10 * offset" if extra else "0"
    (tmp_path / "of_mine.py").write_text(PROGRAM.format(signature=f"length{extra}", value=value))
    layers = [(3, 4)] if "layers" in extra else None
    for case in _sources.cases([str(tmp_path / "of_mine.py")], [5], [0, 7] if extra else [0], layers):
        q, k, _ = _sources.load(case, "float32", "cpu")
        assert (q.shape, k.shape, q.dtype.name) == ((1, 4, 5, 4), (1, 2, 5, 4), "float32")
        assert q[0, 0, 0, 0] == 10 * case.offset + (7 if layers else 0)
        assert case.row() == {"input": "of_mine.py", "offset": case.offset or None, "layers": layers and "3:4"}


def test_files_are_cut(tmp_path, rng):
    q, k, v = (rng.standard_normal((h, 20, 8), np.float32) for h in (4, 2, 2))
    np.savez(tmp_path / "x.npz", q=q, k=k, v=v)
    name = str(tmp_path / "x.npz")
    (whole,) = _sources.cases([name], None)
    np.testing.assert_array_equal(_sources.load(whole, "float32", "cpu")[0], q[None])
    (cut,) = _sources.cases([name], [5], [3])
    np.testing.assert_array_equal(_sources.load(cut, "float32", "cpu")[2], v[None, :, 3:8])
    with pytest.raises(ValueError, match="lengths up to 17"):
        _sources.load(_sources.Case(name, 18, 3), "float32", "cpu")
    np.savez(tmp_path / "longer.npz", q=q[:, :10], k=k, v=v)
    with pytest.raises(ValueError, match="cannot be cut"):
        _sources.load(_sources.Case(str(tmp_path / "longer.npz"), 5), "float32", "cpu")


def test_cases_only_where_they_differ():
    found = _sources.cases(["sinks", "trace", "my.py"], None, [0, 5], [(0, 1), (2,)], default_length=64)
    told = [(c.input, c.length, c.offset, c.layers) for c in found]
    assert told == [
        ("sinks", 64, 0, None),
        ("trace", None, 0, None),
        ("trace", None, 5, None),
        *(("my.py", 64, offset, layers) for offset in (0, 5) for layers in ((0, 1), (2,))),
    ]
    assert str(found[-1]) == "my.py 64 from 5 layers 2"


def test_heads_are_picked():
    q, k = np.arange(12).reshape(1, 12, 1, 1), np.arange(4).reshape(1, 4, 1, 1)
    picked = _sources.pick_heads(q, k, k, 4, 2)
    assert [x.ravel().tolist() for x in picked] == [[0, 1, 6, 7], [0, 2], [0, 2]]
    with pytest.raises(ValueError, match="4 KV heads with 3 query heads each"):
        _sources.pick_heads(q, k, k, 8, 2)


# ---------------------------------------------------------------- quality.py


ORDERS = ("mean:1:0:64:1", "max:4:16:64:1", "weight:8:0:64:4")


@pytest.mark.slow
def test_quality(tmp_path):
    arguments = ["--lengths", 300, "--orders", ",".join(ORDERS), "--taus", "0.2,0.02", "--block-m", 32]
    text = succeed(
        "quality.py", "--input", "trace", "slashes", "--heads", 2, "--kv-heads", 1, "--head-dim", 32, *arguments,
        "--block-n", 32, "--dtype", "float32", "--device", "cpu", "--per-head", "--estimate", "--json",
        tmp_path / "q.json", "--plot", tmp_path / "q.png",
    )  # fmt: skip
    result = json.loads((tmp_path / "q.json").read_text())
    assert result["commit"] == "here"
    assert result["device"].startswith("CPU")
    assert result["command"].startswith("python benchmarks/quality.py --input trace slashes --heads 2")
    assert str(tmp_path) not in (tmp_path / "q.json").read_text()
    assert result["settings"]["segment"] == 64
    assert (tmp_path / "q.png").stat().st_size > 10_000

    given = {
        "trace": inputs.builtin("trace", 300, dtype="float32"),
        "slashes": inputs.builtin("slashes", 300, heads=2, kv_heads=1, head_dim=32),
    }
    assert [(row["input"], row["order"], row["tau"]) for row in result["rows"]] == [
        (name, order, tau) for name in given for order in ORDERS for tau in (0.2, 0.02)
    ]
    for row in result["rows"]:
        q, k, v = given[row["input"]]
        config = S2OConfig(
            block_m=32, block_n=32, **{n: row[n] for n in ("rank", "pooled_queries", "window", "segment", "unit")}
        )
        o, stats = s2o_attention(q, k, v, config=config, tau=row["tau"], return_stats=True)
        assert row["head_estimate"] == stats.error_per_head[0].tolist()
        exact = dense_attention(q, k, v)[0]
        assert row["density"] == stats.density
        assert row["rel_l2"] == pytest.approx(metrics.rel_l2(o, exact), rel=1e-3, abs=1e-6)
        assert row["rel_l1"] == pytest.approx(metrics.rel_l1(o, exact), rel=1e-3, abs=1e-6)
        assert row["heads"] == len(row["head_rel_l2"]) == q.shape[1] and row["head_names"][1] == "1"
        for h in range(q.shape[1]):
            assert row["head_density"][h] == pytest.approx(stats.density_per_head[0, h])
            assert row["head_rel_l2"][h] == pytest.approx(metrics.rel_l2(o[:, h], exact[:, h]), rel=1e-3, abs=1e-6)
            assert row["head_rel_l1"][h] == pytest.approx(metrics.rel_l1(o[:, h], exact[:, h]), rel=1e-3, abs=1e-6)
        assert "s2o_ms" not in row  # the reference's time says nothing
    assert max(row["rel_l2"] for row in result["rows"]) > 0.01

    pooled, heads = text.split("\n\n")
    heading = ["input", "tokens", "order", "tau", "density", "rel_l2", "rel_l1", "NumPy", "s"]
    assert pooled.splitlines()[0].split() == heading
    assert len(pooled.splitlines()) == 1 + 12
    assert len(heads.splitlines()) == 1 + 6 * 4 + 6 * 2
    assert heads.splitlines()[2].split()[:5] == ["trace", "300", "mean:1:0:64:1", "0.2", "1"]


def test_quality_names_all_patterns():
    assert set(quality.parse(["--input", "patterns", *inputs.RECORDED]).input) == set(inputs.names())


# ---------------------------------------------------------------- scaling.py


def test_segments_are_sampled_evenly():
    assert scaling.sampled_segments(Geometry(1024, 1024, 64), 4) == [2, 6, 10, 14]
    assert scaling.sampled_segments(Geometry(100, 100, 64), 4) == [0, 1]
    assert scaling.sampled_segments(Geometry(30, 30, 64), 4) == [0]


@pytest.mark.parametrize("window", [0, 24])
def test_a_segment_by_itself_is_the_whole_call_s(qkv, window):
    q, k, v = qkv(500, heads=4, kv_heads=2, head_dim=32)
    config = S2OConfig(segment=64, window=window, tau=0.1, block_m=32, block_n=32, rank="mean")
    sample = scaling.Sample(q, k, v, config.segment, 3)
    assert sample.rows == 3 * 64
    o = s2o_attention(q, k, v, config=config)
    errors = sample.errors_of(o)
    assert errors["rel_l2"] > 1e-3
    assert sample.errors_at(config) == pytest.approx(errors, rel=1e-4)
    exact = dense_attention(q, k, v)[0]
    rows = np.concatenate([np.arange(*r) for r in sample.ranges])
    assert errors["rel_l2"] == pytest.approx(metrics.rel_l2(o[:, :, rows], exact[:, :, rows]), rel=1e-3)


def test_find_tau():
    asked = []

    def error(tau):
        asked.append(tau)
        return tau**0.5

    assert _common.find_tau(error, 0.05, rising=True) == pytest.approx(0.0025, rel=0.05)
    assert len(asked) < 12
    assert _common.find_tau(lambda tau: 1 / tau, 200, rising=False) == pytest.approx(0.005, rel=0.05)
    assert _common.find_tau(lambda tau: tau, 5.0, rising=True) == pytest.approx(1, rel=0.01)  # out of reach


@pytest.mark.slow
def test_scaling(tmp_path):
    text = succeed(
        "scaling.py", "--input", "trace", "--lengths", "1024,2048,4096", "--heads", 2, "--kv-heads", 2, "--errors",
        "0.02", "--orders", "mean:1:0:128", "--device", "cpu", "--json", tmp_path / "s.json", "--plot",
        tmp_path / "s.png",
    )  # fmt: skip
    assert (tmp_path / "s.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [(row["length"], row["goal"]) for row in rows] == [
        (length, goal) for length in (1024, 2048, 4096) for goal in ("tau 0.01", "error 0.02")
    ]
    assert [row["input"] for row in rows] == ["trace"] * 4 + ["mixture"] * 2  # the trace has 2,816 tokens
    for fixed_tau, fixed_error in zip(rows[::2], rows[1::2], strict=True):
        assert fixed_tau["tau"] == 0.01
        assert fixed_tau["rel_l2"] < fixed_error["rel_l2"] < 0.1
        assert fixed_error["density"] < fixed_tau["density"] <= 1
        assert fixed_tau["sampled_rows"] == 4 * 128
        assert (fixed_tau["heads"], fixed_tau["kv_heads"]) == (2, 2)
    assert rows[-1]["rel_l2"] == pytest.approx(0.02, rel=0.1)
    assert len(text.splitlines()) == 1 + 6


# ---------------------------------------------------------------- many_gpus.py


@pytest.mark.slow
def test_many_gpus(tmp_path, capfd):
    pytest.importorskip("torch")
    printed_here = succeed(
        "many_gpus.py", "--lengths", "700,50", "--heads", 4, "--kv-heads", 2, "--head-dim", 32, "--orders",
        "mean:1:0:64", "--splits", "sequence,heads", "--device", "cpu", "--ranks", 2, "--repeats", 2, "--warmup", 0,
        "--json", tmp_path / "m.json",
    )  # fmt: skip
    text = printed_here + capfd.readouterr().out  # of this process, and of those that it starts
    result = json.loads((tmp_path / "m.json").read_text())
    assert result["command"].startswith("python benchmarks/many_gpus.py --lengths 700,50")
    rows = result["rows"]
    assert [(row["length"], row["split"]) for row in rows] == [
        (length, split) for length in (700, 50) for split in ("sequence", "heads")
    ]
    for row in rows:
        assert row["equal"] is True and row["rel_l2"] == 0
        assert row["ranks"] == 2
        assert row["speedup"] == row["one_ms"] / row["many_ms"]
    assert rows[0]["density"] < 1
    assert rows[0]["gather_ms"] > 0 and 0 < rows[0]["balance"] <= 1
    assert len(text.splitlines()) == 1 + 4
    result = run("many_gpus.py", "--splits", "rows")
    assert result.returncode == 2 and "'rows'; accepted: sequence, heads" in result.stderr


# ---------------------------------------------------------------- random orders


@pytest.mark.parametrize(("length", "window"), [(1000, 0), (1000, 40), (64, 0)])
def test_expected_density_is_the_reference_s(rng, length, window):
    """Queries of zeros give every key the same weight."""
    q = np.zeros((1, 1, length, 8), np.float32)
    k, v = rng.standard_normal((2, 1, 1, length, 8), dtype=np.float32)
    for tau in (0, 0.01, 0.07, 0.3, 1, 5, 1000):
        config = S2OConfig(segment=128, window=window, block_m=32, block_n=16, tau=tau, tail="none")
        stats = s2o_attention(q, k, v, config=config, return_stats=True)[1]
        assert _random_order.expected_density(tau, stats.geometry, config) == pytest.approx(stats.density, rel=1e-12)


def test_expected_tau():
    geometry, config = Geometry(32768, 32768, 1024), S2OConfig(rank="mean")
    for density in (0.1, 0.3, 0.9):
        tau = _random_order.expected_tau(density, geometry, config)
        assert _random_order.expected_density(tau, geometry, config) == pytest.approx(density, rel=0.03)


@pytest.mark.parametrize("unit", [1, 4])
def test_random_orders_are_permutations(unit):
    torch = pytest.importorskip("torch")
    geometry = Geometry(1000, 1000, 128, unit=unit)
    orders = _random_order.RandomOrders(geometry, "cpu")
    chunk = Chunk(0, heads=3, first_segment=2, segments=4, shared_heads=1, near_heads=1, stride=256, growth=128)
    order = orders.draw(chunk)
    assert order.dtype == torch.int32
    assert order.shape == (3 * (256 + 384 + 512 + 640),)
    rows = {(h, n): order[chunk.place(h, n)][: geometry.ranked(n)].tolist() for h in range(3) for n in range(2, 6)}
    for row in rows.values():
        assert sorted(row) == list(range(len(row)))
        assert row != sorted(row)
    assert rows[0, 5] != rows[1, 5]


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
class TestGpu:
    @pytest.fixture(autouse=True)
    def torch(self):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
        return torch

    def test_speed(self, tmp_path):
        succeed(
            "speed.py", "--lengths", 4096, "--head-counts", "8:2", "--head-dims", "64,128", "--error", "--memory",
            "--repeats", 3, "--json", tmp_path / "x.json",
        )  # fmt: skip
        rows = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert [row["head_dim"] for row in rows] == [64, 128]
        for row in rows:
            for name in ("s2o", "cudnn", "flash2"):
                assert 0 < row[f"{name}_queued_ms"] < 10 * row[f"{name}_ms"]
            assert row["x_cudnn_queued"] == row["s2o_queued_ms"] / row["cudnn_queued_ms"]
            assert row["host_us"] > 0
            assert row["host_us_cupy"] > 0
            assert row["rel_l2"] < 0.1

    def test_host(self, tmp_path):
        succeed("host.py", "--tokens", 2048, "--turns", 2, "--processes", 1, "--json", tmp_path / "x.json")
        rows = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert rows[0]["call"] == "CuPy" and rows[0]["more_us"] == 0
        assert {"PyTorch", "integrations.torch", "integrations.distributed, one rank"} <= {row["call"] for row in rows}
        assert all(0 < row["from_us"] <= row["host_us"] <= row["to_us"] for row in rows)

    def test_random_order(self, tmp_path):
        succeed("speed.py", "--lengths", 16384, "--heads", 8, "--kv-heads", 2, "--random-order", "0.3,0.5",
                "--repeats", 3, "--json", tmp_path / "x.json")  # fmt: skip
        for row in json.loads((tmp_path / "x.json").read_text())["rows"]:
            assert row["density"] == pytest.approx(row["target_density"], rel=0.1)
            assert row["pass2_tflops"] > 0

    def test_a_random_order_is_attention_all_the_same(self, torch):
        import speed

        q = torch.randn(1, 4, 2000, 128, dtype=torch.bfloat16, device="cuda")
        k, v = torch.randn(2, 1, 2, 2000, 128, dtype=torch.bfloat16, device="cuda")
        pipeline = speed.Pipeline(q, k, v)
        config = S2OConfig(segment=256, tau=0)
        pipeline.change = _random_order.RandomOrders(pipeline.problem.geometry(config))
        assert pipeline.stats(config).density == 1
        o = torch.from_dlpack(pipeline.out)
        assert _exact.pooled(_exact.sums(o, _exact.dense(q, k, v)))["rel_l2"] < 0.01

    def test_many_gpus(self, tmp_path):
        """On as many GPUs as there are, one too."""
        succeed("many_gpus.py", "--lengths", 16384, "--heads", 8, "--kv-heads", 8, "--splits", "sequence,heads",
                "--repeats", 3, "--json", tmp_path / "x.json")  # fmt: skip
        rows = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert all(row["equal"] and row["many_ms"] > 0 for row in rows)
        assert all(rows[0][f"{part}_ms"] > 0 for part in ("pass1", "ordering", "pass2"))

    def test_quality(self, tmp_path):
        succeed("quality.py", "--input", "mixture", "--lengths", 4096, "--taus", "0.01", "--json", tmp_path / "x.json",
                "--plot", tmp_path / "x.png")  # fmt: skip
        (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert row["x_cudnn"] == row["s2o_ms"] / row["cudnn_ms"]
        assert 0.001 < row["rel_l2"] < 0.1

    def test_scaling(self, tmp_path):
        succeed("scaling.py", "--lengths", "8192,16384", "--errors", "0.02", "--json", tmp_path / "x.json", "--plot",
                tmp_path / "x.png")  # fmt: skip
        rows = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert len(rows) == 4
        assert all(row["s2o_ms"] > 0 and "extra_gib" in row for row in rows)
        assert rows[-1]["rel_l2"] == pytest.approx(0.02, rel=0.1)
