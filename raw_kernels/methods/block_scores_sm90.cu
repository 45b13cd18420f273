// block_scores (block_scores.cu) by wgmma: a warpgroup has kTile rows and kColumns columns, whose means come to shared
// memory at once. The high and the low parts of a mean are one row there.
#include "methods/block_scores.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct BlockScoresSm90Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kTile = 64, kColumns = 128;
  struct Shared {
    uint16 q[kTile * 2 * kHeadDim];
    uint16 k[kColumns * 2 * kHeadDim];
  };
};

// Block: kTile rows and kColumns columns of a head.
template <class Traits>
__device__ __forceinline__ void block_scores_sm90(const BlockScoresParams& p, typename Traits::Shared& shared) {
  constexpr int kTile = Traits::kTile, kColumns = Traits::kColumns, kHeadDim = Traits::kHeadDim;
  constexpr int kChunks = 2 * kHeadDim / 8, kCopied = 128 / kChunks;  // 16 bytes each; rows at a time
  const BlockGrid& g = p.grid;
  uint32 block = blockIdx.x;
  const int first_column = block % p.column_tiles * kColumns;
  block /= p.column_tiles;
  const int first_row = block % p.row_tiles * kTile, head = block / p.row_tiles;  // of the round
  const int rows = g.rows(), columns = g.columns();
  if (first_column >= g.visible(min(first_row + kTile, rows) - 1)) return;

  const int flat = p.first_head + head, chunk = threadIdx.x % kChunks, slot = threadIdx.x / kChunks;
  const uint16* q = p.q_means + static_cast<int64>(flat) * rows * 2 * kHeadDim + chunk * 8;
  const uint16* k = p.k_means + static_cast<int64>(flat / p.shared_heads) * columns * 2 * kHeadDim + chunk * 8;
#pragma unroll 8
  for (int r = slot; r < kTile; r += kCopied)
    cp_async_16(atom_chunk<kTile>(shared_address(shared.q), r, chunk), q + min(first_row + r, rows - 1) * (2 * kHeadDim));
#pragma unroll 8
  for (int r = slot; r < kColumns; r += kCopied)
    cp_async_16(atom_chunk<kColumns>(shared_address(shared.k), r, chunk),
                k + min(first_column + r, columns - 1) * (2 * kHeadDim));
  cp_async_commit();
  cp_async_wait<0>();
  fence_for_wgmma();
  __syncthreads();

  float d[kColumns / 2];
  const uint32 a = tile_descriptor(shared_address(shared.q), 0), b = tile_descriptor(shared_address(shared.k), 0);
  constexpr int kSteps = kHeadDim / 16;  // of a part
  const auto multiply = [&](int of_q, int of_k, bool further) {
#pragma unroll
    for (int c = 0; c < kSteps; ++c)
      Wgmma<typename Traits::Element>::ss(d, descriptor_at(a, atom_columns<kTile>(of_q * kSteps + c)),
                                          descriptor_at(b, atom_columns<kColumns>(of_k * kSteps + c)), further || c > 0);
  };
  wgmma_fence();
  multiply(0, 0, false);
  multiply(1, 0, true);  // low parts of q
  multiply(0, 1, true);  // and of k
  wgmma_commit();
  wgmma_wait<0>();
  finished(d);

  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + static_cast<int>(threadIdx.x) / 32 * 16 + h * 8 + lane / 4;
    if (row >= rows) continue;
    float* to = p.scores + (static_cast<int64>(head) * rows + row) * p.pitch + first_column + lane % 4 * 2;
    const int left = g.visible(row) - first_column - lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 x = make_float2(d[j * 4 + 2 * h] * p.scale_log2, d[j * 4 + 2 * h + 1] * p.scale_log2);
      if (j * 8 + 1 < left) {
        *reinterpret_cast<float2*>(to + j * 8) = x;
      } else if (j * 8 < left) {
        to[j * 8] = x.x;
      }
    }
  }
}

}  // namespace s2o
