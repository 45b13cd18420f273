"""Memory: what grows over many calls, what happens when there is none, and arrays beyond 2^31 elements.

These checks are alone on the GPU: they measure or fill all of its memory.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from s2o_cupy import S2OConfig, s2o_attention, s2o_attention_paged, s2o_attention_varlen
from s2o_cupy.spec import Geometry

from .arrays import (
    DEVICE,
    DRY,
    NAN,
    attend,
    forget_calls,
    of_size,
    packed_rows,
    pages_of,
    paths,
    qkv,
    randn,
    same,
    sparse,
    synchronize,
    to_cupy,
    to_torch,
)  # fmt: skip
from .harness import Run, Skip, check

MIB = 1 << 20


def held() -> dict[str, float]:
    """MiB: the process's, the device's beside the allocators' (kernels, graphs), and live in each allocator."""
    gc.collect()
    synchronize()
    with open("/proc/self/statm") as file:
        found = {"host": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB}
    if DRY:
        return found
    import cupy

    pool = cupy.get_default_memory_pool()
    torch.cuda.empty_cache()
    pool.free_all_blocks()
    free, total = torch.cuda.mem_get_info()
    device = (total - free - torch.cuda.memory_reserved() - pool.total_bytes()) / MIB
    return found | {
        "device": device, "torch": torch.cuda.memory_allocated() / MIB, "cupy": pool.used_bytes() / MIB
    }  # fmt: skip


def assert_bounded(run: Run, call: Callable[[int], None], most: int, what: str) -> str:
    """Over ``most`` distinct calls memory may grow to a bound, not with their number: the second half adds next to
    nothing. Graphs are not small, so a full cache of them may have hundreds of MiB, and the host's allocator rounds."""
    points = [held()]
    done, began = 0, time.monotonic()
    for half in (1, 2):
        while done < half * most // 2 and time.monotonic() < began + half * run.check.seconds / 2:
            call(done)
            done += 1
        points.append(held())
    grown = [{name: round(point[name] - points[0][name], 1) for name in point} for point in points[1:]]
    forget_calls()
    after = {name: round(value - points[0][name], 1) for name, value in held().items()}
    text = f"{done} {what}: MiB after half of them {grown[0]}, all {grown[1]}, forgotten {after}"
    first, second = grown
    for name, allowed in {"torch": 1.0, "cupy": 1.0, "device": 64.0, "host": 64.0}.items():
        if name in first:
            assert second[name] - first[name] <= allowed, f"{name} grows with the number of calls: {text}"
    for name, allowed in {"torch": 1.0, "cupy": 0.1}.items():
        if name in after:
            assert after[name] <= allowed, f"clear_cache leaves memory of {name}: {text}"
    return text


@check(25, alone=True, dry=True)
def growth_of_shapes(run: Run) -> str:
    """Sparse calls of lengths that never came before, three of each: launched, captured, replayed."""
    shortest, most = of_size(2500, 150), of_size(2400, 10)
    q, k, v = qkv(run.seed, 1, 2, 1, shortest + most, None, 64)
    out = torch.empty_like(q)

    def call(number: int) -> None:
        n = shortest + number
        for _ in range(3):
            attend(*(x[:, :, :n] for x in (q, k, v)), config=sparse(segment=512), out=out[:, :, :n])

    call(0)
    return assert_bounded(run, call, most, "lengths")


@check(10, alone=True, dry=True)
def growth_of_statistics(run: Run) -> str:
    """Dense calls with return_stats, whose table of visited tiles is another one for every length."""
    shortest, most = of_size(1000, 100), of_size(2400, 20)
    q, k, v = qkv(run.seed, 1, 8, 1, shortest + most, None, 64)

    def call(number: int) -> None:
        n = shortest + number
        attend(*(x[:, :, :n] for x in (q, k, v)), tau=0, return_stats=True)

    call(0)
    return assert_bounded(run, call, most, "lengths")


