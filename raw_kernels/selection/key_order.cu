// The order of a row's candidates by score (the paper's Algorithm 1, line 19); reference/key_order.py defines it.
//
//   key_strata: candidates are dealt to strata, each is sorted by itself, and the order takes from all strata in turn:
//               the best of each, then the second best, and so on. For rows of more than kOrderWhole candidates.
//   key_middle: the same with the first kMiddle of these, of rows of more than kMiddleFrom
//   key_order_head: the first kOrderHead of that order, or all of a row of no more, sorted by bucket, stable; and how many
//               keys the units among them have that weigh a part of tau or more, which no q tile stops before
//   key_order_whole: the same of rows between these, of up to kOrderWhole candidates, all of them
//   key_order_short: takes the place of key_order_head in a launch whose rows all have up to 4,096 candidates: fewer threads
//               leave fewer empty places to sort
//
//   Rows that visit all candidates have them in the order of their positions: q tiles side by side, which are the
//   longest of all, then read the same keys at the same time, from L2.
//
//   rows are (head, segment) pairs of the chunk; Chunk::place says where their scores and orders are
//
// No atomic decides a place: the order is the same on every run.
#include "selection/candidate_row.cuh"
#include "selection/radix_sort.cuh"
#include "selection/register_sort.cuh"
#include "selection/strata.cuh"

namespace s2o {

constexpr int kShortThreads = 128, kOrderThreads = 256, kWholeThreads = 512;
static_assert(spec::kOrderHead == kOrderThreads * kMostOfThread && spec::kOrderWhole == kWholeThreads * kMostOfThread);
constexpr int kPairLanes = spec::kStratum / kOfLane;     // lanes that sort a pair of strata
constexpr int kBlockPairs = kOrderThreads / kPairLanes;  // of a block of key_strata
constexpr uint32 kAbsent = 0x7fff;      // a score that is not there: NaN, so outside every range
constexpr uint32 kLastNumber = 0x7c00;  // above all others
static_assert((spec::kKeyLevels - 1) * spec::kStratum + spec::kStratum - 1 < kLastNumber,
              "level and index as a float16");
static_assert(spec::kStratum == 256 && spec::kKeyLevels <= 256, "a byte each");

struct StrataShared {
  uint32 sorted[spec::kStratum][kBlockPairs];  // by rank: indices in the two strata of a pair
  int chunks[kBlockPairs][Strata::kLayers];    // the first candidate of each pair's chunks, plus 1 if it is swapped
};

// Where the number of a rank stands in a row of StrataShared: lanes that write theirs at a time find different banks.
__device__ __forceinline__ int slot_at(int rank, int slot) { return slot ^ rank / kOfLane * 4; }

// Thread: kOfLane candidates of each stratum of a pair, in the halves of x: 256 * level + index. Lane t of a pair has
// layers t, t + kPairLanes, ...
__device__ __forceinline__ void load_numbers(uint32 (&x)[kOfLane], int (&chunks)[Strata::kLayers], const uint16* scores,
                                             const CandidateRow& row, const Strata& strata, int pair) {
  const int t = threadIdx.x % kPairLanes;
  bool whole = true;
#pragma unroll
  for (int j = 0; j < kOfLane / 4; ++j) {
    const int layer = j * kPairLanes + t, c = strata.chunk(layer, pair);
    const bool all = layer < strata.layers, eight = all && (!row.gap() || row.eight(c));
    chunks[layer] = c + (all && Strata::swapped(layer));
    whole &= eight;
    const uint4 found = eight ? *reinterpret_cast<const uint4*>(scores + row.key(c)) : make_uint4(0, 0, 0, 0);
    x[4 * j] = found.x, x[4 * j + 1] = found.y, x[4 * j + 2] = found.z, x[4 * j + 3] = found.w;
  }
  if (!whole) {
#pragma unroll 1
    for (int j = 0; j < kOfLane / 4; ++j) {
      const int layer = j * kPairLanes + t;
      uint4 found = row.gathered(scores, chunks[layer] & ~1, kAbsent);
      if (layer >= strata.layers && Strata::swapped(layer))  // is swapped back below
        found = make_uint4(swapped_halves(found.x), swapped_halves(found.y), swapped_halves(found.z),
                           swapped_halves(found.w));
#pragma unroll
      for (int i = 0; i < kOfLane / 4; ++i)  // registers cannot be counted through
        if (i == j) x[4 * i] = found.x, x[4 * i + 1] = found.y, x[4 * i + 2] = found.z, x[4 * i + 3] = found.w;
    }
  }
  static_assert(kPairLanes == 8, "layers 8 * j + t are swapped where j is odd");
  ScoreRange range, swapped;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) (i / 4 % 2 ? swapped : range).take(x[i]);
  range.join(swapped.swapped());
  range.join_lanes(kPairLanes - 1);
  const ScoreBuckets<spec::kKeyLevels> level(range), level_of_swapped(range.swapped());
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const uint32 index = t * 4 + i / 4 * (4 * kPairLanes) + i % 4;
    x[i] = i / 4 % 2 ? __byte_perm(level_of_swapped(x[i]), index, 0x0424) : __byte_perm(level(x[i]), index, 0x2404);
  }
