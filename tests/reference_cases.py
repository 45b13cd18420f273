"""Small problems for tests of the NumPy reference, by hand or drawn."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from s2o_cupy.spec import RANKS, UNIT_RANKS, UNITS, Geometry, S2OConfig


class Case(NamedTuple):
    """One problem: [batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim], S2OConfig fields, causality."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    seqlen_q: int = 40
    seqlen_k: int = 40
    head_dim: int = 8
    config: dict = {}  # noqa: RUF012  read only
    is_causal: bool = True

    def geometry(self, config):
        return Geometry(self.seqlen_q, self.seqlen_k, config.segment, config.window, self.is_causal, config.unit)


def make(case, dtype=np.float64, seed=0):
    """q, k, v of ``case``, standard normal, and its S2OConfig with small tiles."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((case.batch, case.heads, case.seqlen_q, case.head_dim))
    k = rng.standard_normal((case.batch, case.kv_heads, case.seqlen_k, case.head_dim))
    v = rng.standard_normal(k.shape)
    config = S2OConfig(**{"segment": 16, "tau": 0.0, "block_m": 4, "block_n": 4, **case.config})
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), config


@st.composite
def cases(draw, /, **fixed):
    is_causal = draw(st.booleans())
    kv_heads = draw(st.integers(1, 2))
    seqlen_q = draw(st.integers(1, 60))
    rank = draw(st.sampled_from(RANKS))
    config = {
        "segment": draw(st.integers(1, 40)),
        "block_m": draw(st.integers(1, 20)),
        "block_n": draw(st.integers(1, 20)),
        "window": draw(st.sampled_from([0, 0, 1, 9, 100])),
        "rank": rank,
        "unit": draw(st.sampled_from(UNITS)) if rank in UNIT_RANKS else 1,
    }
    if rank != "query":  # which pools none
        config["pooled_queries"] = draw(st.integers(1, 20)) if rank != "mean" else 1
    values = {
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "seqlen_q": seqlen_q,
        "seqlen_k": draw(st.integers(seqlen_q if is_causal else 1, 90)),
        "head_dim": draw(st.integers(1, 9)),
        "config": config,
        "is_causal": is_causal,
    }
    return Case(**(values | fixed))
