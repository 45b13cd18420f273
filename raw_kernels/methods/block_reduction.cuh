// Sums, maxima and counts over all threads of a block, the same on every run.
#pragma once
#include "common/ptx.cuh"

namespace s2o {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2) x += __shfl_xor_sync(kFullWarp, x, stride);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, stride));
  return x;
}

template <int kWarps>
struct ReductionShared {
  float sums[2][kWarps];
  int counts[2][kWarps];
};

// Turns between two places, so that one barrier is enough.
template <int kWarps>
struct BlockReduction {
  ReductionShared<kWarps>& shared;
  int turn = 0;
  __device__ __forceinline__ float sum(float x) {
    const float* of = all(warp_sum(x));
    float total = of[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += of[w];
    return total;
  }
  __device__ __forceinline__ float most(float x) {
    const float* of = all(warp_max(x));
    float total = of[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total = fmaxf(total, of[w]);
    return total;
  }
  // How many threads before this one have it, and how many of all.
  __device__ __forceinline__ int2 count(bool has) {
    const uint32 votes = __ballot_sync(kFullWarp, has);
    const int warp = threadIdx.x / 32;
    turn ^= 1;
    if (threadIdx.x % 32 == 0) shared.counts[turn][warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << threadIdx.x % 32) - 1)), all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? shared.counts[turn][w] : 0;
      all += shared.counts[turn][w];
    }
    return make_int2(before, all);
  }
  // The sum of the threads' numbers before this one, and of all.
  __device__ __forceinline__ int2 places(int mine) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int upto = mine;
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) {
      const int x = __shfl_up_sync(kFullWarp, upto, stride);
      upto += lane >= stride ? x : 0;
    }
    turn ^= 1;
    if (lane == 31) shared.counts[turn][warp] = upto;
    __syncthreads();
    int before = upto - mine, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? shared.counts[turn][w] : 0;
      all += shared.counts[turn][w];
    }
    return make_int2(before, all);
  }

 private:
  __device__ __forceinline__ const float* all(float x) {
    turn ^= 1;
    if (threadIdx.x % 32 == 0) shared.sums[turn][threadIdx.x / 32] = x;
    __syncthreads();
    return shared.sums[turn];
  }
};

}  // namespace s2o
