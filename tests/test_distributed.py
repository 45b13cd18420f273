"""Prefill over several processes: the bits of one process's call, however rows and heads are spread.

Processes talk over gloo; on a machine with several GPUs the same runs over NCCL.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from conftest import SMALL, has_gpu
from ranks import MEAN, parallel, run_ranks
from ranks import end_of_ranks as end_of_ranks

from s2o_cupy import s2o_attention

SEGMENT = SMALL.segment


def _cases(seqlen, dtype, device):
    """q, k, v of every process alike; keys differ in importance, so that S2O stops early."""
    import torch

    rng = np.random.default_rng(7)
    batch = 2 if seqlen < 100 else 1
    q, k, v = (rng.standard_normal((batch, heads, seqlen, 64), dtype=np.float32) for heads in (4, 2, 2))
    importance = rng.standard_normal((batch, 2, seqlen, 1), dtype=np.float32)
    direction = np.float32(np.sqrt(3) * 64**-0.25)
    host = (q + direction, k + importance * direction, v)
    return [torch.from_numpy(x).to(device, getattr(torch, dtype)) for x in host]


def _assert_same(found, expected):
    """Bit for bit on a GPU. NumPy's products are BLAS's, some of which round by how many rows and columns there are:
    sums of 700 products in float32 differ by a few of its steps, and an output of 16 bits by one of its own."""
    import torch

    if found.is_cuda:
        assert torch.equal(found, expected)
        return
    step = 2.0**-20 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=step, atol=2.0**-20)


def _equal_to_one_process(rank, world_size, folder, seqlens, splits, dtype, device):
    import torch

    for seqlen in seqlens:
        q, k, v = _cases(seqlen, dtype, device)
        *expected, stats = s2o_attention(q, k, v, config=MEAN, return_lse=True, return_stats=True)
        assert stats.density < 1 or seqlen < 500
        for split in splits:
            both = parallel(seqlen, config=MEAN, split=split)
            assert (both.rank, both.world_size) == (rank, world_size)
            mine = [both.shard(x, 2) for x in (q, k, v)]
            assert torch.equal(q[:, :, both.positions(q.device)], mine[0])
            o, lse = both.attention(*mine, return_lse=True)
            assert o.shape == mine[0].shape and o.dtype == q.dtype
            _assert_same(both.gather(o, 2), expected[0])
            _assert_same(both.gather(lse, 2), expected[1])
            mine_out = torch.full_like(o, float("nan"))
            assert both.attention(*mine, out=mine_out) is mine_out
            assert torch.equal(mine_out, o)
            if seqlen == seqlens[-1]:
                turned = [x.transpose(1, 2) for x in mine]
                assert torch.equal(both.attention(*turned, layout="BSHD").transpose(1, 2), o)
                assert torch.equal(both.attention(*(x[0] for x in mine)), o[0])


def _in_rounds(rank, world_size, folder, rounds, function, *arguments):
    import s2o_cupy.integrations.distributed as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "rounds_for", lambda seqlen: rounds)
        function(rank, world_size, folder, *arguments)


def _capped(rank, world_size, folder, seqlens, splits, dtype, device):
    import torch

    for seqlen, split in itertools.product(seqlens, splits):
        q, k, v = _cases(seqlen, dtype, device)
        options = {"softcap": 2.0, "scale": 0.2}
        *expected, stats = s2o_attention(q, k, v, config=MEAN, **options, return_lse=True, return_stats=True)
        assert stats.density < 1
        assert not torch.equal(expected[0], s2o_attention(q, k, v, config=MEAN, scale=0.2))
        both = parallel(seqlen, config=MEAN, split=split)
        mine = [both.shard(x, 2) for x in (q, k, v)]
        found = both.attention(*mine, **options, return_lse=True)
        for x, y in zip(found, expected, strict=True):
            _assert_same(both.gather(x, 2), y)
        out = torch.full_like(mine[0], float("nan"))
        both.attention(*(x.transpose(1, 2) for x in mine), **options, layout="BSHD", out=out.transpose(1, 2))
        assert torch.equal(out, found[0])


def _taus_of_heads(rank, world_size, folder, split):
    """A rank that has some of the heads stops by their taus."""

    q, k, v = _cases(8 * SEGMENT, "float32", "cpu")
    config = replace(MEAN, tau=(0.0, 0.3, 0.02, 1.0))
    expected, stats = s2o_attention(q, k, v, config=config, return_stats=True)
    assert len(set(stats.density_per_head[0].tolist())) == 4
    both = parallel(8 * SEGMENT, config=config, split=split)
    o = both.attention(*(both.shard(x, 2) for x in (q, k, v)))
    _assert_same(both.gather(o, 2), expected)


def _dense_last(rank, world_size, folder, split, last):
    """The last queries of the sequence, wherever they are."""
    import torch

    q, k, v = _cases(8 * SEGMENT, "float32", "cpu")
    config = replace(MEAN, tau=0.3, dense_last=last)
    expected = s2o_attention(q, k, v, config=config)
    both = parallel(8 * SEGMENT, config=config, split=split)
    o = both.attention(*(both.shard(x, 2) for x in (q, k, v)))
    _assert_same(both.gather(o, 2), expected)
    assert not torch.equal(expected, s2o_attention(q, k, v, config=replace(config, dense_last=0)))


def _helpers(rank, world_size, folder, device="cpu"):
    import torch

    both = parallel(1000, config=MEAN)
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        x = torch.arange(3 * 1000 * 2).reshape(3, 1000, 2).to(device, dtype)
        for src in range(world_size):
            mine = both.scatter(x if rank == src else None, -2, src=src)
            assert torch.equal(mine, both.shard(x, 1)) and mine.dtype == dtype
        assert torch.equal(both.gather(mine, 1), x)
    line = torch.arange(1000, device=device)
    assert torch.equal(both.scatter(line if rank == 0 else None, 0), both.positions(device))
    assert torch.equal(both.gather(both.positions(device), 0), line)


def _refused(rank, world_size, folder):
    import torch

    x = torch.zeros(1, 3, 500, 16)
    by_heads = parallel(500, config=MEAN, split="heads")
    with pytest.raises(ValueError, match='split is "heads" with 3 kv_heads on 2 ranks; accepted: kv_heads a'):
        by_heads.attention(*(by_heads.shard(x, 2) for _ in range(3)))
    with pytest.raises(ValueError, match=rf"accepted: {by_heads.length} on rank {rank} of 2, for a sequence of 500"):
        by_heads.attention(x, x, x)


# What rank 1 has otherwise than rank 0, of equal size in memory where that is possible: what a new SequenceParallel is
# given, the tensors, the options of a call. And what the error says of it.
DISAGREEMENTS = [
    ({"seqlen": 301}, {}, {}, "seqlen is 300 on rank 0, 301 on rank 1"),
    ({"split": "heads"}, {}, {}, "split is 'sequence' on rank 0, 'heads' on rank 1"),
    ({"config": replace(MEAN, segment=64)}, {}, {}, "segment is 128 on rank 0, 64 on rank 1"),
    ({"config": replace(MEAN, tau=0.1)}, {}, {}, "tau is 0.05 on rank 0, 0.1 on rank 1"),
    ({"config": replace(MEAN, dense_up_to=10)}, {}, {}, "dense_up_to is 0 on rank 0, 10 on rank 1"),
    ({}, {"dtype": "float16"}, {}, "dtype is 'bfloat16' on rank 0, 'float16' on rank 1"),
    ({}, {"batch": 1, "heads": 8, "kv_heads": 4}, {}, "batch is 2 on rank 0, 1 on rank 1; heads is 4 .*; kv_heads is"),
    ({}, {"kv_heads": 4, "head_dim": 16}, {}, "kv_heads is 2 on rank 0, 4 on rank 1; head_dim is 32 on rank 0, 16 on"),
    ({}, {}, {"scale": 0.5}, r"scale is 0.17\d* on rank 0, 0.5 on rank 1"),
    ({}, {}, {"softcap": 20.0}, "softcap is 0.0 on rank 0, 20.0 on rank 1"),
    ({}, {}, {"layout": "BSHD"}, "layout is 'BHSD' on rank 0, 'BSHD' on rank 1"),
    ({}, {}, {"return_lse": True}, "return_lse is False on rank 0, True on rank 1"),
]


def _all_ranks_raise(rank, world_size, folder, device="cpu"):
    """The same error, before anything is sent; after it the same call is compared again, and runs if it is the same."""
    import torch

    from s2o_cupy.integrations import agreement

    def attend(given, shape, options):
        both = parallel(**{"seqlen": 300, "config": MEAN, **given})
        x = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "bfloat16", **shape}
        q, k, v = (
            torch.ones(x["batch"], heads, both.length, x["head_dim"], dtype=getattr(torch, x["dtype"]), device=device)
            for heads in (x["heads"], x["kv_heads"], x["kv_heads"])
        )
        if options.get("layout") == "BSHD":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return both.attention(q, k, v, **options)

    start = "^SequenceParallel: the ranks make different calls:"
    for *mine, match in DISAGREEMENTS:
        agreement._agreements.clear()  # or rank 0 would remember its call
        with pytest.raises(ValueError, match=f"{start} {match}.*; accepted: the same on all"):
            attend(*(mine if rank else ({}, {}, {})))
    assert attend({}, {}, {}).isfinite().all()
    both, x = parallel(300, config=MEAN), torch.arange(300.0, device=device)
    mine = both.shard(x, 0)
    with pytest.raises(ValueError, match="dtype is 'torch.float32' on rank 0, 'torch.int32' on rank 1"):
        both.gather(mine.int() if rank else mine, 0)
    with pytest.raises(ValueError, match=r"shape_of_a_row is \(6,\) on rank 0, \(2, 3\) on rank 1"):
        both.gather(mine[:, None].expand(-1, 6).reshape(-1, 2, 3) if rank else mine[:, None].expand(-1, 6), 0)
    with pytest.raises(ValueError, match="call is 'gather' on rank 0, 'scatter' on rank 1"):
        both.scatter(x, 0, src=1) if rank else both.gather(mine, 0)
    with pytest.raises(ValueError, match="seqlen is 300 on rank 0, 299 on rank 1"):
        parallel(300 - rank, config=MEAN).scatter(None if rank else x, 0)
    assert torch.equal(both.gather(mine, 0), x)


def _calls_are_compared_once(rank, world_size, folder):
    import torch.distributed as dist

    exchange, compared = dist.all_gather_object, []

    def count(*arguments, **options):
        compared.append(1)
        exchange(*arguments, **options)

    q, k, v = _cases(210, "float32", "cpu")  # a length that no other test has
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", count)
        for options, expected in (({}, 1), ({}, 1), ({"scale": 0.5}, 2), ({}, 2), ({"scale": 0.5}, 2)):
            both = parallel(210, config=MEAN)  # each layer may make its own
            both.attention(*(both.shard(x, 2) for x in (q, k, v)), **options)
            assert len(compared) == expected


def _waits_for_a_rank_until_the_timeout(rank, world_size, folder):
    import torch
    import torch.distributed as dist

    both = parallel(50, config=MEAN, group=dist.new_group(timeout=timedelta(seconds=1)))
    if rank == 0:
        with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
            both.attention(*torch.zeros(3, 1, 2, both.length, 16))
    dist.barrier()


def _later_rows_are_waited_for(rank, world_size, folder, expected):
    """A rank sends what others need first, computes what needs nothing of others before anything has arrived, and waits
    for no more than it needs."""
    import torch.distributed as dist

    import s2o_cupy.integrations.distributed as module

    q, k, v = _cases(8 * SEGMENT, "float32", "cpu")
    both = parallel(8 * SEGMENT, config=MEAN)
    log = []
    exchange, attend = dist.batch_isend_irecv, module._attend

    class Logged:
        def __init__(self, index, works):
            self.index, self.works = index, works

        def wait(self):
            log.append(f"wait {self.index}")
            for work in self.works:
                work.wait()

    def start(transfers):
        log.append("start")
        return [Logged(log.count("start") - 1, exchange(transfers))]

    def compute(q, k, *further, **options):
        log.append(f"attend {k.shape[1] // SEGMENT}")
        return attend(q, k, *further, **options)

    module.dist.batch_isend_irecv, module._attend = start, compute
    both.attention(*(both.shard(x, 2) for x in (q, k, v)))
    module.dist.batch_isend_irecv, module._attend = exchange, attend
    assert ", ".join(log) == expected[rank]


def _heads_go_in_stages(rank, world_size, folder, stages, expected):
    """Rows of all stages leave before the first attends, and each stage's outputs before the next attends."""
    import torch
    import torch.distributed as dist

    import s2o_cupy.integrations.distributed as module
    import s2o_cupy.integrations.head_exchange as head_exchange

    rng = np.random.default_rng(3)
    q, k, v = (torch.from_numpy(rng.standard_normal((2, n, 300, 32), dtype=np.float32)) for n in (12, 6, 6))
    both = parallel(300, config=MEAN, split="heads")
    log = []
    exchange, attend = dist.batch_isend_irecv, module._attend

    def start(transfers):
        log.append("send")
        return exchange(transfers)

    def compute(q, k, *further, **options):
        log.append(f"attend {q.shape[2]}:{k.shape[2]}")
        return attend(q, k, *further, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_exchange, "STAGES", stages)
        patch.setattr(module.dist, "batch_isend_irecv", start)
        patch.setattr(module, "_attend", compute)
        found = both.attention(*(both.shard(x, 2) for x in (q, k, v)), return_lse=True)
    assert log == expected
    for x, y in zip(found, s2o_attention(q, k, v, config=MEAN, return_lse=True), strict=True):
        _assert_same(both.gather(x, 2), y)


