"""Fixtures: where a test runs, in which dtype, and how far from exact it may be.

A test that takes ``device`` runs on the CPU, and on a GPU, when one is present, in both of its dtypes and with both
of its paths.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_cases import PATHS
from hypothesis import settings

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.plan import launch_plan as plan
from s2o_cupy.reference.dense import capped, dense_attention
from s2o_cupy.tools import catalogue
from s2o_cupy.tools.metrics import rel_l2

# JAX would take three quarters of a GPU's memory for each process of tests.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# With it commands raise the errors that tests expect them to tell.
os.environ.pop("S2O_DEBUG", None)

# Random cases of a test that does not ask for a number of its own: few at each commit, more in `make test-all`.
settings.register_profile("commit", max_examples=25, deadline=None)
settings.register_profile("all", max_examples=100, deadline=None)
settings.load_profile("commit")

# What takes longest, most of it in processes that it starts: first, so that at the end no worker waits for one file.
LONGEST = (
    "test_packaging", "test_emulated_cases", "test_examples", "test_torch_op", "test_transformers", "test_distributed",
    "test_benchmarks", "test_docs", "test_torch_compile",
)  # fmt: skip

# Tests are short, and most are about S2O: without the shortcut to dense attention unless they ask for it.
DENSE_UP_TO = plan.DENSE_UP_TO
plan.DENSE_UP_TO = 0

# All kernels of an architecture: some 25 ms, and hundreds of tests look something up in them.
catalogue.kernels_for = functools.cache(catalogue.kernels_for)

# Small enough for many segments and tiles in short sequences, large enough for the GPU.
SMALL = S2OConfig(segment=128, tau=0.05, block_m=64, block_n=64, dense_up_to=0)
# The same with stop checks as far apart as the Hopper kernels have them.
SMALL_HOPPER = S2OConfig(segment=128, tau=0.05, block_m=128, block_n=128, dense_up_to=0)


@functools.cache
def has_gpu() -> bool:
    try:
        import cupy
    except ImportError:
        return False
    return cupy.is_available() and int(cupy.cuda.Device().compute_capability) >= 80


def has_hopper() -> bool:
    """A GPU that takes the kernels for compute capability 9.0."""
    if not has_gpu():
        return False
    import cupy

    return cupy.cuda.Device().compute_capability == "90"


def spin(milliseconds: float, blocks: int = 1) -> None:
    """Keep CuPy's current stream busy, at 2 GHz or less for at least so long."""
    import cupy

    code = 'extern "C" __global__ void s2o_spin(long long n) { for (long long t = clock64(); clock64() - t < n;); }'
    cupy.RawKernel(code, "s2o_spin")((blocks,), (128,), (np.int64(milliseconds * 2e6),))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files of which every test needs a GPU are not even read without one, unless they are named."""
    if collection_path.suffix != ".py" or has_gpu():
        return None
    return "\npytestmark = [pytest.mark.gpu" in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(tryfirst=True)  # before "not slow" is looked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Most of the sampled cases become slow. Without a GPU its cases are left out, rather than skipped one by one. The
    longest files come first."""
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))
    if not has_gpu():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
    cases_of: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            cases_of.setdefault((item.nodeid.partition("[")[0], sampled.args[0]), []).append(item)
    for (_, n), cases in cases_of.items():
        quick = [case for case in cases if zlib.crc32(case.name.encode()) % n == 0] or cases[:1]  # of each test some
        for case in cases:
            if case not in quick:
                case.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not has_gpu():
        terminalreporter.write_line("GPU cases are left out: no GPU, cupy.is_available() is False")


@dataclass(frozen=True)
class Device:
    """Arrays of one dtype on the CPU (NumPy) or on a GPU (CuPy)."""

    kind: str
    dtype: np.dtype
    config: S2OConfig = SMALL

    @property
    def xp(self) -> Any:
        if self.kind == "cpu":
            return np
        import cupy

        return cupy

    def round(self, x: np.ndarray) -> np.ndarray:
        """Host values that this device's dtype holds exactly, float64."""
        return x.astype(self.dtype).astype(np.float64)

    def array(self, x: np.ndarray) -> Any:
        return self.xp.asarray(np.asarray(x).astype(self.dtype))

    def poisoned(self, shape: tuple[int, ...]) -> Any:
        """An output in which an unwritten element shows."""
        return self.array(np.full(shape, np.nan))

    def host(self, x: Any) -> np.ndarray:
        """Values as float64 on the host: exact, so equal values are equal bits."""
        return (x if isinstance(x, np.ndarray) else x.get()).astype(np.float64)

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
        """s2o_attention of host arrays in this dtype, into a poisoned output; float64 on the host."""
        options.setdefault("config", self.config)
        out = self.poisoned(q.shape)
        o = s2o_attention(*(self.array(x) for x in (q, k, v)), out=out, **options)
        assert o is out
        return self.host(out)

    def exact(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
        """Dense attention in float64 of the values that this dtype holds."""
        return dense_attention(self.round(q), self.round(k), self.round(v), **options)[0]

    def tolerance(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> float:
        """Twice the error of a plain low-precision attention.

        That one computes softmax in float32, rounds the unnormalised probabilities P and the output to
        the dtype, as any kernel on tensor cores must, and makes no other error. The floor, for
        results that happen to be exact, is four units of float32.
        """
        exact = self.exact(q, k, v, **options)
        low = _low_precision(*(x.astype(self.dtype) for x in (q, k, v)), **options)
        tolerance = 2 * rel_l2(low, exact) + 4 * float(np.finfo(np.float32).eps)
        return tolerance + (self._tanh_error(q, k, v, exact, **options) if options.get("softcap") else 0)

    def _tanh_error(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, exact: np.ndarray, **options: Any) -> float:
        """What tanh.approx adds: each score is off by e = 2^-11 softcap or less, so each weight and their sum by a
        factor between exp(-e) and exp(e), and the output by expm1(2 e) of the weighted sum of absolute values."""
        absolute = self.exact(q, k, np.abs(v), **options)
        return float(np.expm1(2 * 2.0**-11 * options["softcap"]) * np.linalg.norm(absolute) / np.linalg.norm(exact))

    def assert_dense(self, o: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> None:
        """``o`` is dense attention within the tolerance, and every element was written."""
        assert np.isfinite(o).all()
        assert rel_l2(o, self.exact(q, k, v, **options)) <= self.tolerance(q, k, v, **options)


def _low_precision(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: bool = True,
) -> np.ndarray:
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))  # [B, H, Lk, D]
    s = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5 if scale is None else scale)  # [B, H, Lq, Lk]
    s = capped(s, softcap)
    if is_causal:
        seqlen_q, seqlen_k = s.shape[-2:]
        s = np.where(np.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q, dtype=bool), s, np.float32(-np.inf))
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    o = p.astype(dtype).astype(np.float32) @ v / p.sum(axis=-1, keepdims=True)
    return o.astype(dtype)


