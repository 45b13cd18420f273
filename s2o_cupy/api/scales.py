"""A cache of 8-bit keys and values, e4m3: what it is known by, and the scales that its bytes are multiplied by."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from ..arrays.array_info import ArrayInfo
from ..arrays.frameworks import framework_of
from ..by_head import checked_real
from ..errors import ArgumentTypeError, ArgumentValueError

__all__ = ["FP8", "Scales", "check_each", "check_scales", "is_fp8_cache", "parse_scale"]

FP8 = "float8_e4m3fn"
_NUMBERS = ("float16", "bfloat16", "float32", "float64")  # of one number on the host
Scales = tuple[float | None, float | None]  # of keys and values; None: an array among the call's inputs


def parse_scale(name: str, x: Any) -> Any:
    """A number, or an array that only kernels look into. One number on the host is read there, whatever q is on."""
    if x is None:
        return 1.0
    if isinstance(x, numbers.Real) and not isinstance(x, bool):
        return _checked(name, checked_real(name, x, "a number, or an array of float32"))
    if isinstance(x, (bool, str, bytes, list, tuple)):
        raise ArgumentTypeError(f"{name} is a {type(x).__name__}; accepted: a number, or an array of float32")
    framework = framework_of(name, x)
    info = framework.describe(x)
    if info.device.kind == "cpu" and info.shape in ((), (1,)) and info.dtype in _NUMBERS:
        return _checked(name, float(np.asarray(framework.on_host(x)).reshape(())))
    return x


def _checked(name: str, x: float) -> float:
    tiny, large = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    if not tiny <= x <= large:  # kernels multiply by a float32, and not by a subnormal one
        raise ArgumentValueError(f"{name} is {x}; accepted: a number from {tiny:.2g} to {large:.2g}")
    return x


def check_each(name: str, x: np.ndarray) -> np.ndarray:
    """``x``, on the host: each of its numbers is looked at, as one alone is."""
    for i, number in enumerate(x.reshape(-1).tolist()):
        _checked(f"{name}[{i}]", number)
    return x


def is_fp8_cache(q: ArrayInfo, k_pages: ArrayInfo, v_pages: ArrayInfo, k_scale: Any, v_scale: Any) -> bool:
    """Whether the pages have 8 bits. Bytes are taken for e4m3 where both scales came: nothing else tells."""
    if k_scale is None and v_scale is None and k_pages.dtype == v_pages.dtype == q.dtype:
        return False
    given = [name for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None]
    dtypes = {x.dtype for x in (k_pages, v_pages)}
    if dtypes == {FP8} or (dtypes == {"uint8"} and len(given) == 2):
        return True
    pages = {"k_pages": k_pages, "v_pages": v_pages}
    for name, x in sorted(pages.items(), key=lambda item: item[1].dtype == FP8):  # the odd one first
        if x.dtype == "uint8" or x.dtype.startswith("float8"):
            raise ArgumentTypeError(
                f"{name} is {x.dtype}{_beside(k_pages, v_pages)}; accepted: {q.dtype} as q, {FP8}, or "
                f"its bytes as uint8 with k_scale and v_scale, the same for both"
                + (f"; {given[0]} came alone" if len(given) == 1 else "")
            )
    if given:
        raise ArgumentValueError(
            f"{given[0]} is given, but k_pages is {k_pages.dtype}; accepted: scales of a cache of {FP8}, or both "
            "of its bytes as uint8"
        )
    return False


def _beside(k_pages: ArrayInfo, v_pages: ArrayInfo) -> str:
    if k_pages.dtype == v_pages.dtype:
        return ", as v_pages is"
    return f", with k_pages {k_pages.dtype} and v_pages {v_pages.dtype}"


def check_scales(arrays: dict[str, ArrayInfo], kv_heads: int) -> None:
    for name, x in arrays.items():
        if x.dtype != "float32":
            raise ArgumentTypeError(f"{name} is {x.dtype}; accepted: a number, or an array of float32")
        if x.shape not in ((), (1,), (kv_heads,)):
            raise ArgumentValueError(
                f"{name} has shape {tuple(x.shape)}; accepted: a number, or an array of one or of kv_heads, "
                f"({kv_heads},)"
            )
