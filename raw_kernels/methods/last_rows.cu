// last_row_sums and column_means (last_rows.cuh) by mma.sync: a warp has 16 or 32 rows and 64 columns of a product.
#include "methods/last_rows.cuh"
#include "sm80/shared.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct LastRowsTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 256;
  static constexpr int kRows = 128;                        // queries
  static constexpr int kTile = kHeadDim > 128 ? 64 : 128;  // keys
  static constexpr int kStages = kHeadDim > 128 ? 1 : 2;
  static constexpr int kSpread = kTile / 64;               // 16 rows of a warp's product, so many times
  static __device__ __forceinline__ uint32 address(uint32 tile, int row, int chunk) {
    return chunk_address<LastRowsTraits>(tile, row, chunk);
  }
  struct Shared {
    uint16 q[kRows * kHeadDim];
    uint16 k[kStages][kTile * kHeadDim];  // at the end of last_row_sums what the second half of the warps has found
    float norms[kRows];                   // of the queries
    float columns[2][kTile];              // sums over half of the queries each
  };
};

// d[16 * kSpread, 64] = rows of `a` from a_row on . rows of `b` from b_row on
template <class Traits>
__device__ __forceinline__ void multiply(float (&d)[Traits::kSpread][8][4], uint32 a, int a_row, uint32 b, int b_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Traits::kSpread; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i][j][e] = 0.f;
#pragma unroll(__CUDA_ARCH__ >= 1000 ? 1 : 2)  // on Blackwell two would spill
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
    multiply<Traits>(s, shared_address(shared.q), first_row, rows.keys(tile), first_column);
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
  write_norm<Traits::kRows>(p, rows.head, threadIdx.x, shared.norms);
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
    multiply<Traits>(s, rows.keys(tile), first_row, shared_address(shared.q), half * 64);
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
