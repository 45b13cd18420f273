"""What the kernels are handed for a schedule, without a GPU: NumPy stands for them, and reads and writes memory by the
addresses and strides that they would be given."""

from __future__ import annotations

import types

import numpy as np
import pytest
from pages import paged, random_table
from pretended import pretend_gpu
from schedules import RULES, masked_attention, meant, random_schedule
from test_pretended_gpu import array_at

from s2o_cupy import Schedule, gather_attention, gather_attention_paged
from s2o_cupy.reference import s2o
from s2o_cupy.reference.gather import gather
from s2o_cupy.reference.lists import KeyLists
from s2o_cupy.reference.lists import attend_lists as definition
from s2o_cupy.reference.value_skip import ValueSkips

LOG2E = np.log2(np.e)


def bhsd(x):
    return array_at(x.pointer, np.float16, x.shape, x.strides)


class Kernels:
    """pipeline.run_pass1 and attend_lists by the reference."""

    def __init__(self):
        self.launched = []

    def allocate(self, nbytes):
        memory = np.full(nbytes, 0xFF, np.uint8)
        return memory.ctypes.data, memory

    def run_pass1(self, call, config, *, stream, memory):
        operands, lse, _, problem, paging = call
        self.launched.append(("pass1", problem.batch))
        q, k, v = (bhsd(x).astype(np.float32) for x in operands[:3])
        if paging is not None:
            every, params = range(0, problem.heads, problem.heads // problem.kv_heads), {"table_heads": problem.heads}
            k, v = (
                np.concatenate([
                    np.concatenate([self.keys_of(x, paging, b, h, problem, params) for h in every], axis=1)
                    for b in range(problem.batch)
                ]).astype(np.float32)
                for x in operands[1:3]
            )
        state = s2o.pass1(q, k, v, problem.geometry(config), problem.scale, problem.softcap)
        address, keeper = memory(8 * q.shape[0] * q.shape[1] * q.shape[2])
        self.store(state, operands[3], lse, address)
        return address, keeper

    def attend_lists(self, call, lists, shape, config, *, stream, state=0, skips=(0, 0), memory=None):
        operands, lse, visited, problem, paging = call
        self.launched.append(("sinks" if lists.kept else "lists", problem.batch))
        shape.check(problem)
        assert shape.resumed == bool(state)
        params, of = shape.params(problem), shape.lists_shape(problem, config.block_m)
        begins, keys = array_at(lists.begins, np.int64, of), array_at(lists.keys, np.int32, of)
        entries = array_at(lists.entries, np.int32, (int((begins + -(-keys // shape.unit)).max(initial=0)),))
        q, out = bhsd(operands[0]).astype(np.float32), operands[3]
        start, rows = None, (problem.batch, problem.heads, problem.seqlen_q)
        if state:
            m, mass = np.moveaxis(array_at(state, np.float32, (*rows, 2)), -1, 0)
            start = s2o.State(m / LOG2E, mass, bhsd(out).astype(np.float32) * mass[..., None])
        taken = np.zeros(shape.visited_shape(problem, config.block_m), np.int32)
        left_out = np.zeros_like(taken)
        ends = s2o.State(np.empty(rows), np.empty(rows), np.empty(q.shape))
        for b, h in np.ndindex(rows[:2]):
            k, v = (self.keys_of(x, paging, b, h, problem, params).astype(np.float32) for x in operands[1:3])
            at, list_head = (slice(b, b + 1), slice(h, h + 1)), h * shape.list_heads // problem.heads
            of_head = KeyLists(entries, *(x[b : b + 1, list_head : list_head + 1] for x in (begins, keys)), shape.unit)
            limits = None if shape.value_skip is None else np.broadcast_to(shape.value_skip, (problem.heads,))[h]
            values = None if limits is None else ValueSkips(limits)
            found, taken[at] = definition(
                q[at], k, v, of_head, start and s2o.State(*(x[at] for x in start)), segment=shape.segment,
                block_m=config.block_m, block_n=config.block_n, scale=problem.scale, softcap=problem.softcap,
                tau=config.tau, values=values,
            )  # fmt: skip
            if values is not None:
                left_out[at] = values.skipped(taken[at].shape)
            for whole, part in zip(ends, found, strict=True):
                whole[at] = part
        self.store(ends, out, lse, lists.kept)
        if visited:
            array_at(visited, np.int32, taken.shape)[...] = taken
        if skips[0]:
            array_at(skips[0], np.int32, taken.shape)[...] = left_out
        return types.SimpleNamespace(path="portable", path_reason=None)

    @staticmethod
    def keys_of(x, paging, b, h, problem, params):
        """k or v as a head reads it by position, [1, 1, Lk, D]."""
        kv_head = h // (problem.heads // problem.kv_heads)
        if paging is None:
            return bhsd(x)[b : b + 1, kv_head : kv_head + 1]
        row, size = (b * problem.heads + h) // params["table_heads"], paging.page_size
        table = array_at(paging.pointer + 4 * row * paging.stride, np.int32, (-(-problem.seqlen_k // size),))
        positions = np.arange(problem.seqlen_k)
        return bhsd(x)[table[positions // size], kv_head, positions % size][None, None]

    @staticmethod
    def store(state, out, lse, kept):
        o, of_rows = s2o.finish(state)
        bhsd(out)[...] = o
        if lse:
            array_at(lse, np.float32, of_rows.shape)[...] = of_rows
        if kept:
            array_at(kept, np.float32, (*of_rows.shape, 2))[...] = np.stack([state.m * LOG2E, state.l], axis=-1)


@pytest.fixture
def kernels(monkeypatch):
    pytest.importorskip("cupy")
    from s2o_cupy.cuda import gather as module

    found = Kernels()
    monkeypatch.setattr(module, "attend_lists", found.attend_lists)
    monkeypatch.setattr(module, "pipeline", found)
    pretend_gpu(monkeypatch, allocate=found.allocate)
    return found


def assert_masked(found, q, k, v, schedule, **options):
    """Outputs are rounded to 11 bits by up to three launches."""
    o, lse = found
    mask = meant(schedule, *q.shape[:2])
    expected, of_rows = masked_attention(q, k, v, mask, **options)
    np.testing.assert_allclose(o.astype(np.float64), expected, rtol=0, atol=4 * 2**-11 * np.abs(v).max())
    np.testing.assert_allclose(lse, of_rows, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("batches", [(2, None), (1, None), (2, (1, 2)), (1, (2, 4)), (1, (1, 1))], ids=str)
def test_addresses(kernels, qkv, rng, rules, batches):
    """``batches``: of the lists, and batch and heads of a k_order; shared ones have sequences take turns."""
    batch, order = batches
    q, k, v = (x.astype(np.float16) for x in qkv(300, 420, batch=2, heads=4, kv_heads=2, head_dim=16))
    schedule = random_schedule(rng, 300, 420, batch=batch, list_heads=2, unit=64, order=order, **rules)
    *found, stats = gather_attention(q, k, v, schedule, return_lse=True, return_stats=True)
    assert_masked(found, q, k, v, schedule)
    heads = 8 * (np.tri(300, 420, 120).sum() if rules["is_causal"] else 300 * 420)
    assert stats.density == pytest.approx(meant(schedule, 2, 4).sum() / heads)
    apart = batch == 1 or order is not None or "sinks" in rules
    expected = [("pass1", 2)] if "segment" in rules else []
    turn = [("sinks", 1 if apart else 2)] if "sinks" in rules else []
    expected += [*turn, ("lists", 1 if apart else 2)] * (2 if apart else 1)
    assert kernels.launched == expected


@pytest.mark.parametrize("batch", [1, 2])
def test_pairs_left_out_go_to_each_sequences_place(kernels, qkv, rng, batch):
    q, k, v = (x.astype(np.float16) for x in qkv(300, 1420, batch=2, heads=4, kv_heads=2, head_dim=16))
    rules = {"batch": batch, "list_heads": 2, "unit": 64, "segment": 128, "value_skip": (-0.1, -0.2, -0.5, -99.0)}
    k *= np.linspace(1, 0, 1420)[:, None]
    schedule = random_schedule(rng, 300, 1420, share=1.0, **rules)
    o, stats = gather_attention(q, k, v, schedule, return_stats=True)
    values, shape = ValueSkips(schedule.form.value_skip), (2, 2, 1, 3)
    begins, keys = (np.broadcast_to(x.reshape(batch, 2, 1, 3), shape) for x in (schedule.begins, schedule.keys))
    lists = KeyLists(schedule.entries, begins, keys, 64)
    exact, _, taken = gather(*(x.astype(np.float32) for x in (q, k, v)), lists, schedule.form.dense, values=values)
    np.testing.assert_allclose(o.astype(np.float32), exact, atol=0.02)
    assert np.array_equal(stats.visited, taken) and np.array_equal(stats.skipped, values.skipped(taken.shape))
    assert (stats.skipped.sum(axis=(2, 3))[:, 0] > 0).all() and not stats.skipped[:, 3].any()
    assert stats.value_density < stats.density


def test_arrays_lie_as_they_lie(kernels, qkv, rng):
    """Sequence before heads, keys from a wider array, backwards heads; a k_order for each KV head."""
    q, k, v = (x.astype(np.float16) for x in qkv(200, 300, batch=2, heads=4, kv_heads=2, head_dim=16))
    schedule = random_schedule(rng, 200, 300, list_heads=4, order=(2, 2), segment=128, sinks=3)
    placed = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    placed[1] = np.concatenate([placed[1], placed[1]], axis=-1)[..., :16]
    o, lse = gather_attention(*placed, schedule, layout="BSHD", return_lse=True)
    assert_masked((o.swapaxes(1, 2), lse), q, k, v, schedule)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rules", [{"is_causal": False}, {"segment": 128, "sinks": 7}], ids=str)
def test_pages(kernels, qkv, rng, batch, layout, rules):
    q, k, v = (x.astype(np.float16) for x in qkv(200, 300, batch=3, heads=4, kv_heads=2, head_dim=16))
    schedule = random_schedule(rng, 200, 300, batch=batch, list_heads=2, unit=64, **rules)
    table, pages = random_table(rng, [300] * 3, 16)
    k_pages, v_pages = (paged(x, table, pages, 16, layout, [300] * 3) for x in (k, v))
    found = gather_attention_paged(q, k_pages, v_pages, table, schedule, layout=layout, return_lse=True)
    assert_masked(found, q, k, v, schedule)


def test_what_rows_of_16_bytes_are_for(kernels, qkv, rng):
    q, k, v = (x.astype(np.float16) for x in qkv(100, head_dim=12))
    plain = random_schedule(rng, 100, 100, segment=128)
    gather_attention(q, k, v, plain)
    permuted = random_schedule(rng, 100, 100, segment=128, order=(1, 1))
    with pytest.raises(ValueError, match=r"has a k_order, and a row .* or head_dim \(12\) is no multiple of 8"):
        gather_attention(q, k, v, permuted)


def test_float32_on_a_gpu_is_refused(kernels, qkv, rng):
    with pytest.raises(TypeError, match="float32; accepted"):
        gather_attention(*qkv(100), random_schedule(rng, 100, 100, segment=128))


def test_a_stop_reaches_the_lists_and_not_the_sinks(kernels, qkv, rng):
    q, k, v = (x.astype(np.float16) for x in qkv(128, 1200))
    positions = np.argsort(-k[0, 0, :1072].astype(np.float32).sum(-1))[None, None, None]
    positions = positions[positions >= 300].reshape(1, 1, 1, -1)
    counts = np.array([[[positions.shape[-1]]]])
    schedule = Schedule.from_tokens(
        positions, counts, seqlen_q=128, seqlen_k=1200, segment=128, sinks=300, tau=0.3
    )  # fmt: skip
    _, stats = gather_attention(q, k, v, schedule, return_stats=True)
    assert 0 < stats.visited.max() < 7  # of 7 key tiles
