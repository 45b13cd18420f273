// How many leading keys the moments of a segment's candidates are taken from. The same formulas as s2o_cupy/spec:
// moment_group and moment_keys.
#pragma once
#include "common/geometry.cuh"

namespace s2o {

// Groups have 0 to 15 leading keys, then eight numbers of them for each power of two.
__device__ __forceinline__ int moment_group(int keys) {
  const int shift = max(0, 28 - __clz(keys | 1));  // keys >> shift is below 16
  return keys < 16 ? keys : 8 * shift + (keys >> shift);
}
__device__ __forceinline__ int moment_keys(int group) {
  const int shift = max(0, group / 8 - 1);
  return group < 16 ? group : (group - 8 * shift) << shift;
}

// The keys that its own are taken from: of its candidates, without causality of all keys.
__device__ __forceinline__ int moment_group(const Geometry& g, int segment) {
  return moment_group(g.is_causal ? g.dense_begin(segment) : g.seqlen_k);
}

}  // namespace s2o
