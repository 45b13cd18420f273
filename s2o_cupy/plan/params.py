"""What a kernel is given, read from its CUDA source: the C++ struct is the one description of its parameters.

`struct` finds a definition in a source file or the headers that it includes and lays it out as C++ does; launches fill
it in by name with `Struct.fill`. Few forms of C++ occur in these structs, and any other is an error that names its
place. Pure: no array, no GPU, no CuPy.

    template <class T> struct Tensor { ... };     used as Tensor<const uint16> or Mapped<AttentionParams>
    struct alignas(64) TensorMap { ... };
    struct PackedAttentionParams : AttentionParams { ... };
    int a, b;   T* p;   uint16 *p, *q;   int first[kPackedSequences];   member functions, which are skipped
    using MappedAttentionParams = Mapped<AttentionParams>;
    constexpr int kPackedSequences = 128;
"""

from __future__ import annotations

import functools
import re
import struct as packing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

__all__ = ["Field", "Struct", "read_struct", "struct"]

Bindings = Mapping[str, str]  # template parameter: the type that it stands for


@dataclass(frozen=True)
class _Scalar:
    """A type of one number. ``code``: of the module struct."""

    name: str
    dtype: np.dtype[Any]
    code: str

    @property
    def alignment(self) -> int:
        return self.dtype.itemsize


_SCALARS = {
    name: _Scalar(name, np.dtype(dtype), code)
    for name, dtype, code in (
        ("int", "i4", "i"), ("uint32", "u4", "I"), ("int64", "i8", "q"), ("uint64", "u8", "Q"), ("float", "f4", "f"),
    )
}  # fmt: skip
_POINTER = _Scalar("pointer", np.dtype("u8"), "Q")
_POINTED = (*_SCALARS, "uint8", "uint16", "float2")  # what a pointer may point to, beside structs


@dataclass(frozen=True)
class Field:
    name: str
    offset: int  # bytes
    type: _Scalar | Struct
    count: int | None = None  # of an array's elements

    @property
    def is_pointer(self) -> bool:
        return self.type is _POINTER

    @property
    def is_filled(self) -> bool:
        """Whether `Struct.fill` has values for it; pointers and arrays are filled in at the call."""
        if isinstance(self.type, Struct):
            return self.count is None and any(x.is_filled for x in self.type.fields)
        return self.count is None and not self.is_pointer


@dataclass(frozen=True)
class Struct:
    """A C++ struct laid out. The fields of its base come first."""

    name: str
    fields: tuple[Field, ...]
    itemsize: int
    alignment: int

    @functools.cached_property
    def dtype(self) -> np.dtype[Any]:
        formats = [x.type.dtype if x.count is None else (x.type.dtype, (x.count,)) for x in self.fields]
        return np.dtype(
            {
                "names": [x.name for x in self.fields],
                "formats": formats,
                "offsets": [x.offset for x in self.fields],
                "itemsize": self.itemsize,
            }
        )

    @functools.cached_property
    def pointers(self) -> tuple[tuple[str, int], ...]:
        """Every pointer by name and offset. The one of an inner struct, as Tensor and Pages have, has its field's name,
        of several each has its own behind that and a dot; `attention` within tensor maps counts as the struct itself.
        """
        found: list[tuple[str, int]] = []
        for x in self.fields:
            if x.count is not None:
                continue
            if x.is_pointer:
                found.append((x.name, x.offset))
            elif isinstance(x.type, Struct):
                inner = x.type.pointers
                for name, offset in inner:
                    full = x.name if len(inner) == 1 else f"{x.name}.{name}"
                    found.append((name if self.map_bytes else full, x.offset + offset))
        return tuple(found)

    @functools.cached_property
    def map_bytes(self) -> int:
        """Of the tensor maps with which it begins, which the driver writes; 0: there are none."""
        return sum(x.type.itemsize for x in self.fields if isinstance(x.type, Struct) and x.type.name == "TensorMap")

    def fill(self, values: Mapping[str, Any]) -> Any:
        """A 0-d array with ``values``, those of an inner struct as a mapping of its own. What is filled in at the call,
        pointers and arrays, is 0 and no name here.

        Raises ValueError for a name that there is not, a number that is missing and one that does not fit.
        """
        data = bytearray(self.itemsize)
        try:
            self._packer.pack_into(data, 0, *self._flat(values))
        except (KeyError, TypeError, OverflowError, packing.error):
            self._check(values, self.name)
            raise
        return np.ndarray((), self.dtype, data)

    def _flat(self, values: Mapping[str, Any]) -> list[Any]:
        """All numbers in order. KeyError or TypeError if ``values`` are others than those of the struct."""
        names, inner = self._filled
        if len(values) != len(names):
            raise KeyError
        found: list[Any] = []
        for name in names:
            if name in inner:
                found += inner[name]._flat(values[name])
            else:
                found.append(values[name])
        return found

    @functools.cached_property
    def _filled(self) -> tuple[tuple[str, ...], dict[str, Struct]]:
        """Names of what `fill` takes, and those of them that are structs."""
        inner = {x.name: x.type for x in self.fields if isinstance(x.type, Struct) and x.is_filled}
        return tuple(x.name for x in self.fields if x.is_filled), inner

    def _check(self, values: Any, where: str) -> None:
        """Raise what is wrong with ``values``."""
        names, inner = self._filled
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} is {values!r}; accepted: a mapping of {', '.join(names)}")
        for name in (*values, *names):
            if name not in names or name not in values:
                what = "is unknown, or filled in at the call" if name in values else "is missing"
                raise ValueError(f"{where}: {name} {what}; accepted: {', '.join(names)}")
        for x in self.fields:
            if isinstance(x.type, Struct):
                if x.name in inner:
                    x.type._check(values[x.name], f"{where}.{x.name}")
            elif x.is_filled:
                try:
                    packing.pack("<" + x.type.code, values[x.name])
                except (OverflowError, packing.error):
                    given = values[x.name]
                    raise ValueError(f"{where}: {x.name} is {given!r}; accepted: what {x.type.name} holds") from None

    @functools.cached_property
    def _packer(self) -> packing.Struct:
        return packing.Struct("<" + self._format())

    def _format(self) -> str:
        """Of the numbers that `fill` writes, with gaps between them."""
        parts, end = [], 0
        for x in self.fields:
            if x.is_filled:
                code = x.type._format() if isinstance(x.type, Struct) else x.type.code
                parts.append(f"{x.offset - end}x{code}")
                end = x.offset + x.type.dtype.itemsize
        return "".join(parts) + f"{self.itemsize - end}x"


