"""What one row sees changes no bit of another's: keys and values of the future, queries of the future, other sequences.

On a GPU the rows of a warp share its instructions, so a hostile number of one row may send all of them another way.
Each case puts it into the middle of 16 rows, and compares o and lse of the rows before it. The same holds of the NumPy
reference, where head_dim makes no difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import DEVICES, Device
from gpu_cases import Case
from pages import paged, random_table

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged, s2o_attention_varlen

HEAD_DIMS = (64, 96, 128, 256)
HOSTILE = (np.inf, -np.inf, np.nan, 3e4)
LENGTH = 200
SPOTS = (9, 71, 135)  # of rows 0 to 15, 64 to 79 and 128 to 143: in either half of a q tile, and in the next
FLOAT16 = np.dtype(np.float16)


def everywhere(dtype: str = "") -> pytest.MarkDecorator:
    """Arguments device and head_dim: the CPU, and every path, head_dim and dtype (or the one named) of the GPU."""
    names = [name for name in DEVICES if name != "cpu" and name.endswith(dtype)]
    on_gpu = [pytest.param(name, head_dim, marks=pytest.mark.gpu) for name in names for head_dim in HEAD_DIMS]
    return pytest.mark.parametrize(("device", "head_dim"), [("cpu", 64), *on_gpu], indirect=["device"])


def dense(device: Device) -> S2OConfig:
    """One segment, without candidates, and packed sequences in one launch."""
    return replace(device.config, tau=0.0, segment=512, dense_up_to=512)


def two_passes(device: Device, segment: int = 128) -> S2OConfig:
    """Without a stop: where a q tile stops is decided for all of its rows."""
    return replace(device.config, tau=0.0, segment=segment, dense_up_to=0)


def attend(device: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray, config: S2OConfig, **options: Any) -> Any:
    """o [batch, heads, seqlen_q, head_dim] and lse [batch, heads, seqlen_q] of host arrays, float64 on the host."""
    arrays = (device.array(x) for x in (q, k, v))
    o, lse = s2o_attention(*arrays, config=config, out=device.poisoned(q.shape), return_lse=True, **options)
    return device.host(o), device.host(lse)


def assert_apart(found: Any, expected: Any, rows: int, axis: int = 2) -> None:
    """The first ``rows`` rows have the same bits, and some row after them has not."""
    for x, y in zip(found, expected, strict=True):
        before = (slice(None),) * axis + (slice(rows),)
        np.testing.assert_array_equal(x[before], y[before])
    after = (slice(None),) * axis + (slice(rows, None),)
    assert (found[0][after] != expected[0][after]).any(), "the hostile number is seen by nobody"


def poisoned(x: np.ndarray, spot: Any, value: float) -> np.ndarray:
    """``x`` [batch, heads, rows, head_dim] with one hostile element in row ``spot`` of each head."""
    x = x.copy()
    x[:, :, spot, x.shape[3] // 2] = value
    return x


# ---------------------------------------------------------------- dense


@everywhere()
@pytest.mark.parametrize("value", HOSTILE)
def test_a_future_key_or_value(device, qkv, head_dim, value):
    q, k, v = qkv(LENGTH, heads=4, kv_heads=2, head_dim=head_dim)
    expected = attend(device, q, k, v, dense(device))
    for spot in SPOTS:
        assert_apart(attend(device, q, poisoned(k, spot, value), v, dense(device)), expected, spot)
        assert_apart(attend(device, q, k, poisoned(v, spot, value), dense(device)), expected, spot)


@everywhere()
@pytest.mark.parametrize("value", HOSTILE)
def test_a_later_query(device, qkv, head_dim, value):
    q, k, v = qkv(LENGTH, heads=4, kv_heads=2, head_dim=head_dim)
    expected = attend(device, q, k, v, dense(device))
    for spot in SPOTS:
        assert_apart(attend(device, poisoned(q, spot, value), k, v, dense(device)), expected, spot)


@everywhere()
def test_every_key_and_query_from_a_row_on(device, qkv, head_dim):
    q, k, v = qkv(LENGTH, heads=4, kv_heads=2, head_dim=head_dim)
    expected = attend(device, q, k, v, dense(device))
    for spot in SPOTS:
        ahead = slice(spot, None)
        hostile = (poisoned(x, ahead, np.inf) for x in (q, k, v))
        assert_apart(attend(device, *hostile, dense(device)), expected, spot)


@everywhere()
def test_scores_beyond_2_to_22(device, qkv, head_dim):
    """Finite, and so large that Hopper rounds products first: in the rows that have them, and in no other."""
    q, k, v = qkv(LENGTH, heads=4, kv_heads=2, head_dim=head_dim)
    expected = attend(device, q, k, v, dense(device))
    for spot in SPOTS:
        large_q = q.copy()
        large_q[:, :, spot] = 6e4
        large_k = k.copy()
        large_k[:, :, spot] = 6e4  # its score with that query is 3.6e9 * head_dim**0.5
        assert_apart(attend(device, large_q, large_k, v, dense(device)), expected, spot)


# ---------------------------------------------------------------- two passes


@pytest.mark.sampled(2)
@everywhere()
@pytest.mark.parametrize("value", HOSTILE)
def test_a_future_key_of_the_segment(device, qkv, head_dim, value):
    """Pass 2 orders the rows that see it and those that do not into the same warps. By pooled queries, as what pass 1
    finds for later queries has a part in the order of single ones."""
    q, k, v = qkv(300, heads=4, kv_heads=2, head_dim=head_dim)
    config = replace(two_passes(device), rank="weight")
    expected = attend(device, q, k, v, config)
    for spot in (200, 291):
        assert_apart(attend(device, q, poisoned(k, spot, value), v, config), expected, spot)
        assert_apart(attend(device, q, k, poisoned(v, spot, value), two_passes(device)),
                     attend(device, q, k, v, two_passes(device)), spot)  # fmt: skip


@pytest.mark.sampled(2)
@everywhere()
@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("tau", [0.0, 0.05])
def test_a_query_of_a_later_segment(device, qkv, head_dim, value, tau):
    """Of 100 queries a segment: its last rows share a warp with the next one's first."""
    q, k, v = qkv(300, heads=4, kv_heads=2, head_dim=head_dim)
    config = replace(two_passes(device, segment=100), tau=tau)
    expected = attend(device, q, k, v, config)
    for segment_begin in (100, 200):
        hostile = poisoned(q, slice(segment_begin, None), value)
        assert_apart(attend(device, hostile, k, v, config), expected, segment_begin)


