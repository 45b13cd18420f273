// Scores of a segment's candidates and their order (the paper's Algorithm 1, lines 16-20).
//
//   key_scores: scores[row, key] = the largest dot product of key with a representative of row's segment, a small
//               matrix product on tensor cores: the representative is split into two 16-bit parts, so that only
//               the accumulation rounds
//   key_counts, key_order: a stable counting sort of each row's candidates over kKeyBuckets equal parts of the row's
//               own score range, highest first; reference/s2o.py: order_keys defines it. No atomic decides a place:
//               the order is the same on every run.
//
//   rows are (head, segment) pairs of the chunk; scores and k_order [chunk rows, stride]
#include "attention.cuh"
#include "sortable.cuh"

namespace s2o {

constexpr int kScoreRows = 16 * kWarps;  // (head, segment) rows of a block
constexpr int kScoreSteps = 8;           // key steps of a block
constexpr int kSortThreads = 256;
constexpr int kSortWarps = kSortThreads / 32;
constexpr int kSortBatch = 8;            // scores that a thread of key_order has in flight

struct RankKeysParams {
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim]
  const uint16* high;      // [batch * heads, segments, representatives, kHeadDim]
  const uint16* low;
  float* scores;           // [chunk rows, stride] by key position
  uint2* range;            // [chunk rows] (largest, smallest) finite score as sortable(s) and sortable(-s), from 0 on
  uint16* counts;          // [chunk rows, parts, kKeyBuckets]
  int* k_order;            // [chunk rows, stride]
  int64 stride;            // a multiple of kStep
  Geometry geometry;
  Chunk chunk;
  int heads, kv_heads;
  int representatives, run;
  int row_blocks;          // blocks of kScoreRows rows that cover the rows of one KV head
  int key_blocks;          // blocks of kScoreSteps * kStep keys that cover the keys
  int parts;               // parts of kSortPart candidates of the longest row
};

