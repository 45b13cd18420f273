"""Rows whose scores rise along the order of their keys, by little or by more than a weight can hold.

Pass 2 on Hopper leaves what a row's weights are relative to where it is while scores stay near it. A quarter of the
queries here disagree with the segment's mean, which orders the keys: what matters most to them comes last.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import has_gpu, has_hopper
from gpu_cases import Case

from s2o_cupy.tools.diffing import capture, compare

LENGTH, QUERIES = 1200, 128
LOG2 = float(np.log(2))


def opposed(reach: float, shift: float, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """q, k and v, whose scores lie ``reach`` (log2 units) around -``shift``; for every fourth query they rise as they
    fall for the others, from the segment's own keys on."""
    q, k = np.zeros((1, 2, QUERIES, 64)), np.zeros((1, 1, LENGTH, 64))
    q[..., 0] = np.where(np.arange(QUERIES) % 4 == 3, -1, 1) * reach / 2 * LOG2
    q[..., 1] = 1
    k[..., 0] = rng.uniform(-1, 1, LENGTH)
    k[..., LENGTH - QUERIES :, 0] = 1
    k[..., 1] = -shift * LOG2
    return q, k, rng.standard_normal((1, 1, LENGTH, 64))


@pytest.mark.parametrize("shift", [0, 20, 1000])
@pytest.mark.parametrize("reach", [10, 27, 29, 60, 130, 600, 4000])
def test_what_matters_most_comes_last(device, rng, reach, shift):
    q, k, v = opposed(reach, shift, rng)
    if device.dtype != np.float16:
        v *= 2.0**60  # weights are not so large that their products overflow
    config = replace(device.config, rank="mean")
    for is_causal in (True, False):
        o = device.attend(q, k, v, config=config, tau=0, scale=1.0, is_causal=is_causal)
        device.assert_dense(o, q, k, v, scale=1.0, is_causal=is_causal)


@pytest.mark.parametrize("shift", [-40, 0, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_maximum_of_either_sign(device, rng, head_dim, shift):
    """Of rows side by side whose scores rise, fall or are all the same, over six key tiles. Pass 1 on Hopper compares
    scores as integers once no row of a warp has a negative maximum."""
    length = 700
    q, k = np.zeros((1, 2, length, head_dim)), np.zeros((1, 1, length, head_dim))
    q[..., 0] = rng.choice([-20, -1, 0, 1, 20], (1, 2, length))
    q[..., 1] = 1
    k[..., 0] = np.linspace(-1, 1, length)
    k[..., 1] = shift
    v = rng.standard_normal(k.shape)
    config = replace(device.config, segment=1024, dense_up_to=length)
    for is_causal in (True, False):
        o = device.attend(q, k, v, config=config, tau=0, scale=LOG2, is_causal=is_causal)
        device.assert_dense(o, q, k, v, scale=LOG2, is_causal=is_causal)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_no_number(device, rng, value):
    """It shows in the rows that see it, as in dense attention, wherever it stands in the order."""
    q, k, v = opposed(60, 0, rng)
    k[0, 0, 700, 5] = value
    q[..., 5] = np.where(np.arange(QUERIES) % 2, 1, 0)
    config = replace(device.config, rank="mean")
    o = device.attend(q, k, v, config=config, tau=0, scale=1.0)
    exact = device.exact(q, k, v, scale=1.0)
    np.testing.assert_array_equal(np.isnan(o).any(-1), np.isnan(exact).any(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["portable", "hopper"])
@pytest.mark.parametrize("reach", [20, 30, 60])
def test_what_is_left_outweighs_all_that_a_row_has_found(path, reach):
    """By so much that the tail's sums need another unit, or that it is left out; in one row of sixteen."""
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if path == "hopper" and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    import cupy

    case = Case(heads=4, kv_heads=2, seqlen_q=1400, segment=256, head_dim=128, scale=1.0, tau=1000.0, dtype="float16",
                options={"rank": "mean", "tail": "first_order"})  # fmt: skip
    q, k, v = case.arrays()
    q *= q.dtype.type(0.3)
    k *= k.dtype.type(0.03)
    q[..., 0], k[..., 0] = 4, 1
    q[:, :, 3::16, 0], k[:, :, :256, 0] = -reach, -1  # what the mean puts last, and they first
    problem, config = case.problem(), case.config(path)
    report = compare(capture(*map(cupy.asarray, (q, k, v)), problem, config), q, k, v, problem, config)
    assert report.ok, report.table()
