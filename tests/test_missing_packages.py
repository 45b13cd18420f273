"""Benchmarks that lack a package say which, and what brings it, in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from benchmark_modules import BENCHMARKS

from s2o_cupy.extras import remedy

# isort: split
import _missing


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("script", "without", "package"),
    [
        ("speed", ("cupy", "torch"), "CuPy"), ("host", ("cupy",), "CuPy"), ("lists", ("cupy",), "CuPy"),
        ("nsa", ("torch",), "PyTorch"), ("many_gpus", ("torch",), "PyTorch"),
    ],
)  # fmt: skip
def test_a_script_says_what_it_lacks(script, without, package):
    code = f"""
import runpy, sys
for name in {without!r}:
    sys.modules[name] = None
sys.path.insert(0, ".")
sys.argv = ["{script}.py"]
runpy.run_path("{script}.py", run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stdout == ""
    (said,) = result.stderr.splitlines()
    assert said.startswith(f"{script}.py: needs {package} (") and said.endswith(f"remedy: {remedy(package)}")


def test_what_is_said():
    assert _missing.said(ValueError("torch")) is None
    assert _missing.said(ModuleNotFoundError("No module named 'nothing'", name="nothing")) is None
    said = _missing.said(ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"))
    assert said == f"needs PyTorch (No module named 'torch.nn'); remedy: {remedy('PyTorch')}"
    complete = "it needs JAX; remedy: this"
    assert _missing.said(ImportError(complete, name="jax")) == complete


def test_a_folder_without_a_tokenizer(tmp_path):
    pytest.importorskip("transformers")
    import _pretrained

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SystemExit, match="--hugging-face: .* has no tokenizer that transformers can read"):
        _pretrained.tokenizer(str(tmp_path))
