// How the candidates of a segment of the last queries are cut into parts (s2o_cupy/plan/last_queries.py).
#pragma once
#include "common/geometry.cuh"

namespace s2o {

constexpr int kPartKeys = 4096, kMostParts = 16, kLeastPartKeys = 1024, kPartGrain = 128;

// Part number `part` of `parts`: of the keys before the segment's dense ones as many equal parts as they need, each of
// kPartKeys or twice, four times, ... as many. A call of few heads would leave multiprocessors without one: there parts
// have fewer keys, if these make no more than `even_parts`. Without causality the last part is of the keys after them.
struct KeyPart {
  int begin, keys;
  __device__ __forceinline__ KeyPart(const Geometry& g, int segment, int part, int parts, int even_parts) {
    const int before = g.dense_begin(segment), after = g.dense_end(segment);
    if (!g.is_causal && part == parts - 1) {
      begin = after;
      keys = g.seqlen_k - after;
      return;
    }
    int64 each = kPartKeys;
    while (each * kMostParts < before) each *= 2;
    const int even = (before / even_parts / kPartGrain + 1) * kPartGrain;
    each = min(each, static_cast<int64>(max(even, kLeastPartKeys)));
    begin = static_cast<int>(min(part * each, static_cast<int64>(before)));
    keys = static_cast<int>(min(each, static_cast<int64>(before - begin)));
  }
};

}  // namespace s2o