#pragma unroll
  for (int j = 0; j < kOfLane / 4; ++j) {
    const int layer = j * kPairLanes + t;
    if (layer < strata.layers) continue;
    const int present = row.count - chunks[layer];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (2 * e >= present) x[4 * j + e] = x[4 * j + e] & 0xffff0000u | kLastNumber;
      if (2 * e + 1 >= present) x[4 * j + e] = x[4 * j + e] & 0xffffu | kLastNumber << 16;
    }
  }
}

// What is sorted by strata, and where its order goes.
struct StrataTask {
  const uint16* scores;
  CandidateRow row;
  const int* keys;  // of candidates; null: row.key
  int* order;
  int limit;        // what comes before it goes to `first` and, with its score, to `first_scores`
  int* first;
  uint16* first_scores;
};

__device__ __forceinline__ void sort_strata(const StrataTask& task, int first_pair, StrataShared& shared) {
  const CandidateRow& row = task.row;
  const Strata strata(row.count);
  if (first_pair >= strata.pairs) return;
  const int slot = threadIdx.x / kPairLanes;
  // Of a warp's pairs some may be past the row's last: they sort that one again, for nobody.
  if (first_pair + __shfl_sync(kFullWarp, slot, 0) < strata.pairs) {
    uint32 x[kOfLane];
    load_numbers(x, shared.chunks[slot], task.scores, row, strata, min(first_pair + slot, strata.pairs - 1));
    sort_lanes<kPairLanes>(x);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int rank = static_cast<int>(threadIdx.x) % kPairLanes * kOfLane + i;
      shared.sorted[rank][slot_at(rank, slot)] = x[i];
    }
  }
  __syncthreads();
  // Thread: two pairs, four strata, of a rank at a time.
  constexpr int kRankThreads = kBlockPairs / 2, kRanks = kOrderThreads / kRankThreads;
  const int two = static_cast<int>(threadIdx.x) % kRankThreads * 2, stratum = (first_pair + two) * 2;
  if (first_pair + two >= strata.pairs) return;
  const uint32 chunks[2] = {shared_address(shared.chunks[two]), shared_address(shared.chunks[two + 1])};
  int c[4];  // candidates
  const auto read = [&](int rank) {
    const uint2 found = *reinterpret_cast<const uint2*>(&shared.sorted[rank][slot_at(rank, two)]);
    const uint32 index[4] = {found.x, found.x >> 16, found.y, found.y >> 16};
#pragma unroll
    for (int s = 0; s < 4; ++s)
      c[s] = load_shared_4(chunks[s / 2] + (index[s] & 0xfcu)) ^ (index[s] & 3u) * 2 ^ s % 2;
  };
  const bool gap = row.gap();
  const auto key = [&](int s) { return task.keys ? task.keys[c[s]] : gap ? row.key(c[s]) : c[s]; };
  const auto score = [&](int s) -> uint32 { return task.scores[row.key(c[s])]; };
  int rank = threadIdx.x / kRankThreads, place = strata.place(rank, stratum);
  const int step = kRanks * 2 * strata.pairs;
#pragma unroll 1
  for (; rank < 4 * strata.layers; rank += kRanks, place += step) {
    read(rank);
    const int4 keys = make_int4(key(0), key(1), key(2), key(3));
    if (place < task.limit) {
      *reinterpret_cast<int4*>(task.first + place) = keys;
      *reinterpret_cast<uint2*>(task.first_scores + place) =
          make_uint2(score(0) | score(1) << 16, score(2) | score(3) << 16);
    } else {
      *reinterpret_cast<int4*>(task.order + place) = keys;
    }
  }
  if (rank >= 4 * strata.layers + 4 || strata.left == 0) return;
  read(rank);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (rank >= strata.size(stratum + s)) continue;
    const int at = strata.place(rank, stratum + s);
    (at < task.limit ? task.first : task.order)[at] = key(s);
    if (at < task.limit) task.first_scores[at] = static_cast<uint16>(score(s));
  }
}

