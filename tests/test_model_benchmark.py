"""benchmarks/model.py and serving.py: what model.py converts, and, with PyTorch on the CPU in the place of a GPU and
timings that are made up, that both run. tests/test_serving_benchmark.py has the parts of serving.py."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from benchmark_modules import BENCHMARKS, CPU
from conftest import has_gpu
from in_process import run_script

import s2o_cupy
from s2o_cupy import s2o_attention

# isort: split
import _baselines
import _common
import _sources
import model
import serving


@pytest.fixture
def small_llama(torch):
    pytest.importorskip("transformers", "5.16")
    import _small_llama

    return _small_llama


@pytest.fixture
def no_gpu_needed(torch, monkeypatch):
    """Every timing is 2 ms of the first call, every event 1 ms after the one before."""
    from torch.nn.attention import SDPBackend

    def call(function, value):
        function()
        return value

    class Event:
        clock = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.clock += 1
            self.at = Event.clock

        def elapsed_time(self, end):
            return float(end.at - self.at)

    monkeypatch.setattr(_common, "has_gpu", lambda: True)
    monkeypatch.setattr(_common, "time_ms", lambda function, repeats: call(function, 2.0))
    monkeypatch.setattr(_common, "peak_gib", lambda function, but=(): call(function, 1.0))
    monkeypatch.setattr(_common, "provenance", lambda device="cuda": {"commit": "here"})
    monkeypatch.setattr(_baselines, "sdpa_backends", lambda: dict.fromkeys(("cudnn", "flash2"), SDPBackend.MATH))
    monkeypatch.setattr(_baselines, "_flash3", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module, names in ((model, ("run_model", "run_layer")), (serving, ("run_chunked", "run_packed", "run_paged"))):
        for name in names:
            run = getattr(module, name)
            monkeypatch.setattr(module, name, lambda args, step, run=run: run(args, step, CPU))
    parts = {"chunked": serving.run_chunked, "packed": serving.run_packed, "paged": serving.run_paged}
    monkeypatch.setattr(serving, "PARTS", parts)


@pytest.mark.parametrize("script", ["model.py", "serving.py"])
def test_help(script):
    result = run_script(BENCHMARKS / script, "--help")
    assert result.returncode == 0
    for option in ("--input", "--taus", "--orders", "--json"):
        assert option in result.stdout


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["model.py", "--layer", "64x4x2"], ["serving.py"]])
def test_they_need_a_gpu(arguments):
    script, *options = arguments
    result = run_script(BENCHMARKS / script, *options)
    assert result.returncode == 2
    assert "needs an NVIDIA GPU" in result.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (model, [], "--weights, --tokens and --loader, or --layer"),
        (model, ["--weights", "x.npz", "--layer", "64x4x2"], "or --layer"),
        (model, ["--weights", "x.npz", "--tokens", "y.npy"], "--tokens and --loader"),
        (model, ["--layer", "64x4x3"], "each a multiple of the next"),
        (model, ["--layer", "64x4x2", "--baselines", "flash3"], "cudnn and flash2"),
        (serving, ["--parts", "chunks"], "accepted: chunked, packed"),
        (serving, ["--length", "10", "--sequences", "11"], "--length at least"),
    ],
)
def test_refused(script, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.parse(arguments)
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- the small Llama

# A Llama in plain float32 PyTorch, written apart from the one that it is compared with.
LOADER = """
import numpy as np
import torch
import torch.nn.functional as F
HEADS, KV_HEADS, HEAD_DIM, ROPE_THETA = 4, 2, 16, 5e5

def load(path):
    z = np.load(path)
    return {name: torch.from_numpy(z[name]) for name in z.files}

def rope(x):
    angle = torch.arange(len(x))[:, None] * ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

