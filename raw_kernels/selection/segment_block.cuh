// What a block of unit_weights has: kSegments neighbouring segments of a head, the longest first; heads side by side,
// which share keys.
#pragma once
#include "selection/rank_keys_params.cuh"

namespace s2o {

// Whether a unit has a key of the last near_keys before a causal segment.
__device__ __forceinline__ bool is_near(const RankKeysParams& p, int segment, int unit) {
  const int keys = p.geometry.query_begin(segment) + p.geometry.offset() - p.near_keys;  // before them
  return p.near_keys && unit >= max(0, keys) >> p.geometry.unit_shift;
}

template <int kSegments, int kHeadDim, int kUnitKeys = 2>
struct SegmentBlock {
  const RankKeysParams& p;
  int head;
  int first;  // segment, of the chunk
  int end;    // of the units that some segment of the block ranks
  int part;   // of these, where `parts` blocks share them

  __device__ __forceinline__ explicit SegmentBlock(const RankKeysParams& p_, int parts = 1) : p(p_) {
    const int blocks = (p.chunk.segments + kSegments - 1) / kSegments, of_head = blockIdx.x / p.chunk.heads;
    head = p.chunk.first_head + blockIdx.x % p.chunk.heads;
    first = (blocks - 1 - of_head / parts) * kSegments;
    part = of_head % parts;
    end = units_of(segment(kSegments - 1));
  }
  // Past the chunk's last segment there is none, and the last one stands in.
  __device__ __forceinline__ bool there(int i) const { return first + i < p.chunk.segments; }
  __device__ __forceinline__ int segment(int i) const {
    return p.chunk.first_segment + min(first + i, p.chunk.segments - 1);
  }
  // Scores lie by unit: without causality also of units between a segment's candidates.
  __device__ __forceinline__ int units_of(int n) const {
    return p.geometry.is_causal ? p.geometry.ranked(n) : p.geometry.units();
  }
  __device__ __forceinline__ int64 kv_head() const {
    return head / p.heads * p.kv_heads + head % p.heads / (p.heads / p.kv_heads);
  }
  // The head's, [units, kUnitKeys, kHeadDim].
  __device__ __forceinline__ const uint16* unit_keys() const {
    return p.unit_keys + kv_head() * p.geometry.units() * kUnitKeys * kHeadDim;
  }
  // Pooled query r of segment n, [kHeadDim]. What is not there, or an empty run, is stood in for by the first, which
  // changes no maximum.
  __device__ __forceinline__ const uint16* pooled(int n, int r) const {
    const bool is_pooled = r < p.pooled_queries && r * p.run < p.geometry.query_count(n);
    const int64 row = (static_cast<int64>(head) * p.geometry.segments() + n) * p.pooled_queries + (is_pooled ? r : 0);
    return p.means + row * kHeadDim;
  }
};

}  // namespace s2o
