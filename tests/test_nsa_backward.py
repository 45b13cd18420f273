"""NSA's gradients: the reference by finite differences, and the selected branch's function on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from s2o_cupy.nsa import selected_attention_backward
from s2o_cupy.reference.nsa import backward as nsa_backward
from s2o_cupy.reference.nsa import forward as nsa

LENGTH, STRIDE, BLOCK = 8, 4, 16
STEP = 1e-5  # of float64 differences: an error of STEP^2 and of 1e-16 / STEP


@pytest.fixture
def x(rng):
    """q, k, v, do of a chunk: queries behind 30 keys."""
    q, do = rng.standard_normal((2, 2, 4, 70, 8))
    k, v = rng.standard_normal((2, 2, 2, 100, 8))
    return q, k, v, do


def assert_gradients(rng, forward, arrays, gradients, do):
    """``gradients`` of sum(do * forward(*arrays)) with respect to each of ``arrays``, along random directions."""
    for i, (array, gradient) in enumerate(zip(arrays, gradients, strict=True)):
        assert gradient.shape == array.shape
        for _ in range(3):
            direction = rng.standard_normal(array.shape)
            moved = [[*arrays[:i], array + sign * STEP * direction, *arrays[i + 1 :]] for sign in (1, -1)]
            ahead, behind = ((do * forward(*given)).sum() for given in moved)
            np.testing.assert_allclose((gradient * direction).sum(), (ahead - behind) / (2 * STEP), rtol=1e-7)


def blocks_of(rng, seqlen_q, count):
    """Some blocks in any order, some of them none."""
    blocks = np.stack([rng.permutation(count)[:4] for _ in range(2 * 2 * seqlen_q)]).reshape(2, 2, seqlen_q, 4)
    blocks[rng.random(blocks.shape) < 0.2] = -1
    return blocks


@pytest.mark.parametrize("scale", [None, -0.4])
def test_compressed(rng, x, scale):
    q, k, v, do = x
    k, v = (nsa.compress(a, LENGTH, STRIDE) for a in (k, v))
    rule = {"length": LENGTH, "stride": STRIDE, "scale": scale}
    o, lse = nsa.compressed(q, k, v, 100, **rule)
    found = nsa_backward.compressed_backward(q, k, v, o, lse, do, 100, **rule)
    assert_gradients(rng, lambda *a: nsa.compressed(*a, 100, **rule)[0], [q, k, v], found, do)


@pytest.mark.parametrize("scale", [None, -0.4])
def test_selected(rng, x, scale):
    *arrays, do = x
    blocks = blocks_of(rng, 70, 7)
    rule = {"blocks": blocks, "block": BLOCK, "scale": scale}
    attended = nsa.selected(*arrays, **rule)
    found = nsa_backward.selected_backward(*arrays, blocks, *attended, do, block=BLOCK, scale=scale)
    assert_gradients(rng, lambda *a: nsa.selected(*a, **rule)[0], arrays, found, do)


def test_a_block_that_does_not_exist(x):
    q, k, v, do = x
    blocks = np.full((2, 2, 70, 1), 7)  # 100 keys have 7 blocks of 16
    message = "^selected_attention_backward: blocks has 7; accepted: up to 6, the last block"
    with pytest.raises(ValueError, match=message):
        selected_attention_backward(q, k, v, blocks, q, np.zeros(q.shape[:3], np.float32), do, BLOCK)


def test_window(rng, x):
    *arrays, do = x
    found = nsa_backward.window_backward(*arrays, *nsa.window(*arrays, 20), do, 20)
    assert_gradients(rng, lambda *a: nsa.window(*a, 20)[0], arrays, found, do)


@pytest.mark.parametrize("per_head", [False, True])
def test_gates(rng, per_head):
    *branches, do = rng.standard_normal((4, 2, 4, 10, 8))
    gates = rng.random((2, 4, 10, 3) if per_head else (2, 10, 3))
    of_gates, of_branches = nsa_backward.gate_backward(gates, tuple(branches), do)
    assert_gradients(rng, nsa.gate, [gates, *branches], [of_gates, *of_branches], do)


def test_a_key_that_no_row_sees_has_no_gradient(x):
    q, k, v, do = x
    blocks = np.full((2, 2, 70, 2), 3)
    attended = nsa.selected(q, k, v, blocks, block=BLOCK)
    found = nsa_backward.selected_backward(q, k, v, blocks, *attended, do, block=BLOCK)
    for x in (found.k, found.v):
        assert not x[:, :, :48].any() and not x[:, :, 64:].any() and x[:, :, 48:64].all()
    assert not found.q[:, :, :18].any()  # before all keys of the block
