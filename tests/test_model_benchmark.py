"""benchmarks/model.py: what it converts and measures, and, with PyTorch on the CPU in the place of a GPU and timings
that are made up, what it reports."""

from __future__ import annotations

import json

import numpy as np
import pytest
from benchmarks_on_cpu import BENCHMARKS, CPU, pretend_a_gpu, rows_on_a_gpu
from conftest import has_gpu
from hypothesis import example, given
from hypothesis import strategies as st
from in_process import run_script

from s2o_cupy import S2OConfig, s2o_attention

# isort: split
import _common
import _exact
import _sources
import layer
import model
import serving

ONE_MODEL = ["--models", "A=a.py:b.npz:c.npy"]



@pytest.fixture
def small_llama(torch):
    pytest.importorskip("transformers", "5.16")
    import _small_llama

    return _small_llama


@pytest.fixture
def no_gpu_needed(torch, monkeypatch):
    pretend_a_gpu(monkeypatch, [(model, "run_models")])


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("model.py", ["--models", "--base", "--set", "--parts"]),
        ("layer.py", ["--input", "--base", "--set"]),
        ("serving.py", ["--input", "--taus", "--orders"]),
    ],
)
def test_help(script, options):
    result = run_script(BENCHMARKS / script, "--help")
    assert result.returncode == 0
    for option in (*options, "--json"):
        assert option in result.stdout


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["model.py", *ONE_MODEL], ["layer.py"], ["serving.py"]])
def test_they_need_a_gpu(arguments):
    script, *options = arguments
    result = run_script(BENCHMARKS / script, *options)
    assert result.returncode == 2
    assert "needs an NVIDIA GPU" in result.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (model, [], "--models"),
        (model, ["--models", "A=a:b"], "accepted: NAME=LOADER:WEIGHTS:TOKENS"),
        (model, [*ONE_MODEL, "--parts", "loss,speed"], "accepted: one or more of loss, error, time"),
        (model, [*ONE_MODEL, "--set", "taw=0.1"], "taw is not a field; did you mean tau"),
        (model, [*ONE_MODEL, "--set", "segment=0.5"], "segment is 0.5"),
        (model, [*ONE_MODEL, "--set", "tau=0.1,tau=0.2"], "each field once"),
        (model, [*ONE_MODEL, "--set", "tau"], "accepted: FIELD=VALUE"),
        (
            model,
            [*ONE_MODEL, "--base", "rank=mean", "--set", "pooled_queries=4"],
            "pooled_queries is 4 with rank='mean'",
        ),
        (model, [*ONE_MODEL, "--baselines", "flash3"], "cudnn and flash2"),
        (model, [*ONE_MODEL, "--tune", "loss=0.1,error=0.1"], "accepted: loss=, error= or density=NUMBER"),
        (model, [*ONE_MODEL, "--tune", "error=1"], "tune_model: error is 1.0; accepted: 0 < error < 1"),
        (layer, ["--layer", "64x4x3"], "each a multiple of the next"),
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
    import _turns

    from s2o_cupy.integrations.next_tokens import next_tokens

    loader = _sources.module_of(str(folder / "loader.py"))
    weights = loader.load(folder / "weights.npz")
    if not tied:
        weights["lm_head.weight"] = torch.from_numpy(rng.standard_normal((50, 48), dtype=np.float32))
    llama = small_llama.load(loader, weights)
    text = np.load(folder / "tokens.npy")
    ids, targets = small_llama.tokens(text, 200, "cpu")
    assert ids[1:].tolist() == targets[:-1].tolist()
    with torch.inference_mode():
        expected, found = loader.logits(weights, ids), llama(ids[None]).logits[0]
        assert expected.std() > 0.3
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        last = _turns.prefill(llama, ids)
        torch.testing.assert_close(last, found[None, -1:])
        expected = loader.nll(weights, ids, targets)
        for chunk in (7, 200, 1000):
            loss, hit = (x[0] for x in next_tokens(llama, ids[None], targets[None], chunk))
            np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
            assert (hit == (found.argmax(-1) == targets).numpy()).all()
        assert hit.any()
    with pytest.raises(ValueError, match="400 tokens and the one after them of a text of 400"):
        small_llama.tokens(text, 400, "cpu")


