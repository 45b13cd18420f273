"""Bits of arrays, and packed sequences: where they begin, and on a GPU their bits against a call for each.

Importing this needs no GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_varlen

# One token, odd lengths, whole tiles, and two of one length.
LENGTHS = {
    True: ([300, 1, 65, 0, 128, 65, 401], [300, 70, 65, 9, 130, 65, 530]),
    False: ([300, 1, 65, 0, 128, 65, 401], [100, 70, 1, 9, 300, 65, 530]),
}


def on_the_cpu(name: str, module: Any, *arrays: np.ndarray) -> list[Any]:
    """Host arrays as those of PyTorch or JAX, which by default takes a GPU where there is one."""
    if name == "torch":
        return [module.from_numpy(x) for x in arrays]
    return [module.device_put(x, module.devices("cpu")[0]) for x in arrays]


def starts(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def words(x: Any) -> Any:
    """The same memory as unsigned integers, which are equal only where signs of zeros and bits of NaN are."""
    return x.view(f"u{x.dtype.itemsize}")


def bits(x: Any) -> np.ndarray:
    """words(x) on the host."""
    return words(x if isinstance(x, np.ndarray) else x.get())


def assert_same_bits(x: Any, y: Any) -> None:
    """Of two arrays on a GPU, compared there."""
    assert x.shape == y.shape and x.dtype == y.dtype
    assert bool((words(x) == words(y)).all())


def unlike_alone(
    results: tuple[Any, Any, Any], q: Any, k: Any, v: Any, lengths_q: list[int], lengths_k: list[int], **options: Any
) -> list[str]:
    """What of which sequence in ``results`` (o, lse and statistics of packed queries) is not that of a call of its own
    on packed q, k and v: bits, path or density."""
    o, lse, stats = results
    found = []
    rows = zip(itertools.pairwise(starts(lengths_q)), itertools.pairwise(starts(lengths_k)), strict=True)
    for i, ((a, b), (c, d)) in enumerate(rows):
        own_o, own_lse, own = s2o_attention(
            q[a:b], k[c:d], v[c:d], layout="BSHD", return_lse=True, return_stats=True, **options
        )
        pairs = {"o": (o[a:b], own_o), "lse": (lse[:, a:b], own_lse), "visited": (stats[i].visited, own.visited)}
        found += [f"{name} of sequence {i}" for name, (x, y) in pairs.items() if not np.array_equal(bits(x), bits(y))]
        if (stats[i].path, stats[i].path_reason) != (own.path, own.path_reason):
            found.append(f"path of sequence {i}")
        if stats[i].density != own.density:
            found.append(f"density of sequence {i}")
    return found


def differing(
    q: Any, k: Any, v: Any, lengths_q: list[int], lengths_k: list[int], config: S2OConfig, **options: Any
) -> list[str]:
    """What of which sequence is not, bit for bit, that of a call of its own. CuPy arrays as in a packed batch."""
    import cupy

    out = cupy.full(q.shape, np.nan, q.dtype)
    results = s2o_attention_varlen(
        q, k, v, starts(lengths_q), starts(lengths_k), config=config, out=out, return_lse=True, return_stats=True,
        **options,
    )  # fmt: skip
    return unlike_alone(results, q, k, v, lengths_q, lengths_k, config=config, **options)


def differing_on(path: str, is_causal: bool, head_dim: int) -> list[str]:
    """The same of `LENGTHS`, all of them attended densely, in bfloat16."""
    import cupy
    import ml_dtypes

    rng = np.random.default_rng(0)
    lengths = LENGTHS[is_causal]
    shapes = [(sum(lengths[0]), 4, head_dim), *[(sum(lengths[1]), 2, head_dim)] * 2]
    q, k, v = (cupy.asarray(rng.standard_normal(shape).astype(ml_dtypes.bfloat16)) for shape in shapes)
    return differing(q, k, v, *lengths, S2OConfig(dense_up_to=1000, path=path), is_causal=is_causal)
