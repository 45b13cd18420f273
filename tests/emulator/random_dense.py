"""Random calls at tau 0, where pass 2 visits all keys: whatever is planned for a call, it is dense attention.
python -m tests.emulator.random_dense --help."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from s2o_cupy._source_tree import SourceTreeFinder

from . import device, fake_cupy

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
UNITS = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # half the distance of two numbers around 1
LENGTHS = (1, 7, 63, 64, 65, 100, 127, 128, 129, 200, 256, 300, 400)  # of queries: around tiles and segments
MOST = 1.5e6  # scores of a call


@dataclass
class Call:
    """One, or of several sequences a packed one."""

    lengths_q: list[int]
    lengths_k: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    is_causal: bool
    scale: float | None
    softcap: float
    values: int  # the seed of q, k and v
    config: dict[str, Any] = field(default_factory=dict)  # of S2OConfig

    @classmethod
    def draw(cls, rng: random.Random) -> Call:
        pick = rng.choice
        kv_heads, is_causal, sequences = pick([1, 1, 2]), rng.random() < 0.75, pick([1, 1, 1, 2, 3])
        lengths_q = [pick(LENGTHS) for _ in range(sequences)]
        behind = [pick([0, 0, 1, 8, 100, 128, 272, 300, 700, 1500]) for _ in range(sequences)]
        lengths_k = [q + n if is_causal else pick([1, 8, 100, 300, 513, 1000])
                     for q, n in zip(lengths_q, behind, strict=True)]  # fmt: skip
        rank = pick(["query", "query", "weight", "mean", "max"])
        config = {
            "rank": rank, "segment": pick([16, 64, 100, 128, 128, 192, 256, 256, 300, 512, 1024]),
            "block_m": pick([128, 128, 64]), "window": pick([0, 0, 0, 50, 128]), "tail": pick(["none", "first_order"]),
            "workspace_bytes": pick([256 << 20, 1 << 20]), "dense_last": pick([None, None, None, 0, 1, 100, 256]),
            "unit": pick([None, 1, 4, 8, 16, 64, 128]) if rank in ("query", "weight") else None,
        }  # fmt: skip
        return cls(
            lengths_q, lengths_k, kv_heads * pick([1, 2, 3, 4]), kv_heads, pick([64, 64, 128, 128, 256, 80, 96, 40]),
            pick(list(DTYPES)), is_causal, pick([None, None, 1.0, 0.3]), pick([0.0, 0.0, 0.0, 30.0]),
            rng.randrange(1 << 30), config,
        )  # fmt: skip

    @property
    def scores(self) -> int:
        return self.heads * sum(q * k for q, k in zip(self.lengths_q, self.lengths_k, strict=True))

    def arrays(self) -> list[np.ndarray]:
        """q, k and v, packed: [tokens, heads, head_dim]."""
        rng = np.random.default_rng(self.values)
        total_q, total_k = sum(self.lengths_q), sum(self.lengths_k)
        sizes = ((total_q, self.heads), (total_k, self.kv_heads), (total_k, self.kv_heads))
        return [rng.standard_normal((*size, self.head_dim)).astype(DTYPES[self.dtype]) for size in sizes]

    def attended(self) -> tuple[np.ndarray, np.ndarray]:
        """By the kernels: o like q, and lse [heads, tokens]."""
        import cupy

        from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_varlen

        config = S2OConfig(tau=0, dense_up_to=0, **self.config)
        options: dict[str, Any] = {"config": config, "is_causal": self.is_causal, "scale": self.scale,
                                   "softcap": self.softcap, "return_lse": True}  # fmt: skip
        arrays = [cupy.asarray(x) for x in self.arrays()]
        if len(self.lengths_q) == 1:
            o, lse = s2o_attention(*(x[None] for x in arrays), layout="BSHD", **options)
            return cupy.asnumpy(o)[0], cupy.asnumpy(lse)[0]
        o, lse = s2o_attention_varlen(*arrays, self._starts(self.lengths_q), self._starts(self.lengths_k), **options)
        return cupy.asnumpy(o), cupy.asnumpy(lse)

    @staticmethod
    def _starts(lengths: list[int]) -> list[int]:
        return [0, *itertools.accumulate(lengths)]

    def wrong(self) -> list[str]:
        """What is further from dense attention than rounding allows: torture/exact.py says how far that is."""
        from s2o_cupy.reference import dense_attention

        o, lse = self.attended()
        found, unit = [], UNITS[self.dtype]
        capped = math.expm1(2 * 2.0**-11 * self.softcap)
        spans = [itertools.pairwise(self._starts(x)) for x in (self.lengths_q, self.lengths_k)]
        for i, (of_q, of_k) in enumerate(zip(*spans, strict=True)):
            rows = slice(*of_q)
            q, k, v = (x[slice(*of)].swapaxes(0, 1)[None].astype(np.float64)
                       for x, of in zip(self.arrays(), (of_q, of_k, of_k), strict=True))  # fmt: skip
            options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "is_causal": self.is_causal}
            exact, exact_lse = (x[0] for x in dense_attention(q, k, v, **options))
            absolute = dense_attention(q, k, np.abs(v), **options)[0][0]
            norm = lambda x: np.linalg.norm(x, axis=-1)  # noqa: E731
            allowed = (4 * unit + 2e-4 + capped) * norm(absolute) + 2 * unit * norm(exact) + 1e-6
            over = norm(o[rows].swapaxes(0, 1).astype(np.float64) - exact) / allowed  # [heads, rows]
            if not over.max() <= 1:
                found.append(f"sequence {i}: o[{int(over.argmax())}] is {over.max():.3g} times as far off as allowed")
            off = np.abs(lse[:, rows] - exact_lse) / (5e-4 + 1.1 * 2.0**-11 * self.softcap + 2e-5 * np.abs(exact_lse))
            if not off.max() <= 1:
                found.append(f"sequence {i}: lse is {off.max():.3g} times as far off as allowed")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90), help="compute capability times ten")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))  # what tests have kept of kernels is of "emulator"
    sys.meta_path.insert(0, SourceTreeFinder)  # this tree's kernels, whatever is installed
    device.settings.capability = options.capability
    fake_cupy.install()
    rng, wrong = random.Random(options.seed), 0
    calls = list(itertools.islice((x for x in iter(lambda: Call.draw(rng), None) if x.scores <= MOST), options.calls))
    for call in calls:
        if found := call.wrong():
            wrong += 1
            print(call, *found, sep="\n    ", flush=True)
    print(f"{len(calls) - wrong} of {len(calls)} agree")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
