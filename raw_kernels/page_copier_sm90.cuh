// The producer of pass 1 on Hopper where keys and values lie in pages, and tiles begin where boxes of a page may: as
// copier_sm90.cuh, but of a tensor map whose last axis are the pages, and a warp, of which each lane has the copy engine
// bring one box of rows of one page. Rows past the end of a sequence are whatever stands in its last page, and zeros beyond
// it: no row of q sees them.
#pragma once
#include "work_sm90.cuh"

namespace s2o {
namespace sm90 {

template <class Traits, class Rows>
__device__ __forceinline__ void produce_by_page_maps(const MappedAttentionParams& params, typename Traits::Shared& shared) {
  const AttentionParams& p = params.attention;
  const Geometry& g = p.geometry;
  const Pages& pages = p.pages;
  constexpr uint32 kTileBytes = kBlockN * Traits::kHeadDim * 2;
  const int lane = threadIdx.x;
  const int page_size = 1 << pages.shift, box = min(page_size, kBlockN);  // rows of a box: plan.py sees to the maps
  const bool copies = lane * box < kBlockN;
  const auto copy = [&](uint16* tile, const TensorMap& map, uint64& full, int slot, int kv_head) {
    if (lane == 0) barrier_expect(full, kTileBytes);
    __syncwarp();
    if (!copies) return;
    const int page = slot < 0 ? 0 : slot >> pages.shift;
    const int begin = slot < 0 ? page_size : pages.in_page(slot);  // past the end of a page there are zeros
#pragma unroll
    for (int column = 0; column < Traits::kHeadDim; column += 64)
      copy_box(shared_address(tile) + column / 64 * kAtomBytes + lane * box * 128, map, full, column, begin, kv_head,
               page);
  };
  Ring<Traits::kStages> k_ring, v_ring;
  Ring<2> check_ring;
  int taken = lane == 0 ? take_work(p) : 0;
  for (uint32 item = 0;; ++item) {
    const int work = __shfl_sync(kFullWarp, lane == 0 ? work_from<Rows>(p, taken) : 0, 0);
    if (work < 0) {
      if (lane == 0) publish(shared, item, work);
      return;
    }
    const uint32 slot = item % 2;
    const Rows rows(p, work);
    if (lane == 0) {
      const Item described = describe(p, rows);
      publish(shared, item, work, &described);
    }
    __syncwarp();
    const int batch = rows.batch(p.heads), kv_head = rows.kv_head(p.heads, p.kv_heads);
    const int first_key = rows.first_key(g) + lane * box, tiles = rows.key_tiles(g);
    const int first_masked = rows.limit(g) / kBlockN;
    const auto key = [&](int tile) {  // the first row of this lane's box; -1 past the end
      const int position = first_key + tile * kBlockN;
      return copies && position < g.seqlen_k ? position : -1;
    };
    int page = pages.page(pages.of(batch), key(0)), now = -1;  // page: of the next tile, on its way
    for (int tile = 0; tile <= tiles; ++tile) {
      const int before = now;
      if (tile < tiles) {
        now = pages.slot_in(page, key(tile));
        if (tile + 1 < tiles) page = pages.page(pages.of(batch), key(tile + 1));
        barrier_wait(shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
        copy(shared.k[k_ring.slot], params.k, shared.k_full[k_ring.slot], now, kv_head);
        k_ring.advance();
      }
      if (tile == 0) {
        if (lane == 0) {
          barrier_wait(shared.q_empty[slot], (item / 2 & 1) ^ 1);
          barrier_expect(shared.q_full[slot], kTileBytes);
#pragma unroll
          for (int column = 0; column < Traits::kHeadDim; column += 64)
            copy_box(shared_address(shared.q[slot]) + column / 64 * kAtomBytes, params.q, shared.q_full[slot], column,
                     rows.first, rows.head_in_batch(p.heads), batch);
          taken = take_work(p);
        }
        __syncwarp();
      } else {
        barrier_wait(shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
        copy(shared.v[v_ring.slot], params.v, shared.v_full[v_ring.slot], before, kv_head);
        v_ring.advance();
        if (tile - 1 >= first_masked) {
          if (lane == 0) barrier_arrive(shared.v_sent[check_ring.slot]);
          check_ring.advance();
        }
      }
    }
  }
}

}  // namespace sm90
}  // namespace s2o
