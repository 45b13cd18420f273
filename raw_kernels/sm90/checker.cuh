// Pass 1's second job beside its consumers: warps of the producer that look for NaN and infinities in value tiles that
// are masked row by row, where a weight of 0 would turn them into NaN for rows that do not see them.
#pragma once
#include "sm90/q_tiles.cuh"

namespace s2o {
namespace sm90 {

// Tells the consumers whether the value tile in `stage`, which has landed, holds any; the producer's last warps.
template <class Traits, bool kGathers>
__device__ __forceinline__ void check_tile(typename Traits::Shared& shared, uint32 stage, Ring<2>& check_ring) {
  using Element = typename Traits::Element;
  constexpr int kChunks = Traits::kBlockN * Traits::kHeadDim * 2 / 16;  // of 16 bytes
  constexpr uint32 kExponents = Element::kExponentMask, kLowest = kExponents & ~(kExponents << 1);
  constexpr int kWarps = kCheckers<kGathers>;
  const int thread = threadIdx.x - (kWarpgroup - kWarps * 32), warp = thread / 32, lane = threadIdx.x % 32;
  const uint32 data = shared_address(shared.v[stage]);
  uint32 carries = 0;  // into the sign, where an exponent is all ones
#pragma unroll 4
  for (int i = thread; i < kChunks; i += kWarps * 32) {
    const uint4 x = load_shared_16(data + i * 16);
    carries |= ((x.x & kExponents) + kLowest) | ((x.y & kExponents) + kLowest);
    carries |= ((x.z & kExponents) + kLowest) | ((x.w & kExponents) + kLowest);
  }
  const bool nonfinite = __any_sync(kFullWarp, carries & 0x80008000u);
  if (lane == 0)
    reinterpret_cast<volatile unsigned char*>(&shared.v_nonfinite[check_ring.slot])[warp] = nonfinite;
  // Where rows are gathered, with all lanes: race detectors see those copies, and follow a thread's own arrivals.
  if (kGathers || lane == 0) barrier_arrive(shared.v_checked[check_ring.slot]);
  check_ring.advance();
}

template <class Traits>
__device__ __forceinline__ void check_values(typename Traits::Shared& shared) {
  Ring<2> check_ring;
  uint32 values = 0;  // value tiles of the q tiles before this one
  for (uint32 nth = 0;; ++nth) {
    const uint32 place = nth % kPlaces;
    await_q_tile(shared, nth);
    const int q_tile = shared.q_tile[place], tiles = shared.described[place].key_tiles;
    const int first_masked = shared.described[place].limit / Traits::kBlockN;
    barrier_arrive(shared.q_tile_empty[place]);
    if (q_tile < 0) return;
    for (int tile = first_masked; tile < tiles; ++tile) {
      const uint32 stage = (values + tile) % Traits::kStages;
      // Tiles that are not masked are passed over, so v_full may be two phases behind, which looks like one ahead.
      barrier_wait(shared.v_sent[check_ring.slot], check_ring.parity);
      barrier_wait(shared.v_full[stage], (values + tile) / Traits::kStages & 1);
      check_tile<Traits, false>(shared, stage, check_ring);
    }
    values += tiles;
  }
}

}  // namespace sm90
}  // namespace s2o
