// What the last queries of a head make of every key: the mean, over these queries, of their softmax over all keys.
//
//   last_row_sums: q, k -> partial [batch * heads, splits, kRows]: (maximum, sum) of each query over a split of the keys
//   column_means: partial, q, k -> importance [batch * heads, seqlen_k]
//
// Scores are computed twice, as the weights of a key wait for all keys. Without a mask, as the last queries stand for
// those to come; line_sums.cu reads sums with one. Either kernel gives a warp 16 or 32 rows and 64 columns of the
// product; rows are what is added up in a thread: queries in the first, keys in the second.
#include "common/geometry.cuh"
#include "sm80/shared.cuh"

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

template <class Element_, int kHeadDim_>
struct LastRowsTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 256;
  static constexpr int kRows = 128;                        // queries
  static constexpr int kTile = kHeadDim > 128 ? 64 : 128;  // keys
  static constexpr int kStages = kHeadDim > 128 ? 1 : 2;
  static constexpr int kSpread = kTile / 64;               // 16 rows of a warp's product, so many times
  struct Shared {
    uint16 q[kRows * kHeadDim];
    uint16 k[kStages][kTile * kHeadDim];  // at the end of last_row_sums what the second half of the warps has found
    float norms[kRows];                   // of the queries
    float columns[2][kTile];              // sums over half of the queries each
  };
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
      cp_async_16_or_zeros(chunk_address<Traits>(to, r, chunk), there ? from + r * row + chunk * 8 : from, there);
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
  // d[16 * kSpread, 64] = rows of `a` from a_row on . rows of `b` from b_row on
  __device__ __forceinline__ void multiply(float (&d)[Traits::kSpread][8][4], uint32 a, int a_row, uint32 b,
                                           int b_row) const {
#pragma unroll
    for (int i = 0; i < Traits::kSpread; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][j][e] = 0.f;
#pragma unroll 2
    for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
      uint32 x[Traits::kSpread][4];
#pragma unroll
      for (int i = 0; i < Traits::kSpread; ++i)
        ldmatrix_x4(x[i], chunk_address<Traits>(a, a_row + i * 16 + lane % 16, c * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32 y[4];
        ldmatrix_x4(y, chunk_address<Traits>(b, b_row + j * 8 + lane % 8 + lane / 16 * 8, c * 2 + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < Traits::kSpread; ++i) {
          Traits::Element::mma(d[i][j], x[i], y[0], y[1]);
          Traits::Element::mma(d[i][j + 1], x[i], y[2], y[3]);
        }
      }
    }
  }
};

// Two maxima with the sums that belong to them.
__device__ __forceinline__ float2 joined(float2 a, float2 b) {
  const float m = fmaxf(a.x, b.x), base = m == -infinity() ? 0.f : m;
  return make_float2(m, a.y * exp2_approx(a.x - base) + b.y * exp2_approx(b.x - base));
}

template <class Traits>
__device__ __forceinline__ void last_row_sums(const LastRowsParams& p, typename Traits::Shared& shared) {
  constexpr int kSpread = Traits::kSpread, kHalves = Traits::kTile / 64;  // of the keys of a tile
  LastRows<Traits> rows(p, shared);
  const int first_row = rows.warp / kHalves * (16 * kSpread), first_column = rows.warp % kHalves * 64;
  float2 found[kSpread][2];  // of queries first_row + i * 16 + h * 8 + lane / 4
#pragma unroll
  for (int i = 0; i < kSpread; ++i) found[i][0] = found[i][1] = make_float2(-infinity(), 0.f);
  rows.walk([&](int tile) {
    float s[kSpread][8][4];
    rows.multiply(s, shared_address(shared.q), first_row, rows.keys(tile), first_column);
    const int present = p.seqlen_k - rows.first_key(tile) - first_column - rows.lane % 4 * 2;
    const bool whole = rows.first_key(tile) + Traits::kTile <= p.seqlen_k - (p.is_causal ? p.rows - 1 : 0);
#pragma unroll
    for (int i = 0; i < kSpread; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int after = p.is_causal ? max(p.rows - 1 - first_row - i * 16 - h * 8 - rows.lane / 4, 0) : 0;
        float most = found[i][h].x;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            float& y = s[i][j][2 * h + x];
            y *= p.scale_log2;
            if (!whole && j * 8 + x >= present - after) y = -infinity();
            most = fmaxf(most, y);
          }
        const float base = most == -infinity() ? 0.f : most;
        float sum = found[i][h].y * exp2_approx(found[i][h].x - base);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += exp2_approx(s[i][j][2 * h] - base) + exp2_approx(s[i][j][2 * h + 1] - base);
        found[i][h] = make_float2(most, sum);
      }
  });
  float2* other = reinterpret_cast<float2*>(shared.k[0]);
