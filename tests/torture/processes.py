"""What needs processes: cold and unwritable caches, forks, a lost context, errors of others."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import s2o_cupy
from s2o_cupy import S2OConfig, s2o_attention_paged, s2o_attention_varlen

from .arrays import DEVICE, DRY, NAN, attend, packed_rows, pages_of, qkv, rounds, same, sparse, to_cupy
from .harness import Run, check

ROOT = Path(s2o_cupy.__file__).parents[1]
# A call with few and small kernels, and a digest of its result. Its first use of CUDA is in `call`.
CALL = """
import hashlib, os, sys
import numpy as np
from s2o_cupy import S2OConfig, s2o_attention
config = S2OConfig(segment=64, tau=0.05, block_m=64, block_n=64, path="portable", dense_up_to=0)
def call(seed=0):
    from s2o_cupy.arrays.lazy_cupy import import_cupy
    cupy = import_cupy()
    rng = np.random.default_rng(seed)
    q = cupy.asarray(rng.standard_normal((1, 2, 200, 16)).astype(np.float16))
    k, v = (cupy.asarray(rng.standard_normal((1, 1, 200, 16)).astype(np.float16)) for _ in range(2))
    return hashlib.sha256(s2o_attention(q, k, v, config=config).get().tobytes()).hexdigest()[:16]
"""


def start(code: str, **environment: str | None) -> subprocess.Popen[str]:
    """A fresh interpreter that runs ``code`` after CALL; None takes a variable away."""
    changed = {**os.environ, **environment}
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", CALL + code], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={name: value for name, value in changed.items() if value is not None},
    )  # fmt: skip


def output_of(process: subprocess.Popen[str], seconds: float = 90) -> str:
    """What it printed, once it ended well."""
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        raise AssertionError(f"hangs: {text[-1500:]}") from None
    assert process.returncode == 0, f"exit status {process.returncode}: {text[-1500:]}"
    return text.strip()


@check(30)
def cold_caches(run: Run) -> str:
    """Four processes at once on an empty cache folder, then folders that cannot be written, or are none."""
    with tempfile.TemporaryDirectory(prefix="s2o_torture_") as folder:
        started = [start("print(call())", CUPY_CACHE_DIR=folder) for _ in range(4)]
        digests = [output_of(process).split()[-1] for process in started]
        assert len(set(digests)) == 1, f"four processes at once: {digests}"
        blocked = Path(folder) / "file"
        blocked.write_text("")
        kinds: dict[str, dict[str, str | None]] = {
            "no process may write": {"CUPY_CACHE_DIR": "/proc"},
            "below a file": {"CUPY_CACHE_DIR": str(blocked / "below")},
            "no name": {"CUPY_CACHE_DIR": ""},
            "no home": {"HOME": "/proc", "CUPY_CACHE_DIR": None},
        }
        running = {kind: start("print(call())", **environment) for kind, environment in kinds.items()}
        for kind, process in running.items():
            found = output_of(process).split()[-1]
            assert found == digests[0], f"cache folder where {kind}: {found}, not {digests[0]}"
    return f"4 at once, and {', '.join(kinds)}"


FORKED = """
import signal
first = call()
r, w = os.pipe()
if (pid := os.fork()) == 0:
    signal.alarm(40)
    said = []
    try:
        said.append("same" if call() == first else "DIFFERENT")
    except BaseException as error:
        said.append(type(error).__name__)
    x = np.ones((1, 1, 20, 8), np.float32)
    said.append(str(bool((s2o_attention(x, x, x) == 1).all())))
    os.write(w, " ".join(said).encode())
    os._exit(0)
os.close(w)
status = os.waitpid(pid, 0)[1]
print(status, *os.read(r, 1000).decode().split(), call() == first)
"""


@check(15)
def fork_after_use(run: Run) -> str:
    """A child forked after CUDA was used gets an error, and its CPU path works; the parent goes on."""
    status, on_gpu, on_cpu, parent = output_of(start(FORKED)).splitlines()[-1].split()
    assert (status, on_cpu, parent) == ("0", "True", "True"), f"child {status}, its CPU {on_cpu}, the parent {parent}"
    assert on_gpu not in ("same", "DIFFERENT"), "a forked child cannot use the GPU, but a call returned"
    return f"the child's call raises {on_gpu}"


@check(15)
def fork_before_use(run: Run) -> str:
    """Children forked before CUDA is used."""
    code = """
import multiprocessing
with multiprocessing.get_context("fork").Pool(2) as pool:
    a = pool.map(call, [0, 1, 0])
print(len({a[0], a[2], call(0)}), a[1] != a[0])
"""
    line = output_of(start(code)).splitlines()[-1]
    assert line == "1 True", line
    return "the same digests"


LOST = """
import cupy, torch
torch.set_grad_enabled(False)
q = torch.randn(1, 4, 2000, 64, device="cuda").half()
s2o_attention(q, q, q)
torch.cuda.synchronize()
cupy.RawKernel('extern "C" __global__ void f() { asm("trap;"); }', "f")((1,), (1,), ())
try:
    cupy.cuda.Device().synchronize()
    print("no error of the trap")
except Exception as error:
    print("trap", type(error).__name__)
for config in (S2OConfig(), S2OConfig(dense_up_to=0, segment=256)):
    for _ in range(3):
        try:
            s2o_attention(q, q, q, config=config)
            torch.cuda.synchronize()
            print("RETURNED")
        except Exception as error:
            print("call", type(error).__name__)