@everywhere()
@pytest.mark.parametrize("rank", ["query", "weight"])
def test_queries_behind_a_short_segment_do_not_say_what_its_samples_are_worth(device, head_dim, rank):
    """Its 40 queries are 2.5 times the 16 rows that do so together in a tail, and copies of whole tiles bring along the
    next segment's first ones. Most keys are not visited, and of their values the regression knows little."""
    case = Case(heads=2, kv_heads=1, seqlen_q=300, seqlen_k=9000, segment=40, squares=True, head_dim=head_dim,
                scale=0.6 * head_dim**-0.5)  # fmt: skip
    q, k, v = (x.astype(np.float64) for x in case.arrays())
    config = replace(two_passes(device, segment=40), rank=rank, unit=16, tau=1000.0, tail="first_order", dense_last=0)
    whole = attend(device, q, k, v, config, scale=case.scale)
    keys = 9000 - (300 - 40)
    alone = attend(device, q[:, :, :40], k[:, :, :keys], v[:, :, :keys], config, scale=case.scale)
    for x, y in zip(whole, alone, strict=True):
        np.testing.assert_array_equal(x[:, :, :40], y)
    no_tail = attend(device, q, k, v, replace(config, tail="none"), scale=case.scale)
    assert np.linalg.norm(no_tail[0] - whole[0]) > 0.1 * np.linalg.norm(whole[0])


# ---------------------------------------------------------------- packed and paged


