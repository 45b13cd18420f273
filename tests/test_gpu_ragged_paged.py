"""Ragged queries over a paged cache on a GPU: the bits that the same keys give in one array.

Here are the launches themselves, as api/on_gpu.py calls them. Entries of a page table that no key needs point nowhere,
and rows of pages that hold no key are NaN, as is every output before the call.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import has_gpu
from packs import bits, starts
from pages import random_table

from s2o_cupy import S2OConfig, s2o_attention_varlen
from s2o_cupy.arrays.operand import Paging, operand
from s2o_cupy.plan.packed_table import PackedTable
from s2o_cupy.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")]

DENSE = S2OConfig(dense_up_to=1000)
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
# (queries, keys): whole tiles of 64 and 128 and one more or less, one query, and sequences that are left out.
LENGTHS = ((300, 300), (1, 70), (65, 65), (0, 9), (128, 130), (127, 257), (129, 256), (401, 530), (64, 64))
LAYOUTS = {"NHD": "BSHD", "HND": "BHSD"}  # of pages -> of an operand


@dataclass
class Ragged:
    """A batch: q [total_q, heads, head_dim], a cache and its page table, and the same keys packed, on the GPU."""

    lengths: tuple[tuple[int, int], ...] = LENGTHS
    page_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    dtype: str = "bfloat16"
    layout: str = "NHD"
    is_causal: bool = True
    scale: float | None = None
    softcap: float = 0.0
    poison: dict[int, float] = field(default_factory=dict)  # sequence: what its queries, keys and values become
    shares: dict[int, int] = field(default_factory=dict)  # sequence: whose pages it reads

    def __post_init__(self) -> None:
        import cupy

        rng = np.random.default_rng(0)
        table, pages = random_table(rng, [x for _, x in self.lengths], self.page_size)
        for i, other in self.shares.items():
            table[i] = table[other]
        caches = rng.standard_normal((2, pages, self.page_size, self.kv_heads, self.head_dim))
        q = rng.standard_normal((sum(x for x, _ in self.lengths), self.heads, self.head_dim))
        self.starts_q = starts([x for x, _ in self.lengths])
        self.starts_k = starts([x for _, x in self.lengths])
        places = [self._places(entries, n) for entries, (_, n) in zip(table, self.lengths, strict=True)]
        unused = np.ones((pages, self.page_size), bool)
        for i, place in enumerate(places):
            unused[place] = False
            if i in self.poison:
                of_both = (slice(None), *place)
                caches[of_both] = q[self.starts_q[i] : self.starts_q[i + 1]] = self.poison[i]
        caches[:, unused] = np.nan
        packed = [np.concatenate([cache[place] for place in places]) for cache in caches]
        if self.layout == "HND":
            caches = np.ascontiguousarray(caches.swapaxes(2, 3))
        on_gpu = lambda x: cupy.asarray(np.asarray(x).astype(DTYPES[self.dtype]))  # noqa: E731
        self.q, self.k, self.v = map(on_gpu, (q, *packed))
        self.k_pages, self.v_pages = map(on_gpu, caches)
        self.table = cupy.asarray(table)

    def _places(self, entries: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Page and row of each key of a sequence."""
        positions = np.arange(length)
        return entries[positions // self.page_size], positions % self.page_size

    def problem(self, i: int) -> Problem:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return Problem(
            1, self.heads, self.kv_heads, *self.lengths[i], self.head_dim, self.dtype, self.is_causal, scale,
            self.softcap,
        )  # fmt: skip

    def expected(self, config: S2OConfig) -> tuple[Any, Any]:
        """Of one array."""
        return s2o_attention_varlen(
            self.q, self.k, self.v, self.starts_q, self.starts_k, config=config, is_causal=self.is_causal,
            scale=self.scale, softcap=self.softcap, return_lse=True,
        )  # fmt: skip

    def outputs(self) -> tuple[Any, Any]:
        import cupy

        return cupy.full_like(self.q, np.nan), cupy.full((self.heads, len(self.q)), np.nan, np.float32)

    def attend(self, config: S2OConfig, alone: tuple[int, ...] = (), outputs: Any = None) -> tuple[Any, Any, Any]:
        """(o, lse, the prepared launch) from pages. ``alone``: sequences that take turns; others share launches."""
        import cupy

        from s2o_cupy.cuda import packed, pipeline

        o, lse = outputs or self.outputs()
        q, out = (operand(x, "BSHD") for x in (self.q, o))
        k, v = (operand(x, LAYOUTS[self.layout]) for x in (self.k_pages, self.v_pages))
        entries = self.table.shape[1]
        paging = Paging(self.table.data.ptr, entries, self.page_size, len(self.k_pages))
        stream = cupy.cuda.get_current_stream().ptr
        working = [i for i, x in enumerate(self.lengths) if min(x) > 0]
        together = [i for i in working if i not in alone]
        table = PackedTable([(self.starts_q[i], i) for i in together], [self.problem(i) for i in together])
        launch = packed.prepare((q, k, v, out), table, config, paging)
        launch.run((q, k, v, out), table, lse.data.ptr, stream=stream, paging=paging)
        if alone:
            calls = [
                pipeline.Call(
                    (q.rows(a, b), k, v, out.rows(a, b)), lse.data.ptr + 4 * a, 0, self.problem(i),
                    paging.sequences(i, i + 1),
                )
                for i, (a, b) in enumerate(itertools.pairwise(self.starts_q)) if i in alone
            ]  # fmt: skip
            pipeline.run_in_turn(calls, config, lse_stride=len(self.q), stream=stream)
        return o, lse, launch

    def differing(self, config: S2OConfig, alone: tuple[int, ...] = ()) -> list[str]:
        """Of which sequence what is not, bit for bit, as with packed keys; one that is left out is not written."""
        expected_o, expected_lse = self.expected(config)
        o, lse, _ = self.attend(config, alone)
        found = []
        for i, (a, b) in enumerate(itertools.pairwise(self.starts_q)):
            if min(self.lengths[i]) == 0:
                rows = [x.get().astype(np.float64) for x in (o[a:b], lse[:, a:b])]
                found += [] if all(np.isnan(x).all() for x in rows) else [f"rows of sequence {i}"]
                continue
            for name, x, y in (("o", o[a:b], expected_o[a:b]), ("lse", lse[:, a:b], expected_lse[:, a:b])):
                if not np.array_equal(bits(x), bits(y)):
                    found.append(f"{name} of sequence {i}")
        return found


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize(
    ("page_size", "layout"),
    [(1, "NHD"), (8, "NHD"), (16, "HND"), (16, "NHD"), (32, "NHD"), (64, "NHD"), (256, "HND")],
)
def test_the_bits_of_packed_keys(path, page_size, layout, head_dim, is_causal):
    lengths = LENGTHS if is_causal else (*LENGTHS, (300, 100), (65, 1), (70, 0))
    ragged = Ragged(lengths, page_size, head_dim=head_dim, layout=layout, is_causal=is_causal)
    assert ragged.differing(replace(DENSE, path=path)) == []


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"softcap": 5.0},
        {"scale": 0.3},
        {"heads": 6, "kv_heads": 1},
        {"heads": 3, "kv_heads": 3},
        {"lengths": ((1, 1),)},
        {"lengths": ((1, 1), (1, 400), (1, 3))},
    ],
    ids=str,
)
def test_options(path, page_size, changes):
    assert Ragged(page_size=page_size, **changes).differing(replace(DENSE, path=path)) == []