@pytest.mark.slow
def test_two_processes(torch, tmp_path):
    """Lengths that divide evenly, that do not, and that leave chunks empty."""
    seqlens = [4 * SEGMENT, 600, 3 * SEGMENT, 50]
    run_ranks(_equal_to_one_process, 2, tmp_path, seqlens, ["sequence", "heads"], "float32", "cpu")


@pytest.mark.parametrize("split", ["sequence", "heads"])
def test_a_tau_for_each_head(torch, tmp_path, split):
    run_ranks(_taus_of_heads, 2, tmp_path, split)


@pytest.mark.parametrize(("split", "last"), [("sequence", 1), ("sequence", 3 * SEGMENT), ("heads", 2 * SEGMENT)])
def test_dense_last_queries(torch, tmp_path, split, last):
    run_ranks(_dense_last, 2, tmp_path, split, last)


def test_capped_scores_in_two_processes(torch, tmp_path):
    run_ranks(_capped, 2, tmp_path, [600], ["sequence", "heads"], "float32", "cpu")


@pytest.mark.parametrize("rounds", [4, 6])
def test_other_numbers_of_rounds(torch, tmp_path, rounds):
    run_ranks(_in_rounds, 2, tmp_path, rounds, _equal_to_one_process, [1000], ["sequence"], "float32", "cpu")