template <class Element_, int kHeadDim_, bool kAligned_>
struct ScoreTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kAligned = kAligned_;
  struct Shared {
    uint16 k[2][kStep * kHeadDim];
    int first_key;
  };
};

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Block: kScoreRows rows of the heads that share a KV head (heads fastest, so that a block's prefixes are alike)
// and kScoreSteps steps of keys. A warp has 16 rows.
template <class Traits>
__device__ __forceinline__ void key_scores(const RankKeysParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kKeyTiles = kStep / 8;
  const Geometry& g = p.geometry;
  uint32 block = blockIdx.x;
  const int key_block = block % p.key_blocks;
  block /= p.key_blocks;
  const int first_row = block % p.row_blocks * kScoreRows;
  const int first_head = p.chunk.first_head + static_cast<int>(block / p.row_blocks) * p.chunk.shared_heads;

  const int rows = p.chunk.shared_heads * p.chunk.segments;
  const int last_segment = p.chunk.first_segment + min(first_row + kScoreRows - 1, rows - 1) / p.chunk.shared_heads;
  const int first_key = key_block * kScoreSteps * kStep;
  // Keys that some row of the block has as candidates.
  const int keys = min(kScoreSteps * kStep, (g.is_causal ? g.candidates(last_segment) : g.seqlen_k) - first_key);
  if (keys <= 0) return;

  const int lane = threadIdx.x % 32;
  int head[2], segment[2];  // of this thread's rows lane / 4 and lane / 4 + 8
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = min(first_row + static_cast<int>(threadIdx.x) / 32 * 16 + h * 8 + lane / 4, rows - 1);
    head[h] = first_head + row % p.chunk.shared_heads;
    segment[h] = p.chunk.first_segment + row / p.chunk.shared_heads;
  }

  const auto valid = [&](int h) {
    return first_row + static_cast<int>(threadIdx.x) / 32 * 16 + h * 8 + lane / 4 < rows;
  };

  if (threadIdx.x == 0) shared.first_key = first_key;
  __syncthreads();
  const uint16* k = p.k.at(first_head / p.heads, first_head % p.heads / (p.heads / p.kv_heads));
  const ContiguousKeys<Traits> source{shared, keys};
  const int steps = (keys + kStep - 1) / kStep;
  const auto load = [&](int step) {
    if (step < steps) load_step<Traits>(shared_address(shared.k[step % 2]), k, p.k.row, g.head_dim, source, step);
    cp_async_commit();
  };
  // Fragments of a representative: a[16 rows, 16 dims] for each 16 dims.
  uint32 high[Traits::kHeadDim / 16][4], low[Traits::kHeadDim / 16][4];
  const auto load_representative = [&](int r) {
    const uint32 *from_high[2], *from_low[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64 row = (static_cast<int64>(head[h]) * g.segments() + segment[h]) * p.representatives +
                        (r * p.run < g.query_count(segment[h]) ? r : 0);
      from_high[h] = reinterpret_cast<const uint32*>(p.high + row * Traits::kHeadDim) + lane % 4;
      from_low[h] = reinterpret_cast<const uint32*>(p.low + row * Traits::kHeadDim) + lane % 4;
    }
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        high[c][i] = from_high[i % 2][c * 8 + i / 2 * 4];
        low[c][i] = from_low[i % 2][c * 8 + i / 2 * 4];
      }
  };

  load(0);
  load_representative(0);
  float largest[2] = {-infinity(), -infinity()}, smallest[2] = {infinity(), infinity()};
  for (int step = 0; step < steps; ++step) {
    load(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    float best[kKeyTiles][4];  // [rows, keys] of this thread
    for (int r = 0; r < p.representatives; ++r) {
      if (p.representatives > 1) load_representative(r);
      float s[kKeyTiles][4] = {};
#pragma unroll
      for (int c = 0; c < Traits::kHeadDim / 16; ++c)
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
          uint32 x[4];
          ldmatrix_x4(x, chunk_address<Traits>(shared_address(shared.k[step % 2]), j * 8 + lane % 8 + lane / 16 * 8,
                                               c * 2 + lane / 8 % 2));
          Element::mma(s[j], high[c], x[0], x[1]);
          Element::mma(s[j + 1], high[c], x[2], x[3]);
          Element::mma(s[j], low[c], x[0], x[1]);
          Element::mma(s[j + 1], low[c], x[2], x[3]);
        }
      // A run that is empty is stood in for by the first, which changes no maximum.
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) best[j][e] = r == 0 ? s[j][e] : max_or_nan(best[j][e], s[j][e]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!valid(h)) continue;
      const int end = g.is_causal ? g.candidates(segment[h]) : g.seqlen_k;
      const int dense_begin = g.dense_begin(segment[h]), dense_end = g.dense_end(segment[h]);
      float* target = p.scores + p.chunk.row(head[h], segment[h]) * p.stride;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        const int key = first_key + step * kStep + j * 8 + lane % 4 * 2;
        if (key < end) *reinterpret_cast<float2*>(target + key) = make_float2(best[j][2 * h], best[j][2 * h + 1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = best[j][2 * h + e];
          const bool candidate = key + e < end && (g.is_causal || key + e < dense_begin || key + e >= dense_end);
          if (candidate && fabsf(x) < infinity()) {
            largest[h] = fmaxf(largest[h], x);
            smallest[h] = fminf(smallest[h], x);
          }
        }
      }
    }
    __syncthreads();  // every warp is done with this buffer
  }
  cp_async_wait<0>();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], step));
      smallest[h] = fminf(smallest[h], __shfl_xor_sync(kFullWarp, smallest[h], step));
    }
    // The result of an integer maximum does not depend on the order of blocks.
    if (valid(h) && lane % 4 == 0 && largest[h] >= smallest[h]) {
      uint2* range = p.range + p.chunk.row(head[h], segment[h]);
      atomicMax(&range->x, sortable(largest[h]));
      atomicMax(&range->y, sortable(-smallest[h]));
    }
  }
}

// A block of key_counts and key_order has one row and one part of its candidates, parts of a row next to each other:
// few rows are then in flight, and the scattered writes of each meet in L2 before they leave it.
struct RowPart {
  int head, segment;
  int first, count;  // candidates of the part
  int parts;         // of the row
  int part;
  int64 row;         // of the chunk
  int dense_begin, dense_keys;

