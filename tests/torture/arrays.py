"""Arrays that checks are made of: values as a model's, places in memory, and how bits are compared.

PyTorch tensors [batch, heads, seqlen, head_dim] (B, H, S, D) on the GPU; in a dry run on the CPU.
"""

from __future__ import annotations

import math
import os
import random
from typing import Any

import torch

from s2o_cupy import S2OConfig, s2o_attention

from .harness import is_dry

DRY = is_dry()
DEVICE = "cpu" if DRY else "cuda"
NAN, INF = math.nan, math.inf
GUARD = 7.0  # stands around every output


def set_up() -> None:
    """Of this process and thread; other threads have torch.no_grad()."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)


def about() -> dict[str, Any]:
    """The machine and the versions, for the record."""
    from importlib import metadata

    found: dict[str, Any] = {"torch": torch.__version__, "cores": os.cpu_count()}
    if not DRY:
        import cupy

        runtime = cupy.cuda.runtime
        found |= {"GPU": torch.cuda.get_device_name(), "free_GiB": round(torch.cuda.mem_get_info()[0] / 2**30, 1)}
        found |= {"cupy": cupy.__version__, "driver": runtime.driverGetVersion(), "cuda": runtime.runtimeGetVersion()}
    for name in ("transformers", "jax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def capability() -> int:
    """Compute capability, 90 for 9.0."""
    if DRY:
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def paths() -> tuple[str, ...]:
    """The kernels that this GPU has."""
    if DRY:
        return ("auto",)
    return ("hopper", "portable") if capability() == 90 else ("portable",)


def of_size(on_gpu: int, dry: int) -> int:
    return dry if DRY else on_gpu


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def spin(milliseconds: float) -> None:
    """Keep PyTorch's current stream busy, at 1.5 GHz or less for at least so long."""
    if not DRY:
        torch.cuda._sleep(int(milliseconds * 1.5e6))


def forget_calls() -> None:
    """Prepared calls and their graphs: the next call is plain launches."""
    from s2o_cupy.caches import clear_cache

    clear_cache()


