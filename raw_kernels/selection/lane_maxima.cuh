// Maxima of a product's columns: what the lanes of a warp do once each has those of its own rows.
#pragma once
#include "selection/sortable.cuh"

namespace s2o {

// Stores without a branch, around which lanes would have to meet again.
__device__ __forceinline__ void store_if(bool wanted, uint16* target, uint16 score) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.b16 [%0], %1; }"
               :: "l"(__cvta_generic_to_global(target)), "h"(score), "r"(static_cast<uint32>(wanted)) : "memory");
}

// Chooses without a branch: lanes of a warp that choose otherwise would part there, and meet again at each shuffle.
__device__ __forceinline__ float choose(bool first, float a, float b) {
  float y;
  asm("{ .reg .pred p; setp.ne.u32 p, %3, 0; selp.f32 %0, %1, %2, p; }"
      : "=f"(y) : "f"(a), "f"(b), "r"(static_cast<uint32>(first)));
  return y;
}

// Of 2 * kHalf numbers the lower lanes keep the first half, the upper ones the second, the larger of both lanes'.
template <int kHalf>
__device__ __forceinline__ void share_largest(float (&x)[8]) {
  const bool upper = threadIdx.x & 4 * kHalf;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float mine = choose(upper, x[i + kHalf], x[i]), theirs = choose(upper, x[i], x[i + kHalf]);
    x[i] = larger_or_nan(mine, __shfl_xor_sync(kFullWarp, theirs, 4 * kHalf));
  }
}

// The largest over lanes of equal lane % 4: a lane is left with the number lane / 4.
__device__ __forceinline__ float largest_of_lanes(float (&x)[8]) {
  share_largest<4>(x);
  share_largest<2>(x);
  share_largest<1>(x);
  return x[0];
}

}  // namespace s2o
