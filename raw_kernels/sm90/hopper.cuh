// Hopper's own instructions (sm_90a): mbarriers, named barriers, register reallocation and wgmma.
#pragma once
#include "common/ptx.cuh"

namespace s2o {

// Which warp of the block, in a way that tells the compiler that all of its lanes have the same number. What a branch by
// it leads to may then keep numbers that are the same for a warp in its uniform registers; by threadIdx.x it takes each
// thread's.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0); }

// --- mbarriers ---
__device__ __forceinline__ void barrier_init(uint64& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64& barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(&barrier))
               : "memory");
}

// Arrives once this thread's cp.async copies so far have landed. PTX formally asks for a proxy fence between such
// copies and reads by wgmma; reporting each group behind one, a group late, cost 4 to 6 % of pass 2 (docs/kernels.md).
__device__ __forceinline__ void barrier_arrive_after_copies(uint64& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives and announces `bytes` that copies by tensor maps will bring.
__device__ __forceinline__ void barrier_expect(uint64& barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Waits for the phase of parity `parity` to complete.
__device__ __forceinline__ void barrier_wait(uint64& barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// Makes this thread's ordinary writes visible to wgmma of those that a barrier tells of them.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The largest of a number and the bits of two floats, which Hopper has an instruction for. Of floats that are not
// negative it is the largest; negative ones are below those.
__device__ __forceinline__ int largest_bits(int a, float x, float y) {
  int found;  // in one piece: a copy of an accumulator to an integer would be made before wgmma is done with it
  asm("{\n.reg .s32 x, y;\nmov.b32 x, %2;\nmov.b32 y, %3;\nmax.s32 x, x, %1;\nmax.s32 %0, x, y;\n}"
      : "=r"(found)
      : "r"(a), "f"(x), "f"(y));
  return found;
}

// --- tensor maps ---
// What describes an array and a box of it to the copy engine; the driver writes it
// (s2o_cupy/cuda/tensor_maps.py).
struct alignas(64) TensorMap {
  uint64 opaque[16];
};

// Starts the copy of a box to shared memory, reported to `barrier` in bytes; what lies outside of the array is zeros.
__device__ __forceinline__ void copy_box(uint32 shared, const TensorMap& map, uint64& barrier, int column, int row,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

__device__ __forceinline__ void copy_box(uint32 shared, const TensorMap& map, uint64& barrier, int column, int row,
                                         int columns, int rows, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(columns), "r"(rows), "r"(batch)
      : "memory");
}

// --- named barriers: a warpgroup waits where the other has arrived ---
__device__ __forceinline__ void named_sync(int barrier, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void named_arrive(int barrier, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Like named_sync; how many of the threads came with `mine`.
__device__ __forceinline__ uint32 named_count(int barrier, int count, bool mine) {
  uint32 found;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nbar.red.popc.u32 %0, %1, %2, p;\n}"
               : "=r"(found)
               : "r"(barrier), "r"(count), "r"(static_cast<uint32>(mine)));
  return found;
}

// Registers that a block of so many threads has, to be shared out anew.
template <int kThreads>
constexpr int kRegistersOfBlock = 65536 / kThreads / 8 * 8 * kThreads;

template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- wgmma ---
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// After wgmma_wait: nothing of `x`, which products write, is read before.
template <int kCount>
__device__ __forceinline__ void finished(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// wgmma_wait<0> behind the arithmetic that `result`, which is never negative, comes from: the products run under that.
// ptxas moves a wait before arithmetic that does not need it, but not past a branch; this one is never taken.
__device__ __forceinline__ void wgmma_wait_behind(float result) {
  if (result < 0.f) __syncwarp();
  wgmma_wait<0>();
}

// What describes a tile in shared memory to wgmma, in two halves. The high one: the 128-byte swizzle, rows of 64 16-bit
// elements, and the bytes from 8 rows to the next 8, kEightRows where they do not follow each other. The low one is the
// address, in units of 16 bytes, and `atom_stride` (bytes), which leads to the next 64 columns where those are the
// product's N (v); it is unused where they are its K (q and k).
constexpr int kEightRows = 8 * 128;
template <int kEightRowsOfIt>
constexpr uint32 kDescriptorHigh = 0x40000000u | kEightRowsOfIt >> 4;
__device__ __forceinline__ uint32 tile_descriptor(uint32 shared, uint32 atom_stride) {
  return (shared & 0x3ffff) >> 4 | atom_stride >> 4 << 16;
}

// Bytes `offset` further in the same tile.
__device__ __forceinline__ uint32 descriptor_at(uint32 descriptor, uint32 offset) { return descriptor + (offset >> 4); }

// Operands of a product's accumulators: how they are numbered, and what they are.
#define S2O_NUMBERS_16                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define S2O_NUMBERS_32                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "             \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define S2O_NUMBERS_64                                                                                \
  S2O_NUMBERS_32 ", "                                                                                 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                  \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define S2O_NUMBERS_96                                                                                \
  S2O_NUMBERS_64 ", "                                                                                 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define S2O_NUMBERS_128                                                                               \
  S2O_NUMBERS_64 ", "                                                                                 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                  \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                  \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define S2O_ACCUMULATORS_16                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),     \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define S2O_ACCUMULATORS_32                                                                           \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),                 \
  "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),             \
  "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),          \
  "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),          \
  "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define S2O_ACCUMULATORS_64                                                                           \
  S2O_ACCUMULATORS_32,                                                                                \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]),          \
  "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]),          \
  "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]),          \
  "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),          \
  "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define S2O_ACCUMULATORS_96                                                                           \
  S2O_ACCUMULATORS_64,                                                                                \
  "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
  "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define S2O_ACCUMULATORS_128                                                                          \
  S2O_ACCUMULATORS_96,                                                                                \
  "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
  "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// d[64, N] (+)= a[64, 16] b[16, N]. SS: a and b in shared memory, both with K contiguous. RS: a in registers, b in
