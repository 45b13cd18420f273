// Products of mean queries and mean keys, a small matrix product on tensor cores.
//
//   scores[head, row, column] = scale_log2 * q_means[head, row] . k_means[head / shared_heads, column], float32
//
// Means have a high and a low part; the product of two low ones is left out. block_scores.cu has it by mma.sync,
// block_scores_sm90.cu by wgmma.
#pragma once
#include "methods/block_grid.cuh"

namespace s2o {

struct BlockScoresParams {
  const uint16* q_means;  // [batch * heads, rows, 2, kHeadDim]
  const uint16* k_means;  // [batch * heads / shared_heads, columns, 2, kHeadDim]
  float* scores;          // [heads of the round, rows, pitch]
  BlockGrid grid;
  int first_head;         // of the round
  int shared_heads;       // that have the same mean keys
  int pitch;
  int row_tiles, column_tiles;
  float scale_log2;       // scale * log2(e)
};

}  // namespace s2o
