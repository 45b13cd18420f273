// Floats as sortable integers, their maximum, and a small sort in shared memory.
#pragma once
#include "common/ptx.cuh"

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

// Puts the bitonic sequences of kCount neighbouring lanes in order, ascending or descending.
template <int kCount, class Slot>
__device__ __forceinline__ Slot merge_lanes(Slot mine, bool descending) {
  if (descending) mine = ~mine;
#pragma unroll
  for (int stride = kCount / 2; stride > 0; stride /= 2) {
    const Slot its = __shfl_xor_sync(kFullWarp, mine, stride);
    const bool upper = threadIdx.x & stride;  // keeps the larger
    if ((its < mine) != upper) mine = its;
  }
  return descending ? ~mine : mine;
}

// Sorts `count` slots, a power of two from 32 on, written before a barrier, ascending with the whole block: a bitonic
// sort. In steps with strides below 32 a warp's 32 slots are its own, in registers.
template <class Slot>
__device__ __forceinline__ void bitonic_sort(Slot* slots, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    Slot mine = merge_lanes<2>(slots[i], i & 2);
    mine = merge_lanes<4>(mine, i & 4);
    mine = merge_lanes<8>(mine, i & 8);
    mine = merge_lanes<16>(mine, i & 16);
    slots[i] = merge_lanes<32>(mine, i & 32);
  }
#pragma unroll 1
  for (int size = 64; size <= count; size *= 2) {
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
    for (int i = threadIdx.x; i < count; i += blockDim.x) slots[i] = merge_lanes<32>(slots[i], i & size);
  }
  __syncthreads();
}

}  // namespace s2o