// shared memory with N contiguous. kEightRowsOfB: from 8 rows of b in shared memory to the next 8, in bytes.
#define S2O_WGMMA_SS_N192(TYPE)                                                                       \
  asm volatile(                                                                                       \
      "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %98, 0;\n"                                 \
      "mov.b64 da, {%96, %99};\nmov.b64 db, {%97, %100};\n"                                           \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " "                                \
      "{" S2O_NUMBERS_96 "}, da, db, p, 1, 1, 0, 0;\n}"                                               \
      : S2O_ACCUMULATORS_96                                                                           \
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorHigh<kEightRows>), "n"(kDescriptorHigh<kEightRowsOfB>))

#define S2O_WGMMA_SS_N128(TYPE)                                                                       \
  asm volatile(                                                                                       \
      "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %66, 0;\n"                                 \
      "mov.b64 da, {%64, %67};\nmov.b64 db, {%65, %68};\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                                \
      "{" S2O_NUMBERS_64 "}, da, db, p, 1, 1, 0, 0;\n}"                                               \
      : S2O_ACCUMULATORS_64                                                                           \
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorHigh<kEightRows>), "n"(kDescriptorHigh<kEightRowsOfB>))

#define S2O_WGMMA_SS_N64(TYPE)                                                                        \
  asm volatile(                                                                                       \
      "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %34, 0;\n"                                 \
      "mov.b64 da, {%32, %35};\nmov.b64 db, {%33, %36};\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "                                 \
      "{" S2O_NUMBERS_32 "}, da, db, p, 1, 1, 0, 0;\n}"                                               \
      : S2O_ACCUMULATORS_32                                                                           \
      : "r"(a), "r"(b), "r"(accumulate), "n"(kDescriptorHigh<kEightRows>), "n"(kDescriptorHigh<kEightRowsOfB>))

#define S2O_WGMMA_RS_N256(TYPE)                                                                       \
  asm volatile(                                                                                       \
      "{\n.reg .pred p;\n.reg .b64 db;\nsetp.ne.b32 p, %133, 0;\n"                                    \
      "mov.b64 db, {%132, %134};\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " "                                \
      "{" S2O_NUMBERS_128 "}, {%128, %129, %130, %131}, db, p, 1, 1, 1;\n}"                           \
      : S2O_ACCUMULATORS_128                                                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kDescriptorHigh<kEightRowsOfB>))

// TRANSPOSED: "1", b is rows of N; "0", rows of K.
#define S2O_WGMMA_RS_N128(TYPE, TRANSPOSED)                                                           \
  asm volatile(                                                                                       \
      "{\n.reg .pred p;\n.reg .b64 db;\nsetp.ne.b32 p, %69, 0;\n"                                     \
      "mov.b64 db, {%68, %70};\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                                \
      "{" S2O_NUMBERS_64 "}, {%64, %65, %66, %67}, db, p, 1, 1, " TRANSPOSED ";\n}"                   \
      : S2O_ACCUMULATORS_64                                                                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kDescriptorHigh<kEightRowsOfB>))

#define S2O_WGMMA_RS_N64(TYPE, TRANSPOSED)                                                            \
  asm volatile(                                                                                       \
      "{\n.reg .pred p;\n.reg .b64 db;\nsetp.ne.b32 p, %37, 0;\n"                                     \
      "mov.b64 db, {%36, %38};\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "                                 \
      "{" S2O_NUMBERS_32 "}, {%32, %33, %34, %35}, db, p, 1, 1, " TRANSPOSED ";\n}"                   \
      : S2O_ACCUMULATORS_32                                                                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kDescriptorHigh<kEightRowsOfB>))

