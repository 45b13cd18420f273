// Floats as sortable integers, their maximum, and a small sort in shared memory.
#pragma once
#include "ptx.cuh"

namespace s2o {

// An integer that grows with x. NaN is the greatest, so that it comes first in a descending order: a key or query
// that is not a number is looked at, not hidden. -0 equals 0.
__device__ __forceinline__ uint32 sortable(float x) {
  if (x != x) return 0xffffffffu;
  const uint32 bits = __float_as_uint(x == 0.f ? 0.f : x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The float that sortable() turned into `bits`, unless it was NaN.
__device__ __forceinline__ float from_sortable(uint32 bits) {
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

// The larger of two; NaN if one is.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Whether a score is finite as a float16, to which it is rounded.
__device__ __forceinline__ bool finite_score(float x) { return fabsf(x) < 65520.f; }

// The extremes of a row's finite scores, grown by atomics; `range` is (sortable(s), sortable(-s)), from 0 on. The result
// of an integer maximum does not depend on the order of blocks. Rounding is monotone, so it comes last.
__device__ __forceinline__ void grow_range(uint2* range, float largest, float smallest) {
  if (largest < smallest) return;  // nothing was finite
  atomicMax(&range->x, sortable(Float16::low(Float16::pack(largest, 0.f))));
  atomicMax(&range->y, sortable(-Float16::low(Float16::pack(smallest, 0.f))));
}

// Sorts a power of two of slots, written before a barrier, ascending with the whole block. In steps with strides below
// 64 a warp's 32 pairs are 64 slots of its own, so that only its lanes wait for each other.
__device__ __forceinline__ void bitonic_sort(uint64* slots, int count) {
  for (int size = 2; size <= count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      if (stride >= 32) {
        __syncthreads();  // the last step's pairs were of other warps
      } else {
        __syncwarp();
      }
      for (int i = threadIdx.x; i < count / 2; i += blockDim.x) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const uint64 a = slots[low], b = slots[high];
        if ((a > b) == ((low & size) == 0)) {
          slots[low] = b;
          slots[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

}  // namespace s2o
