// The lines that vertical-slash chooses, and the keys that they cross.
//
//   choose_lines: sums [heads of the round, 2, seqlen_k] -> upto [heads of the round, 2, seqlen_k + 1]: how many of the
//                 first keys, or distances, are chosen
//   crossed_keys: upto -> lists of keys: those of chosen columns, and at a chosen distance of one of the row's queries
#include "methods/block_grid.cuh"
#include "methods/largest.cuh"

namespace s2o {

struct VerticalSlashParams {
  const float* sums;
  int* upto;
  int* entries;     // [batch * heads, list_entries]
  int64* begins;    // [batch * heads, rows]
  int* keys;        // likewise
  BlockGrid grid;   // columns are single keys
  int64 list_entries;
  int first_head;   // of the round
  int verticals, slashes, forced;
};

// Block: the columns or the distances of a head.
__device__ __forceinline__ void choose_lines(const VerticalSlashParams& p, LargestShared& shared) {
  const int seqlen = p.grid.seqlen_k, is_slash = blockIdx.x % 2;
  const float* sums = p.sums + static_cast<int64>(blockIdx.x) * seqlen;
  int* upto = p.upto + static_cast<int64>(blockIdx.x) * (seqlen + 1);
  const auto rank = [&](int i) { return rank_of(sums[i], i < p.forced); };
  const Largest largest = Largest::find(rank, seqlen, is_slash ? p.slashes : p.verticals, shared);
  for_largest(largest, rank, seqlen, shared, [&](int i, bool chosen, int before) {
    if (i == 0) upto[0] = 0;
    upto[i + 1] = before + chosen;
  });
}

constexpr int kCrossedThreads = 256, kCrossedWarps = kCrossedThreads / 32;

struct CrossedShared {
  ReductionShared<kCrossedWarps> reduction;
};

// Block: a row of a head.
__device__ __forceinline__ void crossed_keys(const VerticalSlashParams& p, CrossedShared& shared) {
  const BlockGrid& g = p.grid;
  const int count = g.rows(), row = count - 1 - static_cast<int>(blockIdx.x % count), head = blockIdx.x / count;
  const int first = g.listed(row), rows = min(g.block_q, g.seqlen_q - row * g.block_q), flat = p.first_head + head;
  const int* columns = p.upto + static_cast<int64>(head) * 2 * (g.seqlen_k + 1);
  const int* distances = columns + g.seqlen_k + 1;
  const int64 begin = flat * p.list_entries + g.begin(row);
  int* list = p.entries + begin;
  BlockReduction<kCrossedWarps> block{shared.reduction};
  constexpr int kEach = 8;  // neighbouring keys of a thread
  int chosen = 0;
  for (int from = 0; from < first; from += kCrossedThreads * kEach) {
    const int begin_key = from + static_cast<int>(threadIdx.x) * kEach;
    uint32 mine = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int j = min(begin_key + i, first - 1);
      const bool is_crossed = distances[min(first + rows - j, g.seqlen_k)] > distances[first - j];
      if (columns[j + 1] > columns[j] || is_crossed) mine |= static_cast<uint32>(begin_key + i < first) << i;
    }
    const int2 place = block.places(__popc(mine));
    int* to = list + chosen + place.x;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (mine >> i & 1) *to++ = begin_key + i;
    chosen += place.y;
  }
  if (threadIdx.x == 0) {
    p.begins[static_cast<int64>(flat) * count + row] = begin;
    p.keys[static_cast<int64>(flat) * count + row] = chosen;
  }
}

}  // namespace s2o
