// unit_weights on Hopper, of up to 16 pooled queries a segment (unit_weights.cu has the portable one): by wgmma.
//
// A warp has kTurns segments, and so a warpgroup as many products of 64 rows, (segment, pooled query) pairs. They take
// turns: one runs while exponentials or maxima of another are found. All warps read the same units, kTile rows of
// unit_keys at a time: first mean keys, for norms, then both rows, for scores.
#include "selection/segment_block.cuh"
#include "selection/sortable.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct WeightSm90Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8, kThreads = 256;
  static constexpr int kTurns = 2, kSegments = kThreads / 32 * kTurns;  // of a warp, of a block
  static constexpr int kTile = 128, kStages = 4;                        // rows of unit_keys, tiles of them
  struct Shared {
    uint16 units[kStages][kTile * kHeadDim];
  };
};

// Where row i of a tile stands: wgmma gives a thread columns 2 t, 2 t + 1 of each 8, which are then rows 4 t .. 4 t + 3
// of each 16, two units.
__device__ __forceinline__ constexpr int place_of_row(int i) { return (i & ~15) | (i & 2) << 2 | (i >> 1 & 6) | (i & 1); }

// Without a branch around which lanes would have to meet again.
__device__ __forceinline__ void store_pair_if(bool wanted, uint16* target, uint32 pair) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.b32 [%0], %1; }"
               :: "l"(__cvta_generic_to_global(target)), "r"(pair), "r"(static_cast<uint32>(wanted)) : "memory");
}

// Of 2 * kHalf pairs the lower lanes keep the first half, the upper ones the second, the larger of both lanes'.
template <int kHalf>
__device__ __forceinline__ void share_largest_pairs(uint32 (&x)[8]) {
  const bool upper = threadIdx.x & 4 * kHalf;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const uint32 mine = upper ? x[i + kHalf] : x[i], theirs = upper ? x[i] : x[i + kHalf];
    x[i] = Float16::larger_or_nan(mine, __shfl_xor_sync(kFullWarp, theirs, 4 * kHalf));
  }
}

// Block: kSegments neighbouring segments of a head.
template <class Traits>
__device__ __forceinline__ void unit_weights_sm90(const RankKeysParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kTurns = Traits::kTurns, kTile = Traits::kTile, kStages = Traits::kStages, kDims = Traits::kHeadDim / 16;
  constexpr int kAtATime = Traits::kThreads / Traits::kChunks;  // rows of a tile that the block copies
  static_assert(kTurns == 2 && kAtATime % 16 == 0);
  const Geometry& g = p.geometry;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  const SegmentBlock<Traits::kSegments, Traits::kHeadDim> block(p);
  const int end = block.end;
  if (end <= 0) return;

  const int norm_tiles = (end + kTile - 1) / kTile, tiles = norm_tiles + (2 * end + kTile - 1) / kTile;
  const int chunk = threadIdx.x % Traits::kChunks, slot = threadIdx.x / Traits::kChunks;
  const uint16* units = block.unit_keys() + chunk * 8;
  const uint32 place = atom_chunk<kTile>(shared_address(shared.units), place_of_row(slot), chunk);
  const auto load = [&](int tile) {
    if (tile < tiles) {
      const int of_unit = tile < norm_tiles ? 1 : 2;  // rows: the mean key, or both
      const int row = (tile < norm_tiles ? tile : tile - norm_tiles) * kTile + slot, rows = of_unit * end;
      const uint16* from = units + static_cast<int64>(row) * ((3 - of_unit) * Traits::kHeadDim);
      const uint32 to = place + tile % kStages * (kTile * Traits::kHeadDim * 2);
#pragma unroll
      for (int i = 0; i < kTile; i += kAtATime)
        cp_async_16_or_zeros(to + i * 128, from + i * ((3 - of_unit) * Traits::kHeadDim), row + i < rows);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int tile = 0; tile < kStages - 1; ++tile) load(tile);

  int segment[kTurns], row_end[kTurns];
  uint16* target[kTurns];
  uint32 a[kTurns][kDims][4];  // fragments of pooled queries
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int n = warp * kTurns + i;
    segment[i] = block.segment(n);
    row_end[i] = block.there(n) ? block.units_of(segment[i]) : 0;
    target[i] = p.scores + p.chunk.place(block.head, segment[i]) + 2 * lane;
    block.load_pooled(a[i], segment[i], 0);
  }

  float d[kTurns][kTile / 2];  // products [pooled queries lane / 4 and 8 more, rows of a tile]
  const auto issue = [&](int turn, int tile) {
    const uint32 b = tile_descriptor(shared_address(shared.units[tile % kStages]), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kDims; ++c)
      Wgmma<Element>::rs_rows(d[turn], a[turn][c], descriptor_at(b, atom_columns<kTile>(c)), c > 0);
    wgmma_commit();
  };
  // This thread's copies of the next tile have come.
  const auto landed = [&] {
    cp_async_wait<kStages - 3>();
    fence_for_wgmma();
  };
  cp_async_wait<kStages - 2>();
  fence_for_wgmma();
  __syncthreads();
  issue(0, 0);
  wgmma_wait<0>();
  finished(d[0]);

  // The largest score so far in log2 units, rounded once, and the sum of exp2(score - m): exactly the same however many
  // tiles without a candidate there are, so that a norm does not depend on the segments beside it.
  float m[kTurns][2], l[kTurns][2];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    m[i][0] = m[i][1] = -infinity();
    l[i][0] = l[i][1] = 0.f;
  }
  const auto add_to_norms = [&](int turn, int tile) {
    float(&s)[kTile / 2] = d[turn];
    const int begin = g.dense_begin(segment[turn]) >> g.unit_shift, last = row_end[turn];
    if (tile * kTile >= last) return;  // also so that this is done before the next product is waited for
    const int skipped_to = begin + (g.units() - g.ranked(segment[turn]));  // units of [begin, skipped_to) are no candidates
    const int first = tile * kTile, behind = first + kTile;
    if (behind > begin && (first < skipped_to || behind > last)) {
      const int at = first + lane % 4 * 4;
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int unit = at + j / 2 * 16 + j % 2 * 2 + e % 2;
          if (unit >= begin && (unit < skipped_to || unit >= last)) s[j * 4 + e] = -infinity();
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest[4] = {-infinity(), -infinity(), -infinity(), -infinity()}, sum[4] = {};
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j)
        largest[j % 4] = fmaxf(largest[j % 4], fmaxf(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]));
      const float of_all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      const float top = fmaxf(m[turn][h], __fmul_rn(of_all, p.scale_log2));
      const float base = top == -infinity() ? 0.f : top;
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j)
        sum[j % 4] += exp2_approx(fmaf(s[j * 4 + 2 * h], p.scale_log2, -base)) +
                      exp2_approx(fmaf(s[j * 4 + 2 * h + 1], p.scale_log2, -base));
      l[turn][h] = l[turn][h] * exp2_approx(m[turn][h] - base) + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
      m[turn][h] = top;
    }
  };
