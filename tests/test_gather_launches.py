"""Which kernels a schedule launches and what stands in their parameters; a driver that records stands for CUDA's."""

from __future__ import annotations

import numpy as np
import pytest
from pretended import Launched, interrupted_before, record_launches
from schedules import random_schedule

from s2o_cupy.arrays.operand import Call, Operand, Paging
from s2o_cupy.caches import clear_cache
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.problem import Problem
from s2o_cupy.selection.methods import make_plan
from s2o_cupy.tools.catalogue import kernels_for

SHAPE = (2, 8, 2, 600, 1000, 128)  # batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim
OUT, LSE, VISITED = 0x40000, 0x50000, 0x60000
ARRAYS = {
    "entries": 0x1000, "begins": 0x2000, "keys": 0x3000, "sink_entries": 0x4000, "sink_begins": 0x5000,
    "sink_keys": 0x6000, "k_order": 0x7000,
}  # fmt: skip


@pytest.fixture
def driver(monkeypatch):
    """driver(compute_capability) -> the list of what is launched from then on."""
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import lists, pipeline

    def install(compute_capability: int) -> list[Launched]:
        clear_cache()
        return record_launches(monkeypatch, compute_capability, lists, pipeline)

    yield install
    clear_cache()


def call(driver, compute_capability, shape=SHAPE, paging=None, launched=None, moved=0, **schedule):
    """The plan of `cuda.gather`, and what it launches. ``launched``: of a call before, which this one is added to;
    ``moved``: where q lies, from where it did."""
    launched = driver(compute_capability) if launched is None else launched
    from s2o_cupy.cuda import gather

    batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim = shape
    form = random_schedule(np.random.default_rng(0), seqlen_q, seqlen_k, **schedule).form
    problem = Problem(
        batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, "bfloat16", form.is_causal, 0.1
    )

    def operand(pointer, heads, rows):
        return Operand(pointer, (batch, heads, rows, head_dim), (heads * rows * head_dim, rows * head_dim, head_dim))

    q = operand(0x100000 + moved, heads, seqlen_q)
    k, v = (operand(x, kv_heads, seqlen_k) for x in (0x200000, 0x300000))
    if paging is not None:
        pages = (paging.pages, kv_heads, paging.page_size, head_dim)
        row = kv_heads * head_dim
        k, v = (x._replace(shape=pages, strides=(paging.page_size * row, head_dim, row)) for x in (k, v))
    kept = []

    def memory(nbytes):
        kept.append(np.zeros(nbytes + 16, np.uint8))
        return kept[-1].ctypes.data, kept[-1]

    arrays = {name: ARRAYS[name] for name in form.array_names}
    of_call = Call((q, k, v, operand(OUT, heads, seqlen_q)), LSE, VISITED, problem, paging)
    plan = gather.gather(of_call, arrays, form, form.of_pass("auto"), stream=7, memory=memory)
    return plan, launched


@pytest.mark.parametrize("compute_capability", [80, 90])
def test_the_three_launches(driver, compute_capability):
    plan, launched = call(driver, compute_capability, batch=2, list_heads=8, segment=256, window=30, tau=0.25)
    own = "_sm90" if compute_capability == 90 else ""
    assert [x.kernel.function for x in launched] == [f"pass1{own}", f"pass2_listed{own}"]
    first, listed = (x.params["attention"] if "attention" in x.params.dtype.names else x.params for x in launched)
    assert first["geometry"]["segment"] == 256 and first["geometry"]["window"] == 30
    assert first["state"] == listed["state"] != 0 and listed["lists"]["kept"] == 0
    assert (listed["lists"]["entries"], listed["lists"]["begins"], listed["lists"]["keys"]) == (0x1000, 0x2000, 0x3000)
    assert listed["lists"]["shared_heads"] == 1 and listed["lists"]["per_tile"] == 1
    assert listed["geometry"]["segment"] == 600 and listed["tiles"] == 5  # one segment, a list for each q tile
    assert listed["tau"] == 0.25 and listed["lse"] == LSE and listed["visited"] == VISITED
    assert plan.path == ("hopper" if own else "portable") and listed["q"]["data"] == 0x100000


