// Scores of units of keys by the weight that pooled queries give them.
//
//   scores[row, unit] = log2 of the largest softmax weight that a pooled query of row's segment gives the unit, of all
//                       units that are candidates of the segment; in float16
//
//   rows are (head, segment) pairs of the chunk; Chunk::place says where their scores are
//
//   Norms are of mean keys alone. A unit is worth its mean key, or a small part of its outlier (unit_keys.cu) if that is
//   more: reference/ordering.py has the rule.
//
// Products with all mean keys are made twice, on tensor cores: for the pooled queries' norms, then for the scores. That
// takes less than keeping those of each pooled query.
#include "sm80/attention.cuh"
#include "selection/lane_maxima.cuh"
#include "selection/segment_block.cuh"

namespace s2o {

constexpr int kUnitStep = 64;       // rows of unit_keys of a step: mean keys, or both rows of half as many units
constexpr int kWeightThreads = 128;
constexpr int kPooledTile = 16;     // pooled queries of a segment that are multiplied at a time

template <class Element_, int kHeadDim_>
struct WeightTraits {
  using Element = Element_;
  static constexpr int kUnitKeys = 2;  // rows of unit_keys
  static constexpr int kHeadDim = kHeadDim_, kStep = kUnitStep, kThreads = kWeightThreads;
  static constexpr bool kAligned = true, kPaged = false;
  static constexpr int kOfWarp = kHeadDim > 128 ? 1 : 2;              // segments of a warp
  static constexpr int kSegments = kWeightThreads / 32 * kOfWarp;     // of a block
  struct Shared {
    uint16 units[2][kStep * kHeadDim];
    // log2 of the sum of a pooled query's weights; 0 where it is not finite
    float norms[kSegments][spec::kMostPooled];
    int first_key;
  };
};

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
  float s[kOfWarp][kUnitTiles][4];  // products [pooled queries lane / 4 and 8 more, rows of half a step]

  __device__ __forceinline__ UnitWeights(const RankKeysParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), block(p_), lane(threadIdx.x % 32), warp(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)) {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) segment[i] = block.segment(warp * kOfWarp + i);
  }
  __device__ __forceinline__ void load_pooled(int tile) {
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
  // log2 of what a pooled query gives unit j * 4 + lane % 4 of half a step, up to its norm; NaN if a product is.
  __device__ __forceinline__ float weight(int i, int j, int h) const {
    return larger_or_nan(__fmul_rn(s[i][j][2 * h], p.scale_log2),
                         fmaf(s[i][j][2 * h + 1], p.scale_log2,
                              -static_cast<float>(p.geometry.unit_shift + spec::kOutlierShift)));
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

  __device__ __forceinline__ void find_scores() {
    const int tiles = (p.pooled_queries + kPooledTile - 1) / kPooledTile;
    int loaded = tiles - 1;  // by find_norms
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
        const float* norms = shared.norms[warp * kOfWarp + i] + r;
#pragma unroll
        for (int j = 0; j < kUnitTiles; ++j) {
          const float of_both = larger_or_nan(weight(i, j, 0) - norms[0], weight(i, j, 1) - norms[8]);
          float& so_far = best[i][half.kFirst + j];
          so_far = is_first ? of_both : larger_or_nan(so_far, of_both);
        }
      }
    };
    walk<kUnitKeys>([&](int step, auto half) {
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
        const float largest = largest_of_lanes(best[i]);  // of the unit of the lane's own number
        const int at = step * kUnits + lane;
        store_if(at < row_end[i], p.scores + row_place[i] + at, Float16::pack(largest, 0.f));
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

}  // namespace s2o
