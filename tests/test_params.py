"""Parameters of kernels: read from the C++ structs, laid out as C++ does, filled in by name. No GPU is needed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from s2o_cupy.cuda.compiler import _with_includes
from s2o_cupy.plan.params import Struct, read_struct
from s2o_cupy.spec import KERNEL_CONSTANTS
from s2o_cupy.tools.catalogue import kernels_for

FAMILIES = {kernel.family: None for kernel in (*kernels_for(80), *kernels_for(90))}
SOURCES = {(family.source, family.params_type): family.params for family in FAMILIES}
TENSOR = """
template <class T>
struct Tensor {
  T* data;
  int64 row;
  __device__ __forceinline__ T* at(int b) const { return data + b; }
};
"""


def read(body: str, name: str = "Params", before: str = "") -> Struct:
    text = f"{before}struct Params {{\n{body}\n}};\n"
    return read_struct("a.cu", name, {"a.cu": text}.__getitem__)


def offsets(x: Struct) -> dict[str, int]:
    return {field.name: field.offset for field in x.fields}


# ---------------------------------------------------------------- reading


def test_numbers_pointers_and_arrays():
    found = read("int a, b;  // two\nint64 c;\n  const uint16 *p, *q;\nfloat* r;\n\nuint32 d;\nint e[3];")
    assert offsets(found) == {"a": 0, "b": 4, "c": 8, "p": 16, "q": 24, "r": 32, "d": 40, "e": 44}
    assert (found.itemsize, found.alignment) == (56, 8)
    assert found.dtype["d"] == np.uint32 and found.dtype["e"].shape == (3,)
    assert found.pointers == (("p", 16), ("q", 24), ("r", 32))


def test_swapped_fields_are_read_as_they_stand():
    """A launch that fills in by name follows the source; positions decide nothing."""
    values = {"first": 1, "second": 2}
    one, other = (read(body).fill(values) for body in ("int first;\nint second;", "int second;\nint first;"))
    assert one.tobytes() == np.array([1, 2], "i4").tobytes()
    assert other.tobytes() == np.array([2, 1], "i4").tobytes()


def test_headers_templates_bases_and_constants():
    header = TENSOR + "constexpr int kMany = 4;  // of them\nstruct Base {\n  float x;\n  Tensor<const uint16> t;\n};\n"
    before = '#include "b.cuh"\nstruct Pair {\n  int left, right;\n};\n'
    body = "  Tensor<uint16> u;\n  Pair of[kMany];"
    files = {"a.cu": f"{before}struct Params : Base {{\n{body}\n}};", "b.cuh": header}
    found = read_struct("a.cu", "Params", files.__getitem__)
    assert offsets(found) == {"x": 0, "t": 8, "u": 24, "of": 40}
    assert found.itemsize == 40 + 4 * 8
    assert found.dtype["of"].shape == (4,) and found.dtype["of"].base.names == ("left", "right")
    assert found.pointers == (("t", 8), ("u", 24))  # a struct with one pointer is known by its field


def test_pointers_of_a_struct_with_several():
    found = read("int a;\nLists lists;", before="struct Lists {\n  const int *entries, *keys;\n  int shift;\n};\n")
    assert found.pointers == (("lists.entries", 8), ("lists.keys", 16))


def test_tensor_maps_before_the_parameters():
    before = (
        "struct alignas(64) TensorMap {\n  uint64 opaque[16];\n};\n"
        "template <class Inner>\nstruct Mapped {\n  TensorMap q, k;\n  Inner attention;\n};\n"
        "using MappedParams = Mapped<Params>;\n"
    )
    found = read("int a;\nfloat* p;", "MappedParams", before)
    assert (found.name, found.map_bytes, found.itemsize, found.alignment) == ("MappedParams", 256, 320, 64)
    assert offsets(found)["attention"] == 256 and found.pointers == (("p", 256 + 8),)
    assert found.fill({"attention": {"a": 7}})["attention"]["a"] == 7


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("int a;\nhalf b;", 3, "a.cu and its headers have no struct half; accepted: .* or one of int, "),
        ("half* b;", 2, "no struct half"),
        ("Tensor<int> b;", 2, "no struct Tensor"),
        ("int a;\n\n// of what?\nint a;", 5, "Params has two fields a"),
        ("int a[kMany];", 2, r"an array of \[kMany\]; accepted: a number, or a constexpr int"),
        ("int a = 3;", 2, "'int a = 3;' in Params is not understood"),
        ("int a, b", 2, "not understood"),
        ("const int a;", 2, "a field of type const int; accepted: const only behind a pointer"),
        ("int a : 3;", 2, "not understood"),
        ("virtual void f();", 2, "not understood"),
        ("union { int a; float b; };", 2, "not understood"),
        ("int a;\n#if X\nint b;\n#endif", 3, "not understood"),
        ("int** a;", 2, "not understood"),
        ("int& a;", 2, "not understood"),
        ("__device__ int f() {", 2, "a member function does not end"),
        ("", 2, "Params has no field"),
    ],
)
def test_what_is_not_understood_is_an_error_with_its_place(body, line, message):
    with pytest.raises(ValueError, match=rf"^a\.cu:{line}: .*{message}"):
        read(body)


def test_a_struct_that_there_is_not():
    with pytest.raises(ValueError, match=r"^a\.cu: a\.cu and its headers have no struct Other"):
        read("int a;", "Other")


@pytest.mark.parametrize("use", ["Tensor", "Pair<int>"])
def test_template_arguments_that_do_not_match(use):
    with pytest.raises(ValueError, match=r"^a\.cu:\d+: \w+ has other template arguments than in a\.cu:\d+"):
        read(f"{use} t;", before=TENSOR + "struct Pair {\n  int a;\n};\n")


# ---------------------------------------------------------------- filling in

BODY = "Tensor<const uint16> k;\nfloat* lse;\nint heads;\nfloat tau;\nuint32 mask;\nint list[2];"
VALUES = {"k": {"row": 5}, "heads": 2, "tau": 0.5, "mask": 0x80008000}


def test_filled_in_by_name():
    params = read(BODY, before=TENSOR)
    found = params.fill(dict(reversed(VALUES.items())))  # in any order
    assert found["k"].tolist() == (0, 5) and found["lse"] == 0 and found["list"].tolist() == [0, 0]
    assert (found["heads"], found["tau"], found["mask"]) == (2, 0.5, 0x80008000)
    found["k"]["data"] = 1 << 40  # at the call
    assert found["k"].tolist() == (1 << 40, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": 2}, "Params: head is unknown, or filled in at the call; accepted: k, heads, tau, mask"),
        ({"lse": 2}, "Params: lse is unknown, or filled in at the call"),
        ({"list": [1, 2]}, "Params: list is unknown, or filled in at the call"),
        ({"heads": None}, "Params: heads is None; accepted: what int holds"),
        ({"heads": 1 << 31}, "Params: heads is 2147483648; accepted: what int holds"),
        ({"heads": 2.0}, "Params: heads is 2.0; accepted: what int holds"),
        ({"mask": -1}, "Params: mask is -1; accepted: what uint32 holds"),
        ({"tau": 1e39}, r"Params: tau is 1e\+39; accepted: what float holds"),
        ({"tau": "1"}, "Params: tau is '1'; accepted: what float holds"),
        ({"k": {"row": 1 << 63}}, "Params.k: row is 9223372036854775808; accepted: what int64 holds"),
        ({"k": {"rows": 1}}, "Params.k: rows is unknown"),
        ({"k": {}}, "Params.k: row is missing; accepted: row"),
        ({"k": (0, 5)}, r"Params.k is \(0, 5\); accepted: a mapping of row"),
    ],
)
def test_a_wrong_value_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        read(BODY, before=TENSOR).fill(VALUES | changes)


@pytest.mark.parametrize("name", VALUES)
def test_a_missing_value_is_refused(name):
    values = {key: value for key, value in VALUES.items() if key != name}
    with pytest.raises(ValueError, match=f"^Params: {name} is missing; accepted: k, heads, tau, mask"):
        read(BODY, before=TENSOR).fill(values)


# ---------------------------------------------------------------- the structs of the kernels


@pytest.mark.parametrize("params", SOURCES.values(), ids=lambda x: x.name)
def test_parameters_are_what_every_driver_takes(params):
    assert params.itemsize <= 4096 and params.itemsize % params.alignment == 0


@pytest.mark.parametrize("params", SOURCES.values(), ids=lambda x: x.name)
def test_a_pointer_is_known_by_one_name(params):
    """That of an array of the call or of the workspace, and of no other."""
    names = [name for name, _ in params.pointers]
    assert len(names) == len(set(names))
    assert not {"attention", "data", "table"} & set(names)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("source", "name"), SOURCES, ids=[name for _, name in SOURCES])
def test_offsets_are_those_of_the_compiler(source, name):
    """Every field of every struct, inner ones too, as NVRTC places it."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"no CuPy with NVRTC: {error}")

    def of(params: Struct, path: str, start: int) -> list[tuple[str, int]]:
        found = []
        for x in params.fields:
            inner, first = f"{path}{x.name}", "" if x.count is None else "[0]"
            found.append((inner, start + x.offset))
            if isinstance(x.type, Struct):
                found += of(x.type, f"{inner}{first}.", start + x.offset)
        return found

    params = SOURCES[source, name]
    constants = "\n".join(f"inline constexpr int {x} = {value};" for x, value in KERNEL_CONSTANTS.items())
    constants += "\ninline constexpr bool kSoftcap = false, kDrawn = true;"
    text = [f"namespace s2o {{ namespace spec {{\n{constants}\n}} }}"]
    text += _with_includes(source, set())
    text.append(f'static_assert(sizeof(s2o::{name}) == {params.itemsize}, "sizeof");')
    text += (
        f'static_assert(__INTADDR__(&((s2o::{name}*)0)->{path}) == {offset}, "{path}");'
        for path, offset in of(params, "", 0)
    )
    program = nvrtc.createProgram("\n".join(text), "params.cu", [], [])
    arch = "sm_90a" if re.search("sm90", source) else "sm_80"
    try:
        nvrtc.compileProgram(program, [f"-arch={arch}", "-std=c++17", "-default-device"])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)