# ---------------------------------------------------------------- values


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def qkv(
    seed: int, B: int, H: int, Hk: int, Sq: int, Sk: int | None = None, D: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """q [B, H, Sq, D], k and v [B, Hk, Sk, D]. Keys differ in importance by a few nats, so that calls stop early."""
    Sk = Sq if Sk is None else Sk
    direction = math.sqrt(3) * D**-0.25
    q = randn(seed, B, H, Sq, D) + direction
    importance = randn(seed + 3, B, Hk, -(-Sk // 16), 1).repeat_interleave(16, dim=2)[:, :, :Sk]  # of runs of keys
    k = randn(seed + 1, B, Hk, Sk, D) + direction * importance
    return q.to(dtype), k.to(dtype), randn(seed + 2, B, Hk, Sk, D, dtype=dtype)


def packed_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first sequence of [B, heads, S, D] as a packed batch has it, [S, heads, D]."""
    return q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)


def sparse(**fields: Any) -> S2OConfig:
    """All stages, however short the keys are."""
    return S2OConfig(**({"tau": 0.02, "segment": 256, "dense_up_to": 0} | fields))


def rounds(**fields: Any) -> S2OConfig:
    """The same in many launches, which the library captures as graphs when a call comes again."""
    return sparse(**({"workspace_bytes": 1 << 20, "unit": 1} | fields))


# ---------------------------------------------------------------- bits


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same_flag(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether two tensors have the same bits, as a tensor on the device: nothing waits."""
    return (bits(a) == bits(b)).all()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(same_flag(a, b))


def assert_all(flags: list[Any], what: str) -> None:
    """That each of `same_flag`'s results is true."""
    synchronize()
    bad = [number for number, flag in enumerate(flags) if not bool(flag)]
    assert not bad, f"{what}: {len(bad)} of {len(flags)} differ, the first are {bad[:8]}"


# ---------------------------------------------------------------- places in memory

PLACES = ("contiguous", "BSHD", "sliced", "fused", "offset", "odd rows", "strided", "backwards")
OUT_PLACES = ("contiguous", "BSHD", "sliced", "fused", "odd rows")


def blank(shape: tuple[int, ...], dtype: torch.dtype, how: str, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(base, view): a view [B, H, S, D] that lies in its base as ``how`` says; both are full of ``fill``."""
    B, H, S, D = shape

    def full(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, fill, dtype=dtype, device=DEVICE)

    if how == "contiguous":
        base = full(B * H * S * D + 128)
        return base, base[64 : 64 + B * H * S * D].view(shape)
    if how == "BSHD":
        base = full(B, S, H, D)
        return base, base.permute(0, 2, 1, 3)
    if how == "sliced":
        base = full(B + 1, H + 1, S + 5, D + 8)
        return base, base[1:, 1:, 3 : 3 + S, :D]
    if how == "fused":  # as if cut out of one projection to q, k and v
        base = full(B, S, 3, H, D)
        return base, base[:, :, 1].permute(0, 2, 1, 3)
    if how == "offset":  # rows begin at odd elements
        base = full(B * H * S * D + 9)
        return base, base[1 : 1 + B * H * S * D].view(shape)
    if how == "odd rows":
        base = full(B, H, S, D + 1)
        return base, base[..., :D]
    if how == "strided":  # gaps between the elements of a row
        base = full(B, H, S, 2 * D)
        return base, base[..., ::2]
    raise ValueError(how)


def place(x: torch.Tensor, how: str) -> Any:
    """An array equal to x that lies in memory as ``how`` says, NaN all around it; "backwards" is a CuPy array."""
    if how == "backwards":
        return to_cupy(x.flip(2).contiguous())[:, :, ::-1]
    _, view = blank(tuple(x.shape), x.dtype, how, NAN)
    view.copy_(x)
    return view


def guarded_out(x: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(base, view): an output like x, full of NaN, with GUARD all around it."""
    base, view = blank(tuple(x.shape), x.dtype, how, GUARD)
    view.fill_(NAN)
    return base, view


def guard_is_intact(base: torch.Tensor, view: torch.Tensor) -> bool:
    kept = view.clone()
    view.fill_(GUARD)
    intact = bool((base == GUARD).all())
    view.copy_(kept)
    return intact


def to_cupy(x: torch.Tensor) -> Any:
    """A CuPy array on the memory of a 16-bit tensor; in a dry run a NumPy array."""
    import ml_dtypes
    import numpy as np

    dtype = np.dtype(ml_dtypes.bfloat16 if x.dtype is torch.bfloat16 else np.float16)
    if DRY:
        return x.view(torch.int16).numpy().view(dtype)
    import cupy

    if x.numel() == 0:
        return cupy.empty(tuple(x.shape), dtype)
    return cupy.from_dlpack(x.view(torch.int16)).view(dtype)


def to_torch(x: Any) -> torch.Tensor:
    """A contiguous tensor with the values of a tensor, or of a CuPy array of 16-bit elements or float32."""
    import numpy as np

    if isinstance(x, torch.Tensor):
        return x.contiguous()
    if x.size == 0:
        return torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device=DEVICE)
    bits_of = x.copy() if x.dtype.itemsize == 4 else x.view(np.int16).copy()
    found = torch.from_numpy(bits_of) if DRY else torch.from_dlpack(bits_of)
    return found.view(getattr(torch, x.dtype.name))


# ---------------------------------------------------------------- pages


def pages_of(
    k: torch.Tensor, v: torch.Tensor, lengths: list[int], size: int, rng: random.Random, *, layout: str = "NHD",
    junk: float = NAN, nowhere: int = 1 << 30,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(k_pages, v_pages, page table [B, entries]) of k and v [B, Hk, Sk, D] cut to ``lengths``. Pages lie in random
    order; ``junk`` is wherever no key is, and entries past a sequence's last page lead to ``nowhere``."""
    B, Hk, _, D = k.shape
    counts = [-(-length // size) for length in lengths]
    pages = sum(counts) + 3
    order = rng.sample(range(pages), pages)
    table = torch.full((B, max(counts) + 2), nowhere, dtype=torch.int32)
    caches = [torch.full((pages, size, Hk, D), junk, dtype=k.dtype, device=DEVICE) for _ in range(2)]
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
        table[b, :count] = mine.int()
        at = torch.arange(length)
        page, row = mine.to(DEVICE)[(at // size).to(DEVICE)] if length else mine.to(DEVICE), (at % size).to(DEVICE)
        for cache, x in zip(caches, (k, v), strict=True):
            cache[page, row] = x[b, :, :length].transpose(0, 1)
    if layout == "HND":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    return caches[0], caches[1], table.to(DEVICE)


def attend(*arrays: Any, **options: Any) -> Any:
    return s2o_attention(*arrays, **options)
