// last_row_sums and column_means (last_rows.cuh) by wgmma: a warpgroup has 64 rows and 128 columns of a product. Two blocks
// run on a multiprocessor, and one's products beside the other's exponentials.
#include "blocks/last_rows.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct LastRowsSm90Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 256;
  static constexpr int kRows = 128, kTile = 128, kStages = 2;  // queries, keys, tiles of keys
  static __device__ __forceinline__ uint32 address(uint32 tile, int row, int chunk) {
    return atom_chunk<128>(tile, row, chunk);
  }
  static __device__ __forceinline__ void before_products() { fence_for_wgmma(); }
  struct Shared {
    uint16 q[kRows * kHeadDim];
    uint16 k[kStages][kTile * kHeadDim];
    float norms[kRows];  // of the queries
  };
};

// d[64, 128] = 64 rows of `a` from a_row on . all rows of `b`
template <class Traits>
__device__ __forceinline__ void multiply(float (&d)[64], uint32 a, int a_row, uint32 b) {
  const uint32 of_a = tile_descriptor(a + a_row * 128, 0), of_b = tile_descriptor(b, 0);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < Traits::kHeadDim / 16; ++c)
    Wgmma<typename Traits::Element>::ss(d, descriptor_at(of_a, atom_columns<128>(c)),
                                        descriptor_at(of_b, atom_columns<128>(c)), c > 0);
  wgmma_commit();
  wgmma_wait<0>();
}

template <class Traits>
__device__ __forceinline__ void last_row_sums_sm90(const LastRowsParams& p, typename Traits::Shared& shared) {
  LastRows<Traits> rows(p, shared);
  const int group_row = rows.warp / 4 * 64;
  float2 found[2];  // of queries first_row + h * 8
  found[0] = found[1] = make_float2(-infinity(), 0.f);
  rows.walk([&](int tile) {
    float s[64];  // [2 * h + x of 4 * j]: key j * 8 + lane % 4 * 2 + x
    multiply<Traits>(s, shared_address(shared.q), group_row, rows.keys(tile));
    const int present = p.seqlen_k - rows.first_key(tile) - rows.lane % 4 * 2;
    const bool whole = rows.first_key(tile) + Traits::kTile <= p.seqlen_k - (p.is_causal ? p.rows - 1 : 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int after = p.is_causal ? max(p.rows - 1 - rows.warp * 16 - h * 8 - rows.lane / 4, 0) : 0;
      float most = found[h].x;
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          float& y = s[j * 4 + 2 * h + x];
          y *= p.scale_log2;
          if (!whole && j * 8 + x >= present - after) y = -infinity();
          most = fmaxf(most, y);
        }
      const float base = most == -infinity() ? 0.f : most;
      float sum = found[h].y * exp2_approx(found[h].x - base);
#pragma unroll
      for (int j = 0; j < 16; ++j)
        sum += exp2_approx(s[j * 4 + 2 * h] - base) + exp2_approx(s[j * 4 + 2 * h + 1] - base);
      found[h] = make_float2(most, sum);
    }
  });
  float2* to = p.partial + (static_cast<int64>(rows.head) * p.splits + rows.split) * Traits::kRows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float2 x = found[h];
#pragma unroll
    for (int stride = 1; stride <= 2; stride *= 2)
      x = joined(x, make_float2(__shfl_xor_sync(kFullWarp, x.x, stride), __shfl_xor_sync(kFullWarp, x.y, stride)));
    if (rows.lane % 4 == 0) to[rows.warp * 16 + h * 8 + rows.lane / 4] = x;
  }
}

template <class Traits>
__device__ __forceinline__ void column_means_sm90(const LastRowsParams& p, typename Traits::Shared& shared) {
  LastRows<Traits> rows(p, shared);
  write_norms<Traits>(p, rows.head, shared.norms);
  const int group_row = rows.warp / 4 * 64;
  const float factor = 1.f / p.rows;
  float* importance = p.importance + static_cast<int64>(rows.head) * p.seqlen_k;
  rows.walk([&](int tile) {
    float s[64];
    multiply<Traits>(s, rows.keys(tile), group_row, shared_address(shared.q));
    float sum[2] = {};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 norm = *reinterpret_cast<const float2*>(&shared.norms[j * 8 + rows.lane % 4 * 2]);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        sum[h] += exp2_approx(fmaf(s[j * 4 + 2 * h], p.scale_log2, -norm.x)) +
                  exp2_approx(fmaf(s[j * 4 + 2 * h + 1], p.scale_log2, -norm.y));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
      sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
      const int key = rows.first_key(tile) + rows.warp * 16 + h * 8 + rows.lane / 4;
      if (rows.lane % 4 == 0 && key < p.seqlen_k) importance[key] = sum[h] * factor;
    }
  });
}

}  // namespace s2o
