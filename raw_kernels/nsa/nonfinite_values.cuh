// Values that are not finite, in a tile of which rows see different keys: a masked key has weight 0, but 0 * NaN and
// 0 * Inf are NaN. They become zeros in shared memory before the product, and rows that see them add them from global
// memory, so that those that do not keep their bits.
#pragma once
#include "common/ptx.cuh"

namespace s2o {

// Makes zeros of the pairs of 16 bytes of row `row` of a tile in which a value is not finite, and sets the row's bit.
template <class Element>
__device__ __forceinline__ void take_nonfinite(uint32 shared, int row, uint32* rows) {
  const uint4 x = load_shared_16(shared);
  const uint32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (has_nonfinite<Element>(pairs[i])) {
      store_shared_4(shared + i * 4, 0);
      atomicOr(&rows[row / 32], 1u << row % 32);
    }
}

// Adds what was taken of `key`, a row of v in global memory, to the accumulators of the 2 * kRowTiles rows of a thread:
// two columns in each eight, as products leave them.
//
//   weight[i], sees[i]: of the key in row i; element(i, d, e): column 8 * d + 2 * (lane % 4) + e of that row
template <class Element, int kRows, int kDimTiles, class Acc>
__device__ __forceinline__ void add_nonfinite(const uint16* key, int head_dim, const float (&weight)[kRows],
                                              const bool (&sees)[kRows], const Acc& element) {
#pragma unroll
  for (int d = 0; d < kDimTiles; ++d) {
    if (d * 8 >= head_dim) break;
    const uint32 x = *reinterpret_cast<const uint32*>(key + d * 8 + threadIdx.x % 4 * 2);
    if (!has_nonfinite<Element>(x)) continue;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (sees[i]) {
        element(i, d, 0) += weight[i] * Element::low(x);
        element(i, d, 1) += weight[i] * Element::high(x);
      }
  }
}

}  // namespace s2o
