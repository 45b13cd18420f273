// Scores of units of keys by the weight that pooled queries give them, or that queries do by themselves.
//
//   unit_weights: scores[row, unit] = log2 of the largest softmax weight that a pooled query of row's segment gives the
//                 unit, of all units that are candidates of the segment; in float16
//   query_weights: the same of single queries, by the norms that query_norms.cu has found
//
//   rows are (head, segment) pairs of the chunk; Chunk::place says where their scores are
//
//   Norms are of mean keys alone. A unit is worth its mean key, or a small part of its outlier (unit_keys.cu) if that is
//   more: reference/ordering.py has the rule.
//
// Products with all mean keys are made twice, on tensor cores: for the pooled queries' norms, then for the scores. That
// takes less than keeping those of each pooled query.
#include "sm80/attention.cuh"
#include "selection/segment_block.cuh"
#include "selection/sortable.cuh"

namespace s2o {

constexpr int kUnitStep = 64;       // rows of unit_keys of a step: mean keys, or both rows of half as many units
constexpr int kWeightThreads = 128;
constexpr int kPooledTile = 16;     // pooled queries of a segment that are multiplied at a time

template <class Element_, int kHeadDim_, int kClusters_ = 0>
struct WeightTraits {
  using Element = Element_;
  static constexpr bool kByQuery = kClusters_ > 0;  // each query by itself is a pooled query
  static constexpr int kUnitKeys = kByQuery ? kClusters_ : 2;  // rows of unit_keys
  static constexpr int kHeadDim = kHeadDim_, kStep = kUnitStep, kThreads = kWeightThreads;
  static constexpr bool kAligned = true, kPaged = false;
  static constexpr int kOfWarp = kHeadDim > 128 ? 1 : 2;              // segments of a warp
  static constexpr int kSegments = kWeightThreads / 32 * kOfWarp;     // of a block
  struct Shared {
    uint16 units[2][kStep * kHeadDim];
    // log2 of the sum of a pooled query's weights; 0 where it is not finite
    float norms[kByQuery ? 1 : kSegments][kByQuery ? 1 : spec::kMostPooled];
    int first_key;
  };
};

// Without a branch around which lanes would have to meet again.
__device__ __forceinline__ void store_if(bool wanted, uint16* target, uint16 score) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.b16 [%0], %1; }"
               :: "l"(__cvta_generic_to_global(target)), "h"(score), "r"(static_cast<uint32>(wanted)) : "memory");
}

// A choice that is no branch: lanes of a warp that choose otherwise would part there, and meet again at each shuffle.
__device__ __forceinline__ float choose(bool first, float a, float b) {
  float y;
  asm("{ .reg .pred p; setp.ne.u32 p, %3, 0; selp.f32 %0, %1, %2, p; }"
      : "=f"(y) : "f"(a), "f"(b), "r"(static_cast<uint32>(first)));
  return y;
}

// Which half of a step's rows, known to the compiler.
template <int kHalf>
struct Half {
  static constexpr int kTiles = kUnitStep / 16, kFirst = kHalf * kTiles;  // of 8 rows
};

// A warp's segments, and their products with units.
template <class Traits>
struct UnitWeights {
  using Element = typename Traits::Element;
  static constexpr int kOfWarp = Traits::kOfWarp, kDims = Traits::kHeadDim / 16, kUnitTiles = kUnitStep / 16;
  static constexpr int kUnitKeys = Traits::kUnitKeys;
  static constexpr int kUnits = kUnitStep / kUnitKeys;  // of a step that takes all their rows

  const RankKeysParams& p;
  typename Traits::Shared& shared;
  SegmentBlock<Traits::kSegments, Traits::kHeadDim, Traits::kUnitKeys> block;
  int lane, warp;
  int segment[kOfWarp];
  uint32 a[kOfWarp][kDims][4];    // fragments of a tile of pooled queries
  uint32 shares[kUnitTiles];      // of single queries: log2 of what part of a unit's keys rows are
  float s[kOfWarp][kUnitTiles][4];  // products [pooled queries lane / 4 and 8 more, rows of half a step]