@pytest.mark.parametrize("page_size", [16, 64])
def test_many(path, page_size):
    """Three launches, of which each has a part of the page table's rows."""
    lengths = tuple((n * 37 % 290, n * 37 % 290 + n % 50) for n in range(300))
    assert Ragged(lengths, page_size).differing(replace(DENSE, path=path)) == []


@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize("keys_at_a_time", [1000, 100_000])
def test_keys_that_are_collected(path, page_size, head_dim, keys_at_a_time):
    """Before pass 1 on Hopper, as each has many queries; in several rounds where the workspace is small."""
    lengths = ((600, 600), (700, 777), (0, 5), (1, 900), (650, 650))
    ragged = Ragged(lengths, page_size, heads=32, head_dim=head_dim)
    row_bytes = 2 * ragged.kv_heads * head_dim * 2  # of a key and its value
    config = replace(DENSE, path=path, workspace_bytes=max(1 << 20, keys_at_a_time * row_bytes))
    assert ragged.differing(config) == []
    assert (ragged.attend(config)[2].collector is not None) == (path == "hopper")


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [4, 32], ids=["few queries", "many"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e4], ids=str)
def test_neighbours_change_no_bit(path, page_size, heads, value):
    """Queries, keys and values of other sequences, which come along in a tile."""
    lengths = ((400, 410), (77, 77), (500, 560), (129, 129))
    config = replace(DENSE, path=path)
    before, lse_before, _ = Ragged(lengths, page_size, heads=heads).attend(config)
    poisoned = Ragged(lengths, page_size, heads=heads, poison={1: value, 3: value})
    after, lse_after, _ = poisoned.attend(config)
    for i in (0, 2):
        a, b = poisoned.starts_q[i : i + 2]
        np.testing.assert_array_equal(bits(after[a:b]), bits(before[a:b]))
        np.testing.assert_array_equal(bits(lse_after[:, a:b]), bits(lse_before[:, a:b]))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_sequences_may_share_pages(path, page_size):
    """As those with a prompt in common do."""
    lengths = ((300, 300), (65, 300), (1, 128), (200, 200))
    ragged = Ragged(lengths, page_size, shares={1: 0, 2: 0})
    assert ragged.differing(replace(DENSE, path=path)) == []


