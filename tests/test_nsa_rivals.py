"""benchmarks/nsa.py --rivals: what it takes, and, on the CPU with made-up rivals in checkouts of their own, what it
reports."""

from __future__ import annotations

import json
import sys

import pytest
from benchmarks_on_cpu import CPU, Event

pytest.importorskip("torch")

# isort: split
import _common
import _nsa_beside
import _nsa_rivals
import nsa

FSA = """
from s2o_cupy.nsa import nsa_compress, nsa_select, selected_attention
from torch import autograd

class Selected(autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, blocks):
        ctx.save_for_backward(q, k, v)
        bhsd = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
        return selected_attention(*bhsd, blocks[None])[0].transpose(0, 1).contiguous() * SCALE

    @staticmethod
    def backward(ctx, do):
        return (*map(lambda x: x * 0, ctx.saved_tensors), None)

def FSA_topk_sparse_attention(q, k, v, blocks, block, cu, scale):
    assert block == 64 and cu.tolist() == [0, len(q)] and scale is None
    return Selected.apply(q, k, v, blocks)

class reduce_kernel:
    src = "lse_ptrs = (lse_ptr + pid_q_j * stride_lse_n,)"
"""
FSA_OTHERS = """
import torch
from fsa.ops.FSA_topk_sparse_attention import nsa_compress, nsa_select

def avgpool_compress(x, w, cu, length, stride, pe):
    y = nsa_compress(x.transpose(0, 1)[None], length, stride)[0].transpose(0, 1)
    return y, torch.tensor([0, len(y)])

def compressed_attention(q, k, v, length, stride, block, top, cu, cu_k, longest, longest_k, scale, *_, **rest):
    q, k = (x.detach().transpose(0, 1)[None].contiguous() for x in (q, k))
    return q[0].transpose(0, 1), nsa_select(q, k)[0]

topk_sparse_attention = None
"""


@pytest.fixture
def fsa(tmp_path, monkeypatch):
    """A checkout; its factor, which a right one has as 1."""

    def made(scale=1):
        root = tmp_path / "fsa_checkout"
        for name, text in {
            "fsa/ops/__init__.py": "",
            "fsa/ops/FSA_topk_sparse_attention.py": FSA.replace("SCALE", str(scale)),
            "nsa_ref/ops/__init__.py": FSA_OTHERS,
            "nsa_ref/ops/weighted_pool.py": "",
            "COMMIT": "abc\n",
        }.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    monkeypatch.setattr(sys, "path", [*sys.path])
    yield made
    for name in [x for x in sys.modules if x.split(".")[0] in ("fsa", "nsa_ref", "fla")]:
        del sys.modules[name]


@pytest.fixture
def run(monkeypatch, torch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_common, "provenance", lambda: {"commit": "here"})

    def run(*arguments):
        path = tmp_path / "beside.json"
        sizes = ["--lengths", "200", "--groups", "2", "--kv-heads", "2", "--head-dim", "16", "--repeats", "2"]
        nsa.beside(nsa.parse([*sizes, "--json", str(path), *arguments]), CPU)
        return json.loads(path.read_text()), capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it names none; accepted: NAME=FOLDER,..., NAME fsa or fla, each once"),
        ("other=/tmp", "other=/tmp; accepted: NAME=FOLDER"),
        ("fsa", "fsa; accepted: NAME=FOLDER"),
        ("fsa=/nowhere", "fsa=/nowhere: it has no fsa/ops/FSA_topk_sparse_attention.py and nsa_ref"),
        ("fla=/nowhere", "fla=/nowhere: it has no fla/ops/nsa/parallel.py, or native_sparse_attention/ops/parallel.py"),
    ],
)
def test_rivals_that_are_not_accepted(text, told, capsys):
    with pytest.raises(SystemExit):
        nsa.parse(["--rivals", text])
    assert f"--rivals: {told}" in capsys.readouterr().err


def test_an_input_needs_rivals(capsys):
    with pytest.raises(SystemExit):
        nsa.parse(["--input", "trace"])
    assert "--input trace; accepted: random, and others with --rivals" in capsys.readouterr().err


