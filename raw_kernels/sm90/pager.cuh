// The producer of pass 1 on Hopper where keys and values lie in pages: consecutive rows, gathered through the page
// table. It loads just what sm90/copier.cuh would from one array, rows past a tile's own too, so that the consumers
// compute the same bits. Its warps copy and then look for NaN and infinities: a value tile is checked after the copies
// that follow it were started, which is before any that wait for its consumers. The last one of a q tile is checked
// after the next q tile is announced, so consumers must not wait for it before they have stored the q tile before.
#pragma once
#include "sm90/checker.cuh"
#include "sm90/gathered_rows.cuh"
#include "sm90/q_tiles.cuh"

namespace s2o {
namespace sm90 {

template <class Traits, class Rows, class Params>
__device__ __forceinline__ void produce_from_pages(const Params& params, typename Traits::Shared& shared) {
  const Geometry& g = params.geometry;
  const Pages& pages = params.pages;
  constexpr int kBlockN = Traits::kBlockN, kQueryPlaces = Traits::kQueryPlaces;
  const CopyLayout<Traits> layout(g.head_dim);
  const int row = layout.kept_row();
  const bool whole_rows = g.head_dim == Traits::kHeadDim;
  const RowUnits<false> q_units(pages, params.q);
  const RowUnits<true> k_units(pages, params.k), v_units(pages, params.v);
  Ring<Traits::kStages> k_ring, v_ring, unchecked;  // unchecked: the value tile that is to be checked next
  Ring<2> check_ring;
  bool to_check = false;
  const auto check = [&] {
    if (to_check && threadIdx.x >= 32) {
      barrier_wait(shared.v_full[unchecked.slot], unchecked.parity);
      check_tile<Traits, true>(shared, unchecked.slot, check_ring);
    }
    to_check = false;
  };
  const auto announce = [&](uint32 nth, int q_tile) {
    if (q_tile < 0) {
      publish<2>(shared, nth, q_tile, [](uint32) {});
    } else {
      const QTile tile = describe<kBlockN>(params, Rows(params, q_tile));
      publish<2>(shared, nth, q_tile, [&](uint32 place) { shared.described[place] = tile; });
    }
  };
  if (threadIdx.x == 0) announce(0, next_q_tile<Rows>(params));
  for (uint32 nth = 0;; ++nth) {
    const uint32 slot = nth % kQueryPlaces, place = nth % kPlaces;
    await_q_tile(shared, nth);
    const int q_tile = shared.q_tile[place];
    const QTile described = shared.described[place];
    barrier_arrive(shared.q_tile_empty[place]);
    if (q_tile < 0) {
      check();
      return;
    }

    const uint16* k = head_rows<true>(params.k, described.batch, described.kv_head);
    const uint16* v = head_rows<true>(params.v, described.batch, described.kv_head);
    const int first_key = described.first_key, tiles = described.key_tiles, sequence_keys = described.sequence_keys;
    const int first_masked = described.limit / kBlockN;
    const auto key = [&](int tile) {  // the position of this lane's row; -1 past the end
      const int position = first_key + tile * kBlockN + row;
      return position < sequence_keys ? position : -1;
    };
    const auto full = [&](int tile) { return whole_rows && first_key + (tile + 1) * kBlockN <= sequence_keys; };
    const int* entries = pages.of(described.table_row);
    int page = pages.page(entries, key(0)), next = -1;  // page: of the next tile, on its way
    uint32 k_row, v_row = kNoRow;
    for (int tile = 0; tile <= tiles; ++tile) {
      const uint32 v_before = v_row;
      if (tile < tiles) {
        const int now = pages.slot_in(page, key(tile));
        k_row = k_units(now);
        v_row = v_units(now);
        asm volatile("" : "+r"(k_row), "+r"(v_row));  // before the wait, not after it
        if (tile + 1 < tiles) page = pages.page(entries, key(tile + 1));
        barrier_wait(shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
        layout.gather_keys(shared_address(shared.k[k_ring.slot]), k, k_row, full(tile));
        barrier_arrive_after_copies(shared.k_full[k_ring.slot]);
        k_ring.advance();
      }
      if (tile == 0) {
        // From the tile's first row on, as 32 bits may not reach over all packed sequences.
        const uint16* q = params.q.at(described.batch, described.head_in_batch) + described.first * params.q.row;
        const uint32 q_row[1] = {q_units(described.first + row < g.seqlen_q ? row : -1)};
        barrier_wait(shared.q_empty[slot], (nth / kQueryPlaces & 1) ^ 1);
        layout.gather_queries(shared_address(shared.q[slot]), q, q_row,
                                        whole_rows && described.first + Traits::kBlockM <= g.seqlen_q);
        barrier_arrive_after_copies(shared.q_full[slot]);
        barrier_arrive(shared.q_full[slot]);
        if (threadIdx.x == 0) next = take_q_tile(params);
        check();
      } else {
        barrier_wait(shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
        layout.gather_keys(shared_address(shared.v[v_ring.slot]), v, v_before, full(tile - 1));
        barrier_arrive_after_copies(shared.v_full[v_ring.slot]);
        check();
        unchecked = v_ring;
        to_check = tile - 1 >= first_masked;
        v_ring.advance();
      }
    }
    if (threadIdx.x == 0) announce(nth + 1, q_tile_from<Rows>(params, next));
  }
}

}  // namespace sm90
}  // namespace s2o
