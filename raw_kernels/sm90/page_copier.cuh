// The producer of pass 1 on Hopper where keys and values lie in pages, and tiles begin where boxes of a page may: as
// sm90/copier.cuh, but of tensor maps of pages, and a warp, of which each lane has the copy engine bring the rows of
// one page. Rows past the end of a sequence are whatever stands in its last page, and zeros beyond it: no row of q sees
// them.
//
// A box has 64 columns, and each 64 columns of a page their own; or, with WholeRowTraits, all columns: the copy engine
// takes about as long for a box of 16 rows x 64 columns as for twice as many. Such a map has the axes [heads of pages,
// rows / 8, columns / 64, 8, 64] (`page_map` in s2o_cupy/cuda/tensor_maps.py).
#pragma once
#include "sm90/boxes.cuh"
#include "sm90/q_tiles.cuh"

namespace s2o {
namespace sm90 {

template <class Traits, class Params>
__device__ __forceinline__ void produce_by_page_maps(const Mapped<Params>& params, typename Traits::Shared& shared) {
  const Pages& pages = params.attention.pages;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr uint32 kTileBytes = kBlockN * Traits::kHeadDim * 2;
  const int lane = threadIdx.x;
  const int page_size = 1 << pages.shift, box = min(page_size, kBlockN);  // rows of a box: paths.py sees to the maps
  const bool copies = lane * box < kBlockN;
  constexpr bool kWholeRows = Traits::kRowsStride != kEightRows;
  const HeadsOfPages k_heads(params.attention.k), v_heads(params.attention.v);
  const auto copy = [&](uint16* tile, const TensorMap& map, uint64& full, int slot, int kv_head,
                        const HeadsOfPages& heads) {
    if (lane == 0) barrier_expect(full, kTileBytes);
    __syncwarp();
    if (!copies) return;
    if constexpr (kWholeRows) {
      const BoxAt at = heads.box(pages, slot, kv_head);
      copy_box(shared_address(tile) + lane * box / 8 * Traits::kRowsStride, map, full, 0, at.row, 0, at.outer,
               at.outermost);
    } else {
      const int page = slot < 0 ? 0 : slot >> pages.shift;
      const int begin = slot < 0 ? page_size : pages.in_page(slot);  // past the end of a page there are zeros
#pragma unroll
      for (int column = 0; column < Traits::kHeadDim; column += 64)
        copy_box(shared_address(tile) + column / 64 * Traits::kKeyAtom + lane * box * 128, map, full, column, begin,
                 kv_head, page);
    }
  };
  Ring<Traits::kStages> k_ring, v_ring;
  Ring<2> check_ring;
  for (uint32 nth = 0;; ++nth) {
    const uint32 place = nth % kPlaces;
    await_q_tile(shared, nth);
    const int q_tile = shared.q_tile[place];
    const int kv_head = shared.described[place].kv_head, table_row = shared.described[place].table_row;
    const int first_key = shared.described[place].first_key + lane * box;
    const int tiles = shared.described[place].key_tiles;
    const int first_masked = shared.described[place].limit / kBlockN;
    const int sequence_keys = shared.described[place].sequence_keys;
    barrier_arrive(shared.q_tile_empty[place]);
    if (q_tile < 0) return;
    const auto key = [&](int tile) {  // the first row of this lane's box; -1 past the end
      const int position = first_key + tile * kBlockN;
      return copies && position < sequence_keys ? position : -1;
    };
    const int* entries = pages.of(table_row);
    int page = pages.page(entries, key(0)), now = -1;  // page: of the next tile, on its way
    for (int tile = 0; tile <= tiles; ++tile) {
      const int before = now;
      if (tile < tiles) {
        now = pages.slot_in(page, key(tile));
        if (tile + 1 < tiles) page = pages.page(entries, key(tile + 1));
        barrier_wait(shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
        copy(shared.k[k_ring.slot], params.k, shared.k_full[k_ring.slot], now, kv_head, k_heads);
        k_ring.advance();
      }
      if (tile == 0) continue;
      barrier_wait(shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
      copy(shared.v[v_ring.slot], params.v, shared.v_full[v_ring.slot], before, kv_head, v_heads);
      v_ring.advance();
      if (tile - 1 >= first_masked) {
        if (lane == 0) barrier_arrive(shared.v_sent[check_ring.slot]);
        check_ring.advance();
      }
    }
  }
}

}  // namespace sm90
}  // namespace s2o
