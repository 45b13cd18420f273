"""What needs a process of its own: CUDA's first use, threads, forks, and the cache folder. On a GPU only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import has_gpu

import s2o_cupy

ROOT = Path(s2o_cupy.__file__).parents[1]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]

# A call with few and small kernels, and a digest of its result. Its first use of CUDA is in `call`.
CALL = """
import hashlib, os, sys
import numpy as np
from s2o_cupy import S2OConfig, s2o_attention
config = S2OConfig(segment=64, tau=0.05, block_m=64, block_n=64, path="portable", dense_up_to=0)
def call(seed=0):
    import cupy
    rng = np.random.default_rng(seed)
    q = cupy.asarray(rng.standard_normal((1, 2, 200, 16)).astype(np.float16))
    k, v = (cupy.asarray(rng.standard_normal((1, 1, 200, 16)).astype(np.float16)) for _ in range(2))
    o = s2o_attention(q, k, v, config=config)
    return hashlib.sha256(o.get().tobytes()).hexdigest()
"""


def run(code: str, **environment: str) -> list[str]:
    """Words that ``code`` prints after CALL, in a fresh interpreter."""
    inherited = {name: value for name, value in os.environ.items() if "_CACHE_" not in name}
    result = subprocess.run(
        [sys.executable, "-c", CALL + code],
        cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.split()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def expected(cache):
    """The digest, from a process that filled the cache folder."""
    (digest,) = run("print(call())", S2O_CACHE_DIR=str(cache))
    assert len(list(cache.iterdir())) >= 6  # the kernels of a call
    return digest


def test_the_cache_is_used(cache, expected):
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert run("print(call())", S2O_CACHE_DIR=str(cache)) == [expected]
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before


@pytest.mark.parametrize("how", ["emptied", "cut short", "overwritten", "one bit"])
def test_a_corrupt_cache_file_is_compiled_anew(cache, expected, tmp_path, how):
    corrupt = {}
    for path in cache.iterdir():
        data = bytearray(path.read_bytes())
        if how == "one bit":
            data[len(data) // 2] ^= 1
        changed = {"emptied": b"", "cut short": data[: len(data) // 2], "overwritten": b"x" * len(data)}
        corrupt[path.name] = bytes(changed.get(how, data))
        (tmp_path / path.name).write_bytes(corrupt[path.name])
    assert run("print(call())", S2O_CACHE_DIR=str(tmp_path)) == [expected]
    assert sum((tmp_path / name).read_bytes() != data for name, data in corrupt.items()) >= 6


def test_compiling_ahead_fills_the_cache_of_calls(expected, tmp_path):
    """With no more than the dtype and the head size of the calls to come; --arch is this GPU's own."""
    command = [sys.executable, "-m", "s2o_cupy", "compile", "--dtype", "float16", "--head-dim", "16"]
    environment = os.environ | {"S2O_CACHE_DIR": str(tmp_path)}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=600)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert run("print(call())", S2O_CACHE_DIR=str(tmp_path)) == [expected]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


UNCHANGED = """
before = dict(os.environ)
{0}
print(call(), before == dict(os.environ))
"""


@pytest.mark.parametrize("variable", ["CUPY_CACHE_DIR", "S2O_CACHE_DIR"])
def test_a_cache_folder_that_cannot_be_written(expected, variable):
    """/proc is there and takes no file, not even root's."""
    assert run(UNCHANGED.format(""), **{variable: "/proc"}) == [expected, "True"]


def test_a_cache_folder_that_cannot_be_made(expected, tmp_path):
    """CuPy cannot even be imported there, so it is imported by the library, for another framework's arrays. Its own
    kernels work too."""
    (tmp_path / "file").write_text("")
    code = """
from s2o_cupy.arrays.lazy_cupy import import_cupy
cupy = import_cupy()
assert (cupy.arange(5) * 2).get().tolist() == [0, 2, 4, 6, 8]
"""
    folder = str(tmp_path / "file" / "folder")
    assert run(UNCHANGED.format(code), CUPY_CACHE_DIR=folder) == [expected, "True"]
    assert (tmp_path / "file").read_text() == ""


def test_the_first_call_of_8_threads(expected, tmp_path):
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
ready = threading.Barrier(8)
def first(seed):
    ready.wait()
    return call(seed)
with ThreadPoolExecutor(8) as pool:
    digests = list(pool.map(first, [0, 1, 2, 3] * 2))
assert digests[:4] == digests[4:] == [call(seed) for seed in range(4)]
assert len(set(digests)) == 4
print(digests[0])
"""
    assert run(code, S2O_CACHE_DIR=str(tmp_path)) == [expected]


def test_a_fork_before_the_first_use_of_cuda(expected, cache):
    code = """
import multiprocessing
import cupy
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(*pool.map(call, [0, 0, 0]))
print(call())
"""
    assert run(code, S2O_CACHE_DIR=str(cache)) == [expected] * 4


def test_a_changed_header_is_compiled_anew(expected, cache, tmp_path):
    """A comment more in one .cuh: other text, so other entries in the cache beside the old ones."""
    code = """
from s2o_cupy.cuda import compiler
good = compiler._with_includes
def changed(name, seen):
    for line in good(name, seen):
        yield line
        if line == '#line 1 "common/geometry.cuh"':
            yield "// changed"
compiler._with_includes = changed
print(call())
"""
    import shutil

    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    before = len(list(tmp_path.iterdir()))
    assert run(code, S2O_CACHE_DIR=str(tmp_path)) == [expected]
    assert len(list(tmp_path.iterdir())) >= before + 6