__device__ __forceinline__ bool has_middle(const CandidateRow& row) {
  return row.count > spec::kMiddleFrom;
}

// Blocks that a row takes.
__device__ __forceinline__ int strata_blocks(const CandidateRow& row) {
  if (row.count <= spec::kOrderWhole) return 0;
  return (Strata(row.count).pairs + kBlockPairs - 1) / kBlockPairs;
}

// p.strata_blocks blocks are of two rows, a long one and a short one: those of the i-th segment from the end and from
// the beginning of the chunk. So nearly all that are launched have work.
__device__ __forceinline__ void key_strata(const RankKeysParams& p, StrataShared& shared) {
  const int rows = blockIdx.x / p.strata_blocks, i = rows / p.chunk.heads;
  const int head = p.chunk.first_head + rows % p.chunk.heads;
  int block = blockIdx.x % p.strata_blocks;
  CandidateRow row(p, head, p.chunk.first_segment + p.chunk.segments - 1 - i);
  const int of_long = strata_blocks(row);
  if (block >= of_long) {
    if (2 * i + 1 == p.chunk.segments) return;  // the middle one stands alone
    block -= of_long;
    row = CandidateRow(p, head, p.chunk.first_segment + i);
    if (block >= strata_blocks(row)) return;
  }
  StrataTask task = {p.scores + row.place, row};
  task.order = p.k_order + row.place;
  if (has_middle(row)) {
    task.limit = spec::kMiddle;
    task.first = p.middle + row.row * spec::kMiddle;
    task.first_scores = p.middle_scores + row.row * spec::kMiddle;
  } else {
    task.limit = spec::kOrderHead;
    task.first = task.order;
    task.first_scores = p.order_head_scores + row.row * spec::kOrderHead;
  }
  sort_strata(task, block * kBlockPairs, shared);
}

__device__ __forceinline__ void key_middle(const RankKeysParams& p, StrataShared& shared) {
  constexpr int kBlocks = spec::kMiddle / (2 * spec::kStratum * kBlockPairs);
  const CandidateRow row(p, blockIdx.x / kBlocks);
  if (!has_middle(row)) return;
  StrataTask task = {p.middle_scores + row.row * spec::kMiddle, CandidateRow(row.row, row.place, spec::kMiddle)};
  task.keys = p.middle + row.row * spec::kMiddle;
  task.first = task.order = p.k_order + row.place;
  task.limit = spec::kOrderHead;
  task.first_scores = p.order_head_scores + row.row * spec::kOrderHead;
  sort_strata(task, static_cast<int>(blockIdx.x % kBlocks) * kBlockPairs, shared);
}

template <int kThreads>
struct OrderShared {
  RadixShared<kThreads> radix;
  ScoreRange of_warp[kThreads / 32];
  int heavy[kThreads / 32];  // scores of the warp's that weigh so much
};
using OrderShortShared = OrderShared<kShortThreads>;
using OrderHeadShared = OrderShared<kOrderThreads>;
using OrderWholeShared = OrderShared<kWholeThreads>;

// How many of two scores are not less than `least`, as NaN is not.
__device__ __forceinline__ int not_less(uint32 scores, float least) {
  return !(Float16::low(scores) < least) + !(Float16::high(scores) < least);
}

// Puts the scores of a row in order, or of the head of its order: kOfThread of each thread, with minus infinity behind.
template <int kOfThread, int kThreads>
__device__ __forceinline__ void sort_row(const RankKeysParams& p, const CandidateRow& row, const uint16* scores,
                                         const uint16* head_scores, OrderShared<kThreads>& shared) {
  constexpr int kWarps = kThreads / 32;
  RadixSort<kOfThread, kThreads> sort(shared.radix);
#pragma unroll
  for (int i = 0; i < kOfThread / 8; ++i) {
    const int unit = i * kThreads + threadIdx.x;
    const uint32 target = sort.scores_address(unit);
    if (head_scores) {
      cp_async_16(target, head_scores + unit * 8);
    } else if (row.eight(unit * 8)) {
      cp_async_16(target, scores + row.key(unit * 8));
    } else {
      store_shared_16(target, row.gathered(scores, unit * 8, 0xfc00u));  // past the end: minus infinity, so last
    }
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const float least = p.least_keys ? log2f((p.taus ? p.taus[row.head] : p.tau) / spec::kLeastParts) : 0.f;
  ScoreRange range;
  int heavy = 0;
#pragma unroll
  for (int i = 0; i < kOfThread / 8; ++i) {
    const uint4 x = sort.scores(i);
#pragma unroll
    for (const uint32 two : {x.x, x.y, x.z, x.w}) {
      range.take(two);
      heavy += not_less(two, least);
    }
  }
  heavy = __reduce_add_sync(kFullWarp, heavy);
  range.join(range.swapped());
  range.join_lanes(31);
  if (threadIdx.x % 32 == 0) {
    shared.of_warp[threadIdx.x / 32] = range;
    shared.heavy[threadIdx.x / 32] = heavy;
  }
  __syncthreads();
  if (threadIdx.x == 0 && p.least_keys) {
    heavy = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) heavy += shared.heavy[w];
    p.least_keys[row.pair] = min(heavy, row.count) << p.geometry.unit_shift;  // of tau 0 padding has counted, too
  }
#pragma unroll
  for (int w = 0; w < kWarps; ++w) range.join(shared.of_warp[w]);
  sort.sort(ScoreBuckets<spec::kKeyBuckets>(range));
}

