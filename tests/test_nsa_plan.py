"""How NSA's call is cut up for the GPU: lengths of compressed attention, rounds, workspace, what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from s2o_cupy.nsa import NSAConfig, kernels
from s2o_cupy.nsa.backward_plan import halves, make_backward_plan
from s2o_cupy.nsa.plan import compressed_count, make_plan, remainders
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.problem import Problem
from s2o_cupy.reference.dense import dense_attention
from s2o_cupy.reference.nsa import forward as nsa

HOPPER = DeviceLimits.of_architecture(90)
LENGTHS = [(1, 1), (5, 40), (31, 31), (32, 32), (33, 33), (90, 90), (100, 100), (37, 130), (3, 200), (64, 71)]
RUNS = [(32, 16), (16, 16), (8, 4), (1, 1), (12, 5), (64, 8)]


def problem(seqlen_q, seqlen_k=None, *, heads=4, kv_heads=2, batch=1, head_dim=128):
    return Problem(batch, heads, kv_heads, seqlen_q, seqlen_k or seqlen_q, head_dim, "bfloat16", True, 0.1)


def plan_of(found, config, *, limits=HOPPER, compresses=True, attends=True, gates=True, shares=True):
    return make_plan(
        found, config, limits, where="f", compresses=compresses, attends=attends, gates=gates, shares=shares
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_compressed_attention_is_causal_attention_of_every_stride_th_query(rng, lengths, runs):
    (seqlen_q, seqlen_k), (length, stride) = lengths, runs
    q = rng.standard_normal((1, 2, seqlen_q, 8))
    k, v = (nsa.compress(x, length, stride) for x in rng.standard_normal((2, 1, 1, seqlen_k, 8)))
    o, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    found = remainders(seqlen_q, seqlen_k, length, stride)
    assert [x.first for x in found] == list(np.cumsum([0, *(x.size for x in found)])[:-1])
    assert sum(x.size for x in found) == min(stride, seqlen_q)
    for of in found:
        for remainder in range(of.first, of.first + of.size):
            assert of.rows + of.skipped == len(range(remainder, seqlen_q, stride))
            if of.rows:
                at = np.s_[:, :, remainder + of.skipped * stride :: stride]
                assert of.rows <= of.keys <= k.shape[2]
                o[at], lse[at] = dense_attention(q[at], k[:, :, : of.keys], v[:, :, : of.keys])
    exact, exact_lse = nsa.compressed(q, k, v, seqlen_k, length=length, stride=stride)
    np.testing.assert_allclose(o, exact, atol=1e-12)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-12)


def test_compressed_keys():
    for seqlen, count in ((0, 0), (31, 0), (32, 1), (47, 1), (48, 2), (65536, 4095)):
        assert compressed_count(seqlen, 32, 16) == count


@pytest.mark.parametrize("seqlen_q", [1, 127, 5000, 65536, 65537, 200_000])
@pytest.mark.parametrize("workspace", [1 << 20, 64 << 20, 1 << 30])
@pytest.mark.parametrize("heads", [4, 32])
def test_rounds_are_all_tokens_within_the_bound(seqlen_q, workspace, heads):
    plan = plan_of(problem(seqlen_q, heads=heads, kv_heads=4), NSAConfig(workspace_bytes=workspace))
    places = plan.workspace.places
    for rounds, most, names in (
        (plan.choice_rounds, plan.choice_tokens, {"weights", "step_tops", "step_bases", "head_lse"} & set(places)),
        (plan.rounds, plan.tokens, {"parts", "part_lse"}),
    ):
        assert [first for first, _ in rounds] == list(range(0, seqlen_q, most))
        assert sum(tokens for _, tokens in rounds) == seqlen_q
        assert sum(places[name].nbytes for name in names) <= workspace or most <= kernels.ROWS
        assert len(rounds) == 1 or most >= kernels.ROWS


def test_weights_and_parts_share_memory():
    """Of all arrays no others overlap, and none is outside of the workspace."""
    plan = plan_of(problem(5000, heads=2), NSAConfig())
    assert plan.fused
    early, late = {"weights", "step_tops", "step_bases", "head_lse"}, {"parts", "part_lse"}
    spans = {name: (x.offset, x.offset + x.nbytes) for name, x in plan.workspace.places.items()}
    assert early | late <= set(spans)
    assert max(end for _, end in spans.values()) <= plan.workspace.nbytes
    for one, other in itertools.combinations(spans, 2):
        if {one, other} & early and {one, other} & late:
            continue
        assert spans[one][1] <= spans[other][0] or spans[other][1] <= spans[one][0], (one, other)


def test_every_token_finds_room_for_its_blocks():
    """However they are spread, a block of threads takes up to 1,024 rows of one block of keys."""
    rng = np.random.default_rng(1)
    for seqlen, group in ((700, 1), (3000, 4), (3000, 16)):
        plan = plan_of(problem(seqlen, heads=2 * group), NSAConfig(top=6))
        for spread in (1, 5, plan.blocks):
            chosen = rng.integers(0, spread, seqlen * plan.slots)
            items = -(-np.bincount(chosen, minlength=plan.blocks) // plan.item_tokens)
            assert items.sum() <= plan.most_items
        assert plan.item_tokens * group <= 1024


@pytest.mark.parametrize("config", [NSAConfig(), NSAConfig(block=128, top=8)], ids=["64", "128"])
@pytest.mark.parametrize("workspace", [1 << 20, 64 << 20, 1 << 30])
def test_gradients_take_rounds_within_the_bound(config, workspace):
    config = dataclasses.replace(config, workspace_bytes=workspace)
    for seqlen, heads in ((1, 4), (5000, 4), (65537, 32)):
        plan = make_backward_plan(problem(seqlen, heads=heads, kv_heads=4), config, HOPPER, where="f")
        assert sum(tokens for _, tokens in plan.rounds) == seqlen
        assert plan.workspace.places["query_parts"].nbytes <= workspace or plan.tokens <= kernels.ROWS
        parts = plan.workspace.places["key_parts"].shape
        assert parts[:3] == (4, plan.most_items, halves(config)) == (4, plan.most_items, config.block // 64)
        for spread in (1, plan.blocks):
            chosen = np.random.default_rng(1).integers(0, spread, plan.tokens * plan.slots)
            assert (-(-np.bincount(chosen) // plan.item_tokens)).sum() <= plan.most_items


def test_what_is_computed_with_the_window():
    """The last blocks, where the window holds them."""
    assert plan_of(problem(1000), NSAConfig()).slots == 14
    assert plan_of(problem(1000), NSAConfig(window=128)).apart
    assert plan_of(problem(1000), NSAConfig(window=127)).slots == 16
    assert not plan_of(problem(1000), NSAConfig(), gates=False).apart


def test_a_window_of_other_keys_computes_no_blocks():
    plan = plan_of(problem(1000), NSAConfig(), shares=False)
    assert not plan.apart
    assert plan.slots == 16
    assert not {"near_out", "near_lse"} & set(plan.workspace.places)


def test_division_of_rows_by_the_group():
    """As nsa_selected does it."""
    rows = np.arange(4096)
    for group in range(1, kernels.MAX_GROUP + 1):
        np.testing.assert_array_equal(rows * (65536 // group + 1) >> 16, rows // group)


@pytest.mark.parametrize("local", [1, 2])
def test_where_the_window_computes_all_blocks_none_is_listed(local):
    """Its kernels would divide by no slots."""
    config = NSAConfig(top=local, first=0, local=local)
    for shares, slots in ((True, 0), (False, local)):
        plan = plan_of(problem(1000), config, shares=shares)
        lists = {"nsa_count", "nsa_places", "nsa_scatter"} & {x.function for x in plan.kernels}
        assert (plan.slots, bool(lists)) == (slots, slots > 0)
        assert plan.kernel("nsa_merge_parts")


@pytest.mark.parametrize(
    ("found", "config", "message"),
    [
        (problem(100, head_dim=129), NSAConfig(), "head_dim is 129; accepted on the GPU: multiples of 8 up to 128"),
        (problem(100, heads=34), NSAConfig(), "17 heads for each of k's; accepted on the GPU: up to 16"),
        (problem(100), NSAConfig(block=32), "block is 32; accepted on the GPU: 64 or 128"),
        (problem(100), NSAConfig(top=33), "has 33 blocks; accepted on the GPU: up to 32"),
        (problem(100), NSAConfig(stride=32), "length is 32 and stride 32 with blocks of 64"),
        (problem(100), NSAConfig(length=48), "length is 48 and stride 16 with blocks of 64"),
    ],
)
def test_what_no_kernel_takes(found, config, message):
    with pytest.raises(ValueError, match=f"f: .*{message}"):
        plan_of(found, config)


def test_what_does_not_fit_in_shared_memory():
    ada = DeviceLimits.of_architecture(89)
    plan_of(problem(1000, heads=16), NSAConfig(), limits=ada)
    with pytest.raises(ValueError, match="12 query heads of a KV head"):
        plan_of(problem(1000, heads=24), NSAConfig(), limits=ada)
