// Where a q tile's samples and moments are.
#pragma once
#include "common/attention_params.cuh"
#include "tail/moment_groups.cuh"
#include "tail/sample_sums.cuh"

namespace s2o {

// Number of a q tile's moments among all; `Params`: with groups.
template <class Params>
__device__ __forceinline__ int64 moments_of(const Params& p, const QueryTile& tile) {
  return static_cast<int64>(tile.batch(p.heads) * p.kv_heads + tile.kv_head(p.heads, p.kv_heads)) * p.groups +
         moment_group(p.geometry, tile.segment) - p.first_group;
}

// By a whole warp. A mean value is NaN where one of its covariances is not finite.
template <int kHeadDim>
__device__ __forceinline__ bool moments_are_finite(const float* mean_values) {
  bool finite = true;
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 32) finite &= fabsf(mean_values[d + threadIdx.x % 32]) < infinity();
  return __all_sync(kFullWarp, finite);
}

// How many of `left` unvisited candidates are sampled.
__device__ __forceinline__ int tail_samples(int left) {
  return left < spec::kTailFew ? kTailSamples / 2 : kTailSamples;
}
// Of `samples` number n stands at the square of (n + 1/2) / samples of the way through the candidates. n is below that.
__device__ __forceinline__ int sample_place(int n, int samples, int left) {
  constexpr int64 kMost = 4 * kTailSamples * kTailSamples;
  const int64 square = static_cast<int64>((2 * n + 1) * (2 * n + 1)) * left;
  return static_cast<int>(samples == kTailSamples ? square / kMost : square / (kMost / 4));
}

}  // namespace s2o