@pytest.mark.slow
def test_three_processes(torch, tmp_path):
    run_ranks(_equal_to_one_process, 3, tmp_path, [700, 100], ["sequence"], "bfloat16", "cpu")


def test_helpers(torch, tmp_path):
    run_ranks(_helpers, 2, tmp_path)


def test_errors_come_before_anything_is_sent(torch, tmp_path):
    run_ranks(_refused, 2, tmp_path)


def test_ranks_that_make_different_calls_all_raise(torch, tmp_path):
    run_ranks(_all_ranks_raise, 2, tmp_path)


def test_a_call_is_compared_once(torch, tmp_path):
    run_ranks(_calls_are_compared_once, 2, tmp_path)


def test_a_rank_that_never_calls(torch, tmp_path):
    run_ranks(_waits_for_a_rank_until_the_timeout, 2, tmp_path)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (2, ("start, attend 2, start, attend 8, wait 0, wait 1", "start, attend 6, wait 0, start, wait 1")),
        (
            4,
            (
                "start, attend 1, start, start, start, attend 5, wait 0, wait 1, attend 8, wait 2, wait 3",
                "start, attend 3, wait 0, start, start, start, attend 7, wait 1, wait 2, wait 3",
            ),
        ),
    ],
)
def test_computing_overlaps_sending(torch, tmp_path, rounds, expected):
    run_ranks(_in_rounds, 2, tmp_path, rounds, _later_rows_are_waited_for, expected)