sys.stdout.flush()
os._exit(0)
"""


@check(15)
def lost_context(run: Run) -> str:
    """After a kernel that trapped a call raises; it does not return, hang or end the process."""
    lines = output_of(start(LOST)).splitlines()
    assert lines[-7].startswith("trap") and "RETURNED" not in lines, lines[-8:]
    return "; ".join(lines[-7:])


@check(15)
def errors_of_others(run: Run) -> str:
    """A CUDA call of CuPy or PyTorch that failed before: the next call does not report it."""
    import cupy

    runtime = cupy.cuda.runtime
    arrays = qkv(run.seed, 1, 4, 2, 2000, None, 64)
    expected = attend(*arrays, config=rounds()).clone()
    code = 'extern "C" __global__ void f() {}'
    failing: dict[str, Callable[[], Any]] = {
        "cudaMemcpy": lambda: runtime.memcpy(0, 0, 64, 99),
        "cudaSetDevice": lambda: runtime.setDevice(77),
        "cudaFree": lambda: runtime.free(12345),
        "cudaMalloc": lambda: runtime.malloc(1 << 60),
        "a launch": lambda: cupy.RawKernel(code, "f")((1,), (5000,), ()),
        "torch": lambda: torch.empty(1 << 60, dtype=torch.uint8, device="cuda"),
    }
    for name, fail in failing.items():
        try:
            fail()
        except Exception as error:
            print(f"{name}: {type(error).__name__}")
        else:
            raise AssertionError(f"{name} did not fail")
        out = torch.full_like(arrays[0], NAN)
        for _ in range(3):
            attend(*arrays, config=rounds(), out=out)
            assert same(out, expected), f"after {name}"
    return f"{len(failing)} errors"


def refusals(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Calls that are not accepted, of q [1, 4, 300, 64]."""
    big = torch.zeros(1, 1, 4, 257, dtype=q.dtype, device=DEVICE)
    k_pages, v_pages, table = pages_of(k, v, [300], 16, random.Random(0))

    def with_grad() -> Any:
        with torch.enable_grad():
            return attend(q.clone().requires_grad_(), k, v)

    found: dict[str, Callable[[], Any]] = {
        "head_dim 257": lambda: attend(big, big, big),
        "heads that do not divide": lambda: attend(q[:, :3], k, v),
        "more queries than keys": lambda: attend(q, k[:, :, :100], v[:, :, :100]),
        "k and v of two lengths": lambda: attend(q, k, v[:, :, :200]),
        "two dtypes": lambda: attend(q, k.float(), v),
        "scale NaN": lambda: attend(q, k, v, scale=NAN),
        "scale True": lambda: attend(q, k, v, scale=True),
        "tau -1": lambda: attend(q, k, v, tau=-1.0),
        "out is q": lambda: attend(q, k, v, out=q),
        "out overlaps q": lambda: attend(q[:, :, :200], k, v, out=q[:, :, 100:]),
        "out of another dtype": lambda: attend(q, k, v, out=out.float()),
        "out with a stride of 0": lambda: attend(q, k, v, out=out[:, :1].expand(out.shape)),
        "layout": lambda: attend(q, k, v, layout="SHD"),
        "is_causal 1": lambda: attend(q, k, v, is_causal=1),
        "a list": lambda: attend([1], k, v),
        "a gradient": with_grad,
        "too few rows": lambda: s2o_attention_varlen(*packed_rows(q, k, v), [0, 5]),
        "a table of int64": lambda: s2o_attention_paged(q, k_pages, v_pages, table.long(), seqlen_k=300),
    }
    if DRY:
        return found
    return found | {
        "two devices": lambda: attend(q, k.cpu(), v),
        "float32": lambda: attend(q.float(), k.float(), v.float()),
        "Hopper's kernels with other tiles": lambda: attend(q, k, v, config=S2OConfig(path="hopper", block_n=64)),
        "block_n 100": lambda: attend(q, k, v, config=S2OConfig(block_n=100)),
        "two frameworks": lambda: attend(q, to_cupy(k), to_cupy(v)),
    }


@check(10, dry=True)
def refused_calls(run: Run) -> str:
    """A refused call names the remedy, writes nothing, and the next one is as good as ever."""
    q, k, v = qkv(run.seed, 1, 4, 2, 300, None, 64)
    expected = attend(q, k, v, config=sparse()).clone()
    out = torch.full_like(q, 3.0)
    cases = refusals(q, k, v, out)
    for name, call in cases.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            assert "accepted" in str(error) or "requires grad" in str(error), f"{name}: no remedy: {error}"
        else:
            raise AssertionError(f"{name} is taken")
        assert same(attend(q, k, v, config=sparse()), expected), f"the call after {name}"
    assert bool((out == 3.0).all()), "a refused call wrote"
    return f"{len(cases)} refused"


@check(15)
def first_calls_of_many_threads(run: Run) -> str:
    """Eight threads of a fresh process make its first calls at once."""
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
ready = threading.Barrier(8)
def first(seed):
    ready.wait()
    return call(seed)
with ThreadPoolExecutor(8) as pool:
    digests = list(pool.map(first, [0, 1, 2, 3] * 2))
print(digests[:4] == digests[4:] == [call(seed) for seed in range(4)], len(set(digests)))
"""
    with tempfile.TemporaryDirectory(prefix="s2o_torture_") as folder:
        line = output_of(start(code, CUPY_CACHE_DIR=folder)).splitlines()[-1]
    assert line == "True 4", line
    return "the same digests"
