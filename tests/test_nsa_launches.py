"""What NSA launches: in which order, on which arrays, and what waits for what; a CUDA that takes notes stands for the
real one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from nsa_cases import SMALL
from nsa_recorded import (
    GRAPH,
    OF_BLOCKS,
    ROUNDS,
    STREAM,
    WEIGHTS,
    Case,
    Cleared,
    before,
    of_pass1,
    operand,
    points_to,
)  # fmt: skip
from nsa_recorded import install as install
from pretended import Launched, array_at

from s2o_cupy.arrays.operand import Call
from s2o_cupy.nsa import kernels
from s2o_cupy.reference.dense import dense_attention
from s2o_cupy.reference.nsa import forward as nsa

CASES = [
    pytest.param(heads, lengths, capability, id=f"{heads[0] // heads[1]}-{lengths[0]}-{lengths[1]}-sm{capability}")
    for heads in ((2, 2), (4, 2), (4, 1)) for lengths in ((701, 701), (37, 389)) for capability in (80, 90)
]  # fmt: skip
COMPRESSES = [
    *(x for x in CASES if x.values[0] != (2, 2) or x.values[2] == 80),  # else weights come of one kernel
    *(
        pytest.param((4, 2), lengths, 80, id=f"2-{lengths[0]}-{lengths[1]}")
        for lengths in ((64, 95), (704, 704), (37, 37))
    ),
]


# ---------------------------------------------------------------- all branches


@pytest.mark.parametrize(("heads", "lengths", "capability"), CASES)
def test_stages_of_a_call(install, heads, lengths, capability):
    """The window and what is compressed, then all choices, then round by round the chosen blocks and the sum; who looks
    on is told of each."""
    cuda, case, told = install(capability), Case.make(heads, lengths, capability=capability), []
    case.attend(told.append)
    plan = case.plan
    runs = 2 * sum(of.rows > 0 for of in plan.remainders)
    first = ["pass1"] * max(0, runs - 1) + ["nsa_window"] + ["pass1"] * (runs > 0)
    choice = ["nsa_compressed" if plan.fused else "nsa_block_weights", "nsa_top_blocks"] * len(plan.choice_rounds)
    blocks = [*OF_BLOCKS, "nsa_selected", "nsa_merge_parts"] * len(plan.rounds)
    assert [x.kernel.role for x in cuda.launched()] == [*first, *choice, *blocks]
    assert [x.removesuffix("_sm90") for x in told] == [
        *("nsa_compressed" if x == "pass1" else x for x in first), *choice, *blocks
    ]  # fmt: skip
    assert not cuda.keys and {x.stream for x in cuda.notes} == {STREAM}
    assert len(plan.rounds) > 1 or lengths[0] < 128


@pytest.mark.parametrize(("heads", "lengths", "capability"), CASES)
def test_blocks_have_every_token(install, heads, lengths, capability):
    """And no block of threads has nothing to do, of kernels that know how much there is."""
    cuda, case = install(capability), Case.make(heads, lengths, capability=capability)
    case.attend()
    plan, (seqlen_q, seqlen_k), group = case.plan, lengths, heads[0] // heads[1]
    kv_rows = 2 * heads[1]
    cover = lambda rows, each: -(-rows // each)  # noqa: E731

    (window,) = cuda.launched("nsa_window")
    rows = 192 if capability == 90 else 128
    tiles = len({position // rows for position in range(seqlen_k - seqlen_q, seqlen_k)})
    assert (window.blocks, window.params["tiles"], window.params["q_tiles"]) == (2 * heads[0] * tiles, tiles,
                                                                                2 * heads[0])  # fmt: skip
    seen = []
    for x, top in zip(cuda.launched(*WEIGHTS), cuda.launched("nsa_top_blocks"), strict=True):
        p, tokens = x.params, int(x.params["tokens"])
        of_block = 128 if plan.fused else kernels.block_weight_tokens(x.kernel)
        assert p["tiles"] == cover(tokens, of_block) and x.blocks == p["tiles"] * kv_rows * (group if plan.fused else 1)
        assert (top.params["first_token"], top.params["tokens"]) == (p["first_token"], tokens)
        assert p["q_tiles"] == top.params["q_tiles"] == kv_rows
        assert top.blocks == cover(kv_rows * tokens, 4)  # a warp for each
        seen += range(p["first_token"], p["first_token"] + tokens)
    assert seen == [*range(seqlen_q)]

    seen = []
    for x in cuda.launched("nsa_merge_parts"):
        tokens = int(x.params["tokens"])
        assert x.blocks == cover(kv_rows * cover(tokens, 4) * group, 4) and x.params["q_tiles"] == kv_rows
        seen += range(x.params["first_token"], x.params["first_token"] + tokens)
    assert seen == [*range(seqlen_q)]
    for role, blocks in (
        ("nsa_count", kv_rows * cover(plan.tokens, 512)), ("nsa_scatter", kv_rows * cover(plan.tokens, 512)),
        ("nsa_totals", kv_rows * cover(cover(seqlen_k, 64), 128)), ("nsa_places", kv_rows),
        ("nsa_selected", kv_rows * plan.most_items),
    ):  # fmt: skip
        assert {x.blocks for x in cuda.launched(role)} == {blocks}
    assert {int(x.params["tiles"]) for x in cuda.launched("nsa_totals")} == {cover(cover(seqlen_k, 64), 128)}


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("heads", "lengths", "capability"), CASES[::3])
def test_arrays_of_each_stage(install, heads, lengths, capability, shares):
    """Each branch reads its own keys and values, and all have the same places in the workspace."""
    cuda, case = install(capability), Case.make(heads, lengths, capability=capability, shares=shares)
    case.attend()
    x, places = case.x, case.plan.workspace.places
    assert cuda.notes[0][:2] == (case.address, 0) and cuda.notes[0].nbytes <= case.asked[0]
    for launched in cuda.launched():
        p = launched.params
        if launched.kernel.role == "pass1":
            continue
        for name, place in places.items():
            assert p[name] == case.address + place.offset
        others = {"parts", "weights", "near_out", "step_tops", "step_bases", "head_lse"} - set(places)
        assert not any(p[name] for name in others) and p["lse"] == p["sinks"] == 0
        assert points_to(p["q"], x.q) and p["gates_wide"] == 1
        assert tuple(p["gates"]) == (x.gates.ctypes.data, *(s // 4 for s in x.gates.strides[:3]))
        if launched.kernel.role in ("nsa_window", "nsa_selected", "nsa_merge_parts"):
            assert points_to(p["out"], case.out)
            keys = case.near if launched.kernel.role == "nsa_window" else x
            assert points_to(p["k"], keys.k) and points_to(p["v"], keys.v)
        if launched.kernel.role in (*WEIGHTS, "nsa_merge_parts"):
            assert points_to(p["k_cmp"], x.k_cmp) and points_to(p["v_cmp"], x.v_cmp)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("heads", "lengths", "capability"), COMPRESSES)
def test_compressed_attention_leaves_each_row_where_it_is_read(install, heads, lengths, capability):
    """Attention computed with what pass 1 is given is compressed attention; rows without a key are nobody's."""
    cuda, case = install(capability), Case.make(heads, lengths, capability=capability)
    case.attend()
    sizes, spans = [], []  # of each launch, and of its state
    for x in cuda.launched("pass1"):
        p = of_pass1(x)
        rows, keys, head_dim = (int(p["geometry"][name]) for name in ("seqlen_q", "seqlen_k", "head_dim"))
        batch = int(p["q_tiles"]) // (heads[0] * -(-rows // 128))
        views = []
        for name, count, length in (("q", heads[0], rows), ("k", heads[1], keys), ("v", heads[1], keys),
                                    ("out", heads[0], rows)):  # fmt: skip
            pointer, *strides = (int(n) for n in p[name])
            views.append(array_at(pointer, np.float16, (batch, count, length, head_dim), tuple(strides)))
        q, k, v, out = views
        scale = float(p["scale_log2"]) * np.log(2)
        of = {"scale": scale, "is_causal": bool(p["geometry"]["is_causal"])}
        o, lse = dense_attention(q.astype(float), k.astype(float), v.astype(float), **of)
        assert np.isnan(out).all()  # nobody has written it
        out[...] = o
        array_at(int(p["lse"]), np.float32, lse.shape)[...] = lse
        sizes.append(batch * rows)
        spans += [(int(p["state"]), int(p["state"]) + batch * heads[0] * rows * 8)] if p["state"] else []
    assert sizes[-1] == max(sizes)  # what takes longest is beside the window
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(spans)))
    plan, x = case.plan, case.x
    first, (asked,) = case.address + plan.workspace.nbytes, case.asked
    assert all(first <= begin and end <= case.address + asked for begin, end in spans)

    p = cuda.launched(*WEIGHTS)[0].params
    exact, exact_lse = nsa.compressed(
        x.q.astype(float), x.k_cmp.astype(float), x.v_cmp.astype(float), lengths[1], length=32, stride=16, scale=0.125
    )
    seen = np.isfinite(exact_lse)
    out = array_at(int(p["cmp_out"]), np.float16, exact.shape)
    np.testing.assert_allclose(out[seen], exact[seen], atol=2e-3)
    assert np.isnan(out[~seen]).all()
    of = [p[f"remainders_{i}"] for i in range(3)]
    for b, h, token in np.argwhere(seen):
        row, remainder = token >> p["stride_shift"], token & 15
        mine = of[sum(remainder >= of[i]["first"] for i in (1, 2))]
        place = b * p["batch_lse"] + mine["lse"] + ((remainder - mine["first"]) * heads[0] + h) * mine["rows"]
        found = array_at(int(p["cmp_lse"] + 4 * (place + row - mine["skipped"])), np.float32, (1,))
        np.testing.assert_allclose(found[0], exact_lse[b, h, token], atol=1e-4)


