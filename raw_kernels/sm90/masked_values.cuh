// Values of masked keys that are not finite.
#pragma once
#include "sm90/outputs.cuh"
#include "sm90/products.cuh"

namespace s2o {
namespace sm90 {

// A masked key has weight 0, but 0 * NaN and 0 * Inf are NaN. Where the next value tile, which is masked row by row,
// holds values that are not finite (sm90/checker.cuh finds out), their keys are added by plain arithmetic to just the
// rows that see them and leave the product. Both warpgroups come here for the same tiles. Row r sees `limit` keys of
// the tile, or `limit + r` if causal.
template <class Traits>
__device__ __forceinline__ void guard_values(Consumer<Traits>& my, int limit, uint32 nth) {
  constexpr int kLane = Traits::kHeadDim / 32;  // elements of a row in a lane
  barrier_wait(my.shared.v_checked[my.check_ring.slot], my.check_ring.parity);
  uint32 found = 0;  // read by the lane that will release the tile: race detectors follow a thread's own arrivals
  if (my.lane == 0) found = *static_cast<volatile uint32*>(&my.shared.v_nonfinite[my.check_ring.slot]);
  my.check_ring.advance();
  if (__shfl_sync(kFullWarp, found, 0) == 0) return;
  barrier_wait(my.shared.v_full[my.v_ring.slot], my.v_ring.parity);
  if (my.unstored) store_last(my, nth - 1);
  if (!my.holds_output) clear_output(my);
  my.holds_output = true;
  const uint32 tile = shared_address(my.shared.v[my.v_ring.slot]);

  // This lane's part of a row of v: kLane elements, the same for every row but for the swizzle.
  const auto part = [&](int key) {
    const int c = my.lane * kLane / 8;
    return key_chunk<Traits>(tile, key, c) + my.lane * kLane % 8 * 2;
  };
  const auto row_is_finite = [&](int key) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kLane / 2; ++i)
      finite &= !has_nonfinite<typename Traits::Element>(load_shared_4(part(key) + i * 4));
    return __all_sync(kFullWarp, finite);
  };
  for (int key = 0; key < Traits::kBlockN; ++key) {
    if (row_is_finite(key)) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32 pair = 0;
#pragma unroll
      for (int j = 0; j < Traits::kKeyTiles; ++j) {
        uint32 x = my.p[j][h];
        asm volatile("" : "+r"(x));  // or the compiler indexes p by key, which puts it into local memory
        if (j == key / 8) pair = x;
      }
      pair = __shfl_sync(kFullWarp, pair, key % 8 / 2, 4);
      if (key >= limit + (my.params.geometry.is_causal ? my.first_row + 8 * h : 0)) continue;
      const float weight = key % 2 ? Traits::Element::high(pair) : Traits::Element::low(pair);
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d) {
        const uint32 chunk = key_chunk<Traits>(tile, key, d);
        const uint32 x = load_shared_4(chunk + my.lane % 4 * 4);
        my.acc[d * 4 + 2 * h] += weight * Traits::Element::low(x);
        my.acc[d * 4 + 2 * h + 1] += weight * Traits::Element::high(x);
      }
    }
  }
  named_sync(kTake, Traits::kConsumerThreads);  // both warpgroups have what they need of these rows
  for (int key = threadIdx.x / 32 - 4; key < Traits::kBlockN; key += Traits::kConsumerWarps) {
    if (row_is_finite(key)) continue;
    __syncwarp();  // all lanes have read the row
    if (my.lane != 0) continue;  // lane 0 will release the tile, as above
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 8; ++c)
      store_shared_16(key_chunk<Traits>(tile, key, c), make_uint4(0, 0, 0, 0));
  }
  fence_for_wgmma();
  named_sync(kTake, Traits::kConsumerThreads);
}

template <class Traits>
__device__ __forceinline__ void guard(Consumer<Traits>& my, int limit, uint32 nth) {
  if (limit < Traits::kBlockN) guard_values(my, limit, nth);
}

}  // namespace sm90
}  // namespace s2o
