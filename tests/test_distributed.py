"""Prefill over several processes: the bits of one process's call, however rows and heads are spread.

Processes talk over gloo; on a machine with several GPUs the same runs over NCCL.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SMALL, has_gpu

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.caches import clear_cache
from s2o_cupy.integrations.zigzag import Zigzag

SEGMENT = SMALL.segment

# ---------------------------------------------------------------- one process


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def parallel(*arguments, **options):
    from s2o_cupy.integrations.distributed import SequenceParallel

    return SequenceParallel(*arguments, **options)


@pytest.fixture
def attended(torch, monkeypatch):
    """q, k, v and config of each call of `attend`, which computes nothing."""
    import s2o_cupy.integrations.distributed as module

    calls = []
    monkeypatch.setattr(module, "attend", lambda q, k, v, *, config, **options: calls.append((q, k, v, config)))
    return calls


# Segments of a chunk are ordered without regard to those before it.
MEAN = replace(SMALL, rank="mean", pooled_queries=None)


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


# ---------------------------------------------------------------- several processes


def as_first_of_two(monkeypatch):
    """As in a group of two, but nothing is sent."""
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "P2POp", lambda *arguments, **options: None)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda transfers: [])


def run_ranks(function, world_size, folder, *arguments):
    import torch.multiprocessing as multiprocessing

    multiprocessing.spawn(_rank, (world_size, str(folder), function, arguments), nprocs=world_size)


def _rank(rank, world_size, folder, function, arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = os.environ.get("S2O_TEST_BACKEND", "gloo")
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, device_id=device
    )
    try:
        function(rank, world_size, Path(folder), *arguments)
    finally:
        dist.destroy_process_group()


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
            assert torch.equal(both.gather(o, 2), expected[0]), (seqlen, split)
            assert torch.equal(both.gather(lse, 2), expected[1]), (seqlen, split)
            mine_out = torch.full_like(o, float("nan"))
            assert both.attention(*mine, out=mine_out) is mine_out
            assert torch.equal(mine_out, o)
            if seqlen == seqlens[-1]:
                turned = [x.transpose(1, 2) for x in mine]
                assert torch.equal(both.attention(*turned, layout="BSHD").transpose(1, 2), o)
                assert torch.equal(both.attention(*(x[0] for x in mine)), o[0])


def _in_rounds(rank, world_size, folder, rounds, function, *arguments):
    import s2o_cupy.integrations.distributed as module

    module.rounds_for = lambda seqlen: rounds
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
            assert torch.equal(both.gather(x, 2), y), (seqlen, split)
        out = torch.full_like(mine[0], float("nan"))
        both.attention(*(x.transpose(1, 2) for x in mine), **options, layout="BSHD", out=out.transpose(1, 2))
        assert torch.equal(out, found[0])


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


def _later_rows_are_waited_for(rank, world_size, folder, expected):
    """A rank sends what others need first, computes what needs nothing of others before anything has arrived, and waits
    for no more than it needs."""
    import torch.distributed as dist

    import s2o_cupy.integrations.distributed as module

    q, k, v = _cases(8 * SEGMENT, "float32", "cpu")
    both = parallel(8 * SEGMENT, config=MEAN)
    log = []
    exchange, attend = dist.batch_isend_irecv, module.attend

    class Logged:
        def __init__(self, index, q_tiles):
            self.index, self.q_tiles = index, q_tiles

        def wait(self):
            log.append(f"wait {self.index}")
            for work in self.q_tiles:
                work.wait()

    def start(transfers):
        log.append("start")
        return [Logged(log.count("start") - 1, exchange(transfers))]

    def compute(q, k, v, **options):
        log.append(f"attend {k.shape[1] // SEGMENT}")
        return attend(q, k, v, **options)

    module.dist.batch_isend_irecv, module.attend = start, compute
    both.attention(*(both.shard(x, 2) for x in (q, k, v)))
    module.dist.batch_isend_irecv, module.attend = exchange, attend
    assert ", ".join(log) == expected[rank]


@pytest.mark.parametrize(
    ("options", "waits_after"),
    [
        ({}, "pass1"),
        ({"window": 64}, None),
        ({"window": 64, "path": "portable"}, None),
        ({"path": "portable", "rank": "auto"}, "pass1"),
        ({"dense_up_to": 9000}, None),
    ],
)
def test_pass_1_does_not_wait_for_keys(monkeypatch, options, waits_after):
    """But for those of a window, or where it is all there is. A CUDA that only takes notes; on GPUs see below."""
    cupy = pytest.importorskip("cupy")
    from s2o_cupy.arrays.operand import Operand
    from s2o_cupy.cuda import pipeline
    from s2o_cupy.plan.launch_plan import DeviceLimits
    from s2o_cupy.problem import Problem

    notes, names = [], {}

    def load(kernel, device):
        names[len(names) + 1] = kernel.function
        return SimpleNamespace(kernel=SimpleNamespace(ptr=len(names)))

    monkeypatch.setattr(pipeline, "device_limits", lambda device: DeviceLimits.of_architecture(90))
    monkeypatch.setattr(pipeline.kernels, "load", load)
    monkeypatch.setattr(pipeline, "tensor_map", lambda *arguments: bytes(128))
    monkeypatch.setattr(pipeline, "driver", SimpleNamespace(launchKernel=lambda f, *rest: notes.append(names[f])))
    monkeypatch.setattr(
        pipeline, "runtime", SimpleNamespace(getDevice=lambda: 0, memsetAsync=lambda *arguments: notes.append("clear"))
    )
    replays = []
    monkeypatch.setattr(pipeline, "GraphCache", lambda cuda: SimpleNamespace(run=lambda *arguments: replays.append(1)))
    assert cupy.__name__ == "cupy"

    config = S2OConfig(**{"segment": 128, "rank": "mean", "dense_up_to": 0} | options)
    problem = Problem(1, 2, 1, 512, 2048, 64, "bfloat16", True, 0.125)
    q = Operand(1 << 20, (1, 2, 512, 64), (2 * 512 * 64, 512 * 64, 64))
    k = Operand(2 << 20, (1, 1, 2048, 64), (2048 * 64, 2048 * 64, 64))
    clear_cache()
    try:
        for await_keys in (lambda: notes.append("wait"), None):
            memory = lambda nbytes: (4 << 20, None)  # noqa: E731
            pipeline.run((q, k, k, q), 0, 0, problem, config, stream=0, memory=memory, await_keys=await_keys)
    finally:
        clear_cache()
    launched = [note.removesuffix("_sm90") for note in notes]
    at = launched.index("wait")
    assert launched.count("wait") == 1
    if waits_after:
        assert launched[:at] == ["clear", waits_after]
        assert launched[at + 1] == "block_sums"
        assert replays == [1]  # the call that has nothing to wait for
    else:
        assert "pass1" not in launched[:at]


@pytest.mark.parametrize(
    ("dtype", "length", "wide"),
    [("bfloat16", 64, True), ("float32", 36, True), ("bfloat16", 36, False), ("float64", 33, False)],
)
def test_rows_are_copied_in_wide_elements_where_they_can_be(torch, dtype, length, wide):
    """Bit for bit: also NaNs of any kind."""
    from s2o_cupy.integrations.distributed import _wide

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[getattr(torch, dtype).itemsize]
    info = torch.iinfo(bits)
    x = torch.randint(info.min, info.max, (1, 10, 3, length), dtype=bits).view(getattr(torch, dtype))
    assert (_wide(x).dtype == torch.complex128) == wide
    to = torch.empty(10, 2, 3, length, dtype=x.dtype)
    to[:, 1].view(_wide(x).dtype).copy_(_wide(x)[0])
    assert torch.equal(to[:, 1].view(bits), x[0].view(bits))
    for narrow in (x[..., 1:], x.transpose(2, 3), x.flatten()[1 : 1 + 30 * length - length].view(1, -1, length)):
        assert _wide(narrow) is narrow


def test_two_processes(torch, tmp_path):
    """Lengths that divide evenly, that do not, and that leave chunks empty."""
    seqlens = [8 * SEGMENT, 1000, 3 * SEGMENT, 50]
    run_ranks(_equal_to_one_process, 2, tmp_path, seqlens, ["sequence", "heads"], "float32", "cpu")


def test_capped_scores_in_two_processes(torch, tmp_path):
    run_ranks(_capped, 2, tmp_path, [8 * SEGMENT, 1000], ["sequence", "heads"], "float32", "cpu")


@pytest.mark.parametrize("rounds", [4, 6])
def test_other_numbers_of_rounds(torch, tmp_path, rounds):
    run_ranks(_in_rounds, 2, tmp_path, rounds, _equal_to_one_process, [1000], ["sequence"], "float32", "cpu")


@pytest.mark.slow
def test_three_processes(torch, tmp_path):
    run_ranks(_equal_to_one_process, 3, tmp_path, [1000, 100], ["sequence"], "bfloat16", "cpu")


def test_helpers(torch, tmp_path):
    run_ranks(_helpers, 2, tmp_path)


def test_errors_come_before_anything_is_sent(torch, tmp_path):
    run_ranks(_refused, 2, tmp_path)


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
def test_helpers_on_two_gpus(two_gpus, tmp_path):
    run_ranks(_helpers, 2, tmp_path, "cuda")


def _late_keys(rank, world_size, folder, window, path):
    """Each rank in turn is late with its keys; those of the call before, which memory may still hold, are others."""
    import torch
    from conftest import SMALL_HOPPER, has_hopper, spin

    small = SMALL_HOPPER if has_hopper() else SMALL
    config = replace(small, rank="mean", pooled_queries=None, window=window, path=path)
    q, k, v = _cases(16 * SEGMENT, "bfloat16", "cuda")
    both = parallel(16 * SEGMENT, config=config)
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
    ("rounds", "window", "path"), [(2, 0, "auto"), (4, 0, "auto"), (4, 0, "portable"), (4, 64, "auto")]
)
def test_keys_that_come_late(two_gpus, tmp_path, rounds, window, path):
    """The host is far ahead of what arrives, and pass 1 before it."""
    run_ranks(_in_rounds, 2, tmp_path, rounds, _late_keys, window, path)


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


def test_the_whole_length_decides_on_dense_attention(torch, monkeypatch, attended):
    """Not that of a chunk's keys, which are fewer: a GPU would else compute early chunks otherwise than in one call."""
    monkeypatch.setattr("s2o_cupy.plan.launch_plan.DENSE_UP_TO", 8192)
    as_first_of_two(monkeypatch)
    for seqlen, config, expected in (
        (5000, S2OConfig(), 5000),
        (9000, S2OConfig(), 0),
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
        assert {config for *_, config in attended} == {replace(config, dense_up_to=expected)}


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
