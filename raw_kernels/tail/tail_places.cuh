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

// Sample i stands at the square of (i + 1/2) / kTailSamples of the way through the unvisited candidates.
__device__ __forceinline__ int sample_place(int i, int left) {
  return static_cast<int>(static_cast<int64>((2 * i + 1) * (2 * i + 1)) * left / (4 * kTailSamples * kTailSamples));
}

}  // namespace s2o