@check(10, alone=True, dry=True)
def growth_of_batches(run: Run) -> str:
    """Packed and paged calls of lengths that never came before."""
    S = of_size(4000, 200)
    q, k, v = qkv(run.seed, 1, 4, 2, S, None, 64)
    rows = packed_rows(q, k, v)
    pages = pages_of(k, v, [S], 16, run.rng("pages"))
    config = S2OConfig(segment=256, dense_up_to=300)
    rng = run.rng("cuts")

    def call(_: int) -> None:
        s2o_attention_varlen(*rows, [0, *sorted(rng.sample(range(1, S), 5)), S], config=config)
        s2o_attention_paged(q[:, :, :64], *pages, seqlen_k=rng.randint(S // 2, S), config=config)

    call(0)
    return assert_bounded(run, call, of_size(1200, 6), "batches")


def fill(leave: int) -> list[torch.Tensor]:
    """Take the GPU's memory, but for ``leave`` bytes or little more."""
    filled = []
    for size in (1 << 30, 64 * MIB, 2 * MIB):
        while torch.cuda.mem_get_info()[0] > leave + size:
            try:
                filled.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.cuda.OutOfMemoryError:
                break
    return filled


def run_out(
    attend_large: Callable[[], Any], attend_small: Callable[[], None], error: type[BaseException], leave: int
) -> list[str]:
    """With all memory taken but ``leave`` bytes: the large call raises ``error`` each time, and the small one works."""
    filled = fill(leave)
    seen = []
    try:
        for _ in range(3):
            try:
                attend_large()
                synchronize()
                seen.append("no error")
            except error as raised:
                seen.append(type(raised).__name__)
            attend_small()
    finally:
        del filled
        gc.collect()
        torch.cuda.empty_cache()
    assert "no error" not in seen, f"the GPU's memory was taken but for {leave // MIB} MiB, and the large call: {seen}"
    return seen


def large_and_small(seed: int) -> tuple[S2OConfig, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(config, arrays of a call that needs hundreds of MiB, arrays of one that needs a few)."""
    config = sparse(tau=0.05, segment=128, workspace_bytes=1 << 30)
    return config, qkv(seed, 1, 32, 32, 65536, None, 64), qkv(seed + 4, 1, 2, 1, 500)


@check(10, alone=True)
def out_of_memory(run: Run) -> str:
    """PyTorch runs out for a workspace: its own error; a small call works then, and the large one later."""
    config, large, small = large_and_small(run.seed)
    out = torch.empty_like(large[0])
    expected = attend(*small, config=config).clone()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(*large, config=config, out=out)
    needed = torch.cuda.max_memory_allocated() - before
    want = out.clone()
    leave = 96 * MIB
    assert needed > 2 * leave, f"the large call needs {needed // MIB} MiB only: this check cannot run out"
    gc.collect()
    synchronize()
    torch.cuda.empty_cache()

    def attend_small() -> None:
        assert same(attend(*small, config=config), expected), "the small call, short of memory"

    call = lambda: attend(*large, config=config, out=out.fill_(NAN))  # noqa: E731
    seen = run_out(call, attend_small, torch.cuda.OutOfMemoryError, leave)
    assert same(call(), want), "the large call, with memory again"
    return f"{needed // MIB} MiB needed, {leave // MIB} left: {seen}"


@check(10, alone=True)
def out_of_memory_of_cupy(run: Run) -> str:
    """The same of CuPy's pool: with a limit, and with a full GPU."""
    import cupy

    config, large, small = large_and_small(run.seed)
    arrays, few = [to_cupy(x) for x in large], [to_cupy(x) for x in small]
    out = cupy.empty_like(arrays[0])
    pool = cupy.get_default_memory_pool()
    expected = to_torch(s2o_attention(*few, config=config))
    want = to_torch(s2o_attention(*arrays, config=config, out=out))
    synchronize()
    pool.free_all_blocks()

    def attend_small() -> None:
        assert same(to_torch(s2o_attention(*few, config=config)), expected), "the small call, short of memory"

    error = cupy.cuda.memory.OutOfMemoryError
    call = lambda: s2o_attention(*arrays, config=config, out=out)  # noqa: E731
    pool.set_limit(size=pool.used_bytes() + 96 * MIB)
    try:
        seen = run_out(call, attend_small, error, torch.cuda.mem_get_info()[0])
    finally:
        pool.set_limit(size=0)
    pool.free_all_blocks()
    torch.cuda.empty_cache()
    seen += run_out(call, attend_small, error, 96 * MIB)
    assert same(to_torch(call()), want), "the large call, with memory again"
    return f"errors {seen}"


def dense_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int, rows: list[int]) -> torch.Tensor:
    """Some rows of one head of dense causal attention in float64, [rows, D]."""
    kv_head = head // (q.shape[1] // k.shape[1])
    found = []
    for row in rows:
        seen = row + k.shape[2] - q.shape[2] + 1
        s = k[0, kv_head, :seen].double() @ q[0, head, row].double() / math.sqrt(q.shape[-1])
        found.append(torch.softmax(s, 0) @ v[0, kv_head, :seen].double())
    return torch.stack(found)


def assert_rows(o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, what: str) -> None:
    """Some rows of the first, a middle and the last head: within 0.05 of dense. A row of so many random keys is an
    average near 0, of which bfloat16's rounding is a large share; a wrong address gives an error of about 1."""
    H, S = q.shape[1:3]
    rows = sorted({0, 1, S // 3, S // 2, S - 2, S - 1} | {n for n in (127, 128, S - 129) if 0 <= n < S})
    for head in (0, H // 2, H - 1):
        expected = dense_rows(q, k, v, head, rows)
        off = ((o[0, head, rows].double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)).max()
        assert float(off) < 0.05, f"{what}: head {head} is off by {float(off):.3g}"


def by_heads(heads: int, S: int, D: int, seed: int) -> torch.Tensor:
    """[1, heads, S, D] in bfloat16, made head by head: in float32 it would take twice its memory."""
    x = torch.empty(1, heads, S, D, dtype=torch.bfloat16, device=DEVICE)
    for head in range(heads):
        x[:, head] = randn(seed + head, 1, S, D).bfloat16()
    return x


def needs(gib: int) -> None:
    if not DRY and torch.cuda.mem_get_info()[0] < gib << 30:
        raise Skip(f"needs {gib} GiB of free memory")


@check(30, alone=True, dry=True)
def many_elements(run: Run) -> str:
    """q and the output of 2.4e9 elements, dense and sparse; then keys and values of as many."""
    needs(34)
    S, H, kv_heads, D = (300, 4, 2, 64) if DRY else (300_000, 64, 4, 128)
    q = by_heads(H, S, D, run.seed)
    k, v = (randn(run.seed + 1000 + i, 1, kv_heads, S, D, dtype=torch.bfloat16) for i in range(2))
    out, notes = torch.empty_like(q), []
    for path in paths():
        if path != "portable":  # dense in one pass takes the portable kernels too long
            attend(q, k, v, config=S2OConfig(tau=0, path=path), out=out.fill_(NAN))
            assert_rows(out, q, k, v, f"{path}, dense")
            notes.append(f"{path}, dense")
        # With so high a tau each row stops at once: rows are finite averages, and heads have bits of their own.
        config = sparse(tau=10.0, segment=1024, path=path)
        _, lse = attend(q, k, v, config=config, out=out.fill_(NAN), return_lse=True)
        for head in range(0, H, max(1, H // 16)):
            assert bool(torch.isfinite(out[0, head]).all() & torch.isfinite(lse[0, head]).all()), f"{path}, head {head}"
        # Fewer heads alone have their last queries' keys in other parts, and other bits of these.
        group, before = H // kv_heads, config.dense_from(Geometry(S, S, config.segment)) * config.segment
        alone = attend(q[:, -group:].clone(), k[:, -1:].clone(), v[:, -1:].clone(), config=config)
        assert before > S // 2 and same(out[:, -group:, :before], alone[:, :, :before]), f"{path}: not own bits"
        notes.append(f"{path}, sparse")
    del q, out, k, v
    if not DRY:
        torch.cuda.empty_cache()
    k, v, q = by_heads(H, S, D, run.seed), by_heads(H, S, D, run.seed + 500), by_heads(H, 64, D, run.seed + 7)
    for path in paths():
        for dense_up_to in (None, 0):
            config = S2OConfig(tau=0, path=path, dense_up_to=dense_up_to)
            o = attend(q, k, v, config=config, out=torch.full_like(q, NAN))
            assert_rows(o, q, k, v, f"{path}, long keys, dense_up_to {dense_up_to}")
        notes.append(f"{path}, long keys")
    return "; ".join(notes)


@check(10, alone=True)
def huge_strides(run: Run) -> str:
    """Rows 2^23 elements apart and heads between them: elements and bytes beyond 2^31 and 2^32 from the first."""
    needs(16)
    S, D, H = 300, 64, 2
    row = 2**31 // 256 + 64
    buffers = [torch.empty(H * D + S * row, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    far = [x.as_strided((1, H, S, D), (0, D, row, 1)) for x in buffers]
    q, k, v = qkv(run.seed, 1, H, H, S, None, D)
    for path in paths():
        config = sparse(segment=128, path=path)
        expected = attend(q, k, v, config=config)
        far[0].copy_(k)
        far[1].copy_(v)
        assert same(attend(q, *far, config=config), expected), f"{path}: keys with huge strides"
        far[0].copy_(q)
        attend(far[0], k, v, config=config, out=far[1].fill_(NAN))
        assert same(far[1], expected), f"{path}: q and out with huge strides"
    return ", ".join(paths())
