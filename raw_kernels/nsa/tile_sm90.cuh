// Products of 64 rows a warpgroup by wgmma. A thread's rows are lane / 4 and 8 more of its warp's 16; element
// 4 * j + 2 * h + e of a product [64, N] is column 8 * j + 2 * (lane % 4) + e of its row h.
#pragma once
#include "nsa/nonfinite_values.cuh"
#include "nsa/params.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

// acc (+)= w v of 64 keys; w: weights, packed in pairs of keys.
template <class Element, int kHeadDim>
__device__ __forceinline__ void multiply_values(float (&acc)[kHeadDim / 2], const uint32 (&w)[8][2], uint32 v_tile,
                                                bool accumulates) {
  const uint32 v = tile_descriptor(v_tile, 64 * 128);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32 a[4] = {w[j][0], w[j][1], w[j + 1][0], w[j + 1][1]};
    Wgmma<Element>::rs(acc, a, descriptor_at(v, j * 8 * 128), j > 0 || accumulates);
  }
  wgmma_commit();
  wgmma_wait<0>();
  finished(acc);
}

// Whether a thread's accumulators have met a value that is not finite, be it one that no row sees: a masked key has
// weight 0, but 0 * NaN and 0 * Inf are NaN.
template <int kCount>
__device__ __forceinline__ bool any_nonfinite(const float (&acc)[kCount]) {
  float check[2] = {};  // 0, or NaN
#pragma unroll
  for (int i = 0; i < kCount; ++i) check[i % 2] = fmaf(acc[i], 0.f, check[i % 2]);
  return check[0] + check[1] != 0.f;
}

// x = other if a == b. As an instruction: of many conditions the compiler makes an index, and an array in memory.
__device__ __forceinline__ void take_if_equal(uint32& x, uint32 other, int a, int b) {
  asm("{\n.reg .pred same;\nsetp.eq.s32 same, %2, %3;\nselp.b32 %0, %1, %0, same;\n}"
      : "+r"(x)
      : "r"(other), "r"(a), "r"(b));
}

// Adds to acc the values that were taken out of the product w v, of 8 * kKeyTiles keys.
//
//   rows: bits of the keys that have such values; row_of(key): its row in global memory
//   sees(h, key): whether the thread's row h sees key number `key` of them
template <class Element, int kHeadDim, int kKeyTiles, class RowOf, class Sees>
__device__ __forceinline__ void add_taken_values(float (&acc)[kHeadDim / 2], const uint32 (&w)[kKeyTiles][2],
                                                 const uint32* rows, int head_dim, const RowOf& row_of,
                                                 const Sees& sees) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int key = 0; key < 8 * kKeyTiles; ++key) {  // unrolled, it would be most of the kernel, and is seldom run
    if (!(rows[key / 32] >> key % 32 & 1)) continue;
    float weight[2];
    bool seen[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32 pair = 0;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) take_if_equal(pair, w[j][h], key / 8, j);
      pair = __shfl_sync(kFullWarp, pair, lane / 4 * 4 + key % 8 / 2);
      weight[h] = key % 2 ? Element::high(pair) : Element::low(pair);
      seen[h] = sees(h, key);
    }
    add_nonfinite<Element, 2, kHeadDim / 8>(row_of(key), head_dim, weight, seen, [&](int h, int d, int e) -> float& {
      return acc[d * 4 + 2 * h + e];
    });
  }
}

// Of four threads that share a row: the largest, and the sum.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

}  // namespace s2o