  __device__ __forceinline__ explicit RowPart(const RankKeysParams& p) {
    uint32 block = blockIdx.x;
    part = block % p.parts;
    block /= p.parts;
    segment = p.chunk.first_segment + p.chunk.segments - 1 - static_cast<int>(block / p.chunk.heads);
    head = p.chunk.first_head + static_cast<int>(block % p.chunk.heads);
    row = p.chunk.row(head, segment);
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
  __device__ __forceinline__ uint16* counts(const RankKeysParams& p, int of_part) const {
    return p.counts + (row * p.parts + of_part) * spec::kKeyBuckets;
  }
};

// Which bucket a score of a row falls into; reference/s2o.py: order_keys.
struct Buckets {
  float high, factor;
  __device__ __forceinline__ explicit Buckets(uint2 range) {  // zeros if no score is finite
    high = range.x ? from_sortable(range.x) : 0.f;
    const float spread = __fsub_rn(high, range.y ? -from_sortable(range.y) : 0.f);
    factor = spread > 0.f && spread < infinity() ? __fdiv_rn(static_cast<float>(spec::kKeyBuckets), spread) : 0.f;
    if (factor == infinity()) factor = 0.f;
  }
  __device__ __forceinline__ int operator()(float score) const {
    if (score == -infinity()) return spec::kKeyBuckets - 1;
    if (!(score < infinity()) || factor == 0.f) return 0;  // NaN and +inf come first
    const int bucket = static_cast<int>(__fmul_rn(__fsub_rn(high, score), factor));
    return min(max(bucket, 0), spec::kKeyBuckets - 1);
  }
};

// Calls visit(index in the part, score) for candidates [begin, end) of the part, kLanes threads one each, in ascending
// order, with kSortBatch loads in flight.
template <int kLanes, class Visit>
__device__ __forceinline__ void for_each_score(const float* scores, const RowPart& where, int lane, int begin, int end,
                                               Visit visit) {
  float batch[kSortBatch], ahead[kSortBatch];
  const auto load = [&](int base) {
#pragma unroll
    for (int i = 0; i < kSortBatch; ++i) {
      const int c = base + i * kLanes + lane;
      ahead[i] = c < end ? scores[where.key(where.first + c)] : 0.f;
    }
  };
  load(begin);
  for (int base = begin; base < end; base += kSortBatch * kLanes) {
#pragma unroll
    for (int i = 0; i < kSortBatch; ++i) batch[i] = ahead[i];
    load(base + kSortBatch * kLanes);
#pragma unroll
    for (int i = 0; i < kSortBatch; ++i) {
      const int c = base + i * kLanes + lane;
      if (c < end) visit(c, batch[i]);
    }
  }
}

struct CountShared {
  uint32 count[spec::kKeyBuckets];
};

// counts[row, part, bucket]: how many candidates of the part a bucket holds.
__device__ __forceinline__ void key_counts(const RankKeysParams& p, CountShared& shared) {
  const RowPart where(p);
  if (where.count <= 0) return;
  for (int b = threadIdx.x; b < spec::kKeyBuckets; b += kSortThreads) shared.count[b] = 0;
  __syncthreads();
  const Buckets bucket(p.range[where.row]);
  for_each_score<kSortThreads>(p.scores + where.row * p.stride, where, threadIdx.x, 0, where.count,
                               [&](int, float score) { atomicAdd(shared.count + bucket(score), 1u); });
  __syncthreads();
  uint16* counts = where.counts(p, where.part);
  for (int b = threadIdx.x; b < spec::kKeyBuckets; b += kSortThreads) counts[b] = static_cast<uint16>(shared.count[b]);
}

struct SortShared {
  uint16 bucket[spec::kSortPart];              // of each candidate of the part
  uint16 sorted[spec::kSortPart];              // the part's candidates in their order
  uint16 next[kSortWarps][spec::kKeyBuckets];  // a warp's candidates of a bucket: how many, then the next one's place
  uint32 base[spec::kKeyBuckets];              // from a candidate's place in the part to its place in the row
  uint32 total[kSortWarps][2];
};

// Lanes of `active` whose low bits of x equal this lane's.
template <int kBits>
__device__ __forceinline__ uint32 match(uint32 active, uint32 x) {
  uint32 peers = active;
#pragma unroll
  for (int bit = 0; bit < kBits; ++bit) {
    const bool set = x >> bit & 1;
    const uint32 with = __ballot_sync(kFullWarp, set);
    peers &= set ? with : ~with;
  }
  return peers;
}

// k_order[row, place] of the part's candidates. Each warp has its own run of them and keeps their order in a bucket.
// They are sorted in shared memory first: neighbours of a bucket are then written together, not one by one.
__device__ __forceinline__ void key_order(const RankKeysParams& p, SortShared& shared) {
  constexpr int kBucketsOfThread = spec::kKeyBuckets / kSortThreads, kPartOfWarp = spec::kSortPart / kSortWarps;
  static_assert(kBucketsOfThread % 8 == 0, "a thread reads the counts of its buckets 8 at a time");
  const RowPart where(p);
  if (where.count <= 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32* words = reinterpret_cast<uint32*>(&shared.next[0][0]);
  for (int i = threadIdx.x; i < kSortWarps * spec::kKeyBuckets / 2; i += kSortThreads) words[i] = 0;
  __syncthreads();

  // Buckets of the warp's candidates, and how many each holds, two 16-bit counters a word.
  const Buckets bucket(p.range[where.row]);
  const int begin = min(warp * kPartOfWarp, where.count), end = min(begin + kPartOfWarp, where.count);
  uint32* mine = words + warp * (spec::kKeyBuckets / 2);
  for_each_score<32>(p.scores + where.row * p.stride, where, lane, begin, end, [&](int c, float score) {
    const int b = bucket(score);
    shared.bucket[c] = static_cast<uint16>(b);
    atomicAdd(mine + b / 2, b % 2 ? 0x10000u : 1u);
  });

  // Where buckets begin: in the row (candidates in buckets before, and of earlier parts in the same one), in the part.
  uint32 in_row[kBucketsOfThread] = {}, in_part[kBucketsOfThread] = {}, earlier[kBucketsOfThread] = {};
  const int first_bucket = threadIdx.x * kBucketsOfThread;
  for (int part = 0; part < where.parts; ++part) {
    const uint4* counts = reinterpret_cast<const uint4*>(where.counts(p, part) + first_bucket);
#pragma unroll
    for (int i = 0; i < kBucketsOfThread; i += 8) {
      const uint4 x = counts[i / 8];
      const uint32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32 count = pairs[j / 2] >> (j % 2 * 16) & 0xffffu;
        in_row[i + j] += count;
        if (part < where.part) earlier[i + j] += count;
        if (part == where.part) in_part[i + j] = count;
      }
    }
  }
  uint32 sum[2] = {0, 0}, before[2];  // row, part
#pragma unroll
  for (int i = 0; i < kBucketsOfThread; ++i) {
    sum[0] += in_row[i];
    sum[1] += in_part[i];
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    before[k] = sum[k];  // inclusive over the warp's threads
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32 x = __shfl_up_sync(kFullWarp, before[k], step);
      if (lane >= step) before[k] += x;
    }
    if (lane == 31) shared.total[warp][k] = before[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    before[k] -= sum[k];
    for (int w = 0; w < warp; ++w) before[k] += shared.total[w][k];
  }
#pragma unroll
  for (int i = 0; i < kBucketsOfThread; ++i) {
    shared.base[first_bucket + i] = before[0] + earlier[i] - before[1];
    uint32 place = before[1];
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) {
      const uint32 here = shared.next[w][first_bucket + i];
      shared.next[w][first_bucket + i] = static_cast<uint16>(place);
      place += here;
    }
    before[0] += in_row[i];
    before[1] += in_part[i];
  }
  __syncthreads();

  // Sort the part.
  uint16* next = shared.next[warp];
  for (int base = begin; base < end; base += 32) {
    const int c = base + lane;
    const bool active = c < end;
    const uint32 b = active ? shared.bucket[c] : 0;
    const uint32 peers = match<spec::kKeyBucketBits>(__ballot_sync(kFullWarp, active), b);
    const int rank = __popc(peers & ((1u << lane) - 1));
    uint32 place = 0;
    if (active) place = next[b] + rank;
    __syncwarp();
    if (active) {
      if (rank == 0) next[b] = static_cast<uint16>(place + __popc(peers));
      shared.sorted[place] = static_cast<uint16>(c);
    }
    __syncwarp();
  }
  __syncthreads();

  int* order = p.k_order + where.row * p.stride;
#pragma unroll 4
  for (int i = threadIdx.x; i < where.count; i += kSortThreads) {
    const int c = shared.sorted[i];
    order[shared.base[shared.bucket[c]] + i] = where.key(where.first + c);
  }
}

}  // namespace s2o