@pytest.mark.parametrize(
    ("stages", "heads"), [(1, ["6:3"]), (2, ["2:1", "4:2"]), (9, ["2:1", "2:1", "2:1"])], ids=["one", "two", "most"]
)
def test_heads_go_in_stages(torch, tmp_path, stages, heads):
    """Two exchanges for each stage's rows, as a rank has two chunks, and two for its outputs, two for their lse."""
    expected = ["send"] * 2 * len(heads) + [x for of in heads for x in (f"attend {of}", *["send"] * 4)]
    run_ranks(_heads_go_in_stages, 2, tmp_path, stages, expected)


# ---------------------------------------------------------------- several GPUs


@pytest.fixture
def two_gpus(torch, monkeypatch):
    """Processes of `run_ranks` have a GPU each."""
    if not has_gpu() or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs and CuPy")
    if not torch.distributed.is_nccl_available():
        pytest.skip("needs a PyTorch with NCCL")
    monkeypatch.setenv("S2O_TEST_BACKEND", "nccl")


@pytest.mark.gpu
@pytest.mark.parametrize("split", ["sequence", "heads"])
def test_two_gpus(two_gpus, tmp_path, split):
    run_ranks(_equal_to_one_process, 2, tmp_path, [2000, 3 * SEGMENT, 50, 8 * SEGMENT], [split], "bfloat16", "cuda")


