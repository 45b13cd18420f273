// Scores of units of keys by the weight that any single query of a segment gives them, by 16-bit products.
//
//   scores[row, unit] = max over queries r and the unit's groups of keys c of
//                       scale_log2 * r . mean(c) + log2(share(c)) - norm(r), in float16
//
//   rows are (head, segment) pairs of the chunk; Chunk::place says where their scores are
//
// For rows that are not aligned and segments of more than 128 queries; else products are of 8 bits (query_weights_sm90.cu,
// query_weights_int8.cu). Each warp keeps 32 queries in registers, and the steps of keys pass by all warps.
#include "sm80/attention.cuh"
#include "selection/lane_maxima.cuh"
#include "selection/segment_block.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, int kClusters_>
struct ByQueryTraits {
  using Element = Element_;
  static constexpr int kUnitKeys = kClusters_;  // rows of unit_keys of a unit: means of its groups
  static constexpr int kHeadDim = kHeadDim_, kStep = 64, kThreads = 128;
  static constexpr int kSegments = 1, kWarps = kThreads / 32;
  static constexpr int kTiles = kHeadDim > 128 ? 1 : 2;                    // of 16 queries of a warp
  static constexpr int kQueries = kWarps * kTiles * 16;                    // of a segment at a time
  struct alignas(512) Shared {
    uint16 units[2][kStep * kHeadDim];
    uint32 shares[2][kStep / 2];   // of each two groups of the step: log2 of what part of its unit's keys each has
    float largest[2][kWarps][32];  // of each warp's queries, of the step's units as lanes have them
  };
};

template <class Traits>
struct QueryWeights {
  using Element = typename Traits::Element;
  static constexpr int kTiles = Traits::kTiles, kDims = Traits::kHeadDim / 16, kUnitKeys = Traits::kUnitKeys;
  static constexpr int kUnits = Traits::kStep / kUnitKeys;  // of a step
  static constexpr int kLanes = kUnitKeys / 2;              // that have a unit's groups, two each

  const RankKeysParams& p;
  typename Traits::Shared& shared;
  SegmentBlock<Traits::kSegments, Traits::kHeadDim, kUnitKeys> block;
  int lane, warp, segment;
  uint32 rows_of_lane;  // of the first 16 rows of keys, where the lane's chunk of the first columns stands
  float scale;
  uint32 a[kTiles][kDims][4];  // fragments of the warp's queries, of the scale's sign
  float first[kTiles][4];      // minus the norms of queries lane / 4 and 8 more of each tile, over the scale

