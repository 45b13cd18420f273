// What the kernels of antidiagonal scores share: their parameters, which cells meet, and the norms of a row of cells.
//
// A *cell* is kStride neighbouring queries or keys. The score of two cells is the sum over their antidiagonal: row
// kStride - 1 - r of the queries meets row r of the keys, so that a cell of queries is one row of a matrix product, its
// queries from the last to the first. Rows past the end of a sequence are zeros.
#pragma once
#include "methods/block_grid.cuh"

namespace s2o {

struct AntidiagonalParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim]
  const int* order;        // [batch * order_heads, seqlen_k]: key i is that at this position; null: as they lie
  float* norms;            // [heads of the round, norms of a head], see norms_of
  BlockGrid grid;          // of blocks of 128
  int head_dim;
  int heads, kv_heads, order_heads;  // of a sequence
  int first_head, round_heads;       // of the round, flattened
  int shared_heads;        // neighbouring heads of the round that share keys and divide round_heads
  float scale_log2;        // of a sum of kStride dot products
};

constexpr int kMassBlock = 128;  // queries or keys of a block

template <int kStride>
struct Cells {
  static constexpr int kOfBlock = kMassBlock / kStride;
  const AntidiagonalParams& p;

  __device__ __forceinline__ int of_queries() const { return (p.grid.seqlen_q + kStride - 1) / kStride; }
  // How many cells of keys, from the first on, a cell of queries sees.
  __device__ __forceinline__ int seen(int q_cell) const {
    if (!p.grid.own) return p.grid.listed(q_cell / kOfBlock) * kOfBlock;
    return min(q_cell + p.grid.offset() / kStride + 1, (p.grid.seqlen_k + kStride - 1) / kStride);
  }
  __device__ __forceinline__ int blocks(int q_cell) const { return (seen(q_cell) + kOfBlock - 1) / kOfBlock; }
  // Where the norms of a cell of queries begin, one for each block of keys; rows have room for what their last sees.
  __device__ __forceinline__ int64 place(int q_cell) const {
    const int64 row = q_cell / kOfBlock, first = (kMassBlock - 1 + p.grid.offset()) / kMassBlock + 1;
    return (row * first + row * (row - 1) / 2) * kOfBlock + q_cell % kOfBlock * (first + row);
  }
  __device__ __forceinline__ float* norms(int head) const {  // of the round
    return p.norms + head * place(p.grid.rows() * kOfBlock);
  }
};

// A tile of the product: rows of one head's cells of queries.
struct CellTile {
  int head;   // of the round
  int first;  // cell of queries
};

// Longest rows first, heads that share keys side by side.
template <int kRows>
__device__ __forceinline__ CellTile cell_tile(const AntidiagonalParams& p, int q_cells, int block) {
  const int tiles = (q_cells + kRows - 1) / kRows, shared = block % p.shared_heads;
  block /= p.shared_heads;
  const int groups = p.round_heads / p.shared_heads;
  return {block % groups * p.shared_heads + shared, (tiles - 1 - block / groups) * kRows};
}

// A row's scores x in log2 units, two of each 8 neighbouring cells of keys in each of four lanes, minus infinity where
// hidden: writes log2 of the sum of exp2(x) of each block of kBlockTiles * 8 cells, as far as there are `blocks`. What
// is 2^126 below the row's largest counts as nothing.
template <int kBlockTiles, int kTiles>
__device__ __forceinline__ void row_norms(const float (&x)[kTiles][2], float* target, int blocks) {
  constexpr int kBlocks = kTiles / kBlockTiles;
  static_assert(kBlocks % 4 == 0, "each lane of four writes as many");
  const int lane = threadIdx.x % 4;
  float top = -infinity();
#pragma unroll
  for (int j = 0; j < kTiles; ++j) top = fmaxf(top, fmaxf(x[j][0], x[j][1]));
  top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
  top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
  const float base = top == -infinity() ? 0.f : top;
  float sum[kBlocks] = {};
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
    sum[j / kBlockTiles] += exp2_approx(x[j][0] - base) + exp2_approx(x[j][1] - base);
  // Lane 2 a + b is left with the sums of its quarter.
  const bool upper = lane & 2, odd = lane & 1;
  float half[kBlocks / 2], mine[kBlocks / 4];
#pragma unroll
  for (int i = 0; i < kBlocks / 2; ++i) {
    const float other = __shfl_xor_sync(kFullWarp, upper ? sum[i] : sum[i + kBlocks / 2], 2);
    half[i] = (upper ? sum[i + kBlocks / 2] : sum[i]) + other;
  }
#pragma unroll
  for (int i = 0; i < kBlocks / 4; ++i) {
    const float other = __shfl_xor_sync(kFullWarp, odd ? half[i] : half[i + kBlocks / 4], 1);
    mine[i] = (odd ? half[i + kBlocks / 4] : half[i]) + other;
  }
#pragma unroll
  for (int i = 0; i < kBlocks / 4; ++i) {
    const int block = lane * (kBlocks / 4) + i;
    if (block < blocks) target[block] = base + __log2f(mine[i]);
  }
}

}  // namespace s2o
