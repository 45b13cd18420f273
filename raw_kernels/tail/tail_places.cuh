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

// The sample of a half, number i of it, stands at the square of (n + 1/2) / kTailSamples of the way through the unvisited
// candidates, n = 2 i + half.
__device__ __forceinline__ int sample_place(int half, int i, int left) {
  const int64 odd = 2 * (2 * i + half) + 1;
  return static_cast<int>(odd * odd * left / (4 * kTailSamples * kTailSamples));
}

// How far the samples' own values are to be believed, by how two halves of them agree: of sums over elements.
__device__ __forceinline__ float agreement(float agreed, float both) {
  return agreed > 0.f ? __fdividef(4.f * agreed, both) : 0.f;
}

}  // namespace s2o
