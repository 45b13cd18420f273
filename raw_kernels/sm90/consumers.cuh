// The two passes as a consumer goes through them.
#pragma once
#include "sm90/unvisited.cuh"
#include "sm90/walk.cuh"

namespace s2o {
namespace sm90 {

template <class Traits>
constexpr bool kStoresLate = Traits::kHeadDim >= 128;  // pass 1; with 64 the products are too short to gain by it

// Pass 1: takes q tiles until none is left. The last output of one and the first scores of the next are in flight
// together, like those of any two key tiles. With kLate the output is stored beside the next one's products.
template <bool kLate, class Traits>
__device__ __forceinline__ void run_first(Consumer<Traits>& my) {
  uint32 nth = 0;
  if (!take(my, nth)) return;
  wait_for_queries(my, nth);
  uint32 q = queries(my, nth);
  issue_scores(my, q);
  pass_turn(my);
  start_empty(my);
  wgmma_wait<0>();
  finished(my.s);
  release_k(my);
  softmax<true>(my, q_tile_at(my, nth).limit);
  my.holds_output = false;
  pack(my);
  for (;;) {
    const QTile& tile = q_tile_at(my, nth);
    const int rows = tile.rows;
    walk<true>(my, nth, q, tile.key_tiles, tile.limit, rows);
    if (!take(my, ++nth)) {
      issue_output(my);
      stop_check(my, rows);
      wgmma_wait<0>();
      finished(my.acc);
      keep_state(my);
      store_last(my, nth - 1);
      return;
    }
    wait_for_queries(my, nth);
    q = queries(my, nth);
    issue_scores(my, q);
    issue_output<0, true>(my);
    stop_check(my, rows);
    keep_state(my);
    start_empty(my);
    wgmma_wait<1>();
    finished(my.s);
    release_k(my);
    softmax<true>(my, q_tile_at(my, nth).limit);
    await_output(my);
    release_v(my);
    if (!kLate) store_last(my, nth - 1);
    pack(my);
    my.unstored = kLate;
    my.holds_output = false;
  }
}

// Of a q tile of two heads (Rows::kHeads) leaves the part of this warpgroup, whose 64 rows are those of one.
template <class Rows, class Traits>
__device__ __forceinline__ void keep_part(const Consumer<Traits>& my, QTile& tile) {
  if constexpr (Rows::kHeads > 1) {
    static_assert(Rows::kHeads == Traits::kConsumers, "a head for each warpgroup");
    tile.head += my.group;
    tile.head_in_batch += my.group;
    tile.rows += my.group * Rows::kRows;
    tile.visited += my.group * my.params.geometry.segments() * my.params.tiles;
  }
}

// Pass 2: takes q tiles until none is left. A q tile is done before the next begins, whose rows may take a while to
// come: nobody knew when this one would stop. `all`: the kernel's parameters, of which params are a part.
template <class Rows, class Params, class Traits>
__device__ __forceinline__ void run_second(Consumer<Traits>& my, const Params& all) {
  for (uint32 nth = 0;; ++nth) {
    const uint32 slot = nth % 2, place = nth % kPlaces;
    if (!take(my, nth)) return;
    QTile tile = describe<Traits::kBlockN>(my.params, Rows(all, my.shared.q_tile[place]));
    keep_part<Rows>(my, tile);
    const int tiles = tile.key_tiles, limit = tile.limit, rows = tile.rows;
    wait_for_queries(my, nth);
    const int position[2] = {my.shared.rows[slot][my.first_row], my.shared.rows[slot][my.first_row + 8]};
    if (Rows::kListed && tiles == 0) {
      release(my, my.shared.q_empty[nth % Traits::kQueryPlaces]);
      store_nothing(my, tile, position);
      barrier_arrive(my.shared.q_tile_empty[place]);
      continue;
    }
    const uint32 q = queries(my, nth);
    issue_scores(my, q);
    pass_turn(my);
    if (kKeepsTau<Traits> && !kWalksLadder<Traits>) my.kept_tau = my.shared.tau[place];
    if (Rows::resumes(all)) {
      resume(my, tile, position);
    } else {
      start_empty(my);
      clear_output(my);
    }
    if constexpr (kSkipsValues<Traits>) my.values.start(all.values, tile.head_in_batch, tile.visited);
    if constexpr (kWalksLadder<Traits>) {
      my.ladder = {};
      my.kept_tau = my.ladder.tau_of_bit(all, tile.head, my.lane % kLadder);
    }
    wgmma_wait<0>();
    finished(my.s);
    if (!Traits::kInHalves) release_k(my);
    softmax<false>(my, limit, rows);
    rescale(my);
    pack(my);
    if (Traits::kBringsOutputs && Rows::resumes(all)) {
      release_v(my);
      if constexpr (kAddsTail<Traits>) barrier_arrive(my.shared.outputs_read);
    }
    int visited;
    if constexpr (Traits::kInHalves) {
      visited = walk_in_halves(my, nth, q, tiles, limit, rows);
    } else {
      visited = walk<false>(my, nth, q, tiles, limit, rows);
    }
    const int stop_checks = (visited + Traits::kTilesPerStopCheck - 1) / Traits::kTilesPerStopCheck;
    int stored[2];
    const auto find_stored = [&] {
      stored[0] = my.shared.rows[slot][my.first_row];
      stored[1] = my.shared.rows[slot][my.first_row + 8];
    };
    // After the products it would be a copy for each.
    if constexpr (kSkipsValues<Traits>) vote(my, rows, stop_checks - 1, nth);
    by_skips(my, [&](auto skips_of_last) {
      issue_output<skips_of_last.value, false, Traits::kInHalves ? 1 : 0>(my);
      if constexpr (!kSkipsValues<Traits>) vote(my, rows, stop_checks - 1, nth);
      my.voted += stop_checks;
      if constexpr (!kAddsTail<Traits>) find_stored();
      wgmma_wait<0>();
      finished(my.acc);
    });
    release_v(my);
    // Copies that the producer had started before it saw the stop.
    for (int i = min(tiles, visited + Traits::kStages - 1) - visited; i > 0; --i) {
      barrier_wait(my.shared.k_full[my.k_ring.slot], my.k_ring.parity);
      release_k(my);
    }
    for (int i = min(tiles, visited + Traits::kStages - 2) - visited; i > 0; --i) {
      barrier_wait(my.shared.v_full[my.v_ring.slot], my.v_ring.parity);
      release_v(my);
    }
    if constexpr (kWalksLadder<Traits>) {
      stop_check(my, rows);  // adds what votes that did not count have left
      const Rows walked(all, *static_cast<volatile int*>(&my.shared.q_tile[place]));  // needs no register before
      finish_ladder(my, walked.visited_index(my.params), walked.count);
    } else {
      if constexpr (kAddsTail<Traits>) {
        const int left = limit - visited * Traits::kBlockN;
        if (left > 0) add_unvisited(my, all, nth, q, left);
        find_stored();  // not before, as a tail leaves no registers, nor after queries' place is free
        release(my, my.shared.q_empty[nth % Traits::kQueryPlaces]);
      }
      static_assert(!Traits::kInHalves || Rows::kHeads == 1, "keep_part would have to follow");
      if constexpr (Traits::kInHalves)  // anew: registers do not suffice to keep it
        tile = describe<Traits::kBlockN>(my.params, Rows(all, *static_cast<volatile int*>(&my.shared.q_tile[place])));
      store<false>(my, tile, stored, my.m, my.l);
      if constexpr (Rows::kListed) keep_listed_state(my, all, tile, stored);
      const bool writes = Rows::kHeads == 1 ? threadIdx.x == Traits::kFirstConsumer : threadIdx.x % kWarpgroup == 0;
      if (writes) my.params.visited[tile.visited] = stop_checks;
    }
    barrier_arrive(my.shared.q_tile_empty[place]);
  }
}

}  // namespace sm90
}  // namespace s2o
