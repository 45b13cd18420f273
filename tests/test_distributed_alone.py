"""SequenceParallel as one process sees it: what it refuses, what it calls, and what it waits for."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SMALL
from pretended import record_launches
from ranks import MEAN, parallel

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.caches import clear_cache
from s2o_cupy.integrations.zigzag import Zigzag

SEGMENT = SMALL.segment


@pytest.fixture
def attended(torch, monkeypatch):
    """q, k, v and config of each call of `_attend`, which computes nothing."""
    import s2o_cupy.integrations.distributed as module

    calls = []
    note = lambda q, k, v, out, problem, config, *_, **options: calls.append((q, k, v, config))  # noqa: E731
    monkeypatch.setattr(module, "_attend", note)
    return calls


def test_a_group_of_others(torch, monkeypatch):
    for name, value in (("is_initialized", True), ("get_rank", -1), ("get_world_size", -1)):
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    with pytest.raises(ValueError, match="group does not hold this process; accepted: a group that does"):
        parallel(700, config=MEAN)


@pytest.mark.parametrize("split", ["sequence", "heads"])
def test_without_a_group(torch, qkv, split):
    q, k, v = (torch.from_numpy(x) for x in qkv(700, heads=4, kv_heads=2))
    alone = parallel(700, config=MEAN, split=split)
    assert (alone.rank, alone.world_size, alone.length) == (0, 1, 700)
    for helper in (alone.shard, alone.scatter, alone.gather):
        assert torch.equal(helper(q, 2), q)
    options = {"scale": 0.3, "softcap": 2.0}
    o, lse = alone.attention(q, k, v, **options, return_lse=True)
    for x, y in zip((o, lse), s2o_attention(q, k, v, config=MEAN, **options, return_lse=True), strict=True):
        assert torch.equal(x, y)
    turned = [x.transpose(1, 2)[0] for x in (q, k, v)]
    assert torch.equal(alone.attention(*turned, **options, layout="BSHD"), o.transpose(1, 2)[0])
    assert torch.equal(alone.attention(q[0], k[0], v[0], **options), o[0])
    assert not torch.equal(alone.attention(q, k, v, scale=0.3), o)


@pytest.mark.parametrize("split", ["sequence", "heads"])
def test_one_rank_makes_one_call(torch, attended, split):
    """With what it is given: there is nothing to balance."""
    q, k, v = torch.zeros(3, 1, 1, 700, 16)
    alone = parallel(700, config=MEAN, split=split)
    alone.attention(q, k, v)
    (call,) = attended
    assert [x.data_ptr() for x in call[:3]] == [x.data_ptr() for x in (q, k, v)]
    assert call[3] == MEAN


def test_what_is_refused(torch):
    for match, options in (
        (r"seqlen is -1; accepted: an integer >= 0", {"seqlen": -1}),
        (r"seqlen is 1.5; accepted", {"seqlen": 1.5}),
        (r"split is 'rows'; accepted: 'sequence', 'heads'", {"seqlen": 8, "split": "rows"}),
    ):
        with pytest.raises(ValueError, match=match):
            parallel(**options)
    with pytest.raises(TypeError, match="config is a float; accepted: S2OConfig or None"):
        parallel(8, config=0.1)
    x = torch.zeros(1, 2, 8, 16)
    alone = parallel(9)
    with pytest.raises(ValueError, match=r"x is \(1, 2, 8, 16\), 8 rows on axis 2; accepted: 9 rows on rank 0 of 1"):
        alone.shard(x, 2)
    with pytest.raises(ValueError, match=r"gather: x is .*accepted: 9 rows"):
        alone.gather(x, 2)
    with pytest.raises(ValueError, match="scatter: x is None on rank 0, the source"):
        alone.scatter(None, 2)
    with pytest.raises(ValueError, match="q has 8 rows, k and v have 8; accepted: 9 on rank 0 of 1, for"):
        alone.attention(x, x, x)
    with pytest.raises(TypeError, match="k is a ndarray; accepted: a torch.Tensor"):
        alone.attention(x, x.numpy(), x)
    with pytest.raises(ValueError, match="v requires grad.*inference only"):
        alone.attention(x, x, x.clone().requires_grad_())
    with pytest.raises(ValueError, match="q on cpu, k on meta, v on cpu; accepted: one device"):
        alone.attention(x, x.to("meta"), x)
    with pytest.raises(ValueError, match="accepted: heads a multiple of kv_heads"):
        alone.attention(x[:, :1], x, x)
    with pytest.raises(ValueError, match="softcap is -30; accepted: 0 .off., or"):
        alone.attention(x, x, x, softcap=-30)
    y = torch.zeros(1, 2, 9, 16)
    with pytest.raises(ValueError, match="out and k overlap in memory"):
        alone.attention(y.clone(), y, y.clone(), out=y)
    with pytest.raises(ValueError, match=r"out has shape \(1, 2, 8, 16\); accepted: \(1, 2, 9, 16\)"):
        alone.attention(y, y, y, out=x)


# ---------------------------------------------------------------- the first of two


def as_first_of_two(monkeypatch):
    """As in a group of two, but nothing is sent."""
    import torch.distributed as dist

    import s2o_cupy.integrations.distributed as module

    monkeypatch.setattr(module, "agreement_of", lambda group: SimpleNamespace(knows=lambda call: True))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "P2POp", lambda *arguments, **options: None)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda transfers: [])


def test_the_whole_length_decides_on_dense_attention(torch, monkeypatch, attended):
    """Not that of a chunk's keys, which are fewer: a GPU would else compute early chunks otherwise than in one call."""
    monkeypatch.setattr("s2o_cupy.plan.launch_plan.DENSE_UP_TO", 8192)
    as_first_of_two(monkeypatch)
    for seqlen, config, expected in (
        (10_000, S2OConfig(), 10_000),  # of a head of up to 64
        (10_300, S2OConfig(), 0),
        (9000, S2OConfig(tau=0), 9000),
        (5000, S2OConfig(dense_up_to=0), 0),
        (5000, S2OConfig(tau=0, dense_up_to=4999), 0),
        (5000, S2OConfig(dense_up_to=5000), 5000),
    ):
        attended.clear()
        both = parallel(seqlen, config=config)
        q = torch.zeros(1, 1, both.length, 8)
        both.attention(q, q, q)
        assert len(attended) > 1
        found = {replace(config, dense_last=None) for *_, config in attended}
        assert found == {replace(config, dense_up_to=expected)}


