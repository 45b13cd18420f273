// Which blocks of keys a block of queries may choose, and where its list lies. The same formulas as
// s2o_cupy/methods/grid.py: BlockGrid. Rows are blocks of queries, columns blocks of keys.
#pragma once
#include "common/geometry.cuh"

namespace s2o {

struct BlockGrid {
  int seqlen_q, seqlen_k, block_q, block_k;
  int segment, window;  // of the dense part of a causal call
  int is_causal;
  int own;              // columns that the dense part holds compete with those that are listed

  __device__ __forceinline__ int offset() const { return seqlen_k - seqlen_q; }
  __device__ __forceinline__ int rows() const { return (seqlen_q + block_q - 1) / block_q; }
  __device__ __forceinline__ int columns() const { return (seqlen_k + block_k - 1) / block_k; }
  // Columns, from the first on, that a row's list may hold.
  __device__ __forceinline__ int listed(int row) const {
    if (!is_causal) return columns();
    return (row * block_q / segment * segment + offset() - window) / block_k;
  }
  // Columns, from the first on, that compete in a row's softmax.
  __device__ __forceinline__ int visible(int row) const {
    if (!is_causal || !own) return listed(row);
    return (min((row + 1) * block_q, seqlen_q) - 1 + offset()) / block_k + 1;
  }
  // Where a row's list has its place, of those of a head.
  __device__ __forceinline__ int64 begin(int row) const {
    if (!is_causal) return static_cast<int64>(row) * columns();
    const int64 tiles = segment / block_q, n = row / tiles, first = listed(0), growth = segment / block_k;
    return tiles * (n * first + n * (n - 1) / 2 * growth) + row % tiles * (first + n * growth);
  }
};

}  // namespace s2o