DEVICES = {
    "cpu": Device("cpu", np.dtype(np.float32)),
    "cuda-bfloat16": Device("cuda", np.dtype(ml_dtypes.bfloat16)),
    "cuda-float16": Device("cuda", np.dtype(np.float16)),
    "hopper-bfloat16": Device("cuda", np.dtype(ml_dtypes.bfloat16), SMALL_HOPPER),
    "hopper-float16": Device("cuda", np.dtype(np.float16), SMALL_HOPPER),
}


def _devices() -> list[Any]:
    """Names for parameters; those of a GPU only where there is one, as making their cases takes seconds."""
    return ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in DEVICES if name != "cpu" and has_gpu())]


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> Device:
    found = DEVICES[request.param]
    if found.kind == "cuda" and not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if found.config is SMALL_HOPPER and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    return found


@pytest.fixture(params=["portable", "hopper"])
def path(request: pytest.FixtureRequest) -> str:
    """Of tests for a GPU alone: each path that it has."""
    if request.param == "hopper" and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    return request.param


@pytest.fixture
def path_config(path: str) -> S2OConfig:
    """A configuration with several segments in short sequences that takes this path."""
    return PATHS[path]


@pytest.fixture
def gpu(qkv: Any) -> Any:
    """gpu(seqlen_q, seqlen_k=None, dtype=..., ...) -> q, k, v as CuPy arrays."""
    import cupy

    def make(*lengths: int, dtype: Any = ml_dtypes.bfloat16, **shape: int) -> list[Any]:
        return [cupy.asarray(x.astype(dtype)) for x in qkv(*lengths, **shape)]

    return make


@pytest.fixture
def config(request: pytest.FixtureRequest) -> S2OConfig:
    """The device's, in a test that takes one."""
    return request.getfixturevalue("device").config if "device" in request.fixturenames else SMALL


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def without_gradients(torch: Any) -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    """The small Llama of tiny_llama.py, in float32; one for all tests of a file."""
    return _tiny_llama().llama()


@pytest.fixture(scope="module")
def ids() -> Any:
    """Its prompt, (1, LENGTH)."""
    return _tiny_llama().prompt()


def _tiny_llama() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers", "5.16")
    import tiny_llama

    return tiny_llama


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def qkv(rng: np.random.Generator) -> Any:
    """qkv(seqlen_q, seqlen_k=None, batch=, heads=, kv_heads=, head_dim=) -> host float32 arrays.

    Runs of 16 keys differ in importance by a few nats, alike for all queries, so that S2O stops early.
    """

    def make(
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        batch: int = 1,
        heads: int = 2,
        kv_heads: int = 1,
        head_dim: int = 64,
    ) -> tuple[np.ndarray, ...]:
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        q = rng.standard_normal((batch, heads, seqlen_q, head_dim), dtype=np.float32)
        k, v = rng.standard_normal((2, batch, kv_heads, seqlen_k, head_dim), dtype=np.float32)
        importance = rng.standard_normal((batch, kv_heads, -(-seqlen_k // 16), 1), dtype=np.float32)
        importance = importance.repeat(16, axis=2)[:, :, :seqlen_k]
        direction = np.float32(np.sqrt(3) * head_dim**-0.25)  # scores of importance * 3 nats, over head_dim
        return q + direction, k + importance * direction, v

    return make


@pytest.fixture
def packed(qkv: Any) -> Any:
    """packed(lengths_q, lengths_k, ...) -> host q [total_q, heads, head_dim], k and v [total_k, kv_heads, head_dim]."""

    def make(lengths_q: list[int], lengths_k: list[int], **shape: int) -> list[np.ndarray]:
        arrays = qkv(sum(lengths_q), sum(lengths_k), **({"heads": 4, "kv_heads": 2} | shape))
        return [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in arrays]

    return make
