// unit_weights on Hopper, of up to 16 pooled queries a segment (unit_weights.cu has the portable one): by wgmma.
//
// A warp has a segment, and a warpgroup a product of 64 rows, (segment, pooled query) pairs. All warpgroups read the
// same units, kTile rows of unit_keys at a time: first mean keys, for norms, then both rows, for scores. Two multiply
// while the other two find exponentials or maxima.
#include "selection/segment_block.cuh"
#include "selection/sortable.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct WeightSm90Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8, kThreads = 512;
  static constexpr int kGroups = 4, kSegments = kThreads / 32;
  static constexpr int kTile = 128, kStages = 4;  // rows of unit_keys, tiles of them
  struct Shared {
    uint16 units[kStages][kTile * kHeadDim];
    uint16 pooled[kGroups][64 * kHeadDim];
    uint64 full[kStages], empty[kStages];  // barriers: a tile's copies have landed, all warps are done with it
  };
};

constexpr int kTurn = 1;  // the first of the named barriers at which a warpgroup waits for the one two before it

// Where row i of a tile stands: wgmma gives a thread columns 2 t, 2 t + 1 of each 8, which are then rows 4 t .. 4 t + 3
// of each 16, two units.
__device__ __forceinline__ constexpr int place_of_row(int i) {
  return (i & ~15) | (i & 2) << 2 | (i >> 1 & 6) | (i & 1);
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
  constexpr int kTile = Traits::kTile, kStages = Traits::kStages, kHeadDim = Traits::kHeadDim;
  constexpr int kAtATime = Traits::kThreads / Traits::kChunks;  // rows of a tile that the block copies
  static_assert(kAtATime % 16 == 0, "a thread's rows of a tile stand alike in each 16");
  const Geometry& g = p.geometry;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0), group = warp / 4;
  const SegmentBlock<Traits::kSegments, kHeadDim> block(p);
  const int end = block.end;
  if (end <= 0) return;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared.full[s], Traits::kThreads);
      barrier_init(shared.empty[s], Traits::kThreads / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const int norm_tiles = (end + kTile - 1) / kTile, tiles = norm_tiles + (2 * end + kTile - 1) / kTile;
  const int chunk = threadIdx.x % Traits::kChunks, slot = threadIdx.x / Traits::kChunks;
  for (int r = slot; r < Traits::kSegments * 16; r += kAtATime)
    cp_async_16(atom_chunk<64>(shared_address(shared.pooled[r / 64]), r % 64, chunk),
                block.pooled(block.segment(r / 16), r % 16) + chunk * 8);
  cp_async_commit();
  const uint16* units = block.unit_keys() + chunk * 8;
  const uint32 place = atom_chunk<kTile>(shared_address(shared.units), place_of_row(slot), chunk);
  // PTX formally asks for a proxy fence between these copies and wgmma: docs/kernels.md, "Producer of pass 2".
  const auto load = [&](int tile) {
    if (tile >= tiles) return;
    if (tile >= kStages) barrier_wait(shared.empty[tile % kStages], tile / kStages - 1 & 1);
    const int of_unit = tile < norm_tiles ? 1 : 2;  // rows: the mean key, or both
    const int row = (tile < norm_tiles ? tile : tile - norm_tiles) * kTile + slot, rows = of_unit * end;
    const uint16* from = units + static_cast<int64>(row) * ((3 - of_unit) * kHeadDim);
    const uint32 to = place + tile % kStages * (kTile * kHeadDim * 2);
#pragma unroll
    for (int i = 0; i < kTile; i += kAtATime)
      cp_async_16_or_zeros(to + i * 128, from + i * ((3 - of_unit) * kHeadDim), row + i < rows);
    barrier_arrive_after_copies(shared.full[tile % kStages]);
  };
#pragma unroll
  for (int tile = 0; tile < kStages - 1; ++tile) load(tile);
  cp_async_wait<0>();  // of pooled queries alone
  fence_for_wgmma();
  __syncthreads();

  const int segment = block.segment(warp), row_end = block.there(warp) ? block.units_of(segment) : 0;
  const int group_end = block.units_of(block.segment(group * 4 + 3));  // of the warpgroup's longest
  float s[kTile / 2];  // products [pooled queries lane / 4 and 8 more, rows of a tile]
  const uint32 a = tile_descriptor(shared_address(shared.pooled[group]), 0);
  // The products with a tile, of whose units `count` come before it; and a new tile in the place of the one before.
  const auto multiply = [&](int tile, int count) {
    named_sync(kTurn + group, 256);
    if (count < group_end) {
      barrier_wait(shared.full[tile % kStages], tile / kStages & 1);
      const uint32 b = tile_descriptor(shared_address(shared.units[tile % kStages]), 0);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < kHeadDim / 16; ++c)
        Wgmma<Element>::ss(s, descriptor_at(a, atom_columns<64>(c)), descriptor_at(b, atom_columns<kTile>(c)), c > 0);
      wgmma_commit();
      wgmma_wait<0>();
      finished(s);
    }
    if (group < 2 || tile + 1 < tiles) named_arrive(kTurn + (group ^ 2), 256);
    if (lane == 0) barrier_arrive(shared.empty[tile % kStages]);
    __syncwarp();
    load(tile + kStages - 1);
  };
  if (group >= 2) named_arrive(kTurn + (group ^ 2), 256);  // the others begin

  const int begin = g.dense_begin(segment) >> g.unit_shift;
  const int skipped_to = begin + (g.units() - g.ranked(segment));  // units of [begin, skipped_to) are no candidates
  // The largest score so far in log2 units, rounded once, and the sum of exp2(score - m): exactly the same however many
  // tiles without a candidate there are, so that a norm does not depend on the segments beside it.
  float m[2] = {-infinity(), -infinity()}, l[2] = {};
