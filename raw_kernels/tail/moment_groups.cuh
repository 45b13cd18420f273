// How many leading keys the moments of a segment's candidates are taken from, and which of these. The same formulas as
// s2o_cupy/spec: moment_group, moment_keys, moment_samples and moment_place.
#pragma once
#include "common/geometry.cuh"

namespace s2o {

constexpr int kMomentKeys = spec::kMomentKeys;
constexpr int kMomentShift = 11;
static_assert(1 << kMomentShift == kMomentKeys, "a shift divides");

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

// Sums are made of parts of the keys (part_moments.cu): those before part n are part_end(n) keys. With a grain of one key
// parts end where groups do; with 1 << grain_shift only where these are whole grains, as candidates of segments are
// (Geometry.grain_shift in s2o_cupy/spec).
__device__ __forceinline__ int part_end(int n, int grain_shift) { return moment_keys(n) << grain_shift; }

// Samples are the first 2 * kMomentKeys keys, and of those between two further powers of two kMomentKeys: each of equal
// shares of 1 << share_shift keys has one, somewhere in it, so that no period of the keys meets it.
__device__ __forceinline__ int share_shift(int sample) { return max(0, sample / kMomentKeys - 1); }

// How many samples are among the first keys, a group's.
__device__ __forceinline__ int moment_samples(int keys) {
  const int shift = max(0, 31 - __clz(keys | 1) - kMomentShift);  // of the shares of the last ones
  return shift == 0 ? keys : shift * kMomentKeys + (keys >> shift);
}
__device__ __forceinline__ int moment_place(int sample) {
  const int shift = share_shift(sample), i = sample % kMomentKeys;
  if (shift == 0) return sample;
  const uint32 part = static_cast<uint32>(i) * spec::kDrawStep;
  return (kMomentKeys + i << shift) + static_cast<int>(static_cast<uint64>(part) << shift >> 32);
}

}  // namespace s2o
