"""What is missing is named with the extra that brings it, in one way everywhere."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

import s2o_cupy
from s2o_cupy.extras import EXTRAS, remedy, with_extra

PACKAGE = Path(s2o_cupy.__file__).parent
SETUP = PACKAGE.parent / "setup.cfg"
# How setup.cfg spells what a user calls otherwise.
REQUIRED = {"CuPy": "cupy-cuda12x", "NVRTC": "nvidia-cuda-nvrtc-cu12", "PyTorch": "torch", "JAX": "jax"}


@pytest.mark.skipif(not SETUP.exists(), reason="setup.cfg is in a source checkout only")
@pytest.mark.parametrize("package", EXTRAS)
def test_the_extra_brings_the_package(package):
    setup = configparser.RawConfigParser()
    setup.read(SETUP, encoding="utf-8")
    brought = setup["options.extras_require"][EXTRAS[package]].split()
    assert any(x.split(">")[0] == REQUIRED.get(package, package) for x in brought)
    # No index has s2o_cupy yet: its extras are those of a checkout.
    assert remedy(package).startswith(f'pip install ".[{EXTRAS[package]}]" in a checkout of s2o_cupy')


def test_no_other_place_says_how_to_install():
    saying = [x for x in PACKAGE.rglob("*.py") if "pip install" in x.read_text(encoding="utf-8")]
    # versions.py: of servers, which are on an index.
    assert {x.relative_to(PACKAGE).as_posix() for x in saying} == {"extras.py", "integrations/versions.py"}


def test_what_is_not_missing_is_no_error():
    with with_extra("a module", "PyTorch"):
        import json  # noqa: F401
    said = r'^a module needs JAX: .*; remedy: pip install "\.\[jax\]"'
    with pytest.raises(ImportError, match=said) as error, with_extra("a module", "JAX"):
        raise ModuleNotFoundError("No module named 'jax'", name="jax")
    assert error.value.name == "jax"


def test_integrations_without_their_frameworks():
    """In a process that has none of them."""
    needs = {
        **dict.fromkeys(("torch", "torch_gather", "drop_in", "nsa", "distributed"), "PyTorch"),
        **dict.fromkeys(("serving", "vllm", "sglang"), "PyTorch"),
        **dict.fromkeys(("transformers", "capture", "model_tools", "text_ids"), "transformers"),
        "jax": "JAX", "diffusers": "diffusers",
    }  # fmt: skip
    code = f"""
import importlib, sys
for name in ("torch", "jax", "transformers", "diffusers"):
    sys.modules[name] = None
for name in {list(needs)!r}:
    try:
        importlib.import_module("s2o_cupy.integrations." + name)
    except ImportError as error:
        print(error)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    for (name, package), said in zip(needs.items(), result.stdout.splitlines(), strict=True):
        assert said.startswith(f"s2o_cupy.integrations.{name} needs {package}: "), said
        assert said.endswith(f"remedy: {remedy(package)}")