#pragma unroll 1
  for (int tile = 0; tile < norm_tiles; ++tile) {
    const int first = tile * kTile, behind = first + kTile;
    multiply(tile, first);
    if (first >= row_end) continue;
    if (behind > begin && (first < skipped_to || behind > row_end)) {
      const int at = first + lane % 4 * 4;
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int unit = at + j / 2 * 16 + j % 2 * 2 + e % 2;
          if (unit >= begin && (unit < skipped_to || unit >= row_end)) s[j * 4 + e] = -infinity();
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest[4] = {-infinity(), -infinity(), -infinity(), -infinity()}, sum[4] = {};
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j)
        largest[j % 4] = fmaxf(largest[j % 4], fmaxf(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]));
      const float of_all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      const float top = fmaxf(m[h], __fmul_rn(of_all, p.scale_log2));
      const float base = top == -infinity() ? 0.f : top;
#pragma unroll
      for (int j = 0; j < kTile / 8; ++j)
        sum[j % 4] += exp2_approx(fmaf(s[j * 4 + 2 * h], p.scale_log2, -base)) +
                      exp2_approx(fmaf(s[j * 4 + 2 * h + 1], p.scale_log2, -base));
      l[h] = l[h] * exp2_approx(m[h] - base) + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
      m[h] = top;
    }
  }

  float norm[2];  // log2 of the sum of a pooled query's weights; 0 where it is not finite
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = m[h];
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
    const float base = top == -infinity() ? 0.f : top;
    float sum = l[h] * exp2_approx(m[h] - base);
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    const float found = base + __log2f(sum);
    norm[h] = fabsf(found) < infinity() ? found : 0.f;
  }

  const float outlier_shift = static_cast<float>(g.unit_shift + spec::kOutlierShift);
  // log2 of what a pooled query gives a unit; NaN if a product is.
  const auto weight = [&](int j, int h) {
    return larger_or_nan(__fmul_rn(s[j * 4 + 2 * h], p.scale_log2),
                         fmaf(s[j * 4 + 2 * h + 1], p.scale_log2, -outlier_shift)) - norm[h];
  };
  uint16* scores = p.scores + p.chunk.place(block.head, segment);
#pragma unroll 1
  for (int tile = norm_tiles; tile < tiles; ++tile) {
    const int first = (tile - norm_tiles) * (kTile / 2);
    multiply(tile, first);
    if (first >= row_end) continue;
    uint32 x[8];
#pragma unroll
    for (int j = 0; j < kTile / 8; j += 2)
      x[j / 2] =
          Float16::pack(larger_or_nan(weight(j, 0), weight(j, 1)), larger_or_nan(weight(j + 1, 0), weight(j + 1, 1)));
    // The largest over lanes of equal lane % 4: a lane is left with two neighbouring units.
    share_largest_pairs<4>(x);
    share_largest_pairs<2>(x);
    share_largest_pairs<1>(x);
    // What is past the end of the row's candidates is never read.
    const int unit = first + 2 * lane;
    if (unit < row_end) *reinterpret_cast<uint32*>(scores + unit) = x[0];
    __syncwarp();  // not all lanes have written
  }
}

}  // namespace s2o
