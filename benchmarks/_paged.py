"""A paged cache that holds given keys and values, as a server's has come to be: its pages in no order."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np


class Cache:
    """k and v [1, kv_heads, seqlen, head_dim] in half of the pages [pages, page_size, kv_heads, head_dim]."""

    def __init__(self, k: Any, v: Any, page_size: int, seed: int = 0) -> None:
        import torch

        _, kv_heads, seqlen, head_dim = k.shape
        used = -(-seqlen // page_size)
        entries = np.random.default_rng(seed).permutation(2 * used)[:used].astype(np.int32)
        self.table = torch.from_numpy(entries)[None].to(k.device)  # [1, used]
        self.page_size, self.layout = page_size, "NHD"
        self.k, self.v = (torch.zeros(2 * used, page_size, kv_heads, head_dim, dtype=k.dtype, device=k.device)
                          for _ in range(2))  # fmt: skip
        for pages, x in ((self.k, k), (self.v, v)):
            rows = torch.zeros(used * page_size, kv_heads, head_dim, dtype=k.dtype, device=k.device)
            rows[:seqlen] = x[0].transpose(0, 1)
            pages[self.table[0].long()] = rows.view(used, page_size, kv_heads, head_dim)

    @functools.cached_property
    def rounded(self) -> tuple[Cache, Cache]:
        """The same in 8 bits (e4m3), and in 16 bits what those are."""
        import torch

        eight, wide = copy.copy(self), copy.copy(self)
        eight.k, eight.v = (x.clamp(-448, 448).to(torch.float8_e4m3fn) for x in (self.k, self.v))
        wide.k, wide.v = (x.to(self.k.dtype) for x in (eight.k, eight.v))
        return eight, wide

    def gathered(self, seqlen: int) -> tuple[Any, Any]:
        """The first keys and values in one array each, as the cache has to be copied without a page table."""
        entries = self.table[0, : -(-seqlen // self.page_size)]
        k, v = (x.index_select(0, entries).flatten(0, 1)[None, :seqlen].transpose(1, 2) for x in (self.k, self.v))
        return k, v
