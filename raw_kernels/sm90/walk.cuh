// The key tiles of a q tile, one after the other.
#pragma once
#include "sm90/masked_values.cuh"
#include "sm90/votes.cuh"

namespace s2o {
namespace sm90 {

template <uint32 kSkips>
struct Skips { static constexpr uint32 value = kSkips; };

// Runs `stage`, from the issue of products to their end, for the blocks that `skips` says the output leaves out:
// where one of two products of a stage depended on a number, ptxas would have each wait for the one before.
template <class Stage, class Traits>
__device__ __forceinline__ void by_skips(Consumer<Traits>& my, const Stage& stage) {
  if constexpr (!kSkipsValues<Traits>) {
    stage(Skips<0>());
  } else if (my.skips == 0) {
    stage(Skips<0>());
  } else if constexpr (Traits::kBlockN == kValueKeys) {
    stage(Skips<1>());
  } else if (my.skips == 1) {
    stage(Skips<1>());
  } else if (my.skips == 2) {
    stage(Skips<2>());
  } else {
    stage(Skips<3>());
  }
}

// Of pass 1. Behind the softmax only where head_dim is 256: with less, whose products are shorter, waiting before the
// exponentials, as ptxas has it, is up to 3 % faster, as the other warpgroup's products run under them anyway.
template <class Traits>
__device__ __forceinline__ void await_output(Consumer<Traits>& my) {
  if constexpr (Traits::kHeadDim == 256) {
    wgmma_wait_behind(my.mass[0] + my.mass[1]);
  } else {
    wgmma_wait<0>();
  }
  finished(my.acc);
}

// Walks the key tiles of q tile number `nth` from the second on; the first one's weights are in p. Row r sees the
// first `limit` keys, or in pass 1 (kFirst) `limit + r`. Pass 2 ends one stop check after the first that adds too
// little to each of the first `rows` rows. Returns the number of tiles visited; the last one's output is not issued
// yet.
template <bool kFirst, class Traits>
__device__ __forceinline__ int walk(Consumer<Traits>& my, uint32 nth, uint32 q, int tiles, int limit, int rows) {
  int tile = 1;
  for (; tile < tiles; ++tile) {
    const bool at_stop_check = !kFirst && tile % Traits::kTilesPerStopCheck == 0;
    uint32 stops = 0;  // of a ladder
    if (at_stop_check && tile >= 2 * Traits::kTilesPerStopCheck) {
      const uint32 check = my.voted + tile / Traits::kTilesPerStopCheck - 2;
      if constexpr (kWalksLadder<Traits>) {
        stops = ladder_stops<Traits>(my.shared, check);
        if (stops & 1) break;
      } else {
        if (all_voted_to_stop<Traits>(my.shared, check)) break;
      }
    }
    if (kFirst) guard(my, limit - (tile - 1) * Traits::kBlockN, nth);
    bool moved = true;
    by_skips(my, [&](auto skips_of_last) {
      issue_scores(my, q);
      if (kFirst && my.unstored) {  // under these scores, and while the other warpgroup issues its own
        pass_turn(my);
        store_last(my, nth - 1);
        await_turn(my);
      }
      issue_output<skips_of_last.value, true>(my);
      // Here, as it runs under the products.
      if (at_stop_check) vote(my, rows, tile / Traits::kTilesPerStopCheck - 1, nth);
      wgmma_wait<1>();
      finished(my.s);
      release_k(my);
      if constexpr (kFirst) {
        softmax<true>(my, limit - tile * Traits::kBlockN);
        await_output(my);
        pack(my);  // ptxas puts it between the exponentials, which in pass 1 come behind the wait
      } else {
        moved = settled_softmax(my, limit - tile * Traits::kBlockN, rows, tile);
        wgmma_wait<0>();
        finished(my.acc);
      }
    });
    release_v(my);
    if (moved) rescale(my);
    if (!kFirst) pack(my);
    // The output is that of the tiles before this one, and so is l, which has this one's mass added at its stop check.
    if constexpr (kWalksLadder<Traits>) keep_stopped(my, stops);
  }
  // A tail multiplies the queries once more.
  if constexpr (!kAddsTail<Traits>) release(my, my.shared.q_empty[nth % Traits::kQueryPlaces]);
  // Of a single key tile. Before its values are asked for: the pager has them checked after it has announced the next
  // q tile, for which it waits until the one before this is done.
  if (kFirst && my.unstored) store_last(my, nth - 1);
  if (kFirst) guard(my, limit - (tile - 1) * Traits::kBlockN, nth);
  return tile;
}

// The same of pass 2 with two blocks on a multiprocessor, from the second half of the first key tile on: one product
// after the other, as other warpgroups fill its waits. The output of the last half is not issued yet.
template <class Traits>
__device__ __forceinline__ int walk_in_halves(Consumer<Traits>& my, uint32 nth, uint32 q, int tiles, int limit,
                                              int rows) {
  static_assert(!kAddsTail<Traits> && !kWalksLadder<Traits> && !kSkipsValues<Traits>, "these need more registers");
  const auto weigh_half = [&](int half) {  // counted over all tiles
    wgmma_wait<0>();
    finished(my.s);
    if (half % 2 == 1) release_k(my);
    if (settled_softmax(my, limit - half * Traits::kScoreKeys, rows, half)) rescale(my);
    pack(my);
  };
  int tile = 0;
  for (;;) {
    issue_output(my);
    wgmma_wait<0>();
    finished(my.acc);
    issue_scores<1>(my, q);
    weigh_half(2 * tile + 1);
    if (++tile >= tiles) break;
    if (tile >= 2 && first_lane_sees_stop(my.shared, my.voted + tile - 2, my.lane)) break;
    issue_output<0, false, 1>(my);
    vote(my, rows, tile - 1, nth);  // here, as it runs under the product
    wgmma_wait<0>();
    finished(my.acc);
    release_v(my);
    issue_scores(my, q);
    weigh_half(2 * tile);
  }
  release(my, my.shared.q_empty[nth % Traits::kQueryPlaces]);
  return tile;
}

}  // namespace sm90
}  // namespace s2o
