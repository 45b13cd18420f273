// Rows as float32, and their sums over a block: the same on every run.
#pragma once
#include "common/geometry.cuh"

namespace s2o {

constexpr int kRankThreads = 256;

template <class Element_, int kHeadDim_>
struct RowTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kLanes = kHeadDim / 8;           // threads of a row, 8 elements each
  static constexpr int kRows = kRankThreads / kLanes;   // rows that a block reads at a time
  static constexpr int kSums = kRows * kHeadDim;        // of block_sum
};

// Eight elements as float32.
template <class Traits>
__device__ __forceinline__ void unpack_row(float (&x)[8], const uint4& packed) {
  const uint32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = Traits::Element::low(pairs[i]);
    x[2 * i + 1] = Traits::Element::high(pairs[i]);
  }
}

// Elements 8 * lane .. 8 * lane + 7 of a row as float32; zeros past head_dim.
template <class Traits>
__device__ __forceinline__ void read_row(float (&x)[8], const uint16* row, int lane, int head_dim, bool aligned) {
  uint4 packed = make_uint4(0, 0, 0, 0);
  if (aligned && lane * 8 + 8 <= head_dim) {
    packed = *reinterpret_cast<const uint4*>(row + lane * 8);
  } else {
    packed = load_unaligned(row, lane * 8, head_dim);
  }
  unpack_row<Traits>(x, packed);
}

// Adds up the threads' partial sums of rows, total[8] for 8 elements each: the sum of element d in thread d < kHeadDim.
// Every thread has added its rows in order and the partial sums are added in order: the same on every run.
template <class Traits>
__device__ __forceinline__ float block_sum(const float (&total)[8], float* sums) {
  const int lane = threadIdx.x % Traits::kLanes, slot = threadIdx.x / Traits::kLanes;
#pragma unroll
  for (int e = 0; e < 8; ++e) sums[slot * Traits::kHeadDim + lane * 8 + e] = total[e];
  __syncthreads();
  float sum = 0.f;
  if (threadIdx.x < Traits::kHeadDim) {
    for (int s = 0; s < Traits::kRows; ++s) sum += sums[s * Traits::kHeadDim + threadIdx.x];
  }
  __syncthreads();
  return sum;
}

}  // namespace s2o
