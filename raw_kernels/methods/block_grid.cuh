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
  // What follows from these, so that no thread divides for it.
  int all_rows, all_columns;
  int tiles;            // rows of a segment
  int first, growth;    // columns that rows of the first segment may list, and how many more those of each further one

  __device__ __forceinline__ int offset() const { return seqlen_k - seqlen_q; }
  __device__ __forceinline__ int rows() const { return all_rows; }
  __device__ __forceinline__ int columns() const { return all_columns; }
  __device__ __forceinline__ int segment_of(int row) const { return tiles == 1 ? row : row / tiles; }
  // Columns, from the first on, that a row's list may hold.
  __device__ __forceinline__ int listed(int row) const {
    if (!is_causal) return columns();
    return first + segment_of(row) * growth;
  }
  // Columns, from the first on, that compete in a row's softmax.
  __device__ __forceinline__ int visible(int row) const {
    if (!is_causal || !own) return listed(row);
    const int last = min((row + 1) * block_q, seqlen_q) - 1 + offset();
    return (last >> 31 - __clz(block_k)) + 1;  // a power of two
  }
  // Where a row's list has its place, of those of a head.
  __device__ __forceinline__ int64 begin(int row) const {
    if (!is_causal) return static_cast<int64>(row) * columns();
    const int64 n = segment_of(row), before = n * tiles;
    return before * first + tiles * (n * (n - 1) / 2 * growth) + (row - before) * (first + n * growth);
  }
};

}  // namespace s2o