def test_a_converted_model_keeps_its_dtype_but_not_in_the_rotary_embedding(torch, small_llama, folder):
    loader = _sources.module_of(str(folder / "loader.py"))
    weights = {name: x.bfloat16() for name, x in loader.load(folder / "weights.npz").items()}
    llama = small_llama.load(loader, weights)
    assert {x.dtype for x in llama.parameters()} == {torch.bfloat16}
    assert llama.model.rotary_emb.inv_freq.dtype == torch.float32
    weights["model.layers.0.self_attn.q_proj.bias"] = weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'.*unexpected \['model.layers.0.self_attn.q_p"):
        small_llama.load(loader, weights)


def arguments(folder, *more):
    """Two models of the same files, and what all runs below have in common."""
    files = ":".join(str(folder / name) for name in ("loader.py", "weights.npz", "tokens.npy"))
    return ["--models", f"A={files},B={files}", "--json", str(folder / "m.json"), *more]


@pytest.mark.slow
def test_model(no_gpu_needed, small_llama, folder, monkeypatch):
    args = model.parse(arguments(
        folder, "--lengths", "300,390", "--base", "dense_up_to=0", "--set", "rank=mean,segment=128,tau=0",
        "--set", "rank=mean,segment=128,tau=1000", "--copy-ids", "1", "--copy-distance", "10",
    ))  # fmt: skip
    steps: list = []
    rows = model.run(args, lambda *told: steps.append(told))
    written = json.loads((folder / "m.json").read_text())
    assert written["rows"] == rows
    assert written["settings"]["set"][1] == {"rank": "mean", "segment": 128, "tau": 1000}
    assert str(folder) not in (folder / "m.json").read_text()
    assert [done for done, _, _ in steps] == list(range(steps[0][1]))  # 0 to total - 1
    assert [(r["model"], r["length"]) for r in rows[::5]] == [("A", 300), ("A", 390), ("B", 300), ("B", 390)]
    assert [(r["attention"], r.get("config")) for r in rows[:5]] == [
        ("cudnn", None), ("flash2", None), ("s2o", "dense_up_to=0"),
        ("s2o", "segment=128,tau=0,rank=mean,dense_up_to=0"), ("s2o", "segment=128,tau=1000,rank=mean,dense_up_to=0"),
    ]  # fmt: skip
    for dense, flash2, one_segment, exact, sparse in (rows[:5], rows[5:10], rows[10:15]):
        assert dense["loss"] == pytest.approx(dense["loader_loss"], rel=1e-4)
        assert dense["loss_difference"] == 0
        assert (one_segment["density"], exact["density"]) == (1, 1)
        assert sparse["density"] == np.mean(sparse["density_by_layer"]) < 1
        assert abs(exact["loss_difference"]) < 1e-5 < abs(sparse["loss_difference"])
        assert sparse["loss_difference"] == pytest.approx(sparse["loss"] - dense["loss"])
        assert sparse["loss_difference_by_position"][0] == pytest.approx(0, abs=1e-5)  # one segment, dense
        for row in (dense, flash2, one_segment, exact, sparse):
            assert np.mean(row["loss_by_position"]) == pytest.approx(row["loss"], rel=0.02)
            assert len(row["loss_by_position"]) == 8
            assert row["layer_numbers"] == [0, 1]
            assert 0 < row["copies"] == dense["copies"] < 0.5
            assert 0 <= row["copies_accuracy"] <= 1
            # Two events around everything, two around each of two layers.
            assert (row["prefill_ms"], row["attention_ms"], row["rest_ms"]) == (5, 2, 3)
            assert (row["cudnn_attention_ms"], row["x_prefill"], row["x_attention"]) == (2, 1, 1)
        for row in (dense, flash2, one_segment, exact):
            assert row["worst_rel_l2"] == max(row["rel_l2_by_layer"]) < 1e-5
            assert row["rows_above_half_by_layer"] == [0, 0]
        assert min(sparse["rel_l2_by_layer"]) > 0.01
        for n in range(2):
            assert 0 <= sparse["row_median_by_layer"][n] < sparse["row_p99_by_layer"][n]
            assert sparse["row_p99_by_layer"][n] <= sparse["row_p999_by_layer"][n]
    text = _common.table(rows, model.COLUMNS)
    assert len(text.splitlines()) == 21
    assert "nats / token" in text

    from s2o_cupy.integrations.transformers import S2OAttention

    monkeypatch.setattr(S2OAttention, "_why_not", lambda *args: "gradients")
    with pytest.raises(RuntimeError, match="S2O did not run throughout.*gradients"):
        model.run(args, lambda *told: None)


