// Scores of units of keys by the weight that any single query of a segment gives them, of segments of up to 128 queries,
// by products of 8-bit integers.
//
//   scores[row, unit] = max over queries r and the unit's groups of keys c of
//                       scale_log2 * r . mean(c) + log2(share(c)) - norm(r), in float16
//
//   rows are (head, segment) pairs of the chunk; Chunk::place says where their scores are
//
// A tensor core multiplies twice as many such numbers at a time as 16-bit ones, and waits while anything else is done for a
// product: so little else is. The segment's queries lie in shared memory as the threads of a product have them, and each warp
// walks tiles of keys of its own, straight from global memory, without a barrier. A thread has all groups of a unit. What
// a sum begins with stands for minus the query's norm and makes the sum's bits those of a float32 (kOrigin), so that of
// each product nothing is left to do but an integer maximum.
#include "selection/segment_block.cuh"
#include "selection/sortable.cuh"
#include "selection/unit_tile.cuh"

namespace s2o {

// A query's norm counts for at most so many steps of a sum more than the segment's smallest. A sum cut off so is at most
// kMostProduct - kMostLess, which is below any sum of the query with the smallest norm: it is no maximum.
constexpr float kMostLess = 4.2e6f;
template <int kHeadDim>
constexpr float kMostProduct = kHeadDim * kLargestInt8<kHeadDim> * kLargestInt8<kHeadDim>;

template <class Element_, int kHeadDim_, int kClusters_>
struct IntegerWeightTraits {
  using Element = Element_;
  static constexpr int kClusters = kClusters_;  // groups of keys of a unit
  static constexpr int kHeadDim = kHeadDim_, kThreads = 128, kWarps = kThreads / 32, kQueries = 128;
  using Tile = IntegerTile<kHeadDim>;
  struct alignas(16) Shared {
    uint32 queries[kQueries / 8][Tile::kParts / 2][32][4];  // of 8 queries and 64 columns, those of each lane of a product
    // Norms less the segment's smallest, of two queries, and once more, as both rows of a sum begin with them: the compiler
    // would copy them for each sum did it know that they are the same.
    float less[kQueries / 2][4];
    float largest[kWarps], smallest[kWarps];  // element, norm of a warp's queries
    int not_finite[kWarps];                   // whether one of them has an element that is not
  };
};

// d[16, 8] = a[16, 32] b[32, 8] + c, of 8-bit integers.
__device__ __forceinline__ void multiply_int8(int (&d)[4], const uint4& a, uint32 b0, uint32 b1, const int (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

template <class Traits>
struct IntegerWeights {
  using Element = typename Traits::Element;
  using Tile = typename Traits::Tile;
  using Rows = ThreadUnits<Traits::kClusters>;
  static constexpr int kHeadDim = Traits::kHeadDim, kParts = Tile::kParts, kUnits = Rows::kUnits;
  static constexpr int kSixteens = kHeadDim > 128 ? 2 : 4;  // of a tile's rows at a time, as registers are few
  static_assert(kMostLess > 2 * kMostProduct<kHeadDim>, "what is cut off is no maximum");
  static_assert(kOrigin - kMostLess - kMostProduct<kHeadDim> >= 8388608.f &&
                    kOrigin + kMostProduct<kHeadDim> < 16777216.f, "bits count");

  const RankKeysParams& p;
  typename Traits::Shared& shared;
  SegmentBlock<1, kHeadDim> block;
  int lane, warp, segment;
  float step;      // what a step of a query's elements is, times the scale
  float smallest;  // norm of the segment's queries; NaN where one is not finite

  __device__ __forceinline__ IntegerWeights(const RankKeysParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), block(p_), lane(threadIdx.x % 32), warp(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)),
        segment(block.segment(0)) {}

  // Takes the segment's queries to 8 bits. Past its last one the first stands in, which changes no maximum.
  __device__ __forceinline__ void load_queries() {
    constexpr int kLanes = kHeadDim / 8, kAtOnce = Traits::kThreads / kLanes;  // threads of a row; rows
    const Geometry& g = p.geometry;
    const int eighth = threadIdx.x % kLanes, slot = threadIdx.x / kLanes, count = g.query_count(segment);
    const int64 begin = g.query_begin(segment);
    const uint16* rows = p.q.at(block.head / p.heads, block.head % p.heads) + begin * p.q.row + eighth * 8;
    const auto there = [&](int r) { return r < count ? r : 0; };
    const auto load = [&](int r) {
      return load_16_or_zeros(rows + static_cast<int64>(there(r)) * p.q.row, eighth * 8 < g.head_dim);
    };
    const float norm = p.norms[static_cast<int64>(block.head) * g.seqlen_q + begin + there(threadIdx.x)];
    float largest = 0.f, least = norm;
    bool not_finite = false;
#pragma unroll 4
    for (int r = slot; r < Traits::kQueries; r += kAtOnce) {
      const uint4 x = load(r);
      for (const uint32 pair : {x.x, x.y, x.z, x.w}) {
        not_finite |= has_nonfinite<Element>(pair);
        largest = fmaxf(largest, fmaxf(fabsf(Element::low(pair)), fabsf(Element::high(pair))));
      }
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, other));
      least = fminf(least, __shfl_xor_sync(kFullWarp, least, other));
    }
    not_finite = __any_sync(kFullWarp, not_finite);
    if (lane == 0) shared.largest[warp] = largest, shared.smallest[warp] = least, shared.not_finite[warp] = not_finite;
    __syncthreads();
    not_finite = false;
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) {
      largest = fmaxf(largest, shared.largest[w]);
      least = fminf(least, shared.smallest[w]);
      not_finite |= shared.not_finite[w] != 0;
    }
    const float of_element = step_of_int8<kHeadDim>(largest), inverse = __frcp_rn(of_element);
    const float factor = p.scale_log2 < 0.f ? -inverse : inverse;
    step = of_element * fabsf(p.scale_log2);
    smallest = not_finite ? __int_as_float(0x7fffffff) : least;
    shared.less[threadIdx.x / 2][threadIdx.x % 2] = shared.less[threadIdx.x / 2][threadIdx.x % 2 + 2] = norm - least;
#pragma unroll 4
    for (int r = slot; r < Traits::kQueries; r += kAtOnce) {
      const uint4 x = load(r);
      const auto packed = [&](uint32 low, uint32 high) {
        return pack_int8(Element::low(low), Element::high(low), Element::low(high), Element::high(high), factor);
      };
      uint32* to = &shared.queries[r / 8][eighth / 8][r % 8 * 4 + eighth % 4][eighth / 4 % 2 * 2];
      to[0] = packed(x.x, x.y);
      to[1] = packed(x.z, x.w);
    }
    __syncthreads();
  }

  // Tiles of a warp: four neighbours at a time, as warps take turns.
  __device__ __forceinline__ int tile_of(int number) const { return (number / 4 * Traits::kWarps + warp) * 4 + number % 4; }

  // The largest sums of rows first * 16 + lane / 4, 8, 16 ... more of a tile, over all queries. `to_sum`: of each unit, from
  // log2 of a weight to a step of a sum.
  template <int kFirst>
  __device__ __forceinline__ void multiply(int (&best)[8], const unsigned char* tile, const float (&to_sum)[kUnits]) const {
    uint4 rows[kSixteens][kParts];  // of each 16, and 32 columns: of both of the lane's rows four columns, and four more
#pragma unroll
    for (int i = 0; i < kSixteens; ++i)
#pragma unroll
      for (int c = 0; c < kParts; ++c) rows[i][c] = *reinterpret_cast<const uint4*>(tile + Tile::of(kFirst + i, c, lane));
#pragma unroll 2
    for (int eight = 0; eight < Traits::kQueries / 8; ++eight) {
      uint32 x[kParts][2];  // of eight queries
#pragma unroll
      for (int c = 0; c < kParts; c += 2) {
        const uint4 two = *reinterpret_cast<const uint4*>(shared.queries[eight][c / 2][lane]);
        x[c][0] = two.x, x[c][1] = two.y, x[c + 1][0] = two.z, x[c + 1][1] = two.w;
      }
      const float4 less = *reinterpret_cast<const float4*>(shared.less[eight * 4 + lane % 4]);
      int d[kSixteens][4], begin[4];  // of each 16: row lane / 4 and two queries, the row 8 more and these
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) {
        constexpr int kOfUnit = Traits::kClusters / 2;  // sixteens
        const int unit = (kFirst + i) / kOfUnit;
        const auto begin_with = [&](float x) {
          return __float_as_int(fmaxf(fmaf(-x, to_sum[unit], kOrigin), kOrigin - kMostLess));
        };
        if (i == 0 || (kFirst + i) % kOfUnit == 0)
          begin[0] = begin_with(less.x), begin[1] = begin_with(less.y), begin[2] = begin_with(less.z),
          begin[3] = begin_with(less.w);
        multiply_int8(d[i], rows[i][0], x[0][0], x[0][1], begin);
      }
#pragma unroll
      for (int c = 1; c < kParts; ++c)
#pragma unroll
        for (int i = 0; i < kSixteens; ++i) multiply_int8(d[i], rows[i][c], x[c][0], x[c][1], d[i]);
#pragma unroll
      for (int i = 0; i < kSixteens; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int& of_row = best[2 * (kFirst + i) + h];
          of_row = max(of_row, max(d[i][2 * h], d[i][2 * h + 1]));
        }
    }
  }

  // Scores of a tile's units.
  __device__ __forceinline__ void weigh(int tile) const {
    constexpr int kClusters = Traits::kClusters;
    const int64 of_head = block.kv_head() * Rows::tiles(p.geometry.units()) + tile;
    const unsigned char* rows = reinterpret_cast<const unsigned char*>(p.unit_rows) + of_head * Tile::kBytes;
    const uint4 packed = *reinterpret_cast<const uint4*>(p.row_shares + of_head * kTileRows + lane / 4 * 8);
    float of_sum[kUnits], to_sum[kUnits];  // from a step of a sum to log2 of a weight, and back
#pragma unroll
    for (int v = 0; v < kUnits; ++v) {
      of_sum[v] = fminf(p.unit_scales[of_head * (8 * kUnits) + v * 8 + lane / 4] * step, 1e30f);
      to_sum[v] = fminf(1.f / of_sum[v], 1e30f);
    }
    int best[8] = {};  // of the lane's rows
    multiply<0>(best, rows, to_sum);
    if constexpr (kSixteens < 4) multiply<kSixteens>(best, rows, to_sum);
    const uint32 shares[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int v = 0; v < kUnits; ++v) {
      float x = -infinity();
#pragma unroll
      for (int i = v * kClusters; i < (v + 1) * kClusters; ++i) {
        const float share = i % 2 ? Float16::high(shares[i / 2]) : Float16::low(shares[i / 2]);
        x = larger_or_nan(x, fmaf(__int_as_float(best[i]) - kOrigin, of_sum[v], share - smallest));
      }
      x = larger_or_nan(x, __shfl_xor_sync(kFullWarp, x, 1));
      x = larger_or_nan(x, __shfl_xor_sync(kFullWarp, x, 2));
      const int unit = (tile * kUnits + v) * 8 + lane / 4;
      if (is_near(p, segment, unit)) x = infinity();
      if (lane % 4 == 0 && unit < block.end)
        p.scores[p.chunk.place(block.head, segment) + unit] = static_cast<uint16>(Float16::pack(x, 0.f));
    }
  }

  __device__ __forceinline__ void find_scores() {
    load_queries();
    const int tiles = (block.end + 8 * kUnits - 1) / (8 * kUnits);
#pragma unroll 1
    for (int number = 0; tile_of(number) < tiles; ++number) weigh(tile_of(number));
  }
};

// A block of threads takes a segment of a head.
template <class Traits>
__device__ __forceinline__ void query_weights_int8(const RankKeysParams& p, typename Traits::Shared& shared) {
  IntegerWeights<Traits> weights(p, shared);
  if (weights.block.end > 0) weights.find_scores();
}

}  // namespace s2o