// b is rows of K.
#define S2O_WGMMA_RS_N32(TYPE)                                                                        \
  asm volatile(                                                                                       \
      "{\n.reg .pred p;\n.reg .b64 db;\nsetp.ne.b32 p, %21, 0;\n"                                     \
      "mov.b64 db, {%20, %22};\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " "                                 \
      "{" S2O_NUMBERS_16 "}, {%16, %17, %18, %19}, db, p, 1, 1, 0;\n}"                                \
      : S2O_ACCUMULATORS_16                                                                           \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kDescriptorHigh<kEightRowsOfB>))

template <class Element>
struct Wgmma;

#define S2O_WGMMA(ELEMENT, TYPE)                                                                      \
  template <>                                                                                         \
  struct Wgmma<ELEMENT> {                                                                             \
    template <int kEightRowsOfB = kEightRows>                                                         \
    static __device__ __forceinline__ void ss(float (&d)[96], uint32 a, uint32 b, int accumulate) {   \
      S2O_WGMMA_SS_N192(TYPE);                                                                        \
    }                                                                                                 \
    template <int kEightRowsOfB = kEightRows>                                                         \
    static __device__ __forceinline__ void ss(float (&d)[64], uint32 a, uint32 b, int accumulate) {   \
      S2O_WGMMA_SS_N128(TYPE);                                                                        \
    }                                                                                                 \
    template <int kEightRowsOfB = kEightRows>                                                         \
    static __device__ __forceinline__ void ss(float (&d)[32], uint32 a, uint32 b, int accumulate) {   \
      S2O_WGMMA_SS_N64(TYPE);                                                                         \
    }                                                                                                 \
    template <int kEightRowsOfB = kEightRows>                                                         \
    static __device__ __forceinline__ void rs(float (&d)[128], const uint32 (&a)[4], uint32 b, int accumulate) { \
      S2O_WGMMA_RS_N256(TYPE);                                                                        \
    }                                                                                                 \
    template <int kEightRowsOfB = kEightRows>                                                         \
    static __device__ __forceinline__ void rs(float (&d)[64], const uint32 (&a)[4], uint32 b, int accumulate) { \
      S2O_WGMMA_RS_N128(TYPE, "1");                                                                   \
    }                                                                                                 \
    template <int kEightRowsOfB = kEightRows>                                                         \
    static __device__ __forceinline__ void rs_rows(float (&d)[64], const uint32 (&a)[4], uint32 b,    \
                                                   int accumulate) {                                  \
      S2O_WGMMA_RS_N128(TYPE, "0");                                                                   \
    }                                                                                                 \
    template <int kEightRowsOfB = kEightRows>                                                         \
    static __device__ __forceinline__ void rs_rows(float (&d)[16], const uint32 (&a)[4], uint32 b,    \
                                                   int accumulate) {                                  \
      S2O_WGMMA_RS_N32(TYPE);                                                                         \
    }                                                                                                 \
    template <int kEightRowsOfB = kEightRows>                                                         \
    static __device__ __forceinline__ void rs(float (&d)[32], const uint32 (&a)[4], uint32 b, int accumulate) { \
      S2O_WGMMA_RS_N64(TYPE, "1");                                                                    \
    }                                                                                                 \
    template <int kEightRowsOfB = kEightRows>                                                         \
    static __device__ __forceinline__ void rs_rows(float (&d)[32], const uint32 (&a)[4], uint32 b,    \
                                                   int accumulate) {                                  \
      S2O_WGMMA_RS_N64(TYPE, "0");                                                                    \
    }                                                                                                 \
  };
S2O_WGMMA(Float16, "f16")
S2O_WGMMA(Bfloat16, "bf16")
#undef S2O_WGMMA
#undef S2O_WGMMA_SS_N192
#undef S2O_WGMMA_SS_N128
#undef S2O_WGMMA_SS_N64
#undef S2O_WGMMA_RS_N256
#undef S2O_WGMMA_RS_N128
#undef S2O_WGMMA_RS_N64
#undef S2O_WGMMA_RS_N32
#undef S2O_ACCUMULATORS_128
#undef S2O_ACCUMULATORS_96
#undef S2O_ACCUMULATORS_64
#undef S2O_ACCUMULATORS_32
#undef S2O_ACCUMULATORS_16
#undef S2O_NUMBERS_128
#undef S2O_NUMBERS_96
#undef S2O_NUMBERS_64
#undef S2O_NUMBERS_32
#undef S2O_NUMBERS_16

}  // namespace s2o