#pragma unroll
  for (int i = 0; i < kSpread; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float2& x = found[i][h];
#pragma unroll
      for (int stride = 1; stride <= 2; stride *= 2) {
        const float2 its = make_float2(__shfl_xor_sync(kFullWarp, x.x, stride), __shfl_xor_sync(kFullWarp, x.y, stride));
        x = joined(x, its);
      }
      if (first_column > 0 && rows.lane % 4 == 0) other[first_row + i * 16 + h * 8 + rows.lane / 4] = x;
    }
  __syncthreads();
  if (first_column > 0 || rows.lane % 4 > 0) return;
  float2* to = p.partial + (static_cast<int64>(rows.head) * p.splits + rows.split) * Traits::kRows;
#pragma unroll
  for (int i = 0; i < kSpread; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + i * 16 + h * 8 + rows.lane / 4;
      to[row] = kHalves > 1 ? joined(found[i][h], other[row]) : found[i][h];
    }
}

template <class Traits>
__device__ __forceinline__ void column_means(const LastRowsParams& p, typename Traits::Shared& shared) {
  constexpr int kSpread = Traits::kSpread, kTile = Traits::kTile;
  LastRows<Traits> rows(p, shared);
  if (threadIdx.x < Traits::kRows) {
    const float2* from = p.partial + static_cast<int64>(rows.head) * p.splits * Traits::kRows + threadIdx.x;
    float2 x = make_float2(-infinity(), 0.f);
    for (int i = 0; i < p.splits; ++i) x = joined(x, from[static_cast<int64>(i) * Traits::kRows]);
    float norm;
    asm("lg2.approx.f32 %0, %1;" : "=f"(norm) : "f"(x.y));
    shared.norms[threadIdx.x] = static_cast<int>(threadIdx.x) < p.rows ? x.x + norm : infinity();
  }
  __syncthreads();
  const int half = rows.warp % 2, first_row = rows.warp / 2 * (16 * kSpread);  // rows are keys, columns queries
  float norms[8][2];
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int x = 0; x < 2; ++x) norms[j][x] = shared.norms[half * 64 + j * 8 + rows.lane % 4 * 2 + x];
  const float factor = 1.f / p.rows;
  float* importance = p.importance + static_cast<int64>(rows.head) * p.seqlen_k;
  rows.walk([&](int tile) {
    float s[kSpread][8][4];
    rows.multiply(s, rows.keys(tile), first_row, shared_address(shared.q), half * 64);
#pragma unroll
    for (int i = 0; i < kSpread; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int x = 0; x < 2; ++x) sum += exp2_approx(fmaf(s[i][j][2 * h + x], p.scale_log2, -norms[j][x]));
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        if (rows.lane % 4 == 0) shared.columns[half][first_row + i * 16 + h * 8 + rows.lane / 4] = sum;
      }
    __syncthreads();
    const int key = rows.first_key(tile) + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kTile && key < p.seqlen_k)
      importance[key] = (shared.columns[0][threadIdx.x] + shared.columns[1][threadIdx.x]) * factor;
  });
}

}  // namespace s2o