@pytest.mark.parametrize(("heads", "lengths", "capability"), CASES)
def test_what_waits_for_what_in_a_graph(install, heads, lengths, capability):
    """The window runs beside the longest of what is compressed; choices wait for all that is compressed, the first sum
    for the window; and when the call is over nothing is still running."""
    cuda, case = install(capability, captured=True), Case.make(heads, lengths, capability=capability)
    case.attend()
    notes, over = cuda.notes, before(cuda.notes)
    at = {role: [i for i, x in enumerate(notes) if isinstance(x, Launched) and x.kernel.role == role]
          for role in ("pass1", "nsa_window", *WEIGHTS, "nsa_top_blocks", *OF_BLOCKS, "nsa_merge_parts")}  # fmt: skip
    (window,), compressed = at["nsa_window"], at["pass1"]
    for role in (*WEIGHTS, "nsa_top_blocks", "nsa_count", "nsa_merge_parts"):
        assert all(over[i] >= {*compressed} for i in at[role])
    assert all(window in over[i] for i in at["nsa_merge_parts"])
    later = [x for role in (*WEIGHTS, "nsa_top_blocks") for x in at[role]]
    assert all(window not in over[i] for i in [*compressed, *later])
    assert compressed == [] or compressed[-1] not in over[window]
    cleared = [i for i, x in enumerate(notes) if isinstance(x, Cleared)]
    assert all(cleared[0] in over[i] for i in over if i != cleared[0])
    assert over[max(over)] == {*over} - {max(over)} and notes[max(over)].stream == GRAPH
    assert not {x.stream for x in notes} & {STREAM, 0}  # the default one may not be used while others are captured