@pytest.mark.slow
def test_a_tuned_model(no_gpu_needed, small_llama, folder):
    """Each --tune is one more kind of attention, found on the tokens behind the measured ones."""
    args = model.parse(arguments(
        folder, "--lengths", "190", "--base", "segment=32,block_m=32,block_n=16,unit=8", "--tune", "loss=0.5,by=head",
        "--tune", "error=0.02",
    ))  # fmt: skip
    del args.models["B"]
    rows = model.run(args, lambda *told: None)
    assert len(rows) == 5
    assert [row.get("config") for row in rows[3:]] == ["tuned, loss=0.5,by=head", "tuned, error=0.02,by=layer"]
    by_loss, by_error = rows[3:]
    assert by_loss["tuned_loss_difference"] <= 0.5 and "tuned_loss_difference" not in by_error
    assert abs(by_loss["tuned_held_back_worse"]) < 0.5 and "tuned_held_back_worse" not in by_error
    assert by_loss["tuned_loss_difference"] != pytest.approx(by_loss["loss_difference"], abs=1e-6)  # of other tokens
    assert max(by_error["rel_l2_by_layer"]) < 0.04 and len(by_error["taus"]) == 2
    assert 0 < by_loss["density"] < by_error["density"] < 1
    assert by_loss["attention_ms"] == 2


@pytest.mark.parametrize("measure", ["first", "second"])
def test_both_ways_round(torch, no_gpu_needed, small_llama, folder, measure, monkeypatch):
    """Which tokens are measured, and which are tuned on."""
    from s2o_cupy.integrations import model_tools

    text, seen = np.load(folder / "tokens.npy"), []
    monkeypatch.setattr(model_tools, "tune_model", lambda model, ids, **options: seen.append(ids) or S2OConfig(tau=0))
    more = ("--lengths", "190", "--parts", "loss", "--tune", "loss=0.5", "--measure", measure)
    dense = model.run(model.parse(arguments(folder, *more)), lambda *told: None)[0]
    first, second = text[:190], text[190:380]
    assert (seen[0][0].numpy() == (second if measure == "first" else first)).all()
    loader = _sources.module_of(str(folder / "loader.py"))
    begin = 0 if measure == "first" else 190
    ids, targets = small_llama.tokens(text[begin:], 190, CPU)
    with torch.inference_mode():
        expected = loader.nll(loader.load(folder / "weights.npz"), ids, targets).mean()
    assert dense["loss"] == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(ValueError, match="--measure second: a text of 400 tokens; accepted: 401 or more"):
        model.halves(text, 200, "second")
    assert model.halves(text, 200, "first")[1] is text


@pytest.mark.slow
def test_parts_of_a_model(no_gpu_needed, small_llama, folder):
    """Alone a part leaves the others' columns out; an error is the same whatever S2O did in the layers before."""
    rows = {}
    for part in model.PARTS:
        args = model.parse(arguments(folder, "--lengths", "300", "--parts", part, "--base", "segment=64,tau=9"))
        rows[part] = model.run(args, lambda *told: None)[2]
    assert ["loss" in rows[part] for part in model.PARTS] == [True, False, False]
    assert ["rel_l2_by_layer" in rows[part] for part in model.PARTS] == [False, True, False]
    assert ["attention_ms" in rows[part] for part in model.PARTS] == [False, False, True]


