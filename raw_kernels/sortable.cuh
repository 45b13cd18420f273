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

// The larger of two; NaN if one is.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Sorts `count` slots, a power of two from 32 on, written before a barrier, ascending with the whole block: a bitonic
// sort. In steps with strides below 32 a warp's 32 slots are its own, in registers.
template <class Slot>
__device__ __forceinline__ void bitonic_sort(Slot* slots, int count) {
#pragma unroll 1
  for (int size = 32; size <= count; size *= 2) {
#pragma unroll 1
    for (int stride = size / 2; stride >= 32; stride /= 2) {
      __syncthreads();  // the last step's slots were of other warps
      for (int i = threadIdx.x; i < count / 2; i += blockDim.x) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const Slot a = slots[low], b = slots[high];
        if ((a > b) == ((low & size) == 0)) {
          slots[low] = b;
          slots[high] = a;
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      Slot mine = slots[i];
      for (int merged = size == 32 ? 2 : size; merged <= size; merged *= 2)
        for (int stride = min(merged, 32) / 2; stride > 0; stride /= 2) {
          const Slot its = __shfl_xor_sync(kFullWarp, mine, stride);
          const bool smaller = ((i & stride) == 0) == ((i & merged) == 0);  // is what this lane keeps
          if ((its < mine) == smaller) mine = its;
        }
      slots[i] = mine;
    }
  }
  __syncthreads();
}

}  // namespace s2o
