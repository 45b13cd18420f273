// A part of a row's candidates, and how their scores are read.
#pragma once
#include "rank_keys_params.cuh"
#include "sortable.cuh"

namespace s2o {

// A block takes one part, and parts of a row stand next to each other: few rows are then in flight, and the scattered
// writes of each meet in L2 before they leave it.
struct RowPart {
  int first, count;  // candidates of the part
  int part, parts;   // of the row's
  int64 row;         // of the chunk
  int dense_begin, dense_keys;

  __device__ __forceinline__ explicit RowPart(const RankKeysParams& p) {
    uint32 block = blockIdx.x;
    part = block % p.parts;
    block /= p.parts;
    const int segment = p.chunk.first_segment + p.chunk.segments - 1 - static_cast<int>(block / p.chunk.heads);
    row = p.chunk.row(p.chunk.first_head + static_cast<int>(block % p.chunk.heads), segment);
    const int candidates = p.geometry.candidates(segment);
    parts = (candidates + spec::kSortPart - 1) / spec::kSortPart;
    first = part * spec::kSortPart;
    count = min(spec::kSortPart, candidates - first);
    dense_begin = p.geometry.dense_begin(segment);
    dense_keys = p.geometry.dense_end(segment) - dense_begin;
  }
  __device__ __forceinline__ int key(int candidate) const {
    return candidate < dense_begin ? candidate : candidate + dense_keys;
  }
  // Whether candidates [c, c + 8) of the part are there and stand side by side, but for the gap that the dense keys
  // leave.
  __device__ __forceinline__ bool eight(int c) const {
    return c + 8 <= count && (dense_keys == 0 || first + c + 8 <= dense_begin);
  }
  // Scores of candidates [c, c + 8) of the part one by one; minus infinity past its end.
  __device__ __forceinline__ uint4 gathered(const uint16* scores, int c) const {
    uint32 pairs[4];
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const auto score = [&](int i) -> uint32 { return i < count ? scores[key(first + i)] : 0xfc00u; };
      pairs[e / 2] = score(c + e) | score(c + e + 1) << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

}  // namespace s2o