@everywhere()
@pytest.mark.parametrize("value", HOSTILE)
def test_another_sequence_and_the_future_of_a_packed_one(device, packed, head_dim, value):
    """Rows 89 on are hostile: those from 8 on of the second sequence, which begins in the middle of 16 rows."""
    q, k, v = packed([81, 70, 49], [81, 70, 49], head_dim=head_dim)  # [rows, heads, head_dim]
    starts = [0, 81, 151, 200]

    def run(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
        o, lse = s2o_attention_varlen(
            device.array(q), device.array(k), device.array(v), starts, starts, config=dense(device), return_lse=True
        )
        return device.host(o), device.host(lse).swapaxes(0, 1)  # [rows, heads]

    expected = run(q, k, v)
    for which in range(3):
        hostile = [x.copy() for x in (q, k, v)]
        hostile[which][89:, :, head_dim // 2] = value
        assert_apart(run(*hostile), expected, 89, axis=0)


@everywhere()
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_future_key_or_value_in_pages(device, qkv, rng, head_dim, page_size, name):
    arrays = dict(zip("qkv", qkv(LENGTH, heads=4, kv_heads=2, head_dim=head_dim), strict=True))
    table, pages = random_table(rng, [LENGTH], page_size)

    def run(q: np.ndarray, k: np.ndarray, v: np.ndarray, config: S2OConfig) -> Any:
        cache_k, cache_v = (paged(x, table, pages, page_size, "NHD", [LENGTH]) for x in (k, v))
        o, lse = s2o_attention_paged(
            device.array(q), device.array(cache_k), device.array(cache_v),
            device.xp.asarray(table), seqlen_k=LENGTH, config=config, return_lse=True,
        )  # fmt: skip
        return device.host(o), device.host(lse)

    for config in (dense(device), replace(two_passes(device), rank="weight")):
        expected = run(**arrays, config=config)
        for spot in SPOTS:
            hostile = {name: poisoned(arrays[name], spot, np.inf)}
            assert_apart(run(**(arrays | hostile), config=config), expected, spot)


# ---------------------------------------------------------------- the end of float16

LARGEST = float(np.finfo(FLOAT16).max)  # 65504


def weights_that_round_up(length: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """q and k, [1, 1, length, head_dim]: key 0 has the weight 1, and the others one that float16 rounds up by 2^-12.

    A query is (x, 0, ...) and a key (-y, 0, ...), so that at scale 1 a weight is exp(-x y) in all rows. From 0.5 on
    float16 has steps of 2^-11, so that rounding adds up to 2^-11 of a weight: of products x y of two of its numbers,
    one is taken that gains 0.8 to 0.9 of that, far enough from the middle of a step for any exp. Weights add up to l
    and, once rounded, to more than l * (1 + 2^-12), which takes 65504 beyond 65520: there float16 rounds to infinity.
    """
    grid = np.arange(1, 400) / 64  # float16 holds them
    weight = np.exp(-np.outer(grid, grid))
    gain = weight.astype(FLOAT16).astype(np.float64) / weight - 1
    x, y = np.argwhere((weight > 0.5) & (weight < 0.51) & (gain > 0.8 * 2**-11) & (gain < 0.9 * 2**-11))[0]
    rounded = weight[x, y] * (1 + gain[x, y])
    assert 1 + (length - 1) * rounded > (1 + (length - 1) * weight[x, y]) * 65520 / LARGEST
    q, k = np.zeros((2, 1, 1, length, head_dim))
    q[..., 0], k[..., 1:, 0] = grid[x], -grid[y]
    return q, k


@everywhere("-float16")
@pytest.mark.parametrize("passes", ["dense", "two passes", "two passes and a tail"])
def test_the_mean_of_the_largest_is_the_largest(device, head_dim, passes):
    device = replace(device, dtype=FLOAT16)
    config = dense(device) if passes == "dense" else two_passes(device)
    q, k = weights_that_round_up(400, head_dim)
    v = np.full(k.shape, LARGEST)
    v[..., 1::2] *= -1
    tau = 10.0 if passes == "two passes and a tail" else 0.0
    tail = "first_order" if tau > 0 else "none"
    o, lse = attend(device, q, k, v, replace(config, tau=tau, tail=tail), scale=1.0)
    np.testing.assert_array_equal(o, np.broadcast_to(v[:, :, :1], o.shape))
    assert np.isfinite(lse).all()


@everywhere("-float16")
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_infinite_value_stays_infinite(device, head_dim, value):
    """In its own column, in rows that see it; everywhere else 65504 stays what it is."""
    device = replace(device, dtype=FLOAT16)
    q, k = weights_that_round_up(400, head_dim)
    v = np.full(k.shape, LARGEST)
    v[..., 30, 3] = value
    for config in (dense(device), two_passes(device)):
        o, _ = attend(device, q, k, v, config, scale=1.0)
        expected = np.full(o.shape, LARGEST)
        expected[..., 30:, 3] = value
        np.testing.assert_array_equal(o, expected)
