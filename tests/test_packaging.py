"""Wheel, sdist, pip install and pip install -e carry the same package: kernels, reference and data inside it."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"s2o_cupy": "s2o_cupy", "raw_kernels": "s2o_cupy/raw_kernels", "reference": "s2o_cupy/reference"}
CARRIED = (".py", ".cu", ".cuh", ".typed", ".npz", ".md")

pytestmark = pytest.mark.skipif(not (ROOT / "setup.cfg").exists(), reason="needs a source checkout")


def sources(archive_layout: bool) -> set[str]:
    """Files of the three folders, by their place in the source tree or in the installed package."""
    return {
        f"{target if archive_layout else folder}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in CARRIED and "__pycache__" not in path.parts
    }


def test_one_version_of_one_day():
    """In the package, the changelog's newest release and the citation."""
    import s2o_cupy

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    version, day = re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", headings[1]).groups()
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", citation, re.MULTILINE))
    assert (s2o_cupy.__version__, cited) == (version, {"version": version, "date-released": day})


def test_workflows_run_on_the_promised_pythons():
    """And what they run is there."""
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    promised = re.findall(r"Python :: (3\.\d+)$", setup, re.MULTILINE)
    assert f"python_requires = >={promised[0]}" in setup
    tests, gpu = ((ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8") for name in ("tests", "gpu"))
    assert sorted(re.findall(r'"(3\.\d+)"', tests)) == sorted(promised)
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    made = re.findall(r"run: make (\S+)", tests + gpu)
    assert {"test", "test-all", "memcheck", "torture"} <= set(made) <= set(targets)


def run(*command: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def has_backend() -> bool:
    """What pyproject.toml asks for is installed here, so that building need not fetch it into places of its own."""
    try:
        return int(metadata.version("setuptools").split(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel built from that sdist); skipped where the build backend cannot be fetched."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", *["--no-isolation"] * has_backend(), "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    log = result.stdout + result.stderr
    if "No matching distribution found for setuptools" in log:
        pytest.skip("pip reaches no package index to fetch setuptools from")
    assert result.returncode == 0, log
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def test_wheel(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
        told = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
        entry_points = archive.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode()
    installed = {name for name in names if ".dist-info/" not in name}
    assert installed == sources(archive_layout=True)  # nothing left out, and nothing else, tests for example
    assert {name.split("/")[0] for name in installed} == {"s2o_cupy"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in told
    assert "s2o = s2o_cupy.__main__:main" in entry_points
    base = {line for line in told.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line}
    assert {line.split()[1].split(">")[0].lower().replace("_", "-") for line in base} == {
        "numpy", "scipy", "ml-dtypes", "array-api-compat",
    }  # fmt: skip
    for extra in ("cuda12", "cuda13", "compile", "torch", "transformers", "plot", "test"):
        assert f"Provides-Extra: {extra}" in told


def test_metadata(built):
    """What a package index shows: links that lead somewhere from there, and an address in one place."""
    with zipfile.ZipFile(built[1]) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/METADATA"))
        told = email.message_from_bytes(archive.read(name))
    text = str(told.get_payload())
    assert told["Description-Content-Type"] == "text/markdown" and text.startswith("# s2o_cupy\n")
    links = re.findall(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)", text)
    assert links and all("".join(link).startswith("https://") for link in links)
    urls = dict(line.split(", ") for line in told.get_all("Project-URL"))
    assert {"Documentation", "Source", "Changelog", "Issues"} <= urls.keys()
    assert all(url.startswith(urls["Source"]) for url in urls.values())
    assert told["Requires-Python"] == ">=3.10" and told["Keywords"] and told["Summary"]


def test_sdist(built):
    with tarfile.open(built[0]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert sources(archive_layout=False) <= names
    tests = {
        path.relative_to(ROOT).as_posix()
        for kind in ("py", "c", "h", "md")
        for path in (ROOT / "tests").rglob(f"*.{kind}")
    }
    assert tests <= names
    assert {"LICENSE", "Makefile", "setup.cfg", "pyproject.toml", "CHANGELOG.md", ".ci/run", ".ci/setup"} <= names
    assert {"CITATION.cff", "CONTRIBUTING.md", "DESCRIPTION.md", "mkdocs.yml", "docs/site_pages.py"} <= names
    assert {"examples/tour.ipynb", ".github/ISSUE_TEMPLATE/bug.yml"} <= names
    assert not any("__pycache__" in name or ".egg-info/../" in name for name in names)


CHECK = """
import importlib.util, json, pathlib, sys
import numpy as np, s2o_cupy, s2o_cupy.reference, s2o_cupy.__main__
from importlib import resources
from s2o_cupy.tools import inputs
from s2o_cupy.plan import kernels
for name in ("reference", "raw_kernels", "tests"):
    assert importlib.util.find_spec(name) is None, name
headers = resources.files("s2o_cupy.raw_kernels").joinpath("common")
assert len([entry for entry in headers.iterdir() if entry.name.endswith(".cuh")]) > 2
q, k, v = inputs.builtin("trace", 300, dtype="float32")
assert np.isfinite(s2o_cupy.s2o_attention(q, k, v)).all()
print(pathlib.Path(s2o_cupy.__file__).parent)
"""


# `make test` itself installs the folder as editable.
@pytest.mark.parametrize("how", ["wheel", *(pytest.param(x, marks=pytest.mark.slow) for x in ("folder", "editable"))])
def test_installed(built, tmp_path, how):
    """In an environment of its own, whose other packages are those of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    what = {"wheel": [built[1]], "folder": [ROOT], "editable": ["-e", ROOT]}[how]
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", *what)

    ours = {path.name for path in site.iterdir()}
    assert not ours & {"reference", "raw_kernels", "tests", "examples", "data"}
    # Only now the dependencies, from a folder without any s2o_cupy in it.
    dependencies = tmp_path / "dependencies"
    dependencies.mkdir()
    here = Path(run(sys.executable, "-c", "import numpy; print(numpy.__file__)").strip()).parents[1]
    for entry in here.iterdir():
        if "s2o_cupy" not in entry.name and not entry.name.endswith(".pth"):
            (dependencies / entry.name).symlink_to(entry)
    (site / "dependencies.pth").write_text(str(dependencies))

    where = Path(run(python, "-c", CHECK, cwd=tmp_path).strip())
    assert where == (ROOT / "s2o_cupy" if how == "editable" else site / "s2o_cupy")
    script = tmp_path / "venv" / "bin" / "s2o"
    assert run(script, "--version", cwd=tmp_path).startswith("s2o_cupy ")
