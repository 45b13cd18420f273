"""What a tool reads of rank="query" from the GPU's workspace, stage by stage; NumPy arrays stand for the workspace."""

from __future__ import annotations

import numpy as np
import pytest

from s2o_cupy import S2OConfig
from s2o_cupy.problem import Problem
from s2o_cupy.selection.orders import query
from s2o_cupy.tools.diff_query_weights import capture

CONFIG = S2OConfig(rank="query", segment=128, unit=8, clusters=4)
PROBLEM = Problem(2, 6, 3, 300, 1333, 40, "float16", True, 0.1)  # batch, heads, kv_heads, lengths, head_dim
UNITS, WIDTH = 166, 64  # whole units of 1333 keys; elements of a row in the workspace, 40 of which are keys'


def bits(rng, *shape):
    """Random float16 numbers, as the workspace has them."""
    return rng.standard_normal(shape).astype(np.float16).view(np.uint16)


def read(stages, stage, workspace, config=CONFIG):
    return capture(stages, stage, workspace.__getitem__, workspace, np.float16, PROBLEM, config)


def of_groups(rng, heads):
    return {
        "cluster_keys": bits(rng, heads, UNITS, 4, WIDTH), "cluster_shares": bits(rng, heads, UNITS, 4).view(np.float16)
    }  # fmt: skip


def floats(x):
    return x.view(np.float16).astype(np.float32)


def test_groups_of_all_heads(rng):
    """Without the rows' padding; groups, their shares and the means of units."""
    workspace = {**of_groups(rng, 6), "unit_means": bits(rng, 6, UNITS, WIDTH)}
    stages = read(None, "unit_keys", workspace)
    assert stages.keys.shape == (2, 3, UNITS, 4, 40) and stages.keys.dtype == np.float32
    np.testing.assert_array_equal(stages.keys.reshape(6, UNITS, 4, 40), floats(workspace["cluster_keys"])[..., :40])
    np.testing.assert_array_equal(stages.shares.reshape(6, UNITS, 4), workspace["cluster_shares"])
    np.testing.assert_array_equal(stages.means.reshape(6, UNITS, 40), floats(workspace["unit_means"])[..., :40])
    assert stages.shares.dtype == np.float16 and stages.grouped == 6


@pytest.mark.parametrize(("at_once", "turns"), [(1, [1] * 6), (2, [2, 1, 2, 1]), (3, [3, 3]), (6, [6])])
def test_groups_of_some_heads_at_a_time(rng, monkeypatch, at_once, turns):
    """Each turn's stand where the turn before had its own; the last turn of a sequence may have fewer than there is
    room for, and means are whole after the last one."""
    monkeypatch.setattr(query, "GROUPED_BYTES", at_once * UNITS * 4 * WIDTH * 2)
    room = {"unit_rows": None, **of_groups(rng, max(turns))}  # rows of 8 bits are made of them
    stages, keys, shares = None, [], []
    for heads in turns:
        room |= {name: x[:] for name, x in of_groups(rng, max(turns)).items()}
        room["unit_means"] = bits(rng, 6, UNITS, WIDTH)
        keys.append(floats(room["cluster_keys"])[:heads, ..., :40])
        shares.append(room["cluster_shares"][:heads])
        stages = read(stages, "unit_keys", room)
        assert stages.grouped == sum(map(len, keys))
    np.testing.assert_array_equal(stages.keys.reshape(6, UNITS, 4, 40), np.concatenate(keys))
    np.testing.assert_array_equal(stages.shares.reshape(6, UNITS, 4), np.concatenate(shares))
    np.testing.assert_array_equal(stages.means.reshape(6, UNITS, 40), floats(room["unit_means"])[..., :40])


def test_where_each_key_is_a_group_there_are_means_alone(rng):
    workspace = {"unit_means": bits(rng, 6, UNITS, WIDTH), "unit_rows": None}
    stages = read(None, "unit_keys", workspace)
    np.testing.assert_array_equal(stages.means.reshape(6, UNITS, 40), floats(workspace["unit_means"])[..., :40])
    assert stages.keys is None and stages.shares is None and stages.grouped == 0


def of_blocks(rng):
    """What unit_rows leaves of blocks."""
    of_samples = {name: bits(rng, 6, UNITS // 64 * 4, WIDTH) for name in ("sampled_keys", "deviations")}
    return {"block_keys": bits(rng, 6, 1 + UNITS // 64, WIDTH), **of_samples}


def test_means_of_blocks_without_rows_of_8_bits(rng):
    """The centre, and a mean of every 64 units that are all there, four keys of which follow."""
    workspace = of_blocks(rng)
    stages = read(None, "unit_rows", workspace)
    assert stages.blocks.shape == (2, 3, 3, 40)
    np.testing.assert_array_equal(stages.blocks.reshape(6, 3, 40), floats(workspace["block_keys"])[..., :40])
    for name, found in (("sampled_keys", stages.sampled_keys), ("deviations", stages.deviations)):
        assert found.shape == (2, 3, 8, 40)
        np.testing.assert_array_equal(found.reshape(6, 8, 40), floats(workspace[name])[..., :40])
    assert stages.rows is None and stages.exponents is None


@pytest.mark.parametrize("in_bytes", [True, False])
def test_norms_and_scales(rng, in_bytes):
    """A norm of each query, and in 8 bits two scales of each segment; what was read before stays."""
    before = read(None, "unit_rows", of_blocks(rng))
    blocks = before.blocks
    workspace = {"norms": rng.standard_normal((12, 300)).astype(np.float32)}
    if in_bytes:
        workspace["query_scales"] = rng.random((12, 3, 2)).astype(np.float32)
    stages = read(before, "query_norms", workspace)
    np.testing.assert_array_equal(stages.norms, workspace["norms"].reshape(2, 6, 300))
    assert stages.blocks is blocks
    if in_bytes:
        np.testing.assert_array_equal(stages.scales, workspace["query_scales"].reshape(2, 6, 3, 2))
    else:
        assert stages.scales is None