  __device__ __forceinline__ UnitWeights(const RankKeysParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), block(p_), lane(threadIdx.x % 32), warp(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)) {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) segment[i] = block.segment(warp * kOfWarp + i);
  }
  // Of a segment.
  __device__ __forceinline__ int pooled_queries() const {
    return Traits::kByQuery ? min(p.geometry.segment, p.geometry.seqlen_q) : p.pooled_queries;
  }
  // Of the segment's query r, or of the first where there is none: two elements, zeros past head_dim.
  __device__ __forceinline__ uint32 query_pair(int i, int r, int column) const {
    const Geometry& g = p.geometry;
    const int at = g.query_begin(segment[i]) + (r < g.query_count(segment[i]) ? r : 0);
    const uint16* from = p.q.at(block.head / p.heads, block.head % p.heads) + at * p.q.row + column;
    if (p.aligned) return column < g.head_dim ? *reinterpret_cast<const uint32*>(from) : 0u;
    return (column < g.head_dim ? from[0] : 0u) | (column + 1 < g.head_dim ? from[1] : 0u) << 16;
  }
  __device__ __forceinline__ void load_pooled(int tile) {
    if constexpr (Traits::kByQuery) {
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
        for (int c = 0; c < kDims; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            a[i][c][e] =
                query_pair(i, tile * kPooledTile + e % 2 * 8 + lane / 4, c * 16 + e / 2 * 8 + lane % 4 * 2);
      return;
    }
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const uint32* from[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        from[h] = reinterpret_cast<const uint32*>(block.pooled(segment[i], tile * kPooledTile + h * 8 + lane / 4)) +
                  lane % 4;
#pragma unroll
      for (int c = 0; c < kDims; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][c][e] = from[e % 2][c * 8 + e / 2 * 4];
    }
  }
  template <int kHalf>
  __device__ __forceinline__ void multiply(int step, Half<kHalf>) {
    const uint32 units = shared_address(shared.units[step % 2]);
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int j = 0; j < kUnitTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = 0.f;
#pragma unroll
    for (int c = 0; c < kDims; ++c)
#pragma unroll
      for (int j = 0; j < kUnitTiles; j += 2) {
        uint32 x[4];
        ldmatrix_x4(x, chunk_address<Traits>(units, (Half<kHalf>::kFirst + j) * 8 + lane % 8 + lane / 16 * 8,
                                             c * 2 + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < kOfWarp; ++i) {
          Element::mma(s[i][j], a[i][c], x[0], x[1]);
          Element::mma(s[i][j + 1], a[i][c], x[2], x[3]);
        }
      }
  }
  // Multiplies the mean keys of all units, or with kRows == kUnitKeys all rows, half a step at a time, and calls
  // done(step, half) after each.
  template <int kRows, class Done>
  __device__ __forceinline__ void walk(const Done& done) {
    const int rows = kRows * block.end, steps = (rows + kUnitStep - 1) / kUnitStep;
    const Tensor<const uint16> units = {p.unit_keys, 0, 0, kUnitKeys / kRows * Traits::kHeadDim};
    const uint16* data = block.unit_keys();
    const ContiguousKeys<Traits> source{shared, rows, p.pages};
    const auto load = [&](int step) {
      if (step < steps)
        load_step<Traits>(shared_address(shared.units[step % 2]), data, units, Traits::kHeadDim, source, step);
      cp_async_commit();
    };
    load(0);
    for (int step = 0; step < steps; ++step) {
      load(step + 1);
      cp_async_wait<1>();
      __syncthreads();
      multiply(step, Half<0>());
      done(step, Half<0>());
      multiply(step, Half<1>());
      done(step, Half<1>());
      __syncthreads();  // every warp is done with this buffer
    }
    cp_async_wait<0>();
  }
  // log2 of what a pooled query gives unit j * 4 + lane % 4 of half a step, up to its norm; NaN if a product is. Of single
  // queries and units of four groups or more, that of two of these.
  __device__ __forceinline__ float weight(int i, int j, int h) const {
    if constexpr (Traits::kByQuery) {
      return larger_or_nan(fmaf(s[i][j][2 * h], p.scale_log2, Float16::low(shares[j])),
                           fmaf(s[i][j][2 * h + 1], p.scale_log2, Float16::high(shares[j])));
    }
    return larger_or_nan(__fmul_rn(s[i][j][2 * h], p.scale_log2),
                         fmaf(s[i][j][2 * h + 1], p.scale_log2,
                              -static_cast<float>(p.geometry.unit_shift + spec::kOutlierShift)));
  }
  // Shares of the groups of half a step, two each; of what is past the end any.
  __device__ __forceinline__ void load_shares(int first) {
    const int rows = p.geometry.units() * kUnitKeys;
    const uint16* of_head = p.cluster_shares + block.kv_head() * rows;
#pragma unroll
    for (int j = 0; j < kUnitTiles; ++j)
      shares[j] = *reinterpret_cast<const uint32*>(of_head + min(first + j * 8 + lane % 4 * 2, rows - 2));
  }
  __device__ __forceinline__ float norm(int i, int r) const {
    if constexpr (Traits::kByQuery) {
      const Geometry& g = p.geometry;
      const int at = g.query_begin(segment[i]) + (r < g.query_count(segment[i]) ? r : 0);
      return p.norms[static_cast<int64>(block.head) * g.seqlen_q + at];
    } else {
      return shared.norms[warp * kOfWarp + i][r];
    }
  }

  __device__ __forceinline__ void find_norms() {
    const Geometry& g = p.geometry;
    for (int tile = 0; tile * kPooledTile < p.pooled_queries; ++tile) {
      // The largest score so far in log2 units, rounded once, and the sum of exp2(score - m): exactly the same however
      // many steps without a candidate there are, so that a norm does not depend on the segments beside it.
      float m[kOfWarp][2], l[kOfWarp][2];
      int begin[kOfWarp], skipped_to[kOfWarp], last[kOfWarp];  // units of [begin, skipped_to) are no candidates
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        m[i][0] = m[i][1] = -infinity();
        l[i][0] = l[i][1] = 0.f;
        begin[i] = g.dense_begin(segment[i]) >> g.unit_shift;
        last[i] = block.units_of(segment[i]);
        skipped_to[i] = begin[i] + (g.units() - g.ranked(segment[i]));
      }
      load_pooled(tile);
      walk<1>([&](int step, auto half) {
#pragma unroll
        for (int i = 0; i < kOfWarp; ++i) {
          const int first = step * kUnitStep + half.kFirst * 8;
          if (first + kUnitTiles * 8 > begin[i]) {
#pragma unroll
            for (int j = 0; j < kUnitTiles; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int at = first + j * 8 + lane % 4 * 2 + e % 2;
                if (at >= begin[i] && (at < skipped_to[i] || at >= last[i])) s[i][j][e] = -infinity();
              }
          }
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float largest = -infinity();
#pragma unroll
            for (int j = 0; j < kUnitTiles; ++j)
#pragma unroll
              for (int e = 2 * h; e < 2 * h + 2; ++e) largest = fmaxf(largest, s[i][j][e]);
            const float top = fmaxf(m[i][h], __fmul_rn(largest, p.scale_log2));
            const float base = top == -infinity() ? 0.f : top;
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < kUnitTiles; ++j)
              sum += exp2_approx(fmaf(s[i][j][2 * h], p.scale_log2, -base)) +
                     exp2_approx(fmaf(s[i][j][2 * h + 1], p.scale_log2, -base));
            l[i][h] = l[i][h] * exp2_approx(m[i][h] - base) + sum;
            m[i][h] = top;
          }
        }
      });
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float top = m[i][h];
          top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
          top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
          const float base = top == -infinity() ? 0.f : top;
          float sum = l[i][h] * exp2_approx(m[i][h] - base);
          sum += __shfl_xor_sync(kFullWarp, sum, 1);
          sum += __shfl_xor_sync(kFullWarp, sum, 2);
          const int r = tile * kPooledTile + h * 8 + lane / 4;
          const float norm = base + __log2f(sum);
          if (lane % 4 == 0 && r < spec::kMostPooled)
            shared.norms[warp * kOfWarp + i][r] = fabsf(norm) < infinity() ? norm : 0.f;
        }
    }
    __syncwarp();  // a warp reads its own alone
  }

  // Of 2 * kHalf numbers the lower lanes keep the first half, the upper ones the second, the larger of both lanes'.
  template <int kHalf>
  __device__ __forceinline__ void share_largest(float (&x)[kUnitStep / 8]) const {
    const bool upper = lane & 4 * kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float mine = choose(upper, x[i + kHalf], x[i]), theirs = choose(upper, x[i], x[i + kHalf]);
      x[i] = larger_or_nan(mine, __shfl_xor_sync(kFullWarp, theirs, 4 * kHalf));
    }
  }

  __device__ __forceinline__ void find_scores() {
    const int tiles = (pooled_queries() + kPooledTile - 1) / kPooledTile;
    int loaded = tiles - 1;  // by find_norms
    if (Traits::kByQuery) load_pooled(loaded);
    int row_end[kOfWarp];
    int64 row_place[kOfWarp];
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      row_end[i] = block.there(warp * kOfWarp + i) ? block.units_of(segment[i]) : 0;
      row_place[i] = p.chunk.place(block.head, segment[i]);
    }
    float best[kOfWarp][kUnitStep / 8];  // number j is unit j * 4 + lane % 4 of a step
    const auto take = [&](int tile, bool is_first, auto half) {
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        const int r = tile * kPooledTile + lane / 4;
        const float norms[2] = {norm(i, r), norm(i, r + 8)};
#pragma unroll
        for (int j = 0; j < kUnitTiles; ++j) {
          const float of_both = larger_or_nan(weight(i, j, 0) - norms[0], weight(i, j, 1) - norms[1]);
          float& so_far = best[i][half.kFirst + j];
          so_far = is_first ? of_both : larger_or_nan(so_far, of_both);
        }
      }
    };
    walk<kUnitKeys>([&](int step, auto half) {
      if constexpr (Traits::kByQuery) load_shares(step * kUnitStep + half.kFirst * 8);
      take(loaded, true, half);
      for (int further = 1; further < tiles; ++further) {
        loaded = loaded + 1 == tiles ? 0 : loaded + 1;
        load_pooled(loaded);
        multiply(step, half);
        take(loaded, false, half);
      }
      if constexpr (half.kFirst == 0) return;
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) {
        // The largest over lanes of equal lane % 4: a lane is left with the unit of its own number.
        share_largest<4>(best[i]);
        share_largest<2>(best[i]);
        share_largest<1>(best[i]);
        constexpr int kLanes = kUnitKeys / 2;  // that have a unit
#pragma unroll
        for (int other = 1; other < kLanes; other *= 2)
          best[i][0] = larger_or_nan(best[i][0], __shfl_xor_sync(kFullWarp, best[i][0], other));
        const int at = step * kUnits + lane / kLanes;
        const bool stores = lane % kLanes == 0;
        const int64 place = Traits::kByQuery ? p.chunk.place(block.head, segment[i]) : row_place[i];
        store_if(stores && at < row_end[i], p.scores + place + at, Float16::pack(best[i][0], 0.f));
      }
    });
  }
};

// Block: kSegments neighbouring segments of a head.
template <class Traits>
__device__ __forceinline__ void unit_weights(const RankKeysParams& p, typename Traits::Shared& shared) {
  if (threadIdx.x == 0) shared.first_key = 0;
  __syncthreads();
  UnitWeights<Traits> weights(p, shared);
  if (weights.block.end <= 0) return;
  weights.find_norms();
  weights.find_scores();
}

template <class Traits>
__device__ __forceinline__ void query_weights(const RankKeysParams& p, typename Traits::Shared& shared) {
  if (threadIdx.x == 0) shared.first_key = 0;
  __syncthreads();
  UnitWeights<Traits> weights(p, shared);
  if (weights.block.end > 0) weights.find_scores();
}

}  // namespace s2o