# --- Reading definitions ---
_STARTS = ("#include", "constexpr", "inline", "using", "template", "struct")
_INCLUDE = re.compile(r'#include "([\w./]+)"')
_CONSTANT = re.compile(r"(?:inline )?constexpr int (\w+) = (\d+);")
_ALIAS = re.compile(r"using (\w+) = (\w+<\w+>);")
_TEMPLATE = re.compile(r"template <class (\w+)>$")
_STRUCT = re.compile(r"struct (?:alignas\((?P<alignas>\d+)\) )?(?P<name>\w+)(?: : (?P<base>\w+))? \{$")
_TYPE = r"(?P<type>(?:const )?\w+(?:<[\w ]+>)?)"
_FIELDS = re.compile(rf"{_TYPE}(?P<names>\s*\*?\s*\w+(?:\[\w+\])?(?:,\s*\*?\s*\w+(?:\[\w+\])?)*);")
_NAME = re.compile(r"(?P<star>\*?)\s*(?P<name>\w+)(?:\[(?P<count>\w+)\])?")
_INSTANCE = re.compile(r"(\w+)<([\w ]+)>")


@dataclass(frozen=True)
class _Definition:
    file: str
    line: int  # of the body's first
    parameter: str | None
    alignas: int
    base: str | None
    body: tuple[str, ...]


class _File:
    """What a source file defines and includes."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.includes: list[str] = []
        self.constants: dict[str, int] = {}
        self.aliases: dict[str, str] = {}
        self.definitions: dict[str, _Definition] = {}
        lines = text.split("\n")
        for number, line in enumerate(lines):
            if not line.startswith(_STARTS):
                continue
            if include := _INCLUDE.match(line):
                self.includes.append(include[1])
            elif constant := _CONSTANT.match(line):
                self.constants[constant[1]] = int(constant[2])
            elif alias := _ALIAS.match(line):
                self.aliases[alias[1]] = alias[2]
            elif x := _STRUCT.match(line):
                end = next((i for i in range(number, len(lines)) if lines[i].startswith("};")), len(lines))
                template = _TEMPLATE.match(lines[number - 1])  # its head is the line before
                parameter, body = template[1] if template else None, tuple(lines[number + 1 : end])
                self.definitions[x["name"]] = _Definition(
                    name, number + 2, parameter, int(x["alignas"] or 1), x["base"], body
                )


def _read(name: str) -> str:
    return resources.files("s2o_cupy.raw_kernels").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _file(name: str) -> _File:
    return _File(name, _read(name))


@functools.cache
def struct(source: str, name: str) -> Struct:
    """The struct ``name`` of a file below raw_kernels/ or of the headers that it includes; remembered."""
    return _Reader(source, _file).of_type(name, {}, source)


def read_struct(source: str, name: str, read: Callable[[str], str] = _read) -> Struct:
    """``read`` gives a file's text. Raises ValueError, with file and line, for what is not understood."""
    return _Reader(source, lambda file: _File(file, read(file))).of_type(name, {}, source)


