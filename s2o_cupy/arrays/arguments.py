"""The caller's arrays together: one framework, one device, and an ``out`` that can be written."""

from __future__ import annotations

from typing import Any

from ..caches import remembered
from ..errors import ArgumentTypeError, ArgumentValueError
from .array_info import ArrayInfo
from .frameworks import framework_of
from .frameworks.base import Framework

__all__ = ["check_out", "describe"]


def describe(arrays: dict[str, Any]) -> tuple[Framework, tuple[ArrayInfo, ...]]:
    """The one framework of some arrays on one device, by name, and what is known of each."""
    owners = [framework_of(name, x) for name, x in arrays.items()]
    framework = owners[0]
    if owners.count(framework) != len(owners):
        came = ", ".join(f"{name} {owner.name}" for name, owner in zip(arrays, owners, strict=True))
        raise ArgumentTypeError(
            f"{_listed(arrays)} come from different frameworks: {came}; accepted: one framework "
            f"for all{_count(arrays)} (convert with its from_dlpack, without a copy)"
        )
    check, describe_one = framework.check, framework.describe
    for name, x in arrays.items():
        check(name, x)
    infos = tuple([describe_one(x) for x in arrays.values()])
    devices = [info.device for info in infos]
    if devices.count(devices[0]) != len(devices):
        came = ", ".join(f"{name} on {device}" for name, device in zip(arrays, devices, strict=True))
        raise ArgumentValueError(
            f"{_listed(arrays)} are on different devices: {came}; accepted: one device for "
            f"all{_count(arrays)} (move them with .to, jax.device_put or cupy.asarray)"
        )
    return framework, infos


_COUNTS = {3: "three", 4: "four"}  # of them, in words; of more there is "all"


def _count(arrays: dict[str, Any]) -> str:
    return f" {_COUNTS[len(arrays)]}" if len(arrays) in _COUNTS else ""


def _listed(arrays: dict[str, Any]) -> str:
    *names, last = arrays
    return f"{', '.join(names)} and {last}"


def check_out(out: Any, framework: Framework, inputs: dict[str, ArrayInfo], dtype: str) -> ArrayInfo:
    """What is known of ``out``, or an error unless it can be written in place as the output. The first of ``inputs`` is
    q, whose shape and device it has."""
    q = next(iter(inputs.values()))
    owner = framework_of("out", out)
    if owner is not framework:
        raise ArgumentTypeError(f"out is a {owner.name} array, q is {framework.name}; accepted: {framework.name}")
    if not framework.mutable:
        raise ArgumentTypeError(f"out is a {framework.name} array, which is immutable; accepted: None")
    framework.check("out", out)
    info = framework.describe(out)
    if info.shape != q.shape:
        raise ArgumentValueError(f"out has shape {tuple(info.shape)}; accepted: {tuple(q.shape)}, the shape of q")
    if info.dtype != dtype:
        raise ArgumentTypeError(f"out is {info.dtype}; accepted: {dtype}, the dtype of q")
    if info.device != q.device:
        raise ArgumentValueError(f"out is on {info.device}; accepted: {q.device} as q")
    if not framework.writeable(info.native):
        raise ArgumentValueError("out is read-only; accepted: a writeable array")
    place = (info.pointer, info.shape, info.strides, info.itemsize)
    problem = _place_problem(
        place, tuple((name, x.pointer, x.shape, x.strides, x.itemsize) for name, x in inputs.items())
    )
    if problem:
        raise ArgumentValueError(f"out{problem}")
    return info


@remembered
def _place_problem(place: tuple[Any, ...], inputs: tuple[tuple[Any, ...], ...]) -> str | None:
    """Why nothing can be written there, or None."""
    out = ArrayInfo(*place)
    if 0 in out.shape:
        return None  # no element, no place in memory
    if not out.has_contiguous_rows:
        return (
            f" has a stride of {out.strides[-1]} bytes on its last axis; "
            f"accepted: a contiguous last axis ({out.itemsize} bytes)"
        )
    if out.overlaps_itself():
        return (
            f"'s strides {out.strides} (bytes) put several elements in one place; "
            "accepted: an array whose elements are distinct in memory"
        )
    for name, *where in inputs:
        if out.overlaps(ArrayInfo(*where)):
            return (
                f" and {name} overlap in memory (their first to last bytes); "
                "accepted: an out that lies apart from q, k and v"
            )
    return None
