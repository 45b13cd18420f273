"""From a kernel to a function on a device: what is compiled, kept on disk, waited for and loaded. No GPU is needed.

tests/test_gpu_process.py has the same of whole processes, on a GPU.
"""

from __future__ import annotations

import errno
import os
import pathlib
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from s2o_cupy import S2OError
from s2o_cupy.arrays import lazy_cupy
from s2o_cupy.cuda import compiler, cubin_cache
from s2o_cupy.cuda.compiler import CompiledKernel, device_architecture
from s2o_cupy.cuda.cubin_cache import Entry
from s2o_cupy.tools.catalogue import kernels_for

KERNELS = kernels_for(80)[:4]
ENTRY = Entry(b"\x7fELF machine code\n\0 and more", {"registers": 40, "warnings": []})


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("S2O_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---------------------------------------------------------------- the folder


def test_what_is_written_is_read(folder):
    assert cubin_cache.read("a") is None
    cubin_cache.write("a", ENTRY)
    assert cubin_cache.read("a") == ENTRY
    assert [path.name for path in folder.iterdir()] == ["a"]  # nothing temporary is left


def test_others_may_read_what_is_written(folder, tmp_path):
    """As far as they may read the user's own files: kernels that an image was built with are anybody's in it."""
    cubin_cache.write("a", ENTRY)
    own = tmp_path / "own"
    own.write_bytes(b"")
    assert (folder / "a").stat().st_mode == own.stat().st_mode


@pytest.mark.parametrize("how", ["emptied", "cut short", "overwritten", "first bit", "last bit"])
def test_a_corrupt_file_is_not_there(folder, how):
    cubin_cache.write("a", ENTRY)
    data = bytearray((folder / "a").read_bytes())
    changed = {"emptied": b"", "cut short": data[:-1], "overwritten": b"x" * len(data)}.get(how)
    if changed is None:
        data[0 if how == "first bit" else -1] ^= 1
        changed = data
    (folder / "a").write_bytes(changed)
    assert cubin_cache.read("a") is None
    cubin_cache.write("a", ENTRY)
    assert cubin_cache.read("a") == ENTRY


def test_a_name_is_of_all_that_matters():
    parts = [("text", ("-arch=sm_80", "-x"), "12.9"), ("texT", ("-arch=sm_80", "-x"), "12.9")]
    parts += [("text", ("-arch=sm_90a", "-x"), "12.9"), ("text", ("-arch=sm_80",), "12.9")]
    parts += [("text", ("-arch=sm_80", "-x"), "13.0")]
    names = [cubin_cache.key(*each) for each in parts]
    assert len(set(names)) == len(names)
    assert cubin_cache.key(*parts[0]) == names[0]


@pytest.mark.parametrize("where", ["missing", "there"])
def test_a_folder_that_takes_no_file(monkeypatch, tmp_path, where):
    """Not even root's: it is below a file, or it is /proc."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("S2O_CACHE_DIR", "/proc" if where == "there" else str(tmp_path / "file" / "folder"))
    assert cubin_cache.unwritable()
    cubin_cache.write("a", ENTRY)
    assert cubin_cache.read("a") is None


def test_a_folder_on_a_read_only_disk(monkeypatch, tmp_path):
    """There even removing what was never made fails."""

    def fail(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("S2O_CACHE_DIR", str(tmp_path))
    for name in ("open", "unlink"):
        monkeypatch.setattr(pathlib.Path, name, fail)
    cubin_cache.write("a", ENTRY)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_where_the_folder_is(monkeypatch, tmp_path):
    for name in ("S2O_CACHE_DIR", "CUPY_CACHE_DIR", "CUPY_CACHE_IN_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cubin_cache.folder() == tmp_path / ".cupy" / "kernel_cache" / "s2o_cupy"
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cupy"))
    assert cubin_cache.folder() == tmp_path / "cupy" / "s2o_cupy"
    assert cubin_cache.unwritable() is None
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert cubin_cache.folder() is None
    assert cubin_cache.unwritable() == "CUPY_CACHE_IN_MEMORY is 1"
    monkeypatch.setenv("S2O_CACHE_DIR", str(tmp_path / "own"))
    assert cubin_cache.folder() == tmp_path / "own"


# ---------------------------------------------------------------- machine code


@pytest.fixture
def compilations(monkeypatch):
    """Names of the kernels that an NVRTC compiles that only pretends."""
    names = []

    def compile_(kernel, arch, text, options):
        assert (text, options[0]) == (compiler.render(kernel), f"-arch={arch}")
        names.append(kernel.name)
        return CompiledKernel(kernel.name, arch, 40, 0, kernel.shared_bytes, ("a warning",), 0.5, ENTRY.code)

    monkeypatch.setattr(compiler, "_compile", compile_)
    monkeypatch.setattr(compiler, "_nvrtc_build", lambda: "12.9")
    return names


def test_a_kernel_is_compiled_once_for_all_processes(folder, compilations):
    first = compiler.machine_code(KERNELS[0], "sm_80")
    assert compiler.machine_code(KERNELS[0], "sm_80") == first
    assert compilations == [KERNELS[0].name]
    compiler.machine_code(KERNELS[0], "sm_86")
    compiler.machine_code(KERNELS[1], "sm_80")
    assert compilations == [KERNELS[0].name] * 2 + [KERNELS[1].name]


def test_another_text_or_compiler_is_another_file(folder, compilations, monkeypatch):
    good = compiler.render
    compiler.machine_code(KERNELS[0], "sm_80")
    monkeypatch.setattr(compiler, "render", lambda kernel: good(kernel) + "// changed\n")
    compiler.machine_code(KERNELS[0], "sm_80")
    monkeypatch.setattr(compiler, "_nvrtc_build", lambda: "13.5")
    compiler.machine_code(KERNELS[0], "sm_80")
    assert len(compilations) == len(list(folder.iterdir())) == 3


def test_a_corrupt_file_is_compiled_anew(folder, compilations):
    first = compiler.machine_code(KERNELS[0], "sm_80")
    (file,) = folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(good[:-5])
    assert compiler.machine_code(KERNELS[0], "sm_80") == first
    assert (len(compilations), file.read_bytes()) == (2, good)


def test_without_a_folder_kernels_are_compiled_all_the_same(monkeypatch, compilations):
    monkeypatch.setenv("S2O_CACHE_DIR", "/proc")
    before = dict(os.environ)
    assert compiler.machine_code(KERNELS[0], "sm_80").code == ENTRY.code
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("compute_capability", "arch"),
    [
        (80, "sm_80"),
        (86, "sm_86"),
        (87, "sm_86"),  # unknown to this NVRTC: what an older chip of the family runs
        (90, "sm_90a"),
        (100, "sm_100a"),
        (103, "sm_100"),
        (121, "sm_121a"),
        (130, "compute_121"),  # a newer family: the driver translates
        (110, "compute_100"),  # and nothing that is newer than the device
    ],
)
def test_what_a_device_is_compiled_for(compute_capability, arch):
    """What `s2o compile` names an architecture, too, so that it fills the cache of calls."""
    assert device_architecture(compute_capability, (75, 80, 86, 89, 90, 100, 120, 121)) == arch


# ---------------------------------------------------------------- loading


@pytest.fixture
def loads(monkeypatch):
    """What is loaded, as (kernel's name, code), on devices of sm_80."""
    done = []

    def function(kernel, code):
        done.append((kernel.name, code))
        return types.SimpleNamespace(ptr=len(done))

    monkeypatch.setattr(compiler, "_function", function)
    monkeypatch.setattr(compiler, "_architecture_of", lambda device: "sm_80")
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "threads", lambda: 2)
    yield done
    assert compiler._compiling == {}


def pretend(monkeypatch, machine_code):
    def made(kernel, arch):
        assert arch == "sm_80"
        machine_code(kernel)
        return CompiledKernel(kernel.name, arch, 40, 0, 0, (), 0.5, kernel.name.encode())

    monkeypatch.setattr(compiler, "machine_code", made)


def test_kernels_are_loaded_once_for_each_device(loads, monkeypatch):
    pretend(monkeypatch, lambda kernel: None)
    first = compiler.load_all([*KERNELS, KERNELS[0]], 0)
    assert first[0] is first[4] and len({x.ptr for x in first}) == 4
    assert [compiler.load(kernel, 0) for kernel in KERNELS] == first[:4]
    assert compiler.load(KERNELS[0], 1) is not first[0]
    assert loads == [(x.name, x.name.encode()) for x in (*KERNELS, KERNELS[0])]


def test_several_are_compiled_at_a_time(loads, monkeypatch):
    together = threading.Barrier(2, timeout=60)
    pretend(monkeypatch, lambda kernel: together.wait())  # broken, if one waits for the other to be done
    compiler.load_all(KERNELS, 0)
    assert len(loads) == 4


def test_threads_that_want_the_same_kernels_wait_for_one_compilation(loads, monkeypatch):
    ready, lock, compiled = threading.Barrier(8, timeout=60), threading.Lock(), []

    def machine_code(kernel):
        with lock:
            compiled.append(kernel)

    pretend(monkeypatch, machine_code)

    def first(i):
        ready.wait()
        return compiler.load_all(KERNELS if i % 2 else KERNELS[::-1], 0)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(first, range(8)))
    assert sorted(x.name for x in compiled) == sorted(x.name for x in KERNELS)
    assert len(loads) == 4
    assert all(x == found[i % 2] for i, x in enumerate(found)) and found[0] == found[1][::-1]


