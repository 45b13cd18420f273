"""Who imports whom: import is light, the reference needs no GPU, the GPU path needs no reference."""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import s2o_cupy
import s2o_cupy.raw_kernels
import s2o_cupy.reference

PACKAGE = Path(s2o_cupy.__file__).parent
REFERENCE = Path(s2o_cupy.reference.__file__).parent
HEAVY = ("cupy", "torch", "jax", "matplotlib", "transformers", "diffusers", "sglang", "vllm")
# Floors of the house: a room imports from its own floor's files and from those below, never from above.
FLOORS = (
    {"errors", "nearest"},
    {"by_head", "extras"},
    {"spec", "caches"},
    {"problem"},
    {"arrays"},
    {"plan"},
    {"selection"},
    {"cuda"},
    {"stats", "merge"},
    {"schedules"},
    {"api"},
    {"methods", "nsa"},
    {"tools"},
    {"integrations"},
)
ENTRANCES = {"__init__", "__main__", "_source_tree"}  # of the package: they may import any room


def loaded_after(code: str) -> set[str]:
    """Top-level and s2o_cupy modules that a fresh interpreter has loaded after ``code``."""
    report = "import sys; print(*(m for m in sys.modules if '.' not in m or m.startswith('s2o_cupy.')))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@functools.cache
def imports_of(path: Path) -> set[str]:
    """What a source file imports anywhere but for types alone, relative imports with their dots; from a import b is
    a.b."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for of_types in (x for x in tree.body if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING"):
        of_types.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module + "." if node.module else "")
            found |= {base + alias.name for alias in node.names}
    return found


@functools.cache
def files() -> dict[str, Path]:
    """Dotted names in the package, without its own, and their files."""
    found = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def package_imports(name: str, path: Path) -> set[str]:
    """Files of the package that one imports anywhere, also inside functions."""
    known = files()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for imported in imports_of(path):
        dots = len(imported) - len(imported.lstrip("."))
        parts = imported[dots:].split(".")
        if dots == 0:
            if parts[0] != "s2o_cupy":
                continue
            target = parts[1:]
        else:
            target = package[: len(package) - dots + 1] + parts
        while target and ".".join(target) not in known:
            target = target[:-1]
        if target:
            found.add(".".join(target))
    return found - {name}


def room(name: str) -> str:
    return name.split(".")[0]


def test_every_room_has_a_floor():
    rooms = {room(name) for name in files()} - ENTRANCES
    assert rooms == set().union(*FLOORS)


def test_imports_go_down():
    """From api down to spec. What only says what a type is, under TYPE_CHECKING, counts too."""
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    upward = [
        f"{name} imports {target}"
        for name, path in files().items()
        if room(name) not in ENTRANCES
        for target in package_imports(name, path)
        if room(target) != room(name) and (room(target) in ENTRANCES or floor[room(target)] > floor[room(name)])
    ]
    allowed = {name for name in upward if name.endswith(" imports __init__")}
    assert not set(upward) - allowed


FEATURES = {"methods", "nsa", "integrations", "tools"}


def test_the_core_imports_no_feature():
    """Not inside functions either, and the package's entrance loads them only for who asks."""
    for name, path in files().items():
        if room(name) in FEATURES | ENTRANCES - {"__init__"}:
            continue
        found = {room(target) for target in package_imports(name, path)} & FEATURES
        assert not found or (name == "__init__" and "TYPE_CHECKING" in path.read_text(encoding="utf-8")), name
    code = """
import numpy, s2o_cupy
x = numpy.ones((1, 1, 4, 8), numpy.float32)
s2o_cupy.s2o_attention(x, x, x, return_stats=True)[1].density_per_head
x = numpy.ones((1, 1, 128, 8), numpy.float32)
s2o_cupy.gather_attention(x, x, x, s2o_cupy.Schedule.from_block_mask(numpy.ones((1, 1, 1, 1), bool), segment=128))
"""
    loaded = {name.split(".")[1] for name in loaded_after(code) if name.startswith("s2o_cupy.")}
    assert not loaded & FEATURES


def test_no_circle_of_files():
    """Not even one that imports inside functions would hide. Types may know of each other."""
    imports = {
        name: {x for x in package_imports(name, path) if (PACKAGE / f"{x.replace('.', '/')}.py").exists()}
        for name, path in files().items()
        if path.name != "__init__.py"
    }
    while imports:
        ends = {name for name, targets in imports.items() if not targets & imports.keys()}
        assert ends, f"a circle among {sorted(imports)}"
        imports = {name: targets for name, targets in imports.items() if name not in ends}


def test_import_is_light():
    loaded = loaded_after("import s2o_cupy; s2o_cupy.s2o_attention; s2o_cupy.S2OStats")
    assert loaded.isdisjoint(HEAVY)
    assert "s2o_cupy.cuda.pipeline" not in loaded
    assert "s2o_cupy.reference" not in loaded


