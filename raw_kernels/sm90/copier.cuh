// The thread of pass 1 on Hopper that has the copy engine bring consecutive rows of k and v, so that the consumers keep
// the issue slots. Rows past a tile's own come along; nothing of theirs is used.
#pragma once
#include "sm90/q_tiles.cuh"

namespace s2o {
namespace sm90 {

template <class Traits, class Params>
__device__ __forceinline__ void produce_by_tensor_maps(const Mapped<Params>& params, typename Traits::Shared& shared) {
  if (threadIdx.x != 0) return;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr uint32 kTileBytes = kBlockN * Traits::kHeadDim * 2;
  Ring<Traits::kStages> k_ring, v_ring;
  Ring<2> check_ring;
  for (uint32 nth = 0;; ++nth) {
    const uint32 place = nth % kPlaces;
    await_q_tile(shared, nth);
    const int q_tile = shared.q_tile[place];
    const int kv_head = shared.described[place].kv_head, batch = shared.described[place].batch;
    const int first_key = shared.described[place].first_key, tiles = shared.described[place].key_tiles;
    const int first_masked = shared.described[place].limit / kBlockN;
    barrier_arrive(shared.q_tile_empty[place]);
    if (q_tile < 0) return;
    const auto copy = [&](uint16* to, const TensorMap& map, uint64& full, int tile) {
      barrier_expect(full, kTileBytes);
#pragma unroll
      for (int column = 0; column < Traits::kHeadDim; column += 64)
        copy_box(shared_address(to) + column / 64 * Traits::kKeyAtom, map, full, column, first_key + tile * kBlockN,
                 kv_head, batch);
    };
    for (int tile = 0; tile <= tiles; ++tile) {
      if (tile < tiles) {
        barrier_wait(shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
        copy(shared.k[k_ring.slot], params.k, shared.k_full[k_ring.slot], tile);
        k_ring.advance();
      }
      if (tile == 0) continue;
      barrier_wait(shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
      copy(shared.v[v_ring.slot], params.v, shared.v_full[v_ring.slot], tile - 1);
      v_ring.advance();
      if (tile - 1 >= first_masked) {
        barrier_arrive(shared.v_sent[check_ring.slot]);
        check_ring.advance();
      }
    }
  }
}

}  // namespace sm90
}  // namespace s2o