def test_a_graph_is_that_of_all_that_launches_hold(install):
    """Addresses and strides of every array, gates' among them, and the workspace."""
    from s2o_cupy.nsa.launches import Branches, Gates, Pair, attend

    cuda, case = install(90), Case.make(lengths=(90, 90))
    arrays = [operand(x) for x in (*case.x[:5], case.near.k, case.near.v, case.out)]
    gates = Gates(1 << 20, (2160, 540, 6), True)

    def key(arrays, gates=gates, address=case.address):
        q, k, v, k_cmp, v_cmp, k_win, v_win, out = arrays
        branches = Branches(Pair(k, v), Pair(k_cmp, v_cmp), Pair(k_win, v_win), gates)
        memory = lambda nbytes: (address, None)  # noqa: E731
        attend(q, branches, out, case.problem, case.config, stream=STREAM, memory=memory)
        return cuda.keys.pop()

    known = [key(arrays), key(arrays, address=1 << 21)]
    assert key(arrays) == known[0]
    for i, x in enumerate(arrays):
        for moved in (x._replace(pointer=x.pointer + 16), x._replace(strides=(*x.strides[:2], x.strides[2] + 8))):
            known.append(key([*arrays[:i], moved, *arrays[i + 1 :]]))
    for change in ({"pointer": 1 << 22}, {"strides": (2160, 540, 3)}, {"wide": False}):
        known.append(key(arrays, gates._replace(**change)))
    assert len({*known}) == len(known)


def test_a_window_that_has_all_blocks_lists_none(install):
    """Where the last blocks are all that a token attends to."""
    config = replace(SMALL, top=2, first=0, local=2, window=130)
    cuda, case = install(90), Case.make(lengths=(90, 90), config=config)
    case.attend()
    roles = [x.kernel.role for x in cuda.launched()]
    assert not {"nsa_selected", *OF_BLOCKS} & {*roles} and roles[-1] == "nsa_merge_parts"
    (near,) = {int(x.params["near_out"]) for x in cuda.launched("nsa_window", "nsa_merge_parts")}
    assert near == case.address + case.plan.workspace.places["near_out"].offset


