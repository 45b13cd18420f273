"""benchmarks/layer.py: what a layer attends with, and, on the CPU in the place of a GPU, what it reports."""

from __future__ import annotations

import json

import pytest
from benchmarks_on_cpu import pretend_a_gpu, rows_on_a_gpu
from conftest import has_gpu

# isort: split
import _common
import layer


@pytest.fixture
def small_llama(torch):
    pytest.importorskip("transformers", "5.16")
    import _small_llama

    return _small_llama


def test_a_layer_attends_with_what_it_is_given(torch, small_llama):
    one = small_llama.Layer((64, 4, 2), 96, 60, torch.float32, "cpu")
    assert float(one.hidden.std()) > 0.5
    q, k, v = (torch.randn(1, h, 60, 16) for h in (4, 2, 2))
    q, k, v = (small_llama.as_in_a_layer(x) for x in (q, k, v))
    assert q.transpose(1, 2).is_contiguous()
    with torch.inference_mode():
        alone = one.attention("sdpa", q, k, v)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(alone, expected.transpose(1, 2))
        plain = one("sdpa")
        with small_llama.hooked("sdpa", small_llama.instead(q, k, v)):
            other = one("sdpa")
        with small_llama.hooked("sdpa", lambda *args, **options: (alone, None)):
            torch.testing.assert_close(one("sdpa"), other)
        with small_llama.hooked("sdpa", small_llama.skip):
            assert one("sdpa").shape == plain.shape
        assert float((other - plain).abs().max()) > 1e-3
        torch.testing.assert_close(one("sdpa"), plain)  # no hook stays


def test_layer(monkeypatch, small_llama, tmp_path):
    pretend_a_gpu(monkeypatch, [(layer, "run_layer")])
    args = layer.parse([
        "--layer", "64x4x2", "--intermediate", "96", "--lengths", "300", "--set", "tau=0,rank=mean,segment=64",
        "--set", "tau=1000,rank=mean,segment=64", "--error", "--json", str(tmp_path / "l.json"),
    ])  # fmt: skip
    rows = layer.run(args, lambda *told: None)
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
    assert len(_common.table(rows, layer.COLUMNS).splitlines()) == 6
    args.input = "trace"
    with pytest.raises(SystemExit, match="accepted: an input with {'heads': 4, 'kv_heads': 2, 'head_dim': 16}"):
        layer.run(args, lambda *told: None)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
def test_layer_on_a_gpu(small_llama, tmp_path):
    rows = rows_on_a_gpu(
        tmp_path / "l.json", "layer.py", "--layer", "1024x8x2", "--intermediate", 2048, "--lengths", 16384,
        "--set", "tau=0", "--error",
    )  # fmt: skip
    for row in rows:
        parts_ms = row["attention_ms"] + row["rest_ms"]
        assert 0.3 * parts_ms < row["layer_ms"] < 10 * parts_ms  # others may be on the GPU in between
        is_dense = row["attention"] != "s2o" or row is rows[-1]
        # Dense outputs are rounded to bfloat16, 2^-9 each time; the default leaves out what random weights look at.
        assert row["rel_l2"] < (0.01 if is_dense else 0.2)
        assert row["peak_gib"] > 0.1
    assert rows[-1]["rel_l2"] < 0.01