def test_errors_are_those_of_dense_inputs(torch, no_gpu_needed, small_llama, folder):
    """The second layer's, from q, k and v that the loader's own code computes."""
    from _layer_errors import on_dense_trajectory, runs_of

    config = S2OConfig(segment=64, tau=100, block_m=16, block_n=16, tail="none")
    loader = _sources.module_of(str(folder / "loader.py"))
    weights = loader.load(folder / "weights.npz")
    seen: list = []
    original = loader.torch.einsum
    loader.torch = type("Seen", (), {"__getattr__": lambda _, name: getattr(torch, name)})()
    loader.torch.einsum = lambda text, *xs: (seen.append(xs), original(text, *xs))[1]
    ids, _ = small_llama.tokens(np.load(folder / "tokens.npy"), 300, CPU)
    with torch.inference_mode():
        loader.logits(weights, ids)
        llama = small_llama.load(loader, weights)
        dense, found = on_dense_trajectory(llama, ids, ["cudnn", config])
        _, of_some = on_dense_trajectory(llama, ids, ["cudnn", config], rows=100)
    assert dense["layer_numbers"] == [0, 1]
    for n in range(2):
        (q, k), (_, v) = seen[2 * n : 2 * n + 2]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k[:, ::2], v[:, ::2]))  # heads of a group have the same
        o, stats = s2o_attention(q, k, v, config=config, return_stats=True)
        exact = _exact.dense(q, k, v)
        errors = _exact.by_row(o, exact)
        o_some, exact_some = (torch.cat([x[:, :, run] for run in runs_of(300, 100)], 2) for x in (o, exact))
        of_some_rows = _exact.pooled(_exact.sums(o_some, exact_some))["rel_l2"]
        assert of_some["rel_l2_by_layer"][n] == pytest.approx(of_some_rows, rel=1e-3) != found["rel_l2_by_layer"][n]
        assert found["density_by_layer"][n] == stats.density
        assert found["row_p99_by_layer"][n] == pytest.approx(np.quantile(errors, 0.99), rel=1e-3)
        assert found["rows_above_half_by_layer"][n] == pytest.approx(np.mean(errors > 0.5), abs=0.002)
    assert max(found["rows_above_half_by_layer"]) > 0


@given(st.integers(1, 2000), st.none() | st.integers(1, 3000))
@example(63, 62)
@example(65, 64)
def test_rows_that_stand_for_all(seqlen, rows):
    pytest.importorskip("torch")
    from _layer_errors import RUNS, runs_of

    runs = runs_of(seqlen, rows)
    seen = [i for run in runs for i in range(seqlen)[run]]
    assert seen == sorted({*seen}) and set(seen) <= set(range(seqlen))
    if rows is None or rows >= seqlen:
        assert len(seen) == seqlen
    else:
        assert rows - RUNS < len(seen) <= rows
        assert max(np.diff([-1, *seen, seqlen])) <= 2 * seqlen / min(RUNS, rows) + 1  # they are spread evenly


def test_timings_take_turns(torch, no_gpu_needed, small_llama, folder, monkeypatch):
    """Of a prefill each, in the given order again and again; the first rounds do not count."""
    import _turns

    loader = _sources.module_of(str(folder / "loader.py"))
    llama = small_llama.load(loader, loader.load(folder / "weights.npz"))
    ids, _ = small_llama.tokens(np.load(folder / "tokens.npy"), 100, CPU)
    order: list = []
    timed = _turns._timed

    def noted(model, ids, kind):
        order.append(kind)
        return [scale * x for x, scale in zip(timed(model, ids, kind), (1, len(order)), strict=True)]

    monkeypatch.setattr(_turns, "_timed", noted)
    with torch.inference_mode():
        (first, part), (second, other) = _turns.in_turns(llama, ids, ["cudnn", "flash2"], repeats=3, warmup=1)
    assert order == ["cudnn", "flash2"] * 4
    assert (first, part, second, other) == (5, 2 * 5, 5, 2 * 6)  # of the third to eighth


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
def test_model_on_a_gpu(small_llama, folder):
    text = LOADER.replace("torch.from_numpy(z[name])", "torch.from_numpy(z[name]).bfloat16().cuda()")
    (folder / "loader.py").write_text(text.replace("def nll", "def other"))
    rows = rows_on_a_gpu(
        folder / "m.json", "model.py", *arguments(folder)[:2], "--lengths", 390, "--set", "tau=0",
    )  # fmt: skip
    assert [row["attention"] for row in rows] == ["cudnn", "flash2", "s2o", "s2o"] * 2
    for row in rows:
        assert row["worst_rel_l2"] < 0.02
        assert abs(row["loss_difference"]) < 0.02
        assert row["attention_ms"] > 0
        assert row["prefill_ms"] > 0