def test_a_call_after_an_interrupted_one_has_its_own_maps(driver, monkeypatch):
    """The interrupt comes when the other's maps are written and nobody has taken a note of it."""
    from s2o_cupy.cuda.lists import _ListedPass

    armed = interrupted_before(monkeypatch, _ListedPass, "mapped")
    schedule = {"batch": 2, "list_heads": 8, "segment": 256, "unit": 64}
    _, launched = call(driver, 90, **schedule)
    maps = launched[-1].kernel.family.params.map_bytes
    expected = launched[-1].params.tobytes()[:maps]
    armed.append(True)
    with pytest.raises(KeyboardInterrupt):
        call(driver, 90, launched=launched, moved=1 << 24, **schedule)
    armed.clear()
    call(driver, 90, launched=launched, **schedule)
    assert maps and launched[-1].params.tobytes()[:maps] == expected


def test_sinks_come_between_and_keep_the_state(driver):
    _, launched = call(driver, 90, segment=128, sinks=5, batch=2, tau=0.5)
    assert [x.kernel.function for x in launched] == ["pass1_sm90", *["pass2_listed_sm90"] * 4]  # a turn each
    state = launched[0].params["attention"]["state"]
    of_sequence = 8 * 600  # rows
    for b, (sinks, lists) in enumerate([launched[1:3], launched[3:5]]):
        sinks, lists = sinks.params, lists.params
        assert sinks["state"] == sinks["lists"]["kept"] == lists["state"] == state + b * of_sequence * 8
        assert lists["lists"]["kept"] == 0
        assert sinks["lists"]["entries"] == 0x4000 and sinks["lists"]["keys"] == 0x6000  # the same for both
        assert sinks["geometry"]["segment"] == 128 and sinks["tau"] == 0 and lists["tau"] == 0.5
        assert lists["lists"]["begins"] == 0x2000 + b * 5 * 8 and lists["lists"]["keys"] == 0x3000 + b * 5 * 4
        assert lists["lse"] == LSE + b * of_sequence * 4 and lists["visited"] == VISITED + b * 8 * 5 * 4
        assert lists["out"]["data"] == OUT + b * of_sequence * 128 * 2


@pytest.mark.parametrize(("order", "heads", "stride"), [((1, 1), 8, 0), ((1, 2), 4, 1000), ((2, 8), 1, 1000)])
def test_a_permutation_is_a_page_table(driver, order, heads, stride):
    _, launched = call(driver, 90, order=order, is_causal=False)
    assert [x.kernel.name for x in launched] == ["pass2_listed_sm90-bfloat16-d128-s2-paged"] * 2
    for b, x in enumerate(launched):
        p = x.params
        assert p["pages"]["table"] == 0x7000 + (b * order[1] * 1000 * 4 if order[0] > 1 else 0)
        assert (p["pages"]["stride"], p["pages"]["shift"], p["lists"]["table_heads"]) == (stride, 0, heads)
        assert (p["k"]["batch"], p["k"]["head"]) == (128, 1000 * 128)  # from key to key, and from head to head
        assert p["k"]["data"] == 0x200000 + b * 2 * 1000 * 128 * 2 and p["v"]["data"] == p["k"]["data"] + 0x100000
        assert p["state"] == 0


def test_block_m_64(driver):
    """Q tiles of 64 on Hopper: blocks of one computing warpgroup, of which a multiprocessor holds two."""
    plan, launched = call(driver, 90, segment=128, block_m=64, list_heads=8)
    assert (plan.path, plan.path_reason, plan.pass1.block_m) == ("hopper", None, 128)
    assert [x.kernel.function for x in launched] == ["pass1_sm90", *["pass2_listed_sm90"] * 2]
    assert [(x.kernel.block_m, x.kernel.threads) for x in launched[1:]] == [(64, 256)] * 2
    assert launched[1].params["tiles"] == 10 and launched[1].kernel.shared_bytes <= 113 * 1024