def test_all_heads_decide_on_dense_attention(torch, monkeypatch, attended):
    """Not a rank's share of them, which would be dense for longer than one call of all."""
    import s2o_cupy.integrations.distributed as module

    monkeypatch.setattr("s2o_cupy.plan.launch_plan.DENSE_UP_TO", 8192)
    as_first_of_two(monkeypatch)
    share = lambda q, k, v, out, attend, **_: attend(slice(0, 4), q, k, v, out)  # noqa: E731
    monkeypatch.setattr(module, "attend_by_heads", share)
    for seqlen, expected in ((9_216, 9_216), (10_000, 0)):
        both = parallel(seqlen, split="heads")
        q = torch.zeros(1, 8, both.length, 8)
        both.attention(q, q, q)
        assert attended[-1][3].dense_up_to == expected
    taus = tuple(0.01 * n for n in range(1, 9))
    monkeypatch.setattr(module, "attend_by_heads", lambda q, k, v, out, attend, **_: attend(slice(2, 5), q, k, v, out))
    k, v = (q[:, :8] + n for n in (1, 2))
    parallel(10_000, config=S2OConfig(tau=taus), split="heads").attention(q, k, v)
    assert attended[-1][3].tau == taus[2:5]
    assert [x.unique().tolist() for x in attended[-1][:3]] == [[0], [1], [2]]


