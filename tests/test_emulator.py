"""The interpreter of kernels (emulator/): small kernels do what they would on a GPU, and faults in them are named."""

from __future__ import annotations

import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator import device
from emulator.device import EmulatorError, settings

nvrtc = pytest.importorskip("cupy").cuda.nvrtc
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the interpreter is compiled with gcc")


def run(body: str, *arrays: np.ndarray, blocks: int = 1, threads: int = 32, shared: int = 0, arch: str = "90a") -> None:
    """Run a kernel whose arrays are a, b, c ... (``arrays``, of the device)."""
    types = {"uint16": "unsigned short", "uint32": "unsigned", "int32": "int", "float32": "float"}
    members = "".join(f"{types[x.dtype.name]}* {name}; " for name, x in zip("abcdef", arrays, strict=False))
    text = f"""struct Params {{ {members} }};
    extern "C" __global__ void kernel(const __grid_constant__ Params p) {{
      extern __shared__ __align__(1024) unsigned char shared[];
      const int t = threadIdx.x;
      const unsigned window = static_cast<unsigned>(__cvta_generic_to_shared(shared));
      {body}
    }}"""
    program = nvrtc.createProgram(text, "kernel.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"-arch=compute_{arch}", "-std=c++17", "-default-device", "-ftz=true"])
        ptx = nvrtc.getPTX(program)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)
    params = np.array([x.ctypes.data for x in arrays], np.uint64)
    arguments = np.array([params.ctypes.data], np.uint64)
    device.launch(device.load(ptx.rstrip(b"\0").decode()), blocks, threads, shared, arguments.ctypes.data)


def array(values: Any, dtype: Any = None) -> np.ndarray:
    """On the device."""
    values = np.ascontiguousarray(values, dtype)
    found = device.allocate(values.nbytes).view(values.dtype).reshape(values.shape)
    found[...] = values
    return found


def zeros(shape: Any, dtype: Any) -> np.ndarray:
    return array(np.zeros(shape, dtype))