def logits(w, ids):
    x = w["model.embed_tokens.weight"][ids]
    for n in range(2):
        of = lambda name: w[f"model.layers.{n}.{name}.weight"]
        h = F.rms_norm(x, x.shape[-1:], of("input_layernorm"), 1e-5)
        q, k, v = ((h @ of(f"self_attn.{c}_proj").T).view(len(ids), -1, HEAD_DIM) for c in "qkv")
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (rope(k), v))
        s = torch.einsum("ihd,jhd->hij", rope(q), k) * HEAD_DIM**-0.5
        s = s.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        x = x + torch.einsum("hij,jhd->ihd", s.softmax(-1), v).flatten(1) @ of("self_attn.o_proj").T
        h = F.rms_norm(x, x.shape[-1:], of("post_attention_layernorm"), 1e-5)
        x = x + (F.silu(h @ of("mlp.gate_proj").T) * (h @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
    return F.rms_norm(x, x.shape[-1:], w["model.norm.weight"], 1e-5) @ w.get("lm_head.weight", w[
        "model.embed_tokens.weight"]).T

def nll(w, ids, targets):
    return F.cross_entropy(logits(w, ids), targets, reduction="none")
"""


@pytest.fixture
def folder(tmp_path, rng):
    """loader.py, weights.npz and tokens.npy."""
    hidden, inner, vocab = 48, 80, 50
    heads, kv_heads = 4 * 16, 2 * 16
    shapes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[-1]))  # noqa: E731
    weights = {f"model.layers.{n}.{name}.weight": 3 * draw(*shape) for n in range(2) for name, shape in shapes.items()}
    weights |= {"model.embed_tokens.weight": draw(vocab, hidden), "model.norm.weight": 5 * draw(hidden)}
    np.savez(tmp_path / "weights.npz", **weights)
    np.save(tmp_path / "tokens.npy", rng.integers(0, vocab, 400).astype(np.uint16))
    (tmp_path / "loader.py").write_text(LOADER)
    return tmp_path


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_gives_the_same_logits(torch, small_llama, folder, tied, rng):
    loader = _sources.module_of(str(folder / "loader.py"))
    weights = loader.load(folder / "weights.npz")
    if not tied:
        weights["lm_head.weight"] = torch.from_numpy(rng.standard_normal((50, 48), dtype=np.float32))
    llama = small_llama.load(loader, weights)
    ids, targets = small_llama.tokens(str(folder / "tokens.npy"), 200, "cpu")
    assert ids[1:].tolist() == targets[:-1].tolist()
    with torch.inference_mode():
        expected, found = loader.logits(weights, ids), llama(ids[None]).logits[0]
        assert expected.std() > 0.3
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        last = model.prefill(llama, ids)
        torch.testing.assert_close(last, found[None, -1:])
        loss = float(loader.nll(weights, ids, targets).mean())
        for chunk in (7, 200, 1000):
            assert small_llama.mean_loss(llama, ids, targets, chunk) == pytest.approx(loss, rel=1e-5)
    with pytest.raises(ValueError, match="400 tokens and the one after them of a file with 400"):
        small_llama.tokens(str(folder / "tokens.npy"), 400, "cpu")


def test_a_converted_model_keeps_its_dtype_but_not_in_the_rotary_embedding(torch, small_llama, folder):
    loader = _sources.module_of(str(folder / "loader.py"))
    weights = {name: x.bfloat16() for name, x in loader.load(folder / "weights.npz").items()}
    llama = small_llama.load(loader, weights)
    assert {x.dtype for x in llama.parameters()} == {torch.bfloat16}
    assert llama.model.rotary_emb.inv_freq.dtype == torch.float32
    weights["model.layers.0.self_attn.q_norm.weight"] = weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'.*unexpected \['model.layers.0.self_attn.q_n"):
        small_llama.load(loader, weights)


def test_model(no_gpu_needed, small_llama, folder, monkeypatch):
    weights, tokens, loader = (str(folder / name) for name in ("weights.npz", "tokens.npy", "loader.py"))
    args = model.parse([
        "--weights", weights, "--tokens", tokens, "--loader", loader, "--lengths", "300,390", "--taus", "0,1000",
        "--orders", "mean:1:0:128", "--dense-up-to", "0", "--json", str(folder / "m.json"),
    ])  # fmt: skip
    steps: list = []
    rows = model.run(args, lambda *told: steps.append(told))
    assert json.loads((folder / "m.json").read_text())["rows"] == rows
    assert str(folder) not in (folder / "m.json").read_text()
    assert [done for done, _, _ in steps] == list(range(steps[0][1]))  # 0 to total - 1
    assert [(r["length"], r["attention"], r.get("tau"), r.get("default")) for r in rows[:5]] == [
        (300, "cudnn", None, None), (300, "flash2", None, None),
        (300, "s2o", 0.01, True), (300, "s2o", 0, False), (300, "s2o", 1000, False),
    ]  # fmt: skip
    for dense, _, default, exact, sparse in (rows[:5], rows[5:]):
        assert dense["loss"] == pytest.approx(dense["loader_loss"], rel=1e-4)
        assert dense["loss_difference"] == 0
        assert (default["density"], exact["density"]) == (1, 1)  # one segment; tau 0
        assert abs(exact["loss_difference"]) < 1e-5
        assert sparse["density"] < 1
        assert abs(sparse["loss_difference"]) > 1e-5
        for row in (dense, default, exact, sparse):
            assert (row["prefill_ms"], row["attention_ms"], row["rest_ms"]) == (2, 2, 0)  # two layers of 1 ms
            assert (row["x_prefill"], row["x_attention"]) == (1, 1)
    text = _common.table(rows, model.MODEL)
    assert len(text.splitlines()) == 11
    assert "nats / token" in text

    from s2o_cupy.integrations.transformers import S2OAttention

    monkeypatch.setattr(S2OAttention, "_why_not", lambda *args: "a reason")
    with pytest.raises(RuntimeError, match="S2O did not run throughout.*a reason"):
        model.run(args, lambda *told: None)


# ---------------------------------------------------------------- the layer


def test_a_layer_attends_with_what_it_is_given(torch, small_llama):
    layer = small_llama.Layer((64, 4, 2), 96, 60, torch.float32, "cpu")
    assert float(layer.hidden.std()) > 0.5
    q, k, v = (torch.randn(1, h, 60, 16) for h in (4, 2, 2))
    q, k, v = (small_llama.as_in_a_layer(x) for x in (q, k, v))
    assert q.transpose(1, 2).is_contiguous()
    with torch.inference_mode():
        alone = layer.attention("sdpa", q, k, v)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(alone, expected.transpose(1, 2))
        plain = layer("sdpa")
        with small_llama.hooked("sdpa", small_llama.instead(q, k, v)):
            other = layer("sdpa")
        with small_llama.hooked("sdpa", lambda *args, **options: (alone, None)):
            torch.testing.assert_close(layer("sdpa"), other)
        with small_llama.hooked("sdpa", small_llama.skip):
            assert layer("sdpa").shape == plain.shape
        assert float((other - plain).abs().max()) > 1e-3
        torch.testing.assert_close(layer("sdpa"), plain)  # no hook stays


def test_layer(no_gpu_needed, small_llama, tmp_path):
    args = model.parse([
        "--layer", "64x4x2", "--intermediate", "96", "--lengths", "300", "--taus", "0,1000", "--orders", "mean:1:0:64",
        "--dense-up-to", "0", "--error", "--json", str(tmp_path / "l.json"),
    ])  # fmt: skip
    rows = model.run(args, lambda *told: None)
    written = json.loads((tmp_path / "l.json").read_text())
    assert written["rows"] == rows
    assert written["settings"]["layer"] == [64, 4, 2]
    assert [row["attention"] for row in rows] == ["cudnn", "flash2", "s2o", "s2o", "s2o"]
    for row in rows:
        assert (row["input"], row["heads"], row["kv_heads"], row["head_dim"]) == ("mixture", 4, 2, 16)
        assert (row["attention_ms"], row["rest_ms"], row["layer_ms"], row["x_layer"]) == (2, 2, 2, 1)
    assert all(row["rel_l2"] < 0.01 for row in rows[:4])
    assert rows[4]["rel_l2"] > 2 * rows[3]["rel_l2"]
    assert rows[4]["density"] < rows[3]["density"] == 1
    assert len(_common.table(rows, model.LAYER).splitlines()) == 6
    args.input = "trace"
    with pytest.raises(SystemExit, match="accepted: an input with {'heads': 4, 'kv_heads': 2, 'head_dim': 16}"):
        model.run(args, lambda *told: None)


# ---------------------------------------------------------------- chunks and packed batches


def packed_attention(q, k, v, cu_seqlens, *, config=None, return_stats=False):
    import torch

    parts = [
        s2o_attention(q[a:b], k[a:b], v[a:b], config=config, layout="BSHD", return_stats=True)
        for a, b in itertools.pairwise(cu_seqlens)
    ]
    o = torch.cat([o for o, _ in parts])
    return (o, [stats for _, stats in parts]) if return_stats else o


@pytest.mark.parametrize("varlen", [None, packed_attention])
def test_serving(no_gpu_needed, monkeypatch, tmp_path, varlen):
    monkeypatch.setattr(s2o_cupy, "s2o_attention_varlen", varlen, raising=False)
    args = serving.parse([
        "--length", "700", "--chunk", "128", "--sequences", "5", "--heads", "4", "--kv-heads", "2", "--head-dim", "32",
        "--orders", "mean:1:0:64", "--dense-up-to", "0", "--taus", "0,1000", "--parts", "chunked,packed",
        "--json", str(tmp_path / "s.json"),
    ])  # fmt: skip
    steps: list = []
    rows = serving.run(args, lambda *told: steps.append(told))
    assert json.loads((tmp_path / "s.json").read_text())["rows"] == rows
    assert [done for done, _, _ in steps] == list(range(steps[0][1]))
    exact, sparse, packed_exact, packed_sparse = rows
    assert [row["part"] for row in rows] == ["chunked", "chunked", "packed", "packed"]
    for row in (exact, sparse):
        assert row["same_bits"]  # chunks of whole segments
        assert (row["x_plain"], row["x_flash2_chunks"], row["x_cudnn"]) == (1, 1, 1)
        assert row["flash2_chunks_rel_l2"] < 0.01
    assert (exact["difference_like"], exact["density"]) == ("pass", 1)
    assert (sparse["density_like"], sparse["error_like"]) == ("pass", "pass")
    assert sparse["density"] < 0.9
    assert sparse["rel_l2"] > 2 * exact["rel_l2"]
    for row in (packed_exact, packed_sparse):
        assert sum(row["lengths"]) == row["length"] == 700
        assert (row["plain_ms"], row["queue_ms"], row["cudnn_ms"]) == (5 * 2, 2, 2)
        assert ("s2o_ms" in row) == ("x_plain" in row) == ("difference" in row) == (varlen is not None)
        if varlen:
            assert row["same_bits"]
            assert row["density"] == row["plain_density"]
    assert packed_sparse["plain_rel_l2"] > 2 * packed_exact["plain_rel_l2"]
    for columns in (serving.CHUNKED, serving.PACKED):
        assert len(_common.table(rows[:2], columns).splitlines()) == 3


def test_serving_from_pages(no_gpu_needed, tmp_path):
    args = serving.parse([
        "--length", "500", "--chunk", "128", "--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--parts", "paged",
        "--orders", "mean:1:0:64", "--taus", "0.1", "--page-sizes", "16,64", "--json", str(tmp_path / "s.json"),
    ])  # fmt: skip
    rows = serving.run(args, lambda *told: None)
    lengths = {"first chunk": (128, 128), "last chunk": (128, 500), "prompt": (500, 500)}
    assert [(row["call"], row["page_size"]) for row in rows] == list(itertools.product(lengths, (16, 64)))
    for row in rows:
        assert (row["seqlen_q"], row["seqlen_k"]) == lengths[row["call"]]
        assert (row["bits_like"], row["cost_like"], row["x_plain"], row["x_gather"]) == ("pass", "pass", 1, 1)
    assert len(_common.table(rows, serving.PAGED).splitlines()) == 1 + len(rows)
    assert list(serving.paged_calls(100, 128)) == ["prompt"]


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
class TestGpu:
    @pytest.fixture(autouse=True)
    def cuda(self, torch):
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")

    def rows(self, path, script, *arguments):
        command = [sys.executable, BENCHMARKS / script, "--repeats", "3", "--json", path, *arguments]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return json.loads(path.read_text())["rows"]

    def test_model(self, small_llama, folder):
        text = LOADER.replace("torch.from_numpy(z[name])", "torch.from_numpy(z[name]).bfloat16().cuda()")
        (folder / "loader.py").write_text(text.replace("def nll", "def other"))
        rows = self.rows(
            folder / "m.json", "model.py", "--weights", folder / "weights.npz", "--tokens", folder / "tokens.npy",
            "--loader", folder / "loader.py", "--lengths", 390, "--taus", "0",
        )  # fmt: skip
        assert [row["attention"] for row in rows] == ["cudnn", "flash2", "s2o", "s2o"]
        for row in rows:
            assert abs(row["loss_difference"]) < 0.02
            assert row["attention_ms"] > 0
            assert row["prefill_ms"] > 0

    def test_layer(self, small_llama, tmp_path):
        rows = self.rows(
            tmp_path / "l.json", "model.py", "--layer", "1024x8x2", "--intermediate", 2048, "--lengths", 16384,
            "--taus", "0", "--error",
        )  # fmt: skip
        for row in rows:
            assert 0 < row["layer_ms"] < 2 * (row["attention_ms"] + row["rest_ms"])
            assert row["rel_l2"] < 0.1
            assert row["peak_gib"] > 0.1
        assert rows[-1]["rel_l2"] < 0.01

    def test_serving(self, tmp_path):
        rows = self.rows(
            tmp_path / "s.json", "serving.py", "--length", 32768, "--sequences", 4, "--heads", 8, "--kv-heads", 2,
            "--dense-up-to", 0,
        )  # fmt: skip
        for row in rows:
            assert row["plain_ms"] > 0
            assert row.get("s2o_ms", 1) > 0
            # What pages cost is no test's business: others may be using the GPU.
            assert "FAIL" not in [value for key, value in row.items() if key != "cost_like"]
            for other in ("flash2_chunks_rel_l2", "varlen_rel_l2"):
                assert row.get(other, 0) < 0.01