#pragma unroll 1
  for (int tile = 0; tile < norm_tiles; ++tile) {
    issue(1, tile);
    add_to_norms(0, tile);
    landed();
    __syncthreads();
    wgmma_wait<0>();
    finished(d[1]);
    issue(0, tile + 1);
    load(tile + kStages - 1);
    add_to_norms(1, tile);
    wgmma_wait<0>();
    finished(d[0]);
  }

  float norm[kTurns][2];  // log2 of the sum of a pooled query's weights; 0 where it is not finite
#pragma unroll
  for (int i = 0; i < kTurns; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = m[i][h];
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
      const float base = top == -infinity() ? 0.f : top;
      float sum = l[i][h] * exp2_approx(m[i][h] - base);
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      const float found = base + __log2f(sum);
      norm[i][h] = fabsf(found) < infinity() ? found : 0.f;
    }

  const float outlier_shift = static_cast<float>(g.unit_shift + spec::kOutlierShift);
  // Scores of this lane's two units, of both halves of a tile's 64.
  const auto scores_of = [&](int turn) {
    const float(&s)[kTile / 2] = d[turn];
    // log2 of what a pooled query gives a unit; NaN if a product is.
    const auto weight = [&](int j, int h) {
      return larger_or_nan(__fmul_rn(s[j * 4 + 2 * h], p.scale_log2),
                           fmaf(s[j * 4 + 2 * h + 1], p.scale_log2, -outlier_shift)) - norm[turn][h];
    };
    uint32 x[8];
#pragma unroll
    for (int j = 0; j < kTile / 8; j += 2)
      x[j / 2] = Float16::pack(larger_or_nan(weight(j, 0), weight(j, 1)), larger_or_nan(weight(j + 1, 0), weight(j + 1, 1)));
    // The largest over lanes of equal lane % 4: a lane is left with units 2 * lane and 2 * lane + 1.
    share_largest_pairs<4>(x);
    share_largest_pairs<2>(x);
    share_largest_pairs<1>(x);
    return x[0];
  };
  const auto is_wanted = [&](int turn, int tile) { return (tile - norm_tiles) * (kTile / 2) < row_end[turn]; };
  const auto store = [&](int turn, int tile, uint32 pair) {
    const int first_unit = (tile - norm_tiles) * (kTile / 2);
    // What is past the end of the row's candidates is never read.
    store_pair_if(first_unit + 2 * lane < row_end[turn], target[turn] + first_unit, pair);
  };
#pragma unroll 1
  for (int tile = norm_tiles; tile < tiles - 1; ++tile) {
    uint32 pairs[2] = {};
    issue(1, tile);
    if (is_wanted(0, tile)) pairs[0] = scores_of(0);
    landed();
    __syncthreads();
    wgmma_wait<0>();
    finished(d[1]);
    issue(0, tile + 1);
    store(0, tile, pairs[0]);  // now, so that no fence waits for it
    load(tile + kStages - 1);
    if (is_wanted(1, tile)) pairs[1] = scores_of(1);
    store(1, tile, pairs[1]);
    wgmma_wait<0>();
    finished(d[0]);
  }
  issue(1, tiles - 1);
  store(0, tiles - 1, scores_of(0));
  wgmma_wait<0>();
  finished(d[1]);
  store(1, tiles - 1, scores_of(1));
}

}  // namespace s2o