@pytest.mark.gpu
def test_two_gpus_in_four_rounds(two_gpus, tmp_path):
    arguments = [2000, 16 * SEGMENT], ["sequence"], "bfloat16", "cuda"
    run_ranks(_in_rounds, 2, tmp_path, 4, _equal_to_one_process, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("split", ["sequence", "heads"])
def test_capped_scores_on_two_gpus(two_gpus, tmp_path, split):
    run_ranks(_capped, 2, tmp_path, [2000, 8 * SEGMENT], [split], "bfloat16", "cuda")


@pytest.mark.gpu
def test_ranks_that_make_different_calls_on_two_gpus(two_gpus, tmp_path):
    run_ranks(_all_ranks_raise, 2, tmp_path, "cuda")


@pytest.mark.gpu
def test_helpers_on_two_gpus(two_gpus, tmp_path):
    run_ranks(_helpers, 2, tmp_path, "cuda")


def _late_keys(rank, world_size, folder, window, path, split):
    """Each rank in turn is late with its keys; those of the call before, which memory may still hold, are others."""
    import torch
    from conftest import SMALL_HOPPER, has_hopper, spin

    small = SMALL_HOPPER if has_hopper() else SMALL
    config = replace(small, rank="mean", window=window, path=path)
    q, k, v = _cases(16 * SEGMENT, "bfloat16", "cuda")
    both = parallel(16 * SEGMENT, config=config, split=split)
    for turn in range(6):
        k, v = -k, v.flip(2)
        expected = both.shard(s2o_attention(q, k, v, config=config), 2)
        mine = [both.shard(x, 2) for x in (q, k, v)]
        out = torch.full_like(mine[0], float("nan"))
        torch.cuda.synchronize()
        torch.distributed.barrier()
        if rank == turn % 2:
            spin(30)  # on the default stream, PyTorch's too
        both.attention(*mine, out=out)
        assert torch.equal(out, expected), turn


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rounds", "window", "path", "split"),
    [
        (2, 0, "auto", "sequence"),
        (4, 0, "auto", "sequence"),
        (4, 0, "portable", "sequence"),
        (4, 64, "auto", "sequence"),
        (2, 0, "auto", "heads"),
    ],
)
def test_keys_that_come_late(two_gpus, tmp_path, rounds, window, path, split):
    """The host is far ahead of what arrives, and pass 1 before it."""
    run_ranks(_in_rounds, 2, tmp_path, rounds, _late_keys, window, path, split)


@pytest.mark.gpu
def test_tensors_on_a_device_that_is_not_current(torch):
    if not has_gpu() or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs and CuPy")
    for current, other in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            on_current, on_other = (_cases(1000, "bfloat16", f"cuda:{i}") for i in (current, other))
            expected = s2o_attention(*on_current, config=MEAN)
            o = s2o_attention(*on_other, config=MEAN)
            assert torch.cuda.current_device() == current
            assert o.device.index == other
            assert torch.equal(o.cpu(), expected.cpu())
