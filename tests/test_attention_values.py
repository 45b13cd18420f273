"""Values that are no ordinary numbers: NaN and Inf reach what sees them and nothing else, equal scores, huge scores.
On the CPU always; on a GPU too when one is present."""

from __future__ import annotations

import numpy as np
import pytest

LENGTH, SPOT = 400, 200  # SPOT lies inside the second segment of four


def unseen(device, tau, spot):
    """Rows that key ``spot`` cannot reach: all before it, but at tau > 0 only those of earlier segments.

    Rows of a segment stop together, and when a later one stops depends on the keys it sees.
    """
    return slice(0, spot if tau == 0 else spot // device.config.segment * device.config.segment)


def assert_same_rows(device, o, expected, rows):
    """Bits of earlier segments. Rows of the key's own segment share an order with later ones, whose mass it is part
    of: where all keys are visited, another order rounds otherwise."""
    begin = rows.stop // device.config.segment * device.config.segment
    np.testing.assert_array_equal(o[:, :, :begin], expected[:, :, :begin])
    unit = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}[device.dtype.name]
    np.testing.assert_allclose(o[:, :, begin : rows.stop], expected[:, :, begin : rows.stop], rtol=0, atol=unit)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e4])
@pytest.mark.parametrize("tau", [0, 0.05])
@pytest.mark.parametrize("spot", [SPOT, 5], ids=["middle", "first segment"])
def test_a_key_changes_only_the_rows_that_may_see_it(device, qkv, config, name, value, tau, spot):
    q, k, v = qkv(LENGTH, heads=4, kv_heads=2)
    expected = device.attend(q, k, v, tau=tau)
    {"k": k, "v": v}[name][:, 1, spot] = value
    o = device.attend(q, k, v, tau=tau)
    np.testing.assert_array_equal(o[:, :2], expected[:, :2])  # heads of the other KV head
    rows = unseen(device, tau, spot)
    assert_same_rows(device, o[:, 2:], expected[:, 2:], rows)
    assert (o[:, 2:, spot] != expected[:, 2:, spot]).any()


def test_a_nan_reaches_every_row_that_sees_it(device, qkv):
    """NaN is never laundered: not to zero, and not by being ordered last and abandoned."""
    for name in ("k", "v"):
        q, k, v = qkv(LENGTH)
        {"k": k, "v": v}[name][:, :, SPOT] = np.nan
        o = device.attend(q, k, v, tau=0)
        assert np.isnan(o[:, :, SPOT:]).all()
        assert np.isfinite(o[:, :, :SPOT]).all()
    q, k, v = qkv(LENGTH)
    k[:, :, SPOT] = np.nan
    assert np.isnan(device.attend(q, k, v, tau=0.05)[:, :, SPOT:]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 6e4])
@pytest.mark.parametrize("tau", [0, 0.05])
@pytest.mark.parametrize("spot", [SPOT, 301])
def test_the_future_is_not_seen(device, qkv, value, tau, spot):
    """Every key and value from ``spot`` on becomes hostile; rows that cannot see it keep their bits."""
    q, k, v = qkv(LENGTH)
    expected = device.attend(q, k, v, tau=tau)
    k[:, :, spot:], v[:, :, spot:] = value, value
    rows = unseen(device, tau, spot)
    assert_same_rows(device, device.attend(q, k, v, tau=tau), expected, rows)


def test_more_keys_before_the_queries_are_not_the_future(device, qkv):
    """seqlen_k - seqlen_q below one segment: the guide may use only keys before the segment."""
    q, k, v = qkv(200, 250)
    expected = device.attend(q, k, v, tau=0)
    unseen = 50 + 128  # by the first segment's queries, any of which may move the order of all
    k[:, :, unseen:], v[:, :, unseen:] = np.nan, np.nan
    np.testing.assert_array_equal(device.attend(q, k, v, tau=0)[:, :, :128], expected[:, :, :128])


def test_inf_in_v(device, qkv):
    q, k, v = qkv(LENGTH)
    q *= 0.25  # so that no weight is below the smallest of float16: 0 times Inf is NaN
    v[0, 0, 30, 3], v[0, 0, 70, 5] = np.inf, -np.inf
    o, exact = device.attend(q, k, v, tau=0), device.exact(q, k, v)
    np.testing.assert_array_equal(np.isposinf(o), np.isposinf(exact))
    np.testing.assert_array_equal(np.isneginf(o), np.isneginf(exact))
    assert not np.isnan(o).any()


@pytest.mark.parametrize("constant", ["q", "k"])
def test_equal_scores_give_the_mean_of_v(device, qkv, constant):
    q, k, v = qkv(300)
    if constant == "q":
        q[...] = 0
    else:
        k[...] = k[:, :, :1]
    o = device.attend(q, k, v, tau=0)
    device.assert_dense(o, q, k, v)
    if constant == "q":
        mean = device.round(v).cumsum(axis=2) / np.arange(1, 301)[:, None]  # of the visible values
        np.testing.assert_allclose(o, np.broadcast_to(mean, o.shape), rtol=0, atol=0.01)
    once, again = (device.attend(q, k, v, tau=0.05) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert np.isfinite(once).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tau", [0, 0.05])
def test_scores_of_10000(device, qkv, sign, tau):
    q, k, v = qkv(300)
    q[..., 0], k[..., 0] = 100, sign * 100
    o = device.attend(q, k, v, tau=tau, scale=1.0)
    assert np.isfinite(o).all()
    assert np.abs(o).max() <= np.abs(device.round(v)).max()


@pytest.mark.parametrize("tau", [0, 0.05])
def test_float16_maxima(device, qkv, tau):
    q, k, v = (np.copysign(60000, x) for x in qkv(300))
    o = device.attend(q, k, v, tau=tau)
    assert np.isfinite(o).all()
    assert np.abs(o).max() <= np.abs(device.round(v)).max()
