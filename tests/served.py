"""A batch as serving engines have it: prompts, chunks of prompts and decoding in one, keys and values in pages."""

from __future__ import annotations

import functools
import importlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_rounding import allowed_error
from packs import starts

from s2o_cupy.reference import dense_attention

# (queries, keys) of each request. With SETTINGS S2O's are a prompt, a chunk of one and a prompt with a cached prefix.
LENGTHS = [(1, 300), (30, 30), (200, 200), (130, 500), (1, 64), (40, 400), (70, 350)]
KINDS = ["decoding", "short", "s2o", "s2o", "decoding", "few queries", "s2o"]
SETTINGS = {"tau": 0, "segment": 64, "block_m": 64, "block_n": 64, "min_seqlen": 100}
# On a GPU, with min_seqlen 128: two prompts, a chunk of one and a cached prefix are S2O's; page edges at both ends.
ON_GPU = [(1, 1300), (30, 30), (600, 600), (257, 1025), (1, 64), (40, 400), (130, 531), (128, 128)]
HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 32, 0.2


@functools.cache
def on_gpu(dtype: str) -> Served:
    """A batch on the GPU; what it should give is worked out once for all tests."""
    return Served.make(ON_GPU, heads=8, head_dim=128).to("cuda", getattr(torch, dtype))


def installed(module: str) -> Any:
    """A module of a serving engine, or None. To be asked before a stand-in takes the engine's name."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


@dataclass
class Served:
    """``q`` [tokens, heads, head_dim], packed; ``k`` and ``v`` [keys, kv_heads, head_dim] of each request."""

    lengths: list[tuple[int, int]]
    q: Any
    k: list[Any]
    v: list[Any]
    starts: list[int]

    @classmethod
    def make(
        cls, lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0, heads: int = HEADS, kv_heads: int = KV_HEADS,
        head_dim: int = HEAD_DIM,
    ) -> Served:  # fmt: skip
        make = torch.Generator().manual_seed(seed)
        begins = starts([seqlen_q for seqlen_q, _ in lengths])
        k, v = ([torch.randn(n, kv_heads, head_dim, generator=make) for _, n in lengths] for _ in "kv")
        return cls(lengths, torch.randn(begins[-1], heads, head_dim, generator=make), k, v, begins)

    @property
    def heads(self) -> tuple[int, int, int]:
        """heads, kv_heads, head_dim"""
        return self.q.shape[1], self.k[0].shape[1], self.q.shape[2]

    def to(self, device: str, dtype: Any) -> Served:
        q, *rest = (x.to(device, dtype) for x in (self.q, *self.k, *self.v))
        return Served(self.lengths, q, rest[: len(self.k)], rest[len(self.k) :], self.starts)

    def like(self, *shape: int, fill: float = 0.0) -> Any:
        return torch.full(shape, fill, dtype=self.q.dtype, device=self.q.device)

    def table(self, page_size: int, seed: int = 1) -> Any:
        """Each request's pages in the cache, in any order, none of them page 0, which SGLang leaves to padding; int32
        [requests, pages] on q's device."""
        counts = [-(-n // page_size) for _, n in self.lengths]
        order = iter((1 + np.random.default_rng(seed).permutation(sum(counts) + 5)).tolist())
        table = torch.full((len(counts), max(counts) + 3), -1, dtype=torch.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
        return table.to(self.q.device)

    def put(self, k_pages: Any, v_pages: Any, table: Any) -> None:
        """Keys and values to their places in a cache [pages, page_size, kv_heads, head_dim]."""
        page_size = k_pages.shape[1]
        for row, k, v in zip(table, self.k, self.v, strict=True):
            at = torch.arange(len(k), device=self.q.device)
            pages = row[at // page_size].long()
            k_pages[pages, at % page_size] = k.to(k_pages)
            v_pages[pages, at % page_size] = v.to(v_pages)

    def request(self, i: int) -> tuple[Any, Any, Any]:
        """q, k and v of one request, each [1, its heads, its rows, head_dim]."""
        q = self.q[self.starts[i] : self.starts[i + 1]]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, self.k[i], self.v[i]))
        return q, k, v

    def expected(self) -> Any:
        """Dense attention at SCALE, float32 [tokens, heads, head_dim] on the CPU."""
        return self._by_request(lambda q, k, v: dense_attention(q, k, v, scale=SCALE)[0])

    @functools.cached_property
    def _dense(self) -> tuple[Any, Any]:
        """Dense attention, and how far an element may be from it: one rounding of weights, one of the output."""
        dtype = str(self.q.dtype).removeprefix("torch.")

        def allowed(q: Any, k: Any, v: Any) -> Any:
            weight = dense_attention(q, k, np.abs(v), scale=SCALE)[0]  # sum p |v|
            return allowed_error(dtype, weight, q, k, scale=SCALE)

        return self.expected(), self._by_request(allowed)

    def assert_dense(self, o: Any) -> None:
        """``o``, [tokens, heads, head_dim] in q's dtype, is dense attention but for rounding, element by element."""
        expected, allowed = self._dense
        far = (o.float().cpu() - expected).abs() / allowed
        assert far.max() <= 1, far.max()  # NaN is not

    def _by_request(self, of_one: Any) -> Any:
        o = torch.empty(self.q.shape)
        for i, (begin, end) in enumerate(itertools.pairwise(self.starts)):
            arrays = [x.double().cpu().numpy() for x in self.request(i)]
            o[begin:end] = torch.from_numpy(of_one(*arrays)[0].swapaxes(0, 1))
        return o


def dense_from_pages(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, seqused_k: Any, block_table: Any, softmax_scale: float,
    **_: Any,
) -> None:  # fmt: skip
    """What flash-attn's function for a paged cache computes, causal, by plain tensor operations."""
    begins, page_size = cu_seqlens_q.tolist(), k.shape[1]
    for (begin, end), length, row in zip(itertools.pairwise(begins), seqused_k.tolist(), block_table, strict=True):
        at = torch.arange(length, device=q.device)
        pages = row[at // page_size].long()
        group = q.shape[1] // k.shape[2]
        keys, values = (x[pages, at % page_size].repeat_interleave(group, 1).double() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * softmax_scale
        future = torch.ones(end - begin, length, dtype=torch.bool, device=q.device).triu(length - (end - begin) + 1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out)
