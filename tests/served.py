"""A batch as serving engines have it: prompts, chunks of prompts and decoding in one, keys and values in pages."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from packs import starts

from s2o_cupy.reference import dense_attention

# (queries, keys) of each request. With SETTINGS S2O's are a prompt, a chunk of one and a prompt with a cached prefix.
LENGTHS = [(1, 300), (30, 30), (200, 200), (130, 500), (1, 64), (40, 400), (70, 350)]
KINDS = ["decoding", "short", "s2o", "s2o", "decoding", "few queries", "s2o"]
SETTINGS = {"tau": 0, "segment": 64, "block_m": 64, "block_n": 64, "min_seqlen": 100}
HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 32, 0.2


def installed(module: str) -> Any:
    """A module of a serving engine, or None. To be asked before a stand-in takes the engine's name."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


@dataclass
class Served:
    """``q`` [tokens, HEADS, HEAD_DIM], packed; ``k`` and ``v`` [keys, KV_HEADS, HEAD_DIM] of each request."""

    lengths: list[tuple[int, int]]
    q: Any
    k: list[Any]
    v: list[Any]
    starts: list[int]

    @classmethod
    def make(cls, lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0) -> Served:
        make = torch.Generator().manual_seed(seed)
        begins = starts([seqlen_q for seqlen_q, _ in lengths])
        k, v = ([torch.randn(n, KV_HEADS, HEAD_DIM, generator=make) for _, n in lengths] for _ in "kv")
        return cls(lengths, torch.randn(begins[-1], HEADS, HEAD_DIM, generator=make), k, v, begins)

    def to(self, device: str, dtype: Any) -> Served:
        q, *rest = (x.to(device, dtype) for x in (self.q, *self.k, *self.v))
        return Served(self.lengths, q, rest[: len(self.k)], rest[len(self.k) :], self.starts)

    def like(self, *shape: int, fill: float = 0.0) -> Any:
        return torch.full(shape, fill, dtype=self.q.dtype, device=self.q.device)

    def table(self, page_size: int, seed: int = 1) -> Any:
        """Each request's pages in the cache, in any order; int32 [requests, pages] on q's device."""
        counts = [-(-n // page_size) for _, n in self.lengths]
        order = iter(np.random.default_rng(seed).permutation(sum(counts) + 5).tolist())
        table = torch.full((len(counts), max(counts) + 3), -1, dtype=torch.int32)
        for row, count in zip(table, counts, strict=True):
            row[:count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
        return table.to(self.q.device)

    def put(self, k_pages: Any, v_pages: Any, table: Any) -> None:
        """Keys and values to their places in a cache [pages, page_size, KV_HEADS, HEAD_DIM]."""
        page_size = k_pages.shape[1]
        for row, k, v in zip(table, self.k, self.v, strict=True):
            at = torch.arange(len(k), device=self.q.device)
            pages = row[at // page_size].long()
            k_pages[pages, at % page_size] = k.to(k_pages)
            v_pages[pages, at % page_size] = v.to(v_pages)

    def expected(self, scale: float = SCALE) -> Any:
        """Dense attention, float32 [tokens, HEADS, HEAD_DIM] on the CPU."""
        o = torch.empty(self.q.shape)
        for (begin, end), k, v in zip(itertools.pairwise(self.starts), self.k, self.v, strict=True):
            arrays = [x.double().cpu().numpy().swapaxes(0, 1)[None] for x in (self.q[begin:end], k, v)]
            o[begin:end] = torch.from_numpy(dense_attention(*arrays, scale=scale)[0][0].swapaxes(0, 1))
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
        keys, values = (x[pages, at % page_size].repeat_interleave(HEADS // KV_HEADS, 1).double() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * softmax_scale
        future = torch.ones(end - begin, length, dtype=torch.bool, device=q.device).triu(length - (end - begin) + 1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out)
