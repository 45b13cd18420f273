// A consumer's products: by wgmma, from tiles in shared memory, which are released when they have been multiplied.
#pragma once
#include "sm90/consumer.cuh"

namespace s2o {
namespace sm90 {

// s = q k^T of the next key tile, in flight; of TwoBlockTraits of one half of it.
template <int kHalf = 0, class Traits>
__device__ __forceinline__ void issue_scores(Consumer<Traits>& my, uint32 q) {
  if (kHalf == 0) barrier_wait(my.shared.k_full[my.k_ring.slot], my.k_ring.parity);
  await_turn(my);
  const uint32 k = descriptor_at(tile_descriptor(shared_address(my.shared.k[my.k_ring.slot]), 0),
                                 kHalf * Traits::kKeyTiles * Traits::kRowsStride);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
    const uint32 column = c % 4 * 32;
    Wgmma<typename Traits::Element>::template ss<Traits::kRowsStride>(
        my.s, descriptor_at(q, c / 4 * Traits::kQueryAtom + column),
        descriptor_at(k, c / 4 * Traits::kColumnsStride + column), c > 0);
  }
  wgmma_commit();
}

// Products of an output that are issued after the turn has been passed: the other warpgroup's first one is then asked
// for while they run.
template <class Traits>
constexpr int kAfterTurn = Traits::kHeadDim == 64 ? 2 : 1;

// acc += p v of the next value tile, in flight. kSkips: a bit for each block of it that is left out. kPassesTurn: passes
// this warpgroup's turn. kHalf: as above.
template <uint32 kSkips = 0, bool kPassesTurn = false, int kHalf = 0, class Traits>
__device__ __forceinline__ void issue_output(Consumer<Traits>& my) {
  if (kHalf == 0) barrier_wait(my.shared.v_full[my.v_ring.slot], my.v_ring.parity);
  const uint32 v = descriptor_at(tile_descriptor(shared_address(my.shared.v[my.v_ring.slot]), Traits::kColumnsStride),
                                 kHalf * Traits::kKeyTiles * Traits::kRowsStride);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < Traits::kKeyTiles; j += 2) {
    if (kPassesTurn && j == Traits::kKeyTiles - 2 * kAfterTurn<Traits>) pass_turn(my);
    if (kSkips >> (j * 8 / kValueKeys) & 1) continue;
    const uint32 a[4] = {my.p[j][0], my.p[j][1], my.p[j + 1][0], my.p[j + 1][1]};
    Wgmma<typename Traits::Element>::template rs<Traits::kRowsStride>(
        my.acc, a, descriptor_at(v, j * Traits::kRowsStride), j > 0 || my.holds_output);
  }
  wgmma_commit();
  my.holds_output = true;
}

template <class Traits>
__device__ __forceinline__ void release_k(Consumer<Traits>& my) {
  release(my, my.shared.k_empty[my.k_ring.slot]);
  my.k_ring.advance();
}

template <class Traits>
__device__ __forceinline__ void release_v(Consumer<Traits>& my) {
  release(my, my.shared.v_empty[my.v_ring.slot]);
  my.v_ring.advance();
}

template <class Traits>
__device__ __forceinline__ void pack(Consumer<Traits>& my) {
#pragma unroll
  for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) my.p[j][h] = Traits::Element::pack(my.s[j * 4 + 2 * h], my.s[j * 4 + 2 * h + 1]);
}

template <class Traits>
__device__ __forceinline__ void clear_output(Consumer<Traits>& my) {
#pragma unroll
  for (int i = 0; i < Traits::kDimTiles * 4; ++i) my.acc[i] = 0.f;
}

template <class Traits>
__device__ __forceinline__ void rescale(Consumer<Traits>& my) {
  // Keys come in descending importance: most tiles leave every maximum of the warp where it was.
  if (!__any_sync(kFullWarp, my.rescale_by[0] != 1.f || my.rescale_by[1] != 1.f)) return;
#pragma unroll
  for (int d = 0; d < Traits::kDimTiles; ++d)
#pragma unroll
    for (int e = 0; e < 4; ++e) my.acc[d * 4 + e] *= my.rescale_by[e / 2];
}

}  // namespace sm90
}  // namespace s2o
