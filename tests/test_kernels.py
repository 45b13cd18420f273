"""Kernel sources and their compilation: what is rendered, and what is said when it fails.

Nothing here needs a GPU; what compiles needs NVRTC. tests/test_loading.py: what is cached and loaded.
"""

from __future__ import annotations

import functools
import re
import shutil
import sys
import types
from pathlib import Path

import pytest

import s2o_cupy
from s2o_cupy import S2OError
from s2o_cupy.cuda import compiler
from s2o_cupy.cuda.compiler import ARCHITECTURES, check_device, render
from s2o_cupy.plan import kernels
from s2o_cupy.selection import s2o_kernels
from s2o_cupy.tools import compile_ahead
from s2o_cupy.tools.catalogue import kernels_for

ALL = {kernel: None for arch in (80, 86, 89, 90, 100, 120) for kernel in kernels_for(arch)}
SMALL = next(kernel for kernel in ALL if kernel.name == "guides-float16-d64")
OF_SOURCE = {kernel.family.source: kernel for kernel in ALL}  # one is enough to see which headers are in a text


def source_folder() -> Path:
    import s2o_cupy.raw_kernels

    return Path(s2o_cupy.raw_kernels.__file__).parent


HEADERS = sorted(path.relative_to(source_folder()).as_posix() for path in source_folder().glob("**/*.cuh"))


# ---------------------------------------------------------------- render


def test_every_source_has_a_kernel():
    sources = {path.relative_to(source_folder()).as_posix() for path in source_folder().glob("**/*.cu")}
    assert {kernel.family.source for kernel in ALL} == sources


def test_a_function_is_of_one_family():
    """Or of one for each size of its blocks."""
    families = {kernel.family for kernel in ALL}
    assert len({(family.function, family.threads) for family in families}) == len(families)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_a_rendered_kernel_is_complete(kernel):
    text = render(kernel)
    assert '#include "' not in text
    assert "#pragma once" not in text
    headers = re.findall(r'^#line 1 "([\w/]+\.cuh?)"$', text, re.MULTILINE)
    assert len(headers) == len(set(headers)), "a header stands there twice"
    assert kernel.family.source in headers
    assert text.count(f"{compiler.ENTRY.format(function=kernel.function)}(") == 1
    for name, value in s2o_cupy.spec.KERNEL_CONSTANTS.items():
        assert f"constexpr int {name} = {value};" in text


def test_kernels_differ_by_name_and_by_text():
    """Bar what the text does not hold: shared memory that is only sized."""
    texts: dict[str, str] = {}
    for kernel in kernels_for(90):
        assert texts.setdefault(render(kernel), kernel.name) == kernel.name
    assert len({kernel.name for kernel in kernels_for(90)}) == len(kernels_for(90))


def test_every_header_is_used():
    text = "\n".join(texts().values())
    for name in HEADERS:
        assert f'#line 1 "{name}"' in text, name


@functools.cache
def texts():
    return {kernel: render(kernel) for kernel in OF_SOURCE.values()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("header", HEADERS)
def test_a_changed_header_changes_the_text(header, monkeypatch, tmp_path):
    """CuPy's cache keys on the text and knows nothing of the files behind it."""
    before = texts()
    shutil.copytree(source_folder(), tmp_path, dirs_exist_ok=True)
    with (tmp_path / header).open("a", encoding="utf-8") as file:
        file.write("\n// changed\n")
    monkeypatch.setattr(compiler, "resources", types.SimpleNamespace(files=lambda package: tmp_path))
    for kernel, text in before.items():
        assert (render(kernel) != text) == (f'#line 1 "{header}"' in text), kernel.name


def test_line_numbers_are_those_of_the_files():
    """So that a compiler's message names a place in a source file."""
    text = render(next(kernel for kernel in ALL if kernel.function == "key_order_head"))
    folder = source_folder()
    sources = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8").splitlines()
        for path in folder.glob("**/*.cu*")
    }
    checked, name, number = 0, "", 0
    for line in text.splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if directive:
            number, name = int(directive.group(1)), directive.group(2)
            continue
        if name in sources and line:
            assert sources[name][number - 1] == line, f"{name}:{number}"
            checked += 1
        number += 1
    assert checked > 200


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("capability", "driver", "runtime", "message"),
    [
        (75, 12090, 12090, r"compute capability 7\.5, and the kernels need 8\.0 or newer.*backend=\"numpy\""),
        (50, 13000, 13000, r"compute capability 5\.0"),
        (90, 11080, 12090, r"driver supports CUDA 11\.8.*CuPy needs CUDA 12; update the driver.*cupy-cuda11x"),
        (90, 12040, 13000, r"driver supports CUDA 12\.4.*CuPy needs CUDA 13; update the driver.*cupy-cuda12x"),
    ],
)
def test_a_device_that_cannot_is_named_in_one_sentence(capability, driver, runtime, message):
    with pytest.raises(S2OError, match=message) as caught:
        check_device(capability, driver, runtime)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
