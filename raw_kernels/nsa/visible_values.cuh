// Values of a step of which rows see different keys: a masked key has weight 0, but 0 * NaN and 0 * Inf are NaN. Who finds
// a NaN afterwards begins anew, with values that are not finite taken out of the product (nsa/nonfinite_values.cuh).
#pragma once
#include "nsa/nonfinite_values.cuh"
#include "sm80/attention.cuh"

namespace s2o {

// Whether a thread's accumulators have met a value that is not finite, be it one that no row sees.
template <class Traits>
__device__ __forceinline__ bool any_nonfinite(const AttentionTile<Traits>& attention) {
  float sum[4] = {};  // 0, or NaN
#pragma unroll
  for (int i = 0; i < Traits::kRowTiles; ++i)
#pragma unroll
    for (int d = 0; d < Traits::kDimTiles; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = fmaf(attention.acc[i][d][e], 0.f, sum[e]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]) != 0.f;
}

// Adds the values of a step that were taken out of the product.
//
//   rows: bits of the keys that have such values; v: the step's first row in global memory
//   sees(i, h, key): whether row (i, h) of the thread sees key number `key` of the step
template <class Traits, class Sees>
__device__ __forceinline__ void add_taken_values(AttentionTile<Traits>& attention,
                                                 const uint32 (&p)[Traits::kRowTiles][Traits::kKeyTiles][2],
                                                 const uint32* rows, const uint16* v, const Sees& sees) {
  const int lane = attention.lane;
#pragma unroll 1
  for (int key = 0; key < Traits::kStep; ++key) {
    if (!(rows[key / 32] >> key % 32 & 1)) continue;
    float weight[2 * Traits::kRowTiles];
    bool seen[2 * Traits::kRowTiles];
#pragma unroll
    for (int i = 0; i < 2 * Traits::kRowTiles; ++i) {
      uint32 pair = 0;
#pragma unroll
      for (int j = 0; j < Traits::kKeyTiles; ++j) {
        uint32 x = p[i / 2][j][i % 2];
        asm volatile("" : "+r"(x));  // or the compiler indexes p by key, which puts it into local memory
        if (j == key / 8) pair = x;
      }
      pair = __shfl_sync(kFullWarp, pair, lane / 4 * 4 + key % 8 / 2);
      weight[i] = key % 2 ? Traits::Element::high(pair) : Traits::Element::low(pair);
      seen[i] = sees(i / 2, i % 2, key);
    }
    add_nonfinite<typename Traits::Element, 2 * Traits::kRowTiles, Traits::kDimTiles>(
        v + key * attention.params.v.row, attention.params.geometry.head_dim, weight, seen,
        [&](int i, int d, int e) -> float& { return attention.acc[i / 2][d][i % 2 * 2 + e]; });
  }
}

}  // namespace s2o
