// A sort of 16-bit numbers in registers, two independent ones in the halves of each: numbers are the bits of float16
// from 0 to infinity, which its minimum and maximum order like integers.
//
// A lane sorts its kOfLane numbers (Batcher's network); then runs of twice as many lanes are merged (a bitonic merge,
// whose first step compares each number with the other run's mirror image, so that all comparisons have one direction).
#pragma once
#include "common/ptx.cuh"

namespace s2o {

constexpr int kOfLane = 32;

__device__ __forceinline__ void compare_exchange(uint32& a, uint32& b) {
  const uint32 smaller = Float16::smaller(a, b);
  b = Float16::larger(a, b);
  a = smaller;
}

// From the step of distance k that merges runs of p numbers on.
template <int p = 1, int k = p>
__device__ __forceinline__ void sort_lane(uint32 (&x)[kOfLane]) {
#pragma unroll
  for (int i = k % p; i + k < kOfLane; ++i)
    if ((i - k % p) / k % 2 == 0 && i / (2 * p) == (i + k) / (2 * p)) compare_exchange(x[i], x[i + k]);
  if constexpr (k > 1) {
    sort_lane<p, k / 2>(x);
  } else if constexpr (2 * p < kOfLane) {
    sort_lane<2 * p>(x);
  }
}

// Signs of packed pairs, as factors of float16.
__device__ __forceinline__ uint32 sign_if(bool negative) { return negative ? 0xbc00bc00u : 0x3c003c00u; }
__device__ __forceinline__ uint32 times(uint32 a, uint32 b) {
  uint32 y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32 negated(uint32 x) {
  uint32 y;
  asm("neg.f16x2 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Sorts over kLanes neighbouring lanes: lane t of them gets numbers [t * kOfLane, + kOfLane).
//
// Loops stay loops: a warp runs through this once, and more code would wait for its instructions.
//
// Of two lanes that compare the upper one keeps the larger number. It does so as the lower one does, by a minimum, of
// negated numbers: multiplications for the sign run beside minima, selections would not.
template <int kLanes>
__device__ __forceinline__ void sort_lanes(uint32 (&x)[kOfLane]) {
  sort_lane(x);
#pragma unroll 1
  for (int run = 1; run < kLanes; run *= 2) {
    uint32 sign = sign_if(threadIdx.x & run);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) x[i] = times(x[i], sign);
#pragma unroll
    for (int i = 0; i < kOfLane / 2; ++i) {
      uint32 &a = x[i], &b = x[kOfLane - 1 - i];
      const uint32 theirs_b = __shfl_xor_sync(kFullWarp, b, 2 * run - 1);
      const uint32 theirs_a = __shfl_xor_sync(kFullWarp, a, 2 * run - 1);
      a = Float16::smaller(a, negated(theirs_b));
      b = Float16::smaller(b, negated(theirs_a));
    }
#pragma unroll 1
    for (int step = run / 2; step > 0; step /= 2) {
      const uint32 change = sign_if(!(threadIdx.x & (2 * step)) != !(threadIdx.x & step));
      sign = sign_if(threadIdx.x & step);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        x[i] = times(x[i], change);
        x[i] = Float16::smaller(x[i], negated(__shfl_xor_sync(kFullWarp, x[i], step)));
      }
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) x[i] = times(x[i], sign);
#pragma unroll
    for (int distance = kOfLane / 2; distance > 0; distance /= 2)
#pragma unroll
      for (int i = 0; i < kOfLane; ++i)
        if ((i & distance) == 0) compare_exchange(x[i], x[i + distance]);
  }
}

}  // namespace s2o
