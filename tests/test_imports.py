"""Who imports whom: import is light, the reference needs no GPU, the GPU path needs no reference."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import s2o_cupy

PACKAGE = Path(s2o_cupy.__file__).parent
GPU_PATH = (
    "attention", "arguments", "operand", "place", "streams", "lazy_cupy", "problem", "spec", "stats", "pipeline",
    "replay", "plan", "rounds", "kernels", "varlen", "paged",
    *(f"frameworks/{path.stem}" for path in sorted(PACKAGE.glob("frameworks/*.py"))),
)  # fmt: skip
HEAVY = ("cupy", "torch", "jax", "matplotlib", "transformers")


def loaded_after(code: str) -> set[str]:
    """Top-level and s2o_cupy modules that a fresh interpreter has loaded after ``code``."""
    report = "import sys; print(*(m for m in sys.modules if '.' not in m or m.startswith('s2o_cupy.')))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def imports_of(path: Path) -> set[str]:
    """What a source file imports anywhere, relative imports with their dots; from a import b is a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module + "." if node.module else "")
            found |= {base + alias.name for alias in node.names}
    return found


def test_import_is_light():
    loaded = loaded_after("import s2o_cupy; s2o_cupy.s2o_attention; s2o_cupy.S2OStats")
    assert loaded.isdisjoint(HEAVY)
    assert "s2o_cupy.cuda.pipeline" not in loaded
    assert "s2o_cupy.reference" not in loaded


def test_integrations_import_only_their_framework():
    loaded = loaded_after("from s2o_cupy.integrations import head_groups, zigzag")
    assert loaded.isdisjoint(HEAVY)
    for module, framework in (("torch", "torch"), ("distributed", "torch"), ("transformers", "transformers")):
        pytest.importorskip(framework, {"transformers": "5.16"}.get(framework))
        loaded = loaded_after(f"import s2o_cupy.integrations.{module}")
        assert loaded & set(HEAVY) == {framework, "torch"}


@pytest.mark.parametrize("folder", [".", "frameworks"])
def test_nothing_else_imports_the_integrations(folder):
    for path in (PACKAGE / folder).glob("*.py"):
        assert not any("integrations" in name.split(".") for name in imports_of(path)), path


@pytest.mark.parametrize("module", ["place", "lazy_cupy", "streams"])
def test_what_frameworks_are_built_on_does_not_import_them(module):
    """So that any of them can come first."""
    assert not any("frameworks" in name.split(".") for name in imports_of(PACKAGE / f"{module}.py"))


def test_a_framework_is_imported_by_its_own_file_only():
    """CuPy by lazy_cupy, which all share."""
    for path in PACKAGE.glob("frameworks/*.py"):
        heavy = {name.split(".")[0] for name in imports_of(path)} & set(HEAVY)
        assert heavy <= {path.stem} - {"cupy"}, path


def test_a_cpu_call_loads_no_gpu_library():
    code = """
import numpy, s2o_cupy
x = numpy.ones((1, 1, 4, 8), numpy.float32)
s2o_cupy.s2o_attention(x, x, x, return_stats=True)[1].density_per_head
"""
    loaded = loaded_after(code)
    assert loaded.isdisjoint(HEAVY)
    assert "s2o_cupy.reference" in loaded
    assert "s2o_cupy.cuda.pipeline" not in loaded


def test_the_reference_loads_no_gpu_library():
    loaded = loaded_after("import s2o_cupy.reference.s2o, s2o_cupy.reference.dense")
    assert loaded.isdisjoint(HEAVY)
    assert "reference" not in loaded  # never a second, top-level copy


def test_the_reference_imports_only_the_specification():
    import s2o_cupy.reference

    for path in Path(s2o_cupy.reference.__file__).parent.glob("*.py"):
        outside = {name for name in imports_of(path) if name.startswith("..")}
        assert all(name.startswith("..spec") for name in outside), path
        assert not any(name.split(".")[0] in HEAVY for name in imports_of(path)), path


@pytest.mark.parametrize("module", GPU_PATH)
def test_the_gpu_path_does_not_import_the_reference(module):
    assert not any("reference" in name.split(".") for name in imports_of(PACKAGE / f"{module}.py"))


def test_no_module_imports_a_top_level_reference():
    for path in PACKAGE.rglob("*.py"):
        assert not any(name.split(".")[0] in ("reference", "raw_kernels") for name in imports_of(path)), path


def test_kernels_and_reference_are_found():
    """From a source checkout and installed alike."""
    from importlib import resources

    import s2o_cupy.reference as reference

    assert reference.__name__ == "s2o_cupy.reference"
    names = [entry.name for entry in resources.files("s2o_cupy.raw_kernels").iterdir()]
    assert any(name.endswith((".cu", ".cuh")) for name in names)


def test_public_names():
    assert s2o_cupy.__version__.count(".") == 2
    for name in ("s2o_attention", "s2o_attention_varlen", "merge_states", "S2OConfig", "S2OStats", "S2OError"):
        assert name in s2o_cupy.__all__
        assert getattr(s2o_cupy, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = s2o_cupy.nothing
    assert (PACKAGE / "py.typed").exists()


def test_diff_is_a_function():
    import s2o_cupy.tools.diffing

    assert callable(s2o_cupy.diff)
    assert s2o_cupy.diff is s2o_cupy.tools.diffing.diff
