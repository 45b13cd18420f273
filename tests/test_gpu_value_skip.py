"""Values that lists leave out, on a GPU: the kernels' choices one by one by the rule, and what follows from them.

Skipped without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import has_gpu, has_hopper
from gpu_cases import DTYPES
from key_lists import all_keys, random_lists
from listed_calls import attend, wrong_skips

from s2o_cupy import gather_attention
from s2o_cupy.caches import clear_cache
from s2o_cupy.cuda import compiler
from s2o_cupy.methods import SpargeConfig, select, sparse_attention
from s2o_cupy.reference.lists import KeyLists
from s2o_cupy.tools.catalogue import kernels_for

needs_gpu = pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
LIMIT = -3.0


def draw(rng, dtype, seqlen_q, seqlen_k, *, batch=1, heads=4, kv_heads=2, head_dim=128):
    """Keys of slow change, so that blocks differ, and rows whose scores do by the block they are in."""
    slow = np.repeat(rng.standard_normal((batch, kv_heads, -(-seqlen_k // 96), head_dim)), 96, axis=2)[:, :, :seqlen_k]
    q = 1.5 * rng.standard_normal((batch, heads, -(-seqlen_q // 80), head_dim)).repeat(80, axis=2)[:, :, :seqlen_q]
    q, k = q + 0.2 * rng.standard_normal(q.shape), slow + 0.2 * rng.standard_normal(slow.shape)
    return [x.astype(DTYPES[dtype]) for x in (q, k, rng.standard_normal(k.shape))]


def drawn(rng):
    q, k, v = draw(rng, "float16", 300, 1777)
    return q, k, v, random_lists(rng, q.shape, 1777, list_heads=4, unit=64, per_tile=True)


def peaked(rng):
    """The first 64 keys outweigh the others for every query, of which the last tile has few."""
    q, k, v = (rng.standard_normal((1, 2, n, 128)) for n in (300, 1777, 1777))
    q, k[:, :, :64] = q + 1, k[:, :, :64] + 1
    lists = KeyLists(np.arange(28), np.zeros((1, 1, 1, 3), int), np.full((1, 1, 1, 3), 1777), 64)
    return *(x.astype(np.float16) for x in (q, k, v)), lists


def assert_skips(path, q, k, v, lists, limits=LIMIT, **options):
    found = attend(path, q, k, v, lists, per_tile=True, value_skip=limits, **options)
    options.pop("page_size", None)
    assert wrong_skips(path, found, q, k, v, lists, limits, **options) == []
    return found


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("unit", [1, 64, 128])
def test_head_dims_and_units(path, rng, dtype, head_dim, unit):
    q, k, v = draw(rng, dtype, 300, 1777, head_dim=head_dim)
    lists = random_lists(rng, q.shape, 1777, list_heads=4, unit=unit, per_tile=True)
    found = assert_skips(path, q, k, v, lists)
    if unit == 64:
        assert 0.02 < found.found_skips.sum() / (-(-lists.keys // 64)).sum() / found.found_skips.shape[-2] < 0.98


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("seqlen_q", [1, 64, 65, 129])
@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 65, 128, 129, 200, 700])
def test_lengths_around_tiles(path, rng, seqlen_q, seqlen_k):
    q, k, v = draw(rng, "bfloat16", seqlen_q, seqlen_k)
    assert_skips(path, q, k, v, all_keys(q.shape, seqlen_k, 1, rng=rng, per_tile=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("options", [{"scale": 0.05}, {"softcap": 20.0}, {"page_size": 16}, {"page_size": 1}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_options(path, rng, options, head_dim):
    q, k, v = draw(rng, "float16", 300, 900, head_dim=head_dim, batch=2)
    lists = random_lists(rng, q.shape, 900, list_heads=2, unit=64, per_tile=True)
    assert_skips(path, q, k, v, lists, **options)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("options", [{}, {"softcap": 20.0}, {"page_size": 16}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("unit", [1, 64])
def test_tiles_of_64_queries(path, rng, options, head_dim, unit):
    q, k, v = draw(rng, "bfloat16", 300, 1777, head_dim=head_dim, batch=2)
    lists = random_lists(rng, q.shape, 1777, list_heads=2, unit=unit, per_tile=True, block_m=64)
    assert_skips(path, q, k, v, lists, block_m=64, **options)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("head_dim", [33, 99, 201])
def test_rows_without_alignment(rng, block_m, head_dim):
    q, k, v = draw(rng, "bfloat16", 300, 900, head_dim=head_dim)
    lists = random_lists(rng, q.shape, 900, list_heads=2, unit=64, per_tile=True, block_m=block_m)
    assert_skips("portable", q, k, v, lists, block_m=block_m)


@pytest.mark.gpu
@needs_gpu
def test_all_but_a_peak_is_left_out(path):
    q, k, v, lists = peaked(np.random.default_rng(0))
    found = assert_skips(path, q, k, v, lists)
    rows, first = (64, 2) if path == "hopper" else (32, 1)  # on Hopper the first 128 keys know of no maximum yet
    for tile, n in enumerate(-(-np.array([128, 128, 44]) // rows)):
        of_tile = found.found_skips[0, :, 0, tile, :n, :28]
        assert of_tile[..., first:].all() and not of_tile[..., :first].any()
    assert (found.skipped[0, :, 0] == np.array([128, 128, 44]) * (1777 - 64 * first)).all()


@pytest.mark.gpu
@needs_gpu
def test_limits_of_each_head(path, rng):
    q, k, v = draw(rng, "bfloat16", 700, 1500, heads=16, kv_heads=4, batch=2)
    lists = random_lists(rng, q.shape, 1500, list_heads=16, unit=64, per_tile=True)
    limits = tuple(-1.0 * np.arange(16) - 0.5)
    found = assert_skips(path, q, k, v, lists, limits)
    shares = found.skipped.sum(axis=(0, 2, 3))
    assert shares[0] > shares[-1]
    attend(path, q, k, v, lists, per_tile=True, value_skip=limits).assert_same_bits(found)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_limit_that_none_reaches_leaves_nothing_out(path, rng, head_dim):
    """The bits of a call without one; with head_dim 64 on Hopper, whose tiles are then walked in halves, but for
    rounding."""
    q, k, v = draw(rng, "bfloat16", 500, 1500, head_dim=head_dim)
    lists = random_lists(rng, q.shape, 1500, list_heads=4, unit=64, per_tile=True)
    found = attend(path, q, k, v, lists, per_tile=True, value_skip=-1e30)
    assert not found.found_skips.any() and not found.skipped.any()
    alone = attend(path, q, k, v, lists, per_tile=True)
    if path == "hopper" and head_dim == 64:
        # Each weight is rounded by up to 2^-9 of itself, relative to another maximum in each call. Of 64 keys, as many
        # as the shortest list has, some 24 count, so outputs differ by 2^-9 / sqrt(24), and the largest of 128,000 by
        # four and a half times as much. Each is rounded once more, and the next is 2^-7 of itself away at most.
        both = [x.o.view(DTYPES["bfloat16"]).astype(np.float32) for x in (found, alone)]
        np.testing.assert_allclose(*both, rtol=2.0**-7, atol=2.0**-9)
        np.testing.assert_allclose(found.lse, alone.lse, rtol=0, atol=1e-5)  # sums of 1,500 float32 weights
        assert (found.visited == alone.visited).all()
    else:
        found.assert_same_bits(alone)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_sparge_attention(path, rng, is_causal):
    """Through `sparse_attention`: the dense part first, whose maxima the lists begin with."""
    import cupy

    q, k, v = (cupy.asarray(x) for x in draw(rng, "bfloat16", 1500, 1500))
    plain = SpargeConfig(tau=0.95, theta=-1, path=path)
    config = SpargeConfig(tau=0.95, theta=-1, value_skip=(-2.0, -3.0, -4.0, -1e30), path=path)
    o, stats = sparse_attention(q, k, v, config=config, is_causal=is_causal, return_stats=True)
    assert stats.path == path and stats.value_density < 0.998 * stats.density
    exact, other = sparse_attention(q, k, v, config=plain, is_causal=is_causal, return_stats=True)
    assert other.density == stats.density == other.value_density
    assert (o[:, 3] == exact[:, 3]).all()
    left = np.abs(o[:, :3].get().astype(np.float32) - exact[:, :3].get().astype(np.float32))
    assert 0 < left.max() < 0.5
    schedule = select(q, k, config, is_causal=is_causal)
    assert (gather_attention(q, k, v, schedule, path=path) == o).all()


# ---------------------------------------------------------------- planted faults


@dataclass(frozen=True)
class Fault:
    path: str
    name: str
    finding: str  # that must be the first
    old: str
    new: str
    draw: Callable[[np.random.Generator], Any] = lambda rng: drawn(rng)  # q, k, v and lists

    @property
    def function(self):
        """On Hopper units of 64 keys come by boxes."""
        return "pass2_boxes_skipping_sm90" if self.path == "hopper" else "pass2_skipping"

    def plant(self, text):
        assert text.count(self.old) == 1, f"{self.name}: its place in the source is gone or no longer the only one"
        return text.replace(self.old, self.new)


FAULTS = [
    Fault("portable", "the limit is four times lower", "too few", "largest - m <= limit", "largest - m <= 4.f * limit"),
    Fault("portable", "the limit is half", "too many", "largest - m <= limit", "largest - m <= 0.5f * limit"),
    Fault("portable", "one row decides", "too many", "slight &= row(i, h)", "slight = row(i, h)"),
    Fault("portable", "rows that are not there have a say", "too few", "row(i, h) >= rows || values", "values"),
    Fault("portable", "pairs are counted once", "pairs", "rows * keys", "keys"),
    Fault("portable", "values are not left out", "o", "if (!skips) accumulate", "accumulate"),
    Fault("hopper", "the limit is four times lower", "too few", "largest - m <= limit", "largest - m <= 4.f * limit"),
    Fault("hopper", "the limit is half", "too many", "largest - m <= limit", "largest - m <= 0.5f * limit"),
    Fault("hopper", "half of a block is looked at", "too many", "j < kValueKeys / 8; ++j", "j < kValueKeys / 16; ++j"),
    Fault("hopper", "rows that are not there have a say", "too few", "my.first_row + 8 * h >= rows || my.values",
          "my.values",
          draw=lambda rng: peaked(rng)),
    Fault("hopper", "one warp decides", "too many", "sum % 5 == 4", "sum % 5 >= 1"),
    Fault("hopper", "blocks are exchanged", "o", "kSkips >> (j * 8 / kValueKeys)",
          "kSkips >> (1 - j * 8 / kValueKeys)"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.path}: {f.name}")
def test_every_fault_has_its_place(fault):
    """Without a GPU: the sources still hold what each fault changes."""
    text = compiler.render(next(kernel for kernel in kernels_for(90) if kernel.function == fault.function))
    assert fault.plant(text) != text


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.path}: {f.name}")
def test_a_planted_fault_is_found(fault, monkeypatch):
    if fault.path == "hopper" and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    good = compiler.render
    monkeypatch.setattr(
        compiler, "render", lambda kernel: fault.plant(good(kernel)) if kernel.function == fault.function
        else good(kernel),
    )  # fmt: skip
    monkeypatch.setattr(compiler, "_loaded", {})
    clear_cache()
    q, k, v, lists = fault.draw(np.random.default_rng(0))
    try:
        found = attend(fault.path, q, k, v, lists, per_tile=True, value_skip=LIMIT)
        assert wrong_skips(fault.path, found, q, k, v, lists, LIMIT)[:1] == [fault.finding]
    finally:
        clear_cache()