@pytest.mark.parametrize("list_heads", [1, 2])
def test_two_heads_share_a_tile_of_128_rows(driver, list_heads):
    """Where q tiles of 64 have one list for both and never stop: half as many tiles, each of 64 queries as before."""
    _, launched = call(driver, 90, segment=128, block_m=64, list_heads=list_heads)
    assert [x.kernel.function for x in launched] == ["pass1_sm90", *["pass2_listed_pairs_sm90"] * 2]
    for x in launched[1:]:
        assert (x.kernel.block_m, x.kernel.threads, x.kernel.tile_heads) == (128, 384, 2)
        assert (x.params["tiles"], x.params["q_tiles"]) == (10, 10 * 8 // 2)
        assert x.params["lists"]["shared_heads"] == 8 // list_heads


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [
        (SHAPE, {"list_heads": 8}),
        (SHAPE, {"tau": 0.1}),
        (SHAPE, {"order": (1, 8), "is_causal": False}),
        ((2, 6, 2, *SHAPE[3:]), {"list_heads": 2}),  # three heads of a KV head
        ((2, 8, 8, *SHAPE[3:]), {}),
    ],
    ids=str,
)
def test_heads_that_share_too_little_have_tiles_of_their_own(driver, shape, schedule):
    _, launched = call(driver, 90, shape, block_m=64, **schedule)
    assert {x.kernel.function for x in launched} - {"pass1_sm90"} == {"pass2_listed_sm90"}


@pytest.mark.parametrize(("chunks", "reaches"), [(2**32 - 2, True), (2**32 - 1, False)])
def test_two_heads_share_a_tile_if_32_bits_reach_both(driver, monkeypatch, chunks, reaches):
    """The last row of a head from the first row of the one before it, in chunks of 16 bytes."""
    x = Operand(0, (1, 2, 600, 128), (0, chunks * 8 - 599 * 128, 128))
    assert x.is_compact() and x.reaches_next_head() == reaches
    monkeypatch.setattr(Operand, "reaches_next_head", lambda self: reaches)
    _, launched = call(driver, 90, block_m=64)
    assert {x.kernel.function == "pass2_listed_pairs_sm90" for x in launched} == {reaches}


def test_block_m_64_with_wide_heads_is_portable(driver):
    plan, launched = call(driver, 90, (*SHAPE[:5], 256), segment=128, block_m=64)
    assert plan.path == "portable" and plan.path_reason == "block_m is 64, not 128 with head_dim 256"
    assert [x.kernel.function for x in launched] == ["pass1", *["pass2_listed"] * 2]


@pytest.mark.parametrize("compute_capability", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("options", [{}, {"order": (1, 2)}, {"block_m": 64}], ids=str)
def test_every_kernel_is_compiled_ahead(driver, compute_capability, head_dim, options):
    _, launched = call(driver, compute_capability, (*SHAPE[:5], head_dim), segment=128, sinks=5, **options)
    assert {x.kernel for x in launched} <= set(kernels_for(compute_capability))


def test_a_plan_without_a_choice_is_pass_1(driver):
    problem = Problem(1, 8, 2, 4000, 4000, 128, "bfloat16", True, 0.1)
    form = random_schedule(np.random.default_rng(0), 4000, 4000, segment=256).form
    plan = make_plan(problem, form.of_pass("auto"), DeviceLimits.of_architecture(90), True)
    assert plan.chunks == () and plan.keeps_state and not plan.dense and plan.geometry.segment == 256


@pytest.mark.parametrize("list_batch", [1, 2])
def test_pages_are_those_of_a_turn(driver, list_batch):
    """Lists that sequences share have them take turns, each with its own row of the page table."""
    _, launched = call(driver, 90, paging=Paging(0x8000, 20, 64, 40), batch=list_batch, list_heads=2, segment=128)
    assert launched[0].kernel.function == "pass1_gathered_sm90" and launched[0].params["pages"]["table"] == 0x8000
    turns = launched[1:]
    assert len(turns) == (2 if list_batch == 1 else 1)
    for b, x in enumerate(turns):
        assert x.kernel.paged and x.params["pages"]["table"] == 0x8000 + b * 20 * 4
        assert x.params["lists"]["table_heads"] == 8 and x.params["pages"]["shift"] == 6
        assert x.params["k"]["data"] == 0x200000 and x.params["q"]["data"] == 0x100000 + b * 8 * 600 * 128 * 2
