// What the last queries of a head make of every key: the mean, over these queries, of their softmax over all keys.
//
//   last_row_sums: q, k -> partial [batch * heads, splits, kRows]: (maximum, sum) of each query over a split of the keys
//   column_means: partial, q, k -> importance [batch * heads, seqlen_k]
//
// Scores are computed twice, as the weights of a key wait for all keys. Without a mask, as the last queries stand for
// those to come; line_sums.cu reads sums with one. What is added up in a thread are rows of a product: queries in the
// first kernel, keys in the second. last_rows.cu has both by mma.sync, last_rows_sm90.cu by wgmma.
#pragma once
#include "common/geometry.cuh"

namespace s2o {

struct LastRowsParams {
  Tensor<const uint16> q, k;
  float2* partial;
  float* importance;
  int heads, kv_heads;  // of a sequence
  int seqlen_q, seqlen_k, head_dim;
  int rows;             // last queries, up to kRows
  int splits;
  int split_tiles;      // tiles of keys of each
  int is_causal;        // or without a mask
  float scale_log2;     // scale * log2(e)
};

template <class Traits>
struct LastRows {
  using Shared = typename Traits::Shared;
  static constexpr int kTile = Traits::kTile, kChunks = Traits::kHeadDim / 8, kStages = Traits::kStages;
  const LastRowsParams& p;
  Shared& shared;
  const uint16* k;
  int head, split, first_tile, tiles, lane, warp;

  // Heads that share keys stand side by side.
  __device__ __forceinline__ LastRows(const LastRowsParams& params, Shared& shared_) : p(params), shared(shared_) {
    uint32 index = blockIdx.x;
    const int group = p.heads / p.kv_heads, member = index % group;
    index /= group;
    split = index % p.splits;
    const int kv_head = index / p.splits, batch = kv_head / p.kv_heads;
    head = kv_head * group + member;
    first_tile = split * p.split_tiles;
    tiles = min(p.split_tiles, (p.seqlen_k + kTile - 1) / kTile - first_tile);
    lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    k = p.k.at(batch, kv_head % p.kv_heads);
    const uint16* q = p.q.at(batch, head % p.heads) + static_cast<int64>(p.seqlen_q - p.rows) * p.q.row;
    load(shared_address(shared.q), q, p.q.row, Traits::kRows, p.rows);
  }
  __device__ __forceinline__ void load(uint32 to, const uint16* from, int64 row, int rows, int present) {
    const int chunk = threadIdx.x % kChunks;
    for (int r = threadIdx.x / kChunks; r < rows; r += Traits::kThreads / kChunks) {
      const bool there = r < present && chunk * 8 < p.head_dim;
      cp_async_16_or_zeros(Traits::address(to, r, chunk), there ? from + r * row + chunk * 8 : from, there);
    }
  }
  __device__ __forceinline__ int first_key(int tile) const { return (first_tile + tile) * kTile; }
  __device__ __forceinline__ void load_keys(int tile) {
    if (tile < tiles)
      load(keys(tile), k + static_cast<int64>(first_key(tile)) * p.k.row, p.k.row, kTile, p.seqlen_k - first_key(tile));
    cp_async_commit();
  }
  __device__ __forceinline__ uint32 keys(int tile) const { return shared_address(shared.k[tile % kStages]); }
  // Tile by tile: `use` is called when its keys are in shared memory.
  template <class Use>
  __device__ __forceinline__ void walk(const Use& use) {
    if constexpr (kStages > 1) load_keys(0);
    for (int tile = 0; tile < tiles; ++tile) {
      load_keys(tile + kStages - 1);
      cp_async_wait<kStages - 1>();
      __syncthreads();
      use(tile);
      __syncthreads();
    }
  }
};

// Two maxima with the sums that belong to them.
__device__ __forceinline__ float2 joined(float2 a, float2 b) {
  const float m = fmaxf(a.x, b.x), base = m == -infinity() ? 0.f : m;
  return make_float2(m, a.y * exp2_approx(a.x - base) + b.y * exp2_approx(b.x - base));
}

// Of a thread up to kRows the norm of a query: log2 of the sum of its weights over all keys; of one that is not there
// infinity.
template <int kRows>
__device__ __forceinline__ void write_norm(const LastRowsParams& p, int head, int row, float (&norms)[kRows]) {
  if (row >= kRows) return;
  const float2* from = p.partial + static_cast<int64>(head) * p.splits * kRows + row;
  float2 x = make_float2(-infinity(), 0.f);
  for (int i = 0; i < p.splits; ++i) x = joined(x, from[static_cast<int64>(i) * kRows]);
  float norm;
  asm("lg2.approx.f32 %0, %1;" : "=f"(norm) : "f"(x.y));
  norms[row] = row < p.rows ? x.x + norm : infinity();
}

}  // namespace s2o