def test_an_error_is_raised_and_not_remembered(loads, monkeypatch):
    def broken(kernel):
        if kernel is KERNELS[1]:
            raise S2OError("does not compile")

    pretend(monkeypatch, broken)
    for _ in range(2):
        with pytest.raises(S2OError, match="does not compile"):
            compiler.load_all(KERNELS, 0)
    pretend(monkeypatch, lambda kernel: None)
    assert len(compiler.load_all(KERNELS, 0)) == 4


# ---------------------------------------------------------------- CuPy itself


def test_a_cupy_that_cannot_make_its_folder_is_told_to_do_without(monkeypatch, tmp_path):
    """On the module of the installed CuPy that would make it."""
    pytest.importorskip("cupy")
    pytest.importorskip("cupy.cuda._compiler_cache")
    name = "cupy.cuda._compiler_cache"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setitem(sys.modules, name, None)
    before = dict(os.environ)
    assert lazy_cupy._cache_folder_is_missing()
    lazy_cupy._keep_cupys_kernels_in_memory()
    backend = sys.modules[name].DiskKernelCacheBackend()
    backend.save("a", b"code", "source")
    assert backend.load("a") is None
    assert dict(os.environ) == before
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "folder"))
    assert not lazy_cupy._cache_folder_is_missing()
