"""Attention over two sets of keys from the attention over each: what chunked and distributed attention is built on."""

from __future__ import annotations

from typing import Any

from .arrays.frameworks import framework_of
from .errors import ArgumentTypeError, ArgumentValueError
from .problem import LAYOUTS
from .spec import is_one_of

__all__ = ["merge_states"]

ACCEPTED = "NumPy, CuPy, PyTorch or JAX arrays, or others with an array API namespace"


def merge_states(o1: Any, lse1: Any, o2: Any, lse2: Any, *, layout: str = "BHSD") -> tuple[Any, Any]:
    """Merge attention over two disjoint sets of keys into attention over both, by their log-sum-exps.

    For softmax attention of the same queries, scores and scale over keys A (``o1``, ``lse1``) and keys B (``o2``,
    ``lse2``) the result is exact up to rounding. Merging is commutative, and associative up to rounding, so any number
    of parts can be folded together. A part may come from any attention that returns natural log-sum-exps.

    Parameters
    ----------
    o1, o2 : array, (..., seqlen, head_dim), such as (batch, heads, seqlen, head_dim)
        Of one shape and dtype: float16, bfloat16, float32 or float64.
    lse1, lse2 : array, (..., seqlen), such as (batch, heads, seqlen)
        Natural log of each row's softmax denominator, float32 or float64. -inf for a row without a key, whose o then
        counts as 0 whatever it holds.
    layout : {"BHSD", "BSHD"}, default "BHSD"
        Order of o's axes, as in :func:`s2o_cupy.s2o_attention`; "BSHD" is (batch, seqlen, heads, head_dim), with or
        without the batch axis. lse is (batch, heads, seqlen) for both.

    Returns
    -------
    o : array, like o1
        Computed in float32, or in float64 if any argument is, and rounded once.
    lse : array, like lse1
        -inf, with o = 0, for a row that has no key in either part. NaN in a lse makes its row NaN.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, what came and what is accepted.

    Examples
    --------
    >>> import numpy as np
    >>> from s2o_cupy import merge_states, s2o_attention
    >>> q = np.random.default_rng(0).standard_normal((1, 2, 8, 16), dtype=np.float32)
    >>> attend = lambda keys: s2o_attention(q, q[:, :, keys], q[:, :, keys], is_causal=False, return_lse=True)
    >>> o, lse = merge_states(*attend(slice(0, 5)), *attend(slice(5, 8)))
    >>> bool(np.allclose(o, attend(slice(0, 8))[0], atol=1e-6))
    True
    """
    xp, compute, dtypes = _check(o1, lse1, o2, lse2, layout)
    low = float("-inf")
    part1, part2 = xp.astype(lse1, compute), xp.astype(lse2, compute)  # [..., seqlen]
    top = xp.maximum(part1, part2)
    base = xp.where(top == low, xp.zeros_like(top), top)  # -inf - -inf would be NaN
    weight1, weight2 = xp.exp(part1 - base), xp.exp(part2 - base)
    total = weight1 + weight2  # 0 without a key, else 1 to 2, or NaN
    empty = total == 0
    divisor = xp.where(empty, xp.ones_like(total), total)
    lse = xp.where(empty, top, base + xp.log(divisor))

    def share(o: Any, part: Any, weight: Any) -> Any:
        o = xp.astype(o, compute)
        # Without a key o may hold anything, and 0 * NaN is NaN.
        o = xp.where(_per_row(xp, part == low, layout), xp.zeros_like(o), o)
        return o * _per_row(xp, weight / divisor, layout)

    o = share(o1, part1, weight1) + share(o2, part2, weight2)
    return xp.astype(o, dtypes[0]), xp.astype(lse, dtypes[1])


def _per_row(xp: Any, x: Any, layout: str) -> Any:
    """[..., heads, seqlen] to what broadcasts against o."""
    if layout == "BSHD":
        x = xp.permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))
    return x[..., None]


def _check(o1: Any, lse1: Any, o2: Any, lse2: Any, layout: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """The arrays' namespace, the dtype to compute in, and those of o and lse."""
    from array_api_compat import array_namespace, device

    arrays = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}
    if not is_one_of(layout, LAYOUTS):
        raise ArgumentValueError(f"layout is {layout!r}; accepted: {' or '.join(map(repr, LAYOUTS))}", "merge_states")
    owners, names = {}, {}
    for name, x in arrays.items():
        try:
            array_namespace(x)
            owners[name] = framework_of(name, x)
        except TypeError:
            raise ArgumentTypeError(f"{name} is a {type(x).__name__}; accepted: {ACCEPTED}", "merge_states") from None
        names[name] = owners[name].dtype(x)
    if len(set(owners.values())) > 1:
        came = ", ".join(f"{name} {owner.name}" for name, owner in owners.items())
        raise ArgumentTypeError(
            f"arrays of different frameworks: {came}; accepted: one framework for all", "merge_states"
        )
    if len({str(device(x)) for x in arrays.values()}) > 1:
        came = ", ".join(f"{name} on {device(x)}" for name, x in arrays.items())
        raise ArgumentValueError(f"arrays on different devices: {came}; accepted: one device for all", "merge_states")
    for pair, accepted in ((("o1", "o2"), ("float16", "bfloat16", "float32", "float64")),
                           (("lse1", "lse2"), ("float32", "float64"))):  # fmt: skip
        one, other = (names[name] for name in pair)
        if one != other or one not in accepted:
            raise ArgumentTypeError(
                f"{pair[0]} is {one} and {pair[1]} {other}; accepted: one dtype for both, "
                f"of {', '.join(accepted)}",
                "merge_states",
            )
    shape = tuple(o1.shape)
    if len(shape) < 2 or (layout == "BSHD" and len(shape) not in (3, 4)):
        axes = "2 or more axes (..., seqlen, head_dim)" if layout == "BHSD" else "4 axes (BSHD) or 3 (SHD)"
        raise ArgumentValueError(f"o1 is {shape}; accepted for layout {layout!r}: {axes}", "merge_states")
    rows = shape[:-1] if layout == "BHSD" else (*shape[:-3], shape[-2], shape[-3])
    for name, expected in (("o2", shape), ("lse1", rows), ("lse2", rows)):
        if tuple(arrays[name].shape) != expected:
            raise ArgumentValueError(
                f"{name} is {tuple(arrays[name].shape)} with o1 {shape}; accepted: {expected}",
                "merge_states",
            )
    xp = array_namespace(*arrays.values())
    return xp, xp.float64 if "float64" in names.values() else xp.float32, (o1.dtype, lse1.dtype)
