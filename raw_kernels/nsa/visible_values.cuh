// Values of a step of which rows see different keys: a masked key has weight 0, but 0 * NaN and 0 * Inf are NaN. Who finds
// a NaN afterwards begins anew with accumulate_visible.
#pragma once
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

// acc += p v of one step, key by key, each to just the rows that see it: slow, and only where values are not finite.
//
//   sees(i, h, key): whether row (i, h) of the thread sees key number `key` of the step
template <class Traits, class Sees>
__device__ __forceinline__ void accumulate_visible(AttentionTile<Traits>& attention,
                                                   const uint32 (&p)[Traits::kRowTiles][Traits::kKeyTiles][2],
                                                   uint32 v_tile, const Sees& sees) {
  const int lane = attention.lane;
#pragma unroll
  for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll 1
    for (int key = j * 8; key < j * 8 + 8; ++key) {
      float weight[Traits::kRowTiles][2];
#pragma unroll
      for (int i = 0; i < Traits::kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32 pair = __shfl_sync(kFullWarp, p[i][j][h], lane / 4 * 4 + key % 8 / 2);
          weight[i][h] = key % 2 ? Traits::Element::high(pair) : Traits::Element::low(pair);
        }
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d) {
        const uint32 x = load_shared_4(chunk_address<Traits>(v_tile, key, d) + lane % 4 * 4);
#pragma unroll
        for (int i = 0; i < Traits::kRowTiles; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (sees(i, h, key)) {
              attention.acc[i][d][2 * h] += weight[i][h] * Traits::Element::low(x);
              attention.acc[i][d][2 * h + 1] += weight[i][h] * Traits::Element::high(x);
            }
      }
    }
}

}  // namespace s2o
