// The producer of pass 1 on Hopper: one thread that takes q tiles and has the copy engine bring consecutive rows of q, k
// and v, so that the consumers keep the issue slots. Rows past a tile's own come along; nothing of theirs is used.
#pragma once
#include "work_sm90.cuh"

namespace s2o {
namespace sm90 {

template <class Traits, class Rows, class Params>
__device__ __forceinline__ void produce_by_tensor_maps(const Mapped<Params>& params, typename Traits::Shared& shared) {
  if (threadIdx.x != 0) return;
  const Params& p = params.attention;
  const Geometry& g = p.geometry;
  constexpr uint32 kTileBytes = kBlockN * Traits::kHeadDim * 2;
  static_assert(kBlockM == kBlockN, "one box fits q, k and v");
  const auto copy = [&](uint16* tile, const TensorMap& map, uint64& full, int row, int head, int batch) {
    barrier_expect(full, kTileBytes);
#pragma unroll
    for (int column = 0; column < Traits::kHeadDim; column += 64)
      copy_box(shared_address(tile) + column / 64 * kAtomBytes, map, full, column, row, head, batch);
  };
  Ring<Traits::kStages> k_ring, v_ring;
  Ring<2> check_ring;
  int taken = take_work(p);
  for (uint32 item = 0;; ++item) {
    const int work = work_from<Rows>(p, taken);
    if (work < 0) {
      publish(shared, item, work);
      return;
    }
    const uint32 slot = item % 2;
    const Rows rows(p, work);
    const int batch = rows.batch(p.heads), head = rows.head_in_batch(p.heads);
    const int kv_head = rows.kv_head(p.heads, p.kv_heads), first_key = rows.first_key(g);
    const int tiles = rows.key_tiles(g), first_masked = rows.limit(g) / kBlockN;
    for (int tile = 0; tile <= tiles; ++tile) {
      if (tile < tiles) {
        barrier_wait(shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
        copy(shared.k[k_ring.slot], params.k, shared.k_full[k_ring.slot], first_key + tile * kBlockN, kv_head, batch);
        k_ring.advance();
      }
      if (tile == 0) {
        barrier_wait(shared.q_empty[slot], (item / 2 & 1) ^ 1);
        copy(shared.q[slot], params.q, shared.q_full[slot], rows.first, head, batch);
        // After the first copies: the place may not be free before the consumers have stored an earlier q tile.
        const Item described = describe(p, rows);
        publish(shared, item, work, &described);
        taken = take_work(p);
      } else {
        barrier_wait(shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
        copy(shared.v[v_ring.slot], params.v, shared.v_full[v_ring.slot], first_key + (tile - 1) * kBlockN, kv_head,
             batch);
        v_ring.advance();
        if (tile - 1 >= first_masked) {
          barrier_arrive(shared.v_sent[check_ring.slot]);
          check_ring.advance();
        }
      }
    }
  }
}

}  // namespace sm90
}  // namespace s2o