class _Reader:
    """The definitions of a source file and its headers, which are read as far as they are needed."""

    def __init__(self, source: str, file: Callable[[str], _File]) -> None:
        self.source, self._file = source, file
        self._known: dict[tuple[str, str], Struct] = {}  # by name and template argument

    def _files(self) -> Iterator[_File]:
        seen, waiting = {self.source}, [self.source]
        for name in waiting:
            file = self._file(name)
            yield file
            waiting += (x for x in file.includes if x not in seen)
            seen.update(file.includes)

    def of_type(self, name: str, bound: Bindings, where: str) -> Struct:
        """The struct that a type's name means. ``where``: file and line that use it, for errors."""
        instance = _INSTANCE.fullmatch(name)
        plain, argument = instance.groups() if instance else (name, "")
        key = plain, bound.get(argument, argument)
        if key not in self._known:
            self._known[key] = self._find(*key, where)
        return self._known[key]

    def _find(self, name: str, argument: str, where: str) -> Struct:
        for file in self._files():
            if name in file.aliases:
                return replace(self.of_type(file.aliases[name], {}, where), name=name)
            definition = file.definitions.get(name)
            if definition is None:
                continue
            if (definition.parameter is None) != (argument == ""):
                raise ValueError(f"{where}: {name} has other template arguments than in {file.name}:{definition.line}")
            return self._lay_out(name, definition, {definition.parameter or "": argument})
        raise ValueError(
            f"{where}: {self.source} and its headers have no struct {name}; accepted: one that they define, or one of "
            f"{', '.join(_SCALARS)}"
        )

    def _lay_out(self, name: str, definition: _Definition, bound: Bindings) -> Struct:
        fields: list[Field] = []
        end, alignment = 0, definition.alignas
        if definition.base is not None:
            base = self.of_type(definition.base, {}, f"{definition.file}:{definition.line}")
            fields, end, alignment = [*base.fields], base.itemsize, max(alignment, base.alignment)
        for line, text in _declarations(definition):
            where = f"{definition.file}:{line}"
            declared = _FIELDS.fullmatch(text)
            if declared is None:
                raise ValueError(
                    f"{where}: {text!r} in {name} is not understood; accepted: the forms that plan/params.py lists"
                )
            for part in declared["names"].split(","):
                x = _NAME.fullmatch(part.strip())
                assert x is not None
                type = self._type(declared["type"], bool(x["star"]), bound, where)
                count = None if x["count"] is None else self._count(x["count"], where)
                if x["name"] in (other.name for other in fields):
                    raise ValueError(f"{where}: {name} has two fields {x['name']}")
                offset = -(-end // type.alignment) * type.alignment
                fields.append(Field(x["name"], offset, type, count))
                end, alignment = offset + type.dtype.itemsize * (count or 1), max(alignment, type.alignment)
        if not fields:
            raise ValueError(f"{definition.file}:{definition.line}: {name} has no field")
        return Struct(name, tuple(fields), -(-end // alignment) * alignment, alignment)

    def _type(self, name: str, pointer: bool, bound: Bindings, where: str) -> _Scalar | Struct:
        plain = name.removeprefix("const ")
        plain = bound.get(plain, plain).removeprefix("const ")
        if pointer:
            if plain not in _POINTED:
                self.of_type(plain, bound, where)  # a struct, or an error
            return _POINTER
        if name.startswith("const "):
            raise ValueError(f"{where}: a field of type {name}; accepted: const only behind a pointer")
        return _SCALARS[plain] if plain in _SCALARS else self.of_type(plain, bound, where)

    def _count(self, text: str, where: str) -> int:
        if text.isdigit():
            return int(text)
        for file in self._files():
            if text in file.constants:
                return file.constants[text]
        raise ValueError(f"{where}: an array of [{text}]; accepted: a number, or a constexpr int of the source")


def _declarations(definition: _Definition) -> Iterator[tuple[int, str]]:
    """(line, text) of every line of a body but comments and member functions."""
    depth, in_function = 0, False
    for number, line in enumerate(definition.body, start=definition.line):
        text = line.split("//")[0].strip()
        if not in_function and text.startswith("__device__"):
            in_function = True
        if in_function:
            depth += text.count("{") - text.count("}")
            in_function = depth > 0 or ("{" not in text and not text.endswith("}"))
        elif text:
            yield number, text
    if in_function:
        raise ValueError(f"{definition.file}:{definition.line}: a member function does not end")