@pytest.mark.slow
def test_integrations_import_only_their_framework():
    """One after the other in one interpreter, as PyTorch takes seconds."""
    loaded = loaded_after("from s2o_cupy.integrations import head_groups, plugins, zigzag")
    assert loaded.isdisjoint(HEAVY)
    of_servers = {f"s2o_cupy.integrations.{name}" for name in ("serving", "sglang", "vllm")}
    assert loaded.isdisjoint({*of_servers, "s2o_cupy.cuda.pipeline"})  # docs/servers.md says so
    if importlib.util.find_spec("jax"):
        assert loaded_after("import s2o_cupy.integrations.jax") & set(HEAVY) == {"jax"}
    pytest.importorskip("torch")
    expected = {"torch": "torch", "distributed": "torch", "transformers": "torch transformers"}
    if not importlib.util.find_spec("transformers"):
        del expected["transformers"]
    report = f"print(*sorted({set(HEAVY)} & sys.modules.keys()))"
    code = "\n".join(f"import sys, s2o_cupy.integrations.{module}; {report}" for module in expected)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == list(expected.values())


def test_where_a_name_is_is_known_without_a_framework():
    loaded = loaded_after("import s2o_cupy; assert not hasattr(s2o_cupy, 'register') and not hasattr(s2o_cupy, 'vllm')")
    assert loaded.isdisjoint(HEAVY)


def test_a_framework_is_imported_by_its_own_file_only():
    """CuPy by lazy_cupy, which all share."""
    for path in PACKAGE.glob("arrays/frameworks/*.py"):
        heavy = {name.split(".")[0] for name in imports_of(path)} & set(HEAVY)
        assert heavy <= {path.stem} - {"cupy"}, path


def test_near_names_are_found_in_one_file():
    assert [name for name, path in files().items() if "difflib" in imports_of(path)] == ["nearest"]


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
    """Published methods import their configurations too."""
    for path in REFERENCE.rglob("*.py"):
        in_folder = path.parent != REFERENCE
        up = "..." if in_folder else ".."  # out of the reference
        outside = {name for name in imports_of(path) if name.startswith(up)}
        assert all(name.startswith((f"{up}spec", "...methods.")) for name in outside), path
        assert not any(name.split(".")[0] in HEAVY for name in imports_of(path)), path


def test_the_gpu_path_does_not_import_the_reference():
    """Only the CPU backend and the tools do."""
    for name, path in files().items():
        if any("reference" in x.split(".") for x in imports_of(path)):
            assert name in ("api.on_host", "nsa.on_host") or room(name) == "tools", name


def test_no_module_imports_a_top_level_reference():
    for path in PACKAGE.rglob("*.py"):
        assert not any(name.split(".")[0] in ("reference", "raw_kernels") for name in imports_of(path)), path


def test_kernels_and_reference_are_found():
    """From a source checkout and installed alike."""
    from importlib import resources

    assert s2o_cupy.reference.__name__ == "s2o_cupy.reference"
    assert resources.files("s2o_cupy.raw_kernels").joinpath("common/geometry.cuh").is_file()


def test_another_checkout_lends_nothing(tmp_path):
    """One that is installed as editable has a finder of its own for the names of these two."""
    (tmp_path / "__init__.py").touch()
    finder = f"""
import importlib.util, sys

class Other:
    def find_spec(name, path=None, target=None):
        if name in ("s2o_cupy.raw_kernels", "s2o_cupy.reference"):
            return importlib.util.spec_from_file_location(name, {str(tmp_path / "__init__.py")!r})

sys.meta_path.append(Other)
import s2o_cupy.raw_kernels, s2o_cupy.reference
print(s2o_cupy.raw_kernels.__file__, s2o_cupy.reference.__file__, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", finder], capture_output=True, text=True, check=True)
    assert [Path(x).parent for x in done.stdout.splitlines()] == [REFERENCE.parent / "raw_kernels", REFERENCE]
    assert REFERENCE.parent in (PACKAGE, PACKAGE.parent)


def test_a_checkout_is_no_part_of_the_package():
    """There is one S2OConfig: no second copy of a module under another name."""
    from importlib.util import find_spec

    for name in ("s2o_cupy", "tests", "benchmarks", "docs"):
        assert find_spec(f"s2o_cupy.{name}") is None


def test_public_names():
    assert s2o_cupy.__version__.count(".") == 2
    functions = ("s2o_attention", "s2o_attention_varlen", "gather_attention", "gather_attention_paged", "merge_states")
    for name in (*functions, "Schedule", "GatherStats", "S2OConfig", "S2OStats", "S2OError"):
        assert name in s2o_cupy.__all__
        assert getattr(s2o_cupy, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = s2o_cupy.nothing
    assert (PACKAGE / "py.typed").exists()


def test_diff_is_a_function():
    import s2o_cupy.tools.diffing

    assert callable(s2o_cupy.tools.diff)
    assert s2o_cupy.tools.diff is s2o_cupy.tools.diffing.diff
