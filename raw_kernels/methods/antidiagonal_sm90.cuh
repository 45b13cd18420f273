// What the kernels of antidiagonal norms on Hopper share: the order of their tiles, and what becomes of a product.
#pragma once
#include "methods/antidiagonal.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

// The tiles of a block, every `step`-th: by head, or heads that take theirs together, group of rows, tile of keys, and row.
template <class Traits>
struct TileWalk {
  static constexpr int kRows = Traits::kRows, kTile = Traits::kTile, kGroup = Traits::kGroup;
  const AntidiagonalParams& p;
  Cells<Traits::kStride> cells;
  int heads, step;                    // of the round
  int head = 0, group = 0, at, size;  // place in the group, and places there are
  int first_row, first_key;           // cells of the tile

  __device__ __forceinline__ TileWalk(const AntidiagonalParams& p_, int first, int step_, int heads_)
      : p(p_), cells{p_}, heads(heads_), step(step_), at(first) {
    size = places();
    settle();
  }
  __device__ __forceinline__ bool done() const { return head == heads; }
  __device__ __forceinline__ void next() {
    at += step;
    settle();
  }

 private:
  __device__ __forceinline__ int rows() const { return (cells.of_queries() + kRows - 1) / kRows; }
  // Tiles of keys that some cell of a tile of rows sees.
  __device__ __forceinline__ int tiles(int row) const {
    return (cells.seen(min((row + 1) * kRows, cells.of_queries()) - 1) + kTile - 1) / kTile;
  }
  __device__ __forceinline__ int places() const { return tiles(min((group + 1) * kGroup, rows()) - 1) * kGroup; }
  // To the next place that has a tile.
  __device__ __forceinline__ void settle() {
    while (!done()) {
      if (at >= size) {
        at -= size;
        if (++group * kGroup >= rows()) {
          group = 0;
          ++head;
        }
        size = places();
        continue;
      }
      const int tile = at / kGroup, row = group * kGroup + (at + tile) % kGroup;  // a block meets all rows in turn
      first_row = row * kRows;
      first_key = tile * kTile;
      if (row < rows() && tile < tiles(row)) return;
      at += step;
    }
  }
};

// log2 of the sums of a warpgroup's part of a tile, two products of 64 cells of queries from first_row on.
template <class Traits>
__device__ __forceinline__ void write_norms(const AntidiagonalParams& p, int head, int first_row, int first_key,
                                            const float (&d)[2][Traits::kTile / 2]) {
  constexpr int kOfBlock = Cells<Traits::kStride>::kOfBlock;
  const Cells<Traits::kStride> cells{p};
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int cell = first_row + i * 64 + warp_row + h * 8;
      const int left = (cell < cells.of_queries() ? cells.seen(cell) : 0) - first_key;
      float* norms = cells.norms(head) + cells.place(cell) + first_key / kOfBlock;
#pragma unroll
      for (int first = 0; first < Traits::kTile; first += 64) {
        float x[8][2];
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            x[j][e] = first + j * 8 + e < left - lane % 4 * 2
                          ? d[i][(first / 8 + j) * 4 + 2 * h + e] * p.scale_log2
                          : -infinity();
        row_norms<kOfBlock / 8>(x, norms + first / kOfBlock, (left - first + kOfBlock - 1) / kOfBlock);
      }
    }
}

}  // namespace s2o