@pytest.mark.parametrize(("driver", "runtime"), [(12040, 12090), (12090, 12020), (13000, 12090), (13010, 13000)])
def test_a_device_that_can(capability, driver, runtime):
    check_device(capability, driver, runtime)
    assert compiler.architecture_path(capability) != "unsupported"


def test_architecture_path():
    assert compiler.architecture_path(75) == "unsupported"
    assert {compiler.architecture_path(cc) for cc in (80, 86, 89, 120)} == {"portable"}


# ---------------------------------------------------------------- compiling; `s2o compile` does it for all


@pytest.fixture
def nvrtc():
    """CuPy's binding with a library behind it."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"no CuPy with NVRTC: {error}")
    return nvrtc


def test_compile_all(nvrtc, monkeypatch):
    """In the order that was asked for, each with what ptxas says. `s2o compile` in `make test` judges them all."""
    few = tuple(k for k in kernels_for(80) if k.function in ("guides", "pool_queries") and k.head_dim == 128)
    assert len(few) > 1
    monkeypatch.setattr(compile_ahead, "all_kernels", lambda arch: few)
    seen: list[tuple[int, int]] = []
    results = compile_ahead.compile_all(["sm_80"], progress=lambda done, total: seen.append((done, total)))
    assert [r.name for r in results] == [k.name for k in few]
    assert seen == [(i + 1, len(few)) for i in range(len(few))]
    for r in results:
        assert (r.arch, r.spill_bytes, r.warnings) == ("sm_80", 0, ())
        assert 0 < r.registers <= 255 and r.seconds > 0
        assert r.code.startswith(b"\x7fELF")


def test_compile_all_of_one_dtype_and_size(monkeypatch):
    """Kernels that have neither belong to every one, some have a dtype and no size, and some a size alone."""
    of_every_size = {"fp8_pages", "packed_fp8_pages", "segment_sizes"}
    monkeypatch.setattr(compiler, "machine_code", lambda kernel, arch: (kernel, arch))
    found = compile_ahead.compile_all(["sm_90a"], dtypes=["float16"], head_dims=[64])
    assert found == [
        (kernel, "sm_90a")
        for kernel in kernels_for(90)
        if "-float16-d64" in kernel.name
        or ("float16" not in kernel.name and (kernel.function != "key_moments" or kernel.head_dim == 64))
        or (kernel.function in of_every_size and "-float16" in kernel.name)
    ]
    assert {"key_strata", "key_order_head", "pass2_sm90", "pass1"} <= {kernel.function for kernel, _ in found}


def test_compile_all_of_a_sample(monkeypatch):
    """A kernel of every function, on the first architecture that has it of those that kernels are written for, and
    passes where registers are fewest; elsewhere the passes."""
    monkeypatch.setattr(compiler, "machine_code", lambda kernel, arch: kernel)
    had: set[str] = set()
    for arch in ARCHITECTURES:
        few, every = compile_ahead.compile_all([arch], sample=True), compile_ahead.compile_all([arch])
        assert set(few) < set(every)
        plain = [kernel for kernel in few if kernel.head_dim == 128]
        functions = {kernel.function for kernel in plain}
        assert len(plain) == len(functions) and {kernel.dtype for kernel in few} == {"bfloat16"}
        if arch not in ("sm_80", "sm_90a"):
            assert functions == {"pass1", "pass2", "pass1_packed", "pass2_listed", "pass2_skipping"}
            continue
        assert functions == {kernel.function for kernel in every} - had
        had |= functions
        tight = [kernel.name for kernel in few if kernel.head_dim != 128]
        ends = ("_sm90-bfloat16-d256-s2-paged", "_sm90-bfloat16-d64-s2-two")
        assert all(name.startswith("pass") and name.endswith(ends) for name in tight)
        of_each = [sum(name.endswith(end) for name in tight) for end in ends]
        assert of_each == ([8, 4] if arch == "sm_90a" else [0, 0])


def test_every_architecture_is_known():
    capabilities = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90a": 90, "sm_100a": 100, "sm_120a": 120}
    assert {*ARCHITECTURES} == {*capabilities}
    for arch, capability in capabilities.items():
        found = compile_ahead.all_kernels(arch)
        assert found and found == kernels_for(capability)
        assert any(kernel.function.endswith("_sm90") for kernel in found) == (arch == "sm_90a")


@pytest.mark.parametrize("name", ["sm90", "90", "compute_90", "sm_9", "sm_90x", "", "sm_90 "])
def test_a_name_that_is_no_architecture(name):
    with pytest.raises(ValueError, match=rf"architectures has '{name}'; accepted: names such as sm_80, "):
        compile_ahead.compile_all(["sm_80", name])


def test_an_architecture_that_nvrtc_does_not_know(nvrtc, monkeypatch):
    monkeypatch.setattr(compile_ahead, "all_kernels", lambda arch: (SMALL,))
    with pytest.raises(S2OError, match="guides-float16-d64 does not compile for sm_999:"):
        compile_ahead.compile_all(["sm_999"])


def test_a_source_error_is_reported_with_its_place(nvrtc, monkeypatch):
    good = compiler.render

    def broken(kernel):
        return good(kernel).replace("lane * 8 + 8 <= head_dim", "lane * 8 + 8 <= hed_dim")

    monkeypatch.setattr(compile_ahead, "all_kernels", lambda arch: (SMALL,))
    monkeypatch.setattr(compiler, "render", broken)
    place = r"does not compile for sm_80:\n(.*\n)*common/row_sums\.cuh\(\d+\): error.*hed_dim"
    with pytest.raises(S2OError, match=place):
        compile_ahead.compile_all(["sm_80"])


def test_a_parameter_or_size_that_differs_from_python_s_does_not_compile(nvrtc, monkeypatch):
    import dataclasses

    small = dataclasses.replace(s2o_kernels.key_order_head(), shared_bytes=4)
    monkeypatch.setattr(compile_ahead, "all_kernels", lambda arch: (small,))
    with pytest.raises(S2OError, match="the plan counts the shared memory differently"):
        compile_ahead.compile_all(["sm_80"])
    other = dataclasses.replace(SMALL.family.params, itemsize=192)
    monkeypatch.setattr(kernels, "struct", lambda source, name: other)
    monkeypatch.setattr(compile_ahead, "all_kernels", lambda arch: (SMALL,))
    with pytest.raises(S2OError, match="lays the parameters out differently"):
        compile_ahead.compile_all(["sm_80"])


@pytest.mark.parametrize("kernel", ["pass1_gathered_sm90-float16-d64-s2-paged", "pass2_sm90-bfloat16-d128-s2",
                                    "pass2_sm90-bfloat16-d256-s2", "pass2_tail_sm90-bfloat16-d64-s2",
                                    "pass2_listed_sm90-float16-d64-s2-two"])  # fmt: skip
def test_the_shared_memory_that_a_hopper_kernel_asks_for(nvrtc, kernel):
    """Is what C++ makes of it: all of the kernel's text but the kernel, which takes long, holds where that is so."""
    declared = render(next(k for k in ALL if k.name == kernel)).partition('extern "C" __global__')[0]
    assert "the plan counts the shared memory differently" in declared
    program = nvrtc.createProgram(declared, "declared.cu", [], [])
    try:
        nvrtc.compileProgram(program, ["-arch=sm_90a", "-std=c++17", "-default-device"])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def test_compiling_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(S2OError, match=r"compiling needs CuPy and NVRTC .*remedy: pip install"):
        compile_ahead.compile_all(["sm_80"])