  __device__ __forceinline__ QueryWeights(const RankKeysParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), block(p_), lane(threadIdx.x % 32), warp(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)),
        segment(block.segment(0)),
        rows_of_lane(chunk_address<Traits>(shared_address(shared_.units[0]), lane % 8 + lane / 16 * 8, lane / 8 % 2)),
        scale(fabsf(p_.scale_log2)) {}

  // The segment's query r; past its last one the first stands in, which changes no maximum.
  __device__ __forceinline__ int query(int r) const {
    return p.geometry.query_begin(segment) + (r < p.geometry.query_count(segment) ? r : 0);
  }
  // The warp's queries, from query `begin` of the segment on.
  __device__ __forceinline__ void load_queries(int begin) {
    const auto pair_or_zeros = [](const uint16* x, int end) {  // `end`: of the columns from x on
      return end > 0 ? *reinterpret_cast<const uint32*>(x) : 0u;
    };
    const auto unaligned = [](const uint16* x, int end) {
      return (end > 0 ? x[0] : 0u) | (end > 1 ? x[1] : 0u) << 16;
    };
    if (p.aligned) load_queries(begin, pair_or_zeros);
    else load_queries(begin, unaligned);  // in a branch of each pair loads would wait for one another
  }
  template <class Load>
  __device__ __forceinline__ void load_queries(int begin, const Load& load) {
    const float* norms = p.norms + static_cast<int64>(block.head) * p.geometry.seqlen_q;
    const uint16* of_head = p.q.at(block.head / p.heads, block.head % p.heads) + lane % 4 * 2;
    const int end = p.geometry.head_dim - lane % 4 * 2;
    const uint32 sign = p.scale_log2 < 0.f ? 0x80008000u : 0u;
    const float inverse = 1.f / scale;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = query(begin + (warp * kTiles + i) * 16 + lane / 4 + 8 * h);
        first[i][2 * h] = first[i][2 * h + 1] = -norms[r] * inverse;
        const uint16* row = of_head + r * p.q.row;
#pragma unroll
        for (int c = 0; c < 2 * kDims; ++c) a[i][c / 2][c % 2 * 2 + h] = load(row + c * 8, end - c * 8) ^ sign;
      }
  }
  // Finds the largest weight that the lane's queries give either of its two groups, in each half of the 16 rows of keys
  // from row 16 * part of a step on.
  __device__ __forceinline__ void weigh(int step, int part, float& first_half, float& second_half) const {
    // Chunk 2 c + b of a row stands where its number, but for the swizzle's bits, says: 2 c is one exclusive or.
    const uint32 of_step = rows_of_lane + step % 2 * (Traits::kStep * Traits::kHeadDim * 2);
    float s[kTiles][2][4];  // [queries lane / 4 and 8 more, groups]
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][0][e] = s[i][1][e] = first[i][e];
#pragma unroll
    for (int c = 0; c < kDims; ++c) {
      uint32 x[4];
      ldmatrix_x4(x, (of_step ^ c * 32) + part * (16 * Traits::kHeadDim * 2));
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        Element::mma(s[i][0], a[i][c], x[0], x[1]);
        Element::mma(s[i][1], a[i][c], x[2], x[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float of[2];  // of each group
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        of[e] = larger_or_nan(s[0][j][e], s[0][j][2 + e]);
#pragma unroll
        for (int i = 1; i < kTiles; ++i) of[e] = larger_or_nan(of[e], larger_or_nan(s[i][j][e], s[i][j][2 + e]));
      }
      const uint32 share = shared.shares[step % 2][part * 8 + j * 4 + lane % 4];
      (j == 0 ? first_half : second_half) = larger_or_nan(fmaf(of[0], scale, Float16::low(share)),
                                                          fmaf(of[1], scale, Float16::high(share)));
    }
  }
  // One of the warps stores the largest of all warps' maxima of a step, and of earlier passes'.
  __device__ __forceinline__ void store(int step, bool is_first) const {
    if (step % Traits::kWarps != warp) return;
    float x = shared.largest[step % 2][0][lane];
#pragma unroll
    for (int w = 1; w < Traits::kWarps; ++w) x = larger_or_nan(x, shared.largest[step % 2][w][lane]);
    const int at = step * kUnits + lane / kLanes;
    const bool stores = lane % kLanes == 0 && at < block.end;
    uint16* target = p.scores + p.chunk.place(block.head, segment) + (stores ? at : 0);
    if (!is_first && stores) x = larger_or_nan(x, Float16::low(*target));
    store_if(stores, target, Float16::pack(is_near(p, segment, at) ? infinity() : x, 0.f));
  }
  __device__ __forceinline__ void find_scores() {
    const int end = kUnitKeys * block.end, steps = (end + Traits::kStep - 1) / Traits::kStep;
    constexpr int kChunks = Traits::kHeadDim / 8, kRows = Traits::kThreads / kChunks;  // of a row; that are loaded at a time
    const int chunk = threadIdx.x % kChunks, of_thread = threadIdx.x / kChunks;
    const uint16* data = block.unit_keys() + of_thread * Traits::kHeadDim + chunk * 8;  // [rows, kHeadDim]
    const uint32 place = chunk_address<Traits>(shared_address(shared.units[0]), of_thread, chunk);
    const int rows = p.geometry.units() * kUnitKeys, pair = threadIdx.x * 2;  // groups of the KV head; of a step
    const uint16* shares = p.cluster_shares + block.kv_head() * rows;
    const auto load = [&](int step) {
      const int left = end - step * Traits::kStep - of_thread;  // rows from the thread's first on
      const uint16* from = data + static_cast<int64>(step) * (Traits::kStep * Traits::kHeadDim);
      const uint32 to = place + step % 2 * (Traits::kStep * Traits::kHeadDim * 2);
      const auto copy = [&](int row, bool present) {
        cp_async_16_or_zeros((to ^ (row & 7) << 4) + row * (Traits::kHeadDim * 2),
                             from + (present ? row * Traits::kHeadDim : 0), present);
      };
      if (end - step * Traits::kStep >= Traits::kStep) {
#pragma unroll
        for (int row = 0; row < Traits::kStep; row += kRows) copy(row, true);
      } else if (step < steps) {
#pragma unroll 1
        for (int row = 0; row < Traits::kStep; row += kRows) copy(row, row < left);
      }
      if (pair < Traits::kStep)  // of what is past the end any
        cp_async_4(shared_address(&shared.shares[step % 2][threadIdx.x]),
                   shares + min(step * Traits::kStep + pair, rows - 2));
      cp_async_commit();
    };
    const int queries = min(p.geometry.segment, p.geometry.seqlen_q);
    for (int begin = 0; begin < queries; begin += Traits::kQueries) {
      load(0);
      load_queries(begin);
      for (int step = 0; step < steps; ++step) {
        load(step + 1);
        cp_async_wait<1>();
        __syncthreads();
        float largest[8];  // number j is of rows 8 * j + lane % 4 * 2 and the next of the step
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          weigh(step, part, largest[2 * part], largest[2 * part + 1]);
          asm volatile("" ::: "memory");  // parts one by one: side by side they take too many registers
        }
        float x = largest_of_lanes(largest);
#pragma unroll
        for (int other = 1; other < kLanes; other *= 2) x = larger_or_nan(x, __shfl_xor_sync(kFullWarp, x, other));
        shared.largest[step % 2][warp][lane] = x;
        __syncthreads();  // every warp is done with the step's keys, and has its maxima there
        store(step, begin == 0);
      }
      cp_async_wait<0>();
    }
  }
};

// A block of threads takes a segment of a head.
template <class Traits>
__device__ __forceinline__ void query_weights(const RankKeysParams& p, typename Traits::Shared& shared) {
  QueryWeights<Traits> weights(p, shared);
  if (weights.block.end > 0) weights.find_scores();
}

}  // namespace s2o