// The same of all of a row: kOfThread of each thread, or as many more as it needs.
template <int kOfThread, int kThreads>
__device__ __forceinline__ void sort_whole_row(const RankKeysParams& p, const CandidateRow& row,
                                               OrderShared<kThreads>& shared) {
  if constexpr (kOfThread < kMostOfThread) {
    if (row.count > kOfThread * kThreads) return sort_whole_row<kOfThread + 8>(p, row, shared);
  }
  sort_row<kOfThread>(p, row, p.scores + row.place, nullptr, shared);
}

template <int kLeastOfThread, int kThreads>
__device__ __forceinline__ void order_row(const RankKeysParams& p, const CandidateRow& row,
                                          OrderShared<kThreads>& shared) {
  if (row.count <= 0) {
    if (threadIdx.x == 0 && p.least_keys) p.least_keys[row.pair] = 0;
    return;
  }
  sort_whole_row<kLeastOfThread>(p, row, shared);
  int* order = p.k_order + row.place;
#pragma unroll 4
  for (int i = threadIdx.x; i < row.count; i += kThreads) order[i] = row.key(index_of(shared.radix.items[i]));
}

// Whether key_order_whole has the row, and not key_order_head.
__device__ __forceinline__ bool is_whole(const CandidateRow& row) {
  return row.count > spec::kOrderHead && row.count <= spec::kOrderWhole;
}

// The last unit is not ranked where it is short.
__device__ __forceinline__ void end_with_short_unit(const RankKeysParams& p, const CandidateRow& row) {
  if (row.short_unit >= 0 && threadIdx.x == 0) p.k_order[row.place + row.count] = row.short_unit;
}

// Block: a row.
__device__ __forceinline__ void key_order_short(const RankKeysParams& p, OrderShortShared& shared) {
  const CandidateRow row(p, blockIdx.x);
  end_with_short_unit(p, row);
  order_row<8>(p, row, shared);
}

__device__ __forceinline__ void key_order_whole(const RankKeysParams& p, OrderWholeShared& shared) {
  const CandidateRow row(p, blockIdx.x);
  if (!is_whole(row)) return;
  end_with_short_unit(p, row);
  order_row<spec::kOrderHead / kWholeThreads + 8>(p, row, shared);
}

__device__ __forceinline__ void key_order_head(const RankKeysParams& p, OrderHeadShared& shared) {
  const CandidateRow row(p, blockIdx.x);
  if (is_whole(row)) return;
  end_with_short_unit(p, row);
  if (row.count <= spec::kOrderHead) {
    order_row<8>(p, row, shared);
    return;
  }
  int* order = p.k_order + row.place;
  sort_row<kMostOfThread>(p, row, nullptr, p.order_head_scores + row.row * spec::kOrderHead, shared);
  // The order is read before it is written.
  constexpr int kOfThread = kMostOfThread;
  uint32 found[kOfThread / 2];  // two indices each
#pragma unroll
  for (int i = 0; i < kOfThread / 2; ++i) {
    const uint32* items = shared.radix.items + 2 * i * kOrderThreads + threadIdx.x;
    found[i] = index_of(items[0]) | index_of(items[kOrderThreads]) << 16;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOfThread / 4; ++i) {
    const int unit = (i * kOrderThreads + threadIdx.x) * 4;
    cp_async_16(shared_address(shared.radix.items + unit), order + unit);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOfThread; ++i)
    order[i * kOrderThreads + threadIdx.x] = shared.radix.items[found[i / 2] >> i % 2 * 16 & 0xffffu];
}

}  // namespace s2o
