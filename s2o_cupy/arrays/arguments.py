"""The caller's arrays together: one framework, one device, and an ``out`` that can be written."""

from __future__ import annotations

import functools
from typing import Any

from .frameworks import framework_of
from .frameworks.base import Framework
from .place import Device, Extent

__all__ = ["check_out", "common_framework"]


def common_framework(**inputs: Any) -> tuple[Framework, Device]:
    """The one framework and the one device of q, k and v."""
    owners = [framework_of(name, x) for name, x in inputs.items()]
    framework = owners[0]
    if owners.count(framework) != len(owners):
        came = ", ".join(f"{name} {owner.name}" for name, owner in zip(inputs, owners, strict=True))
        raise TypeError(
            f"s2o_attention: {_listed(inputs)} come from different frameworks: {came}; accepted: one framework "
            f"for all {_COUNTS[len(inputs)]} (convert with its from_dlpack, without a copy)"
        )
    for name, x in inputs.items():
        framework.check(name, x)
    devices = [framework.device(x) for x in inputs.values()]
    if devices.count(devices[0]) != len(devices):
        came = ", ".join(f"{name} on {device}" for name, device in zip(inputs, devices, strict=True))
        raise ValueError(
            f"s2o_attention: {_listed(inputs)} are on different devices: {came}; accepted: one device for all "
            f"{_COUNTS[len(inputs)]} (move them with .to, jax.device_put or cupy.asarray)"
        )
    return framework, devices[0]


_COUNTS = {3: "three", 4: "four"}


def _listed(inputs: dict[str, Any]) -> str:
    *names, last = inputs
    return f"{', '.join(names)} and {last}"


def check_out(
    out: Any, framework: Framework, inputs: dict[str, Any], shape: tuple[int, ...], dtype: str, device: Device
) -> None:
    """Raise unless ``out`` can be written in place as the output."""
    owner = framework_of("out", out)
    if owner is not framework:
        raise TypeError(
            f"s2o_attention: out is a {owner.name} array, q is {framework.name}; accepted: {framework.name}"
        )
    if not framework.mutable:
        raise TypeError(f"s2o_attention: out is a {framework.name} array, which is immutable; accepted: None")
    framework.check("out", out)
    if framework.shape(out) != shape:
        raise ValueError(f"s2o_attention: out has shape {framework.shape(out)}; accepted: {shape}, the shape of q")
    if framework.dtype(out) != dtype:
        raise TypeError(f"s2o_attention: out is {framework.dtype(out)}; accepted: {dtype}, the dtype of q")
    if framework.device(out) != device:
        raise ValueError(f"s2o_attention: out is on {framework.device(out)}; accepted: {device} as q")
    if not framework.writeable(out):
        raise ValueError("s2o_attention: out is read-only; accepted: a writeable array")
    problem = _place_problem(framework.extent(out), tuple((name, framework.extent(x)) for name, x in inputs.items()))
    if problem:
        raise ValueError(f"s2o_attention: out{problem}")


@functools.lru_cache(maxsize=1024)
def _place_problem(extent: Extent, inputs: tuple[tuple[str, Extent], ...]) -> str | None:
    """Why nothing can be written there, or None."""
    if 0 in extent.shape:
        return None  # no element, no place in memory
    if extent.shape[-1] > 1 and extent.strides[-1] != extent.itemsize:
        return (
            f" has a stride of {extent.strides[-1]} bytes on its last axis; "
            f"accepted: a contiguous last axis ({extent.itemsize} bytes)"
        )
    if extent.overlaps_itself():
        return (
            f"'s strides {extent.strides} (bytes) put several elements in one place; "
            "accepted: an array whose elements are distinct in memory"
        )
    for name, x in inputs:
        if extent.overlaps(x):
            return (
                f" and {name} overlap in memory (their first to last bytes); "
                "accepted: an out that lies apart from q, k and v"
            )
    return None