@pytest.mark.parametrize("group", range(1, 17))
def test_numbers_that_kernels_reckon_with(install, group):
    """As params.cuh has them: n * group_magic >> 16 is n / group, scores are in log2 units, shifts are those of a
    stride and a block."""
    config = replace(SMALL, block=128, stride=16, length=32, first=2, local=1, window=300)
    cuda, case = install(80), Case.make((group, 1), (100, 237), config, 80, batch=1)
    case.attend()
    p, n = cuda.launched("nsa_merge_parts")[-1].params, np.arange(4096)
    np.testing.assert_array_equal(n * int(p["group_magic"]) >> 16, n // group)
    assert (p["group"], p["heads"], p["kv_heads"], p["compressed"], p["length"]) == (group, group, 1, 13, 32)
    np.testing.assert_allclose(p["scale_log2"], 0.125 / np.log(2), rtol=1e-6)
    assert (2 ** p["stride_shift"], 2 ** p["block_shift"], p["blocks"]) == (16, 128, 2)
    assert (p["top"], p["first"], p["local"], p["apart"], p["slots"], p["window"]) == (5, 2, 1, 1, 4, 237)
    assert tuple(p["geometry"][name] for name in ("seqlen_q", "seqlen_k", "head_dim")) == (100, 237, 64)
    assert p["item_tokens"] * group <= 1024 < (p["item_tokens"] + 1) * group
    assert p["steps_per_tile"] == 1 and not p["fused"]


# ---------------------------------------------------------------- a branch alone


CHOSEN, LSE = 0x3000, 0x4000


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
def test_blocks_are_chosen_without_attending(install, heads, capability):
    """To the caller's array, by compressed attention to keys that stand for values too."""
    from s2o_cupy.nsa.launches import select

    cuda, case = install(capability), Case.make(heads, capability=capability)
    q, k_cmp = operand(case.x.q), operand(case.x.k_cmp)
    select(q, k_cmp, CHOSEN, case.problem, ROUNDS, stream=STREAM, memory=case.give)
    chosen = cuda.launched(*WEIGHTS, "nsa_top_blocks")
    assert {x.stream for x in cuda.notes} == {STREAM}
    assert {x.kernel.role for x in cuda.launched()} == {x.kernel.role for x in chosen} | (
        {"pass1"} if not (heads == (2, 2) and capability == 90) else set()
    )
    assert sum(int(x.params["tokens"]) for x in cuda.launched("nsa_top_blocks")) == 701
    for x in chosen:
        assert x.params["chosen"] == CHOSEN and points_to(x.params["q"], case.x.q)
        assert points_to(x.params["k_cmp"], case.x.k_cmp) and points_to(x.params["v_cmp"], case.x.k_cmp)
    for x in cuda.launched("pass1"):
        k, v = (of_pass1(x)[name] for name in "kv")
        assert k == v and k["data"] in {case.x.k_cmp[b].ctypes.data for b in (0, 1)}


@pytest.mark.parametrize("capability", [80, 90])
def test_chosen_blocks_alone(install, capability):
    """As many rounds as it takes. The caller may name a block twice, which leaves a gap that must say so."""
    from s2o_cupy.nsa.launches import attend_blocks

    cuda, case = install(capability), Case.make(capability=capability)
    x, arrays = case.x, [operand(a) for a in (case.x.q, case.x.k, case.x.v, case.out)]
    attend_blocks(Call(tuple(arrays), LSE, 0, case.problem), CHOSEN, ROUNDS, stream=STREAM, memory=case.give)
    launched = cuda.launched()
    rounds = len(launched) // 6
    assert rounds > 1 and [x.kernel.role for x in launched] == [*OF_BLOCKS, "nsa_selected", "nsa_merge_parts"] * rounds
    assert sum(int(x.params["tokens"]) for x in cuda.launched("nsa_merge_parts")) == 701
    for one in launched:
        p = one.params
        assert (p["chosen"], p["lse"], p["gates"]["data"], p["apart"], p["slots"]) == (CHOSEN, LSE, 0, 0, 5)
        assert points_to(p["q"], x.q) and points_to(p["k"], x.k) and points_to(p["v"], x.v)
        assert points_to(p["out"], case.out)
    kinds = [x.address if isinstance(x, Cleared) else x.kernel.role for x in cuda.notes[1:]]
    entries = int(launched[0].params["entries"])
    assert [kinds[i - 1] for i, x in enumerate(kinds) if x == "nsa_count"] == [entries] * rounds
    tokens = max(int(x.params["tokens"]) for x in launched)
    gaps = {x for x in cuda.notes[1:] if isinstance(x, Cleared)}
    assert gaps == {Cleared(entries, 255, 4 * 2 * 2 * tokens * 5, STREAM)}


def test_the_window_alone(install):
    """With no more sinks than there are keys; and nothing is left of the call before."""
    from s2o_cupy.nsa.launches import attend_window

    cuda, case = install(90), Case.make(lengths=(37, 89))
    arrays = tuple(operand(a) for a in (case.x.q, case.x.k, case.x.v, case.out))
    for lse, sinks in ((LSE, 4), (0, 0), (0, 1000)):
        attend_window(Call(arrays, lse, 0, case.problem), SMALL, sinks, stream=STREAM, memory=case.give)
        (window,) = cuda.launched()
        p = window.params
        assert window.kernel.role == "nsa_window" and window.blocks == 2 * 4 and p["window"] == 89
        assert (p["lse"], p["sinks"], p["gates"]["data"], p["near_out"]) == (lse, min(sinks, 89), 0, 0)
        assert points_to(p["q"], case.x.q) and points_to(p["k"], case.x.k) and points_to(p["v"], case.x.v)
        assert points_to(p["out"], case.out)
        cuda.notes.clear()


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("block", [64, 128])
def test_gradients_of_chosen_blocks(install, heads, block):
    """Those of keys start from 0 and are added up over the rounds; a row's product with its output comes once."""
    from s2o_cupy.nsa.backward_launches import Gradients, attend_blocks_backward

    config = replace(ROUNDS, block=block, stride=16)
    cuda, case = install(90), Case.make(heads, (701, 725), config)
    x, dout = case.x, np.zeros_like(case.x.q)
    arrays = Call(tuple(operand(a) for a in (x.q, x.k, x.v, case.out)), LSE, 0, case.problem)
    gradients = Gradients(0x1000000, 0x2000000, 0x3000000)
    case = case._replace(memory=np.zeros(1 << 26, np.uint8))
    attend_blocks_backward(arrays, CHOSEN, operand(dout), gradients, config, stream=STREAM, memory=case.give)

    kv_rows, group, halves = 2 * heads[1], heads[0] // heads[1], block // 64
    sums = [*OF_BLOCKS, "nsa_selected_backward", "nsa_query_gradients", "nsa_key_gradients"]
    launched = cuda.launched()
    rounds = len(launched) // 7
    assert rounds > 1 and [x.kernel.role for x in launched] == ["nsa_deltas", *sums * rounds]
    assert launched[0].blocks == -(-2 * heads[0] * 701 // 4) and launched[0].params["q_tiles"] == kv_rows
    seen = []
    for items, of_queries, of_keys in zip(*(cuda.launched(role) for role in sums[-3:]), strict=True):
        p, tokens = items.params, int(items.params["tokens"])
        seen += range(p["first_token"], p["first_token"] + tokens)
        assert items.blocks == kv_rows * int(p["most_items"]) * halves and of_keys.blocks == kv_rows * p["most_items"]
        assert of_queries.blocks == -(-kv_rows * tokens * group // 4)
    assert seen == [*range(701)]
    for one in launched:
        p = one.params
        assert (p["chosen"], p["lse"]) == (CHOSEN, LSE) and points_to(p["out"], case.out)
        assert points_to(p["q"], x.q) and points_to(p["k"], x.k) and points_to(p["v"], x.v)
        if one.kernel.role in OF_BLOCKS:
            continue
        assert (p["dq"], p["dk"], p["dv"], p["halves"]) == (*gradients, halves) and points_to(p["dout"], dout)
        parts = [int(p[name]) for name in ("delta", "query_parts", "key_parts", "value_parts")]
        assert 0 < case.address < min(parts) and len({*parts}) == 4
    cleared = [x for x in cuda.notes if isinstance(x, Cleared)]
    whole = [x[:3] for x in cleared if x.address in gradients]
    assert sorted(whole) == [(address, 0, 4 * 2 * heads[1] * 725 * 64) for address in gradients[1:]]
    assert cuda.notes.index(cuda.launched("nsa_key_gradients")[0]) > max(
        i for i, x in enumerate(cuda.notes) if isinstance(x, Cleared) and x.address in gradients
    )
