// Scores of units of keys by the weight that any single query of a segment gives them, by 16-bit products.
//
//   scores[row, unit] = max over queries r and the unit's groups of keys c of
//                       scale_log2 * r . mean(c) + log2(share(c)) - norm(r), in float16
//
//   rows are (head, segment) pairs of the chunk; Chunk::place says where their scores are
//
// Where products of 8 bits can be had query_weights_sm90.cu has them. Here each warp keeps 32 queries in registers, and
// the steps of keys pass by all warps.
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
  uint32 a[kTiles][kDims][4];  // fragments of the warp's queries
  float less[kTiles][2];       // minus the norms of queries lane / 4 and 8 more of each tile

  __device__ __forceinline__ QueryWeights(const RankKeysParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), block(p_), lane(threadIdx.x % 32), warp(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)),
        segment(block.segment(0)),
        rows_of_lane(chunk_address<Traits>(shared_address(shared_.units[0]), lane % 8 + lane / 16 * 8, lane / 8 % 2)) {}

  // The segment's query r; past its last one the first stands in, which changes no maximum.
  __device__ __forceinline__ int query(int r) const {
    return p.geometry.query_begin(segment) + (r < p.geometry.query_count(segment) ? r : 0);
  }
  // The warp's queries, from query `first` of the segment on.
  __device__ __forceinline__ void load_queries(int first) {
    const float* norms = p.norms + static_cast<int64>(block.head) * p.geometry.seqlen_q;
    const uint16* of_head = p.q.at(block.head / p.heads, block.head % p.heads);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = query(first + (warp * kTiles + i) * 16 + lane / 4 + 8 * h);
        less[i][h] = -norms[r];
        const uint16* row = of_head + r * p.q.row;
        const int end = p.geometry.head_dim - lane % 4 * 2;  // of the columns from the lane's on
        row += lane % 4 * 2;
#pragma unroll
        for (int c = 0; c < 2 * kDims; ++c) {
          uint32& pair = a[i][c / 2][c % 2 * 2 + h];
          pair = 0;  // past head_dim
          if (c * 8 >= end) continue;
          if (p.aligned) {
            pair = *reinterpret_cast<const uint32*>(row + c * 8);
          } else {
            pair = row[c * 8] | (c * 8 + 1 < end ? row[c * 8 + 1] : 0u) << 16;
          }
        }
      }
  }
  // Finds the largest weight that the lane's queries give either of its two groups, in each half of the 16 rows of keys
  // from row 16 * part of a step on.
  __device__ __forceinline__ void weigh(int step, int part, float& first_half, float& second_half) const {
    // Chunk 2 c + b of a row stands where its number, but for the swizzle's bits, says: 2 c is one exclusive or.
    const uint32 of_lane = rows_of_lane + (step % 2 * Traits::kStep + part * 16) * Traits::kHeadDim * 2;
    const int rows = p.geometry.units() * kUnitKeys;
    const uint16* of_head = p.cluster_shares + block.kv_head() * rows;
    uint32 shares[2];  // log2 of what part of its unit's keys each of two groups has; of what is past the end any
#pragma unroll
    for (int j = 0; j < 2; ++j)
      shares[j] = *reinterpret_cast<const uint32*>(
          of_head + min(step * Traits::kStep + part * 16 + j * 8 + lane % 4 * 2, rows - 2));
    float s[kTiles][2][4] = {};  // [queries lane / 4 and 8 more, groups]
#pragma unroll
    for (int c = 0; c < kDims; ++c) {
      uint32 x[4];
      ldmatrix_x4(x, of_lane ^ c * 32);
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
        of[e] = fmaf(s[0][j][e], p.scale_log2, less[0][0]);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int h = i == 0; h < 2; ++h) of[e] = larger_or_nan(of[e], fmaf(s[i][j][2 * h + e], p.scale_log2, less[i][h]));
      }
      (j == 0 ? first_half : second_half) =
          larger_or_nan(of[0] + Float16::low(shares[j]), of[1] + Float16::high(shares[j]));
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
    store_if(stores, target, Float16::pack(x, 0.f));
  }
  __device__ __forceinline__ void find_scores() {
    const int rows = kUnitKeys * block.end, steps = (rows + Traits::kStep - 1) / Traits::kStep;
    constexpr int kChunks = Traits::kHeadDim / 8, kRows = Traits::kThreads / kChunks;  // of a row; that are loaded at a time
    const int chunk = threadIdx.x % kChunks, of_thread = threadIdx.x / kChunks;
    const uint16* data = block.unit_keys() + of_thread * Traits::kHeadDim + chunk * 8;  // [rows, kHeadDim]
    const auto load = [&](int step) {
      const uint32 tile = shared_address(shared.units[step % 2]), first = step * Traits::kStep;
      if (step < steps)
#pragma unroll 1
        for (int row = 0; row < Traits::kStep; row += kRows) {
          const bool present = first + row + of_thread < rows;
          cp_async_16_or_zeros(chunk_address<Traits>(tile, row + of_thread, chunk),
                               data + (present ? (first + row) * Traits::kHeadDim : 0u), present);
        }
      cp_async_commit();
    };
    const int queries = min(p.geometry.segment, p.geometry.seqlen_q);
    for (int first = 0; first < queries; first += Traits::kQueries) {
      load_queries(first);
      load(0);
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
        store(step, first == 0);
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
