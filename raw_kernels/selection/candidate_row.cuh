// A row of scores: the whole units among the candidates of a (head, segment) pair, and where each stands. A unit is a
// key, or several neighbours; here each is called a candidate, and its number its key.
#pragma once
#include "selection/rank_keys_params.cuh"

namespace s2o {

struct CandidateRow {
  int64 row;    // of the chunk
  int head;     // flattened
  int64 pair;   // of all (head, segment) pairs
  int64 place;  // of its scores and of its order
  int count;    // candidates
  int dense_begin, dense_keys;
  int short_unit = -1;  // the last of the keys where it is a candidate and not whole, else -1

  // Candidates that stand side by side.
  __device__ __forceinline__ CandidateRow(int64 row, int64 place, int count)
      : row(row), head(-1), pair(-1), place(place), count(count), dense_begin(count), dense_keys(0) {}
  __device__ __forceinline__ CandidateRow(const RankKeysParams& p, int head, int segment)
      : row(p.chunk.row(head, segment)),
        head(head),
        pair(static_cast<int64>(head) * p.geometry.segments() + segment),
        place(p.chunk.place(head, segment)),
        count(p.geometry.ranked(segment)),
        dense_begin(p.geometry.dense_begin(segment) >> p.geometry.unit_shift),
        dense_keys(p.geometry.units() - count),
        short_unit(p.geometry.candidates(segment) & p.geometry.unit_mask() ? p.geometry.units() : -1) {}
  // Longer rows first: `index` counts (head, segment) pairs from the chunk's last segment on, heads fastest.
  __device__ __forceinline__ CandidateRow(const RankKeysParams& p, uint32 index)
      : CandidateRow(p, p.chunk.first_head + static_cast<int>(index % p.chunk.heads),
                     p.chunk.first_segment + p.chunk.segments - 1 - static_cast<int>(index / p.chunk.heads)) {}
  // Whether dense keys stand between candidates.
  __device__ __forceinline__ bool gap() const { return dense_begin < count; }
  __device__ __forceinline__ int key(int candidate) const {
    return candidate < dense_begin ? candidate : candidate + dense_keys;
  }
  // Whether candidates [c, c + 8) are there and their scores stand side by side from 16 bytes on.
  __device__ __forceinline__ bool eight(int c) const {
    return c + 8 <= count && (c >= dense_begin ? (c + dense_keys) % 8 == 0 : c + 8 <= dense_begin);
  }
  // Scores of candidates [c, c + 8) one by one, in little code; `absent` past the end.
  __device__ __forceinline__ uint4 gathered(const uint16* scores, int c, uint32 absent) const {
    uint64 low = 0, high = 0;
#pragma unroll 1
    for (int i = c + 7; i >= c; --i) {
      high = high << 16 | low >> 48;
      low = low << 16 | (i < count ? scores[key(i)] : absent);
    }
    return make_uint4(low, low >> 32, high, high >> 32);
  }
};

}  // namespace s2o
