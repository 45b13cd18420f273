// How the candidates of a segment of the last queries are cut into parts (s2o_cupy/plan/last_queries.py).
#pragma once
#include "common/geometry.cuh"

namespace s2o {

constexpr int kLeastPartKeys = 1024, kPartGrain = 128;

// Part number `part` of `parts`: of the keys before the segment's dense ones as many equal parts as `most_parts`, if
// these are not too short. Without causality the last part is of the keys after them.
struct KeyPart {
  int begin, keys;
  __device__ __forceinline__ KeyPart(const Geometry& g, int segment, int part, int parts, int most_parts) {
    const int before = g.dense_begin(segment), after = g.dense_end(segment);
    if (!g.is_causal && part == parts - 1) {
      begin = after;
      keys = g.seqlen_k - after;
      return;
    }
    const int64 grains = (static_cast<int64>(before) + most_parts * kPartGrain - 1) / (most_parts * kPartGrain);
    const int64 each = max(grains * kPartGrain, static_cast<int64>(kLeastPartKeys));
    begin = static_cast<int>(min(part * each, static_cast<int64>(before)));
    keys = static_cast<int>(min(each, static_cast<int64>(before - begin)));
  }
};

}  // namespace s2o