@pytest.mark.parametrize("page_size", [16, 64])
def test_long_sequences_take_turns(path, page_size):
    """Each with its row of the page table, its rows of q, and rows of lse with gaps between its heads."""
    lengths = ((1500, 1500), (65, 200), (700, 3100), (130, 130), (1, 900))
    config = S2OConfig(segment=256, tau=0.05, dense_up_to=300, path=path)
    assert Ragged(lengths, page_size, heads=8).differing(config, alone=(0, 2, 4)) == []


@pytest.mark.parametrize("heads", [4, 32], ids=["few queries", "many"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_captured_graph_follows_the_page_table(path, page_size, heads):
    """It keeps its lengths, whatever other calls with the same arrays do in between."""
    import cupy

    config = replace(DENSE, path=path)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ragged = Ragged(((300, 300), (1, 128), (813, 900)), page_size, heads=heads)
        other = copy.copy(ragged)
        other.lengths, other.starts_q = ((200, 200), (100, 100), (814, 900)), [0, 200, 300, 1114]
        outputs, pages = ragged.outputs(), len(ragged.k_pages)
        ragged.attend(config, outputs=outputs)
        stream.begin_capture()
        ragged.attend(config, outputs=outputs)
        graph = stream.end_capture()
        for _ in range(3):
            other.attend(config)
            for cache in (ragged.k_pages, ragged.v_pages):  # each page moves on by one, and entries follow
                cache[...] = cupy.roll(cache, 1, axis=0)
            ragged.table[...] = cupy.where(ragged.table < pages, (ragged.table + 1) % pages, ragged.table)
            for x in outputs:
                x.fill(np.nan)
            graph.launch(stream=stream)
            o, lse = ragged.expected(config)
            np.testing.assert_array_equal(bits(outputs[0]), bits(o))
            np.testing.assert_array_equal(bits(outputs[1]), bits(lse))
