"""Schedules: lists from masks, compressed rows, padded rows and tokens, of every framework; and what check() finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import FRAMEWORKS, listed, tile_limits

from s2o_cupy import Schedule
from s2o_cupy.arrays.frameworks import to_host

# ---------------------------------------------------------------- what constructors make of their arguments


@given(st.data())
def test_a_mask_lists_its_blocks_but_for_those_of_the_dense_part(data):
    draw = data.draw
    block, block_m = draw(st.sampled_from([64, 128])), draw(st.sampled_from([64, 128]))
    is_causal, blocks = draw(st.booleans()), draw(st.integers(1, 9))
    segment = block * draw(st.integers(1, 3)) if is_causal or draw(st.booleans()) else None
    per_segment = segment is not None and (segment % block_m != 0 or draw(st.booleans()))
    seqlen_k = blocks * block - draw(st.integers(0, block - 1))
    seqlen_q = seqlen_k - block * draw(st.integers(0, blocks - 1))  # the offset is whole blocks
    sinks = block * draw(st.integers(0, 2)) if is_causal else 0
    window = block * draw(st.integers(0, 2)) if segment else 0
    if sinks > seqlen_k or (not is_causal and segment and seqlen_q > segment and seqlen_q % segment % block):
        return
    rows = -(-seqlen_q // (segment if per_segment else block_m))
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), rows, blocks)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = rng.random(shape) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    schedule = Schedule.from_block_mask(
        mask, block, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=block_m, segment=segment, per_segment=per_segment,
        sinks=sinks, window=window, is_causal=is_causal,
    )  # fmt: skip
    schedule.check()
    assert schedule.is_sorted
    assert schedule.entries.dtype == schedule.keys.dtype == np.int32 and schedule.begins.dtype == np.int64
    for b, h, r in np.ndindex(shape[:3]):
        low, limit, after = tile_limits(schedule.form, r)
        keys = np.repeat(mask[b, h, r], block)[:seqlen_k]
        at = np.arange(seqlen_k)
        keys &= (at >= low) & ((at < limit) | (at >= after))
        np.testing.assert_array_equal(listed(schedule, b, h, r), np.flatnonzero(keys))


@pytest.mark.parametrize("unit", [1, 64])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_csr_padded_and_tokens_of_the_same_lists_are_the_same(rng, unit, dtype):
    units, rows = 200 // unit + 1, 3
    seqlen_k = units * unit - unit // 2
    lists = [[[np.sort(rng.permutation(units)[: rng.integers(0, units + 1)]) for _ in range(rows)] for _ in range(2)]]
    flat = [x for head in lists[0] for x in head]
    ends = np.cumsum([0] + [len(x) for x in flat]).astype(dtype)
    rules = {"seqlen_q": 300, "seqlen_k": seqlen_k, "unit": unit, "is_causal": False, "is_sorted": True}
    indices = np.concatenate(flat).astype(dtype)
    one_row = Schedule.from_csr(ends, indices, list_heads=2, **rules)
    indptr = np.stack([ends[:4], ends[3:]])[None]
    by_head = Schedule.from_csr(indptr, indices, **rules)
    padded = np.full((1, 2, rows, units), 1 << 30, dtype)
    for i, x in enumerate(flat):
        padded[0, i // rows, i % rows, : len(x)] = x
    counts = np.diff(ends).reshape(1, 2, rows)
    made = [one_row, by_head, Schedule.from_padded(padded, counts, **rules)]
    if unit == 1:
        del rules["unit"]
        made.append(Schedule.from_tokens(padded, counts, **rules))
    for schedule in made:
        schedule.check()
        for i, x in enumerate(flat):
            expected = (x[:, None] * unit + np.arange(unit)).ravel()
            found = listed(schedule, 0, i // rows, i % rows)
            np.testing.assert_array_equal(found, expected[expected < seqlen_k])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_makes_the_same_arrays(rng, name):
    framework = FRAMEWORKS[name]()
    mask, order = rng.random((2, 2, 4, 5)) < 0.5, np.stack([[rng.permutation(600)] for _ in range(2)]).astype(np.int32)
    rules = {"seqlen_q": 472, "seqlen_k": 600, "segment": 128, "sinks": 128}
    by_numpy, found = (
        Schedule.from_block_mask(x(mask), k_order=x(order), **rules) for x in (np.asarray, framework.array)
    )
    assert found.form == by_numpy.form
    for array_name, expected in by_numpy.arrays.items():
        x = found.arrays[array_name]
        assert isinstance(x, framework.kind)
        assert to_host(x).dtype == expected.dtype, array_name
        np.testing.assert_array_equal(to_host(x), expected)
    indptr, indices = np.array([0, 2, 3]), np.array([1, 0, 4])
    rules = {"seqlen_q": 200, "seqlen_k": 700, "unit": 128, "is_causal": False}
    schedule = Schedule.from_csr(framework.array(indptr), framework.array(indices), **rules)
    schedule.check()
    assert to_host(schedule.begins).dtype == np.int64 and to_host(schedule.entries).dtype == np.int32
    np.testing.assert_array_equal(listed(schedule, 0, 0, 1), np.arange(512, 640))


def test_strided_arrays_are_copied_and_contiguous_ones_are_not(rng):
    indices = np.arange(20, dtype=np.int32)
    rules = {"seqlen_q": 100, "seqlen_k": 100, "is_causal": False}
    schedule = Schedule.from_csr(np.array([0, 5]), indices, **rules)
    assert np.shares_memory(schedule.entries, indices)
    strided = Schedule.from_csr(np.array([0, 5]), indices[::2], **rules)
    assert strided.entries.flags.c_contiguous and not np.shares_memory(strided.entries, indices)
    np.testing.assert_array_equal(listed(strided, 0, 0, 0), [0, 2, 4, 6, 8])


# ---------------------------------------------------------------- check()


def tokens(*lists, counts=None, **rules):
    """Lists of one head by key position, of 256 queries and keys in q tiles of 128."""
    width = max(map(len, lists))
    rows = np.array([[*x, *[-1] * (width - len(x))] for x in lists], np.int32)[None, None]
    counts = np.array([list(map(len, lists)) if counts is None else counts])[None]
    return Schedule.from_tokens(rows, counts, **{"seqlen_q": 256, "seqlen_k": 256} | rules)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda: tokens([0], [256], is_causal=False),
         r"list \[0, 0, 1\] \(batch, list head, q tile\) has 256 as its entry 0; accepted: 0 to 255, units of 1 keys"),
        (lambda: tokens([0], [-1], is_causal=False), r"list \[0, 0, 1\] .* has -1 as its entry 0"),
        (lambda: tokens([3, 4, 3], [], is_causal=False), r"list \[0, 0, 0\] .* has 3 twice; accepted: each entry once"),
        (lambda: tokens([4, 3], [], is_causal=False, is_sorted=True), r"list \[0, 0, 0\] .* does not ascend"),
        (lambda: tokens([0], [1, 2], counts=[1, 300], is_causal=False), r"list \[0, 0, 1\] .* has 300 keys"),
        (lambda: tokens([0], [1, 2], counts=[1, 5], is_causal=False), r"list \[0, 0, 1\] .* has entries 2 to 6"),
        (lambda: tokens([0], [1, 2], counts=[-2, 1], is_causal=False), r"list \[0, 0, 0\] .* has -2 keys"),
        (lambda: tokens([0], [7, 129]), r"list \[0, 0, 1\] .* has key 129, which is in the future of its query 128; "
                                        r"accepted: keys before 129"),
        (lambda: tokens([], [7, 128], segment=128), r"list \[0, 0, 1\] .* has key 128, which the dense part holds; "
                                                    r"accepted: keys before 128"),
        (lambda: tokens([], [7, 120], segment=128, window=10), r"has key 120, which the dense part holds"),
        (lambda: tokens([], [7, 120], segment=128, sinks=8), r"has key 7, one of the 8 sinks; accepted: keys from 8"),
        (lambda: tokens([], [0, 200], segment=128, is_causal=False),
         r"has key 200, which the dense part holds; accepted: keys before 128 or from 256 on"),
        (lambda: tokens([0], [130], per_segment=True, segment=128),
         r"list \[0, 0, 0\] \(batch, list head, segment\) has key 0, which the dense part holds"),
        (lambda: tokens([], [3], segment=128, k_order=np.arange(256)[None, None, ::-1]),
         r"list \[0, 0, 1\] .* has key 252, which is in the future"),
        (lambda: tokens([], [3], segment=128, k_order=np.array([[[*range(255), 0]]])),
         r"k_order\[0, 0\] holds 0 out of range or twice; accepted: a permutation of 0 to 255"),
        (lambda: tokens([], [3], segment=128, k_order=np.arange(1, 257)[None, None]),
         r"k_order\[0, 0\] holds 256 out of range or twice"),
        (lambda: Schedule.from_padded(np.array([[[[3, 0]]]]), np.array([[[2]]]), seqlen_q=100, seqlen_k=200, unit=64,
                                      is_causal=False),
         r"has the short unit 3 as its entry 0 of 2; accepted: it stands last"),
    ],
)  # fmt: skip
def test_check_names_the_list(schedule, message):
    with pytest.raises(ValueError, match=r"Schedule\.check: .*" + message):
        schedule().check()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda far: Schedule.from_tokens(np.array([[[[3 + far]]]]), np.array([[[1]]]), seqlen_q=64, seqlen_k=64,
                                          is_causal=False), "has 2147483647 as its entry 0"),
        (lambda far: Schedule.from_tokens(np.array([[[[3]]]]), np.array([[[1 + far]]]), seqlen_q=64, seqlen_k=64,
                                          is_causal=False), "has 2147483647 keys"),
        (lambda far: Schedule.from_csr(np.array([[[0, 1 + far]]]), np.array([0]), seqlen_q=64, seqlen_k=64, unit=64,
                                       is_causal=False), "has 2147483584 keys"),
        (lambda far: Schedule.from_block_mask(np.ones((1, 1, 1, 1), bool), seqlen_q=64, seqlen_k=64, is_causal=False,
                                              k_order=np.arange(64)[None, None] + far), "k_order"),
    ],
)  # fmt: skip
def test_numbers_beyond_32_bits_are_not_cut_off(make, message):
    """To 32 bits each of them would be what is right."""
    make(0).check()
    with pytest.raises(ValueError, match=message):
        make(2**32).check()


def test_check_knows_permuted_blocks():
    """Block 0 through k_order holds keys of several places; that of a segment is before it, or not, as a whole."""
    order = np.concatenate([np.random.default_rng(0).permutation(128), 128 + np.arange(128)])[None, None]
    rows, counts = np.array([[[[0, 1], [0, 1]]]]), np.array([[[0, 2]]])
    rules = {"seqlen_q": 256, "seqlen_k": 256, "unit": 64, "segment": 128}
    Schedule.from_padded(rows, counts, k_order=order, **rules).check()
    order[0, 0, [5, 200]] = order[0, 0, [200, 5]]
    with pytest.raises(ValueError, match=r"list \[0, 0, 1\] .* has key 200, which is in the future of its query 128"):
        Schedule.from_padded(rows, counts, k_order=order, **rules).check()


def test_check_looks_at_every_order_of_a_shared_list():
    order = np.stack([np.arange(256), np.arange(256)[::-1]])[None]
    with pytest.raises(ValueError, match=r"list \[0, 0, 1\] .* has key 252"):
        tokens([], [3], segment=128, k_order=order).check()


# ---------------------------------------------------------------- what is refused

MASK = np.ones((1, 1, 2, 2), bool)


def one_row(**options):
    return Schedule.from_csr(np.array([0, 1, 2]), np.array([0, 0]), seqlen_q=256, seqlen_k=256, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule.from_block_mask(MASK.astype(np.int32), segment=128), "mask is int32; accepted: bool"),
        (lambda: Schedule.from_block_mask(MASK[0], segment=128), r"mask has shape \(1, 2, 2\); accepted: \(batch or 1"),
        (lambda: Schedule.from_block_mask(MASK, 32, segment=128), "block is 32; accepted: 64 or 128"),
        (lambda: Schedule.from_block_mask(MASK), "segment is None and is_causal is True; accepted: a segment"),
        (lambda: Schedule.from_block_mask(MASK, segment=128, seqlen_k=300), "mask has 2 key blocks; accepted: 3"),
        (lambda: Schedule.from_block_mask(MASK, segment=128, seqlen_q=300, seqlen_k=300), "there are 2 lists"),
        (lambda: Schedule.from_block_mask(MASK, segment=128, seqlen_q=200, seqlen_k=256),
         r"the dense part of segment 0 has keys 56 to 183, which cuts a block of 128; .*\(window=56 serves"),
        (lambda: Schedule.from_block_mask(MASK, segment=128, sinks=100), "sinks is 100; accepted: a multiple"),
        (lambda: tokens([0], [0], segment=100), "segment is 100 with lists of q tiles; accepted: a multiple"),
        (lambda: tokens([0], [0], segment=9000), "segment is 9000; accepted: an integer from 1 to 8192"),
        (lambda: tokens([0], [0], window=3), "window is given without a segment; accepted: with segment="),
        (lambda: tokens([0], [0], sinks=3), "sinks is given without a segment"),
        (lambda: tokens([0], [0], per_segment=True), "per_segment is given without a segment"),
        (lambda: tokens([0], [0], segment=128, sinks=3, is_causal=False), "sinks is 3 with is_causal=False"),
        (lambda: tokens([0], [0], segment=128, sinks=300), "sinks is 300; accepted: up to seqlen_k, 256"),
        (lambda: tokens([0], [0], block_m=32), "block_m is 32; accepted: 64 or 128"),
        (lambda: tokens([0], [0], block_m=128.0), "block_m is 128.0; accepted: 64 or 128"),
        (lambda: Schedule.from_block_mask(MASK, 64, block_m=None), "block_m is None; accepted: 64 or 128"),
        (lambda: one_row(unit=True), "unit is True; accepted: 1, 64 or 128"),
        (lambda: one_row(batch=-1), "batch is -1; accepted: an integer >= 0"),
        (lambda: one_row(list_heads="x"), r"list_heads is 'x' \(str\); accepted: an integer >= 0"),
        (lambda: tokens([0], [0], is_sorted="x"), "is_sorted is 'x'; accepted: True or False"),
        (lambda: tokens([0]), r"there are 1 lists; accepted: 2, q tiles of 128 in seqlen_q \(256\)"),
        (lambda: tokens([0], [0], seqlen_k=200), "seqlen_q 256 exceeds seqlen_k 200; accepted with is_causal=True"),
        (lambda: tokens([0], [0], windows=3), "windows is no argument; accepted beside its own: block_m, per_segment"),
        (lambda: Schedule.from_block_mask(MASK, unit=64), "from_block_mask: unit is no argument"),
        (lambda: tokens([0], [0], tau=-1), "tau is -1; accepted: a number >= 0"),
        (lambda: tokens([0], [0], is_causal=1), "is_causal is 1; accepted: True or False"),
        (lambda: tokens([0], [0], k_order=np.arange(9)[None, None]), r"k_order has shape \(1, 1, 9\); accepted: 256"),
        (lambda: tokens([0], [0], seqlen_q=2.5), "seqlen_q is 2.5; accepted: an integer from 0"),
        (lambda: Schedule.from_padded(np.zeros((1, 1, 2, 1), np.int32), np.ones((1, 1, 2), np.int32), seqlen_q=256,
                                      seqlen_k=256, unit=32), "unit is 32; accepted: 1, 64 or 128"),
        (lambda: Schedule.from_csr(np.array([0, 1]), np.array([0]), seqlen_q=256, seqlen_k=256),
         r"indptr has shape \(2,\); accepted: \(3,\), 2 lists of a list head"),
        (lambda: Schedule.from_csr(np.array([0, 1]), [0], seqlen_q=1, seqlen_k=1), "indices is a list; accepted"),
    ],
)  # fmt: skip
def test_what_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_making_a_schedule_looks_into_no_array(monkeypatch, rng):
    """On a GPU a look would wait for it."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append(str(function))
            return function(*arguments, **(options or {}))

    mask = torch.from_numpy(rng.random((1, 2, 4, 4)) < 0.5)
    order = torch.arange(500, dtype=torch.int32)[None, None]
    indptr, indices = torch.tensor([0, 3, 4, 4, 6]), torch.tensor([0, 1, 3, 0, 1, 2])
    with Watch():
        Schedule.from_block_mask(mask, seqlen_q=500, seqlen_k=500, segment=128, sinks=128, k_order=order)
        Schedule.from_csr(indptr, indices, seqlen_q=500, seqlen_k=500, unit=128, is_causal=False)
        Schedule.from_padded(mask.to(torch.int32), mask.sum(-1), seqlen_q=500, seqlen_k=500)
    waits = ("local_scalar", "nonzero", "item", "masked", "unique", "equal", "lift")  # lift: numbers of the host's
    assert len(seen) > 20 and not [x for x in seen if any(name in x for name in waits)]
