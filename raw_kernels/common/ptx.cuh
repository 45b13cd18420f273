// One-instruction wrappers for sm_80 and newer, and the two 16-bit element types.
// No CUDA header is included: NVRTC compiles this text alone.
#pragma once

namespace s2o {

using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

inline constexpr uint32 kFullWarp = 0xffffffffu;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
  return most;
}

// Off by 2^-11 of the result or less.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes to shared memory.
__device__ __forceinline__ void cp_async_16(uint32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32 shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Copies 16 bytes if `present`, else writes zeros: a handful of instructions less than a size that varies.
__device__ __forceinline__ void cp_async_16_or_zeros(uint32 shared, const void* global, bool present) {
  asm volatile(
      "{\n.reg .pred absent;\nsetp.eq.s32 absent, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, absent;\n}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(present))
      : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32 (&r)[4], uint32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(uint32 (&r)[4], uint32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32 shared) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

__device__ __forceinline__ uint32 load_shared_4(uint32 shared) {
  uint32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ uint32 load_shared_2(uint32 shared) {
  uint16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_2(uint32 shared, uint32 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(static_cast<uint16>(x)) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32 shared, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32 shared, uint32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

// As one store: of a uint4 that is put together where it is stored, the compiler may make four.
__device__ __forceinline__ void store_global_16(void* global, uint32 x, uint32 y, uint32 z, uint32 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// The same of what is read once, much later: it should not push out of the L2 cache what is read often.
__device__ __forceinline__ void store_global_16_streamed(void* global, uint4 x) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// 16 bytes of global memory if `present`, else zeros.
__device__ __forceinline__ uint4 load_16_or_zeros(const void* global, bool present) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred present;\nsetp.ne.s32 present, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@present ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(global), "r"(static_cast<int>(present)));
  return x;
}

__device__ __forceinline__ uint32 load_4_or_zeros(const void* global, bool present) {
  uint32 x;
  asm volatile("{\n.reg .pred present;\nsetp.ne.s32 present, %2, 0;\nmov.b32 %0, 0;\n@present ld.global.u32 %0, [%1];\n}"
               : "=&r"(x)
               : "l"(global), "r"(static_cast<int>(present)));
  return x;
}

// An element type says how it converts and multiplies; its values travel as uint16 or packed uint32.
struct Float16 {
  static constexpr uint32 kExponentMask = 0x7c007c00u;  // both halves of a packed pair
  static constexpr bool kWide = false;                   // the exponents of float32
  static constexpr float kLargest = 65504.f;             // finite
  static constexpr int kPartBits = 11;  // times 2^11, what rounding leaves of a float32 is in range again

  static __device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float to_float(uint16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
  static __device__ __forceinline__ float low(uint32 packed) { return to_float(static_cast<uint16>(packed)); }
  static __device__ __forceinline__ float high(uint32 packed) { return to_float(static_cast<uint16>(packed >> 16)); }

  // Of both halves of packed pairs; a number where only one is NaN.
  static __device__ __forceinline__ uint32 larger(uint32 a, uint32 b) {
    uint32 y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
  // Of both halves; NaN where one is.
  static __device__ __forceinline__ uint32 larger_or_nan(uint32 a, uint32 b) {
    uint32 y;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
  static __device__ __forceinline__ uint32 smaller(uint32 a, uint32 b) {
    uint32 y;
    asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }

  // d[16, 8] += a[16, 16] b[16, 8], float32 accumulation
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct Bfloat16 {
  static constexpr uint32 kExponentMask = 0x7f807f80u;
  static constexpr bool kWide = true;
  static constexpr int kPartBits = 0;

  static __device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
  static __device__ __forceinline__ float to_float(uint16 bits) {
    return __int_as_float(static_cast<int>(static_cast<uint32>(bits) << 16));
  }
  static __device__ __forceinline__ float low(uint32 packed) { return __int_as_float(static_cast<int>(packed << 16)); }
  static __device__ __forceinline__ float high(uint32 packed) {
    return __int_as_float(static_cast<int>(packed & 0xffff0000u));
  }

  static __device__ __forceinline__ void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// True if one of the packed pair is NaN or infinite.
template <class Element>
__device__ __forceinline__ bool has_nonfinite(uint32 packed) {
  constexpr uint32 low = Element::kExponentMask & 0xffffu, high = Element::kExponentMask & 0xffff0000u;
  return (packed & low) == low || (packed & high) == high;
}

// Elements [first, first + 8) of a row whose start has no 16-byte alignment; zeros past head_dim.
__device__ __forceinline__ uint4 load_unaligned(const uint16* row, int first, int head_dim) {
  uint32 packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = first + 2 * i;
    const uint32 low = c < head_dim ? row[c] : 0, high = c + 1 < head_dim ? row[c + 1] : 0;
    packed[i] = low | high << 16;
  }
  return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

}  // namespace s2o
