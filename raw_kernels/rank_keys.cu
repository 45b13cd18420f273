// Scores of a segment's candidates and their order (the paper's Algorithm 1, lines 16-20).
//
//   key_scores: scores[row, key] = the largest dot product of key with a representative of row's segment, a small
//               matrix product on tensor cores: the representative is split into two 16-bit parts, so that only
//               the accumulation rounds
//   key_order:  a stable counting sort of each row's candidates over kKeyBuckets equal parts of the row's own score
//               range, highest first; reference/s2o.py: order_keys defines it. No atomic decides a place: the order is
//               the same on every run.
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
  int* k_order;            // [chunk rows, stride]
  int64 stride;            // a multiple of kStep
  Geometry geometry;
  Chunk chunk;
  int heads, kv_heads;
  int representatives, run;
  int row_blocks;          // blocks of kScoreRows rows that cover the rows of one KV head
  int key_blocks;          // blocks of kScoreSteps * kStep keys that cover the keys
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

struct SortShared {
  uint32 next[kSortWarps][spec::kKeyBuckets];  // how many keys of the warp's part a bucket holds; then its next place
  uint32 total[kSortWarps];
};

// Block: one row. Each warp has its own run of candidates and keeps their order inside a bucket.
__device__ __forceinline__ void key_order(const RankKeysParams& p, SortShared& shared) {
  constexpr int kBucketsOfThread = spec::kKeyBuckets / kSortThreads;
  static_assert(spec::kKeyBuckets % kSortThreads == 0, "every thread scans the same number of buckets");
  const Geometry& g = p.geometry;
  // Longest rows first.
  const int n = p.chunk.first_segment + p.chunk.segments - 1 - static_cast<int>(blockIdx.x / p.chunk.heads);
  const int head = p.chunk.first_head + static_cast<int>(blockIdx.x % p.chunk.heads);
  const int count = g.candidates(n);
  if (count == 0) return;
  const int dense_begin = g.dense_begin(n), dense_keys = g.dense_end(n) - dense_begin;
  const int64 row = p.chunk.row(head, n) * p.stride;
  const float* scores = p.scores + row;
  int* order = p.k_order + row;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto position = [&](int candidate) { return candidate < dense_begin ? candidate : candidate + dense_keys; };

  for (int b = threadIdx.x; b < kSortWarps * spec::kKeyBuckets; b += kSortThreads) (&shared.next[0][0])[b] = 0;
  __syncthreads();
  const uint2 range = p.range[p.chunk.row(head, n)];  // zeros if no score is finite
  const float high = range.x ? from_sortable(range.x) : 0.f, low = range.y ? -from_sortable(range.y) : 0.f;
  const float spread = __fsub_rn(high, low);
  float factor = spread > 0.f && spread < infinity() ? __fdiv_rn(static_cast<float>(spec::kKeyBuckets), spread) : 0.f;
  if (factor == infinity()) factor = 0.f;
  const auto bucket = [&](float s) {
    if (s == -infinity()) return spec::kKeyBuckets - 1;
    if (!(s < infinity()) || factor == 0.f) return 0;  // NaN and +inf come first
    return min(max(static_cast<int>(__fmul_rn(__fsub_rn(high, s), factor)), 0), spec::kKeyBuckets - 1);
  };

  // A warp walks its part 32 candidates at a time, with kSortBatch loads in flight.
  const int part = ((count + kSortWarps - 1) / kSortWarps + 31) / 32 * 32;
  const int begin = min(warp * part, count), end = min(begin + part, count);
  const auto load = [&](float (&batch)[kSortBatch], int base) {
#pragma unroll
    for (int i = 0; i < kSortBatch; ++i) {
      const int c = base + i * 32 + lane;
      batch[i] = c < end ? scores[position(c)] : 0.f;
    }
  };

  // Count.
  uint32* next = shared.next[warp];
  float batch[kSortBatch], ahead[kSortBatch];
  load(ahead, begin);
  for (int base = begin; base < end; base += kSortBatch * 32) {
#pragma unroll
    for (int i = 0; i < kSortBatch; ++i) batch[i] = ahead[i];
    load(ahead, base + kSortBatch * 32);
#pragma unroll
    for (int i = 0; i < kSortBatch; ++i)
      if (base + i * 32 + lane < end) atomicAdd(next + bucket(batch[i]), 1u);
  }
  __syncthreads();

  // Exclusive sums over buckets, and inside a bucket over warps: where each warp's keys of a bucket begin.
  uint32 sum = 0;
  for (int b = threadIdx.x * kBucketsOfThread; b < (threadIdx.x + 1) * kBucketsOfThread; ++b)
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) sum += shared.next[w][b];
  uint32 before = sum;  // inclusive over the warp's threads
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32 x = __shfl_up_sync(kFullWarp, before, step);
    if (lane >= step) before += x;
  }
  if (lane == 31) shared.total[warp] = before;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < warp; ++w) before += shared.total[w];
  for (int b = threadIdx.x * kBucketsOfThread; b < (threadIdx.x + 1) * kBucketsOfThread; ++b)
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) {
      const uint32 here = shared.next[w][b];
      shared.next[w][b] = before;
      before += here;
    }
  __syncthreads();

  // Place.
  load(ahead, begin);
  for (int base = begin; base < end; base += kSortBatch * 32) {
#pragma unroll
    for (int i = 0; i < kSortBatch; ++i) batch[i] = ahead[i];
    load(ahead, base + kSortBatch * 32);
#pragma unroll
    for (int i = 0; i < kSortBatch; ++i) {
      const int c = base + i * 32 + lane;
      if (base + i * 32 >= end) break;
      const bool active = c < end;
      const int b = active ? bucket(batch[i]) : spec::kKeyBuckets;  // inactive lanes have a bucket of their own
      const uint32 peers = __match_any_sync(kFullWarp, b);
      const int leader = __ffs(peers) - 1;
      uint32 place = 0;
      if (active && lane == leader) {
        place = next[b];
        next[b] = place + __popc(peers);
      }
      place = __shfl_sync(kFullWarp, place, leader) + __popc(peers & ((1u << lane) - 1));
      if (active) order[place] = position(c);
      __syncwarp();
    }
  }
}

}  // namespace s2o
