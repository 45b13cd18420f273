// block_scores (block_scores.cuh) by mma.sync. No element is in shared memory: the dimensions of a product may come in any
// order, so a thread reads 16 bytes of its row at a time.
#include "methods/block_scores.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct BlockScoresTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kTile = 64;
};

// Block: kTile rows, 16 a warp, and kTile columns.
template <class Traits>
__device__ __forceinline__ void block_scores(const BlockScoresParams& p) {
  using Element = typename Traits::Element;
  constexpr int kTile = Traits::kTile, kHeadDim = Traits::kHeadDim, kColumns = kTile / 8;
  const BlockGrid& g = p.grid;
  uint32 block = blockIdx.x;
  const int first_column = block % p.column_tiles * kTile;
  block /= p.column_tiles;
  const int first_row = block % p.row_tiles * kTile, head = block / p.row_tiles;  // of the round
  const int rows = g.rows(), columns = g.columns();
  if (first_column >= g.visible(min(first_row + kTile, rows) - 1)) return;

  const int lane = threadIdx.x % 32, t = lane % 4, warp_row = first_row + static_cast<int>(threadIdx.x) / 32 * 16;
  const int flat = p.first_head + head;
  const uint16* q = p.q_means + static_cast<int64>(flat) * rows * 2 * kHeadDim + t * 8;
  const uint16* k = p.k_means + static_cast<int64>(flat / p.shared_heads) * columns * 2 * kHeadDim + t * 8;
  const uint16* of_row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    of_row[h] = q + min(warp_row + h * 8 + lane / 4, rows - 1) * (2 * kHeadDim);
  const uint16* of_column = k + min(first_column + lane / 4, columns - 1) * (2 * kHeadDim);
  const int most = columns - 1 - first_column - lane / 4;  // 8 j, at most, without a clamp

  float d[kColumns][4] = {};
#pragma unroll 1
  for (int c = 0; c < kHeadDim; c += 32) {
    uint4 a[2][2];  // [row][high, low]
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int part = 0; part < 2; ++part)
        a[h][part] = *reinterpret_cast<const uint4*>(of_row[h] + part * kHeadDim + c);
    const uint32 high[2][4] = {{a[0][0].x, a[1][0].x, a[0][0].y, a[1][0].y}, {a[0][0].z, a[1][0].z, a[0][0].w, a[1][0].w}};
    const uint32 low[2][4] = {{a[0][1].x, a[1][1].x, a[0][1].y, a[1][1].y}, {a[0][1].z, a[1][1].z, a[0][1].w, a[1][1].w}};
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint16* from = of_column + max(0, min(8 * j, most)) * (2 * kHeadDim) + c;
      const uint4 b_high = *reinterpret_cast<const uint4*>(from);
      const uint4 b_low = *reinterpret_cast<const uint4*>(from + kHeadDim);
      Element::mma(d[j], high[0], b_high.x, b_high.y);
      Element::mma(d[j], high[1], b_high.z, b_high.w);
      Element::mma(d[j], low[0], b_high.x, b_high.y);
      Element::mma(d[j], low[1], b_high.z, b_high.w);
      Element::mma(d[j], high[0], b_low.x, b_low.y);
      Element::mma(d[j], high[1], b_low.z, b_low.w);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_row + h * 8 + lane / 4;
    if (row >= rows) continue;
    float* to = p.scores + (static_cast<int64>(head) * rows + row) * p.pitch;
    const int visible = g.visible(row);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = first_column + 8 * j + 2 * t;
      if (column < visible) to[column] = d[j][2 * h] * p.scale_log2;
      if (column + 1 < visible) to[column + 1] = d[j][2 * h + 1] * p.scale_log2;
    }
  }
}

}  // namespace s2o