def test_a_call_for_each_run_of_chunks(torch, monkeypatch, attended):
    as_first_of_two(monkeypatch)
    monkeypatch.setattr("s2o_cupy.integrations.distributed.rounds_for", lambda seqlen: 4)
    for segments, keys in ((0, []), (1, [1]), (3, [3]), (8, [1, 5, 8]), (12, [1, 6, 12])):
        attended.clear()
        both = parallel(segments * SEGMENT, config=MEAN)
        q = torch.zeros(1, 1, both.length, 8)
        both.attention(q, q, q)
        assert [k.shape[1] // SEGMENT for _, k, _, _ in attended] == keys


def test_config_and_length_decide_the_chunks(torch):
    assert parallel(4096, config=replace(S2OConfig(), segment=512)).zigzag == Zigzag(4096, 1, 512, 2)
    assert [parallel(seqlen).zigzag.rounds for seqlen in (0, 524_288, 524_289)] == [2, 2, 4]


# ---------------------------------------------------------------- what the ranks agree on


def test_who_differs_in_what(torch):
    from s2o_cupy.integrations.agreement import _differences

    assert _differences([{"a": 1, "b": "x"}] * 3) == []
    assert _differences([{"a": 1}, {"a": 2}, {"a": 1}]) == ["a is 1 on ranks 0 and 2, 2 on rank 1"]
    assert _differences([{"a": 1}, {"a": 2}, {"a": 3, "b": None}]) == [
        "a is 1 on rank 0, 2 on rank 1, 3 on rank 2", "b is absent on ranks 0 and 1, None on rank 2",
    ]  # fmt: skip


def test_what_is_remembered_is_bounded(torch, monkeypatch):
    """All ranks forget at the same call, as they make the same ones."""
    import s2o_cupy.integrations.agreement as module

    monkeypatch.setattr(module, "CALLS", 3)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(module.dist, "all_gather_object", lambda of_ranks, terms, group: of_ranks.__setitem__(0, terms))
    agreement = module.Agreement(None)
    for call in "abcd":
        agreement.reach(call, {"call": call}, None)
        assert agreement.knows(call)
    assert [agreement.knows(call) for call in "abcd"] == [False, False, False, True]


# ---------------------------------------------------------------- keys on their way


@pytest.mark.parametrize(
    ("options", "seqlen_k", "waits_after"),
    [
        ({}, 2048, "pass1"),
        ({"window": 64}, 2048, None),
        ({"window": 64, "path": "portable"}, 2048, None),
        ({"path": "portable", "tail": "first_order"}, 2048, "pass1"),
        ({"rank": "weight"}, 2048, "pass1"),
        ({"rank": "weight"}, 2044, None),
        ({"rank": "query", "tail": "none"}, 2048, "pass1"),
        ({"rank": "query", "tail": "none"}, 2044, None),
        ({"dense_up_to": 9000}, 2048, None),
    ],
)
def test_pass_1_does_not_wait_for_keys(monkeypatch, options, seqlen_k, waits_after):
    """But for those of a window, or of a unit inside which the queries begin, or where it is all there is. A CUDA that
    only takes notes; on GPUs see below."""
    pytest.importorskip("cupy")
    from s2o_cupy.arrays.operand import Operand
    from s2o_cupy.cuda import pipeline, program
    from s2o_cupy.problem import Problem

    launched = record_launches(monkeypatch, 90, pipeline)
    memset = SimpleNamespace(getDevice=lambda: 0, memsetAsync=lambda *arguments: launched.append("clear"))
    monkeypatch.setattr(pipeline, "runtime", memset)
    replays = []
    graphs = SimpleNamespace(run=lambda *arguments: replays.append(1))
    monkeypatch.setattr(program, "GraphCache", lambda cuda: graphs)

    config = S2OConfig(**{"segment": 128, "rank": "mean", "dense_up_to": 0} | options)
    problem = Problem(1, 2, 1, 512, seqlen_k, 64, "bfloat16", True, 0.125)
    q = Operand(1 << 20, (1, 2, 512, 64), (2 * 512 * 64, 512 * 64, 64))
    k = Operand(2 << 20, (1, 1, seqlen_k, 64), (seqlen_k * 64, seqlen_k * 64, 64))
    clear_cache()
    try:
        for await_keys in (lambda: launched.append("wait"), None):
            memory = lambda nbytes: (4 << 20, None)  # noqa: E731
            call = pipeline.Call((q, k, k, q), 0, 0, problem)
            pipeline.run(call, config, stream=0, memory=memory, await_keys=await_keys)
    finally:
        clear_cache()
    notes = [x if isinstance(x, str) else x.kernel.function.removesuffix("_sm90") for x in launched]
    at = notes.index("wait")
    assert notes.count("wait") == 1
    if waits_after:
        assert notes[:at] == ["clear", waits_after]
        first = "unit_clusters" if options.get("rank") == "query" else "pool_queries"
        assert notes[at + 1] == ("part_moments" if options.get("tail") == "first_order" else first)
        assert replays == [1]  # the call that has nothing to wait for
    else:
        assert "pass1" not in notes[:at]


def test_what_is_on_its_way_is_kept_until_it_was_waited_for(torch):
    """Its memory would else be the next tensor's, on another stream than what still reads it."""
    from s2o_cupy.integrations.exchange import Exchange
    from s2o_cupy.integrations.head_exchange import Sent

    source, seen = torch.zeros(3), []
    alive = weakref.ref(source)
    work = SimpleNamespace(wait=lambda: seen.append(alive() is not None))
    sent = Sent(torch.ones(3), source, [Exchange([work])])
    del source
    gc.collect()
    assert torch.equal(sent.wait(), torch.ones(3))
    assert seen == [True] and alive() is None


@pytest.mark.parametrize(
    ("dtype", "length", "wide"),
    [("bfloat16", 64, True), ("float32", 36, True), ("bfloat16", 36, False), ("float64", 33, False)],
)
def test_rows_are_copied_in_wide_elements_where_they_can_be(torch, dtype, length, wide):
    """Bit for bit: also NaNs of any kind."""
    from s2o_cupy.integrations.exchange import wide as widened

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[getattr(torch, dtype).itemsize]
    info = torch.iinfo(bits)
    x = torch.randint(info.min, info.max, (1, 10, 3, length), dtype=bits).view(getattr(torch, dtype))
    assert (widened(x).dtype == torch.complex128) == wide
    to = torch.empty(10, 2, 3, length, dtype=x.dtype)
    to[:, 1].view(widened(x).dtype).copy_(widened(x)[0])
    assert torch.equal(to[:, 1].view(bits), x[0].view(bits))
    for narrow in (x[..., 1:], x.transpose(2, 3), x.flatten()[1 : 1 + 30 * length - length].view(1, -1, length)):
        assert widened(narrow) is narrow


def test_rows_that_stay_narrow(torch):
    """16 bytes divide rows, their distances, where they begin in a tensor's memory and where that begins."""
    from s2o_cupy.integrations.exchange import wide as widened

    rows = torch.zeros(6, 4, 40, dtype=torch.int16)
    for whole in (rows[..., :32], rows[..., 8:24], rows[1:, 1:]):
        assert widened(whole).dtype == torch.complex128
        assert widened(whole).shape == (*whole.shape[:2], whole.shape[2] // 8)
    memory = np.zeros(80, np.int16)
    odd = torch.from_numpy(memory[(2 - memory.ctypes.data) % 16 // 2 :][:64].reshape(8, 8))
    assert odd.data_ptr() % 16 == 2 and odd.storage_offset() == 0
    apart = torch.zeros(300, dtype=torch.int16).as_strided((6, 32), (36, 1))
    for part in (rows[..., :36], rows[..., 4:36], apart, odd):
        assert widened(part) is part


def test_an_error_is_refused_and_a_tau_for_each_head_is_not(torch, qkv):
    with pytest.raises(ValueError, match="SequenceParallel: config.error is 0.1.*; accepted: a tau, or one for each"):
        parallel(100, config=S2OConfig(error=0.1))
    arrays = [torch.from_numpy(x) for x in qkv(300, heads=4, kv_heads=2)]
    config = SMALL.with_tau((0.5, 0.0, 0.01, 0.1))
    found = parallel(300, config=config).attention(*arrays)
    assert torch.equal(found, s2o_attention(*arrays, config=config))