def test_lanes_part_and_come_together():
    """Each lane loops as often as its number says, in one of two branches; then they exchange what they found."""
    a = zeros(32, np.int32)
    run("""int x = 0;
           for (int i = 0; i < t; ++i) { if (i % 2) x += 3; else x += 5; }
           p.a[t] = x + 1000 * __shfl_xor_sync(0xffffffff, x, 1);""", a)  # fmt: skip
    x = np.array([5 * ((t + 1) // 2) + 3 * (t // 2) for t in range(32)])
    np.testing.assert_array_equal(a, x + 1000 * x[np.arange(32) ^ 1])


def test_warps_wait_at_barriers():
    a = zeros(256, np.int32)
    run("""int* x = reinterpret_cast<int*>(shared);
           x[t] = t;
           __syncthreads();
           p.a[t] = x[255 - t] + 1000 * __syncthreads_count(t % 3 == 0);""", a, threads=256, shared=1024)  # fmt: skip
    np.testing.assert_array_equal(a, 255 - np.arange(256) + 86_000)


@pytest.mark.parametrize("seed", range(3))
def test_blocks_share_a_counter(seed, monkeypatch):
    monkeypatch.setattr(settings, "seed", seed)
    a, b = zeros(1, np.uint32), zeros(64, np.uint32)
    run("const unsigned i = atomicAdd(p.a, 1u); atomicAdd(p.b + i % 64, i);", a, b, blocks=6, threads=64)
    i = np.arange(6 * 64)
    assert a[0] == len(i)
    np.testing.assert_array_equal(b, np.bincount(i % 64, i))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_tiles(dtype, rng):
    kind = np.dtype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
    x, y = rng.standard_normal((16, 16)).astype(kind), rng.standard_normal((8, 16)).astype(kind)  # y: columns
    a, b, c = array(x.view(np.uint16)), array(y.view(np.uint16)), zeros((16, 8), np.float32)
    name = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    run(f"""unsigned short* rows = reinterpret_cast<unsigned short*>(shared);
           for (int i = t; i < 256; i += 32) rows[i] = p.a[i];
           __syncwarp();
           unsigned x[4], y[2];
           asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
                        : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(window + t % 16 * 32 + t / 16 * 16));
           for (int e = 0; e < 2; ++e) y[e] = *reinterpret_cast<unsigned*>(p.b + t / 4 * 16 + t % 4 * 2 + e * 8);
           float d[4] = {{}};
           asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%0, %1, %2, %3}}, "
                        "{{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
                        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                        : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
           for (int e = 0; e < 4; ++e) p.c[(t / 4 + e / 2 * 8) * 8 + t % 4 * 2 + e % 2] = d[e];""",
        a, b, c, shared=512)  # fmt: skip
    want = x.astype(np.float64) @ y.astype(np.float64).T
    # 16 roundings of sums to float32, each at most half a unit of the sum of magnitudes.
    bound = 16 * 2.0**-24 * (np.abs(x.astype(np.float64)) @ np.abs(y.astype(np.float64)).T)
    assert (np.abs(c - want) <= bound).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("waits_first", [False, True])
def test_what_a_wgmma_reads_stays_until_a_warp_has_waited_for_it(waits_first, seed, monkeypatch):
    """It is one instruction of four warps: whichever waits first may let others write."""
    monkeypatch.setattr(settings, "seed", seed)
    results = ", ".join(f"%{n}" for n in range(32))
    outputs = ", ".join(f'"+f"(d[{n}])' for n in range(32))
    write = "if (t == 0) *reinterpret_cast<volatile unsigned*>(shared + 8192) = 0;"  # all four warps multiply by it
    wait = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'
    then = wait + write if waits_first else write + wait  # by the first warp; others may not have come to their wait
    body = f"""for (int i = t; i < 4096; i += 128) reinterpret_cast<unsigned*>(shared)[i] = 0x3c003c00;  // ones
               __syncthreads();
               const unsigned long long kind = 1ull << 62 | 64ull << 32;  // rows of 128 bytes, 8 of them in 1,024
               const unsigned long long x = kind | (window & 0x3ffff) >> 4, y = x + 512;
               float d[32] = {{}};
               asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
               asm volatile("{{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                            "{{{results}}}, %32, %33, p, 1, 1, 0, 0;}}"
                            : {outputs} : "l"(x), "l"(y));
               asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
               {then}
               p.a[t] = d[0];"""
    a = array(np.full(128, np.nan, np.float32))
    if waits_first:
        run(body, a, threads=128, shared=16384)
        np.testing.assert_array_equal(a, 16)
    else:
        with pytest.raises(EmulatorError, match="shared memory that wgmma reads was written before"):
            run(body, a, threads=128, shared=16384)


def kept_pairs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every four columns of x [64, 64] e4m3 the two largest, as 128 threads of a sparse product have them: 16 bytes
    each [128, 16], and a word that says which they are [128]."""
    size = np.abs(x.astype(np.float32)).reshape(64, 16, 4)
    places = np.sort(np.argsort(-size, axis=2, kind="stable")[..., :2], axis=2)  # [rows, fours, 2]
    kept = np.take_along_axis(x.reshape(64, 16, 4), places, 2).reshape(64, 32).view(np.uint8)
    nibbles = (places[..., 0] | places[..., 1] << 2).astype(np.uint32)
    thread = np.arange(128)
    row, lane = thread // 32 * 16 + thread % 32 // 4, thread % 4
    pieces = [kept[row + 8 * h][np.arange(128)[:, None], (lane * 4 + c)[:, None] + np.arange(4)]
              for c in (0, 16) for h in (0, 1)]  # fmt: skip
    of_row, half = row + thread % 2 * 8, thread // 2 % 2
    words = (nibbles[of_row[:, None], half[:, None] * 8 + np.arange(8)] << 4 * np.arange(8, dtype=np.uint32)).sum(1)
    return np.concatenate(pieces, axis=1), words.astype(np.uint32)


SPARSE = """unsigned char* rows = shared;  // 8 queries of 64 bytes, in pieces of 16 that are swizzled
            for (int i = t; i < 512; i += 128) {{
              const int row = i / 64, column = i % 64;
              rows[row * 64 + ((column / 16 ^ row / 2 % 4) * 16 + column % 16)] = p.b[i];
            }}
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncthreads();
            const unsigned long long of_rows = 2ull << 62 | 32ull << 32 | (window & 0x3ffff) >> 4;
            unsigned d[2] = {{}};
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            asm volatile("{{.reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sp.sync.aligned.m64n8k64.f16.e4m3.e4m3 "
                         "{{%0, %1}}, {{%2, %3, %4, %5}}, %6, %7, 0, p, 1, 1;}}"
                         : "+r"(d[0]), "+r"(d[1])
                         : "r"(p.a[t * 4]), "r"(p.a[t * 4 + 1]), "r"(p.a[t * 4 + 2]), "r"(p.a[t * 4 + 3]),
                           "l"(of_rows), "r"(p.c[t]));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            for (int h = 0; h < 2; ++h) p.d[t * 2 + h] = d[h];"""


def test_sparse_products_leave_columns_out(rng):
    """Two of every four columns: whatever stands in the others, NaN too, changes nothing."""
    x, y = (rng.standard_normal((n, 64)).astype(ml_dtypes.float8_e4m3fn) for n in (64, 8))
    kept, words = kept_pairs(x)
    y[3, 17] = np.nan
    a, b = array(kept.view(np.uint32).reshape(-1)), array(y.view(np.uint8).astype(np.uint16).reshape(-1))
    c, d = array(words), zeros(256, np.uint32)
    run(SPARSE.format(), a, b, c, d, threads=128, shared=1024)
    pairs = d.view(np.float16).astype(np.float64).reshape(4, 8, 4, 2, 2)  # warp, row, lane, 8 rows on, column
    got = pairs.transpose(0, 3, 1, 2, 4).reshape(64, 8)
    size = np.abs(x.astype(np.float32)).reshape(64, 16, 4)
    is_kept = (np.argsort(np.argsort(-size, axis=2, kind="stable"), axis=2) < 2).reshape(64, 64)
    terms = np.where(is_kept[:, None], x.astype(np.float64)[:, None] * y.astype(np.float64)[None], 0)  # [64, 8, 64]
    want, bound = terms.sum(axis=2), np.abs(terms).sum(axis=2) * 2.0**-11  # of float16, rounded once
    assert np.isnan(want[:, 3]).any() and not np.isnan(want[:, 3]).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert (np.abs(got - want) <= bound)[~np.isnan(want)].all()
    c[5] = 0x44444440  # the first of four columns twice
    with pytest.raises(EmulatorError, match="of four columns 0x0 are kept"):
        run(SPARSE.format(), a, b, c, d, threads=128, shared=1024)


def test_numbers_are_rounded_as_a_gpu_does(rng):
    x = np.concatenate([rng.standard_normal(56) * 10.0 ** rng.integers(-9, 5, 56),
                        [0, -0.0, np.inf, -np.inf, np.nan, 448, 65504, 464.1]]).astype(np.float32)  # fmt: skip
    a, b, c, d = array(x), zeros(64, np.uint16), zeros(64, np.uint16), zeros(64, np.uint16)
    run("""asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p.b[t]) : "f"(p.a[t]));
           asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(p.c[t]) : "f"(p.a[t]));
           asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(p.d[t]) : "f"(p.a[t]));""",
        a, b, c, d, threads=64)  # fmt: skip
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(b.view(np.float16), x.astype(np.float16))
        rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(c.view(ml_dtypes.bfloat16).astype(np.float32), rounded)
        saturated = np.where(np.isnan(x), x, np.clip(x, -448, 448)).astype(ml_dtypes.float8_e4m3fn)
    got = (d & 255).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(got.astype(np.float32), saturated.astype(np.float32))
    assert (np.signbit(b.view(np.float16)) == np.signbit(x))[~np.isnan(x)].all()


COPY = """asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                       :: "r"(window + t * 16), "l"(p.a + t * 4) : "memory");
          {end}
          __syncwarp();
          for (int e = 0; e < 4; ++e) p.b[t * 4 + e] = reinterpret_cast<volatile unsigned*>(shared)[t * 4 + e];"""


@pytest.mark.parametrize(("end", "arrives"), [
    ('asm volatile("cp.async.commit_group;\\ncp.async.wait_group 0;" ::: "memory");', True),
    ('asm volatile("cp.async.wait_group 0;" ::: "memory");', False),  # of no group
    ("", False),
])  # fmt: skip
def test_a_copy_lands_when_it_is_waited_for(end, arrives):
    x = np.arange(128, dtype=np.uint32)
    a, b = array(x), zeros(128, np.uint32)
    run(COPY.format(end=end), a, b, shared=512)
    assert (b == x).all() == arrives


def test_memory_outside_of_arrays_is_an_error():
    a = zeros(32, np.int32)
    with pytest.raises(EmulatorError, match="outside of every array: 128 bytes behind the start of one of 128"):
        run("p.a[t + 1] = t;", a)
    with pytest.raises(EmulatorError, match="4 bytes before one of 128"):
        run("p.a[t] = p.a[t - 1];", a)
    with pytest.raises(EmulatorError, match="shared memory at 128 are outside of the block's 128"):
        run("reinterpret_cast<volatile int*>(shared)[t + 1] = t;", a, shared=128)
    with pytest.raises(EmulatorError, match="no multiple"):
        run("*reinterpret_cast<volatile unsigned long long*>(p.a + 1) = 0;", a)


def test_who_waits_for_ever_is_an_error():
    a = zeros(64, np.int32)
    with pytest.raises(EmulatorError, match="every warp waits"):
        run('if (t < 32) asm volatile("bar.sync 1, 64;" ::: "memory"); p.a[t] = 1;', a, threads=64)
    with pytest.raises(EmulatorError, match="an mbarrier that was not initialised"):
        run('asm volatile("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0];}" :: "r"(window) : "memory");', a,
            shared=64)  # fmt: skip
