// A consumer's products: by wgmma, from tiles in shared memory, which are released when they have been multiplied.
#pragma once
#include "sm90/softmax.cuh"

namespace s2o {
namespace sm90 {

template <class Traits>
struct Products : Softmax<Traits> {
  using Element = typename Traits::Element;
  using Shared = typename Traits::Shared;
  static constexpr int kHeadDim = Traits::kHeadDim, kDimTiles = Traits::kDimTiles, kStages = Traits::kStages;
  static constexpr int kQueryAtom = Traits::kQueryAtom, kQueryPlaces = Traits::kQueryPlaces;
  using Softmax<Traits>::kKeyTiles, Softmax<Traits>::group, Softmax<Traits>::lane, Softmax<Traits>::s;
  using Softmax<Traits>::rescale_by;

  float acc[kDimTiles * 4];  // [rows, dims] of this thread
  uint32 p[kKeyTiles][2];    // weights, packed in pairs of keys
  bool holds_output = true;  // acc; false: the next product begins it (pass 1)

  Shared& shared;
  Ring<kStages> k_ring, v_ring;

  __device__ __forceinline__ Products(Shared& shared_, const AttentionParams& params_)
      : Softmax<Traits>(params_), shared(shared_) {
    if (group == 1) named_arrive(kTurn, kConsumers * kWarpgroup);  // the first warpgroup goes first
  }

  __device__ __forceinline__ void release(uint64& barrier) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }
  __device__ __forceinline__ void await_turn() const { named_sync(kTurn + group, kConsumers * kWarpgroup); }
  __device__ __forceinline__ void pass_turn() const { named_arrive(kTurn + 1 - group, kConsumers * kWarpgroup); }

  // Descriptor of this warpgroup's rows of a q tile.
  __device__ __forceinline__ uint32 queries(uint32 nth) const {
    uint32 q = tile_descriptor(shared_address(shared.q[nth % kQueryPlaces]) + group * 64 * 128, 0);
    asm volatile("" : "+r"(q));  // or it is computed anew for each key tile, while the other warpgroup waits
    return q;
  }

  // s = q k^T of the next key tile, in flight.
  __device__ __forceinline__ void issue_scores(uint32 q) {
    barrier_wait(shared.k_full[k_ring.slot], k_ring.parity);
    await_turn();
    const uint32 k = tile_descriptor(shared_address(shared.k[k_ring.slot]), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c) {
      const uint32 column = c % 4 * 32;
      Wgmma<Element>::template ss<Traits::kRowsStride>(
          s, descriptor_at(q, c / 4 * kQueryAtom + column),
          descriptor_at(k, c / 4 * Traits::kColumnsStride + column), c > 0);
    }
    wgmma_commit();
  }

  // acc += p v of the next value tile, in flight. kSkips: a bit for each block of it that is left out.
  template <uint32 kSkips = 0>
  __device__ __forceinline__ void issue_output() {
    barrier_wait(shared.v_full[v_ring.slot], v_ring.parity);
    const uint32 v = tile_descriptor(shared_address(shared.v[v_ring.slot]), Traits::kColumnsStride);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kKeyTiles; j += 2) {
      if (kSkips >> (j * 8 / kValueKeys) & 1) continue;
      const uint32 a[4] = {p[j][0], p[j][1], p[j + 1][0], p[j + 1][1]};
      Wgmma<Element>::template rs<Traits::kRowsStride>(acc, a, descriptor_at(v, j * Traits::kRowsStride),
                                                       j > 0 || holds_output);
    }
    wgmma_commit();
    holds_output = true;
  }

  __device__ __forceinline__ void release_k() {
    release(shared.k_empty[k_ring.slot]);
    k_ring.advance();
  }
  __device__ __forceinline__ void release_v() {
    release(shared.v_empty[v_ring.slot]);
    v_ring.advance();
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) p[j][h] = Element::pack(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]);
  }

  __device__ __forceinline__ void rescale() {
    // Keys come in descending importance: most tiles leave every maximum of the warp where it was.
    if (!__any_sync(kFullWarp, rescale_by[0] != 1.f || rescale_by[1] != 1.f)) return;
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[d * 4 + e] *= rescale_by[e / 2];
  }
};

}  // namespace sm90
}  // namespace s2o