def test_rows(fsa, run):
    result, out = run("--rivals", f"fsa={fsa()}")
    assert "q, k and v are random" in out
    assert (result["rivals"], result["input"]) == ({"fsa": "abc"}, "random")
    assert set(result["includes"]) == {"s2o", "fsa"} and "rivals" not in result["settings"]
    rows = {(row["part"], row["pass"]): row for row in result["rows"]}
    assert len(rows) == 4 and all(row["x_fsa"] == row["fsa_ms"] / row["s2o_ms"] for row in rows.values())
    row = rows["selected", "forward"]
    assert (row["length"], row["group"], row["kv_heads"], row["head_dim"]) == (200, 2, 2, 16)
    assert row["fsa_same"] and row["fsa_o"] == 0 and max(row["s2o_error"], row["fsa_error"]) < 0.01
    backward = rows["selected", "forward+backward"]
    assert not backward["fsa_same"] and backward["fsa_dq"] == backward["fsa_dk"] == backward["fsa_dv"] == 1
    whole = rows["whole", "forward"]
    assert whole["window_of_rivals"] == "none" and whole["fsa_blocks"] == 1 and whole["fsa_compressed"] > 0.1
    assert any("window of the rivals" in line for line in result["told"])


def test_another_output_is_told(fsa, run):
    row = run("--rivals", f"fsa={fsa(scale=1.1)}")[0]["rows"][0]
    assert not row["fsa_same"] and abs(row["fsa_o"] - 0.1) < 0.01


def test_what_fails_is_told_and_left_out(fsa, run, tmp_path):
    (tmp_path / "fla" / "ops" / "nsa").mkdir(parents=True)
    (tmp_path / "fla" / "ops" / "nsa" / "parallel.py").write_text("import triton_that_is_not_there")
    folder = fsa()
    kernels = folder / "nsa_ref" / "ops" / "__init__.py"
    kernels.write_text(FSA_OTHERS.replace("return q[0]", "raise RuntimeError('out of luck'); return q[0]"))
    result, out = run("--rivals", f"fsa={folder},fla={tmp_path}")
    assert "fla left out: its import failed, ModuleNotFoundError: No module named 'triton_that" in out
    assert "whole forward: fsa failed: RuntimeError: out of luck" in out
    assert ["fsa_ms" in row for row in result["rows"]] == [True, True, False, False]
    assert all("s2o_ms" in row for row in result["rows"])


def test_none_is_left(run, tmp_path):
    (tmp_path / "fla" / "ops" / "nsa").mkdir(parents=True)
    (tmp_path / "fla" / "ops" / "nsa" / "parallel.py").write_text("1 / 0")
    with pytest.raises(SystemExit, match="--rivals: none is left to time"):
        run("--rivals", f"fla={tmp_path}")


def test_heads_of_an_input(torch):
    args = nsa.parse(["--kv-heads", "2"])
    q = torch.arange(8.0).reshape(1, 8, 1, 1)
    k = torch.arange(4.0).reshape(1, 4, 1, 1)

    def heads(group):
        q_, k_, _, borrowed = _nsa_beside._heads(args, (q, k, k), 1, group, CPU)
        return q_.flatten().tolist(), k_.flatten().tolist(), borrowed

    assert heads(2) == ([0, 1, 4, 5], [0, 2], False)
    assert heads(4) == ([0, 1, 2, 3, 4, 5, 6, 7], [0, 2], True)


def test_query_heads_are_padded_for_fla(torch):
    q, k, v = (torch.randn(1, heads, 130, 16) for heads in (6, 2, 2))
    x = _nsa_rivals.Inputs.of(q, k, v, nsa.SETTINGS["64"])
    side = _nsa_rivals.Fla(None, x, None)
    assert side.leaves[0].shape == (1, 130, 32, 16) and side.leaves[3].shape == (1, 130, 32)
    torch.testing.assert_close(side.bhsd(side.leaves[0]), q)
    torch.testing.assert_close(side.bhsd(side.leaves[1]), k)
    with pytest.raises(ValueError, match="fla: first 0 and local 1; accepted: 1 and 2"):
        _nsa_rivals.Fla(None, _nsa_rivals.Inputs.of(q, k, v, nsa.NSAConfig(first=0, local=1)), None)


def test_a_pointer_of_a_kernel_is_mended(fsa):
    _nsa_rivals.Fsa.load(fsa())
    module = sys.modules["fsa.ops.FSA_topk_sparse_attention"]
    assert module.reduce_kernel.src == "lse_ptrs = lse_ptr + pid_q_j * stride_lse_n"
