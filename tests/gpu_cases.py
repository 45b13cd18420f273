"""Small problems that take the kernels through every branch: for test_gpu.py, and for sanitize.py.

Importing this needs no GPU and no CuPy.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from s2o_cupy import S2OConfig
from s2o_cupy.problem import Problem, validate
from s2o_cupy.tools.diffing import DiffReport, capture, compare

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
NAN, INF = float("nan"), float("inf")
UNKNOWN = 8200, 8600  # keys of 9,000 that no moments are taken from; samples meet some
HEAVIER = {"12 bits heavier": 12, "50 bits heavier": 50}  # arrange: by so many bits some late ones of these are,
FEW_HEAVIER = {"32 keys 20 bits heavier": 20}  # or two runs, of which samples may meet one key
# All are so many bits below what is found, but one that is so many above: of 4,000 keys an odd sample of a late part.
SUDDEN = {"one key of all": (120, 29), "one key far above all": (80, 60)}
SUDDEN_KEY = 2529
# A configuration for each path with several segments in short sequences.
PATHS = {
    "portable": S2OConfig(segment=256, tau=0.05, block_m=64, block_n=64, path="portable", dense_up_to=0),
    "hopper": S2OConfig(segment=256, tau=0.05, path="hopper", dense_up_to=0),
}


@dataclass(frozen=True)
class Case:
    """A problem; every field has a value that is quick and uses both passes."""

    dtype: str = "bfloat16"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    seqlen_q: int = 400
    seqlen_k: int | None = None
    head_dim: int = 64
    is_causal: bool = True
    scale: float | None = None
    softcap: float = 0.0
    segment: int = 128
    tau: float | tuple[float, ...] = 0.05
    block_m: int = 128
    block_n: int = 128
    options: dict[str, Any] = field(default_factory=dict)  # of S2OConfig
    arrange: str = "contiguous"
    poison: tuple[str, int | tuple[int, int], float] | None = None  # (q, k or v; its row or rows; what is put there)
    # Values are keys' squares: no regression on scores knows what a tail's samples say.
    squares: bool = field(default=False, repr=False)
    value_scale: float = field(default=1.0, repr=False)

    def config(self, path: str = "auto") -> S2OConfig:
        return S2OConfig(self.segment, self.tau, self.block_m, self.block_n, path=path, **self.options)

    def problem(self) -> Problem:
        seqlen_k = self.seqlen_q if self.seqlen_k is None else self.seqlen_k
        q = (self.batch, self.heads, self.seqlen_q, self.head_dim)
        k = (self.batch, self.kv_heads, seqlen_k, self.head_dim)
        return validate(
            (q, k, k),
            [self.dtype] * 3,
            config=self.config(),
            backend="cupy",
            is_causal=self.is_causal,
            scale=self.scale,
            softcap=self.softcap,
        )

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v on the host. Runs of 16 keys differ in importance by a few nats, so that S2O stops early."""
        rng = np.random.default_rng(zlib.crc32(repr(self).encode()))
        p, dtype = self.problem(), DTYPES[self.dtype]
        q = rng.standard_normal((p.batch, p.heads, p.seqlen_q, p.head_dim))
        k, v = rng.standard_normal((2, p.batch, p.kv_heads, p.seqlen_k, p.head_dim))
        direction = np.sqrt(3) * p.head_dim**-0.25
        importance = rng.standard_normal((p.batch, p.kv_heads, -(-p.seqlen_k // 16), 1))
        k += direction * importance.repeat(16, axis=2)[:, :, : p.seqlen_k]
        q += direction
        bits = (HEAVIER | FEW_HEAVIER).get(self.arrange)
        if bits:  # to every other query, and behind others in the order of their mean
            at = np.sqrt(bits * np.log(2) / p.scale)
            q[..., 0] = np.where(np.arange(p.seqlen_q) % 2, at, -at)
            k[..., 8400:8432, 0] = at
        if self.arrange in HEAVIER:
            first, early = np.quantile(importance, (0.85, 0.6))
            of_keys, unknown = importance.repeat(16, axis=2)[:, :, : p.seqlen_k, 0], slice(*UNKNOWN)
            k[..., 0] = 0.6 * at * ((of_keys < first) & (np.arange(p.seqlen_k) < p.seqlen_k - p.seqlen_q))
            k[..., unknown, 0] = at * (of_keys[..., unknown] < early)
        if self.arrange in SUDDEN:
            low, high = SUDDEN[self.arrange]
            below, at = (np.sqrt(bits * np.log(2) / p.scale) for bits in (low, low + high))
            q[:], k[:] = 0, 0
            q[..., 2], k[:, :, : p.seqlen_k - p.seqlen_q, 2] = below, -below
            q[..., 0], k[..., SUDDEN_KEY, 0] = np.where(np.arange(p.seqlen_q) % 2, at, -at), at
        arrays = {"q": q, "k": k, "v": self.value_scale * (k**2 if self.squares else v)}
        if self.arrange in HEAVIER:
            arrays["v"][:, :, slice(*UNKNOWN)] += 5
            arrays["v"][..., 0] = 0  # of which a regression would know much
        if self.poison:
            name, row, value = self.poison
            arrays[name][:, -1, slice(*row) if isinstance(row, tuple) else row, p.head_dim // 2] = value
        if self.arrange == "one key for all":  # a stride of 0 wants equal rows
            arrays["k"][:], arrays["v"][:] = arrays["k"][:, :, :1], arrays["v"][:, :, :1]
        if self.arrange == "zeros first":
            arrays["k"][:, :, :128] = 0
        if self.arrange == "one head for all":
            arrays["q"][:] = arrays["q"][:, :1]
        host = [arrays[name].astype(dtype) for name in "qkv"]
        return host[0], host[1], host[2]

    @property
    def hopper(self) -> bool:
        """Whether the Hopper kernels take it."""
        elsewhere = self.arrange in ("one element in", "odd row stride", "sequence backwards")
        tiles = self.block_n == 128 and (self.block_m == 128 or self.head_dim <= 128)
        head_dim = self.head_dim % 8 == 0
        return tiles and head_dim and not elsewhere and (self.scale is None or self.scale > 1e-37)


CASES: dict[str, Case] = {
    f"{dtype}, head_dim {head_dim}": Case(dtype=dtype, head_dim=head_dim)
    for dtype in DTYPES
    for head_dim in (1, 8, 33, 64, 72, 80, 96, 127, 128, 129, 136, 192, 256)
}
_KEYS: dict[str, Any] = {"options": {"unit": 1}}  # in order one by one
_ROUNDS: dict[str, Any] = {"options": {"unit": 1, "workspace_bytes": 1 << 20}}
_LATE: tuple[tuple[str, int, dict[str, Any]], ...] = (  # rank, unit, and more: what comes late, if it comes
    ("weight", 8, {}),
    ("weight", 8, {"poison": ("v", UNKNOWN, NAN)}),
    *(("mean", 1, {"arrange": arrange}) for arrange in HEAVIER | FEW_HEAVIER),
)
_CHANGES: tuple[dict[str, Any], ...] = (
    # Lengths around tiles and segments.
    {"seqlen_q": 1},
    {"seqlen_q": 1, "seqlen_k": 300},
    {"seqlen_q": 63, "seqlen_k": 64, "segment": 32},
    {"seqlen_q": 127, "segment": 64},
    {"seqlen_q": 129},
    {"seqlen_q": 257, "seqlen_k": 1000},
    {"seqlen_q": 200, "seqlen_k": 201},
    {"seqlen_q": 100, "seqlen_k": 700},
    # Segments.
    {"segment": 1, "seqlen_q": 70},
    {"segment": 2, "seqlen_q": 70},
    {"segment": 100},
    {"segment": 256, "seqlen_q": 700},
    {"segment": 1000, "seqlen_q": 300, "seqlen_k": 500},
    {"segment": 8192, "seqlen_q": 8300, "heads": 1, "seqlen_k": 8400, "head_dim": 16},
    # Tiles.
    {"block_m": 64, "head_dim": 128},
    {"block_m": 64, "block_n": 64},
    {"block_n": 64, "head_dim": 128},
    {"block_n": 192, "seqlen_q": 1000},
    {"block_n": 1024, "seqlen_q": 1500, "segment": 256},
    {"block_m": 64, "block_n": 192, "segment": 100, "seqlen_q": 777},
    {"block_m": 64, "head_dim": 256},
    {"block_m": 64, "block_n": 64, "head_dim": 160, "segment": 100, "seqlen_q": 777},
    {"block_n": 192, "head_dim": 256, "seqlen_q": 1000},
    # Tiles of 64 queries, of which a multiprocessor of Hopper holds two.
    *({"block_m": 64, "seqlen_q": 900, "head_dim": head_dim, "tau": 0.2, **more} for head_dim in (40, 64, 128)
      for more in ({}, {"softcap": 3.0}, {"segment": 100, "batch": 2}, {"options": {"dense_last": 300}, "heads": 4},
                   {"dtype": "float16", "is_causal": False, "seqlen_k": 1300})),
    {"block_m": 64, "tau": (0.5, 0.0, 0.01, INF), "heads": 4, "seqlen_q": 900, "head_dim": 128},
    {"block_m": 64, "segment": 64, "seqlen_q": 700, "head_dim": 128, "options": {"unit": 1}},
    {"block_m": 64, "seqlen_q": 3000, "heads": 8, "head_dim": 64},  # more than run at once
    *({"block_m": 64, "seqlen_q": 500, "poison": (name, 100, value)} for name in "qkv" for value in (NAN, INF)),
    # Norms of a segment's queries that differ by more than sums of 8-bit integers may begin with, of units with large
    # keys and of units with keys that are all alike.
    {"scale": 40.0, "seqlen_q": 900, "head_dim": 128, "options": {"clusters": 4}},
    {"scale": -40.0, "seqlen_q": 900, "head_dim": 64, "arrange": "one key for all"},
    # Stopping.
    {"tau": 0.0, "head_dim": 128},
    {"tau": 0.0, "head_dim": 256},
    {"tau": 1e-3, "head_dim": 128, "seqlen_q": 900},
    {"tau": 10.0, "seqlen_q": 900},
    {"tau": INF, "seqlen_q": 900},
    {"tau": (0.5, 0.0, 0.01, 0.1), "heads": 4, "kv_heads": 2, "batch": 2, "head_dim": 128, "seqlen_q": 900},
    {"tau": (0.5, 0.0, 0.01, 0.1), "heads": 4, "head_dim": 256, "seqlen_q": 900, "options": {"tail": "first_order"}},
    {"tau": (0.5, 0.0), "block_m": 64, "block_n": 64, "seqlen_q": 900},
    # The last queries visit all keys, in rounds by segments too; keys behind them, and more than are sorted at once.
    *({"options": {"dense_last": last}, "heads": 4, "kv_heads": 2, "seqlen_q": 900, "head_dim": 128, "tau": 0.2}
      for last in (1, 300, 900)),
    {"options": {"dense_last": 100, "rank": "mean"}, "seqlen_q": 500, "seqlen_k": 17_500, "tau": 0.2},
    {"options": {"dense_last": 100}, "is_causal": False, "seqlen_q": 500, "seqlen_k": 777, "tau": 0.2},
    {"options": {"dense_last": 200}, "is_causal": False, "batch": 2, "seqlen_q": 500, "seqlen_k": 9000},
    {"options": {"dense_last": 200}, "heads": 2, "kv_heads": 1, "seqlen_q": 300, "seqlen_k": 70_000, "head_dim": 64},
    {"options": {"dense_last": 200}, "batch": 4, "heads": 4, "kv_heads": 2, "seqlen_q": 500, "seqlen_k": 5000},
    *({"options": {"dense_last": 200}, "batch": 2, "seqlen_q": 500, "seqlen_k": 4500, "head_dim": 128, **more}
      for more in ({"softcap": 3.0}, {"arrange": "sequence backwards"}, {"arrange": "one element in"},
                   {"arrange": "one element in", "softcap": 3.0}, {"poison": ("v", 4200, NAN)},
                   {"poison": ("k", 100, INF)})),
    {"options": {"dense_last": 1500, **_ROUNDS["options"]}, "batch": 2, "seqlen_q": 4000, "head_dim": 16},
    # Heads.
    {"batch": 2, "heads": 8, "kv_heads": 1, "seqlen_q": 300},
    {"batch": 2, "heads": 6, "kv_heads": 2, "seqlen_q": 300},
    {"batch": 3, "heads": 3, "kv_heads": 3, "seqlen_q": 300},
    {"batch": 2, "heads": 1, "kv_heads": 1, "seqlen_q": 300},
    # Without causality.
    {"is_causal": False, "head_dim": 128},
    {"is_causal": False, "head_dim": 256},
    {"is_causal": False, "seqlen_q": 300, "seqlen_k": 700},
    {"is_causal": False, "seqlen_q": 700, "seqlen_k": 300},
    {"is_causal": False, "seqlen_q": 130, "seqlen_k": 2},
    {"is_causal": False, "seqlen_q": 1, "seqlen_k": 1},
    {"is_causal": False, "seqlen_q": 500, "block_m": 64, "block_n": 64, "options": {"window": 70}},
    # Scales.
    {"scale": 0.0},
    {"scale": -0.1, "head_dim": 128},
    {"scale": -0.1, "options": {"rank": "max"}},
    {"scale": 1.0},
    {"scale": 1e-40},  # 0 in float32
    # Capped scores.
    *(
        {"softcap": 5.0, "head_dim": head_dim, "dtype": dtype, "tau": 0.2, "seqlen_q": 900}
        for head_dim in (64, 128, 256)
        for dtype in DTYPES
    ),
    *({"softcap": softcap, "head_dim": 128, "scale": 1.0} for softcap in (1e-3, 50.0, 1e6)),
    {"softcap": 2.0, "scale": -0.3, "head_dim": 80, "options": {"window": 30}},
    {"softcap": 2.0, "block_m": 64, "block_n": 64, "head_dim": 128, "tau": 0.1, "seqlen_q": 700},
    {"softcap": 2.0, "block_m": 64, "head_dim": 200, "arrange": "one element in", "tau": 0.1},
    {"softcap": 2.0, "is_causal": False, "seqlen_k": 700, "tau": 0.2},
    {"softcap": 2.0, "tau": 0.0, "head_dim": 33},
    {"softcap": 2.0, "seqlen_q": 3000, "segment": 512, "head_dim": 128, "tau": 0.05},
    *({"softcap": 2.0, "poison": (name, 200, value), "seqlen_q": 300} for name in "qkv" for value in (NAN, INF)),
    # Ranks; a short last segment leaves runs of queries short or empty.
    {"options": {"rank": "max"}},
    {"options": {"rank": "max", "pooled_queries": 7}, "seqlen_q": 300, "head_dim": 128},
    {"options": {"rank": "max", "pooled_queries": 7}, "seqlen_q": 300, "head_dim": 256},
    {"options": {"rank": "max", "pooled_queries": 64}, "segment": 20, "seqlen_q": 111},
    {"options": {"rank": "max", "pooled_queries": 1}},
    {"options": {"rank": "max", "pooled_queries": 3}, "segment": 300, "seqlen_q": 1000, "head_dim": 128},
    {"options": {"rank": "max", "pooled_queries": 3}, "segment": 300, "seqlen_q": 1000, "head_dim": 250},
    {"options": {"rank": "max", "pooled_queries": 5}, "is_causal": False, "seqlen_k": 500},
    {"options": {"rank": "mean"}},
    {"options": {"rank": "mean", "tail": "first_order"}},
    *({"options": {"tail": "first_order"}, "head_dim": head_dim, "seqlen_q": 900} for head_dim in (64, 128, 256)),
    {"options": {"rank": "mean"}, "is_causal": False, "head_dim": 128},
    {"options": {"pooled_queries": 7}, "seqlen_q": 1500, "head_dim": 128},
    {"options": {"pooled_queries": 256}, "segment": 20, "seqlen_q": 311},
    {"options": {"pooled_queries": 40}, "segment": 320, "seqlen_q": 1500, "head_dim": 128},  # several tiles of them
    {"options": {"pooled_queries": 256}, "segment": 1024, "seqlen_q": 2500, "head_dim": 256},
    *({"options": {"rank": "weight"}, "seqlen_q": 900, "head_dim": head_dim} for head_dim in (64, 128, 256)),
    {"options": {"rank": "weight"}, "seqlen_q": 500, "seqlen_k": 777, "is_causal": False, "scale": -0.1},
    {"options": {"rank": "weight", "tail": "first_order", "unit": 4}, "seqlen_q": 1300, "head_dim": 128},
    # Samples of 4,000 keys and, twice as many, of 9,000; values that are not finite, in the moments and among samples
    # alone, or almost not.
    *(
        {"options": {"rank": "mean", "tail": "first_order"}, "squares": True, "tau": 1000.0, "seqlen_q": 300,
         "seqlen_k": 9000, "segment": 64, "head_dim": head_dim, "scale": 0.6 * head_dim**-0.5, **more}
        for head_dim in (64, 128, 256)
        for more in ({}, {"dtype": "float16"}, {"seqlen_k": 4000}, {"poison": ("v", 1000, INF)},
                     {"poison": ("v", UNKNOWN, NAN)}, {"poison": ("v", UNKNOWN, 1e30)})
    ),
    # Of the elements that halves of samples are compared by: squares beyond float32, and where only their sum is.
    {"options": {"rank": "mean", "tail": "first_order"}, "squares": True, "tau": 1000.0, "seqlen_q": 300,
     "seqlen_k": 9000, "segment": 64, "scale": 0.075, "value_scale": 3e18},
    {"options": {"rank": "mean", "tail": "first_order"}, "squares": True, "tau": 1000.0, "seqlen_q": 300,
     "seqlen_k": 9000, "segment": 64, "head_dim": 32, "scale": 0.1, "poison": ("v", UNKNOWN, 1e30)},
    *(
        {"options": {"rank": rank, "tail": "first_order", "unit": unit}, "squares": True, "tau": 1000.0,
         "seqlen_q": 300, "seqlen_k": 9000, "segment": 128, "head_dim": 128, "scale": 0.053, "dtype": dtype, **more}
        for dtype in ("bfloat16", "float16") for rank, unit, more in _LATE
    ),
    *(
        {"options": {"rank": rank, "tail": "first_order"}, "tau": 1000.0, "seqlen_q": 128, "seqlen_k": 4000,
         "head_dim": 128, "scale": 1.0, "dtype": dtype, "arrange": arrange}
        for rank in ("mean", "query") for dtype in DTYPES for arrange in SUDDEN
    ),
    # Sums of weights and values beyond float32, and of squares of weights below it.
    *(
        {"options": {"rank": "mean", "tail": "first_order"}, "tau": 1000.0, "seqlen_q": 128, "seqlen_k": 4000,
         "head_dim": 128, "scale": 1.0, "arrange": arrange, "poison": ("v", row, value)}
        for row, value in ((SUDDEN_KEY, 1e36), ((3872, 4000), 0.0)) for arrange in SUDDEN
    ),
    # Each query by itself: two groups of keys, four or eight, segments of up to 128 queries and longer, short last
    # ones, more blocks of units than one, and without causality units between them on three sides.
    *({"options": {"clusters": clusters}, "segment": 128, "seqlen_q": 900, "head_dim": head_dim}
      for clusters in (2, 4) for head_dim in (64, 96, 256)),
    *({"options": {"unit": 16, "clusters": clusters}, "segment": 128, "seqlen_q": 2300, "head_dim": head_dim}
      for clusters in (4, 8) for head_dim in (64, 128)),
    *({"segment": 128, "seqlen_q": 2900, "head_dim": head_dim, "tau": 0.1} for head_dim in (64, 128, 256)),
    *({"segment": 128, "seqlen_q": 300, "seqlen_k": 5000 + more, "is_causal": False, "head_dim": 128, "dtype": dtype}
      for more in (0, 33) for dtype in DTYPES),
    {"segment": 100, "heads": 6, "kv_heads": 2, "batch": 2, "seqlen_q": 777, "seqlen_k": 2003, "head_dim": 40},
    {"segment": 128, "scale": -0.2, "seqlen_q": 700, "head_dim": 128},
    {"segment": 128, "scale": 30.0, "seqlen_q": 700, "head_dim": 64},
    {"segment": 128, "scale": 1e-5, "seqlen_q": 700, "head_dim": 128},
    *({"segment": 128, "poison": (name, 200, value), "seqlen_q": 700, "head_dim": 128}
      for name in "qk" for value in (NAN, INF)),
    {"segment": 128, "seqlen_q": 700, "head_dim": 72, "arrange": "one element in"},
    # Fewer queries than a q tile of a segment of several: they are in order there.
    *({"segment": 256, "seqlen_q": seqlen_q, "seqlen_k": 700, "head_dim": head_dim,
       "options": {"rank": rank, "unit": 16}}
      for seqlen_q, head_dim in ((1, 64), (100, 128), (128, 128), (64, 256)) for rank in ("query", "weight")),
    *({"segment": 128, "seqlen_q": 900, "head_dim": head_dim, "arrange": "zeros first"} for head_dim in (64, 128)),
    {"segment": 128, "options": {"unit": 1}, "seqlen_q": 500, "head_dim": 128},
    {"segment": 128, "options": {"unit": 128, "window": 40}, "seqlen_q": 900, "head_dim": 64},
    # Units of keys: a key, more of them than a segment or a key tile has queries or keys, and lengths around them.
    *(
        {"options": {"unit": unit}, "seqlen_q": 700, "head_dim": head_dim}
        for unit in (1, 2, 64, 128)
        for head_dim in (64, 256)
    ),
    {"options": {"unit": 128}, "block_m": 64, "block_n": 64, "seqlen_q": 700},
    {"options": {"unit": 32}, "segment": 40, "seqlen_q": 300, "seqlen_k": 777, "head_dim": 128},
    *({"seqlen_q": 300, "seqlen_k": 400 + more, "is_causal": False} for more in (0, 1, 15, 16, 17)),
    {"seqlen_q": 300, "seqlen_k": 7, "is_causal": False},  # no whole unit
    {"seqlen_q": 100, "seqlen_k": 8292 * 16 + 5, "is_causal": False, "head_dim": 8, "heads": 1},
    {"options": {"unit": 8}, "seqlen_q": 100, "seqlen_k": 131_877, "is_causal": False, "head_dim": 8, "heads": 1},
    {"options": {"unit": 4}, "seqlen_q": 300, "seqlen_k": 40_003, "is_causal": False, "head_dim": 16, "heads": 1},
    {"segment": 64, "seqlen_q": 1500, "seqlen_k": 2400, "heads": 4},
    {"segment": 1024, "seqlen_q": 3000, "head_dim": 128, "tau": 0.01},  # full runs
    {"segment": 1024, "seqlen_q": 3000, "head_dim": 256, "tau": 0.01, "heads": 1},
    {"segment": 64, "seqlen_q": 1500, "seqlen_k": 2400, "head_dim": 256},
    # More units than a tile of unit_weights_sm90 has, and more segments than a block; 16 pooled queries and 17.
    {"options": {"unit": 8}, "heads": 4, "kv_heads": 2, "seqlen_q": 2600, "head_dim": 128},
    {"options": {"unit": 8}, "dtype": "float16", "seqlen_q": 2600, "seqlen_k": 2777, "batch": 2, "head_dim": 72},
    {"options": {"unit": 4, "window": 100}, "seqlen_q": 1300, "seqlen_k": 2003, "is_causal": False, "head_dim": 64},
    {"options": {"unit": 2}, "segment": 32, "seqlen_q": 700, "seqlen_k": 1500, "head_dim": 128, "scale": -0.1},
    {"options": {"unit": 8, "pooled_queries": 16}, "segment": 300, "seqlen_q": 1600, "head_dim": 128},
    {"options": {"unit": 8, "pooled_queries": 17}, "segment": 300, "seqlen_q": 1600, "head_dim": 128},
    {"seqlen_q": 300, "seqlen_k": 5000, "is_causal": False, "head_dim": 72},
    # head_dim 64 without a tail: gathered, by boxes, and lists that end within a box.
    {"options": {"rank": "weight"}, "seqlen_q": 1500, "head_dim": 64, "dtype": "float16", "tau": 0.0},
    *({"options": {"rank": "weight", "unit": unit}, "seqlen_q": 900, "seqlen_k": 1203, "is_causal": False,
       "head_dim": 64} for unit in (8, 16)),
    {"options": {"rank": "weight"}, "seqlen_q": 900, "head_dim": 64, "softcap": 5.0, "batch": 2},
    {"options": {"rank": "weight"}, "seqlen_q": 700, "head_dim": 64, "poison": ("v", 200, NAN)},
    {"options": {"rank": "mean"}, "seqlen_q": 1500, "segment": 512, "head_dim": 64, "tau": 0.01},
    # More q tiles than an H200 has blocks.
    *({"options": {"rank": "weight", "unit": unit}, "seqlen_q": 2000, "heads": 32, "kv_heads": 8, "head_dim": 64,
       "tau": 0.2} for unit in (8, 16)),
    # Windows.
    {"options": {"window": 1}},
    {"options": {"window": 50}, "head_dim": 128},
    {"options": {"window": 300}, "seqlen_q": 700},
    {"options": {"window": 5000}},
    {"options": {"window": 1 << 40}},
    # Many rounds of the workspace: by heads, by segments, and by both.
    {"batch": 4, "heads": 24, "kv_heads": 4, "seqlen_q": 1500, "head_dim": 8, **_ROUNDS},
    {"batch": 2, "heads": 4, "seqlen_q": 4000, "head_dim": 16, **_ROUNDS},
    {"heads": 7, "seqlen_q": 300, "seqlen_k": 40_000, "head_dim": 8, **_ROUNDS},
    {"seqlen_q": 300, "seqlen_k": 140_000, "head_dim": 8, **_ROUNDS},
    {"batch": 4, "heads": 24, "kv_heads": 4, "seqlen_q": 1500, "segment": 32, "options": {"workspace_bytes": 1 << 20}},
    # About as many candidates as each kernel's sorts hold, and more.
    *(
        {"seqlen_q": 100, "seqlen_k": 100 + most + more, "heads": 1, **_KEYS}
        for most in (1024, 2048, 3072, 4096, 6144, 12_288)
        for more in (-1, 0, 1)
    ),
    *({"seqlen_q": 100, "seqlen_k": 100 + most + more, "heads": 1, **_KEYS}
      for most in (8192, 16_384) for more in (-1, 0, 1, 7, 2000)),
    {"seqlen_q": 1300, "seqlen_k": 4500, "segment": 300, "heads": 1, **_KEYS},
    {"seqlen_q": 1300, "seqlen_k": 8600, "segment": 300, "heads": 4, "kv_heads": 2, **_KEYS},
    *({"seqlen_q": 1300, "seqlen_k": keys, "segment": 512, "heads": 1, "is_causal": False, **_KEYS}
      for keys in (4000, 6000, 9600, 17_600)),
    {"seqlen_q": 1300, "seqlen_k": 9603, "segment": 500, "heads": 1, "is_causal": False, "head_dim": 128, **_KEYS},
    {"seqlen_q": 1300, "seqlen_k": 17_603, "segment": 500, "heads": 1, "is_causal": False, "head_dim": 16, **_KEYS},
    {"seqlen_q": 1000, "seqlen_k": 17_000, "segment": 300, "heads": 4, "options": {"window": 77, "unit": 1}},
    {"seqlen_q": 200, "seqlen_k": 40_003, "heads": 1, "is_causal": False, "head_dim": 8, **_KEYS},
    *({"seqlen_q": 100, "seqlen_k": keys, "heads": 1, "scale": 0.0, **_KEYS} for keys in (9100, 17_100)),
    *({"seqlen_q": 20, "seqlen_k": (1 << 18) + more, "heads": 1, "head_dim": 8, **_KEYS} for more in (20, 21, 40_001)),
    *({"seqlen_q": 100, "seqlen_k": keys, "heads": 1, "poison": ("k", row, value), **_KEYS}
      for keys in (9000, 17_000) for row in (17, keys - 1000) for value in (NAN, INF, -INF)),
    # Places in memory.
    *(
        {"arrange": arrange, "head_dim": 80, "batch": 2}
        for arrange in (
            "one element in", "odd row stride", "BSHD", "fused", "sequence backwards", "one key for all",
            "one head for all",
        )
    ),
    *(
        {"arrange": arrange, "head_dim": head_dim, "block_m": block_m}
        for arrange, head_dim, block_m in (
            ("one element in", 256, 128), ("one element in", 256, 64), ("fused", 192, 128),
        )
    ),
    # Values.
    *(
        {"poison": (name, row, value), "seqlen_q": 300}
        for name in "qkv"
        for row in (5, 200)
        for value in (NAN, INF, -INF)
    ),
    *(
        {"dtype": "float16", "poison": (name, row, value), "seqlen_q": 300, "head_dim": 128}
        for name, row, value in (("q", 200, INF), ("q", 200, NAN), ("k", 5, INF), ("k", 5, NAN))
    ),
    {"poison": ("q", 200, -INF), "seqlen_q": 300, "head_dim": 80, "arrange": "one element in"},
    {"poison": ("v", 200, NAN), "head_dim": 128, "is_causal": False},
    {"poison": ("v", 1000, NAN), "head_dim": 128, "segment": 1024, "seqlen_q": 3000},  # behind tiles without a mask
    {"poison": ("v", 1400, INF), "segment": 512, "seqlen_q": 1500},
    {"poison": ("v", 200, INF), "head_dim": 33},
    {"poison": ("v", 200, NAN), "head_dim": 256},
    {"poison": ("v", 300, INF), "head_dim": 131, "block_m": 64},
)  # fmt: skip
CASES |= {", ".join(f"{name} {value}" for name, value in changes.items()): Case(**changes) for changes in _CHANGES}

# A few of them, for tools that slow a GPU a hundredfold.
SANITIZED = (
    Case(seqlen_q=300, head_dim=128),
    Case(seqlen_q=300, head_dim=72, dtype="float16", options={"window": 30}),
    Case(seqlen_q=200, seqlen_k=333, head_dim=33, block_m=64, block_n=64),
    Case(seqlen_q=150, seqlen_k=290, arrange="one element in", options={"rank": "max"}),
    Case(seqlen_q=260, is_causal=False, batch=2, arrange="BSHD"),
    Case(seqlen_q=140, poison=("v", 130, NAN), head_dim=128),
    Case(seqlen_q=300, head_dim=128, block_m=64),
    Case(seqlen_q=600, segment=512, head_dim=128, poison=("v", 500, NAN)),  # behind tiles without a mask
    Case(seqlen_q=300, head_dim=256),
    Case(seqlen_q=600, segment=512, head_dim=256, poison=("v", 500, NAN)),
    Case(seqlen_q=300, head_dim=128, softcap=3.0),
    # Two blocks on a multiprocessor, by boxes and gathered, with more key tiles than places for votes.
    Case(seqlen_q=300, seqlen_k=1800, head_dim=64, tau=0.001, options={"rank": "weight"}),
    Case(seqlen_q=200, seqlen_k=1333, head_dim=64, tau=0.001, is_causal=False, options={"rank": "weight", "unit": 8}),
    Case(seqlen_q=270, head_dim=136, block_m=64, poison=("v", 260, NAN)),
    Case(seqlen_q=70, segment=20, options={"rank": "max", "pooled_queries": 64}),
    Case(seqlen_q=40, seqlen_k=140_000, head_dim=8, **_ROUNDS),
    *(Case(seqlen_q=60, seqlen_k=keys, head_dim=16, is_causal=False, **_KEYS) for keys in (5003, 9603, 17_003)),
    Case(seqlen_q=60, seqlen_k=333, is_causal=False, options={"unit": 32}),
    Case(seqlen_q=270, head_dim=72, options={"tail": "first_order"}),
    *(Case(seqlen_q=140, seqlen_k=8700, head_dim=128, segment=128, tau=1000.0, squares=True, scale=0.053,
           options={"tail": "first_order", **options})
      for options in ({"rank": "weight", "unit": 8}, {"rank": "mean"})),
    Case(seqlen_q=200, segment=100, head_dim=256, options={"unit": 64, "pooled_queries": 50}),
    Case(seqlen_q=300, seqlen_k=430, head_dim=33, arrange="odd row stride", options={"unit": 4}),
    Case(seqlen_q=20, seqlen_k=270_001, head_dim=8, heads=1, **_KEYS),
    # The last queries: all parts of a sequence, and a part of all sequences at a time.
    Case(seqlen_q=300, seqlen_k=4500, head_dim=128, options={"dense_last": 150}),
    Case(seqlen_q=150, seqlen_k=4300, head_dim=33, batch=3, options={"dense_last": 999}),
)


def place(x: Any, arrange: str) -> Any:
    """A CuPy array equal to ``x`` [B, H, S, D] that lies in memory as ``arrange`` says."""
    import cupy

    b, h, s, d = x.shape
    if arrange in {"contiguous", "zeros first", *HEAVIER, *FEW_HEAVIER, *SUDDEN}:
        return x
    if arrange == "one element in":
        view = cupy.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape)
    elif arrange == "odd row stride":
        view = cupy.zeros((b, h, s, d + 1), x.dtype)[..., :d]
    elif arrange == "BSHD":
        view = cupy.zeros((b, s, h, d), x.dtype).transpose(0, 2, 1, 3)
    elif arrange == "fused":  # as if cut out of one projection to q, k and v
        view = cupy.zeros((b, s, 3, h, d), x.dtype)[:, :, 1].transpose(0, 2, 1, 3)
    elif arrange == "sequence backwards":
        view = cupy.zeros(x.shape, x.dtype)[:, :, ::-1]
    elif arrange == "one key for all":
        return cupy.broadcast_to(x[:, :, :1], x.shape)
    elif arrange == "one head for all":
        return cupy.broadcast_to(x[:, :1], x.shape)
    else:
        raise ValueError(arrange)
    view[...] = x
    return view


def run_diff(case: Case, path: str) -> DiffReport:
    """The GPU on a case's arrays, where they lie, against the reference."""
    import cupy

    host = case.arrays()
    arranged = {"one key for all": "kv", "one head for all": "q"}.get(case.arrange, "qkv")
    q, k, v = (
        place(cupy.asarray(x), case.arrange if name in arranged else "contiguous")
        for name, x in zip("qkv", host, strict=True)
    )
    problem, config = case.problem(), case.config(path)
    return compare(capture(q, k, v, problem, config), *host, problem, config)
